"""Tasks: all ops of an action on a device, and messages between devices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.ops import COMPUTE, Host, Op, SideOps, StageOps, Transfer
from meshcast.simulator.program.block import (
    FREE,
    INPUT,
    SUMS,
    CompiledBlocks,
    Price,
    PricedBlock,
    one_op,
    price_block,
)
from meshcast.simulator.program.categories import KINDS, kind_of
from meshcast.simulator.program.memory_profile import Growth, Profile
from meshcast.simulator.scheduling.schedule import ActionKind

Flow = tuple[float, str]
"""Bytes and memory category of a buffer that enters or leaves a task."""


@dataclass(eq=False)
class PricedSideOps:
    """Priced ops that run in order on a separate stream while a task computes, such as gradient
    reductions, weight gathers and copies; see `simulator.ir.ops.SideOps`.

    params: numbers of the parameters of each op, concatenated.
    starts: index in `params` of the first parameter of each op.
    after: side ops that are issued earlier, and for each op the index of that which it waits for; -1: none.
    """

    ops: list[Op]
    seconds: np.ndarray
    sigma: np.ndarray
    latency: np.ndarray
    params: np.ndarray
    starts: np.ndarray
    after: tuple[PricedSideOps, np.ndarray] | None = None

    @property
    def stream(self) -> str:
        return self.ops[0].stream

    @property
    def lasting(self) -> np.ndarray:
        """Time from the begin of each op until other ops see its result [s]."""
        return self.seconds + self.latency

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of parameters of each op."""
        return np.diff(self.starts, append=len(self.params))

    @cached_property
    def sums(self) -> tuple[int, tuple[float, ...]]:
        """`SUMS` over all ops, behind the place of their kind in `KINDS`."""
        sums = self.seconds.sum(), self.seconds @ self.sigma, self.lasting.sum(), 0.0
        return KINDS.index(kind_of(self.ops[0])), sums

    @cached_property
    def ends(self) -> np.ndarray:
        """Time from the begin of the first op to the end of each op if none waits [s]."""
        return np.cumsum(self.seconds)


