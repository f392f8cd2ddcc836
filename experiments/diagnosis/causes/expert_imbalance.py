"""Experts of one rank that get more tokens than those of others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.simulator.report.formatting import format_seconds

LEAST_IMBALANCE = 1.1
"""Seconds of the experts of the most loaded rank over the mean from which on it is named."""


class ExpertImbalance(Detector):
    """Kernels of experts that take some ranks longer than others."""

    name = "expert imbalance"
    words = {
        "megatron": "--moe-router-load-balancing-type aux_loss, --moe-router-enable-expert-bias, or a capacity "
        "(--moe-expert-capacity-factor)",
        ANY: "an auxiliary loss or expert bias that balances the router, or a capacity factor",
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it for the stage where it costs most."""
        if run.traced is None:
            return
        computed = run.traced.median(lambda step: step.expert_seconds)
        worst, words = 0.0, ""
        for ranks in run.traced.stages.values():
            mean = statistics.mean(computed[rank] for rank in ranks)
            loaded = max(ranks, key=lambda rank: computed[rank])
            if len(ranks) > 1 and computed[loaded] > LEAST_IMBALANCE * mean and computed[loaded] - mean > worst:
                worst = computed[loaded] - mean
                words = f"experts of rank {loaded} compute {format_seconds(computed[loaded])} a step, the mean of the "
                words += f"traced ranks is {format_seconds(mean)}"
        if worst >= run.least:
            yield self.make(run, worst, words)
