"""FlexSP: in every micro-batch, groups of sequence-parallel ranks of the degrees, and with the samples, that end first.

Samples, sorted by length, are cut into micro-batches so that the largest has as few tokens as possible: as few
micro-batches as memory allows, up to four more, whichever step is shortest. In each the ranks form groups of 2, 4, 8,
... ranks. A group computes its samples packed behind each other; it takes

    sum over its samples of (a s^2 + b s) / d  +  all-to-alls of the s tokens among d ranks

and has at most c tokens a rank. Degrees and samples of the groups minimise the time of the slowest.

The paper solves this as a mixed-integer program over 16 buckets of lengths, for 5 s with SCIP. Here all sets of degrees
are tried, each filled longest sample first, where it then ends first, with moves and swaps while they help: of 23 drawn
problems of 8 to 24 samples on 8 and 16 ranks whose optimum an integer program finds, 0.3 % longer in the mean, 0.8 % at
most.

References: Wang et al. 2025 (ASPLOS), arXiv 2412.01523, section 4; https://github.com/PKU-DAIR/Hetu-Galvatron, branch
flexSP, galvatron/flexsp_solver.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import accumulate, takewhile
from math import ceil, inf, log2

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.job.assigners.groups import Round, SampleGroup

SMALLEST = 2
"""Ranks of the smallest group (`get_sp_options` of flexSP.py leaves out groups of 1)."""

MORE_MICROBATCHES = 5
"""Numbers of micro-batches that are tried, from the smallest on (`mb_option_num`)."""

PROMISING = 8
"""Sets of degrees whose groups are improved: those that end first."""

BALANCED = 1.005
"""Groups of which the last ends at most so many times as late as all do in the mean are not improved."""

GAIN = 1e-3
"""A change is made where it lets a group end earlier by this share."""

OTHERS = 4
"""Groups, those that end first, that the last one moves samples to."""

Seconds = Callable[[int, int], float]
"""Time of a sample of some tokens in a group of some ranks."""


@dataclass
class _Filled(SampleGroup):
    """A group that is being filled.

    samples: their numbers.
    tokens, seconds: of all of them.
    """

    samples: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def assign_flexibly(lengths: Sequence[int], rank_tokens: int, sizes: tuple[int, int], seconds: Seconds) -> list[Round]:
    """Returns the rounds of all samples: a micro-batch each, that of every group packed; none where no micro-batches
    have room, or too few samples for all groups.

    lengths: of the samples; none needs more than a largest group [tokens].
    rank_tokens: of a rank at most.
    sizes: all ranks, and those of a group at most, powers of 2.
    seconds: estimated.
    """
    falling = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    best, chosen_rounds = inf, list[list[_Filled]]()
    tried, count = 0, max(1, ceil(sum(lengths) / (sizes[0] * rank_tokens)))
    while tried < MORE_MICROBATCHES and count <= len(lengths):
        parts = cut_evenly([lengths[sample] for sample in falling], count)
        count += 1
        if min(map(len, parts)) < sizes[0] // sizes[1]:
            break  # more micro-batches have no sample for each group either
        divided = (_divide([falling[i] for i in part], lengths, rank_tokens, sizes, seconds) for part in parts)
        rounds = [*takewhile(bool, divided)]
        if len(rounds) < len(parts):
            continue
        tried += 1
        step = sum(max(group.seconds for group in groups) for groups in rounds)
        if step < best:
            best, chosen_rounds = step, rounds
    return [[SampleGroup(group.degree, [sorted(group.samples)]) for group in groups] for groups in chosen_rounds]


def cut_evenly(lengths: Sequence[int], count: int) -> list[range]:
    """Returns the samples of `count` parts, each of neighbours, of which the largest has as few tokens as possible."""
    sums = np.array([0, *accumulate(lengths)])
    most = np.where(sums == 0, 0.0, inf)
    starts = []
    for _ in range(count):
        each = np.maximum(most[:, None], sums[None, :] - sums[:, None])
        each[np.tril_indices(len(sums))] = inf  # no part is empty
        starts.append(each.argmin(axis=0))
        most = each.min(axis=0)
    end, parts = len(lengths), list[range]()
    for start in reversed(starts):
        parts.append(range(int(start[end]), end))
        end = int(start[end])
    return parts[::-1]


def _divide(
    samples: Sequence[int], lengths: Sequence[int], rank_tokens: int, sizes: tuple[int, int], seconds: Seconds
) -> list[_Filled]:
    """Returns the groups of a micro-batch that end first; none if no groups have room. samples: the longest first."""
    ranks, largest = sizes
    smallest = min(SMALLEST, largest)
    least = max(smallest, 2 ** ceil(log2(max(1, max(lengths[s] for s in samples) / rank_tokens))))
    filled, first = list[list[_Filled]](), inf
    work = {d: np.array([d * seconds(lengths[s], d) for s in samples]) for d in _powers(smallest, largest)}
    for degrees in _list_degrees(ranks, smallest, largest):
        if degrees[0] < least or len(degrees) > len(samples):
            continue
        if np.min([work[d] for d in {*degrees}], axis=0).sum() / ranks >= first:
            continue  # not even if all ranks ended together
        if groups := _fill(degrees, samples, lengths, rank_tokens, seconds):
            filled.append(groups)
            first = min(first, _last(groups))
    for groups in (promising := sorted(filled, key=_last)[:PROMISING]):
        _improve(groups, lengths, rank_tokens, seconds)
    return min(promising, key=_last, default=[])


def _powers(smallest: int, largest: int) -> list[int]:
    """Returns the powers of 2 from the smallest to the largest."""
    return [2**n for n in range(smallest.bit_length() - 1, largest.bit_length())]


def _last(groups: Sequence[_Filled]) -> float:
    return max(group.seconds for group in groups)


def _list_degrees(ranks: int, smallest: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yields all sets of powers of 2 in this range that add up to `ranks`, each falling."""
    if ranks == 0:
        yield ()
        return
    degree = largest
    while degree >= smallest:
        if degree <= ranks:
            for others in _list_degrees(ranks - degree, smallest, degree):
                yield (degree, *others)
        degree //= 2


