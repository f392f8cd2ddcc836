"""Pipelines: actions, the shape they fill, and what a schedule is.

A schedule states, per device, the order of its actions. Transfers between stages, dependencies, memory and time are
derived by shared code; an order is checked before it is played. Symbols as in the literature: p devices, m
micro-batches of one replica, v chunks (virtual stages) a device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from hardware.errors import PlanError, ScheduleError
from simulator.scheme import Scheme, SchemeOptions


class Action(NamedTuple):
    """One task of the pipeline, printed like ``2F0``.

    Kinds: F, B (gradient of inputs), W (of weights), BW (both), R (recompute), O (optimizer).
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Shape:
    """p devices, m micro-batches, v chunks a device: p v stages, stage 0 first."""

    p: int
    m: int
    v: int = 1

    @property
    def stages(self) -> int:
        return self.p * self.v

    @property
    def microbatches(self) -> range:
        return range(self.m)


class Schedule(Scheme, ABC):
    """Base of the pipeline schedules."""

    family = "pipeline"
    role = "pipeline schedule"
    most_axes = 1
    backward = "BW"
    """Kinds of the backward pass: ``BW`` at once, or ``B W`` apart."""

    class Options(SchemeOptions):
        """chunks: virtual stages a device."""

        chunks: int = Field(default=1, ge=1, strict=True)

    @abstractmethod
    def order(self, shape: Shape, device: int) -> list[Action]:
        """All actions of one device, in the order in which it executes them."""

    def device(self, shape: Shape, stage: int) -> int:
        """The device that holds `stage`: chunks go round-robin."""
        return stage % shape.p

    def check(self, shape: Shape) -> None:
        """Raises PlanError where the schedule does not exist for this shape."""
        if shape.v != 1:
            raise PlanError(
                "plan.chunks", f"{self.use} has one chunk a device", "Use pipeline/interleaved-1f1b for more", shape.v
            )

    def orders(self, shape: Shape) -> list[list[Action]]:
        """The checked orders of all devices.

        Raises PlanError for an impossible shape, ScheduleError for an order that is not complete or would stand still.
        """
        self.check(shape)
        orders = [self.order(shape, device) for device in range(shape.p)]
        check_orders(orders, shape, self)
        return orders


@dataclass(frozen=True)
class PipelineSetting:
    """Where a schedule's laws are asked: a shape and the times of one micro-batch through the layers of one device."""

    shape: Shape
    tf: float
    tb: float
    tw: float

    @property
    def u(self) -> float:
        """Work of one micro-batch on one device."""
        return self.tf + self.tb + self.tw


def requires(action: Action, shape: Shape, split: bool) -> list[Action]:
    """The actions, on whatever device, whose result `action` needs."""
    stage, kind, microbatch = action
    back = "B" if split else "BW"
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "B", microbatch)]
    needs = [Action(stage, "F", microbatch)]
    return needs if stage == shape.stages - 1 else [*needs, Action(stage + 1, back, microbatch)]


def check_orders(orders: Sequence[Sequence[Action]], shape: Shape, schedule: Schedule) -> None:
    """Every action exactly once, on its stage's device, and no standstill.

    Raises ScheduleError with the rank-by-step table, the failing steps marked.
    """
    kinds = ["F", *schedule.backward.split()]
    split = len(kinds) > 2
    counts = Counter(action for order in orders for action in order)
    for device, order in enumerate(orders):
        wanted = [
            Action(s, k, m)
            for s in range(shape.stages)
            if schedule.device(shape, s) == device
            for k in kinds
            for m in shape.microbatches
        ]
        own = set(wanted)
        wrong = [action for action in wanted if counts[action] != 1] + [action for action in order if action not in own]
        if wrong:
            raise ScheduleError(
                f"{schedule.use} on device {device}",
                f"every action of its stages runs exactly once there; {wrong[0]} occurs {counts[wrong[0]]} times",
                f"Order:\n{table(orders, {device: len(order)})}",
            )
    done: set[Action] = set()
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while at[device] < len(order) and all(need in done for need in requires(order[at[device]], shape, split)):
                done.add(order[at[device]])
                at[device] += 1
                moved = True
    stuck = {device: at[device] for device, order in enumerate(orders) if at[device] < len(order)}
    if stuck:
        raise ScheduleError(
            schedule.use,
            "the order stands still: the marked actions wait for each other",
            f"Order:\n{table(orders, stuck)}",
        )


def table(orders: Sequence[Iterable[Action]], marked: dict[int, int]) -> str:
    """A row of actions a device; the step at which a device fails stands in ``>...<``."""
    rows = []
    for device, order in enumerate(orders):
        cells = [f">{action}<" if marked.get(device) == step else str(action) for step, action in enumerate(order)]
        rows.append(f"  device {device}: {' '.join(cells)}")
    return "\n".join(rows)


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` (at least one of it) next to `value`."""
    return max(1, math.floor(value / of + 0.5)) * of
