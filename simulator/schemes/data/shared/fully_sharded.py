"""Sharded weights, unit by unit: all-gathered for the passes of a unit, sharded between them.

A unit is a transformer layer, the embedding, or the output layer with its loss. `shard_units` decides for every unit
when its weights are gathered (`gather_plan`), how long they live, and when its gradients are reduced; a scheme says how
they move (`ShardedScheme`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise, takewhile
from math import inf
from typing import ClassVar, NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.capabilities import ConvertsWeights, KeepsSecondaryShards
from meshcast.simulator.ir.modules import Module, Stage, Update
from meshcast.simulator.ir.ops import (
    BYTES,
    COMPUTE,
    Fragment,
    HostCopy,
    HostLaunch,
    Memory,
    Op,
    Param,
    StageOps,
    TensorUse,
    UnitRun,
)
from meshcast.simulator.ir.scheme import RECOMPUTES, LowerModule, LowerStage
from meshcast.simulator.lowering.offload import IN, OUT, update_on_host
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, count_gathered, split_axes
from meshcast.simulator.schemes.data.shared.gather_plan import (
    Gather,
    GatheredModule,
    GatheredWeights,
    PassGathers,
    Reach,
    add_up,
    find_modules,
    kernel_before,
    plan_pass,
    whole_pass,
    wrap_trained,
)
from meshcast.simulator.schemes.data.shared.reduce_buckets import count_whole_elements, fill_buckets, hold_buckets


@dataclass
class GatherOps:
    """How the weights of a unit are gathered.

    ops: collectives and copies, in order.
    unpack: kernels of the unit that prepare the arrived weights.
    nbytes: bytes that arrive, where these are not the weights themselves.
    """

    ops: list[Op]
    unpack: list[Op] = field(default_factory=list)
    nbytes: int = 0


class ShardedScheme(DataScheme):
    """Base of the data schemes that reduce gradients unit by unit, and gather sharded weights unit by unit.

    They differ in how far ahead weights are gathered (`reach`), and in how weights and gradients move (`gather_unit`,
    `reduce_unit`). The last axis that a scheme is `over` joins the nearest ranks.

    by_module: whether weights are gathered module by module, not unit by unit.
    """

    by_module: ClassVar[bool] = False

    @property
    def reuse(self) -> float:
        """Elements that other modules use between two uses of a module, from which on its weights are gathered
        twice."""
        return inf

    shards: ClassVar[tuple[str, ...]] = ("optimizer", "gradients", "parameters")

    @cached_property
    def known_gathers(self) -> dict[Hashable, list[UnitGathers]]:
        """Gathers that were planned, by what they are planned for."""
        return {}

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        def shard(part: Stage) -> StageOps:
            units = shard_units(self, group_layers(inner(part), self.layers_per_unit))
            return hold_buckets(self, self.bucket_elements, units)

        return super().lower_stage(stage, shard)

    @property
    def layers_per_unit(self) -> int:
        """Layers of a unit, where that many of a kind follow each other."""
        return 1

    def gather(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        """Returns an all-gather; those that happen once a step run on a stream that units do not use."""
        op = super().gather(axes, elements, phase, when)
        return replace(op, stream="data-returns") if when == "first" else op

    def reach(self, forward: bool, sizes: Sequence[int]) -> Sequence[int]:
        """Returns for each unit (or module) of a pass: how many of the pass have been asked for by the time it
        computes.

        sizes: their elements, in the order of the pass.
        """
        depth = self.prefetch_depth(forward)
        return [place + 1 + depth for place in range(len(sizes))]

    @property
    def gathers_ahead(self) -> bool:
        """Whether weights are gathered during the computation of the units before."""
        return self.framework.overlap.gathers_ahead

    def prefetch_depth(self, forward: bool) -> int:
        """Counts how many of the following units are gathered during the computation of a unit."""
        return int(self.gathers_ahead)

    def join_modules(self, modules: tuple[GatheredModule, ...]) -> tuple[GatheredModule, ...]:
        """Returns the modules of a pass of a unit whose weights are gathered together, by default each by itself."""
        return modules

    def gather_unit(self, axes: tuple[str, ...], elements: int, forward: bool) -> GatherOps:
        """Returns the all-gather of weights that are sharded over `axes`, whose shards come from where they are
        offloaded to.

        elements: of the gathered weights.
        """
        phase = "F" if forward else "B"
        ops = [self.gather(axes, elements, phase, "every")] if axes else []
        for place, share in self.offloaded_to("parameters").items():
            dtype = self.framework.main_weights if self.updates_weights and axes else self.framework.weights
            shard = HostCopy(round(share * BYTES[dtype] * elements / self.mesh.size(axes)), True, place)
            ops.insert(0, Op("copy shard", IN, shard, [], phase))
        return GatherOps(ops)

    def reduce_unit(self, axes: tuple[str, ...], elements: int) -> list[Op]:
        """Returns the reductions of gradients in every micro-batch, in order: reduce-scatter over the axes that shard
        them, then all-reduce of the shards over replica axes, then a copy to where they are offloaded to.
        """
        ops = self.reductions(axes, elements, "W", "every")
        for place, share in self.offloaded_to("gradients").items():
            ranks = self.mesh.size(split_axes(axes, self.replica_axes)[1])
            nbytes = share * BYTES[self.framework.gradients] * elements / ranks
            shard = HostCopy(round(nbytes), False, place)
            ops.append(Op("copy gradients", OUT, shard, [], "W"))
        return ops

    @property
    def has_root(self) -> bool:
        """Whether weights outside of the layers are those of a single unit, whose gradients are reduced together."""
        return False

    @property
    def wraps_trained(self) -> bool:
        """Whether each trained parameter of a unit with frozen ones is a unit of its own."""
        return False

    @property
    def gathers_again(self) -> bool:
        """Whether recomputed units are gathered for their recomputation, none of them ahead, and once more for the rest
        of their backward pass."""
        return False

    delays_update: bool = False
    """Whether the host updates the states during the passes of the next step."""

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, Update):
            return fragment
        for place, share in self.offloaded_to("optimizer").items():
            back = BYTES[self.framework.weights] * (1 - sum(self.offloaded_to("parameters").values()))
            fragment = update_on_host(module, fragment, back, place, True, self.delays_update, share)
        return fragment

    def gradient_buckets(self, params: Sequence[Param]) -> list[list[Param]]:
        """Returns the parameters of a unit whose gradients are reduced together, by default all unless the framework
        says else.

        params: with the same reduction axes, in the order in which their gradients are ready.
        """
        return fill_buckets(params, self.bucket_elements) if self.framework.bucket.in_units else [list(params)]


@dataclass(frozen=True)
class UnitShards:
    """What the ranks of a scheme share of a unit.

    forward, backward: modules whose weights are gathered for the two passes, in their order.
    gradients: reduction axes, each with its elements.
    leaving: elements of gradients that are sharded once reduced, and that the unit reduces last.
    again: whether its weights are gathered twice for the backward pass (`ShardedScheme.gathers_again`).
    """

    forward: tuple[GatheredModule, ...]
    backward: tuple[GatheredModule, ...]
    gradients: tuple[tuple[tuple[str, ...], int], ...]
    leaving: int
    again: bool = False

    def __bool__(self) -> bool:
        return bool(self.gradients or any(module.weights.groups for module in self.forward))


@dataclass(frozen=True)
class UnitGathers:
    """The all-gathers of a unit for itself and for the units that follow.

    sent: gradient elements of the following unit that are still being reduced during its backward pass.
    """

    forward: PassGathers
    backward: PassGathers
    sent: int


def shard_units(scheme: ShardedScheme, stage_ops: StageOps) -> StageOps:
    """Returns `stage_ops` in which the weights of every unit are gathered before its passes and its gradients reduced
    after.

    How far ahead the weights of a unit are gathered, `scheme.reach` says; weights that nobody asked for are gathered
    while nothing computes. A unit begins once all its weights that were asked for in earlier units have arrived. An
    embedding whose table is also that of the output layer stays whole between its passes, and so does its gradient from
    the output layer on (both belong to the root unit of FSDP, which is not freed after its forward pass). Of two
    tables the gradient of the output layer waits for that of the embedding, where both are of a root unit.
    """
    unit_runs = stage_ops.unit_runs
    held = [_unit_shards(scheme, unit_run, scheme.by_module) for unit_run in unit_runs]
    if not any(held):
        return stage_ops
    shared = (
        unit_runs[0].residual_in is None
        and bool(held[0])
        and any(unit_run.fragment.shared_weights for unit_run in unit_runs[1:])
    )
    if shared:
        held[0] = _unit_shards(scheme, unit_runs[0], False, stays=True)
        held[0] = replace(held[0], backward=whole_pass(unit_runs[0].fragment.backward, GatheredWeights()))
    waits = scheme.has_root and not shared and _are_ends(unit_runs, held)
    if waits:
        held[-1] = replace(held[-1], leaving=0)
    turns = [
        (i, turn)
        for row in _find_rows(unit_runs)
        for i, turn in zip(row, _plan_gathers(scheme, held, row), strict=True)
    ]
    sharded: list[UnitRun] = []
    # Copies of a unit differ in what they gather for later units: usually the first, the middle ones and the last.
    for (i, turn), similar in groupby(turns):
        stays = shared and i == 0
        fragment = _share_unit(scheme, unit_runs[i], held[i], turn, stays)
        whole = replace(unit_runs[i], fragment=fragment, count=len(list(similar)))
        table = [_table_key(axes) for axes, _ in held[0].gradients]
        if shared and fragment.shared_weights:
            whole = (_add_table_gradients if fragment.backward else _free_table)(scheme, whole, held[0])
        if stays:
            whole = replace(whole, allocated_before=(*whole.allocated_before, *table))
            if not any(unit_run.fragment.backward for unit_run in unit_runs):
                whole = replace(whole, freed_later=(*whole.freed_later, TABLE))
        sharded.append(whole)
    if waits:
        sharded[0], sharded[-1] = _join_root_gradients(scheme, sharded[0], sharded[-1], held)
    return replace(stage_ops, unit_runs=sharded)


def _find_rows(unit_runs: Sequence[UnitRun]) -> list[list[int]]:
    """Returns rows of neighbours, unit by unit the number of its run; a unit without input from the previous unit, as
    an embedding, starts a new row."""
    rows: list[list[int]] = []
    for i, unit_run in enumerate(unit_runs):
        if i == 0 or unit_run.residual_in is None:
            rows.append([])
        rows[-1] += [i] * unit_run.count
    return rows


def _are_ends(unit_runs: Sequence[UnitRun], held: Sequence[UnitShards]) -> bool:
    """Returns whether the first and the last of several units are an embedding and an output layer that are trained."""
    ends = (unit_runs[0], unit_runs[-1])
    outside = not any(param.in_layer for unit_run in ends for param in unit_run.fragment.params)
    return len(unit_runs) > 1 and outside and bool(held[0].gradients and held[-1].gradients)


def _join_root_gradients(
    scheme: ShardedScheme, first: UnitRun, last: UnitRun, held: Sequence[UnitShards]
) -> tuple[UnitRun, UnitRun]:
    """Returns the embedding and the output layer of a root unit: the gradients of the output layer wait, as the
    backward pass makes them, for those of the embedding, and are packed and reduced with these (autograd completes a
    flat parameter of FSDP1 then, and FSDP2 reduces its root in `_root_post_backward_final_callback`). When the
    reductions run is left as it is.

    The whole weights of the root are freed before its gradients are packed; they count through the whole step, so the
    buffer takes what it needs beyond them.
    """
    elements = sum(elements for unit in (held[0], held[-1]) for _, elements in unit.gradients)
    packed = elements * max(0, BYTES[scheme.framework.gradients] - BYTES[scheme.framework.weights])
    waiting = [
        replace(use, key=f"root {use.key}")
        for use in last.fragment.tensor_uses
        if use.key.startswith(GRADIENTS) and use.made
    ]
    kept = [use for use in last.fragment.tensor_uses if not use.key.startswith((GRADIENTS, PACKED))]
    uses = [replace(use, nbytes=packed) if use.key.startswith(PACKED) else use for use in first.fragment.tensor_uses]
    freed = [replace(use, op=first.fragment.backward[-1], made=False) for use in waiting]
    first, last = (
        replace(unit_run, fragment=replace(unit_run.fragment, tensor_uses=of_unit))
        for unit_run, of_unit in ((first, uses), (last, kept))
    )
    keys = tuple(use.key for use in waiting)
    return _add_uses(first, freed, allocated_before=keys), _add_uses(last, waiting, freed_later=keys)


def _unit_shards(scheme: ShardedScheme, unit_run: UnitRun, by_module: bool, stays: bool = False) -> UnitShards:
    """Returns what is gathered and reduced of a unit.

    stays: its weights stay whole for other units, and are not kept twice.
    """
    fragment = unit_run.fragment

    def modules(forward: bool) -> tuple[GatheredModule, ...]:
        sharded = _gathered_params(scheme, fragment, forward, stays) if forward or fragment.backward else []
        if scheme.wraps_trained and not all(param.trained for param in fragment.params):
            return wrap_trained(fragment, sharded, forward) if sharded else ()
        if by_module:
            return scheme.join_modules(find_modules(fragment, sharded, forward, scheme.reuse))
        ops = fragment.forward if forward else fragment.backward
        return whole_pass(ops, add_up([weights for _, weights in sharded]))

    if not fragment.backward:  # no weights below are trained
        return UnitShards(modules(True), modules(False), (), 0)
    gradients = defaultdict[tuple[str, ...], int](int)
    for param in fragment.params:
        if param.trained and ((axes := scheme.reduces(param)) or scheme.offloaded_to("gradients")):
            gradients[axes] += param.size
    last_buckets = [_gradient_buckets(scheme, fragment, axes)[-1][0] for axes in gradients]
    leaving = sum(param.size for bucket in last_buckets for param in bucket if _leave_unit(scheme, param))
    if scheme.framework.bucket.buffers:  # which hold them
        leaving = 0
    again = scheme.gathers_again and RECOMPUTES in unit_run.marks
    return UnitShards(modules(True), modules(False), tuple(gradients.items()), leaving, again)


def _gathered_params(
    scheme: ShardedScheme, fragment: Fragment, forward: bool, stays: bool
) -> list[tuple[Param, GatheredWeights]]:
    """Returns the parameters that are gathered for a pass of a unit."""
    away = bool(scheme.offloaded_to("parameters"))
    converts = isinstance(scheme, ConvertsWeights) and scheme.converts
    gathered: list[tuple[Param, GatheredWeights]] = []
    for param in fragment.params:
        axes = scheme.shards_at_rest("parameters", param)
        if axes or away or converts:
            second = scheme.secondary_shards(param) if isinstance(scheme, KeepsSecondaryShards) and not stays else None
            if second is not None and not forward:
                axes = second
            size = count_gathered(scheme, param)
            groups = ((axes, size),) if axes or away else ()
            gathered.append((param, GatheredWeights(groups, size if second != () else 0)))
    return gathered


def _plan_gathers(scheme: ShardedScheme, units: Sequence[UnitShards], row: Sequence[int]) -> list[UnitGathers]:
    """Returns the all-gathers of the units of a row, planned once for stages whose units have equal weights: those of
    micro-batches of another size. row: unit by unit the number of its run."""
    of_row = tuple(units[number] for number in dict.fromkeys(row))
    lengths = tuple((number, len(list(same))) for number, same in groupby(row))
    make = partial(_plan_row, scheme, [units[number] for number in row])
    return remember(scheme.known_gathers, (of_row, lengths), make)


def _plan_row(scheme: ShardedScheme, row: list[UnitShards]) -> list[UnitGathers]:
    forward = plan_pass([unit.forward for unit in row], partial(scheme.reach, True))
    again = any(unit.again for unit in row)
    reach = _ask_inside([len(unit.backward) for unit in row[::-1]]) if again else partial(scheme.reach, False)
    backward = plan_pass([unit.backward for unit in row[::-1]], reach)[::-1]
    sent = [*(unit.leaving for unit in row[1:]), 0]
    return [UnitGathers(*each) for each in zip(forward, backward, sent, strict=True)]


def _ask_inside(counts: Sequence[int]) -> Reach:
    """Returns the reach of a pass in which no unit is asked for ahead, but the next of the units inside of one is.

    counts: modules of every unit.
    """
    ends = set(accumulate(counts))
    return lambda sizes: [place + 1 + (place + 1 not in ends) for place in range(len(sizes))]


GRADIENTS, PACKED = "gradients of a bucket", "packed"
"""What the memory keys of whole gradients, and of their copies in a buffer, begin with."""

TABLE = "weights"
"""The memory key of the weights of a table that other units also use."""


def _table_key(axes: tuple[str, ...]) -> str:
    """Returns the memory key of the gradients of a table that other units also use."""
    return f"gradients of the table {axes}"


def _add_table_gradients(scheme: ShardedScheme, unit_run: UnitRun, table: UnitShards) -> UnitRun:
    """Returns a unit that makes a first part of the gradients of a table; the unit with the table frees them."""
    first = next((op for op in unit_run.fragment.backward if op.phase == "W"), unit_run.fragment.backward[-1])
    width = BYTES[scheme.framework.gradients]
    uses = [TensorUse(_table_key(axes), size * width, first, True, "gradients") for axes, size in table.gradients]
    return _add_uses(unit_run, uses, freed_later=tuple(use.key for use in uses))


def _free_table(scheme: ShardedScheme, unit_run: UnitRun, table: UnitShards) -> UnitRun:
    """Returns a unit without backward pass that is the last to read a table; the unit with the table gathers it."""
    nbytes = table.forward[0].weights.live * BYTES[scheme.framework.weights]
    read = TensorUse(TABLE, nbytes, unit_run.fragment.forward[-1], False, "parameters")
    return _add_uses(unit_run, [read], allocated_before=(TABLE,))


def _add_uses(
    unit_run: UnitRun,
    uses: Sequence[TensorUse],
    allocated_before: tuple[str, ...] = (),
    freed_later: tuple[str, ...] = (),
) -> UnitRun:
    """Returns a unit that uses further buffers, some of which other units allocate or free. Its fragment may be that of
    other stages, and stays as it is."""
    return replace(
        unit_run,
        fragment=replace(unit_run.fragment, tensor_uses=[*unit_run.fragment.tensor_uses, *uses]),
        allocated_before=(*unit_run.allocated_before, *allocated_before),
        freed_later=(*unit_run.freed_later, *freed_later),
    )


def _share_unit(
    scheme: ShardedScheme, unit_run: UnitRun, shards: UnitShards, turn: UnitGathers, stays: bool
) -> Fragment:
    """Returns the same as `_lower_unit`, once for all stages."""
    key = unit_run.residual_in, unit_run.residual_out, shards, turn, stays
    lower = partial(_lower_unit, scheme, unit_run, shards, turn, stays)
    return scheme.derived_units.derive(unit_run.fragment, key, lower)


def _lower_unit(
    scheme: ShardedScheme, unit_run: UnitRun, shards: UnitShards, turn: UnitGathers, stays: bool
) -> Fragment:
    """Returns a unit with its all-gathers and reductions.

    stays: its weights are whole between its passes, too.
    """
    fragment = unit_run.fragment.copy()
    _PassGathering(scheme, unit_run, fragment, shards.forward, turn.forward, True, stays).lower()
    if fragment.backward:
        # A table that stays is gathered already.
        modules = shards.backward
        if stays:
            weights = replace(shards.forward[0].weights, groups=())
            modules = (replace(shards.backward[0], weights=weights),)
        _PassGathering(scheme, unit_run, fragment, modules, turn.backward, False, stays).lower()
        if shards.again:
            _gather_again(scheme, fragment, modules[:1])
        # The gradients of the unit whose backward pass came before are still being reduced.
        nbytes, ends = turn.sent * BYTES[scheme.framework.gradients], (fragment.backward[0], fragment.backward[-1])
        fragment.tensor_uses += _lifetime("gradients of the following", nbytes, *ends, "gradients")
        for axes, _ in shards.gradients:
            _reduce_gradients(scheme, fragment, axes, stays)
    return fragment


def _gather_again(scheme: ShardedScheme, fragment: Fragment, modules: Sequence[GatheredModule]) -> None:
    """Gathers the weights of a unit once more behind their first all-gather, for the ops behind its recomputation."""
    groups = [group for module in modules for group in _gather_all(scheme, module.weights, False)]
    kernels = [op for op in fragment.backward if op.stream == COMPUTE]
    if not groups or not (again := [op for op in kernels if op.phase == "R"]):
        return
    place = fragment.backward.index(again[0])
    for group in groups:
        group.ops[0].after += [op for op in fragment.backward[:place] if op.stream == group.ops[0].stream]
    fragment.backward[place:place] = [op for group in groups for op in group.ops]
    for op in kernels:
        if op.phase != "R":
            op.after += [group.ops[-1] for group in groups]


class InsertionPoint(NamedTuple):
    """Where all-gathers are issued in a pass.

    before: the op that they stand before; None: behind all.
    after: the ops that they wait for.
    """

    before: Op | None
    after: list[Op]


class _PassGathering:
    """One pass of a unit with its all-gathers: of its weights, unless earlier units have asked for them, and of
    those of later units.

    Whatever waits for the output of the unit also waits for the weights of the next unit.

    ops: of the pass.
    input: the op that brings its input, if there is any.
    gathers: by module of the unit, its all-gathers.
    asked: those of them that the unit issues itself.
    for_next: ops that the next unit waits for.
    inserted: ops that stand before an op of the pass; None: behind all.
    """

    def __init__(
        self,
        scheme: ShardedScheme,
        unit_run: UnitRun,
        fragment: Fragment,
        modules: tuple[GatheredModule, ...],
        planned: PassGathers,
        forward: bool,
        stays: bool,
    ) -> None:
        self.scheme, self.unit_run, self.fragment, self.modules = scheme, unit_run, fragment, modules
        self.planned, self.forward, self.stays = planned, forward, stays
        self.ops, self.phase = (fragment.forward, "F") if forward else (fragment.backward, "B")
        entry, takes = (
            (fragment.entry, unit_run.residual_in) if forward else (fragment.grad_entry, unit_run.residual_out)
        )
        self.input = [entry[takes]] if takes in entry else []
        self.gathers = [_gather_all(scheme, module.weights, forward) for module in modules]
        self.asked: dict[int, list[Op]] = {}
        marks = relay_arrivals(planned.reach, self.phase)
        self.for_next = marks[:1]
        self.inserted = defaultdict[Op | None, list[Op]](list, {self.ops[0]: marks})

    def lower(self) -> None:
        for issuer, gathers in groupby(self.planned.now, lambda gather: gather.issuer):
            begin = self.modules[issuer].begin if issuer else 0
            after = (kernel_before(self.ops, begin) if issuer else []) or self.input
            self._issue_gathers(InsertionPoint(self.ops[begin], after), list(gathers))
        self._hold_later_weights()
        for number in range(len(self.modules)):
            self._hold_gathered_weights(number)
        fragment, unit_run = self.fragment, self.unit_run
        gate, gives = (
            (fragment.exit, unit_run.residual_out) if self.forward else (fragment.grad_exit, unit_run.residual_in)
        )
        if gives in gate and self.for_next:
            after = [gate[gives], *self.for_next]
            gate[gives] = Op("gather params of the next", after=after, phase=self.phase)
        behind = self.inserted[None]
        self.ops[:] = [*(op for place in self.ops for op in (*self.inserted[place], place)), *behind]

    def _issue_gathers(self, point: InsertionPoint, gathers: list[Gather]) -> None:
        """Issues all-gathers in order at an insertion point."""
        issued: list[Op] = []
        for gather in gathers:
            if gather.later and not self.forward and not point.after:
                # Without an incoming gradient the loss starts the backward pass.
                point = point._replace(after=issued[:1]) if issued else self._find_end_of_loss()
            planned = self.gathers[gather.module] if not gather.later else None
            groups = planned if planned is not None else _gather_all(self.scheme, gather.weights, self.forward)
            for group in groups:
                group.ops[0].after += point.after
            issued += self._note_issued(gather, groups)
        self.inserted[point.before] += issued

    def _find_end_of_loss(self) -> InsertionPoint:
        """Returns the place behind the kernels of the loss, whose result is the gradient that a pass starts with."""
        kernels = takewhile(lambda op: isinstance(op.work, Memory) and op.work.what == "cross-entropy", self.ops)
        begin = max(1, len(list(kernels)))
        return InsertionPoint(next(iter(self.ops[begin:]), None), self.ops[begin - 1 : begin])

    def _note_issued(self, gather: Gather, groups: list[GatherOps]) -> list[Op]:
        """Lets whatever needs the weights of an all-gather wait for it, and returns its ops."""
        ops, arrived = [op for group in groups for op in group.ops], [group.ops[-1] for group in groups]
        if not gather.later:
            self.asked[gather.module] = ops
            self._wait_for_weights(gather.module, arrived)
        elif ops:
            self._hold_later(gather, groups, ops[0])
            if gather.later == 1:
                self.for_next += arrived
            else:  # a mark stands behind the ops that it waits for
                return [*ops, mark_arrival(self.phase, gather.later - 1, arrived)]
        return ops

    def _wait_for_weights(self, module: int, arrived: list[Op]) -> None:
        """Lets the ops from the start of a module to that of the next wait for its weights."""
        # Collectives that gather weights further before a kernel reads them wait, too.
        used = {param.used for param in self.fragment.params} if self.forward else set()
        begin = self.modules[module].begin
        end = next((other.begin for other in self.modules if other.begin > begin), len(self.ops))
        for op in self.ops[begin if module else 0 : end]:
            if op.stream == COMPUTE or op in used:
                op.after += arrived

    def _hold_later_weights(self) -> None:
        """Keeps the weights in memory that earlier units have asked for and later units use."""
        if self.planned.ahead:
            nbytes = self.planned.ahead * BYTES[self.scheme.framework.weights]
            self._hold("ahead", nbytes, self.ops[0], self.ops[-1])
        for gather in self.planned.before:
            if gather.later:
                groups = _gather_all(self.scheme, gather.weights, self.forward)
                self._hold_later(gather, groups, self.ops[0])

    def _hold_later(self, gather: Gather, groups: list[GatherOps], begin: Op) -> None:
        """Keeps the weights of a later unit in memory until the end of the pass."""
        if self.forward and self.scheme.framework.gathers_apart:
            return  # the host, which allocates, asks for them when it has freed those of this unit
        live = gather.weights.live * BYTES[self.scheme.framework.weights]
        nbytes = sum(group.nbytes for group in groups) or live
        self._hold(f"{gather.later} {gather.module}", nbytes, begin, self.ops[-1])

    def _hold_gathered_weights(self, number: int) -> None:
        """Keeps the weights of a module in memory until its last op, and unpacks them before its first kernel."""
        module, groups = self.modules[number], self.gathers[number]
        begin, end = (self.asked.get(number) or self.ops)[0], self.ops[module.end]
        nbytes = module.weights.live * BYTES[self.scheme.framework.weights]
        if self.stays:
            self.fragment.tensor_uses += _lifetime(TABLE, nbytes, begin, end)
        else:
            self._hold(f"of {number}", nbytes, begin, end)
        unpack, nbytes = self._unpack_kernels(module.weights, groups)
        for op in unpack:
            op.after += [*self.input, *(group.ops[-1] for group in groups if number in self.asked)]
        self.inserted[next((op for op in self.ops[module.begin :] if op.stream == COMPUTE), None)] += unpack
        if nbytes:
            self.fragment.tensor_uses += _lifetime(f"arrived {self.phase} {number}", nbytes, begin, end, "buffers")

    def _unpack_kernels(self, weights: GatheredWeights, groups: list[GatherOps]) -> tuple[list[Op], int]:
        """Returns the kernels that prepare arrived weights, and the bytes of what they read that stay in memory:
        backward FSDP2 frees a buffer before it asks for the next weights (`wait_for_unshard`, _fsdp_param_group.py)."""
        unpack = [op for group in groups for op in group.unpack]
        if unpack or not groups or not self.scheme.framework.gathers_apart:
            return unpack, sum(group.nbytes for group in groups)
        nbytes = weights.elements * BYTES[self.scheme.framework.weights]
        copy = Op("copy params", work=Memory("concat", nbytes, nbytes), phase=self.phase)
        return [copy], nbytes if self.forward else 0

    def _hold(self, which: str, nbytes: float, begin: Op, end: Op) -> None:
        """Keeps weights in memory, where a pass is split until the last of its gradients of inputs that may need them
        (`simulator.program.memory_profile.release_weights`)."""
        until = self.ops[: self.ops.index(end) + 1]
        reader = next((op for op in reversed(until) if op.phase != "W"), end)
        key = f"weights {self.phase} {which}"
        self.fragment.tensor_uses += [*_lifetime(key, nbytes, begin, reader), *_lifetime(key, nbytes, begin, end)[1:]]


def _gather_all(scheme: ShardedScheme, weights: GatheredWeights, forward: bool) -> list[GatherOps]:
    groups = [scheme.gather_unit(axes, elements, forward) for axes, elements in weights.groups]
    if groups and weights.launches:
        first = groups[0].ops[0]
        groups[0].ops.insert(0, Op("hooks", first.stream, HostLaunch(weights.launches), [], first.phase))
    for group in groups:
        _serialise(group.ops)
    return groups


def _serialise(ops: list[Op]) -> None:
    """Lets each op wait for the op before."""
    for op, follower in pairwise(ops):
        follower.after.append(op)


def _gradient_buckets(scheme: ShardedScheme, fragment: Fragment, axes: tuple[str, ...]) -> list[tuple[list[Param], Op]]:
    """Returns the buckets in which gradients of a unit are reduced over `axes`, each with the op after which it is
    ready."""
    place = {op: i for i, op in enumerate(fragment.backward)}

    def ready(param: Param) -> int:
        return _last_place(param.ready, place)

    params = [param for param in fragment.params if param.trained and scheme.reduces(param) == axes]
    buckets = scheme.gradient_buckets(sorted(params, key=ready))
    return [(bucket, fragment.backward[max(map(ready, bucket))]) for bucket in buckets]


def _leave_unit(scheme: ShardedScheme, param: Param) -> bool:
    """Returns whether no rank keeps the whole gradient of a parameter on its GPU."""
    return bool(scheme.shards_at_rest("gradients", param) or scheme.offloaded_to("gradients"))


def _last_place(op: Op, place: dict[Op, int]) -> int:
    """Returns the place of an op in a pass; of a mark, that of the last op that it waits for."""
    return place[op] if op in place else max((_last_place(other, place) for other in op.after), default=0)


def _reduce_gradients(scheme: ShardedScheme, fragment: Fragment, axes: tuple[str, ...], stays: bool) -> None:
    """Reduces the gradients of a unit, bucket by bucket.

    Unsharded gradients live until they are reduced. Those of a bucket are still being reduced while those of the
    next are computed.
    """
    buckets = _gradient_buckets(scheme, fragment, axes)
    if stays:
        buckets = [([param for params, _ in buckets for param in params], buckets[-1][1])]
    begin = 0
    for number, (params, complete) in enumerate(buckets):
        following = buckets[number + 1][1] if number + 1 < len(buckets) else None
        end = fragment.backward.index(complete) + 1 if following else len(fragment.backward)
        ops = scheme.reduce_unit(axes, sum(param.size for param in params))
        if not ops:
            return
        _serialise(ops)
        packing = []
        if _leave_unit(scheme, params[0]):
            last = fragment.backward[end - 1]
            first = next((op for op in fragment.backward[begin:end] if op.phase == "W"), last)
            key = _table_key(axes) if stays else f"{GRADIENTS} {axes} {number}"
            elements, framework = count_whole_elements(scheme, params), scheme.framework
            nbytes = elements * BYTES[framework.gradients]
            if framework.gathers_apart:  # gradients have the format of the weights until they are packed
                packing = _pack_gradients(fragment, f"{PACKED} {axes} {number}", nbytes, params, ops[0])
                nbytes = elements * BYTES[framework.weights]
            elif framework.bucket.flat:
                packing = _flatten_gradients(nbytes, params)
            fragment.tensor_uses += _lifetime(key, nbytes, first, following or ops[0], "gradients")
        ops[0].after += packing or [param.ready for param in params]
        fragment.backward[end:end] = [*packing, *ops]
        begin = end + len(packing) + len(ops)
        for param in params:
            param.ready = ops[-1]


def _flatten_gradients(nbytes: int, params: list[Param]) -> list[Op]:
    """Returns the kernels that copy the gradients of a unit into one, and divide it in place before its reduction."""
    flatten = Op("flatten grads", work=Memory("concat", nbytes, nbytes), phase="W")
    flatten.after += [param.ready for param in params]
    return [flatten, Op("divide grads", work=Memory("scale", nbytes, nbytes), after=[flatten], phase="W")]


def _pack_gradients(fragment: Fragment, key: str, nbytes: int, params: list[Param], reduction: Op) -> list[Op]:
    """Returns the kernel that copies the gradients of a bucket into a buffer, which lives until they are reduced."""
    ready = [param.ready for param in params]
    pack = Op("pack grads", work=Memory("concat", nbytes, nbytes), after=ready, phase="W")
    fragment.tensor_uses += _lifetime(key, nbytes, pack, reduction, "buffers")
    return [pack]


def _lifetime(key: str, nbytes: float, begin: Op, end: Op, category: str = "parameters") -> list[TensorUse]:
    return [TensorUse(key, round(nbytes), op, op is begin, category) for op in (begin, end)]


def relay_arrivals(reach: int, phase: str) -> list[Op]:
    """Makes ops without work that pass on to later units that their weights have arrived; the next unit waits for the
    first.

    Units are connected by their residual stream alone. The arrival of weights for the unit after the next is relayed
    from unit to unit on a separate stream, arrivals for units further on on other streams; every unit hands them to
    the stream before.
    """
    marks = [mark_arrival(phase, 1, [])] if reach else []
    for stream in range(1, reach):
        marks.append(mark_arrival(phase, stream + 1, []))
        marks.append(mark_arrival(phase, stream, marks[-1:]))
    return marks


def mark_arrival(phase: str, stream: int, after: list[Op]) -> Op:
    """Returns a mark, on a stream of arrivals, that weights are there."""
    name = "data-forward" if phase == "F" else "data-backward"
    return Op("weights arrived", f"{name}-{stream}", None, after, phase)


def group_layers(stage_ops: StageOps, layers: int) -> StageOps:
    """Returns `stage_ops` whose runs have units of `layers` copies, and a run for the remainder."""
    if layers == 1:
        return stage_ops
    unit_runs: list[UnitRun] = []
    for unit_run in stage_ops.unit_runs:
        whole, rest = divmod(unit_run.count, layers)
        unit_runs += [_join_copies(unit_run, n, count) for n, count in ((layers, whole), (rest, 1)) if n and count]
    return replace(stage_ops, unit_runs=unit_runs)


def _join_copies(unit_run: UnitRun, n: int, count: int) -> UnitRun:
    """Returns a run of `count` units, each of `n` copies in a fragment."""
    if n == 1:
        return replace(unit_run, count=count)
    copies = [unit_run.fragment.copy() for _ in range(n)]
    takes, gives = unit_run.residual_in or "", unit_run.residual_out or ""
    for copy, following in pairwise(copies):
        following.entry[takes].after.append(copy.exit[gives])
        if takes in following.grad_exit:
            copy.grad_entry[gives].after.append(following.grad_exit[takes])

    def key(old: str, i: int) -> str:
        """Returns memory keys of copy i: neighbouring copies share the residual stream between them."""
        back, (come, go) = old.removeprefix("d:"), unit_run.keys
        at = {come: i, go: i + 1}.get(back)
        if at is None:
            return f"{old} of {i}"
        return old if at in (0, n) else f"{old.removesuffix(back)}between {at}"

    fragment = Fragment(
        [op for copy in copies for op in copy.forward],
        [op for copy in reversed(copies) for op in copy.backward],
        copies[0].entry,
        copies[-1].exit,
        copies[-1].grad_entry,
        copies[0].grad_exit,
        [param for copy in copies for param in copy.params],
        [name for copy in copies for name in copy.shared_weights],
        [
            replace(tensor_use, key=key(tensor_use.key, i))
            for i, copy in enumerate(copies)
            for tensor_use in copy.tensor_uses
        ],
    )
    allocated_before, freed_later = (
        tuple(key(old, i) for i in range(n) for old in keys)
        for keys in (unit_run.allocated_before, unit_run.freed_later)
    )
    return replace(
        unit_run, fragment=fragment, count=count, layers=n, allocated_before=allocated_before, freed_later=freed_later
    )
