"""Uneven routing: loads of experts and their ranks by hand, and choices dropped by a capacity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from random import Random
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.routing import TRAINED, Placement, Routing, _loads, least_capacity
from tests.strategies import examples

PLACES = st.sampled_from([(1, 4), (2, 4), (4, 4), (2, 6), (4, 32), (8, 64), (16, 160)])
"""Ranks, and the experts that they hold."""


@st.composite
def routings(draw: st.DrawFn, ranks: int, experts: int) -> Routing:
    """Even, by Zipf's law, or counts of one source or of every rank."""
    kind = draw(st.sampled_from(["balanced", "zipf", "one", "each"]))
    if kind in ("balanced", "zipf"):
        return Routing(zipf=draw(st.floats(0.1, 3)) if kind == "zipf" else 0.0)
    row = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts).filter(any)
    rows = draw(st.lists(row, min_size=(n := 1 if kind == "one" else ranks), max_size=n))
    return Routing(counts=tuple(tuple(float(count) for count in one) for one in rows))


# ------------------------------------------------------------------------------------------------ by hand


@given(places=PLACES, capacity=st.none() | st.floats(1, 8))
def test_even_routing_is_even_to_the_last_bit(places: tuple[int, int], capacity: float | None) -> None:
    ranks, experts = places
    counts = ((7.0,) * experts,) * ranks
    for routing in (Routing(), Routing(counts=counts), Routing(counts=counts[:1])):
        spread = routing.load(ranks, experts, capacity)
        assert spread.even and spread.dropped == 0
        assert (spread.most_loaded, spread.remote, spread.busiest_exchange) == (1, 1, 1)
        assert set(spread.kept) == {1}
        assert least_capacity(routing, experts) == 1


def test_zipf_by_hand() -> None:
    """1, 1/2, 1/3, 1/4 of 25/12: rank 0 holds the first two of four experts."""
    spread = Routing(zipf=1.0).load(2, 4)
    assert spread.kept == pytest.approx([48 / 25, 24 / 25, 16 / 25, 12 / 25])
    assert spread.rank_loads == pytest.approx([36 / 25, 14 / 25])
    assert spread.most_loaded == pytest.approx(36 / 25)
    assert spread.expert_loads == pytest.approx([48 / 25, 24 / 25])
    # Rank 0 sends 14/50 of its tokens, rank 1 the other 36/50 of its own to rank 0; 25/50 are even.
    assert spread.remote == pytest.approx(1)
    assert spread.busiest_exchange == pytest.approx(36 / 25)


def test_the_largest_sender_may_be_busier_than_the_largest_receiver() -> None:
    """Of three ranks the last is never chosen: it sends all that it has, where two thirds are even."""
    spread = Routing(counts=((1.0, 1.0, 0.0),)).load(3, 3)
    assert spread.rank_loads == pytest.approx([1.5, 1.5, 0])
    # Received are two halves by each of the first two, one whole is sent by the last, against two thirds in the mean.
    assert spread.busiest_exchange == pytest.approx(1.5)
    many = Routing(counts=((1.0,) * 7 + (0.0,),)).load(8, 8)
    assert many.most_loaded == pytest.approx(8 / 7)
    assert many.busiest_exchange == pytest.approx(8 / 7)


def test_counts_by_rank_determine_local_tokens() -> None:
    """Two ranks that choose their own experts only send nothing; if all choose the other's, all is sent."""
    near = Routing(counts=((3.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 1.0))).load(2, 4)
    assert (near.remote, near.busiest_exchange, near.most_loaded) == (0, 1, 1)
    assert near.kept == pytest.approx([1.5, 0.5, 1, 1])
    far = Routing(counts=((0.0, 1.0), (5.0, 0.0))).load(2, 2)
    assert (far.remote, far.busiest_exchange, far.most_loaded) == (2, 1, 1)


