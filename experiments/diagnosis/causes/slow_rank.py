"""A rank that computes longer than the others of its stage, for which all wait."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.ranks import TracedRun
from meshcast.simulator.formats.logs.rank_times import ROUND_TRIP
from meshcast.simulator.formats.logs.training_log import RankTimes
from meshcast.simulator.report.formatting import format_seconds

LEAST_SLOWNESS = 0.05
"""Share of the others' time by which a rank is slower."""

ALWAYS = 0.8
"""Share of the steps in which it is the same rank: chance has all of them in turn."""

CERTAIN = 3.0
"""Standard errors of the mean by which it is slower."""

TIMERS = (ROUND_TRIP, "forward-compute", "backward-compute")
"""Timers whose time is a rank's own work, those that tell most first: a rank's ``forward-backward`` ends when all
do."""


class SlowRank(Detector):
    """A rank with longer computation than ranks of equal work."""

    name = "slow rank"
    words = {
        ANY: "look at this rank's GPU and host (clocks, other processes, its PCIe link); leave its node out "
        "if it stays slow",
        "megatron": "--log-straggler tells the rank, its clock, power and temperature; leave its node out if it stays",
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it where it is the same rank in nearly all steps."""
        if run.traced is not None and (cause := self._find_in_traces(run, run.traced)) is not None:
            yield cause
        elif run.steps is not None:
            for name in TIMERS:
                times = [timer for timer in run.steps.timers(name) if timer.least > 0]
                if len(times) >= 3 and (cause := self._find_in_timers(run, times)) is not None:
                    yield cause
                    return

    def _find_in_traces(self, run: RunEvidence, traced: TracedRun) -> Cause | None:
        computed = traced.median(lambda step: step.dense_seconds)
        for ranks in traced.stages.values():
            if len(ranks) < 2:
                continue
            slowest = max(ranks, key=lambda rank: computed[rank])
            others = statistics.median(computed[rank] for rank in ranks if rank != slowest)
            seconds = computed[slowest] - others
            count = min(len(traced.steps[rank]) for rank in ranks)
            wins = sum(
                max(ranks, key=lambda rank: traced.steps[rank][step].dense_seconds) == slowest for step in range(count)
            )
            surely = is_certain([_measure_lead(traced, ranks, slowest, step) for step in range(count)])
            if seconds >= max(LEAST_SLOWNESS * others, run.least) and wins >= ALWAYS * count and surely:
                words = f"rank {slowest} computes {format_seconds(computed[slowest])} a step, "
                words += f"the other{'s' * (len(ranks) > 2)}"
                steps = f"it is the slowest in {wins} of {count} traced steps"
                return self.make(run, seconds, f"{words} {format_seconds(others)}", steps)
        return None

    def _find_in_timers(self, run: RunEvidence, times: Sequence[RankTimes]) -> Cause | None:
        """Returns it where a timer differs between ranks: of stages of a pipeline it does so by their layers."""
        name = times[0].name
        pipelined = run.report is None or run.report.play.plan.shape.p > 1
        if pipelined and name != ROUND_TRIP and not times[0].ranks:
            return None
        slow = statistics.median(timer.most for timer in times)
        seconds = slow - statistics.median(timer.least for timer in times)
        slowest = [max(timer.ranks, key=timer.ranks.__getitem__) for timer in times if timer.ranks]
        if slowest:
            who, wins = Counter(slowest).most_common(1)[0]
            if wins < ALWAYS * len(slowest):
                return None
            if len(times[0].ranks) > 2:  # all ranks are named: those of its stage are alike
                equals = _list_equal(run, who, times[0].ranks)
                usual = statistics.median(
                    timer.ranks[rank] for timer in times for rank in equals if rank in timer.ranks
                )
                seconds = slow - usual
            words = f"rank {who} is the slowest on {wins} of {len(slowest)} lines of {name}"
        else:
            words = f"{name} takes one rank longer on {len(times)} lines"
        if seconds < max(LEAST_SLOWNESS * (slow - seconds), run.least):
            return None
        return self.make(run, seconds, f"{words}: {format_seconds(slow)}, others {format_seconds(slow - seconds)}")


def is_certain(leads: Sequence[float]) -> bool:
    """Returns whether a difference that is measured several times is `CERTAIN` times the error of its mean."""
    if len(leads) < 2:
        return True
    return statistics.mean(leads) >= CERTAIN * statistics.stdev(leads) / len(leads) ** 0.5


def _measure_lead(traced: TracedRun, ranks: Sequence[int], slowest: int, step: int) -> float:
    """Returns the seconds by which a rank computes longer in a step than the others [s]."""
    others = [traced.steps[rank][step].dense_seconds for rank in ranks if rank != slowest]
    return traced.steps[slowest][step].dense_seconds - statistics.median(others)


def _list_equal(run: RunEvidence, rank: int, ranks: Iterable[int]) -> list[int]:
    """Returns the other ranks with equal work: those of the same pipeline stage, or all where no job is known."""
    others = [other for other in ranks if other != rank]
    if run.report is None:
        return others
    mesh, axis = run.report.play.plan.mesh, run.report.play.plan.ranks.pipeline_axis
    if axis not in mesh.axes:
        return others
    stage = [
        other
        for other in others
        if _stage(mesh.stride(axis), mesh.size(axis), other) == _stage(mesh.stride(axis), mesh.size(axis), rank)
    ]
    return stage or others


def _stage(stride: int, size: int, rank: int) -> int:
    return rank // stride % size
