"""Packing of Megatron-Core's scheduler ``dp_balanced``: samples in their order, until a sequence is full.

So that every data-parallel rank has as many sequences, the last samples of the last sequences that have several become
sequences of their own.

References: megatron/core/datasets/data_schedule.py (`DpBalancedScheduler`) of NVIDIA/Megatron-LM, at d98e8a64 of
2026-08-22.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack_in_order(lengths: Sequence[int], most: int, multiple: int) -> list[list[int]]:
    """Returns the lengths of the samples of every sequence, a multiple of `multiple` sequences; fewer where there are
    too few samples.

    lengths: of the samples, in their order [tokens].
    most: tokens of a sequence; a longer sample fills one alone.
    """
    packed = [list[int]()]
    for length in lengths:
        if packed[-1] and sum(packed[-1]) + length > most:
            packed.append([])
        packed[-1].append(length)
    at = len(packed) - 1
    while len(packed) % multiple and at >= 0:
        if len(packed[at]) > 1:
            packed.append([packed[at].pop()])
        else:
            at -= 1
    return packed
