"""Data parallelism: what the schemes share whose ranks run the same layers on different samples.

A data scheme shards the samples at every operator, so the gradient of every weight is a partial sum over its axes. It
reduces the gradients in buckets, in the order in which the backward pass of the last micro-batch completes them, and
says which states are sharded over its axes. The framework sets the size of a bucket: ``max(bucket.elements,
bucket.elements_per_rank x ranks)`` elements, or one bucket for all without overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from simulator.ir.modules import Module, Operator, Stage, Update
from simulator.ir.ops import BYTES, Collective, Fragment, Op, Param, SideOps, StageOps
from simulator.ir.scheme import LowerModule, LowerStage, Scheme
from simulator.ir.settings import OptionValues

ReductionGroup = Callable[[Param], tuple[tuple[str, ...], int]]
"""Reduction axes of a parameter and its element count; no axes if it needs no collective."""


@dataclass(frozen=True)
class DataSetting:
    """Data-parallel ranks of a small model with bf16 weights and fp32 gradients.

    n: ranks that share states, on `across` nodes of n / across.
    batches: micro-batches of a step.
    replicas: groups of n ranks that hold copies of each other's states.
    options: of the scheme.
    unit_elements: parameters of every unit: the embedding, the layers, the output layer with its norm.
    module_elements: parameters of every operator.
    parameter_elements: elements of every parameter tensor.
    buckets: equal buckets of gradients in another model, where `bucket_backward_s` seconds of the backward pass fill
        one and its all-reduce takes `bucket_reduce_s` seconds.
    """

    n: int = 4
    batches: int = 1
    replicas: int = 1
    across: int = 1
    options: OptionValues = ()
    unit_elements: tuple[int, ...] = ()
    module_elements: tuple[int, ...] = ()
    parameter_elements: tuple[int, ...] = ()
    buckets: int = 3
    bucket_backward_s: float = 2.0
    bucket_reduce_s: float = 1.0

    @property
    def grad_bytes(self) -> int:
        return 4 * sum(self.unit_elements)

    @property
    def weight_bytes(self) -> int:
        return 2 * sum(self.unit_elements)

    def small(self, least: int) -> int:
        """Elements of all parameters that have fewer than `least`."""
        return sum(elements for elements in self.parameter_elements if elements < least)


MakeCollective = Callable[[tuple[str, ...], int], Op]
"""Makes the collective of a number of elements over axes."""


class DataScheme(Scheme):
    """Base of the data schemes; many only state which states they shard."""

    family = "data"
    role = "data scheme"
    shards: ClassVar[tuple[str, ...]] = ()
    """States that are sharded: optimizer, gradients, parameters."""

    def layouts(self, operator: Operator) -> str | None:
        return "b" if operator.has("b") else None

    @property
    def replica_count(self) -> int:
        """Ranks that hold the same weights, outside of views."""
        return self.mesh.size((*self.over, *self.sequence_axes))

    def reduces(self, param: Param) -> tuple[str, ...]:
        """Its own axes and the sequence axes, along which ranks have the same weights; in a view all axes with other
        tokens.
        """
        mine = {*self.over, *self.sequence_axes}
        return param.partial if param.view else tuple(axis for axis in param.partial if axis in mine)

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that its options name: states are replicated along them, also those sharded over the other axes."""
        named = (getattr(self.options, option) for option in self.names_axes)
        return self.mesh.parts(axis for axis in named if axis)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        return self.split_replica_axes(self.over)[0] if "parameters" in self.shards else ()

    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        return (
            tuple(axis for axis in self.reduces(param) if axis not in self.replica_axes) if state in self.shards else ()
        )

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients are reduced in buckets during the backward pass; otherwise all at once after it."""
        return bool(self.framework.overlap.dp)

    @property
    def gathers_ahead_of_use(self) -> bool:
        """Whether updated weights are all-gathered in buckets ahead of their first use; otherwise after the update."""
        return self.overlaps_backward and self.framework.overlap.updated_weights

    def axes_reduced_once(self, param: Param) -> tuple[str, ...]:
        """Axes over which the gradient is reduced once a step, after the last micro-batch, and not in every one."""
        return () if "gradients" in self.shards else self.reduces(param)

    def axes_gathered_once(self, param: Param) -> tuple[str, ...]:
        """Axes over which updated shards of unsharded weights are all-gathered before their next use."""
        return () if self.shards_at_rest("parameters", param) else self.update_shards(param)

    def _reduction_group(self, param: Param) -> tuple[tuple[str, ...], int]:
        """Axes of the reduction after the last micro-batch, and the elements of the gradient stored until then."""
        return self.axes_reduced_once(param), param.size // self.mesh.size(self.shards_at_rest("gradients", param))

    def gather_group(self, param: Param) -> tuple[tuple[str, ...], int]:
        """Axes of the all-gather of updated weights, and their elements."""
        return self.axes_gathered_once(param), param.size

    @property
    def lowering_key(self) -> Hashable:
        """The work of a rank is the same with any number of replicas: only which axes have several matters."""
        return self.use, self.over, tuple(self.mesh.size(axis) > 1 for axis in self.over), self.options

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        """Buckets are reduced after the last backward pass, and all-gathered before the first forward pass."""
        stage_ops = inner(stage)
        if self.overlaps_backward:
            copies: dict[Op, Op] = {}

            def reduce(axes: tuple[str, ...], elements: int) -> Op:
                first, *others = self.reductions(axes, elements, "W", "last")
                copies.update((first, other) for other in others)
                return first

            for buckets in self._make_buckets(stage_ops, self._reduction_group, reduce, backward=True):
                stage_ops.behind += [buckets, *_follow_buckets(buckets, copies)]
        if self.gathers_ahead_of_use:
            gather: MakeCollective = lambda axes, n: self.gather(axes, n, "F", "first")  # noqa: E731
            # Each bucket of weights is all-gathered before its first use in the first micro-batch.
            stage_ops.ahead += self._make_buckets(stage_ops, self.gather_group, gather, backward=False)
        return stage_ops

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        """Without overlap all gradients are reduced before the update, and all weights all-gathered after it."""
        fragment = inner(module)
        if not isinstance(module, Update):
            return fragment
        if not self.overlaps_backward:
            groups = sum_by_axes(module.params, self._reduction_group)
            sums = [op for axes, elements in groups for op in self.reductions(axes, elements, "U", "every")]
            for op in fragment.forward:
                op.after += sums
            fragment.forward = [*sums, *fragment.forward]
        if not self.gathers_ahead_of_use:
            update = fragment.forward[-1]
            for gather in self.gather_updated(module.params):
                gather.after.append(update)
                fragment.forward = [*fragment.forward, gather]
        return fragment

    def split_replica_axes(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that shard states, and those along which the shards are replicated."""
        shard_axes = tuple(axis for axis in axes if axis not in self.replica_axes)
        return shard_axes, tuple(axis for axis in axes if axis in self.replica_axes)

    def reductions(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> list[Op]:
        """The reductions of gradients, each of which waits for the one before: over the axes that shard states, then of
        the shards over replica axes.
        """
        shard_axes, copies = self.split_replica_axes(axes)
        ops = [self.reduce(shard_axes, elements, phase, when)] if shard_axes else []
        if copies:
            among = self.reduce(copies, elements // self.mesh.size(shard_axes), phase, when)
            ops.append(replace(among, after=ops[:]))
        return ops

    def reduce(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        """A reduction of gradients: reduce-scatter to the shards that the optimizer updates, or all-reduce; among
        replicas an all-reduce of the shards.
        """
        copies = set(axes) <= set(self.replica_axes)
        operation = "reduce_scatter" if "optimizer" in self.shards and not copies else "all_reduce"
        work = Collective(operation, elements * BYTES[self.framework.gradients], axes)
        return Op("reduce grads", "data-replicas" if copies else "data", work, [], phase, when)

    def gather(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        work = Collective("all_gather", elements * BYTES[self.framework.weights], axes)
        return Op("gather params", "data", work, [], phase, when)

    def gather_updated(self, params: Iterable[tuple[Param, int]]) -> Iterable[Op]:
        """The collectives after the update that bring updated weights to all ranks; by default one all-gather.

        params: of the update, each with how many there are of it.
        """
        for axes, elements in sum_by_axes(params, self.gather_group):
            yield self.gather(axes, elements, "U", "every")

    def _make_buckets(
        self, stage_ops: StageOps, of: ReductionGroup, make: MakeCollective, backward: bool
    ) -> Iterable[SideOps]:
        """One op per bucket of parameters with the same axes, in the order in which the buckets start."""
        limit = max(self.framework.bucket.elements, self.framework.bucket.elements_per_rank * self.replica_count)
        found = [of(param) if param.trained else ((), 0) for param, _ in stage_ops.params()]
        axes_of = [axes for axes, _ in found]
        sets = list(dict.fromkeys(axes_of))
        summed = stage_ops.of_params([sets.index(axes) for axes in axes_of])
        size = stage_ops.of_params([elements for _, elements in found])
        buckets: list[tuple[np.ndarray, Op]] = []
        for i, axes in enumerate(sets):
            if axes:
                numbers = np.flatnonzero(summed == i)[:: -1 if backward else 1]
                held = np.cumsum(size[numbers])
                starts, sizes = _fill_buckets(held, limit)
                ops = {elements: make(axes, elements) for elements in set(sizes)}
                if len(sets) == 1:
                    yield SideOps([ops[elements] for elements in sizes], numbers, starts)
                    return
                buckets += zip(np.split(numbers, starts[1:]), (ops[elements] for elements in sizes), strict=True)
        if buckets:
            # Backward a bucket starts with its last gradient; forward it must arrive before its first weight is used.
            buckets.sort(key=lambda bucket: -bucket[0][-1] if backward else bucket[0][0])
            lengths = [len(numbers) for numbers, _ in buckets]
            starts = np.cumsum([0, *lengths[:-1]])
            yield SideOps([op for _, op in buckets], np.concatenate([numbers for numbers, _ in buckets]), starts)


def sum_by_axes(params: Iterable[tuple[Param, int]], of: ReductionGroup) -> Iterable[tuple[tuple[str, ...], int]]:
    """The elements of all parameters with the same reduction axes."""
    whole: dict[tuple[str, ...], int] = defaultdict(int)
    for param, count in params:
        axes, elements = of(param)
        if axes:
            whole[axes] += count * elements
    return whole.items()


def _follow_buckets(buckets: SideOps, following: dict[Op, Op]) -> Iterable[SideOps]:
    """The ops that follow those of buckets, for the same parameters; none if nothing follows."""
    places = [place for place, op in enumerate(buckets.ops) if op in following]
    if places:
        numbers = np.split(buckets.params, buckets.starts[1:])
        own = [numbers[place] for place in places]
        ops = [following[buckets.ops[place]] for place in places]
        starts = np.cumsum([0, *map(len, own[:-1])])
        yield SideOps(ops, np.concatenate(own), starts, after=(buckets, np.array(places)))


def _fill_buckets(cumulative: np.ndarray, limit: float) -> tuple[np.ndarray, list[int]]:
    """Starts and sizes of buckets: the parameter that reaches the limit closes its bucket.

    cumulative: elements of all parameters up to each one.
    limit: elements of a bucket.
    """
    before = np.concatenate([[0], cumulative[:-1]])
    follows = (np.searchsorted(cumulative, before + limit) + 1).tolist()
    starts, start = [], 0
    while start < len(cumulative):
        starts.append(start)
        start = follows[start]
    return np.array(starts), np.diff([*before[starts], cumulative[-1]]).tolist()
