"""An order of all actions of a timetable in which each follows those that it needs."""

from __future__ import annotations

import numpy as np

from meshcast.simulator.batch.loops.compiled import compile_loop


@compile_loop
def sort_actions(starts: np.ndarray, need: np.ndarray) -> np.ndarray:
    """Returns the numbers of all actions, each behind that whose result it needs and those before it on its device; of
    a deadlock those that precede it.

    starts: see `Order`.
    need: by action, the action of another stage whose result it needs; -1: none.
    """
    devices, count = len(starts) - 1, 0
    at, done, order = starts[:-1].copy(), np.zeros(len(need), np.bool_), np.empty(len(need), np.int64)
    moved = True
    while moved:
        moved = False
        for device in range(devices):
            i = at[device]
            while i < starts[device + 1] and (need[i] < 0 or done[need[i]]):
                done[i], order[count] = True, i
                count, i = count + 1, i + 1
            moved = moved or i > at[device]
            at[device] = i
    return order[:count]
