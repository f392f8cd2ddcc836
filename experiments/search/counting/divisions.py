"""Schedules, chunks and partitions of the pipelines with one number of stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from meshcast.experiments.search.keys.partitions import divide_layers

ANY_CHUNKS = ("interleaved-1f1b", "breadth-first", "hanayo")
"""Schedules with two or more chunks a device."""

TWO_CHUNKS = ("zb-v", "dualpipe-v", "v-half", "v-min", "v-zb")


class Division(NamedTuple):
    """How a pipeline divides the layers. layers: the most of a part of the model."""

    schedule: str
    chunks: int
    partition: str | tuple[int, ...]
    layers: int


def list_divisions(
    schedules: Sequence[str], partitions: Sequence[str], chunks: Sequence[int], layers: int, pp: int
) -> Iterator[Division]:
    """The divisions of a model of some layers among `pp` stages, two or more, that exist."""
    for schedule, partition, number in product(schedules, partitions, chunks):
        if _has_chunks(schedule, number):
            for divided in divide_layers(partition, layers, pp * number):
                most = -(-(layers + 2 * (divided == "ends-as-layers")) // (pp * number))
                yield Division(schedule, number, divided, most)


def _has_chunks(schedule: str, chunks: int) -> bool:
    """Whether a schedule takes a number of chunks a device."""
    if schedule in TWO_CHUNKS:
        return chunks == 2
    return chunks > 1 if schedule in ANY_CHUNKS else chunks == 1
