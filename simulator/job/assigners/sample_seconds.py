"""Estimated time of a sample in a group of ranks, by which samples are assigned before anything is priced."""

from __future__ import annotations

from meshcast.hardware import Cluster
from meshcast.simulator.models.flops import needed_flops
from meshcast.simulator.models.model import Model

LINEAR_SHARE, ATTENTION_SHARE = 0.68, 0.49
"""Shares of the dense peak in 16 bits that products with weights, and attention, reach: those of the coefficients of
FlexSP for a GPT of 7 B on A100s, 183.9576e-3 ms and 5.128e-6 ms a token and pair of tokens (optimizer_param_dict of
galvatron/flexsp_solver/flexSP.py): 6 x 6.51e9 FLOP in the first, 6 x 32 x 4096 in the second, of 312 TFLOP/s."""

ALL_TO_ALLS = 2
"""All-to-alls of each of queries, keys, values and outputs in a layer: in the forward and in the backward pass."""


class SampleSeconds:
    """Time of a sample of s tokens on d ranks, by the cost model of FlexSP: (a s^2 + b s) / d, and all-to-alls."""

    def __init__(self, model: Model, cluster: Cluster, tensor: int) -> None:
        """Makes the estimate for a model on a cluster. tensor: tensor-parallel ranks that share the work of a rank."""
        self.model, self.cluster, self.tensor = model, cluster, tensor
        peak = cluster.gpu.peak.get("bf16") or max(cluster.gpu.peak.values())
        self.linear = needed_flops("causal", model, 1) / (LINEAR_SHARE * peak * tensor)
        self.attention = 1 / (ATTENTION_SHARE * peak * tensor)
        width = 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim
        self.nbytes = 2.0 * ALL_TO_ALLS * model.layers * width / tensor

    def __call__(self, length: int, degree: int) -> float:
        """Returns the seconds of a sample in a group of some ranks."""
        pairs = length * (needed_flops("causal", self.model, length) - needed_flops("causal", self.model, 1))
        compute = length * self.linear + pairs * self.attention
        return (compute + length * self._exchange(degree)) / degree

    def _exchange(self, degree: int) -> float:
        """Returns the seconds that all-to-alls take for a token of each of so many ranks."""
        if degree == 1:
            return 0.0
        near = max(1, self.cluster.scale_up_domain // self.tensor)
        up, out = self.cluster.scale_up, self.cluster.scale_out
        inside = self.nbytes * (min(degree, near) - 1) / degree / (up.bandwidth * up.payload or 1.0)
        outside = self.nbytes * max(0, degree - near) / degree / (out.bandwidth * out.payload or 1.0)
        return max(inside, outside)
