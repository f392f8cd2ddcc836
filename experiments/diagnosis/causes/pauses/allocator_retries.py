"""Retries of the caching allocator: memory is full or in pieces, so it waits for the GPU, frees all that it caches, and
allocates again."""

from __future__ import annotations

from collections.abc import Iterable

from meshcast.experiments.diagnosis.causes.pauses.pause import list_steps
from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.simulator.formats.logs.training_log import RETRIES

RELIEF = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or less memory: meshcast advise"


class AllocatorRetries(Detector):
    """Steps in which the allocator frees its cache and allocates anew."""

    name = "allocator retries"
    pauses = True
    words = {ANY: RELIEF}

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it where the log tells of retries behind the warm-up, or a trace of allocations."""
        steps = run.steps
        if steps is None or not (logged := steps.with_event(RETRIES)):
            return
        count = sum(event.count for interval in logged for event in interval.events if event.kind == RETRIES)
        shares = [share for interval in logged if (share := interval.line.reserved_share) is not None]
        full = [f"{max(shares):.0%} of the memory is reserved"] if shares else []
        without = [interval.seconds for interval in steps.intervals if interval not in logged]
        if len(without) < len(logged) / 4 or len(without) < 3:
            yield self.make(run, None, f"the log tells of {count:.0f} in nearly all steps", *full)
            return
        usual = sorted(without)[len(without) // 2]
        excess = sum(max(interval.seconds - usual, 0.0) * interval.steps for interval in logged) / steps.steps
        if excess >= run.least:
            yield self.make(
                run, excess, f"the log tells of {count:.0f} at {list_steps(logged)}, which are longer", *full
            )
