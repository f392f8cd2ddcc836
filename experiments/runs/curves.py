"""Goodput of a run against the interval of its checkpoints, the rate of failures and the scale; what more hardware is
worth.

All points of a curve use the same random numbers, so that their differences are not those of luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from meshcast.experiments.runs.seeds import simulate_runs
from meshcast.experiments.sweeps.scaling import resize_cluster
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.endless import refuse_endless
from meshcast.simulator.runs.formulas import expected_goodput
from meshcast.simulator.runs.inputs import RunPlan, make_run, replace_run_keys
from meshcast.simulator.runs.training import RunSetting

INTERVALS = (1 / 8, 1 / 4, 1 / 2, 1 / math.sqrt(2), 1.0, math.sqrt(2), 2.0, 4.0, 8.0)
"""Intervals between checkpoints of a curve, over that of the run."""

MTBF_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Numbers of replicas of a curve, over that of the job; the global batch grows with them."""

MAX_SEEDS = 32
"""Runs of a point, at most."""

MakePlan = Callable[[], RunPlan | None]
"""Makes the run of a point; None where the plan does not divide it. Raises PlanError for a run that does not end."""

Each = Callable[[list[Any]], Iterator[Any]]
"""Shows progress over the points of a curve."""


@dataclass(frozen=True)
class CurvePoint:
    """A point of a curve.

    value: interval [s], factor on the mean time between failures, or number of GPUs.
    goodput: mean.
    interval: of the goodput of nine of ten runs.
    formula: goodput by Daly's formula, None where it does not hold.
    days: mean length.
    reason: why there are no runs, such as that they do not end; "" with figures.
    """

    value: float
    goodput: float
    interval: tuple[float, float]
    formula: float | None
    days: float
    cost: float | None
    reason: str = ""

    @classmethod
    def without_runs(cls, value: float, error: PlanError) -> CurvePoint:
        nothing = math.nan
        return cls(value, nothing, (nothing, nothing), None, nothing, None, f"{error.rule}. {error.remedy}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "goodput": None if self.reason else self.goodput,
            "goodput_interval_90": None if self.reason else list(self.interval),
            "daly_goodput": self.formula,
            "days": None if self.reason else self.days,
            "cost": self.cost,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Worth:
    """What a change of the hardware is worth, after it less before it.

    change: in words.
    days: length of the run.
    goodput: share of the time.
    cost: None without a price.
    """

    change: str
    days: float
    goodput: float
    cost: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.change, "days": self.days, "goodput": self.goodput, "cost": self.cost}


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run, each with its points in rising order.

    interval: of checkpoints.
    mtbf: mean time between failures.
    scale: number of GPUs.
    worth: what changes of the hardware are worth.
    """

    interval: tuple[CurvePoint, ...]
    mtbf: tuple[CurvePoint, ...]
    scale: tuple[CurvePoint, ...]
    worth: tuple[Worth, ...]

    @property
    def best_interval(self) -> float | None:
        """The interval of highest goodput [s]; None without regular checkpoints."""
        ended = tuple(point for point in self.interval if not point.reason)
        return find_best(ended) if ended else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the key `curves` of ``run --json``."""
        named = {"interval": self.interval, "mtbf": self.mtbf, "scale": self.scale}
        curves = {name: [entry.to_dict() for entry in points] for name, points in named.items()}
        worth = [entry.to_dict() for entry in self.worth]
        return {"curves": curves, "best_interval_s": self.best_interval, "worth": worth}


def find_best(points: tuple[CurvePoint, ...]) -> float:
    """Returns the interval of highest goodput, by a parabola through the best point and its neighbours in log space."""
    best = max(range(len(points)), key=lambda i: points[i].goodput)
    if not 0 < best < len(points) - 1:
        return points[best].value
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(point.value), point.goodput) for point in points[best - 1 : best + 2])
    above = (x1 - x0) ** 2 * (y1 - y2) - (x1 - x2) ** 2 * (y1 - y0)
    below = (x1 - x0) * (y1 - y2) - (x1 - x2) * (y1 - y0)
    return math.exp(x1 - above / below / 2) if below else points[best].value


def draw_curves(plan: RunPlan, workers: int | None = None, each: Each = iter) -> RunCurves:
    """Simulates all curves of a run. each: called with the points of all curves."""
    tasks: list[tuple[str, float, MakePlan]] = []
    step = plan.report.step_time
    intervals = dict.fromkeys(max(1, round(_every(plan.setting) * factor)) for factor in INTERVALS)
    if _every(plan.setting):
        tasks += [("interval", every * step, partial(_with_interval, plan, every)) for every in intervals]
    if math.isfinite(plan.mtbf):
        tasks += [("mtbf", factor, partial(_with_mtbf, plan, factor)) for factor in MTBF_FACTORS]
    sizes = [plan.job.cluster.gpus * factor for factor in SCALES]
    tasks += [("scale", gpus, partial(_at_scale, plan, gpus)) for gpus in sizes]
    points: dict[str, list[CurvePoint]] = {"interval": [], "mtbf": [], "scale": []}
    for name, value, make in each(tasks):
        if (point := _make_point(value, make, workers)) is not None:
            points[name].append(point)
    interval, mtbf, scale = (tuple(points[name]) for name in ("interval", "mtbf", "scale"))
    return RunCurves(interval, mtbf, scale, _find_worth(plan, workers))


