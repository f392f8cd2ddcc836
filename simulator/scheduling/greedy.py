"""Greedy list scheduling in unit slots: in every slot each free device takes the ready pass of the highest priority.

Some papers define an order by such a rule. Every pass takes a single slot, whatever its duration will be; the result is
an order like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from meshcast.simulator.scheduling.schedule import Action, Orders, PipelineShape, Schedule, actions_of

Dependencies = Mapping[Action, Sequence[Action]]
"""Of every action, the actions that must be done before it begins."""


def pass_dependencies(schedule: Schedule, shape: PipelineShape, *, split_backward: bool) -> Dependencies:
    """Returns the dependencies of every pass. split_backward: backward passes are B and W, not BW."""
    dependencies: dict[Action, list[Action]] = {}
    kind = "B" if split_backward else "BW"
    for stage in range(shape.stages):
        predecessors = schedule.predecessors(shape, stage)
        for k in schedule.microbatches(shape, stage):
            forward, backward = Action(stage, "F", k), Action(stage, kind, k)
            dependencies[forward] = [Action(other, "F", k) for other in predecessors]
            dependencies.setdefault(backward, []).append(forward)
            for other in predecessors:
                dependencies.setdefault(Action(other, kind, k), []).append(backward)
            if split_backward:
                dependencies[Action(stage, "W", k)] = [backward]
    return dependencies


def invert_dependencies(dependencies: Dependencies) -> Dependencies:
    """Returns, of every action, the actions that depend on it."""
    dependents: dict[Action, list[Action]] = {action: [] for action in dependencies}
    for action, others in dependencies.items():
        for other in others:
            dependents[other].append(action)
    return dependents


Priority = int | tuple[int, ...]
"""What a ready action comes before others by; a schedule uses one of both."""


def schedule_greedily(
    schedule: Schedule, shape: PipelineShape, dependencies: Dependencies, priority: Callable[[Action], Priority]
) -> list[list[Action]]:
    """Returns the orders of all devices. priority: of an action; the lowest value goes first."""
    dependents = invert_dependencies(dependencies)
    missing = {action: len(others) for action, others in dependencies.items()}
    ready: list[list[tuple[Priority, Action]]] = [[] for _ in range(shape.p)]
    orders: list[list[Action]] = [[] for _ in range(shape.p)]
    released = [action for action, count in missing.items() if not count]
    while released or any(ready):
        for action in released:
            heappush(ready[schedule.device(shape, action.stage)], (priority(action), action))
        released = []
        for heap, order in zip(ready, orders, strict=True):
            if heap:
                order.append(heappop(heap)[1])
                for other in dependents[order[-1]]:
                    missing[other] -= 1
                    released += [other] * (not missing[other])
    return orders


def forward_orders(schedule: Schedule, shape: PipelineShape, orders: Orders) -> list[list[Action]]:
    """Returns the orders of a forward-only step: of the ready forward passes a device takes that which comes first in
    its order of training.

    Without backward passes nothing bounds the micro-batches in flight: where an order of training waits for a pass of
    an earlier micro-batch to come back (V-Half, Chimera), the next micro-batch goes first.

    orders: of training.
    """
    places = {action: at for order in orders for at, action in enumerate(actions_of(order)) if action.kind == "F"}
    dependencies = {
        action: [
            *(action._replace(stage=other) for other in schedule.predecessors(shape, action.stage)),
            *([action._replace(slice=action.slice - 1)] if action.slice else []),
        ]
        for action in places
    }
    return schedule_greedily(schedule, shape, dependencies, places.__getitem__)
