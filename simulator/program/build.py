"""Builds the program of a step: tasks and messages for every slot of the timetable, and the optimizer updates.

A unit's fragment is compiled once per kind of pass into a *block*. The blocks of a stage's units, each so many times,
make a *task*; the timetable says which device runs which task when. One device stands for all ranks that execute the
same ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from meshcast.hardware.errors import ScheduleError
from meshcast.hardware.remembered import remember, remembered, remembered_by
from meshcast.simulator.ir.ops import (
    COMPUTE,
    IN_TURN,
    Exchange,
    Fragment,
    HostCopy,
    Memory,
    Op,
    SideOps,
    StageOps,
    Transfer,
    UnitRun,
)
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.program.block import (
    INPUT,
    Block,
    CompiledBlocks,
    Port,
    Price,
    PricedBlock,
    Prices,
    Where,
    concatenate,
    interleave,
    leave_multiprocessors,
    one_op,
    price_block,
    resolve_dependencies,
)
from meshcast.simulator.program.categories import axis_of
from meshcast.simulator.program.memory_profile import CATEGORIES, Growth, update_events
from meshcast.simulator.program.messages import StageEnd, StageMessages
from meshcast.simulator.program.pipeline_stages import Slot
from meshcast.simulator.program.program import EveryStageOps, Program, one_of, variants_of
from meshcast.simulator.program.task import (
    Flow,
    PlaceInStep,
    PricedSideOps,
    Send,
    Task,
    first_kernels,
    make_task,
    price_side_ops,
)
from meshcast.simulator.program.timetable import Timetable
from meshcast.simulator.scheduling.schedule import (
    ACTIVATION_TRANSFERS,
    BATCH_LOSS,
    GRADIENT_SUMS,
    HOST_COPIES,
    SHARD_COLLECTIVES,
    ActionKind,
)

FORWARD = (ActionKind.FORWARD, ActionKind.AHEAD)
"""Kinds of forward passes."""

PASSES = (
    ActionKind.FORWARD,
    ActionKind.AHEAD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENTS,
    ActionKind.WEIGHT_GRADIENTS,
    ActionKind.RECOMPUTATION,
)
"""Kinds of passes through a stage."""

NORM_BYTES = 8
"""Bytes of the sum of the squares of gradients, and whether they are finite."""

MOVING = "pipeline-moves"
"""The stream of activations that go to another device to rest there, and come back."""

SUMS = "pipeline-sums"
"""The stream of sums of gradients among the devices that hold copies of a stage."""

SHARDS = "pipeline-shards"
"""The stream of collectives among the devices that hold shards of the vocabulary."""


def build(
    timetable: Timetable,
    stages: EveryStageOps,
    price: Prices,
    messages: StageMessages | None = None,
    overlap_sends: bool = True,
    updates: Sequence[Fragment] = (),
    host: float = 0.0,
    blocks: CompiledBlocks | None = None,
    growth: Growth | None = None,
) -> Program:
    """Returns the program of a step.

    messages: those between devices; along the axis `pp` by default.
    updates: the optimizer update of every device; played where the timetable says, or behind all passes.
    host: time of the host to launch an op [s].
    blocks: blocks that were compiled before.
    growth: of gradients that have no memory before the backward pass.
    """
    prices = [price] * timetable.shape.p if callable(price) else price
    maker = _Builder(timetable, stages, prices, messages or StageMessages("pp"), updates, host, blocks, growth)
    at_end = () if timetable.update_interval else updates
    tails, meetings = build_updates(at_end, prices, maker.blocks)
    sends, others, received = maker.exchange()
    return Program(timetable, maker.tasks(), sends, received, tails, meetings, overlap_sends, host, others)


Exchanged = tuple[list[Send | None], dict[int, list[Send | None]], list[int]]
"""By slot: messages, the further messages where there are several, and received bytes, as in a `Program`."""


class _Builder:
    """Tasks and messages by slot; equal tasks are built once."""

    def __init__(
        self,
        timetable: Timetable,
        stages: EveryStageOps,
        prices: Sequence[Price],
        messages: StageMessages,
        updates: Sequence[Fragment] = (),
        host: float = 0.0,
        blocks: CompiledBlocks | None = None,
        growth: Growth | None = None,
    ) -> None:
        self.host, self.growth = host, growth
        self.blocks = blocks if blocks is not None else CompiledBlocks()
        self.timetable, self.pipeline = timetable, timetable.stages
        self.stages, self.prices, self.messages = stages, prices, messages
        self.updates = updates
        # Devices whose prices are equal share their tasks.
        self.price_groups = [prices.index(price) for price in prices]
        self.again = any(slot.kind == ActionKind.RECOMPUTATION for slot in timetable.slots)
        self.ahead = {slot.stage for slot in timetable.slots if slot.kind == ActionKind.AHEAD}
        self._nothing = Task((), [], [])
        self._passes: dict[Hashable, Task] = {}

    def stage_ops(self, stage: int, slot: Slot) -> StageOps:
        """Returns the ops of a stage that a slot runs: those of its slice, of its part of the samples, or of its
        class."""
        of_stage = self.stages[stage]
        if isinstance(of_stage, StageOps):
            return of_stage
        return of_stage[
            slot.variant if self.pipeline.backwards_per_forward == 1 else int(slot.kind != ActionKind.FORWARD)
        ]

    def tasks(self) -> list[Task]:
        """Returns the task of every slot, made once for stages that are alike."""
        key = "tasks", self.timetable, self._equal_stages
        slots, places = remember(self.blocks.slots, key, self._group_slots)
        tasks = [self.task(slot) for slot in slots]
        return [tasks[place] for place in places]

    def _group_slots(self) -> tuple[list[Slot], list[int]]:
        """Returns slots of which each stands for those that run the same task, and by slot the place of that which
        stands for it."""
        groups: dict[tuple[int | str, ...] | int, int] = {}
        slots, places = list[Slot](), list[int]()
        for number, slot in enumerate(self.timetable.slots):
            stage, kind, first, last, variant, partner, follows, keeper = slot
            plain = kind in PASSES and partner is None and not follows and keeper < 0
            key = (self._equal_stages[stage], kind, first, last, variant) if plain else number
            if key not in groups:
                groups[key] = len(slots)
                slots.append(slot)
            places.append(groups[key])
        return slots, places

    @cached_property
    def _equal_stages(self) -> tuple[int, ...]:
        """By stage, the first stage whose passes are the same: of the same ops at the same prices.

        When weights are gathered again depends on the order of a stage.
        """
        first: dict[Hashable, int] = {}
        stages = []
        for stage, (stage_ops, device) in enumerate(zip(self.stages, self.pipeline.devices, strict=True)):
            order = stage if any(variant.again for variant in variants_of(stage_ops)) else -1
            key = id(stage_ops), self.price_groups[device], stage in self.ahead, order
            stages.append(first.setdefault(key, stage))
        return tuple(stages)

    def task(self, slot: Slot) -> Task:
        if slot.follows:
            return self._nothing
        if slot.kind in ACTIVATION_TRANSFERS:
            return self._move(slot)
        if slot.kind in GRADIENT_SUMS:
            return self._sum_gradients(slot)
        if slot.kind in BATCH_LOSS:
            return self._batch_loss(slot)
        if slot.kind in SHARD_COLLECTIVES:
            return self._join_shards(slot)
        if slot.kind in HOST_COPIES:
            return self._copy_to_host(slot)
        if slot.partner is None:
            return self._alone(slot)
        return self._pair(self._alone(slot), self._alone(slot.partner), self.pipeline.devices[slot.stage])

    # ---------------------------------------------------------------------------------------- messages

    def exchange(self) -> Exchanged:
        """Returns by slot the message that carries the result, the further ones where there are several, and the bytes
        that it receives. Programs of the same timetable and prices whose stages send as much share them."""
        traits = self.messages.traits([variants_of(stage_ops) for stage_ops in self.stages])
        if traits is None:
            return self._exchange()
        key = "messages", self.timetable, tuple(self.prices), traits
        return remember(self.blocks.slots, key, self._exchange)

    def _exchange(self) -> Exchanged:
        # Slots of the same stage, kind and variant send and receive alike.
        kinds = [(slot.stage, slot.kind, slot.variant) for slot in self.timetable.slots]
        one_of_kind = dict(zip(kinds, self.timetable.slots, strict=True))
        results = {kind: self.sends(slot) for kind, slot in one_of_kind.items()}
        received = {kind: self.received_bytes(slot) for kind, slot in one_of_kind.items()}
        sends = [results[kind] for kind in kinds]
        others = {slot: every[1:] for slot, every in enumerate(sends) if len(every) > 1}
        return [every[0] for every in sends], others, [received[kind] for kind in kinds]

    def sends(self, slot: Slot) -> list[Send | None]:
        """Messages that carry the result of a slot to each stage that needs it; None to a stage on the same device."""
        return [self._send(slot, stage) for stage in self.pipeline.gives_to(slot)] or [None]

    def _send(self, slot: Slot, receiver: int) -> Send | None:
        if not self.pipeline.elsewhere(slot.stage, receiver):
            return None
        stream = (
            "pipeline-backward"
            if slot.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENTS, ActionKind.LOSS)
            else "pipeline-forward"
        )
        work = self._message(slot, slot.stage, receiver)
        ends = self.pipeline.devices[slot.stage], self.pipeline.devices[receiver]
        # What goes from a kind of GPU to another is as slow as the slower.
        price = self.prices[ends[0]](work)
        if self.price_groups[ends[0]] != self.price_groups[ends[1]]:
            price = max(price, self.prices[ends[1]](work), key=lambda priced: priced[0] + priced[2])
        return Send(work, stream, *price, *ends)

    @remembered_by(
        lambda builder, slot, *ends: (
            slot.kind == ActionKind.UPDATE,
            slot.kind in BATCH_LOSS,
            slot.kind in FORWARD,
            *ends,
            slot.variant,
        )
    )
    def _message(self, slot: Slot, sender: int, receiver: int) -> Transfer:
        """Returns the message from a stage to another that carries the result of a slot's kind of action."""
        source, target = (
            StageEnd(stage, self.pipeline.devices[stage], self.stage_ops(stage, slot)) for stage in (sender, receiver)
        )
        if slot.kind == ActionKind.UPDATE:
            return self.messages.plain(NORM_BYTES, source.device, target.device)
        if slot.kind in BATCH_LOSS:
            return self.messages.outputs(source, target)
        return self.messages.results(source, target, slot.kind in FORWARD)

    def received_bytes(self, slot: Slot) -> int:
        """Counts the bytes that a rank receives from other devices before an action of a slot."""
        far = [stage for stage in self.pipeline.takes_from(slot) if self.pipeline.elsewhere(slot.stage, stage)]
        return sum(self._message(slot, stage, slot.stage).nbytes for stage in far)

    # ------------------------------------------------------------------------------------------- tasks

    def _update(self, device: int) -> Task:
        """Returns the update of a device between two of its passes (schedules without a flush).

        It begins when all streams of the device are idle, and they continue when it ends. Collectives over the pipeline
        axis do not wait for other devices. With post-validation the sum of the gradients' norms goes from device to
        device, and weights are updated by the sum so far.
        """
        fragment, price = self.updates[device], self.price_groups[device]
        held = [one_of(stage_ops) for i, stage_ops in enumerate(self.stages) if self.pipeline.devices[i] == device]
        streams = {COMPUTE} | {op.stream for op in fragment.forward}
        for stage_ops in held:
            streams |= {
                op.stream
                for unit_run in stage_ops.unit_runs
                for op in (*unit_run.fragment.forward, *unit_run.fragment.backward)
            }
            streams |= {op.stream for side in (*stage_ops.ahead, *stage_ops.behind) for op in side.ops}
        return self._update_beside(fragment, price, tuple(sorted(streams - {COMPUTE})))

    @remembered
    def _update_beside(self, fragment: Fragment, price: int, streams: tuple[str, ...]) -> Task:
        """Returns an update of devices with equal prices. streams: those that their passes use beside the compute
        stream."""
        begin, copies = _everywhere("begin", streams, []), dict[Op, Op]()
        for op in fragment.forward:
            after = [copies.get(other, other) for other in op.after]
            copies[op] = Op(op.name, op.stream, op.work, after or begin, op.phase)
        ops = [*begin, *copies.values()]
        ops += _everywhere("end", streams, list(ops))
        waits = resolve_dependencies(ops, None, None)[0]
        norm = [i for i, op in enumerate(ops) if op.name == "grad-norm"][-1:] if self.pipeline.chained else []
        entry = tuple(i for i, others in enumerate(waits) if {*norm} & {*others})
        events = update_events(fragment, copies, ops)
        block = Block(ops, waits, (Port(entry, tuple(norm), through=bool(norm)),), events)
        return Task((price_block(block, 1, self.prices[price]),), [], [])

    def _alone(self, slot: Slot) -> Task:
        if slot.kind == ActionKind.UPDATE:
            return self._update(self.pipeline.devices[slot.stage])
        stage_ops = self.stage_ops(slot.stage, slot)
        price = self.price_groups[self.pipeline.devices[slot.stage]]
        # When weights are gathered again depends on the order of a stage.
        order = slot.stage if stage_ops.again else -1
        repeated = stage_ops.batch_loss is not None and slot.stage in self.ahead
        traits = stage_ops, slot.kind, slot.first, slot.last, price, order, repeated
        known = self._passes.get(traits)
        if known is None:
            place = self._place_in_step(slot, stage_ops)
            key = stage_ops, slot.kind, self.prices[price], place, repeated, self.again, self.host, self.growth
            make = partial(self._make_pass, slot, stage_ops, price, place)
            known = self._passes[traits] = remember(self.blocks.tasks, key, make)
        return known

    def _make_pass(self, slot: Slot, stage_ops: StageOps, price: int, place: PlaceInStep) -> Task:
        """Returns a pass of a stage, with its side ops. price: number of the group of devices with equal prices."""
        of_pass, traits = (stage_ops, slot.kind, self.prices[price]), (self.again, self.growth)

        plain = remember(
            self.blocks.tasks, (*of_pass, *traits), lambda: self._share(make_task(*of_pass, self.blocks, *traits))
        )
        if stage_ops.batch_loss is not None:
            plain = self._place_outputs(plain, slot, stage_ops.batch_loss)

        def side_ops(besides: Sequence[SideOps], wanted: bool) -> list[PricedSideOps]:
            return price_side_ops(besides, plain, self.prices[price], self.host, self.blocks) if wanted else []

        if not any(place):
            return self._share(plain)
        task = replace(
            plain,
            ahead=side_ops(stage_ops.ahead, place.first_forward) + side_ops(stage_ops.again, place.gathers_again),
            behind=side_ops(stage_ops.behind, place.last_gradient),
            inputs=plain.inputs + place.allocates(stage_ops),
            results=place.frees(stage_ops) + plain.results,
            marks=first_kernels(plain) if place.gathers_again else plain.marks,
        )
        return task if task.ahead or task.behind else self._share(task)

    def _share(self, task: Task) -> Task:
        """Returns the task without side ops that is equal to `task`, whatever its stage and mesh."""
        shared: Task = remember(self.blocks.equal_tasks, task.traits, lambda: task)
        return shared

    def _place_in_step(self, slot: Slot, stage_ops: StageOps) -> PlaceInStep:
        """Returns which events of a step fall on the actions of a slot, as far as its stage has something to do at
        them."""
        forward = slot.kind in FORWARD
        gradients = slot.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENTS)
        whole = bool(stage_ops.whole_weights or stage_ops.whole_gradients)
        opening = self._kind_that_gathers_again(slot.stage) if stage_ops.again else ""
        return PlaceInStep(
            first_forward=forward and slot.first and (whole or bool(stage_ops.ahead)),
            frees_weights=forward and slot.last and (bool(opening) or self.timetable.shape.forward_only),
            gathers_again=slot.kind == opening and slot.first,
            first_gradient=gradients and slot.first and whole,
            last_gradient=gradients and slot.last and (whole or bool(stage_ops.behind)),
        )

    @remembered
    def _kind_that_gathers_again(self, stage: int) -> str:
        """Returns the kind of the first backward pass of a stage in a step, if there are two or more and all forward
        passes precede it; otherwise weights stay whole between them."""
        table = self.timetable
        numbers = [number for number, slot in enumerate(table.slots) if slot.stage == stage]
        places = np.flatnonzero(np.isin(table.slot_array, numbers)).tolist()
        actions = [(i, table.slots[table.slot_array[i]]) for i in places]
        last = [i for i, slot in actions if slot.kind == ActionKind.FORWARD and slot.last]
        opening = ActionKind.BACKWARD, ActionKind.INPUT_GRADIENTS, ActionKind.RECOMPUTATION
        first = [(i, slot.kind) for i, slot in actions if slot.kind in opening and slot.first]
        whole = ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENTS
        single = any(slot.first and slot.last for _, slot in actions if slot.kind in whole)
        apart = not single and all(f < b for f, (b, _) in zip(last, first, strict=False))
        return first[0][1] if apart and first else ""

    def _place_outputs(self, task: Task, slot: Slot, loss: UnitRun) -> Task:
        """Returns a pass of a stage whose outputs a loss of the batch reads: they stay in memory until the loss, which
        makes room for the gradients of all of them. The outputs of a pass that repeats another are dropped."""
        if slot.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENTS):
            return replace(task, inputs=())
        repeated = slot.kind == ActionKind.FORWARD and slot.stage in self.ahead
        return replace(task, results=((loss.nbytes / self.timetable.shape.m, "activations"),) if repeated else ())

    def _batch_loss(self, slot: Slot) -> Task:
        """Returns one of the three actions of a loss that couples the samples of a batch."""
        loss, price = (
            self.stage_ops(slot.stage, slot).batch_loss,
            self.price_groups[self.pipeline.devices[slot.stage]],
        )
        assert loss is not None
        return self._act_of_loss(loss, slot.kind, price)

    @remembered
    def _act_of_loss(self, loss: UnitRun, kind: str, price: int) -> Task:
        outputs, others = float(loss.nbytes), float(loss.nbytes_in)
        allocated: tuple[Flow, ...] = ()
        freed: tuple[Flow, ...] = ()
        if kind == ActionKind.LOSS:
            blocks = [self.blocks.block(loss, phase, again=False) for phase in ("F", "BW")]
            allocated = (outputs, "workspace"), (others, "activations")
            freed = (outputs, "activations"), (others, "workspace")
        elif kind == ActionKind.OUTPUTS:
            blocks = [one_op(Op("outputs complete"))]
        else:
            adds = Memory("add", 2 * loss.nbytes, loss.nbytes)
            blocks = [one_op(Op("add gradients of outputs", COMPUTE, adds, [], "B"))]
            allocated = freed = ((outputs, "workspace"),)
        parts = tuple(price_block(block, 1, self.prices[price]) for block in blocks)
        return Task(parts, [], [], allocated, freed, [()] * len(parts), [0] * len(parts))

    @remembered_by(lambda builder, slot: (slot.stage, slot.variant, slot.kind, slot.keeper))
    def _move(self, slot: Slot) -> Task:
        """Returns one of the four actions of an activation transfer (BPipe): evict and give back send, keep and load
        receive.

        Each begins at its place in the device's order. A device sends again once its last transfer has arrived, and
        evicts no more before.
        """
        stream, stripe = MOVING, self.pipeline.stripes.get((slot.stage, slot.keeper))
        if stripe is None:
            saved = self._alone(Slot(slot.stage, "F", False, False, slot.variant)).memory.net
            flows = tuple((float(nbytes), name) for nbytes, name in zip(saved, CATEGORIES, strict=True) if nbytes)
        else:
            flows = ((float(stripe.nbytes), "activations"),)
            stream = f"{MOVING} {slot.stage} {slot.keeper}" if stripe.own_links else MOVING
        here, ready = Op("here"), Op("ready", stream)
        if takes := slot.kind in (ActionKind.KEEP, ActionKind.LOAD):
            block = Block([here, ready], [(), (0,)], (Port((), (1,), through=False),), [])
        else:
            ends = (self.pipeline.devices[slot.stage], slot.keeper)[:: 1 if slot.kind == ActionKind.EVICT else -1]
            work = self.messages.plain(round(sum(nbytes for nbytes, _ in flows)), *ends)
            send = Op("evict" if slot.kind == ActionKind.EVICT else "give back", stream, work, phase="B")
            ops = [ready, here, send, Op("arrived", stream)]
            # An eviction makes room for the next pass, which waits for it; what is returned only leaves.
            waits = (0,) if slot.kind == ActionKind.EVICT else ()
            block = Block(ops, [(), waits, (0, 1), (2,)], (Port((2,), (3,), through=False),), [])
        priced = price_block(block, 1, self.prices[self.pipeline.owner(slot)])
        return Task((priced,), [], [], flows if takes else (), () if takes else flows)

    @remembered_by(lambda builder, slot: (slot.stage, slot.variant, slot.kind))
    def _copy_to_host(self, slot: Slot) -> Task:
        """Returns one of the three actions of activations that rest in host memory: a copy there, from its place in the
        device's order on, its end, and the copy back."""
        saved = self._alone(Slot(slot.stage, "F", False, False, slot.variant)).memory.net
        flows = tuple((float(nbytes), name) for nbytes, name in zip(saved, CATEGORIES, strict=True) if nbytes)
        nbytes = round(sum(nbytes for nbytes, _ in flows))
        taken, freed = tuple[Flow, ...](), tuple[Flow, ...]()
        if slot.kind == ActionKind.HOST_FREED:
            block, freed = one_op(Op("copied out", COMPUTE, None, [], "F")), flows
        else:
            back = slot.kind == ActionKind.HOST_IN
            work = HostCopy(nbytes, back, activations=True) if nbytes else None
            phase, taken = "B" if back else "F", flows if back else ()
            copy = Op("copy in" if back else "copy out", IN if back else OUT, work, [], phase)
            block = Block([Op("here", phase=phase), copy], [(), (0,)], (Port((1,), (1,), through=False),), [])
        part = price_block(block, 1, self.prices[self.price_groups[self.pipeline.devices[slot.stage]]])
        return Task((part,), [], [], taken, freed)

    def _sum_gradients(self, slot: Slot) -> Task:
        """Returns one of the two actions of a sum of gradients among the devices that hold a stage."""
        device, stage_ops = self.pipeline.devices[slot.stage], self.stage_ops(slot.stage, slot)
        return self._sum_among(self.pipeline.copies[slot.stage], stage_ops, slot.kind, self.price_groups[device])

    @remembered
    def _sum_among(self, members: tuple[int, ...], stage_ops: StageOps, kind: str, price: int) -> Task:
        """Returns one of the two actions, of devices whose prices are equal.

        Gradients are complete once the last backward pass has run and the data-parallel ranks have reduced them. The
        sum is an all-reduce on a separate stream, for which all devices meet.
        """
        if kind == ActionKind.COMPLETE:
            gradient_ops = [op for unit_run in stage_ops.unit_runs for op in unit_run.fragment.backward]
            gradient_ops += [op for side in stage_ops.behind for op in side.ops]
            streams = sorted({op.stream for op in gradient_ops if axis_of(op) == "dp"})
            ops = [Op("gradients complete", stream, None, [], "U") for stream in (COMPUTE, *streams)]
            port = Port((), tuple(range(len(ops))), through=False)
        else:
            nbytes = stage_ops.shared_gradients
            work = self.messages.all_reduce(nbytes, members) if nbytes else None
            ops, port = [Op("sum gradients", SUMS, work, [], "U")], Port((0,), (0,), through=False)
        block = Block(ops, [()] * len(ops), (port,), [])
        # All devices are in the sum for as long as the slowest.
        part = price_block(block, 1, lambda work: max(self.prices[member](work) for member in members))
        return Task((part,), [], [])

    def _join_shards(self, slot: Slot) -> Task:
        """Returns a collective among the devices that hold shards of the vocabulary: all devices."""
        messages = self.stage_ops(slot.stage, slot).shard_messages
        assert messages is not None
        if slot.kind == ActionKind.SPREAD:
            return self._among_all("broadcast", (messages.shared,), slot.kind)
        return self._among_all(
            "all_reduce", messages.joined if slot.kind == ActionKind.JOIN else messages.gradients, slot.kind
        )

    @remembered
    def _among_all(self, operation: str, every: tuple[int, ...], kind: str) -> Task:
        """Returns collectives among all devices, one behind the other on a stream of their own. every: their bytes."""
        members = range(self.timetable.shape.p)
        phase = "F" if kind == ActionKind.JOIN else "B"
        works = [self.messages.among(operation, nbytes, members) if nbytes else None for nbytes in every]
        ops = [Op(f"{operation} of shards", SHARDS, work if len(members) > 1 else None, [], phase) for work in works]
        block = Block(ops, [()] * len(ops), (Port((0,), (len(ops) - 1,), through=False),), [])
        # All devices are in a collective for as long as the slowest.
        part = price_block(block, 1, lambda work: max(price(work) for price in self.prices))
        received = ((float(every[0]), "buffers"),) if kind == ActionKind.SPREAD and every[0] else ()
        return Task((part,), [], [], received, received)

    @remembered_by(lambda builder, first, second, device: (first, second))
    def _pair(self, first: Task, second: Task, device: int) -> Task:
        """Merges two overlapped tasks, all copies interleaved.

        Raises ScheduleError where both have side ops: their parameter numbers would be ambiguous.
        """
        if (first.ahead or first.behind) and (second.ahead or second.behind):
            rule = "the first forward pass of a stage and the last backward pass of another are one pair"
            raise ScheduleError("pipeline", rule, "Use more micro-batches")
        pair = Task((), first.ahead + second.ahead, first.behind + second.behind, first.inputs + second.inputs)
        pair.results = first.results + second.results
        (one_copy, _), (other_copy, _) = both = self._concatenate(first), self._concatenate(second)
        part, where = self._interleave(one_copy, other_copy, device)
        i = int(bool(second.ahead or second.behind))
        pair.parts, pair.numbers = (part,), [0]
        pair.marks = [_marks_of_pair((first, second)[i], both[i][1], where[i])]
        return pair

    @remembered_by(lambda builder, first, second, device: (first, second))
    def _interleave(
        self, first: PricedBlock, second: PricedBlock, device: int
    ) -> tuple[PricedBlock, tuple[dict[int, int], dict[int, int]]]:
        """Merges two passes; their GEMMs and attention leave multiprocessors to the token exchanges of both."""
        ops = [*first.block.ops, *second.block.ops]
        taken = max((op.work.sms for op in ops if isinstance(op.work, Exchange)), default=0)
        if taken and self.pipeline.separates_multiprocessors:
            first, second = (leave_multiprocessors(part, taken, self.prices[device]) for part in (first, second))
        return interleave(first, second)

    @remembered_by(lambda builder, task: task.parts)
    def _concatenate(self, task: Task) -> tuple[PricedBlock, list[list[Where]]]:
        return concatenate(task.parts)


