"""Units of any micro-batch from those of one and of two sequences, against lowered ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.space.space import LayerGroup
from meshcast.simulator.bounds.micro_batches import NotAffine, SizedUnits
from meshcast.simulator.bounds.schedule_bound import FORWARD, INPUTS, PASSES, WHOLE
from meshcast.simulator.bounds.unit_prices import LoweredUnits, add_recomputed, price_units
from meshcast.simulator.ir.ops import COMPUTE
from tests.experiments.search.test_bounds import JOBS, space_of


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_scaled_units_and_their_durations_are_those_that_are_lowered(name: str, seed: int) -> None:
    bounds, rng = PointBounds(space_of(name)), random.Random(seed)
    group = rng.choice([one for one in bounds.space.groups() if one.tp <= 8])._replace(offload=())
    units = bounds.prices._units(group, False)
    for size in (3, 8):
        scaled, lowered = units.scale(size), units.lower(size)
        assert scaled is not None and lowered is not None, group
        compare(bounds, scaled, lowered, group)
    assert len(units.sizes) > 2
    for size in units.sizes:
        times, prices = units._times(size), units.prices(size)
        assert times is not None and prices is not None
        for column in ("stream", "busy", "path", "from_input", "to_result"):
            np.testing.assert_allclose(getattr(times[0], column), getattr(prices.unit_times, column), rtol=1e-12)
        np.testing.assert_allclose(times[1], prices.longest_kernels, rtol=1e-12)
        kernels = sum(times[0].busy[:, [FORWARD, WHOLE], 0].sum(axis=1)[prices.of_layer])
        assert units.kernel_seconds(size, False) == pytest.approx(kernels, rel=1e-12)
        again = (times[0].busy[:, FORWARD, 0] - times[1])[prices.of_layer].sum()
        assert units.kernel_seconds(size, True) == pytest.approx(kernels + again, rel=1e-12)


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


def test_chains_of_a_pipeline_last_as_long_as_the_passes_of_any_device() -> None:
    bounds = PointBounds(space_of("dense"))
    group = next(g for g in bounds.space.groups() if g.tp == 2 and g.recompute == "none" and not g.offload)
    pipeline = next(p for p in bounds.space.pipelines(group) if p.schedule == "1f1b" and p.pp == 4)
    stages = bounds.stages(group, pipeline)
    assert stages is not None
    passes = stages.times(None).stream[:, [FORWARD, WHOLE]].sum(axis=1)
    assert stages.chain_seconds(None) >= stages.order.place.work(passes)[:, 0].max() * (1 - 1e-12) > 0


def test_recomputed_layers_last_longer_by_their_forward_pass_but_its_longest_kernel() -> None:
    """And no longer than where they are lowered so."""
    bounds = PointBounds(space_of("dense"))
    group = next(g for g in bounds.space.groups() if g.tp == 2 and g.recompute == "none" and not g.offload)
    plain, full = (bounds.prices._units(group._replace(recompute=what), False).prices(1) for what in ("none", "full"))
    assert plain is not None and full is not None
    times, recomputed, layers = (
        plain.unit_times,
        add_recomputed(plain.unit_times, plain.longest_kernels),
        len(plain.kinds) - 2,
    )
    for name in ("stream", "busy"):
        alone, joined = getattr(times, name), getattr(recomputed, name)
        assert (joined[[*range(layers + 1), -1]] == alone).all()
        for kind in range(1, 1 + layers):
            parts = plain.kinds[kind].tasks["F"].parts
            priced = [pair for part in parts for pair in zip(part.block.ops, part.seconds, strict=True)]
            longest = max(seconds for op, seconds in priced if op.stream == COMPUTE)
            again = np.zeros_like(alone[kind])
            again[[WHOLE, INPUTS], 0] = times.busy[kind, FORWARD, 0] - longest
            assert joined[layers + kind] == pytest.approx(alone[kind] + again)
        assert joined[-2, WHOLE, 0] <= getattr(full.unit_times, name)[-2, WHOLE, 0] * (1 + 1e-12)


def test_units_that_differ_in_more_than_sizes_are_refused() -> None:
    bounds = PointBounds(space_of("dense"))
    group = next(one for one in bounds.space.groups() if one.tp == 2 and one.recompute == "none")
    changed = {1: group, 2: group._replace(recompute="selective")}
    units = SizedUnits(lambda size: bounds.prices._lower(changed[size], False), True, bounds.shared)
    with pytest.raises(NotAffine):
        units.scale(3)
