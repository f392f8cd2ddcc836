"""The inner loops of forecasts in batch, over arrays alone: the (max,+) matrices of passes, the play of a step, its
updates, and the peaks of memory. They compute what `engine.maxplus`, `engine.task_player`, `engine.longest_path` and
`engine.peak_memory` do.

A state has the coordinates `COMPUTE`, `HOST` and `ARRIVAL`, then those of all other streams; times are in s.

Blocks lie one behind the other in an array of integers and an array of floats; see `simulator.batch.blocks`.
"""

from __future__ import annotations

import numpy as np

from meshcast.simulator.batch.compiled import compiled

COMPUTE, HOST, ARRIVAL, OTHERS = 0, 1, 2, 3
"""Coordinates: when the compute stream becomes free, when the host has launched all so far, when the input of a pass
arrives (behind it: when its result exists), and the first of the other streams."""

NEVER = -np.inf
"""No path."""

HEADER = 4
"""Integers before those of the ops of a block: ops, whether the result waits for the input, exits, marks."""


@compiled
def sweep_block(whole: np.ndarray, reals: np.ndarray, size: int, launch: float) -> np.ndarray:
    """Returns the (max,+) matrix of a block [size, size]. launch: time of the host to launch an op [s]; 0: none."""
    ops, through, exits = whole[0], whole[1], whole[2]
    streams, entry, after = HEADER, HEADER + ops, HEADER + 2 * ops
    waits = after + ops + 1
    leaving = waits + whole[waits - 1]
    now = np.full((size, size), NEVER)
    for i in range(size):
        now[i, i] = 0.0
    seen = np.full((ops, size), NEVER)
    for i in range(ops):
        stream = whole[streams + i]
        row = now[stream]
        if launch > 0 and reals[2 * ops + i] > 0:
            for c in range(size):
                now[HOST, c] += launch * reals[2 * ops + i]
                row[c] = max(row[c], now[HOST, c])
        for at in range(whole[after + i], whole[after + i + 1]):
            other = whole[waits + at]
            for c in range(size):
                row[c] = max(row[c], seen[other, c])
        if whole[entry + i]:
            row[ARRIVAL] = max(row[ARRIVAL], 0.0)
        for c in range(size):
            row[c] += reals[i]
            seen[i, c] = row[c] + reals[ops + i]
    if not through:
        now[ARRIVAL, ARRIVAL] = NEVER
    for at in range(exits):
        place = whole[leaving + at]
        for c in range(size):
            now[ARRIVAL, c] = max(now[ARRIVAL, c], seen[place, c])
    return now


@compiled
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


@compiled
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


@compiled
def walk_pass(
    state: np.ndarray,
    begun: float,
    launch: float,
    table: np.ndarray,
    at: int,
    whole: np.ndarray,
    reals: np.ndarray,
    seen: np.ndarray,
    held: np.ndarray,
    ready: np.ndarray,
    release: np.ndarray,
) -> None:
    """Plays a pass with side ops op by op, and advances the state of its device.

    begun: when the host begins to launch it.
    table, at: its row, see `simulator.batch.passes`.
    seen, held, ready, release: room for times of ops and of parameters.
    """
    parts, ahead, behind, params, forward = table[at], table[at + 1], table[at + 2], table[at + 3], table[at + 4]
    sides = at + 5 + 4 * parts
    for param in range(params):
        ready[param] = NEVER
        release[param] = NEVER
    for side in range(sides, sides + 2 * ahead, 2):
        where, times = table[side], table[side + 1]
        stream, count = whole[where], whole[where + 1]
        listed = where + 3 + count
        for i in range(count):
            state[stream] += reals[times + i]
            arrived = state[stream] + reals[times + count + i]
            for j in range(whole[where + 2 + i], whole[where + 3 + i]):
                param = whole[listed + j]
                release[param] = max(release[param], arrived)
    for part in range(at + 5, at + 5 + 4 * parts, 4):
        where, times, copies, number = table[part], table[part + 1], table[part + 2], table[part + 3]
        ops, through, exits, marks = whole[where], whole[where + 1], whole[where + 2], whole[where + 3]
        streams = where + HEADER
        entry, after = streams + ops, streams + 2 * ops
        waits = after + ops + 1
        leaving = waits + whole[waits - 1]
        marked = leaving + exits
        places = marked + marks + 1
        for copy in range(copies):
            first = number + (copy if forward else copies - 1 - copy) * marks
            if ahead:
                for i in range(ops):
                    held[i] = NEVER
                for m in range(marks):
                    for j in range(whole[marked + m], whole[marked + m + 1]):
                        place = whole[places + j]
                        if place >= 0:
                            held[place] = max(held[place], release[first + m])
            arrival = state[ARRIVAL]
            for i in range(ops):
                stream = whole[streams + i]
                begin = state[stream]
                if launch > 0 and reals[times + 2 * ops + i] > 0:
                    begun += launch * reals[times + 2 * ops + i]
                    begin = max(begin, begun)
                for j in range(whole[after + i], whole[after + i + 1]):
                    begin = max(begin, seen[whole[waits + j]])
                if whole[entry + i]:
                    begin = max(begin, arrival)
                if ahead:
                    begin = max(begin, held[i])
                state[stream] = begin + reals[times + i]
                seen[i] = state[stream] + reals[times + ops + i]
            if not through:
                state[ARRIVAL] = NEVER
            for j in range(exits):
                state[ARRIVAL] = max(state[ARRIVAL], seen[whole[leaving + j]])
            if behind:
                for m in range(marks):
                    for j in range(whole[marked + m], whole[marked + m + 1]):
                        place = whole[places + j]
                        ready[first + m] = max(ready[first + m], seen[place] if place >= 0 else arrival)
    for side in range(sides + 2 * ahead, sides + 2 * (ahead + behind), 2):
        where, times = table[side], table[side + 1]
        stream, count = whole[where], whole[where + 1]
        listed = where + 3 + count
        for i in range(count):
            begin = state[stream]
            for j in range(whole[where + 2 + i], whole[where + 3 + i]):
                begin = max(begin, ready[whole[listed + j]])
            state[stream] = begin + reals[times + i]


