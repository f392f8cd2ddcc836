"""NCCL's tuner: up to which buffer size it uses an algorithm with a protocol.

NCCL does not measure. It compares latency + bytes / rate of all algorithms and protocols by built-in constants
(NVIDIA/nccl @5067397, src/graph/tuning.cc), so it changes over at sizes that are not always the best ones. A protocol
is used up to the size at which a protocol of a higher rate looks as fast:

    ring   base + steps x step;  rate R n / steps, with LL at most R / 2 and a cap, with LL128 0.92 R
    NVLS   25 us;                rate e min(c n, R)

n: members; steps: 2 (n - 1) for an all-reduce, else n - 1; R: rate of its rings. With NVLS every member heads a
channel of at most c, of which the share e counts: groups of up to 4 GPUs (H100) or 5 (B200) use rings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshcast.hardware.load import catalog, load

LL, LL128, SIMPLE, NVLS = "LL", "LL128", "Simple", "NVLS"


class Generation(NamedTuple):
    """NCCL's constants for a generation of links.

    Attributes:
        ring_share: rate of rings, as a share of the nominal rate.
        ll_cap: highest rate of LL [bytes/s].
        nvls_channel: highest rate of an NVLS channel [bytes/s] (c above); 0 without NVLS.
        nvls_efficiency: share of the NVLS rate that counts (e above).
        channels: of a ring, each of which takes a multiprocessor.
    """

    ring_share: float
    ll_cap: float = math.inf
    nvls_channel: float = 0.0
    nvls_efficiency: float = 0.0
    channels: int = 24


GENERATIONS = {
    "nvlink2": Generation(0.8, 39e9, channels=12),
    "nvlink3": Generation(0.8, 87.7e9),
    "nvlink4": Generation(0.824, 141e9, 60e9, 0.85),
    "nvlink5": Generation(0.711, 282e9, 90e9, 0.74, channels=32),
}
"""Rates: NVLink 20 GB/s a link (2, 3), 20.6 (4), 16 channels of 40 (5); rates of channels: the highest speeds in
src/graph/search.cc; numbers of channels are recalled from logs of NCCL, not checked against a document."""
OTHER = Generation(0.8, channels=8)
"""Links that are not listed, PCIe among them."""

NVLS_CHANNELS = 16
"""Multiprocessors that NVLS takes."""

BASE = {LL: 6.6e-6, LL128: 14e-6, SIMPLE: 8.4e-6}
"""Base latency of a ring [s]."""
STEP = {LL: 0.6e-6, LL128: 1.9e-6, SIMPLE: 3.4e-6}
"""A step of a ring over NVLink [s]."""
STEP_HOST = {LL: 1.0e-6, LL128: 2.5e-6, SIMPLE: 5.7e-6}
"""A step of a ring over PCIe [s]."""
NVLS_LATENCY = 25e-6
"""Latency of NVLS [s]."""


def generation(kind: str) -> Generation:
    """Returns NCCL's constants for the links `kind` of the catalog (nvlink4-h800: those of nvlink4)."""
    return GENERATIONS.get(kind.partition("-")[0], OTHER)


def nominal_rate(kind: str) -> float:
    """Returns the rate of a GPU [bytes/s] that NCCL assumes for the links `kind` of the catalog: their generation's.

    NCCL looks it up by name and does not measure it. So the sizes at which it changes over stay the same on links that
    are faster or slower than their name says, and faster links are never slower.
    """
    links = next((name for name in (kind.partition("-")[0], kind) if name in catalog("links")), "")
    return float(load("links", links).bandwidth) if links else math.inf


def max_bytes(kind: str, links: float, members: int, steps: int, host: bool, nvls: bool) -> dict[str, float]:
    """Returns the largest buffer [bytes] for which each protocol, and NVLS, is used; 0 for never.

    links: share of a GPU's links that lead to other members. host: over PCIe. nvls: whether NVLS is available.
    """
    of, nominal = generation(kind), nominal_rate(kind)
    if math.isinf(nominal):  # NCCL has no constants for them: the fastest algorithm wins
        return dict.fromkeys((LL, LL128, SIMPLE, NVLS), math.inf)
    rate, ratio = of.ring_share * nominal * links, members / steps
    step = STEP_HOST if host else STEP
    most = {LL: min(of.ll_cap, rate / 2), LL128: 0.92 * rate, SIMPLE: rate}
    known = {name: (BASE[name] + steps * step[name], most[name] * ratio) for name in most}
    if nvls and of.nvls_channel:
        known[NVLS] = NVLS_LATENCY, of.nvls_efficiency * min(of.nvls_channel * members, rate)
    return {name: min(_break_even(protocol, other) for other in known.values()) for name, protocol in known.items()}


def _break_even(protocol: tuple[float, float], other: tuple[float, float]) -> float:
    """Returns the size [bytes] from which `other` (latency, rate) is no slower than `protocol`; else inf."""
    if other[1] <= protocol[1]:
        return math.inf
    return max(0.0, (other[0] - protocol[0]) / (1 / protocol[1] - 1 / other[1]))
