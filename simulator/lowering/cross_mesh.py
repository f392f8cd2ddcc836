"""Cross-mesh resharding: messages between pipeline stages whose ranks shard the residual stream in different ways.

Every rank of a stage holds a box of the residual stream, an interval of each sharded dim, and along the other axes the
ranks hold copies of it. A message is the intersection of a box of the sending stage with a box of the receiving stage.
Of the ranks that hold copies of a box, the rank that has sent the fewest bytes so far sends. Where receivers hold
copies too, and gather (see `scatter_gather`), each receives its share only. The output of a branch of the model is a
part of the sequence of its trunk: a message between them is the intersection with the boxes of that part.

Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism", arXiv 2211.05322 (Alpa), sections 2 and 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from itertools import pairwise, product

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Layout
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.operators import Boundary
from meshcast.simulator.ir.ops import Message
from meshcast.simulator.lowering.scope import Scope

Interval = tuple[Fraction, Fraction]
"""Begin and end."""

WHOLE: Interval = Fraction(0), Fraction(1)


def border_layout(scope: Scope, stage: Stage) -> Layout:
    """Returns the layout of the residual stream at the borders of a stage."""
    residual = next(
        tensor for tensor in (stage.units[0].residual_in, stage.units[-1].residual_out) if tensor is not None
    )
    border = Boundary("border", (residual,), (residual,))
    return border.output_layout(residual, scope.division(border))


@dataclass(frozen=True, eq=False)
class BoxGrid:
    """The boxes of a tensor that the ranks of a stage hold, each an interval of every sharded dim.

    dims: number of shards of each sharded dim, in the order of their names.
    ranks: global ranks [shards of each dim, copies].
    parts: the interval of a dim that messages carry, from 0 to 1; all of it where none is named.
    """

    dims: dict[str, int]
    ranks: np.ndarray
    parts: Mapping[str, Interval] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh, pipeline: str, first: int) -> BoxGrid:
        """Returns the boxes of a tensor in `layout` on the ranks of a stage, along all axes of `mesh` but that of the
        pipeline.

        first: global rank of the first of them.
        """
        axes = [axis for axis, size in mesh.axes.items() if size > 1 and axis != pipeline]
        sharding = {dim: [axis for axis in axes if layout.get(axis) == dim] for dim in sorted({*layout.values()})}
        copies = [axis for axis in axes if axis not in layout]
        order = [axis for group in (*sharding.values(), copies) for axis in group]
        ranks = np.full([mesh.size(axis) for axis in order], first)
        for i, axis in enumerate(order):
            steps = np.arange(mesh.size(axis)) * mesh.stride(axis)
            ranks = ranks + steps.reshape([-1 if i == j else 1 for j in range(len(order))])
        dims = {dim: mesh.size(group) for dim, group in sharding.items() if group}
        return cls(dims, ranks.reshape([*dims.values(), mesh.size(copies)]))

    @property
    def boxes(self) -> int:
        """Number of boxes."""
        return math.prod(self.dims.values())

    def equals(self, other: BoxGrid) -> bool:
        """Says whether the ranks of two stages hold the same boxes in the same order."""
        order = self.ranks - self.ranks.min(), other.ranks - other.ranks.min()
        cut = any(dim in grid.parts for grid in (self, other) for dim in self.dims)
        return not cut and self.dims == other.dims and np.array_equal(*order)

    def shards(self, dim: str) -> list[Interval]:
        """Returns the intervals that the shards of a dim hold of what messages carry, from 0 to 1; some lie outside."""
        count, (begin, end) = self.dims.get(dim, 1), self.parts.get(dim, WHOLE)
        borders = [(Fraction(i, count) - begin) / (end - begin) for i in range(count + 1)]
        return list(pairwise(borders))


def reshard(sender: BoxGrid, receiver: BoxGrid, nbytes: int, shares: int = 1) -> tuple[Message, ...]:
    """Returns the messages that carry a tensor from the ranks of a stage to those of another.

    nbytes: bytes of the whole tensor.
    shares: copies of a box among the receivers that receive a share of it each, and gather the rest.
    """
    dims = sorted({*sender.dims, *receiver.dims})
    overlaps = [list(_find_overlaps(sender.shards(dim), receiver.shards(dim))) for dim in dims]
    sent: dict[int, int] = defaultdict(int)
    messages: dict[tuple[int, int], int] = defaultdict(int)
    for parts in product(*overlaps):
        at = tuple(source for dim, (source, _, _) in zip(dims, parts, strict=True) if dim in sender.dims)
        to = tuple(target for dim, (_, target, _) in zip(dims, parts, strict=True) if dim in receiver.dims)
        size = nbytes * math.prod(share for _, _, share in parts)
        for target in receiver.ranks[to].tolist():
            piece = round(size / shares)
            source = min(sender.ranks[at].tolist(), key=lambda rank: sent[rank])
            sent[source] += piece
            messages[source, target] += piece
    return tuple((source, target, size) for (source, target), size in messages.items() if size)


def most_received(messages: tuple[Message, ...]) -> int:
    """Returns the most bytes that a rank receives."""
    received: dict[int, int] = defaultdict(int)
    for _, target, nbytes in messages:
        received[target] += nbytes
    return max(received.values(), default=0)


def _find_overlaps(senders: Sequence[Interval], receivers: Sequence[Interval]) -> Iterator[tuple[int, int, float]]:
    """Shards of a dim cut in two ways that overlap between 0 and 1: of the sender, of the receiver, and the overlap."""
    target = 0
    for source, (begin, end) in enumerate(senders):
        while target < len(receivers) - 1 and receivers[target][1] <= max(begin, WHOLE[0]):
            target += 1
        for number in range(target, len(receivers)):
            first, last = receivers[number]
            overlap = min(end, last, WHOLE[1]) - max(begin, first, WHOLE[0])
            if overlap > 0:
                yield source, number, float(overlap)
            elif first >= end:
                break
