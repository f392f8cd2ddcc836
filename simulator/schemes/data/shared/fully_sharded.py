"""Sharded weights, unit by unit: all-gathered for the passes of a unit, sharded between them.

A unit is a transformer layer, the embedding, or the output layer with its loss. `shard_units` decides for every unit
when its weights are gathered, how long they live, and when its gradients are reduced; a scheme says how they move
(`ShardedScheme`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import ClassVar

from simulator.ir.modules import Stage
from simulator.ir.ops import BYTES, COMPUTE, Fragment, Memory, Op, StageOps, TensorUse, UnitRun
from simulator.ir.scheme import LowerStage
from simulator.schemes.data.shared.data_parallel import DataScheme


@dataclass
class GatherOps:
    """How the weights of a unit are gathered.

    ops: collectives and copies, one after another.
    unpack: kernels of the unit that prepare the arrived weights.
    nbytes: bytes that arrive, where these are not the weights themselves.
    """

    ops: list[Op]
    unpack: list[Op] = field(default_factory=list)
    nbytes: int = 0


class ShardedScheme(DataScheme):
    """Base of the data schemes that reduce gradients unit by unit, and gather sharded weights unit by unit.

    They differ in how far ahead weights are gathered (`prefetch_depth`), and in how weights and gradients move
    (`gather_unit`, `reduce_unit`). The last axis that a scheme is `over` joins the nearest ranks.
    """

    shards: ClassVar[tuple[str, ...]] = ("optimizer", "gradients", "parameters")

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        return super().lower_stage(
            stage, lambda part: shard_units(self, group_layers(inner(part), self.layers_per_unit))
        )

    @property
    def layers_per_unit(self) -> int:
        """Layers of one unit, where that many of one kind follow each other."""
        return 1

    def gather(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        """An all-gather; those that happen once a step run on a stream that units do not use."""
        op = super().gather(axes, elements, phase, when)
        return replace(op, stream="data-returns") if when == "first" else op

    def prefetch_depth(self, forward: bool, sizes: Sequence[int]) -> int:
        """How many of the following units are gathered during the computation of one.

        sizes: elements of that unit, and of those that follow it in this pass.
        """
        return int(self.framework.overlap.dp)

    def gather_unit(self, axes: tuple[str, ...], elements: int, forward: bool) -> GatherOps:
        """The all-gather of weights that are sharded over `axes`.

        elements: of the gathered weights.
        """
        return GatherOps([self.gather(axes, elements, "F" if forward else "B", "every")])

    def reduce_unit(self, axes: tuple[str, ...], elements: int) -> list[Op]:
        """The reductions of gradients in every micro-batch, one after another: reduce-scatter over the axes that shard
        them, then all-reduce of the shards over replica axes.
        """
        shard_axes, copies = self.split_replica_axes(axes)
        ops = [self.reduce(shard_axes, elements, "W", "every")] if shard_axes else []
        if copies:
            ops.append(self.reduce(copies, elements // self.mesh.size(shard_axes), "W", "every"))
        return ops

    def split_replica_axes(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that shard states, and those along which the shards are replicated."""
        shard_axes = tuple(axis for axis in axes if axis not in self.replica_axes)
        return shard_axes, tuple(axis for axis in axes if axis in self.replica_axes)

    @cached_property
    def node_axes(self) -> tuple[str, ...]:
        """The axes of the nearest ranks that hold the same weights: the last one that the scheme is over, and the
        sequence axes.
        """
        claimed = [axis for axis in self.axes if not set(self.mesh.parts(axis)) & set(self.replica_axes)]
        return (*self.mesh.parts(claimed[-1:]), *self.sequence_axes)


@dataclass(frozen=True)
class GatheredWeights:
    """The weights that a pass of a unit gathers.

    groups: axes that shard them, each with its elements.
    live: elements that take memory once gathered; weights that are also stored whole take none.
    """

    groups: tuple[tuple[tuple[str, ...], int], ...] = ()
    live: int = 0

    @property
    def elements(self) -> int:
        return sum(elements for _, elements in self.groups)


