"""Scaling curves: forecasts of a job on several numbers of GPUs, by which an axis of its mesh is scaled.

Strong scaling keeps the global batch size, weak scaling the batch size per GPU; the rest of the job is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import MeshcastError, PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.figures import nest, shown_in
from meshcast.simulator.report.report import Report

Kind = Literal["weak", "strong"]

MATRIX = "matrix work"
"""Bottleneck of a step in which all but GEMMs and attention take less than a tenth of the time."""


@dataclass(frozen=True)
class Point:
    """Forecast for a number of GPUs, or the error of a job that cannot run on it."""

    gpus: int
    report: Report | None
    error: MeshcastError | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.report.tokens_per_s_per_gpu * self.gpus if self.report else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Interval that should hold nine of ten measured throughputs [tokens/s]."""
        if self.report is None:
            return math.nan, math.nan
        low, high = self.report.interval_90
        return self.report.tokens / high, self.report.tokens / low

    @property
    def bottleneck(self) -> str:
        """Largest part of the step other than GEMMs and attention; `MATRIX` if all of these are below a tenth of it."""
        if self.report is None:
            return ""
        costs, step = self.report.costs, self.report.step_time
        return max(costs, key=lambda name: costs[name]) if sum(costs.values()) > step / 10 else MATRIX


@dataclass(frozen=True)
class Curve:
    """Scaling of a job along a mesh axis; `points` are sorted by their number of GPUs."""

    job: Job
    kind: Kind
    axis: str
    points: tuple[Point, ...]

    @property
    def known(self) -> list[Point]:
        """Points with a forecast."""
        return [point for point in self.points if point.report is not None]

    def efficiency(self, point: Point) -> float:
        """Computes the throughput per GPU relative to that at the smallest number of GPUs with a forecast."""
        first = self.known[0]
        return point.tokens_per_s / point.gpus / (first.tokens_per_s / first.gpus)


def forecast_curve(
    source: str | Path | Mapping[str, Any] | Job, gpus: Sequence[int], kind: Kind, axis: str | None = None
) -> Curve:
    """Forecasts a job on every number of GPUs.

    axis: mesh axis that grows; the first axis of the data scheme if None.
    Raises PlanError for a job or axis that cannot be scaled. A number of GPUs that the plan does not divide is a point
    with an error.
    """
    job = source if isinstance(source, Job) else load_job(source)
    if job.plan.has_stages or job.plan.replicas:
        where = "plan.stages" if job.plan.stages else "plan.replicas"
        raise PlanError(where, "scaling needs a plan whose stages and replicas are alike", "Give pp, tp and dp")
    chosen = axis or _data_axis(job)
    if chosen not in job.plan.mesh:
        raise PlanError("--over", "no such axis in plan.mesh", nearest(chosen, job.plan.mesh), chosen)
    if job.cluster.groups:
        rule = "a cluster of several kinds of nodes cannot be scaled"
        raise PlanError("cluster.groups", rule, "Describe it by one kind of node")
    shop = SharedWork()
    return Curve(job, kind, chosen, tuple(_points(job, sorted(set(gpus)), kind, chosen, job.folder, shop)))


def _points(job: Job, gpus: Sequence[int], kind: Kind, axis: str, base: Path, shop: SharedWork) -> Iterator[Point]:
    for count in gpus:
        try:
            yield Point(count, simulate(load_job(scale_job(job, count, kind, axis), base=base), shared_work=shop))
        except MeshcastError as error:
            yield Point(count, None, error)


def scale_job(job: Job, gpus: int, kind: Kind, axis: str) -> dict[str, Any]:
    """Returns the job on `gpus` GPUs as a mapping in long form. Raises PlanError if a degree would be no integer."""
    scaled, factor = job.to_dict(), Fraction(gpus, job.cluster.gpus)
    plan = scaled["plan"]
    plan["mesh"] = {**plan["mesh"], axis: _whole(f"plan.mesh.{axis}", plan["mesh"][axis] * factor, gpus)}
    for view in plan.get("views", {}).values():
        outer = next(iter(view))  # the axis of replicas of experts
        view[outer] = _whole(f"plan.views.{outer}", view[outer] * factor, gpus)
    if kind == "weak":
        scaled["batch"]["global"] = _whole("batch.global", scaled["batch"]["global"] * factor, gpus)
    scaled["cluster"] = resize_cluster(job.cluster, gpus)
    return scaled


