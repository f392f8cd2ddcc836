"""The play of a step and of its updates, as `engine.task_player` and `engine.longest_path` compute it."""

from __future__ import annotations

import numpy as np

from meshcast.simulator.batch.loops.arrays import (
    ACTION,
    ARRIVAL,
    ARRIVED,
    BESIDE,
    COMPUTE,
    DEVICE,
    FREE,
    HEADER,
    HOST,
    INSTANT,
    NEED,
    NEVER,
    OTHERS,
    PORT,
    SLOT,
    TARGET,
    WAITING,
    Notes,
    Order,
    PassKinds,
    Room,
)
from meshcast.simulator.batch.loops.compiled import compile_inside, compile_loop


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
    launch: float,
    kinds: PassKinds,
    kind: int,
    room: Room,
    notes: Notes,
    devices: np.ndarray,
    device: int,
) -> float:
    """Plays a pass op by op, and advances the streams of its device. Returns when its result exists [s].

    state: before it.
    kind: its number.
    """
    table, row, begun = kinds.table, kinds.rows[kind], state[HOST]
    ahead, behind = table[row + 1], table[row + 2]
    room.ready[: table[row + 3]] = NEVER
    room.release[: table[row + 3]] = NEVER
    sides = row + 5 + 4 * table[row]
    for side in range(sides, sides + 2 * ahead, 2):
        gather_ahead(state, kinds, side, room, notes)
    for part in range(row + 5, sides, 4):
        begun = walk_part(state, begun, launch, kinds, row, part, room, notes)
    for side in range(sides + 2 * ahead, sides + 2 * (ahead + behind), 2):
        reduce_behind(state, kinds, side, room, notes)
    for c in range(len(state)):
        if kinds.matrices[kind, len(state), c] > 0 and c != HOST:
            devices[device, c] = state[c]
    return state[ARRIVAL]


@compile_loop
def walk_part(
    state: np.ndarray, begun: float, launch: float, kinds: PassKinds, row: int, part: int, room: Room, notes: Notes
) -> float:
    """Plays all copies of a block, and returns when the host has launched them. row, part: places in the table."""
    table = kinds.table
    copies, number, marks = table[part + 2], table[part + 3], kinds.whole[table[part] + 3]
    for copy in range(copies):
        first = number + (copy if table[row + 4] else copies - 1 - copy) * marks
        if table[row + 1]:
            hold_ops(kinds, part, first, room)
        arrival = state[ARRIVAL]
        begun = walk_copy(state, begun, launch, kinds, part, table[row + 1] > 0, room, notes)
        if table[row + 2]:
            note_ready(kinds, part, first, arrival, room)
    return begun


@compile_loop
def gather_ahead(state: np.ndarray, kinds: PassKinds, side: int, room: Room, notes: Notes) -> None:
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
def reduce_behind(state: np.ndarray, kinds: PassKinds, side: int, room: Room, notes: Notes) -> None:
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
    order: Order, pass_of: np.ndarray, issue: np.ndarray, launch: float, behind: np.ndarray
) -> np.ndarray:
    """Returns by action when the host begins to launch it [s].

    issue: see `PassKinds`.
    behind: by device, what is filled in: when the host has launched all.
    """
    rows, begun, clocks = order.rows, np.empty(len(order.slot)), behind[:, 1]
    for n in range(len(rows)):  # those of a device are in its order
        device = rows[n, DEVICE]
        begun[rows[n, ACTION]] = clocks[device]
        clocks[device] += issue[pass_of[rows[n, SLOT]]] + (launch if rows[n, PORT] >= 0 else 0.0)
    return begun


@compile_inside
def enter_state(devices: np.ndarray, device: int, matrices: np.ndarray, kind: int, state: np.ndarray) -> None:
    """Writes the streams of a device before a pass into `state`.

    devices: see `start_devices`.
    matrices: see `PassKinds`; kind: that of the pass.
    """
    size = len(state)
    for c in range(size):
        state[c] = devices[device, c]
        if matrices[kind, size, c] > 0:
            state[c] = max(state[c], devices[device, size + WAITING])
    if matrices[kind, size, COMPUTE] > 0:  # a pass that computes nothing passes the wait on to the next
        devices[device, size + WAITING] = NEVER


@compile_inside
def advance(matrices: np.ndarray, kind: int, state: np.ndarray, devices: np.ndarray, device: int) -> float:
    """Advances the streams of a device by the matrix of a pass, and returns when its result exists [s].

    matrices: see `PassKinds`; kind: that of the pass.
    state: before it.
    """
    computed, size = NEVER, len(state)
    for i in range(size):
        if matrices[kind, size, i] > 0 or i == ARRIVAL:
            most = NEVER
            for c in range(size):
                most = max(most, matrices[kind, i, c] + state[c])
            if i == ARRIVAL:
                computed = most
            else:
                devices[device, i] = most
    return computed


