"""Blocks and side ops as arrays, as the loops of `simulator.batch.loops` read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.batch.loops.arrays import OTHERS
from meshcast.simulator.batch.loops.matrices import raise_matrix, sweep_block
from meshcast.simulator.ir.ops import COMPUTE, HostCopy, Op
from meshcast.simulator.program.block import BlockPrices
from meshcast.simulator.program.task import PricedSideOps

Marks = Sequence[tuple[int, ...]]
"""For each parameter of a block, the places of the ops that first use it or complete its gradient."""


class Streams:
    """The coordinates of streams in states, in the order in which blocks bring them."""

    def __init__(self) -> None:
        self._at = {COMPUTE: 0}

    def at(self, stream: str) -> int:
        """Returns the coordinate of a stream."""
        return remember(self._at, stream, lambda: OTHERS - 1 + len(self._at))

    @property
    def names(self) -> dict[int, str]:
        """The streams by their coordinates."""
        return {at: stream for stream, at in self._at.items()}

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return OTHERS - 1 + len(self._at)


@dataclass(eq=False)
class BlockArrays:
    """A block at its prices.

    whole: its header, streams, entries, the ops that each waits for, its exits, and the places of each of its marks.
    reals: seconds, latency and launches of its ops.
    ops: their number, by stream.
    params: number of its marks.
    launches: of all ops.
    copies_to_host: whether it offloads anything.
    prices: the prices themselves.
    powers: (max,+) matrices, by the size of states, the time of the host to launch an op, and the number of copies.
    """

    whole: np.ndarray
    reals: np.ndarray
    ops: dict[int, int]
    params: int
    launches: float
    copies_to_host: bool
    prices: BlockPrices
    powers: dict[tuple[int, float, int], np.ndarray]

    def power(self, size: int, launch: float, count: int) -> np.ndarray:
        """Returns the matrix of `count` copies. size: of states; launch: time of the host to launch an op [s]."""
        copy = remember(self.powers, (size, launch, 1), lambda: sweep_block(self.whole, self.reals, size, launch))
        return remember(self.powers, (size, launch, count), lambda: raise_matrix(copy, count))


def flatten_block(prices: BlockPrices, marks: Marks, streams: Streams) -> BlockArrays:
    """Returns the arrays of a block at its prices. marks: the places of its parameters."""
    block = prices.block
    (port,), ops = block.ports, block.ops
    at = [streams.at(op.stream) for op in ops]
    entries = [0] * len(ops)
    for place in port.entry:
        entries[place] = 1
    waits = accumulate(map(len, block.after), initial=0)
    places = accumulate(map(len, marks), initial=0)
    header = len(ops), int(port.through), len(port.exit), len(marks)
    numbers = chain(
        header, at, entries, waits, chain.from_iterable(block.after), port.exit, places, chain.from_iterable(marks)
    )
    launches = [op.issued for op in ops]
    reals = np.array([*prices.seconds, *prices.latency, *launches])
    offloads = any(isinstance(work, HostCopy) for work in block.host_works)
    whole = np.array([*numbers], np.int64)
    return BlockArrays(whole, reals, Counter(at), len(marks), sum(launches), offloads, prices, {})


@dataclass(eq=False)
class SideArrays:
    """Side ops at their prices.

    whole: stream, ops, where the parameters of each begin, and these.
    reals: seconds and latency.
    stream: its coordinate.
    side: the side ops themselves.
    """

    whole: np.ndarray
    reals: np.ndarray
    stream: int
    side: PricedSideOps


def flatten_side(side: PricedSideOps, streams: Streams) -> SideArrays:
    """Returns the arrays of side ops at their prices."""
    stream, count = streams.at(side.stream), len(side.ops)
    whole = np.concatenate([[stream, count], side.starts, [len(side.params)], side.params]).astype(np.int64)
    return SideArrays(whole, np.concatenate([side.seconds, side.latency]), stream, side)


def stream_numbers(ops: Sequence[Op], devices: Sequence[int]) -> np.ndarray:
    """Returns by op the number of its stream; those of different devices have different numbers."""
    numbers: dict[tuple[int, str], int] = {}
    return np.array([numbers.setdefault((d, op.stream), len(numbers)) for op, d in zip(ops, devices, strict=True)])
