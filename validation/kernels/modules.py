"""The modules of the reference trainer, one for each leaf of the simulator's, at the sizes of one tensor-parallel rank.

Nothing is sent: a module is given what a collective would bring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simulator.ir.operators import Head, Norm, Residual
from simulator.plan.plan import Plan
from validation.kernels.operators import OperatorOfRank
from validation.measurements.device import Device
from validation.reference import functions, model
from validation.reference.layers import ColumnLinear, RowLinear
from validation.reference.tensor_parallel import TensorGroup


@dataclass
class ShardedModule:
    """A leaf's work in PyTorch.

    forward: of `inputs`, gives one tensor or several. weights: whose gradients the backward pass makes, besides those
    of the inputs that require one.
    """

    part: OperatorOfRank
    forward: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    weights: tuple[nn.Parameter, ...] = ()

    @property
    def wanted(self) -> list[Tensor]:
        """What the backward pass makes gradients of."""
        return [*(one for one in self.inputs if one.requires_grad), *self.weights]


class Modules:
    """Makes the modules of a plan. The weights of one layer of each kind and of both ends exist once, inputs are made
    for each module anew.

    Raises PlanError for what the reference trainer lacks.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        model.check(plan)
        self.plan, self.device = plan, device
        self.dtype = device.dtype(plan.job.framework.weights)
        tensor = plan.family("tensor")
        size = plan.mesh.size(axis for scheme in tensor for axis in scheme.over)
        sequence = any(scheme.use == "tensor/megatron-sp" for scheme in tensor)
        self.tensor = TensorGroup(size, 0, None, sequence)
        shape = plan.job.model
        kinds = {shape.kind(i)[0]: i for i in range(shape.layers)}
        self.layers = {experts: self._stage(range(i, i + 1)) for experts, i in kinds.items()}
        self.first, self.last = self._stage(range(0), first=True), self._stage(range(0), last=True)

    def _stage(self, layers: range, first: bool = False, last: bool = False) -> model.Stage:
        """A stage with random weights."""
        with torch.device(self.device.torch):
            made = model.Stage(self.plan, layers, first, last, self.tensor)
        made.to(self.dtype)
        with torch.no_grad():
            for param in made.parameters():
                param.normal_(std=model.INITIAL_STD)
        return made

    @property
    def layer(self) -> Any:
        """A layer, one with experts if the model has some."""
        return next(self.layers[max(self.layers)].layers.children())

    @property
    def dense(self) -> Any:
        """A layer without experts."""
        return next(self.layers[min(self.layers)].layers.children())

    def module(self, part: OperatorOfRank) -> ShardedModule:
        """The module of a leaf, with inputs of its own."""
        name, operator = part.name, part.operator
        if isinstance(operator, Head):
            table = self.last.embedding if self.last.tied else self.last.head
            return self._linear(part, table.weight)
        if isinstance(operator, Norm):
            norm = self.last.norm if name == "final_norm" else getattr(self.layer, name)
            return ShardedModule(part, norm, (self._input(part),), tuple(norm.parameters()))
        if isinstance(operator, Residual) and len(operator.ins) == 2:
            return ShardedModule(part, lambda x, y: x + y, (self._input(part), self._input(part)))
        makers: dict[str, Callable[[OperatorOfRank], ShardedModule]] = {
            "embedding": self._embedding,
            "positions": self._positions,
            "qkv": self._of_attention,
            "rope": self._rope,
            "core": self._core,
            "proj": self._of_attention,
            "up": self._of_mlp,
            "act": self._act,
            "down": self._of_mlp,
            "router": lambda part: self._linear(part, self.layer.mlp.router),
            "top_k": lambda part: ShardedModule(part, self.layer.mlp.combine_weights, (self._input(part),)),
            "permute": lambda part: ShardedModule(part, self.layer.mlp.permute, (self._input(part),)),
            "expert.up": lambda part: self._of_experts(part, self.layer.mlp.up),
            "expert.act": self._expert_act,
            "expert.down": lambda part: self._of_experts(part, self.layer.mlp.down),
            "unpermute": self._unpermute,
            "loss": self._loss,
        }
        return makers[name](part)

    # ------------------------------------------------------------------------------------------- leaves

    def sizes(self, part: OperatorOfRank) -> list[int]:
        """Local sizes of the first input."""
        return [int(size) for size in part.at.dims(part.operator.ins[0]).values()]

    def _input(self, part: OperatorOfRank) -> Tensor:
        return self._random(*self.sizes(part))

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device.torch, requires_grad=True)

    def _tokens(self, part: OperatorOfRank) -> Tensor:
        """Tokens for all positions [b, s] that a rank with a part of the vocabulary may be asked for."""
        b, s = self.sizes(part)[:2]
        return torch.randint(self.plan.job.model.vocab, (b, s), device=self.device.torch)

    def _linear(self, part: OperatorOfRank, weight: nn.Parameter, bias: nn.Parameter | None = None) -> ShardedModule:
        weights = (weight,) if bias is None else (weight, bias)
        return ShardedModule(part, lambda x: F.linear(x, weight, bias), (self._input(part),), weights)

    def _embedding(self, part: OperatorOfRank) -> ShardedModule:
        weight = self.first.embedding.weight
        return ShardedModule(part, lambda ids: functions.embedding(ids, weight, 0), (self._tokens(part),), (weight,))

    def _positions(self, part: OperatorOfRank) -> ShardedModule:
        return ShardedModule(part, self.first.positions, (self._input(part),), (self.first.positions.weight,))

    def _of_attention(self, part: OperatorOfRank) -> ShardedModule:
        return self._shard_linear(part, getattr(self.layer.attention, part.name))

    def _of_mlp(self, part: OperatorOfRank) -> ShardedModule:
        return self._shard_linear(part, getattr(self.dense.mlp, part.name))

    def _shard_linear(self, part: OperatorOfRank, linear: ColumnLinear | RowLinear) -> ShardedModule:
        """A linear of a layer. The bias of one divided by rows is added where its parts have been summed."""
        later = self.tensor.size > 1 and isinstance(linear, RowLinear)
        return self._linear(part, linear.weight, None if later else linear.bias)

    def _qkv(self, part: OperatorOfRank) -> Tensor:
        """Fused queries, keys and values, as the linear in front gives them."""
        b, s, width = self.sizes(part)
        attention = self.layer.attention
        return self._random(b, s, width // attention.queries * (attention.queries + 2 * attention.keys))

    def _rope(self, part: OperatorOfRank) -> ShardedModule:
        return ShardedModule(part, self.layer.attention.split_heads, (self._qkv(part),))

    def _core(self, part: OperatorOfRank) -> ShardedModule:
        q, k, v = (one.detach().requires_grad_() for one in self.layer.attention.split_heads(self._qkv(part)))
        return ShardedModule(part, functions.attention, (q, k, v))

    def _act(self, part: OperatorOfRank) -> ShardedModule:
        b, s, f = self.sizes(part)
        return ShardedModule(part, self.dense.mlp.activation, (self._random(b, s, f * len(part.operator.ins)),))

    def _loss(self, part: OperatorOfRank) -> ShardedModule:
        targets = self._tokens(part)
        return ShardedModule(part, lambda x: functions.cross_entropy(x, targets, self.tensor), (self._input(part),))

    # ------------------------------------------------------------------------------------------ experts

    def _routed_tokens(self, part: OperatorOfRank) -> Tensor:
        """Tokens in the order of their experts [e, n, ...]."""
        b, s, _, width = self.sizes(part)
        experts = self.layer.mlp.experts
        return self._random(experts, b * s // experts, width * len(part.operator.ins))

    def _of_experts(self, part: OperatorOfRank, weight: nn.Parameter) -> ShardedModule:
        return ShardedModule(
            part, lambda x: self.layer.mlp.expert_gemm(x, weight), (self._routed_tokens(part),), (weight,)
        )

    def _expert_act(self, part: OperatorOfRank) -> ShardedModule:
        x = self._routed_tokens(part)
        return ShardedModule(part, self.layer.mlp.activation, (x, self._random(*x.shape[:2], 1)))

    def _unpermute(self, part: OperatorOfRank) -> ShardedModule:
        b, s, _, h = self.sizes(part)
        experts, top_k = self.layer.mlp.experts, self.layer.mlp.top_k
        like = torch.empty(b, s // top_k, h, dtype=self.dtype, device=self.device.torch)
        sent = self._random(experts, b * s // experts, h)
        return ShardedModule(part, lambda y: self.layer.mlp.unpermute(y, like), (sent,))
