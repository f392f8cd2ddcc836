"""The shortest time of a pipeline over all orders, as a bound for schedules of a few devices and micro-batches.

Solved exactly by CP-SAT of OR-Tools, which ``pip install 'meshcast[search]'`` installs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

from ortools.sat.python import cp_model

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.scheduling.schedule import PassDurations, PipelineShape, Schedule

MAX_STEPS_PER_UNIT = 1_000_000
"""Most integer steps of a unit of time; the solver has integer times."""


@dataclass(frozen=True)
class ShortestTime:
    """Answer of the solver, in the unit of the durations.

    bound: no order is shorter.
    found: time of the best order found.
    """

    bound: float
    found: float

    @property
    def is_optimal(self) -> bool:
        return self.bound == self.found


def solve_shortest(
    schedule: Schedule,
    shape: PipelineShape,
    durations: PassDurations,
    limit: int | None = None,
    span: bool = False,
    effort: float = 10.0,
) -> ShortestTime:
    """Returns the shortest time of the passes F, B and W of all stages, on the devices on which `schedule` places the
    stages.

    Backward passes are split, so no order of whole ones is shorter.

    limit: chunks whose activations a device may hold, each from the begin of F to the end of W.
    span: minimise the longest span (first begin to last end on a device) in place of the makespan.
    effort: deterministic time of CP-SAT, about seconds, the same on every machine.

    Raises PlanError for durations that are no multiples of 1/n for an n up to `MAX_STEPS_PER_UNIT`.
    """
    steps, (forward, backward, weights, (hop, *_)) = _integer_times(
        durations.forward, durations.input_gradients, durations.weight_gradients, (durations.hop,)
    )
    steps_of = {"F": forward, "B": backward, "W": weights}
    horizon = shape.m * (sum(map(sum, steps_of.values())) + 2 * shape.stages * hop)
    model = cp_model.CpModel()
    begin: dict[tuple[str, int, int], Any] = {}
    on: list[list[tuple[str, int, int]]] = [[] for _ in range(shape.p)]
    for stage in range(shape.stages):
        for kind in steps_of:
            for k in schedule.microbatches(shape, stage):
                begin[kind, stage, k] = model.new_int_var(0, horizon, f"{stage}{kind}{k}")
                on[schedule.device(shape, stage)].append((kind, stage, k))
    end = {key: var + steps_of[key[0]][key[1]] for key, var in begin.items()}

    def hop_between(stage: int, neighbour: int) -> int:
        return hop * (schedule.device(shape, stage) != schedule.device(shape, neighbour))

    for stage in range(shape.stages):
        some = schedule.microbatches(shape, stage)
        for k in some:
            model.add(begin["B", stage, k] >= end["F", stage, k])
            model.add(begin["W", stage, k] >= end["B", stage, k])
            for other in schedule.predecessors(shape, stage):
                model.add(begin["F", stage, k] >= end["F", other, k] + hop_between(stage, other))
                model.add(begin["B", other, k] >= end["B", stage, k] + hop_between(stage, other))
        # Micro-batches are interchangeable: their order is fixed to break the symmetry.
        for kind in steps_of:
            for k, later in pairwise(some):
                model.add(begin[kind, stage, later] >= end[kind, stage, k])
    total = model.new_int_var(0, horizon, "total")
    for keys in on:
        intervals = [model.new_fixed_size_interval_var(begin[key], steps_of[key[0]][key[1]], str(key)) for key in keys]
        model.add_no_overlap(intervals)
        if limit is not None:
            allocations = [(begin[key], 1) for key in keys if key[0] == "F"]
            releases = [(end[key], -1) for key in keys if key[0] == "W"]
            times, changes = zip(*allocations, *releases, strict=True)
            model.add_reservoir_constraint(times, changes, 0, limit)
        first = model.new_int_var(0, horizon, "first") if span else 0
        for key in keys:
            model.add(first <= begin[key])
            model.add(total >= end[key] - first)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return ShortestTime(solver.best_objective_bound / steps, solver.objective_value / steps)


def _integer_times(*times: Sequence[float]) -> tuple[int, list[list[int]]]:
    """Returns the steps of a unit of time, and the times in steps."""
    exact = [[Fraction(time).limit_denominator(MAX_STEPS_PER_UNIT) for time in row] for row in times]
    steps = lcm(*(time.denominator for row in exact for time in row))
    if steps > MAX_STEPS_PER_UNIT or any(
        tuple(map(float, row)) != tuple(computed) for row, computed in zip(exact, times, strict=True)
    ):
        raise PlanError(
            "durations",
            f"durations are multiples of 1/n for an n of at most {MAX_STEPS_PER_UNIT:,}",
            "Round the durations",
            times,
        )
    return steps, [[int(time * steps) for time in row] for row in exact]
