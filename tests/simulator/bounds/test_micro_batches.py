"""Units of any micro-batch from those of one and of two sequences, against lowered ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.space.space import LayerGroup
from meshcast.simulator.bounds.micro_batches import NotAffine, SizedUnits
from meshcast.simulator.bounds.schedule_bound import PASSES
from meshcast.simulator.bounds.unit_prices import LoweredUnits, price_units
from tests.experiments.search.test_bounds import JOBS, space_of


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_scaled_units_are_those_that_are_lowered(name: str, seed: int) -> None:
    bounds, rng = PointBounds(space_of(name)), random.Random(seed)
    group = rng.choice([one for one in bounds.space.groups() if one.tp <= 8])._replace(offload=())
    units = bounds.prices._units(group, False)
    for size in (3, 8):
        scaled, lowered = units.scale(size), units.lower(size)
        assert scaled is not None and lowered is not None, group
        compare(bounds, scaled, lowered, group)


def compare(bounds: PointBounds, scaled: LoweredUnits, lowered: LoweredUnits, group: LayerGroup) -> None:
    """Both have the same matrices and the same memory."""
    found, wanted = (price_units(units, bounds.shared) for units in (scaled, lowered))
    assert (found.of_layer == wanted.of_layer).all()
    for kind in range(len(wanted.kinds)):
        for action in PASSES:
            assert np.array_equal(found.matrix(kind, action, 2), wanted.matrix(kind, action, 2)), (group, action)
    layers = (len(wanted.of_layer) // 2,) * 2
    both = (one.pass_memory(one.stages(layers)) for one in (found, wanted))
    for one, other in zip(*both, strict=True):
        assert np.array_equal(one, other), group
    assert found.message_nbytes == wanted.message_nbytes


def test_units_that_differ_in_more_than_sizes_are_refused() -> None:
    bounds = PointBounds(space_of("dense"))
    group = next(one for one in bounds.space.groups() if one.tp == 2 and one.recompute == "none")
    changed = {1: group, 2: group._replace(recompute="selective")}
    units = SizedUnits(lambda size: bounds.prices._lower(changed[size], False), True, bounds.shared)
    with pytest.raises(NotAffine):
        units.scale(3)
