"""Data flow and placement in a layer under every tensor and sequence scheme, with each of its options."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.validation.contract.checked import layer_problems
from meshcast.validation.contract.composed import Options, with_options
from meshcast.validation.contract.measure import make
from tests.draws import drawn


def schemes_on(use: str, mesh: Mesh, options: Options) -> list[Scheme]:
    """A scheme over all axes of the mesh; one without axes joins a tensor scheme that shards activations."""
    if find_scheme(use).most_axes == 0:
        return [make(use, mesh, (), **options), make("tensor/megatron-sp", mesh, tuple(mesh.axes))]
    return [make(use, mesh, tuple(mesh.axes), **options)]


WAYS = [*product(("flash", "unfused"), (2, 3, 4), (True, False))]
"""Kernels of attention, ranks along each axis, and whether gathered tensors are gathered again."""


@pytest.mark.parametrize(("use", "options"), with_options("tensor", "sequence"))
def test_data_flow_and_placement_in_a_layer(use: str, options: Options) -> None:
    axes = max(1, find_scheme(use).least_axes)
    for attention, ranks, regather in drawn(WAYS, keep={("flash", 2 if axes > 1 else 4, True), ("unfused", 3, False)}):
        if axes == 1 or ranks < 4:
            mesh = Mesh({f"x{i}": ranks for i in range(axes)})
            found = layer_problems(mesh, partial(schemes_on, use, mesh, options), regather, attention)
            assert found == [], (attention, ranks, regather)
