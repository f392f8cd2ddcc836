"""What a sweep's stored rows depend on, and parts that were damaged or exchanged since they were written."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshcast.experiments.sweeps import fingerprint as module
from meshcast.experiments.sweeps.fingerprint import changed_inputs, fingerprint, hash_installation, parse_fingerprint
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.sweeps.store import Store
from meshcast.hardware.errors import PlanError
from tests.draws import drawn
from tests.experiments.sweeps.sweeps import GRID, JOB, Counting, Lazy, sweep
from tests.experiments.sweeps.test_sweep_rows import Stopping
from tests.strategies import EVERY_EXAMPLE

pytestmark = pytest.mark.usefixtures("known_forecasts")


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small installation of meshcast with files of every kind."""
    root = tmp_path / "installed"
    for place in (
        "simulator/job/framework.py", "simulator/job/frameworks/nemo.yaml", "simulator/models/presets/gpt2.yaml",
        "simulator/costs/calibration/h100-sxm.yaml", "simulator/costs/calibration/check.py",
        "hardware/catalog/gpus/h100-sxm.yaml", "sweeps/run.py",
    ):  # fmt: skip
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text("one")
    monkeypatch.setattr(module, "PACKAGES", {name: root / name for name in module.PACKAGES})
    begin_process(monkeypatch)
    yield root
    module._read_installation.cache_clear()