@dataclass(frozen=True)
class UnitShards:
    """What the ranks of a scheme share of a unit.

    forward, backward: weights gathered for the two passes.
    gradients: reduction axes, each with its elements.
    leaving: elements of gradients that are sharded once reduced.
    """

    forward: GatheredWeights
    backward: GatheredWeights
    gradients: tuple[tuple[tuple[str, ...], int], ...]
    leaving: int

    def __bool__(self) -> bool:
        return bool(self.forward.groups or self.gradients)


@dataclass(frozen=True)
class PassGathers:
    """The all-gathers of a pass of a unit.

    now: weights gathered when the pass starts, each with the number of units until their use.
    before: weights of the following units that earlier passes have gathered, the next unit first.
    """

    now: tuple[tuple[int, GatheredWeights], ...]
    before: tuple[GatheredWeights, ...]


@dataclass(frozen=True)
class UnitGathers:
    """The all-gathers of a unit for itself and for the units that follow.

    sent: gradient elements of the following unit that are still being reduced during its backward pass.
    """

    forward: PassGathers
    backward: PassGathers
    sent: int


def group_layers(stage_ops: StageOps, layers: int) -> StageOps:
    """`stage_ops` in which each run has units of `layers` copies, and the remainder in a run of its own."""
    if layers == 1:
        return stage_ops
    unit_runs: list[UnitRun] = []
    for unit_run in stage_ops.unit_runs:
        whole, rest = divmod(unit_run.count, layers)
        unit_runs += [_join_copies(unit_run, n, count) for n, count in ((layers, whole), (rest, 1)) if n and count]
    return replace(stage_ops, unit_runs=unit_runs)


def _join_copies(unit_run: UnitRun, n: int, count: int) -> UnitRun:
    """A run of `count` units, each of `n` copies in one fragment."""
    if n == 1:
        return replace(unit_run, count=count)
    copies = [unit_run.fragment.copy() for _ in range(n)]
    takes, gives = unit_run.residual_in or "", unit_run.residual_out or ""
    for one, other in pairwise(copies):
        other.entry[takes].after.append(one.exit[gives])
        if takes in other.grad_exit:
            one.grad_entry[gives].after.append(other.grad_exit[takes])

    def key(old: str, i: int) -> str:
        """Memory keys of copy i: neighbouring copies share the residual stream between them."""
        back, (come, go) = old.removeprefix("d:"), unit_run.keys
        at = {come: i, go: i + 1}.get(back)
        if at is None:
            return f"{old} of {i}"
        return old if at in (0, n) else f"{old.removesuffix(back)}between {at}"

    fragment = Fragment(
        [op for one in copies for op in one.forward],
        [op for one in reversed(copies) for op in one.backward],
        copies[0].entry,
        copies[-1].exit,
        copies[-1].grad_entry,
        copies[0].grad_exit,
        [param for one in copies for param in one.params],
        [name for one in copies for name in one.shared_weights],
        [
            replace(tensor_use, key=key(tensor_use.key, i))
            for i, one in enumerate(copies)
            for tensor_use in one.tensor_uses
        ],
    )
    found, left = (
        tuple(key(old, i) for i in range(n) for old in keys)
        for keys in (unit_run.allocated_before, unit_run.freed_later)
    )
    return replace(unit_run, fragment=fragment, count=count, allocated_before=found, freed_later=left)