@dataclass(eq=False)
class Task:
    """All ops of an action.

    parts: priced blocks that run in order, such as embedding, layers and loss.
    ahead: side ops that the first use of parameters waits for, such as weight all-gathers.
    behind: side ops that wait for gradients, such as gradient reduce-scatters.
    inputs, results: buffers of the inputs and of the results: bytes and memory category.
    marks: for every part and parameter of a copy, the places of its first use or, backward, of the ops that complete
        its gradient.
    numbers: for every part, the number of the first parameter of its first copy.
    forward: copies run in ascending order of parameter numbers; otherwise in descending order.

    Two overlapped passes are a single task, whose block has a port for each pass; the second of the two actions then
    has a task without parts.
    """

    parts: tuple[PricedBlock, ...]
    ahead: list[PricedSideOps]
    behind: list[PricedSideOps]
    inputs: tuple[Flow, ...] = ()
    results: tuple[Flow, ...] = ()
    marks: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    forward: bool = True
    engine_results: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    """What the engine has computed for the task."""

    @property
    def traits(self) -> Hashable:
        """All that a task without side ops is."""
        parts = tuple((part.prices, part.count) for part in self.parts)
        return self.forward, parts, self.inputs, self.results, tuple(self.numbers)

    @cached_property
    def memory(self) -> Profile:
        """The memory profile: the input is allocated at the begin; the result is freed, or passed on, at the end."""
        parts = [(part.block.memory, part.count) for part in self.parts]
        inputs = [(Profile.step(nbytes, category), 1) for nbytes, category in self.inputs]
        results = [(Profile.step(-nbytes, category), 1) for nbytes, category in self.results]
        return Profile.in_series([*inputs, *parts, *results])

    @cached_property
    def ports(self) -> int:
        """Number of passes that are overlapped in this task."""
        return max((len(part.block.ports) for part in self.parts), default=1)

    def copy_of(self, part: int, copy: int) -> int:
        """Returns the number of the first parameter of a copy; copies are counted in the order of execution."""
        place = copy if self.forward else self.parts[part].count - 1 - copy
        return self.numbers[part] + place * len(self.marks[part])

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over all ops of an action, by kind."""
        total = np.zeros((len(KINDS), len(SUMS)))
        for part in self.parts:
            total += part.count * part.sums
        for side in (*self.ahead, *self.behind):
            kind, sums = side.sums
            total[kind] += sums
        return total

    @cached_property
    def host_works(self) -> list[tuple[Host, int]]:
        """Every work of the host with the number of times that it runs in an action."""
        works = [(work, part.count) for part in self.parts for work in part.block.host_works]
        beside = (op.work for side in (*self.ahead, *self.behind) for op in side.ops)
        return works + [*Counter(work for work in beside if isinstance(work, Host)).items()]

    def count_ops(self) -> Iterator[tuple[Op, int]]:
        """Yields every op with the number of times that it runs in an action."""
        for part in self.parts:
            yield from ((op, part.count) for op in part.block.ops)
        for side in (*self.ahead, *self.behind):
            yield from ((op, 1) for op in side.ops)


class PlaceInStep(NamedTuple):
    """What an action does besides its pass, as the first or last of its kind on a stage in a step.

    first_forward: it gathers weights that stay whole.
    frees_weights: it is the last forward pass, after which whole weights are freed.
    gathers_again: it is the first backward pass, and gathers whole weights again.
    first_gradient: it allocates gradients that stay unreduced.
    last_gradient: it reduces them, and frees them and whole weights.
    """

    first_forward: bool = False
    frees_weights: bool = False
    gathers_again: bool = False
    first_gradient: bool = False
    last_gradient: bool = False

    def allocates(self, stage_ops: StageOps) -> tuple[Flow, ...]:
        """Buffers that are allocated at the begin of the action and stay."""
        weights = self.first_forward or self.gathers_again
        return _flows(stage_ops, weights, self.first_gradient)

    def frees(self, stage_ops: StageOps) -> tuple[Flow, ...]:
        """Buffers that are freed at the end of the action."""
        return _flows(stage_ops, self.frees_weights or self.last_gradient, self.last_gradient)


def _flows(stage_ops: StageOps, weights: bool, gradients: bool) -> tuple[Flow, ...]:
    flows = [(float(stage_ops.whole_weights), "parameters")] if weights and stage_ops.whole_weights else []
    flows += [(float(stage_ops.whole_gradients), "gradients")] if gradients and stage_ops.whole_gradients else []
    return tuple(flows)


def first_kernels(task: Task) -> list[tuple[tuple[int, ...], ...]]:
    """Marks by which all parameters of a copy are first used by its first kernel."""
    marks_of_parts = []
    for part, marks in zip(task.parts, task.marks, strict=True):
        kernels = [i for i, op in enumerate(part.block.ops) if op.stream == COMPUTE and op.work is not None]
        marks_of_parts.append((tuple(kernels[:1]),) * len(marks))
    return marks_of_parts


@dataclass(eq=False)
class Send:
    """A priced message that carries the result of a slot's actions from device `source` to device `target`."""

    work: Transfer
    stream: str
    seconds: float
    sigma: float
    latency: float
    source: int
    target: int

    @cached_property
    def backward(self) -> bool:
        """Whether it leaves by the port of messages that go backward."""
        return self.stream == "pipeline-backward"


def make_task(
    stage_ops: StageOps,
    kind: str,
    price: Price,
    blocks: CompiledBlocks,
    again: bool = True,
    growth: Growth | None = None,
) -> Task:
    """Makes the task of a pass of a stage, without side ops.

    kind: F, BW, B, W, R, or the F whose output alone is kept (AHEAD).
    blocks: blocks that were compiled before, also at these prices.
    again: recomputation has separate actions (R).
    growth: see `CompiledBlocks.block`.
    """
    forward = kind in (ActionKind.FORWARD, ActionKind.AHEAD)
    counts = [unit_run.count * len(unit_run.fragment.params) for unit_run in stage_ops.unit_runs]
    unit_runs = list(zip(stage_ops.unit_runs, accumulate(counts, initial=0), strict=False))
    parts: list[PricedBlock] = []
    task = Task((), [], [], forward=forward)
    for unit_run, start in unit_runs if forward else reversed(unit_runs):
        block = blocks.block(unit_run, kind, again, growth)
        parts.append(PricedBlock(blocks.price(block, price), unit_run.count))
        task.marks.append(block.marks(unit_run.fragment.params, forward))
        task.numbers.append(start)
    inputs, results = _bytes_at_ends(stage_ops, kind)
    category = "activations" if forward else "workspace"
    task.inputs, task.results = ((inputs, category),) if inputs else (), ((results, category),) if results else ()
    if growth is not None and growth.freed and kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENTS):
        gradients = sum(count * growth(param) for param, count in stage_ops.params() if param.trained)
        task.results += ((gradients, "gradients"),)
    if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENTS):
        task.results += stage_ops.held
    if stage_ops.shard_messages is not None and stage_ops.unit_runs[-1].residual_out is None:
        _join_output_shards(task, parts, kind, price)
    if kind == ActionKind.INPUT_GRADIENTS and inputs and not any(part.block.ops for part in parts):
        # The weight gradients that follow need what arrives, also where no input gradient is computed of it.
        parts.insert(0, price_block(one_op(Op("gradient arrives", COMPUTE, None, [], "B")), 1, price))
        task.marks.insert(0, ())
        task.numbers.insert(0, 0)
    task.parts = tuple(parts)
    return task


