"""The timetable of a schedule: the checked orders of all devices, with the dependencies between their actions.

Arrays have an entry for each action, device by device. Actions that run the same task have the same *slot*: stage,
kind, variant (slice, or class of micro-batches), and whether they are the first or last of that kind on the stage
(`scheduling` calls a unit of time a slot). Of two overlapped passes the forward pass leads and the backward pass, the
next action, follows: both are played together, in the place of the leader.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property

import numpy as np

from meshcast.hardware.errors import ScheduleError
from meshcast.hardware.records import dataclass
from meshcast.simulator.program.pipeline_stages import GRADIENT_PASSES, PipelineStages, Slot
from meshcast.simulator.program.rounds import Rounds, find_rounds
from meshcast.simulator.scheduling.batch_loss import coupled_stages, insert_batch_loss
from meshcast.simulator.scheduling.gradient_sums import insert_gradient_sums
from meshcast.simulator.scheduling.no_flush import insert_updates, orders_of_run
from meshcast.simulator.scheduling.order_check import format_orders, incomplete_error
from meshcast.simulator.scheduling.schedule import (
    ACTION_KINDS,
    ACTIVATION_TRANSFERS,
    BATCH_LOSS,
    SHARD_COLLECTIVES,
    Action,
    ActionArray,
    ActionKind,
    OverlappedPasses,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)
from meshcast.simulator.scheduling.vocabulary import find_shards

NUMBER: dict[str, int] = {kind: number for number, kind in enumerate(ActionKind)}
"""The numbers that stand for kinds in arrays."""


@dataclass(frozen=True, eq=False)
class Timetable:
    """Actions numbered device by device, in the order of each device. Sweeps keep the timetables of many plans, so that
    they are arrays of integers; lists of them, and of actions, are made when somebody asks.

    starts: by device, the number of its first action; last, the number of actions.
    fields: stage, kind by its place in `ACTION_KINDS`, micro-batch and slice of every action [4, actions].
    leads: by action, whether it leads an overlapped pair.
    slot_array: by action, its index into `slots`.
    need_array: by action, the result of another stage that it needs, or -1. A result has the number of its action.
    sequence_array: all actions, each after those that it needs.
    stages: the stages of the pipeline.
    further_needs: by action, the results that it needs besides `need`.
    extra_results: by action, the numbers of its result for the second and later stages that need it, after all actions.
    update_interval: micro-batches per update in schedules without a barrier; otherwise 0.
    joined: several pipelines run side by side, see `join_timetables`.
    """

    shape: PipelineShape
    starts: list[int]
    fields: np.ndarray
    leads: np.ndarray
    slots: list[Slot]
    slot_array: np.ndarray
    need_array: np.ndarray
    sequence_array: np.ndarray
    stages: PipelineStages
    further_needs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    extra_results: dict[int, range] = field(default_factory=dict)
    update_interval: int = 0
    joined: bool = False

    @cached_property
    def slot(self) -> list[int]:
        """`slot_array` as a list."""
        return self.slot_array.tolist()

    @cached_property
    def need(self) -> list[int]:
        """`need_array` as a list."""
        return self.need_array.tolist()

    @cached_property
    def sequence(self) -> list[int]:
        """`sequence_array` as a list."""
        return self.sequence_array.tolist()

    @cached_property
    def turns(self) -> list[int]:
        """Number of actions of every slot."""
        return np.bincount(self.slot_array, minlength=len(self.slots)).tolist()

    @cached_property
    def actions(self) -> list[Action]:
        """All actions, device by device."""
        rows = zip(*self.fields.tolist(), strict=True)
        return [Action(stage, ACTION_KINDS[kind], microbatch, piece) for stage, kind, microbatch, piece in rows]

    @cached_property
    def orders(self) -> list[list[ScheduleItem]]:
        """The order of every device, with the updates inside a run."""
        orders: list[list[ScheduleItem]] = []
        leads = self.leads.tolist()
        for begin, end in itertools.pairwise(self.starts):
            order: list[ScheduleItem] = []
            for at in range(begin, end):
                if leads[at]:
                    order.append(OverlappedPasses(self.actions[at], self.actions[at + 1]))
                elif at == begin or not leads[at - 1]:
                    order.append(self.actions[at])
            orders.append(order)
        return orders

    @cached_property
    def device_array(self) -> np.ndarray:
        """The device of every action."""
        return np.repeat(np.arange(self.shape.p, dtype=np.int32), np.diff(self.starts))

    @cached_property
    def device_of(self) -> list[int]:
        """`device_array` as a list."""
        return self.device_array.tolist()

    @cached_property
    def rounds(self) -> Rounds | None:
        """The steady state, if there is any."""
        # A sum of gradients follows the last pass of a stage, so no round has any.
        joins = any(self.slots[self.slot_array[action]].kind != ActionKind.SUM for action in self.further_needs)
        if self.joined or joins or self.extra_results or any(slot.follows for slot in self.slots):
            return None
        return find_rounds(self.shape, self.starts, self.need_array, self.slot_array, self.update_interval)

    @cached_property
    def sequence_by_round(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sequence before the steady state, of its first round, and behind it (`Rounds.split`)."""
        assert self.rounds is not None
        return self.rounds.split(self.sequence_array, self.device_array)

    @cached_property
    def updates(self) -> list[list[int]]:
        """By device, the numbers of the actions that are updates."""
        which = np.array([slot.kind == ActionKind.UPDATE for slot in self.slots], bool)[self.slot_array]
        return [(begin + np.flatnonzero(which[begin:end])).tolist() for begin, end in itertools.pairwise(self.starts)]

    @property
    def results(self) -> int:
        """The number of results."""
        return len(self.slot_array) + sum(map(len, self.extra_results.values()))


