"""The commands that write files at their end, and attacks on them: `tests.fuzz.kills` has those on tables that resume.

Whatever hits such a command, each file is the earlier one or the new one, byte by byte, or, of a command that measures
or that answers an interruption with what it has, one that can be read to its end. No earlier file is lost. There is no
other file but, after SIGKILL, the one that was being written, and the next command takes that away and ends with the
files of an undisturbed one. An error ends in one message that names the file and the reason.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app, load_command
from meshcast.experiments.cli.commands import COMMANDS, find_options
from meshcast.hardware.documents.output_file import TEMPORARY
from tests.fuzz import seeds
from tests.fuzz.command_process import BLOWS, ROOT, CommandProcess, Ended, Moment

Files = dict[str, bytes]
"""Contents by paths within a folder."""


class Output(NamedTuple):
    """A command that writes files into the folder ``out`` beside its inputs.

    Attributes:
        words: the command; its inputs are those of `seeds.prepare`.
        prepare: writes what else it needs, given the folder.
        repeats: whether equal commands write equal bytes, also if they are interrupted.
        package: what has to be installed.
    """

    words: str
    prepare: Callable[[Path], object] = lambda folder: None
    repeats: bool = True
    package: str = "yaml"


def _write_script(folder: Path) -> None:
    """Writes a launch file of another plan than the job's."""
    words = ["export", str(folder / "small.yaml"), "--to", "megatron", "--set", "plan.tp=1"]
    ended = CliRunner().invoke(app, [*words, "--out", str(folder / "out/run.sh")])
    assert ended.exit_code == 0, ended.output


def _write_run(folder: Path) -> None:
    job = {**seeds.SMALL, "run": {"steps": 20_000, "failures": {"rates": "none", "components": {}}}}
    job["run"]["failures"]["components"]["node"] = {"per": "node", "mtbf_hours": 1.0}
    (folder / "run.yaml").write_text(yaml.safe_dump(job))


def _write_campaign(folder: Path) -> None:
    """Writes a campaign of few kernels whose calibration is there."""
    options = {"tps": [1], "dtypes": ["fp32"], "modes": ["eager"], "repeat": 2, "warmup": 1}
    runs = [{"name": "kernels", "measure": "kernels", "job": "a", "options": options}]
    (folder / "campaign.yaml").write_text(yaml.safe_dump({**seeds.STARTED, "runs": runs}))
    shutil.copytree(folder / "machine", folder / "out" / "calibration")


def _copy_measured(folder: Path) -> None:
    shutil.copy(seeds.MEASURED / "llama-tp2.json", folder / "steps.json")


def _write_rows(folder: Path) -> None:
    """Writes collectives at half the rate of their links, of which something is learnt."""
    lines = ["gpu,interconnect,op,gpus,nodes,bytes,time_us,source"]
    times = {size: 2e6 * size * 7 / 8 / 450e9 for size in (2**k for k in range(24, 34))}
    lines += [f"h100,NVLink4+NVSwitch,all_gather,8,1,{size},{time},nccl-tests" for size, time in times.items()]
    (folder / "rows.csv").write_text("\n".join(lines))


OUTPUTS = {
    "forecast": Output("predict small.yaml --plot out/ --trace out/ranks/ --snapshot out/memory.pickle"),
    "trace": Output("predict small.yaml --trace out/trace.json.gz --plot out/timeline.svg --width slide"),
    "answers": Output("predict --jobs jobs.jsonl --out out/answers.jsonl"),
    "page": Output("report small.yaml --no-sensitivity --out out/report.html", package="bokeh"),
    "scaling": Output("scale small.yaml --gpus 8,16 --plot out/scaling.pdf"),
    "scalings": Output("scale small.yaml job.yaml --gpus 8,16 --plot out/scalings.pdf"),
    "comparison": Output("compare small.yaml job.yaml --plot out/compare.png"),
    "tornado": Output("why small.yaml --plot out/why.svg"),
    "search": Output(
        "search search.yaml --workers 2 --out out/plans.parquet --plot out/plans.pdf --jobs-to out/jobs", repeats=False
    ),
    "size": Output(
        "size small.yaml --tokens 1B --days 9 --most-gpus 8 --plot out/s.pdf --html out/s.html --jobs-to out/jobs",
        package="bokeh",
    ),
    "plot": Output("plot memory small.yaml --out out/memory.png"),
    "planners": Output("plan small.yaml --with galvatron --seconds 1 --plot out/regret.png", repeats=False),
    "curves": Output("run run.yaml --plot out/run.png", _write_run),
    "launch file": Output("export small.yaml --to megatron --out out/run.sh"),
    "advised launch file": Output("advise out/run.sh --write out/run.new.sh", _write_script),
    "edited launch file": Output("export small.yaml --against out/run.sh --write", _write_script),
    "schedule": Output("export schedule zb-h1 --p 4 --m 8 --out out/order.csv"),
    "first job": Output("init out/first.yaml --force"),
    "import": Output(
        "import nccl-tests log.txt --operation all_reduce --members 8 --job small.yaml --out out/l.json", repeats=False
    ),
    "accuracy": Output("validate distributed steps.json --plot out/steps.png", _copy_measured),
    "calibration": Output("calibrate campaign measured --out out", package="torch"),
    "learnt calibration": Output("learn rows.csv --out out", _write_rows),
    "campaign": Output("measure campaign campaign.yaml --out out", _write_campaign, repeats=False, package="torch"),
    "measurement": Output(
        "measure distributed laptop.yaml --device cpu --steps 2 --no-check --trace out/t.json --out out/d.json",
        repeats=False,
        package="torch",
    ),
}
"""Commands by what they write. Of ``calibrate --device``, which takes minutes, there is only what a campaign's fit and
`measure` share with it."""

