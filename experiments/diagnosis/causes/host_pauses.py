"""A host that does something else for a while in a step: it launches nothing, and calls no operator."""

from __future__ import annotations

from collections.abc import Iterable

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.ranks import ALLOCATION, COLLECTION, LATE, SAVE, Gap, RankStep
from meshcast.simulator.report.formatting import format_seconds

LONG = 0.01
"""Share of the step from which on a gap is one that the host makes by something else than launching."""

LEAST_PAUSE = 0.05
"""Share of the step that such gaps take."""

LEAST_ON_CPU = 0.1
"""The same where operators run on the host: of a step of small operators Python takes some percent between them."""

HOST_WORK = {
    ALLOCATION: "memory is allocated or freed",
    COLLECTION: "garbage is collected",
    SAVE: "a checkpoint is saved",
}


class HostPauses(Detector):
    """Long gaps in which a host launches nothing."""

    name = "host pauses"
    words = {
        ANY: "what the training loop does between these operators: printing, .item(), sleeps, logging, locks; other "
        "processes on the host's cores"
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it for the rank that pauses longest."""
        if run.traced is None:
            return
        paused = run.traced.median(sum_long)
        rank = max(paused, key=lambda rank: paused[rank])
        share = LEAST_PAUSE if run.traced.on_gpu else LEAST_ON_CPU
        if paused[rank] < max(share * run.step, run.least):
            return
        step = run.traced.steps[rank][-1]
        gaps = sorted((gap for gap in step.gaps if is_long(gap, step)), key=lambda gap: -gap.seconds)
        longest = (
            f"; the longest, {format_seconds(gaps[0].seconds)}, after {gaps[0].after or 'the start'}" if gaps else ""
        )
        words = (
            f"nothing runs on rank {rank} for {format_seconds(paused[rank])} of a step, in {len(gaps)} gaps{longest}"
        )
        known = [
            f"{format_seconds(seconds)} of it while {words}"
            for kind, words in HOST_WORK.items()
            if (seconds := step.idle(kind)) > 0
        ]
        yield self.make(run, paused[rank], words, *known)


def is_long(gap: Gap, step: RankStep) -> bool:
    """Returns whether a gap is too long for a late launch."""
    return gap.seconds >= LONG * step.compared.real.span


def sum_long(step: RankStep) -> float:
    """Returns the seconds of long gaps in which the host does what is neither data loading nor waiting [s]."""
    kinds = (LATE, *HOST_WORK)
    return sum(gap.doing.get(kind, 0.0) for gap in step.gaps if is_long(gap, step) for kind in kinds)
