"""``meshcast validate`` and ``calibrate`` of kernels and collectives: the work and its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.published import progress
from meshcast.experiments.render.terminal.tables import reasons_table, show_table
from meshcast.experiments.views.table import Column, Format, Table, TableCell, Words, format_percent, formatted_numbers
from meshcast.hardware.errors import CatalogError, PlanError, nearest
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.validation.calibration.collectives import tables as collectives
from meshcast.validation.calibration.collectives.recorded import read_recorded
from meshcast.validation.calibration.kernels import tables as kernels
from meshcast.validation.calibration.tables.calibrated import MIN_ROWS, CalibrationResult
from meshcast.validation.calibration.tables.rows import SampleComparison
from meshcast.validation.calibration.tables.summary import summary
from meshcast.validation.calibration.tables.table import LibraryTable
from meshcast.validation.calibration.write import write

ROOMS: dict[str, Any] = {"kernels": kernels, "collectives": collectives}

PLOTS = ("errors", "ratios")
"""Names of the plots; a file gets the first, a folder all."""


MAX_REASONS = 20
"""Maximum number of reasons of refusals on the page."""


def validate_tables(
    kind: str, paths: Sequence[Path], calibration: Path | None
) -> tuple[dict[str, Any], list[SampleComparison]]:
    """Forecasts every row of the tables: the answer, and the samples that plots are drawn of."""
    room = ROOMS[kind]
    tables = [_read_table(kind, path) for path in paths]
    rows: list[dict[str, Any]] = []
    every: list[SampleComparison] = []
    known = Calibration.from_folder(calibration)
    for table in progress(tables, len(tables), "tables"):
        held = _forecast_samples(room, known, table)
        rows += table.answers(held)
        every += held
    refusals = Counter(row["reason"] for row in rows if row["reason"])
    figures = summary(every, len(rows), room.GOALS) | {"refusals": dict(refusals.most_common())}
    return {"rows": rows, "summary": figures}, every


def _forecast_samples(room: Any, calibration: Calibration, table: LibraryTable) -> list[SampleComparison]:
    """Forecasts the samples of a table; rows that no calibration can price are refused."""
    held: list[SampleComparison] = []
    for sample in table.samples:
        try:
            held.append(room.compare_sample(calibration, sample))
        except CatalogError as error:
            table.refused.update(dict.fromkeys(sample.index.tolist(), f"{sample.gpu}: {error.rule}"))
    return held


def _read_table(kind: str, path: Path) -> LibraryTable:
    """Reads a table or a measurement file. Raises PlanError for a table of another kind, which it names."""
    if path.suffix == ".json" and kind == "collectives":
        return read_recorded(path)  # type: ignore[return-value]  # it has samples and sources as a table has
    try:
        table: LibraryTable = ROOMS[kind].read(path)
    except PlanError as error:
        other = next((name for name in ROOMS if name != kind and _is_table_of(name, path)), None)
        if other is None:
            raise
        rule = f"{kind} are asked for, and this is a table of {other}"
        raise PlanError("--data", rule, f"Write {other} in place of {kind}", str(path)) from error
    return table


def _is_table_of(kind: str, path: Path) -> bool:
    try:
        ROOMS[kind].read(path)
    except PlanError:
        return False
    return True


def calibrate_tables(
    kind: str, paths: Sequence[Path], out: Path, only: Sequence[str], leave_out: bool
) -> dict[str, Any]:
    """Fits calibrations and writes their files; the answer has the errors of every library."""
    room = ROOMS[kind]
    tables = [_read_table(kind, path) for path in paths]
    names = room.names(tables)
    if not names:
        rule = f"no library has {MIN_ROWS} rows that can be fitted"
        remedy = f"The source of a row names its library; meshcast validate {kind} says why rows are refused"
        raise PlanError("--data", rule, remedy, ", ".join(map(str, paths)))
    for name in only:
        if name not in names:
            raise PlanError("--only", "the tables have too few rows of it", nearest(name, names), name)
    calibrated: list[dict[str, Any]] = []
    wanted = [name for name in names if not only or name in only]
    out.mkdir(exist_ok=True)
    try:
        with np.errstate(all="ignore"):
            for name in progress(wanted, len(wanted), "fits"):
                known = Calibration.from_folder(out)  # the next fits use the coefficients of the earlier ones
                fit = _calibrate(kind, known, tables, name, leave_out)
                file = out / f"{name}.yaml"
                write(file, room.title(name), fit.data)
                calibrated.append({"name": name, "file": str(file), "libraries": [*map(asdict, fit.libraries)]})
    except KeyboardInterrupt:  # every file is complete or absent, so finished ones can be used
        pass
    return {"calibrated": calibrated, "missing": wanted[len(calibrated) :]}


def _calibrate(
    kind: str, calibration: Calibration, tables: Sequence[LibraryTable], name: str, leave_out: bool
) -> CalibrationResult:
    """Fits a calibration. Raises PlanError if rows are too far from every cost model for a fit."""
    try:
        result: CalibrationResult = ROOMS[kind].calibrate(calibration, tables, name, leave_out)
    except (ValueError, ArithmeticError) as error:
        rule = f"no cost model can be fitted to its rows ({error})"
        raise PlanError(name, rule, f"meshcast validate {kind} shows the rows with the largest errors") from None
    return result


# --------------------------------------------------------------------------------------------- pages


def page(kind: str, answer: dict[str, Any]) -> RenderableType:
    """Returns errors of every cell with its goal, errors of every library, the worst rows, and the refused rows."""
    head = f"{answer['rows']:,} rows: {answer['predicted']:,} forecast, {answer['refused']:,} refused"
    parts: list[RenderableType] = [Text(head, style="bold"), Text()]
    if not answer["predicted"]:
        return Group(*parts, *_refusals(answer))
    parts += [
        cells_table(answer),
        Text("goal: median / p90 of the absolute error; cells of fewer than 20 rows have none", "dim"),
        Text("borrowed: the median with the coefficients of other hardware in place of its own", "dim"),
        *(Text(), libraries_table(answer["libraries"]), Text(), worst_table(answer["worst"]), *_refusals(answer)),
    ]
    if answer["impossible"]:
        parts.append(
            Text(f"DEFECT: {answer['impossible']:,} rows are forecast faster than the hardware can be", "bold red")
        )
    return Group(*parts)


ERRORS = ("rows", ","), ("median", ".1p"), ("p90", ".1p"), ("bias", "+.1p")
SHARES = ("in 90%", ".0p"), ("in 50%", ".0p")
"""Heads of tables, with their formats."""


def cells_table(answer: dict[str, Any]) -> RenderableType:
    """Returns errors of every cell of the measurements, by GPU, and of all."""
    table = _table(("operation, kind, class",), *ERRORS, ("goal", ""), *SHARES, ("borrowed", ".1p"))
    gpu = ""
    for cell in answer["cells"]:
        gpu = _name_gpu(table, cell, gpu)
        goal = "" if cell["met"] is None else "/".join(format_percent(end, ".0p") for end in cell["goal"])
        mark = {True: " yes", False: " no", None: ""}[cell["met"]]
        name = f"  {cell['operation']} {cell['kind']} {cell['class']}"
        table.add(name, cell["rows"], *_errors(cell), goal + mark, *_inside(cell), cell["borrowed"])
    table.end_section()
    table.add("all", answer["predicted"], *_errors(answer), "", *_inside(answer), answer["borrowed"])
    return show_table(table)


def libraries_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Returns errors of every library, by GPU."""
    table = _table(("library, operation, kind",), *ERRORS, *SHARES)
    gpu = ""
    for row in rows:
        gpu = _name_gpu(table, row, gpu)
        table.add(f"  {row['library']} {row['operation']} {row['kind']}", row["rows"], *_errors(row), *_inside(row))
    return show_table(table)


