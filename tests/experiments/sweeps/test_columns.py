"""Tables of rows: the same as `pyarrow.table` makes of them, without pandas."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.experiments.sweeps.columns import make_table

SCHEMA = pa.schema(
    [("count", pa.int64()), ("figure", pa.float64()), ("flag", pa.bool_()), ("text", pa.string())], {"meshcast": "{}"}
)
CELLS = {
    "count": st.integers(-(2**63), 2**63 - 1),
    "figure": st.floats(allow_nan=False) | st.integers(-(2**53), 2**53),
    "flag": st.booleans(),
    "text": st.text(),
}


@given(st.lists(st.fixed_dictionaries({}, optional={name: st.none() | cells for name, cells in CELLS.items()})))
def test_a_table_is_that_of_arrow(rows: list[dict[str, Any]]) -> None:
    columns = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
    table = make_table(rows, SCHEMA)
    table.validate(full=True)
    assert table.equals(pa.table(columns, schema=SCHEMA), check_metadata=True)


def test_a_value_that_is_no_text_is_written_as_json_in_a_column_of_texts() -> None:
    values = [[1, 2], {"a": None}, 2.5, True, "text", None]
    table = make_table([{"text": value} for value in values], SCHEMA)
    assert table["text"].to_pylist() == [*map(json.dumps, values[:4]), "text", None]


@pytest.mark.parametrize("row", [{"count": 1.5}, {"count": "1"}, {"figure": "1"}, {"flag": 0}, {"flag": "yes"}])
def test_a_value_of_another_type_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        make_table([row], SCHEMA)


def test_a_table_is_written_without_pandas() -> None:
    code = """
import io, sys
import pyarrow as pa, pyarrow.parquet as pq
from meshcast.experiments.sweeps.columns import make_table
table = make_table([{"a": 1, "b": "x"}, {"a": None}], pa.schema([("a", pa.int64()), ("b", pa.string())]))
pq.write_table(table, io.BytesIO())
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
