"""Pipelines: actions, the shape they fill, and what a schedule is.

A schedule states, per device, the order of its actions. Transfers between stages, dependencies, memory and time are
derived by shared code; an order is checked before it is played. Symbols as in the literature: p devices, m
micro-batches of one replica, v chunks (virtual stages) a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import Field

from hardware.errors import PlanError
from simulator.ir.scheme import Scheme, SchemeOptions

KINDS = ("F", "BW", "B", "W", "R", "O", "E", "K", "G", "L")
"""Kinds of actions: a forward pass; the gradients of inputs and weights at once, or those of inputs and those of
weights apart; a forward pass again, for a backward pass that needs what it has made; and an update of a device's
weights, where the pipe is not flushed for it: no schedule states these, see `with_updates`. The others are `MOVES`."""

MOVES = KINDS[6:]
"""What a forward pass has saved goes to another device and comes back before its backward pass: its own device evicts
it, the other one keeps it; later the other gives it back, and its own device loads it. No computation takes part."""


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


class OverlappedPasses(NamedTuple):
    """A forward and a backward pass of two stages on one device, played together: each op as soon as it can.

    What comes out of each is there when its own ops are done.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{{{self.forward}+{self.backward}}}"


ScheduleItem = Action | OverlappedPasses
"""What a device does next."""


@dataclass(frozen=True)
class PipelineShape:
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

    forward, backward (gradients of inputs alone), weights, again (a forward pass once more). kept: the part of what a
    forward pass keeps that waits for the gradients of weights; None: not known.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    again: tuple[float, ...]
    hop: float = 0.0
    kept: tuple[float, ...] | None = None


Lasts = Callable[[int, int], float]
"""Seconds that a slice of a sequence takes on a stage, both ways: by its tokens, and by those in front of it."""


