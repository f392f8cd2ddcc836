"""The shortest that a pipeline can take, whatever the order: what schedules are held against in small cases.

Solved exactly by CP-SAT, which comes with ``pip install 'meshcast[search]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

from ortools.sat.python import cp_model

from hardware.errors import PlanError
from simulator.scheduling.schedule import PassDurations, PipelineShape, Schedule

FINEST = 1_000_000
"""Most steps that a unit of time is cut into, for the solver counts in whole numbers."""


@dataclass(frozen=True)
class Best:
    """The shortest time of all orders is at least `bound`, and one takes `found`."""

    bound: float
    found: float

    @property
    def proven(self) -> bool:
        return self.bound == self.found


def best(
    schedule: Schedule,
    shape: PipelineShape,
    durations: PassDurations,
    limit: int | None = None,
    span: bool = False,
    effort: float = 10.0,
) -> Best:
    """The shortest time for the passes F, B and W of all stages, on the devices where `schedule` places these.

    What B makes is there at its end, so no backward pass at once is faster. limit: stages' activations that a device
    may hold, each from the begin of F to the end of W. span: the longest time of a device from its first begin to its
    last end, in place of the time from the first begin of all to the last end. effort: of the solver, about seconds,
    but the same on every machine.

    Raises PlanError for durations that are no multiples of a 1 / `FINEST`.
    """
    steps, (forward, backward, weights, (hop, *_)) = _whole(
        durations.forward, durations.input_gradients, durations.weight_gradients, (durations.hop,)
    )
    lasts = {"F": forward, "B": backward, "W": weights}
    horizon = shape.m * (sum(map(sum, lasts.values())) + 2 * shape.stages * hop)
    model = cp_model.CpModel()
    begin: dict[tuple[str, int, int], Any] = {}
    on: list[list[tuple[str, int, int]]] = [[] for _ in range(shape.p)]
    for stage in range(shape.stages):
        for kind in lasts:
            for k in schedule.microbatches(shape, stage):
                begin[kind, stage, k] = model.new_int_var(0, horizon, f"{stage}{kind}{k}")
                on[schedule.device(shape, stage)].append((kind, stage, k))
    end = {key: var + lasts[key[0]][key[1]] for key, var in begin.items()}

    def far(one: int, other: int) -> int:
        return hop * (schedule.device(shape, one) != schedule.device(shape, other))

    for stage in range(shape.stages):
        some = schedule.microbatches(shape, stage)
        for k in some:
            model.add(begin["B", stage, k] >= end["F", stage, k])
            model.add(begin["W", stage, k] >= end["B", stage, k])
            for other in schedule.predecessors(shape, stage):
                model.add(begin["F", stage, k] >= end["F", other, k] + far(stage, other))
                model.add(begin["B", other, k] >= end["B", stage, k] + far(stage, other))
        # Micro-batches are alike, so whichever passes come first may as well be those of the first of them.
        for kind in lasts:
            for k, later in pairwise(some):
                model.add(begin[kind, stage, later] >= end[kind, stage, k])
    total = model.new_int_var(0, horizon, "total")
    for own in on:
        intervals = [model.new_fixed_size_interval_var(begin[key], lasts[key[0]][key[1]], str(key)) for key in own]
        model.add_no_overlap(intervals)
        if limit is not None:
            taken = [(begin[key], 1) for key in own if key[0] == "F"]
            freed = [(end[key], -1) for key in own if key[0] == "W"]
            times, changes = zip(*taken, *freed, strict=True)
            model.add_reservoir_constraint(times, changes, 0, limit)
        first = model.new_int_var(0, horizon, "first") if span else 0
        for key in own:
            model.add(first <= begin[key])
            model.add(total >= end[key] - first)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return Best(solver.best_objective_bound / steps, solver.objective_value / steps)


def _whole(*times: Sequence[float]) -> tuple[int, list[list[int]]]:
    """Times in whole steps, and how many steps a unit has."""
    exact = [[Fraction(time).limit_denominator(FINEST) for time in row] for row in times]
    steps = lcm(*(time.denominator for row in exact for time in row))
    if steps > FINEST or any(tuple(map(float, row)) != tuple(own) for row, own in zip(exact, times, strict=True)):
        raise PlanError("durations", f"a unit of time has at most {FINEST:,} steps", "Round the durations", times)
    return steps, [[int(time * steps) for time in row] for row in exact]
