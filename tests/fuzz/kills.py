"""Kills every command that writes files, fills its disk, shuts its folder, doubles it and changes its inputs: ``make
kills``, or one attack again: ``python -m tests.fuzz.kills --seed 17 -n 1``.

The victims are tables that resume, here, and files that are written at the end of a command (`tests.fuzz.outputs`,
which says what is checked of them). Whatever hits a sweep, its shards, its merge or ``meshcast run --out``, the same
command ends with the file of an undisturbed one, byte by byte: no row lost, doubled or from other code; stored parts
are not forecast again; nothing else is left, neither processes nor files; and every message is one line. A test finds
an option that names an output and has no victim. Needs Linux.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.fuzz.command_process import (
    BLOWS,
    ROOT,
    SAMPLE,
    SECONDS,
    CommandProcess,
    Ended,
    Moment,
    Patience,
    check_end,
    send,
)
from tests.fuzz.outputs import (
    NO_ROOM,
    NOT_WRITABLE,
    OUTPUT_ATTACKS,
    OUTPUTS,
    Files,
    OutputPlace,
    missing_package,
    shut,
    small_disk,
)
from tests.fuzz.victim import CHUNK

JOB: dict[str, Any] = {
    "model": "gpt2-124m",
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "sequence": 1024},
    "framework": "torchtitan",
}
VARY: dict[str, Any] = {
    "plan.tp": [1, 2, 3, 4],
    "plan.pp": [1, 2],
    "batch.micro": [1, 2, 4],
    "plan.recompute": ["none", "selective", "full"],
    "batch.global": [64, 128, 192],
}
SWEEPS: dict[str, dict[str, Any]] = {
    "grid": {"job": JOB, "vary": VARY, "where": ["plan.tp * plan.pp <= 6"]},
    "files": {"job": "job.yaml", "vary": VARY},
    "zip": {
        "job": JOB,
        "zip": [{"plan.tp": [1, 2, 4, 8], "batch.micro": [4, 4, 2, 1]}],
        "vary": {"batch.global": {"range": [16, 512, 10]}},
    },
}
"""Sweeps of some 200 points with rows that fit and rows that are invalid, without and with points left out."""

RUN, RUNS = "run", 200
"""Name of the table that ``meshcast run --out`` makes, and its rows."""

RUN_JOB: dict[str, Any] = {
    **JOB,
    "run": {
        "steps": 20_000,
        "seeds": RUNS,
        "failures": {"rates": "none", "components": {"node": {"per": "node", "mtbf_hours": 0.5}}},
        "checkpoints": {"kind": "sharded", "every_s": 60},
        "recovery": {"detection_s": 5, "scheduling_s": 5, "warm_up_s": 5},
        "stragglers": {"jitter": 0.05},
    },
}
"""A job whose runs have some failures each."""

FILES: dict[str, Any] = {
    "job.yaml": {**JOB, "model": "model.yaml"},
    "model.yaml": {"preset": "gpt2-124m", "layers": 8},
}
"""Files beside the sweep."""

OPERATIONS = 4 * (216 // CHUNK) + 16
"""Operations of a sweep on its files: three for each part, one to remove it, and some at the begin and the end."""

CLUSTER = "cluster"
"""Name of the sweep on a Dask cluster, of the points of `FILES`."""

PACKAGES = ("hardware", "simulator", "validation", "experiments", "meshcast")


class Edit(NamedTuple):
    """A change of an input of the rows, by which all of them change.

    Attributes:
        kind: the kind of input that a message names.
        file: within an installation, or beside the sweep.
        pattern, replacement: of a regular expression.
    """

    kind: str
    file: str
    pattern: str
    replacement: str


EDITS = (
    Edit("calibration", "simulator/costs/calibration/h100-sxm.yaml", r"sigma: 0\.0", "sigma: 0.1"),
    Edit("hardware catalog", "hardware/catalog/gpus/h100-sxm.yaml", r"3\.35 TB/s", "2.35 TB/s"),
    Edit(
        "framework profiles", "simulator/job/frameworks/torchtitan.yaml", r"vocab_multiple: \d+", "vocab_multiple: 96"
    ),
    Edit("model presets", "simulator/models/presets/gpt2-124m.yaml", "vocab: 50257", "vocab: 60257"),
    Edit(
        "code", "simulator/report/report.py", r"\"step_time_s\": self\.step_time,", '"step_time_s": 2 * self.step_time,'
    ),
    Edit("file model.yaml", "model.yaml", "layers: 8", "layers: 10"),
)


class Place:
    """The folder of one attack: a sweep file, an empty folder for its output, and perhaps an installation."""

    def __init__(self, folder: Path, sweep: str, installed: bool = False) -> None:
        folder.mkdir()
        self.folder, self.name = folder, sweep
        self.out = folder / "out" / "rows.parquet"
        self.parts = self.out.with_name("rows.parquet.parts")
        self.out.parent.mkdir()
        self.sweep = folder / "sweep.yaml"
        made = RUN_JOB if sweep == RUN else SWEEPS[sweep]
        for file, content in {**FILES, "sweep.yaml": made}.items():
            (folder / file).write_text(yaml.safe_dump(content, sort_keys=False))
        self.root = ROOT
        if installed:
            self.root = folder / "installed"
            for package in PACKAGES:
                shutil.copytree(ROOT / package, self.root / package, symlinks=True)

    def start(self, *words: str, stop: Moment | None = None, nbytes: int | None = None) -> CommandProcess:
        command = [*self.command(words), "--out", str(self.out)]
        return CommandProcess(self.folder, self.out, command, stop, self.root, nbytes)

    def draw_workers(self, rng: random.Random) -> list[str]:
        """The option of the number of processes."""
        return ["--workers", str(rng.choice((1, 2, 2, 3)))]

    @property
    def operations(self) -> int:
        """Operations of the command on the files of its output."""
        return 4 * (RUNS // CHUNK) + 16 if self.name == RUN else OPERATIONS

    def command(self, words: Sequence[str]) -> list[str]:
        """The words of the command that makes the output, without its --out."""
        return ["run" if self.name == RUN else "sweep", self.sweep.name, *words]

    def finish(self, *words: str) -> None:
        """Runs the sweep to its end."""
        with self.start(*words) as last:
            ended = last.end()
        assert ended.code == 0, f"the last run ended with {ended.code}: {ended.stderr}"

    def stored(self) -> dict[str, tuple[int, int]]:
        """The stored parts; a part that is written again has another value."""
        found = {path.name: path.stat() for path in self.parts.glob("0*.parquet")}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}

    def apply(self, edit: Edit) -> None:
        """Edits a file, in one step as an editor does; applied to an edited file, it does nothing."""
        path = next(path for path in (self.root / edit.file, self.folder / edit.file) if path.is_file())
        text = re.sub(edit.pattern, edit.replacement, path.read_text())
        new = self.folder / "new"
        new.write_text(text)
        shutil.copy2(path, self.folder / "old")
        os.replace(new, path)
        self.edited = path

    def undo(self) -> None:
        """Takes the last edit back."""
        os.replace(self.folder / "old", self.edited)


class ShardPlace(Place):
    """One shard of a sweep, in a folder of its own."""

    def __init__(self, folder: Path, sweep: str, number: int, of: int) -> None:
        super().__init__(folder, sweep)
        self.shard = f"{number}/{of}"

    def command(self, words: Sequence[str]) -> list[str]:
        return [*super().command(words), "--shard", self.shard]


class ClusterPlace(Place):
    """A sweep on the workers of a Dask scheduler. scheduler: its address."""

    def __init__(self, folder: Path, scheduler: str) -> None:
        super().__init__(folder, "files")
        self.scheduler = scheduler

    def draw_workers(self, rng: random.Random) -> list[str]:
        return ["--on", self.scheduler]


class MergePlace(Place):
    """The folder of a merge. files: of the shards."""

    operations = 9

    def __init__(self, folder: Path, sweep: str, files: Sequence[Path]) -> None:
        super().__init__(folder, sweep)
        self.files = files

    def draw_workers(self, rng: random.Random) -> list[str]:
        return []

    def command(self, words: Sequence[str]) -> list[str]:
        return ["merge", *map(str, self.files)]


class Harness:
    """What the attacks share: a folder, files of undisturbed sweeps, and counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = Counter[str]()
        self.references: dict[tuple[str, Edit | None], bytes] = {}
        self.outputs: dict[str, tuple[Files, float]] = {}
        self.seconds = dict.fromkeys((RUN, "sweep"), 0.0)
        """Longest undisturbed command."""
        self.cluster: Any = None
        """Dask workers, once there are any."""

    def reference(self, sweep: str, edit: Edit | None = None) -> bytes:
        """The file of an undisturbed sweep, of an edited installation."""
        if (sweep, edit) not in self.references:
            place = Place(Path(tempfile.mkdtemp(dir=self.folder)) / "reference", sweep, edit is not None)
            if edit is not None:
                place.apply(edit)
            begin = time.monotonic()
            place.finish("--workers", "1")
            command = place.command(())[0]
            self.seconds[command] = max(self.seconds[command], time.monotonic() - begin)
            self.references[sweep, edit] = place.out.read_bytes()
            shutil.rmtree(place.folder.parent)
        return self.references[sweep, edit]

    def output_reference(self, name: str) -> tuple[Files, float]:
        """The files of an undisturbed command that writes at its end, and its seconds."""
        if name not in self.outputs:
            place = OutputPlace(Path(tempfile.mkdtemp(dir=self.folder)) / "reference", name)
            begin = time.monotonic()
            place.finish()
            self.outputs[name] = place.files(), time.monotonic() - begin
            place.check_end(self.outputs[name][0])
            shutil.rmtree(place.folder.parent)
        return self.outputs[name]

    def moment(self, rng: random.Random, place: Place) -> Moment:
        """Any time of a sweep, any of its operations, or one of the last, when parts are joined and removed."""
        last = place.operations
        operation = rng.choice((0, rng.randrange(last), rng.randrange(last * 2 // 3, last)))
        most = self.seconds[RUN if place.name == RUN else "sweep"]
        return Moment(operation, rng.random() * most if operation == 0 else rng.choice((0, 0, rng.random() / 10)))

    def strike(self, place: Place, rng: random.Random, *words: str) -> tuple[str, Ended]:
        """Starts a sweep, hits it and waits for its end; what was stored before stays as it was."""
        blow, before = rng.choice(list(BLOWS)), place.stored()
        workers = place.draw_workers(rng)
        with place.start(*workers, *words, stop=self.moment(rng, place)) as victim:
            if victim.reach():
                BLOWS[blow](victim, rng)
                self.counts[blow] += 1
            else:
                self.counts["too late"] += 1
            ended = victim.end()
        check_end(blow, ended)
        after = place.stored()
        if "--restart" not in words and (place.parts / "_sweep.json").exists():
            lost = [name for name in before if after.get(name) != before[name]]
            assert not lost, f"{len(lost)} stored parts were lost or made again: {lost[:3]}"
        elif "--restart" not in words and before:
            assert place.out.exists(), "stored parts are removed, and there is no table"
        return blow, ended


def check_result(place: Place, *references: bytes) -> None:
    """Raises AssertionError unless the table is one of these files, and the only file in its folder."""
    left = sorted(path.name for path in place.out.parent.iterdir())
    assert left == [place.out.name], f"left beside the table: {left}"
    if (found := place.out.read_bytes()) not in references:
        raise AssertionError(describe_difference(found, references[0]))


def describe_difference(found: bytes, expected: bytes) -> str:
    """Counts of rows that are lost, doubled or other than expected."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, wanted = (pq.read_table(pa.BufferReader(table)).to_pylist() for table in (found, expected))
    by_index = {row["index"]: row for row in rows}
    lost = sum(row["index"] not in by_index for row in wanted)
    other = sum(row["index"] in by_index and by_index[row["index"]] != row for row in wanted)
    return f"{lost} rows lost, {len(rows) - len(by_index)} doubled, {other} other, of {len(wanted)}"


# -------------------------------------------------------------------------------------------- attacks


def kill_sweep(harness: Harness, rng: random.Random, folder: Path, table: str) -> None:
    """One to four blows, each to the command that goes on after the one before."""
    place = Place(folder, table)
    reference = harness.reference(place.name)
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        harness.strike(place, rng)
    place.finish("--workers", str(rng.choice((1, 2))))
    check_result(place, reference)


def kill_on_cluster(harness: Harness, rng: random.Random, folder: Path, table: str) -> None:
    """One to three blows to a sweep on a cluster, or to one of the workers, which is started again."""
    place = ClusterPlace(folder, start_cluster(harness))
    reference = harness.reference(place.name)
    for _ in range(rng.choice((1, 2, 3))):
        if rng.random() < 0.5:
            harness.strike(place, rng)
            continue
        with place.start(*place.draw_workers(rng), stop=harness.moment(rng, place)) as victim:
            victim.reach()
            send(rng.choice(list_workers(harness)), signal.SIGKILL)
            harness.counts["kill Dask worker"] += 1
            ended = victim.end()
        assert ended.code == 0, f"exit code {ended.code} after the kill of a Dask worker: {ended.stderr}"
    place.finish(*place.draw_workers(rng))
    check_result(place, reference)


def merge_shards(harness: Harness, rng: random.Random, folder: Path, table: str) -> None:
    """Blows to the shards of a sweep and to their merge; each goes on."""
    folder.mkdir()
    name, of = rng.choice(list(SWEEPS)), rng.choice((2, 3))
    reference, files = harness.reference(name), []
    for number in range(of):
        shard = ShardPlace(folder / f"shard-{number}", name, number, of)
        if rng.random() < 0.5:
            harness.strike(shard, rng)
        shard.finish("--workers", str(rng.choice((1, 2))))
        files.append(shard.out)
    rng.shuffle(files)
    place = MergePlace(folder / "merge", name, files)
    for _ in range(rng.choice((1, 2))):
        harness.strike(place, rng)
        if place.out.exists():
            assert place.out.read_bytes() == reference, describe_difference(place.out.read_bytes(), reference)
    place.finish()
    check_result(place, reference)


def fill_disk(harness: Harness, rng: random.Random, folder: Path, table: str) -> None:
    """A file system that is too small, or a limit of the size of a file, and more room later; sometimes a blow too."""
    place = Place(folder, table)
    reference = harness.reference(place.name)
    room = sorted(rng.randrange(2 * len(reference)) for _ in range(rng.choice((1, 2, 3))))
    with small_disk(place.out.parent, rng.random() < 0.7) as disk:
        for nbytes in room:
            if disk is not None:
                disk(nbytes)
            with place.start("--workers", str(rng.choice((1, 2))), nbytes=nbytes if disk is None else None) as victim:
                ended = victim.end()
            assert ended.code in (0, 2), f"exit code {ended.code} with {nbytes:,} bytes of room"
            if ended.code:
                harness.counts["no room"] += 1
                check_full(place, ended)
            elif rng.random() < 0.2:
                break
        if disk is not None:
            disk(1 << 24)
        if rng.random() < 0.3:
            harness.strike(place, rng)
        place.finish("--workers", "2")
        check_result(place, reference)


def check_full(place: Place, ended: Ended) -> None:
    """Raises AssertionError unless the message says that there is no room, and that points are kept if some are."""
    (line,) = ended.stderr
    assert re.search(rf"cannot be written \(({NO_ROOM})\)", line), line
    assert ("points are kept" in line) == bool(place.stored()), f"{len(place.stored())} parts: {line}"


def shut_folder(harness: Harness, rng: random.Random, folder: Path, table: str) -> None:
    """A folder that may not be written to, before a command begins or from one of its moments on; then it may."""
    place = Place(folder, table)
    reference = harness.reference(place.name)
    with small_disk(place.out.parent, True) as disk:
        if disk is not None:
            disk(1 << 24)
        elif os.geteuid() == 0:
            harness.counts["not mounted"] += 1  # modes do not restrict this user
            return
        if rng.random() < 0.5:
            harness.strike(place, rng)
        with place.start(*place.draw_workers(rng), stop=harness.moment(rng, place)) as victim:
            if victim.reach():
                shut(place.out.parent, True)
            ended = victim.end()
        shut(place.out.parent, False)
        assert ended.code in (0, 2), f"exit code {ended.code} in a folder that may not be written to"
        if ended.code:
            harness.counts["read-only"] += 1
            assert re.search(NOT_WRITABLE, ended.stderr[0]), ended.stderr
            assert ("points are kept" not in ended.stderr[0]) or place.stored(), ended.stderr
        place.finish(*place.draw_workers(rng))
        check_result(place, reference)


def write_twice(harness: Harness, rng: random.Random, folder: Path, table: str) -> None:
    """Two sweeps of one output, each stopped at a moment while the other goes on, and sometimes hit there."""
    place = Place(folder, table)
    reference = harness.reference(place.name)
    if rng.random() < 0.3:  # what they find
        harness.strike(place, rng)
    words = [["--workers", str(rng.choice((1, 2)))] + ["--restart"] * (rng.random() < 0.3) for _ in range(2)]
    with place.start(*words[0], stop=harness.moment(rng, place)) as first:
        first.reach()
        with place.start(*words[1], stop=harness.moment(rng, place)) as second:
            second.reach()
            both = [first, second]
            if rng.random() < 0.5:
                both.reverse()
            if rng.random() < 0.2 and both[0].process.poll() is None:
                BLOWS[rng.choice(("kill parent", "kill group"))](both[0], rng)
                harness.counts["kill one of two"] += 1
            codes = [_end_of_two(harness, place, one, both, reference) for one in both]
    assert 0 in codes or min(codes) < 0, f"both sweeps of one output were refused: {codes}"
    place.finish()
    check_result(place, reference)


def _end_of_two(
    harness: Harness, place: Place, one: CommandProcess, both: Sequence[CommandProcess], reference: bytes
) -> int:
    """Waits for the end of one of two sweeps: with the right table, or refused in a line that names the other."""
    ended = one.end()
    if ended.code == 0:
        assert place.out.read_bytes() == reference, describe_difference(place.out.read_bytes(), reference)
    elif ended.code == 2:
        harness.counts["refused: another writes"] += 1
        other = next(process for process in both if process is not one)
        assert f"process {other.pid}" in ended.stderr[0], f"{ended.stderr} does not name process {other.pid}"
    else:
        assert ended.code == -9, f"exit code {ended.code}"
    return ended.code


def change_inputs(harness: Harness, rng: random.Random, folder: Path, table: str) -> None:
    """An input of the rows changes after a blow, or while the sweep runs; then it is undone, or rows are discarded."""
    edit = rng.choice(EDITS)
    place = Place(folder, "files" if edit.file in FILES else table, installed=True)
    before, after = harness.reference(place.name), harness.reference(place.name, edit)
    assert before != after, f"the edit of {edit.file} changes no row"
    if rng.random() < 0.5:
        harness.strike(place, rng)
        place.apply(edit)
    else:
        with place.start("--workers", str(rng.choice((1, 2))), stop=harness.moment(rng, place)) as victim:
            victim.reach()
            place.apply(edit)
            ended = victim.end()
        harness.counts["change of a running sweep"] += 1
        check_change(harness, edit, ended)
        if ended.code == 0:
            check_result(place, before, after)
    begun = place.out.exists() or (place.parts / "_sweep.json").exists()
    with place.start() as victim:
        ended = victim.end()
    check_change(harness, edit, ended)
    assert begun or ended.code == 0, f"refused without stored rows: {ended.stderr}"
    if ended.code == 0:
        check_result(place, after)
    elif rng.random() < 0.5:
        place.undo()
        place.finish()
        check_result(place, before)
    else:
        harness.strike(place, rng, "--restart")
        place.finish("--restart")
        check_result(place, after)


def check_change(harness: Harness, edit: Edit, ended: Ended) -> None:
    """Raises AssertionError for another end than success or a refusal that names the input that changed."""
    assert ended.code in (0, 2), f"exit code {ended.code} after a change of {edit.kind}"
    if ended.code:
        harness.counts["refused: other inputs"] += 1
        assert re.search(rf"changed: {edit.kind}[.;]", ended.stderr[0]), (
            f"after a change of {edit.kind}: {ended.stderr}"
        )


Attack = Callable[[Harness, random.Random, Path, str], None]

TABLE_ATTACKS: dict[str, Attack] = {
    "kills": kill_sweep,
    "full disk": fill_disk,
    "read-only folder": shut_folder,
    "two writers": write_twice,
    "changed inputs": change_inputs,
}
"""Attacks on a command that goes on where it was stopped."""

VICTIMS: dict[str, tuple[dict[str, Attack], int]] = {
    **dict.fromkeys(SWEEPS, (TABLE_ATTACKS, 4)),
    RUN: ({kind: attack for kind, attack in TABLE_ATTACKS.items() if attack is not change_inputs}, 5),
    "shards": ({"kills": merge_shards}, 4),
    CLUSTER: ({"kills": kill_on_cluster}, 2),
    **dict.fromkeys(OUTPUTS, (OUTPUT_ATTACKS, 1)),
}
"""Victims, with their attacks and their shares of all. Shards and clusters store rows as the other sweeps do."""

SHARES = {"kills": 4, "full disk": 2, "read-only folder": 1, "two writers": 2, "changed inputs": 2}
"""Shares of the attacks of a victim."""

TABLES = {"sweep": ("--out",), "merge": ("--out",), "run": ("--out",)}
"""Options of commands that write tables that resume."""


# ----------------------------------------------------------------------------------------------- main


def missing_for(victim: str) -> str:
    """The package that a victim needs and is not installed; empty if none."""
    if victim == CLUSTER:
        return "" if find_spec("distributed") else "distributed"
    return missing_package(victim) if victim in OUTPUTS else ""


def start_cluster(harness: Harness) -> str:
    """Starts two Dask workers, once; later, those that are missing. Returns the address of their scheduler."""
    if harness.cluster is None:
        import dask
        import distributed

        dask.config.set({"distributed.deploy.lost-worker-timeout": SECONDS})  # until a worker is given up
        options = {"host": "127.0.0.1", "dashboard_address": None, "worker_dashboard_address": None}
        harness.cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, silence_logs=logging.CRITICAL, **options
        )
    harness.cluster.scale(2)
    return str(harness.cluster.scheduler_address).replace("tcp://", "dask://")


def list_workers(harness: Harness) -> list[int]:
    """Returns the processes of the Dask workers that run; waits while there are none. A worker that is killed in its
    start is not started again by Dask, so such workers are left alone."""
    patience = Patience()
    nannies = harness.cluster.workers.values
    while not (processes := [nanny.pid for nanny in nannies() if nanny.pid and nanny.status.name == "running"]):
        assert not patience.is_over(), "no Dask worker is started again"
        time.sleep(SAMPLE)
    return processes


def run_attack(harness: Harness, seed: int, kind: str | None = None, victim: str | None = None) -> tuple[str, str, str]:
    """Returns the kind and the victim of the attack of a seed, and what was wrong; "" if nothing was.

    kind, victim: instead of those that the seed draws.
    """
    rng = random.Random(seed)
    known = [name for name in VICTIMS if kind is None or kind in VICTIMS[name][0]]
    victim = victim or rng.choices(known, [VICTIMS[name][1] for name in known])[0]
    attacks, _ = VICTIMS[victim]
    kind = kind or rng.choices(list(attacks), [SHARES[name] for name in attacks])[0]
    if package := missing_for(victim):
        harness.counts[f"skipped: {package} is not installed"] += 1
        return kind, victim, ""
    folder = harness.folder / f"attack-{seed}"
    try:
        attacks[kind](harness, rng, folder, victim)
    except AssertionError as error:
        return kind, victim, str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return kind, victim, ""


def main(words: Sequence[str] | None = None) -> int:
    """Prints counts by attack and victim, and failures with the command that repeats each; returns 1 if there are
    any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="attacks in all")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--kind", choices=TABLE_ATTACKS, help="one kind of attack only")
    parser.add_argument("--victim", choices=VICTIMS, help="one victim only")
    given = parser.parse_args(words)
    if given.kind and given.victim and given.kind not in VICTIMS[given.victim][0]:
        parser.error(f"{given.victim} has no such attack: {', '.join(VICTIMS[given.victim][0])}")
    done, failed = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        harness = Harness(Path(folder))
        for seed in range(given.seed, given.seed + given.n):
            kind, victim, failure = run_attack(harness, seed, given.kind, given.victim)
            done.update((kind, victim))
            if failure:
                failed.update((kind, victim))
                options = "".join(f" --{name} '{word}'" for name, word in vars(given).items() if word and name in DRAWN)
                print(f"  {kind} of {victim}: {failure}", flush=True)
                print(f"    python -m tests.fuzz.kills --seed {seed} -n 1{options}", flush=True)
        if harness.cluster is not None:
            harness.cluster.close()
    for name in done:
        print(f"{name:20} {done[name]:,} attacks, {failed[name]:,} failures")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(harness.counts.items())))
    return int(bool(failed))


DRAWN = ("kind", "victim")
"""Options instead of what a seed draws."""

if __name__ == "__main__":
    sys.exit(main())
