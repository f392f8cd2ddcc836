"""Attacks on commands that write files, one or two of each kind; `make kills` makes many more."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from tests.draws import drawn
from tests.fuzz import command_process, kills
from tests.fuzz.command_process import BLOWS, Ended, Moment, Patience, check_end
from tests.fuzz.kills import (
    CLUSTER,
    EDITS,
    RUN,
    SWEEPS,
    TABLES,
    VICTIMS,
    Harness,
    Place,
    check_result,
    describe_difference,
    missing_for,
    run_attack,
)
from tests.fuzz.outputs import (
    NO_ROOM,
    OUTPUTS,
    READ,
    WHOLE,
    WRITTEN,
    OutputPlace,
    check_error,
    check_whole,
    list_file_options,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes and looks for them as Linux does")

FEW = {"plan.tp": [1, 2, 3, 4], "plan.pp": [1, 2], "batch.micro": [1, 2], "plan.recompute": ["none", "full"]}
"""32 points, so three parts."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kills, "SWEEPS", {"files": {**SWEEPS["files"], "vary": FEW}})
        patch.setattr(kills, "OPERATIONS", 28)
        made = Harness(tmp_path_factory.mktemp("kills"))
        made.reference("files")
        yield made


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an undisturbed sweep, made in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kills, "SWEEPS", {"files": {**SWEEPS["files"], "vary": FEW}})
        place = Place(tmp_path_factory.mktemp("table") / "place", "files")
        patch.chdir(place.folder)
        done = CliRunner().invoke(app, [*place.command(("--workers", "1")), "--out", str(place.out)])
    assert done.exit_code == 0, done.output
    return place.out.read_bytes()


def test_patience_does_not_count_waiting_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = 0.0, {"1": 7.0}
    monkeypatch.setattr(command_process.time, "monotonic", lambda: now)
    monkeypatch.setattr(Patience, "_read_waits", staticmethod(lambda: dict(waits)))
    patience = Patience(most=100)
    for moment in ((60.0, {"1": 67.0}), (120.0, {"1": 68.0, "2": 49.0}), (220.0, {"2": 59.0})):
        now, waits = moment
        assert not patience.is_over()
    assert patience.seconds == 0 + 10 + 90
    now = 221.0
    assert patience.is_over()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "victim", "seed"),
    [
        *((kind, victim, 0) for victim in ("files", RUN, "shards", CLUSTER, *OUTPUTS) for kind in VICTIMS[victim][0]),
        *((kind, "files", seed) for kind in VICTIMS["files"][0] for seed in range(3, 8)),
    ],
)
def test_no_file_is_lost_or_half_written(kind: str, victim: str, seed: int, harness: Harness) -> None:
    if package := missing_for(victim):
        pytest.skip(f"{package} is not installed")
    assert run_attack(harness, seed, kind, victim) == (kind, victim, "")


@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.slow
def test_every_blow_while_parts_are_stored(blow: str, harness: Harness, tmp_path: Path) -> None:
    place = Place(tmp_path / "place", "files")
    with place.start("--workers", "2", stop=Moment(11)) as victim:
        assert victim.reach()
        BLOWS[blow](victim, random.Random(0))
        ended = victim.end()
    check_end(blow, ended)
    assert ended.code != 0 and len(place.stored()) >= 1
    place.finish()
    check_result(place, harness.reference("files"))


def test_every_output_has_a_victim() -> None:
    options = set(list_file_options())
    unknown = {option for _, option in options} - WRITTEN - READ
    assert not unknown, f"say in tests/fuzz/outputs.py whether a command writes what they name: {unknown}"
    words = [output.words.split() for output in OUTPUTS.values()]
    attacked = {(word[0], option) for word in words for option in WRITTEN & set(word)}
    attacked |= {(command, option) for command, names in TABLES.items() for option in names}
    written = {(command, option) for command, option in options if option in WRITTEN}
    assert attacked >= written, f"outputs without a victim in tests/fuzz/outputs.py: {written - attacked}"
    assert attacked <= written and any(word[0] == "init" for word in words)


