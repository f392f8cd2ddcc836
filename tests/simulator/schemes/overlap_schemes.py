"""The schemes that overlap collectives of tensor parallelism with GEMMs, and a layer under them."""

from __future__ import annotations

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import make

ASYNC, FLUX, USERBUFFERS = "tensor/async-tp", "tensor/flux", "tensor/userbuffers"
ALL = [ASYNC, FLUX, USERBUFFERS]
every = pytest.mark.parametrize("use", ALL)


def a_layer(t: int, *more: str, regather: bool = True, tensor: str = "megatron-sp") -> list[Fragment]:
    """The units of a small model on t ranks: embedding, layers, loss."""
    mesh = Mesh({"tp": t})
    model = Model(layers=2, hidden=64, heads=8, vocab=128, seq=32, tied=False)
    schemes = [make(use, mesh) for use in more]
    schemes.append(make(f"tensor/{tensor}", mesh, ("tp",)))
    stage = Architecture(model, 1, 32, 128).stage(range(2), True, True)
    return [unit_run.fragment for unit_run in Lowering(mesh, schemes, regather).run(stage).unit_runs]