def _every(setting: RunSetting) -> int:
    """Returns steps between two checkpoints of the most frequent tier; 0 without any."""
    return next((tier.every for tier in setting.tiers if tier.every), 0)


def _answer(plan: RunPlan, workers: int | None) -> RunAnswer:
    plan = replace(plan, seeds=min(plan.seeds, MAX_SEEDS))
    return RunAnswer(plan, simulate_runs(plan, workers))


def _make_point(value: float, make: MakePlan, workers: int | None) -> CurvePoint | None:
    """Returns the point of a run; None where the plan does not divide it."""
    try:
        plan = make()
        if plan is None:
            return None
        answer, formula = _answer(plan, workers), None
    except PlanError as error:
        return CurvePoint.without_runs(value, error)
    tier = next((tier for tier in plan.setting.tiers if tier.every), None)
    if tier is not None and math.isfinite(plan.mtbf):
        restart = plan.setting.detection + plan.setting.restart + tier.load
        formula = expected_goodput(tier.every * plan.report.step_time, tier.stall, restart, plan.mtbf)
    low, high = answer.interval_90(lambda run: run.time_s["productive"] / run.seconds) or [math.nan] * 2
    return CurvePoint(value, answer.goodput, (low, high), formula, answer.days, answer.mean(answer.cost_of))


def _with_interval(plan: RunPlan, every: int) -> RunPlan:
    """Returns the run with another interval of its most frequent checkpoints."""
    tiers, changed = [], False
    for tier in plan.setting.tiers:
        tiers.append(replace(tier, every=every) if tier.every and not changed else tier)
        changed = changed or bool(tier.every)
    setting = replace(plan.setting, tiers=tuple(tiers))
    refuse_endless(setting)
    return replace(plan, setting=setting)


def _change(plan: RunPlan, **changes: dict[str, Any]) -> RunPlan:
    """Returns the run with other keys of parts of `run`; the forecast stays."""
    job = plan.job.to_dict()
    run = {key: value for key, value in job["run"].items() if value is not None}
    job |= {"run": {**run, **{name: {**run.get(name, {}), **keys} for name, keys in changes.items()}}}
    job["cluster"] = plan.job.cluster
    job.pop("published", None)
    return make_run(replace_run_keys(plan.report, load_job(job, base=plan.job.folder)))


def _with_mtbf(plan: RunPlan, factor: float) -> RunPlan:
    """Returns the run with other mean times between failures, and the stated or then best interval of checkpoints."""
    known = plan.job.run.failures.mtbf_factor if plan.job.run.failures else 1.0
    return _change(plan, failures={"mtbf_factor": known * factor})


def _at_scale(plan: RunPlan, gpus: float) -> RunPlan | None:
    """Returns the run on another number of GPUs with as many replicas; None where the plan does not divide them."""
    job = plan.job
    axis = next((scheme.over[0] for scheme in job.plan.schemes if scheme.use.startswith("data/") and scheme.over), None)
    factor = gpus / job.cluster.gpus
    if axis is None or job.cluster.groups or job.plan.has_stages or job.plan.replicas:
        return plan if factor == 1 else None
    if factor == 1:
        return plan
    scaled = job.to_dict()
    sizes = job.plan.mesh[axis] * factor, (job.batch.total or 0) * factor
    if any(size != round(size) or size < 1 for size in sizes) or scaled["plan"].get("views"):
        return None
    scaled["plan"]["mesh"] = {**scaled["plan"]["mesh"], axis: round(sizes[0])}
    scaled["batch"]["global"] = round(sizes[1])
    scaled["cluster"] = resize_cluster(job.cluster, round(gpus))
    if scaled["run"].get("tokens") is not None:
        scaled["run"]["tokens"] *= factor  # as many steps
    scaled.pop("published", None)
    try:
        report = simulate(load_job(scaled, base=job.folder))
    except MeshcastError:
        return None
    return make_run(report)


def _find_worth(plan: RunPlan, workers: int | None) -> tuple[Worth, ...]:
    """Returns what a further spare node and a store of twice the rate are worth."""
    before, worths, changed = _answer(plan, workers), [], dict[str, Callable[[], RunPlan]]()
    if plan.setting.spares is not None:
        setting = replace(plan.setting, spares=plan.setting.spares + 1)
        changed["one spare node more"] = partial(replace, plan, setting=setting)
    if plan.setting.tiers:
        keys = plan.job.run.checkpoints
        factor = 2 * (keys.bandwidth_factor if keys else 1.0)
        changed["a store of twice the rate"] = partial(_change, plan, checkpoints={"bandwidth_factor": factor})
    for name, make in changed.items():
        try:
            after = _answer(make(), workers)
        except PlanError:  # such a run does not end
            continue
        costs = [answer.mean(answer.cost_of) for answer in (before, after)]
        cost = None if costs[0] is None or costs[1] is None else costs[1] - costs[0]
        worths.append(Worth(name, after.days - before.days, after.goodput - before.goodput, cost))
    return tuple(worths)
