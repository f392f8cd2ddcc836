"""Lower bound of the energy of a step: idle power for as long as it takes, and the FLOPs that every plan executes."""

from __future__ import annotations

from typing import NamedTuple

from meshcast.hardware.gpu import GPU
from meshcast.simulator.costs.power import overhead, power_model
from meshcast.simulator.ir.operators import QUANTISED
from meshcast.simulator.job.job import Job
from meshcast.simulator.models.flops import needed_flops


class LeastEnergy(NamedTuple):
    """Energy of a step in no plan is below `joules` + `watts` x its seconds.

    watts: idle power of all GPUs with their nodes and the data centre.
    joules: of the FLOPs of the model.
    """

    watts: float = 0.0
    joules: float = 0.0

    def bound(self, seconds: float) -> float:
        """Returns the least energy of a step that takes `seconds` [J]; also of arrays."""
        return self.joules + self.watts * seconds


def least_energy(job: Job) -> LeastEnergy:
    """Returns the least energy of a step of a job on its cluster, for any plan.

    Kernels add the least for each FLOP at the peak of their GPU, where it is shared among the most FLOPs. With
    documents or micro-batches of different lengths attention is left out, and so are all FLOPs beyond those of the
    model.
    """
    cluster, run, batch = job.cluster, job.run, job.batch
    counts: dict[GPU, int] = {}
    for node, number in [(group.node, group.nodes) for group in cluster.groups] or [(cluster.node, 0)]:
        counts[node.gpu] = counts.get(node.gpu, 0) + (number * int(node.gpus) or cluster.gpus)
    beside = {gpu: overhead(gpu, run.node_watts_per_gpu, run.pue) for gpu in counts}
    watts = sum(
        count * (power_model(gpu).idle_watts + beside[gpu].node) * beside[gpu].pue for gpu, count in counts.items()
    )
    if batch.lengths or batch.total is None or batch.sequence is None:
        return LeastEnergy(watts)
    framework = job.framework
    formats = {framework.weights, *([QUANTISED[framework.quantised].dtype] if framework.quantised else [])}
    each = [
        power_model(gpu).least_joules_per_flop(dtype) * beside[gpu].pue
        for gpu in counts
        for dtype in formats
        if dtype in gpu.peak
    ]
    seq = 1 if batch.documents else batch.sequence
    flops = needed_flops("causal", job.model, seq, job.adapters, job.forward_only) * batch.total * batch.sequence
    return LeastEnergy(watts, flops * min(each, default=0.0))
