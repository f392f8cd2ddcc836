"""Sequences cut into slices that follow each other through the pipeline, and where to cut them.

A causal model needs nothing of later positions, so a slice of a sequence can go on to the next stage while the one
behind it is still here. Backward, the last slice comes first: what later slices add to the gradients of keys and values
must be there. Attention makes late slices slower than early ones of the same length.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from simulator.scheduling.schedule import Action, Lasts, PipelineShape, Schedule

MOST_SLICES = 1024
"""Of one sequence."""

ALIKE = 1 + 1e-12
"""Of two sums that differ by less, neither is less."""

Number = Annotated[int, Field(ge=1, le=MOST_SLICES, strict=True)]
Lengths = Annotated[tuple[Annotated[float, Field(gt=0, le=1e15)], ...], Field(min_length=1, max_length=MOST_SLICES)]
"""Slices of equal lengths, or their lengths, of which only ratios matter."""


class Sliced(Schedule):
    """Base of the schedules that cut sequences, with an option `slices`: a `Number` or `Lengths`."""

    @property
    def slices(self) -> tuple[float, ...]:
        told = self.options.slices
        if isinstance(told, int):
            return (1 / told,) * told
        return tuple(length / sum(told) for length in told)


def forward_units(shape: PipelineShape, stage: int) -> list[Action]:
    """The forward passes of all slices through a stage, in the order of the sequence."""
    return [Action(stage, "F", k, j) for k in shape.microbatches for j in range(shape.slices)]


def times(sequence: int, step: int, lasts: Lasts) -> np.ndarray:
    """The seconds of all slices between multiples of `step` [begin, end]; infinite where the end is not behind."""
    count = sequence // step
    found = np.full((count + 1, count + 1), np.inf)
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            found[begin, end] = lasts((end - begin) * step, begin * step)
    return found


def quickest(sequence: int, step: int, lasts: Lasts, turns: int, waits: int) -> tuple[int, ...]:
    """The lengths of slices, multiples of `step`, for which turns x sum + waits x longest of their seconds is least.

    The dynamic programme of TeraPipe (arXiv 2102.07988, section 3.3): for every candidate for the longest slice, the
    least sum of slices that take no longer, O(n^2) for n = sequence / step.
    """
    lasting = times(sequence, step, lasts)
    best, cuts = np.inf, [0, len(lasting) - 1]
    floor, _ = _least_sum(lasting)
    for longest in np.unique(lasting[np.isfinite(lasting)]).tolist():
        if turns * floor + waits * longest >= best:
            break
        total, found = _least_sum(np.where(lasting <= longest, lasting, np.inf))
        if turns * total + waits * longest < best:
            best, cuts = turns * total + waits * longest, found
    return tuple((np.diff(cuts) * step).tolist())


def _least_sum(lasting: np.ndarray) -> tuple[float, list[int]]:
    """The least sum of slices from begin to end, and where they are cut; of equal sums that with long slices first."""
    last = len(lasting) - 1
    sums, goes = np.zeros(last + 1), [last] * (last + 1)
    for begin in reversed(range(last)):
        ways = lasting[begin] + sums
        sums[begin] = ways.min()
        goes[begin] = int(np.flatnonzero(ways <= sums[begin] * ALIKE)[-1])
    cuts = [0]
    while cuts[-1] < last:
        cuts.append(goes[cuts[-1]])
    return float(sums[0]), cuts


def evenest(sequence: int, step: int, lasts: Lasts, count: int) -> tuple[int, ...]:
    """The lengths of `count` slices, multiples of `step`, of which the one that lasts longest is the shortest possible.

    count: at most sequence / step.
    """
    lasting = times(sequence, step, lasts)
    longest = np.full(len(lasting), np.inf)
    longest[0] = 0
    came = []
    for _ in range(count):
        ways = np.maximum(longest[:, None], lasting)
        came.append(ways.argmin(axis=0))
        longest = ways.min(axis=0)
    cuts = [len(lasting) - 1]
    for back in reversed(came):
        cuts.append(int(back[cuts[-1]]))
    return tuple((np.diff(cuts[::-1]) * step).tolist())