def timetable(
    schedule: Schedule,
    shape: PipelineShape,
    durations: PassDurations | None = None,
    update_interval: int = 0,
    orders: Sequence[Sequence[ScheduleItem]] | None = None,
    gradient_sums: bool = True,
) -> Timetable:
    """Makes the timetable of `schedule`.

    durations: of passes, for schedules that ask for them.
    update_interval: micro-batches per update in schedules without a barrier; otherwise 0.
    orders: orders that devices followed at run time, in place of those of the schedule.
    gradient_sums: whether copies of a stage sum their gradients, where the schedule does so during a step.

    Raises PlanError for a shape that the schedule does not support, and ScheduleError, which prints the orders, if an
    action is missing or repeated or if the orders deadlock.
    """
    stated = orders_of_run(schedule, shape, update_interval, durations) if orders is None else orders
    stated = insert_gradient_sums(schedule, shape, stated) if gradient_sums else stated
    stated = insert_batch_loss(schedule, shape, stated) if orders is None else stated
    return _TimetableMaker(schedule, shape, stated, update_interval).build()


def read_fields(order: Sequence[ScheduleItem]) -> np.ndarray:
    """Returns the fields of the actions of an order, as an `ActionArray` has them; an unknown kind has the number
    -1."""
    stages, kinds, microbatches, slices = list(zip(*actions_of(order), strict=True)) or [(), (), (), ()]
    return np.array([stages, [NUMBER.get(name, -1) for name in kinds], microbatches, slices], int)