@given(data=st.data(), places=PLACES)
def test_nothing_is_lost_on_the_way(data: st.DataObject, places: tuple[int, int]) -> None:
    """All ranks together compute all tokens, whatever the routing, and the most loaded rank no fewer than the mean; its
    groups are those that it computes. Sent and received tokens are equal in number.
    """
    ranks, experts = places
    routing = data.draw(routings(ranks, experts))
    spread = routing.load(ranks, experts)
    assert sum(spread.kept) == pytest.approx(experts)
    assert sum(spread.rank_loads) == pytest.approx(ranks)
    assert 1 - 1e-12 <= spread.most_loaded <= ranks * (1 + 1e-12)
    assert spread.most_loaded == pytest.approx(max(spread.rank_loads))
    assert sum(spread.expert_loads) == pytest.approx(spread.most_loaded * experts / ranks)
    assert 0 <= spread.remote <= (ranks / (ranks - 1) if ranks > 1 else 1) * (1 + 1e-12)
    assert spread.busiest_exchange >= 1 - 1e-12
    if len(routing.counts) <= 1 and ranks > 1:
        assert spread.remote == pytest.approx(1), "where sources choose alike, only even parts leave them in the mean"
        unloved = min(spread.rank_loads)
        assert spread.busiest_exchange == pytest.approx(
            max(spread.most_loaded, (1 - unloved / ranks) * ranks / (ranks - 1))
        )


@given(data=st.data(), places=PLACES)
def test_tokens_of_experts_that_all_ranks_have_stay(data: st.DataObject, places: tuple[int, int]) -> None:
    """The load of the ranks evens out, and only the other experts' tokens travel."""
    ranks, experts = places
    routing = data.draw(routings(ranks, experts).filter(lambda one: len(one.counts) <= 1))
    stay = tuple(data.draw(st.lists(st.integers(0, experts - 1), unique=True, max_size=experts)))
    bare, spread = (
        routing.load(ranks, experts),
        routing.load(ranks, experts, None, Placement.with_shadows(ranks, experts, stay)),
    )
    assert sum(spread.rank_loads) == pytest.approx(ranks)
    assert sum(spread.expert_loads) == pytest.approx(spread.most_loaded * experts / ranks)
    moving = 1 - sum(bare.kept[j] for j in stay) / experts
    if ranks > 1:
        own = [sum(bare.kept[j] for j in rank if j not in stay) for rank in ranks_of(ranks, experts)]
        sends = [(experts * moving - mine) / (experts * (ranks - 1) / ranks) for mine in own]
        assert spread.remote == pytest.approx(sum(sends) / ranks, abs=1e-12)
    if len(stay) == experts:
        assert spread.most_loaded == pytest.approx(1)


def ranks_of(ranks: int, experts: int) -> Iterator[range]:
    own = experts // ranks
    return (range(rank * own, (rank + 1) * own) for rank in range(ranks))


def test_a_routing_says_where_it_comes_from() -> None:
    counts = Routing(counts=((1.0, 2.0),), file="c.json")
    assert "as c.json counts them" in str(counts) and "of 3 steps" in str(replace(counts, steps=3))
    assert "a trained router" in str(Routing(trained="natural")) and "counts" not in str(Routing(zipf=1.0))


# ----------------------------------------------------------------------------------------------- capacity


@given(data=st.data(), places=PLACES, c=st.floats(0.1, 10), more=st.floats(1, 4))
def test_capacity_drops_choices_beyond_it(data: st.DataObject, places: tuple[int, int], c: float, more: float) -> None:
    """Of each source's choices sum max(0, n - c) are dropped: fewer for a larger c, none from the share of the most
    popular expert on. Computed groups are padded, so all ranks have the same load.
    """
    ranks, experts = places
    routing = data.draw(routings(ranks, experts))
    spread, shares = routing.load(ranks, experts, c), routing.shares(experts)
    lost = sum(max(0.0, share - c) for row in shares.tolist() for share in row)
    assert spread.dropped == pytest.approx(lost / shares.sum(), abs=1e-12)
    assert max(spread.kept) <= c * (1 + 1e-12)
    assert sum(spread.kept) / experts == pytest.approx(1 - spread.dropped)
    assert routing.load(ranks, experts, c * more).dropped <= spread.dropped + 1e-12
    assert routing.load(ranks, experts, least_capacity(routing, experts)).dropped == 0
    assert spread.even and spread.most_loaded == 1