def shard_units(scheme: ShardedScheme, stage_ops: StageOps) -> StageOps:
    """`stage_ops` in which the weights of every unit are gathered before its passes and its gradients reduced after.

    The weights of a unit are gathered during the computation of the `scheme.prefetch_depth` units before it, or, with a
    depth of 0, while nothing computes: the limit of unused all-gathers. An embedding whose table is also that of the
    output layer stays whole between its passes, and so does its gradient from the output layer on (both belong to the
    root unit of FSDP, which is not freed after its forward pass).
    """
    unit_runs = stage_ops.unit_runs
    held = [_unit_shards(scheme, unit_run) for unit_run in unit_runs]
    if not any(held):
        return stage_ops
    shared = (
        unit_runs[0].residual_in is None
        and bool(held[0])
        and any(unit_run.fragment.shared_weights for unit_run in unit_runs[1:])
    )
    if shared:
        held[0] = replace(held[0], backward=GatheredWeights())
    # A unit without input from the previous one, as an embedding, starts a new row of neighbours.
    rows: list[list[int]] = []
    for i, unit_run in enumerate(unit_runs):
        if i == 0 or unit_run.residual_in is None:
            rows.append([])
        rows[-1] += [i] * unit_run.count
    turns = [
        (i, turn) for row in rows for i, turn in zip(row, _plan_gathers(scheme, [held[i] for i in row]), strict=True)
    ]
    made: list[UnitRun] = []
    # Copies of a unit differ in what they gather for later units: usually the first, the middle ones and the last.
    for (i, turn), similar in groupby(turns):
        stays = shared and i == 0
        fragment = _lower_unit(scheme, unit_runs[i], held[i], turn, stays)
        whole = replace(unit_runs[i], fragment=fragment, count=len(list(similar)))
        table = [_table_key(axes) for axes, _ in held[0].gradients]
        if shared and fragment.shared_weights:
            whole = _add_table_gradients(scheme, whole, held[0])
        made.append(replace(whole, allocated_before=(*whole.allocated_before, *table)) if stays else whole)
    return replace(stage_ops, unit_runs=made)


def _unit_shards(scheme: ShardedScheme, unit_run: UnitRun) -> UnitShards:
    forward, backward, gradients = (defaultdict[tuple[str, ...], int](int) for _ in range(3))
    live = leaving = 0
    for param in unit_run.fragment.params:
        if axes := scheme.shards_at_rest("parameters", param):
            forward[axes] += param.size
            second = scheme.secondary_shards(param)
            live += param.size if second != () else 0
            backward[axes if second is None else second] += param.size
        if param.trained and (axes := scheme.reduces(param)):
            gradients[axes] += param.size
            leaving += param.size if scheme.shards_at_rest("gradients", param) else 0
    backward.pop((), None)
    groups = GatheredWeights(tuple(forward.items()), live), GatheredWeights(tuple(backward.items()), live)
    if not unit_run.fragment.backward:  # no weights below are trained
        return UnitShards(groups[0], GatheredWeights(), (), 0)
    return UnitShards(*groups, tuple(gradients.items()), leaving)


def _plan_gathers(scheme: ShardedScheme, row: list[UnitShards]) -> list[UnitGathers]:
    forward = _plan_pass(scheme, [one.forward for one in row], True)
    backward = _plan_pass(scheme, [one.backward for one in row[::-1]], False)[::-1]
    sent = [*(one.leaving for one in row[1:]), 0]
    return [UnitGathers(*each) for each in zip(forward, backward, sent, strict=True)]


def _plan_pass(scheme: ShardedScheme, row: list[GatheredWeights], forward: bool) -> list[PassGathers]:
    """The all-gathers of units in the order of a pass."""
    sizes = [one.elements for one in row]
    found, reached = [], 0
    for place in range(len(row)):
        begin = max(reached, place)
        before = row[place + 1 : begin]
        reached = max(begin, min(place + 1 + scheme.prefetch_depth(forward, sizes[place:]), len(row)))
        found.append(PassGathers(tuple((at - place, row[at]) for at in range(begin, reached)), tuple(before)))
    return found


def _table_key(axes: tuple[str, ...]) -> str:
    """The memory key of the gradients of a table that other units also use."""
    return f"gradients of the table {axes}"