class Schedule(Scheme):
    """Base of the pipeline schedules."""

    family = "pipeline"
    role = "pipeline schedule"
    most_axes = 1
    needs_durations: ClassVar[bool] = False
    """Whether its orders depend on how long passes last."""
    directions: ClassVar[int] = 1
    """Ways through the devices, each with stages of its own that hold the same parts of the model."""
    at_run_time: ClassVar[bool] = False
    """Whether devices may leave their orders, as `next_item` says, where passes do not last as long as they should."""
    flush: ClassVar[bool] = True
    """Whether the pipe runs empty before the weights are updated. Without a flush one batch follows the other into the
    pipe: the schedule states its order for any number of micro-batches, and every device updates its own weights."""

    class Options(SchemeOptions):
        chunks: int = Field(default=1, ge=1, strict=True)
        """Virtual stages a device."""

    @property
    def lowering_key(self) -> Hashable:
        """A schedule orders the passes through units and changes none."""
        return self.family

    def order(self, shape: PipelineShape, device: int) -> Sequence[ScheduleItem]:
        """All actions of one device, in the order in which it executes them. A schedule states this or `orders`."""
        return self.orders(shape)[device]

    def orders(self, shape: PipelineShape, lasting: Durations | None = None) -> Sequence[Sequence[ScheduleItem]]:
        """The orders of all devices. lasting: told where `needs_durations`."""
        return [list(self.order(shape, device)) for device in range(shape.p)]

    def chunks(self) -> int:
        """Stages a device, of all ways."""
        return self.options.chunks * self.directions

    @property
    def slices(self) -> tuple[float, ...]:
        """The slices that every sequence is cut into, as shares of it; none where `cut` says it."""
        return (1.0,)

    def cut(self, shape: PipelineShape, sequence: int, step: int, lasts: Lasts) -> tuple[int, ...]:
        """Tokens of the slices of a sequence, multiples of `step`, where that depends on how long they take."""
        return (sequence,)

    def device(self, shape: PipelineShape, stage: int) -> int:
        """The device that holds `stage`: chunks go round-robin."""
        return stage % shape.p

    def part(self, shape: PipelineShape, stage: int) -> int:
        """Which part of the model a stage holds; parts are numbered from the embedding on."""
        return stage % (shape.stages // self.directions)

    def before(self, shape: PipelineShape, stage: int) -> tuple[int, ...]:
        """The stages whose results a stage takes."""
        return (stage - 1,) if self.part(shape, stage) else ()

    def microbatches(self, shape: PipelineShape, stage: int) -> range:
        """The micro-batches that pass through a stage: of several ways each takes a like share, the first the first."""
        way = stage // (shape.stages // self.directions)
        return range(way * shape.m // self.directions, (way + 1) * shape.m // self.directions)

    def update_every(self, shape: PipelineShape) -> int:
        """Micro-batches between two updates of the weights."""
        return shape.m

    def version(self, shape: PipelineShape, device: int, microbatch: int) -> int:
        """How many updates the weights have seen that a micro-batch meets on a device, forward and backward.

        shape: of one batch; micro-batches are counted through all of them.
        """
        return microbatch // shape.m

    def idle_roles(self, shape: PipelineShape, stage: int) -> tuple[str, ...]:
        """Roles of other schemes that do nothing on a stage."""
        return ()

    def next_item(
        self,
        shape: PipelineShape,
        left: Sequence[ScheduleItem],
        there: Callable[[ScheduleItem], bool],
        done: Callable[[Action], float],
    ) -> ScheduleItem:
        """What a free device plays at run time, of all that is left of its order.

        there: whether what a turn needs from other stages is there. done: the part of a pass that is done.
        """
        return left[0]

    def check(self, shape: PipelineShape) -> None:
        """Raises PlanError where the schedule does not exist for this shape."""
        if shape.v != self.directions:
            one = "one chunk a device" + (f" and way, of {self.directions} ways" if self.directions > 1 else "")
            rule, remedy = f"{self.use} has {one}", "Use pipeline/interleaved-1f1b for more"
            raise PlanError("plan.chunks", rule, remedy, shape.v // self.directions)


class Bidirectional(Schedule):
    """Base of the schedules with two ways through an even number of devices, one down and one up: every device holds a
    stage of each, and all weights are there twice."""

    directions = 2

    def device(self, shape: PipelineShape, stage: int) -> int:
        return v_shape_device(shape, stage)

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.p % 2:
            rule = f"{self.use} needs an even number of devices, half of them nearer to the end of each way"
            raise PlanError("the pipeline's axis", rule, f"{shape.p + 1} would work", shape.p)


class VShape(Schedule):
    """Base of the schedules whose stages go down the devices and up again: two chunks a device, the first and the last
    stage on the first device."""

    class Options(SchemeOptions):
        """chunks: one down the devices and one up, 2."""

        chunks: int = Field(default=2, ge=1, strict=True)

    def device(self, shape: PipelineShape, stage: int) -> int:
        return v_shape_device(shape, stage)

    def check(self, shape: PipelineShape) -> None:
        if shape.v != 2:
            raise PlanError("plan.chunks", f"{self.use} has two chunks a device", "Set chunks: 2", shape.v)


@dataclass(frozen=True)
class PipelineSetting:
    """Where a schedule's laws are asked: a shape and the times of one micro-batch through the layers of one device."""

    shape: PipelineShape
    tf: float
    tb: float
    tw: float

    @property
    def u(self) -> float:
        """Work of one micro-batch on one device."""
        return self.tf + self.tb + self.tw


def one_forward_one_backward(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forward passes (or all), then one forward and one backward in turn, then what is left."""
    ahead = forward[warmup:]
    steady = [action for pair in zip(ahead, backward, strict=False) for action in pair]
    return [*forward[:warmup], *steady, *backward[len(ahead) :]]


def v_shape_device(shape: PipelineShape, stage: int) -> int:
    """The device of a stage where stages go down the devices and up again, in waves: the ends of a wave meet on one."""
    down = stage % (2 * shape.p)
    return min(down, 2 * shape.p - 1 - down)


def actions_of(turns: Iterable[ScheduleItem]) -> list[Action]:
    """All actions; of a pair the forward pass first."""
    return [action for turn in turns for action in (turn if isinstance(turn, OverlappedPasses) else (turn,))]


def table(orders: Sequence[Iterable[ScheduleItem]], marked: dict[int, int]) -> str:
    """A row of actions a device; the step at which a device fails stands in ``>...<``."""
    rows = []
    for device, order in enumerate(orders):
        cells = [f">{action}<" if marked.get(device) == step else str(action) for step, action in enumerate(order)]
        rows.append(f"  device {device}: {' '.join(cells)}")
    return "\n".join(rows)


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` (at least one of it) next to `value`."""
    return max(1, math.floor(value / of + 0.5)) * of
