"""Modules of the reference trainer, for every operator of the simulator, at the sizes of a tensor-parallel rank.

Nothing is communicated: a module gets random inputs in place of the results of collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.operators import Head, Norm, Residual
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.kernels.operators import LocalOperator
from meshcast.validation.measurements.device import Device
from meshcast.validation.reference import functions, model
from meshcast.validation.reference.layers import ColumnLinear, RowLinear
from meshcast.validation.reference.tensor_parallel import TensorGroup


@dataclass
class ShardedModule:
    """An operator in PyTorch.

    Attributes:
        local: the operator of the simulator at the sizes of a rank.
        forward: from `inputs` to a tensor or several.
        inputs: random tensors.
        weights: whose gradients the backward pass computes, besides those of the inputs that require one.
    """

    local: LocalOperator
    forward: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    weights: tuple[nn.Parameter, ...] = ()

    @property
    def wanted(self) -> list[Tensor]:
        """Tensors whose gradients the backward pass computes."""
        return [*(tensor for tensor in self.inputs if tensor.requires_grad), *self.weights]


class Modules:
    """Makes the modules of a plan.

    The weights of a layer of each kind and of both ends exist once; every module gets new inputs.
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
        kinds = {shape.kind(i).experts: i for i in range(shape.layers)}
        self.layers = {experts: self._stage(range(i, i + 1)) for experts, i in kinds.items()}
        self.first, self.last = self._stage(range(0), first=True), self._stage(range(0), last=True)

    def _stage(self, layers: range, first: bool = False, last: bool = False) -> model.Stage:
        """Returns a stage with random weights."""
        with torch.device(self.device.torch):
            stage = model.Stage(self.plan, layers, first, last, self.tensor)
        stage.to(self.dtype)
        with torch.no_grad():
            for param in stage.parameters():
                param.normal_(std=model.INITIAL_STD)
        return stage

    @property
    def layer(self) -> Any:
        """A layer, with experts if the model has some."""
        return next(self.layers[max(self.layers)].layers.children())

    @property
    def dense(self) -> Any:
        """A layer without experts."""
        return next(self.layers[min(self.layers)].layers.children())

    def module(self, local: LocalOperator) -> ShardedModule:
        """Returns the module of an operator, with new inputs."""
        name, kind = local.name, local.operator
        if isinstance(kind, Head):
            table = self.last.embedding if self.last.tied else self.last.head
            return self._linear(local, table.weight)
        if isinstance(kind, Norm):
            norm = self.last.norm if name == "final_norm" else getattr(self.layer, name)
            return ShardedModule(local, norm, (self._input(local),), tuple(norm.parameters()))
        if isinstance(kind, Residual) and len(kind.ins) == 2:
            return ShardedModule(local, lambda x, y: x + y, (self._input(local), self._input(local)))
        makers: dict[str, Callable[[LocalOperator], ShardedModule]] = {
            "embedding": self._embedding,
            "positions": self._positions,
            "qkv": lambda local: self._shard_linear(local, self.layer.attention.qkv),
            "rope": lambda local: ShardedModule(local, self.layer.attention.split_heads, (self._qkv(local),)),
            "core": self._core,
            "proj": lambda local: self._shard_linear(local, self.layer.attention.proj),
            "up": lambda local: self._shard_linear(local, self.dense.mlp.up),
            "act": self._act,
            "down": lambda local: self._shard_linear(local, self.dense.mlp.down),
            "router": lambda local: self._linear(local, self.layer.mlp.router),
            "top_k": lambda local: ShardedModule(local, self.layer.mlp.combine_weights, (self._input(local),)),
            "permute": lambda local: ShardedModule(local, self.layer.mlp.permute, (self._input(local),)),
            "expert.up": lambda local: self._of_experts(local, self.layer.mlp.up),
            "expert.act": self._expert_act,
            "expert.down": lambda local: self._of_experts(local, self.layer.mlp.down),
            "unpermute": self._unpermute,
            "loss": self._loss,
        }
        return makers[name](local)

    # ---------------------------------------------------------------------------------------- operators

    def sizes(self, local: LocalOperator) -> list[int]:
        """Returns the local sizes of the first input."""
        return [int(size) for size in local.at.dims(local.operator.ins[0]).values()]

    def _input(self, local: LocalOperator) -> Tensor:
        return self._random(*self.sizes(local))

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device.torch, requires_grad=True)

    def _tokens(self, local: LocalOperator) -> Tensor:
        """Returns random token ids [b, s] of the whole vocabulary."""
        b, s = self.sizes(local)[:2]
        return torch.randint(self.plan.job.model.vocab, (b, s), device=self.device.torch)

    def _linear(self, local: LocalOperator, weight: nn.Parameter, bias: nn.Parameter | None = None) -> ShardedModule:
        weights = (weight,) if bias is None else (weight, bias)
        return ShardedModule(local, lambda x: F.linear(x, weight, bias), (self._input(local),), weights)

    def _embedding(self, local: LocalOperator) -> ShardedModule:
        weight = self.first.embedding.weight
        return ShardedModule(local, lambda ids: functions.embedding(ids, weight, 0), (self._tokens(local),), (weight,))

    def _positions(self, local: LocalOperator) -> ShardedModule:
        return ShardedModule(local, self.first.positions, (self._input(local),), (self.first.positions.weight,))

    def _shard_linear(self, local: LocalOperator, linear: ColumnLinear | RowLinear) -> ShardedModule:
        """Returns a linear of a layer. The bias of a row-parallel linear is added after its all-reduce."""
        later = self.tensor.size > 1 and isinstance(linear, RowLinear)
        return self._linear(local, linear.weight, None if later else linear.bias)

    def _qkv(self, local: LocalOperator) -> Tensor:
        """Returns fused queries, keys and values, as the linear before gives them."""
        b, s, width = self.sizes(local)
        attention = self.layer.attention
        return self._random(b, s, width // attention.queries * (attention.queries + 2 * attention.keys))

    def _core(self, local: LocalOperator) -> ShardedModule:
        q, k, v = (head.detach().requires_grad_() for head in self.layer.attention.split_heads(self._qkv(local)))
        return ShardedModule(local, functions.attention, (q, k, v))

    def _act(self, local: LocalOperator) -> ShardedModule:
        b, s, f = self.sizes(local)
        return ShardedModule(local, self.dense.mlp.activation, (self._random(b, s, f * len(local.operator.ins)),))

    def _loss(self, local: LocalOperator) -> ShardedModule:
        targets = self._tokens(local)
        return ShardedModule(local, lambda x: functions.cross_entropy(x, targets, self.tensor), (self._input(local),))

    # ------------------------------------------------------------------------------------------ experts

    def _routed_tokens(self, local: LocalOperator) -> Tensor:
        """Returns tokens in the order of their experts [e, n, ...]."""
        b, s, _, width = self.sizes(local)
        experts = self.layer.mlp.experts
        return self._random(experts, b * s // experts, width * len(local.operator.ins))

    def _of_experts(self, local: LocalOperator, weight: nn.Parameter) -> ShardedModule:
        return ShardedModule(
            local, lambda x: self.layer.mlp.expert_gemm(x, weight), (self._routed_tokens(local),), (weight,)
        )

    def _expert_act(self, local: LocalOperator) -> ShardedModule:
        x = self._routed_tokens(local)
        return ShardedModule(local, self.layer.mlp.activation, (x, self._random(*x.shape[:2], 1)))

    def _unpermute(self, local: LocalOperator) -> ShardedModule:
        b, s, _, h = self.sizes(local)
        experts, top_k = self.layer.mlp.experts, self.layer.mlp.top_k
        like = torch.empty(b, s // top_k, h, dtype=self.dtype, device=self.device.torch)
        sent = self._random(experts, b * s // experts, h)
        return ShardedModule(local, lambda y: self.layer.mlp.unpermute(y, like), (sent,))