def _add_table_gradients(scheme: ShardedScheme, unit_run: UnitRun, table: UnitShards) -> UnitRun:
    """A unit that makes a first part of the gradients of a table; the unit with the table frees them."""
    first = next((op for op in unit_run.fragment.backward if op.phase == "W"), unit_run.fragment.backward[-1])
    for axes, elements in table.gradients:
        nbytes = elements * BYTES[scheme.framework.gradients]
        unit_run.fragment.tensor_uses.append(TensorUse(_table_key(axes), nbytes, first, True, "gradients"))
    return replace(unit_run, freed_later=(*unit_run.freed_later, *(_table_key(axes) for axes, _ in table.gradients)))


def _lower_unit(scheme: ShardedScheme, unit_run: UnitRun, own: UnitShards, turn: UnitGathers, stays: bool) -> Fragment:
    """A unit with its all-gathers and reductions.

    stays: its weights are whole between its passes, too.
    """
    made = unit_run.fragment.copy()
    _lower_pass(scheme, unit_run, made, own.forward, turn.forward, True, stays)
    if made.backward:
        # A table that stays is gathered already.
        weights = replace(own.forward, groups=()) if stays else own.backward
        _lower_pass(scheme, unit_run, made, weights, turn.backward, False, stays)
        # The gradients of the unit whose backward pass came before are still being reduced.
        nbytes, ends = turn.sent * BYTES[scheme.framework.gradients], (made.backward[0], made.backward[-1])
        made.tensor_uses += _lifetime("gradients of the following", nbytes, *ends, "gradients")
        for axes, elements in own.gradients:
            _reduce_gradients(scheme, made, axes, elements, stays)
    return made


def _lower_pass(
    scheme: ShardedScheme,
    unit_run: UnitRun,
    made: Fragment,
    own: GatheredWeights,
    fetch: PassGathers,
    forward: bool,
    stays: bool,
) -> None:
    """One pass of a unit with its all-gathers: of its own weights, unless earlier passes have gathered them, and of
    those of later units.

    Whatever waits for the output of the unit also waits for the weights of the next unit.
    """
    ops, phase = (made.forward, "F") if forward else (made.backward, "B")
    entry, takes = (made.entry, unit_run.residual_in) if forward else (made.grad_entry, unit_run.residual_out)
    gate, gives = (made.exit, unit_run.residual_out) if forward else (made.grad_exit, unit_run.residual_in)
    came = [entry[takes]] if takes in entry else []
    kernels, first, last = [op for op in ops if op.stream == COMPUTE], ops[0], ops[-1]
    mine = _gather_all(scheme, own, forward)
    front, behind, arrived = list[Op](), list[Op](), dict[int, list[Op]]()
    for later, weights in fetch.now:
        found = _gather_all(scheme, weights, forward) if later else mine
        # Without an incoming gradient the loss starts the backward pass.
        begins = bool(later) and not forward and not came
        for one in found:
            one.ops[0].after += (front or ops)[:1] if begins else came
        gathers = [op for one in found for op in one.ops]
        (behind if begins and not front else front).extend(gathers)
        arrived[later] = [one.ops[-1] for one in found]
        if later and gathers:
            made.tensor_uses += _lifetime(
                f"weights {phase} {later}", _bytes_in_flight(scheme, weights, found), gathers[0], last
            )
    for later, weights in enumerate(fetch.before, 1):
        nbytes = _bytes_in_flight(scheme, weights, _gather_all(scheme, weights, forward))
        made.tensor_uses += _lifetime(f"weights {phase} {later}", nbytes, first, last)
    here = arrived.get(0, [])
    # Collectives that gather weights further before a kernel reads them wait, too.
    used = {param.used for param in made.params} if forward else set()
    for op in (op for op in ops if op.stream == COMPUTE or op in used):
        op.after += here
    key, begin = "weights" if stays else f"weights {phase}", (front if here else ops)[0]
    made.tensor_uses += _lifetime(key, own.live * BYTES[scheme.framework.weights], begin, last)
    marks, waits = _relay_arrivals(len(fetch.before), arrived, phase)
    if gives in gate and waits:
        gate[gives] = Op("gather params of the next", after=[gate[gives], *waits], phase=phase)
    # Marks stand behind the ops that they wait for.
    ops[:] = [*front, *ops[:1], *behind, *marks, *ops[1:]] if behind else [*front, *marks, *ops]
    unpack = [op for one in mine for op in one.unpack]
    nbytes = sum(one.nbytes for one in mine)
    if not unpack and mine and scheme.framework.gathers_apart:
        nbytes = own.elements * BYTES[scheme.framework.weights]
        unpack = [Op("copy params", work=Memory("concat", nbytes, nbytes), phase=phase)]
    for op in unpack:
        op.after += [*came, *here]
    place = ops.index(kernels[0]) if kernels else len(ops)
    ops[place:place] = unpack
    if nbytes:
        made.tensor_uses += _lifetime(f"arrived {phase}", nbytes, ops[0], ops[-1], "buffers")


