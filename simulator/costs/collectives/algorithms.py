"""NCCL's algorithms for each collective, and the bytes that they move over each link.

Symbols: n members on k nodes, g on the node that holds the fewest of them (its ports limit the group), S the largest
buffer of a member. A scale-up domain of several nodes (GB200 NVL72) counts as one node. Bytes over each member's
links in its domain, in multiples of S (c: `self_copy`, what the copy of a member's part costs in steps):

    ring all-reduce             (2 (n - 1) + c) / n    steps 2 (n - 1); by trees 2 (g - 1), and 2 log2 k levels
    NVLS                        1 + 1/g                within a node
                                1 + 2/g                2 log2 k levels between nodes: what others sent is multicast too
    all-gather, reduce-scatter  (n - 1 + c) / n        n - k steps within nodes and k - 1 between them
    all-to-all                  (g - 1 + c) / n        a single step, and a latency for each peer
    broadcast                   1                      g - 1 steps and log2 k levels
    push-pull                   1, where all members share a node; else through the network alone

and over each member's port to the network (the g members share g ports of the node; its other GPUs belong to sibling
groups):

    ring all-reduce             2 (n - 1) / (n g)      rings through every port of every node
    trees                       2 / g                  a node receives from two children and its parent in a tree,
                                                       and is a leaf of the other; 1 / g between two nodes
    SHARP in the network        1 / g
    all-gather, reduce-scatter  (n - 1) / (n g)
    all-to-all                  (n - g) / n
    broadcast                   1 / g
    push-pull                   1                      S bytes to servers and S from them, at the same time

In a node of several scale-up domains these are joined by the host: rings of PCIe cards, bridged in pairs or not, share
a link to it (two bridged A100 or H100 and two more reach 0.77 of a link, as eight cards without bridges do); for an
all-to-all the host acts like the network. Where cards have no peer access, all that they send at the same time passes
through the memory of the host, at a common rate (`Cluster.staging`). Without a switch a group can use only the links
between its members. All tiers work concurrently, so the slowest tier determines the time; `fabric` adds what the
network's upper levels cost.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.collectives import fabric, tuner
from meshcast.simulator.costs.collectives.links import Links, RingCostModel, crosses_host
from meshcast.simulator.costs.collectives.tuner import LL, LL128, NVLS, SIMPLE

TREE = 0.92 * 0.85
"""Rate of trees within nodes against rings (NVIDIA/nccl @5067397, src/graph/tuning.cc)."""
PAT = 0.75
"""Rate of NCCL's PAT all-gathers (a GPU a node) against rings, by the same source."""
RING_STEP = 1 / 3
"""A ring step between nodes against a level of a tree, through which chunks go up and down: 14 us by the source above,
of the 42 us that trees show."""
PORTS = 9
"""Most ports of a rack that rings and trees of a group use: between racks of 72 GPUs with a port of 50 GB/s each,
all-reduces move 430 GB/s (coreweave/nccl-tests, 2 and 20 racks), as if NCCL's search stopped at these channels."""
LL_MESSAGE = 16384
"""Largest message of an all-to-all that is sent with LL [bytes] (NCCL_P2P_LL_THRESHOLD)."""


LinkShares = tuple[float, float, float]
"""Busy shares of the links of each tier, in the order of `simulator.costs.estimate.TIERS`."""


class Algorithm(NamedTuple):
    """An algorithm with a protocol, for an operation of a group.

    Attributes:
        name: such as ``ring LL128`` or ``NVLS``.
        max_bytes: largest buffer that it is used for.
        latency: of all steps of an empty buffer [s].
        byte: seconds of a byte of the buffer over the slowest tier.
        exposed_fill: exposed share of filling and draining the channels.
        multiprocessors: that it takes from kernels.
        busy: shares of a member's links that are busy while bytes move, by tier; 1 for the slowest tier.
        delay: latency of links between blocks of nodes [s]: on the wire, so chunks follow each other through it.
    """

    name: str
    max_bytes: float
    latency: float
    byte: float
    exposed_fill: float
    multiprocessors: int
    busy: LinkShares
    delay: float = 0.0


