"""The layers of the reference model: modules of a rank, for activations of shape [b, s, ...].

With context parallelism s is the number of the rank's positions.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from meshcast.simulator.models.model import Model
from meshcast.validation.reference import functions
from meshcast.validation.reference.context_parallel import ContextGroup
from meshcast.validation.reference.experts import Experts
from meshcast.validation.reference.sharded_parameter import ParameterSharding, sharded_parameter
from meshcast.validation.reference.tensor_parallel import AxisGroup, TensorGroup

EPS = 1e-5
"""Epsilon of norms."""

ROPE_BASE = 10_000.0


class ColumnLinear(nn.Module):
    """Column-parallel linear y = x W^T + b: the rows of W and the columns of y are sharded.

    sections: row counts of concatenated weights, each sharded by itself.
    """

    def __init__(self, hidden: int, sections: tuple[int, ...], bias: bool, tensor: TensorGroup) -> None:
        super().__init__()
        cut, rows = ParameterSharding(tensor, 0, sections), sum(sections)
        self.tensor = tensor
        self.weight = sharded_parameter(cut, rows, hidden)
        self.bias = sharded_parameter(cut, rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functions.linear(self.tensor.enter_region(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """Row-parallel linear y = x W^T + b: the columns of W and of x are sharded; b is added after the reduction."""

    def __init__(self, inner: int, hidden: int, bias: bool, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.weight = sharded_parameter(ParameterSharding(tensor, 1, (inner,)), hidden, inner)
        self.bias = sharded_parameter(ParameterSharding(tensor), hidden) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tensor.size == 1:
            return functions.linear(x, self.weight, self.bias)
        y = self.tensor.leave_region(functions.linear(x, self.weight))
        return y if self.bias is None else y.add_(self.bias)


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dim."""

    def __init__(self, model: Model, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight = sharded_parameter(ParameterSharding(tensor, mean=1.0), model.hidden)
        self.bias = sharded_parameter(ParameterSharding(tensor), model.hidden) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return functions.rms_norm(x, self.weight, EPS)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, EPS)


class Embedding(nn.Module):
    """Vocabulary-parallel embedding: ids [b, s] to the residual stream."""

    def __init__(self, model: Model, vocab: int, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.weight = sharded_parameter(ParameterSharding(tensor, 0, (vocab,)), vocab, model.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.tensor.rank * self.weight.shape[0]
        return self.tensor.leave_region(functions.embedding(ids, self.weight, first))


class Positions(nn.Module):
    """Learned position embedding, added to the residual stream."""

    def __init__(self, model: Model, tensor: TensorGroup, context: ContextGroup) -> None:
        super().__init__()
        self.tensor, self.context = tensor, context
        self.weight = sharded_parameter(ParameterSharding(tensor), model.position_rows, model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        positions = x.shape[1] * (self.tensor.size if self.tensor.shards_sequence else 1)
        rows: Tensor = self.weight
        if self.context.size > 1:
            rows = self.context.own_positions(rows[: positions * self.context.size])
        return x + rows[self.tensor.positions(positions)]


class Attention(nn.Module):
    """Causal self-attention: a fused QKV linear, the attention core, the output projection.

    table: of `functions.rope_table`, at the rank's positions; None: no RoPE.
    recompute: recompute the core in the backward pass.
    """

    def __init__(
        self, model: Model, tensor: TensorGroup, context: ContextGroup, table: Tensor | None, recompute: bool
    ) -> None:
        super().__init__()
        self.context = context
        self.queries, self.keys = model.heads // tensor.size, model.kv_heads // tensor.size
        self.table, self.recompute = table, recompute
        width, kv = model.query_width, model.key_width
        self.qkv = ColumnLinear(model.hidden, (width, kv, kv), model.qkv_bias is True, tensor)
        self.proj = RowLinear(width, model.hidden, model.proj_bias, tensor)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as views of `qkv`, RoPE applied in place."""
        return functions.split_heads(qkv, self.queries, self.keys, self.table)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.recompute:
            return _checkpoint(self.context.attention, q, k, v)
        return self.context.attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.context.enter_attention(*self.split_heads(self.qkv(x)))
        return self.proj(self.context.leave_attention(self.core(*inputs)))


class MLP(nn.Module):
    """SwiGLU with gate and up in a single matrix, or GELU with the tanh approximation."""

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
    """A pre-norm transformer layer: x + attention(norm(x)), then the same with an MLP or experts.

    recompute: what the backward pass recomputes: ``layer``, ``core`` (of attention), or nothing if empty.
    """

    def __init__(
        self,
        model: Model,
        number: int,
        tensor: TensorGroup,
        context: ContextGroup,
        expert: AxisGroup,
        table: Tensor | None,
        recompute: str,
    ) -> None:
        super().__init__()
        self.recompute = recompute == "layer"
        self.norm1 = Norm(model, tensor)
        self.attention = Attention(model, tensor, context, table, recompute == "core")
        self.norm2 = Norm(model, tensor)
        moe = model.is_moe(number)
        self.mlp = Experts(model, tensor, expert) if moe else MLP(model, model.dense_ffn, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return _checkpoint(self.compute, x) if self.recompute else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """Computes attention, then MLP or experts."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _checkpoint(function, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Runs with activation checkpointing: saves the inputs only. Nothing here is random, so no RNG state is saved."""
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
