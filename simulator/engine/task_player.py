"""Plays a program action by action with the (max,+) matrices of its tasks, and skips rounds of a steady state.

The state of a device is the vector of times at which its streams become free. For most actions two of them suffice, the
compute stream's and one other's, since streams that are never free later than the compute stream are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, sub
from typing import TypeVar

import numpy as np

from meshcast.simulator.engine.longest_path import OpTimes, longest_path
from meshcast.simulator.engine.maxplus import NEVER, CompactMatrix, Coordinates
from meshcast.simulator.program.flatten import FlatProgram, flatten_updates
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.rounds import Repetition, Rounds
from meshcast.simulator.program.task import Task


@dataclass
class Times:
    """Times of all actions by number [s]; see `Play`."""

    entry: list[float]
    beside: list[float]
    arrival: list[float]
    sent: list[float]
    full: dict[int, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Play:
    """A step played by matrices: the state before every action, from which all other times follow. Times are in s.

    played: times of actions; those that the repetition stands for are filled in once somebody asks.
    second: coordinate of one further stream that matters (None: no such stream).
    host: by action, when the host began to launch it.
    sent_extra: by number of an extra result (`Timetable.extra_results`), when its send began.
    tail: times of the ops of the updates; tail_ops: these ops.
    span: end of the last op.
    repetition: rounds whose times are those of earlier rounds, shifted.
    """

    played: Times
    second: int | None
    host: list[float]
    sent_extra: dict[int, float]
    tail: OpTimes
    tail_ops: FlatProgram
    span: float
    repetition: Repetition | None

    @property
    def skipped(self) -> int:
        """Number of actions whose times are those of earlier rounds, shifted."""
        return self.repetition.skipped if self.repetition else 0

    @cached_property
    def entry(self) -> list[float]:
        """By action, when the compute stream became free."""
        return self._complete(self.played.entry)

    @cached_property
    def beside(self) -> list[float]:
        """By action, when the stream `second` became free."""
        return self._complete(self.played.beside)

    @cached_property
    def arrival(self) -> list[float]:
        """By action, when its input arrived."""
        return self._complete(self.played.arrival)

    @cached_property
    def sent(self) -> list[float]:
        """By action, when the send of its result began."""
        return self._complete(self.played.sent)

    @cached_property
    def full(self) -> dict[int, Sequence[float]]:
        """The whole state before an action, where further coordinates matter."""
        if self.repetition:
            self.repetition.fill_states(self.played.full)
        return self.played.full

    def _complete(self, log: list[float]) -> list[float]:
        if self.repetition:
            self.repetition.fill(log)
        return log


def play(program: Program, coordinates: Coordinates, skip: bool = True) -> Play:
    """Plays a program action by action. skip: jump over rounds that are proven to repeat."""
    return _Player(program, coordinates).run(skip)


def states(coordinates: Coordinates, task: Task, play: Play, actions: Sequence[int]) -> np.ndarray:
    """Returns the states before `actions`, all of one task [coordinates, actions], without the host.

    Arrivals that cannot delay the task are `NEVER`.
    """
    found = np.full((coordinates.size, len(actions)), NEVER)
    port, host = coordinates.port, coordinates.host
    found[0] = [play.entry[action] for action in actions]
    if play.second is not None:
        found[play.second] = [play.beside[action] for action in actions]
    found[port] = [play.arrival[action] for action in actions]
    for i, action in enumerate(actions):
        if (given := play.full.get(action)) is not None:
            found[:, i] = given
    if host is not None:
        found[host] = NEVER
    if coordinates.patient(task):
        rows = found[coordinates.ports]
        rows[rows <= found[0]] = NEVER
    return found


T = TypeVar("T")


class _Player:
    def __init__(self, program: Program, coordinates: Coordinates) -> None:
        self.program, self.axes, self.table = program, coordinates, program.timetable
        count, size = len(self.table.slot), coordinates.size
        matrices: dict[Task, np.ndarray] = {}
        for task in program.tasks:
            if task not in matrices:
                matrices[task] = coordinates.matrix(task)
        self.matrices = [matrices[task] for task in program.tasks]
        used = {task: self._used_streams(task) for task in matrices}
        self.used = [used[task] for task in program.tasks]
        self.computes = [0 in streams for streams in self.used]
        follow = [s for s in coordinates.inside if self._follows_everywhere(s)]
        rest = [s for s in coordinates.inside if s not in follow]
        self.second = rest[0] if len(rest) == 1 else None
        self.plain = len(rest) <= 1
        """Whether the compute stream and at most one other determine the state of a device."""
        self.left_out = follow
        # Which entries matter depends on the task, and on whether its result is sent.
        keys = [(task, send is not None) for task, send in zip(program.tasks, program.sends, strict=True)]
        compact = {key: self._compact_matrix(*key) for key in dict.fromkeys(keys)}
        self.compact = [compact[key] for key in keys]
        self.log = Times([NEVER] * count, [NEVER] * count, [NEVER] * count, [NEVER] * count)
        self.result = [NEVER] * self.table.results
        self.second_result = [NEVER] * program.devices
        """By device, when the result of the second pass of an overlapped pair exists."""
        self.follows = [slot.follows for slot in self.table.slots]
        self.sent_extra: dict[int, float] = {}
        """By number of the extra result, when its send began."""
        self.free = [0.0] * program.devices
        self.free_second = [0.0 if self.second is not None else NEVER] * program.devices
        self.uses_second = [self.second in used for used in self.used]
        self.state = [[NEVER if i in follow else 0.0 for i in range(size)] for _ in range(program.devices)]
        self.ports = [0.0] * (2 * program.devices)
        """When the send streams of every device become free: forward, backward."""
        self.seen = list(self.ports)
        self.waiting = [NEVER] * program.devices
        self.issue, self.host, self.hosted = self._host()
        self.bound: set[int] = set()
        """Actions that waited for the host."""

    def _used_streams(self, task: Task) -> list[int]:
        def find() -> list[int]:
            inside = set[str]().union(*(part.block.streams for part in task.parts))
            return sorted(self.axes.at[s] for s in inside.union(side.stream for side in (*task.ahead, *task.behind)))

        return self._once(task, "used", find)

    def _once(self, task: Task, what: Hashable, make: Callable[[], T]) -> T:
        """Returns what follows from a task and the coordinates alone, computed once and kept with the task."""
        key = what, self.axes.key
        if key not in task.engine_results:
            task.engine_results[key] = make()
        found: T = task.engine_results[key]
        return found

    def _host(self) -> tuple[list[float], list[float], list[float]]:
        """Returns the host's launch time of each task, by slot; when it begins to launch each action; and when it has
        launched all actions of each device.
        """
        if self.axes.host is None:
            return [0.0] * len(self.program.tasks), [0.0] * len(self.table.slot), [0.0] * self.program.devices
        each = np.array([matrix[self.axes.host, self.axes.host] for matrix in self.matrices])
        tasks = each.tolist()
        for slot, _ in self.program.sent:
            each[slot] += self.axes.launch
        bounds, took = self.table.starts, each[self.table.slot_array]
        if len(lengths := {*map(sub, bounds[1:], bounds)}) == 1:  # all devices at once
            ends = np.cumsum(took.reshape(-1, *lengths), axis=1)
            begins = np.zeros_like(ends)
            begins[:, 1:] = ends[:, :-1]
            return tasks, begins.ravel().tolist(), ends[:, -1].tolist()
        each_end = [np.cumsum(took[a:b]) for a, b in itertools.pairwise(bounds)]
        each_begin = [np.concatenate([[0.0], end[:-1]]) for end in each_end]
        return tasks, np.concatenate(each_begin).tolist(), [float(end[-1]) for end in each_end]

    def _follows_everywhere(self, s: int) -> bool:
        """Whether stream `s` is never free later than the compute stream when a task begins, and can be left out.

        By induction this holds if in every task the stream delays no op more than the compute stream does when both
        become free at the same time (columns), and the task ends no later on it than on the compute stream (rows).
        """
        sides = (side for task in self.program.tasks for side in (*task.ahead, *task.behind))
        if self.axes.streams[s] in {side.stream for side in sides}:
            return False
        distinct = {task.parts: task for task in self.program.tasks}
        return all(self._follows(task, s) for task in distinct.values())

    def _follows(self, task: Task, s: int) -> bool:
        return self._once(task, ("follows", s), lambda: self.axes.parts_follow(task.parts, s))

    def _compact_matrix(self, task: Task, sends: bool) -> CompactMatrix | None:
        """Returns the `CompactMatrix` of a task; None if further streams matter. sends: whether its result is sent."""
        if not self.plain or task.ahead or task.behind or not task.parts or task.ports > 1:
            return None
        axes, second = self.axes, self.second
        key = "compact", second, sends
        return self._once(task, key, lambda: axes.choose_entries(axes.matrix(task), second, sends))

    def run(self, skip: bool) -> Play:
        rounds = self.table.rounds if skip else None
        if rounds is None:
            self.advance(self.table.sequence)
            return self._finish_times(None)
        return self._finish_times(self._in_rounds(rounds))

    def advance(self, actions: Sequence[int]) -> None:
        """Plays `actions`, in which each one follows the actions that it needs."""
        if self.simple:
            self._advance_simply(actions)
        else:
            self._advance_generally(actions)

    @cached_property
    def simple(self) -> bool:
        """Whether devices go on while they send, and every action needs one result and makes one, of one stream."""
        table = self.table
        joins = table.further_needs or table.extra_results or any(self.follows)
        return self.program.overlap_sends and self.second is None and not joins

    @cached_property
    def _sent_by_slot(self) -> list[tuple[int, float, float, float] | None]:
        """By slot, the send of its result: its stream (0: forward, 1: backward), seconds, latency, and the time in
        which the host launches the task before it; None without a send."""
        return [
            (int(send.stream == "pipeline-backward"), send.seconds, send.latency, issue) if send else None
            for send, issue in zip(self.program.sends, self.issue, strict=True)
        ]

    def _advance_simply(self, actions: Sequence[int]) -> None:
        """Plays `actions` of a `simple` program: the same as in general, with fewer questions for each."""
        slot, need, device_of, compact, sends = (
            self.table.slot,
            self.table.need,
            self.table.device_of,
            self.compact,
            self._sent_by_slot,
        )
        entry, arrival, sent, result = self.log.entry, self.log.arrival, self.log.sent, self.result
        free, host, ports, seen = self.free, self.host, self.ports, self.seen
        launch = self.axes.launch if self.axes.host is not None else NEVER
        for action in actions:
            device, kind, other = device_of[action], slot[action], need[action]
            arrival[action] = come = result[other] if other >= 0 else NEVER
            entry[action] = now = free[device]
            numbers = compact[kind]
            if numbers is not None and now - host[action] >= numbers[0]:
                _, after, late, made, made_late = numbers
                after, late = now + after, come + late
                free[device] = after if after > late else late
                made, made_late = now + made, come + made_late
                if made_late > made:
                    made = made_late
            else:
                made = self._advance_fully(action, device, kind, now, come, NEVER)
            if (send := sends[kind]) is None:
                result[action] = made
            else:
                backward, seconds, latency, issue = send
                port = 2 * device + backward
                if ports[port] > made:
                    made = ports[port]
                if (issued := host[action] + issue + launch) > made:
                    made = issued
                    self.bound.add(action)
                sent[action] = made
                ports[port] = end = made + seconds
                seen[port] = result[action] = end + latency

    def _advance_generally(self, actions: Sequence[int]) -> None:
        slot, need, device_of = self.table.slot, self.table.need, self.table.device_of
        entry, arrival, beside, sent = self.log.entry, self.log.arrival, self.log.beside, self.log.sent
        compact, result, free, free_second = self.compact, self.result, self.free, self.free_second
        host, waiting, sends, ports = self.host, self.waiting, self.program.sends, self.ports
        overlap, second = self.program.overlap_sends, self.second
        computes, uses_second, issue, bound, launches = (
            self.computes,
            self.uses_second,
            self.issue,
            self.bound,
            self.axes.host is not None,
        )
        launch, further_needs, extra_results, follows, seen = (
            self.axes.launch,
            self.table.further_needs,
            self.table.extra_results,
            self.follows,
            self.seen,
        )
        for action in actions:
            device, kind = device_of[action], slot[action]
            other = need[action]
            come = result[other] if other >= 0 else NEVER
            if action in further_needs:
                come = max(come, *(result[other] for other in further_needs[action]))
            now, wait = free[device], waiting[device]
            if not overlap:
                if wait > now:
                    now = wait
            entry[action], arrival[action] = now, come
            if second is not None:
                also_free = free_second[device]
                if not overlap and uses_second[kind] and wait > also_free:
                    also_free = wait
                beside[action] = also_free
            numbers = compact[kind]
            # An action that computes nothing passes the wait on to the next one.
            waiting[device] = NEVER if computes[kind] else wait
            if numbers is not None and now - host[action] >= numbers[0]:
                a, b = now + numbers[1], come + numbers[2]
                after = a if a > b else b
                a, b = now + numbers[3], come + numbers[4]
                made = a if a > b else b
                if second is not None:
                    after, made = max(after, also_free + numbers[5]), max(made, also_free + numbers[6])
                    free_second[device] = max(now + numbers[7], come + numbers[8], also_free + numbers[9])
                free[device] = after
            elif follows[kind]:
                made = self.second_result[device]
            else:
                made = self._advance_fully(action, device, kind, now, come, wait)
            send = sends[kind]
            if send is None:
                result[action] = made
            else:
                port = 2 * device + (send.stream == "pipeline-backward")
                begin = ports[port] if ports[port] > made else made
                if launches and (issued := host[action] + issue[kind] + launch) > begin:
                    begin = issued
                    bound.add(action)
                sent[action] = begin
                ports[port] = end = begin + send.seconds
                seen[port] = result[action] = end + send.latency
                if not overlap:
                    waiting[device] = max(waiting[device], seen[port])
            if action in extra_results:
                self._send_others(action, device, kind, made)

    def _send_others(self, action: int, device: int, slot: int, made: float) -> None:
        """Sends a result to all stages that need it but the first."""
        issued = self.host[action] + self.issue[slot] if self.axes.host is not None else NEVER
        issued += self.axes.launch if self.program.sends[slot] is not None else 0.0
        for at, send in zip(self.table.extra_results[action], self.program.others[slot], strict=True):
            self.result[at] = made
            if send is not None:
                issued += self.axes.launch
                port = 2 * device + (send.stream == "pipeline-backward")
                self.sent_extra[at] = begin = max(self.ports[port], made, issued)
                self.ports[port] = begin + send.seconds
                self.seen[port] = self.result[at] = self.ports[port] + send.latency
                if not self.program.overlap_sends:
                    self.waiting[device] = max(self.waiting[device], self.seen[port])

    def _advance_fully(self, action: int, device: int, slot: int, now: float, come: float, wait: float) -> float:
        """Plays one action with the whole matrix of its task and returns when its result exists."""
        axes, state, task = self.axes, self.state[device], self.program.tasks[slot]
        given = state.copy()
        given[0] = now
        used = self.used[slot]
        for i in used if wait > NEVER else ():
            given[i] = max(given[i], wait)
        if axes.host is not None:
            given[axes.host] = self.host[action]
        given[axes.ports] = [NEVER] * (axes.size - axes.port)
        given[axes.port] = come
        if task.ports > 1:
            needs = (self.table.need[action + 1], *self.table.further_needs.get(action + 1, ()))
            given[axes.port + 1] = max(self.result[need] if need >= 0 else NEVER for need in needs)
        for i in self.left_out:
            given[i] = NEVER
        if self.second is not None:
            given[self.second] = self.log.beside[action]
        self.log.full[action] = given
        # A few plain numbers take less time than an array of them.
        rows: list[list[float]] = self._once(task, "rows", self.matrices[slot].tolist)
        out = [max(map(add, row, given)) for row in rows]
        if (h := axes.host) is not None:
            launched = given[h]
            for i, (row, latest) in enumerate(zip(rows, out, strict=True)):
                if i != h and row[h] + launched == latest > NEVER:
                    self.bound.add(action)
                    break
        self.free[device] = out[0]
        for i in used:
            if i:
                state[i] = out[i]
        if self.second is not None:
            self.free_second[device] = out[self.second]
        self.second_result[device] = out[-1]
        return out[axes.port]

    # ----------------------------------------------------------------------------------------- rounds

    def _in_rounds(self, rounds: Rounds) -> Repetition | None:
        before, once, behind = self.table.sequence_by_round
        self.advance(before.tolist())
        states = [self._snapshot(rounds, 0)]
        done, repetition = 0, None
        while done < rounds.count:
            self.advance((once + done * rounds.length).tolist())
            done += 1
            if repetition:
                continue
            states.append(self._snapshot(rounds, done))
            period, shift = self._period(rounds, done, states)
            if period and (times := (rounds.count - done) // period):
                starts = [begin + done * rounds.length for begin in rounds.first]
                repetition = Repetition(starts, period * rounds.length, shift, times)
                done += times * period
                left = [once + i * rounds.length for i in range(done, rounds.count)]
                self._repeat(repetition, states[-1] != states[-1 - period], np.concatenate([*left, behind]))
        self.advance(behind.tolist())
        return repetition

    def _snapshot(self, rounds: Rounds, done: int) -> np.ndarray:
        """Returns all times on which later rounds depend, after `done` rounds."""
        waiting = [self.result[i + done * rounds.length] for i in rounds.waiting]
        streams = self.free, self.free_second, self.waiting, self.ports, *self.state, waiting
        return np.array(list(itertools.chain.from_iterable(streams)))

    def _period(self, rounds: Rounds, done: int, snapshots: Sequence[np.ndarray]) -> tuple[int, float]:
        """Returns the number of rounds after which all changing times have shifted by one amount, and that shift [s].

        The number is 0 if there is none yet. Times that do not change are of streams that the rounds do not use. The
        host may shift by less where no action waited for it; otherwise it must shift by the same amount.
        """
        last = snapshots[-1]
        for period in range(1, min(len(snapshots), self.program.devices + 1)):
            before = snapshots[-1 - period]
            moved = last != before
            steps = last[moved] - before[moved]
            if not len(steps) or not np.isfinite(steps).all() or np.ptp(steps) > 1e-12 * last[moved].max():
                continue
            shift, span = float(np.sort(steps)[len(steps) // 2]), period * rounds.length  # they differ by rounding
            for begin in rounds.first:
                end = begin + done * rounds.length
                took = self.host[end] - self.host[end - span]
                near = any(action in self.bound for action in range(end - span, end))
                if took > shift * (1 + 1e-12) or (near and took < shift * (1 - 1e-12)):
                    break
            else:
                return period, shift
        return 0, 0.0

    def _repeat(self, repetition: Repetition, moved: np.ndarray, left: np.ndarray) -> None:
        """Advances the state to the end of a repetition.

        moved: which times of a snapshot change in it. left: the actions that are still to be played.
        """
        further = itertools.chain.from_iterable(self.table.further_needs.get(action, ()) for action in left.tolist())
        needed = self.table.need_array[left], np.array([*further], int) if self.table.further_needs else left[:0]
        repetition.fill_some(self.result, np.concatenate(needed))
        devices, size, whole = self.program.devices, self.axes.size, repetition.times * repetition.shift
        move = (moved * whole).tolist()
        self.free = list(map(add, self.free, move))
        self.free_second = list(map(add, self.free_second, move[devices:]))
        self.waiting = list(map(add, self.waiting, move[2 * devices :]))
        self.ports = list(map(add, self.ports, move[3 * devices :]))
        self.seen = list(map(add, self.seen, move[3 * devices :]))
        self.state = [list(map(add, one, move[5 * devices + i * size :])) for i, one in enumerate(self.state)]

    def _finish_times(self, repetition: Repetition | None) -> Play:
        program, axes = self.program, self.axes
        streams = len(axes.streams)
        ends, begins = [], []
        for device in range(program.devices):
            own = [self.free[device], self.free_second[device], *self.state[device][1:streams]]
            ends += own
            begins.append(max(*own, *self.seen[2 * device : 2 * device + 2]))
        flat = flatten_updates(program)
        tail = longest_path(flat, {key: begins[key[0]] for key in flat.queues}, self.hosted)
        span = float(max(*ends, *self.ports, tail.span))
        return Play(self.log, self.second, self.host, self.sent_extra, tail, flat, span, repetition)
