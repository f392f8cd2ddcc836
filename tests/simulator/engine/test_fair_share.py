"""Fair rates of flows that use the same links."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcast.simulator.engine.fair_share import fair_rates
from tests.strategies import examples

SHARES = st.floats(0.01, 1.0)
FLOWS = st.lists(st.dictionaries(st.sampled_from("abcd"), SHARES, min_size=1), min_size=1, max_size=6)


def test_alone_every_flow_goes_at_full_rate() -> None:
    assert fair_rates([{"a": 1.0, "b": 0.3}]) == [1.0]
    assert fair_rates([{"a": 1.0}, {"b": 1.0}, {"c": 0.5}]) == [1.0, 1.0, 1.0]


def test_flows_that_fit_together_are_not_slowed() -> None:
    assert fair_rates([{"a": 0.5}, {"a": 0.3}, {"a": 0.2}]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_flows_share_a_link_evenly(count: int) -> None:
    assert fair_rates([{"a": 1.0}] * count) == pytest.approx([1 / count] * count)


def test_a_flow_below_its_even_share_gets_all_it_asks_for() -> None:
    """Of 1, 0.2 goes to the third, and 0.4 to each of the others."""
    assert fair_rates([{"a": 1.0}, {"a": 0.5}, {"a": 0.2}]) == pytest.approx([0.4, 0.8, 1.0])


def test_a_flow_limited_elsewhere_leaves_bandwidth() -> None:
    """The second flow has half of b, and so a quarter of a."""
    assert fair_rates([{"a": 1.0}, {"a": 0.5, "b": 1.0}, {"b": 1.0}]) == pytest.approx([0.75, 0.5, 0.5])


def test_a_flow_that_hardly_uses_a_crowded_link_is_not_held_up_by_it() -> None:
    crowd = [{"a": 1.0}] * 3
    assert fair_rates([*crowd, {"a": 0.01, "b": 1.0}]) == pytest.approx([0.33, 0.33, 0.33, 1.0])


def test_links_that_hold_up_each_others_flows_in_a_circle() -> None:
    """x on a, y on b: x + y / 2 = 1 and x / 2 + y = 1."""
    assert fair_rates([{"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 1.0}]) == pytest.approx([2 / 3, 2 / 3])


@examples(400)
@given(flows=FLOWS)
def test_no_link_is_overfull_and_every_slowed_flow_has_a_bottleneck(flows: list[dict[str, float]]) -> None:
    rates = fair_rates(flows)
    used: dict[str, list[float]] = defaultdict(list)
    for flow, rate in zip(flows, rates, strict=True):
        assert 0 < rate <= 1
        for link, share in flow.items():
            used[link].append(rate * share)
    assert all(math.fsum(own) <= 1 + 1e-9 for own in used.values())
    for flow, rate in zip(flows, rates, strict=True):
        full = [link for link in flow if math.fsum(used[link]) >= 1 - 1e-6]
        assert rate == 1 or any(rate * flow[link] >= max(used[link]) * (1 - 1e-6) for link in full)


@settings(deadline=None)
@given(flows=FLOWS, data=st.data())
def test_the_order_of_flows_does_not_matter(flows: list[dict[str, float]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(flows))))
    rates, again = fair_rates(flows), fair_rates([flows[i] for i in order])
    assert again == pytest.approx([rates[i] for i in order], rel=1e-6)


@given(shares=st.lists(SHARES, min_size=1, max_size=8), more=SHARES)
def test_on_one_link_one_flow_more_makes_none_faster(shares: list[float], more: float) -> None:
    rates = fair_rates([{"a": share} for share in (*shares, more)])
    assert all(
        one <= other * (1 + 1e-12) for one, other in zip(rates, fair_rates([{"a": s} for s in shares]), strict=False)
    )
