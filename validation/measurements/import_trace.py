"""Import of profiler traces: seconds of each class of kernels become rows of a measurement file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from meshcast.simulator.formats import kineto
from meshcast.validation.measurements.forecasts import Forecaster, forecasters, with_interval
from meshcast.validation.measurements.imported_file import Origin
from meshcast.validation.measurements.measurement import ForecastValue, Machine, Measurement, MeasurementRow
from meshcast.validation.traces.comparison import Comparison, compare_step
from meshcast.validation.traces.kernel_classes import class_of

INSTRUMENT = "torch.profiler"


def import_trace(
    path: Path,
    job: Mapping[str, Any],
    rank: int | None = None,
    calibration: Path | None = None,
    command: str = "",
) -> Measurement:
    """Imports a trace of torch's profiler: a row for each stream and class of kernels, a sample for each marked step.

    rank: the traced rank, if the trace does not record it.
    Raises PlanError for a file that is not a trace, or a trace of another job.
    """
    trace, sources = kineto.read(path), forecasters(job, calibration)
    steps: Sequence[int | None] = range(len(trace.steps())) or [None]
    compared = {source.by: [compare_step(trace, source.report, rank, step) for step in steps] for source in sources}
    comparisons = compared[sources[0].by]
    first, last = comparisons[0], comparisons[-1]
    sigmas = {source.by: _class_sigmas(source, first.device) for source in sources}
    rows = [
        MeasurementRow(
            name="step",
            forecasts={source.by: source.step for source in sources},
            samples=tuple(comparison.real.span for comparison in comparisons),
            instrument=INSTRUMENT,
            shape={"kernels": last.real.calls},
        )
    ]
    for stream, kind in dict.fromkeys(
        (line.stream, line.kind) for comparison in comparisons for line in comparison.lines
    ):
        rows.append(
            MeasurementRow(
                name=kind,
                group=stream,
                forecasts={
                    by: _forecast(steps_of_source[0], stream, kind, sigmas[by].get(kind, 0.0))
                    for by, steps_of_source in compared.items()
                },
                samples=tuple(comparison.real.sums.get((stream, kind), (0.0, 0))[0] for comparison in comparisons),
                instrument=INSTRUMENT,
                shape={"kernels": last.real.sums.get((stream, kind), (0.0, 0))[1]},
            )
        )
    device: Literal["cuda", "cpu"] = "cuda" if trace.on_gpu else "cpu"
    return Origin(path, job, calibration, command).measurement(
        kind="kernels",
        title=f"classes of kernels: {first.title}",
        machine=Machine(device=device, name=first.on, count=trace.world or 1),
        rows=rows,
        settings={"steps": len(steps)},
        notes=first.notes if len(comparisons) == 1 else (),
    )


def _forecast(comparison: Comparison, stream: str, kind: str, sigma: float) -> ForecastValue:
    """Returns the simulated seconds of a class of kernels on a stream."""
    return with_interval(comparison.simulated.sums.get((stream, kind), (0.0, 0))[0], sigma)


def _class_sigmas(source: Forecaster, device: int) -> dict[str, float]:
    """Returns the standard deviation of log(time) of each class on a device; errors within a class count as fully
    correlated."""
    flat, sums = source.report.play.step.flat, defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for op, owner, seconds in zip(flat.ops, flat.device, flat.seconds, strict=True):
        if owner == device and op.work is not None:
            total = sums[class_of(op)]
            total[0] += seconds
            total[1] += seconds * source.costs.estimate(op.work).sigma
    return {kind: weighted / seconds for kind, (seconds, weighted) in sums.items() if seconds}
