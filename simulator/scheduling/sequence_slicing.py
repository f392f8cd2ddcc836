"""Schedules over slices of sequences, and algorithms that choose the lengths of the slices.

In a causal model no position depends on a later one, so a slice of a sequence moves on to the next stage while the
slice after it is still on this one. Backward passes go from the last slice to the first: the gradients of a slice's
keys and values have contributions from all later slices. Attention makes late slices slower than early ones of the same
length.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from simulator.scheduling.schedule import Action, PipelineShape, Schedule, SliceDuration

MAX_SLICES = 1024
"""Most slices of one sequence."""

ROUNDING = 1 + 1e-12
"""Ratio below which two sums of seconds count as equal."""

SliceCount = Annotated[int, Field(ge=1, le=MAX_SLICES, strict=True)]
"""Number of slices, all of one length."""
SliceLengths = Annotated[tuple[Annotated[float, Field(gt=0, le=1e15)], ...], Field(min_length=1, max_length=MAX_SLICES)]
"""Lengths of the slices, of which only ratios matter."""


class SlicedSchedule(Schedule):
    """Base of the schedules that slice sequences, with an option `slices`: a `SliceCount` or `SliceLengths`."""

    @property
    def slices(self) -> tuple[float, ...]:
        given = self.options.slices
        if isinstance(given, int):
            return (1 / given,) * given
        return tuple(length / sum(given) for length in given)


def forward_slices(shape: PipelineShape, stage: int) -> list[Action]:
    """The forward passes of all slices through a stage, in the order of the sequence."""
    return [Action(stage, "F", k, j) for k in shape.microbatches for j in range(shape.slices)]


def tabulate_seconds(sequence: int, step: int, seconds: SliceDuration) -> np.ndarray:
    """Seconds of the slice between every two multiples of `step` tokens [begin, end]; infinite unless begin < end."""
    count = sequence // step
    found = np.full((count + 1, count + 1), np.inf)
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            found[begin, end] = seconds((end - begin) * step, begin * step)
    return found


def choose_fastest_slices(
    sequence: int, step: int, seconds: SliceDuration, microbatches: int, hops: int
) -> tuple[int, ...]:
    """Lengths of slices [tokens] that minimise microbatches x sum + hops x longest of their seconds.

    The dynamic programme of TeraPipe (arXiv 2102.07988, section 3.3): for every candidate for the longest slice, the
    least sum of slices that take no longer, O(n^2) for n = sequence / step. Lengths are multiples of `step` tokens.
    """
    table = tabulate_seconds(sequence, step, seconds)
    best, bounds = np.inf, [0, len(table) - 1]
    lower_bound, _ = _minimise_sum(table)
    for longest in np.unique(table[np.isfinite(table)]).tolist():
        if microbatches * lower_bound + hops * longest >= best:
            break
        total, found = _minimise_sum(np.where(table <= longest, table, np.inf))
        if microbatches * total + hops * longest < best:
            best, bounds = microbatches * total + hops * longest, found
    return tuple((np.diff(bounds) * step).tolist())


def _minimise_sum(table: np.ndarray) -> tuple[float, list[int]]:
    """The least sum of seconds of slices that make a sequence, and their bounds; of equal sums the one whose first
    slices are longest."""
    last = len(table) - 1
    sums, next_bound = np.zeros(last + 1), [last] * (last + 1)
    for begin in reversed(range(last)):
        candidates = table[begin] + sums
        sums[begin] = candidates.min()
        next_bound[begin] = int(np.flatnonzero(candidates <= sums[begin] * ROUNDING)[-1])
    bounds = [0]
    while bounds[-1] < last:
        bounds.append(next_bound[bounds[-1]])
    return float(sums[0]), bounds


def choose_balanced_slices(sequence: int, step: int, seconds: SliceDuration, count: int) -> tuple[int, ...]:
    """Lengths of `count` slices [tokens] whose slowest takes the least seconds; multiples of `step` tokens.

    count: at most sequence / step.
    """
    table = tabulate_seconds(sequence, step, seconds)
    slowest = np.full(len(table), np.inf)
    slowest[0] = 0
    previous_bounds = []
    for _ in range(count):
        candidates = np.maximum(slowest[:, None], table)
        previous_bounds.append(candidates.argmin(axis=0))
        slowest = candidates.min(axis=0)
    bounds = [len(table) - 1]
    for previous in reversed(previous_bounds):
        bounds.append(int(previous[bounds[-1]]))
    return tuple((np.diff(bounds[::-1]) * step).tolist())
