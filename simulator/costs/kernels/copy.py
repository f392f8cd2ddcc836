"""Copies by a copy engine over a link: to and from the memory of the host, or a disk.

    seconds = latency + bytes / (payload rate)

The link tells its nominal rate, the share of it that large transfers reach, and the latency of the wire
(`hardware.link.Link`); `ISSUE` is what a driver adds to each copy. Memory of the host must be pinned: pageable memory
passes through a pinned buffer of the driver, and reaches about half of the rate (NVIDIA, CUDA C++ Best Practices Guide,
"Pinned Memory"). Copies inside a GPU's memory are kernels: `Memory` that reads and writes as much.
"""

from __future__ import annotations

from hardware.link import Link
from simulator.costs.estimate import NOTHING, Estimate

ISSUE = 5e-6
"""From the call of a copy to its first byte [s]: the driver and the engine. Recalled, not measured here."""

SPREAD = 0.06
"""Between hosts: 55.4 and 51 GB/s over PCIe 5 on an H200 (nvbandwidth) and an H100 (Azure/AI-benchmarking-guide)."""


def seconds(nbytes: float, link: Link) -> float:
    """One copy, alone on its direction of the link."""
    return ISSUE + link.latency + nbytes / (link.payload * link.bandwidth)


def price(nbytes: float, link: Link) -> Estimate:
    """The same as an estimate. Both directions of a link work at once."""
    return Estimate(seconds(nbytes, link), SPREAD) if nbytes else NOTHING
