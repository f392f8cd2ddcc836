"""Relations that hold for every job: between engines, parts and whole, a job and the same job changed."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.program import plans_orders
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import fixed_order_step, forecast_step
from meshcast.simulator.ir.capabilities import ShardsStates, schemes_with
from meshcast.simulator.job.hardware_figures import hardware_figures
from meshcast.simulator.report.report import Report
from meshcast.validation.published.baseline import peak_format, seconds_at_peak
from meshcast.validation.selfcheck.replay import CLOSE, describe_disagreement, replay

OTHER_ORDER = 1e-2
"""Share of a step by which faster hardware may lengthen it where passes run in pairs: their kernels are list-scheduled
by their durations (Graham's anomalies; see `simulator.program.block.interleave` for what bounds them). So, too, where
gradients are summed together that are ready at the same tick of a clock."""

OTHER_PAIRS = 5e-2
"""Share of a peak by which longer passes may lower it where they run in pairs and gather weights: kernels lie in
another order then, and other weights are whole beside a gradient. Of 1,109 drawn jobs five peaks were lower, by up to
4.6 %."""

TICKING = "data/horovod"
"""The data scheme with such a clock."""

FIGURES = 2
"""Figures of the hardware that are made better, of each job."""

Described = dict[str, Any]
Relation = Callable[[Described, Report, SharedWork], str]
"""Takes a job, its forecast and shared work; returns what is wrong, or an empty string."""


def engines_agree(described: Described, report: Report, shared: SharedWork) -> str:
    """SimPy and every rank by itself give the step, the attribution and the times of the forecast."""
    return describe_disagreement(replay(report)[1])


def parts_add_up(described: Described, report: Report, shared: SharedWork) -> str:
    """The parts of the breakdown are the step, and none is negative."""
    parts, overhead = report.breakdown.parts, report.job.framework.step_overhead_s
    total = math.fsum(parts.values()) + overhead
    if not _close(total, report.step_time):
        return f"parts add up to {total!r} s of a step of {report.step_time!r} s"
    worst = min(parts, key=lambda part: parts[part])
    return f"{worst} is {parts[worst]!r} s" if parts[worst] < -CLOSE * report.step_time else ""


def takes_its_flops(described: Described, report: Report, shared: SharedWork) -> str:
    """No step is shorter than its FLOPs at the peak rate of all GPUs."""
    least = seconds_at_peak(report, peak_format(report.job.framework.quantised or report.job.framework.weights))
    if least is None or report.step_time >= least * (1 - CLOSE):
        return ""
    return f"{report.step_time!r} s, and {least!r} s at the peak rate"


def tokens_are_the_batch(described: Described, report: Report, shared: SharedWork) -> str:
    """Tokens a second and GPU, times both, are the tokens of a step."""
    batch, answer = report.job.batch, report.to_dict()
    tokens = answer["tokens_per_s_per_gpu"] * report.job.cluster.gpus * report.step_time
    wanted = (batch.total or 0) * (batch.sequence or report.job.model.seq)
    return "" if _close(tokens, wanted) else f"{tokens!r} tokens a step, the batch has {wanted}"


def numbers_are_finite(described: Described, report: Report, shared: SharedWork) -> str:
    """The answer holds no NaN and no infinity, and the interval holds the step."""
    try:
        json.dumps(report.to_dict(), allow_nan=False)
    except ValueError as error:
        return str(error)
    low, high = report.interval_90
    return "" if 0 < low <= report.step_time <= high else f"interval {low!r} to {high!r} of {report.step_time!r} s"


def order_of_keys_is_nothing(described: Described, report: Report, shared: SharedWork) -> str:
    """A job with its keys in another order is the same job."""
    turned = simulate(_turn(described), shared_work=shared)
    same = turned.step_time == report.step_time and turned.peak_device == report.peak_device
    return "" if same else f"{turned.step_time!r} s with keys in reverse, {report.step_time!r} s as written"


def faster_is_not_slower(described: Described, report: Report, shared: SharedWork) -> str:
    """Twice a rate of the hardware, or half a latency, never makes a step longer.

    Held for some figures of each job. A step whose orders are planned with durations may become as long as with orders
    that no duration changes. Of nodes of several kinds, each with figures of its own, none is changed.
    """
    job, plan = report.job, report.play.plan
    if job.cluster.groups:
        return ""
    figures = hardware_figures(job, bool(report.host_uses))
    drawn = random.Random(json.dumps(described)).sample(figures, min(FIGURES, len(figures)))
    most = max(report.step_time, fixed_order_step(plan, shared)) if plans_orders(plan) else report.step_time
    ticks = any(scheme.use == TICKING for scheme in plan.every_scheme)
    near = OTHER_ORDER if plan.schedule.pairs_passes or ticks else CLOSE
    lenders = shared.calibration.lenders
    for figure in drawn:
        other = figure.change(job, 2.0)
        if lenders(other.cluster.gpu) != lenders(job.cluster.gpu):
            continue  # a GPU that borrows its rates is then like that of another GPU
        faster = forecast_step(other, shared).step_time
        if faster > most * (1 + near):
            return f"twice as good a {figure.label}: {faster!r} s, without: {report.step_time!r} s"
    return ""


def memory_grows_with_the_work(described: Described, report: Report, shared: SharedWork) -> str:
    """Twice as many samples in a micro-batch, at as many micro-batches, never need less memory in the same order of
    passes; a schedule that plans with durations may plan another one for longer passes, and kernels of paired passes
    that gather weights may lie in another one."""
    larger = copy.deepcopy(described)
    larger["batch"] |= {key: 2 * described["batch"][key] for key in ("global", "micro") if key in larger["batch"]}
    try:
        other = simulate(larger, shared_work=shared)
    except MeshcastError:
        return ""
    orders = [forecast.play.step.program.timetable.orders for forecast in (report, other)]
    plan = report.play.plan
    gathers = any(scheme.gathered_axes for scheme in schemes_with(plan.every_scheme, ShardsStates))
    near = OTHER_PAIRS if plan.schedule.pairs_passes and gathers else CLOSE
    if other.peak_allocated >= report.peak_allocated * (1 - near) or orders[0] != orders[1]:
        return ""
    return f"{other.peak_allocated!r} bytes with twice the micro-batch, {report.peak_allocated!r} as written"


ENGINES = "SimPy and every rank give the same step"
"""Name of the relation between the engines."""

RELATIONS: dict[str, Relation] = {
    ENGINES: engines_agree,
    "parts add up to the step": parts_add_up,
    "no step under its FLOPs at peak": takes_its_flops,
    "tokens a second are batch over step": tokens_are_the_batch,
    "every number is finite": numbers_are_finite,
    "the order of keys changes nothing": order_of_keys_is_nothing,
    "faster hardware is never slower": faster_is_not_slower,
    "memory grows with the micro-batch": memory_grows_with_the_work,
}

EXACT = ("parts add up to the step", "no step under its FLOPs at peak", "every number is finite")
"""Relations that need no other forecast than that of the job itself, whatever plan it has."""


def _close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=CLOSE)


def _turn(value: Any) -> Any:
    """The same value with the keys of all mappings in reverse. The order of a mesh means something."""
    if isinstance(value, dict):
        return {key: _turn(value[key]) for key in reversed(value)}
    return [_turn(entry) for entry in value] if isinstance(value, list) else value