class Protocol(NamedTuple):
    """A protocol of NCCL on the links of a group.

    Attributes:
        setup: of a transfer [s].
        step: within a node [s].
        level: of a tree between nodes [s].
        share: of the nominal rate that it reaches within a node.
        network_share: of the ports' payload rate that it reaches between nodes.
        exposed_fill: exposed share of filling and draining the channels.
    """

    setup: float
    step: float
    level: float
    share: float
    network_share: float
    exposed_fill: float


def _slowest_tier(
    reach: Reach,
    links: Links,
    scale_up: float,
    host: float,
    network: float,
    shares: tuple[float, float],
    host_senders: float = 0.0,
) -> tuple[float, LinkShares]:
    """Seconds of a byte of the buffer over the slowest tier, and `Algorithm.busy`.

    scale_up, host, network: bytes over each link for each byte of the buffer. shares: of the rate that is reached, in
    nodes and between them. host_senders: GPUs of a node that send over it; by default a GPU of each domain in each
    group, as in rings.
    """
    usable, senders = _ring_links(reach, links), host_senders or links.node_gpus / reach.domains.fewest
    up = scale_up * links.scale_up_byte(shares[0], usable) if scale_up else 0.0
    middle = host * links.host_byte(shares[0], senders) if crosses_host(reach) else 0.0
    out = network * links.network_byte(shares[1], reach) if reach.nodes.number > 1 else 0.0
    most = max(up, middle, out)
    return most, (usable * up / most, middle / most, out / most)


def _port_share(reach: Reach, links: Links) -> float:
    """Returns the share of the bytes leaving a node in rings and trees that goes through a single port."""
    if reach.nodes.number == 1:
        return 0.0
    rack = links.cluster.node.domain > links.cluster.gpus_per_node
    return max(fabric.ring(reach) / reach.nodes.fewest, 1 / PORTS if rack else 0.0)


