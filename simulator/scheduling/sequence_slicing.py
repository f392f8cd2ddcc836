"""Schedules over slices of sequences, and algorithms that choose the lengths of the slices.

In a causal model no position depends on a later position, so a slice of a sequence moves on to the next stage while the
slice after it is still on this stage. Backward passes go from the last slice to the first: the gradients of a slice's
keys and values have contributions from all later slices. Attention makes late slices slower than early ones of the same
length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated

import numpy as np

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm
from meshcast.simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    Schedule,
    SliceDuration,
    alternate_passes,
    one_forward_one_backward,
    passes_in_groups,
)

MAX_SLICES = 1024
"""Most slices of a sequence."""

FINEST = 8
"""Lengths of slices are multiples of so many tokens, as in TeraPipe (its code, latency_model.py)."""

LENGTHS_TRIED = 32
"""Most lengths that a refinement tries: each is lowered and priced."""

LONGEST_TRIED = 100
"""Most candidates for the longest slice that a refinement tries."""

PROMISING = 1.25
"""Slices of equal lengths are forecast if their estimate is at most that many times the least."""

ROUNDING = 1 + 1e-12
"""Ratio below which two sums of seconds count as equal."""

SliceCount = Annotated[int, Field(ge=1, le=MAX_SLICES, strict=True)]
"""Number of slices, all of the same length."""
SliceLengths = Annotated[tuple[Annotated[float, Field(gt=0, le=1e15)], ...], Field(min_length=1, max_length=MAX_SLICES)]
"""Lengths of the slices, of which only ratios matter."""


class SlicedSchedule(Schedule):
    """Base of the schedules that slice sequences, with an option `slices`: a `SliceCount` or `SliceLengths`."""

    @property
    def slices(self) -> tuple[float, ...]:
        stated = self.options.slices
        if isinstance(stated, int):
            return (1 / stated,) * stated
        return tuple(length / sum(stated) for length in stated)


def forward_slices(shape: PipelineShape, stage: int) -> list[Action]:
    """Returns the forward passes of all slices through a stage, in the order of the sequence."""
    return [Action(stage, "F", k, j) for k in shape.microbatches for j in range(shape.slices)]


def sliced_1f1b(shape: PipelineShape, device: int) -> Sequence[Action]:
    """Returns 1F1B over slices: backward passes of a micro-batch from its last slice to its first; with several chunks
    a device interleaved, in groups of `slice_group` micro-batches."""
    if shape.v > 1:
        group = slice_group(shape.p, shape.m, shape.slices)
        return alternate_passes(*interleaved_passes(shape, device, group))
    forward, s = forward_slices(shape, device), shape.slices
    backward = [action._replace(kind="BW", slice=s - 1 - action.slice) for action in forward]
    return one_forward_one_backward(forward, backward, shape.p - 2 - device + s)


def sliced_1f1b_forms(setting: PipelineSetting, slices: int) -> Iterable[ClosedForm]:
    """Yields closed forms of `sliced_1f1b` for slices that take equally long."""
    p, m, v, s = setting.shape.p, setting.shape.m, setting.shape.v, slices
    group = slice_group(p, m, s)
    if v == 1 or group * s >= p:
        yield ClosedForm("bubble", (p - 1) * setting.t_total / (v * s), "section 3.2; with chunks, replay of the order")
    if v == 1:
        yield ClosedForm("in_flight_b", [min(m * s, p - i + s - 1) for i in range(p)], "section 3.2")
    elif m % group == 0:
        held = [min(m * v * s, 2 * (p - 1 - i) + (v - 1) * group * s + s) for i in range(p)]
        yield ClosedForm("in_flight_b", held, "replay of the order")


def slice_group(p: int, m: int, slices: int) -> int:
    """Micro-batches that run through a chunk in a row: the fewest whose slices keep all devices busy."""
    return smallest_interleaved_group(m, -(-p // slices))


def tabulate_seconds(
    sequence: int, step: int, seconds: SliceDuration, shortest: int = 1, longest: int | None = None
) -> np.ndarray:
    """Tabulates the seconds of the slice between every two multiples of `step` tokens [begin, end]; infinite unless
    begin < end.

    shortest, longest: limits of the lengths, in steps; slices of other lengths are infinite, too.
    """
    count = sequence // step
    most = count if longest is None else longest
    table = np.full((count + 1, count + 1), np.inf)
    for begin in range(count):
        for end in range(begin + shortest, min(begin + most, count) + 1):
            table[begin, end] = seconds((end - begin) * step, begin * step)
    return table


def choose_fastest_slices(
    sequence: int, step: int, seconds: SliceDuration, microbatches: int, hops: int
) -> tuple[int, ...]:
    """Lengths of slices [tokens] that minimise microbatches x sum + hops x longest of their seconds.

    The dynamic programme of TeraPipe (arXiv 2102.07988, section 3.3): for every candidate for the longest slice, the
    least sum of slices that take no longer, O(n^2) for n = sequence / step. Lengths are multiples of `step` tokens.
    """
    table = tabulate_seconds(sequence, step, seconds)
    bounds = _minimise_step(table, microbatches, hops, np.unique(table[np.isfinite(table)]).tolist())
    return tuple((np.diff(bounds) * step).tolist())


def refine_slices(
    lengths: tuple[int, ...], step: int, granule: int, seconds: SliceDuration, microbatches: int, hops: int
) -> tuple[int, ...]:
    """Returns lengths near those of `choose_fastest_slices` in steps of `step` tokens, in finer steps.

    They are multiples of `FINEST` tokens where few enough lengths are then to be tried, and of `granule` tokens.
    """
    sequence, least, most = sum(lengths), max(min(lengths) - step, 1), max(lengths) + step
    fits = [n for n in range(math.lcm(granule, math.gcd(FINEST, step)), step, granule) if step % n == 0]
    fine = next((n for n in fits if (most - least) // n < LENGTHS_TRIED), step)
    if fine == step:
        return lengths
    table = tabulate_seconds(sequence, fine, seconds, -(-least // fine), most // fine)
    total = [seconds(length, begin) for length, begin in zip(lengths, accumulate(lengths, initial=0), strict=False)]
    bound = (microbatches * sum(total) + hops * max(total) - microbatches * _minimise_sum(table)[0]) / max(hops, 1)
    known = np.unique(table[table <= bound])
    tried = known[np.linspace(0, len(known) - 1, min(len(known), LONGEST_TRIED)).astype(int)].tolist()
    return tuple((np.diff(_minimise_step(table, microbatches, hops, tried)) * fine).tolist())


def promising_even_slices(
    lengths: tuple[int, ...], granule: int, seconds: SliceDuration, microbatches: int, hops: int
) -> list[tuple[int, ...]]:
    """Slices of equal lengths for which microbatches x sum + hops x longest is at most `PROMISING` times that of
    `lengths`; the lengths are multiples of `granule` tokens."""
    sequence = sum(lengths)

    def estimate(cut: tuple[int, ...]) -> float:
        each = [seconds(length, begin) for length, begin in zip(cut, accumulate(cut, initial=0), strict=False)]
        return microbatches * sum(each) + hops * max(each)

    counts = (n for n in range(1, 2 * len(lengths) + 2) if sequence % (n * granule) == 0)
    limit = PROMISING * estimate(lengths)
    return [cut for cut in ((sequence // n,) * n for n in counts) if estimate(cut) <= limit]


def _minimise_step(table: np.ndarray, microbatches: int, hops: int, candidates: list[float]) -> list[int]:
    """Returns the bounds of the slices that minimise microbatches x sum + hops x longest, the longest being among
    `candidates`."""
    best, bounds = np.inf, [0, len(table) - 1]
    lower_bound, _ = _minimise_sum(table)
    for longest in candidates:
        if microbatches * lower_bound + hops * longest >= best:
            break
        total, candidate = _minimise_sum(np.where(table <= longest, table, np.inf))
        if microbatches * total + hops * longest < best:
            best, bounds = microbatches * total + hops * longest, candidate
    return bounds


def _minimise_sum(table: np.ndarray) -> tuple[float, list[int]]:
    """Returns the least sum of seconds of slices that make a sequence, and their bounds; of equal sums that whose first
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


def interleaved_passes(shape: PipelineShape, device: int, group: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the passes of 1F1B over chunks, forward and backward, and the number of warm-up passes: the
    micro-batches, slice by slice, run in groups of `group` (the last may be smaller), a group chunk by chunk, backward
    with the chunks and the slices in reverse order. The passes are fields of an `ActionArray`."""
    stages, slices = range(device, shape.stages, shape.p), range(shape.slices)
    forward = passes_in_groups("F", stages, shape.m, group, slices)
    backward = passes_in_groups("BW", stages[::-1], shape.m, group, slices[::-1])
    return forward, backward, 2 * (shape.p - 1 - device) + (shape.v - 1) * group * shape.slices + shape.slices - 1


def is_interleaved_group(group: int, m: int, least: int) -> bool:
    """Returns whether m micro-batches run in groups of `group` without waiting: each has `least`, also the last with
    what is left; or all are a single group."""
    return group == m or (least <= group <= m and not 0 < m % group < least)


def smallest_interleaved_group(m: int, least: int) -> int:
    """Returns the smallest group that `is_interleaved_group` admits."""
    return next(group for group in range(min(m, least), m + 1) if is_interleaved_group(group, m, least))
