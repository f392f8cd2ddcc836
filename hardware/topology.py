"""How far a communication group extends in a cluster: over how many scale-up domains, nodes and levels of the network.

Cost models of collectives depend on a group only through this `Reach`. Ranks fill the cluster in order: rank r is in
scale-up domain r // domain, in node r // gpus_per_node, and so on upwards. A scale-up domain that spans nodes (GB200
NVL72) counts as a single node here: its GPUs reach each other without the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from meshcast.hardware.cluster import Cluster, Level
from meshcast.hardware.records import dataclass


class Parts(NamedTuple):
    """Number of domains or nodes that have members of a group, and the least number of members in any of them."""

    number: int
    fewest: int


class Crossing(NamedTuple):
    """A level of the network that a group crosses.

    Attributes:
        oversubscription: rate of the ports of a block below this level against what the level passes of rings.
        fewest: least number of the group's members in a block below; where a link joins blocks, the number in that
            whose link limits the group.
        blocks: where a link joins blocks, in how many of them the group has members; 0: switches join them.
        latency: of that link [s].
        link_ratio: links that an all-to-all uses, for each that rings use.
    """

    oversubscription: float
    fewest: int
    blocks: int = 0
    latency: float = 0.0
    link_ratio: float = 1.0


@dataclass(frozen=True)
class Reach:
    """How far a group extends in the cluster.

    Attributes:
        members: GPUs in the group.
        domains: scale-up domains of its members; if it is a single domain, all traffic is on scale-up links.
        nodes: nodes of its members; if it is a single node, the group needs no network.
        links: share of its scale-up links that a member can use within the group: 1 with a switch.
        levels: levels of the network that it crosses, from the lowest.
        rails: oversubscription of the level above `levels` that traffic between GPUs at different places of their nodes
            has to cross, where ports at the same place share a switch (rails) and no scale-up switch forwards it.
        ports: ports that a member sends through, over its even share of its node's ports; above 1 where other GPUs at
            its port send nothing meanwhile. Within a node likewise of the memory of the host, where data is staged.
        hops: bytes that an all-to-all sends over the busiest link of a torus, over those that it would send if all
            members were neighbours; 1 elsewhere.
    """

    members: int
    domains: Parts
    nodes: Parts
    links: float = 1.0
    levels: tuple[Crossing, ...] = ()
    rails: float = 1.0
    ports: float = 1.0
    hops: float = 1.0


def reach(cluster: Cluster, ranks: Sequence[int]) -> Reach:
    """Returns the `Reach` of the group of these global `ranks`."""
    if not len(ranks) or min(ranks) < 0 or max(ranks) >= cluster.gpus:
        raise ValueError(f"a group needs ranks from 0 to {cluster.gpus - 1}, got {list(ranks)[:8]}")
    node = cluster.node
    domains, links, hops = _parts(ranks, cluster.domain), 1.0, 1.0
    nodes = _parts(ranks, cluster.local_gpus) if cluster.local_gpus != cluster.domain else domains
    if node.scale_up and node.scale_up.torus and len(ranks) > domains.number:
        links, hops = _torus_links(cluster, int(node.scale_up.torus), ranks)
    elif node.scale_up and not node.scale_up.switched.value and len(ranks) > domains.number:
        links = _links(cluster, ranks)
        if not links:  # as far from each other as GPUs of two domains
            domains, links = Parts(len(ranks), 1), 1.0
    levels = _levels(cluster, ranks) if nodes.number > 1 else ()
    return Reach(len(ranks), domains, nodes, links, levels, _rails(cluster, ranks, len(levels)), hops=hops)


def _parts(ranks: Sequence[int], size: int) -> Parts:
    """Counts the blocks of `size` consecutive ranks that have members of a group."""
    held = Counter([rank // size for rank in ranks])
    return Parts(len(held), min(held.values()))


def _links(cluster: Cluster, ranks: Sequence[int]) -> float:
    """Returns, without a switch, the least share of a member's links that end at other members."""
    domain, places = cluster.domain, dict[int, list[int]]()
    for rank in ranks:
        places.setdefault(rank // domain, []).append(rank % domain)
    up = cluster.node.scale_up
    return min(up.among(tuple(held)) for held in places.values()) if up else 1.0


def torus_shape(chips: int, axes: int) -> list[int]:
    """Returns the sizes of the axes of the torus of so many chips that is most like a square or cube, the largest
    first: ranks fill the last axis first."""
    shape, divisor = [1] * axes, 2
    factors = list[int]()
    while chips > 1:
        if chips % divisor:
            divisor += 1
        else:
            factors.append(divisor)
            chips //= divisor
    for factor in reversed(factors):
        shape[shape.index(min(shape))] *= factor
    return sorted(shape, reverse=True)


def _torus_links(cluster: Cluster, axes: int, ranks: Sequence[int]) -> tuple[float, float]:
    """Returns the least share of a member's links that a group on a torus uses, and `Reach.hops`.

    Rings run in both directions along every axis on which members differ: over two links of each where they are all
    of the axis, else over one, as the way back takes the same links. Of an all-to-all along e chips of an axis the
    busiest link passes e/8 of the bytes of a rank, or e/4 without the link that closes the axis.
    """
    domain = min(cluster.domain, cluster.gpus)
    shape = torus_shape(domain, axes)
    held = dict[int, list[int]]()
    for rank in ranks:
        held.setdefault(rank // domain, []).append(rank % domain)
    used, hops = list[int](), list[float]()
    for places in held.values():
        spans = [
            (len({place // prod(shape[i + 1 :]) % size for place in places}), size) for i, size in enumerate(shape)
        ]
        used.append(sum(1 + (span == size > 2) for span, size in spans if span > 1))
        loads = [span / (8 if span == size > 2 else 4) for span, size in spans if span > 1]
        hops.append(max([1.0, *(load * used[-1] for load in loads)]))
    return min((links for links in used if links), default=2 * axes) / (2 * axes), max(hops)


def _levels(cluster: Cluster, ranks: Sequence[int]) -> tuple[Crossing, ...]:
    crossings: list[Crossing] = []
    below: Level | None = None
    for level in cluster.fabric.joins:
        if level.link is None and not (below and below.blocks):
            parts = _parts(ranks, cluster.block(below) if below else cluster.local_gpus)
            if parts.number == 1:
                break
            crossings.append(Crossing(level.oversubscription, parts.fewest))
        else:
            held: dict[range, list[int]] = {}
            for rank in ranks:
                held.setdefault(cluster.find_block(below, rank), []).append(rank)
            if len(held) == 1:
                break
            crossings.append(_cross_blocks(cluster, level, held))
        below = level
    return tuple(crossings)


def _cross_blocks(cluster: Cluster, level: Level, held: Mapping[range, Sequence[int]]) -> Crossing:
    """Returns the crossing of a level that joins blocks of different sizes, or by links. held: members in each
    block."""
    if level.link is None:
        return Crossing(level.oversubscription, min(map(len, held.values())))
    members = sum(map(len, held.values()))

    def load(block: range) -> tuple[float, float]:
        """Returns what a ring, and an all-to-all, of every group in the block sends over its links."""
        return len(block) / len(held[block]), len(block) * (members - len(held[block]))

    most = max(held, key=load)
    # The rings of groups on the same nodes leave a block from one of these nodes.
    senders = len({rank // cluster.local_gpus for rank in held[most]})
    links = min(level.links, max(1.0, len(most) / cluster.local_gpus / senders))
    narrow = _share_link(cluster, level, len(most)) / links
    return Crossing(narrow, len(held[most]), len(held), float(level.link.latency), level.links / links)


def _share_link(cluster: Cluster, level: Level, senders: int, ports: float = 1.0) -> float:
    """Returns the payload rate of the ports of `senders` GPUs, each with `ports` of its even share, over that of a
    link."""
    assert level.link is not None
    rate = senders * cluster.port_rate(ports) * cluster.scale_out.payload
    return rate / float(level.link.bandwidth * level.link.payload)


def _rails(cluster: Cluster, ranks: Sequence[int], crossed: int) -> float:
    """Returns `Reach.rails`; 1 where NCCL forwards data over a scale-up switch to the GPU on the right rail (PXN)."""
    node, levels = cluster.node, cluster.fabric.joins
    if not crossed or crossed == len(levels) or node.nics is None or not node.nics.rail_optimised.value:
        return 1.0
    forwarded = node.scale_up is not None and node.scale_up.switched.value and cluster.domain >= cluster.gpus_per_node
    places = {rank % cluster.gpus_per_node for rank in ranks}
    return 1.0 if forwarded or len(places) == 1 else levels[crossed].oversubscription


Peer = Callable[[int], int | None]
"""The rank to which a rank sends at some time, or from which it receives; None: it does not."""


def message_reach(cluster: Cluster, source: int, target: int, sends_to: Peer, receives_from: Peer) -> Reach:
    """Returns the `Reach` of a message from rank `source` to rank `target`.

    sends_to, receives_from: the messages that are sent at the same time, this message included.
    """
    path = reach(cluster, (source, target))
    if path.nodes.number > 1:
        if cluster.ports_shared:
            free = min(_free_ports(cluster, source, sends_to), _free_ports(cluster, target, receives_from))
            path = replace(path, ports=free)
        return _share_links(cluster, path, (source, sends_to), (target, receives_from))
    if path.nodes.number == 1 < path.domains.number and cluster.staged:
        size, domain = cluster.gpus_per_node, cluster.domain
        peers = [(rank, sends_to(rank)) for rank in _node_ranks(cluster, source)]
        staged = [
            rank
            for rank, to in peers
            if to is not None and to // size == rank // size and to // domain != rank // domain
        ]
        return replace(path, ports=len(peers) / len(staged))
    return path


def _share_links(cluster: Cluster, path: Reach, *ends: tuple[int, Peer]) -> Reach:
    """Returns the reach of a message that shares a link between blocks with those that cross it at the same time.

    ends: source and target, each with the function that returns the other end of a rank's message.
    """
    levels, below = list(path.levels), None
    joins = cluster.fabric.joins[: len(levels)]
    if all(level.link is None for level in joins):
        return path
    for i, level in enumerate(joins):
        if level.link is not None:
            narrow = []
            for end, peer in ends:
                block = cluster.find_block(below, end)
                away = [rank for rank in block if (other := peer(rank)) is not None and other not in block]
                nodes = len({rank // cluster.local_gpus for rank in away})
                narrow.append(_share_link(cluster, level, len(away), path.ports) / min(level.links, nodes))
            levels[i] = levels[i]._replace(oversubscription=max(narrow))
        below = level
    return replace(path, levels=tuple(levels))


def _node_ranks(cluster: Cluster, rank: int) -> range:
    """Returns the ranks of the node of a rank."""
    first = rank - rank % cluster.gpus_per_node
    return range(first, min(first + cluster.gpus_per_node, cluster.gpus))


def _free_ports(cluster: Cluster, rank: int, peer: Peer) -> float:
    """Returns `Reach.ports` of a rank whose message leaves its node, or comes from another.

    Of fewer ports than GPUs, NCCL uses that which is nearest to a GPU, so neighbouring GPUs share a port
    (`ncclTopoGetLocalNetType` in src/graph/topo.cc of NVIDIA/nccl @5067397).
    """
    size, local, nics = cluster.gpus_per_node, cluster.local_gpus, cluster.node.nics
    count = float(nics.count) if nics else float(size)
    port = int(rank % size * count / size)
    neighbours = [other for other in _node_ranks(cluster, rank) if int(other % size * count / size) == port]
    far = [other for other in neighbours if (to := peer(other)) is not None and to // local != other // local]
    return size / count / len(far)
