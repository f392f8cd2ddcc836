"""Bounds of many pipelines at once, against those of each."""

from __future__ import annotations

import numpy as np
import pytest

from meshcast.simulator.bounds.pipeline_table import Collectives, DeviceUnits, PipelineTable, PipelineUnits
from meshcast.simulator.bounds.schedule_bound import PASSES, StagePlaces, StageTimes, bound_devices, least_in_flight
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule
from tests.simulator.bounds.test_critical_paths import make

KINDS = 3
"""The embedding, layers, the output layer."""


def collectives(elements: np.ndarray, reduction: float, gather: float, each: tuple[int, int] = (0, 0)) -> Collectives:
    """Those of one group of ranks, alike in all pipelines. each: how often they happen in a micro-batch."""
    rates = (np.full((1, 1, len(elements)), one) for one in (reduction, gather))
    return Collectives(elements, elements, *rates, *(np.full((1, 1), one) for one in each))


NOTHING = collectives(np.zeros((0, KINDS)), 0, 0)


def unit_times(seed: int) -> StageTimes:
    """Units whose passes last as long whichever way a chain runs through them."""
    seconds = np.random.default_rng(seed).uniform(0.5, 2.0, (KINDS, len(PASSES)))
    seconds[:, 1] = seconds[:, 2] + seconds[:, 3]  # BW is B and W
    return times_of(seconds)


def times_of(seconds: np.ndarray) -> StageTimes:
    own = seconds[:, :, None]
    return StageTimes(own, own / 2, seconds, own, own, 0.0)  # passes also wait


def count_parts(shape: PipelineShape, layers: int) -> np.ndarray:
    counts = np.zeros((shape.stages, KINDS))
    counts[:, 1], counts[0, 0], counts[-1, 2] = layers, 1, 1
    return counts


def make_table(schedule: Schedule, shape: PipelineShape, counts: np.ndarray) -> PipelineTable:
    place = StagePlaces(schedule, shape)
    devices = DeviceUnits.of(place, counts[:, None, :], shape.m)
    return PipelineTable([PipelineUnits(schedule, shape, devices, least_in_flight(schedule, shape))])


SCHEDULES = [("1f1b", 1), ("interleaved-1f1b", 3), ("zb-h1", 1), ("hanayo", 2)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_sums_of_units_bound_as_stages_do(name: str, chunks: int, seed: int) -> None:
    schedule, shape = make(name, 4, 8, chunks)
    counts, units = count_parts(shape, 2), unit_times(seed)
    stages = times_of(counts @ units.path)
    bound = bound_devices(schedule, shape, StagePlaces(schedule, shape), stages)
    found = make_table(schedule, shape, counts).step_seconds(units, NOTHING)
    assert found[0, 0] == pytest.approx(max(bound.computed.max(), bound.returned.max()))


def test_collectives_follow_the_last_backward_pass_or_fill_the_step() -> None:
    schedule, shape = make("1f1b", 4, 2)
    counts, units = count_parts(shape, 2), times_of(np.ones((KINDS, len(PASSES))))
    table = make_table(schedule, shape, counts)
    alone = table.step_seconds(units, NOTHING)[0, 0]
    elements = np.array([[0.0, 10.0, 0.0]])
    few, many = (collectives(elements, one, two) for one, two in ((0.1, 0), (5, 5)))
    assert table.step_seconds(units, few)[0, 0] == alone  # 2 s of reductions beside a backward pass of 3 s
    assert table.step_seconds(units, many)[0, 0] == 2 * 10 * (5 + 5)
    every = collectives(elements, 5, 5, (1, 2))
    assert table.step_seconds(units, every)[0, 0] == shape.m * 2 * 10 * (5 + 2 * 5)


def test_the_fullest_device_counts() -> None:
    schedule, shape = make("1f1b", 4, 8)
    table = make_table(schedule, shape, count_parts(shape, 2))
    grown, elements = np.array([5.0, 10.0, 1.0]), np.array([100.0, 7.0, 100.0])
    each = np.array([[0.0, 2.0]])
    # The first device holds the activations of 4 micro-batches.
    first = 4 * (5 + 2 * 10)
    assert table.memory(grown, elements, each).tolist() == [[first, first + 2 * (100 + 2 * 7)]]


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_stages_alike_hold_as_much_of_every_micro_batch_in_flight(name: str, chunks: int) -> None:
    schedule, shape = make(name, 4, 8, chunks)
    table, held = make_table(schedule, shape, count_parts(shape, 2)), least_in_flight(schedule, shape)
    nbytes = table.memory(np.array([0.0, 10.0, 0.0]), np.zeros(KINDS), np.zeros((1, 1)))
    assert nbytes[0, 0] == pytest.approx(2 * 10 * held.max())


@pytest.mark.parametrize("layer", [10.0, -2.0])
def test_of_other_micro_batches_any_stage_is_held_also_where_a_layer_frees_memory(layer: float) -> None:
    schedule, shape = make("interleaved-1f1b", 4, 8, 2)
    table, held = make_table(schedule, shape, count_parts(shape, 2)), least_in_flight(schedule, shape)[0]
    grown = np.array([100.0, layer, 0.0])
    # Eleven stages of passes are in flight: of three micro-batches both chunks, of five one of them.
    assert held == 3 * 2 + 5
    nbytes = table.memory(grown, np.zeros(KINDS), np.zeros((1, 1)))
    assert nbytes[0, 0] == 3 * (100 + 2 * 2 * layer) + 5 * 2 * layer


def test_devices_that_another_exceeds_in_everything_are_left_out() -> None:
    """The second of four: the third has as many layers, and a micro-batch comes to it later."""
    schedule, shape = make("1f1b", 4, 8)
    devices = DeviceUnits.of(StagePlaces(schedule, shape), count_parts(shape, 2)[:, None, :], shape.m)
    assert sorted(devices.places.tolist()) == [0, 2, 3]
