"""Scaling curve: throughput of a GPU, its interval and the parts of the step, on growing numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshcast.experiments.sweeps.scaling import Curve, Point
from meshcast.experiments.views.breakdown import group_shares
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.report import Report


@dataclass(frozen=True)
class ScaledStep:
    """The forecast on a number of GPUs.

    Attributes:
        gpus: number of GPUs.
        report: the forecast.
        tokens_per_s: throughput of the whole cluster.
        rate: throughput of a GPU [tokens/s].
        low: lower end of its 90 % interval [tokens/s].
        high: upper end of its 90 % interval [tokens/s].
        efficiency: throughput of a GPU relative to that on the smallest number of GPUs.
        bottleneck: largest cost of the step besides matrix work.
        shares: parts of the step by group, in the order of `STEP_GROUPS`.
    """

    gpus: int
    report: Report
    tokens_per_s: float
    rate: float
    low: float
    high: float
    efficiency: float
    bottleneck: str
    shares: Sequence[float]


@dataclass(frozen=True)
class ScalingCurve:
    """The curve of a job along a mesh axis.

    Attributes:
        title: kind of scaling, and the model.
        phrases: what stays and what grows, the GPU, the framework, and the mesh axes that stay.
        steps: numbers of GPUs with a forecast, ascending.
        refused: numbers of GPUs that the job cannot run on, with the rule that forbids each.
        changes: neighbouring steps with different bottlenecks.
    """

    title: str
    phrases: Sequence[str]
    steps: Sequence[ScaledStep]
    refused: dict[int, str]
    changes: Sequence[tuple[ScaledStep, ScaledStep]]

    @property
    def gpus(self) -> list[int]:
        """All numbers of GPUs, ascending."""
        return sorted([*(step.gpus for step in self.steps), *self.refused])


def make_scaling_curve(curve: Curve) -> ScalingCurve:
    """Makes the picture of forecasts on several numbers of GPUs."""
    job, kept = curve.job, "batch of a GPU" if curve.kind == "weak" else "global batch"
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in job.plan.mesh.items() if axis != curve.axis and degree > 1)
    phrases = [f"the {kept} stays, {curve.axis} grows", f"{job.cluster.gpu.name}, {job.framework.name}"]
    steps = [_scale_step(curve, point, point.report) for point in curve.points if point.report is not None]
    pairs = pairwise(steps)
    return ScalingCurve(
        title=f"{curve.kind.capitalize()} scaling of {job.model.name}",
        phrases=[*phrases, mesh] if mesh else phrases,
        steps=steps,
        refused={point.gpus: point.error.rule for point in curve.points if point.error is not None},
        changes=[(smaller, larger) for smaller, larger in pairs if smaller.bottleneck != larger.bottleneck],
    )


def _scale_step(curve: Curve, point: Point, report: Report) -> ScaledStep:
    low, high = (rate / point.gpus for rate in point.interval)
    return ScaledStep(
        gpus=point.gpus,
        report=report,
        tokens_per_s=point.tokens_per_s,
        rate=point.tokens_per_s / point.gpus,
        low=low,
        high=high,
        efficiency=curve.efficiency(point),
        bottleneck=point.bottleneck.removeprefix("exposed ").removeprefix("the ").removesuffix(" communication"),
        shares=group_shares(report),
    )
