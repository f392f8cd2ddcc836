"""Every command and function that reads a file or words of the command line, with valid input for it.

Not here: what `measure` and `calibrate --device` do after their forecast, which is the machine's work and not the
input's; and `tools.pages.accuracy`, which reads published runs as `validate published` does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext
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
from meshcast.simulator.formats.expert_counts import read_counts
from meshcast.validation.measurements import campaign
from meshcast.validation.pipelines.cases import EXAMPLES
from tests.experiments.cli.test_fuzz import JOBS, NODE
from tests.fuzz import seeds
from tests.fuzz.seeds import PART, Seeds, as_json, as_lines, as_text, as_words, as_yaml, of_files, of_measured
from tests.simulator.formats.test_logs import MEGATRON, TITAN
from tests.simulator.formats.test_nccl_tests import OLD, TABLE, document

DATA = "tests/data"
CATALOG = "hardware/catalog"
CALIBRATIONS = "simulator/costs/calibration"
LAPTOP = "{}/given.yaml --device cpu --out {}/out.json"
FIT = "--out {}/out --no-leave-out --json"
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
COMMANDS = (
    "predict job.yaml --set plan.tp=2 --json --engine simpy --every-round",
    "predict small.yaml --strict --trace out/trace.json.gz --engine sweep",
    "predict small.yaml --trace out/ranks/ --snapshot out/memory.pickle",
    "collectives small.yaml --stage 0 --operation all_reduce --set plan.tp=2",
    "collectives --cluster dgx-h100:1 --gpus 4 -b 1M -e 8M -f 2 --json",
    "predict --jobs jobs.jsonl --out out/answers.jsonl --set plan.pp=1",
    "predict small.yaml --calibration machine --set batch.micro=2",
    "predict - --json",
    "predict search.yaml --json --set plan.tp=auto",
    "sweep sweep.yaml --out out/rows.parquet --workers 1 --restart --json",
    "sweep sweep.yaml --out out/shard-0.parquet --workers 1 --shard 0/2 --json",
    "merge shard-0.parquet shard-1.parquet --out out/rows.parquet --json",
    "search search.yaml --within 1% --top 3 --jobs-to out --json",
    "search search.yaml --where plan.tp*plan.pp<=4 --where plan.dp>1 --memory-margin 10% --json",
    "search search.yaml --near-measured --top 2",
    "search search.yaml --robust --json",
    "search search.yaml --compare small.yaml --compare job.yaml --json",
    "search search.yaml --out out/plans.parquet --plot out/plans.svg",
    "report small.yaml --out out/report.html --no-sensitivity --title A --set plan.pp=1",
    "scale small.yaml --gpus 8,16,24 --strong --over dp --json",
    "scale small.yaml --gpus 8..64 --weak",
    "compare small.yaml job.yaml --json",
    "compare small.yaml --set plan.tp=4 --set batch.micro=2",
    "list models --json",
    "list gpus",
    "list schedule 1f1b --p 4 --m 8 --v 1 --json",
    "list schedule interleaved-1f1b --p 4 --m 8 --v 2",
    "list schedule schedule.csv",
    "export schedule zb-h1 --p 4 --m 8 --out out/order.csv",
    "plot finished.parquet --why 1,1 --x plan.tp --y batch.micro --value step_time --title A",
    "schema sweep",
    "init out/first.yaml --force",
    "validate pipeline --json",
    "validate collectives log.txt --json",
    "import nccl-tests log.txt --out out/links.json --operation all_reduce --members 8 --job small.yaml --json",
    "import megatron-log log.txt --out out/steps.json --skip 1 --tokens 65536 --gpus 8",
    "measure kernels laptop.yaml --device cpu --tp 1 --dtype fp32 --mode eager --repeat 2 --warmup 1 --out out/k.json",
    "measure stages laptop.yaml --device cpu --recompute full --repeat 2 --out out/s.json --set batch.micro=1",
    "measure distributed laptop.yaml --device cpu --steps 2 --warmup 1 --no-check --trace out/t.json --out out/d.json",
    "measure collectives laptop.yaml --device cpu --size 1024 --operation all_reduce --repeat 2 --out out/c.json",
    "measure campaign started.yaml --out started --minutes 1 --json",
    "calibrate collectives log.txt --only nvlink4 --out out/fitted --no-leave-out",
    "calibrate --device cpu --processes 1 --out out/machine",
    "calibrate campaign measured --out out/machine",
    "check --jobs 1 --seed 3",
)


class Reader(NamedTuple):
    """One kind of input.

    Attributes:
        form: format of the file, a key of `generate.LAYERS`.
        name: of the file in the working folder.
        read: arguments of meshcast, in which the working folder is `{}`; or a function of the file's path.
        make_seeds: makes the valid files; its argument is the working folder.
        share: files of this reader for each of another; below 1 where one takes seconds.
    """

    form: str
    name: str
    read: str | Callable[[Path], object]
    make_seeds: Seeds
    share: float = 1.0


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
        _without_measuring() if measures else nullcontext(),
    ):
        return Runner().invoke(app, words)


_make_command = cache(typer.main.get_command)


@contextmanager
def _without_measuring() -> Iterator[None]:
    """Ends `meshcast measure` with exit code 0 after its forecast, and calibrates no machine."""

    def end(*given: Any, **options: Any) -> NoReturn:
        typer.echo("null")  # the answer, also in JSON
        raise typer.Exit

    names = (
        *("kernels.measure.record", "stages.measure.record", "distributed.measure._run_and_write"),
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
    return invoke(["predict", f"{path.parent}/plain.yaml", "--json", *changes])


def name_entries(path: Path) -> Result:
    """Forecasts a job of four names: model, cluster, framework, schedule."""
    names = dict(zip(("model", "cluster", "framework", "schedule"), read_words(path), strict=False))
    schedule = {"schedule": names.pop("schedule")} if "schedule" in names else {}
    text = json.dumps({**names, "plan": {"pp": 4, **schedule}}, ensure_ascii=False)
    path.with_name("names.json").write_text(text, "utf-8", "surrogateescape")
    return invoke(f"predict {path.parent}/names.json --json")


# ------------------------------------------------------------------------ files that are read once, or resumed

_numbers = count()


def place_entry(cluster: str) -> Callable[[Path], Result]:
    """Forecasts a job on a cluster in which FILE is a file of the form of the catalog. A file of one name is read once,
    so each has a name of its own."""

    def read(path: Path) -> Result:
        given = path.with_name(f"entry-{next(_numbers)}.yaml")
        path.rename(given)
        try:
            change = f"cluster={cluster.replace('FILE', str(given))}"
            return invoke(["predict", f"{path.parent}/plain.yaml", "--json", "--set", change])
        finally:
            given.unlink()

    return read


def resume_sweep(path: Path) -> Result:
    """Resumes a copy of the stopped sweep, of which `path` is the part or the note."""
    out = path.with_name("resumed.parquet")
    out.unlink(missing_ok=True)
    shutil.rmtree(parts_folder(out), ignore_errors=True)
    shutil.copytree(parts_folder(path.with_name("stopped.parquet")), parts_folder(out))
    shutil.copy(path, parts_folder(out) / (PART if path.suffix == ".parquet" else "_sweep.json"))
    return invoke(f"sweep {path.parent}/parts.yaml --out {out} --workers 1 --json")


def predict_on_core(path: Path) -> Result:
    """Forecasts a job on the machine of a calibration, whose description is `path`."""
    with chdir(path.parents[1]):
        return invoke("predict on-core.yaml --json --calibration machine")


def needs_torch(reader: Reader) -> bool:
    """Whether a reader imports torch, which takes seconds: of a process, not of a file."""
    return reader.read is run_command or str(reader.read).startswith(("measure", "calibrate"))


READERS: dict[str, Reader] = {
    "job": Reader("yaml", "given.yaml", "predict {}/given.yaml --json", as_yaml(*JOBS)),
    "job page": Reader("yaml", "given.yaml", "predict {}/given.yaml", as_yaml(*JOBS)),
    "jobs": Reader("jsonl", "given.jsonl", "predict --jobs {}/given.jsonl", as_lines(*JOBS), 0.3),
    "sweep": Reader(
        "yaml",
        "sweep.yaml",
        "sweep {}/sweep.yaml --out {}/out.parquet --workers 1 --restart --json",
        as_yaml(seeds.SWEEP),
    ),
    "sweep part": Reader("parquet", "given.parquet", resume_sweep, seeds.stop_sweep),
    "shard": Reader(
        "parquet",
        "given.parquet",
        "merge {}/given.parquet {}/shard-1.parquet --out {}/out.parquet --json",
        seeds.finish_shards,
    ),
    "sweep rows": Reader("parquet", "given.parquet", "plot {}/given.parquet --why 1,1", seeds.finish_sweep),
    "cluster": Reader(
        "yaml",
        "given.yaml",
        "predict {}/plain.yaml --json --set cluster={}/given.yaml",
        of_files(f"{CATALOG}/clusters/[ejs]*"),
    ),
    "model": Reader(
        "yaml",
        "given.yaml",
        "predict {}/plain.yaml --json --set model={}/given.yaml",
        of_files("simulator/models/presets/[dlm]*.yaml"),
    ),
    "config.json": Reader(
        "json",
        "config.json",
        "predict {}/job.yaml --json --set model={}/config.json",
        of_files("examples/*/config.json"),
    ),
    "routing": Reader("json", "counts.json", read_counts, as_json([1, 2, 3], [[1, 2.5], [3, 4]])),
    "routing table": Reader("csv", "counts.csv", read_counts, as_text("1,2,3\n4,5,6\n")),
    "calibration of a gpu": Reader(
        "yaml",
        "calibration/h100-sxm.yaml",
        "predict {}/job.yaml --json --calibration {}/calibration",
        of_files(f"{CALIBRATIONS}/v100-sxm2-32.yaml"),
    ),
    "calibration of links": Reader(
        "yaml",
        "calibration/infiniband.yaml",
        "predict {}/job.yaml --json --calibration {}/calibration",
        of_files(f"{CALIBRATIONS}/infiniband.yaml"),
    ),
    "calibration of steps": Reader(
        "yaml",
        "calibration/steps.yaml",
        "predict {}/job.yaml --json --calibration {}/calibration",
        of_files(f"{CALIBRATIONS}/steps.yaml"),
    ),
    "published": Reader(
        "jsonl",
        "given.jsonl",
        "validate published --json --jobs 1 --data {}/given.jsonl",
        of_files(f"{DATA}/published_runs.jsonl", 2),
        0.3,
    ),
    "pipeline": Reader("jsonl", "given.jsonl", "validate pipeline --json {}/given.jsonl", as_lines(*EXAMPLES)),
    "claims": Reader("yaml", "given.yaml", "validate claims --json --jobs 1 {}/given.yaml", as_yaml(seeds.CLAIMS), 0.3),
    "kernels": Reader(
        "csv", "given.csv", "validate kernels --json --data {}/given.csv", of_files(f"{DATA}/[aegm]*.csv", 8)
    ),
    "collectives": Reader(
        "csv", "given.csv", "validate collectives --json --data {}/given.csv", of_files(f"{DATA}/co*.csv", 20)
    ),
    "measurement": Reader(
        "json", "given.json", "validate collectives --json --data {}/given.json", seeds.make_measurement
    ),
    "trace": Reader(
        "json", "given.json", "validate trace {}/given.json --json --job {}/job.yaml", as_json(seeds.TRACE)
    ),
    "kineto": Reader(
        "json",
        "given.json",
        "import kineto {}/given.json --json --job {}/job.yaml --out {}/out.json",
        as_json(seeds.TRACE),
    ),
    "nccl-tests": Reader(
        "text",
        "given.txt",
        "import nccl-tests {}/given.txt --json --job {}/job.yaml --out {}/out.json",
        as_text(TABLE, OLD),
    ),
    "nccl-tests json": Reader(
        "json", "given.json", "import nccl-tests {}/given.json --json --out {}/out.json", as_json(document())
    ),
    "megatron-log": Reader(
        "text", "given.log", "import megatron-log {}/given.log --json --skip 1 --out {}/out.json", as_text(MEGATRON)
    ),
    "torchtitan-log": Reader(
        "text",
        "given.log",
        "import torchtitan-log {}/given.log --json --skip 0 --tokens 65536 --gpus 8 --out {}/out.json",
        as_text(TITAN),
    ),
    "schedule": Reader("csv", "given.csv", "list schedule {}/given.csv --json", as_text(seeds.COMPUTE_ONLY)),
    "campaign": Reader("yaml", "given.yaml", campaign.load, as_yaml(seeds.CAMPAIGN)),
    "campaign page": Reader(
        "yaml", "given.yaml", "measure campaign {}/given.yaml --out {}/out", as_yaml(seeds.STARTED), 0.3
    ),
    "resumed campaign": Reader(
        "json",
        "started/step.json",
        "measure campaign {}/started.yaml --out {}/started --json",
        of_measured("*-tp2*.json"),
    ),
    # jobs of other commands
    "why": Reader("yaml", "given.yaml", "why {}/given.yaml --json", as_yaml(seeds.SMALL, *JOBS), 0.1),
    "why page": Reader("yaml", "given.yaml", "why {}/given.yaml", as_yaml(seeds.SMALL, *JOBS), 0.1),
    "compare": Reader("yaml", "given.yaml", "compare {}/small.yaml {}/given.yaml --json", as_yaml(*JOBS)),
    "compare page": Reader("yaml", "given.yaml", "compare {}/given.yaml {}/small.yaml", as_yaml(*JOBS)),
    "search": Reader("yaml", "given.yaml", "search {}/given.yaml --json", as_yaml(*seeds.SEARCH), 0.3),
    "search page": Reader(
        "yaml", "given.yaml", "search {}/given.yaml --top 3 --jobs-to {}/out", as_yaml(*seeds.SEARCH), 0.1
    ),
    "report": Reader(
        "yaml", "given.yaml", "report {}/given.yaml --no-sensitivity --out {}/out.html", as_yaml(seeds.SMALL), 0.1
    ),
    "report of rows": Reader(
        "parquet", "given.parquet", "report {}/given.parquet --out {}/out.html", seeds.finish_sweep, 0.1
    ),
    "scale": Reader("yaml", "given.yaml", "scale {}/given.yaml --gpus 8..32 --json", as_yaml(*JOBS)),
    "scale page": Reader("yaml", "given.yaml", "scale {}/given.yaml --gpus 8,16 --strong", as_yaml(*JOBS)),
    "job of a sweep": Reader(
        "yaml",
        "given.yaml",
        "sweep {}/named.yaml --out {}/out.parquet --workers 1 --restart --json",
        as_yaml(*JOBS),
    ),
    "job to trace": Reader("yaml", "given.yaml", "predict {}/given.yaml --json --trace {}/out.json", as_yaml(*JOBS)),
    "job by engines": Reader(
        "yaml", "given.yaml", "predict {}/given.yaml --json --every-round --engine shared", as_yaml(seeds.SMALL, *JOBS)
    ),
    "job to draw": Reader("yaml", "given.yaml", "predict {}/given.yaml --plot {}/out.png", as_yaml(seeds.SMALL), 0.1),
    "job of kernels": Reader("yaml", "given.yaml", f"measure kernels {LAPTOP}", as_yaml(seeds.LAPTOP)),
    "job of stages": Reader("yaml", "given.yaml", f"measure stages {LAPTOP}", as_yaml(seeds.LAPTOP)),
    "job of steps": Reader("yaml", "given.yaml", f"measure distributed {LAPTOP}", as_yaml(seeds.LAPTOP)),
    "job of collectives": Reader("yaml", "given.yaml", f"measure collectives {LAPTOP}", as_yaml(seeds.LAPTOP)),
    # files that a job names
    "gpu": Reader("yaml", "given.yaml", place_entry("{gpu: FILE, gpus: 16}"), of_files(f"{CATALOG}/gpus/[ahv]*")),
    "node": Reader("yaml", "given.yaml", place_entry("{node: FILE, nodes: 2}"), of_files(f"{CATALOG}/nodes/*[0-9]00*")),
    "link": Reader("yaml", "given.yaml", place_entry(NODE_OF_LINK), of_files(f"{CATALOG}/links/[inp]*")),
    "schedule of a job": Reader("csv", "given.csv", "predict {}/from-file.yaml --json", as_text(seeds.COMPUTE_ONLY)),
    "routing of a job": Reader("json", "counts.json", "predict {}/experts.yaml --json", as_json(seeds.COUNTS)),
    "machine": Reader(
        "yaml", "machine/device.yaml", predict_on_core, of_files("validation/measured/cpu/calibration/device.yaml")
    ),
    "steps of a machine": Reader(
        "yaml", "machine/steps.yaml", predict_on_core, of_files("validation/measured/cpu/calibration/steps.yaml")
    ),
    "coefficients of a machine": Reader(
        "yaml",
        "machine/this-core.yaml",
        predict_on_core,
        of_files("validation/measured/cpu/calibration/this-core.yaml"),
    ),
    # measurements
    "steps": Reader("json", "given.json", "validate distributed {}/given.json --json", of_measured("*-tp2*.json")),
    "steps page": Reader("json", "given.json", "validate distributed {}/given.json", of_measured("*-tp2*.json")),
    "stages": Reader("json", "given.json", "validate stages {}/given.json --json", of_measured("stages-*.json")),
    "stages page": Reader("json", "given.json", "validate stages {}/given.json", of_measured("stages-*.json")),
    "kernels measured": Reader("json", "given.json", "validate kernels {}/given.json --json", of_measured("kernels-*")),
    "kernels page": Reader("csv", "given.csv", "validate kernels {}/given.csv", of_files(f"{DATA}/[aegm]*.csv", 8)),
    "trace page": Reader("json", "given.json", "validate trace {}/given.json --job {}/job.yaml", as_json(seeds.TRACE)),
    "published page": Reader(
        "jsonl",
        "given.jsonl",
        "validate published --jobs 1 --data {}/given.jsonl",
        of_files(f"{DATA}/published_runs.jsonl", 2),
        0.3,
    ),
    "choice": Reader(
        "jsonl",
        "given.jsonl",
        "validate choice --json --jobs 1 --data {}/given.jsonl",
        of_files(f"{DATA}/published_runs.jsonl", 4),
        0.3,
    ),
    "fit": Reader(
        "jsonl",
        "given.jsonl",
        "validate fit --json --jobs 1 --data {}/given.jsonl",
        of_files(f"{DATA}/published_runs.jsonl", 4),
        0.1,
    ),
    "calibrate kernels": Reader(
        "csv", "given.csv", f"calibrate kernels {{}}/given.csv {FIT}", of_files(f"{DATA}/[agm]*_h100.csv", 40), 0.1
    ),
    "calibrate collectives": Reader(
        "csv", "given.csv", f"calibrate collectives {{}}/given.csv {FIT}", of_files(f"{DATA}/collectives.csv", 60), 0.1
    ),
    "calibrate imported": Reader(
        "json", "given.json", f"calibrate collectives {{}}/given.json {FIT}", seeds.write_links, 0.1
    ),
    "calibrate campaign": Reader(
        "json",
        "measured/calibration/measured.json",
        "calibrate campaign {}/measured --out {}/out --json",
        of_measured("calibration/measured.json", 80),
        0.1,
    ),
    "kernels of a campaign": Reader(
        "json",
        "measured/kernels.json",
        "calibrate campaign {}/measured --out {}/out --json",
        of_measured("kernels-*.json"),
        0.1,
    ),
    # the rest
    "note of a sweep": Reader("json", "given.json", resume_sweep, seeds.note_sweep),
    "heatmap": Reader("parquet", "given.parquet", "plot {}/given.parquet --out {}/out.png", seeds.finish_sweep, 0.1),
    "schedule page": Reader("csv", "given.csv", "list schedule {}/given.csv", as_text(seeds.COMPUTE_ONLY)),
    "schedule to export": Reader("csv", "given.csv", "export schedule {}/given.csv", as_text(seeds.COMPUTE_ONLY)),
    # the command line
    "words": Reader("words", "words", run_command, write_commands, 2),
    "set": Reader("words", "words", set_fields, as_words(*CHANGES), 3),
    "names": Reader("words", "words", name_entries, as_words(*NAMES), 3),
}
