"""Data parallelism: what all schemes whose ranks run the same layers on different samples have in common.

A data scheme divides samples everywhere, so the gradient of every weight is a partial sum over its axes. It
reduces them in buckets, in the order in which the backward pass of the last micro-batch completes them, and says
which states rest cut over its axes. A bucket is the framework's habit: ``max(bucket.elements,
bucket.elements_per_rank x ranks)`` elements, or one for all without overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import ClassVar

import numpy as np

from simulator.ops import BYTES, Beside, Chain, Collective, Fragment, Op, Param
from simulator.scheme import Around, Inner, Scheme
from simulator.sites import Leaf, Site, Stage, Update


class DataScheme(Scheme):
    """Base of the data schemes: the whole statement of one is which states it shards."""

    family = "data"
    shards: ClassVar[tuple[str, ...]] = ()
    """States that rest cut: optimizer, gradients, parameters."""

    def layouts(self, site: Leaf) -> str | None:
        return "b" if site.has("b") else None

    def rests(self, state: str) -> tuple[str, ...]:
        return self.over if state in self.shards else ()

    @property
    def alike(self) -> Hashable:
        """A rank does the same work beside any number of others: only along which axes there are some matters."""
        return self.use, self.over, tuple(self.mesh.size(axis) > 1 for axis in self.over), self.options

    def lower_stage(self, stage: Stage, inner: Around) -> Chain:
        """Behind the last backward pass the buckets are reduced; ahead of the first forward pass they are gathered."""
        chain = inner(stage)
        if self.mesh.size(self.over) > 1 and self.habits.overlap.dp:
            chain.behind += self._in_buckets(chain, lambda axes, n: self._reduce(axes, n, "W", "last"), backward=True)
            if self._gathers:
                # Each bucket of weights is gathered in front of its first use in the first micro-batch.
                chain.ahead += self._in_buckets(
                    chain, lambda axes, n: self._gather(axes, n, "F", "first"), backward=False
                )
        return chain

    def lower(self, site: Site, inner: Inner) -> Fragment:
        """Without overlap all is reduced, and gathered again, around the update."""
        fragment = inner(site)
        if isinstance(site, Update) and self.mesh.size(self.over) > 1 and not self.habits.overlap.dp:
            whole: dict[tuple[str, ...], int] = defaultdict(int)
            for param, count in site.params:
                if axes := self._axes(param):
                    whole[axes] += count * param.size
            sums = [self._reduce(axes, elements, "U", "every") for axes, elements in whole.items()]
            for op in fragment.forward:
                op.after += sums
            gathers = []
            for axes, elements in whole.items() if self._gathers else ():
                gathers.append(self._gather(axes, elements, "U", "every"))
                gathers[-1].after.append(fragment.forward[-1])
            fragment.forward = [*sums, *fragment.forward, *gathers]
        return fragment

    @property
    def _gathers(self) -> bool:
        """Updated shards must come together before the weights are used again."""
        return "optimizer" in self.shards and "parameters" not in self.shards

    def _axes(self, param: Param) -> tuple[str, ...]:
        """My axes over which the gradient of `param` is summed."""
        return tuple(axis for axis in self.over if axis in param.partial)

    def _reduce(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        operation = "reduce_scatter" if "optimizer" in self.shards else "all_reduce"
        work = Collective(operation, elements * BYTES[self.habits.gradients], axes)
        return Op("reduce grads", "data", work, [], phase, when)

    def _gather(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        work = Collective("all_gather", elements * BYTES[self.habits.weights], axes)
        return Op("gather params", "data", work, [], phase, when)

    def _in_buckets(self, chain: Chain, make: Callable[[tuple[str, ...], int], Op], backward: bool) -> Iterable[Beside]:
        """For each set of axes that gradients are summed over, an op a bucket, in the order in which they begin."""
        limit = max(self.habits.bucket.elements, self.habits.bucket.elements_per_rank * self.mesh.size(self.over))
        axes_of = [self._axes(param) for param, _ in chain.params()]
        sets = list(dict.fromkeys(axes_of))
        summed = chain.of_params([sets.index(axes) for axes in axes_of])
        size = chain.of_params([param.size for param, _ in chain.params()])
        for i, axes in enumerate(sets):
            if axes:
                numbers = np.flatnonzero(summed == i)[:: -1 if backward else 1]
                held = np.cumsum(size[numbers])
                starts, sizes = _filled(held, limit)
                ops = {elements: make(axes, elements) for elements in set(sizes)}
                yield Beside([ops[elements] for elements in sizes], numbers, starts)


def _filled(held: np.ndarray, limit: float) -> tuple[np.ndarray, list[int]]:
    """Where buckets start, and how much is in each: the parameter that fills a bucket closes it.

    held: elements of all parameters up to each one.
    """
    before = np.concatenate([[0], held[:-1]])
    follows = (np.searchsorted(held, before + limit) + 1).tolist()
    starts, start = [], 0
    while start < len(held):
        starts.append(start)
        start = follows[start]
    return np.array(starts), np.diff([*before[starts], held[-1]]).tolist()
