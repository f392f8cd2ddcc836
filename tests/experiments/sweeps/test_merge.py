"""Shards of a sweep, and the file that `merge` makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.sweeps import output
from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.merge import merge
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.sweeps.store import Shard
from meshcast.hardware.errors import PlanError
from tests.experiments.sweeps.sweeps import GRID, Counting, Lazy, know_forecasts
from tests.experiments.sweeps.test_sweep_rows import Stopping

pytestmark = pytest.mark.usefixtures("known_forecasts")


@pytest.fixture(scope="module")
def shards(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The three shards of GRID, in chunks of four."""
    with know_forecasts(reference):
        return make_shards(tmp_path_factory.mktemp("shards"), 3)


def make_shards(folder: Path, of: int, grid: dict[str, Any] = GRID, chunk: int = 4) -> list[Path]:
    made = [folder / f"part-{number}.parquet" for number in range(of)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "CHUNK", chunk)
        for number, path in enumerate(made):
            run(load_sweep(grid), path, Lazy(), part=Shard(number, of))
    return made


def refused(paths: list[Path], out: Path) -> str:
    """The message of a merge that is refused, which leaves nothing behind."""
    before = out.read_bytes() if out.is_file() else None
    with pytest.raises(PlanError) as error:
        merge(paths, out)
    assert (out.read_bytes() if out.is_file() else None) == before and not parts_folder(out).exists()
    return str(error.value)


# ------------------------------------------------------------------------------------------ the same bytes


@pytest.mark.parametrize("group", [5, 20_000])
def test_merged_shards_are_the_whole_sweep(
    group: int, shards: list[Path], small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "GROUP", group)
    whole, joined, seen = tmp_path / "whole.parquet", tmp_path / "joined.parquet", list[int]()
    summary = run(load_sweep(GRID), whole, Lazy())
    fields, answer = merge([shards[2], shards[0], shards[1]], joined, lambda done, points: seen.append(done))
    assert joined.read_bytes() == whole.read_bytes() and not parts_folder(joined).exists()
    assert answer == {**summary, "out": str(joined)} and fields == list(GRID["vary"])
    assert seen == list(range(4, 33, 4))
    merge(shards, joined)  # again, onto itself
    assert joined.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("of", "chunk"), [(1, 4), (2, 5), (9, 4)])