@compiled
def play_passes(
    starts: np.ndarray,
    sequence: np.ndarray,
    need: np.ndarray,
    slot: np.ndarray,
    pass_of: np.ndarray,
    matrices: np.ndarray,
    walked: np.ndarray,
    used: np.ndarray,
    issue: np.ndarray,
    ports: np.ndarray,
    message: np.ndarray,
    launch: float,
    waits: bool,
    table: np.ndarray,
    whole: np.ndarray,
    reals: np.ndarray,
    room: np.ndarray,
    behind: np.ndarray,
) -> float:
    """Plays all passes of a step, and returns when the last stream becomes free.

    starts, sequence, need, slot: of the timetable.
    pass_of: by slot, the kind of pass.
    matrices: by kind of pass; walked: by kind, the row in `table`, or -1.
    used: by kind, the streams that it uses.
    issue: by kind, the time of the host to launch it [s].
    ports: by slot, the port by which its result is sent; -1: it is not.
    message: by slot, seconds and latency of that message.
    waits: whether a device waits until what it sends has arrived.
    room: most ops of a block, most parameters of a pass.
    behind: by device, what is filled in: when its update can begin, and when the host has launched all its passes.
    """
    devices, size = len(starts) - 1, matrices.shape[1]
    begun = np.empty(len(sequence))
    owner = np.empty(len(sequence), np.int32)
    for device in range(devices):
        clock = 0.0
        for action in range(starts[device], starts[device + 1]):
            owner[action] = device
            begun[action] = clock
            clock += issue[pass_of[slot[action]]]
            if ports[slot[action]] >= 0:
                clock += launch
        behind[device, 1] = clock
    seen, held = np.empty(room[0]), np.empty(room[0])
    ready, release = np.empty(room[1]), np.empty(room[1])
    streams = np.zeros((devices, size))
    port, arrived, waiting = np.zeros((devices, 2)), np.zeros((devices, 2)), np.full(devices, NEVER)
    result = np.full(len(sequence) + 1, NEVER)
    state, later = np.empty(size), np.empty(size)
    for action in sequence:
        device, place = owner[action], slot[action]
        kind = pass_of[place]
        for c in range(size):
            state[c] = streams[device, c]
        wait = waiting[device]
        if wait > NEVER:
            for c in range(size):
                if used[kind, c]:
                    state[c] = max(state[c], wait)
            if used[kind, COMPUTE]:
                waiting[device] = NEVER
        state[HOST] = begun[action] if launch > 0 else NEVER
        state[ARRIVAL] = result[need[action]]
        if walked[kind] >= 0:
            walk_pass(state, begun[action], launch, table, walked[kind], whole, reals, seen, held, ready, release)
            for c in range(size):
                later[c] = state[c]
        else:
            for i in range(size):
                most = NEVER
                for c in range(size):
                    most = max(most, matrices[kind, i, c] + state[c])
                later[i] = most
        for c in range(size):
            if used[kind, c]:
                streams[device, c] = later[c]
        computed = later[ARRIVAL]
        if ports[place] < 0:
            result[action] = computed
            continue
        way = ports[place]
        begin = max(port[device, way], computed)
        if launch > 0:
            begin = max(begin, begun[action] + issue[kind] + launch)
        port[device, way] = begin + message[place, 0]
        result[action] = arrived[device, way] = port[device, way] + message[place, 1]
        if waits:
            waiting[device] = max(waiting[device], result[action])
    span = 0.0
    for device in range(devices):
        free = streams[device, COMPUTE]
        for c in range(OTHERS, size):
            free = max(free, streams[device, c])
        span = max(span, free, port[device, 0], port[device, 1])
        behind[device, 0] = max(free, arrived[device, 0], arrived[device, 1])
    return span


@compiled
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


@compiled
def find_peaks(
    starts: np.ndarray,
    slot: np.ndarray,
    pass_of: np.ndarray,
    memory: np.ndarray,
    moved: np.ndarray,
    overlap: bool,
    peaks: np.ndarray,
) -> None:
    """Finds the peak of every device in its passes.

    memory: by kind of pass, what it leaves, its peak, and of both the gradients [bytes].
    moved: by slot, the bytes that it sends and receives.
    overlap: whether buffers of messages lie beside the actions before and behind.
    peaks: by device, what is filled in: the peak, what all passes leave, and of both the gradients.
    """
    for device in range(len(starts) - 1):
        level, gradients, best, at_best = 0.0, 0.0, NEVER, 0.0
        for action in range(starts[device], starts[device + 1]):
            kind, flying = pass_of[slot[action]], 0.0
            if overlap and action > starts[device]:
                flying += moved[slot[action - 1], 0]
            if overlap and action + 1 < starts[device + 1]:
                flying += moved[slot[action + 1], 1]
            high = level + memory[kind, 1] + flying
            if high > best:
                best, at_best = high, gradients + memory[kind, 3]
            level += memory[kind, 0]
            gradients += memory[kind, 2]
        peaks[device, 0], peaks[device, 1], peaks[device, 2], peaks[device, 3] = best, level, at_best, gradients
