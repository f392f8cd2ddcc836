"""Which member of a group sends how much of a collective's buffer to which other member.

Symbols: S the largest buffer of a member (`Collective.nbytes`), n members on k nodes, g on each. Every message is a
share of S. Over a whole group the shares add up to

    all-reduce                                2 (n - 1), whichever algorithm reduces
    all-gather, reduce-scatter, broadcast, reduce, all-to-all      n - 1
    shift                                     the number of members that send to another; twice both ways
    push-pull                                 n

- Ring: each member sends to the next. NCCL's channels enter a node at different GPUs, so a ring stands for g rings
  that each leave a node through another member to the member at the same place of the next node: links inside a node
  carry (g - 1) / g of a member's share, ports 1 / g, as in `simulator.costs.collectives.algorithms`.
- Tree: NCCL's double binary tree over nodes, half of the buffer in each (`ncclGetDtree` of NVIDIA/nccl, src/graph/
  trees.cc), up and down, of which the members at each place of their nodes carry 1 / g; within a node chains that begin
  at different members.
- NVLS: a switch adds and multicasts. It is counted as the direct exchange that it stands for: every member owns 1 / g
  of the buffer, receives it from all others of its node and sends the sum back. Links carry less, for the switch adds.
  SHARP does the same between nodes.
- PAT: a chunk reaches the rank at distance d over the binary digits of d, the highest first (arXiv 2506.20252).
- All-to-all: each member sends 1 / n to each other.
- Push-pull: servers are spread evenly over the members' nodes, so every member sends as much to each other.
- Broadcast and reduce: chains, whose roots take turns, as where every member broadcasts the part that it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class MemberMessages(NamedTuple):
    """Messages between the members of a group.

    sources, targets: positions in the group.
    shares: of the buffer's bytes.
    """

    sources: np.ndarray
    targets: np.ndarray
    shares: np.ndarray

    def reverse(self) -> MemberMessages:
        """Returns the messages the other way."""
        return MemberMessages(self.targets, self.sources, self.shares)

    def both_ways(self) -> MemberMessages:
        """Returns the messages and their answers."""
        return _join([self, self.reverse()])

    def stretch(self, by: int, place: int) -> MemberMessages:
        """Returns messages between nodes as those between the members at a place of nodes of `by` members."""
        return MemberMessages(self.sources * by + place, self.targets * by + place, self.shares)


def collective_messages(operation: str, algorithm: str, nodes: Sequence[int]) -> MemberMessages:
    """Returns the messages of a collective, by the words of `Collective.operation` and `Algorithm.name`.

    nodes: the node of every member; members of a node are neighbours.
    """
    n = len(nodes)
    if n < 2:
        return _join([])
    match operation:
        case "all_to_all":
            return _direct(n, 1.0 / n)
        case "push_pull":
            return _direct(n, 1.0 / (n - 1))
        case "all_reduce" if algorithm.startswith("tree") and _members_of_node(nodes):
            return _tree(nodes)
        case "all_reduce" if algorithm.startswith("NVLS") and _members_of_node(nodes):
            return _switch(nodes, "SHARP" in algorithm)
        case "all_reduce":
            return _ring(nodes, 2.0 * (n - 1) / n)
        case "all_gather" | "reduce_scatter" if algorithm == "PAT":
            return _binary(n) if operation == "all_gather" else _binary(n).reverse()
    return _ring(nodes, (n - 1) / n)


def shift_messages(targets: Sequence[int], both_ways: bool) -> MemberMessages:
    """Returns the messages of a shift. targets: the position that each position sends to; itself: nothing."""
    sources, ends = np.arange(len(targets)), np.asarray(targets, int)
    away = sources != ends
    sources, ends = sources[away], ends[away]
    messages = MemberMessages(sources, ends, np.ones(len(sources)))
    return messages.both_ways() if both_ways else messages


def exchange_messages(nodes: Sequence[int], near: float, far: float) -> MemberMessages:
    """Returns the messages of a token exchange that forwards inside nodes.

    near: bytes that a member sends to the other members of its node together.
    far: bytes that it sends to the members at its place in all other nodes together.

    Its shares are bytes.
    """
    messages, g = [], _members_of_node(nodes)
    if not g:  # nodes with different numbers of members: to all of them alike
        return _direct(len(nodes), (near + far) / max(1, len(nodes) - 1))
    k = len(nodes) // g
    if g > 1:
        messages += [_direct(g, near / (g - 1)).stretch(1, node * g) for node in range(k)]
    if k > 1:
        messages += [_direct(k, far / (k - 1)).stretch(g, place) for place in range(g)]
    return _join(messages)


def _join(parts: Sequence[MemberMessages]) -> MemberMessages:
    if not parts:
        return MemberMessages(np.zeros(0, int), np.zeros(0, int), np.zeros(0))
    return MemberMessages(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _members_of_node(nodes: Sequence[int]) -> int:
    """Returns the members of each node; 0 if their numbers differ."""
    _, counts = np.unique(np.asarray(nodes), return_counts=True)
    return int(counts[0]) if (counts == counts[0]).all() else 0


def _direct(n: int, share: float) -> MemberMessages:
    """Returns a message of a share from every member to each other."""
    sources, targets = np.nonzero(~np.eye(n, dtype=bool))
    return MemberMessages(sources, targets, np.full(len(sources), share))


def _cycle(n: int, share: float) -> MemberMessages:
    sources = np.arange(n if n > 1 else 0)
    return MemberMessages(sources, (sources + 1) % n, np.full(len(sources), share))


def _ring(nodes: Sequence[int], share: float) -> MemberMessages:
    """Returns rings in which every member sends a share to the next."""
    g = _members_of_node(nodes)
    k = len(nodes) // g if g else 1
    if not g or k == 1:
        return _cycle(len(nodes), share)
    inside = [_cycle(g, share * (g - 1) / g).stretch(1, node * g) for node in range(k)]
    return _join([*inside, *(_cycle(k, share / g).stretch(g, place) for place in range(g))])


def _tree(nodes: Sequence[int]) -> MemberMessages:
    """Returns messages up and down NCCL's two trees over nodes, and chains within them."""
    g = _members_of_node(nodes)
    k = len(nodes) // g
    messages = []
    if g > 1:
        chains = _cycle(g, (g - 1) / g).both_ways()
        messages += [chains.stretch(1, node * g) for node in range(k)]
    if k > 1:
        messages += [_node_trees(k, 0.5 / g).stretch(g, place) for place in range(g)]
    return _join(messages)