def _fill(
    degrees: Sequence[int], samples: Sequence[int], lengths: Sequence[int], rank_tokens: int, seconds: Seconds
) -> list[_Filled]:
    """Returns groups of these degrees with all samples; none if they have no room, or a group has no sample."""
    groups = [_Filled(degree) for degree in degrees]
    queues = {degree: [(0.0, i) for i, group in enumerate(groups) if group.degree == degree] for degree in degrees}
    for sample in samples:
        length, best, chosen = lengths[sample], inf, -1
        for degree, queue in queues.items():  # each in the order in which its groups end
            room = degree * rank_tokens - length
            first = next((i for _, i in queue if groups[i].tokens <= room), -1)
            if first >= 0 and (end := groups[first].seconds + seconds(length, degree)) < best:
                best, chosen = end, first
        if chosen < 0:
            return []
        queue = queues[groups[chosen].degree]
        queue.remove((groups[chosen].seconds, chosen))
        _add(groups[chosen], sample, length, seconds)
        insort(queue, (groups[chosen].seconds, chosen))
    for group in groups:
        if not group.samples and not _take_one(group, groups, lengths, rank_tokens, seconds):
            return []
    return groups


def _add(group: _Filled, sample: int, length: int, seconds: Seconds) -> None:
    group.samples.append(sample)
    group.tokens += length
    group.seconds += seconds(length, group.degree)


def _move(source: _Filled, target: _Filled, sample: int, length: int, seconds: Seconds) -> None:
    source.samples.remove(sample)
    source.tokens -= length
    source.seconds -= seconds(length, source.degree)
    _add(target, sample, length, seconds)


def _take_one(
    empty: _Filled, groups: Sequence[_Filled], lengths: Sequence[int], rank_tokens: int, seconds: Seconds
) -> bool:
    """Moves the longest sample that fits from the group that ends last to an empty one; returns whether one did."""
    for source in sorted(groups, key=lambda group: -group.seconds):
        fits = [sample for sample in source.samples if lengths[sample] <= empty.degree * rank_tokens]
        if len(source.samples) > 1 and fits:
            sample = max(fits, key=lambda sample: lengths[sample])
            _move(source, empty, sample, lengths[sample], seconds)
            return True
    return False


def _improve(groups: Sequence[_Filled], lengths: Sequence[int], rank_tokens: int, seconds: Seconds) -> None:
    """Moves samples from the group that ends last, or swaps them, while the groups then end earlier."""
    for _ in range(4 * len(lengths)):
        *others, last = sorted(groups, key=lambda group: group.seconds)
        mean = sum(group.seconds * group.degree for group in groups) / sum(group.degree for group in groups)
        if last.seconds <= BALANCED * mean:
            return
        change = _find_change(last, others[:OTHERS], lengths, rank_tokens, seconds)
        if change is None:
            return
        other, given, taken = change
        _move(last, other, given, lengths[given], seconds)
        if taken is not None:
            _move(other, last, taken, lengths[taken], seconds)


def _find_change(
    last: _Filled, others: Sequence[_Filled], lengths: Sequence[int], rank_tokens: int, seconds: Seconds
) -> tuple[_Filled, int, int | None] | None:
    """Returns the group, the sample to give it and the one to take for it (None: none) with which both end earliest;
    None where nothing helps."""
    best = last.seconds * (1 - GAIN)
    change: tuple[_Filled, int, int | None] | None = None
    for other in others:
        room, own_room = other.degree * rank_tokens - other.tokens, last.degree * rank_tokens - last.tokens
        for given in last.samples:
            n = lengths[given]
            left, right = last.seconds - seconds(n, last.degree), other.seconds + seconds(n, other.degree)
            if n <= room and len(last.samples) > 1 and max(left, right) < best:
                best, change = max(left, right), (other, given, None)
            for taken in other.samples:
                m = lengths[taken]
                if n - m <= room and m - n <= own_room:
                    ends = left + seconds(m, last.degree), right - seconds(m, other.degree)
                    if max(ends) < best:
                        best, change = max(ends), (other, given, taken)
    return change