WRITTEN = {"--out", "--plot", "--trace", "--snapshot", "--jobs-to", "--write", "--html"}
"""Options that name what a command writes."""

READ = {"--calibration", "--plugins", "--jobs", "--compare", "--data", "--job", "--against", "--prices"}
"""Options that name what a command reads."""


class OutputPlace:
    """The folder of one attack: the inputs of a command, and the folder of its files.

    Attributes:
        before: the files that were there when the last command began.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True)
        seeds.prepare(folder)
        self.folder, self.name, self.command = folder, name, OUTPUTS[name]
        self.out = folder / "out"
        self.command.prepare(folder)
        self.before = self.files()

    def start(self, stop: Moment | None = None, nbytes: int | None = None) -> CommandProcess:
        """Starts the command."""
        self.before = self.files()
        return CommandProcess(self.folder, self.out, self.command.words.split(), stop, ROOT, nbytes)

    def finish(self) -> None:
        """Runs the command to its end."""
        with self.start() as process:
            ended = process.end(talks=True)
        assert ended.code == 0, f"the last command ended with {ended.code}: {ended.stderr}"

    def files(self) -> Files:
        """The files that are there."""
        paths = sorted(path for path in self.out.rglob("*") if path.is_file())
        return {str(path.relative_to(self.out)): path.read_bytes() for path in paths}

    def write(self, files: Files) -> None:
        """Writes files into the folder, as into a file system that was mounted there."""
        for name, content in files.items():
            (self.out / name).parent.mkdir(exist_ok=True, parents=True)
            (self.out / name).write_bytes(content)

    def add_earlier(self, reference: Files) -> None:
        """Writes what an earlier command may have left: other bytes, which the command takes for such a file."""
        if self.name != "campaign":  # it does not measure again
            added = {name: content for name, content in reference.items() if name not in self.before}
            self.write({name: make_other(name, content) for name, content in added.items()})

    def check(self, reference: Files, killed: bool = False) -> None:
        """Raises AssertionError unless each file is whole, and all that were there are.

        reference: files of an undisturbed command. killed: whether SIGKILL may have left a file that was being written.
        """
        files = self.files()
        lost = [name for name in self.before if name not in files]
        assert not [name for name in lost if not is_temporary(name)], f"lost: {lost}"
        for name, content in files.items():
            if is_temporary(name):
                assert killed or name in self.before, f"left behind: {name}"
            elif content not in (self.before.get(name), reference.get(name)):
                assert not self.command.repeats, f"{name} is neither the earlier file nor the new one"
                check_whole(name, content)

    def check_end(self, reference: Files) -> None:
        """Raises AssertionError unless the files are those of an undisturbed command, and no others."""
        files = self.files()
        assert files.keys() == reference.keys(), f"{sorted(files)}, not {sorted(reference)}"
        for name, content in files.items():
            if self.command.repeats:
                assert content == reference[name], f"{name} is not that of an undisturbed command"
            check_whole(name, content)


def is_temporary(name: str) -> bool:
    """Whether a file is one that is being written."""
    return TEMPORARY.fullmatch(Path(name).name) is not None


def make_other(name: str, content: bytes) -> bytes:
    """Another file of the same format and content."""
    if not name.endswith(".parquet"):
        return content + b"\n"
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pq.read_table(pa.BufferReader(content)), file, compression="none")
    return file.getvalue()


def _read_parquet(content: bytes) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
        assert len(file.read()) == file.metadata.num_rows


def _read_image(content: bytes) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        image.load()


def _ends_with(end: bytes) -> Callable[[bytes], Any]:
    def check(content: bytes) -> None:
        assert content.rstrip().endswith(end), f"it ends with {content[-40:]!r}"

    return check


WHOLE: dict[str, Callable[[bytes], Any]] = {
    ".parquet": _read_parquet,
    ".json": json.loads,
    ".jsonl": lambda content: [json.loads(line) for line in content.splitlines()],
    ".gz": lambda content: json.loads(gzip.decompress(content)),
    ".pickle": pickle.loads,
    ".png": _read_image,
    ".svg": _ends_with(b"</svg>"),
    ".pdf": _ends_with(b"%%EOF"),
    ".html": _ends_with(b"</html>"),
    ".yaml": yaml.safe_load,
    ".csv": _ends_with(b""),
    ".sh": _ends_with(b""),
    ".txt": _ends_with(b""),
}
"""What reads a file to its end, by its suffix."""


def check_whole(name: str, content: bytes) -> None:
    """Raises AssertionError for a file that cannot be read to its end."""
    assert content, f"{name} is empty"
    try:
        WHOLE[Path(name).suffix](content)
    except Exception as error:
        raise AssertionError(f"{name} is not whole: {error}") from error


# -------------------------------------------------------------------------------------------- attacks


def check_ended(blow: str, ended: Ended) -> None:
    """Raises AssertionError for an exit code that a blow does not explain."""
    codes = {"kill": (0, 2, -9), "terminate": (0, 2, -15), "interrupt": (0, 130, -2)}[blow.split()[0]]
    assert ended.code in codes, f"exit code {ended.code} after {blow}: {ended.stderr[-3:]}"


def check_error(place: OutputPlace, ended: Ended, reasons: str) -> None:
    """Raises AssertionError unless the last line names a file of the output, and a reason."""
    line = ended.stderr[-1] if ended.stderr else ""
    assert ended.code == 2, f"exit code {ended.code}: {line}"
    assert line.startswith("meshcast: ") and "out" in line and re.search(reasons, line), f"{place.name}: {line}"


NO_ROOM = "No space left on device|File too large"
NOT_WRITABLE = "[Pp]ermission denied|Read-only file system"


def draw_moment(rng: random.Random, reference: Files, seconds: float) -> Moment:
    """Any time of a command, or any of its operations on its files."""
    operation = rng.choice((0, 1, 1)) and rng.randrange(1, 5 * len(reference) + 4)
    return Moment(operation, rng.random() * seconds if operation == 0 else rng.choice((0, 0, rng.random() / 20)))


def hit_output(harness: Any, rng: random.Random, folder: Path, name: str) -> None:
    """One or two blows, each to a command on what the one before has left."""
    reference, seconds = harness.output_reference(name)
    place = OutputPlace(folder, name)
    if rng.random() < 0.7:
        place.add_earlier(reference)
    for _ in range(rng.choice((1, 1, 2))):
        blow = rng.choice(list(BLOWS))
        with place.start(draw_moment(rng, reference, seconds)) as victim:
            reached = victim.reach()
            if reached:
                BLOWS[blow](victim, rng)
            harness.counts[blow if reached else "too late"] += 1
            ended = victim.end(talks=True)
        check_ended(blow, ended)
        place.check(reference, killed=blow.startswith("kill"))
    place.finish()
    place.check_end(reference)


def fill_output_disk(harness: Any, rng: random.Random, folder: Path, name: str) -> None:
    """A file system that is too small, or a limit of the size of a file; then there is room."""
    reference, _ = harness.output_reference(name)
    place = OutputPlace(folder, name)
    total, uses_torch = sum(map(len, reference.values())), place.command.package == "torch"
    with small_disk(place.out, uses_torch or rng.random() < 0.7) as disk:
        if disk is None and uses_torch:  # its processes need files of their own
            harness.counts["not mounted"] += 1
            return
        if disk is not None:
            disk(1 << 24)
            place.write(place.before)
        if rng.random() < 0.7:
            place.add_earlier(reference)
        held = sum(map(len, place.files().values())) if disk is not None else 0
        room = held + rng.randrange(total + 1)
        if disk is not None:
            disk(room)
        with place.start(nbytes=room if disk is None else None) as victim:
            ended = victim.end(talks=True)
        if ended.code:
            harness.counts["no room"] += 1
            check_error(place, ended, NO_ROOM)
        place.check(reference)
        if disk is not None:
            disk(1 << 24)
        place.finish()
        place.check_end(reference)


def shut_output_folder(harness: Any, rng: random.Random, folder: Path, name: str) -> None:
    """A folder that may not be written to, before the command begins or from one of its moments on."""
    reference, seconds = harness.output_reference(name)
    place = OutputPlace(folder, name)
    with small_disk(place.out, True) as disk:
        if disk is not None:
            disk(1 << 25)
            place.write(place.before)
        elif os.geteuid() == 0:
            harness.counts["not mounted"] += 1  # modes do not restrict this user
            return
        if rng.random() < 0.7:
            place.add_earlier(reference)
        late = rng.random() < 0.5
        with place.start(draw_moment(rng, reference, seconds) if late else Moment(0)) as victim:
            if victim.reach():
                shut(place.out, True)
            ended = victim.end(talks=True)
        shut(place.out, False)
        if ended.code:
            harness.counts["read-only"] += 1
            check_error(place, ended, NOT_WRITABLE)
        else:
            assert late, f"{name} was written into a folder that may not be written to"
        place.check(reference, killed=late)  # what was being written cannot be removed any more
        place.finish()
        place.check_end(reference)


def shut(folder: Path, shuts: bool) -> None:
    """Forbids to write into a folder, or allows it again; without effect while a file in it is being written."""
    if folder.is_mount():
        subprocess.run(["mount", "-o", f"remount,{'ro' if shuts else 'rw'}", str(folder)], capture_output=True)
    else:
        folder.chmod(0o555 if shuts else 0o755)


def write_output_twice(harness: Any, rng: random.Random, folder: Path, name: str) -> None:
    """Two commands of one output, each stopped at a moment while the other goes on, and sometimes one is killed."""
    reference, seconds = harness.output_reference(name)
    place = OutputPlace(folder, name)
    if rng.random() < 0.7:
        place.add_earlier(reference)
    with (
        place.start(draw_moment(rng, reference, seconds)) as first,
        place.start(draw_moment(rng, reference, seconds)) as second,
    ):
        both = [first, second]
        first.reach()
        second.reach()
        rng.shuffle(both)
        hits = rng.random() < 0.3 and both[0].process.poll() is None
        if hits:
            BLOWS[rng.choice(("kill parent", "kill group"))](both[0], rng)
            harness.counts["kill one of two"] += 1
        ends = [process.end(talks=True) for process in both]
    codes = [ended.code for ended in ends]
    assert codes in ([0, 0], [-9, 0] if hits else [0, 0]), f"two commands of one output ended with {ends}"
    place.check(reference, killed=hits)
    place.finish()
    place.check_end(reference)


@contextmanager
def small_disk(folder: Path, wanted: bool) -> Iterator[Callable[[int], None] | None]:
    """Yields what sets the size of the file system of a folder; None if it is not wanted, or cannot be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "meshcast", str(folder)]
    if not wanted or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield lambda nbytes: _remount(folder, nbytes)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _remount(folder: Path, nbytes: int) -> None:
    stat = os.statvfs(folder)
    used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize  # a file system cannot become smaller than what it holds
    subprocess.run(["mount", "-o", f"remount,size={max(nbytes, used, 4096)}", str(folder)], check=True)


OUTPUT_ATTACKS: dict[str, Callable[[Any, random.Random, Path, str], None]] = {
    "kills": hit_output,
    "full disk": fill_output_disk,
    "read-only folder": shut_output_folder,
    "two writers": write_output_twice,
}
"""Attacks on a command that writes files at its end. Its inputs do not change: it keeps nothing of an earlier one."""


def missing_package(name: str) -> str:
    """What a command needs and is not installed; empty if nothing."""
    package = OUTPUTS[name].package
    return "" if find_spec(package) else package


def list_file_options() -> Iterator[tuple[str, str]]:
    """(command, option) of every option of every command that may name a file, by its type or its placeholder."""
    for name in COMMANDS:
        fields, flags = find_options(name).model_fields, find_options(name).flags()
        for param in load_command(name).params:
            kind = f"{fields[param.name].annotation} {flags[param.name].reads}"
            is_file = param.metavar in ("FILE", "FOLDER", "PATH") or "Path" in kind
            if param.param_type_name == "option" and (is_file or param.opts[0] in WRITTEN):
                yield name, param.opts[0]