def test_any_number_of_shards_and_a_short_last_chunk(
    of: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also more shards than chunks: the others have no rows."""
    monkeypatch.setattr(sweeps, "CHUNK", chunk)
    run(load_sweep(GRID), tmp_path / "whole.parquet", Lazy())
    made = make_shards(tmp_path, of, GRID, chunk)
    merge(made, tmp_path / "joined.parquet")
    assert (tmp_path / "joined.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_a_shard_goes_on_from_its_own_chunks(shards: list[Path], small_chunks: None, tmp_path: Path) -> None:
    out, seen, counting = tmp_path / "part.parquet", list[int](), Counting()
    with pytest.raises(KeyboardInterrupt):
        run(load_sweep(GRID), out, Stopping(1), part=Shard(1, 3))
    with pytest.raises(PlanError, match=r"part\.parquet\.parts holds rows of another sweep; changed: shard"):
        run(load_sweep(GRID), out, Lazy(), part=Shard(2, 3))
    run(load_sweep(GRID), out, counting, part=Shard(1, 3), watch=lambda done, points: seen.append(done))
    assert counting.asked == [16, 28] and seen == [4, 8, 12]
    assert out.read_bytes() == shards[1].read_bytes()
    with pytest.raises(PlanError, match=r"part\.parquet holds rows of another sweep; changed: shard"):
        run(load_sweep(GRID), out, Lazy())


def test_the_commands(shards: list[Path], reference: Path, tmp_path: Path, small_chunks: None) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(GRID))
    words = ["sweep", str(tmp_path / "sweep.json"), "--workers", "1", "--out", str(tmp_path / "part-1.parquet")]
    result = CliRunner().invoke(app, [*words, "--shard", "1/3"])
    assert result.exit_code == 0 and result.stdout.startswith("12 points: ")
    assert (tmp_path / "part-1.parquet").read_bytes() == shards[1].read_bytes()
    parts, out = [str(shards[0]), str(tmp_path / "part-1.parquet"), str(shards[2])], str(tmp_path / "rows.parquet")
    result = CliRunner().invoke(app, ["merge", *parts, "--out", out])
    assert result.exit_code == 0 and result.stdout.startswith("32 points: 20 fit, 0 do not fit, 4 invalid, 8 left out")
    assert Path(out).read_bytes() == reference.read_bytes()
    again = CliRunner().invoke(app, ["merge", *parts, "--out", out, "--json"])
    assert json.loads(again.stdout)["rows"] == 24


# ------------------------------------------------------------------------------------------ what is refused


def test_missing_and_doubled_shards_are_named(shards: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    assert refused([shards[0], shards[2]], out).startswith(
        f"{shards[0]}: it is shard 0/3 of a sweep, of which shard 1 is missing"
    )
    assert "of which shards 0, 2 are missing" in refused([shards[1]], out)
    copy = tmp_path / "copy.parquet"
    shutil.copy(shards[1], copy)
    assert refused([*shards, copy], out).startswith(f"{copy}: it is shard 1/3, as {shards[1]} is")
    assert refused([*shards, shards[1]], out) == f"{shards[1]}: it is named twice. Name it once"
    assert refused([tmp_path], out).startswith(f"{tmp_path}: it is a folder. Name the results of")


def test_a_shard_is_not_overwritten(shards: list[Path]) -> None:
    before = shards[1].read_bytes()
    words = f"--out is {str(shards[1])!r}: it is one of the shards, which would be overwritten. Name another file"
    assert refused(shards, shards[1]) == words and shards[1].read_bytes() == before


def test_other_sweeps_and_other_divisions_are_named(shards: list[Path], reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    (tmp_path / "other").mkdir()
    other = make_shards(tmp_path / "other", 3, {**GRID, "where": ["plan.tp < 4"]})[1]
    assert refused([shards[0], other, shards[2]], out).startswith(
        f"{other}: it holds rows of another sweep than {shards[0]}; other: points"
    )
    (tmp_path / "two").mkdir()
    half = make_shards(tmp_path / "two", 2)[1]
    assert refused([shards[0], half], out).startswith(f"{half}: it is shard 1/2, and {shards[0]} is shard 0/3")
    assert refused([shards[0], reference], out).startswith(f"{reference}: it is shard 0/1, and")
    later = tmp_path / "later.parquet"
    table = pq.read_table(shards[1])
    about = json.loads(table.schema.metadata[b"meshcast"])
    pq.write_table(table.replace_schema_metadata({"meshcast": json.dumps({**about, "version": "9"})}), later)
    assert refused([shards[0], later], out).startswith(f"{later}: it was written by another version of meshcast")


def _without_a_row(table: pa.Table) -> pa.Table:
    return table.set_column(0, "index", pa.array([0, *table["index"].to_pylist()[1:]]))


def _as_text(table: pa.Table) -> pa.Table:
    at = table.schema.names.index("tokens_per_s_per_gpu")
    return table.set_column(at, "tokens_per_s_per_gpu", table["tokens_per_s_per_gpu"].cast(pa.string()))


@pytest.mark.parametrize(
    "change",
    [
        _without_a_row,
        _as_text,
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),
        lambda table: table.drop_columns(["limits"]),
        lambda table: table.replace_schema_metadata(None),
        lambda table: table.replace_schema_metadata({"meshcast": '{"fingerprint": {"shard": "1/3"}}'}),
    ],
    ids=["a row of another shard", "a figure as text", "a row too much", "a column less", "no metadata", "no points"],
)
def test_files_that_were_changed_are_named(change: Any, shards: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    pq.write_table(change(pq.read_table(shards[1])), bad)
    message = refused([shards[0], bad, shards[2]], tmp_path / "rows.parquet")
    assert message.startswith(f"{bad}: it is no result of `meshcast sweep`, or is damaged")


def test_damaged_and_missing_files_are_named(shards: list[Path], tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.parquet", tmp_path / "rows.parquet"
    assert refused([shards[0], bad], out).startswith(f"{bad}: no such file")
    content = bytearray(shards[1].read_bytes())
    for at in range(10, len(content), 997):
        flipped = content.copy()
        flipped[at] ^= 16
        bad.write_bytes(flipped)
        try:
            merge([shards[0], bad, shards[2]], out)
        except PlanError as error:
            assert str(error).startswith(f"{bad}: it ")
        else:  # a bit that no row depends on
            merge(shards, tmp_path / "good.parquet")
            assert pq.read_table(out).equals(pq.read_table(tmp_path / "good.parquet"))
            out.unlink()


def test_nothing_but_the_same_result_is_replaced(shards: list[Path], small_chunks: None, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    out.write_text("mine")
    assert "is not the result of a sweep" in refused(shards, out)
    out.unlink()
    shutil.copy(shards[0], out)
    assert "holds rows of another sweep; changed: shard" in refused(shards, out)
    out.unlink()
    with pytest.raises(KeyboardInterrupt):
        run(load_sweep(GRID), out, Stopping(2))
    with pytest.raises(PlanError, match=r"rows\.parquet\.parts holds rows of an unfinished sweep"):
        merge(shards, out)
    assert len(list(parts_folder(out).glob("0*.parquet"))) == 2
    assert "there is no folder" in refused(shards, tmp_path / "none" / "rows.parquet")
