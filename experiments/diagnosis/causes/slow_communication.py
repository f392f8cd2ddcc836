"""Collectives that take longer than their links should need."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.ranks import TracedRun
from meshcast.simulator.program.categories import EXPOSED
from meshcast.simulator.report.formatting import format_seconds
from meshcast.simulator.report.metrics import Z90
from meshcast.simulator.report.report import Report
from meshcast.validation.measurements.measurement import Measurement, MeasurementRow

LEAST_RATIO = 1.3
"""Measured over forecast seconds of a collective from which on it is slow."""

LARGE = 16e6
"""Bytes from which on a collective's time is that of its bandwidth."""


class SlowCommunication(Detector):
    """Collectives of a parallelism that are slower than the forecast of their links, in traces or in nccl-tests."""

    name = "slow communication"
    words = {
        ANY: "test this link alone with nccl-tests (meshcast collectives prints what to expect), then NCCL_DEBUG=INFO: "
        "which network and which channels it chose"
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it for every parallelism, and for every run of nccl-tests."""
        if run.traced is not None and run.report is not None:
            for stream in run.traced.streams:
                seconds, words = measure_slowness(run.traced, run.report, stream)
                if seconds >= run.least:
                    yield self.make(run, seconds, *words)
        for links in run.links:
            yield from self._find_in_tests(run, links)

    def _find_in_tests(self, run: RunEvidence, links: Measurement) -> Iterable[Cause]:
        rows = [row for row in links.rows if row.shape.get("bytes", 0) >= LARGE and row.forecasts]
        groups: dict[tuple[str, int], list[MeasurementRow]] = {}
        for row in rows:
            groups.setdefault((str(row.shape["operation"]), int(row.shape["members"])), []).append(row)
        for (operation, members), measured in groups.items():
            ratio = statistics.median(_ratio(row) for row in measured)
            beyond = [
                row for row in measured if statistics.median(row.samples) > next(iter(row.forecasts.values())).high
            ]
            if ratio < LEAST_RATIO or len(beyond) < len(measured) / 2:
                continue
            words = f"nccl-tests: {operation} of {members} ranks takes {ratio:.2f} times its forecast"
            seconds, axes = _price(run.report, members, ratio) if run.report is not None else (None, "")
            yield self.make(
                run, seconds, words, *([f"exposed communication of {axes} uses this group"] if axes else [])
            )


def measure_slowness(traced: TracedRun, report: Report, stream: str) -> tuple[float, tuple[str, ...]]:
    """Returns the seconds of a step by which communication of a stream is slower than its links, on the worst stage,
    and the evidence; 0: it is not."""
    ratio_limit = max(LEAST_RATIO, math.exp(Z90 * _sigma(report)))
    if not traced.on_gpu:  # processes move messages themselves: where they compute slowly, they send slowly, too
        ratio_limit *= max(1.0, traced.compute_ratio)
    worst, evidence = 0.0, tuple[str, ...]()
    exposed = traced.measure_exposed(stream)
    for device, (measured, forecast) in traced.measure_busy(stream).items():
        if not forecast or measured / forecast < ratio_limit:
            continue
        seconds = min(measured - forecast, exposed[device][0] - exposed[device][1])
        if seconds > worst:
            ranks = traced.stages[device]
            words = f"{stream} communication takes {format_seconds(measured)} of a step, "
            words += f"forecast {format_seconds(forecast)}"
            waits = (
                "of the rank that waits least"
                if len(ranks) > 1
                else (
                    f"rank {ranks[0]} alone of its stage is traced: its waits for other ranks count, trace another one"
                )
            )
            worst, evidence = seconds, (words, waits)
    return worst, evidence


def _sigma(report: Report) -> float:
    """Returns the standard deviation of log(measured / forecast) of the forecast's communication."""
    share = sum(report.parts[axis] for axis in EXPOSED) / report.step_time
    sigma = math.hypot(*(report.sigmas.get(axis, 0.0) for axis in EXPOSED))
    return min(sigma / share, 0.5) if share else 0.0


def _ratio(row: MeasurementRow) -> float:
    return statistics.median(row.samples) / next(iter(row.forecasts.values())).value


def _price(report: Report, members: int, ratio: float) -> tuple[float | None, str]:
    """Returns the seconds that a step takes longer if collectives of groups of this size do, and their axes; None:
    the job has no exposed communication of such a group."""
    sizes = report.play.plan.mesh.named_axes
    axes = [axis for axis in EXPOSED if sizes.get(axis) == members and report.parts[axis] > 0]
    if not axes:
        return None, ""
    return sum(report.parts[axis] for axis in axes) * (ratio - 1), ", ".join(axes)
