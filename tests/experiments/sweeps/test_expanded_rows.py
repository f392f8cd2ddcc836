"""A small Parquet file may hold any number of bytes: rows are counted while they are read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshcast.experiments.sweeps import selection
from meshcast.hardware.errors import PlanError


def write_rows(path: Path, word: str, rows: int) -> None:
    columns = {"index": range(rows), "plan.tp": [1] * rows, "status": ["invalid"] * rows, "reason": [word] * rows}
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path, compression="zstd")


@pytest.mark.parametrize("word", ["no" * 50_000, "no"])
def test_rows_are_counted_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    write_rows(path := tmp_path / "rows.parquet", word, 300)
    monkeypatch.setattr(selection, "BATCH", 10)
    monkeypatch.setattr(selection, "MAX_BYTES", 2_000_000)
    assert path.stat().st_size < 20_000
    if len(word) == 2:
        assert len(selection.read_rows(path)) == 300
        return
    before = pa.total_allocated_bytes()
    with pytest.raises(PlanError, match="more than 2,000,000 decompressed bytes"):
        selection.read_rows(path)
    assert pa.total_allocated_bytes() <= before + 2_000_000
