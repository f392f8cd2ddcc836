"""Time of copies by a copy engine over a link, to and from host memory or a disk.

    seconds = ISSUE + latency + bytes / (payload x rate)

The link states its nominal rate, its payload (the share of the rate that large transfers reach) and its latency
(`hardware.link.Link`); `ISSUE` is what the driver adds to each copy. Host memory is assumed to be pinned: pageable
memory goes through a pinned buffer of the driver and reaches about half of the rate (NVIDIA, CUDA C++ Best Practices
Guide, "Pinned Memory"). Copies within a GPU's memory are memory-bound kernels (`simulator.ir.ops.Memory`).
"""

from __future__ import annotations

from meshcast.hardware.link import Link
from meshcast.simulator.costs.estimate import NOTHING, Estimate

ISSUE = 5e-6
"""Time from the call of a copy to its first byte [s], in driver and copy engine. Assumed, not measured."""

SIGMA = 0.06
"""Standard deviation of log(measured / forecast), from the difference between hosts: 55.4 and 51 GB/s over PCIe 5 on an
H200 (nvbandwidth) and an H100 (Azure/AI-benchmarking-guide)."""


def seconds(nbytes: float, link: Link) -> float:
    """Computes the time of one copy that has its direction of the link to itself [s]."""
    return ISSUE + link.latency + nbytes / (link.payload * link.bandwidth)


def price(nbytes: float, link: Link) -> Estimate:
    """Prices one copy. Both directions of a link work concurrently."""
    return Estimate(seconds(nbytes, link), SIGMA) if nbytes else NOTHING
