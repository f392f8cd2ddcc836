"""Processes of a host that communicate through its memory, as torch's gloo does: a stand-in for GPUs and their links.

    collective   launch + steps x step + sent / (share of the operation x nominal rate)
    message      p2p_latency + bytes / (p2p x nominal rate)

sent: bytes that each of n members must send: 2 (n - 1) / n of an all-reduce's buffer, (n - 1) / n of the others'.
Additions, copies into and out of buffers and copies of the kernel are contained in the share, so each operation has a
separate share; gloo's reduce-scatter is an all-reduce of which a part is kept (facebookincubator/gloo; torch
ProcessGroupGloo).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshcast.hardware.records import dataclass
from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.coefficients import coefficient
from meshcast.simulator.costs.collectives.algorithms import Algorithm

if TYPE_CHECKING:
    from meshcast.simulator.costs.collectives.links import Links


@dataclass(frozen=True, slots=True)
class ProcessCostModel:
    """Collectives and messages of gloo. Operations have shares of the link's nominal rate."""

    launch: float = coefficient("call of a collective until its thread starts it [s]", 1e-6, 3e-3, 1e-4)
    step: float = coefficient("a step of the algorithm [s]", 1e-6, 2e-3, 4e-5)
    all_reduce: float = coefficient("share of the nominal rate in an all-reduce", 0.005, 2.0, 0.3)
    all_gather: float = coefficient("share of the nominal rate in an all-gather", 0.005, 2.0, 0.3)
    reduce_scatter: float = coefficient("share of the nominal rate in a reduce-scatter", 0.005, 2.0, 0.15)
    all_to_all: float = coefficient("share of the nominal rate in an all-to-all", 0.005, 2.0, 0.4)
    broadcast: float = coefficient("share of the nominal rate in a broadcast", 0.005, 2.0, 0.4)
    p2p_latency: float = coefficient("from send to arrival of an empty message [s]", 1e-6, 3e-3, 1e-4)
    p2p: float = coefficient("share of the nominal rate in a message", 0.005, 2.0, 0.7)
    sigma: float = 0.0
    sigma_short: float = 0.0


def algorithm(operation: str, reach: Reach, links: Links) -> Algorithm:
    """Returns the only algorithm of an operation."""
    n, model = reach.members, links.models_within_node(reach).ring
    operation = {"reduce": "broadcast"}.get(operation, operation)  # the same steps the other way round
    steps = {"all_reduce": 2 * (n - 1), "reduce_scatter": 2 * (n - 1), "broadcast": math.ceil(math.log2(n))}
    sent = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "push_pull": 1.0}.get(operation, (n - 1) / n)
    share = model.all_to_all if operation == "push_pull" else getattr(model, operation)
    byte = sent * links.host_byte(share)
    latency = steps.get(operation, n - 1) * model.step
    return Algorithm(f"processes {operation}", math.inf, latency, byte, 0.0, 0, (0.0, 1.0, 0.0))
