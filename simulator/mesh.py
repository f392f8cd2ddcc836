"""The mesh: named axes over the GPUs, outermost (slowest links) first.

Rank numbers are row-major over the axes, so the last axis joins neighbours. An *axis* belongs to the mesh, a *dim*
to a tensor. Ranks of one scale-up domain or node are consecutive numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property


class Mesh:
    """Axes with their sizes, outermost first; the product of the sizes is the number of GPUs.

    >>> mesh = Mesh({"pp": 2, "dp": 2, "tp": 4})
    >>> mesh.stride("dp"), mesh.ranks(("tp",)), mesh.ranks(("dp",))
    (4, (0, 1, 2, 3), (0, 4))
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes = dict(axes)

    @cached_property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    def size(self, axes: str | Iterable[str]) -> int:
        """The product of the sizes of one or more axes; an axis that the mesh lacks counts one."""
        if isinstance(axes, str):
            return self.axes.get(axes, 1)
        return math.prod([self.axes.get(axis, 1) for axis in axes])

    def stride(self, axis: str) -> int:
        """Rank distance between neighbours along `axis`."""
        return self._strides[axis]

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for axis in reversed(self.axes):
            strides[axis] = stride
            stride *= self.axes[axis]
        return strides

    def ranks(self, axes: tuple[str, ...], members: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Global ranks of the group over `axes` that holds rank 0; `members` picks positions of a single axis."""
        ranks = [0]
        for axis in axes:
            positions = members if members is not None else range(self.axes.get(axis, 1))
            steps = [i * self.stride(axis) if axis in self.axes else 0 for i in positions]
            ranks = [rank + step for rank in ranks for step in steps]
        return tuple(sorted(ranks))

    def inner_first(self, axes: Iterable[str]) -> list[str]:
        """`axes` from the innermost to the outermost."""
        order = list(self.axes)
        return sorted(axes, key=order.index, reverse=True)
