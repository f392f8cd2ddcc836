"""The length of the union of the intervals of a device, level by level, as `engine.occupancy.measure` computes it."""

from __future__ import annotations

import numpy as np

from meshcast.simulator.batch.loops.arrays import Notes
from meshcast.simulator.batch.loops.compiled import compile_loop


@compile_loop
def measure_levels(notes: Notes, levels: np.ndarray, count: int) -> np.ndarray:
    """Returns by level the length of the union of its intervals and of those of the levels below [s].

    levels: by list of `notes`, its level.
    count: number of levels.
    """
    total = notes.counts.sum()
    covered, other = np.empty((2, total)), np.empty((2, total))
    lengths, size = np.zeros(count), 0
    for level in range(count):
        for number in range(len(levels)):
            if levels[number] == level and notes.counts[number] > 0:
                size = unite(covered, size, notes, number, other)
                covered, other = other, covered
        for i in range(size):
            lengths[level] += covered[1, i] - covered[0, i]
    return lengths


@compile_loop
def unite(covered: np.ndarray, size: int, notes: Notes, number: int, united: np.ndarray) -> int:
    """Writes the union of the first `size` intervals of `covered`, which do not overlap, and of a list into `united`,
    and returns the number of its intervals."""
    at, place, stop, count = 0, notes.starts[number], notes.starts[number] + notes.counts[number], 0
    while at < size or place < stop:
        if place >= stop or (at < size and covered[0, at] <= notes.begin[place]):
            begin, end = covered[0, at], covered[1, at]
            at += 1
        else:
            begin, end = notes.begin[place], notes.end[place]
            place += 1
        if count > 0 and begin <= united[1, count - 1]:
            united[1, count - 1] = max(united[1, count - 1], end)
        else:
            united[0, count], united[1, count] = begin, end
            count += 1
    return count