@pytest.mark.parametrize(
    "name",
    drawn(["answers", "launch file", "schedule", "first job", "plot", "page"], keep=("answers", "launch file")),
)
def test_a_full_disk_leaves_the_earlier_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = OutputPlace(tmp_path / "place", name)
    word = OUTPUTS[name].words.split()[-1 - OUTPUTS[name].words.endswith("--force")]
    (place.folder / word).write_bytes(b"earlier")
    place.before = place.files()

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(os, "fsync", fail)
    ended = CliRunner().invoke(app, OUTPUTS[name].words.split())
    check_error(place, Ended(ended.exit_code, ended.stderr.splitlines()), NO_ROOM)
    assert place.files() == place.before


# ------------------------------------------------------------------------------------- failures are seen


def test_rows_that_are_lost_doubled_or_other_are_counted(table: bytes, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(pa.BufferReader(table))
    changed = rows.slice(1, 1).set_column(rows.column_names.index("status"), "status", pa.array(["other"]))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.concat_tables([changed, rows.slice(2, 5), rows.slice(2, 2), rows.slice(10)]), path)
    assert describe_difference(path.read_bytes(), table) == "4 rows lost, 2 doubled, 1 other, of 32"


def test_another_table_and_files_beside_it_are_failures(table: bytes, tmp_path: Path) -> None:
    place = Place(tmp_path / "place", "files")
    place.out.write_bytes(table)
    check_result(place, table)
    (place.out.parent / "other").touch()
    with pytest.raises(AssertionError, match="left beside the table"):
        check_result(place, table)


@pytest.mark.parametrize(
    ("blow", "code", "line"),
    [
        ("kill parent", 130, ""),
        ("kill group", 2, "meshcast: a worker was killed"),
        ("kill worker", 2, "meshcast: another reason"),
        ("terminate parent", -signal.SIGKILL, ""),
        ("terminate group", 1, ""),
        ("interrupt twice", 130, "meshcast: something else"),
    ],
)
def test_unexplained_ends_are_failures(blow: str, code: int, line: str) -> None:
    with pytest.raises(AssertionError, match=blow):
        check_end(blow, Ended(code, [line] * bool(line)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("order.csv", b"0F0,0", "neither the earlier file nor the new one"),
        (".meshcast-0123456789abcdef", b"0F0,0", "left behind"),
        ("other.csv", b"0F0,0", "neither"),
    ],
)
def test_files_that_are_cut_off_or_left_behind_are_failures(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    place = OutputPlace(tmp_path / "place", "schedule")
    place.write({"order.csv": b"earlier"})
    place.before = place.files()
    reference = {"order.csv": b"0F0,0F1"}
    place.check(reference)
    place.write({name: content})
    with pytest.raises(AssertionError, match=message):
        place.check(reference)
    (place.out / "order.csv").unlink()
    with pytest.raises(AssertionError, match="lost"):
        place.check(reference)
    with pytest.raises(AssertionError):
        place.check_end(reference)


@pytest.mark.parametrize("suffix", sorted(WHOLE.keys() - {".csv", ".sh", ".txt", ".yaml"}))
def test_half_a_file_is_no_file(suffix: str) -> None:
    with pytest.raises(AssertionError, match="is not whole"):
        check_whole(f"out{suffix}", b'{"a": [1, ')
    with pytest.raises(AssertionError, match="is empty"):
        check_whole(f"out{suffix}", b"")


def test_edits_change_one_file_of_an_installation_and_are_undone(tmp_path: Path) -> None:
    place = Place(tmp_path / "place", "files", installed=True)
    for edit in EDITS:
        path = next(path for path in (place.root / edit.file, place.folder / edit.file) if path.is_file())
        before = path.read_text()
        place.apply(edit)
        assert path.read_text() != before
        place.undo()
        assert path.read_text() == before
    shutil.rmtree(place.root)
