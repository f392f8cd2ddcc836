"""``meshcast validate trace``: a profiler trace against the simulated step of its job, and the page of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.measurements import format_amount, measurement_table
from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import TableCell, format_percent
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.formats import kineto
from meshcast.simulator.loading.load import load_job
from meshcast.validation.measurements.forecasts import use_calibrated_gpu
from meshcast.validation.traces.comparison import Comparison, compare_step

if TYPE_CHECKING:
    from meshcast.simulator.report.report import Report

PLOTS = ("trace",)
"""Names of the plots."""


def compare_trace(trace: Path, job: Path, calibration: Path | None, rank: int | None, step: int | None) -> Comparison:
    """Compares a step of a trace with the forecast of its job. Raises PlanError for a file that is no trace of it."""
    return compare_step(kineto.read(trace), _forecast(job, calibration), rank, step)


def _forecast(job: Path, calibration: Path | None) -> Report:
    stated = load_job(job)
    if calibration is None:
        return simulate(stated)
    calibrated = load_job(use_calibrated_gpu(stated.to_dict(), calibration), base=stated.folder)
    return simulate(calibrated, calibration=Calibration.from_folder(calibration))


def page(comparison: Comparison) -> RenderableType:
    """Returns table of the seconds of every class of kernels on every stream."""

    def format_time(seconds: float) -> str:
        return format_amount(seconds, "seconds")

    real, simulated = (("real", format_time), ("kernels", ",")), (("simulated", format_time), ("ops", ","))
    table = measurement_table("stream, class", *real, *simulated, ("ratio", ".2f"))
    stream = ""
    for line in comparison.lines:
        if line.stream != stream:
            stream = line.stream
            table.end_section()
            table.add(TableCell(stream, "bold"))
        table.add(f"  {line.kind}", line.real, line.real_calls, line.simulated, line.simulated_calls, line.ratio)
    table.end_section()
    traced, forecast = comparison.real.span, comparison.simulated.span
    table.add("step", traced, "", forecast, "", f"{format_percent(forecast / traced - 1, '+.1p') if traced else ''} %")
    notes = [Text(f"note      {note}", "dim") for note in (*comparison.notes, *comparison.explain_framework())]
    return Group(Text(f"{comparison.title}, traced on {comparison.on}", "bold"), show_table(table), *notes)


def draw_plots(comparison: Comparison, files: Mapping[str, Path], width: Width = "page") -> None:
    """Draws the plots. Raises OSError if a file cannot be written."""
    for path in files.values():
        from meshcast.experiments.render.matplotlib.measured.traces import traces
        from meshcast.experiments.render.matplotlib.sheet import save

        path.parent.mkdir(exist_ok=True)
        save(lambda: traces(comparison), path, width)
