"""Data parallelism: what all schemes whose ranks run the same layers on different samples have in common.

A data scheme divides samples everywhere, so the gradient of every weight is a partial sum over its axes. It
reduces them in buckets, in the order in which the backward pass of the last micro-batch completes them, and says
which states rest cut over its axes. A bucket is the framework's habit: ``max(bucket.elements,
bucket.elements_per_rank x ranks)`` elements, or one for all without overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

from simulator.ops import BYTES, Collective, Fragment, Op, Param
from simulator.scheme import Inner, Scheme
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

    def lower(self, site: Site, inner: Inner) -> Fragment:
        fragment = inner(site)
        if self.mesh.size(self.over) == 1:
            return fragment
        overlap = self.habits.overlap.dp
        if isinstance(site, Stage) and overlap:
            fragment.backward += self._reductions(reversed(fragment.params), "W", "last")
            if self._gathers:
                self._gather_ahead(fragment)
        elif isinstance(site, Update) and not overlap:
            sums = self._reductions(site.params, "U", "every")
            for op in fragment.forward:
                op.after += sums
            fragment.forward[:0] = sums
            if self._gathers:
                size = sum(param.size for param in site.params) * BYTES[self.habits.weights]
                gather = Collective("all_gather", size, self.over)
                fragment.forward.append(Op("gather params", "data", gather, [fragment.forward[-1]], "U"))
        return fragment

    @property
    def _gathers(self) -> bool:
        """Updated shards must come together before the weights are used again."""
        return "optimizer" in self.shards and "parameters" not in self.shards

    def _reductions(self, params: Iterable[Param], phase: str, when: str) -> list[Op]:
        """One collective a bucket, once its gradients are complete."""
        operation = "reduce_scatter" if "optimizer" in self.shards else "all_reduce"
        ops = []
        for axes, bucket in self.buckets(params):
            work = Collective(operation, sum(param.size for param in bucket) * BYTES[self.habits.gradients], axes)
            after = [param.ready for param in bucket] if phase == "W" else []
            ops.append(Op("reduce grads", "data", work, after, phase, when))
        return ops

    def _gather_ahead(self, fragment: Fragment) -> None:
        """Each bucket of weights is gathered in front of its first use in the first micro-batch."""
        gathers = []
        for axes, bucket in self.buckets(fragment.params):
            nbytes = sum(param.size for param in bucket) * BYTES[self.habits.weights]
            gathers.append(Op("gather params", "data", Collective("all_gather", nbytes, axes), [], "F", "first"))
            for param in bucket:
                param.used.after.append(gathers[-1])
        fragment.forward[:0] = gathers

    def buckets(self, params: Iterable[Param]) -> Sequence[tuple[tuple[str, ...], list[Param]]]:
        """Parameters in buckets, each with the axes over which its gradients are summed."""
        groups: dict[tuple[str, ...], list[list[Param]]] = defaultdict(lambda: [[]])
        limit = float("inf")
        if self.habits.overlap.dp:
            limit = max(self.habits.bucket.elements, self.habits.bucket.elements_per_rank * self.mesh.size(self.over))
        order: list[tuple[tuple[str, ...], list[Param]]] = []
        for param in params:
            axes = tuple(axis for axis in self.over if axis in param.partial)
            if not axes:
                continue
            bucket = groups[axes][-1]
            if bucket and sum(p.size for p in bucket) >= limit:
                groups[axes].append(bucket := [])
            if not bucket:
                order.append((axes, bucket))
            bucket.append(param)
        return order
