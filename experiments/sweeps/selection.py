"""Selects what ``meshcast plot`` shows of a finished sweep: its rows, the two fields of the heatmap, and the cell that
``--why`` asks about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.figures import FIGURES

Row = dict[str, Any]

REMEDY = "Name the --out of a finished sweep, or run the sweep again"

MAX_ROWS = 400_000
"""Most rows of a sweep that are read into memory: some 3 kB each."""

MAX_BYTES = 500_000_000
"""Most bytes of rows as Arrow holds them: a file of a few kB may hold any number."""

SHOWN = ("step_time_s", "tokens_per_s_per_gpu")
"""Figures that every row of a plan that fits has."""

BATCH = 1_000
"""Rows that are read at a time."""


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a sweep's Parquet file. Raises PlanError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        rule = "it is a folder" if path.is_dir() else "no such file"
        raise PlanError(str(path), rule, "Name the --out of a finished sweep")
    try:
        about = pq.read_metadata(path)
        if about.num_rows > MAX_ROWS:
            rule = f"{about.num_rows:,} rows, at most {MAX_ROWS:,} are drawn"
            raise PlanError(str(path), rule, "Draw a sweep of fewer points")
        if twice := [name for name, times in Counter(about.schema.names).items() if times > 1]:
            raise PlanError(str(path), f"the column {twice[0]!r} is there twice", "Name the --out of a finished sweep")
        rows = _read_within(path)
        if len(rows) != about.num_rows:
            raise PlanError(str(path), "it is damaged: rows are missing", REMEDY)
    except OSError as error:
        rule = f"it cannot be read ({error.strerror or 'not a Parquet file, or damaged'})"
        raise PlanError(str(path), rule, REMEDY) from None
    except (pa.ArrowException, ValueError):  # ValueError: a name that is not UTF-8
        described = path.suffix.lower() in (".yaml", ".yml", ".json")
        remedy = f"{REMEDY}; a job is drawn by meshcast plot breakdown {path}" if described else REMEDY
        raise PlanError(str(path), "not a Parquet file, or damaged", remedy) from None
    if rows and {"index", "lost_work_s"} <= set(rows[0]):
        rule = "it has rows of simulated runs, not of a sweep or a search"
        raise PlanError(str(path), rule, "Draw runs with meshcast run JOB --plot FOLDER/, or read them with pandas")
    if not rows or not {"index", "status", "reason"} <= set(rows[0]):
        raise PlanError(str(path), "it has no rows of a sweep", "Name the --out of a finished sweep")
    check_rows(str(path), rows, "Name the --out of a finished sweep")
    return rows


STATUSES = {"fits": "fit", "tight": "are tight", "does-not-fit": "do not fit", "invalid": "invalid"}
"""What the status of a row may be, with the words for several rows."""

LARGE = ("tight", "does-not-fit")
"""Statuses of plans that are forecast and may lack memory."""

LARGEST_FIGURE = 1e30
"""Largest figure of a row: a page draws them with 32 bits."""


def check_rows(where: str, rows: Sequence[Row], remedy: str) -> None:
    """Raises PlanError for rows with a figure that is no finite number, or a status that no row has."""
    for number, row in enumerate(rows, 1):
        place = f"{where} row {number}"
        if not isinstance(row["status"], str) or row["status"] not in STATUSES:
            raise PlanError(f"{place} status", f"it is one of {', '.join(STATUSES)}", remedy, row["status"])
        for name, cell in row.items():
            is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
            stands = abs(cell) <= LARGEST_FIGURE if is_number else name not in FIGURES or cell is None
            if not stands:
                raise PlanError(f"{place} {name}", "it is a finite number, or empty", remedy, cell)
        if row["status"] == "fits" and (left_out := next((name for name in SHOWN if row.get(name) is None), None)):
            raise PlanError(f"{place} {left_out}", "it is empty, and the plan fits", remedy)
        if not isinstance(row["reason"], str | None):
            raise PlanError(f"{place} reason", "it is text, or empty", remedy, row["reason"])


def _read_within(path: Path) -> list[Row]:
    """Reads all rows. Raises PlanError as soon as they take more than `MAX_BYTES`."""
    import pyarrow.parquet as pq

    rows: list[Row] = []
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
        left = MAX_BYTES - max((group.total_byte_size for group in groups), default=0)
        for batch in file.iter_batches(BATCH) if left >= 0 else ():
            left -= batch.nbytes
            if left < 0:
                break
            rows += batch.to_pylist()
    if left < 0:
        rule = f"more than {MAX_BYTES:,} decompressed bytes, which is the most that is read"
        raise PlanError(str(path), rule, "Read it with pandas, or draw a sweep of fewer points and fields")
    return rows


def varied_fields(rows: list[Row]) -> list[str]:
    names = list(rows[0])
    return names[1 : names.index("status")]


def choose_axes(rows: list[Row], x: str | None, y: str | None) -> tuple[str, str]:
    """Returns the fields of the heatmap across and down; in place of None, the first that takes several values."""
    several = [name for name in varied_fields(rows) if len({repr(row[name]) for row in rows}) > 1]
    left = [name for name in several if name not in (x, y)]
    if x is not None and x == y:
        raise PlanError("--y", "it is the field of --x", f"Name another: {', '.join(left) or 'vary two fields'}", y)
    x = x or (left.pop(0) if left else None)
    y = y or (left.pop(0) if left else None)
    if x is None or y is None:
        varying = f"only {several[0]} takes" if len(several) == 1 else "none takes"
        remedy = "Vary a second field; one alone is compared by meshcast plot breakdown JOB JOB..., or a plot of its "
        remedy += "rows with pandas"
        raise PlanError("--x", f"a heatmap has two fields, and of this sweep {varying} several values", remedy)
    return x, y


def parse_cell(words: str, rows: list[Row], x: str, y: str) -> tuple[Any, Any]:
    """Parses a cell like ``4,8`` as values of `x` and `y`. Raises PlanError if the sweep has no such values."""
    parts = [part.strip() for part in words.split(",")]
    if len(parts) != 2:
        raise PlanError("--why", f"it names a value of {x} and one of {y}", "Write it like --why 4,8", words)
    cell = []
    for part, name in zip(parts, (x, y), strict=True):
        known = {_spell(row[name]): row[name] for row in rows}
        if part not in known:
            values = ", ".join(sorted(known, key=lambda word: (len(word), word))[:20])
            raise PlanError("--why", f"the sweep has no {name} of {part}", f"Its values: {values}", words)
        cell.append(known[part])
    return cell[0], cell[1]


def _spell(value: Any) -> str:
    """Returns a value as the heatmap labels it."""
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
