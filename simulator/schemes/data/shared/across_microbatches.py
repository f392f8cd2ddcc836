"""Sharded weights that stay gathered, and gradients that stay unreduced, through all micro-batches of a step.

Unit by unit the weights are all-gathered during the first forward pass of a step, and the gradients reduced during the
last backward pass. Where all forward passes of a stage precede its backward passes, the weights may be freed in between
and gathered again (`StageOps.again`). Copies of arrived weights and of gradients into contiguous buffers, once per step
each, are not modelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.ops import BYTES, Op, Param, SideOps, StageOps
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme

Axes = tuple[str, ...]


def check_gathers_once(scheme: ShardedScheme, job: Any) -> None:
    """Raises PlanError where one all-gather and one reduction per step are not modelled: without overlap, without a
    flush, or with offloaded shards."""
    flush = all(getattr(find_scheme(entry.use), "flush", True) for entry in job.plan.schemes)
    if not (scheme.overlaps_backward and flush) or scheme.offloaded_to("parameters"):
        rule = "weights on the GPU stay gathered through a step that ends with a flush, gathered as its passes begin"
        remedy = "Leave it out, or set framework.set.overlap.dp and no offloading"
        raise PlanError(f"{scheme.use}.across_microbatches", rule, remedy, True)


def gather_once(scheme: ShardedScheme, stage_ops: StageOps) -> StageOps:
    """`stage_ops` in which the weights of every unit are gathered once per step, and its gradients reduced once."""
    units = list(_units(stage_ops, scheme.layers_per_unit))
    params = [param for param, _ in stage_ops.params()]

    def shards(param: Param) -> Axes:
        return scheme.shards_at_rest("parameters", param)

    def reduces(param: Param) -> Axes:
        return scheme.reduces(param) if param.trained else ()

    sizes = stage_ops.of_params([param.size for param in params]).astype(int)
    gathered = stage_ops.of_params([bool(shards(param)) for param in params]).astype(bool)
    accumulated = stage_ops.of_params([bool(reduces(param)) for param in params]).astype(bool)
    backward = any(unit_run.fragment.backward for unit_run in stage_ops.unit_runs)
    return replace(
        stage_ops,
        ahead=stage_ops.ahead + _gathers(scheme, stage_ops, units, shards, "F"),
        again=_gathers(scheme, stage_ops, units[::-1], shards, "B") if scheme.options.reshard and backward else [],
        behind=stage_ops.behind + _reductions(scheme, stage_ops, units[::-1], reduces),
        whole_weights=stage_ops.whole_weights + int(sizes[gathered].sum()) * BYTES[scheme.framework.weights],
        whole_gradients=stage_ops.whole_gradients + int(sizes[accumulated].sum()) * BYTES[scheme.framework.gradients],
    )


def _units(stage_ops: StageOps, layers: int) -> Iterator[np.ndarray]:
    """The numbers of the parameters of every unit, in forward order; a unit has up to `layers` equal layers."""
    start = 0
    for unit_run in stage_ops.unit_runs:
        width = len(unit_run.fragment.params)
        for first in range(0, unit_run.count, layers):
            count = min(layers, unit_run.count - first)
            yield start + first * width + np.arange(count * width)
        start += unit_run.count * width


def _by_axes(stage_ops: StageOps, units: list[np.ndarray], axes_of: Callable[[Param], Axes]) -> dict[Axes, SideOps]:
    """For each set of axes an op without work for every unit that has parameters with these axes."""
    found = [axes_of(param) for param, _ in stage_ops.params()]
    sets = list(dict.fromkeys(axes for axes in found if axes))
    which = stage_ops.of_params([sets.index(axes) if axes else -1 for axes in found])
    sides = {}
    for i, axes in enumerate(sets):
        parts = [part for unit in units if len(part := unit[which[unit] == i])]
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        sides[axes] = SideOps([Op("unit") for _ in parts], np.concatenate(parts), starts)
    return sides


def _sizes(stage_ops: StageOps, side: SideOps) -> list[int]:
    """Elements of the parameters of each op."""
    sizes = stage_ops.of_params([param.size for param, _ in stage_ops.params()]).astype(int)
    return np.add.reduceat(sizes[side.params], side.starts).tolist()


def _gathers(
    scheme: ShardedScheme, stage_ops: StageOps, units: list[np.ndarray], axes_of: Callable[[Param], Axes], phase: str
) -> list[SideOps]:
    made: dict[tuple[Axes, int], Op] = {}
    found = []
    for axes, side in _by_axes(stage_ops, units, axes_of).items():
        ops = [
            made.setdefault((axes, size), replace(scheme.gather(axes, size, phase, "every"), when="first"))
            for size in _sizes(stage_ops, side)
        ]
        found.append(replace(side, ops=ops))
    return found


def _reductions(
    scheme: ShardedScheme, stage_ops: StageOps, units: list[np.ndarray], axes_of: Callable[[Param], Axes]
) -> list[SideOps]:
    """Reductions of every unit; those of the shards among replicas follow those inside a group, each on its stream."""
    found: list[SideOps] = []
    for axes, side in _by_axes(stage_ops, units, axes_of).items():
        steps: dict[int, list[Op]] = defaultdict(list)
        made: dict[int, list[Op]] = {}
        for size in _sizes(stage_ops, side):
            if size not in made:
                made[size] = [replace(op, when="last") for op in scheme.reduce_unit(axes, size)]
            for step, op in enumerate(made[size]):
                steps[step].append(op)
        before: SideOps | None = None
        for ops in steps.values():
            after = (before, np.arange(len(ops))) if before else None
            before = replace(side, ops=ops, after=after)
            found.append(before)
    return found
