"""Divisions of the layers of a model among the parts of a pipeline."""

from __future__ import annotations

UNLIKE_ENDS = "unlike-ends"
"""Lists in which the first and the last stage have fewer layers than the others, where nothing divides the layers."""


def divide_layers(partition: str, layers: int, parts: int) -> list[str | tuple[int, ...]]:
    """What a partition comes to with so many parts of the model; empty: it does not exist."""
    if partition != UNLIKE_ENDS:
        return [] if (layers if partition == "even" else layers + 2) % parts else [partition]
    most = -(-layers // parts)
    left = layers - (parts - 2) * most
    if not layers % parts or not (layers + 2) % parts or parts < 2 or left < 0:
        return []
    ends = range(max(0, left - most), min(most, left) + 1)
    return [(first, *[most] * (parts - 2), left - first) for first in ends]