class _TimetableMaker:
    """Checks orders and finds dependencies.

    pieces: slices of every micro-batch, or parts of it that have separate backward passes.
    action_at: the numbers of actions [stage, kind, micro-batch x piece].
    move_at: those of activation transfers [stage, evict to load, micro-batch x piece, stripe]: where micro-batches are
        whole, the slice of a transfer is the stripe of the activations that it moves.
    """

    def __init__(
        self, schedule: Schedule, shape: PipelineShape, stated: Sequence[Sequence[ScheduleItem]], interval: int
    ) -> None:
        self.schedule, self.shape, self.stated, self.update_interval = schedule, shape, stated, interval
        self.chained = schedule.flush and interval > 0
        self.parts = schedule.backwards_per_forward
        self.pieces = shape.slices * self.parts
        self.orders = [insert_updates(order, interval) for order in stated] if interval else stated
        self.devices = [schedule.device(shape, stage) for stage in range(shape.stages)]
        self.predecessors = [tuple(schedule.predecessors(shape, stage)) for stage in range(shape.stages)]
        self.successors: list[tuple[int, ...]] = [()] * shape.stages
        for stage, others in enumerate(self.predecessors):
            for other in others:
                self.successors[other] = (*self.successors[other], stage)
        self.coupled = coupled_stages(schedule, shape)
        self._read_actions()
        self._number_actions()
        if not self._is_complete():
            raise self._incomplete()
        # One forward pass serves the backward passes of all its parts.
        forward = self._actions(ActionKind.FORWARD)
        forward[:] = np.repeat(forward[:, :: self.parts], self.parts, axis=1)
        self._check_moves()
        self.leads = self._leads()

    def _read_actions(self) -> None:
        """Makes an array of each field of the actions. Raises ScheduleError for a field out of its range."""
        every = [order.fields if isinstance(order, ActionArray) else read_fields(order) for order in self.orders]
        self.starts = [0, *np.cumsum([fields.shape[1] for fields in every]).tolist()]
        self.count = self.starts[-1]
        self.stage, self.kind, self.microbatch, self.slice = np.concatenate(every, axis=1)
        self.moves = self._is(*ACTIVATION_TRANSFERS)
        self.stripe = np.where(self.moves & (self.pieces == 1), self.slice, 0)
        self.unit = self.microbatch * self.pieces + self.slice - self.stripe
        self.owner = np.repeat(np.arange(self.shape.p), np.diff(self.starts))
        self.ranges = [self.schedule.microbatches(self.shape, stage) for stage in range(self.shape.stages)]
        ok = (self.kind >= 0) & (self.stage >= 0) & (self.stage < self.shape.stages)
        ok &= (self.slice >= 0) & (self.slice - self.stripe < self.pieces) & (self.stripe < self.shape.p)
        if ok.all():
            low, high = np.array([r.start for r in self.ranges]), np.array([r.stop for r in self.ranges])
            ok &= (self.microbatch >= low[self.stage]) & (self.microbatch < high[self.stage])
            ok &= (np.array(self.devices)[self.stage] == self.owner) | self._is(ActionKind.KEEP, ActionKind.GIVE_BACK)
        if not ok.all():
            raise self._incomplete()

    def _number_actions(self) -> None:
        """Makes `action_at` and `move_at`."""
        shape, units = self.shape, self.shape.m * self.pieces
        self.action_at = np.full((shape.stages, len(NUMBER), units), -1)
        self.action_at[self.stage, self.kind, self.unit] = np.arange(self.count)
        self.move_at = np.full((shape.stages, 4, units, 1 + int(self.stripe.max(initial=0))), -1)
        moved = self.stage, self.kind - NUMBER[ActionKind.EVICT], self.unit, self.stripe
        self.move_at[tuple(numbers[self.moves] for numbers in moved)] = np.flatnonzero(self.moves)

    def _is_complete(self) -> bool:
        """Returns whether every pass of every micro-batch occurs, and occurs once."""
        shape, has = self.shape, self.action_at >= 0
        transfers = [NUMBER[kind] for kind in ACTIVATION_TRANSFERS]
        placed = has.sum() - has[:, transfers].sum() + (self.move_at >= 0).sum()
        passing = np.zeros((shape.stages, shape.m * self.pieces), bool)
        for stage, microbatches in enumerate(self.ranges):
            passing[stage, microbatches.start * self.pieces : microbatches.stop * self.pieces] = True
        entering = passing & (np.arange(shape.m * self.pieces) % self.parts == 0)
        back = passing & (not shape.forward_only)
        kinds = ActionKind.FORWARD, ActionKind.AHEAD, ActionKind.BACKWARD
        forward, ahead, backward = (self._actions(kind) >= 0 for kind in kinds)
        halves = ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS
        inputs, weights = (self._actions(kind) >= 0 for kind in halves)
        whole = ahead == (entering & ahead.any(axis=1, keepdims=True))
        whole &= (forward == entering) & ((backward ^ inputs) == back) & (weights == inputs)
        updates = shape.p * shape.m // self.update_interval if self.update_interval else 0
        return bool(whole.all() and placed == self.count and np.count_nonzero(self._is(ActionKind.UPDATE)) == updates)

    def _leads(self) -> np.ndarray:
        """Marks the actions that lead an overlapped pair."""
        leads = np.zeros(self.count + 1, bool)
        for order, at, end in zip(self.orders, self.starts, self.starts[1:], strict=False):
            if end - at > len(order):
                for turn in order:
                    leads[at] = isinstance(turn, OverlappedPasses)
                    at += 2 if isinstance(turn, OverlappedPasses) else 1
        return leads[:-1]

    def build(self) -> Timetable:
        need, further_needs, extra_results, sources = self._needs()
        self._need_moves(need, further_needs, sources)
        self._need_gradients(need, further_needs, sources)
        self._need_shards(need, further_needs, sources)
        self._need_host_copies(need, further_needs, sources)
        slots, slot = self._slots()
        sequence = self._sequence(sources)
        stages = PipelineStages(
            self.devices, self._copies(), self.predecessors, self.successors, self.coupled, self.chained, self.parts,
            self.schedule.separates_multiprocessors, dict(self.schedule.stripes(self.shape)),
        )  # fmt: skip
        fields = np.array([self.stage, self.kind, self.microbatch, self.slice], np.int32)
        slots_of, needs, order = (np.array(column, np.int32) for column in (slot, need, sequence))
        return Timetable(
            self.shape, self.starts, fields, self.leads, slots, slots_of, needs, order, stages, further_needs,
            extra_results, self.update_interval,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ needs

    @cached_property
    def _gradient_action(self) -> np.ndarray:
        """Numbers of the actions that compute the gradient of a stage's input [stage, micro-batch x slice]."""
        backward = self._actions(ActionKind.BACKWARD)
        return np.where(backward >= 0, backward, self._actions(ActionKind.INPUT_GRADIENTS))

    def _is(self, *kinds: ActionKind) -> np.ndarray:
        """Returns which actions are of some kinds."""
        mask = np.zeros(self.count, bool)
        for kind in kinds:
            mask |= self.kind == NUMBER[kind]
        return mask

    def _actions(self, kind: ActionKind) -> np.ndarray:
        """Returns the numbers of the actions of a kind [stage, micro-batch x piece]."""
        return self.action_at[:, NUMBER[kind]]

    @cached_property
    def _first_needs(self) -> list[int]:
        """By action, the (first) action on another stage that must precede it; -1: none."""
        need = np.full(self.count, -1)
        coupled = [self.coupled.get(stage, ()) for stage in range(self.shape.stages)]
        for kinds, tables, results in (
            ((ActionKind.FORWARD,), self.predecessors, self._actions(ActionKind.FORWARD)),
            ((ActionKind.AHEAD,), self.predecessors, self._actions(ActionKind.AHEAD)),
            ((ActionKind.LOSS,), coupled, self._actions(ActionKind.OUTPUTS)),
            ((ActionKind.OUTPUT_GRADIENTS,), coupled, self._actions(ActionKind.LOSS)),
            (GRADIENT_PASSES, self.successors, self._gradient_action),
        ):
            first = np.array([others[0] if others else -1 for others in tables])[self.stage]
            need = np.where(self._is(*kinds) & (first >= 0), results[first, self.unit], need)
        if self.chained:
            # An update is an action of the first stage of its device, and stages go down the devices.
            chain = self._is(ActionKind.UPDATE) & (self.stage > 0)
            need = np.where(chain, self._actions(ActionKind.UPDATE)[self.stage - 1, self.unit], need)
        return need.tolist()

    def _needs(self) -> tuple[list[int], dict[int, tuple[int, ...]], dict[int, range], dict[int, tuple[int, ...]]]:
        """Returns `need`, `further_needs`, `extra_results`, and by action the further actions that must precede it."""
        need, further_needs, extra_results = list(self._first_needs), dict[int, tuple[int, ...]](), dict[int, range]()
        more: dict[int, tuple[int, ...]] = {}
        if all(len(others) <= 1 for others in (*self.predecessors, *self.successors)):
            return need, further_needs, extra_results, more
        total = self.count
        down, up = self.predecessors, self.successors
        ways = {NUMBER[kind]: (down, up, self._actions(kind)) for kind in (ActionKind.FORWARD, ActionKind.AHEAD)}
        ways |= {NUMBER[kind]: (up, down, self._gradient_action) for kind in GRADIENT_PASSES}
        passes = np.flatnonzero(np.isin(self.kind, [*ways])).tolist()
        for i in passes:
            if (others := len(ways[self.kind[i]][1][self.stage[i]])) > 1:
                extra_results[i] = range(total, total + others - 1)
                total += others - 1
        for i in passes:
            stage, (takes, gives, numbers) = int(self.stage[i]), ways[self.kind[i]]
            results = []
            for other in takes[stage]:
                at, turn = int(numbers[other, self.unit[i]]), gives[other].index(stage)
                results.append(extra_results[at][turn - 1] if turn else at)
                more[i] = (*more.get(i, ()), at)
            if results:
                need[i], further_needs[i] = results[0], tuple(results[1:])
        return need, {i: others for i, others in further_needs.items() if others}, extra_results, more

    def _check_moves(self) -> None:
        """Checks that every activation transfer has all four actions, with KEEP and GIVE_BACK on a single other
        device."""
        transfers = self.move_at
        some, whole = (transfers >= 0).any(axis=1), (transfers >= 0).all(axis=1)
        kept, returned = self.owner[transfers[:, 1]], self.owner[transfers[:, 2]]
        wrong = np.argwhere(some & ~(whole & (kept == returned) & (kept != np.array(self.devices)[:, None, None])))
        if len(wrong):
            stage, unit, stripe = wrong[0].tolist()
            microbatch, piece = divmod(unit, self.pieces)
            moves = [str(Action(stage, kind, microbatch, piece + stripe)) for kind in ACTIVATION_TRANSFERS]
            rule = f"an activation transfer needs all of {', '.join(moves)}, the second and third on another device"
            remedy = f"Add those that are missing, in this order:\n{format_orders(self.orders, {})}"
            raise ScheduleError(self.schedule.use, rule, remedy)

    def _need_moves(self, need: list[int], rest: dict[int, tuple[int, ...]], more: dict[int, tuple[int, ...]]) -> None:
        """Adds the dependencies of activation transfers: EVICT needs KEEP, GIVE_BACK needs EVICT and LOAD, and the
        backward pass needs GIVE_BACK."""
        for evict in np.flatnonzero(self._is(ActionKind.EVICT)).tolist():
            stage, unit = self.stage[evict], self.unit[evict]
            _, keep, give, load = self.move_at[stage, :, unit, self.stripe[evict]].tolist()
            back = int(self._gradient_action[stage, unit])
            need[evict], more[evict] = keep, (keep,)
            need[give], rest[give], more[give] = evict, (load,), (evict, load)
            more[back] = (*more.get(back, (need[back],)), give)
            if need[back] < 0:
                need[back] = give
            else:
                rest[back] = (*rest.get(back, ()), give)

    def _need_gradients(
        self, need: list[int], rest: dict[int, tuple[int, ...]], more: dict[int, tuple[int, ...]]
    ) -> None:
        """Adds the dependencies of sums of gradients: SUM needs COMPLETE of all copies of its stage."""
        complete: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for action in np.flatnonzero(self._is(ActionKind.COMPLETE)).tolist():
            complete[self.schedule.model_part(self.shape, self.stage[action])] += (action,)
        for action in np.flatnonzero(self._is(ActionKind.SUM)).tolist():
            need[action], *others = more[action] = complete[self.schedule.model_part(self.shape, self.stage[action])]
            rest[action] = tuple(others)

    def _need_shards(self, need: list[int], rest: dict[int, tuple[int, ...]], more: dict[int, tuple[int, ...]]) -> None:
        """Adds the dependencies between layers and the shards of the vocabulary on all devices."""
        shards = find_shards(self.schedule, self.shape)
        if shards is None:
            return
        columns = self.stage.tolist(), self.kind.tolist(), self.microbatch.tolist()
        for number, (stage, kind, microbatch) in enumerate(zip(*columns, strict=True)):
            needed = [need[number]] if need[number] >= 0 else []
            for other, kinds in shards.needs(Action(stage, ACTION_KINDS[kind], microbatch)):
                at = (int(self.action_at[other, NUMBER[each], microbatch]) for each in kinds)
                needed.append(next((action for action in at if action >= 0), -1))
            if -1 in needed:
                raise self._incomplete()
            if needed:
                need[number], *others = more[number] = tuple(needed)
                rest |= {number: tuple(others)} if others else {}

    def _need_host_copies(
        self, need: list[int], rest: dict[int, tuple[int, ...]], more: dict[int, tuple[int, ...]]
    ) -> None:
        """Adds the dependencies of activations in host memory: HOST_FREED and HOST_IN need HOST_OUT, and the backward
        pass needs HOST_IN."""
        for action in np.flatnonzero(self._is(ActionKind.HOST_FREED, ActionKind.HOST_IN)).tolist():
            stage, unit = self.stage[action], self.unit[action]
            out = int(self._actions(ActionKind.HOST_OUT)[stage, unit])
            if out < 0:
                raise self._incomplete()
            need[action], more[action] = out, (out,)
            if self.kind[action] == NUMBER[ActionKind.HOST_IN]:
                back = int(self._gradient_action[stage, unit])
                needed = more.get(back, (need[back],) if need[back] >= 0 else ())
                need[back], *others = more[back] = (*needed, action)
                rest |= {back: tuple(others)} if others else {}

    def _copies(self) -> list[tuple[int, ...]]:
        """Returns for each stage the devices that hold the same part of the model."""
        parts = [self.schedule.model_part(self.shape, stage) for stage in range(self.shape.stages)]
        holders: dict[int, set[int]] = defaultdict(set)
        for part, device in zip(parts, self.devices, strict=True):
            holders[part].add(device)
        return [tuple(sorted(holders[part])) for part in parts]

    def _needs_on_own_stage(self) -> np.ndarray:
        """Returns for each action the last action on its stage that must precede it; -1: none."""
        stage, unit, count = self.stage, self.unit, self.shape.slices
        forwards = self._actions(ActionKind.FORWARD)
        forward, again = forwards[stage, unit], self._actions(ActionKind.RECOMPUTATION)[stage, unit]
        inputs = self._actions(ActionKind.INPUT_GRADIENTS)[stage, unit]
        begins = self._is(ActionKind.FORWARD, ActionKind.KEEP, ActionKind.AHEAD, *BATCH_LOSS, *SHARD_COLLECTIVES)
        others = ActionKind.WEIGHT_GRADIENTS, ActionKind.RECOMPUTATION, ActionKind.LOAD
        needs = [-1, inputs, forward, self.move_at[stage, 0, unit, self.stripe]]
        last = np.select([begins, *map(self._is, others)], needs, np.maximum(forward, again))
        if count > 1:
            # Keys and values come from the slice before, their gradients from the slice after.
            before = np.where(self.slice > 0, forwards[stage, unit - 1], -1)
            following = self._gradient_action[stage, (unit + 1) % forwards.shape[1]]
            behind = np.where(self.slice < count - 1, following, -1)
            of_slices = [self._is(ActionKind.FORWARD), self._is(*GRADIENT_PASSES)]
            last = np.maximum(last, np.select(of_slices, [before, behind], -1))
        return last

    def _sequence(self, more: dict[int, tuple[int, ...]]) -> list[int]:
        """Sorts the actions so that each follows those that it needs. Raises ScheduleError for a deadlock."""
        need = self._first_needs
        waits = self._needs_on_own_stage().tolist()
        for lead in np.flatnonzero(self.leads).tolist():
            # The leader of a pair also waits for what its follower needs.
            of_follower = more.get(lead + 1, (need[lead + 1],))
            more[lead] = (*more.get(lead, ()), *of_follower, waits[lead + 1])
        done = bytearray(self.count + 1)
        done[-1] = 1  # number -1: no dependency
        sequence: list[int] = []
        at, ends = self.starts[:-1], self.starts[1:]
        moved = True
        while moved:
            moved = False
            for device, end in enumerate(ends):
                i = begin = at[device]
                while i < end and done[need[i]] and done[waits[i]]:
                    if i in more and not all(done[j] for j in more[i]):
                        break
                    done[i] = 1
                    i += 1
                if i > begin:
                    sequence.extend(range(begin, i))
                    at[device] = i
                    moved = True
        if len(sequence) < self.count:
            stuck = {d: self._turn(d, at[d]) for d in range(self.shape.p) if at[d] < ends[d]}
            raise ScheduleError(
                self.schedule.use,
                "the order deadlocks: the marked actions wait for each other",
                f"Move them behind those that they need:\n{format_orders(self.orders, stuck)}",
            )
        return sequence

    def _turn(self, device: int, action: int) -> int:
        """Returns the index of an action's item in the order of its device."""
        led = self.leads[self.starts[device] : action]
        return action - self.starts[device] - int(led.sum())

    # ------------------------------------------------------------------------------------------ slots

    def _slots(self) -> tuple[list[Slot], list[int]]:
        kind = self.kind
        first, last = self._first_and_last()
        variant = np.array(self.shape.classes)[self.microbatch] if self.shape.classes else self.slice - self.stripe
        variants = 1 + int(variant.max(initial=0))
        code = (((self.stage * len(NUMBER) + kind) * variants + variant) * 2 + first) * 2 + last
        follows = np.concatenate([[False], self.leads[:-1]]) if self.count else self.leads
        partner = np.where(self.leads, np.roll(code, -1) + 1, 0)
        keeper = np.where(self.moves, self.owner[self.move_at[self.stage, 1, self.unit, self.stripe]], -1)
        # One number that differs between slots.
        code = ((code * (1 + partner.max(initial=0)) + partner) * 2 + follows) * (self.shape.p + 1) + keeper + 1
        _, chosen, slot = np.unique(code, return_index=True, return_inverse=True)

        def make_slot(i: int, led: Slot | None = None) -> Slot:
            plain = int(self.stage[i]), ACTION_KINDS[kind[i]], bool(first[i]), bool(last[i]), int(variant[i])
            return Slot(*plain, led, bool(follows[i]), int(keeper[i]))

        slots = [make_slot(i, make_slot(i + 1) if self.leads[i] else None) for i in chosen.tolist()]
        return slots, slot.reshape(-1).tolist()

    def _first_and_last(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns whether each action is the first, and the last, of its kind on its stage between two updates."""
        numbers, kind = np.arange(self.count), self.kind
        # Gradients of weights are complete after the last pass of either kind that makes them.
        merged = np.where(self._is(ActionKind.WEIGHT_GRADIENTS), NUMBER[ActionKind.BACKWARD], kind)
        merged = np.where(self._is(ActionKind.AHEAD), NUMBER[ActionKind.FORWARD], merged)
        turn = self.stage * len(NUMBER) + merged
        if self.update_interval:
            updates = self._is(ActionKind.UPDATE)
            done = np.cumsum(updates) - updates
            done -= np.repeat(done[self.starts[:-1]], np.diff(self.starts))
            turn += done * self.shape.stages * len(NUMBER)
        first_of, last_of = np.zeros((2, turn.max(initial=0) + 1), int)
        # Where an index occurs several times, the last assignment stays.
        first_of[turn[::-1]], last_of[turn] = numbers[::-1], numbers
        return first_of[turn] == numbers, last_of[turn] == numbers

    def _incomplete(self) -> ScheduleError:
        return incomplete_error(self.schedule, self.shape, self.stated, self.devices, self.pieces)