def _everywhere(what: str, streams: Sequence[str], after: list[Op]) -> list[Op]:
    """Marks that synchronise the compute stream and the others."""
    first = Op(f"update {what}", COMPUTE, None, after, "U")
    return [first, *(Op(first.name, stream, None, [first], "U") for stream in streams)]


def build_updates(
    updates: Sequence[Fragment], prices: Sequence[Price], blocks: CompiledBlocks
) -> tuple[list[Task], list[list[tuple[int, int]]]]:
    """Returns the update of every device, and the collectives over the pipeline axis that devices share.

    In front of each is a mark, whose end is the moment at which a device reaches the collective.
    """
    tasks: list[Task] = []
    meetings: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for device, fragment in enumerate(updates):
        key = fragment, prices[device], len(updates) > 1
        task, met = remember(blocks.updates, key, partial(_update, *key))
        tasks.append(task)
        for meeting, place in met:
            meetings[meeting].append((device, place))
    return tasks, list(meetings.values())


def _update(fragment: Fragment, price: Price, meets: bool) -> tuple[Task, list[tuple[Hashable, int]]]:
    """Returns an update, and the names and places of its collectives with other devices. meets: whether there are
    others."""
    ops: list[Op] = []
    copies: dict[Op, Op] = {}
    met: list[tuple[Hashable, int]] = []
    for op in fragment.forward:
        after = [copies.get(other, other) for other in op.after]
        if meets and op.meeting is not None:
            ops.append(Op(f"arrive {op.name}", op.stream, None, after, op.phase))
            after = ops[-1:]
            met.append((op.meeting, len(ops)))
        launches = op.launches if op.tag == IN_TURN else 1.0
        ops.append(Op(op.name, op.stream, op.work, after, op.phase, launches=launches))
        copies[op] = ops[-1]
    events = update_events(fragment, copies, ops)
    block = Block(ops, resolve_dependencies(ops, None, None)[0], (Port(through=False),), events)
    return Task((price_block(block, 1, price),), [], []), met


def _marks_of_pair(
    task: Task, copies: Sequence[Sequence[Mapping[int, tuple[int, ...]]]], where: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the marks of a pair of passes: those of the task that has side ops.

    copies: by part and copy, for each op of a copy its places in the whole pass.
    where: the places of these in the pair.
    """
    marks: dict[int, tuple[int, ...]] = {}
    for number, (part_marks, part_copies) in enumerate(zip(task.marks, copies, strict=True)):
        for copy, places in enumerate(part_copies):
            for param, marked in enumerate(part_marks, task.copy_of(number, copy)):
                # What a pass waits for before it begins is no place of the pair.
                marks[param] = tuple(where[j] for place in marked for j in places[place] if j != INPUT)
    return tuple(marks[param] for param in range(len(marks)))