@compile_inside
def send_result(
    rows: np.ndarray, n: int, computed: float, begun: float, devices: np.ndarray, sends: np.ndarray, waits: bool
) -> tuple[float, float]:
    """Sends the result of an action, and returns when the message begins and when it arrives [s].

    n: row of the action; computed: when its result exists; begun: when the host begins to launch it.
    """
    device, port, size = rows[n, DEVICE], rows[n, PORT], devices.shape[1] - BESIDE
    begin = max(devices[device, size + FREE + port], computed, begun + sends[rows[n, SLOT], 2])
    devices[device, size + FREE + port] = begin + sends[rows[n, SLOT], 0]
    arrived = begin + sends[rows[n, SLOT], 0] + sends[rows[n, SLOT], 1]
    devices[device, size + ARRIVED + port] = arrived
    if waits:
        devices[device, size + WAITING] = max(devices[device, size + WAITING], arrived)
    return begin, arrived


@compile_loop
def make_room(kinds: PassKinds) -> Room:
    """Makes room for the passes that are walked."""
    ops, params = kinds.room
    return Room(np.empty(ops), np.empty(ops), np.empty(params), np.empty(params))


@compile_loop
def start_devices(count: int, size: int) -> np.ndarray:
    """Returns the states of idle devices [s]: when their streams become free; then what their next kernel waits for,
    and by port when it becomes free, and when what it sent last has arrived. size: number of coordinates."""
    devices = np.zeros((count, size + BESIDE))
    devices[:, size + WAITING] = NEVER
    return devices


@compile_loop
def play_passes(
    order: Order,
    pass_of: np.ndarray,
    kinds: PassKinds,
    sends: np.ndarray,
    launch: float,
    waits: bool,
    behind: np.ndarray,
    notes: Notes,
) -> float:
    """Plays all passes of a step, and returns when the last stream becomes free.

    Arrays that every action needs have names of their own: each look-up in a tuple costs as much as an action.

    pass_of: by slot, the kind of pass.
    sends: by slot, seconds and latency of its message, and time of the host from the begin of its pass to the end of
        its launch [slots, 3] [s].
    launch: time of the host to launch an op [s].
    waits: whether a device waits until what it sends has arrived.
    behind: by device, what is filled in: when its update can begin, and when the host has launched all its passes.
    notes: what is filled in.
    """
    begun = launch_passes(order, pass_of, kinds.issue, launch, behind)
    rows, matrices, room = order.rows, kinds.matrices, make_room(kinds)
    result, state = np.full(len(rows) + 1, NEVER), np.empty(matrices.shape[2])
    devices = start_devices(len(order.starts) - 1, len(state))
    silent = Notes(-1, notes.starts, notes.counts, notes.begin, notes.end)
    for n in range(len(rows)):
        kind = pass_of[rows[n, SLOT]]
        enter_state(devices, rows[n, DEVICE], matrices, kind, state)
        state[HOST] = begun[rows[n, ACTION]] if launch > 0 else NEVER
        state[ARRIVAL] = result[rows[n, NEED]]
        if rows[n, DEVICE] == notes.device:
            computed = walk_pass(state, launch, kinds, kind, room, notes, devices, rows[n, DEVICE])
        elif matrices[kind, len(state), HOST] > 0:
            computed = walk_pass(state, launch, kinds, kind, room, silent, devices, rows[n, DEVICE])
        else:
            computed = advance(matrices, kind, state, devices, rows[n, DEVICE])
        if rows[n, PORT] >= 0:
            begin, computed = send_result(rows, n, computed, begun[rows[n, ACTION]], devices, sends, waits)
            if notes.device in (rows[n, DEVICE], rows[n, TARGET]):
                note(notes, 2 * len(state) + 2 * rows[n, DEVICE] + rows[n, PORT], begin, computed)
        result[rows[n, ACTION]] = computed
    return find_ends(devices, behind)


@compile_loop
def find_ends(devices: np.ndarray, behind: np.ndarray) -> float:
    """Returns when the last stream becomes free. behind: by device, what is filled in: when its update can begin."""
    span, size = 0.0, devices.shape[1] - BESIDE
    for device in range(len(devices)):
        free = devices[device, COMPUTE]
        for c in range(OTHERS, size):
            free = max(free, devices[device, c])
        behind[device, 0] = span_here = free
        for port in range(2):
            span_here = max(span_here, devices[device, size + FREE + port])
            behind[device, 0] = max(behind[device, 0], devices[device, size + ARRIVED + port])
        span = max(span, span_here)
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
