"""Partition of samples into micro-batches for the shortest step: beside all partitions, and at its limits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from meshcast.simulator.job.shortest_step import partition_samples

HALF = 64


def seconds(rows: int, length: int) -> float:
    return (rows * length + HALF) * (1 + length / 500)


def step(parts: list[range], lengths: list[int], stages: int, replicas: int, ranks: int) -> float:
    times = [seconds(-(-len(own) // ranks), lengths[own.start]) for own in parts]
    return (stages - 1) * max(times) + sum(times) / replicas


@pytest.mark.parametrize(("stages", "replicas", "ranks"), [(1, 1, 1), (4, 1, 1), (4, 2, 1), (8, 1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_partition_makes_a_much_shorter_step(stages: int, replicas: int, ranks: int, seed: int) -> None:
    """Of all partitions of ten samples; limits of the longest micro-batch are 32 of all that there are."""
    lengths = sorted(np.random.default_rng(seed).integers(8, 600, 10).tolist(), reverse=True)
    most = 800
    found = partition_samples(lengths, most, stages, replicas, ranks, seconds)
    assert [i for own in found for i in own] == list(range(10))
    every = []
    for count in range(10):
        for borders in combinations(range(1, 10), count):
            parts = [range(i, j) for i, j in zip((0, *borders), (*borders, 10), strict=True)]
            fit = (-(-len(own) // ranks) <= max(1, most // lengths[own.start]) for own in parts)
            every += [step(parts, lengths, stages, replicas, ranks)] * all(fit)
    assert min(every) <= step(found, lengths, stages, replicas, ranks) <= 1.03 * min(every)


def test_samples_are_joined_as_long_as_products_gain_more_than_padding_costs() -> None:
    """On one stage: two equal samples always; a short one with a long one only if it is hardly shorter."""
    together = partition_samples([100, 100], 1000, 1, 1, 1, seconds)
    apart = partition_samples([100, 10], 1000, 1, 1, 1, lambda rows, length: rows * length + 64)
    joined = partition_samples([100, 50], 1000, 1, 1, 1, lambda rows, length: rows * length + 64)
    assert [len(one) for one in (together, apart, joined)] == [1, 2, 1]


def test_many_stages_ask_for_short_micro_batches() -> None:
    few, many = (partition_samples([64] * 64, 4096, stages, 1, 1, seconds) for stages in (1, 16))
    assert (len(few), len(many) > 4) == (1, True)


def test_a_sample_that_is_longer_than_a_micro_batch_is_one_by_itself() -> None:
    assert partition_samples([900, 100], 500, 2, 1, 1, seconds) == [range(0, 1), range(1, 2)]
