"""Steps whose update is left out: they take their time and train nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.steps import StepInterval
from meshcast.simulator.formats.logs.training_log import SKIP


class SkippedSteps(Detector):
    """Steps that overflowed, or whose loss was no number."""

    name = "skipped steps"
    pauses = True
    words = {
        "megatron": "--bf16 has no loss scale; with --fp16 a smaller --initial-loss-scale",
        "deepspeed": "bf16 has no loss scale; with fp16 a smaller initial_scale_power",
        ANY: "train in bf16, which has no loss scale, and look at the loss where steps are skipped",
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it where enough steps are skipped behind the warm-up, in which the scale of the loss is found."""
        steps = run.steps
        if steps is None:
            return
        searched = [*takewhile(_count_skipped, steps.intervals)]  # a run begins with the search of its loss scale
        logged = [interval for interval in steps.intervals[len(searched) :] if _count_skipped(interval)]
        count = sum(map(_count_skipped, logged))
        seconds = count / steps.steps * steps.typical
        if seconds >= run.least:
            losses = [interval.line.loss for interval in logged if interval.line.loss is not None]
            words = f"; their loss is up to {max(losses):.3g}" if losses else ""
            yield self.make(run, seconds, f"{count} of {steps.steps} steps were skipped or had no loss{words}")


def _count_skipped(interval: StepInterval) -> int:
    """Returns the number of skipped steps of an interval: as its line states it, or events between lines."""
    events = int(sum(event.count for event in interval.events if event.kind == SKIP))
    return min(interval.line.skipped or events, interval.steps)
