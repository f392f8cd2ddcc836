"""``meshcast validate kernels|stages|distributed`` of measurement files: the comparison and its page."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.published import format_percent
from meshcast.experiments.render.terminal.safe_console import SafeConsole
from meshcast.experiments.render.terminal.tables import number_columns, ruled_table
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import GIB
from meshcast.validation.measurements import row_errors
from meshcast.validation.measurements.measurement import read

PLOTS = ("forecasts",)
"""Names of the plots."""

MOST = 400
"""Maximum number of rows of a file on the page; ``--json`` has all of them."""


PAGE_WIDTH = 120
"""Width of a written page [characters]."""


def validate_files(kind: str, paths: Sequence[Path]) -> dict[str, Any]:
    """Compares measurement files with their forecasts. Raises PlanError for files of another kind."""
    files = []
    for path in paths:
        found = read(path)
        if found.kind != kind:
            rule = f"the file is of kind {found.kind}, not {kind}"
            remedy = (
                f"Write validate {found.kind}"
                if found.kind != "calibration"
                else "It is what a calibration was fitted to"
            )
            raise PlanError("--data", rule, remedy, str(path))
        files.append((str(path), found))
    rows = row_errors.row_answers(files)
    keys = ("title", "forecast_written", "measured", "calibration", "command")
    described = [
        {"file": name, **{key: getattr(found, key) for key in keys}, "notes": list(found.notes)}
        for name, found in files
    ]
    return {"rows": rows, "summary": row_errors.summarize(rows) | {"files": described}}


def page(answer: Mapping[str, Any], brief: bool = False) -> RenderableType:
    """All rows, then the errors of each forecast. brief: no rows of kernels and collectives."""
    given, rows = answer["summary"], answer["rows"]
    parts: list[RenderableType] = []
    if brief:
        kept = [row for row in rows if row["name"].partition(" ")[0] in ("step", "rank", "device")]
        parts = [rows_table(kept, files=True)] if kept else [Text(", ".join(one["title"] for one in given["files"]))]
    for head in () if brief else given["files"]:
        own = [row for row in rows if row["file"] == head["file"]]
        when = f"forecast {head['forecast_written']}, measured {head['measured'] or 'not yet'}"
        parts += [Text(head["title"], "bold"), Text(f"{head['file']}: {when}", "dim")]
        parts += [rows_table(own[:MOST]), *(Text(f"note      {note}", "dim") for note in head["notes"]), Text()]
        if len(own) > MOST:
            parts.append(Text(f"{len(own) - MOST:,} rows more with --json", "dim"))
    parts.append(errors_table(given["forecasts"]))
    if given["classes"]:
        parts += [Text(), errors_table(given["classes"])]
    noise = row_errors.median_scatter(rows)
    if not math.isnan(noise):
        parts.append(
            Text(f"spread of the samples themselves: {noise:.1%} (half the width of their middle 80 %)", "dim")
        )
    return Group(*parts)


def write_page(answers: Iterable[Mapping[str, Any]], path: Path, brief: bool = False) -> Path:
    """Writes the comparison of measurement files with their forecasts as text.

    answers: of `validate_files`. brief: see `page`. Raises OSError if the file cannot be written.
    """
    text = io.StringIO()
    console = SafeConsole(text, PAGE_WIDTH, color_system=None, legacy_windows=False)
    for answer in answers:
        console.print_page(page(answer, brief), Text())
    write_file(path, text.getvalue())
    return path


def rows_table(rows: Sequence[Mapping[str, Any]], files: bool = False) -> Table:
    """Measured values, and each forecast with its error. files: groups are named by their files."""
    by = [source for source in ("catalog", "calibration") if any(source in row["predicted"] for row in rows)]
    table = measurement_table("measurement", "measured", "±", *(head for source in by for head in (source, "error")))
    group = ""
    for row in rows:
        own = f"{Path(row['file']).stem}: {row['group']}" if files else row["group"]
        if own != group:
            group = own
            table.add_section()
            table.add_row(Text(group, "bold"))
        cells = [f"  {row['name']}", format_amount(row["measured"], row["quantity"])]
        cells.append(f"{row['spread']:.0%}" if row["measured"] is not None and row["samples"] > 2 else "")
        for source in by:
            cells.append(format_amount(row["predicted"].get(source), row["quantity"]))
            cells.append(format_percent(row["error"].get(source), "+"))
        table.add_row(*cells)
    return table


def errors_table(forecasts: Sequence[Mapping[str, Any]]) -> Table:
    """Errors of every quantity, or class of rows, and forecast."""
    table = measurement_table("forecast of, by", "rows", "median", "p90", "worst", "bias", "in 90%")
    for one in forecasts:
        figures = (format_percent(one[key]) for key in ("median", "p90", "worst"))
        inside = "" if one["inside_90"] is None else format_percent(one["inside_90"], "", 0)
        name = f"{one.get('quantity') or one['class']}, {one['by']}"
        table.add_row(name, f"{one['rows']:,}", *figures, format_percent(one["bias"], "+"), inside)
    return table


def format_amount(value: float | None, quantity: str) -> str:
    """Formats seconds or bytes with the unit that suits the value."""
    if value is None:
        return ""
    if quantity == "bytes":
        return f"{value / GIB:.3f} GiB" if value >= GIB else f"{value / 2**20:.2f} MiB"
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def measurement_table(first: str, *numbers: str) -> Table:
    return ruled_table(Column(first, no_wrap=True), *number_columns(*numbers, no_wrap=True), show_edge=False)


def draw_plots(answer: Mapping[str, Any], files: Mapping[str, Path], width: Width = "page") -> None:
    """Draws the plots. Raises OSError if a file cannot be written."""
    for path in files.values():
        from meshcast.experiments.render.matplotlib.measured import measurements

        path.parent.mkdir(exist_ok=True)
        measurements.draw(answer["rows"], path, width, answer["summary"]["files"])
