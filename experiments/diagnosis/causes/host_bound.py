"""GPUs that run dry because the host launches their kernels late, one by one."""

from __future__ import annotations

from collections.abc import Iterable

from meshcast.experiments.diagnosis.causes.host_pauses import is_long
from meshcast.experiments.diagnosis.detector import ANY, Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.ranks import LATE, RankStep
from meshcast.simulator.program.categories import HOST
from meshcast.simulator.report.formatting import format_seconds

LEAST_DRY = 0.05
"""Share of the step in which the GPU waits for launches, beyond the forecast, from which on the host bounds it."""


class HostBound(Detector):
    """Short gaps between kernels, each of which was launched after the one before it had ended."""

    name = "host-bound phases"
    words = {
        "megatron": "--cuda-graph-impl local, a larger --micro-batch-size, fused kernels; fewer processes on the host",
        "torchtitan": "compile.enable, a larger training.local_batch_size; fewer processes on the host",
        ANY: "CUDA graphs, torch.compile, a larger micro-batch; fewer processes on the host",
    }

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields it for the rank whose GPU waits longest."""
        traced = run.traced
        if traced is None or run.report is None or not traced.on_gpu:
            return
        dry = traced.median(_sum_short)
        rank = max(dry, key=lambda rank: dry[rank])
        forecast = run.report.breakdown.parts[HOST]
        seconds = dry[rank] - forecast
        if seconds >= max(LEAST_DRY * run.step, run.least):
            gaps = traced.steps[rank][-1].gaps
            late = sum(1 for gap in gaps if gap.doing.get(LATE))
            words = f"the GPU of rank {rank} waits {format_seconds(dry[rank])} of a step for launches, forecast "
            yield self.make(run, seconds, f"{words}{format_seconds(forecast)}; {late} kernels were launched too late")


def _sum_short(step: RankStep) -> float:
    return sum(gap.doing.get(LATE, 0.0) for gap in step.gaps if not is_long(gap, step))