def test_choices_dropped_by_chance_under_even_routing() -> None:
    """n tokens each to one of E experts at random: at c = 1 about sqrt(E / (2 pi n)) are dropped, 3.5 % of 8192 on 64.
    The counts are the quantiles, in the middle of E equal parts, of the normal distribution that they come from.
    """
    experts, tokens = 64, 8192
    mean = tokens / experts
    chance = NormalDist(mean, math.sqrt(mean * (1 - 1 / experts)))
    counts = tuple(chance.inv_cdf((j + 0.5) / experts) for j in range(experts))
    dropped = Routing(counts=(counts,)).load(8, experts, 1.0).dropped
    assert dropped == pytest.approx(math.sqrt(experts / (2 * math.pi * tokens)), rel=0.02)
    assert round(dropped, 3) == 0.035


@given(data=st.data(), places=PLACES, block=st.sampled_from([1, 16, 128]))
def test_blocks_waste_less_than_one_each_expert(data: st.DataObject, places: tuple[int, int], block: int) -> None:
    """sum(ceil(n / 128) 128 - n) rows over all experts, of whole counts n."""
    ranks, experts = places
    counts = data.draw(st.lists(st.integers(0, 2000), min_size=experts, max_size=experts).filter(any))
    mean = Fraction(sum(counts), experts)
    spread = Routing(counts=(tuple(map(float, counts)),)).load(ranks, experts)
    filled = spread.pad_to_blocks(block / float(mean))
    waste = sum(-(-n // block) * block - n for n in counts)
    alone = Routing(counts=(tuple(map(float, counts)),)).load(1, experts).pad_to_blocks(block / float(mean))
    assert alone.most_loaded - 1 == pytest.approx(waste / sum(counts))
    assert waste < block * experts
    most = max(sum(-(-counts[j] // block) * block for j in rank) for rank in ranks_of(ranks, experts))
    assert filled.most_loaded == pytest.approx(most / float(mean) / (experts // ranks))
    assert sum(filled.expert_loads) == pytest.approx(filled.most_loaded * experts / ranks)
    assert filled.most_stored / filled.most_loaded == pytest.approx(spread.most_stored / spread.most_loaded)
    assert (filled.busiest_exchange, filled.rank_loads) == (spread.busiest_exchange, spread.rank_loads), (
        "padding is not sent"
    )


# ---------------------------------------------------------------------------------------------- a gate


@given(
    zipf=st.sampled_from([0.0, 0.5, 1.5]),
    machines=st.sampled_from([2, 4]),
    each=st.sampled_from([1, 2, 4]),
    own=st.sampled_from([1, 2]),
    most=st.sampled_from([0.0, 0.14, 0.5, 1.0]),
    topk=st.sampled_from([1, 2, 4]),
)
def test_a_gate_lets_one_copy_of_few_tokens_leave_their_machine(
    zipf: float, machines: int, each: int, own: int, most: float, topk: int
) -> None:
    """Of a rank: all copies as before where few enough first choices are elsewhere, else one of each token that may."""
    ranks, experts = machines * each, machines * each * own
    free = Routing(zipf)
    gated = free.limit_outgoing(ranks, experts, each, most, topk)
    before, after = np.broadcast_to(free.shares(experts), (ranks, experts)), gated.shares(experts)
    assert after.sum(axis=1) == pytest.approx(np.full(ranks, experts))
    leaving = []
    for rank in range(ranks):
        inside = [expert // (own * each) == rank // each for expert in range(experts)]
        elsewhere, now = (sum(row[rank][~np.array(inside)]) / experts for row in (before, after))
        assert now == pytest.approx(elsewhere if elsewhere <= most else most / topk)
        leaving.append(now)
        # Among the experts of one side the popular ones stay popular.
        for side in (np.array(inside), ~np.array(inside)):
            if after[rank][side].sum():
                shares = [row[rank][side] / row[rank][side].sum() for row in (before, after)]
                assert shares[0] == pytest.approx(shares[1])
    assert gated.outgoing(ranks, experts, each) == pytest.approx(sum(leaving) / ranks)
    if not zipf:
        assert gated.load(ranks, experts).rank_loads == pytest.approx([1] * ranks)


@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_what_ranks_send_is_the_sum_over_experts(
    ranks: int, own: int, stays: bool, heterogeneous_sources: bool, random: Random
) -> None:
    """Experts with one host, which are summed rank by rank, send what each of them sends alone."""
    experts = ranks * own
    hosts = [tuple(random.sample(range(ranks), random.randint(1, ranks))) for _ in range(experts)]
    shares = np.array([[random.uniform(0, 4) for _ in hosts] for _ in range(ranks if heterogeneous_sources else 1)])
    placement = Placement(tuple(hosts), stays)
    alone = [placement._sent_to(expert, shares, ranks) for expert in range(experts)]
    np.testing.assert_allclose(placement.distribute(shares, ranks), sum(alone))
    everything = shares.sum(axis=1) if heterogeneous_sources else shares.sum(axis=1).repeat(ranks)
    np.testing.assert_allclose(placement.distribute(shares, ranks).sum(axis=1), everything)
    for rank in range(ranks):
        arrived = [one[:, rank].mean() for one, at in zip(alone, hosts, strict=True) if rank in at]
        np.testing.assert_allclose(placement.arrivals(rank, shares, ranks), arrived)


@examples(200)
@given(ranks=st.integers(1, 4), data=st.data())
def test_owners_send_experts_to_new_hosts(ranks: int, data: st.DataObject) -> None:
    hosts = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(tuple)
    moves = data.draw(st.lists(st.tuples(hosts, hosts), min_size=1, max_size=6))
    before, after = (Placement(tuple(column)) for column in zip(*moves, strict=True))
    sent = after.transfers(before, ranks)
    for rank in range(ranks):
        assert sent[rank].sum() == sum(len({*new} - {*old}) for old, new in moves if old[0] == rank)
        assert sent[:, rank].sum() == sum(rank in new and rank not in old for old, new in moves)


def test_many_experts_are_not_played_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with one host are summed at once, and the loads that are kept hold few experts in all."""
    monkeypatch.setattr(Placement, "_sent_to", lambda *_: pytest.fail("an expert alone"))
    monkeypatch.setattr("meshcast.simulator.ir.routing.KEPT_EXPERTS", 10_000)
    for experts in (4_000, 4_008, 4_016, 4_024, 8):
        assert Routing(zipf=0.5).load(8, experts).most_loaded > 1
        assert sum(len(load.kept) for load in _loads.values()) <= 10_000 + experts


# --------------------------------------------------------------------------------------------- trained routers


@pytest.mark.parametrize(("ranks", "experts"), [(8, 8), (8, 64), (32, 256)])
@pytest.mark.parametrize("kind", [*TRAINED])
def test_the_busiest_rank_of_a_trained_router_is_the_mean_of_drawn_ones(kind: str, ranks: int, experts: int) -> None:
    """Shares that vary among experts and documents, drawn 2,000 times, against the law."""
    router, documents, rng = TRAINED[kind], 4, np.random.default_rng(0)
    lasting = rng.normal(1, router.lasting, (2000, experts))
    drawn = lasting + rng.normal(0, router.topical / math.sqrt(documents), lasting.shape)
    loads = drawn.reshape(2000, ranks, -1).mean(axis=2)
    load = Routing(trained=kind, documents=documents).load(ranks, experts)
    assert load.most_loaded == pytest.approx(loads.max(axis=1).mean(), rel=0.01)
    assert sum(load.rank_loads) == pytest.approx(ranks) and sum(load.kept) == pytest.approx(experts)
    assert load.busiest_exchange == pytest.approx(load.most_loaded) and load.remote == pytest.approx(1)
    assert load.most_stored == 1


def test_trained_routers_have_the_loads_that_were_published() -> None:
    """The largest share of all data, of Mixtral-8x7B and of the two models of arXiv 2408.15664, table 2."""
    for kind, experts, published in (
        ("natural", 8, (1.32,)),
        ("natural", 64, (1.52, 1.72)),
        ("loss-free", 64, (1.04,)),
    ):
        share = Routing(trained=kind, documents=1e9).load(experts, experts).most_loaded
        assert min(published) - 0.02 <= share <= max(published) + 0.02
