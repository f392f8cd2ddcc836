"""The sample in tests/data: few rows, each with its source, word for word from the full tables."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
TABLES = sorted(path.name for path in DATA.glob("*.csv"))


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_source_that_the_readme_names(name: str) -> None:
    import pandas as pd

    known = re.findall(
        r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", (DATA / "README.md").read_text("utf-8"), re.M))
    )
    table = pd.read_csv(DATA / name)
    assert 0 < len(table) <= 200
    assert all(source.startswith(tuple(known)) for source in table["source"])


def test_every_published_run_has_a_source() -> None:
    rows = [json.loads(line) for line in (DATA / "published_runs.jsonl").read_text("utf-8").splitlines()]
    assert 0 < len(rows) <= 200 and all(len(row["source"]) > 10 for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "dispatch_hybrid_ep.csv"])
def test_rows_are_rows_of_the_full_table(name: str, tables: Any) -> None:
    (file,) = tables.files(name.removesuffix(".csv"))
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as full:
        rows = set(full)
    assert set((DATA / name).read_text("utf-8").splitlines(keepends=True)) <= rows
