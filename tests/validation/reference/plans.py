"""Small plans for the tests of the reference trainer, and a model written down once more, as plainly as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

GPT = {"layers": 2, "hidden": 48, "heads": 4, "vocab": 96, "seq": 16, "ffn": 64}
LLAMA = {
    **{"layers": 2, "hidden": 48, "heads": 4, "kv_heads": 2, "vocab": 96, "seq": 16, "ffn": 64, "tied": False},
    **{"gated": True, "norm": "rmsnorm", "positions": "rope"},
}
EXPERTS = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}
MODELS = {"gpt": GPT, "llama": LLAMA, "experts": EXPERTS}


def plan(
    model: dict[str, Any],
    precision: str = "fp32",
    gpus: int = 1,
    job: dict[str, Any] | None = None,
    micro: int = 2,
    **degrees: Any,
) -> Plan:
    """A plan whose gradients and main weights have the format of the weights. job: fields that replace the others."""
    usual = {
        "model": model,
        "cluster": {"node": "dgx-h100", "nodes": 1, "gpus": gpus},
        "framework": "reference",
        "precision": dict.fromkeys(("compute", "gradients", "main_weights", "moments"), precision),
        "batch": {"micro": micro},
        "plan": {"sequence_parallel": False, "zero": 0, **degrees},
    }
    return resolve_plan(load_job({**usual, **(job or {})}))


def serial(weights: dict[str, Tensor], plan: Plan, ids: Tensor, targets: Tensor) -> Tensor:
    """The loss of the model with these weights, from textbook formulas in plain operations."""
    import torch
    from torch.nn import functional as F

    model = plan.job.model
    heads, keys, d, eps = model.heads, model.kv_heads, model.head_dim, 1e-5
    b, s = ids.shape

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(x: Tensor, name: str) -> Tensor:
        if model.norm == "rmsnorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def turn(x: Tensor) -> Tensor:
        if model.positions != "rope":
            return x
        angles = torch.arange(s, dtype=x.dtype)[:, None] * 10_000.0 ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = linear(x, f"{name}.qkv").view(b, s, -1, d).split((heads, keys, keys), 2)
        q, k = turn(q), turn(k)
        k, v = (t.repeat_interleave(heads // keys, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / d**0.5
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        return linear(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2), f"{name}.proj")

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate * gate.sigmoid() * up

    def mlp(x: Tensor, name: str) -> Tensor:
        if f"{name}.router" in weights:
            return experts(x, name)
        inner = linear(x, f"{name}.up")
        return linear(gated(inner) if model.gated else F.gelu(inner, approximate="tanh"), f"{name}.down")

    def experts(x: Tensor, name: str) -> Tensor:
        assert model.moe is not None
        e, k = model.moe.experts, model.moe.top_k
        probabilities = (x @ weights[f"{name}.router"].T).softmax(-1)
        samples = []
        for i in range(b):
            tokens = []
            for p in range(s):
                chosen = [(p * k + j) % e for j in range(k)]
                share = probabilities[i, p, chosen] / probabilities[i, p, chosen].sum()
                ups, downs = weights[f"{name}.up"], weights[f"{name}.down"]
                tokens.append(sum(w * (downs[c] @ gated(ups[c] @ x[i, p])) for w, c in zip(share, chosen, strict=True)))
            samples.append(torch.stack(tokens))
        return torch.stack(samples)

    x = weights["embedding.weight"][ids]
    if model.positions == "learned":
        x = x + weights["positions.weight"][:s]
    for i in range(model.layers):
        x = x + attention(norm(x, f"layers.{i}.norm1"), f"layers.{i}.attention")
        x = x + mlp(norm(x, f"layers.{i}.norm2"), f"layers.{i}.mlp")
    logits = norm(x, "norm") @ weights["embedding.weight" if model.tied else "head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
