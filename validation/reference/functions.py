"""Operations that keep no more for the backward pass than the simulator says, where PyTorch's own would."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from validation.reference import weight_gradients as later
from validation.reference.parallel import TensorGroup

ROWS = 1 << 16
"""Elements of the rows that RMS norms treat at a time on a CPU: their temporary results stay in its caches."""

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Kernels of attention that keep no scores."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format for sums over values in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


# --------------------------------------------------------------------------------------------- linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. Where gradients of weights may be put off, see `later`, it keeps the same as torch's."""
    return _Linear.apply(x, weight, bias) if hasattr(weight, "later") else F.linear(x, weight, bias)


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
        d_weight, d_bias = partial(_product, grad, x), partial(_columns, grad)
        if place := later.of(ctx.weight):
            place.put(ctx.weight, d_weight)
            if ctx.bias is not None:
                place.put(ctx.bias, d_bias)
            return d_x, None, None
        return d_x, d_weight(), d_bias() if ctx.bias is not None else None


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight [out, in]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _columns(grad: Tensor) -> Tensor:
    """The gradient of a bias."""
    return grad.flatten(0, -2).sum(0)


# ------------------------------------------------------------------------------------------- RMS norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; keeps x and 1 / sqrt(...) of every row.

    CUDA has a fused kernel for both directions; elsewhere PyTorch puts it together from operations that keep x twice.
    """
    if x.is_cuda and hasattr(torch, "_fused_rms_norm"):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Any:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=wide(x.dtype))
        for some, by, out in _rows(x, scale, y):
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
        for some, g, by, out in _rows(x, grad, scale, d_x):
            normed = some * by
            d_weight += (g * normed).sum(0)
            d_normed = g.to(by.dtype) * weight
            along = (d_normed * normed).mean(-1, keepdim=True)
            out.copy_(d_normed.sub_(normed.mul_(along)).mul_(by))
        return d_x, d_weight.to(weight.dtype), None


def _rows(first: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Some rows at a time of tensors that have equally many; `first` says how wide they are. Those that are written to
    must lie in one piece."""
    count = max(1, ROWS // first.shape[-1])
    return zip(*(t.reshape(-1, t.shape[-1]).split(count) for t in (first, *others)), strict=True)


# --------------------------------------------------------------------------------------------- attention


def rope_table(positions: int, width: int, base: float, device: torch.device) -> Tensor:
    """exp(i p base^(-2 j / width)) of position p and pair j: [positions, width / 2], complex."""
    turns = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64, device=device), turns)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def heads(qkv: Tensor, queries: int, keys: int, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [b, heads, s, d] from qkv [b, s, (queries + 2 keys) d], as views of it.

    table: of `rope_table`; queries and keys are turned by it inside `qkv`, which nothing else may read.
    """
    return _Heads.apply(qkv, queries, keys, table)


class _Heads(Function):
    """Keeps nothing but the table; the backward pass puts the three gradients into one."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, queries: int, keys: int, table: Tensor | None) -> Any:
        # What comes in is written over without autograd's knowledge: linears do not keep what they give.
        parts = qkv.detach().unflatten(-1, (queries + 2 * keys, -1))
        ctx.sizes, ctx.table = (queries, keys, keys), table
        if table is not None:
            _turn(parts[:, :, : queries + keys], table)
        return tuple(one.transpose(1, 2) for one in parts.split(ctx.sizes, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        queries, keys, _ = ctx.sizes
        b, _, s, d = grads[0].shape
        out = grads[0].new_empty((b, s, sum(ctx.sizes), d))
        for into, grad in zip(out.split(ctx.sizes, 2), grads, strict=True):
            into.copy_(grad.transpose(1, 2))
        if ctx.table is not None:
            _turn(out[:, :, : queries + keys], ctx.table.conj())
        return out.flatten(2), None, None, None


def _turn(x: Tensor, table: Tensor) -> None:
    """Turns the first elements of heads [b, s, heads, d] in place, two neighbours at a time."""
    turned = x[..., : 2 * table.shape[-1]]
    # There are no complex numbers of 16 bits.
    pairs = turned if x.dtype in (torch.float32, torch.float64) else turned.float()
    torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(table[:, None])
    if pairs is not turned:
        turned.copy_(pairs)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [b, heads, s, d], as [b, s, heads d]; fewer key heads serve several query heads each.

    A fused kernel keeps its inputs, its result and a number per row and head; no scores lie in memory, or there is an
    error. Its result is laid out by positions, so that joining the heads is no copy.
    """
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # of which CUDA's kernel knows no groups
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        grouped = False
    with sdpa_kernel(FUSED):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


# -------------------------------------------------------------------------------------------- activations


def swiglu(gate_up: Tensor, share: Tensor | None = None) -> Tensor:
    """silu(gate) up of [..., 2 f]; share: [..., 1], a factor of each row. Keeps what comes in."""
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
    """Rows of a table that begins with row `first` of the whole one; zeros for ids [b, s] whose row is elsewhere."""
    return _Embedding.apply(ids, table, first)


class _Embedding(Function):
    """Keeps the ids."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, first: int) -> Any:
        ids = ids - first
        elsewhere = (ids < 0) | (ids >= table.shape[0])
        ctx.table = table
        rows = F.embedding(ids.masked_fill(elsewhere, 0), table)
        # Rows elsewhere have the number -1 from here on, which the backward kernel passes over as padding.
        ctx.save_for_backward(ids.masked_fill_(elsewhere, -1))
        return rows.masked_fill_(elsewhere[..., None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        d_table = partial(torch.ops.aten.embedding_dense_backward, grad, ids, len(ctx.table), -1, False)
        if place := later.of(ctx.table):
            place.put(ctx.table, d_table)
            return None, None, None
        return None, d_table(), None


# -------------------------------------------------------------------------------------------------- loss


def cross_entropy(logits: Tensor, targets: Tensor, tensor: TensorGroup) -> Tensor:
    """Mean cross-entropy of logits [b, s, v/tp] against targets [b, s].

    Three all-reduces of one number a token join the parts of the vocabulary: the maximum, the target's logit, the sum
    of exponentials (arXiv 1909.08053, section 3). Keeps 4 bytes a logit, in which the backward pass makes the gradient.
    Moves, for logits of n bytes: forward n for the maximum, n + 4 to subtract it, 8 for the exponentials and 4 for
    their sum, 2 n + 16; backward 8 to scale, and 4 + n to convert where n is not 4.
    """
    return _CrossEntropy.apply(logits, targets, tensor)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tensor: TensorGroup) -> Any:
        ctx.dtype, size = logits.dtype, logits.shape[-1]
        largest = tensor.reduce(logits.amax(-1, keepdim=True).to(wide(logits.dtype)), largest=True)
        if logits.is_cuda or logits.dtype == largest.dtype:
            kept = logits - largest
        else:  # where a processor subtracts numbers of two formats it makes a converted copy besides
            kept = logits.to(largest.dtype).sub_(largest)
        at = targets[..., None] - tensor.rank * size
        elsewhere = (at < 0) | (at >= size)
        at = at.masked_fill_(elsewhere, 0)
        wanted = tensor.reduce(kept.gather(-1, at).masked_fill_(elsewhere, 0))
        total = tensor.reduce(kept.exp_().sum(-1, keepdim=True))
        ctx.save_for_backward(kept, at, elsewhere, total)
        return (total.log() - wanted).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, at, elsewhere, total = ctx.saved_tensors
        each = grad / at.numel()
        kept.mul_(each / total)
        kept.scatter_add_(-1, at, (-each).expand(at.shape).masked_fill(elsewhere, 0).to(kept.dtype))
        return kept.to(ctx.dtype), None, None
