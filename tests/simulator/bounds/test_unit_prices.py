"""Units of a plan, whatever was lowered for other plans before."""

from __future__ import annotations

import random

import pytest

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.simulator.bounds.unit_prices import LoweredUnits
from tests.experiments.search.test_bounds import JOBS, space_of


@pytest.mark.parametrize("name", [*JOBS, "tensor schemes", "expert schemes"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_units_are_the_same_with_the_modules_that_other_plans_have_lowered(name: str, seed: int) -> None:
    """Plans that differ in what is recomputed and what overlaps share the modules of their units."""
    bounds = PointBounds(space_of(name))
    groups = [group for group in bounds.space.groups() if 1 < group.tp <= 8 and group.micro == 1 and not group.offload]
    draw = random.Random(seed)
    drawn = draw.choice(groups or bounds.space.groups())
    same = drawn._replace(recompute="", overlap_tp=False, tensor=None)
    alike = [group for group in groups if group._replace(recompute="", overlap_tp=False, tensor=None) == same]
    for group in draw.sample(alike, min(4, len(alike))):
        shared = bounds.prices._lower(group, False)
        alone = PointBounds(bounds.space).prices._lower(group, False)
        assert (shared is None) == (alone is None)
        if shared is not None and alone is not None:
            assert describe(shared) == describe(alone), group


def describe(units: LoweredUnits) -> list[object]:
    """Returns all ops of units with what each waits for, their parameters and their buffers."""
    rows = list[object]()
    for run in (run for stage in units.stages for run in stage.unit_runs):
        fragment = run.fragment
        numbers = {op: number for number, op in enumerate((*fragment.forward, *fragment.backward))}
        rows += [
            (op.name, op.stream, op.work, op.phase, op.launches, op.tag, [numbers.get(other) for other in op.after])
            for op in numbers
        ]
        rows += [(param.name, param.size, param.partial, numbers.get(param.ready)) for param in fragment.params]
        rows += [(use.key, use.nbytes, numbers.get(use.op), use.made, use.category) for use in fragment.tensor_uses]
        rows.append((run.name, run.count, run.keys, run.nbytes, run.nbytes_in))
    return rows
