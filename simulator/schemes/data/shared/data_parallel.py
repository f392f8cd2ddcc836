"""Data parallelism: what the schemes share whose ranks run the same layers on different samples.

A data scheme shards the samples at every operator, so the gradient of every weight is a partial sum over its axes. It
reduces the gradients in buckets, in the order in which the backward pass of the last micro-batch completes them, and
says which states are sharded over its axes. The framework sets the size of a bucket: ``max(bucket.elements,
bucket.elements_per_rank x ranks)`` elements, or one bucket for all without overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.capabilities import ShardsStates
from meshcast.simulator.ir.modules import Module, Operator, Stage, Update
from meshcast.simulator.ir.ops import (
    BYTES,
    GATHERED_FORMATS,
    Collective,
    Fragment,
    Op,
    Param,
    SideOps,
    StageOps,
    TensorUse,
)
from meshcast.simulator.ir.scheme import LowerModule, LowerStage, Scheme
from meshcast.simulator.ir.settings import OptionValues
from meshcast.simulator.lowering.scope import traits_of
from meshcast.simulator.schemes.data.shared.reduce_buckets import count_bucket_bytes, hold_buckets

ReductionGroup = Callable[[Param], tuple[tuple[str, ...], int]]
"""Reduction axes of a parameter and its element count; no axes if it needs no collective."""

Sizes = tuple[int, ...]
"""Sizes that add up over the parameters of a bucket, see `DataScheme.gradient_sizes`; elements first."""


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
    matrices: rows and columns of every matrix.
    buckets: equal buckets of gradients in another model, where `bucket_backward_s` seconds of the backward pass fill
        a bucket and its all-reduce takes `bucket_reduce_s` seconds.
    """

    n: int = 4
    batches: int = 1
    replicas: int = 1
    across: int = 1
    options: OptionValues = ()
    unit_elements: tuple[int, ...] = ()
    module_elements: tuple[int, ...] = ()
    parameter_elements: tuple[int, ...] = ()
    matrices: tuple[tuple[int, ...], ...] = ()
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
        """Counts the elements of all parameters that have fewer than `least`."""
        return sum(elements for elements in self.parameter_elements if elements < least)


def count_gathered(scheme: Scheme, param: Param, sharded: bool = True) -> int:
    """Returns the elements of a weight that a collective moves, as of weights in the format of the computation.

    sharded: whether weights are sharded between their uses. Otherwise those in MXFP8, whose blocks lie along rows and
        along columns, are gathered in 16 bits and then quantised (`_post_param_sync` of Megatron-Core's
        param_and_grad_buffer.py).
    """
    framework = scheme.framework
    width, recipe = BYTES[framework.weights], param.recipe if framework.quantised_weights and param.trained else ""
    if recipe not in GATHERED_FORMATS or (recipe == "mxfp8" and not sharded):
        return param.count_moved(width)
    return round(param.size * GATHERED_FORMATS[recipe] / width)


MakeOps = Callable[[tuple[str, ...], Sizes], Sequence[Op]]
"""Makes the ops of a bucket over axes, each after that before."""


