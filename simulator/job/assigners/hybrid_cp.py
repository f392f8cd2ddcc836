"""Hybrid context parallelism of Megatron-Core: every sample gets as few ranks as it needs, in rounds that are balanced.

A sample of s tokens gets 2^ceil(log2(s / c)) ranks, with at most c tokens a rank. Its work is s^2 over them. Samples,
from the longest to the shortest, are divided into as many buckets of equal work as there are numbers of ranks; a round
takes from the first bucket whose first sample has free ranks or a group of its size: free ranks first, then the group
with the least work. Once samples of fewer ranks come, a round ends where the ranks' work differs by at most 5 %. The
last sample of the busiest group goes to the next round if that evens the round out, and ranks that are left free join a
smallest group, which doubles.

    c = 4k, 8 ranks                    round 0                        round 1
    32k 8k 8k 8k 4k 4k 3k 3k ...       32k on ranks 0-7               8k on 0-1, 8k on 2-3, 8k on 4-5, 4k on 6, 4k on 7

Each sample is a micro-batch: its forward and backward pass run before the next begins. At the end of a round all ranks
wait for each other.

References: megatron/core/pipeline_parallel/hybrid_cp_schedule.py (`BalancedCPScheduler`) and
megatron/core/datasets/data_schedule.py of NVIDIA/Megatron-LM, at d98e8a64 of 2026-08-22.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil, log2

from meshcast.hardware.records import dataclass
from meshcast.simulator.job.assigners.groups import Round, SampleGroup

SLACK = 0.05
"""Difference of the work of two ranks, over that of the busiest, with which a round counts as balanced."""

OVERFULL = 1.1
"""A bucket ends before its work exceeds so many times an equal share."""


@dataclass
class _Group(SampleGroup):
    """A group, and the work of its samples."""

    work: float = 0.0


def assign_hybrid(lengths: Sequence[int], rank_tokens: int, ranks: int) -> list[Round]:
    """Returns the rounds of all samples.

    lengths: of the samples; none needs more than all ranks [tokens].
    rank_tokens: of a rank at most.
    ranks: a power of 2.
    """
    left = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    rounds = list[Round]()
    while left:
        groups, left = _HybridRound(lengths, rank_tokens, ranks).fill(left)
        rounds.append(groups)
    return rounds


def degree_of(length: int, rank_tokens: int) -> int:
    """Returns the ranks that a sample of so many tokens gets."""
    return max(1, 2 ** ceil(log2(length / rank_tokens)))


class _HybridRound:
    """A round that is being filled; see `assign_hybrid`."""

    def __init__(self, lengths: Sequence[int], rank_tokens: int, ranks: int) -> None:
        self.degrees = [degree_of(length, rank_tokens) for length in lengths]
        self.works = [length * length / degree for length, degree in zip(lengths, self.degrees, strict=True)]
        self.ranks = ranks
        self.groups: list[_Group] = []

    @property
    def free(self) -> int:
        """Ranks without a sample; they are behind all groups."""
        return self.ranks - sum(group.degree for group in self.groups)

    def fill(self, samples: Sequence[int]) -> tuple[list[_Group], list[int]]:
        """Returns the groups of the round, and the samples that are left for the next."""
        left = self._place(self._divide(samples))
        left += self._trim()
        while self.free:
            smallest = min(group.degree for group in self.groups)
            grown = next(group for group in self.groups if group.degree == smallest)
            grown.degree = min(2 * smallest, self.ranks)
        return self.groups, left

    def _divide(self, samples: Sequence[int]) -> list[deque[int]]:
        """Returns buckets of samples of about equal work, at most as many as there are degrees."""
        count = len({self.degrees[sample] for sample in samples})
        target = sum(self.works[sample] for sample in samples) / count
        buckets, work = [deque[int]()], 0.0
        open_buckets = count
        for i, sample in enumerate(samples):
            # The number of closed buckets is taken off twice, as in the source.
            scarce = len(samples) - i <= open_buckets - (len(buckets) - 1)
            if buckets[-1] and (work + self.works[sample] > OVERFULL * target or scarce):
                buckets.append(deque())
                work, open_buckets = 0.0, open_buckets - 1
            buckets[-1].append(sample)
            work += self.works[sample]
        return buckets

    def _place(self, buckets: list[deque[int]]) -> list[int]:
        """Places samples while there is room and the round is not balanced; returns those that are left."""
        first, fewer = 0, False
        while buckets:
            bucket = next((bucket for bucket in buckets if bucket and self._has_room(bucket[0])), None)
            if bucket is None:
                break
            sample = bucket.popleft()
            degree = self.degrees[sample]
            first = first or degree
            self._add(sample)
            while buckets and not buckets[0]:
                buckets.pop(0)
            fewer = fewer or degree < first
            if fewer and buckets and self._is_balanced():
                break
        return [sample for bucket in buckets for sample in bucket]

    def _has_room(self, sample: int) -> bool:
        degree = self.degrees[sample]
        return self.free >= degree or any(group.degree == degree for group in self.groups)

    def _add(self, sample: int) -> None:
        """Gives a sample to free ranks, or to the group of its size that has least work."""
        degree = self.degrees[sample]
        if self.free >= degree:
            self.groups.append(_Group(degree))
        of_size = [group for group in self.groups if group.degree == degree]
        group = of_size[-1] if not of_size[-1].microbatches else min(of_size, key=lambda group: group.work)
        group.microbatches.append([sample])
        group.work += self.works[sample]

    def _extremes(self) -> tuple[float, float]:
        """Returns the work of the rank with least and of that with most."""
        works = [group.work for group in self.groups]
        return 0.0 if self.free else min(works), max(works)

    def _is_balanced(self) -> bool:
        least, most = self._extremes()
        return most - least <= SLACK * most

    def _trim(self) -> list[int]:
        """Takes the last sample from the busiest group while that evens the work out; returns what was taken."""
        taken = list[int]()
        while not self._is_balanced() and not self.free:
            least, most = self._extremes()
            group = next(group for group in self.groups if group.work == most)
            if len(group.microbatches) == 1:
                break
            (sample,) = group.microbatches[-1]
            works = [other.work - self.works[sample] * (other is group) for other in self.groups]
            if max(works) - min(works) >= most - least:
                break
            taken.append(sample)
            group.microbatches.pop()
            group.work -= self.works[sample]
        return taken
