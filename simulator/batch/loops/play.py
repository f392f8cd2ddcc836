"""The play of a step and of its updates, as `engine.task_player` and `engine.longest_path` compute it."""

from __future__ import annotations

import numpy as np

from meshcast.simulator.batch.loops.arrays import (
    ARRIVAL,
    COMPUTE,
    HEADER,
    HOST,
    INSTANT,
    NEVER,
    OTHERS,
    Devices,
    Notes,
    Order,
    PassKinds,
    Room,
    SlotMessages,
)
from meshcast.simulator.batch.loops.compiled import compile_loop


@compile_loop
def note(notes: Notes, number: int, begin: float, end: float) -> None:
    """Adds an interval to a list; one that touches the interval before lengthens it."""
    if end > begin > NEVER:
        place = notes.starts[number] + notes.counts[number]
        if notes.counts[number] > 0 and begin <= notes.end[place - 1] + INSTANT:
            notes.end[place - 1] = max(notes.end[place - 1], end)
        else:
            notes.begin[place], notes.end[place] = begin, end
            notes.counts[number] += 1


@compile_loop
def walk_pass(
    state: np.ndarray,
    begun: float,
    launch: float,
    kinds: PassKinds,
    kind: int,
    room: Room,
    notes: Notes,
) -> None:
    """Plays a pass op by op, and advances the state of its device.

    begun: when the host begins to launch it.
    kind: its number.
    """
    table, row = kinds.table, kinds.rows[kind]
    ahead, behind = table[row + 1], table[row + 2]
    room.ready[: table[row + 3]] = NEVER
    room.release[: table[row + 3]] = NEVER
    sides = row + 5 + 4 * table[row]
    for side in range(sides, sides + 2 * ahead, 2):
        gather_ahead(state, kinds, side, room, notes)
    for part in range(row + 5, sides, 4):
        copies, number, marks = table[part + 2], table[part + 3], kinds.whole[table[part] + 3]
        for copy in range(copies):
            first = number + (copy if table[row + 4] else copies - 1 - copy) * marks
            if ahead:
                hold_ops(kinds, part, first, room)
            arrival = state[ARRIVAL]
            begun = walk_copy(state, begun, launch, kinds, part, ahead > 0, room, notes)
            if behind:
                note_ready(kinds, part, first, arrival, room)
    for side in range(sides + 2 * ahead, sides + 2 * (ahead + behind), 2):
        reduce_behind(state, kinds, side, room, notes)


@compile_loop
def gather_ahead(
    state: np.ndarray, kinds: PassKinds, side: int, room: Room, notes: Notes
) -> None:
    """Plays side ops ahead of a pass, and notes when each parameter is there."""
    whole, where, times = kinds.whole, kinds.table[side], kinds.table[side + 1]
    stream, count = whole[where], whole[where + 1]
    listed = where + 3 + count
    for i in range(count):
        begin = state[stream]
        state[stream] += kinds.reals[times + i]
        arrived = state[stream] + kinds.reals[times + count + i]
        if notes.device >= 0:
            note(notes, stream, begin, arrived)
        for j in range(whole[where + 2 + i], whole[where + 3 + i]):
            room.release[whole[listed + j]] = max(room.release[whole[listed + j]], arrived)


@compile_loop
def reduce_behind(
    state: np.ndarray, kinds: PassKinds, side: int, room: Room, notes: Notes
) -> None:
    """Plays side ops behind a pass, each as soon as the gradients of its parameters are complete."""
    whole, where, times = kinds.whole, kinds.table[side], kinds.table[side + 1]
    stream, count = whole[where], whole[where + 1]
    listed = where + 3 + count
    for i in range(count):
        begin = state[stream]
        for j in range(whole[where + 2 + i], whole[where + 3 + i]):
            begin = max(begin, room.ready[whole[listed + j]])
        state[stream] = begin + kinds.reals[times + i]
        if notes.device >= 0:
            note(notes, stream, begin, state[stream] + kinds.reals[times + count + i])


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
    state: np.ndarray,
    begun: float,
    launch: float,
    kinds: PassKinds,
    part: int,
    holds: bool,
    room: Room,
    notes: Notes,
) -> float:
    """Plays a copy of a block, and returns when the host has launched it. holds: whether weights come beside it."""
    whole, where, times = kinds.whole, kinds.table[part], kinds.table[part + 1]
    ops, streams = whole[where], where + HEADER
    after = streams + 2 * ops
    for i in range(ops):
        stream = whole[streams + i]
        begin, issue = state[stream], launch * kinds.reals[times + 2 * ops + i]
        for j in range(whole[after + i], whole[after + i + 1]):
            begin = max(begin, room.seen[whole[after + ops + 1 + j]])
        if whole[streams + ops + i]:
            begin = max(begin, state[ARRIVAL])
        free = begin
        if holds:
            begin = max(begin, room.held[i])
        if issue > 0:
            begun += issue
            begin = max(begin, begun)
            if notes.device >= 0 and begin <= begun + INSTANT:
                note(notes, len(state) + stream, free, begin)
        state[stream] = begin + kinds.reals[times + i]
        room.seen[i] = state[stream] + kinds.reals[times + ops + i]
        if notes.device >= 0:
            note(notes, stream, begin, room.seen[i])
    leave_copy(state, whole, where, room)
    return begun


