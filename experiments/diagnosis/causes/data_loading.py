"""Steps that wait for their data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.ranks import DATA
from meshcast.simulator.formats.logs.rank_times import BATCH
from meshcast.simulator.report.formatting import format_seconds

TIMERS = ("batch-generator", BATCH)
"""Timers of getting a batch."""

LEAST_WAIT = 0.02
"""Share of a step that its batch takes at least: getting one is never free."""


class DataLoading(Detector):
    """Time in which a step gets its data while nothing else runs."""

    name = "data loading"
    words = {
        "megatron": "a larger --num-workers, data on a local disk, or --no-create-attention-mask-in-dataloader",
        "trainer": "a larger dataloader_num_workers, dataloader_pin_memory and dataloader_prefetch_factor",
        "deepspeed": "more workers of the DataLoader, pinned memory, and data on a local disk",
        ANY: "more workers of the data loader, pinned memory, and data on a local disk",
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it where traces show it, or timers of the log."""
        least = max(run.least, LEAST_WAIT * run.step)
        if run.traced is not None:
            waits = run.traced.median(lambda step: step.idle(DATA))
            rank = max(waits, key=lambda rank: waits[rank])
            if waits[rank] >= least:
                words = f"rank {rank} gets data for {format_seconds(waits[rank])} of a step while nothing runs"
                yield self.make(run, waits[rank], words)
                return
        times = run.steps.timers(*TIMERS) if run.steps is not None else []
        if len(times) >= 3:
            seconds = statistics.median(timer.most for timer in times)
            if seconds >= least:
                yield self.make(run, seconds, f"{times[0].name} takes {format_seconds(seconds)} of a step")
