"""``meshcast validate trace``: a real profiler trace beside the simulated one of the same step, and what is printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from experiments.pages.measurements import amount, table_of
from experiments.pages.published import percent
from simulator.bridges import kineto
from simulator.job.load import load_job
from validation.measurements.forecasts import Forecaster, use_calibrated_gpu
from validation.traces.comparison import Comparison, compare_step

if TYPE_CHECKING:
    from simulator.report.report import Report

FIGURES = ("trace",)
"""What is drawn."""


def compare_trace(trace: Path, job: Path, calibration: Path | None, rank: int | None, step: int | None) -> Comparison:
    """A step of a trace beside the forecast of its job. Raises PlanError for what is no trace, or another's."""
    return compare_step(kineto.read(trace), _report(job, calibration), rank, step)


def _report(job: Path, calibration: Path | None) -> Report:
    given = load_job(job).to_dict()
    if calibration is None:
        return Forecaster("catalog", given).report
    return Forecaster("calibration", use_calibrated_gpu(given, calibration), calibration).report


def page(found: Comparison) -> RenderableType:
    """Seconds of every class of kernels on every stream."""
    table = table_of("stream, class")
    for head in ("real", "kernels", "simulated", "ops", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    stream = ""
    for line in found.lines:
        if line.stream != stream:
            stream = line.stream
            table.add_section()
            table.add_row(Text(stream, "bold"))
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        times = amount(line.real, "seconds"), f"{line.real_calls:,}", amount(line.simulated, "seconds")
        table.add_row(f"  {line.kind}", *times, f"{line.simulated_calls:,}", ratio)
    table.add_section()
    real, simulated = found.real.span, found.simulated.span
    error = percent(simulated / real - 1, "+") if real else ""
    table.add_row("step", amount(real, "seconds"), "", amount(simulated, "seconds"), "", f"{error} %")
    notes = [Text(f"note      {note}", "dim") for note in found.notes]
    return Group(Text(f"{found.title}, traced on {found.on}", "bold"), table, *notes)


def draw(found: Comparison, files: Mapping[str, Path]) -> None:
    """Writes the figure. Raises OSError where it cannot be written."""
    for path in files.values():
        from experiments.plots import traces

        path.parent.mkdir(exist_ok=True)
        traces.draw(found, path)
