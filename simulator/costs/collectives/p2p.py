"""Point-to-point messages: the links are busy for `bytes / rate`, and the receiver has the message a latency later.

    busy = B c + 2 p sqrt(b c B)

B: bytes; c: seconds of a byte over the links between the two GPUs; b: latency [s]; p: exposed share of filling and
draining the channels, as in `collective`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.coefficients import estimate_sigma
from meshcast.simulator.costs.collectives import fabric, tuner
from meshcast.simulator.costs.collectives.links import Links, crosses_host
from meshcast.simulator.costs.collectives.processes import ProcessCostModel
from meshcast.simulator.costs.estimate import ALONE, NOTHING, Estimate, Use
from meshcast.simulator.ir.ops import Collective

CHANNEL_RATE = 14e9
"""Rate of a port for which NCCL takes a channel [bytes/s] (NCCL_P2P_PER_CHANNEL_NET_BW)."""


def price(nbytes: int, reach: Reach, links: Links) -> Estimate:
    """Estimates the time of a message between two GPUs placed as `reach` says."""
    if not nbytes:
        return NOTHING
    model = links.models.network if reach.nodes.number > 1 else links.models_within_node(reach).p2p
    busy, latency = seconds(nbytes, reach, links)
    sigma = estimate_sigma(model, busy + latency, latency)
    return Estimate(busy, math.hypot(sigma, links.place_sigma(reach)), latency)


def seconds(nbytes: Any, reach: Reach, links: Links) -> tuple[Any, float]:
    """Returns how long the links are busy [s], a number or an array, and how much later the message arrives [s]."""
    moving = _moving(nbytes, reach, links)
    if reach.nodes.number > 1:
        return moving, links.models.network.p2p_latency + links.wire_latency(reach) + fabric.message_delay(reach)
    model, host = links.models_within_node(reach).p2p, crosses_host(reach)
    if isinstance(model, ProcessCostModel):
        return moving, model.p2p_latency
    busy = moving + 2 * model.exposed_fill * (model.latency * moving) ** 0.5
    return busy, model.latency + (links.host.latency if host else links.scale_up.latency)


def _moving(nbytes: Any, reach: Reach, links: Links) -> Any:
    """Seconds in which the bytes move."""
    if reach.nodes.number > 1:
        return nbytes * (fabric.message(reach) * links.network_byte(links.models.network.p2p_share, reach))
    model = links.models_within_node(reach).p2p
    if isinstance(model, ProcessCostModel):
        return nbytes * links.host_byte(model.p2p)
    if crosses_host(reach):
        return nbytes * links.host_byte(model.share, links.node_gpus / reach.ports)
    return nbytes * links.scale_up_byte(model.share, reach.links)


def shift_messages(work: Collective, reach: Reach, links: Links) -> tuple[int, Reach]:
    """Returns the bytes that a rank sends in a shift, and their reach: that of a message in either direction.

    Two messages share the rank's port. Only where links join GPUs directly, the messages have separate links.
    """
    if not work.both_ways:
        return work.nbytes, reach
    direct = reach.nodes.number == 1 and not crosses_host(reach) and not links.scale_up.switched
    return 2 * work.nbytes, replace(reach, links=min(1.0, 2 * reach.links)) if direct else reach


def use(nbytes: int, reach: Reach, links: Links) -> Use:
    """Returns what a message occupies: links while its bytes move, multiprocessors for all of its time."""
    if not nbytes:
        return ALONE
    far, host = reach.nodes.number > 1, crosses_host(reach)
    busy = (0.0, 0.0, 1.0) if far else (0.0, 1.0, 0.0) if host else (reach.links, 0.0, 0.0)
    share = count_channels(reach, links) / links.cluster.gpu.multiprocessors
    return Use(_moving(nbytes, reach, links), busy, share)


def count_channels(reach: Reach, links: Links) -> int:
    """Returns the channels of NCCL for a message, each of which takes a multiprocessor of both ends.

    Between nodes a channel for every 14 GB/s of the port, over NVLink two for each link of the pair and no more than
    those of a ring, over PCIe two (`ncclTopoGetNchannels` in src/graph/paths.cc of NVIDIA/nccl @5067397). Small
    messages take fewer. None between processes.
    """
    if isinstance(links.models_within_node(reach).p2p, ProcessCostModel):
        return 0
    if reach.nodes.number > 1:
        return math.ceil(links.port_rate(reach) / CHANNEL_RATE)
    if crosses_host(reach) or not links.scale_up.switched:
        return 2
    return tuner.generation(links.scale_up.kind).channels


def lower_bound(nbytes: Any, reach: Reach, links: Links) -> Any:
    """Returns the time [s] that no message can beat: the bytes at the nominal rate of the links between both."""
    if reach.nodes.number > 1:
        return nbytes / links.port_rate(reach)
    return nbytes / (links.host.bandwidth if crosses_host(reach) else links.scale_up.bandwidth * reach.links)
