"""Autograd functions that save exactly the activations that the simulator counts, where those of PyTorch save more."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshcast.validation.reference.deferred_weight_gradients import deferral_of
from meshcast.validation.reference.tensor_parallel import TensorGroup

ROW_CHUNK = 1 << 16
"""Elements per chunk of rows in RMS norms on a CPU: temporaries of a chunk stay in the caches."""

FUSED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Attention kernels that do not store the scores."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the number format for sums over values in `dtype`: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


# --------------------------------------------------------------------------------------------- linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x W^T + b, with a weight gradient that can be deferred (`deferred_weight_gradients`); saves what torch
    saves."""
    return _Linear.apply(x, weight, bias) if hasattr(weight, "deferred") else F.linear(x, weight, bias)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d_x = grad @ ctx.weight if ctx.needs_input_grad[0] else None
        d_weight, d_bias = partial(_weight_gradient, grad, x), partial(_bias_gradient, grad)
        if place := deferral_of(ctx.weight):
            place.append(ctx.weight, d_weight)
            if ctx.bias is not None:
                place.append(ctx.bias, d_bias)
            return d_x, None, None
        return d_x, d_weight(), d_bias() if ctx.bias is not None else None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of a weight [out, in]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _bias_gradient(grad: Tensor) -> Tensor:
    """Returns the gradient of a bias."""
    return grad.flatten(0, -2).sum(0)


