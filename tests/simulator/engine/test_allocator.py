"""The allocator does what torch's own does, and what any allocator must."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.engine.allocator import CachedBlock, CachingAllocator

TRACES = json.loads((Path(__file__).parent / "torch_allocator.json").read_text("utf-8"))["traces"]


@pytest.mark.parametrize("trace", TRACES)
def test_it_reserves_what_torch_reserves(trace: dict[str, Any]) -> None:
    """To the byte, behind every allocation and free that was recorded."""
    allocator, blocks = CachingAllocator(trace["expandable"]), list[CachedBlock]()
    rows = zip(trace["tensors"], trace["reserved"], trace["allocated"], strict=True)
    for number, ((nbytes, stream), reserved, allocated) in enumerate(rows):
        if nbytes < 0:
            allocator.free(blocks[-1 - nbytes])
        else:
            blocks.append(allocator.allocate(nbytes, str(stream)))
        assert (allocator.reserved, allocator.allocated) == (reserved, allocated), number


SIZES = st.one_of(st.integers(1, 1 << 12), st.integers(1 << 19, 1 << 21), st.integers(9 << 20, 64 << 20))
TURNS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 100), st.sampled_from(["", "data"])), max_size=80)


@given(TURNS, st.booleans())
def test_no_byte_is_lost_and_none_has_two_tensors(turns: list[tuple[bool, int, int, str]], expandable: bool) -> None:
    allocator, live = CachingAllocator(expandable), dict[CachedBlock, int]()
    for frees, nbytes, which, stream in turns:
        before = allocator.reserved
        if frees and live:
            block = list(live)[which % len(live)]
            del live[block]
            allocator.free(block)
            assert allocator.reserved == before
        else:
            block = allocator.allocate(nbytes, stream)
            live[block] = nbytes
            assert block.nbytes >= nbytes and allocator.reserved >= before
        assert allocator.allocated == sum(block.nbytes for block in live) <= allocator.reserved
        ends = sorted((block.address, block.address + block.nbytes) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for block in live:
        allocator.free(block)
    segments = [(one.address, one.nbytes) for one in allocator.segments]
    assert sum(nbytes for _, nbytes in segments) == allocator.reserved
    # All neighbours have joined again: every segment is one free block, which serves a tensor as large as itself.
    for one in allocator.segments:
        allocator.allocate(one.nbytes if not one.small else 1 << 20, one.stream)
    assert sum(one.nbytes for one in allocator.segments) == sum(nbytes for _, nbytes in segments)


def test_streams_share_nothing_and_small_tensors_lie_apart() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 << 20))
    allocator.allocate(30 << 20, "data")
    allocator.allocate(100)
    allocator.allocate(25 << 20)
    kinds = [(one.nbytes >> 20, one.stream, one.small) for one in allocator.segments]
    assert kinds == [(30, "", False), (30, "data", False), (2, "", True)]
