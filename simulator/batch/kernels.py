"""The inner loops of forecasts in batch, over arrays alone: the (max,+) matrices of passes, the play of a step, its
updates, and the peaks of memory. They compute what `engine.maxplus`, `engine.task_player`, `engine.longest_path` and
`engine.peak_memory` do.

A state has the coordinates `COMPUTE`, `HOST` and `ARRIVAL`, then those of all other streams; times are in s.

Blocks lie one behind the other in an array of integers and an array of floats; see `simulator.batch.blocks`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshcast.simulator.batch.compiled import compile_loop

COMPUTE, HOST, ARRIVAL, OTHERS = 0, 1, 2, 3
"""Coordinates: when the compute stream becomes free, when the host has launched all so far, when the input of a pass
arrives (behind it: when its result exists), and the first of the other streams."""

NEVER = -np.inf
"""No path."""

HEADER = 4
"""Integers before those of the ops of a block: ops, whether the result waits for the input, exits, marks."""


@compile_loop
def sweep_block(whole: np.ndarray, reals: np.ndarray, size: int, launch: float) -> np.ndarray:
    """Returns the (max,+) matrix of a block [size, size]. launch: time of the host to launch an op [s]; 0: none."""
    ops, after = whole[0], HEADER + 2 * whole[0]
    waits = after + ops + 1
    now = np.full((size, size), NEVER)
    for i in range(size):
        now[i, i] = 0.0
    seen = np.full((ops, size), NEVER)
    for i in range(ops):
        row = now[whole[HEADER + i]]
        if launch > 0 and reals[2 * ops + i] > 0:
            for c in range(size):
                now[HOST, c] += launch * reals[2 * ops + i]
                row[c] = max(row[c], now[HOST, c])
        for at in range(whole[after + i], whole[after + i + 1]):
            other = whole[waits + at]
            for c in range(size):
                row[c] = max(row[c], seen[other, c])
        if whole[HEADER + ops + i]:
            row[ARRIVAL] = max(row[ARRIVAL], 0.0)
        for c in range(size):
            row[c] += reals[i]
            seen[i, c] = row[c] + reals[ops + i]
    if not whole[1]:
        now[ARRIVAL, ARRIVAL] = NEVER
    for at in range(whole[2]):
        place = whole[waits + whole[waits - 1] + at]
        for c in range(size):
            now[ARRIVAL, c] = max(now[ARRIVAL, c], seen[place, c])
    return now


@compile_loop
def multiply(late: np.ndarray, early: np.ndarray) -> np.ndarray:
    """Returns the (max,+) product of two matrices of one size: that of what `early` stands for and then `late`."""
    size = len(late)
    result = np.full((size, size), NEVER)
    for i in range(size):
        for j in range(size):
            if late[i, j] > NEVER:
                for c in range(size):
                    result[i, c] = max(result[i, c], late[i, j] + early[j, c])
    return result


@compile_loop
def raise_matrix(matrix: np.ndarray, count: int) -> np.ndarray:
    """Returns the (max,+) power of a matrix: of `count` copies one behind the other."""
    size = len(matrix)
    result = np.full((size, size), NEVER)
    for i in range(size):
        result[i, i] = 0.0
    square = matrix
    while count > 0:
        if count % 2:
            result = multiply(square, result)
        count //= 2
        if count:
            square = multiply(square, square)
    return result


class Order(NamedTuple):
    """The order of all passes: see `Timetable`."""

    starts: np.ndarray
    sequence: np.ndarray
    need: np.ndarray
    slot: np.ndarray


class PassKinds(NamedTuple):
    """The kinds of passes of a plan.

    matrices: by kind.
    walked: by kind, its row in `table` if it has side ops; otherwise -1.
    used: by kind, the streams that it uses.
    issue: by kind, the time of the host to launch it [s].
    memory: by kind, what it leaves, its peak, and of both the gradients [bytes].
    table, whole, reals: of kinds that are walked. A row of the table: its parts, side ops ahead and behind, parameters,
        and whether it is forward; for every part where its block is in `whole` and `reals`, its copies and its first
        parameter; for all side ops where they are.
    room: most ops of a block, most parameters of a pass.
    """

    matrices: np.ndarray
    walked: np.ndarray
    used: np.ndarray
    issue: np.ndarray
    memory: np.ndarray
    table: np.ndarray
    whole: np.ndarray
    reals: np.ndarray
    room: np.ndarray


class SlotMessages(NamedTuple):
    """Messages by slot of a timetable.

    ports: that by which the result is sent; -1: it is not.
    prices: seconds and latency [s].
    moved: bytes that are sent and received.
    """

    ports: np.ndarray
    prices: np.ndarray
    moved: np.ndarray


class Room(NamedTuple):
    """Times of a pass that is walked [s]: when results of the ops of a copy are seen, what they are held by, and when
    gradients are complete and weights there."""

    seen: np.ndarray
    held: np.ndarray
    ready: np.ndarray
    release: np.ndarray


class Devices(NamedTuple):
    """States of all devices [s]: when their streams and ports become free, what they sent last has arrived, and what
    their next kernel waits for."""

    streams: np.ndarray
    port: np.ndarray
    arrived: np.ndarray
    waiting: np.ndarray


@compile_loop
def walk_pass(state: np.ndarray, begun: float, launch: float, kinds: PassKinds, row: int, room: Room) -> None:
    """Plays a pass with side ops op by op, and advances the state of its device.

    begun: when the host begins to launch it.
    row: its row in the table.
    """
    table = kinds.table
    ahead, behind, forward = table[row + 1], table[row + 2], table[row + 4]
    room.ready[: table[row + 3]] = NEVER
    room.release[: table[row + 3]] = NEVER
    sides = row + 5 + 4 * table[row]
    for side in range(sides, sides + 2 * ahead, 2):
        gather_ahead(state, kinds, side, room)
    for part in range(row + 5, sides, 4):
        copies, number, marks = table[part + 2], table[part + 3], kinds.whole[table[part] + 3]
        for copy in range(copies):
            first = number + (copy if forward else copies - 1 - copy) * marks
            if ahead:
                hold_ops(kinds, part, first, room)
            arrival = state[ARRIVAL]
            begun = walk_copy(state, begun, launch, kinds, part, ahead > 0, room)
            if behind:
                note_ready(kinds, part, first, arrival, room)
    for side in range(sides + 2 * ahead, sides + 2 * (ahead + behind), 2):
        reduce_behind(state, kinds, side, room)


@compile_loop
def gather_ahead(state: np.ndarray, kinds: PassKinds, side: int, room: Room) -> None:
    """Plays side ops ahead of a pass, and notes when each parameter is there."""
    whole, where, times = kinds.whole, kinds.table[side], kinds.table[side + 1]
    stream, count = whole[where], whole[where + 1]
    listed = where + 3 + count
    for i in range(count):
        state[stream] += kinds.reals[times + i]
        arrived = state[stream] + kinds.reals[times + count + i]
        for j in range(whole[where + 2 + i], whole[where + 3 + i]):
            room.release[whole[listed + j]] = max(room.release[whole[listed + j]], arrived)


@compile_loop
def reduce_behind(state: np.ndarray, kinds: PassKinds, side: int, room: Room) -> None:
    """Plays side ops behind a pass, each as soon as the gradients of its parameters are complete."""
    whole, where, times = kinds.whole, kinds.table[side], kinds.table[side + 1]
    stream, count = whole[where], whole[where + 1]
    listed = where + 3 + count
    for i in range(count):
        begin = state[stream]
        for j in range(whole[where + 2 + i], whole[where + 3 + i]):
            begin = max(begin, room.ready[whole[listed + j]])
        state[stream] = begin + kinds.reals[times + i]


@compile_loop
def find_marks(whole: np.ndarray, where: int) -> int:
    """Returns where a block lists the places of its marks begin; these follow."""
    waits = where + HEADER + 3 * whole[where] + 1
    return waits + whole[waits - 1] + whole[where + 2]


@compile_loop
def hold_ops(kinds: PassKinds, part: int, first: int, room: Room) -> None:
    """Notes before which times the ops of a copy cannot begin. first: number of its first parameter."""
    whole, where = kinds.whole, kinds.table[part]
    marked, marks = find_marks(whole, where), whole[where + 3]
    room.held[: whole[where]] = NEVER
    for m in range(marks):
        for j in range(whole[marked + m], whole[marked + m + 1]):
            place = whole[marked + marks + 1 + j]
            if place >= 0:
                room.held[place] = max(room.held[place], room.release[first + m])


@compile_loop
def note_ready(kinds: PassKinds, part: int, first: int, arrival: float, room: Room) -> None:
    """Notes when the gradients of a copy are complete. arrival: of its input."""
    whole, where = kinds.whole, kinds.table[part]
    marked, marks = find_marks(whole, where), whole[where + 3]
    for m in range(marks):
        for j in range(whole[marked + m], whole[marked + m + 1]):
            place = whole[marked + marks + 1 + j]
            room.ready[first + m] = max(room.ready[first + m], room.seen[place] if place >= 0 else arrival)


@compile_loop
def walk_copy(
    state: np.ndarray, begun: float, launch: float, kinds: PassKinds, part: int, holds: bool, room: Room
) -> float:
    """Plays a copy of a block, and returns when the host has launched it. holds: whether weights come beside it."""
    whole, where, times = kinds.whole, kinds.table[part], kinds.table[part + 1]
    ops, arrival = whole[where], state[ARRIVAL]
    streams = where + HEADER
    after = streams + 2 * ops
    waits = after + ops + 1
    for i in range(ops):
        begin, launches = state[whole[streams + i]], kinds.reals[times + 2 * ops + i]
        if launch > 0 and launches > 0:
            begun += launch * launches
            begin = max(begin, begun)
        for j in range(whole[after + i], whole[after + i + 1]):
            begin = max(begin, room.seen[whole[waits + j]])
        if whole[streams + ops + i]:
            begin = max(begin, arrival)
        if holds:
            begin = max(begin, room.held[i])
        state[whole[streams + i]] = begin + kinds.reals[times + i]
        room.seen[i] = state[whole[streams + i]] + kinds.reals[times + ops + i]
    if not whole[where + 1]:
        state[ARRIVAL] = NEVER
    leaving = waits + whole[waits - 1]
    for j in range(whole[where + 2]):
        state[ARRIVAL] = max(state[ARRIVAL], room.seen[whole[leaving + j]])
    return begun


@compile_loop
def launch_passes(
    order: Order, pass_of: np.ndarray, kinds: PassKinds, ports: np.ndarray, launch: float, behind: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns by action its device, and when the host begins to launch it [s].

    behind: by device, what is filled in: when the host has launched all.
    """
    begun, owner = np.empty(len(order.sequence)), np.empty(len(order.sequence), np.int64)
    for device in range(len(order.starts) - 1):
        clock = 0.0
        for action in range(order.starts[device], order.starts[device + 1]):
            slot = order.slot[action]
            owner[action], begun[action] = device, clock
            clock += kinds.issue[pass_of[slot]] + (launch if ports[slot] >= 0 else 0.0)
        behind[device, 1] = clock
    return owner, begun


