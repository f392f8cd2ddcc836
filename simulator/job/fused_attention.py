"""Whether the GPUs of a cluster run the fused attention of a framework."""

from __future__ import annotations

from meshcast.hardware import GPU, Cluster
from meshcast.simulator.job.framework import Framework


def find_gpu_without_flash(framework: Framework, cluster: Cluster) -> GPU | None:
    """Returns a GPU of the cluster that is too old for the framework's fused attention; None if all run it.

    Of several kinds of nodes a single one is enough, for a stage on it would run another attention than the others.
    """
    if framework.attention != "flash":
        return None
    least = framework.attention_since
    gpus = [cluster.gpu, *(group.node.gpu for group in cluster.groups)]
    return next((gpu for gpu in gpus if gpu.compute_capability and gpu.compute_capability.value < least), None)
