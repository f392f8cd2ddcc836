"""Pipeline schedules: the actions of a device, the shape of a pipeline, and the base class of all schedules.

A schedule states the order of actions of every device. Messages between stages, dependencies, memory and time follow
from the orders in shared code, and an order is checked before it is played. Symbols as in the literature: p devices,
m micro-batches of a replica, v chunks (virtual stages) a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import ClassVar, Literal, NamedTuple, overload

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import ClosedForm, Scheme, SchemeOptions


class ActionKind(StrEnum):
    """Kind of an action. Its value is how orders write it: passes by the letters of the zero-bubble papers (arXiv
    2401.10241)."""

    FORWARD = "F"
    """Forward pass."""
    BACKWARD = "BW"
    """Whole backward pass: gradients of inputs and of weights."""
    INPUT_GRADIENTS = "B"
    """First half of a split backward pass: gradients of inputs."""
    WEIGHT_GRADIENTS = "W"
    """Second half of a split backward pass: gradients of weights."""
    RECOMPUTATION = "R"
    """Recomputation: the forward pass again, for a backward pass that needs its activations."""
    UPDATE = "O"
    """Optimizer update of a device's weights in a schedule without a flush: put in by `no_flush.insert_updates`."""
    AHEAD = "N"
    """Forward pass before the loss of the batch, of which the output alone is kept; an F runs it again later."""
    OUTPUTS = "X"
    """All outputs of the batch are complete, and go to the stage of the other branch."""
    LOSS = "Y"
    """The loss over all samples of the batch, and its gradients."""
    OUTPUT_GRADIENTS = "Z"
    """Gradients of the outputs come back from the stage of the other branch, and are added."""
    EVICT = "E"
    """The device of the stage sends the activations of a forward pass to another device."""
    KEEP = "K"
    """The other device receives and keeps them."""
    GIVE_BACK = "G"
    """The other device sends them back."""
    LOAD = "L"
    """The device of the stage receives them again, before its backward pass."""
    COMPLETE = "C"
    """All gradients of a stage of which there are copies are complete on its device."""
    SUM = "S"
    """They are summed with those of the copies, while other passes run."""
    SPREAD = "V"
    """What the shards of the vocabulary read in their next pass is broadcast to the devices of all of them."""
    JOIN = "J"
    """What all shards of the vocabulary have computed of a micro-batch is all-reduced, forward."""
    JOIN_GRADIENTS = "Q"
    """The gradients that all shards of the output layer have computed of their input are all-reduced."""
    HOST_OUT = "D"
    """The activations of a forward pass are copied to host memory, from here on."""
    HOST_FREED = "P"
    """They are there, and their memory is free."""
    HOST_IN = "U"
    """They have memory again, and are copied back before their backward pass."""


ACTION_KINDS = tuple(kind.value for kind in ActionKind)
"""Values of `ActionKind`, in its order: a timetable stores kinds as indices of it."""

ACTIVATION_TRANSFERS = (ActionKind.EVICT, ActionKind.KEEP, ActionKind.GIVE_BACK, ActionKind.LOAD)
"""The four actions of an activation transfer; none of them computes."""

BATCH_LOSS = (ActionKind.OUTPUTS, ActionKind.LOSS, ActionKind.OUTPUT_GRADIENTS)
"""The actions of a loss that couples the samples of a batch: `batch_loss` puts them in. Of several stages with outputs
each action needs that before of the others."""

GRADIENT_SUMS = (ActionKind.COMPLETE, ActionKind.SUM)
"""The two actions of a sum of gradients during a step; none of them computes. `gradient_sums` puts them in."""

SHARD_COLLECTIVES = (ActionKind.SPREAD, ActionKind.JOIN, ActionKind.JOIN_GRADIENTS)
"""Collectives among the devices that hold shards of the vocabulary (`vocabulary`); none of them computes."""

HOST_COPIES = (ActionKind.HOST_OUT, ActionKind.HOST_FREED, ActionKind.HOST_IN)
"""The three actions of activations that rest in host memory (`host_copies`); none of them computes."""

BETWEEN_PASSES = (*ACTIVATION_TRANSFERS, *HOST_COPIES, *SHARD_COLLECTIVES)
"""Actions that move data while passes run: none of them computes."""

