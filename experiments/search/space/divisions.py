"""Divisors of degrees; schedules, chunks and partitions of the pipelines with a number of stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

UNEVEN_ENDS = "uneven-ends"
"""Lists in which the first and the last stage have fewer layers than the others, where nothing divides the layers."""

ANY_CHUNKS = ("interleaved-1f1b", "interleaved-zb", "grouped-interleaved", "breadth-first", "hanayo")
"""Schedules with two or more chunks a device."""

TWO_CHUNKS = ("zb-v", "dualpipe-v", "v-half", "v-min", "v-zb")


class Division(NamedTuple):
    """How a pipeline divides the layers.

    layers: the most of a part of the model.
    """

    schedule: str
    chunks: int
    partition: str | tuple[int, ...]
    layers: int


def list_divisions(
    schedules: Sequence[str], partitions: Sequence[str], chunks: Sequence[int], layers: int, pp: int
) -> Iterator[Division]:
    """Yields the divisions of a model of some layers among `pp` stages, two or more, that exist."""
    for schedule, partition, number in product(schedules, partitions, chunks):
        if _has_chunks(schedule, number):
            for divided in _divide_layers(partition, layers, pp * number):
                most = -(-(layers + 2 * (divided == "ends-as-layers")) // (pp * number))
                yield Division(schedule, number, divided, most)


def _has_chunks(schedule: str, chunks: int) -> bool:
    if schedule in TWO_CHUNKS:
        return chunks == 2
    return chunks > 1 if schedule in ANY_CHUNKS else chunks == 1


def _divide_layers(partition: str, layers: int, parts: int) -> list[str | tuple[int, ...]]:
    """Returns what a partition comes to with so many parts of the model; empty: it does not exist."""
    if partition != UNEVEN_ENDS:
        return [] if (layers if partition == "even" else layers + 2) % parts else [partition]
    most = -(-layers // parts)
    left = layers - (parts - 2) * most
    if not layers % parts or not (layers + 2) % parts or parts < 2 or left < 0:
        return []
    ends = range(max(0, left - most), min(most, left) + 1)
    return [(first, *[most] * (parts - 2), left - first) for first in ends]


def list_divisors_of_any(numbers: Sequence[int], most: int) -> list[int]:
    """Returns divisors of any of some numbers, up to `most`."""
    return [n for n in range(1, most + 1) if any(number % n == 0 for number in numbers)]
