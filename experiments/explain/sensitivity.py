"""What every figure of the hardware and every assumed field is worth: the change of the step time with each, all others
kept; and which uncertainties widen the interval most.

A figure is made better and worse by `STEP`, and the job forecast again. Between two points at which the critical path
changes, the step time is linear in the time of every op, so the difference quotient over a percent is the derivative
itself; over `RANGE` it shows what the next generation would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshcast.experiments.explain.assumed_fields import AssumedFieldEffect, assumed_fields, forecast_alternatives
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.hardware_figures import HardwareFigure, hardware_figures
from meshcast.simulator.job.job import Job
from meshcast.simulator.report.report import Report

STEP = 0.01
"""Change of a figure for its derivative."""
RANGE = 0.1
"""Change of a figure for its range, either way."""

Watch = Callable[[Iterable[Any]], Iterable[Any]]
"""Passes the steps of a long work on, as a progress bar does."""


@dataclass(frozen=True)
class Sensitivity:
    """What a figure is worth.

    saved_s: seconds that a step gets shorter if the figure gets better by a percent.
    better_s, worse_s: step time with the figure better and worse by `RANGE` [s].
    """

    figure: HardwareFigure
    saved_s: float
    better_s: float
    worse_s: float

    @property
    def swing_s(self) -> float:
        """Seconds between the ends of the range."""
        return self.worse_s - self.better_s


@dataclass(frozen=True)
class Sensitivities:
    """A forecast, what every figure of its hardware and every assumed field is worth, and what widens its interval.

    figures: of the hardware, the most valuable first.
    assumed: fields that the job does not state, that of the largest effect first.
    """

    report: Report
    figures: tuple[Sensitivity, ...]
    assumed: tuple[AssumedFieldEffect, ...]

    @property
    def variance(self) -> dict[str, float]:
        """Share of every contribution in the variance of log(measured / forecast), the largest first.

        Keys are those of `Metrics.sigmas`.
        """
        squares = {source: sigma**2 for source, sigma in self.report.sigmas.items()}
        total = sum(squares.values())
        return {source: squares[source] / total for source in sorted(squares, key=lambda name: -squares[name]) if total}

    def to_dict(self) -> Fields:
        """Returns the JSON answer."""
        answer = self.report.to_dict()
        return {
            **{key: answer[key] for key in ("step_time_s", "interval_90_s", "breakdown_s", "limits", "assumed")},
            "peak_device_gib": self.report.peak_device / GIB,
            "interval_variance": self.variance,
            "range": RANGE,
            "hardware": [
                {
                    "figure": effect.figure.name,
                    "value": effect.figure.value,
                    "saved_s_per_percent": effect.saved_s,
                    "step_time_s": {"better": effect.better_s, "worse": effect.worse_s},
                }
                for effect in self.figures
            ],
            "assumed_fields": [field.to_dict() for field in self.assumed],
        }


def explain(job: Job, watch: Watch = iter, shared_work: SharedWork | None = None) -> Sensitivities:
    """Forecasts a job, with every figure of its hardware changed, and with every alternative of its assumed fields.

    watch: passes figures and fields on, as a progress bar does.
    shared_work: of a forecast of the job, for related jobs (`SharedWork.related`).
    Raises PlanError for a job on several kinds of nodes.
    """
    from meshcast.simulator import simulate

    shared = shared_work or SharedWork(related=True)
    report = simulate(job, shared_work=shared)
    effects_of_figures = change_figures(job, report, shared, watch)
    effects = [forecast_alternatives(field, report, shared) for field in watch(assumed_fields(report))]
    effects.sort(key=lambda effect: (-effect.step_effect_s, -effect.memory_effect_gib))
    return Sensitivities(report, effects_of_figures, tuple(effect for effect in effects if effect.alternatives))


def change_figures(job: Job, report: Report, shared_work: SharedWork, watch: Watch = iter) -> tuple[Sensitivity, ...]:
    """Forecasts a job with every figure of its hardware changed; the most valuable figure comes first.

    report: the forecast of the job as it is.
    Raises PlanError for a job on several kinds of nodes.
    """
    from meshcast.simulator import simulate

    effects = []
    for figure in watch(hardware_figures(job, bool(report.host_uses))):
        changed = {by: simulate(figure.change(job, 1 + by), shared_work=shared_work) for by in (STEP, RANGE, -RANGE)}
        times = {by: forecast.step_time for by, forecast in changed.items()}
        saved = (report.step_time - times[STEP]) / (100 * STEP)
        effects.append(Sensitivity(figure, saved, times[RANGE], times[-RANGE]))
    return tuple(sorted(effects, key=lambda forecast: -forecast.swing_s))