def _join_output_shards(task: Task, parts: list[PricedBlock], kind: str, price: Price) -> None:
    """Adds marks to a pass of a shard of the output layer, whose parts are `parts`: no gradient arrives at it, but it
    needs what all shards have summed up; and collectives follow the whole pass."""
    if kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENTS):
        parts.insert(0, price_block(one_op(Op("sums arrive", COMPUTE, None, [], "B")), 1, price))
        task.marks.insert(0, ())
        task.numbers.insert(0, 0)
    if kind != ActionKind.WEIGHT_GRADIENTS:
        phase = "F" if kind == ActionKind.FORWARD else "B"
        parts.append(price_block(one_op(Op("shard computed", COMPUTE, None, [], phase)), 1, price))
        task.marks.append(())
        task.numbers.append(0)


def _bytes_at_ends(stage_ops: StageOps, kind: str) -> tuple[float, float]:
    """Returns the bytes of the input and of the result of a pass of a stage."""
    if kind in (ActionKind.WEIGHT_GRADIENTS, ActionKind.RECOMPUTATION):
        return 0, 0
    first, last = stage_ops.unit_runs[0], stage_ops.unit_runs[-1]
    begin, end = first.nbytes_in if first.residual_in else 0, last.nbytes if last.residual_out else 0
    if kind in (ActionKind.FORWARD, ActionKind.AHEAD):
        return begin, end
    # Nothing comes back to a stage of frozen layers, nor to those before a stage that ends with them.
    return end * bool(last.fragment.backward), begin * (first.residual_in in first.fragment.grad_exit)


def price_side_ops(
    besides: Sequence[SideOps], task: Task, price: Price, host: float, blocks: CompiledBlocks
) -> list[PricedSideOps]:
    """Returns the side ops at their prices. Those formed at run time (bucketing by time) see the gradients of the task
    played alone.

    blocks: side ops that were priced before.
    """
    if any(each.formed for each in besides):
        formed = [side for each in besides for side in (each.formed(_ready(task, host)) if each.formed else [each])]
        return _price_in_order(formed, price)
    priced: list[PricedSideOps] = remember(blocks.sides, (*besides, price), lambda: _price_in_order(besides, price))
    return [*priced]


def _price_in_order(besides: Sequence[SideOps], price: Price) -> list[PricedSideOps]:
    """Returns side ops at their prices, each of which may wait for earlier ones."""
    sides: dict[SideOps, PricedSideOps] = {}
    for side_ops in besides:
        sides[side_ops] = side = price_side(side_ops, price)
        side.after = (sides[side_ops.after[0]], side_ops.after[1]) if side_ops.after else None
    return list(sides.values())


def _ready(task: Task, host: float) -> np.ndarray:
    """Returns when the gradient of every parameter is complete, by its number, if the task begins at 0 [s]."""
    ready = np.zeros(sum(part.count * len(marks) for part, marks in zip(task.parts, task.marks, strict=True)))
    free: dict[str, float] = defaultdict(float)
    issued = arrived = 0.0
    for number, part in enumerate(task.parts):
        block, marks = part.block, task.marks[number]
        (port,) = block.ports
        for copy in range(part.count):
            seen = list[float]()
            for i, op in enumerate(block.ops):
                issued += host * op.issued
                waits = (seen[j] for j in block.after[i])
                begin = max(
                    free[op.stream], issued if op.issued else 0.0, arrived if i in port.entry else 0.0, *waits, 0.0
                )
                free[op.stream] = begin + part.seconds[i]
                seen.append(free[op.stream] + part.latency[i])
            for at, places in enumerate(marks, task.copy_of(number, copy)):
                ready[at] = max((arrived if place == INPUT else seen[place] for place in places), default=0.0)
            arrived = max((seen[place] for place in port.exit), default=0.0 if not port.through else arrived)
    return ready


def price_side(beside: SideOps, price: Price) -> PricedSideOps:
    """Returns side ops that wait for no others at their prices."""
    known = {op: price(op.work) if op.work else FREE for op in dict.fromkeys(beside.ops)}
    seconds, sigma, latency = np.array([known[op] for op in beside.ops]).T
    latency = latency + np.array(beside.waits) if len(beside.waits) else latency
    return PricedSideOps(beside.ops, seconds, sigma, latency, beside.params, beside.starts)
