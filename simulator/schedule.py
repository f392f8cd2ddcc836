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
from typing import ClassVar, NamedTuple

from pydantic import Field

from hardware.errors import PlanError
from simulator.scheme import Scheme, SchemeOptions

KINDS = ("F", "BW", "B", "W", "R")
"""Kinds of actions: a forward pass; the gradients of inputs and weights at once, or those of inputs and those of
weights apart; a forward pass again, for a backward pass that needs what it has made."""


class Action(NamedTuple):
    """One task of the pipeline, printed like ``2F0``: the stage, one of `KINDS`, the micro-batch.

    slice: part of the micro-batch's sequences, where a schedule cuts these; printed like ``2F0.1``.
    """

    stage: int
    kind: str
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}" + (f".{self.slice}" if self.slice else "")


class Pair(NamedTuple):
    """A forward and a backward pass of two stages on one device, played together: each op as soon as it can.

    What comes out of each is there when its own ops are done.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{{{self.forward}+{self.backward}}}"


Turn = Action | Pair
"""What a device does next."""


@dataclass(frozen=True)
class Shape:
    """p devices, m micro-batches, v chunks a device, each micro-batch cut into so many slices.

    Stages are numbered from 0, and so many as devices have chunks.
    """

    p: int
    m: int
    v: int = 1
    slices: int = 1

    @property
    def stages(self) -> int:
        return self.p * self.v

    @property
    def microbatches(self) -> range:
        return range(self.m)


@dataclass(frozen=True)
class Durations:
    """How long passes last, by stage, and a hop between devices: what a policy weighs. Any unit, only ratios matter.

    forward, backward (gradients of inputs alone), weights, again (a forward pass once more).
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    again: tuple[float, ...]
    hop: float = 0.0


class Schedule(Scheme, ABC):
    """Base of the pipeline schedules."""

    family = "pipeline"
    role = "pipeline schedule"
    most_axes = 1
    weighs: ClassVar[bool] = False
    """Whether its orders depend on how long passes last."""
    ways: ClassVar[int] = 1
    """Ways through the devices, each with stages of its own that hold the same parts of the model."""

    class Options(SchemeOptions):
        """chunks: virtual stages a device."""

        chunks: int = Field(default=1, ge=1, strict=True)

    @property
    def alike(self) -> Hashable:
        """A schedule orders the passes through units and changes none."""
        return self.family

    @abstractmethod
    def order(self, shape: Shape, device: int) -> Sequence[Turn]:
        """All actions of one device, in the order in which it executes them."""

    def orders(self, shape: Shape, lasting: Durations | None = None) -> list[list[Turn]]:
        """The orders of all devices. lasting: told where `weighs`."""
        return [list(self.order(shape, device)) for device in range(shape.p)]

    def chunks(self) -> int:
        """Stages a device, of all ways."""
        return self.options.chunks * self.ways

    @property
    def slices(self) -> tuple[float, ...]:
        """The slices that every sequence is cut into, as shares of it."""
        return (1.0,)

    def device(self, shape: Shape, stage: int) -> int:
        """The device that holds `stage`: chunks go round-robin."""
        return stage % shape.p

    def part(self, shape: Shape, stage: int) -> int:
        """Which part of the model a stage holds; parts are numbered from the embedding on."""
        return stage % (shape.stages // self.ways)

    def before(self, shape: Shape, stage: int) -> tuple[int, ...]:
        """The stages whose results a stage takes."""
        return (stage - 1,) if self.part(shape, stage) else ()

    def microbatches(self, shape: Shape, stage: int) -> range:
        """The micro-batches that pass through a stage: of several ways each takes a like share, the first the first."""
        way = stage // (shape.stages // self.ways)
        return range(way * shape.m // self.ways, (way + 1) * shape.m // self.ways)

    def check(self, shape: Shape) -> None:
        """Raises PlanError where the schedule does not exist for this shape."""
        if shape.v != self.ways:
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


def actions_of(turns: Iterable[Turn]) -> list[Action]:
    """All actions; of a pair the forward pass first."""
    return [action for turn in turns for action in (turn if isinstance(turn, Pair) else (turn,))]


def table(orders: Sequence[Iterable[Turn]], marked: dict[int, int]) -> str:
    """A row of actions a device; the step at which a device fails stands in ``>...<``."""
    rows = []
    for device, order in enumerate(orders):
        cells = [f">{action}<" if marked.get(device) == step else str(action) for step, action in enumerate(order)]
        rows.append(f"  device {device}: {' '.join(cells)}")
    return "\n".join(rows)


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` (at least one of it) next to `value`."""
    return max(1, math.floor(value / of + 0.5)) * of
