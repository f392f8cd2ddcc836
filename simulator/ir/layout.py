"""Layouts, and the communication between them.

A layout says, per mesh axis, how a tensor lies on the ranks of that axis: cut along one of its dims, a partial sum, or
(not listed) a full copy. A scheme says which dim its axis divides at a site; what arrives, what leaves and what must
move in between is worked out here, once for activations and with the same rules for gradients:

* an input that has the divided dim must arrive cut along it, one that lacks it must arrive whole;
* an output that has it leaves cut, one that lacks it leaves as a partial sum;
* an axis may divide one dim of some tensors and another of the rest (``b|h``: samples, and `h` of what has none);
* for gradients the two change places: the gradient of an output must arrive cut or whole, that of an input leaves
  cut or partial; a weight that has the dim is cut, the gradient of one that lacks it is partial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from simulator.ir.mesh import Mesh
from simulator.ir.ops import BYTES, Collective

PARTIAL = "+"
"""The state of a tensor whose copies must still be summed over an axis."""

Layout = Mapping[str, str]
"""Axis to the dim it cuts, or to PARTIAL; an axis that is not listed holds full copies."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a tensor: `size` elements, cut only at multiples of `unit` (a head is never cut).

    copies: a dim of fewer units than ranks (key and value heads) is copied rather than cut below one unit.
    A unit below one divides a dim that adds no elements of its own: routed tokens, counted along another dim, that are
    spread over experts evenly.
    """

    size: int | Fraction
    unit: int | Fraction = 1
    copies: bool = False

    def local(self, parts: int) -> int | Fraction:
        """Elements on one of `parts` ranks."""
        units = self.size // self.unit
        return (math.ceil(units / parts) if self.copies else units // parts) * self.unit

    def ranks_per_part(self, parts: int) -> int:
        """Of `parts` ranks, how many neighbours hold the same part."""
        return max(1, parts // (self.size // self.unit)) if self.copies else 1

    def is_divisible_by(self, parts: int) -> bool:
        units = self.size // self.unit
        return units % parts == 0 or (self.copies and parts % units == 0)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a site by its named dims (global sizes). Equal names mean the same tensor.

    renamed: dims under which a consumer sees the producer's dims (keys are produced at positions `s` and read at `t`).
    gradient_dtype: of its gradient, where that is another one.
    """

    name: str
    dims: Mapping[str, Dim]
    dtype: str = "bf16"
    renamed: Mapping[str, str] = field(default_factory=dict)
    gradient_dtype: str = ""

    def has(self, dim: str) -> bool:
        return dim in self.dims

    def first_dim(self, dims: str) -> str | None:
        """Of one dim, or of several in turn (``b|h``), the first that it has."""
        return next((dim for dim in dims.split("|") if dim in self.dims), None)

    def rename_dims(self, **renamed: str) -> Tensor:
        """The same tensor with dims under other names."""
        dims = {renamed.get(name, name): dim for name, dim in self.dims.items()}
        return replace(self, dims=dims, renamed=renamed)

    @property
    def gradient(self) -> Tensor:
        """Its gradient: the same but for the number format."""
        return replace(self, dtype=self.gradient_dtype) if self.gradient_dtype else self

    def layout_of_producer(self, layout: Layout) -> Layout:
        """The producer's layout in this consumer's dim names."""
        return {axis: self.renamed.get(dim, dim) for axis, dim in layout.items()}

    def local_dims(self, layout: Layout, mesh: Mesh) -> dict[str, int | Fraction]:
        """Local size of every dim."""
        found = {}
        for name, dim in self.dims.items():
            parts = 1
            for axis, cut in layout.items():
                if cut == name:
                    parts *= mesh.size(axis)
            found[name] = dim.local(parts) if parts > 1 else dim.size
        return found

    def local(self, layout: Layout, mesh: Mesh) -> int:
        """Local number of elements."""
        return int(math.prod(self.local_dims(layout, mesh).values()))

    def nbytes(self, layout: Layout, mesh: Mesh) -> int:
        """Local bytes."""
        return int(self.local(layout, mesh) * BYTES[self.dtype])


def required_layout(tensor: Tensor, divide: Mapping[str, str]) -> Layout:
    """How an input, a weight or the gradient of an output must arrive."""
    return {axis: dim for axis, dims in divide.items() if (dim := tensor.first_dim(dims))}


def output_layout(tensor: Tensor, divide: Mapping[str, str]) -> Layout:
    """How an output, or the gradient of an input or weight, leaves."""
    return {axis: tensor.first_dim(dims) or PARTIAL for axis, dims in divide.items()}


def collectives_between(tensor: Tensor, source: Layout, target: Layout, mesh: Mesh) -> list[Collective]:
    """The collectives that turn `source` into `target`, in order.

    Reductions come first, then all-to-alls, then gathers, inner axes first: so every step moves the least. Turning a
    full copy into a cut is a slice and moves nothing: along a dim that is whole it comes before the all-to-alls. Equal
    steps over all parts of one axis are one step over it.
    """
    steps: list[Collective] = []
    now = dict(source)
    axes = [axis for axis in mesh.inner_first(mesh.axes) if mesh.size(axis) > 1 and now.get(axis) != target.get(axis)]

    def step(operation: str, axis: str, buffer: Layout) -> None:
        work = Collective(operation, tensor.nbytes(buffer, mesh), (axis,))
        now.pop(axis, None)
        if axis in target:
            now[axis] = target[axis]
        if operation == "all_to_all":
            # Copies of heads that several ranks get are sent once for each of them.
            work = replace(work, nbytes=max(work.nbytes, tensor.nbytes(now, mesh)))
        if steps and steps[-1].operation == operation and mesh.of_one_axis(joined := (axis, *steps[-1].axes)):
            # The widest buffer of a rank: what a gather ends with, what a reduction begins with.
            work = Collective(operation, max(work.nbytes, steps.pop().nbytes), joined)
        steps.append(work)

    for axis in axes:
        if now.get(axis) == PARTIAL and target.get(axis) != PARTIAL:
            step("reduce_scatter" if axis in target else "all_reduce", axis, now)
    whole = {axis: target[axis] for axis in axes if axis not in now and target.get(axis) not in (None, PARTIAL)}
    now |= {axis: dim for axis, dim in whole.items() if dim not in now.values()}
    for axis in axes:
        if now.get(axis, PARTIAL) != PARTIAL and target.get(axis, PARTIAL) != PARTIAL and now[axis] != target[axis]:
            step("all_to_all", axis, now)
    for axis in axes:
        if axis in now and now[axis] != PARTIAL and axis not in target:
            step("all_gather", axis, {a: d for a, d in now.items() if a != axis})
    return steps
