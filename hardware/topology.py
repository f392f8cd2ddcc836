"""The place of a group in a cluster: the domains, nodes and levels of the fabric that it touches.

Ranks are dense: rank r is a GPU of scale-up domain r // domain, of node r // gpus_per_node, and so on upwards. A
scale-up domain that spans nodes (GB200 NVL72) counts as one node here: its GPUs reach each other without the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hardware.cluster import Cluster


class Parts(NamedTuple):
    """Parts of the cluster (domains, nodes) that a group touches, and its members in the part that holds the fewest."""

    number: int
    fewest: int


class Crossing(NamedTuple):
    """A level of the fabric that a group crosses, and its members in the block below that holds the fewest."""

    oversubscription: float
    fewest: int


@dataclass(frozen=True)
class Reach:
    """Where a group sits in the cluster.

    Attributes:
        members: GPUs in the group.
        domains: scale-up domains that it touches; with one it never leaves the scale-up links.
        nodes: nodes that it touches; with one it needs no network.
        links: share of its scale-up links that a member can use within the group: 1 with a switch.
        levels: of the fabric that it crosses, from the lowest.
        rails: oversubscription of the level above `levels` that traffic between GPUs at different places of their nodes
            has to cross, where ports at the same place share a switch (rails) and no scale-up switch forwards it.
    """

    members: int
    domains: Parts
    nodes: Parts
    links: float = 1.0
    levels: tuple[Crossing, ...] = ()
    rails: float = 1.0


def reach(cluster: Cluster, ranks: Sequence[int]) -> Reach:
    """The `Reach` of the group of these global `ranks`."""
    if not len(ranks) or min(ranks) < 0 or max(ranks) >= cluster.gpus:
        raise ValueError(f"a group needs ranks from 0 to {cluster.gpus - 1}, got {list(ranks)[:8]}")
    node = cluster.node
    domains, links = _parts(ranks, cluster.domain), 1.0
    nodes = _parts(ranks, cluster.local_gpus) if cluster.local_gpus != cluster.domain else domains
    if node.scale_up and not node.scale_up.switched.value and len(ranks) > domains.number:
        links = _links(cluster, ranks)
        if not links:  # as far from each other as GPUs of two domains
            domains, links = Parts(len(ranks), 1), 1.0
    levels = _levels(cluster, ranks) if nodes.number > 1 else ()
    return Reach(len(ranks), domains, nodes, links, levels, _rails(cluster, ranks, len(levels)))


def _parts(ranks: Sequence[int], size: int) -> Parts:
    """The blocks of `size` ranks that a group touches."""
    held = Counter([rank // size for rank in ranks])
    return Parts(len(held), min(held.values()))


def _links(cluster: Cluster, ranks: Sequence[int]) -> float:
    """Without a switch: the share of a member's links that end at other members; least of all members."""
    domain, places = cluster.domain, dict[int, list[int]]()
    for rank in ranks:
        places.setdefault(rank // domain, []).append(rank % domain)
    up = cluster.node.scale_up
    return min(up.among(tuple(held)) for held in places.values()) if up else 1.0


def _levels(cluster: Cluster, ranks: Sequence[int]) -> tuple[Crossing, ...]:
    block, found = cluster.local_gpus, []
    for level in cluster.fabric.joins:
        parts = _parts(ranks, block)
        if parts.number == 1:
            break
        found.append(Crossing(level.oversubscription, parts.fewest))
        block = cluster.block(level)
    return tuple(found)


def _rails(cluster: Cluster, ranks: Sequence[int], crossed: int) -> float:
    """See `Reach.rails`. Behind a scale-up switch NCCL forwards data to the GPU on the right rail (PXN)."""
    node, levels = cluster.node, cluster.fabric.joins
    if not crossed or crossed == len(levels) or node.nics is None or not node.nics.rail_optimised.value:
        return 1.0
    forwarded = node.scale_up is not None and node.scale_up.switched.value and cluster.domain >= cluster.gpus_per_node
    places = {rank % cluster.gpus_per_node for rank in ranks}
    return 1.0 if forwarded or len(places) == 1 else levels[crossed].oversubscription
