"""Where the members of a group sit: how many scale-up domains it touches.

Ranks are dense: rank r is a GPU of scale-up domain r // scale_up_domain.
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
        fewest: members in the domain that holds the fewest.
    """

    members: int
    domains: int
    fewest: int


def reach(cluster: Cluster, ranks: Sequence[int]) -> Reach:
    """The `Reach` of the group of these global `ranks`."""
    if not len(ranks) or min(ranks) < 0 or max(ranks) >= cluster.gpus:
        raise ValueError(f"a group needs ranks from 0 to {cluster.gpus - 1}, got {list(ranks)[:8]}")
    domain = cluster.scale_up_domain
    domains = Counter([rank // domain for rank in ranks])
    return Reach(len(ranks), len(domains), min(domains.values()))
