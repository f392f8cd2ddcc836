"""Up to which size NCCL uses an algorithm and a protocol.

NCCL does not measure: it compares latency + bytes / rate of all its ways, with constants of its own (NVIDIA/nccl
@5067397, src/graph/tuning.cc), and so changes over at sizes that are not always the best. A way is in use up to the
size where a wider one looks as fast:

    ring   base + steps x step;  rate R n / steps, with LL at most R / 2 and a cap, LL128 0.92 R
    sums in the switch   25 us;  rate e min(c n, R)

n: members, steps: 2 (n - 1) for an all-reduce, n - 1 else, R: rate of its rings. For sums in the switch every member
is the head of one channel of at most c, of which e is of use: so groups of up to 4 (H100) or 5 (B200) use rings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hardware.load import catalog, load

QUICK, LINE, WHOLE, SWITCH = "LL", "LL128", "Simple", "NVLS"


class Generation(NamedTuple):
    """What NCCL assumes of a generation of links.

    ring: rate of rings, as a share of the nominal one. quick: cap of LL [bytes/s]. channel, useful: c and e above.
    channels: that a ring runs, each on a multiprocessor of its own.
    """

    ring: float
    quick: float = math.inf
    channel: float = 0.0
    useful: float = 0.0
    channels: int = 24


GENERATIONS = {
    "nvlink2": Generation(0.8, 39e9, channels=12),
    "nvlink3": Generation(0.8, 87.7e9),
    "nvlink4": Generation(0.824, 141e9, 60e9, 0.85),
    "nvlink5": Generation(0.711, 282e9, 90e9, 0.74, channels=32),
}
"""Rates: NVLink 20 GB/s a link (2, 3), 20.6 (4), 16 channels of 40 (5); channels: the highest speeds of
src/graph/search.cc; their numbers are recalled from logs of NCCL, not checked against a document."""
OTHER = Generation(0.8, channels=8)
"""Links that are not listed, PCIe among them."""

SWITCH_CHANNELS = 16
"""Multiprocessors that sums in the switch take."""

BASE = {QUICK: 6.6e-6, LINE: 14e-6, WHOLE: 8.4e-6}
STEP = {QUICK: 0.6e-6, LINE: 1.9e-6, WHOLE: 3.4e-6}
STEP_HOST = {QUICK: 1.0e-6, LINE: 2.5e-6, WHOLE: 5.7e-6}
SWITCH_LATENCY = 25e-6


def generation(kind: str) -> Generation:
    """Of the links `kind` of the catalog (nvlink4-h800: nvlink4)."""
    return GENERATIONS.get(kind.partition("-")[0], OTHER)


def nominal(kind: str) -> float:
    """Rate of one GPU [bytes/s] that NCCL takes links `kind` of the catalog for: that of their generation.

    It is looked up by name, as NCCL does, and not measured: the sizes of changeovers stay where they are on links that
    are faster or slower than their name says, so that faster links are never slower.
    """
    own = next((name for name in (kind.partition("-")[0], kind) if name in catalog("links")), "")
    return float(load("links", own).bandwidth) if own else math.inf


def limits(kind: str, links: float, members: int, steps: int, host: bool, sums: bool) -> dict[str, float]:
    """The size up to which each way is used; 0 for never.

    links: share of a GPU's links that lead to other members. host: over PCIe. sums: the switch may form them.
    """
    of, bandwidth = generation(kind), nominal(kind)
    if math.isinf(bandwidth):  # nobody's table: all ways compete
        return dict.fromkeys((QUICK, LINE, WHOLE, SWITCH), math.inf)
    rate, ratio = of.ring * bandwidth * links, members / steps
    step = STEP_HOST if host else STEP
    most = {QUICK: min(of.quick, rate / 2), LINE: 0.92 * rate, WHOLE: rate}
    known = {name: (BASE[name] + steps * step[name], most[name] * ratio) for name in most}
    if sums and of.channel:
        known[SWITCH] = SWITCH_LATENCY, of.useful * min(of.channel * members, rate)
    return {name: min(_meet(one, other) for other in known.values()) for name, one in known.items()}


def _meet(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The size from which `other`, if it is the wider, looks no slower than `one`."""
    if other[1] <= one[1]:
        return math.inf
    return max(0.0, (other[0] - one[0]) / (1 / one[1] - 1 / other[1]))
