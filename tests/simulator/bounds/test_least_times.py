"""Durations of passes from the works of operators, against those of lowered units."""

from __future__ import annotations

import random

import pytest

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.frontier.group_bounds import GroupBounds
from meshcast.experiments.search.frontier.plan_search import ROUNDING
from meshcast.experiments.search.space.space import LayerGroup, Space
from meshcast.simulator.bounds.schedule_bound import FORWARD, WHOLE
from tests.experiments.search.spaces import open_space
from tests.experiments.search.test_bounds import JOBS, LARGE_JOBS, draw_spaces, space_of

UNKNOWN = {"adapters", "streams"}
"""Jobs under whose programs something else may lower modules."""


def draw_groups(space: Space, seed: int, number: int) -> list[LayerGroup]:
    groups = space.groups()
    return random.Random(seed).sample(groups, min(number, len(groups)))


@pytest.mark.parametrize("name", [*JOBS, *LARGE_JOBS])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_lowered_units_take_no_less_than_their_operators(name: str, seed: int) -> None:
    """By streams and by kernels, and so in the bounds of a group."""
    groups = GroupBounds((bounds := PointBounds(space_of(name))).space, bounds)
    for group in draw_groups(bounds.space, seed, 4):
        least, lowered = bounds.prices.least_times(group), bounds.prices.times(group._replace(recompute="none"))
        assert least is not None or lowered is None or group.names_schemes or name in UNKNOWN, group
        if least is None or lowered is None:
            continue
        times, ends = least.times[group.micro], (0, -1)  # the compute stream first, the host last
        for action in (FORWARD, WHOLE):
            found, wanted = times.stream[:, action][:, ends], lowered.stream[:, action][:, ends]
            assert (found[:, 0] <= wanted[:, 0] * (1 + ROUNDING)).all(), group
            kernels, every = times.busy[:, action, 0], lowered.busy[:, action, 0]
            assert (kernels <= every * (1 + ROUNDING)).all(), group
            assert kernels.sum() >= 0.5 * every.sum(), group
            layers = times.path[1:-1, action], lowered.path[1:-1, action]
            assert (times.path[:, action] <= lowered.path[:, action] * (1 + ROUNDING)).all(), group
            assert layers[0].sum() >= 0.4 * layers[1].sum(), group
        check_group(groups, group)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", [*JOBS, *LARGE_JOBS])
def test_lowered_units_hold_no_less_than_their_operators_save(name: str, recompute: str) -> None:
    bounds = PointBounds(space_of(name))
    for group in draw_groups(bounds.space, 0, 4):
        group = group._replace(recompute=recompute, offload=())
        saved, held = bounds.prices.least_saved(group), bounds.prices.unit_memory(group)
        if saved is None or held is None:
            continue
        assert (saved <= held * (1 + ROUNDING)).all(), group
        if recompute == "none":
            assert saved[1:-1].sum() >= 0.3 * held[1:-1].sum(), group


@pytest.mark.parametrize("name", ["cp", "llama3", "deepseek"])
def test_shares_of_sequences_are_bounded_without_lowering(name: str) -> None:
    """What a scheme may do to attention of uneven shares only takes longer."""
    space = open_space((JOBS | LARGE_JOBS)[name], tp=[4], cp=[2])
    group = next(iter(space.groups()))
    assert PointBounds(space).prices.least_times(group) is not None


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_bounds_of_operators_of_drawn_jobs_are_below_those_of_passes(seed: int) -> None:
    groups = GroupBounds((bounds := PointBounds(next(draw_spaces(seed)))).space, bounds)
    for group in draw_groups(groups.space, seed, 4):
        check_group(groups, group)


def check_group(groups: GroupBounds, group: LayerGroup) -> None:
    if (passes := groups.bound_passes(group)) and groups.bounds.prices.least_times(group) is not None:
        assert groups.bound_operators(group) <= passes * (1 + ROUNDING), group


def test_what_is_known_of_other_degrees_changes_no_bound() -> None:
    """Kernels outside of experts are shared by all degrees of these, collectives are not: their axes differ."""
    space = space_of("mixtral")
    several, first = GroupBounds(space, PointBounds(space)), next(group for group in space.groups() if group.tp == 8)
    alike = [group for group in space.groups() if group == first._replace(ep=group.ep, etp=group.etp)]
    assert len(alike) > 5
    for group in random.Random(0).sample(alike, 6):
        alone = GroupBounds(space, PointBounds(space))
        assert several.bound_operators(group) == pytest.approx(alone.bound_operators(group), rel=1e-12), group
