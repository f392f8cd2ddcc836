"""Copies between GPUs and the host of their node, and optimizer updates on the host.

All GPUs in use of a node do the same at the same time, so each has its share of what they have in common: of the links
between PCIe switches and sockets, of the host memory, of the disks. GPUs in use are those behind the same switches.
"""

from __future__ import annotations

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.estimate import NOTHING, Estimate
from meshcast.simulator.ir.ops import HostCopy, HostUpdate

COPY_LAUNCH = 10e-6
"""Launch of a copy [s] (recalled: an asynchronous copy of a few bytes)."""

COPY_SHARE = 0.8
"""Share of the nominal bandwidth of host memory that copies reach (assumed, as of other memories)."""

UPDATE_SHARE = 0.5
"""Share of the nominal bandwidth of host memory that an optimizer on all cores reaches: DeepSpeed's CPU-Adam takes
0.22, 1.03 and 2.57 s for 1, 4 and 10 G parameters on two sockets of six channels of DDR4-2666, 256 GB/s (arXiv
2101.06840, table 4; 30 bytes a parameter: 0.53, 0.46 and 0.46 of it)."""

SIGMA = 0.2
"""Of log(measured / forecast): processes are bound to sockets or not, and drives differ (assumed)."""

MEMORIES = {"pcie5": 76.8e9, "pcie6": 76.8e9}
MEMORY = 51.2e9
"""Host memory bandwidth of a GPU where the node's is not known [bytes/s], by its link to the host: an eighth of 16
channels of DDR5-4800, of DDR4-3200 before. Copies from pinned memory to an H200 and back move 55.3 GB/s, what PCIe 5
promises (validation/measured/h200)."""

DISKS = 3e9
"""Disk rate of a GPU where the node's is not known [bytes/s], both ways: less than a PCIe 4 drive (assumed)."""


@dataclass(frozen=True, slots=True)
class HostShare:
    """One GPU's share of its host while all GPUs of the node use it.

    Attributes:
        link: rate to or from host memory [bytes/s].
        memory: nominal bandwidth of host memory, reads and writes in sum [bytes/s].
        read: rate of reading from disks [bytes/s].
        write: rate of writing to disks [bytes/s].
        latency: of the link [s].
        assumed: what the catalog does not say of the host, a sentence each.
        assumed_disks: what it does not say of the disks.
    """

    link: float
    memory: float
    read: float
    write: float
    latency: float
    assumed: tuple[str, ...]
    assumed_disks: tuple[str, ...]

    @classmethod
    def of(cls, cluster: Cluster, speed: float = 1.0) -> HostShare:
        """Returns the share of a GPU of `cluster`. speed: rate of links against the calibrated, at most nominal."""
        tier, host, gpus = cluster.host, cluster.node.host, min(cluster.gpus_per_node, cluster.gpus)
        link = tier.bandwidth * min(1.0, tier.payload * speed)
        if host is not None and host.uplinks is not None:
            link /= max(1.0, min(gpus, cluster.gpus_per_node / host.uplinks))
        missing = f"of {cluster.node.name} is not in the catalog: assumed"
        known = host.memory if host else None
        usual = MEMORIES.get(tier.kind, MEMORY)
        assumed = () if known else (f"host: memory {missing} {usual / 1e9:g} GB/s for each GPU",)
        disks = host.read if host else None, host.write if host else None
        assumed_disks = () if all(disks) else (f"host: what disks reach {missing} {DISKS / 1e9:g} GB/s for each GPU",)
        read, write = (float(rate / gpus) if rate else DISKS for rate in disks)
        memory = float(known / gpus) if known else usual
        return cls(min(link, COPY_SHARE * memory), memory, read, write, tier.latency, assumed, assumed_disks)


def copy(work: HostCopy, share: HostShare) -> Estimate:
    """Estimates the time of a copy between a GPU and host memory, or through host memory between a GPU and disks."""
    if not work.nbytes:
        return NOTHING
    rate = share.link
    if work.to == "nvme":
        rate = min(rate, share.read if work.back else share.write)
    return Estimate(COPY_LAUNCH + share.latency + work.nbytes / rate, SIGMA)


def update(work: HostUpdate, share: HostShare) -> Estimate:
    """Estimates the time of an optimizer step on the host: the slower of host memory and of the disks."""
    disks = work.loaded / share.read + work.stored / share.write
    return Estimate(max(work.nbytes / (UPDATE_SHARE * share.memory), disks), SIGMA)
