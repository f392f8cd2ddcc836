"""Cross-mesh resharding: messages between pipeline stages whose ranks shard the residual stream in unlike ways.

Every rank of a stage holds a box of the residual stream, an interval of each sharded dim, and along the other axes the
ranks hold copies of it. A message is the intersection of a box of the sending stage with one of the receiving stage. Of
the ranks that hold copies of a box, the one that has sent the fewest bytes so far sends. Where receivers hold copies
too, and gather (see `scatter_gather`), each receives its share only.

Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism", arXiv 2211.05322 (Alpa), sections 2 and 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from simulator.ir.layout import Layout
from simulator.ir.mesh import Mesh
from simulator.ir.modules import Stage
from simulator.ir.operators import Boundary
from simulator.ir.ops import Message
from simulator.lowering.scope import Scope


def border_layout(scope: Scope, stage: Stage) -> Layout:
    """The layout of the residual stream at the borders of a stage."""
    residual = next(one for one in (stage.units[0].residual_in, stage.units[-1].residual_out) if one is not None)
    border = Boundary("border", (residual,), (residual,))
    return border.output_layout(residual, scope.division(border))


@dataclass(frozen=True, eq=False)
class BoxGrid:
    """The boxes of a tensor that the ranks of a stage hold.

    dims: number of shards of each sharded dim, in the order of their names.
    ranks: global ranks [shards of each dim, copies].
    """

    dims: dict[str, int]
    ranks: np.ndarray

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh, pipeline: str, first: int) -> BoxGrid:
        """The boxes of a tensor in `layout` on the ranks of a stage, along all axes of `mesh` but that of the pipeline.

        first: global rank of the first of them.
        """
        axes = [axis for axis, size in mesh.axes.items() if size > 1 and axis != pipeline]
        sharding = {dim: [axis for axis in axes if layout.get(axis) == dim] for dim in sorted({*layout.values()})}
        copies = [axis for axis in axes if axis not in layout]
        order = [axis for own in (*sharding.values(), copies) for axis in own]
        ranks = np.full([mesh.size(axis) for axis in order], first)
        for i, axis in enumerate(order):
            steps = np.arange(mesh.size(axis)) * mesh.stride(axis)
            ranks = ranks + steps.reshape([-1 if i == j else 1 for j in range(len(order))])
        dims = {dim: mesh.size(own) for dim, own in sharding.items() if own}
        return cls(dims, ranks.reshape([*dims.values(), mesh.size(copies)]))

    @property
    def copies(self) -> int:
        """Ranks that hold the same box."""
        return int(self.ranks.shape[-1])

    @property
    def boxes(self) -> int:
        """Number of boxes."""
        return math.prod(self.dims.values())

    def equals(self, other: BoxGrid) -> bool:
        """Whether the ranks of two stages hold the same boxes in the same order."""
        order = self.ranks - self.ranks.min(), other.ranks - other.ranks.min()
        return self.dims == other.dims and np.array_equal(*order)


def reshard(sender: BoxGrid, receiver: BoxGrid, nbytes: int, shares: int = 1) -> tuple[Message, ...]:
    """The messages that carry a tensor from the ranks of one stage to those of another.

    nbytes: bytes of the whole tensor.
    shares: copies of a box among the receivers that receive one share of it each, and gather the rest.
    """
    dims = sorted({*sender.dims, *receiver.dims})
    overlaps = [list(_overlaps(sender.dims.get(dim, 1), receiver.dims.get(dim, 1))) for dim in dims]
    sent: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int], int] = defaultdict(int)
    for parts in product(*overlaps):
        at = tuple(source for dim, (source, _, _) in zip(dims, parts, strict=True) if dim in sender.dims)
        to = tuple(target for dim, (_, target, _) in zip(dims, parts, strict=True) if dim in receiver.dims)
        size = nbytes * math.prod(share for _, _, share in parts)
        for target in receiver.ranks[to].tolist():
            piece = round(size / shares)
            source = min(sender.ranks[at].tolist(), key=lambda rank: sent[rank])
            sent[source] += piece
            found[source, target] += piece
    return tuple((source, target, size) for (source, target), size in found.items() if size)


def most_received(messages: tuple[Message, ...]) -> int:
    """The most bytes that a rank receives."""
    received: dict[int, int] = defaultdict(int)
    for _, target, nbytes in messages:
        received[target] += nbytes
    return max(received.values(), default=0)


def _overlaps(senders: int, receivers: int) -> Iterator[tuple[int, int, float]]:
    """Shards of a dim cut in two ways that overlap: of the sender, of the receiver, and share of the dim."""
    units = math.lcm(senders, receivers)
    each, every = units // senders, units // receivers
    for source in range(senders):
        for target in range(source * each // every, ((source + 1) * each - 1) // every + 1):
            begin, end = max(source * each, target * every), min((source + 1) * each, (target + 1) * every)
            yield source, target, (end - begin) / units
