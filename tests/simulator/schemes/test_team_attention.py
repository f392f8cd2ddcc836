"""WallFacer: which team's keys each rank computes, the pairs of tokens in its blocks, its traffic and placement."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, UnitRun
from meshcast.simulator.models.model import Model
from meshcast.simulator.schemes.sequence.wallfacer import first_keys, team_blocks
from meshcast.validation.contract.measure import lowered_stage, make, sent_bytes
from meshcast.validation.contract.of_sequence import of_family
from tests.simulator.schemes.ring_layers import LLAMA

MIB = 2**20
SHAPES = [(1, 4), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]
"""Ranks of a team, and ranks of a ring."""


def layer(ranks: int, around: int, **model: Any) -> UnitRun:
    """A layer on teams of `ranks`, and `around` ranks in a ring."""
    mesh = Mesh({"groups": ranks, "ring": around, "team": ranks})
    shape = Model(**({"layers": 1, "hidden": 192, "heads": 24, "vocab": 64, "seq": 288} | model))
    scheme = make("sequence/wallfacer", mesh, tuple(mesh.axes))
    (unit_run,) = lowered_stage(shape, mesh, [scheme]).unit_runs
    return unit_run


def teams_of_keys(ranks: int, around: int) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """The teams whose keys each rank (group, place, number in its team) meets, step by step, as the messages say."""
    targets = first_keys(ranks, groups_outside=True)
    found = {}
    for source, target in enumerate(targets):
        for place in range(around):
            keys = [(source // ranks, (place - i) % around) for i in range(around)]
            found[target // ranks, place, target % ranks] = keys
    return found


@pytest.mark.parametrize(("ranks", "around"), SHAPES)
def test_the_ranks_of_a_team_meet_every_team_once(ranks: int, around: int) -> None:
    found = teams_of_keys(ranks, around)
    teams = [(group, place) for group in range(ranks) for place in range(around)]
    for group, place in teams:
        met = Counter(key for rank in range(ranks) for key in found[group, place, rank])
        assert met == Counter(teams)


@pytest.mark.parametrize(("ranks", "around"), SHAPES)
def test_blocks_have_the_pairs_of_a_count_one_by_one(ranks: int, around: int) -> None:
    """Of tokens that are zigzag over the teams; a pair of a token with itself counts half."""
    teams, n = ranks * around, 4
    parts = [[*range(t * n // 2, (t + 1) * n // 2)] for t in range(2 * teams)]
    tokens = {(t // around, t % around): parts[t] + parts[2 * teams - 1 - t] for t in range(teams)}
    found = teams_of_keys(ranks, around)
    for i, block in enumerate(team_blocks("zigzag", ranks, around)):
        pairs = [
            sum(Fraction(2 * (k < q) + (k == q), 2) for q in tokens[group, place] for k in tokens[keys[i]])
            for (group, place, _), keys in found.items()
        ]
        assert set(pairs) == {Fraction(n * n, 2)} == {block.mean_share(n) * n * n}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_first_keys_go_to_the_same_rank_in_either_order_of_axes(ranks: int) -> None:
    outside, inside = first_keys(ranks, True), first_keys(ranks, False)
    for group in range(ranks):
        for rank in range(ranks):
            end = (group + rank) % ranks
            assert outside[group * ranks + rank] == end * ranks + rank
            assert inside[rank * ranks + group] == rank * ranks + end


def test_a_layer_of_llama_3_8b_on_8_ranks_sends_the_known_bytes() -> None:
    """Teams of two: 20 MiB in the team without row sums, one hop of 8 MiB; half of the ranks fetch 8 MiB first."""
    forward = of_family(layer(2, 2, **LLAMA).fragment.forward)
    mesh = Mesh({"groups": 2, "ring": 2, "team": 2})
    by_name = {op.name: sent_bytes([op], mesh) / MIB for op in forward}
    tensors = [name for name in by_name if name.partition(" ")[0] in ("all_gather", "reduce_scatter")]
    assert sum(by_name[name] for name in tensors if name != "all_gather row sums") == 20
    assert (by_name["ring core"], by_name["place core"], by_name["all_gather row sums"]) == (8, 4, 0.25)


@pytest.mark.parametrize(("ranks", "hops"), [(1, 63), (2, 15), (4, 3), (8, 0)])
def test_64_ranks_make_fewer_hops_in_larger_teams(ranks: int, hops: int) -> None:
    forward = layer(ranks, 64 // ranks**2, seq=1152).fragment.forward
    assert sum(op.name.startswith("ring ") for op in forward) == hops


def test_teams_of_one_rank_are_a_ring() -> None:
    mesh, shape = Mesh({"ring": 4}), Model(layers=1, hidden=192, heads=24, vocab=64, seq=288)
    schemes = [make("sequence/burst-attention", mesh, ("ring",))]
    (ring,) = lowered_stage(shape, mesh, schemes).unit_runs
    for one, other in zip(layer(1, 4).fragment.forward, ring.fragment.forward, strict=True):
        assert (one.name, one.work) == (other.name, other.work)


def test_all_work_of_attention_is_done_once() -> None:
    for ranks, around in SHAPES:
        fragment = layer(ranks, around).fragment
        works = [op.work for op in fragment.forward if isinstance(op.work, Attention)]
        assert sum(work.flops for work in works) * ranks**2 * around == pytest.approx(4 * 288 * 288 * 192 / 2)


def test_the_order_of_axes_decides_what_is_near() -> None:
    """On two nodes, whose ports hops inside a node do not take: teams across the nodes against rings across them."""

    def seconds(order: str) -> float:
        sizes = {"groups": 2, "ring": 4, "team": 2}
        return simulate(
            {
                "model": {"layers": 1, "hidden": 1024, "heads": 8, "vocab": 64, "seq": 65536},
                "cluster": "dgx-a100:2",
                "plan": {
                    "mesh": {name: sizes[name] for name in order.split()},
                    "schemes": [{"use": "data/ddp"}, {"use": "sequence/wallfacer", "over": [*sizes]}],
                },
            }
        ).step_time

    assert seconds("groups ring team") != seconds("ring groups team") != seconds("team groups ring")