def _gather_all(scheme: ShardedScheme, weights: GatheredWeights, forward: bool) -> list[GatherOps]:
    found = [scheme.gather_unit(axes, elements, forward) for axes, elements in weights.groups]
    for one in found:
        _serialise(one.ops)
    return found


def _bytes_in_flight(scheme: ShardedScheme, weights: GatheredWeights, found: list[GatherOps]) -> float:
    """Bytes of the weights that are being gathered for a later unit."""
    return sum(one.nbytes for one in found) or weights.live * BYTES[scheme.framework.weights]


def _serialise(ops: list[Op]) -> None:
    """Lets each op wait for the one before."""
    for one, other in pairwise(ops):
        other.after.append(one)


def _relay_arrivals(before: int, arrived: dict[int, list[Op]], phase: str) -> tuple[list[Op], list[Op]]:
    """Ops without work that tell later units when their weights have arrived, and the ops that the next unit waits for.

    Units are connected by their residual stream alone. The arrival of weights for the unit after the next is relayed
    from unit to unit on a stream of its own, arrivals for units further on on other streams; every unit hands them to
    the stream before.
    """

    def mark(stream: int, after: list[Op]) -> Op:
        name = "data-forward" if phase == "F" else "data-backward"
        return Op("weights arrived", f"{name}-{stream}", None, after, phase)

    marks = [mark(1, [])] if before else []
    waits = marks[:1] or arrived.get(1, [])
    for stream in range(1, before):
        marks.append(mark(stream + 1, []))
        marks.append(mark(stream, marks[-1:]))
    marks += [mark(later - 1, ops) for later, ops in arrived.items() if later > 1 and ops]
    return marks, waits


def _reduce_gradients(scheme: ShardedScheme, made: Fragment, axes: tuple[str, ...], elements: int, stays: bool) -> None:
    """Reduces gradients after the backward pass; unsharded ones live until they are reduced."""
    params = [param for param in made.params if param.trained and scheme.reduces(param) == axes]
    ready = [param.ready for param in params]
    ops = scheme.reduce_unit(axes, elements)
    if not ops:
        return
    _serialise(ops)
    if scheme.shards_at_rest("gradients", params[0]):
        nbytes = elements * BYTES[scheme.framework.gradients]
        begin = next((op for op in made.backward if op.phase == "W"), made.backward[-1])
        if scheme.framework.gathers_apart:
            packed = Op("pack grads", work=Memory("concat", nbytes, nbytes), after=ready, phase="W")
            made.tensor_uses += _lifetime(f"packed {axes}", nbytes, packed, ops[0], "buffers")
            made.backward.append(packed)
            ready = [packed]
        key = _table_key(axes) if stays else f"gradients {axes}"
        made.tensor_uses += _lifetime(key, nbytes, begin, ops[0], "gradients")
    ops[0].after += ready
    made.backward += ops
    for param in params:
        param.ready = ops[-1]


def _lifetime(key: str, nbytes: float, begin: Op, end: Op, category: str = "parameters") -> list[TensorUse]:
    return [TensorUse(key, round(nbytes), op, op is begin, category) for op in (begin, end)]
