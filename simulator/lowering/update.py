"""Lowers the optimizer update at the end of a step: all-reduces of gradients that no data scheme has reduced, gradient
clipping, Adam or what updates matrices in its place, and zeroing of the gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from meshcast.simulator.ir.capabilities import HoldsUnequalShards, MeetsPeriodically, schemes_with
from meshcast.simulator.ir.modules import Update
from meshcast.simulator.ir.ops import Collective, Fragment, Memory, Op, Param, TensorUse
from meshcast.simulator.lowering.scope import Scope, count_shards, shards_at_rest

UPDATE = "update"
"""The memory key of what the update holds."""


def lower_update(scope: Scope, module: Update) -> Fragment:
    """All-reduces the gradients that no data scheme reduces, clips by the global norm, and updates the local shards."""
    sums, elements, shard = _sum_gradients(scope, module)
    ops = [scope.op("reduce", work, [], "U") for work in sums]
    for meeting, work, replicas in module.shared:
        ops.append(scope.op("reduce", work, [], "U"))
        ops[-1].stream = "data" if replicas else ops[-1].stream
        ops[-1].meeting = meeting
    if module.clipped:
        ops.append(scope.op("grad-norm", Memory("grad-norm", round(shard * module.grad_bytes), 0), ops, "U"))
        apart = _unsynchronised_axes(scope)
        everyone = tuple(axis for axis in scope.mesh.axes if scope.mesh.size(axis) > 1 and axis not in apart)
        if everyone:
            work = Collective("all_reduce", 4, everyone, ranks=module.everyone)
            ops.append(Op("grad-norm", "compute", work, ops[-1:], "U", meeting="norm"))
    behind = ops[-1:] if module.clipped else ops
    if any(module.convert):
        read, write = (round(shard * nbytes) for nbytes in module.convert)
        behind = [scope.op("convert", Memory("convert", read, write), behind, "U")]
        ops += behind
    held = _count_workspace(scope, module, elements, shard)
    steps, uses = _update_shards(scope, module, shard, behind)
    # Zeroing writes every gradient that this rank stores.
    zero = scope.op("zero-grad", Memory("zero-grad", 0, round(elements * module.grad_bytes)), steps[-1:], "U")
    uses += [TensorUse(UPDATE, held, steps[0], made=True)] if held else []
    return Fragment(forward=[*ops, *steps, zero], exit={"parameters": steps[-1]}, tensor_uses=uses)


def _update_shards(scope: Scope, module: Update, shard: float, behind: list[Op]) -> tuple[list[Op], list[TensorUse]]:
    """Returns the ops that update `shard` elements, and their use of buffers: a pass over all, and what the optimizer
    does with matrices in its place."""
    ops, uses = list[Op](), list[TensorUse]()
    if module.matrices is not None:
        from meshcast.simulator.lowering.matrices import lower_matrices  # only what these optimizers need

        ops, uses, shared = lower_matrices(scope, module, behind)
        shard -= shared
    step = scope.op("adam", Memory("adam", round(shard * module.read), round(shard * module.write)), behind, "U")
    return [step, *ops], uses


def _count_workspace(scope: Scope, module: Update, elements: float, shard: float) -> int:
    """Returns the most bytes that the update holds beside states and gradients. elements: of gradients that a rank
    stores; shard: of those that it updates."""
    workspace, width = module.workspace, module.grad_bytes
    sizes = [param.size for param, _ in module.params]
    if any(shards_at_rest(scope.sharding, "parameters", param) for param, _ in module.params):
        cut = shard / sum(count * param.size for param, count in module.params)
        # A sub-group ends with the parameter that fills it (`_create_fp16_sub_groups` of DeepSpeed's stage3.py).
        last = cut * max((param.size for param, _ in module.params if param.in_layer), default=max(sizes))
        updated = min(shard, module.sub_group + last) if module.sub_group else shard
        return round(workspace.most_sharded(elements, updated, max(sizes) * cut))
    largest = min(max(sizes, default=0), shard)
    return round(workspace.most(shard, largest, (elements - shard) * width, shard * width))


def _unsynchronised_axes(scope: Scope) -> set[str]:
    return {axis for scheme in schemes_with(scope.schemes, MeetsPeriodically) for axis in scheme.unsynchronised_axes}


def _sum_gradients(scope: Scope, module: Update) -> tuple[list[Collective], float, float]:
    """Returns the all-reduces that no data scheme does, and the elements of gradients and of updated shards that a rank
    holds."""
    rest: dict[tuple[str, ...], int] = defaultdict(int)
    copied: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
    unequal = schemes_with(scope.schemes, HoldsUnequalShards)
    apart = _unsynchronised_axes(scope)
    elements = shard = 0.0
    for param, count in module.params:
        if param.copies:
            cut = scope.mesh.size(shards_at_rest(scope.sharding, "gradients", param))
            copied[param.copies] += count * param.size // cut
    for param, size in by_axes(module.params):
        summed = {axis for scheme in scope.sharding for axis in scheme.reduces(param)} | apart
        held = size / count_shards(scope.mesh, unequal, shards_at_rest(scope.sharding, "gradients", param))
        if axes := tuple(axis for axis in param.partial if axis not in summed):
            rest[axes] += round(held)
        elements += held
        updated = [axis for scheme in scope.sharding for axis in scheme.update_shards(param)]
        shard += size / count_shards(scope.mesh, unequal, updated)
    sums = [Collective("all_reduce", n * module.grad_bytes, axes) for axes, n in sorted(rest.items()) if n]
    for (axes, holders), n in sorted(copied.items()):
        sums.append(Collective("all_reduce", n * module.grad_bytes, axes, tuple(range(holders))))
    return sums, elements, shard


def by_axes(params: Iterable[tuple[Param, int]]) -> list[tuple[Param, int]]:
    """Groups parameters of equal size, place and reduction axes; returns a parameter of each and the elements of
    all."""
    groups: dict[Hashable, tuple[Param, int]] = {}
    for param, count in params:
        key = param.partial, param.view, param.trained, param.in_layer, param.size, param.shape, param.stored
        groups[key] = param, groups.get(key, (param, 0))[1] + count * param.size
    return list(groups.values())
