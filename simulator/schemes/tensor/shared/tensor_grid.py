"""Tensor parallelism on a grid of ranks: base of the 2D, 2.5D and 3D schemes, which shard GEMMs along several axes.

The ranks form squares or a cube; each axis shards the samples, the contracted dim or the produced dim of a GEMM. Since
samples are sharded too, the samples of a micro-batch must be a multiple of the ranks along the axes that shard them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.moe_operators import TopK
from meshcast.simulator.ir.operators import Concat, Linear
from meshcast.simulator.ir.scheme import TensorScheme

WIDTHS = ("a", "f", "v", "h", "c", "r", "rank")
"""Dims along which activations are wide: heads, feed-forward, vocabulary, hidden, two concatenated streams, latents and
router logits, adapters. Where an operator has several, the first is that whose shards are independent.
"""


class TensorGrid(TensorScheme):
    """Base of tensor schemes on a grid of mesh axes. A named axis may have several parts in the mesh (`Mesh.parts`)."""

    names: ClassVar[tuple[str, ...]]
    """Names of the axes, in the order of `over`."""
    square: ClassVar[tuple[str, ...]]
    """Names of the axes that must have the same number of ranks."""

    @classmethod
    def axis_sizes(cls, ranks: int, near: int) -> list[tuple[int, ...]]:
        """Squares or cubes; of squares behind each other two or more, and no more than a square has rows."""
        sizes, equal = list[tuple[int, ...]](), len(cls.square)
        for side in range(2, ranks + 1):
            depth, left = divmod(ranks, side**equal)
            deep = len(cls.names) > equal
            if depth and not left and (1 < depth <= side if deep else depth == 1):
                sizes.append(tuple(side if name in cls.square else depth for name in cls.names))
        return sizes

    def axis(self, name: str) -> tuple[str, ...]:
        """Returns the parts of the axis `name`."""
        return next(
            (
                self.mesh.parts(axis)
                for axis_name, axis in zip(self.names, self.axes, strict=False)
                if axis_name == name
            ),
            (),
        )

    def along(self, **dims: str) -> Mapping[str, str]:
        """Returns the dim that each part of the mesh shards. dims: by axis name, the dim that it shards."""
        return {part: dim for name, dim in dims.items() for part in self.axis(name)}

    def follows_view(self, operator: Operator) -> bool:
        """Returns whether the operator is in a view of the mesh (of experts), whose schemes shard it."""
        return operator.view in self.mesh.views

    def check_job(self, job: Any) -> None:
        sizes = {
            axis: self.mesh.size(axis) for name, axis in zip(self.names, self.axes, strict=True) if name in self.square
        }
        if len({*sizes.values()}) > 1:
            rule = f"{self.use} needs the same number of ranks along the axes {', '.join(sizes)}"
            fits = " or ".join(str(size) for size in sorted({*sizes.values()}))
            raise PlanError("plan.mesh", rule, f"{' = '.join(sizes)} = {fits} would work", sizes)
        parts = {
            "an indexer (model.mla.index)": job.model.mla and job.model.mla.index,
            "compressed entries (model.compressed)": job.model.compressed,
            "biases by distance (model.distance_profiles)": job.model.distance_profiles,
        }
        for name, part in parts.items():
            if part:
                rule = f"{self.use} divides both widths of linear layers, and {job.model.name} has {name}"
                raise PlanError("plan.schemes", rule, "Use tensor/megatron or tensor/megatron-sp", self.use)


def contracted_and_produced(linear: Linear) -> tuple[str, str]:
    """Returns the dim that a linear contracts, and the dim that it produces."""
    taken, produced = linear.ins[0], linear.outs[0]
    contracted = next(dim for dim in taken.dims if not produced.has(dim))
    return contracted, next(dim for dim in produced.dims if not taken.has(dim))


def width_dims(operator: Operator) -> str:
    """Returns the dims besides tokens along which an operator other than a linear can be sharded; "" if there are none.

    A concatenation is sharded by the shards of its inputs, which every rank concatenates.
    """
    if isinstance(operator, TopK):
        return ""
    dims = [dim for dim in WIDTHS if operator.has(dim)]
    return "|".join(dims) if isinstance(operator, Concat) else dims[0]
