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


@pytest.mark.parametrize(
    ("flows", "rates"),
    [
        ([{"a": 1.0, "b": 0.3}], [1.0]),
        ([{"a": 1.0}, {"b": 1.0}, {"c": 0.5}], [1.0, 1.0, 1.0]),
        ([{"a": 0.5}, {"a": 0.3}, {"a": 0.2}], [1.0, 1.0, 1.0]),  # they fit together
        ([{"a": 1.0}] * 2, [1 / 2] * 2),
        ([{"a": 1.0}] * 7, [1 / 7] * 7),
        ([{"a": 1.0}, {"a": 0.5}, {"a": 0.2}], [0.4, 0.8, 1.0]),  # of 1, 0.2 goes to the third, 0.4 to each other one
        ([{"a": 1.0}, {"a": 0.5, "b": 1.0}, {"b": 1.0}], [0.75, 0.5, 0.5]),  # half of b, and so a quarter of a
        ([*[{"a": 1.0}] * 3, {"a": 0.01, "b": 1.0}], [0.33, 0.33, 0.33, 1.0]),  # hardly uses a crowded link
        ([{"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 1.0}], [2 / 3, 2 / 3]),  # x + y / 2 = 1 and x / 2 + y = 1
    ],
    ids=str,
)
def test_rates_by_hand(flows: list[dict[str, float]], rates: list[float]) -> None:
    assert fair_rates(flows) == pytest.approx(rates)


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
