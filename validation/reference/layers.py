"""The layers of the reference model: modules of one tensor-parallel rank, for activations [b, s, ...].

Every parameter bears a `Cut`, which says what part of the whole tensor a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from simulator.models.model import Model
from validation.reference import functions
from validation.reference.parallel import TensorGroup

EPS = 1e-5
"""Of norms."""

ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class Cut:
    """What part of a whole tensor a rank holds: of each of the `sections` along `dim` its 1/size, one behind the other.

    No dim: all of it, on every rank. mean: of the values it starts with.
    """

    tensor: TensorGroup
    dim: int | None = None
    sections: tuple[int, ...] = ()
    mean: float = 0.0

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole."""
        return self.dim is None and self.tensor.size > 1

    @property
    def partial(self) -> bool:
        """Whether the gradient of a rank is that of its positions only."""
        return self.replicated and self.tensor.sequence

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole of a part."""
        return tuple(sum(self.sections) if i == self.dim else size for i, size in enumerate(shape))

    def part(self, whole: Tensor) -> Tensor:
        """The part of `whole` that this rank holds."""
        if self.dim is None or self.tensor.size == 1:
            return whole
        sections = whole.split(self.sections, self.dim)
        return torch.cat([one.chunk(self.tensor.size, self.dim)[self.tensor.rank] for one in sections], self.dim)


def parameter(cut: Cut, *shape: int) -> nn.Parameter:
    """A parameter to be filled; `shape` is that of the whole."""
    local = [size // cut.tensor.size if i == cut.dim else size for i, size in enumerate(shape)]
    made = nn.Parameter(torch.empty(local))
    mark(made, cut)
    return made


def mark(given: Tensor, cut: Cut) -> None:
    """Notes on a parameter its `cut`, whether it is `replicated` and `partial`, and whether this rank counts it in the
    norm of all gradients."""
    marks = {
        "cut": cut,
        "replicated": cut.replicated,
        "partial": cut.partial,
        "counted": not cut.replicated or cut.tensor.rank == 0,
    }
    for name, value in marks.items():
        setattr(given, name, value)


class ColumnLinear(nn.Module):
    """y = x W^T + b with the rows of W, the columns of y, divided. sections: of W's rows, each divided."""

    def __init__(self, hidden: int, sections: tuple[int, ...], bias: bool, tensor: TensorGroup) -> None:
        super().__init__()
        cut, rows = Cut(tensor, 0, sections), sum(sections)
        self.tensor = tensor
        self.weight = parameter(cut, rows, hidden)
        self.bias = parameter(cut, rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functions.linear(self.tensor.enter(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """y = x W^T + b with the columns of W and x divided; the results of all ranks are summed before b is added."""

    def __init__(self, inner: int, hidden: int, bias: bool, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.weight = parameter(Cut(tensor, 1, (inner,)), hidden, inner)
        self.bias = parameter(Cut(tensor), hidden) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tensor.size == 1:
            return functions.linear(x, self.weight, self.bias)
        y = self.tensor.leave(functions.linear(x, self.weight))
        return y if self.bias is None else y.add_(self.bias)


class Norm(nn.Module):
    """Layer or RMS norm over the last dim."""

    def __init__(self, model: Model, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight = parameter(Cut(tensor, mean=1.0), model.hidden)
        self.bias = parameter(Cut(tensor), model.hidden) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return functions.rms_norm(x, self.weight, EPS)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, EPS)


class Embedding(nn.Module):
    """From ids [b, s] to the residual stream: rows of a table that is divided along the vocabulary."""

    def __init__(self, model: Model, vocab: int, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.weight = parameter(Cut(tensor, 0, (vocab,)), vocab, model.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.tensor.rank * self.weight.shape[0]
        return self.tensor.leave(functions.embedding(ids, self.weight, first))


class Positions(nn.Module):
    """Learned positions, added to the residual stream."""

    def __init__(self, model: Model, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.weight = parameter(Cut(tensor), model.position_rows, model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.tensor.size if self.tensor.cuts else 1
        return x + self.weight[self.tensor.positions(x.shape[1] * parts)]


class Attention(nn.Module):
    """Causal self-attention: fused queries, keys and values, a fused core, an output layer.

    table: of `functions.rope_table`, None without rope. again: the core is computed again in the backward pass.
    """

    def __init__(self, model: Model, tensor: TensorGroup, table: Tensor | None, again: bool) -> None:
        super().__init__()
        self.queries, self.keys = model.heads // tensor.size, model.kv_heads // tensor.size
        self.table, self.again = table, again
        width, kv = model.query_width, model.key_width
        self.qkv = ColumnLinear(model.hidden, (width, kv, kv), model.qkv_bias, tensor)
        self.proj = RowLinear(width, model.hidden, model.proj_bias, tensor)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, turned in place where there is rope."""
        return functions.heads(qkv, self.queries, self.keys, self.table)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.again:
            return _again(functions.attention, q, k, v)
        return functions.attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.core(*self.heads(self.qkv(x))))


class MLP(nn.Module):
    """SwiGLU with gate and up in one matrix, or GELU (tanh)."""

    def __init__(self, model: Model, ffn: int, tensor: TensorGroup) -> None:
        super().__init__()
        self.gated = model.gated
        sections = (ffn, ffn) if model.gated else (ffn,)
        self.up = ColumnLinear(model.hidden, sections, model.mlp_bias, tensor)
        self.down = RowLinear(ffn, model.hidden, model.mlp_bias, tensor)

    def activation(self, x: Tensor) -> Tensor:
        return functions.swiglu(x) if self.gated else F.gelu(x, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    """x + attention(norm(x)), and the same with an MLP. again: what is computed again in the backward pass: "layer",
    "core" (of attention), or nothing."""

    def __init__(self, model: Model, number: int, tensor: TensorGroup, table: Tensor | None, again: str) -> None:
        super().__init__()
        self.again = again == "layer"
        self.norm1 = Norm(model, tensor)
        self.attention = Attention(model, tensor, table, again == "core")
        self.norm2 = Norm(model, tensor)
        self.mlp = _experts(model, tensor) if model.is_moe(number) else MLP(model, model.dense_ffn, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return _again(self.whole, x) if self.again else self.whole(x)

    def whole(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _experts(model: Model, tensor: TensorGroup) -> nn.Module:
    from validation.reference.experts import Experts  # which is made of parts from here

    return Experts(model, tensor)


def _again(function, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Keeps the inputs only, and computes all of it again. Nothing here is random, so no generator's state is kept."""
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