MEETINGS = (*GRADIENT_SUMS, *SHARD_COLLECTIVES)
"""Actions whose collectives run on a stream of their own, and take no buffers of messages."""


class Action(NamedTuple):
    """One task of a pipeline, printed as stage, kind and micro-batch (``2F0``), with a later slice as ``2F0.1``.

    stage: virtual stage, numbered from 0.
    kind: a value of `ActionKind`.
    microbatch: micro-batch of the replica, numbered from 0.
    slice: slice of the micro-batch's sequences, in schedules that slice sequences; or the part of its samples, of a
        backward pass of a part.
    """

    stage: int
    kind: str
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}" + (f".{self.slice}" if self.slice else "")


class Stripe(NamedTuple):
    """A part of the activations of a forward pass, which rests on another device, the keeper.

    own_links: whether it moves over separate links, at the same time as other parts.
    """

    keeper: int
    nbytes: int
    own_links: bool = False


class OverlappedPasses(NamedTuple):
    """A forward and a backward pass of two stages on the same device, run at the same time.

    Each op starts as soon as its inputs are there; the output of a pass is there when that pass is done.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{{{self.forward}+{self.backward}}}"


class ActionArray(Sequence[Action]):
    """The order of a device without pairs, as arrays: a timetable reads these, and actions are made when somebody asks
    for them.

    fields: stage, kind by its place in `ACTION_KINDS`, micro-batch and slice of every action [4, actions].
    """

    def __init__(self, fields: np.ndarray) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return self.fields.shape[1]

    @overload
    def __getitem__(self, at: int) -> Action: ...

    @overload
    def __getitem__(self, at: slice) -> list[Action]: ...

    def __getitem__(self, at: int | slice) -> Action | list[Action]:
        return [*self][at]

    def __iter__(self) -> Iterator[Action]:
        stages, kinds, microbatches, slices = self.fields.tolist()
        # This takes two thirds of the time of a call of `Action` for each.
        make, names = partial(tuple.__new__, Action), map(ACTION_KINDS.__getitem__, kinds)
        return map(make, zip(stages, names, microbatches, slices, strict=True))

    def __eq__(self, other: object) -> bool:
        return [*self] == [*other] if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


ScheduleItem = Action | OverlappedPasses
"""One entry in the order of a device."""


Orders = Sequence[Sequence[ScheduleItem]]
"""The orders of all devices."""


@dataclass(frozen=True)
class PipelineShape:
    """Size of a pipeline. Stages are numbered from 0 to p v - 1.

    p: devices.
    m: micro-batches, those that a forward pass runs together counted as one.
    v: chunks (virtual stages) a device.
    slices: slices of every sequence.
    forward_only: micro-batches have forward passes alone.
    classes: of micro-batches of different lengths, the class of each; empty: all are alike.
    batch_loss: the loss couples the samples of all micro-batches (a contrastive loss).
    """

    p: int
    m: int
    v: int = 1
    slices: int = 1
    forward_only: bool = False
    classes: tuple[int, ...] = ()
    batch_loss: bool = False

    @property
    def stages(self) -> int:
        return self.p * self.v

    @property
    def microbatches(self) -> range:
        return range(self.m)


@dataclass(frozen=True)
class PassDurations:
    """Duration of every pass, by stage, for schedules that depend on it; in any unit of time, only ratios matter.

    forward: forward passes (F).
    input_gradients: first halves of backward passes (B).
    weight_gradients: second halves of backward passes (W).
    recomputation: forward passes that are repeated for a backward pass (R).
    hop: a message between two devices.
    kept_for_weights: share of a forward pass's activations that stays until the gradients of weights; None: not known.
    barrier: whether the devices wait for each other after their last passes, as for the global norm of the gradients: a
        step then takes the makespan. Otherwise the next step begins on each device by itself, and a step takes the
        longest span of a device.
    stored: what a forward pass leaves in memory, in any unit; empty: the same on all stages.
    copied: a copy of that between GPU and host memory; empty: not known.
    each: those of every micro-batch, where lengths differ; the fields above are then their means. Empty: all are alike.
    """

    forward: tuple[float, ...]
    input_gradients: tuple[float, ...]
    weight_gradients: tuple[float, ...]
    recomputation: tuple[float, ...]
    hop: float = 0.0
    kept_for_weights: tuple[float, ...] | None = None
    barrier: bool = False
    stored: tuple[float, ...] = ()
    copied: tuple[float, ...] = ()
    each: tuple[PassDurations, ...] = ()

    def of(self, action: Action) -> float:
        """Returns the duration of an action; 0 if it does not compute."""
        durations, stage = self.of_microbatch(action.microbatch), action.stage
        if action.kind == ActionKind.BACKWARD:
            return durations.input_gradients[stage] + durations.weight_gradients[stage]
        kinds = {
            "F": durations.forward,
            "B": durations.input_gradients,
            "W": durations.weight_gradients,
            "R": durations.recomputation,
        }
        return kinds[action.kind][stage] if action.kind in kinds else 0.0

    def of_microbatch(self, microbatch: int) -> PassDurations:
        """Returns those of the passes of a micro-batch."""
        return self.each[microbatch] if self.each else self

    @property
    def equalised(self) -> PassDurations:
        """Durations of passes that last equally long and of messages without time: no figure of hardware changes
        them."""
        unit, again = (1.0,) * len(self.forward), tuple(float(seconds > 0) for seconds in self.recomputation)
        each = tuple(durations.equalised for durations in self.each)
        equal = PassDurations(unit, unit, unit, again)
        return replace(
            equal, kept_for_weights=self.kept_for_weights, barrier=self.barrier, stored=self.stored, each=each
        )


class PostValidation(SchemeOptions):
    """Option of the zero-bubble schedules."""

    post_validation: bool = False
    """Devices update their weights by the sum of the gradients' norms up to their own, which goes from device to
    device, start the next batch, and roll back if the whole norm demands another update: no barrier between steps
    (arXiv 2401.10241, section 4). Default: off, as the norm is all-reduced first."""


class PassOverlap(SchemeOptions):
    """Option of the 1F1B schedules."""

    overlap_passes: bool = False
    """A forward and a backward pass of the steady state run together, after one more pass of warm-up: token dispatch of
    one overlaps with computation of the other (Megatron-Core's --overlap-moe-expert-parallel-comm)."""


class GradientSync(SchemeOptions):
    """Option of the schedules that hold every stage on several devices."""

    gradient_sync: Literal["end", "eager"] = "eager"
    """When the gradients of the copies of a stage are summed: `end`, after all passes; `eager`, as soon as the last
    backward pass of that stage has run on all devices that hold it, while other passes go on."""


SliceDuration = Callable[[int, int], float]
"""Seconds of a slice on a stage, forward and backward, from its tokens and the tokens before it in the sequence."""


class Schedule(Scheme):
    """Base of the pipeline schedules.

    Customise by: `order` (a device) or `orders` (all devices), `check` (shapes that exist), `closed_forms`.
    Less often: `device`, `place`, `model_part`, `predecessors` and `microbatches` (a graph of stages that is no
    chain), `propose_slices`, `next_item` (decisions at run time), `microbatches_per_update` and `weight_version` (no
    flush).
    """

    family = "pipeline"
    role, most_axes = "pipeline schedule", 1
    needs_durations: ClassVar[bool] = False
    """Whether its orders depend on the durations of passes: they run where their step is no longer than that of its
    orders for equally long passes."""
    least_chunks: ClassVar[int] = 1
    """Fewest chunks a device."""
    directions: int = 1
    """Ways through the devices; each has its stages, which hold the same parts of the model."""
    microbatches_per_forward: int = 1
    """Micro-batches that a forward pass runs together: to the schedule they are a single micro-batch."""
    backwards_per_forward: int = 1
    """Backward passes to a forward pass, each of an equal part of its samples: those of later parts are actions with
    a `slice`."""
    reorders_at_run_time: ClassVar[bool] = False
    """Whether a device may deviate from its order, by `next_item`, when passes last longer or shorter than planned."""
    separates_multiprocessors: ClassVar[bool] = False
    """Whether the kernels of a pair of passes leave to those of its token exchanges their multiprocessors while the
    pair runs; otherwise only in the `shared` engine, and while an exchange runs."""
    backward_kinds: ClassVar[tuple[str, ...]] = ("BW",)
    """Kinds of its backward passes: whole ones, halves (B, W), or all three."""
    couples_samples: ClassVar[bool] = False
    """Whether all outputs of a batch are computed before its first backward pass, as a loss that couples them
    demands."""
    flush: ClassVar[bool] = True
    """Whether the pipeline drains before the weights are updated. Without a flush the next batch enters at once: the
    schedule states its order for any number of micro-batches, and every device updates its weights."""

    class Options(SchemeOptions):
        chunks: int = Field(default=1, ge=1, strict=True)
        """Virtual stages a device."""

    @property
    def barrier(self) -> bool:
        """Whether no device begins the next batch before all have updated their weights, as gradient clipping by the
        norm of all gradients demands. Without a barrier the order of a batch is repeated, each device in its time.
        """
        return self.flush and not getattr(self.options, "post_validation", False)

    @property
    def lowering_key(self) -> Hashable:
        """The same for all schedules: they order the passes of a stage and change none of its ops."""
        return self.family

    def order(self, shape: PipelineShape, device: int) -> Sequence[ScheduleItem]:
        """Returns all actions of a device, in the order of execution. A schedule defines this or `orders`."""
        return self.orders(shape)[device]

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> Orders:
        """Returns the orders of all devices. durations: stated if `needs_durations`."""
        return [self.order(shape, device) for device in range(shape.p)]

    def chunks_per_device(self) -> int:
        """Returns the number of stages a device, of all directions."""
        return self.options.chunks * self.directions

    @property
    def slices(self) -> tuple[float, ...]:
        """Lengths of the slices of every sequence, as shares of it; empty if `propose_slices` finds them."""
        return (1.0,)

    def propose_slices(
        self, shape: PipelineShape, sequence: int, step: int, granule: int, seconds: SliceDuration
    ) -> list[tuple[int, ...]]:
        """Returns the lengths of the slices of a sequence [tokens], if they depend on how long slices take; of several
        proposals the plan takes that with the shortest step.

        sequence: tokens of a sequence.
        step: a multiple of `granule` that divides the sequence into few parts.
        granule: every length is a multiple of it.
        """
        return [(sequence,)]

    def device(self, shape: PipelineShape, stage: int) -> int:
        """Returns the device that holds `stage`: by default chunks go round-robin."""
        return stage % shape.p

    def place(self, shape: PipelineShape, device: int) -> int:
        """Returns the place of a device along the pipeline's axis: by default devices are in the order of ranks."""
        return device

    def stripes(self, shape: PipelineShape) -> Mapping[tuple[int, int], Stripe]:
        """Returns by stage and keeper, the part of the activations of a forward pass that rests there; by default
        all."""
        return {}

    def model_part(self, shape: PipelineShape, stage: int) -> int:
        """Returns the part of the model that a stage holds; part 0 has the embedding."""
        return stage % (shape.stages // self.directions)

    def predecessors(self, shape: PipelineShape, stage: int) -> tuple[int, ...]:
        """Returns the stages whose outputs are the inputs of a stage."""
        return (stage - 1,) if self.model_part(shape, stage) else ()

    def microbatches(self, shape: PipelineShape, stage: int) -> range:
        """Returns the micro-batches that pass through a stage: every direction takes an equal share, in order."""
        direction = stage // (shape.stages // self.directions)
        return range(direction * shape.m // self.directions, (direction + 1) * shape.m // self.directions)

    def microbatches_per_update(self, shape: PipelineShape) -> int:
        """Micro-batches between two updates of the weights."""
        return shape.m

    def weight_version(self, shape: PipelineShape, device: int, microbatch: int) -> int:
        """Counts the updates in the weights that a micro-batch uses on a device, in its forward and in its backward
        pass.

        shape: of a batch.
        microbatch: counted through all batches.
        """
        return microbatch // shape.m

    def unused_roles(self, shape: PipelineShape, stage: int) -> tuple[str, ...]:
        """Roles (`Scheme.role`) of other schemes that do not apply to a stage."""
        return ()

    def sums_early(self, shape: PipelineShape, stage: int) -> bool:
        """Returns whether the gradients of a stage are summed with those of its copies as soon as all copies have run
        their last backward pass, instead of at the end of the step; the same for all copies."""
        return False

    @property
    def pairs_passes(self) -> bool:
        """Whether a forward and a backward pass may run together on a device (`OverlappedPasses`)."""
        return bool(getattr(self.options, "overlap_passes", False))

    def next_item(
        self,
        shape: PipelineShape,
        remaining: Sequence[ScheduleItem],
        is_ready: Callable[[ScheduleItem], bool],
        fraction_done: Callable[[Action], float],
    ) -> ScheduleItem:
        """Returns the item that a free device runs next, at run time.

        remaining: items of its order that have not run.
        is_ready: whether the inputs of an item from other stages have arrived.
        fraction_done: share of a pass that has run, 0 to 1.
        """
        return remaining[0]

    def check(self, shape: PipelineShape) -> None:
        """Raises PlanError if the schedule does not exist for this shape."""
        if shape.v != self.directions:
            chunks = "one chunk a device" + (f" and direction, of {self.directions}" if self.directions > 1 else "")
            rule, remedy = f"{self.use} has {chunks}", "Use pipeline/interleaved-1f1b for more"
            raise PlanError("plan.chunks", rule, remedy, shape.v // self.directions)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        """Returns closed forms of the paper that hold at `setting`; validation/contract/of_pipeline.py lists the
        quantities."""
        return ()


class ZeroBubble(Schedule):
    """Base of the schedules with split backward passes and a stage a device."""

    backward_kinds = ("B", "W")

    class Options(Schedule.Options, PostValidation):
        pass


class Bidirectional(Schedule):
    """Base of the schedules with two directions, down and up an even number of devices: every device holds a stage of
    each, so there are two copies of the weights, whose gradients are summed."""

    directions = 2

    class Options(Schedule.Options, GradientSync):
        pass

    def sums_early(self, shape: PipelineShape, stage: int) -> bool:
        return bool(self.options.gradient_sync == "eager")

    def device(self, shape: PipelineShape, stage: int) -> int:
        return v_shape_device(shape, stage)

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.p % 2:
            rule = f"{self.use} has two directions, which meet in the middle of an even number of devices"
            raise PlanError("the pipeline's axis", rule, f"{shape.p + 1} would work", shape.p)


class VShape(Schedule):
    """Base of the schedules whose stages go down the devices and up again: two chunks a device, and the first and the
    last stage on the first device."""

    backward_kinds: ClassVar[tuple[str, ...]] = ("B", "W")

    class Options(SchemeOptions):
        """chunks: 2, down the devices and up."""

        chunks: int = Field(default=2, ge=1, strict=True)

    def device(self, shape: PipelineShape, stage: int) -> int:
        return v_shape_device(shape, stage)

    def check(self, shape: PipelineShape) -> None:
        if shape.v != 2:
            raise PlanError("plan.chunks", f"{self.use} has two chunks a device", "Set chunks: 2", shape.v)


@dataclass(frozen=True)
class PipelineSetting:
    """A point at which closed forms of schedules are evaluated. Times are of a micro-batch through all layers of a
    device.

    shape: of the pipeline.
    t_f: forward pass [s].
    t_b: gradients of inputs [s].
    t_w: gradients of weights [s].
    """

    shape: PipelineShape
    t_f: float
    t_b: float
    t_w: float

    @property
    def t_total(self) -> float:
        """All passes of a micro-batch on a device [s]."""
        return self.t_f + self.t_b + self.t_w


def make_schedule(name: str, devices: int, chunks: int, framework: object) -> Schedule:
    """Makes a schedule by its name, of pipelines on so many devices that nothing else divides."""
    kind = find_scheme(f"pipeline/{name}")
    options = kind.Options.model_validate({"chunks": chunks})
    schedule = kind(("pp",), options, Mesh({"pp": devices}), framework, (), devices > 1)
    assert isinstance(schedule, Schedule)
    return schedule


def one_forward_one_backward(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """Returns 1F1B: warm-up of `warmup` forward passes, a forward and a backward pass in turn, cool-down of the
    rest."""
    steady_forward = forward[warmup:]
    steady = [action for pair in zip(steady_forward, backward, strict=False) for action in pair]
    return [*forward[:warmup], *steady, *backward[len(steady_forward) :]]


def alternate_passes(forward: np.ndarray, backward: np.ndarray, warmup: int) -> ActionArray:
    """Returns 1F1B of as many forward as backward passes, like `one_forward_one_backward`. forward, backward: fields of
    an `ActionArray`."""
    count = forward.shape[1]
    steady = max(count - warmup, 0)
    ahead, end = count - steady, count + steady
    fields = np.empty((4, 2 * count), int)
    fields[:, :ahead], fields[:, ahead:end:2] = forward[:, :ahead], forward[:, ahead:]
    fields[:, ahead + 1 : end : 2], fields[:, end:] = backward[:, :steady], backward[:, steady:]
    return ActionArray(fields)


def overlapped_1f1b(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[ScheduleItem]:
    """Returns 1F1B whose two passes of a turn run together, after another pass of warm-up."""
    steady_forward = forward[warmup + 1 :]
    steady = [OverlappedPasses(*pair) for pair in zip(steady_forward, backward, strict=False)]
    return [*forward[: warmup + 1], *steady, *backward[len(steady_forward) :]]


def split_1f1b(shape: PipelineShape, device: int, rounds: int) -> list[Action]:
    """Returns 1F1B with split backward passes, a warm-up of `rounds` x (p - 1 - device) + 1 forward passes, and every W
    `rounds` x device B's behind it: ZB-H1 (1 round) and ZB-H2 (2 rounds) of arXiv 2401.10241."""
    forward, backward = ([Action(device, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
    return split_backwards(forward, backward, min(shape.m, rounds * (shape.p - 1 - device)), rounds * device)


def split_backwards(forward: Sequence[Action], backward: Sequence[Action], warmup: int, delay: int) -> list[Action]:
    """Returns 1F1B with split backward passes: `warmup` forward passes, then a forward pass, a B and a W in turn, the W
    of the backward pass `delay` places before.

    forward, backward: equally many passes, backward passes whole.
    """
    order, count = [*forward[:warmup]], len(forward)
    for k in range(count + delay):
        # Passes beyond the last one drop out: first forward passes, then B's.
        order += [forward[warmup + k]] if warmup + k < count else []
        order += [backward[k]._replace(kind="B")] if k < count else []
        order += [backward[k - delay]._replace(kind="W")] if k >= delay else []
    return order


def v_shape_device(shape: PipelineShape, stage: int) -> int:
    """Returns the device of a stage when stages go down the devices and up again, any number of times."""
    position = stage % (2 * shape.p)
    return min(position, 2 * shape.p - 1 - position)


def passes_in_groups(
    kind: str, stages: Sequence[int], microbatches: int, group: int, slices: Sequence[int] = (0,)
) -> np.ndarray:
    """Returns the passes of a kind of all micro-batches in groups of `group` (the last may be smaller): a group stage
    by stage, its micro-batches slice by slice. The fields of an `ActionArray`."""
    left, parts = microbatches % group, []
    for begin, end, size in ((0, microbatches - left, group), (microbatches - left, microbatches, left)):
        if begin < end:
            fields = np.empty((4, (end - begin) // size, len(stages), size, len(slices)), int)
            fields[0] = np.array(stages)[:, None, None]
            fields[1] = ACTION_KINDS.index(kind)
            fields[2] = np.arange(begin, end).reshape(-1, 1, size, 1)
            fields[3] = slices
            parts.append(fields.reshape(4, -1))
    return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def actions_of(items: Iterable[ScheduleItem]) -> list[Action]:
    """Returns all actions of schedule items; of overlapped passes the forward pass first."""
    if OverlappedPasses not in set(map(type, items := [*items])):
        return items  # type: ignore[return-value]
    return [action for item in items for action in (item if isinstance(item, OverlappedPasses) else (item,))]


def nearest_multiple(value: int, of: int) -> int:
    """Returns the positive multiple of `of` nearest to `value`."""
    return max(1, math.floor(value / of + 0.5)) * of
