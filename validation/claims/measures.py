"""Numbers that claims read off forecasts and pipeline cases.

Of a job: any figure of docs/figures.md, or any of `OF_REPORT`, some with words after dots
(``kernel_s.gemm.B``, ``sent_gib.tp.all_gather``, ``memory_gib.activations``, ``between_s.norm2.residual2``). Of a
pipeline case: any number of the answer of ``validate pipeline``. Of a plan: any of `OF_PLAN` of `planner_run.py`,
``plan.KEY``, or those of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.ir.ops import Collective, Transfer
from meshcast.simulator.program.categories import EXPOSED, KINDS, axis_of, kind_of
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.figures import FIGURES
from meshcast.simulator.report.report import Report
from meshcast.validation.claims.planner_run import OF_PLAN
from meshcast.validation.claims.played_measures import (
    list_most,
    measure_between,
    measure_contended,
    priced_ops,
    sum_across,
)
from meshcast.validation.claims.relation import Quantity

OF_CASE = ("makespan", "span_max", "bubble_rate", "bubble_rate_span", "in_flight_b", "in_flight_w", "memory", "period",
           "weight_versions")  # fmt: skip
"""Numbers of a pipeline case; the first is the default."""

DEFAULT = "step_time_s"
"""Number of a job where a claim names none."""

PHASES = ("F", "B", "W", "R", "U")
SHARES_SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Times (n-1)/n of the buffer that a rank sends."""


def _sum_kernels(report: Report, kind: str, phase: str = "") -> Quantity:
    """Sums the seconds of the kernels of a kind on every device, overlapped kernels included."""
    seconds_by_device = [0.0] * report.play.program.devices
    for device, op, seconds, count in priced_ops(report):
        if kind_of(op) == kind and phase in ("", op.phase):
            seconds_by_device[device] += count * seconds
    return seconds_by_device


def _sum_sent(report: Report, axis: str, operation: str = "") -> Quantity:
    """Sums the GiB that a rank of every device sends in collectives, or in messages between stages."""
    sent = [0.0] * report.play.program.devices
    mesh = report.play.plan.mesh
    for device, op, _, count in priced_ops(report):
        if isinstance(op.work, Collective) and axis_of(op) == axis and operation in ("", op.work.operation):
            n = len(op.work.members or ()) or mesh.size(op.work.axes)
            share = SHARES_SENT.get(op.work.operation, 0.0) * (n - 1) / n or 1.0
            sent[device] += count * share * op.work.nbytes * (1 + op.work.both_ways) / GIB
    if axis == "pp":
        turns = report.play.program.timetable.turns
        for slot, send in report.play.program.sent:
            work = send.work
            assert isinstance(work, Transfer)
            sent[send.source] += turns[slot] * work.nbytes / GIB
    return sent


def _list_memory(report: Report, category: str = "") -> Quantity:
    """Lists the GiB that tensors take at the peak of every stage; of a single category if it is named."""
    return [(peak.by.get(category, 0.0) if category else peak.total) / GIB for peak in report.play.peaks]


def _list_states(report: Report, category: str = "") -> Quantity:
    """Lists the GiB of states that every stage holds through the whole step: shards where they are sharded."""
    return [
        sum(nbytes for state, nbytes in states.items() if category in ("", state)) / GIB
        for states in report.play.resting
    ]


def _count_model_tflops(report: Report, convention: str = "palm") -> Quantity:
    """Returns FLOP/s of the model on a GPU / 1e12, without recomputation."""
    return report.flops_per_token(convention) * report.tokens_per_s_per_gpu / 1e12


def _count_executed_tflops(report: Report) -> Quantity:
    """Returns FLOP/s of a GPU / 1e12, recomputation included."""
    return _count_model_tflops(report) * report.hfu / report.mfu["palm"]  # type: ignore[operator, return-value]


RUN = ("goodput", "ettr", "failures", "mtbf_hours", "days", "wasted_s", "checkpoint_s")
"""Numbers of simulated runs: `checkpoint_s` is the time from the beginning of a checkpoint until it can be used, of
those that load fastest; `wasted_s` is the time from the checkpoint to which a failure leads back until training is
where it was, without detection and restart, per failure."""


def _simulate_run(report: Report, name: str) -> Quantity:
    """Returns a number of the mean of the simulated runs of a job."""
    from meshcast.simulator.runs.answer import RunAnswer
    from meshcast.simulator.runs.inputs import make_run
    from meshcast.simulator.runs.training import simulate_run

    plan = make_run(report)
    if name == "mtbf_hours":
        return plan.mtbf / 3600
    if name == "checkpoint_s":
        return plan.setting.tiers[0].stall + plan.setting.tiers[0].write
    answer = RunAnswer(plan, [simulate_run(plan.setting, plan.seed, number) for number in range(plan.seeds)])
    failures = sum(answer.failures.values())
    if name == "wasted_s":
        pauses = answer.time_s["restart"] - failures * plan.setting.restart
        return (answer.time_s["lost_work"] + max(pauses, 0.0)) / failures
    known = {"goodput": answer.goodput, "ettr": answer.effective_ratio, "failures": failures, "days": answer.days}
    return known[name]


OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "shift"),
    "push_pull",
)


@dataclass(frozen=True)
class ReportMeasure:
    """A number of a forecast that is no figure.

    compute: from the report and the words behind the name.
    words: valid words behind the first dot, and behind the second; () for any word.
    needed: how many of them must be there.
    better: which of two values is better.
    """

    compute: Callable[..., Quantity]
    words: tuple[tuple[str, ...], ...] = ()
    needed: int = 0
    better: str = "lower"


OF_REPORT = {
    "parameters": ReportMeasure(lambda report: report.job.model.parameters / 1e9),
    "fits": ReportMeasure(lambda report: float(report.fits), better="higher"),
    "slices": ReportMeasure(lambda report: float(len(report.play.plan.slice_lengths))),
    "tokens_per_s": ReportMeasure(
        lambda report: report.tokens_per_s_per_gpu * report.job.cluster.gpus, better="higher"
    ),
    "model_tflops": ReportMeasure(_count_model_tflops, (("palm", "causal"),), better="higher"),
    "executed_tflops": ReportMeasure(_count_executed_tflops, better="higher"),
    "run": ReportMeasure(_simulate_run, (RUN,), needed=1, better="higher"),
    "kernel_s": ReportMeasure(_sum_kernels, (KINDS, PHASES), needed=1),
    "sent_gib": ReportMeasure(_sum_sent, (EXPOSED, OPERATIONS), needed=1),
    "across_gib": ReportMeasure(sum_across, (EXPOSED, OPERATIONS), needed=1),
    "between_s": ReportMeasure(measure_between, ((),) * 4, needed=2),
    "contended_s": ReportMeasure(measure_contended),
    "states_gib": ReportMeasure(_list_states, (CATEGORIES,)),
    "memory_gib": ReportMeasure(_list_memory, (CATEGORIES,)),
    "most_gib": ReportMeasure(list_most, (CATEGORIES,), needed=1),
}
"""Measures of a job besides its figures."""


def check_measure(name: str, kind: str) -> None:
    """Raises PlanError for a measure that does not exist. kind: ``jobs``, ``cases`` or ``plans``."""
    if not name or (kind == "plans" and (name in OF_PLAN or name.startswith("plan."))):
        return
    if kind == "cases":
        if name not in OF_CASE:
            raise PlanError("measure", "pipeline cases have no such number", nearest(name, OF_CASE), name)
        return
    head, *words = name.split(".")
    if name in FIGURES:
        return
    if head not in OF_REPORT:
        raise PlanError("measure", "there is no such number of a forecast", nearest(head, [*FIGURES, *OF_REPORT]), name)
    allowed, needed = OF_REPORT[head].words, OF_REPORT[head].needed
    if not needed <= len(words) <= len(allowed):
        forms = " and ".join(f".{{{'|'.join(valid) or 'name of an op'}}}" for valid in allowed) or "nothing"
        raise PlanError("measure", f"{head} is followed by {forms}", "Correct the words after it", name)
    for word, valid in zip(words, allowed, strict=False):
        if valid and word not in valid:
            raise PlanError("measure", f"{head} has no {word!r}", nearest(word, valid), name)


def read_measure(report: Report, name: str) -> Quantity:
    """Returns the number of a forecast. Raises PlanError if the job does not have it."""
    name = name or DEFAULT
    if name in FIGURES:
        value = FIGURES[name].compute(report)
        if value is None:
            needs = FIGURES[name].needs or "what it needs"
            raise PlanError("measure", "the job does not have this figure", f"Add {needs} to the job", name)
        return float(value)
    head, *words = name.split(".")
    return OF_REPORT[head].compute(report, *words)


def read_case(answer: dict[str, Any], name: str) -> Quantity:
    """Returns the number of a pipeline case, as ``validate pipeline`` answers it. Raises PlanError if it has none."""
    if answer["status"] == "refused":
        raise PlanError("case", str(answer["reason"]), "Correct the case")
    value = answer.get(name or OF_CASE[0])
    if value is None:
        remedy = "memory needs m_w; period and weight_versions need a schedule without a flush"
        raise PlanError("measure", "the case does not have this number", remedy, name)
    return [float(number) for number in value] if isinstance(value, list) else float(value)


def better_of(name: str, is_case: bool) -> str:
    """Returns which of two values of a measure is better: ``lower`` or ``higher``."""
    if is_case or not name:
        return "lower"
    better = FIGURES[name].better if name in FIGURES else OF_REPORT[name.partition(".")[0]].better
    return "higher" if better == "higher" else "lower"
