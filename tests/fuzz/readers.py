"""Every command line that reads a file, or words, with valid input for it.

A reader's command stands where its file does: FILE, or the folder that holds it. `tests/fuzz/test_fuzz_readers.py`
asks the commands themselves for all files that they take, and fails for one without a reader.

Not here: what `measure` and `calibrate --device` do after their forecast, which is the machine's work and not the
input's; and `tools.pages.accuracy`, which reads published runs as `validate published` does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import typer
import typer.testing
from typer.testing import CliRunner, Result

from meshcast.experiments.cli.app import app
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.simulator.formats.launch.programs.registry import EXPORTS, FORMATS
from meshcast.validation.pipelines.cases import EXAMPLES
from tests.fuzz import seeds
from tests.fuzz.seeds import (
    CALIBRATIONS,
    JOBS,
    NODE,
    PART,
    Seeds,
    as_json,
    as_lines,
    as_text,
    as_words,
    as_yaml,
    of_corpus,
    of_files,
    of_measured,
    suffix_of_program,
)
from tests.simulator.formats.test_gpu_samples import DMON, QUERY
from tests.simulator.formats.test_logs import MEGATRON, OTHERS, TITAN
from tests.simulator.formats.test_nccl_tests import OLD, TABLE, document

DATA = "tests/data"
CATALOG = "hardware/catalog"
CPU = "validation/measured/cpu/calibration"
LAPTOP = "--device cpu --out out.json"
IMPORTED = "--model gpt2-124m --cluster dgx-h100:1 --set batch.sequence=1024"
OPEN = "--set model=gpt2-124m --set cluster=dgx-h100:1 --set batch.sequence=1024"
"""What many launch files leave open."""
PLAIN = "predict plain.yaml --json --set"
FIT = "--out out --no-leave-out --json"
NODE_OF_LINK = json.dumps({"node": {**NODE, "scale_up": {"link": "FILE"}}, "nodes": 2})

NAMES = (
    "llama3-8b dgx-h100:2 megatron-core 1f1b",
    "mixtral-8x7b gb200-nvl72:1 nemo interleaved-1f1b",
    "gpt2-1.5b selene torchtitan zb-h1",
    "qwen3-30b-a3b p5e:4 deepspeed gpipe",
    "nemotron-h-8b mi300x-8:2 primus dualpipe-v",
)
CHANGES = (
    "plan.tp=4 plan.pp=2 batch.micro=2 batch.global=32",
    "plan={tp:2,cp:2} batch.sequence=8192 precision=fp8-delayed framework=megatron-core",
    "model={preset:llama3-8b,layers:4} model.moe.experts=8 model.moe.top_k=2 plan.ep=4",
    "cluster={gpu:h100-sxm,gpus:16} cluster.inter.kind=roce cluster.inter.gbps_per_gpu=400",
    "framework.name=nemo framework.set.overlap.dp=false framework.set.bucket.elements=1000 framework.set.launch_s=1e-6",
    "run.tokens=1e9 run.price_per_gpu_hour=2.5 train.mode=lora train.rank=8 optimizer=adam noise=0.01",
    "plan.zero=3 plan.recompute=selective plan.schedule=zb-v plan.partition=[16,16] plan.chunks=2 plan.pp=2",
)
SCRIPT = "--env A=2 --args 1 --program megatron --start 1 --assume-defaults"
COMMANDS = (
    "predict job.yaml --set plan.tp=2 --json --engine simpy --every-round",
    "predict small.yaml --strict --trace out/trace.json.gz --engine sweep --verbose",
    "predict small.yaml --trace out/ranks/ --snapshot out/memory.pickle --plot out/step.svg --width slide",
    f"predict run.sh {SCRIPT} --set model=llama3-8b --json",
    "predict --jobs jobs.jsonl --out out/answers.jsonl --set plan.pp=1",
    "predict --jobs jobs.jsonl --brief",
    "predict small.yaml --calibration machine --set batch.micro=2 --verify",
    "predict - --json",
    "predict search.yaml --json --set plan.tp=auto",
    f"advise small.yaml --set plan.tp=1 --keep plan.pp --json {SCRIPT}",
    f"advise run.sh --write out/run.new.sh {SCRIPT}",
    f"explain log.txt --job small.yaml --set plan.tp=1 --skip 1 --rank 0 {SCRIPT}",
    "explain log.txt trace.json --job job.yaml --json",
    f"why small.yaml --set plan.tp=1 --plot out/why.png --width column {SCRIPT}",
    "run run.yaml --curves --set run.steps=50 --workers 1 --out out/runs.parquet --restart --plot out/ --width page",
    f"run run.sh {SCRIPT} --json",
    "plan small.yaml --with optcnn --seconds 1 --steps 50 --no-optimum --any-program --plot out/plan.png --width page",
    f"plan run.sh {SCRIPT} --json",
    "collectives small.yaml --stage 0 --operation all_reduce --set plan.tp=2",
    "collectives --cluster dgx-h100:1 --gpus 4 -b 1M -e 8M -f 2 --json",
    f"collectives run.sh {SCRIPT} --every-rank",
    "sweep sweep.yaml --out out/rows.parquet --workers 1 --restart --json",
    "sweep sweep.yaml --out out/shard-0.parquet --workers 1 --shard 0/2 --json",
    "sweep sweep.yaml --out out/rows.parquet --on tcp://nowhere",
    "merge shard-0.parquet shard-1.parquet --out out/rows.parquet --json",
    "search search.yaml --within 1% --top 3 --jobs-to out --set batch.global=32 --json",
    "search search.yaml --where plan.tp*plan.pp<=4 --where plan.dp>1 --memory-margin 10% --memory-risk 20% --json",
    "search search.yaml --near-measured --top 2 --workers 1 --any-program --objective time,memory",
    "search search.yaml --robust --json",
    "search search.yaml --compare small.yaml --compare job.yaml --json",
    "search search.yaml --out out/plans.parquet --plot out/plans.svg --width page",
    f"search run.sh {SCRIPT} --set plan=auto",
    "search heterogeneous.yaml --heterogeneous --runs 1 --top 1",
    "size small.yaml --tokens 1 --days 9 --budget 9 --node dgx-h100 --batch 1K --most-gpus 8 --price dgx-h100=2 --json",
    f"size small.yaml --tokens 1B --days 9 --most-gpus 8 --plot out/s.png --width page --html out/s.html {SCRIPT}",
    "size run.yaml --tokens 1B --days 9 --most-gpus 8 --prices prices.yaml --workers 1 --set plan.tp=2 --jobs-to out",
    "size small.yaml --tokens 1M --days 9 --most-gpus 8 --yes",
    "report small.yaml --out out/report.html --no-sensitivity --title A --set plan.pp=1",
    f"report run.sh {SCRIPT} --out out/report.html",
    "scale small.yaml --gpus 8,16,24 --strong --over dp --json",
    "scale small.yaml --gpus 8..64 --weak --plot out/scale.png --width page",
    f"scale run.sh --gpus 8 {SCRIPT}",
    "compare small.yaml job.yaml --json",
    "compare small.yaml job.yaml small.yaml --set batch.micro=1 --plot out/three.png",
    "scale small.yaml job.yaml --gpus 8,16 --plot out/jobs.png --json",
    "compare small.yaml --set plan.tp=4 --set batch.micro=2 --plot out/both.png --width page",
    f"compare run.sh small.yaml {SCRIPT}",
    "list models --json",
    "list gpus",
    "list schedule 1f1b --p 4 --m 8 --v 1 --json",
    "list schedule interleaved-1f1b --p 4 --m 8 --v 2",
    "list schedule schedule.csv",
    "export schedule zb-h1 --p 4 --m 8 --v 1 --out out/order.csv",
    f"export small.yaml --to megatron --set plan.tp=1 --out out/run.sh {SCRIPT}",
    "export small.yaml --against run.sh --write",
    "plot finished.parquet --why 1,1 --x plan.tp --y batch.micro --value step_time --title A",
    "plot schedules 1f1b gpipe --p 4 --m 8 --v 1 --out out/orders.png --width page",
    "plot communication small.yaml --by stage --set plan.tp=1 --out out/matrix.png",
    f"plot timeline run.sh {SCRIPT} --out out/line.svg",
    "schema sweep",
    "init out/first.yaml --force",
    "validate pipeline --json",
    "validate collectives log.txt --json",
    "validate claims claims.yaml --family pipeline --system GPipe --claim a --slow --jobs 1",
    "validate fit runs.jsonl --leave-out source --jobs 1 --json",
    "validate trace trace.json --job job.yaml --rank 0 --step 1 --plot out/trace.png --width page",
    "import nccl-tests log.txt --out out/links.json --operation all_reduce --members 8 --job small.yaml --json",
    "import megatron-log log.txt --out out/steps.json --skip 1 --tokens 65536 --gpus 8",
    "import kineto trace.json --job job.yaml --set batch.micro=1 --rank 0 --calibration machine --out out/trace.json",
    f"import run.sh --cluster dgx-h100:1 --model llama3-8b --gpus 8 {SCRIPT}",
    "measure kernels laptop.yaml --device cpu --tp 1 --dtype fp32 --mode eager --repeat 2 --warmup 1 --out out/k.json",
    "measure stages laptop.yaml --device cpu --recompute full --repeat 2 --out out/s.json --set batch.micro=1",
    "measure distributed laptop.yaml --device cpu --steps 2 --warmup 1 --no-check --trace out/t.json --out out/d.json",
    "measure collectives laptop.yaml --device cpu --size 1024 --operation all_reduce --repeat 2 --out out/c.json --yes",
    "measure campaign started.yaml --out started --minutes 1 --calibration machine --json",
    "calibrate collectives log.txt --only nvlink4 --out out/fitted --no-leave-out",
    "learn log.txt --job small.yaml --set batch.micro=1 --calibration machine --out out/learnt --json",
    "calibrate --device cpu --processes 1 --out out/machine",
    "calibrate campaign measured --out out/machine",
    f"check small.yaml --jobs 1 --seed 3 {SCRIPT}",
    "check --plugins plugin --json",
    # --yes lifts the limits of size: only beside files that are small, in words that change no batch, model or noise
    *(f"{command} small.yaml --yes" for command in ("predict", "why", "collectives", "report", "check", "advise")),
    "explain log.txt --job small.yaml --yes",
    *(f"{command} small.yaml --yes" for command in ("export --to nemo", "plot timeline", "scale --gpus 8")),
    *("run run.yaml --yes", "compare small.yaml job.yaml --yes", "import run.sh --yes", "search search.yaml --yes"),
    "plan small.yaml --with optcnn --seconds 1 --steps 50 --memory-risk 5% --yes",
)


class Reader(NamedTuple):
    """One kind of input.

    Attributes:
        form: format of the file, a key of `generate.LAYERS`.
        name: of the file in the working folder, in which commands run.
        read: arguments of meshcast, in which FILE is that name; or a function of the file's path.
        make_seeds: makes the valid files; its argument is the working folder.
        share: files of this reader for each of another; below 1 where one takes longer.
    """

    form: str
    name: str
    read: str | Callable[[Path], object]
    make_seeds: Seeds
    share: float = 1.0

    @property
    def words(self) -> list[str]:
        """The words of its command; of a function none."""
        return [word.replace("FILE", self.name) for word in self.read.split()] if isinstance(self.read, str) else []


class Runner(CliRunner):
    """Runs commands with an output that, as that of `main`, prints question marks for what it cannot encode."""

    @contextmanager
    def isolation(self, *given: Any, **options: Any) -> Iterator[Any]:
        with super().isolation(*given, **options) as streams:
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
            yield streams


def invoke(arguments: str | Sequence[str]) -> Result:
    """Runs meshcast in this process, up to where it would measure this machine."""
    words = arguments.split() if isinstance(arguments, str) else list(arguments)
    measures = {"measure", "calibrate"} & set(words)
    # typer makes the tree of commands from annotations at every call, which takes longer than most refusals.
    with (
        patch.object(typer.testing, "_get_command", _make_command),
        _without_measuring(answers="campaign" not in words) if measures else nullcontext(),
    ):
        return Runner().invoke(app, words)


_make_command = cache(typer.main.get_command)


@contextmanager
def _without_measuring(answers: bool) -> Iterator[None]:
    """Ends `meshcast measure` with exit code 0 after its forecast, and calibrates no machine. answers: with an answer
    in JSON; a campaign goes on and has its own."""

    def end(*given: Any, **options: Any) -> NoReturn:
        if answers:
            typer.echo("null")
        raise typer.Exit

    names = (
        *("kernels.measure.record", "stages.measure.record", "distributed.measure.record"),
        *("calibration.device.calibrate.calibrate", "calibration.device.calibrate.refresh"),
    )
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch(f"meshcast.validation.{name}", end))
        yield


# ---------------------------------------------------------------------------------------- words


def read_words(path: Path) -> list[str]:
    """The words of a command, one a line, as the system passes them: any bytes but 0."""
    return [os.fsdecode(line) for line in path.read_bytes().replace(b"\0", b"").split(b"\n")]


def run_command(path: Path) -> Result:
    """Runs a command line in a copy of the working folder, whose files it may overwrite."""
    copy = path.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path.parent, copy, ignore=shutil.ignore_patterns("copy"))
    with chdir(copy):
        return invoke(read_words(path))


def write_commands(folder: Path) -> list[bytes]:
    """Commands, of which some read the rows of a finished sweep, or of its shards."""
    seeds.finish_sweep(folder)
    seeds.finish_shards(folder)
    return as_words(*COMMANDS)(folder)


def set_fields(path: Path) -> Result:
    """Forecasts a job after the changes of `--set`, one a line."""
    changes = [word for line in read_words(path) for word in ("--set", line)]
    return invoke(["predict", "plain.yaml", "--json", *changes])


def start_script(path: Path) -> Result:
    """Forecasts a launch script with a variable of the shell a line, the first line its arguments."""
    arguments, *variables = read_words(path)
    words = [word for line in variables for word in ("--env", line)]
    return invoke(["predict", "started.sh", "--json", "--assume-defaults", "--args", arguments, *words])


def name_entries(path: Path) -> Result:
    """Forecasts a job of four names: model, cluster, framework, schedule."""
    names = dict(zip(("model", "cluster", "framework", "schedule"), read_words(path), strict=False))
    schedule = {"schedule": names.pop("schedule")} if "schedule" in names else {}
    text = json.dumps({**names, "plan": {"pp": 4, **schedule}}, ensure_ascii=False)
    path.with_name("names.json").write_text(text, "utf-8", "surrogateescape")
    return invoke("predict names.json --json")


# ------------------------------------------------------------------------ files that are read once, or resumed

_numbers = count()


def move(path: Path, place: Path) -> None:
    """Moves what lies in the place of a file, if anything does."""
    with suppress(FileNotFoundError):
        path.rename(place)


def place_entry(cluster: str) -> Callable[[Path], Result]:
    """Forecasts a job on a cluster in which FILE is a file of the form of the catalog. A file of one name is read once,
    so each has a name of its own."""

    def read(path: Path) -> Result:
        entry = path.with_name(f"entry-{next(_numbers)}.yaml")
        move(path, entry)
        try:
            change = f"cluster={cluster.replace('FILE', str(entry))}"
            return invoke(["predict", "plain.yaml", "--json", "--set", change])
        finally:
            entry.rmdir() if entry.is_dir() else entry.unlink(missing_ok=True)

    return read


def resume_sweep(path: Path) -> Result:
    """Resumes a copy of the stopped sweep, of which `path` is the part or the note."""
    out = path.with_name("resumed.parquet")
    out.unlink(missing_ok=True)
    shutil.rmtree(parts_folder(out), ignore_errors=True)
    shutil.copytree(parts_folder(path.with_name("stopped.parquet")), parts_folder(out))
    place = parts_folder(out) / (PART if path.suffix == ".parquet" else "_sweep.json")
    place.unlink()
    move(path, place)
    return invoke(f"sweep parts.yaml --out {out} --workers 1 --json")


def needs_torch(reader: Reader) -> bool:
    """Whether a reader imports torch, which takes seconds: of a process, not of a file."""
    return reader.read is run_command or bool({"measure", "calibrate"} & {*reader.words[:1]})


# --------------------------------------------------------------------------------------------- the readers


def list_readers(form: str, name: str, make_seeds: Seeds, **shares: float) -> Callable[..., dict[str, Reader]]:
    """Returns a function that lists commands which read files of one kind, by themselves; `share` is one of all."""
    share = shares.get("share", 1.0)
    return lambda *commands: {
        command.replace("FILE", name): Reader(form, name, command, make_seeds, share) for command in commands
    }


def read_figures(job: str, folder: str, source: str, **names: str) -> dict[str, Reader]:
    """Returns readers of the files of a calibration, by their names, and those of the valid files where they differ."""
    command = f"predict {job} --json --calibration {folder}"
    return {
        f"{folder}/{name}": Reader("yaml", f"{folder}/{name}.yaml", command, of_files(f"{source}/{other or name}.yaml"))
        for name, other in names.items()
    }


job, jobs_slow = as_yaml(*JOBS), as_yaml(seeds.SMALL, *JOBS)
rows = list_readers("parquet", "rows.parquet", seeds.finish_sweep)
runs = of_files(f"{DATA}/published_runs.jsonl", 2)

READERS: dict[str, Reader] = {
    # jobs
    **list_readers("yaml", "given.yaml", job, share=2)("predict FILE --json", "predict FILE --verbose"),
    **list_readers("yaml", "given.yaml", job)(
        "compare small.yaml FILE --json",
        "compare FILE small.yaml",
        "scale FILE --gpus 8..32 --json",
        "scale FILE --gpus 8,16 --strong",
        "predict FILE --json --trace out.json --snapshot out.pickle",
        "predict FILE --json --calibration calibration",
        *(f"export FILE --to {program}" for program in EXPORTS),
    ),
    **list_readers("yaml", "given.yaml", job, share=0.5)(
        "sweep named.yaml --out out.parquet --workers 1 --restart --json",
        "collectives FILE --json",
        "export FILE --against run.sh",
        "import nccl-tests log.txt --json --job FILE --out out.json",
        "learn log.txt --json --job FILE --out out",
        "validate trace trace.json --json --job FILE",
        "check FILE --json",
    ),
    **list_readers("yaml", "given.yaml", jobs_slow, share=0.5)(
        "predict FILE --json --every-round --engine shared", "search search.yaml --compare FILE --json --workers 1"
    ),
    **list_readers("yaml", "given.yaml", jobs_slow, share=0.05)(
        "size FILE --tokens 1M --days 9 --most-gpus 8 --workers 1 --json",
        "why FILE --json",
        "why FILE",
        "advise FILE --json",
        "plan FILE --with optcnn --steps 50 --seconds 1 --json",
    ),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.SMALL), share=0.05)(
        "report FILE --no-sensitivity --out out.html",
        "predict FILE --plot out.png",
        *(f"plot {kind} FILE --out out.svg" for kind in ("timeline", "breakdown", "memory", "stage-memory")),
        *(f"plot {kind} FILE --out out.svg" for kind in ("roofline", "communication", "tornado", "schedules")),
    ),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.LAPTOP))(
        *(f"measure {kind} FILE {LAPTOP}" for kind in ("kernels", "stages", "distributed", "collectives"))
    ),
    **list_readers("yaml", "given.yaml", as_yaml({"dgx-h100": 2.5}, seeds.PRICES), share=0.05)(
        "size small.yaml --tokens 1M --days 9 --most-gpus 8 --workers 1 --json --prices FILE"
    ),
    **list_readers("jsonl", "given.jsonl", as_lines(*JOBS), share=0.5)("predict --jobs FILE"),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.RUN), share=0.5)(
        "run FILE --json --workers 1", "run FILE --workers 1", "run FILE --out out.parquet --workers 1 --restart --json"
    ),
    # sweeps and searches
    **list_readers("yaml", "given.yaml", as_yaml(seeds.SWEEP), share=2)(
        "sweep FILE --out out.parquet --workers 1 --restart --json"
    ),
    **list_readers("yaml", "given.yaml", as_yaml(*seeds.SEARCH), share=0.4)(
        "search FILE --json --workers 1",
        "search FILE --top 3 --jobs-to out --workers 1",
        "search FILE --json --objective memory --workers 1",
    ),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.HETEROGENEOUS))(
        "search FILE --heterogeneous --json --workers 1"
    ),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.SEARCH_RUNS), share=0.4)(
        "search FILE --json --objective days --workers 1"
    ),
    "part of a sweep": Reader("parquet", "given.parquet", resume_sweep, seeds.stop_sweep),
    "note of a sweep": Reader("json", "given.json", resume_sweep, seeds.note_sweep),
    **list_readers("parquet", "given.parquet", seeds.finish_shards)(
        "merge FILE shard-1.parquet --out out.parquet --json", "merge shard-1.parquet FILE --out out.parquet"
    ),
    **rows("plot FILE --why 1,1", "sweep sweep.yaml --out FILE --workers 1 --json"),
    **list_readers("parquet", "rows.parquet", seeds.finish_sweep, share=0.1)(
        "plot FILE --out out.png", "report FILE --out out.html"
    ),
    **list_readers("parquet", "plans.parquet", seeds.finish_search, share=0.1)("report FILE --out out.html"),
    **list_readers("parquet", "runs.parquet", seeds.finish_runs)("run run.yaml --out FILE --workers 1 --json"),
    **list_readers("json", "answer.json", seeds.answer_forecast, share=0.1)(
        "report FILE --no-sensitivity --out out.html"
    ),
    **list_readers("json", "answers.json", seeds.answer_search, share=0.1)("report FILE --out out.html"),
    # launch files
    **{
        name: reader
        for suffix in (".sh", ".yaml", ".json", ".toml", ".py")
        for name, reader in list_readers("script", f"launch{suffix}", of_corpus(suffix=suffix), share=2)(
            f"predict FILE --json --assume-defaults {OPEN}", "export small.yaml --against FILE"
        ).items()
    },
    **{
        f"import {program}": Reader(
            "script", f"run{suffix_of_program(program)}", f"import {program} FILE {IMPORTED}", of_corpus(program)
        )
        for program in FORMATS
    },
    **list_readers("yaml", "launch.yaml", of_corpus(suffix=".yaml"), share=2)("import FILE --json"),
    **list_readers("script", "launch.sh", of_corpus(suffix=".sh"))(
        "import FILE --env N=8 --args 2 --start 1",
        f"run FILE --json --workers 1 --assume-defaults --set run.steps=9 {OPEN}",
    ),
    # files that a job or a sweep names
    "cluster": Reader("yaml", "given.yaml", f"{PLAIN} cluster=FILE", of_files(f"{CATALOG}/clusters/[ejs]*")),
    "model": Reader("yaml", "given.yaml", f"{PLAIN} model=FILE", of_files("simulator/models/presets/[dlm]*.yaml")),
    "config.json": Reader("json", "config.json", f"{PLAIN} model=FILE", of_files("examples/*/config.json")),
    "gpu": Reader("yaml", "given.yaml", place_entry("{gpu: FILE, gpus: 16}"), of_files(f"{CATALOG}/gpus/[ahv]*")),
    "node": Reader("yaml", "given.yaml", place_entry("{node: FILE, nodes: 2}"), of_files(f"{CATALOG}/nodes/*[0-9]00*")),
    "plugin": Reader("yaml", "plugin/gpus/x9.yaml", "check --plugins plugin", of_files(f"{CATALOG}/gpus/[ahv]*")),
    "link": Reader("yaml", "given.yaml", place_entry(NODE_OF_LINK), of_files(f"{CATALOG}/links/[inp]*")),
    "schedule of a job": Reader("csv", "given.csv", "predict from-file.yaml --json", as_text(seeds.COMPUTE_ONLY)),
    "counts of a job": Reader("json", "counts.json", "predict experts.yaml --json", as_json(seeds.COUNTS)),
    "table of counts": Reader("csv", "counts.csv", "predict table.yaml --json", as_text("3,1,2,2\n")),
    "counts of steps": Reader("json", "trace-counts.json", "predict steps.yaml --json", as_json([[3, 1, 2, 2]] * 4)),
    "lengths of samples": Reader("csv", "lengths.csv", "predict samples.yaml --json", as_text(seeds.LENGTHS)),
    "failures of a run": Reader("csv", "failures.csv", "run logged.yaml --json --workers 1", as_text(seeds.FAILURES)),
    **list_readers("csv", "failures.csv", as_text(seeds.FAILURES))(
        "import failure-log FILE --gpus 64 --json", "import failure-log FILE --out out.yaml"
    ),
    # calibrations
    **read_figures("job.yaml", "calibration", CALIBRATIONS, **{"h100-sxm": "v100-sxm2-32"}, infiniband="", steps=""),
    **read_figures("on-core.yaml", "machine", CPU, device="", steps="", **{"this-core": ""}),
    **list_readers("yaml", "calibration/h100-sxm.yaml", of_files(f"{CALIBRATIONS}/v100-sxm2-32.yaml"), share=0.3)(
        "validate kernels kernels.csv --calibration calibration --json",
        "validate trace trace.json --job job.yaml --calibration calibration",
        f"measure collectives laptop.yaml {LAPTOP} --calibration calibration",
        "learn kernels.csv --calibration calibration --out out --json",
        "import kineto trace.json --job job.yaml --calibration calibration --out out.json --json",
    ),
    # measurements
    **list_readers("jsonl", "given.jsonl", runs, share=0.3)(
        "validate published --json --jobs 1 --data FILE", "validate published --jobs 1 FILE --as-stranger"
    ),
    **list_readers("jsonl", "given.jsonl", of_files(f"{DATA}/published_runs.jsonl", 4), share=0.05)(
        "validate choice --json --jobs 1 --data FILE",
        "validate fit --json --jobs 1 --data FILE",
        "validate learning --json --jobs 1 --data FILE",
        "learn FILE --out out --json",
    ),
    **list_readers("jsonl", "given.jsonl", as_lines(*EXAMPLES))("validate pipeline --json FILE"),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.CLAIMS), share=0.3)("validate claims --json --jobs 1 FILE"),
    **list_readers("csv", "given.csv", of_files(f"{DATA}/[aegm]*.csv", 8))(
        "validate kernels --json --data FILE", "validate kernels FILE"
    ),
    **list_readers("csv", "given.csv", of_files(f"{DATA}/co*.csv", 20))("validate collectives --json --data FILE"),
    **list_readers("json", "given.json", seeds.make_measurement)("validate collectives --json --data FILE"),
    **list_readers("trace", "trace.json", as_json(seeds.TRACE))(
        "validate trace FILE --json --job job.yaml",
        "validate trace FILE --job job.yaml",
        "explain FILE --job job.yaml --rank 0",
        "import kineto FILE --json --job job.yaml --out out.json",
    ),
    **list_readers("text", "given.txt", as_text(TABLE, OLD))(
        "import nccl-tests FILE --json --job job.yaml --out out.json"
    ),
    **list_readers("json", "given.json", as_json(document()))("import nccl-tests FILE --json --out out.json"),
    **list_readers("text", "given.log", as_text(MEGATRON))("import megatron-log FILE --json --skip 1 --out out.json"),
    **list_readers("text", "given.log", as_text(MEGATRON, TITAN, *OTHERS))(
        "explain FILE --json", "explain FILE --job job.yaml"
    ),
    **list_readers("text", "samples.txt", as_text(DMON, QUERY))("explain FILE --job job.yaml --json"),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.SMALL), share=0.3)("explain log.txt --job FILE --json"),
    **list_readers("text", "titan.log", as_text(TITAN))(
        "import torchtitan-log FILE --json --skip 0 --tokens 65536 --gpus 8 --out out.json"
    ),
    **list_readers("csv", "given.csv", as_text(seeds.COMPUTE_ONLY))(
        "list schedule FILE --json", "list schedule FILE", "export schedule FILE", "plot schedules FILE --out out.svg"
    ),
    **list_readers("yaml", "given.yaml", as_yaml(seeds.STARTED, seeds.CAMPAIGN), share=0.3)(
        "measure campaign FILE --out out"
    ),
    "resumed campaign": Reader(
        "json", "started/step.json", "measure campaign started.yaml --out started --json", of_measured("*-tp2*.json")
    ),
    **list_readers("json", "steps.json", of_measured("*-tp2*.json"))(
        "validate distributed FILE --json", "validate distributed FILE"
    ),
    **list_readers("json", "stages.json", of_measured("stages-*.json"))(
        "validate stages FILE --json", "validate stages FILE"
    ),
    **list_readers("json", "kernels.json", of_measured("kernels-*"))("validate kernels FILE --json"),
    **list_readers("csv", "given.csv", of_files(f"{DATA}/[agm]*_h100.csv", 40), share=0.05)(
        f"calibrate kernels FILE {FIT}"
    ),
    **list_readers("csv", "given.csv", of_files(f"{DATA}/collectives.csv", 60), share=0.05)(
        f"calibrate collectives --data FILE {FIT}"
    ),
    **list_readers("json", "links.json", seeds.write_links, share=0.05)(f"calibrate collectives FILE {FIT}"),
    **list_readers("csv", "given.csv", of_files(f"{DATA}/collectives.csv", 60), share=0.05)(
        "learn FILE --out out --json"
    ),
    **list_readers("csv", "given.csv", as_text("job,step_time_s,plan.tp\nsmall.yaml,0.02,1\nsmall.yaml,0.02,2\n"))(
        "learn FILE --out out --json"
    ),
    **list_readers("yaml", "given.yaml", as_text("steps: [{job: small.yaml, step_time_s: 0.02, set: {plan.tp: 1}}]\n"))(
        "learn FILE --out out --json"
    ),
    **{
        name: Reader("json", name, "calibrate campaign measured --out out --json", of_measured(pattern, rows), 0.05)
        for name, pattern, rows in (
            ("measured/calibration/measured.json", "calibration/measured.json", 80),
            ("measured/kernels.json", "kernels-*.json", 12),
        )
    },
    # the command line
    "words": Reader("words", "words", run_command, write_commands, 4),
    "set": Reader("words", "words", set_fields, as_words(*CHANGES), 4),
    "variables": Reader("words", "words", start_script, as_words(*seeds.VARIABLES), 2),
    "names": Reader("words", "words", name_entries, as_words(*NAMES), 3),
}