def _node_trees(nodes: int, share: float) -> MemberMessages:
    """Returns messages of a share up and down both trees over nodes."""
    children, parents = tree_edges(nodes)
    return MemberMessages(children, parents, np.full(len(children), share)).both_ways()


def tree_edges(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns children and parents in NCCL's double binary tree: nodes - 1 edges of the first tree, then those of the
    second.

    The second tree is the first, mirrored or, for an odd number of nodes, shifted by 1.

    >>> [edges.tolist() for edges in tree_edges(4)]
    [[1, 2, 3, 2, 1, 0], [2, 0, 2, 1, 3, 1]]
    """
    children = np.arange(1, nodes)
    parents = np.array([_parent(child, nodes) for child in range(1, nodes)], int)
    if nodes % 2:
        return np.concatenate([children, (children + 1) % nodes]), np.concatenate([parents, (parents + 1) % nodes])
    return np.concatenate([children, nodes - 1 - children]), np.concatenate([parents, nodes - 1 - parents])


def _parent(node: int, nodes: int) -> int:
    """Returns the parent of a node other than 0, which is the root (`ncclGetBtree`)."""
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < nodes else node ^ bit


def _switch(nodes: Sequence[int], sharp: bool) -> MemberMessages:
    """Returns the direct exchange that switches reduce and multicast. sharp: also between nodes."""
    g = _members_of_node(nodes)
    k = len(nodes) // g
    messages = [_direct(g, 2.0 / g).stretch(1, node * g) for node in range(k)] if g > 1 else []
    if k > 1:
        between = _direct(k, 2.0 / k) if sharp else _node_trees(k, 0.5)
        between = between._replace(shares=between.shares * (1.0 / g))
        messages += [between.stretch(g, place) for place in range(g)]
    return _join(messages)


def _binary(n: int) -> MemberMessages:
    """Returns an all-gather by PAT: over distance 2^j go the chunks whose distance ends with that binary digit."""
    distances = np.arange(1, n)
    steps, chunks = np.unique(distances & -distances, return_counts=True)
    sources = np.arange(n)
    return _join(
        [
            MemberMessages(sources, (sources + step) % n, np.full(n, count / n))
            for step, count in zip(steps.tolist(), chunks.tolist(), strict=True)
        ]
    )


def switch_link_shares(nodes: Sequence[int], sharp: bool) -> tuple[float, float]:
    """Returns shares of the buffer that a member sends over its scale-up links, and over its port, in an all-reduce
    by NVLS.

    A switch adds what members read and multicasts what they write, so links carry less than `collective_messages`
    counts: 1 + 1 / g within a node and 1 + 2 / g on several, and at ports with SHARP 1 / g.
    """
    g = _members_of_node(nodes)
    k = len(nodes) // g
    if k == 1:
        return 1 + 1 / g, 0.0
    return (1 + 2 / g if g > 1 else 0.0), (1 / g if sharp else 2 * (k - 1) / k / g)
