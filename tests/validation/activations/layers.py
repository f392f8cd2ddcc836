"""Layers of published models in plain torch, as Transformers writes them, built from the shape of a model.

One builder for all families: what differs is read from the model. Modules are those of Transformers 5.24.0: RMS norms
of `modeling_llama.py` and `modeling_gemma.py`, activations of `activations.py`, RoPE, attention through
scaled_dot_product_attention or `eager_attention_forward`, latent attention of `modeling_deepseek_v3.py`, experts of
`integrations/moe.py` (grouped_mm).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshcast.simulator.models.model import Model


class RMSNorm(nn.Module):
    """The RMS norm of Llama, of Gemma (`weight - 1` is stored), or without a weight."""

    def __init__(self, width: int, less_one: bool) -> None:
        super().__init__()
        self.less_one, self.weight = less_one, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.less_one:
            return (normed * (1.0 + self.weight.float())).type_as(x)
        return self.weight * normed.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """A layer norm whose mean and deviation are in fp32, as on a GPU: on a CPU those have the format of its weights."""

    def __init__(self, width: int) -> None:
        super().__init__(width, dtype=torch.float32)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Drops with a mask of one byte an element, as on a GPU."""
    return torch.native_dropout(x, probability, True)[0] if probability else x


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": gelu_new,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
}