@compile_loop
def enter_state(devices: Devices, device: int, used: np.ndarray, state: np.ndarray) -> None:
    """Writes the state of a device before a pass. used: the streams that it uses."""
    wait = devices.waiting[device]
    for c in range(len(state)):
        state[c] = max(devices.streams[device, c], wait) if used[c] else devices.streams[device, c]
    if used[COMPUTE]:  # a pass that computes nothing passes the wait on to the next
        devices.waiting[device] = NEVER


@compile_loop
def multiply_state(matrix: np.ndarray, state: np.ndarray, later: np.ndarray) -> None:
    """Writes the (max,+) product of a matrix and a state into `later`."""
    for i in range(len(state)):
        most = NEVER
        for c in range(len(state)):
            most = max(most, matrix[i, c] + state[c])
        later[i] = most


@compile_loop
def make_room(kinds: PassKinds) -> Room:
    """Makes room for the passes that are walked."""
    ops, params = kinds.room
    return Room(np.empty(ops), np.empty(ops), np.empty(params), np.empty(params))


@compile_loop
def start_devices(count: int, size: int) -> Devices:
    """Returns the states of idle devices. size: number of coordinates."""
    sent = np.zeros((2, count, 2))
    return Devices(np.zeros((count, size)), sent[0], sent[1], np.full(count, NEVER))


