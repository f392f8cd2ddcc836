"""Measures the closed forms of memory schemes on the layer of the tensor schemes."""

from __future__ import annotations

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import HostCopy
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import backward_ops, forward_ops, make
from meshcast.validation.contract.of_tensor import LoweredLayer, activations_per_layer, settings

__all__ = ["settings"]


def recomputed_forward_share(setting: LoweredLayer, scheme: str) -> float:
    """FLOPs of recomputation over FLOPs of the forward pass of one layer."""
    fragment = setting.layer(scheme)[0].fragment
    flops = {"F": 0.0, "R": 0.0, "B": 0.0, "W": 0.0}
    for op in fragment.forward + fragment.backward:
        flops[op.phase] += op.work.flops if op.work is not None else 0.0
    return flops["R"] / flops["F"]


def copied_per_layer(setting: LoweredLayer, scheme: str) -> float:
    """Bytes between GPU and host in both passes of a middle stage of four layers, per layer, without the statistics of
    norms, which closed forms leave out."""
    mesh = Mesh({"tp": 1})
    model = Model(layers=8, hidden=setting.h, heads=setting.a, vocab=512, seq=setting.s, dropout=0.1)
    blocks = Architecture(model, setting.b, setting.s, 512, attention=setting.attention)
    stage_ops = Lowering(mesh, [make(scheme, mesh)]).run(blocks.stage(range(4), False, False))
    works = [op.work for op in forward_ops(stage_ops) + backward_ops(stage_ops)]
    assert sum(work.nbytes * (-1) ** work.back for work in works if isinstance(work, HostCopy)) == 0
    statistics = 2 * 2 * 8 * setting.b * setting.s  # out and back, of two norms
    return sum(work.nbytes for work in works if isinstance(work, HostCopy)) / 4 - statistics


MEASURES = {
    "recomputed_forward_share": recomputed_forward_share,
    "activations_per_layer": activations_per_layer,
    "copied_per_layer": copied_per_layer,
}
