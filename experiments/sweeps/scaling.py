"""Scaling curves: one job on ever more GPUs, along one axis of its plan.

Strong scaling keeps the global batch, weak scaling the batch of every GPU; everything else of the job stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from hardware.cluster import Cluster
from hardware.errors import MeshcastError, PlanError, nearest
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.simulate import simulate
from simulator.job.job import Job
from simulator.job.load import load_job
from simulator.report.figures import nest, shown_in
from simulator.report.report import Report

Kind = Literal["weak", "strong"]

MATRIX = "matrix work"
"""What a step spends its time on when nothing else takes more."""


@dataclass(frozen=True)
class Point:
    """One number of GPUs: its forecast, or why there is none."""

    gpus: int
    report: Report | None
    error: MeshcastError | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        return self.report.tokens_per_s_per_gpu * self.gpus if self.report else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Where nine of ten measured rates should lie [tokens/s]."""
        if self.report is None:
            return math.nan, math.nan
        low, high = self.report.interval_90
        return self.report.tokens / high, self.report.tokens / low

    @property
    def bottleneck(self) -> str:
        """The largest cost of the step beside matrix work, unless all of them together are a tenth of it."""
        if self.report is None:
            return ""
        costs, step = self.report.costs, self.report.step_time
        return max(costs, key=lambda name: costs[name]) if sum(costs.values()) > step / 10 else MATRIX


@dataclass(frozen=True)
class Curve:
    """A job along `axis` of its plan; `points` by number of GPUs."""

    job: Job
    kind: Kind
    axis: str
    points: tuple[Point, ...]

    @property
    def known(self) -> list[Point]:
        """The points that have a forecast."""
        return [point for point in self.points if point.report is not None]

    def efficiency(self, point: Point) -> float:
        """Tokens/s of a GPU against those of a GPU in the smallest forecast."""
        first = self.known[0]
        return point.tokens_per_s / point.gpus / (first.tokens_per_s / first.gpus)

    @property
    def changes(self) -> list[tuple[Point, Point]]:
        """Neighbours between which the bottleneck changes."""
        pairs = zip(self.known, self.known[1:], strict=False)
        return [(one, other) for one, other in pairs if one.bottleneck != other.bottleneck]


def curve(source: str | Path | Mapping[str, Any], gpus: Sequence[int], kind: Kind, axis: str | None = None) -> Curve:
    """The scaling of a job. axis: of the mesh, the one that grows; the first one of its data scheme if not given.

    Raises PlanError for a job or an axis that cannot be scaled; a number of GPUs that the plan does not fit is a point
    with its error.
    """
    job = load_job(source)
    chosen = axis or _data_axis(job)
    if chosen not in job.plan.mesh:
        raise PlanError("--over", "no such axis in plan.mesh", nearest(chosen, job.plan.mesh), chosen)
    if job.cluster.groups:
        rule = "a cluster of several kinds of nodes has no larger one of its kind"
        raise PlanError("cluster.groups", rule, "Describe it by one kind of node")
    base = Path(".") if isinstance(source, Mapping) else Path(source).parent
    shop = SharedWork()
    return Curve(job, kind, chosen, tuple(_points(job, sorted(set(gpus)), kind, chosen, base, shop)))


def _points(job: Job, gpus: Sequence[int], kind: Kind, axis: str, base: Path, shop: SharedWork) -> Iterator[Point]:
    for count in gpus:
        try:
            yield Point(count, simulate(load_job(scaled(job, count, kind, axis), base=base), shared_work=shop))
        except MeshcastError as error:
            yield Point(count, None, error)


def scaled(job: Job, gpus: int, kind: Kind, axis: str) -> dict[str, Any]:
    """The job on `gpus` GPUs, as a mapping in long form. Raises PlanError where a degree is no whole number."""
    told, factor = job.to_dict(), Fraction(gpus, job.cluster.gpus)
    plan = told["plan"]
    plan["mesh"] = {**plan["mesh"], axis: _whole(f"plan.mesh.{axis}", plan["mesh"][axis] * factor, gpus)}
    for view in plan.get("views", {}).values():
        outer = next(iter(view))  # the axis along which copies lie
        view[outer] = _whole(f"plan.views.{outer}", view[outer] * factor, gpus)
    if kind == "weak":
        told["batch"]["global"] = _whole("batch.global", told["batch"]["global"] * factor, gpus)
    told["cluster"] = resized(job.cluster, gpus)
    return told


def _whole(where: str, value: Fraction, gpus: int) -> int:
    if value.denominator > 1:
        rule = f"on {gpus:,} GPUs it would be {float(value):g}, and it must be a whole number"
        raise PlanError(where, rule, "Use other numbers of GPUs, another --over, or another job")
    return int(value)


def resized(cluster: Cluster, gpus: int) -> Cluster:
    """A cluster of the same nodes with another number of GPUs."""
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
    found = (entry.over[0] for entry in job.plan.schemes if entry.use.startswith("data/") and entry.over)
    axis = next(found, None)
    if axis is None:
        raise PlanError("plan.schemes", "no data scheme has an axis that could grow", "Name one with --over")
    return axis


def brief(bottleneck: str) -> str:
    """A bottleneck in few words."""
    return bottleneck.removeprefix("exposed ").removeprefix("the ").removesuffix(" communication")


def table(found: Curve) -> list[dict[str, Any]]:
    """The curve as plain rows."""
    rows = []
    for point in found.points:
        row: dict[str, Any] = {"gpus": point.gpus, "error": point.error.to_dict() if point.error else None}
        if (report := point.report) is not None:
            row |= {
                "status": "fits" if report.fits else "does-not-fit",
                "global_batch": report.job.batch.total,
                "tokens_per_s": point.tokens_per_s,
                "efficiency": found.efficiency(point),
                "bottleneck": point.bottleneck,
                # Memory stands beside the other figures: a row is as flat as it can be.
                **nest((figure.where.removeprefix("memory."), figure.compute(report)) for figure in shown_in("points")),
            }
        else:
            row["status"] = "invalid"
        rows.append(row)
    return rows


MOST_POINTS = 1000
"""Most numbers of GPUs on one curve."""


def counts(words: str) -> list[int]:
    """Numbers of GPUs as a person writes them: ``8,16,24``, or ``8..4096`` for all doublings of the first.

    Raises PlanError for anything else.
    """
    found: list[int] = []
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
            found.append(count)
            count *= 2
    if len(found) > MOST_POINTS:
        raise PlanError("--gpus", f"more than {MOST_POINTS:,} numbers of GPUs", "Write fewer", len(found))
    return found
