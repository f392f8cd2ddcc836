"""Checkpoints of recomputed units that each tensor-parallel rank keeps 1/p of: sliced after the forward pass of the
unit, and all-gathered before it is recomputed.

Without sequence parallelism all tensor-parallel ranks keep the same input of a unit. Partitioned, they keep
2 b s h / p bytes of it each, for an all-gather of 2 b s h bytes per unit in the backward pass. The slices may be
offloaded: copied to the host behind the slicing and back before the all-gather, during which nothing else runs.
"""

from __future__ import annotations

from dataclasses import replace

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Fragment, HostCopy, Memory, Op, StageOps, TensorUse, UnitRun
from meshcast.simulator.lowering.offload import IN, OUT


def partition_checkpoints(stage_ops: StageOps, mark: str, mesh: Mesh, to_host: bool) -> StageOps:
    """`stage_ops` in which the inputs of units with `mark` are partitioned, where ranks keep equal ones.

    to_host: the parts lie in host memory between the passes.
    """
    runs = [
        _partition_input(unit_run, mesh, to_host) if mark in unit_run.marks else unit_run
        for unit_run in stage_ops.unit_runs
    ]
    return replace(stage_ops, unit_runs=runs)


def _partition_input(unit_run: UnitRun, mesh: Mesh, to_host: bool) -> UnitRun:
    fragment, key = unit_run.fragment, unit_run.keys[0]
    axes = _replicated_axes(fragment, key)
    forward, backward = set(fragment.forward), set(fragment.backward)
    uses = [use for use in fragment.tensor_uses if use.key == key]
    saved = any(use.op in forward for use in uses) and any(use.op in backward for use in uses)
    if key is None or mesh.size(axes) == 1 or not saved:
        return unit_run
    made, nbytes = fragment.copy(), max(use.nbytes for use in uses)
    part = -(-nbytes // mesh.size(axes))
    cut = Op("partition checkpoint", work=Memory("concat", part, part), after=[made.entry[unit_run.residual_in or ""]])
    gradient = [made.grad_entry[unit_run.residual_out]] if unit_run.residual_out in made.grad_entry else []
    gather = Op("gather checkpoint", "tensor", Collective("all_gather", nbytes, axes), gradient, "R")
    again = set(made.backward)
    for op in {use.op for use in made.tensor_uses if use.key == key} & again:
        op.after.append(gather)
    made.tensor_uses = [
        *(replace(use, key=f"{key}~") if use.key == key and use.op in again else use for use in made.tensor_uses),
        TensorUse(key, nbytes, cut),
        *_keep_part(made, f"{key} part", part, cut, gather, to_host),
        TensorUse(f"{key}~", nbytes, gather, True, "activations"),
    ]
    return replace(unit_run, fragment=made)


def _keep_part(fragment: Fragment, key: str, nbytes: int, cut: Op, gather: Op, to_host: bool) -> list[TensorUse]:
    """Issues the ops that make and read a part of a checkpoint, and returns how they use it."""
    if not to_host:
        fragment.forward.append(cut)
        fragment.backward.insert(0, gather)
        return [TensorUse(key, nbytes, cut, True), TensorUse(key, nbytes, gather)]
    out = Op("copy checkpoint out", OUT, HostCopy(nbytes, activations=True), [cut])
    back = Op("copy checkpoint in", IN, HostCopy(nbytes, True, activations=True), gather.after, "R")
    gather.after = [back]
    fragment.forward += [cut, out]
    fragment.backward[:0] = [back, gather]
    return [
        *(TensorUse(key, nbytes, op, op is cut) for op in (cut, out)),
        *(TensorUse(f"{key}~", nbytes, op, op is back, "activations") for op in (back, gather)),
    ]


def _replicated_axes(fragment: Fragment, key: str | None) -> tuple[str, ...]:
    """The axes of tensor parallelism over which ranks have equal inputs: those of the all-reduces of a unit whose input
    is not sharded."""
    reduced = [
        op.work
        for op in fragment.forward
        if op.stream == "tensor" and isinstance(op.work, Collective) and op.work.operation == "all_reduce"
    ]
    if not reduced or key is None or key.partition("@")[2]:
        return ()
    return max(reduced, key=lambda work: work.nbytes).axes
