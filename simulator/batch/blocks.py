"""Blocks and side ops as arrays, as the loops of `simulator.batch.kernels` read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.batch.kernels import OTHERS, raise_matrix, sweep_block
from meshcast.simulator.ir.ops import COMPUTE, HostCopy, Op
from meshcast.simulator.program.block import Block
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.program.task import PricedSideOps

GRADIENTS = CATEGORIES.index("gradients")

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
    def size(self) -> int:
        """Number of coordinates."""
        return OTHERS - 1 + len(self._at)


@dataclass(eq=False)
class BlockArrays:
    """A block at its prices.

    whole: its header, streams, entries, the ops that each waits for, its exits, and the places of each of its marks.
    reals: seconds, latency and launches of its ops.
    streams: coordinates that it uses.
    ops: their number.
    params: number of its marks.
    launches: of all ops.
    net, top: what a copy leaves, and its peak; of both the gradients behind it [bytes].
    copies_to_host: whether it offloads anything.
    powers: (max,+) matrices, by the size of states, the time of the host to launch an op, and the number of copies.
    """

    whole: np.ndarray
    reals: np.ndarray
    streams: frozenset[int]
    ops: int
    params: int
    launches: float
    net: tuple[float, float]
    top: tuple[float, float]
    copies_to_host: bool
    powers: dict[tuple[int, float, int], np.ndarray]

    def power(self, size: int, launch: float, count: int) -> np.ndarray:
        """Returns the matrix of `count` copies. size: of states; launch: time of the host to launch an op [s]."""
        copy = remember(self.powers, (size, launch, 1), lambda: sweep_block(self.whole, self.reals, size, launch))
        return remember(self.powers, (size, launch, count), lambda: raise_matrix(copy, count))


def flatten_block(block: Block, prices: Sequence[tuple[float, float]], marks: Marks, streams: Streams) -> BlockArrays:
    """Returns the arrays of a block.

    prices: seconds and latency of its ops.
    marks: the places of its parameters.
    """
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
    reals = np.array([*(price[0] for price in prices), *(price[1] for price in prices), *launches])
    net, top = ((float(of.sum()), float(of[GRADIENTS])) for of in (block.memory.net, block.memory.top))
    offloads = any(isinstance(work, HostCopy) for work in block.host_works)
    whole = np.array([*numbers], np.int64)
    return BlockArrays(whole, reals, frozenset(at), len(ops), len(marks), sum(launches), net, top, offloads, {})


@dataclass(eq=False)
class SideArrays:
    """Side ops at their prices. whole: stream, ops, where the parameters of each begin, and these; reals: seconds and
    latency."""

    whole: np.ndarray
    reals: np.ndarray
    stream: int


def flatten_side(side: PricedSideOps, streams: Streams) -> SideArrays:
    """Returns the arrays of side ops at their prices."""
    stream, count = streams.at(side.stream), len(side.ops)
    whole = np.concatenate([[stream, count], side.starts, [len(side.params)], side.params]).astype(np.int64)
    return SideArrays(whole, np.concatenate([side.seconds, side.latency]), stream)


def stream_numbers(ops: Sequence[Op], devices: Sequence[int]) -> np.ndarray:
    """Returns by op the number of its stream; those of different devices have different numbers."""
    numbers: dict[tuple[int, str], int] = {}
    return np.array([numbers.setdefault((d, op.stream), len(numbers)) for op, d in zip(ops, devices, strict=True)])
