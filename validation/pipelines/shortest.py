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


Pass = tuple[str, int, int]
"""Kind, stage and micro-batch."""


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
    passes = _Passes(schedule, shape, {"F": forward, "B": backward, "W": weights}, hop)
    passes.order_stages()
    total = passes.model.new_int_var(0, passes.horizon, "total")
    for keys in passes.on:
        passes.occupy_device(keys, total, limit, span)
    passes.model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(passes.model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return ShortestTime(solver.best_objective_bound / steps, solver.objective_value / steps)


class _Passes:
    """The passes of all stages as intervals of CP-SAT.

    steps_of: integer steps of a pass, by its kind and stage.
    hop: steps of a message between devices.
    begin, end: of each pass, by kind, stage and micro-batch.
    on: the passes of each device.
    """

    def __init__(self, schedule: Schedule, shape: PipelineShape, steps_of: dict[str, list[int]], hop: int) -> None:
        self.schedule, self.shape, self.steps_of, self.hop = schedule, shape, steps_of, hop
        self.horizon = shape.m * (sum(map(sum, steps_of.values())) + 2 * shape.stages * hop)
        self.model = cp_model.CpModel()
        self.begin: dict[Pass, Any] = {}
        self.on: list[list[Pass]] = [[] for _ in range(shape.p)]
        for stage in range(shape.stages):
            for kind in steps_of:
                for k in schedule.microbatches(shape, stage):
                    self.begin[kind, stage, k] = self.model.new_int_var(0, self.horizon, f"{stage}{kind}{k}")
                    self.on[schedule.device(shape, stage)].append((kind, stage, k))
        self.end = {key: var + steps_of[key[0]][key[1]] for key, var in self.begin.items()}

    def order_stages(self) -> None:
        """Adds what must end before a pass begins, and an order of micro-batches, which are interchangeable."""
        model, begin, end = self.model, self.begin, self.end
        for stage in range(self.shape.stages):
            microbatches = self.schedule.microbatches(self.shape, stage)
            for k in microbatches:
                model.add(begin["B", stage, k] >= end["F", stage, k])
                model.add(begin["W", stage, k] >= end["B", stage, k])
                for other in self.schedule.predecessors(self.shape, stage):
                    hop = self.hop * (self._device(stage) != self._device(other))
                    model.add(begin["F", stage, k] >= end["F", other, k] + hop)
                    model.add(begin["B", other, k] >= end["B", stage, k] + hop)
            # A fixed order breaks the symmetry.
            for kind in self.steps_of:
                for k, later in pairwise(microbatches):
                    model.add(begin[kind, stage, later] >= end[kind, stage, k])

    def occupy_device(self, keys: Sequence[Pass], total: Any, limit: int | None, span: bool) -> None:
        """Adds that the passes of a device run one after another, within its memory and the total."""
        model, begin, end = self.model, self.begin, self.end
        sizes = (self.steps_of[kind][stage] for kind, stage, _ in keys)
        intervals = zip(keys, sizes, strict=True)
        model.add_no_overlap(model.new_fixed_size_interval_var(begin[key], size, str(key)) for key, size in intervals)
        if limit is not None:
            allocations = [(begin[key], 1) for key in keys if key[0] == "F"]
            releases = [(end[key], -1) for key in keys if key[0] == "W"]
            times, changes = zip(*allocations, *releases, strict=True)
            model.add_reservoir_constraint(times, changes, 0, limit)
        first = model.new_int_var(0, self.horizon, "first") if span else 0
        for key in keys:
            model.add(first <= begin[key])
            model.add(total >= end[key] - first)

    def _device(self, stage: int) -> int:
        return self.schedule.device(self.shape, stage)


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
