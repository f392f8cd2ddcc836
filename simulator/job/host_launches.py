"""How long hosts take to launch ops: the pace of their CPUs, and what of it hides behind the GPU."""

from __future__ import annotations

from meshcast.hardware import Cluster
from meshcast.simulator.job.framework import Framework

NEWER_X86, GRACE = 0.87, 1.08
"""Time of the host for an op, over that on the Xeons of the fourth generation beside H100: on Xeons of the fifth and
sixth generation and their like beside Blackwell, and on Grace.

The first from 21 runs of Megatron-Bridge with experts on B200 and B300 whose forecast depends on it: mean error 11.7 %
at 1.0, 9.3 % at 0.87, 11.3 % at 0.8; without any one of the four models, 0.87 is the best of the three. The second from
12 such runs on GB200 and GB300, which CUDA graphs leave little to show: 5.3 % at 1.0, 4.8 % at 1.08."""


def host_pace(cluster: Cluster) -> float:
    """Returns the time in which the hosts of a cluster launch an op, over that of the hosts of H100.

    The CPU is that beside which vendors build the GPU: Grace where NVLink joins both, otherwise a CPU of its
    generation. Those of GPUs before Blackwell are taken as equal, for no published run tells them apart. Of several
    kinds of nodes the slowest counts, since all launch the same.
    """
    gpus = [cluster.gpu, *(group.node.gpu for group in cluster.groups)]
    return max(
        GRACE if gpu.host.name == "nvlink-c2c" else NEWER_X86 if gpu.architecture == "blackwell" else 1.0
        for gpu in gpus
    )


def exposed_launch_s(framework: Framework) -> float:
    """Returns the time of the host that is added to every op [s]."""
    return framework.launch_s if framework.launch_blocking else 0.0


def hidden_launch_s(framework: Framework) -> float:
    """Returns the time of the host to launch an op while the GPU works on earlier ones [s]; none with CUDA graphs."""
    return 0.0 if framework.cuda_graphs is True or framework.launch_blocking else framework.launch_s
