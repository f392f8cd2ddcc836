"""Pipelines: actions, the shape they fill, and what a schedule is.

A schedule states, per device, the order of its actions. Transfers between stages, dependencies, memory and time are
derived by shared code; an order is checked before it is played. Symbols as in the literature: p devices, m
micro-batches of one replica, v chunks (virtual stages) a device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from hardware.errors import PlanError
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

    @property
    def alike(self) -> Hashable:
        """A schedule orders the passes through units and changes none."""
        return self.family

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


def one_by_one(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forward passes (or all), then one forward and one backward in turn, then what is left."""
    ahead = forward[warmup:]
    steady = [action for pair in zip(ahead, backward, strict=False) for action in pair]
    return [*forward[:warmup], *steady, *backward[len(ahead) :]]


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
