"""Bounds of a pipeline by hand: stages alike, with collectives, copies and states beside their passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.simulator.bounds.collectives import UnitCollectives
from meshcast.simulator.bounds.device_states import DeviceStates, hop_seconds
from meshcast.simulator.bounds.least_states import ParameterCosts, least_states
from meshcast.simulator.bounds.order_bounds import OrderBounds, StageBounds
from meshcast.simulator.bounds.schedule_bound import StagePlaces, bound_devices
from meshcast.simulator.bounds.unit_prices import UnitLayout
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.loading.load import load_job
from tests.experiments.search.test_bounds import space_of
from tests.simulator.bounds.test_critical_paths import BW, F, alike, draw_times, make, replay

P, M, LAYERS, UPDATE = 4, 8, 8, 1.0
STEP = (M + P - 1) * (F + BW)
"""Of 1F1B without anything beside its passes."""


def bound(copies: float = 0.0, ahead: bool = False, **columns: float) -> float:
    """The bound of eight layers on four devices. columns: seconds of the collectives of a layer."""
    schedule, shape = make("1f1b", P, M)
    prices: Any = SimpleNamespace(stage_times=lambda units, hop: alike(shape), message_nbytes=0)
    order = OrderBounds(schedule, shape, (LAYERS // P,) * P)
    each = {name: np.array([0.0, *[columns.get(name, 0.0)] * LAYERS, 0.0]) for name in UnitCollectives.__annotations__}
    model = SimpleNamespace(layers=LAYERS)
    plan: Any = SimpleNamespace(shape=SimpleNamespace(p=1), model_parts=SimpleNamespace(model=model))
    none, collectives = np.zeros(P), (UnitCollectives(**each),)
    state = DeviceStates(none, none + UPDATE, none, collectives, np.zeros((2, P)), plan)
    return StageBounds(order, (), prices, SharedWork()).seconds(state, False, ahead, copies)


def test_a_step_takes_its_passes_and_the_update() -> None:
    assert bound() == pytest.approx(STEP + UPDATE)


def test_all_layers_of_a_device_but_the_last_are_copied_in_every_micro_batch() -> None:
    assert bound(copies=10.0) == pytest.approx(M * (LAYERS / P - 1) * 10 + UPDATE)


def test_weights_of_all_but_the_first_unit_of_a_pass_are_gathered_while_nothing_computes() -> None:
    """Unless they are gathered ahead; then the stream of the collectives may be full."""
    gathers = {"each": 2.0, "each_between": 2.0}
    assert bound(**gathers) == pytest.approx(M * (F + BW + 2.0) + UPDATE)
    assert bound(ahead=True, **gathers) == pytest.approx(STEP + UPDATE)
    assert bound(ahead=True, each=3.0, each_between=3.0) == pytest.approx(M * 2 * 3 + UPDATE)


@given(layers=st.lists(st.integers(0, 3), min_size=2, max_size=5), data=st.data())
def test_collectives_of_stages_are_those_of_their_units(layers: list[int], data: st.DataObject) -> None:
    """Also where a stage has no layer: what its neighbour has is counted once."""
    units = sum(layers) + 2
    drawn = data.draw(st.lists(st.integers(1, 9), min_size=units, max_size=units))
    every = UnitCollectives(*(np.array(drawn, float) * number for number in range(1, 7)))
    stages, ends = every.of_stages(layers, np.arange(len(layers))), np.cumsum([0, *layers]) + 1
    for part, (begin, end) in enumerate(pairwise(ends)):
        own = drawn[begin - (part == 0) : end + (part == len(layers) - 1)]
        assert stages.first[part] == sum(own) and stages.each_last[part] == 5 * sum(own)
        assert stages.each_between[part] == 6 * (sum(own) - max(own, default=0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_no_other_rank_shares_is_gathered_by_none(ranks: int) -> None:
    """States are there on any number of ranks; of large weights gathered copies only where they are sharded."""
    elements, matrices = np.array([100.0, 10.0, 50.0]), np.array([0.0, 8.0, 0.0])
    plan: Any = SimpleNamespace(mesh=Mesh({"dp": ranks}), ranks=SimpleNamespace(devices=2))
    layout = UnitLayout(elements, {("dp",): elements}, {("dp",): matrices}, np.ones(6, int), None)
    costs = ParameterCosts(2.0, (2.0, 4.0), {("dp",): 0.5}, {("dp",): 0.25}, 1, 2, 1)
    place = StagePlaces(*make("1f1b", 2, 4))
    state = least_states(plan, layout, (((0, 1), (1, 3)), ((1, 3), (2, 1))), place, costs)
    assert state.resident.tolist() == [2 * 130, 2 * 80]
    assert state.whole.tolist() == [[nbytes * 24 * (ranks > 1)] * 2 for nbytes in (2, 4)]
    (collectives,) = state.collectives
    assert collectives.each.tolist() == [50, *[0.5 * 10 + 2 * 0.25 * 8] * 6, 25]
    assert collectives.each_between.tolist() == [0, *[2 * 0.25 * 8] * 6, 0]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_the_last_backward_pass_of_a_device_begins_no_earlier_than_its_bound(name: str) -> None:
    """Of stages alike that of the last device begins then."""
    schedule, shape = make(name, P, M)
    for times in (alike(shape), draw_times(shape)):
        opened = bound_devices(schedule, shape, StagePlaces(schedule, shape), times).opened
        begins = np.zeros(P)
        for action, (begin, _) in replay(schedule, shape, times, {}).items():
            if action.kind != "F":
                begins[action.stage] = max(begins[action.stage], begin)
        assert (opened <= begins * (1 + 1e-12)).all() and (opened > 0).all()
        if name == "1f1b" and times.hop == 0:
            assert opened[-1] == pytest.approx(begins[-1])


def test_of_pairs_with_short_kernels_the_last_backward_pass_begins_its_length_before_the_end() -> None:
    schedule, shape = make("dualpipe", P, 32)
    times = alike(shape, parts=P)
    alone = bound_devices(schedule, shape, StagePlaces(schedule, shape), replace(times, busy=times.busy / 100))
    assert alone.opened == pytest.approx(alone.computed - BW) and (alone.opened >= (32 - 1) * BW).all()


def test_one_device_sends_no_messages() -> None:
    model, shared = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "seq": 16}, SharedWork()
    plans = [
        resolve_plan(load_job({"model": model, "cluster": {"gpu": "h100-sxm", "gpus": p}, "plan": {"pp": p}}))
        for p in (1, 2)
    ]
    assert hop_seconds(plans[0], 10**6, shared) == 0
    assert 0 < hop_seconds(plans[1], 10**6, shared) < hop_seconds(plans[1], 10**9, shared)


def test_layers_are_copied_only_where_activations_are_offloaded() -> None:
    bounds = PointBounds(space_of("dense"))
    groups = bounds.space.groups()
    plain = next(group for group in groups if group.tp == 2 and group.recompute == "none" and not group.offload)
    units = [bounds.prices._units(plain._replace(offload=what), False).prices(1) for what in ((), ("activations",))]
    assert None not in units and [prices.copy_seconds > 0 for prices in units if prices is not None] == [False, True]
