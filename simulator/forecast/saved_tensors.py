"""The tensors that the layers of a stage save, with the seconds of making them again and of moving them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf

from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.stage_messages import choose_messages
from meshcast.simulator.ir.ops import COMPUTE, HostCopy, Op, StageOps, UnitRun, Work
from meshcast.simulator.lowering.offload import saved_activations
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.pricing import SavedTensors, StageTensors
from meshcast.simulator.program.program import variants_of

MOVED = 1 << 24
"""Bytes of the messages that say how fast tensors move."""


def price_stage_tensors(plan: Plan, device: int, stage: StageOps | Sequence[StageOps], costs: Costs) -> StageTensors:
    """Returns the tensors that the layers of a stage save, and their prices on its device."""

    def byte_seconds(work: Work) -> float:
        return costs.estimate(work).seconds / MOVED

    unit_runs, cluster = variants_of(stage)[0].unit_runs, plan.ranks.clusters[device]
    forward_s = sum(_compute_seconds(run.fragment.forward, costs) * run.count for run in unit_runs)
    backward_s = sum(_compute_seconds(run.fragment.backward, costs) * run.count for run in unit_runs)
    messages, fabric = choose_messages(plan), cluster.node.scale_up
    device_s = (
        inf if other == device else byte_seconds(messages.plain(MOVED, device, other))
        for other in range(plan.ranks.devices)
    )
    own_links = fabric is not None and not fabric.switched.value and plan.ranks.devices <= cluster.gpus_per_node
    tensors, host_s = _saved_tensors(unit_runs, costs), byte_seconds(HostCopy(MOVED))
    return StageTensors(tensors, min(forward_s, backward_s), tuple(device_s), host_s, own_links)


def _saved_tensors(unit_runs: Iterable[UnitRun], costs: Costs) -> tuple[SavedTensors, ...]:
    """Returns the saved tensors of the layers among some runs of units."""
    tensors: dict[tuple[str, ...], SavedTensors] = {}
    for unit_run in unit_runs:
        for maker, sizes in (_saved_by_maker(unit_run) if unit_run.marks else {}).items():
            names = tuple(sorted({key.partition("@")[0] for key in sizes}))
            _, nbytes, seconds = tensors.get(names, SavedTensors(names, 0.0, 0.0))
            nbytes += sum(sizes.values()) * unit_run.count
            seconds += (_compute_seconds([maker], costs) if maker else inf) * unit_run.count
            tensors[names] = SavedTensors(names, nbytes, seconds)
    return tuple(tensors.values())


def _saved_by_maker(unit_run: UnitRun) -> dict[Op | None, dict[str, int]]:
    """Returns the bytes of the saved tensors of a unit by the op of its forward pass that makes them; None: none."""
    fragment = unit_run.fragment
    forward = set(fragment.forward)
    makers = {use.key: use.op for use in fragment.tensor_uses if use.made and use.op in forward}
    sizes = defaultdict[Op | None, dict[str, int]](dict)
    for key, nbytes in saved_activations(unit_run).items():
        sizes[makers.get(key)][key] = nbytes
    return sizes


def _compute_seconds(ops: Iterable[Op], costs: Costs) -> float:
    return sum(costs.estimate(op.work).seconds for op in ops if op.work is not None and op.stream == COMPUTE)
