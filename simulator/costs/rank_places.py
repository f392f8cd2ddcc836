"""Where ranks of a mesh are in the topology of a cluster: what the messages and collectives between them cross."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.topology import Reach, message_reach, reach
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Exchange, Message, Transfer


class KnownReaches(NamedTuple):
    """Reaches that were looked up before, on clusters of the same `Cluster.layout`.

    pairs: of messages between two ranks, on any mesh.
    groups: of what else is sent, on a mesh.
    """

    pairs: dict[tuple[int, int], Reach]
    groups: dict[Hashable, tuple[Reach, ...]]


class RankPlaces:
    """The ranks of a mesh on the GPUs of a cluster. The reach of equal groups is looked up once."""

    def __init__(self, cluster: Cluster, mesh: Mesh, known: KnownReaches | None = None) -> None:
        """known: reaches on this mesh that are known; new ones are added."""
        self.cluster, self.mesh = cluster, mesh
        self._pairs, self._reaches = known or KnownReaches({}, {})
        self._offsets: dict[tuple[str, ...], list[int]] = {}

    def group_reaches(self, work: Collective | Exchange) -> tuple[Reach, ...]:
        """Returns the reaches of the groups of a collective that may be the slowest."""
        group = work.axes, work.members if isinstance(work, Collective) else None
        if isinstance(work, Collective) and work.ranks is not None:
            return (reach(self.cluster, work.ranks),)
        if group not in self._reaches:
            self._reaches[group] = self._slowest_reaches(work.axes, self.mesh.ranks(*group))
        return self._reaches[group]

    def pair_reaches(self, work: Transfer) -> tuple[Reach, ...]:
        """Returns the pairs of a message that may be the slowest; () if source and target are the same rank."""
        if work.source == work.target:
            return ()
        pair = work.axis, work.source, work.target
        if pair not in self._reaches:
            source, target = (self.mesh.offset(work.axis, end) for end in (work.source, work.target))
            self._reaches[pair] = self._hop_reaches((work.axis,), {source: target})
        return self._reaches[pair]

    def shift_reaches(self, work: Collective) -> tuple[Reach, ...]:
        """Returns the reaches of the pairs in a shift that may be the slowest; () if each rank keeps its data."""
        ranks = self.mesh.ranks(work.axes, work.members)
        targets = work.targets or tuple((i + work.by) % len(ranks) for i in range(len(ranks)))
        key = "shift", work.axes, work.members, targets
        if key not in self._reaches:
            hops = {rank: ranks[to] for i, (rank, to) in enumerate(zip(ranks, targets, strict=True)) if i != to}
            self._reaches[key] = self._hop_reaches(work.axes, hops)
        return self._reaches[key]

    def message_reaches(self, messages: Sequence[Message]) -> Iterator[tuple[Message, Reach]]:
        """Yields every message of a cross-mesh resharding with its reach; of several messages of a rank, a message that
        leaves the node counts for the ports that it shares with its neighbours."""
        local = self.cluster.local_gpus
        sends_to, receives_from = dict[int, int](), dict[int, int]()
        for source, target, _ in messages:
            for peers, rank, peer in ((sends_to, source, target), (receives_from, target, source)):
                if rank not in peers or peers[rank] // local == rank // local:
                    peers[rank] = peer
        for message in messages:
            source, target, _ = message
            yield message, message_reach(self.cluster, source, target, sends_to.get, receives_from.get)

    def _hop_reaches(self, axes: tuple[str, ...], hops: Mapping[int, int]) -> tuple[Reach, ...]:
        """Returns the reaches of messages that are sent at the same time and may be the slowest.

        hops: receiver by sender, in the group of rank 0 along `axes`; all groups along them send at the same time.
        """
        sends_to = self._find_peers(axes, hops)
        receives_from = self._find_peers(axes, {target: source for source, target in hops.items()})
        slowest: dict[Reach, None] = {}
        known = self._pairs if self.cluster.messages_alone else {}
        for source, target in hops.items():
            pairs = [(offset + source, offset + target) for offset in self._group_offsets(axes)]
            for pair in pairs:
                if pair not in known:
                    known[pair] = message_reach(self.cluster, *pair, sends_to, receives_from)
            most_nodes = max(known[pair].nodes.number for pair in pairs)
            slowest |= dict.fromkeys(known[pair] for pair in pairs if known[pair].nodes.number == most_nodes)
        return tuple(slowest)

    def _find_peers(self, axes: tuple[str, ...], hops: Mapping[int, int]) -> Callable[[int], int | None]:
        """Returns a function that finds the other end of the message of a rank, if `hops` has that rank."""
        parts = [(self.mesh.stride(part), self.mesh.size(part)) for part in self.mesh.parts(axes)]
        first = self.mesh.first

        def find_peer(rank: int) -> int | None:
            place = sum((rank - first) // stride % count * stride for stride, count in parts)
            return rank - place + hops[place] if place in hops else None

        return find_peer

    def _slowest_reaches(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> tuple[Reach, ...]:
        """Returns the reaches of those groups along `axes`, shifted copies of `ranks`, that cross most links between
        blocks of nodes and are in most nodes.

        One of them is the slowest.
        """
        offsets = self._group_offsets(axes)
        reaches = dict.fromkeys(reach(self.cluster, [offset + rank for rank in ranks]) for offset in offsets)
        distances = [
            (sum(1 for level in group.levels if level.blocks), group.nodes.number, -group.nodes.fewest)
            for group in reaches
        ]
        farthest = max(distances)
        return tuple(group for group, distance in zip(reaches, distances, strict=True) if distance == farthest)

    def _group_offsets(self, axes: tuple[str, ...]) -> list[int]:
        """Returns first ranks of groups along `axes`, a rank for each distinct position in the nodes of the cluster."""
        if axes not in self._offsets:
            pattern, start = self.cluster.pattern, self.mesh.first
            first = {start % pattern: start}
            for axis in self.mesh.inner:
                if axis not in axes:
                    stride = self.mesh.stride(axis)
                    # Further along the axis the positions repeat.
                    steps = min(self.mesh.size(axis), pattern // math.gcd(stride, pattern))
                    ranks = [rank + i * stride for i in range(steps) for rank in first.values()]
                    first = {rank % pattern: rank for rank in reversed(ranks)}
            self._offsets[axes] = list(first.values())
        return self._offsets[axes]
