"""Process groups of the reference trainer: one along each axis of the plan's mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hardware.errors import PlanError
from simulator.plan.plan import Plan
from validation.measurements.device import Device


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis.

    size: number of ranks.
    rank: this rank among them.
    group: their process group; None for an axis of size 1.
    """

    size: int = 1
    rank: int = 0
    group: Any = None


@dataclass(frozen=True)
class ProcessPlace:
    """Place of a process in the mesh of a plan.

    mesh: torch's device mesh with the plan's axes, outermost first.
    pipeline, data, tensor: the groups along the axes.
    data_mesh: the part of `mesh` along the data axis.
    embedding_group: ranks of the first and the last stage that hold a tied embedding, as in Megatron; None for others.
    last: pipeline rank that holds the last stage.
    """

    device: Device
    mesh: DeviceMesh
    pipeline: AxisGroup
    data: AxisGroup
    tensor: AxisGroup
    data_mesh: DeviceMesh | None
    embedding_group: Any = None
    last: int = 0


def axis_of(plan: Plan, family: str) -> str:
    """Axis of size above 1 that a family's scheme uses; empty if there is none. Raises PlanError for several."""
    axes = [axis for scheme in plan.family(family) for axis in scheme.over if plan.mesh.size(axis) > 1]
    if len(axes) > 1:
        rule = f"the reference trainer supports one axis for {family} schemes"
        raise PlanError("plan.schemes", rule, "Join the axes into one", axes)
    return axes[0] if axes else ""


def make_process_groups(plan: Plan, device: Device) -> ProcessPlace:
    """Makes all process groups; collective over all ranks. Raises PlanError if their number is not that of the mesh."""
    if dist.get_world_size() != plan.mesh.world:
        rule = f"the plan has {plan.mesh.world} ranks"
        raise PlanError("--nproc-per-node", rule, f"Start {plan.mesh.world} processes", dist.get_world_size())
    named = plan.mesh.named_axes or {"world": 1}
    mesh = init_device_mesh(device.torch.type, tuple(named.values()), mesh_dim_names=tuple(named))
    names = {family: axis_of(plan, family) for family in ("pipeline", "data", "tensor")}
    axes = {family: AxisGroup() if not name else _axis_group(mesh, name) for family, name in names.items()}
    last = plan.device(plan.shape.stages - 1)
    ends = _embedding_group(plan, names["pipeline"], last) if last and plan.job.model.tied else None
    return ProcessPlace(
        device, mesh, **axes, data_mesh=mesh[names["data"]] if names["data"] else None, embedding_group=ends, last=last
    )


def _axis_group(mesh: DeviceMesh, name: str) -> AxisGroup:
    return AxisGroup(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name))


def _embedding_group(plan: Plan, axis: str, last: int) -> Any:
    """Group of this pipeline's first and last stage. torch requires every process to make every group."""
    size, stride, mine = plan.mesh.size(axis), plan.mesh.stride(axis), None
    for rank in range(plan.mesh.world):
        if rank // stride % size == 0:
            pair = [rank, rank + last * stride]
            group = dist.new_group(pair)
            mine = group if dist.get_rank() in pair else mine
    return mine
