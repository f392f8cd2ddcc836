"""Partition of layers over stages: even, by cost, by a list."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.plan.partition import LayerCosts, balance, layers_of_stages
from tests.draws import drawn

COUNTS = st.integers(1, 200)


@given(layers=COUNTS, stages=COUNTS)
def test_even(layers: int, stages: int) -> None:
    if layers % stages == 0:
        assert layers_of_stages("even", layers, stages) == [layers // stages] * stages
        return
    with pytest.raises(PlanError) as refused:
        layers_of_stages("even", layers, stages)
    rule, remedy = refused.value.rule, refused.value.remedy
    assert f"{layers} layers" in rule and f"{stages} stages" in rule
    words = [int(word) for word in remedy.replace(",", "").split() if word.isdigit()]
    assert layers % words[0] == 0 and words[1] % stages == 0, "what is offered works"
    assert layers_of_stages("even", layers, words[0]) and layers_of_stages("even", words[1], stages)


@given(layers=COUNTS, stages=COUNTS)
def test_ends_as_layers(layers: int, stages: int) -> None:
    """Embedding and output layer count one layer each, so that 126 layers make 16 equal places of 8 (Llama 3 405B)."""
    if stages < 2 or (layers + 2) % stages:
        with pytest.raises(PlanError, match="2 ends") as refused:
            layers_of_stages("ends-as-layers", layers, stages)
        near = [int(word) for word in refused.value.remedy.split() if word.isdigit()]
        assert all(layers_of_stages("ends-as-layers", one, stages) for one in near), "what is offered works"
        assert near or stages == 1 or stages == 2 or layers + 2 < 1.5 * stages
        return
    found = layers_of_stages("ends-as-layers", layers, stages)
    assert sum(found) == layers and len(found) == stages
    places = [found[0] + 1, *found[1:-1], found[-1] + 1]
    assert len(set(places)) == 1 and min(found) >= 0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=16).filter(any).filter(lambda layers: all(layers[1:-1])))
def test_a_list_gives_the_layers_of_each_stage(given_: list[int]) -> None:
    assert layers_of_stages(tuple(given_), sum(given_), len(given_)) == given_
    for layers, stages in ((sum(given_) + 1, len(given_)), (sum(given_), len(given_) + 1)):
        with pytest.raises(PlanError, match=f"sums to {layers}"):
            layers_of_stages(tuple(given_), layers, stages)


COST = st.integers(0, 20).map(float)


def costs(weights: list[LayerCosts], found: list[int]) -> list[float]:
    """The cost of every stage of a partition."""
    ends = [0]
    for count in found:
        ends.append(ends[-1] + count)
    last = len(found) - 1
    return [
        sum(one.layers[a:b]) + one.begin * (stage == 0) + one.end * (stage == last)
        for stage, (one, (a, b)) in enumerate(zip(weights, pairwise(ends), strict=True))
    ]


def divisions(layers: int, stages: int) -> list[list[int]]:
    """All divisions in which no stage inside is empty."""
    found = [
        [b - a for a, b in pairwise([0, *cuts, layers])]
        for cuts in combinations_with_replacement(range(layers + 1), stages - 1)
    ]
    return [one for one in found if min(one[1:-1], default=1) > 0]


@given(st.lists(COST, min_size=1, max_size=7), st.integers(1, 4), COST, COST, st.data())
def test_the_costliest_stage_costs_the_least(
    layers: list[float], stages: int, begin: float, end: float, data: st.DataObject
) -> None:
    """And the squares of all sum to the least: asked of all divisions, on stages of which some are slower."""
    stages = min(stages, len(layers) + 2)
    slow = data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=stages, max_size=stages))
    weights = [LayerCosts(s * begin, [s * each for each in layers], s * end) for s in slow]
    found = balance(weights)
    assert sum(found) == len(layers) and found in divisions(len(layers), stages)
    ranked = [
        (max(costs(weights, one)), sum(cost**2 for cost in costs(weights, one)))
        for one in divisions(len(layers), stages)
    ]
    mine = costs(weights, found)
    assert (max(mine), sum(cost**2 for cost in mine)) == min(ranked)


@given(each=st.integers(1, 12), stages=st.integers(1, 16), cost=st.floats(1e-6, 1e3))
def test_equal_layers_without_ends_are_even(each: int, stages: int, cost: float) -> None:
    weights = [LayerCosts(0.0, [cost] * (each * stages), 0.0)] * stages
    assert balance(weights) == [each] * stages


@given(each=st.integers(2, 12), stages=st.integers(2, 16), cost=st.floats(1e-6, 1e3))
def test_ends_that_cost_a_layer_are_as_layers(each: int, stages: int, cost: float) -> None:
    layers = each * stages - 2
    weights = [LayerCosts(cost, [cost] * layers, cost)] * stages
    assert balance(weights) == layers_of_stages("ends-as-layers", layers, stages)


def test_more_stages_than_layers_are_refused_with_a_remedy() -> None:
    def weigh() -> list[LayerCosts]:
        return [LayerCosts(1.0, [1.0] * 4, 1.0)] * 6

    assert layers_of_stages("by-cost", 4, 6, weigh) == [0, 1, 1, 1, 1, 0]
    with pytest.raises(PlanError, match="At most 6 stages would work"):
        layers_of_stages("by-cost", 4, 7, weigh)


def job(model: Any, partition: Any, **more: Any) -> dict[str, Any]:
    plan = {"pp": 4, "partition": partition, **more.pop("plan", {})}
    fields = {"model": model, "cluster": "dgx-h100:1", "batch": {"global": 32}, "plan": plan}
    return fields | more


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    """Llama 3 8B: the output layer of 128,256 words costs as much as two layers."""
    found = resolve_plan(load_job(job("llama3-8b", "by-cost"))).layers
    assert sum(found) == 32 and found[-1] < min(found[:-1])
    assert simulate(job("llama3-8b", "by-cost")).step_time < simulate(job("llama3-8b", "even")).step_time


@pytest.mark.parametrize("model", drawn(["llama3-8b", "gpt2", "mixtral-8x7b"], keep=("mixtral-8x7b",)))
def test_no_neighbouring_division_is_faster(model: str) -> None:
    """Nearly: the cost of a stage leaves out waits for its neighbours."""
    best = simulate(job(model, "by-cost")).step_time
    found = resolve_plan(load_job(job(model, "by-cost"))).layers
    for a in range(3):
        for step in (1, -1):
            other = list(found)
            other[a], other[a + 1] = other[a] + step, other[a + 1] - step
            if min(other[1:-1]) > 0 and min(other) >= 0:
                assert simulate(job(model, other)).step_time > 0.99 * best


def test_dense_layers_and_layers_with_experts_have_their_own_costs() -> None:
    """Layers of two kinds: stages have equal costs, not equal numbers of layers."""
    moe = {"experts": 16, "top_k": 4, "expert_ffn": 4096, "first_dense": 8}
    model = {"layers": 16, "hidden": 1024, "heads": 16, "vocab": 1024, "seq": 2048, "ffn": 1024, "moe": moe}
    found = resolve_plan(load_job(job(model, "by-cost"))).layers
    assert found[0] > found[-1] and sum(found) == 16


def test_chunks_are_divided_by_cost_too() -> None:
    plan = {"schedule": "interleaved-1f1b", "chunks": 2}
    found = resolve_plan(load_job(job("llama3-8b", "by-cost", plan=plan))).layers
    assert len(found) == 8 and sum(found) == 32 and found[-1] == min(found)