def _ring_links(reach: Reach, links: Links) -> float:
    """Returns the share of a member's scale-up links that rings use.

    Where some pairs of GPUs have no link, rings run in both directions, over two links of each GPU.
    """
    up = links.cluster.node.scale_up
    if up is None or not up.gaps or reach.members == 2:
        return reach.links
    count = up.link.links
    return max(1, round(reach.links * count) // 2 * 2) / count


def _simple_level(reach: Reach, links: Links) -> float:
    """Returns the time of a level of a tree with Simple [s]: each member's chunk goes through the ports in use."""
    net = links.models.network
    members_per_port = _port_share(reach, links) * reach.nodes.fewest
    return net.simple_level + (net.chunk_bytes * members_per_port / links.port_rate(reach) if members_per_port else 0.0)


def _protocols(model: RingCostModel, reach: Reach, links: Links) -> dict[str, Protocol]:
    net, ratio, rate, level = links.models.network, model.step_ratio, model.rate_ratio, _simple_level(reach, links)
    ll128_level = math.sqrt(net.ll_level * level)
    return {
        LL: Protocol(
            0.0, model.ll_step * ratio, net.ll_level, model.ll_share * rate, 0.5 * net.share, model.ll_exposed_fill
        ),
        LL128: Protocol(
            0.0, model.ll128_step * ratio, ll128_level, 0.92 * model.simple_share * rate, 0.92 * net.share, 0.0
        ),
        SIMPLE: Protocol(
            model.simple_setup * ratio, model.simple_step * ratio, level, model.simple_share * rate, net.share, 0.0
        ),
    }


def _max_bytes(reach: Reach, links: Links, steps: int, nvls: bool) -> dict[str, float]:
    """Returns largest buffers of protocols; no limits between nodes, where the tuner's constants are not modelled."""
    if reach.nodes.number > 1:
        return dict.fromkeys((LL, LL128, SIMPLE, NVLS), math.inf)
    tier = links.host if crosses_host(reach) else links.scale_up
    return tuner.max_bytes(tier.kind, reach.links, reach.members, steps, crosses_host(reach), nvls)


def _all_reduce(reach: Reach, links: Links) -> tuple[Algorithm, ...]:
    switched = links.scale_up.switched and not crosses_host(reach) and reach.nodes.fewest > 1
    nvls = links.nvls and not links.rings and switched and bool(tuner.generation(links.scale_up.kind).nvls_channel)
    max_bytes = _max_bytes(reach, links, 2 * (reach.members - 1), nvls)
    algorithms = []
    for name, protocol in _protocols(links.models_within_node(reach).ring, reach, links).items():
        algorithms.append(_reduce_in_rings(reach, links, name, protocol, max_bytes[name]))
        if reach.nodes.number > 1 and not links.rings:
            algorithms.append(_reduce_in_trees(reach, links, name, protocol))
    if nvls:
        algorithms += _reduce_in_switches(reach, links, max_bytes[NVLS])
    return tuple(algorithm for algorithm in algorithms if algorithm.max_bytes)


def _reduce_in_rings(reach: Reach, links: Links, name: str, protocol: Protocol, max_bytes: float) -> Algorithm:
    n, k = reach.members, reach.nodes.number
    model, channels = links.models_within_node(reach).ring, tuner.generation(links.scale_up.kind).channels
    inner, ring = (2 * (n - 1) + model.self_copy) / n if reach.domains.fewest > 1 else 0.0, 2 * (n - 1) / n
    shares = protocol.share, protocol.network_share
    byte, busy = _slowest_tier(reach, links, inner, ring, ring * _port_share(reach, links), shares)
    between = RING_STEP * protocol.level + links.wire_latency(reach)
    latency = protocol.setup + 2 * (n - k) * protocol.step + 2 * (k - 1) * between
    delay = fabric.ring_delay(reach, 2)
    return Algorithm(f"ring {name}", max_bytes, latency, byte, protocol.exposed_fill, channels, busy, delay)


def _reduce_in_trees(reach: Reach, links: Links, name: str, protocol: Protocol) -> Algorithm:
    n, (k, g), channels = reach.members, reach.nodes, tuner.generation(links.scale_up.kind).channels
    inside, shares = 2.0 if reach.domains.fewest > 1 else 0.0, (TREE * protocol.share, protocol.network_share)
    byte, busy = _slowest_tier(reach, links, inside, 2 * (n - 1) / n, _tree_share(reach, links), shares)
    levels = 2 * math.ceil(math.log2(k)) * (protocol.level + links.wire_latency(reach))
    latency, fill = protocol.setup + 2 * (g - 1) * protocol.step + levels, links.models.network.exposed_fill
    return Algorithm(f"tree {name}", math.inf, latency, byte, fill, channels, busy, fabric.tree_delay(reach, 2))


def _reduce_in_switches(reach: Reach, links: Links, max_bytes: float) -> list[Algorithm]:
    """Describes NVLS and, where the network has SHARP and there are several nodes, both together."""
    (k, g), model, net = reach.nodes, links.models_within_node(reach).ring, links.models.network
    shares, setup = (model.nvls_share * model.rate_ratio, net.share), model.nvls_setup * g * model.step_ratio
    level, delay = _simple_level(reach, links) + links.wire_latency(reach), fabric.tree_delay(reach, 2)
    moved, fill = 1 + (1 if k == 1 else 2) / g, model.nvls_exposed_fill if k == 1 else net.exposed_fill
    byte, busy = _slowest_tier(reach, links, moved, 0.0, _tree_share(reach, links), shares)
    latency = setup + 2 * math.ceil(math.log2(k)) * level
    algorithms = [Algorithm("NVLS", max_bytes, latency, byte, fill, tuner.NVLS_CHANNELS, busy, delay)]
    if links.sharp and k > 1:
        byte, busy = _slowest_tier(reach, links, moved, 0.0, _port_share(reach, links), shares)
        latency, channels = setup + 2 * level, tuner.NVLS_CHANNELS
        algorithms.append(Algorithm("NVLS and SHARP", math.inf, latency, byte, fill, channels, busy, delay))
    return algorithms


def _tree_share(reach: Reach, links: Links) -> float:
    """Returns the share of the buffer that goes through a single port in trees."""
    return (1 if reach.nodes.number == 2 else 2) * _port_share(reach, links)


def _gather(reach: Reach, links: Links) -> tuple[Algorithm, ...]:
    """Describes an all-gather, and a reduce-scatter, which has the same steps the other way round."""
    n, k, d, model = reach.members, reach.nodes.number, reach.domains.fewest, links.models_within_node(reach).ring
    wires, channels = links.wire_latency(reach), tuner.generation(links.scale_up.kind).channels
    max_bytes, port = _max_bytes(reach, links, n - 1, False), _port_share(reach, links)
    inner, ring = (n - 1 + model.self_copy) / n if d > 1 else 0.0, (n - 1) / n
    algorithms = []
    for name, protocol in _protocols(model, reach, links).items():
        byte, busy = _slowest_tier(reach, links, inner, ring, ring * port, (protocol.share, protocol.network_share))
        latency = protocol.setup + (n - k) * protocol.step + (k - 1) * (RING_STEP * protocol.level + wires)
        fill, delay = protocol.exposed_fill, fabric.ring_delay(reach, 1)
        algorithms.append(Algorithm(f"ring {name}", max_bytes[name], latency, byte, fill, channels, busy, delay))
        if name == SIMPLE and n == k:
            latency = protocol.setup + math.ceil(math.log2(k)) * (RING_STEP * protocol.level + wires)
            algorithms.append(Algorithm("PAT", math.inf, latency, byte / PAT, fill, channels, busy, delay))
    return tuple(algorithm for algorithm in algorithms if algorithm.max_bytes)


def _broadcast(reach: Reach, links: Links) -> tuple[Algorithm, ...]:
    """Describes a broadcast, and a reduce, which has the same steps the other way round."""
    (k, g), (_, d), model = reach.nodes, reach.domains, links.models_within_node(reach).ring
    wires, channels = links.wire_latency(reach), tuner.generation(links.scale_up.kind).channels
    port = _port_share(reach, links)
    algorithms = []
    for name, protocol in _protocols(model, reach, links).items():
        byte, busy = _slowest_tier(reach, links, float(d > 1), 1.0, port, (protocol.share, protocol.network_share))
        latency = protocol.setup + (g - 1) * protocol.step + math.ceil(math.log2(k)) * (protocol.level + wires)
        fill, delay = protocol.exposed_fill, fabric.tree_delay(reach, 1)
        algorithms.append(Algorithm(f"ring {name}", math.inf, latency, byte, fill, channels, busy, delay))
    return tuple(algorithms)


def _all_to_all(reach: Reach, links: Links) -> tuple[Algorithm, ...]:
    model, net, level = links.models_within_node(reach).all_to_all, links.models.network, _simple_level(reach, links)
    share, between = model.simple_share * model.rate_ratio, net.all_to_all_share
    ll = Protocol(0.0, 0.0, net.ll_level, model.ll_share, between, 0.0)
    simple = Protocol(model.simple_setup, 0.0, level, share, between, model.exposed_fill)
    return (
        _exchange_messages(reach, links, LL, ll, LL_MESSAGE * reach.members),
        _exchange_messages(reach, links, SIMPLE, simple, math.inf),
    )


def _exchange_messages(reach: Reach, links: Links, name: str, protocol: Protocol, max_bytes: float) -> Algorithm:
    n, (k, g), (_, d), model = reach.members, reach.nodes, reach.domains, links.models_within_node(reach).all_to_all
    inner = (d - 1 + model.self_copy) / n * reach.hops if d > 1 else 0.0
    out = (n - g) / n * (fabric.all_to_all(reach) if k > 1 else 1.0)
    shares = protocol.share, protocol.network_share
    byte, busy = _slowest_tier(reach, links, inner, (n - d) / n, out, shares, links.node_gpus)
    between = RING_STEP * protocol.level + links.wire_latency(reach) if k > 1 else 0.0
    latency, delay = model.peer_latency * (n - 1) + protocol.setup + between, fabric.message_delay(reach)
    channels, fill = tuner.generation(links.scale_up.kind).channels, protocol.exposed_fill
    return Algorithm(f"p2p {name}", max_bytes, latency, byte, fill, channels, busy, delay)


def _push_pull(reach: Reach, links: Links) -> tuple[Algorithm, ...]:
    """Messages to servers and the sums back, which cross each other; the host sends, not the GPU's multiprocessors."""
    k, d, net = reach.nodes.number, reach.domains.number, links.models.network
    near, over = (0.0, 0.0) if k > 1 else (float(d == 1), float(d > 1))
    byte, busy = _slowest_tier(reach, links, near, over, fabric.message(reach), (1.0, net.p2p_share))
    latency = 2 * (net.p2p_latency + links.wire_latency(reach)) if k > 1 else 0.0
    return (Algorithm("push-pull", math.inf, latency, byte, 0.0, 0, busy, 2 * fabric.message_delay(reach)),)


ALGORITHMS = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _broadcast,
    "push_pull": _push_pull,
}
"""By operation: the algorithms of a group."""
