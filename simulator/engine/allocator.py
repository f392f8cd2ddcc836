"""The caching allocator of torch's CUDA devices, played without a GPU: what it reserves for allocations and frees.

pytorch/pytorch @001074d25084, c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to 512 bytes; tensors of up to
1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, larger ones get a segment of their size, rounded
up to 2 MiB. The smallest free block of the stream that is large enough serves a tensor, and what is left of it stays
free; free neighbours join. With expandable segments a stream has a segment for small and another for large tensors,
which grows by whole pages of 2 and of 20 MiB. What it does when memory ends is left out: cached segments are returned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import field

from meshcast.hardware.records import dataclass

UNIT = 512
"""Bytes that sizes are multiples of, and the least rest that is split from a small or expandable block."""
SMALL = 1 << 20
"""Largest tensor of the small pool, and the largest rest that stays with a block of the large pool [bytes]."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_SEGMENT = 10 << 20
"""Smallest tensor that gets a segment of its size [bytes]."""
PAGE = 2 << 20
"""Bytes that segments of a tensor's size are multiples of."""
ROOM = 1 << 40
"""Bytes of addresses for an expandable segment: more than any GPU has."""


@dataclass(slots=True)
class CachedSegment:
    """Memory that was asked of the device at once or, if it grows, piece by piece.

    Attributes:
        address: where it begins.
        nbytes: its size.
        stream: whose tensors it is for.
        small: whether it is for small tensors.
    """

    address: int
    nbytes: int
    stream: str
    small: bool


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A piece of a segment.

    Attributes:
        address: where it begins.
        nbytes: its size.
        pool: the pool that it belongs to.
        before: its neighbour below in the segment.
        behind: its neighbour above.
        free: whether no tensor has it.
    """

    address: int
    nbytes: int
    pool: BlockPool
    before: CachedBlock | None = None
    behind: CachedBlock | None = None
    free: bool = False


@dataclass(eq=False, slots=True)
class BlockPool:
    """The blocks of a stream for small or for large tensors.

    Attributes:
        stream: whose.
        small: whether they are for small tensors.
        least_rest: the smallest rest that is split from a block [bytes].
        blocks: its free blocks by size and address.
        segment: its expandable segment; None: it has none yet.
        last: the block at the end of that.
    """

    stream: str
    small: bool
    least_rest: int
    blocks: list[tuple[int, int, CachedBlock]] = field(default_factory=list)
    segment: CachedSegment | None = None
    last: CachedBlock | None = None

    @property
    def page(self) -> int:
        """Bytes of a segment that tensors share, and by which an expandable segment grows."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


class CachingAllocator:
    """The allocator of a device.

    Attributes:
        expandable: whether segments grow (``expandable_segments``).
        first: the first address.
        segments: in the order in which they were allocated; none is returned.
        reserved: bytes of all segments.
        allocated: bytes of all blocks that tensors have.
    """

    def __init__(self, expandable: bool = False, first: int = 0) -> None:
        self.expandable = expandable
        self.segments: list[CachedSegment] = []
        self.reserved = self.allocated = 0
        self._pools: dict[tuple[str, bool], BlockPool] = {}
        self._top = first

    def allocate(self, nbytes: float, stream: str = "") -> CachedBlock:
        """Returns a block for a tensor of a stream."""
        size = max(UNIT, -int(-nbytes // UNIT) * UNIT)
        small = size <= SMALL
        pool = self._pools.get((stream, small)) or self._add_pool(stream, small)
        blocks = pool.blocks
        at = bisect_left(blocks, (size,))
        if at + 1 < len(blocks) and blocks[at][2] is pool.last:
            at += 1  # A block that can grow counts as large as it can become.
        if at < len(blocks):
            block = blocks.pop(at)[2]
        else:
            block = self._grow(pool, size) if self.expandable else self._add_segment(pool, size)
        if block.nbytes - size >= pool.least_rest:
            self._split(block, size)
        block.free = False
        self.allocated += block.nbytes
        return block

    def free(self, block: CachedBlock) -> None:
        """Takes a block back from its tensor and joins it with free neighbours."""
        self.allocated -= block.nbytes
        pool, before, behind = block.pool, block.before, block.behind
        if before is not None and before.free:
            self._take_out(before)
            block.address, block.before = before.address, before.before
            block.nbytes += before.nbytes
            if block.before is not None:
                block.before.behind = block
        if behind is not None and behind.free:
            self._take_out(behind)
            block.nbytes += behind.nbytes
            block.behind = behind.behind
            if block.behind is not None:
                block.behind.before = block
            elif behind is pool.last:
                pool.last = block
        block.free = True
        insort(pool.blocks, (block.nbytes, block.address, block))

    def _add_pool(self, stream: str, small: bool) -> BlockPool:
        least_rest = UNIT if small or self.expandable else SMALL + 1
        return self._pools.setdefault((stream, small), BlockPool(stream, small, least_rest))

    @staticmethod
    def _take_out(block: CachedBlock) -> None:
        """Takes a free block out of its pool."""
        del block.pool.blocks[bisect_left(block.pool.blocks, (block.nbytes, block.address))]

    @staticmethod
    def _split(block: CachedBlock, size: int) -> None:
        """Cuts what a tensor does not need from its block."""
        pool = block.pool
        rest = CachedBlock(block.address + size, block.nbytes - size, pool, block, block.behind, True)
        if block.behind is not None:
            block.behind.before = rest
        elif block is pool.last:
            pool.last = rest
        block.behind, block.nbytes = rest, size
        insort(pool.blocks, (rest.nbytes, rest.address, rest))

    def _add_segment(self, pool: BlockPool, size: int) -> CachedBlock:
        nbytes = pool.page if size < MIN_SEGMENT else -(-size // PAGE) * PAGE
        self.segments.append(CachedSegment(self._top, nbytes, pool.stream, pool.small))
        self.reserved += nbytes
        self._top += nbytes
        return CachedBlock(self._top - nbytes, nbytes, pool)

    def _grow(self, pool: BlockPool, size: int) -> CachedBlock:
        """Returns a block at the end of an expandable segment, which grows by the pages that it lacks."""
        if pool.segment is None:
            pool.segment = CachedSegment(self._top, 0, pool.stream, pool.small)
            self.segments.append(pool.segment)
            self._top += ROOM
        segment, block = pool.segment, pool.last
        if block is not None and block.free:
            self._take_out(block)
        else:
            pool.last = CachedBlock(segment.address + segment.nbytes, 0, pool, block)
            if block is not None:
                block.behind = pool.last
            block = pool.last
        grown = -(-(size - block.nbytes) // pool.page) * pool.page
        block.nbytes += grown
        segment.nbytes += grown
        self.reserved += grown
        return block
