"""Process groups of the reference trainer: along each axis of the plan's mesh."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.measurements.device import Device
from meshcast.validation.reference.tensor_parallel import ONE_RANK, AxisGroup

FAMILIES = ("pipeline", "data", "sequence", "tensor", "expert")
"""Families of schemes that divide ranks."""


@dataclass(frozen=True)
class ProcessPlace:
    """Place of a process in the mesh of a plan.

    mesh: torch's device mesh with the parts of the plan's axes, outermost first.
    pipeline, replica, context, tensor, expert: the groups along the axes; `replica` are the ranks with other samples.
    data: the ranks over which gradients are reduced: `replica` x `context`.
    expert_data: the ranks of `data` that hold the same experts.
    data_mesh: the part of `mesh` along `data`.
    embedding_group: ranks of the first and the last stage that hold a tied embedding, as in Megatron; None for others.
    last: pipeline rank that holds the last stage.
    """

    device: Device
    mesh: DeviceMesh
    pipeline: AxisGroup
    replica: AxisGroup
    context: AxisGroup
    tensor: AxisGroup
    expert: AxisGroup
    data: AxisGroup
    expert_data: AxisGroup
    data_mesh: DeviceMesh | None
    embedding_group: Any = None
    last: int = 0


def axis_of(plan: Plan, family: str) -> str:
    """Axis of size above 1 that a family's scheme uses; empty if there is none. Raises PlanError for several."""
    axes = [axis for scheme in plan.family(family) for axis in scheme.axes if plan.mesh.size(axis) > 1]
    if len(axes) > 1:
        rule = f"the reference trainer supports one axis for {family} schemes"
        raise PlanError("plan.schemes", rule, "Join the axes into one", axes)
    return axes[0] if axes else ""


def make_process_groups(plan: Plan, device: Device) -> ProcessPlace:
    """Makes all process groups; collective over all ranks. Raises PlanError if their number is not that of the mesh."""
    if dist.get_world_size() != plan.mesh.world:
        rule = f"the plan has {plan.mesh.world} ranks"
        raise PlanError("--nproc-per-node", rule, f"Start {plan.mesh.world} processes", dist.get_world_size())
    axes = plan.mesh.axes or {"world": 1}
    mesh = init_device_mesh(device.torch.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    parts = {family: plan.mesh.parts(axis_of(plan, family)) for family in FAMILIES}
    data = (*parts["data"], *parts["sequence"])
    data_mesh = _submesh(mesh, data)
    last = plan.model_parts.device(plan.shape.stages - 1)
    ends = _embedding_group(plan, axis_of(plan, "pipeline"), last) if last and plan.job.model.tied else None
    return ProcessPlace(
        device,
        mesh,
        pipeline=_axis_group(_submesh(mesh, parts["pipeline"])),
        replica=_axis_group(_submesh(mesh, parts["data"])),
        context=_axis_group(_submesh(mesh, parts["sequence"])),
        tensor=_axis_group(_submesh(mesh, parts["tensor"])),
        expert=_axis_group(_submesh(mesh, parts["expert"])),
        data=_axis_group(data_mesh),
        expert_data=_axis_group(_submesh(mesh, [part for part in data if part not in parts["expert"]])),
        data_mesh=data_mesh,
        embedding_group=ends,
        last=last,
    )


def _submesh(mesh: DeviceMesh, parts: Collection[str]) -> DeviceMesh | None:
    """Returns the mesh of a single dim along some parts; None if it has a single rank."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in parts and mesh[name].size() > 1)
    if len(names) < 2:
        return mesh[names[0]] if names else None
    return mesh[names]._flatten()


def _axis_group(mesh: DeviceMesh | None) -> AxisGroup:
    return ONE_RANK if mesh is None else AxisGroup(mesh.size(), mesh.get_local_rank(), mesh.get_group())


def _embedding_group(plan: Plan, axis: str, last: int) -> Any:
    """Returns the group of this pipeline's first and last stage. torch requires every process to make every group."""
    size, stride, mine = plan.mesh.size(axis), plan.mesh.stride(axis), None
    for rank in range(plan.mesh.world):
        if rank // stride % size == 0:
            pair = [rank, rank + last * stride]
            group = dist.new_group(pair)
            mine = group if dist.get_rank() in pair else mine
    return mine
