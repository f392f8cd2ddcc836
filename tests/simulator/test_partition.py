"""Which layers form a stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.errors import PlanError
from simulator.partition import layers_of_stages

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
        with pytest.raises(PlanError, match="2 ends"):
            layers_of_stages("ends-as-layers", layers, stages)
        return
    found = layers_of_stages("ends-as-layers", layers, stages)
    assert sum(found) == layers and len(found) == stages
    places = [found[0] + 1, *found[1:-1], found[-1] + 1]
    assert len(set(places)) == 1 and min(found) >= 0


def test_llama_405b() -> None:
    assert layers_of_stages("ends-as-layers", 126, 16) == [7, *[8] * 14, 7]
    with pytest.raises(PlanError, match="126 layers must divide evenly"):
        layers_of_stages("even", 126, 16)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=16).filter(any).filter(lambda told: all(told[1:-1])))
def test_a_list_says_it_outright(given_: list[int]) -> None:
    assert layers_of_stages(tuple(given_), sum(given_), len(given_)) == given_
    for layers, stages in ((sum(given_) + 1, len(given_)), (sum(given_), len(given_) + 1)):
        with pytest.raises(PlanError, match=f"sums to {layers}"):
            layers_of_stages(tuple(given_), layers, stages)


def test_no_stage_has_fewer_than_no_layers() -> None:
    with pytest.raises(PlanError, match="list"):
        layers_of_stages((5, -1), 4, 2)
    with pytest.raises(PlanError):
        layers_of_stages((), 4, 2)


def test_unknown_words_are_refused_with_the_valid_ones() -> None:
    with pytest.raises(PlanError, match=r"no such partition.*even, ends-as-layers"):
        layers_of_stages("evenly", 4, 2)


def test_a_stage_inside_is_never_empty() -> None:
    assert layers_of_stages((0, 12, 0), 12, 3) == [0, 12, 0]
    with pytest.raises(PlanError, match="at least one layer"):
        layers_of_stages((6, 0, 6), 12, 3)
