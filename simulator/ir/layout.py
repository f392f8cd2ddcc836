"""Layouts of tensors on the mesh, and the collectives that turn a layout into another.

A layout says for each mesh axis what the ranks along that axis hold of a tensor: shards along a dim, partial
sums, or replicas (then the layout does not list the axis). A scheme says which dim its axis shards at an operator. From
that follow the layouts of all tensors of the operator:

* the operator needs an input sharded along that dim if the input has it, and replicated otherwise;
* it produces an output sharded along that dim if the output has it, and as partial sums otherwise;
* an axis may shard a dim of some tensors and another dim of the others (``b|h``: `b` of tensors that have it, else
  `h`);
* backward, the operator needs the gradient of an output as it needs an input, and produces the gradient of an input as
  it produces an output. A weight that has the dim is sharded, and so is its gradient; the gradient of a weight that
  lacks it is a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from fractions import Fraction
from functools import cached_property

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import BYTES, Collective

PARTIAL = "+"
"""The state of a tensor along an axis whose ranks hold partial sums of it."""

Layout = Mapping[str, str]
"""From mesh axis to the dim that it shards, or to PARTIAL; along axes that are not listed the tensor is replicated."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a tensor.

    size: number of elements.
    unit: elements that stay together on a rank, for example the width of a head. A unit below 1 shards a dim that
        adds no further elements: routed tokens, counted along another dim, are sharded evenly over experts.
    copies: whether ranks share a unit where there are fewer units than ranks (key and value heads).
    """

    size: int | Fraction
    unit: int | Fraction = 1
    copies: bool = False

    def local(self, parts: int) -> int | Fraction:
        """Returns the number of elements on each of `parts` ranks."""
        units = self.size // self.unit
        return (math.ceil(units / parts) if self.copies else units // parts) * self.unit

    def ranks_per_part(self, parts: int) -> int:
        """Returns how many neighbouring ranks, of `parts` ranks in all, hold the same shard."""
        return max(1, parts // (self.size // self.unit)) if self.copies else 1

    def is_divisible_by(self, parts: int) -> bool:
        """Returns whether `parts` ranks get equal shards of whole units, or equal numbers of ranks share each unit."""
        units = self.size // self.unit
        return units % parts == 0 or (self.copies and parts % units == 0)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of an operator with named dims.

    name: equal names in a unit mean the same tensor.
    dims: the dims with their global sizes, by name.
    dtype: number format.
    renamed: the consumer's name of a dim by the producer's name (keys are produced at positions `s` and read at `t`).
    gradient_dtype: number format of the gradient; empty: `dtype`.
    pieces: that make it up, which are in memory in turn.
    parts: equal tensors side by side in it, of which it adds one to those that are in memory already.
    """

    name: str
    dims: Mapping[str, Dim]
    dtype: str = "bf16"
    renamed: Mapping[str, str] = field(default_factory=dict)
    gradient_dtype: str = ""
    pieces: int = 1
    parts: int = 1

    def has(self, dim: str) -> bool:
        """Returns whether the tensor has this dim."""
        return dim in self.dims

    def first_dim(self, dims: str) -> str | None:
        """Returns the first of the dims (``b|h``) that the tensor has; None: it has none of them."""
        if dims in self.dims:
            return dims
        return next((dim for dim in dims.split("|") if dim in self.dims), None) if "|" in dims else None

    def rename_dims(self, **renamed: str) -> Tensor:
        """Returns the same tensor with other names for some dims."""
        dims = {renamed.get(name, name): dim for name, dim in self.dims.items()}
        return replace(self, dims=dims, renamed=renamed)

    @property
    def gradient(self) -> Tensor:
        """The gradient: the same dims, in its number format; all its parts are its own."""
        if not self.gradient_dtype and self.parts == 1:
            return self
        return replace(self, dtype=self.gradient_dtype or self.dtype, parts=1)

    def layout_of_producer(self, layout: Layout) -> Layout:
        """Renames the dims of `layout`, in which the producer makes the tensor, to those of this consumer."""
        return {axis: self.renamed.get(dim, dim) for axis, dim in layout.items()}

    @cached_property
    def sizes(self) -> dict[str, int | Fraction]:
        """The global size of every dim."""
        return {name: dim.size for name, dim in self.dims.items()}

    def local_dims(self, layout: Layout, mesh: Mesh) -> dict[str, int | Fraction]:
        """Returns the local size of every dim."""
        sizes, parts = dict(self.sizes), dict[str, int]()
        for axis, name in layout.items():
            if name in sizes:
                parts[name] = parts.get(name, 1) * mesh.size(axis)
        for name, count in parts.items():
            if count > 1:
                sizes[name] = self.dims[name].local(count)
        return sizes

    def local(self, layout: Layout, mesh: Mesh) -> int:
        """Returns the local number of elements."""
        return int(math.prod(self.local_dims(layout, mesh).values()))

    def held_bytes(self, layout: Layout, mesh: Mesh) -> int:
        """Returns the local bytes that are in memory at a time."""
        return -(-self.nbytes(layout, mesh) // (self.pieces * self.parts))

    def nbytes(self, layout: Layout, mesh: Mesh) -> int:
        """Returns the local size in bytes."""
        return int(self.local(layout, mesh) * BYTES[self.dtype])


def required_layout(tensor: Tensor, divide: Mapping[str, str]) -> Layout:
    """Returns the layout in which an operator needs an input, a weight or the gradient of an output.

    divide: which dim each axis shards at the operator.
    """
    return {axis: dim for axis, dims in divide.items() if (dim := tensor.first_dim(dims))}


def output_layout(tensor: Tensor, divide: Mapping[str, str]) -> Layout:
    """Returns the layout in which an operator produces an output, or the gradient of an input or weight.

    divide: which dim each axis shards at the operator.
    """
    return {axis: tensor.first_dim(dims) or PARTIAL for axis, dims in divide.items()}


def collectives_between(tensor: Tensor, source: Layout, target: Layout, mesh: Mesh) -> list[Collective]:
    """Returns the collectives that turn the layout `source` into `target`, in the order of their execution.

    Reductions come first, then all-to-alls, then all-gathers, each over inner axes first: this order moves the fewest
    bytes. Sharding a replicated tensor is a local slice without communication; along a dim that no axis shards yet it
    comes before the all-to-alls. Equal collectives over all parts of an axis become a collective over that axis;
    over axes that the mesh joins, those that turn the same dim into the same other.
    """
    if source == target:
        return []
    conversion = _Conversion(tensor, source, target, mesh)
    conversion.reduce()
    conversion.slice_whole()
    conversion.exchange()
    conversion.gather()
    return conversion.steps


class _Conversion:
    """A tensor on the way from a layout to another.

    now: its layout so far.
    axes: those along which the layouts differ, inner first.
    moves: of every step, the dim that the axis sharded before and that which it shards after.
    """

    def __init__(self, tensor: Tensor, source: Layout, target: Layout, mesh: Mesh) -> None:
        self.tensor, self.target, self.mesh, self.now = tensor, target, mesh, dict(source)
        self.axes = [
            axis for axis in mesh.inner_first(mesh.axes) if mesh.size(axis) > 1 and source.get(axis) != target.get(axis)
        ]
        self.steps: list[Collective] = []
        self.moves: list[tuple[str | None, str | None]] = []

    def reduce(self) -> None:
        for axis in self.axes:
            if self.now.get(axis) == PARTIAL and self.target.get(axis) != PARTIAL:
                self._add("reduce_scatter" if axis in self.target else "all_reduce", axis, self.now)

    def slice_whole(self) -> None:
        """Shards replicated dims that no axis shards yet, without communication."""
        whole = {axis: self.target[axis] for axis in self.axes if axis not in self.now and axis in self.target}
        sharded = (None, PARTIAL, *self.now.values())
        self.now |= {axis: dim for axis, dim in whole.items() if dim not in sharded}

    def exchange(self) -> None:
        for axis in self.axes:
            before, after = self.now.get(axis, PARTIAL), self.target.get(axis, PARTIAL)
            if PARTIAL not in (before, after) and before != after:
                self._add("all_to_all", axis, self.now)

    def gather(self) -> None:
        for axis in self.axes:
            if self.now.get(axis, PARTIAL) != PARTIAL and axis not in self.target:
                self._add("all_gather", axis, {other: dim for other, dim in self.now.items() if other != axis})

    def _add(self, operation: str, axis: str, buffer: Layout) -> None:
        """Adds a collective, or joins it with the last. buffer: the layout of its largest buffer."""
        work = Collective(operation, self.tensor.nbytes(buffer, self.mesh), (axis,))
        self.moves.append((self.now.pop(axis, None), self.target.get(axis)))
        if axis in self.target:
            self.now[axis] = self.target[axis]
        if operation == "all_to_all":
            # A head of keys or values that several ranks share is sent to each of them.
            work = replace(work, nbytes=max(work.nbytes, self.tensor.nbytes(self.now, self.mesh)))
        steps = self.steps
        joined = (axis, *(steps[-1].axes if steps and steps[-1].operation == operation else ()))
        same = self.mesh.are_joined(joined) and self.moves[-1] == self.moves[-2:][0]
        if len(joined) > 1 and (same or self.mesh.of_one_axis(joined)):
            # The largest buffer of a rank: the result of an all-gather, the input of a reduction.
            work = Collective(operation, max(work.nbytes, steps.pop().nbytes), joined)
        steps.append(work)
