"""Where the laws of memory schemes are asked: the layer of tensor schemes."""

from __future__ import annotations

from tests.contract.of_tensor import LayerSetting, activations_per_layer, settings

__all__ = ["settings"]


def recomputed_forward_share(setting: LayerSetting, scheme: str) -> float:
    """FLOPs of recomputation over FLOPs of the forward pass, of one layer."""
    fragment = setting.layer(scheme)[0].fragment
    flops = {"F": 0.0, "R": 0.0, "B": 0.0, "W": 0.0}
    for op in fragment.forward + fragment.backward:
        flops[op.phase] += op.work.flops if op.work is not None else 0.0
    return flops["R"] / flops["F"]


MEASURES = {
    "recomputed_forward_share": recomputed_forward_share,
    "activations_per_layer": activations_per_layer,
}
