"""Attacks on running sweeps, one or two of each kind; `make kills` makes many more."""

from __future__ import annotations

import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from tests.fuzz import kills
from tests.fuzz.kills import ATTACKS, EDITS, SWEEPS, Harness, Place, check_result, describe_difference, run_attack
from tests.fuzz.sweep_process import BLOWS, Ended, Moment, check_end

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


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param("kills", 1, marks=pytest.mark.slow),
        *(pytest.param(kind, 0, marks=pytest.mark.slow) for kind in ATTACKS),
        *(pytest.param(kind, seed, marks=pytest.mark.slow) for kind in ATTACKS for seed in range(3, 8)),
    ],
)
def test_sweeps_outlive_attacks(kind: str, seed: int, harness: Harness) -> None:
    assert run_attack(harness, seed, kind) == (kind, "")


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
