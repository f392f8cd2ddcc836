"""Plays a program action by action with the (max,+) matrices of its tasks, and skips rounds of a steady state.

The state of a device is the vector of times at which its streams become free. For most actions two of them suffice, the
compute stream's and another's, since streams that are never free later than the compute stream are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import field
from functools import cached_property
from operator import add, sub
from typing import TypeVar

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.engine.longest_path import OpTimes, longest_path
from meshcast.simulator.engine.maxplus import NEVER, CompactMatrix, Coordinates
from meshcast.simulator.program.flatten import FlatProgram, flatten_updates
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.rounds import Repetition, Rounds
from meshcast.simulator.program.task import Send, Task


@dataclass
class Times:
    """Times of all actions by number [s].

    entry: when the compute stream became free.
    beside: when the stream `Play.second` became free.
    arrival: when the input arrived.
    sent: when the send of the result began.
    full: the whole state before an action, where further coordinates matter.
    """

    entry: list[float]
    beside: list[float]
    arrival: list[float]
    sent: list[float]
    full: dict[int, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceTimes:
    """Times of the actions of a device [s], in their order; see `Times`.

    first: number of its first action.
    host: when the host began to launch each.
    """

    first: int
    entry: np.ndarray
    beside: np.ndarray
    arrival: np.ndarray
    sent: np.ndarray
    host: np.ndarray


@dataclass(frozen=True)
class Play:
    """A step played by matrices: the state before every action, from which all other times follow. Times are in s.

    starts: by device, the number of its first action; last, the number of actions.
    played: times of actions; those that the repetition stands for are not filled in.
    second: coordinate of a further stream that matters (None: no such stream).
    host: by action, when the host began to launch it.
    sent_extra: by number of an extra result (`Timetable.extra_results`), when its send began.
    tail: times of the ops of the updates.
    tail_ops: these ops.
    span: end of the last op.
    repetition: rounds whose times are those of earlier rounds, shifted.
    """

    starts: Sequence[int]
    played: Times
    second: int | None
    host: np.ndarray
    sent_extra: dict[int, float]
    tail: OpTimes
    tail_ops: FlatProgram
    span: float
    repetition: Repetition | None

    @property
    def skipped(self) -> int:
        """Number of actions whose times are those of earlier rounds, shifted."""
        return self.repetition.skipped if self.repetition else 0

    @remembered
    def of_device(self, device: int) -> DeviceTimes:
        """Returns the times of all actions of a device: most who ask look at a single one."""
        first, behind = self.starts[device], self.starts[device + 1]
        played = self.played.entry, self.played.beside, self.played.arrival, self.played.sent
        logs = entry, beside, arrival, sent = [np.array(log[first:behind]) for log in played]
        if self.repetition is not None:
            for times in logs:
                self.repetition.fill(times, device, first)
        return DeviceTimes(first, entry, beside, arrival, sent, self.host[first:behind])

    @cached_property
    def full(self) -> dict[int, Sequence[float]]:
        """The whole state before an action, where further coordinates matter."""
        if self.repetition:
            self.repetition.fill_states(self.played.full)
        return self.played.full


def play(program: Program, coordinates: Coordinates, skip: bool = True) -> Play:
    """Plays a program action by action. skip: jump over rounds that are proven to repeat."""
    return _Player(program, coordinates).run(skip)


def states(coordinates: Coordinates, task: Task, play: Play, device: int, places: np.ndarray) -> np.ndarray:
    """Returns the states before actions of a device, all of a task [coordinates, actions], without the host.

    places: of the actions in the order of the device.
    Arrivals that cannot delay the task are `NEVER`.
    """
    before, times = np.full((coordinates.size, len(places)), NEVER), play.of_device(device)
    before[0] = times.entry[places]
    if play.second is not None:
        before[play.second] = times.beside[places]
    before[coordinates.port] = times.arrival[places]
    for i, action in enumerate((times.first + places).tolist()) if play.full else ():
        if (whole := play.full.get(action)) is not None:
            before[:, i] = whole
    if coordinates.host is not None:
        before[coordinates.host] = NEVER
    if coordinates.ignores_early_arrivals(task):
        rows = before[coordinates.ports]
        rows[rows <= before[0]] = NEVER
    return before


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _TaskToPlay:
    """What the player needs of a task whose result is sent, or is not, and that follows another in a pair, or not.

    matrix: of the task.
    compact: its entries that matter; None: the whole matrix does.
    used: coordinates of the streams that the task uses.
    computes: whether the compute stream is among them.
    uses_second: whether the stream `second` is among them.
    issue: time in which the host launches the task [s].
    issued: time in which it launches the send, too [s].
    """

    task: Task
    matrix: np.ndarray
    compact: CompactMatrix | None
    used: list[int]
    computes: bool
    uses_second: bool
    follows: bool
    issue: float
    issued: float


@dataclass(slots=True)
class _PlayedDevice:
    """The state of a device. Times are in s.

    free: when the compute stream becomes free.
    free_second: when the stream `second` does.
    waiting: when the sends have arrived that its next kernel waits for.
    ports: when its send streams become free: forward, backward.
    seen: when what they sent last has arrived.
    streams: when all streams become free, where the whole matrix of a task was needed.
    second_result: when the result of the second pass of an overlapped pair exists.
    """

    free: float
    free_second: float
    waiting: float
    ports: list[float]
    seen: list[float]
    streams: list[float]
    second_result: float = NEVER

    def times(self) -> list[float]:
        """Returns all times on which later actions depend."""
        return [self.free, self.free_second, self.waiting, *self.ports, *self.streams]

    def shift(self, seconds: Sequence[float]) -> None:
        """Adds seconds to each of `times`."""
        self.free, self.free_second, self.waiting = map(add, self.times()[:3], seconds)
        self.ports = list(map(add, self.ports, seconds[3:5]))
        self.seen = list(map(add, self.seen, seconds[3:5]))
        self.streams = list(map(add, self.streams, seconds[5:]))


Runs = tuple[list[_TaskToPlay], list[Send | None], list[_PlayedDevice]]
"""By action, what is played and sent, and the device."""

Row = tuple[int, int, float, _TaskToPlay, Send | None, _PlayedDevice]
"""An action with the result that it needs, when the host begins to launch it, what is played and sent, and the
device."""


class _Player:
    """Plays the actions of a program.

    tasks: of all slots, each once.
    beside: streams of their side ops.
    second: coordinate of a further stream that matters (None: no such stream).
    plain: whether the compute stream and at most another determine the state of a device.
    left_out: coordinates of the streams that follow the compute stream.
    result: by number of a result, when it exists; the last, -1, stands for no need of any.
    sent_extra: by number of an extra result, when its send began.
    host: by action, when the host begins to launch it.
    hosted: by device, when the host has launched all its actions.
    bound: actions that waited for the host.
    """

    def __init__(self, program: Program, coordinates: Coordinates) -> None:
        self.program, self.axes, self.table = program, coordinates, program.timetable
        self.launches, self.waits_for_sends = coordinates.host is not None, not program.overlap_sends
        self.tasks = list(dict.fromkeys(program.tasks))
        self.beside = {side.stream for task in self.tasks for side in (*task.ahead, *task.behind)}
        self.left_out = [s for s in coordinates.inside if self._follows_everywhere(s)]
        rest = [s for s in coordinates.inside if s not in self.left_out]
        self.second = rest[0] if len(rest) == 1 else None
        self.plain = len(rest) <= 1
        matrices = {task: coordinates.matrix(task) for task in self.tasks}
        self.host, self.hosted = self._host(matrices)
        self.slots = self._slots(matrices)
        count = len(self.table.slot_array)
        self.log = Times([NEVER] * count, [NEVER] * count, [NEVER] * count, [NEVER] * count)
        self.result = [NEVER] * (self.table.results + 1)
        self.sent_extra: dict[int, float] = {}
        idle = 0.0 if self.second is not None else NEVER
        streams = [NEVER if i in self.left_out else 0.0 for i in range(coordinates.size)]
        self.devices = [
            _PlayedDevice(0.0, idle, NEVER, [0.0, 0.0], [0.0, 0.0], list(streams)) for _ in range(program.devices)
        ]
        self.bound: set[int] = set()

    def _slots(self, matrices: dict[Task, np.ndarray]) -> list[_TaskToPlay]:
        """Returns what is played in every slot."""
        # Which entries matter depends on the task, and on whether its result is sent.
        program = self.program
        traits = program.task_numbers * 4 + np.array([slot.follows for slot in self.table.slots], int) * 2
        traits[program.first_sent_slots] += 1
        played = {}
        for trait in sorted({*traits.tolist()}):
            task = program.distinct[trait // 4]
            played[trait] = self._task_to_play(matrices[task], task, trait % 2 > 0, trait % 4 > 1)
        return [played[trait] for trait in traits.tolist()]

    def _task_to_play(self, matrix: np.ndarray, task: Task, sends: bool, follows: bool) -> _TaskToPlay:
        used, host = self._used_streams(task), self.axes.host
        issue = float(matrix[host, host]) if host is not None else 0.0
        uses = 0 in used, self.second in used
        return _TaskToPlay(
            task, matrix, self._compact_matrix(task, sends), used, *uses, follows, issue, issue + self.axes.launch
        )

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
        result: T = task.engine_results[key]
        return result

    def _host(self, matrices: dict[Task, np.ndarray]) -> tuple[np.ndarray, list[float]]:
        """Returns when the host begins to launch each action, and when it has launched all actions of each device.
        matrices: of the tasks."""
        host, program = self.axes.host, self.program
        if host is None:
            return np.zeros(len(self.table.slot_array)), [0.0] * program.devices
        of_tasks = [matrices[task][host, host] if task in matrices else 0.0 for task in program.distinct]
        each = np.array(of_tasks)[program.task_numbers]
        np.add.at(each, program.sent_slots, self.axes.launch)
        bounds, took = self.table.starts, each[self.table.slot_array]
        if len(lengths := {*map(sub, bounds[1:], bounds)}) == 1:  # all devices at once
            ends = np.cumsum(took.reshape(-1, *lengths), axis=1)
            begins = np.zeros_like(ends)
            begins[:, 1:] = ends[:, :-1]
            return begins.ravel(), ends[:, -1].tolist()
        each_end = [np.cumsum(took[a:b]) for a, b in itertools.pairwise(bounds)]
        each_begin = [np.concatenate([[0.0], end[:-1]]) for end in each_end]
        return np.concatenate(each_begin), [float(end[-1]) for end in each_end]

    def _follows_everywhere(self, s: int) -> bool:
        """Returns whether stream `s` is never free later than the compute stream when a task begins, and can be left
        out.

        By induction this holds if in every task the stream delays no op more than the compute stream does when both
        become free at the same time (columns), and the task ends no later on it than on the compute stream (rows).
        """
        if self.axes.streams[s] in self.beside:
            return False
        # What is known of a task stays with it: most tasks without side ops are those of earlier programs.
        by_sides = sorted(self.tasks, key=lambda task: not (task.ahead or task.behind))
        distinct = {task.parts: task for task in by_sides}
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
            self.advance(self._list_rows(self.table.sequence_array))
            return self._finish_times(None)
        return self._finish_times(self._in_rounds(rounds))

    def advance(self, rows: Iterable[Row]) -> None:
        """Plays actions, in which each follows the actions that it needs.

        A single body without calls in the usual cases: sweeps and searches spend more time here than anywhere else.
        """
        table, log, result, launches = self.table, self.log, self.result, self.launches
        entry, beside, arrivals, sent, further_needs = log.entry, log.beside, log.arrival, log.sent, table.further_needs
        waits_for_sends, extra_results = self.waits_for_sends, table.extra_results
        for action, need, begun, slot, send, device in rows:
            arrival = result[need]
            if action in further_needs:
                arrival = max(arrival, *map(result.__getitem__, further_needs[action]))
            now, second, wait = device.free, device.free_second, device.waiting
            if wait > NEVER:
                now, second = max(now, wait), max(second, wait) if slot.uses_second else second
                # An action that computes nothing passes the wait on to the next.
                device.waiting = NEVER if slot.computes else wait
            entry[action], beside[action], arrivals[action] = now, second, arrival
            compact = slot.compact
            if compact is not None and now - begun >= compact.lead:
                free, late = now + compact.free_after_free, arrival + compact.free_after_arrival
                device.free = late if late > free else free
                computed, late = now + compact.result_after_free, arrival + compact.result_after_arrival
                if late > computed:
                    computed = late
                if (stream := compact.second) is not None:
                    device.free = max(device.free, second + stream.free_after)
                    computed = max(computed, second + stream.result_after)
                    device.free_second = max(
                        now + stream.after_free, arrival + stream.after_arrival, second + stream.after_itself
                    )
            elif slot.follows:
                computed = device.second_result
            else:
                computed = self._advance_fully(action, device, slot, now, wait)
            if send is None:
                result[action] = computed
            else:
                ports, port = device.ports, send.backward
                begin = ports[port] if ports[port] > computed else computed
                if launches and (issued := begun + slot.issued) > begin:
                    begin = issued
                    self.bound.add(action)
                sent[action] = begin
                ports[port] = end = begin + send.seconds
                device.seen[port] = result[action] = arrival = end + send.latency
                if waits_for_sends and arrival > device.waiting:
                    device.waiting = arrival
            if action in extra_results:
                self._send_others(action, device, slot, computed)

    def _list_rows(self, actions: np.ndarray, runs: Runs | None = None) -> Iterable[Row]:
        """Returns actions with the results that they need, when the host begins to launch them, and what is run in
        them. runs: the latter, if it is known."""
        columns = actions, self.table.need_array[actions], self.host[actions]
        return zip(*(column.tolist() for column in columns), *(runs or self._runs_of(actions)), strict=True)

    def _runs_of(self, actions: np.ndarray) -> Runs:
        """Returns what is played and sent in the slots of actions, and their devices."""
        slots, devices = self.table.slot_array[actions].tolist(), self.table.device_array[actions].tolist()
        sends = self.program.sends
        return [self.slots[i] for i in slots], [sends[i] for i in slots], [self.devices[i] for i in devices]

    def _send_others(self, action: int, device: _PlayedDevice, slot: _TaskToPlay, computed: float) -> None:
        """Sends a result to all stages that need it but the first."""
        number = int(self.table.slot_array[action])
        issued = float(self.host[action]) + slot.issue if self.axes.host is not None else NEVER
        issued += self.axes.launch if self.program.sends[number] is not None else 0.0
        others = self.program.others[number]
        for number, send in zip(self.table.extra_results[action], others, strict=True):
            self.result[number] = computed
            if send is not None:
                issued += self.axes.launch
                port = send.backward
                self.sent_extra[number] = begin = max(device.ports[port], computed, issued)
                device.ports[port] = begin + send.seconds
                device.seen[port] = self.result[number] = device.ports[port] + send.latency
                if not self.program.overlap_sends:
                    device.waiting = max(device.waiting, device.seen[port])

    def _advance_fully(self, action: int, device: _PlayedDevice, slot: _TaskToPlay, now: float, wait: float) -> float:
        """Plays an action with the whole matrix of its task and returns when its result exists."""
        axes = self.axes
        before = self.log.full[action] = self._whole_state(action, device, slot, now, wait)
        # A few plain numbers take less time than an array of them.
        rows: list[list[float]] = self._once(slot.task, "rows", slot.matrix.tolist)
        after = [max(map(add, row, before)) for row in rows]
        if (h := axes.host) is not None:
            launched = before[h]
            if any(
                row[h] + launched == latest > NEVER
                for i, (row, latest) in enumerate(zip(rows, after, strict=True))
                if i != h
            ):
                self.bound.add(action)
        device.free = after[0]
        for stream in slot.used:
            if stream:
                device.streams[stream] = after[stream]
        if self.second is not None:
            device.free_second = after[self.second]
        device.second_result = after[-1]
        return after[axes.port]

    def _whole_state(
        self, action: int, device: _PlayedDevice, slot: _TaskToPlay, now: float, wait: float
    ) -> list[float]:
        """Returns the state before an action, with all coordinates."""
        axes, state = self.axes, device.streams.copy()
        state[0] = now
        for stream in slot.used if wait > NEVER else ():
            state[stream] = max(state[stream], wait)
        if axes.host is not None:
            state[axes.host] = float(self.host[action])
        state[axes.ports] = [NEVER] * (axes.size - axes.port)
        state[axes.port] = self.log.arrival[action]
        if slot.task.ports > 1:
            needs = (int(self.table.need_array[action + 1]), *self.table.further_needs.get(action + 1, ()))
            state[axes.port + 1] = max(self.result[need] if need >= 0 else NEVER for need in needs)
        for stream in self.left_out:
            state[stream] = NEVER
        if self.second is not None:
            state[self.second] = self.log.beside[action]
        return state

    # ----------------------------------------------------------------------------------------- rounds

    def _in_rounds(self, rounds: Rounds) -> Repetition | None:
        before, once, behind = self.table.sequence_by_round
        self.advance(self._list_rows(before))
        states, runs = [self._snapshot(rounds, 0)], self._runs_of(once)
        done, repetition = 0, None
        while done < rounds.count:
            self.advance(self._list_rows(once + done * rounds.length, runs))
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
        self.advance(self._list_rows(behind))
        return repetition

    def _snapshot(self, rounds: Rounds, done: int) -> np.ndarray:
        """Returns all times on which later rounds depend, after `done` rounds."""
        waiting = [self.result[i + done * rounds.length] for i in rounds.waiting]
        devices = (device.times() for device in self.devices)
        return np.array([*itertools.chain.from_iterable(devices), *waiting])

    def _period(self, rounds: Rounds, done: int, snapshots: Sequence[np.ndarray]) -> tuple[int, float]:
        """Returns the number of rounds after which all changing times have shifted by the same amount, and that shift
        [s].

        The number is 0 if there is none yet. Times that do not change are of streams that the rounds do not use. The
        host may shift by less where no action waited for it; otherwise it must shift by the same amount.
        """
        last = snapshots[-1]
        for period in self._near_periods(snapshots):
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

    def _near_periods(self, snapshots: Sequence[np.ndarray]) -> list[int]:
        """Returns the numbers of rounds in which the compute streams that moved all moved alike: a few operations on
        arrays rule out most, whose snapshots need not be compared whole. Those of the first two devices rule out most
        of these."""
        size, least = len(self.devices[0].times()), 1e-12 * snapshots[-1].max()
        periods = range(1, min(len(snapshots), self.program.devices + 1))
        ends = (0, size if self.program.devices > 1 else 0)
        first, second = ([float(snapshot[at]) for snapshot in snapshots[-len(periods) - 1 :]] for at in ends)
        pairs = ((n, first[-1] - first[-1 - n], second[-1] - second[-1 - n]) for n in periods)
        near = [n for n, move, other in pairs if not (move and other and abs(move - other) > least)]
        if not near:
            return []
        free = [snapshots[-1 - n][: size * self.program.devices : size] for n in near]
        moves = snapshots[-1][: size * self.program.devices : size] - np.array(free)
        moves[moves == 0] = np.nan
        differences = np.fmax.reduce(moves, axis=1) - np.fmin.reduce(moves, axis=1)
        return [n for n, difference in zip(near, differences.tolist(), strict=True) if not difference > least]

    def _repeat(self, repetition: Repetition, moved: np.ndarray, left: np.ndarray) -> None:
        """Advances the state to the end of a repetition.

        moved: which times of a snapshot change in it.
        left: the actions that are still to be played.
        """
        further = itertools.chain.from_iterable(self.table.further_needs.get(action, ()) for action in left.tolist())
        needed = self.table.need_array[left], np.array([*further], int) if self.table.further_needs else left[:0]
        repetition.fill_some(self.result, np.concatenate(needed))
        moves = (moved * (repetition.times * repetition.shift)).tolist()
        size = len(self.devices[0].times())
        for number, device in enumerate(self.devices):
            device.shift(moves[number * size : (number + 1) * size])

    def _finish_times(self, repetition: Repetition | None) -> Play:
        streams = len(self.axes.streams)
        ends, begins = [], []
        for device in self.devices:
            free = [device.free, device.free_second, *device.streams[1:streams]]
            ends += free + device.ports
            begins.append(max(*free, *device.seen))
        flat = flatten_updates(self.program.updates, self.program.meetings, self.program.host)
        tail = longest_path(flat, {key: begins[key[0]] for key in flat.queues}, self.hosted)
        span = float(max(*ends, tail.span))
        return Play(self.table.starts, self.log, self.second, self.host, self.sent_extra, tail, flat, span, repetition)
