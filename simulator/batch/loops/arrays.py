"""The arrays that the loops read, and the coordinates of states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshcast.simulator.program.memory_profile import CATEGORIES

COMPUTE, HOST, ARRIVAL, OTHERS = 0, 1, 2, 3
"""Coordinates: when the compute stream becomes free, when the host has launched all so far, when the input of a pass
arrives (behind it: when its result exists), and the first of the other streams."""

NEVER = -np.inf
"""No path."""

BUFFERS = CATEGORIES.index("buffers")

INSTANT = 1e-12
"""Gap between intervals that is taken for rounding [s]."""

ACTION, NEED, SLOT, DEVICE, PORT, TARGET = range(6)
"""Columns of `Order.rows`: number of the action, and of the result that it needs (-1: none); its slot and device; the
port by which its result is sent (-1: it is not), and the device that receives it."""

WAITING, FREE, ARRIVED, BESIDE = 0, 1, 3, 5
"""Places behind the streams of a device: what its next kernel waits for; by port, when it becomes free, and when what
it sent last has arrived; the number of all."""

HEADER = 4
"""Integers before those of the ops of a block: ops, whether the result waits for the input, exits, marks."""


class Order(NamedTuple):
    """The order of all passes.

    starts: by device, the number of its first action; last, the number of actions.
    slot: by action, its slot.
    rows: of actions, each behind those that it needs; see `ACTION` and what follows.
    """

    starts: np.ndarray
    slot: np.ndarray
    rows: np.ndarray


class PassKinds(NamedTuple):
    """The kinds of passes of a plan.

    matrices: by kind, its matrix, and a row that is above 0 for the streams that it uses, and in the place of the host
        where it has side ops, so that it is walked [kinds, size + 1, size].
    issue: by kind, the time of the host to launch it [s].
    memory: by kind, what it leaves and holds at its peak, by category and in sum [kinds, 2, categories + 1] [bytes].
    rows: by kind, its row in `table`.
    table, whole, reals: what passes that are walked are made of. A row of the table: its parts, side ops ahead and
        behind, parameters, and whether it is forward; for every part where its block is in `whole` and `reals`, its
        copies and its first parameter; for all side ops where they are.
    room: most ops of a block, most parameters of a pass.
    """

    matrices: np.ndarray
    issue: np.ndarray
    memory: np.ndarray
    rows: np.ndarray
    table: np.ndarray
    whole: np.ndarray
    reals: np.ndarray
    room: np.ndarray


class SlotMessages(NamedTuple):
    """Messages by slot of a timetable.

    prices: seconds, latency and relative standard deviation of the seconds [slots, 3].
    moved: bytes that are sent and received.
    """

    prices: np.ndarray
    moved: np.ndarray


class Notes(NamedTuple):
    """Lists of intervals in which a device is busy, each in the order of their begins: by stream, and by stream those
    in which an op waits for the host; by device and port the messages that it sends from or to the device; by stream of
    the updates, and those of their waits.

    device: its number; -1: nothing is noted.
    starts: where each list begins in `begin` and `end`.
    counts: the intervals that it has.
    begin, end: of all intervals [s].
    """

    device: int
    starts: np.ndarray
    counts: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class Room(NamedTuple):
    """Times of a pass that is walked [s]: when results of the ops of a copy are seen, what they are held by, and when
    gradients are complete and weights there."""

    seen: np.ndarray
    held: np.ndarray
    ready: np.ndarray
    release: np.ndarray
