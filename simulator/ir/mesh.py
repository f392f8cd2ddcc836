"""The device mesh: named axes over the GPUs, outermost (slowest links) first, and views of it with other axes.

Rank numbers are row-major over the axes: ranks along the last axis are neighbours. Ranks of the same scale-up domain or
node have consecutive numbers. An *axis* belongs to the mesh, a *dim* to a tensor.

A *view* names other axes over the ranks of a pipeline stage: experts, for example, are sharded over
``edp x ep x etp`` where everything else is sharded over ``dp x cp x tp`` (Megatron's parallel folding). Both are
row-major over the same ranks, so each axis is a product of *parts* that the mesh and its views have in common. Lowered
ops name parts only; an axis that no view divides has a single part, itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Any

from meshcast.hardware.errors import PlanError


class Mesh:
    """Axes with their sizes, outermost first; the product of the sizes is the number of GPUs.

    Args:
        axes: size of each axis of the mesh, outermost first.
        views: for each view its axes with their sizes.
        region: the axes of the mesh that the views replace; the other axes belong to all views.

    Attributes:
        named_axes: the axes of the mesh with their sizes.
        views: the axes of each view with their sizes.
        axes: the parts with their sizes, outermost first.
        places: for an axis whose positions are not in the order of ranks, the place of each along the axis.
        stage: axis of the pipeline, of a stage whose degrees other stages do not have: all groups lie in that stage.
        first: global rank of the first rank of that stage.
        joined: sets of parts over which equal collectives are a single collective (`with_joined`).

    Raises:
        PlanError: a view has another number of ranks, or its axes do not nest with the others.

    >>> mesh = Mesh({"pp": 2, "dp": 2, "tp": 4})
    >>> mesh.stride("dp"), mesh.ranks(("tp",)), mesh.ranks(("dp",))
    (4, (0, 1, 2, 3), (0, 4))
    >>> mesh = Mesh({"pp": 2, "dp": 8, "tp": 2}, {"experts": {"edp": 4, "ep": 4}}, ["dp", "tp"])
    >>> mesh.axes
    {'pp': 2, 'dp.0': 4, 'dp.1': 2, 'tp': 2}
    >>> mesh.parts("ep"), mesh.parts("edp"), mesh.parts("dp")
    (('dp.1', 'tp'), ('dp.0',), ('dp.0', 'dp.1'))
    """

    def __init__(
        self, axes: Mapping[str, int], views: Mapping[Any, Mapping[str, int]] | None = None, region: Sequence[str] = ()
    ) -> None:
        self.named_axes = dict(axes)
        self.places: dict[str, tuple[int, ...]] = {}
        self.stage, self.first = "", 0
        self.joined: tuple[tuple[str, ...], ...] = ()
        self.views = {name: dict(view) for name, view in (views or {}).items()}
        for axis in (*axes, *(axis for view in self.views.values() for axis in view)):
            if "." in axis:  # the names of parts have a point
                raise PlanError(
                    "plan.mesh", "the name of an axis holds no dot", f"Write {axis.replace('.', '-')}", axis
                )
        again = {axis: size for axis, size in axes.items() if axis in region}
        for name, view in self.views.items():
            _check_view(name, view, again, self.named_axes)
        borders = {name: _borders(reading) for name, reading in {"": again, **self.views}.items()}
        self._parts: dict[str, tuple[str, ...]] = {}
        self.axes: dict[str, int] = {}
        self._divide_axes(again, borders)

    def _divide_axes(self, region: Mapping[str, int], borders: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
        """Divides the axes of the region into parts that every view is composed of.

        borders: by view, the strides at which its axes begin and end; "": the region.
        """
        strides = sorted({stride for reading in borders.values() for pair in reading.values() for stride in pair})
        for inner, outer in pairwise(strides):
            if outer % inner:
                rule = f"groups of {inner} and of {outer} consecutive ranks do not nest"
                raise PlanError("plan.views", rule, "Choose degrees of which one divides the other", self.views)
        part_at: dict[int, str] = {}
        for axis, size in self.named_axes.items():
            low, high = borders[""].get(axis, (1, size))
            divided = axis in region and high > low
            inside = [stride for stride in strides if low <= stride < high] if divided else [low]
            names = [axis] if len(inside) == 1 else [f"{axis}.{i}" for i in range(len(inside))]
            self._parts[axis] = tuple(names)
            for part, (begin, end) in zip(names, reversed([*pairwise([*inside, high])]), strict=True):
                self.axes[part] = end // begin
                if divided and end > begin:
                    part_at[begin] = part
        for name in self.views:
            for axis, (low, high) in borders[name].items():
                self._parts[axis] = tuple(part_at[stride] for stride in reversed(strides) if low <= stride < high)

    @cached_property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    def parts(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        """Returns the parts of an axis or several, outermost first within each; a part stands for itself."""
        if isinstance(axes, str):
            return self._parts.get(axes, (axes,))
        return tuple(part for axis in axes for part in self.parts(axis))

    def view_of(self, axis: str) -> str:
        """Returns the view that has this axis; empty for an axis of the mesh itself."""
        for name, view in self.views.items():
            if axis in view:
                return name
        return ""

    def of_one_axis(self, parts: Iterable[str]) -> bool:
        """Returns whether all these parts belong to the same axis."""
        wanted = set(parts)
        return any(wanted <= set(parts_of_axis) for parts_of_axis in self._parts.values())

    def size(self, axes: str | Iterable[str]) -> int:
        """Returns the product of the sizes of an axis or several; an axis that the mesh does not have counts as 1."""
        sizes = self._sizes
        if isinstance(axes, str):
            return sizes.get(axes, 1)
        product = 1
        for axis in axes:
            product *= sizes.get(axis, 1)
        return product

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The sizes of all axes and their parts."""
        return {axis: math.prod(self.axes[part] for part in parts) for axis, parts in self._parts.items()} | self.axes

    def stride(self, axis: str) -> int:
        """Returns the difference of the rank numbers of neighbours along `axis`."""
        return self._strides[self.parts(axis)[-1]]

    def place(self, axis: str, position: int) -> int:
        """Returns the place of a position along an axis."""
        return self.places[axis][position] if axis in self.places else position

    def offset(self, axis: str, position: int) -> int:
        """Returns the difference of the rank numbers of a position along an axis and of the first place."""
        return self.place(axis, position) * self.stride(axis)

    def with_places(self, axis: str, places: Iterable[int]) -> Mesh:
        """Returns this mesh with other places for the positions along an axis.

        >>> Mesh({"pp": 4, "tp": 2}).with_places("pp", (0, 2, 3, 1)).ranks(("pp",))
        (0, 4, 6, 2)
        """
        mesh = copy(self)
        mesh.places = {**self.places, axis: tuple(places)}
        return mesh

    def of_stage(self, axis: str, first: int) -> Mesh:
        """Returns this mesh for a single stage, whose ranks begin at `first`; other positions along `axis` do not
        exist."""
        mesh = copy(self)
        mesh.stage, mesh.first = axis, first
        return mesh

    @property
    def inner(self) -> dict[str, int]:
        """The axes inside a stage with their sizes, where it has other degrees; otherwise all."""
        return {axis: size for axis, size in self.axes.items() if axis != self.stage}

    def are_joined(self, parts: Iterable[str]) -> bool:
        """Returns whether equal collectives over each of these parts are a single collective over all of them."""
        wanted = set(parts)
        return any(wanted <= set(set_of_parts) for set_of_parts in self.joined)

    def with_joined(self, joined: Iterable[tuple[str, ...]]) -> Mesh:
        """Returns this mesh, in which equal collectives over parts of any of these sets are a single collective."""
        mesh = copy(self)
        mesh.joined = (*self.joined, *joined)
        return mesh

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for axis in reversed(self.axes):
            strides[axis] = stride
            stride *= self.axes[axis]
        return strides

    def ranks(self, axes: tuple[str, ...], members: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Returns the global ranks of the group over `axes` that rank 0 belongs to.

        members: positions in the group of the ranks to return; None: all.
        """
        if not self.places:
            plain = [0]
            for axis in self.parts(axes):
                if size := self.axes.get(axis, 0):
                    strides = range(0, size * self.stride(axis), self.stride(axis))
                    plain = [step + rank for step in strides for rank in plain]
            plain.sort()
            return tuple(plain if members is None else [plain[i] for i in members])
        ranks = [(0, 0)]  # of each position where it would be in the order of ranks, and where it is
        for axis in self.parts(axes):
            count = self.axes.get(axis, 0)
            steps = [(i * self.stride(axis), self.offset(axis, i)) for i in range(count)] or [(0, 0)]
            ranks = [(a + i, b + j) for a, b in ranks for i, j in steps]
        in_order = [rank for _, rank in sorted(ranks)]
        return tuple(in_order if members is None else [in_order[i] for i in members])

    def inner_first(self, axes: Iterable[str]) -> list[str]:
        """Returns `axes` from the innermost to the outermost."""
        order = list(self.axes)
        return sorted(axes, key=order.index, reverse=True)


def _borders(axes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Returns for each axis its stride and the stride of the next outer axis."""
    strides, stride = {}, 1
    for axis in reversed([*axes]):
        strides[axis] = stride, stride * axes[axis]
        stride *= axes[axis]
    return strides


def _check_view(name: str, view: Mapping[str, int], again: Mapping[str, int], named: Iterable[str]) -> None:
    if math.prod(view.values()) != math.prod(again.values()):
        ours, theirs = (" x ".join(f"{axis} {n}" for axis, n in degrees.items()) for degrees in (view, again))
        rule = f"{ours} = {math.prod(view.values())} must be {theirs} = {math.prod(again.values())}, the same ranks"
        raise PlanError(f"plan.views.{name}", rule, "Correct a degree", dict(view))
    if both := [axis for axis in view if axis in named]:
        raise PlanError(f"plan.views.{name}", "the mesh has an axis of this name", "Give it another name", both[0])
