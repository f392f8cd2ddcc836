"""Ranks of a plan without its other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshcast.simulator.plan.plan import Plan


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Makes this process rank `rank` of a plan whose other ranks do not exist: torch's fake backend sends nothing."""
    import torch.distributed as dist
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from meshcast.validation.distributed.process_groups import make_process_groups
    from meshcast.validation.measurements.device import Device

    def become(plan: Plan, rank: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch 2.9 keeps flattened meshes longer than the process groups that they name.
        meshes = getattr(device_mesh, "_mesh_resources", None)
        getattr(meshes, "root_to_flatten_mapping", {}).clear()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.mesh.world)
        return make_process_groups(plan, Device.of("cpu"))

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()
