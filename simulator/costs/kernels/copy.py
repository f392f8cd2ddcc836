"""Copies by a copy engine over a link, to and from host memory or a disk.

    seconds = ISSUE + latency + bytes / (payload x rate)

The link states its nominal rate, its payload (the share of the rate that large transfers reach) and its latency
(`hardware.link.Link`); `ISSUE` is what the driver adds to each copy. Host memory must be pinned: pageable memory goes
through a pinned buffer of the driver and reaches about half of the rate (NVIDIA, CUDA C++ Best Practices Guide, "Pinned
Memory"). Copies within a GPU's memory are kernels: `Memory` that reads and writes the same bytes.
"""

from __future__ import annotations

from hardware.link import Link
from simulator.costs.estimate import NOTHING, Estimate

ISSUE = 5e-6
"""From the call of a copy to its first byte [s]: driver and copy engine. Recalled, not measured here."""

SIGMA = 0.06
"""Between hosts: 55.4 and 51 GB/s over PCIe 5 on an H200 (nvbandwidth) and an H100 (Azure/AI-benchmarking-guide)."""


def seconds(nbytes: float, link: Link) -> float:
    """Time [s] of one copy, alone in its direction of the link."""
    return ISSUE + link.latency + nbytes / (link.payload * link.bandwidth)


def price(nbytes: float, link: Link) -> Estimate:
    """The estimate of one copy. Both directions of a link work concurrently."""
    return Estimate(seconds(nbytes, link), SIGMA) if nbytes else NOTHING
