"""Copies between GPUs and the host of their node, and updates that run there.

All GPUs of a node do the same at the same time, so each has its share of what they have in common: of the links
between PCIe switches and sockets, of the host's memory, of the disks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.cluster import Cluster
from simulator.costs.estimate import NOTHING, Estimate
from simulator.ir.ops import HostCopy, HostUpdate

BEGIN = 10e-6
"""Starting a copy [s] (recalled: an asynchronous copy of a few bytes)."""

COPIED = 0.8
"""Of the nominal rate of host memory, what copies reach (assumed, as of other memories)."""

UPDATED = 0.5
"""Of the nominal rate of host memory, what an optimizer reaches that all cores share: DeepSpeed's CPU-Adam takes 0.22,
1.03 and 2.57 s for 1, 4 and 10 G parameters on two sockets of six channels of DDR4-2666, 256 GB/s (arXiv 2101.06840,
table 4; 30 bytes a parameter: 0.53, 0.46 and 0.46 of it)."""

SPREAD = 0.2
"""Of log(measured / predicted): processes are bound to sockets or not, and drives differ (assumed)."""

MEMORY = 51.2e9
"""Host memory of one GPU, where the node's is not known [bytes/s]: an eighth of 16 channels of DDR4-3200."""

DISKS = 3e9
"""Disks of one GPU, where the node's are not known [bytes/s], both ways: less than one drive of PCIe 4 (assumed)."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one GPU has of its host while all others of its node use theirs [bytes/s].

    link: to or from the host's memory. memory: of that memory, nominal, reads and writes in sum. read, write: of disks.
    latency [s]: of the link. assumed: what is not in the catalog, one sentence each; of_disks: the same of disks.
    """

    link: float
    memory: float
    read: float
    write: float
    latency: float
    assumed: tuple[str, ...]
    of_disks: tuple[str, ...]

    @classmethod
    def of(cls, cluster: Cluster, speed: float = 1.0) -> Share:
        """Of the GPUs of a cluster. speed: rate of its links against the calibrated one, never beyond the nominal."""
        tier, host, gpus = cluster.host, cluster.node.host, cluster.gpus_per_node
        link = tier.bandwidth * min(1.0, tier.payload * speed)
        if host is not None and host.uplinks is not None:
            link *= min(1.0, host.uplinks / gpus)
        missing = f"of {cluster.node.name} is not in the catalog: assumed"
        assumed = () if host else (f"host: memory {missing} {MEMORY / 1e9:g} GB/s for each GPU",)
        disks = host.read if host else None, host.write if host else None
        of_disks = () if all(disks) else (f"host: what disks reach {missing} {DISKS / 1e9:g} GB/s for each GPU",)
        read, write = (float(rate / gpus) if rate else DISKS for rate in disks)
        memory = float(host.memory / gpus) if host else MEMORY
        return cls(min(link, COPIED * memory), memory, read, write, tier.latency, assumed, of_disks)


def copy(work: HostCopy, share: Share) -> Estimate:
    """A copy between a GPU and its host, or through the host's memory its disks."""
    if not work.nbytes:
        return NOTHING
    rate = share.link
    if work.to == "nvme":
        rate = min(rate, share.read if work.back else share.write)
    return Estimate(BEGIN + share.latency + work.nbytes / rate, SPREAD)


def update(work: HostUpdate, share: Share) -> Estimate:
    """An optimizer on the host: as long as its memory takes, or the disks meanwhile."""
    disks = work.loaded / share.read + work.stored / share.write
    return Estimate(max(work.nbytes / (UPDATED * share.memory), disks), SPREAD)