def split_axes(axes: Iterable[str], group: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns those of some axes that are in a group, such as `DataScheme.node_axes`, and the others."""
    return tuple(axis for axis in axes if axis in group), tuple(axis for axis in axes if axis not in group)


class DataScheme(ShardsStates):
    """Base of the data schemes; many only state which states they shard."""

    family = "data"
    role = "data scheme"

    def layouts(self, operator: Operator) -> str | None:
        return "b" if operator.has("b") else None

    def reduces(self, param: Param) -> tuple[str, ...]:
        """Returns the scheme's axes and the sequence axes, along which ranks have the same weights; in a view all axes
        with other tokens.
        """
        mine = self._own_axes
        return param.partial if param.view else tuple(axis for axis in param.partial if axis in mine)

    @cached_property
    def _own_axes(self) -> frozenset[str]:
        """The scheme's axes and the sequence axes."""
        return frozenset((*self.over, *self.sequence_axes))

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that its options name: states are replicated along them, also those sharded over the other axes."""
        named = (getattr(self.options, option) for option in self.names_axes)
        return self.mesh.parts(axis for axis in named if axis)

    @cached_property
    def node_axes(self) -> tuple[str, ...]:
        """The axes of the nearest ranks that hold the same weights: the last that the scheme is over, and the
        sequence axes.
        """
        claimed = [axis for axis in self.axes if not set(self.mesh.parts(axis)) & set(self.replica_axes)]
        return (*self.mesh.parts(claimed[-1:]), *self.sequence_axes)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        return split_axes(self.over, self.replica_axes)[1] if "parameters" in self.shards else ()

    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        return (
            tuple(axis for axis in self.reduces(param) if axis not in self.replica_axes) if state in self.shards else ()
        )

    def accumulation_shards(self, param: Param) -> tuple[str, ...]:
        return self.shards_at_rest("gradients", param)

    def update_shards(self, param: Param) -> tuple[str, ...]:
        return self.shards_at_rest("optimizer", param)

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients are reduced in buckets during the backward pass; otherwise all at once after it."""
        return bool(self.framework.overlap.dp)

    @property
    def gathers_ahead_of_use(self) -> bool:
        """Whether updated weights are all-gathered in buckets ahead of their first use; otherwise after the update."""
        return self.overlaps_backward and self.framework.overlap.updated_weights

    @property
    def bucket_elements(self) -> float:
        """Elements of gradients that are reduced together."""
        bucket, replicas = self.framework.bucket, self.mesh.size((*self.over, *self.sequence_axes))
        return float(max(bucket.elements, bucket.elements_per_rank * replicas))

    def axes_reduced_once(self, param: Param) -> tuple[str, ...]:
        """Returns the axes over which the gradient is reduced once a step, after the last micro-batch, and not in every
        micro-batch."""
        return () if "gradients" in self.shards else self.reduces(param)

    def gradient_sizes(self, param: Param) -> Sizes:
        """Returns the sizes of a gradient on whose sums the reduction of a bucket depends: the elements stored until
        the last micro-batch, which fill buckets, and whatever else the scheme asks for.
        """
        return (param.size // self.mesh.size(self.shards_at_rest("gradients", param)),)

    def _reduction_group(self, param: Param) -> tuple[tuple[str, ...], Sizes]:
        """Returns the axes of the reduction after the last micro-batch, and the sizes of the gradient."""
        return self.axes_reduced_once(param), self.gradient_sizes(param)

    def axes_gathered_once(self, param: Param) -> tuple[str, ...]:
        """Returns the axes over which updated shards of unsharded weights are all-gathered before their next use."""
        return () if self.shards_at_rest("parameters", param) else self.update_shards(param)

    def _gather_group(self, param: Param) -> tuple[tuple[str, ...], int]:
        """Returns the axes of the all-gather of updated weights, and their elements."""
        return self.axes_gathered_once(param), count_gathered(self, param, sharded=False)

    @property
    def lowering_key(self) -> Hashable:
        """The work of a rank is the same with any number of replicas: only which axes have several matters."""
        return self.use, self.over, tuple(self.mesh.size(axis) > 1 for axis in self.over), self.options

    @property
    def unit_key(self) -> Hashable:
        """Data schemes add their ops to stages and updates. Units depend on which weights are sharded between passes
        and, where separate kernels add up gradients, on which gradients are."""
        key = self.over, tuple(self.mesh.size(axis) > 1 for axis in self.over), self.gathered_axes
        return ("data", *key) if self.framework.fused_gradients else (*key, self.lowering_key)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        """Buckets are reduced after the last backward pass, and all-gathered before the first forward pass."""
        stage_ops = inner(stage)
        if self.overlaps_backward:
            if "gradients" not in self.shards:
                stage_ops = hold_buckets(self, self.bucket_elements, stage_ops)
            reduce: MakeOps = lambda axes, sizes: self.reduce_bucket(axes, sizes, "W", "last")  # noqa: E731
            stage_ops.behind += self._make_buckets(stage_ops, self._reduction_group, reduce, backward=True)
        if self.gathers_ahead_of_use:

            def gather_sizes(param: Param) -> tuple[tuple[str, ...], Sizes]:
                axes, elements = self._gather_group(param)
                return axes, (elements,)

            gather: MakeOps = lambda axes, sizes: [self.gather(axes, sizes[0], "F", "first")]  # noqa: E731
            # Each bucket of weights is all-gathered before its first use in the first micro-batch.
            stage_ops.ahead += self._make_buckets(stage_ops, gather_sizes, gather, backward=False)
        return stage_ops

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        """Adds to the update, without overlap, the reductions of all gradients and the all-gathers of all weights."""
        fragment = inner(module)
        if not isinstance(module, Update):
            return fragment
        if not self.overlaps_backward:
            groups = sum_sizes(module.params, self._reduction_group)
            sums = [op for axes, sizes in groups for op in self.reduce_bucket(axes, sizes, "U", "every")]
            buffers = round(count_bucket_bytes(self, self.bucket_elements, sum(sizes[0] for _, sizes in groups)))
            fragment.tensor_uses += [TensorUse("reduce", buffers, op, True, "buffers") for op in sums if buffers]
            for op in fragment.forward:
                op.after += sums
            fragment.forward = [*sums, *fragment.forward]
        if not self.gathers_ahead_of_use:
            update = fragment.forward[-1]
            for gather in self.gather_updated(module.params):
                gather.after.append(update)
                fragment.forward = [*fragment.forward, gather]
        return fragment

    def reduce_bucket(self, axes: tuple[str, ...], sizes: Sizes, phase: str, when: str) -> Sequence[Op]:
        """Returns the ops that reduce the gradients of a bucket, in order.

        sizes: sums of the `gradient_sizes` of its parameters.
        """
        return self.reductions(axes, sizes[0], phase, when)

    def reductions(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> list[Op]:
        """Returns the reductions of gradients, each of which waits for that before: over the axes that shard states,
        then of the shards over replica axes.
        """
        copies, shard_axes = split_axes(axes, self.replica_axes)
        ops = [self.reduce(shard_axes, elements, phase, when)] if shard_axes else []
        if copies:
            among = self.reduce(copies, elements // self.mesh.size(shard_axes), phase, when)
            ops.append(replace(among, after=ops[:]))
        return ops

    def reduce(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        """Returns a reduction of gradients: reduce-scatter to the shards that the optimizer updates, or all-reduce;
        among replicas an all-reduce of the shards.
        """
        copies = set(axes) <= set(self.replica_axes)
        operation = "reduce_scatter" if "optimizer" in self.shards and not copies else "all_reduce"
        work = Collective(operation, elements * BYTES[self.framework.gradients], axes)
        return Op("reduce grads", "data-replicas" if copies else "data", work, [], phase, when)

    def gather(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        work = Collective("all_gather", elements * BYTES[self.framework.weights], axes)
        return Op("gather params", "data", work, [], phase, when)

    def gather_updated(self, params: Iterable[tuple[Param, int]]) -> Iterable[Op]:
        """Yields the collectives after the update that bring updated weights to all ranks; by default an all-gather.

        params: of the update, each with its number of copies.
        """
        for axes, elements in sum_by_axes(params, self._gather_group):
            yield self.gather(axes, elements, "U", "every")

    def _make_buckets(
        self, stage_ops: StageOps, of: Callable[[Param], tuple[tuple[str, ...], Sizes]], make: MakeOps, backward: bool
    ) -> Sequence[SideOps]:
        """Returns the ops of the buckets of parameters with the same axes, in the order in which the buckets start.

        Stages whose parameters have equal sizes share them: micro-batches of another size change no gradient.
        """
        known, groups = self._known_groups[backward], list[tuple[tuple[str, ...], Sizes]]()
        for param, _ in stage_ops.params():
            if (traits := traits_of(param)) not in known:
                known[traits] = of(param) if param.trained else ((), ())
            groups.append(known[traits])
        runs = tuple((len(unit_run.fragment.params), unit_run.count) for unit_run in stage_ops.unit_runs)
        key = backward, tuple(groups), runs
        if key not in self._known_buckets:
            self._known_buckets[key] = list(self._fill(stage_ops, groups, make, backward))
        return self._known_buckets[key]

    @cached_property
    def _known_groups(self) -> tuple[dict[Hashable, tuple[tuple[str, ...], Sizes]], ...]:
        """Axes and sizes of parameters by their traits: of weights that are gathered, and of gradients."""
        return {}, {}

    @cached_property
    def _known_buckets(self) -> dict[Hashable, Sequence[SideOps]]:
        return {}

    def _fill(
        self, stage_ops: StageOps, groups: Sequence[tuple[tuple[str, ...], Sizes]], make: MakeOps, backward: bool
    ) -> Iterable[SideOps]:
        """Fills buckets. groups: axes and sizes of the distinct parameters of a stage."""
        sets = list(dict.fromkeys(axes for axes, _ in groups))
        summed = stage_ops.of_params([sets.index(axes) for axes, _ in groups])
        kinds = max((len(sizes) for _, sizes in groups), default=0)
        columns = [stage_ops.of_params([sizes[kind] if sizes else 0 for _, sizes in groups]) for kind in range(kinds)]
        numbers, lengths, chains = list[np.ndarray](), list[np.ndarray](), list[Sequence[Op]]()
        for i, axes in enumerate(sets):
            if axes:
                members = np.flatnonzero(summed == i)[:: -1 if backward else 1]
                starts = _fill_buckets(np.cumsum(columns[0][members]), self.bucket_elements)
                sums = zip(*(np.add.reduceat(column[members], starts).tolist() for column in columns), strict=True)
                chain_of: dict[Sizes, Sequence[Op]] = {}
                chains += [
                    chain_of[sizes] if sizes in chain_of else chain_of.setdefault(sizes, make(axes, sizes))
                    for sizes in sums
                ]
                numbers.append(members)
                lengths.append(np.diff(starts, append=len(members)))
        if chains:
            yield from _side_ops(np.concatenate(numbers), np.concatenate(lengths), chains, backward)


def _side_ops(
    numbers: np.ndarray, lengths: np.ndarray, chains: Sequence[Sequence[Op]], backward: bool
) -> Iterable[SideOps]:
    """Yields the ops of buckets, side by side on each stream: bucket after bucket, until the stream of their ops
    changes. Buckets without a sum inside a node, whose first ops lie on another stream, have separate lists.

    numbers, lengths: the parameters of all buckets, in order, and how many each bucket has.
    chains: the ops of each bucket in order.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # Backward a bucket starts with its last gradient; forward it must arrive before its first weight is used.
    order = np.argsort(-numbers[ends - 1] if backward else numbers[starts], kind="stable").tolist()
    if len({op.stream for chain in chains for op in chain}) == 1:
        yield _join_side_ops([chains[i] for i in order], [numbers[starts[i] : ends[i]] for i in order])
        return
    legs = _split_by_stream(chains)
    last: dict[int, tuple[SideOps | None, int]] = dict.fromkeys(order, (None, -1))
    for place in range(max(map(len, legs))):
        groups = defaultdict[tuple[SideOps | None, str], list[int]](list)
        for i in order:
            if place < len(legs[i]):
                groups[last[i][0], legs[i][place][0].stream].append(i)
        for (before, _), group in groups.items():
            ops = [legs[i][place] for i in group]
            side = _join_side_ops(ops, [numbers[starts[i] : ends[i]] for i in group])
            lasts = np.cumsum([len(leg) for leg in ops]) - 1
            if before is not None:
                waits = np.full(len(side.ops), -1)
                waits[[0, *(lasts[:-1] + 1)]] = [last[i][1] for i in group]
                side.after = before, waits
            last |= {i: (side, end) for i, end in zip(group, lasts.tolist(), strict=True)}
            yield side


def _join_side_ops(ops: Sequence[Sequence[Op]], params: Sequence[np.ndarray]) -> SideOps:
    """Returns the ops of some buckets in a list. params: of each bucket, which every op of it has."""
    of_ops = [numbers for leg, numbers in zip(ops, params, strict=True) for _ in leg]
    lengths = [len(numbers) for numbers in of_ops]
    return SideOps([op for leg in ops for op in leg], np.concatenate(of_ops), np.cumsum(lengths) - lengths)


def _split_by_stream(chains: Sequence[Sequence[Op]]) -> list[list[list[Op]]]:
    """Splits the ops of each bucket where their stream changes; buckets may share their ops."""
    distinct = {id(chain): chain for chain in chains}
    split = {key: [list(ops) for _, ops in groupby(chain, lambda op: op.stream)] for key, chain in distinct.items()}
    return [split[id(chain)] for chain in chains]


def sum_sizes(
    params: Iterable[tuple[Param, int]], of: Callable[[Param], tuple[tuple[str, ...], Sizes]]
) -> Iterable[tuple[tuple[str, ...], Sizes]]:
    """Returns the sizes of all parameters with the same reduction axes."""
    whole: dict[tuple[str, ...], Sizes] = {}
    for param, count in params:
        axes, sizes = of(param)
        if axes:
            known = whole.get(axes, (0,) * len(sizes))
            whole[axes] = tuple(total + count * size for total, size in zip(known, sizes, strict=True))
    return whole.items()


def sum_by_axes(params: Iterable[tuple[Param, int]], of: ReductionGroup) -> Iterable[tuple[tuple[str, ...], int]]:
    """Returns the elements of all parameters with the same reduction axes."""

    def sizes(param: Param) -> tuple[tuple[str, ...], Sizes]:
        axes, elements = of(param)
        return axes, (elements,)

    return [(axes, elements) for axes, (elements,) in sum_sizes(params, sizes)]


def _fill_buckets(cumulative: np.ndarray, limit: float) -> np.ndarray:
    """Starts of buckets: the parameter that reaches the limit closes its bucket.

    cumulative: elements of all parameters up to each of them.
    limit: elements of a bucket.
    """
    before = np.concatenate([[0], cumulative[:-1]])
    follows = (np.searchsorted(cumulative, before + limit) + 1).tolist()
    starts, start = [], 0
    while start < len(cumulative):
        starts.append(start)
        start = follows[start]
    return np.array(starts)
