"""Columns of rows as Arrow's, without pandas: `pyarrow.array` imports it to look for its types in any list, which takes
as much memory as a thousand forecasts, and half a second."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Cell = bool | int | float | str | None


def make_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Returns a table of rows, with columns of flags, whole numbers, numbers and texts; in a column of text, a value
    that is not text is written as JSON. Raises TypeError for a value of another type."""
    import pyarrow as pa

    columns = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        cells = [row.get(name) for row in rows]
        if pa.types.is_string(kind):
            cells = [cell if isinstance(cell, str | None) else json.dumps(cell) for cell in cells]
        columns.append(_make_column(cells, kind))
    return pa.Table.from_arrays(columns, schema=schema)


def _make_column(cells: Sequence[Cell], kind: pa.DataType) -> pa.Array:
    """Returns a column of Arrow. kind: of its cells."""
    import pyarrow as pa

    present = [cell is not None for cell in cells]
    validity = None if all(present) else _pack(present)
    if pa.types.is_string(kind):
        texts = [b"" if cell is None else str.encode(cell) for cell in cells]  # type: ignore[arg-type]
        ends = array("i", accumulate(map(len, texts), initial=0))
        return pa.Array.from_buffers(kind, len(cells), [validity, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    if pa.types.is_boolean(kind):
        if not all(isinstance(cell, bool | None) for cell in cells):
            raise TypeError("a flag is true or false")
        values = _pack([bool(cell) for cell in cells])
    else:
        code = {pa.int64(): "q", pa.float64(): "d"}[kind]
        values = pa.py_buffer(array(code, (0 if cell is None else cell for cell in cells)))  # type: ignore[type-var]
    return pa.Array.from_buffers(kind, len(cells), [validity, values])


def _pack(flags: Sequence[bool]) -> pa.Buffer:
    """Returns flags as bits."""
    import pyarrow as pa

    return pa.py_buffer(np.packbits(np.array(flags, bool), bitorder="little"))
