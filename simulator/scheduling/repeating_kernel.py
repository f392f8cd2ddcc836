"""The shortest kernel of a pipeline: an order of passes that repeats in the steady state, computed by CP-SAT.

In a period every stage runs its passes of n micro-batches, whatever micro-batches they are. A pass of the first n
begins at offset x period + phase: phases order the passes of a device, offsets say how far a pass lags behind. Of the
kernels of 1, 2, .. micro-batches that with the least period for each is taken, and of these that through which the
first micro-batches pass soonest. Needs OR-Tools (``pip install 'meshcast[search]'``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.scheduling.greedy import Dependencies, pass_dependencies
from meshcast.simulator.scheduling.schedule import Action, PassDurations, PipelineShape, Schedule

STEPS = 60
"""Steps of the longest pass: the solver has integer times."""

COARSER = 1.05
"""Ratio of a period that is tried to that before, from the least that the work of a device admits."""

EFFORT = 0.5
"""Deterministic time of CP-SAT for a period, about seconds, the same on every machine."""


@dataclass(frozen=True)
class Kernel:
    """A repeating kernel, in steps.

    period: of the kernel.
    microbatches: whose passes a period runs.
    begin: of every pass of the first micro-batches.
    """

    period: int
    microbatches: int
    begin: Mapping[Action, int]


def find_kernel(
    schedule: Schedule, shape: PipelineShape, durations: PassDurations, limit: int, most: int, split_backward: bool
) -> Kernel:
    """Returns the kernel of the least period for each of its micro-batches.

    limit: chunks whose activations a device may hold, each from its forward pass to its last pass.
    most: micro-batches of a kernel.

    Raises PlanError where OR-Tools is not installed.
    """
    best: Kernel | None = None
    for count in range(1, min(most, shape.m) + 1):
        dependencies = pass_dependencies(schedule, replace(shape, m=count), split_backward=split_backward)
        steps, hop = _in_steps(dependencies, durations)
        device = {action: schedule.device(shape, action.stage) for action in dependencies}
        work: dict[int, int] = defaultdict(int)
        for action, duration in steps.items():
            work[device[action]] += duration
        period = max(work.values())
        while best is None or period * best.microbatches < best.period * count:
            if (begin := _solve(_solver(), dependencies, steps, device, hop, limit, period)) is not None:
                best = Kernel(period, count, begin)
                break
            period = max(period + 1, round(period * COARSER))
    assert best is not None
    return best


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        rule = "the search of a repeating kernel needs OR-Tools, which is not installed"
        raise PlanError("plan.schemes", rule, "pip install 'meshcast[search]', or use pipeline/zb-auto") from None
    return cp_model


def _in_steps(dependencies: Dependencies, durations: PassDurations) -> tuple[dict[Action, int], int]:
    """Returns the steps of every pass, at least 1, and of a message."""
    again = zip(durations.input_gradients, durations.recomputation, strict=True)
    inputs, weights = [sum(both) for both in again], durations.weight_gradients
    whole = [a + b for a, b in zip(inputs, weights, strict=True)]
    seconds = {"F": durations.forward, "B": inputs, "W": weights, "BW": whole}
    longest = max(seconds[action.kind][action.stage] for action in dependencies) or 1.0
    steps = {action: max(1, round(seconds[action.kind][action.stage] / longest * STEPS)) for action in dependencies}
    return steps, round(durations.hop / longest * STEPS)


def _solve(
    cp_model: Any,
    dependencies: Dependencies,
    steps: Mapping[Action, int],
    device: Mapping[Action, int],
    hop: int,
    limit: int,
    period: int,
) -> dict[Action, int] | None:
    """Returns the begin of every pass of the first micro-batch; None if there is no kernel of this period."""
    model, horizon = cp_model.CpModel(), sum(steps.values()) + hop * len(steps) + period
    rounds = horizon // period + 1
    begin: dict[Action, Any] = {}
    busy: dict[int, list[Any]] = defaultdict(list)
    for action, duration in steps.items():
        offset = model.new_int_var(0, rounds, f"offset {action}")
        phase = model.new_int_var(0, period - 1, f"phase {action}")
        begin[action] = offset * period + phase
        # Twice, so that a pass that goes on in the next period leaves the begin of this free.
        busy[device[action]] += [
            model.new_fixed_size_interval_var(phase + again, duration, "") for again in (0, period)
        ]
    for intervals in busy.values():
        model.add_no_overlap(intervals)
    for action, others in dependencies.items():
        for other in others:
            model.add(begin[action] >= begin[other] + steps[other] + hop * (device[action] != device[other]))
    _limit_chunks(model, begin, steps, device, rounds, limit, period)
    return _begin_early(cp_model, model, begin, steps, horizon + period)


def _limit_chunks(
    model: Any,
    begin: Mapping[Action, Any],
    steps: Mapping[Action, int],
    device: Mapping[Action, int],
    rounds: int,
    limit: int,
    period: int,
) -> None:
    """Lets every device hold at most `limit` chunks, each from its F to its last pass."""
    held: dict[int, list[Any]] = defaultdict(list)
    for action in (action for action in steps if action.kind == "F"):
        last = next(other for other in (action._replace(kind="W"), action._replace(kind="BW")) if other in steps)
        held[device[action]].append(model.new_int_var(1, rounds + 1, ""))
        model.add(begin[last] + steps[last] - begin[action] <= period * held[device[action]][-1])
    for chunks in held.values():
        model.add(sum(chunks) <= limit)


def _begin_early(
    cp_model: Any, model: Any, begin: Mapping[Action, Any], steps: Mapping[Action, int], horizon: int
) -> dict[Action, int] | None:
    """Returns the begins with which the last pass ends as early as possible; None if there are none."""
    end = model.new_int_var(0, horizon, "end")
    for action, duration in steps.items():
        model.add(end >= begin[action] + duration)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = EFFORT
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {action: solver.value(variable) for action, variable in begin.items()}


def unroll(kernel: Kernel, shape: PipelineShape, device: Sequence[int]) -> list[list[Action]]:
    """Returns the orders of all devices when the kernel repeats until all micro-batches are through."""
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(shape.p)]
    for action, begin in kernel.begin.items():
        for turn, k in enumerate(shape.microbatches[action.microbatch :: kernel.microbatches]):
            rows[device[action.stage]].append((begin + turn * kernel.period, action._replace(microbatch=k)))
    return [[action for _, action in sorted(row)] for row in rows]