def begin_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is from now on what this process has loaded."""
    module._read_installation.cache_clear()
    monkeypatch.setattr(module, "IMPORTED_NS", time.time_ns() + 10**9)  # file systems round times


def stop(of: Any, out: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(of, out, Stopping(after))


# -------------------------------------------------------------------------------------- what changed


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("simulator/job/framework.py", "code"),
        ("simulator/job/frameworks/nemo.yaml", "framework profiles"),
        ("simulator/job/frameworks/new.yaml", "framework profiles"),
        ("simulator/models/presets/gpt2.yaml", "model presets"),
        ("simulator/costs/calibration/h100-sxm.yaml", "calibration"),
        ("simulator/costs/calibration/check.py", "code"),
        ("hardware/catalog/gpus/h100-sxm.yaml", "hardware catalog"),
        ("sweeps/run.py", "code"),
    ],
)
def test_a_changed_file_of_meshcast_changes_its_kind(installation: Path, place: str, kind: str) -> None:
    before = hash_installation()
    (installation / place).write_text("two")
    module._read_installation.cache_clear()
    assert changed_inputs(before, hash_installation()) == [kind]


def test_a_renamed_file_is_a_change(installation: Path) -> None:
    before = hash_installation()
    (installation / "sweeps/run.py").rename(installation / "sweeps/walk.py")
    module._read_installation.cache_clear()
    assert changed_inputs(before, hash_installation()) == ["code"]


def test_every_kind_of_data_of_meshcast_is_found() -> None:
    empty = module.hashlib.sha256().hexdigest()
    assert set(hash_installation()) == {"code", *module.DATA.values()}
    assert empty not in hash_installation().values()


def test_job_points_and_files_are_kinds_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "model.yaml").write_text("{preset: deep/base.yaml, layers: 2}")
    (tmp_path / "deep" / "base.yaml").write_text("{preset: gpt2-124m, heads: 12}")
    grid: dict[str, Any] = {"job": {**JOB, "model": "model.yaml"}, "vary": {"plan.tp": [1, 2]}}
    first = fingerprint(load_sweep(grid, tmp_path), 64)
    assert [kind for kind in first if kind.startswith("file ")] == ["file deep/base.yaml", "file model.yaml"]

    def changes(other: dict[str, Any], chunk: int = 64) -> list[str]:
        return changed_inputs(first, fingerprint(load_sweep(other, tmp_path), chunk))

    assert changes(grid) == []
    assert changes(grid, 128) == changes({**grid, "vary": {"plan.tp": [1, 4]}}) == ["points"]
    assert changes({**grid, "where": ["plan.tp == 1"]}) == ["points"]
    assert changes({**grid, "job": {**grid["job"], "cluster": "dgx-a100:2"}}) == ["job"]
    (tmp_path / "deep" / "base.yaml").write_text("{preset: gpt2-124m, heads: 6}")
    assert changes(grid) == ["file deep/base.yaml"]
    (tmp_path / "deep" / "base.yaml").unlink()
    assert changes(grid) == ["file deep/base.yaml"]


def test_rows_of_other_code_are_not_joined(
    installation: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.parquet"
    stop(load_sweep(GRID), out, 3)
    (installation / "simulator/job/framework.py").write_text("two")
    (installation / "hardware/catalog/gpus/h100-sxm.yaml").write_text("two")
    begin_process(monkeypatch)
    words = r"rows\.parquet\.parts holds rows of another sweep; changed: code, hardware catalog\. Undo .*--restart"
    with pytest.raises(PlanError, match=words):
        run(load_sweep(GRID), out, Lazy())
    assert run(load_sweep(GRID), out, Lazy(), restart=True)["rows"] == 24


class Editing:
    """An executor that edits a file before the third chunk of points."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def map(self, work: Any, tasks: Any) -> Iterator[Any]:
        for number, task in enumerate(tasks):
            if number == 2:
                self.path.write_text(f"{self.path.read_text()}\n# edited\n")
            yield work(task)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("installed/simulator/costs/calibration/h100-sxm.yaml", "calibration"),
        ("installed/simulator/job/framework.py", "code"),
        ("model.yaml", "file model.yaml"),
    ],
)
def test_a_change_of_a_running_sweep_ends_it(
    place: str, kind: str, installation: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / place, tmp_path / "rows.parquet"
    (tmp_path / "model.yaml").write_text("{preset: gpt2-124m}")
    of = load_sweep({**GRID, "job": {**JOB, "model": "model.yaml"}}, tmp_path)
    before = path.read_text()
    with pytest.raises(PlanError, match=rf"changed: {kind}; 8 of 32 points are kept in .*undo the change first"):
        run(of, out, Editing(path))
    path.write_text(before)
    begin_process(monkeypatch)
    made = Counting()
    assert run(of, out, made)["rows"] == 24 and made.asked == list(range(8, 32, 4))


def test_a_file_changed_since_the_import_is_refused(
    installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IMPORTED_NS", (installation / "sweeps/run.py").stat().st_mtime_ns - 1)
    for place in installation.rglob("*.yaml"):
        os.utime(place, ns=(0, 0))
    with pytest.raises(PlanError, match=r"changed: code\. Run the command again"):
        run(load_sweep(GRID), tmp_path / "rows.parquet", Lazy())
    assert not (tmp_path / "rows.parquet.parts").exists()


@pytest.mark.parametrize("stated", ["0f3a", None, 7, [], {}, {"code": 1}])
def test_a_fingerprint_of_unknown_form_is_another_version(stated: Any, tmp_path: Path) -> None:
    assert list(parse_fingerprint(stated)) == ["version"]
    of, out = sweep(vary={"plan.tp": [1]}), tmp_path / "rows.parquet"
    parts_folder(out).mkdir()
    (parts_folder(out) / "_sweep.json").write_text(json.dumps({"fingerprint": stated}))
    with pytest.raises(PlanError, match="is damaged, or was written by another version of meshcast"):
        run(of, out, Lazy())


@pytest.mark.parametrize("note", ["[" * 100_000, "{", "\xff", '{"fingerprint": {}, "fingerprint": {}}'])
def test_a_note_that_is_no_json_is_damaged(note: str, tmp_path: Path) -> None:
    of, out = sweep(vary={"plan.tp": [1]}), tmp_path / "rows.parquet"
    parts_folder(out).mkdir()
    (parts_folder(out) / "_sweep.json").write_bytes(note.encode("latin-1"))
    with pytest.raises(PlanError, match=r"is damaged, .*\. Name another --out, or discard these rows with --restart"):
        run(of, out, Lazy())


# ------------------------------------------------------------------------------------- damaged parts


def damage(content: bytes, chance: random.Random) -> bytes:
    """The content cut short, with a bit flipped, or with bytes replaced; most of them at the end, in the footer."""
    found = bytearray(content)
    at = chance.choice((chance.randrange(len(found)), len(found) - chance.randrange(1, 3000)))
    match chance.randrange(3):
        case 0:
            return bytes(found[:at])
        case 1:
            found[at] ^= 1 << chance.randrange(8)
        case 2:
            found[at : at + 32] = chance.randbytes(chance.randrange(64))
    return bytes(found)


def test_no_damage_to_a_part_changes_a_row(small_chunks: None, tmp_path: Path) -> None:
    of, out, chance = load_sweep(GRID), tmp_path / "rows.parquet", random.Random(7)
    stop(of, out, 4)
    part = parts_folder(out) / "0000002.parquet"
    content, store = part.read_bytes(), Store(out, of, 4)
    whole, refused = store._read_part(2), 0
    assert whole is not None
    for _ in range(damages := 300 if EVERY_EXAMPLE else 60):
        part.write_bytes(damage(content, chance))
        found = store._read_part(2)
        refused += found is None
        assert found is None or found.equals(whole)
    assert refused > 2 / 3 * damages


@pytest.mark.parametrize(
    "how",
    drawn(
        ["empty", "cut", "text", "swapped", "other sweep", "folder missing its points"], keep=("empty", "other sweep")
    ),
)
def test_a_part_that_is_not_whole_is_forecast_again(
    how: str, reference: Path, small_chunks: None, tmp_path: Path
) -> None:
    out = tmp_path / "rows.parquet"
    stop(load_sweep(GRID), out, 4)
    parts = parts_folder(out)
    bad, other = parts / "0000001.parquet", parts / "0000002.parquet"
    if how == "swapped":
        shutil.copy(other, bad)
    elif how == "other sweep":
        stop(load_sweep({**GRID, "job": {**JOB, "cluster": "dgx-a100:2"}}), tmp_path / "b.parquet", 4)
        shutil.copy(parts_folder(tmp_path / "b.parquet") / bad.name, bad)
    elif how == "folder missing its points":
        bad.unlink()
    else:
        content = bad.read_bytes()
        bad.write_bytes({"empty": b"", "cut": content[:-5], "text": b"index,status"}[how])
    counting = Counting()
    run(load_sweep(GRID), out, counting)
    assert counting.asked == [4, 16, 20, 24, 28]
    assert out.read_bytes() == reference.read_bytes()


def test_a_part_that_is_damaged_during_the_sweep_is_not_joined(
    reference: Path, small_chunks: None, tmp_path: Path
) -> None:
    out = tmp_path / "rows.parquet"

    def watch(done: int, points: int) -> None:
        if done == 32:
            (parts_folder(out) / "0000003.parquet").write_bytes(b"PAR1")

    with pytest.raises(PlanError, match=r"0000003\.parquet was damaged while the sweep was running"):
        run(load_sweep(GRID), out, Lazy(), watch=watch)
    run(load_sweep(GRID), out, Lazy())
    assert out.read_bytes() == reference.read_bytes()


def test_a_damaged_result_is_one_message(reference: Path, small_chunks: None, tmp_path: Path) -> None:
    content, chance, answered = reference.read_bytes(), random.Random(3), 0
    out, of = tmp_path / "rows.parquet", load_sweep(GRID)
    expected = {**run(of, reference), "out": str(out)}
    for _ in range(damages := 100 if EVERY_EXAMPLE else 30):
        out.write_bytes(damage(content, chance))
        try:
            assert run(of, out) == expected  # the damage is in bytes that no reader needs
            answered += 1
        except PlanError as error:
            assert "damaged" in str(error) or "another sweep" in str(error)
    assert answered < damages / 2
    assert pq.read_table(reference).num_rows == 24


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.take([*range(24), 3]), "order, each once"),
        (lambda rows: rows.take([*range(23, -1, -1)]), "order, each once"),
        (lambda rows: rows.set_column(rows.schema.get_field_index("status"), "status", [["fine"] * 24]), "'fine'"),
    ],
)
def test_an_edited_result_is_damaged(
    reference: Path, small_chunks: None, tmp_path: Path, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    out = tmp_path / "rows.parquet"
    pq.write_table(change(pq.read_table(reference)), out)
    with pytest.raises(PlanError, match=f"is damaged .*{words}"):
        run(load_sweep(GRID), out)


def test_a_result_without_its_last_rows_is_damaged(reference: Path, small_chunks: None, tmp_path: Path) -> None:
    out, rows = tmp_path / "rows.parquet", pq.read_table(reference)
    with pq.ParquetWriter(out, rows.schema) as writer:
        writer.write_table(rows.slice(0, len(rows) - 4))
        writer.add_key_value_metadata({"rows": str(len(rows))})
    with pytest.raises(PlanError, match=f"it has {len(rows) - 4} rows, and {len(rows)} were written"):
        run(load_sweep(GRID), out)
