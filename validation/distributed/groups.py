"""Where a process stands in the mesh of a plan, and with whom it talks along each axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hardware.errors import PlanError
from simulator.plan.plan import Plan
from validation.measurements.device import Device


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis: how many, which one this is, and their process group (None where it is alone)."""

    size: int = 1
    rank: int = 0
    group: Any = None


@dataclass(frozen=True)
class Place:
    """Where a process stands. mesh: of torch, with the plan's axes, outermost first; ends: the group of the ranks that
    hold this rank's part of a table which the first and the last stage share, None for ranks without it. last: the
    position along the pipeline that holds the last stage."""

    device: Device
    mesh: DeviceMesh
    pipeline: Axis
    data: Axis
    tensor: Axis
    data_mesh: DeviceMesh | None
    ends: Any = None
    last: int = 0


def axis_of(plan: Plan, family: str) -> str:
    """The axis, larger than one, that a family of schemes claims; empty without one. Raises PlanError for several."""
    axes = [axis for scheme in plan.family(family) for axis in scheme.over if plan.mesh.size(axis) > 1]
    if len(axes) > 1:
        rule = f"the reference trainer has one axis for {family} schemes"
        raise PlanError("plan.schemes", rule, "Join the axes into one", axes)
    return axes[0] if axes else ""


def stand(plan: Plan, device: Device) -> Place:
    """Makes all process groups; every rank calls it. Raises PlanError where the processes do not fill the mesh."""
    if dist.get_world_size() != plan.mesh.world:
        rule = f"the plan has {plan.mesh.world} ranks"
        raise PlanError("--nproc-per-node", rule, f"Start {plan.mesh.world} processes", dist.get_world_size())
    named = plan.mesh.named_axes or {"world": 1}
    mesh = init_device_mesh(device.kind, tuple(named.values()), mesh_dim_names=tuple(named))
    names = {family: axis_of(plan, family) for family in ("pipeline", "data", "tensor")}
    axes = {family: Axis() if not name else _axis(mesh, name) for family, name in names.items()}
    last = plan.device(plan.shape.stages - 1)
    ends = _ends(plan, names["pipeline"], last) if last and plan.job.model.tied else None
    return Place(device, mesh, **axes, data_mesh=mesh[names["data"]] if names["data"] else None, ends=ends, last=last)


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    return Axis(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name))


def _ends(plan: Plan, axis: str, last: int) -> Any:
    """The group of the ranks of this pipeline that hold its first and its last stage. torch wants every process to make
    every group."""
    size, stride, mine = plan.mesh.size(axis), plan.mesh.stride(axis), None
    for rank in range(plan.mesh.world):
        if rank // stride % size == 0:
            pair = [rank, rank + last * stride]
            group = dist.new_group(pair)
            mine = group if dist.get_rank() in pair else mine
    return mine