# ------------------------------------------------------------------------------------------- RMS norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dim; saves x and 1 / sqrt(...) of each row.

    On CUDA PyTorch's fused kernels are used; elsewhere PyTorch composes it from operations that save x twice.
    """
    if x.is_cuda and hasattr(torch, "_fused_rms_norm"):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Any:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))
        for some, by, out in _row_chunks(x, scale, y):
            norm = torch.linalg.vector_norm(some, dim=-1, keepdim=True, dtype=scale.dtype)
            by.copy_(norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_())
            torch.mul(some * by, weight, out=out)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        d_weight = torch.zeros_like(weight, dtype=scale.dtype)
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        for some, g, by, out in _row_chunks(x, grad, scale, d_x):
            normed = some * by
            d_weight += (g * normed).sum(0)
            d_normed = g.to(by.dtype) * weight
            along = (d_normed * normed).mean(-1, keepdim=True)
            out.copy_(d_normed.sub_(normed.mul_(along)).mul_(by))
        return d_x, d_weight.to(weight.dtype), None


def _row_chunks(first: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Chunks of rows of tensors with equally many rows; `first` gives their width.

    Tensors that are written to must be contiguous.
    """
    count = max(1, ROW_CHUNK // first.shape[-1])
    return zip(*(t.reshape(-1, t.shape[-1]).split(count) for t in (first, *others)), strict=True)


# --------------------------------------------------------------------------------------------- attention


def rope_table(positions: int, width: int, base: float, device: torch.device) -> Tensor:
    """Rotations of RoPE, exp(i p base^(-2 j / width)) of position p and pair j: [positions, width / 2], complex."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64, device=device), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def split_heads(qkv: Tensor, queries: int, keys: int, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [b, heads, s, d] as views of qkv [b, s, (queries + 2 keys) d].

    queries, keys: numbers of query heads and key heads.
    table: of `rope_table`, applied to queries and keys in place, so nothing else may read `qkv`; None: no RoPE.
    """
    return _SplitHeads.apply(qkv, queries, keys, table)


class _SplitHeads(Function):
    """Saves only the table; the backward pass writes the three gradients into a tensor."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, queries: int, keys: int, table: Tensor | None) -> Any:
        # `qkv` is overwritten behind autograd's back, which is safe because linears do not save their outputs.
        parts = qkv.detach().unflatten(-1, (queries + 2 * keys, -1))
        ctx.sizes, ctx.table = (queries, keys, keys), table
        if table is not None:
            _rotate(parts[:, :, : queries + keys], table)
        return tuple(part.transpose(1, 2) for part in parts.split(ctx.sizes, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        queries, keys, _ = ctx.sizes
        b, _, s, d = grads[0].shape
        out = grads[0].new_empty((b, s, sum(ctx.sizes), d))
        for into, grad in zip(out.split(ctx.sizes, 2), grads, strict=True):
            into.copy_(grad.transpose(1, 2))
        if ctx.table is not None:
            _rotate(out[:, :, : queries + keys], ctx.table.conj())
        return out.flatten(2), None, None, None


def _rotate(x: Tensor, table: Tensor) -> None:
    """Rotates the first elements of heads [b, s, heads, d] in place, pairs of neighbours as complex numbers."""
    rotated = x[..., : 2 * table.shape[-1]]
    # PyTorch has no bf16 complex numbers.
    pairs = rotated if x.dtype in (torch.float32, torch.float64) else rotated.float()
    torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(table[:, None])
    if pairs is not rotated:
        rotated.copy_(pairs)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention of [b, heads, s, d], as [b, s, heads d]; with fewer key heads it is grouped-query
    attention.

    With fewer queries than keys the queries are those of the last positions.
    Only fused kernels are allowed, which save their inputs, their result and a number for each row and head, but no
    scores. Their result is laid out by positions, so joining the heads copies nothing.
    """
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # CUDA's fp32 kernel has no grouped-query mode
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    mask = None
    if q.shape[2] < k.shape[2]:
        # Imports torch's compiler, which takes as long as torch itself; few models need it.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(FUSED_BACKENDS):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


# -------------------------------------------------------------------------------------------- activations


def swiglu(gate_up: Tensor, share: Tensor | None = None) -> Tensor:
    """Computes silu(gate) * up of [..., 2 f]; saves its inputs.

    share: [..., 1], a factor for each row (the combine weights of experts).
    """
    return _SwiGLU.apply(gate_up, share)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, share: Tensor | None) -> Any:
        gate, up = gate_up.chunk(2, -1)
        ctx.save_for_backward(gate_up, share)
        y = F.silu(gate).mul_(up)
        return y if share is None else y.mul_(share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate_up, share = ctx.saved_tensors
        out, d_share = torch.empty_like(gate_up), None
        (gate, up), (d_gate, d_up) = gate_up.chunk(2, -1), out.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=d_up)
        if share is not None:
            d_share = (d_up * up).mul_(grad).sum(-1, keepdim=True).to(share.dtype)
            grad = grad * share
        d_up.mul_(grad)
        torch.mul(grad, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return out, d_share


# --------------------------------------------------------------------------------------------- embedding


def embedding(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Returns the rows of this rank's shard of the embedding table for ids [b, s]; zeros for ids of other shards.

    first: first row of the shard in the whole table.
    """
    return _Embedding.apply(ids, table, first)


class _Embedding(Function):
    """Saves the ids."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, first: int) -> Any:
        ids = ids - first
        elsewhere = (ids < 0) | (ids >= table.shape[0])
        ctx.table = table
        rows = F.embedding(ids.masked_fill(elsewhere, 0), table)
        # The backward kernel skips ids of -1 as padding.
        ctx.save_for_backward(ids.masked_fill_(elsewhere, -1))
        return rows.masked_fill_(elsewhere[..., None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        d_table = partial(torch.ops.aten.embedding_dense_backward, grad, ids, len(ctx.table), -1, False)
        if place := deferral_of(ctx.table):
            place.append(ctx.table, d_table)
            return None, None, None
        return None, d_table(), None


# -------------------------------------------------------------------------------------------------- loss


def cross_entropy(logits: Tensor, targets: Tensor, tensor: TensorGroup) -> Tensor:
    """Computes the mean cross-entropy of vocabulary-parallel logits [b, s, v/tp] against targets [b, s].

    Three all-reduces of a number per token: the maximum, the target's logit, the sum of exponentials (arXiv
    1909.08053, section 3). Saves 4 bytes per logit, which the backward pass overwrites with the gradient.
    Memory traffic per logit of n bytes: forward n for the maximum, n + 4 to subtract it, 8 for the exponentials and 4
    for their sum, so 2 n + 16; backward 8 to scale, and 4 + n to convert where n is not 4.
    """
    return _CrossEntropy.apply(logits, targets, tensor)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tensor: TensorGroup) -> Any:
        ctx.dtype, size = logits.dtype, logits.shape[-1]
        largest = tensor.all_reduce(logits.amax(-1, keepdim=True).to(accumulation_dtype(logits.dtype)), largest=True)
        if logits.is_cuda or logits.dtype == largest.dtype:
            kept = logits - largest
        else:  # mixed-format subtraction on a CPU would make a converted copy first
            kept = logits.to(largest.dtype).sub_(largest)
        at = targets[..., None] - tensor.rank * size
        elsewhere = (at < 0) | (at >= size)
        at = at.masked_fill_(elsewhere, 0)
        wanted = tensor.all_reduce(kept.gather(-1, at).masked_fill_(elsewhere, 0))
        total = tensor.all_reduce(kept.exp_().sum(-1, keepdim=True))
        ctx.save_for_backward(kept, at, elsewhere, total)
        return (total.log() - wanted).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, at, elsewhere, total = ctx.saved_tensors
        each = grad / at.numel()
        kept.mul_(each / total)
        kept.scatter_add_(-1, at, (-each).expand(at.shape).masked_fill(elsewhere, 0).to(kept.dtype))
        return kept.to(ctx.dtype), None, None
