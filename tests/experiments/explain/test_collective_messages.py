"""Messages of collectives: against hand counts, and totals that do not depend on the algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.experiments.explain.collective_messages import (
    MemberMessages,
    collective_messages,
    exchange_messages,
    shift_messages,
    switch_link_shares,
    tree_edges,
)

ALGORITHMS = {
    "all_reduce": ("ring Simple", "tree LL128", "NVLS", "NVLS and SHARP"),
    "all_gather": ("ring LL", "PAT"),
    "reduce_scatter": ("ring Simple", "PAT"),
    "all_to_all": ("p2p Simple",),
    "broadcast": ("ring Simple",),
    "reduce": ("ring Simple",),
    "push_pull": ("push-pull",),
}


def matrix(found: MemberMessages, n: int) -> np.ndarray:
    shares = np.zeros((n, n))
    np.add.at(shares, (found.sources, found.targets), found.shares)
    return shares


def test_a_ring_on_one_node() -> None:
    """Four members: 2 x 3 / 4 of the buffer to the next one, 3 / 4 in an all-gather."""
    ring = np.roll(np.eye(4), 1, axis=1)
    assert matrix(collective_messages("all_reduce", "ring Simple", [0] * 4), 4) == pytest.approx(1.5 * ring)
    assert matrix(collective_messages("all_gather", "ring LL", [0] * 4), 4) == pytest.approx(0.75 * ring)


def test_a_ring_on_two_nodes_of_two() -> None:
    """Two rings, each with half: one leaves a node through its first member, the other through its second."""
    found = matrix(collective_messages("all_gather", "ring Simple", [0, 0, 1, 1]), 4)
    half = 0.75 / 2
    inside, across = [(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 2), (2, 0), (1, 3), (3, 1)]
    expected = np.zeros((4, 4))
    for pair in inside + across:
        expected[pair] = half
    assert found == pytest.approx(expected)


def test_trees_of_four_nodes() -> None:
    """NCCL's first tree hangs 2 under 0, and 1 and 3 under 2; the second is its mirror image."""
    found = matrix(collective_messages("all_reduce", "tree Simple", [0, 1, 2, 3]), 4)
    expected = np.zeros((4, 4))
    for child, parent in [(2, 0), (1, 2), (3, 2), (1, 3), (2, 1), (0, 1)]:
        expected[child, parent] += 0.5
        expected[parent, child] += 0.5
    assert found == pytest.approx(expected)


@given(st.integers(2, 70))
def test_both_trees_span_all_nodes_with_at_most_two_children(nodes: int) -> None:
    children, parents = tree_edges(nodes)
    for tree in (slice(0, nodes - 1), slice(nodes - 1, None)):
        own, up = children[tree].tolist(), parents[tree].tolist()
        assert len({*own}) == nodes - 1
        assert max(np.bincount(up)) <= 2
        above = dict(zip(own, up, strict=True))
        for node in own:
            for _ in range(nodes):
                node = above.get(node, node)
            assert node not in above
    if nodes % 2 == 0 and nodes > 2:
        inner = [{*parents[: nodes - 1].tolist()}, {*parents[nodes - 1 :].tolist()}]
        assert not inner[0] & inner[1], "a node is a leaf of one tree"


def test_a_switch_is_a_direct_exchange_whose_links_carry_less() -> None:
    """Eight members: an eighth from each to each and back as a sum; a link carries 1 + 1 / 8. Between four nodes each
    eighth goes round a ring, 2 x 3 / 4 of it, or once to a switch that adds."""
    found = matrix(collective_messages("all_reduce", "NVLS", [0] * 8), 8)
    assert found == pytest.approx((1 - np.eye(8)) * 2 / 8)
    assert switch_link_shares([0] * 8, False) == (1.125, 0.0)
    assert switch_link_shares([0] * 8 + [1] * 8, False) == (1.25, 1 / 8)
    assert switch_link_shares([0] * 8 + [1] * 8, True) == (1.25, 1 / 8)
    four = [node for node in range(4) for _ in range(8)]
    assert (switch_link_shares(four, False), switch_link_shares(four, True)) == ((1.25, 1.5 / 8), (1.25, 1 / 8))


def test_pat_sends_most_to_near_ranks() -> None:
    """Of five: distances 1 and 3 end with 1, distance 2 with 2, distance 4 with 4."""
    found = matrix(collective_messages("all_gather", "PAT", list(range(5))), 5)
    assert found[0].tolist() == pytest.approx([0.0, 0.4, 0.2, 0.0, 0.2])
    scatter = matrix(collective_messages("reduce_scatter", "PAT", list(range(5))), 5)
    assert scatter == pytest.approx(found.T)


def test_shifts_and_exchanges() -> None:
    assert matrix(shift_messages((1, 2, 0), False), 3) == pytest.approx(np.roll(np.eye(3), 1, axis=1))
    assert matrix(shift_messages((1, 0, 2), True), 3).tolist() == [[0, 2, 0], [2, 0, 0], [0, 0, 0]]
    found = matrix(exchange_messages([0, 0, 1, 1, 2, 2], near=10.0, far=8.0), 6)
    assert found[0].tolist() == [0, 10, 4, 0, 4, 0]


@given(st.integers(1, 9), st.integers(1, 8), st.sampled_from(sorted(ALGORITHMS)))
def test_every_algorithm_moves_the_same_bytes(k: int, g: int, operation: str) -> None:
    n, nodes = k * g, [place // g for place in range(k * g)]
    totals = {"all_reduce": 2.0 * (n - 1), "push_pull": float(n) if n > 1 else 0.0}
    for algorithm in ALGORITHMS[operation]:
        found = matrix(collective_messages(operation, algorithm, nodes), n)
        assert found.sum() == pytest.approx(totals.get(operation, n - 1.0))
        assert not found.diagonal().any()
        # In the mean over trees every member also receives what it sends.
        if "tree" not in algorithm and algorithm != "NVLS":
            assert found.sum(axis=0) == pytest.approx(found.sum(axis=1))


def test_heterogeneous_nodes_have_one_ring() -> None:
    found = matrix(collective_messages("all_reduce", "tree Simple", [0, 0, 1]), 3)
    assert found == pytest.approx(np.roll(np.eye(3), 1, axis=1) * 4 / 3)
