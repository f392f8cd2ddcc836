"""Units of any micro-batch from those of one and of two sequences, against lowered ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshcast.experiments.search.bounds import PointBounds
from meshcast.experiments.search.space import LayerGroup
from meshcast.simulator.bounds.micro_batches import NotAffine
from meshcast.simulator.bounds.schedule_bound import PASSES
from meshcast.simulator.bounds.unit_prices import price_units
from tests.experiments.search.test_bounds import JOBS, space_of


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_scaled_units_are_those_that_are_lowered(name: str, seed: int) -> None:
    bounds, rng = PointBounds(space_of(name)), random.Random(seed)
    group = rng.choice([one for one in bounds.space.groups() if one.tp <= 8])._replace(offload=())
    for micro in (3, 8):
        wanted = group._replace(micro=micro)
        one, two, lowered = (bounds.prices._lower(group._replace(micro=size), False) for size in (1, 2, micro))
        assert one is not None and two is not None and lowered is not None, wanted
        compare(bounds, one.at_size(two, micro), lowered, wanted)


def compare(bounds: PointBounds, scaled: object, lowered: object, group: LayerGroup) -> None:
    """Both have the same matrices and the same memory."""
    found, wanted = (price_units(units, bounds.shared) for units in (scaled, lowered))  # type: ignore[arg-type]
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
    one, other = (bounds.prices._lower(group._replace(recompute=kind, micro=1), False) for kind in ("none", "full"))
    assert one is not None and other is not None
    with pytest.raises(NotAffine):
        one.at_size(other, 3)
