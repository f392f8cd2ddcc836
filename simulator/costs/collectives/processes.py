"""Processes of one host that talk through its memory, as torch's gloo does it: what stands in for GPUs and their links.

    collective   begin + steps x step + sent / (share of the operation x nominal rate)
    message      send + bytes / (message x nominal rate)

sent: bytes that each of n members must send, 2 (n - 1)/n of an all-reduce's buffer, (n - 1)/n of the others'. Sums,
copies into and out of buffers and the kernel's own copies are the shares' business, so each operation has one; gloo's
reduce-scatter is an all-reduce of which only a part is kept (facebookincubator/gloo; torch ProcessGroupGloo).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware.topology import Reach
from simulator.costs.coefficients import coefficient
from simulator.costs.collectives.algorithms import Way

if TYPE_CHECKING:
    from simulator.costs.collectives.links import Links


@dataclass(frozen=True, slots=True)
class ProcessLaw:
    """Coefficients, by operation shares of the link's nominal rate."""

    begin: float = coefficient("calling a collective and its thread taking it up [s]", 1e-6, 3e-3, 1e-4)
    step: float = coefficient("a step of its algorithm [s]", 1e-6, 2e-3, 4e-5)
    all_reduce: float = coefficient("rate of an all-reduce", 0.005, 2.0, 0.3)
    all_gather: float = coefficient("rate of an all-gather", 0.005, 2.0, 0.3)
    reduce_scatter: float = coefficient("rate of a reduce-scatter", 0.005, 2.0, 0.15)
    all_to_all: float = coefficient("rate of an all-to-all", 0.005, 2.0, 0.4)
    broadcast: float = coefficient("rate of a broadcast", 0.005, 2.0, 0.4)
    send: float = coefficient("from a send to its arrival, bytes aside [s]", 1e-6, 3e-3, 1e-4)
    message: float = coefficient("rate of a message", 0.005, 2.0, 0.7)
    spread: float = 0.0
    spread_short: float = 0.0


def way(operation: str, reach: Reach, links: Links) -> Way:
    """The one way of an operation."""
    n, law = reach.members, links.law(reach).ring
    operation = {"reduce": "broadcast"}.get(operation, operation)  # the same steps the other way
    steps = {"all_reduce": 2 * (n - 1), "reduce_scatter": 2 * (n - 1), "broadcast": math.ceil(math.log2(n))}
    sent = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(operation, (n - 1) / n)
    per_byte = sent * links.over_host(getattr(law, operation))
    latency = steps.get(operation, n - 1) * law.step
    return Way(f"processes {operation}", math.inf, latency, per_byte, 0.0, 0, (0.0, 1.0, 0.0))