def _whole(where: str, value: Fraction, gpus: int) -> int:
    if value.denominator > 1:
        rule = f"on {gpus:,} GPUs it would be {float(value):g}, and it must be a whole number"
        raise PlanError(where, rule, "Use other numbers of GPUs, another --over, or another job")
    return int(value)


def resize_cluster(cluster: Cluster, gpus: int) -> Cluster:
    """Returns the cluster with another number of GPUs, in nodes of the same kind."""
    nodes = math.ceil(gpus / cluster.gpus_per_node)
    return Cluster(
        name=f"{cluster.node.name}:{nodes}",
        title=cluster.title,
        source=cluster.source,
        node=cluster.node,
        nodes=nodes,
        gpus=gpus,
        fabric=cluster.fabric,
        assumed=cluster.assumed,
    )


def _data_axis(job: Job) -> str:
    axes = (entry.over[0] for entry in job.plan.schemes if entry.use.startswith("data/") and entry.over)
    axis = next(axes, None)
    if axis is None:
        raise PlanError("plan.schemes", "no data scheme has an axis that could grow", "Name one with --over")
    return axis


def list_lengths(job: Job) -> list[str]:
    """Returns which figures of a whole training a job has: days with `run.tokens`, and with a price the cost."""
    if job.run.tokens is None:
        return []
    return ["days"] if job.run.price_per_gpu_hour is None else ["days", "cost"]


def curve_rows(curve: Curve) -> list[dict[str, Any]]:
    """Returns the rows of the curve for ``scale --json``."""
    rows = []
    for point in curve.points:
        row: dict[str, Any] = {"gpus": point.gpus, "error": point.error.to_dict() if point.error else None}
        if (report := point.report) is not None:
            row |= {
                "status": report.fit.verdict,
                "global_batch": report.job.batch.total,
                "tokens_per_s": point.tokens_per_s,
                "efficiency": curve.efficiency(point),
                "bottleneck": point.bottleneck,
                **{name: getattr(report, name) for name in list_lengths(curve.job)},
                # Memory figures are keys of the row itself, not of a `memory` inside it.
                **nest((figure.where.removeprefix("memory."), figure.compute(report)) for figure in shown_in("points")),
            }
        else:
            row["status"] = "invalid"
        rows.append(row)
    return rows


MAX_POINTS = 1000
"""Maximum number of points of a curve."""


MAX_CURVES = 8
"""Maximum number of curves on one axis: as many as a plot tells apart."""


def check_curves(jobs: Sequence[object], counts: Sequence[int]) -> None:
    """Raises PlanError for more jobs than have room on one axis, or for more points than a curve has at most."""
    if len(jobs) > MAX_CURVES:
        raise PlanError("scale", f"at most {MAX_CURVES} jobs are drawn on one axis", "Name fewer", len(jobs))
    if len(jobs) * len(counts) > MAX_POINTS:
        raise PlanError(
            "--gpus", f"more than {MAX_POINTS:,} points of all jobs", "Write fewer", len(jobs) * len(counts)
        )


def parse_counts(words: str) -> list[int]:
    """Parses numbers of GPUs: ``8,16,24``, or ``8..4096`` for all doublings of 8. Raises PlanError for other text."""
    counts: list[int] = []
    for word in words.split(","):
        first, dots, last = (part.strip() for part in word.partition(".."))
        if (
            not first.isdecimal()
            or (dots and not last.isdecimal())
            or len(first) > 9
            or len(last) > 9
            or not int(first)
        ):
            rule = "numbers of GPUs are whole numbers above 0"
            raise PlanError("--gpus", rule, "Write 8,16,32 or 8..4096 (all doublings)", words)
        count, end = int(first), int(last or first)
        if end < count:
            raise PlanError("--gpus", f"{count:,}..{end:,} holds no number", f"Write {end}..{count}", words)
        while count <= end:
            counts.append(count)
            count *= 2
    if len(counts) > MAX_POINTS:
        raise PlanError("--gpus", f"more than {MAX_POINTS:,} numbers of GPUs", "Write fewer", len(counts))
    return counts