@compile_loop
def play_passes(
    order: Order,
    pass_of: np.ndarray,
    kinds: PassKinds,
    messages: SlotMessages,
    launch: float,
    waits: bool,
    behind: np.ndarray,
) -> float:
    """Plays all passes of a step, and returns when the last stream becomes free.

    pass_of: by slot, the kind of pass.
    launch: time of the host to launch an op [s].
    waits: whether a device waits until what it sends has arrived.
    behind: by device, what is filled in: when its update can begin, and when the host has launched all its passes.
    """
    owner, begun = launch_passes(order, pass_of, kinds, messages.ports, launch, behind)
    room, devices = make_room(kinds), start_devices(len(order.starts) - 1, kinds.matrices.shape[1])
    result = np.full(len(order.sequence) + 1, NEVER)
    state = np.empty(kinds.matrices.shape[1])
    later = np.empty_like(state)
    for action in order.sequence:
        device, kind = owner[action], pass_of[order.slot[action]]
        enter_state(devices, device, kinds.used[kind], state)
        state[HOST] = begun[action] if launch > 0 else NEVER
        state[ARRIVAL] = result[order.need[action]]
        if kinds.walked[kind] >= 0:
            walk_pass(state, begun[action], launch, kinds, kinds.walked[kind], room)
            later[:] = state
        else:
            multiply_state(kinds.matrices[kind], state, later)
        for c in range(len(state)):
            if kinds.used[kind, c]:
                devices.streams[device, c] = later[c]
        issued = begun[action] + kinds.issue[kind] + launch if launch > 0 else NEVER
        result[action] = send_result(devices, device, messages, order.slot[action], later[ARRIVAL], issued)
        if waits and messages.ports[order.slot[action]] >= 0:
            devices.waiting[device] = max(devices.waiting[device], result[action])
    return find_ends(devices, behind)


