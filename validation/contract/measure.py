"""How the quantities of closed forms are measured on lowered and played programs.

A closed form names a quantity; the functions in `MEASURES` of its family (``of_data``, ...) take a setting and the
scheme and return it. Costs are ideal: given times for pipelines, counted bytes and FLOPs for the rest. This file has
what all families use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import ceil, log2
from typing import Any, ParamSpec, TypeVar

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, Collective, Op, Param, SideOps, StageOps, UnitRun
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.framework import SchemeTraits, load_framework
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.program.memory_profile import memory_events
from meshcast.simulator.program.task import PricedSideOps

P = ParamSpec("P")
T = TypeVar("T")

SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Times (n-1)/n of the buffer that a ring sends per rank."""


_FORGET: list[Callable[[], None]] = []


def remembered(lower: Callable[P, T]) -> Callable[P, T]:
    """Caches a function of a setting for the closed forms that share it, until `forget`."""
    known = lru_cache(lower)
    _FORGET.append(known.cache_clear)
    return known  # type: ignore[return-value]


def forget() -> None:
    """Clears the cache of a setting."""
    for clear in _FORGET:
        clear()


def make(use: str, mesh: Mesh, over: Sequence[str] = (), **options: object) -> Scheme:
    """A scheme on a mesh, in the framework megatron-core."""
    kind = find_scheme(use)
    return kind(tuple(over), kind.Options(**options), mesh, SchemeTraits.of(load_framework("megatron-core")))


def lowered_stage(
    model: Model,
    mesh: Mesh,
    schemes: Sequence[Scheme] = (),
    ends: tuple[bool, bool] = (False, False),
    layers: int = 1,
    regather: bool = False,
    accumulated: str | None = None,
    **blocks: Any,
) -> StageOps:
    """A stage of `layers` layers, with embedding and loss if `ends`, one sample per data-parallel rank.

    accumulated: format in which a separate kernel adds weight gradients, empty: that of the weights; None: GEMMs do.
    """
    replicas = mesh.size(axis for scheme in schemes if scheme.family == "data" for axis in scheme.over)
    built = Architecture(model, 1, model.seq, model.vocab, replicas, **blocks)
    lowering = Lowering(mesh, schemes, regather, fused_gradients=accumulated is None, accumulated=accumulated or "")
    return lowering.run(built.stage(range(layers), *ends))


def forward_ops(stage_ops: StageOps) -> list[Op]:
    """The ops of the links' forward passes, each as often as it runs."""
    return [op for unit_run in stage_ops.unit_runs for _ in range(unit_run.count) for op in unit_run.fragment.forward]


def backward_ops(stage_ops: StageOps) -> list[Op]:
    """The ops of the links' backward passes, each as often as it runs."""
    return [
        op
        for unit_run in reversed(stage_ops.unit_runs)
        for _ in range(unit_run.count)
        for op in unit_run.fragment.backward
    ]


def side_ops_of(sides: Iterable[SideOps | PricedSideOps]) -> list[Op]:
    """The side ops of schemes, in issue order."""
    return [op for side in sides for op in side.ops]


def params_of(stage_ops: StageOps) -> list[Param]:
    """Every parameter of a stage, once for each layer that has it."""
    return [
        param for unit_run in stage_ops.unit_runs for _ in range(unit_run.count) for param in unit_run.fragment.params
    ]


def list_ops(ops: Iterable[Op]) -> list[tuple[object, ...]]:
    """Ops by work and phase, and the positions of their predecessors."""
    ops = list(ops)
    place = {op: i for i, op in enumerate(ops)}

    def sources(op: Op) -> frozenset[int]:
        return frozenset((place[op],)) if op in place else frozenset().union(*map(sources, op.after))

    return [(*op_fields(op), frozenset().union(*map(sources, op.after))) for op in ops]


def op_fields(op: Op) -> tuple[object, ...]:
    """Work and phase of an op."""
    return op.name, op.stream, op.work, op.phase, op.when


def catalog_model(stage_ops: StageOps) -> tuple[object, ...]:
    """All of a stage but the identity of its ops."""

    def of_link(unit_run: UnitRun) -> tuple[object, ...]:
        fragment = unit_run.fragment
        params = [(p.name, p.size, p.total) for p in fragment.params]
        tensor_uses = Counter((t.nbytes, t.op.name, t.made, t.category) for t in fragment.tensor_uses)
        ends = (
            unit_run.name,
            unit_run.count,
            unit_run.residual_in,
            unit_run.residual_out,
            unit_run.keys,
            unit_run.nbytes,
        )
        return ends, list_ops(fragment.forward), list_ops(fragment.backward), params, tensor_uses

    return [of_link(unit_run) for unit_run in stage_ops.unit_runs], list_ops(
        side_ops_of((*stage_ops.ahead, *stage_ops.behind))
    )


def waits_for(op: Op) -> set[Op]:
    """All ops that `op` waits for, directly or through others."""
    awaited: set[Op] = set()
    left = list(op.after)
    while left:
        other = left.pop()
        if other not in awaited:
            awaited.add(other)
            left += other.after
    return awaited


def shares_sent(operation: str, n: int) -> float:
    """Buffers that one of `n` ranks sends; for a tree the messages along its longest path."""
    if operation in ("broadcast", "reduce"):
        return ceil(log2(n))
    return 1 if operation in ("shift", "push_pull") else SENT[operation] * (n - 1) / n


def sent_bytes(ops: Iterable[Op], mesh: Mesh) -> float:
    """Bytes that one rank sends in the collectives among `ops`."""
    nbytes = 0.0
    for op in ops:
        assert op.work is None or op.stream == COMPUTE or isinstance(op.work, Collective)
        if isinstance(op.work, Collective):
            n = len(op.work.members or ()) or mesh.size(op.work.axes)
            nbytes += shares_sent(op.work.operation, n) * op.work.nbytes * (1 + op.work.both_ways)
    return nbytes


def saved_bytes(unit_run: UnitRun, statistics: bool = True) -> float:
    """Bytes of one copy that wait for the backward pass at the end of the forward pass. An input was counted where it
    was allocated, so the output counts here. statistics: those of norms, which closed forms leave out, are counted too.
    """
    fragment = unit_run.fragment
    uses = [use for use in fragment.tensor_uses if statistics or not use.key.rstrip("~").endswith(".statistics")]
    events = memory_events(uses, fragment.forward, fragment.backward, unit_run)
    allocated = [event for op in fragment.forward for event in events.get(op, ())]
    return sum(nbytes for _, _, nbytes, category in allocated if category == "activations")
