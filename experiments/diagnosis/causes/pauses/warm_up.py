"""A warm-up that takes long: compilation, allocation, connections, or a data loader that fills its queue."""

from __future__ import annotations

from collections.abc import Iterable

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.simulator.report.formatting import format_seconds
from meshcast.validation.measurements.import_training_log import WARMUP_LINES


class WarmUp(Detector):
    """Steps at the begin that are longer, for more lines than a warm-up usually takes."""

    name = "long warm-up"
    pauses = True
    words = {
        "torchtitan": "a compile cache that is kept (TORCHINDUCTOR_CACHE_DIR), and shapes that do not change",
        ANY: "keep compiled kernels between runs, and shapes that do not change from step to step",
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it where the steps settle late."""
        steps = run.steps
        if steps is None or len(steps.warm) <= WARMUP_LINES:
            return
        excess = sum((interval.seconds - steps.typical) * interval.steps for interval in steps.warm)
        count = sum(interval.steps for interval in steps.warm)
        seconds = excess / (steps.steps + count)
        if seconds >= run.least:
            words = f"the first {count} steps took {format_seconds(excess)} more than the same number of later ones"
            yield self.make(run, seconds, f"{words}; they settle at step {steps.intervals[0].first}")