@compile_loop
def send_result(
    devices: Devices, device: int, messages: SlotMessages, slot: int, computed: float, issued: float
) -> float:
    """Sends a result if it is sent, and returns when it exists where it is needed.

    computed: when it exists where it was made.
    issued: when the host has launched the message.
    """
    way = messages.ports[slot]
    if way < 0:
        return computed
    devices.port[device, way] = max(devices.port[device, way], computed, issued) + messages.prices[slot, 0]
    devices.arrived[device, way] = devices.port[device, way] + messages.prices[slot, 1]
    return devices.arrived[device, way]


@compile_loop
def find_ends(devices: Devices, behind: np.ndarray) -> float:
    """Returns when the last stream becomes free. behind: by device, what is filled in: when its update can begin."""
    span = 0.0
    for device in range(len(devices.waiting)):
        free = devices.streams[device, COMPUTE]
        for c in range(OTHERS, devices.streams.shape[1]):
            free = max(free, devices.streams[device, c])
        span = max(span, free, devices.port[device, 0], devices.port[device, 1])
        behind[device, 0] = max(free, devices.arrived[device, 0], devices.arrived[device, 1])
    return span


@compile_loop
def play_updates(
    seconds: np.ndarray,
    latency: np.ndarray,
    issue: np.ndarray,
    first: np.ndarray,
    after: np.ndarray,
    device: np.ndarray,
    stream: np.ndarray,
    behind: np.ndarray,
) -> float:
    """Returns the end of the updates behind all passes [s].

    first, after: where the ops that each op waits for begin in `after`.
    device, stream: of every op; equal streams of two devices have two numbers.
    behind: see `play_passes`.
    """
    count = len(seconds)
    ready = np.full(count, NEVER)
    arrival = np.empty(count)
    clock = behind[:, 1].copy()
    span = 0.0
    for i in range(count):
        at = max(ready[stream[i]], behind[device[i], 0])
        for j in range(first[i], first[i + 1]):
            at = max(at, arrival[after[j]])
        if issue[i] > 0:
            clock[device[i]] += issue[i]
            at = max(at, clock[device[i]])
        ready[stream[i]] = at + seconds[i]
        arrival[i] = ready[stream[i]] + latency[i]
        span = max(span, ready[stream[i]])
    return span


@compile_loop
def find_peaks(
    order: Order, pass_of: np.ndarray, kinds: PassKinds, messages: SlotMessages, overlap: bool, peaks: np.ndarray
) -> None:
    """Finds the peak of every device in its passes.

    pass_of: by slot, the kind of pass.
    overlap: whether buffers of messages lie beside the actions before and behind.
    peaks: by device, what is filled in: the peak, what all passes leave, and of both the gradients.
    """
    memory, moved = kinds.memory, messages.moved
    for device in range(len(order.starts) - 1):
        level, gradients, best, at_best = 0.0, 0.0, NEVER, 0.0
        first, behind = order.starts[device], order.starts[device + 1]
        for action in range(first, behind):
            kind, flying = pass_of[order.slot[action]], 0.0
            if overlap and action > first:
                flying += moved[order.slot[action - 1], 0]
            if overlap and action + 1 < behind:
                flying += moved[order.slot[action + 1], 1]
            if level + memory[kind, 1] + flying > best:
                best, at_best = level + memory[kind, 1] + flying, gradients + memory[kind, 3]
            level += memory[kind, 0]
            gradients += memory[kind, 2]
        peaks[device, 0], peaks[device, 1], peaks[device, 2], peaks[device, 3] = best, level, at_best, gradients
