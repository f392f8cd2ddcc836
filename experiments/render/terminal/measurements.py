"""``meshcast validate kernels|stages|distributed`` of measurement files: the comparison and its page."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.safe_console import SafeConsole
from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import Column, Format, Table, TableCell, formatted_numbers
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import GIB
from meshcast.validation.measurements import row_errors
from meshcast.validation.measurements.measurement import read

PLOTS = ("forecasts",)
"""Names of the plots."""

MAX_ROWS = 400
"""Maximum number of rows of a file on the page; ``--json`` has all of them."""


PAGE_WIDTH = 120
"""Width of a written page [characters]."""


def validate_files(kind: str, paths: Sequence[Path]) -> dict[str, Any]:
    """Compares measurement files with their forecasts. Raises PlanError for files of another kind."""
    files = []
    for path in paths:
        measurement = read(path)
        if measurement.kind != kind:
            rule = f"the file is of kind {measurement.kind}, not {kind}"
            remedy = (
                f"Write validate {measurement.kind}"
                if measurement.kind != "calibration"
                else "It is what a calibration was fitted to"
            )
            raise PlanError("--data", rule, remedy, str(path))
        files.append((str(path), measurement))
    rows = row_errors.row_answers(files)
    keys = ("title", "forecast_written", "measured", "calibration", "command")
    described = [
        {"file": name, **{key: getattr(measurement, key) for key in keys}, "notes": list(measurement.notes)}
        for name, measurement in files
    ]
    return {"rows": rows, "summary": row_errors.summarize(rows) | {"files": described}}


def page(answer: Mapping[str, Any], brief: bool = False) -> RenderableType:
    """Returns all rows, then the errors of each forecast. brief: no rows of kernels and collectives."""
    summary, rows = answer["summary"], answer["rows"]
    parts: list[RenderableType] = []
    if brief:
        kept = [row for row in rows if row["name"].partition(" ")[0] in ("step", "rank", "device")]
        titles = ", ".join(file["title"] for file in summary["files"])
        parts = [rows_table(kept, files=True) if kept else Text(titles)]
    for head in () if brief else summary["files"]:
        of_file = [row for row in rows if row["file"] == head["file"]]
        when = f"forecast {head['forecast_written']}, measured {head['measured'] or 'not yet'}"
        parts += [Text(head["title"], "bold"), Text(f"{head['file']}: {when}", "dim")]
        parts += [rows_table(of_file[:MAX_ROWS]), *(Text(f"note      {note}", "dim") for note in head["notes"]), Text()]
        if len(of_file) > MAX_ROWS:
            parts.append(Text(f"{len(of_file) - MAX_ROWS:,} rows more with --json", "dim"))
    parts.append(errors_table(summary["forecasts"]))
    if summary["classes"]:
        parts += [Text(), errors_table(summary["classes"])]
    noise = row_errors.median_scatter(rows)
    if not math.isnan(noise):
        parts.append(
            Text(f"spread of the samples themselves: {noise:.1%} (half the width of their middle 80 %)", "dim")
        )
    return Group(*parts)


def write_page(answers: Iterable[Mapping[str, Any]], path: Path, brief: bool = False) -> Path:
    """Writes the comparison of measurement files with their forecasts as text.

    answers: of `validate_files`.
    brief: see `page`. Raises OSError if the file cannot be written.
    """
    text = io.StringIO()
    console = SafeConsole(text, PAGE_WIDTH, color_system=None, legacy_windows=False)
    for answer in answers:
        console.print_page(page(answer, brief), Text())
    write_file(path, text.getvalue())
    return path


def rows_table(rows: Sequence[Mapping[str, Any]], files: bool = False) -> RenderableType:
    """Returns measured values, and each forecast with its error. files: groups are named by their files."""
    sources = [source for source in ("catalog", "calibration") if any(source in row["predicted"] for row in rows)]
    errors = [column for source in sources for column in ((source, ""), ("error", "+.1p"))]
    table = measurement_table("measurement", ("measured", ""), ("±", ".0%"), *errors)
    group = ""
    for row in rows:
        name = f"{Path(row['file']).stem}: {row['group']}" if files else row["group"]
        if name != group:
            group = name
            table.end_section()
            table.add(TableCell(group, "bold"))
        scatter = row["spread"] if row["measured"] is not None and row["samples"] > 2 else None
        forecasts = [(format_amount(row["predicted"].get(by), row["quantity"]), row["error"].get(by)) for by in sources]
        measured = format_amount(row["measured"], row["quantity"])
        table.add(f"  {row['name']}", measured, scatter, *chain.from_iterable(forecasts))
    return show_table(table)


def errors_table(forecasts: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Returns errors of every quantity, or class of rows, and forecast."""
    errors = [(head, ".1p") for head in ("median", "p90", "worst")]
    ends = ("bias", "+.1p"), ("in 90%", ".0p")
    table = measurement_table("forecast of, by", ("rows", ","), *errors, *ends)
    for errors_of in forecasts:
        figures = [errors_of[key] for key in ("rows", "median", "p90", "worst", "bias", "inside_90")]
        table.add(f"{errors_of.get('quantity') or errors_of['class']}, {errors_of['by']}", *figures)
    return show_table(table)


def format_amount(value: float | None, quantity: str) -> str:
    """Formats seconds or bytes with the unit that suits the value."""
    if value is None:
        return ""
    if quantity == "bytes":
        return f"{value / GIB:.3f} GiB" if value >= GIB else f"{value / 2**20:.2f} MiB"
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def measurement_table(first: str, *columns: tuple[str, Format]) -> Table:
    """Makes a table without rows.

    first: head of its first column.
    columns: heads and formats of those of numbers.
    """
    return Table(Column(first, wrap="never"), *formatted_numbers(*columns, wrap="never"), edges=False)


def draw_plots(answer: Mapping[str, Any], files: Mapping[str, Path], width: Width = "page") -> None:
    """Draws the plots. Raises OSError if a file cannot be written."""
    for path in files.values():
        from meshcast.experiments.render.matplotlib.measured.measurements import forecasts
        from meshcast.experiments.render.matplotlib.sheet import save

        path.parent.mkdir(exist_ok=True)
        save(lambda: forecasts(answer["rows"], answer["summary"]["files"]), path, width)
