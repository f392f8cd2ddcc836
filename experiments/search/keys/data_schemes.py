"""What bounds know of data schemes; of others they count no collectives, no update and no shares of the states."""

from __future__ import annotations

DATA = ("ddp", "zero-1", "zero-2", "zero-3", "fsdp")
"""Ways to shard states over data-parallel ranks that are tried by default, and that bounds know."""

SHARDED = {"zero-2": (1, 0), "zero-3": (1, 2), "fsdp": (1, 2)}
"""Data schemes that reduce gradients in every micro-batch: how often they do, and how often they gather weights."""


def is_known(data: str) -> bool:
    """Whether bounds know the collectives of a data scheme."""
    return data in DATA


def may_shard_gradients(data: str) -> bool:
    """Whether a data scheme may reduce gradients in every micro-batch."""
    return data in SHARDED or not is_known(data)


def collectives_of_microbatch(data: str, piped: bool, overlaps: bool) -> tuple[int, int]:
    """How often a micro-batch reduces gradients, and gathers weights at most, with a data scheme.

    piped, overlaps: under a pipeline that overlaps, FSDP keeps weights whole through all micro-batches.
    """
    return (0, 0) if data == "fsdp" and piped and overlaps else SHARDED.get(data, (0, 0))
