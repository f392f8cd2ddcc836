"""Where the members of a group sit: how many scale-up domains and nodes it touches.

Ranks are dense: rank r is a GPU of scale-up domain r // scale_up_domain and of node r // gpus_per_node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hardware.cluster import Cluster


@dataclass(frozen=True)
class Reach:
    """How far a group spreads.

    Attributes:
        members: GPUs in the group.
        domains: scale-up domains that it touches; 1 means it never leaves the fast links.
        per_domain: the most members in one domain.
        nodes: nodes that it touches.
        even: every domain it touches holds as many members as every other.
    """

    members: int
    domains: int
    per_domain: int
    nodes: int
    even: bool


def reach(cluster: Cluster, ranks: Sequence[int]) -> Reach:
    """The `Reach` of the group of these global `ranks`."""
    if not ranks or min(ranks) < 0 or max(ranks) >= cluster.gpus:
        raise ValueError(f"a group needs ranks from 0 to {cluster.gpus - 1}, got {list(ranks)[:8]}")
    domain, node = cluster.scale_up_domain, cluster.gpus_per_node
    domains = Counter(rank // domain for rank in ranks)
    nodes = {rank // node for rank in ranks}
    most = max(domains.values())
    return Reach(len(ranks), len(domains), most, len(nodes), most == min(domains.values()))


def sharers(cluster: Cluster, ranks: Sequence[int]) -> float:
    """Groups of this shape that share one domain's ports to the network, this one included (1 or more).

    A domain's GPUs that are not in this group are in siblings of it (every rank belongs to one group of an axis),
    and all of them communicate at the same time. So a group with m members in a domain has the ports of m GPUs to
    itself on average: GPUs in the domain / m siblings share them all. Meaningless for a group inside one domain.
    """
    return cluster.scale_up_domain / reach(cluster, ranks).per_domain