def rotate(x: Tensor, width: int) -> Tensor:
    """Rotates the first `width` elements of heads [b, a, s, d]; the table takes no part in the count."""
    if not width:
        return x
    table = TABLES[x.shape[-2], width]
    turned, rest = x[..., :width], x[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * table + half * table
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Tables(dict[tuple[int, int], Tensor]):
    """Cosines of positions, one table for all layers."""

    def __missing__(self, key: tuple[int, int]) -> Tensor:
        self[key] = torch.ones(key)
        return self[key]


TABLES = Tables()


def attend(q: Tensor, k: Tensor, v: Tensor, model: Model, fused: bool) -> Tensor:
    """Attention of heads [b, a, s, d], causal."""
    if fused:  # the fused kernels of a GPU keep no mask of dropout
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    group = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(group, 1) if group > 1 else one for one in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if "attention" in model.softcaps:
        scores = torch.tanh(scores / 50.0) * 50.0
    scores = scores + torch.ones(scores.shape[-2:])
    shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(dropout(shares, model.dropout), v)


class Attention(nn.Module):
    """Multi-head or grouped-query attention."""

    def __init__(self, model: Model, fused: bool, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.fused, self.core = model, fused, core
        d, h, biased = model.head_dim, model.hidden, model.qkv_bias
        self.widths = [model.heads * d, model.kv_heads * d, model.kv_heads * d]
        parts = [sum(self.widths)] if model.fused_qkv else self.widths
        self.qkv = nn.ModuleList(nn.Linear(h, width, biased) for width in parts)
        self.norms = nn.ModuleList(RMSNorm(d, model.norm == "rmsnorm1p") for _ in range(2 * bool(model.qk_layernorm)))
        self.out = nn.Linear(model.heads * d, h, model.proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        model, b, s = self.model, *x.shape[:2]
        made = [linear(x) for linear in self.qkv]
        made = list(made[0].split(self.widths, -1)) if model.fused_qkv else made
        q, k, v = (one.view(b, s, -1, model.head_dim).transpose(1, 2) for one in made)
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        if model.positions == "rope":
            q, k = (rotate(one, model.rope_width) for one in (q, k))
        o = self.core(q, k, v, model, self.fused).transpose(1, 2).contiguous().view(b, s, -1)
        return self.out(o)


class LatentAttention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, model: Model, fused: bool, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.fused, self.core = model, fused, core
        mla, h, heads = model.mla, model.hidden, model.heads
        assert mla and mla.q_lora_rank
        self.q_down = nn.Linear(h, mla.q_lora_rank, False)
        self.kv_down = nn.Linear(h, mla.kv_lora_rank + mla.qk_rope, False)
        self.q_norm, self.kv_norm = RMSNorm(mla.q_lora_rank, False), RMSNorm(mla.kv_lora_rank, False)
        self.q_up = nn.Linear(mla.q_lora_rank, heads * (mla.qk_nope + mla.qk_rope), False)
        self.kv_up = nn.Linear(mla.kv_lora_rank, heads * (mla.qk_nope + mla.v), False)
        self.out = nn.Linear(heads * mla.v, h, False)

    def forward(self, x: Tensor) -> Tensor:
        mla, b, s = self.model.mla, *x.shape[:2]
        assert mla
        q = self.q_up(self.q_norm(self.q_down(x))).view(b, s, -1, mla.qk_nope + mla.qk_rope).transpose(1, 2)
        still, turning = q.split([mla.qk_nope, mla.qk_rope], -1)
        latent, key = self.kv_down(x).split([mla.kv_lora_rank, mla.qk_rope], -1)
        up = self.kv_up(self.kv_norm(latent)).view(b, s, -1, mla.qk_nope + mla.v).transpose(1, 2)
        k_still, v = up.split([mla.qk_nope, mla.v], -1)
        key = rotate(key.view(b, 1, s, mla.qk_rope), mla.qk_rope).expand(-1, k_still.shape[1], -1, -1)
        q = torch.cat((still, rotate(turning, mla.qk_rope)), -1)
        k = torch.cat((k_still, key), -1)
        return self.out(self.core(q, k, v, self.model, self.fused).transpose(1, 2).contiguous().view(b, s, -1))


class MLP(nn.Module):
    """An MLP, gated or not."""

    def __init__(self, model: Model, ffn: int) -> None:
        super().__init__()
        ups = 2 if model.gated else 1
        self.ups = nn.ModuleList(nn.Linear(model.hidden, ffn, model.mlp_bias) for _ in range(ups))
        self.down = nn.Linear(ffn, model.hidden, model.mlp_bias)
        self.activation = ACTIVATIONS[model.activation]

    def forward(self, x: Tensor) -> Tensor:
        first, *second = (linear(x) for linear in self.ups)
        active = self.activation(first)
        return self.down(active * second[0] if second else active)


class Experts(nn.Module):
    """A router with softmax over all experts, and experts as grouped products."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        self.moe, h, e, f = model.moe, model.hidden, model.moe.experts, model.moe.expert_ffn
        self.router = nn.Linear(h, e, False)
        self.up = nn.Parameter(torch.ones(e, h, 2 * f))
        self.down = nn.Parameter(torch.ones(e, f, h))
        self.shared = MLP(model, self.moe.shared_ffn) if self.moe.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        k, tokens = self.moe.top_k, x.view(-1, x.shape[-1])
        shares = F.softmax(self.router(tokens), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(shares, k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        experts, order = torch.sort(chosen.reshape(-1))
        sent = tokens[order // k]
        ends = torch.cumsum(torch.bincount(experts, minlength=self.moe.experts), 0, dtype=torch.int32)
        gate, up = torch._grouped_mm(sent, self.up, ends).chunk(2, -1)
        back = torch._grouped_mm(F.silu(gate) * up, self.down, ends)
        weighted = back * weights.reshape(-1)[order].unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0])
        y = weighted[places].view(tokens.shape[0], k, -1).sum(1).view(x.shape)
        return y + self.shared(x) if self.shared is not None else y


class Layer(nn.Module):
    """A layer of a model. fused: attention is. core: what runs the core of attention."""

    def __init__(self, model: Model, fused: bool = True, core: Callable[..., Tensor] = attend) -> None:
        super().__init__()
        self.model, h = model, model.hidden

        def norm() -> nn.Module:
            return LayerNorm(h) if model.norm == "layernorm" else RMSNorm(h, model.norm == "rmsnorm1p")

        kind = LatentAttention if model.mla else Attention
        self.attention = kind(model, fused, core)
        self.mlp = Experts(model) if model.moe else MLP(model, model.ffn)
        self.norm1, self.norm2 = norm(), None if model.shared_norm else norm()
        self.after = nn.ModuleList(norm() for _ in range(2 * (model.norm_place == "both")))

    def forward(self, x: Tensor) -> Tensor:
        drop = self.model.dropout
        normed = self.norm1(x)
        mixed = self.attention(normed)
        if self.model.parallel_residual:
            other = self.mlp(normed if self.norm2 is None else self.norm2(x))
            return dropout(mixed, drop) + dropout(other, drop) + x
        mixed = self.after[0](mixed) if self.after else mixed
        x = x + dropout(mixed, drop)
        assert self.norm2 is not None
        y = self.mlp(self.norm2(x))
        return x + dropout(self.after[1](y) if self.after else y, drop)


class Decoder(nn.Module):
    """A whole model: an embedding, its layers, a norm and an output layer of its own."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm, self.out = RMSNorm(model.hidden, False), nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))