@compile_loop
def leave_copy(state: np.ndarray, whole: np.ndarray, where: int, room: Room) -> None:
    """Notes when the result of a copy exists. where: its block is in `whole`."""
    if not whole[where + 1]:
        state[ARRIVAL] = NEVER
    waits = where + HEADER + 3 * whole[where] + 1
    leaving = waits + whole[waits - 1]
    for j in range(whole[where + 2]):
        state[ARRIVAL] = max(state[ARRIVAL], room.seen[whole[leaving + j]])


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
    notes: Notes,
) -> float:
    """Plays all passes of a step, and returns when the last stream becomes free.

    pass_of: by slot, the kind of pass.
    launch: time of the host to launch an op [s].
    waits: whether a device waits until what it sends has arrived.
    behind: by device, what is filled in: when its update can begin, and when the host has launched all its passes.
    notes: what is filled in.
    """
    owner, begun = launch_passes(order, pass_of, kinds, messages.ports, launch, behind)
    room, devices = make_room(kinds), start_devices(len(order.starts) - 1, kinds.matrices.shape[1])
    result = np.full(len(order.sequence) + 1, NEVER)
    state = np.empty(kinds.matrices.shape[1])
    silent = Notes(-1, notes.starts, notes.counts, notes.begin, notes.end)
    later = np.empty_like(state)
    for action in order.sequence:
        device, kind = owner[action], pass_of[order.slot[action]]
        enter_state(devices, device, kinds.used[kind], state)
        state[HOST] = begun[action] if launch > 0 else NEVER
        state[ARRIVAL] = result[order.need[action]]
        if kinds.beside[kind] or device == notes.device:
            walk_pass(state, begun[action], launch, kinds, kind, room, notes if device == notes.device else silent)
            later[:] = state
        else:
            multiply_state(kinds.matrices[kind], state, later)
        for c in range(len(state)):
            if kinds.used[kind, c]:
                devices.streams[device, c] = later[c]
        issued = begun[action] + kinds.issue[kind] + launch if launch > 0 else NEVER
        result[action] = send_result(devices, device, messages, order.slot[action], later[ARRIVAL], issued, notes)
        if waits and messages.ports[order.slot[action]] >= 0:
            devices.waiting[device] = max(devices.waiting[device], result[action])
    return find_ends(devices, behind)


@compile_loop
def send_result(
    devices: Devices, device: int, messages: SlotMessages, slot: int, computed: float, issued: float, notes: Notes
) -> float:
    """Sends a result if it is sent, and returns when it exists where it is needed.

    computed: when it exists where it was made.
    issued: when the host has launched the message.
    """
    way = messages.ports[slot]
    if way < 0:
        return computed
    begin = max(devices.port[device, way], computed, issued)
    devices.port[device, way] = begin + messages.prices[slot, 0]
    devices.arrived[device, way] = devices.port[device, way] + messages.prices[slot, 1]
    if notes.device == device or notes.device == messages.targets[slot]:
        note(notes, 2 * devices.streams.shape[1] + 2 * device + way, begin, devices.arrived[device, way])
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
    notes: Notes,
    lists: int,
) -> float:
    """Returns the end of the updates behind all passes [s].

    first, after: where the ops that each op waits for begin in `after`.
    device, stream: of every op; equal streams of two devices have two numbers.
    behind: see `play_passes`.
    notes: what is filled in; those of a stream's ops in list `lists` + its number, and of their waits behind all these.
    """
    count = len(seconds)
    ready = np.full(count, NEVER)
    arrival = np.empty(count)
    clock = behind[:, 1].copy()
    span, streams = 0.0, (len(notes.starts) - 1 - lists) // 2
    for i in range(count):
        at = max(ready[stream[i]], behind[device[i], 0])
        for j in range(first[i], first[i + 1]):
            at = max(at, arrival[after[j]])
        if issue[i] > 0:
            clock[device[i]] += issue[i]
            if notes.device == device[i]:
                note(notes, lists + streams + stream[i], at, clock[device[i]])
            at = max(at, clock[device[i]])
        ready[stream[i]] = at + seconds[i]
        arrival[i] = ready[stream[i]] + latency[i]
        if notes.device == device[i]:
            note(notes, lists + stream[i], at, arrival[i])
        span = max(span, ready[stream[i]])
    return span