def _name_gpu(table: Table, row: dict[str, Any], before: str) -> str:
    """Adds a line with the GPU of a row where it is another than before; returns its name."""
    if row["gpu"] != before:
        table.add(TableCell(row["gpu"], "bold"))
    return str(row["gpu"])


def worst_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Returns the rows with the largest errors."""
    times = [(head, ",.1f") for head in ("measured us", "forecast us")]
    table = _table(("largest errors", "shape"), *times, ("error %", "+.0p"))
    for row in rows:
        words = f"{row['gpu']} {row['operation']} {row['kind']}", f"  {row['library']}"
        table.add(words, row["shape"], row["measured_us"], row["predicted_us"], row["error"])
    return show_table(table)


def _refusals(answer: dict[str, Any]) -> list[RenderableType]:
    if not answer["refusals"]:
        return []
    rest = "{} other reasons, which --json names"
    return [Text(), reasons_table("refused", "because", list(answer["refusals"].items()), MAX_REASONS, rest)]


def calibration_page(answer: dict[str, Any], out: Path) -> RenderableType:
    """Returns errors of every library with its coefficients, and when it was left out of the fit."""
    unseen = ("unseen:", "median"), ("", "p90")
    errors = [(head, ".1p") for head in ("median", "p90", *unseen)]
    table = _table(("hardware", "section", "library"), ("rows", ","), *errors, low=True)
    for calibration in answer["calibrated"]:
        for row in calibration["libraries"]:
            figures = [row[key] for key in ("rows", "median", "p90", "blind_median", "blind_p90")]
            table.add(calibration["name"], row["section"], row["library"], *figures)
    count = len(answer["calibrated"])
    title = Text(f"wrote {count} file{'s' * (count != 1)} to {out}/", style="bold")
    remark = Text("error %; unseen: fitted without the library, and priced as an unnamed library", "dim")
    return Group(title, Text(), show_table(table), remark)


def _table(words: Sequence[str], *columns: tuple[Words, Format], low: bool = False) -> Table:
    """Makes a table without rows.

    words: heads of columns of words.
    columns: heads and formats of those of numbers.
    low: see `Column`.
    """
    folded = (Column(head, wrap="letters") for head in words)
    return Table(*folded, *formatted_numbers(*columns, wrap="never", low=low), dense=True)


def _errors(row: dict[str, Any]) -> list[float]:
    return [row[key] for key in ("median", "p90", "bias")]


def _inside(row: dict[str, Any]) -> list[float]:
    return [row[key] for key in ("inside_90", "inside_50")]


def draw_plots(kind: str, held: Sequence[SampleComparison], files: dict[str, Path], width: Width = "page") -> None:
    """Draws the plots. Raises OSError if a file cannot be written."""
    if not files or not held:
        return
    from meshcast.experiments.render.matplotlib.measured import calibration as plots
    from meshcast.experiments.render.matplotlib.sheet import save

    figures = {"errors": lambda: plots.errors(held, ROOMS[kind].GOALS), "ratios": lambda: plots.ratios(held)}
    for name, path in files.items():
        path.parent.mkdir(exist_ok=True)
        save(figures[name], path, width)


# --------------------------------------------------------------------------------------- this machine


def calibrate_device(kind: str, out: Path, processes: int) -> dict[str, Any]:
    """Measures this machine and fits a calibration: see `validation.calibration.device`."""
    from meshcast.validation.calibration.device.calibrate import calibrate

    return calibrate(kind, out, processes, progress)


def device_page(answer: dict[str, Any], out: Path) -> RenderableType:
    """Returns errors of the fitted cost models on the measurements, the written files, and how to use them."""
    errors = [(head, ".1p") for head in ("median", "p90")]
    table = _table(("measured and fitted",), ("rows", ","), *errors)
    for library in answer["libraries"]:
        table.add(f"{library['section']}, {library['library']}", library["rows"], library["median"], library["p90"])
    used = f"meshcast predict JOB --calibration {out}"
    if answer["device"]:
        used += f", with cluster: {{gpu: {answer['device']}, gpus: ...}}"
    lines = [Text(), Text(f"written   {', '.join(answer['files'])}"), Text(f"use       {used}")]
    return Group(Text(answer["title"], "bold"), show_table(table), *lines)
