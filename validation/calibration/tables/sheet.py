"""CSV files: columns of numbers and of words, and the faults of single rows.

A file that cannot be read as a whole is refused with a single message. A row that cannot be read keeps its place and is
answered with a reason, like a row that no cost model can price.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from meshcast.hardware.documents.input_file import DATA, Unreadable, parse_csv, read_text
from meshcast.hardware.errors import PlanError, shorten

WORDS = frozenset(
    {"gpu", "dtype", "out_dtype", "op", "pass", "layout", "accumulate", "causal", "distribution"}
    | {"library", "interconnect", "algo", "source"}
)
"""Columns of words; all other columns of a format are numbers."""
NAMES = ("gpu", "dtype", "out_dtype", "op", "pass")
"""Columns of words that are read without regard to case."""
BLANK = frozenset({"interconnect", "source"})
"""Columns of a format that a row may leave empty."""

MISSING = ("", "nan")
"""Cells that hold nothing."""

MIN_NUMBER, MAX_NUMBER = 1e-9, 1e15
"""Range of sizes and times in whatever unit: cost models are not asked about numbers outside of it."""
FEWER = {"num_experts": 4096, "topk": 4096, "gpus": 2**17, "nodes": 2**17}
"""Largest values of columns over whose numbers loops run."""


class CsvSheet(NamedTuple):
    """A file as text.

    Attributes:
        path: of the file.
        columns: its header.
        rows: its cells, without empty lines.
    """

    path: Path
    columns: list[str]
    rows: list[list[str]]

    def filled_columns(self, columns: Collection[str]) -> list[set[str]]:
        """Returns those of these columns that each row fills."""
        places = [(place, name) for place, name in enumerate(self.columns) if name in columns]
        return [
            {name for place, name in places if place < len(row) and row[place].strip().lower() not in MISSING}
            for row in self.rows
        ]

    def frame(self, wanted: Collection[str], needed: Collection[str]) -> tuple[pd.DataFrame, dict[int, str]]:
        """Returns the columns `wanted` that the file has, and the faults of rows by their numbers from 0.

        needed: columns that a row must fill.
        """
        faults: dict[int, str] = {}
        for at, row in enumerate(self.rows):
            if len(row) > len(self.columns) and any(cell.strip() for cell in row[len(self.columns) :]):
                faults[at] = f"the row has {len(row)} fields, the header {len(self.columns)}"
        columns: dict[str, object] = {}
        for place, name in enumerate(self.columns):
            if name not in wanted:
                continue
            if name in columns:
                raise PlanError("--data", f"the column {name} is given twice", "Keep one of them", str(self.path))
            cells = [row[place].strip() if place < len(row) else "" for row in self.rows]
            for at, cell in enumerate(cells):
                stated = "" if name in WORDS and cell else _fault(name, cell, name in needed and name not in BLANK)
                if stated:
                    faults.setdefault(at, stated)
            if name in WORDS:
                columns[name] = [cell.lower() if name in NAMES else cell for cell in cells]
            else:
                columns[name] = np.array([_number(cell) for cell in cells], float)
        return pd.DataFrame(columns, index=range(len(self.rows))), faults


def _fault(name: str, cell: str, needed: bool) -> str:
    """Returns the fault of a cell, "" if it has none."""
    if cell.lower() in MISSING:
        return f"{name} is missing" if needed else ""
    value, most = _number(cell), FEWER.get(name, MAX_NUMBER)
    if math.isnan(value):
        return f"{name} is {shorten(cell, 40)}, which is no number"
    if math.isinf(value):
        return f"{name} is {shorten(cell, 40)}, which is no finite number"
    if abs(value) > most:
        return f"{name} is {value:g}: nothing is forecast above {most:g}"
    if 0 < value < MIN_NUMBER:
        return f"{name} is {value:g}: nothing is forecast below {MIN_NUMBER:g}"
    return ""


def _number(cell: str) -> float:
    """Returns the number in a cell, NaN if it holds none."""
    try:
        return float(cell) if "_" not in cell else math.nan  # Python reads 1_000, tables do not mean it
    except ValueError:
        return math.nan


def sheet(path: Path) -> CsvSheet:
    """Reads a .csv or .csv.gz file. Raises PlanError for a file that cannot be read."""
    try:
        rows = [row.cells for row in parse_csv(read_text(path, DATA)) if row.cells]
    except Unreadable as error:
        raise error.error(PlanError, "--data", "Name a .csv or .csv.gz file, saved as UTF-8", str(path)) from None
    if not rows:
        raise _unread(path, "it is empty", "Name a CSV file with a header")
    columns = rows[0]
    for mark, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(columns) == 1 and mark in columns[0]:
            raise _unread(path, f"its columns are separated by {word}", "Separate them by commas")
    return CsvSheet(path, columns, rows[1:])


def _unread(path: Path, reason: str, remedy: str) -> PlanError:
    return PlanError("--data", f"cannot be read ({reason})", remedy, str(path))
