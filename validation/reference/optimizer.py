"""Mixed-precision Adam, unsharded or with its state sharded over the replicas (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshcast.simulator.plan.plan import Plan
from meshcast.validation.measurements.device import DTYPES
from meshcast.validation.reference.sharded_parameter import holds_experts
from meshcast.validation.reference.tensor_parallel import all_gather_into, reduce_scatter_into

MAX_GRADIENT_NORM = 1.0
"""Gradients are clipped to this global norm."""

LEARNING_RATE = 1e-4
"""Learning rate."""

MainWeightPair = tuple[nn.Parameter, nn.Parameter]
"""A parameter and its main weight, the copy that Adam updates."""


NORM_CHUNK = 2**18
"""Elements per partial sum of the gradient norm: an fp32 sum over millions of squares loses digits."""


class Optimizer:
    """Gradient clipping by global norm, then a step of fused AdamW.

    groups: process groups over which the norm is summed: tensor, pipeline, and the replicas if they hold shards (FSDP).
    Main weights are copies only if their format differs from that of the weights. Gradients stay allocated in the
    plan's format.
    """

    def __init__(self, params: Iterable[nn.Parameter], plan: Plan, groups: Sequence[Any] = ()) -> None:
        framework = plan.job.framework
        self.params, self.groups = list(params), list(groups)
        self.main_dtype = DTYPES[framework.main_weights]
        for param in self.params:
            allocate_gradient(param, DTYPES[framework.gradients])
        main = self.main_dtype
        pairs = [(p, p if p.dtype == main else nn.Parameter(p.detach().to(main))) for p in self.params]
        converts = any(gradient(param).dtype != self.main_dtype for param in self.params)
        parts = _conversion_batches(pairs) if converts else [pairs]
        self.adams = [(fused_adamw([main for _, main in part]), part) for part in parts]

    def _update(self, adam: torch.optim.Optimizer, pairs: Sequence[MainWeightPair]) -> None:
        """Takes a step of an AdamW over its parameters and their main weights."""
        for param, main in pairs:
            main.grad = gradient(param).to(self.main_dtype)
        adam.step()
        for param, main in pairs:
            if main is not param:
                param.copy_(main)
            if main.grad is not gradient(param):
                main.grad = None

    def step(self) -> Tensor:
        """Takes a step; returns the global gradient norm before clipping, a scalar on the device."""
        with torch.no_grad():
            gradients = [local_shard(gradient(param)) for param in self.params]
            counted = [g for g, p in zip(gradients, self.params, strict=True) if getattr(p, "in_norm", True)]
            norm = global_norm(counted, self.groups, gradients[0].device)
            torch._foreach_mul_(gradients, clip_factor(norm))
            for adam, some in self.adams:
                self._update(adam, some)
        return norm

    def zero_grad(self) -> None:
        """Zeroes the gradients in place."""
        torch._foreach_zero_([local_shard(gradient(param)) for param in self.params])


class ZeroOptimizer:
    """Clipping and AdamW with main weights and moments sharded over the replicas (ZeRO-1).

    group: process group of the replicas.
    groups: as in `Optimizer`, without the replicas.
    expert_group: process group of the replicas of experts under expert parallelism; None: each expert is on a single
        rank.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        plan: Plan,
        group: Any,
        groups: Sequence[Any] = (),
        expert_group: Any = None,
    ) -> None:
        self.groups = [*groups, group]
        experts: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for param in params:
            (experts if holds_experts(param) else others).append(param)
        replicas = dist.get_world_size(group)
        self.parts = [
            FlatParameters(some, plan, over, replicas)
            for some, over in ((others, group), (experts, expert_group))
            if some
        ]

    def step(self) -> Tensor:
        """Reduce-scatters the mean gradient over the replicas, then as `Optimizer.step`."""
        with torch.no_grad():
            counted = [chunk for part in self.parts for chunk in part.reduce_gradients()]
            norm = global_norm(counted, self.groups, self.parts[0].weights.device)
            for part in self.parts:
                part.update(clip_factor(norm))
        return norm

    def zero_grad(self) -> None:
        """Zeroes the gradients in place."""
        for part in self.parts:
            part.gradients.zero_()


class FlatParameters:
    """Parameters in a flat tensor of weights and another of gradients, with AdamW for this rank's shard of them.

    group: process group over which they are sharded: gradients are reduce-scattered, updated weights all-gathered.
        None: not sharded.
    replicas: number of ranks over whose tokens gradients are averaged.
    """

    def __init__(self, params: Iterable[nn.Parameter], plan: Plan, group: Any, replicas: int) -> None:
        framework = plan.job.framework
        self.group, self.replicas = group, replicas
        self.ranks, self.rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        # Parameters that other ranks add to the norm come last, so that the others form a slice.
        self.params = sorted(params, key=lambda param: not getattr(param, "in_norm", True))
        first, total = self.params[0], sum(param.numel() for param in self.params)
        size = -(-total // self.ranks)
        self.weights = first.new_empty(self.ranks * size).detach()
        self.gradients = torch.zeros_like(self.weights, dtype=DTYPES[framework.gradients])
        counted, place = 0, 0
        for param in self.params:
            mine = slice(place, place := place + param.numel())
            self.weights[mine].copy_(param.detach().flatten())
            param.data = self.weights[mine].view_as(param)
            allocate_gradient(param, DTYPES[framework.gradients], self.gradients[mine].view_as(param))
            counted += param.numel() if getattr(param, "in_norm", True) else 0
        self.weights[total:].zero_()
        self.mine = slice(self.rank * size, (self.rank + 1) * size)
        self.counted = min(max(counted - self.mine.start, 0), size)
        self.shard = nn.Parameter(self.weights[self.mine].to(DTYPES[framework.main_weights]))
        self.adam = fused_adamw([self.shard])

    def reduce_gradients(self) -> Sequence[Tensor]:
        """Reduce-scatters the mean gradient; returns what this rank adds to the gradient norm, in chunks."""
        shard = self.gradients[self.mine]
        if self.group is not None:
            reduce_scatter_into(shard, self.gradients, self.group)
        shard.div_(self.replicas)
        return shard[: self.counted].split(NORM_CHUNK)

    def update(self, factor: Tensor) -> None:
        """Updates this rank's shard with its gradient times `factor`, and all-gathers the weights."""
        self.shard.grad = self.gradients[self.mine].mul_(factor).to(self.shard.dtype)
        self.adam.step()
        self.shard.grad = None
        self.weights[self.mine].copy_(self.shard)
        if self.group is not None:
            all_gather_into(self.weights, self.weights[self.mine], self.group)


def _conversion_batches(pairs: Iterable[MainWeightPair]) -> list[list[MainWeightPair]]:
    """Splits parameters into batches of at most the largest's size.

    Gradients are converted to the main weights' format batch by batch, which bounds the memory of the copies.
    """
    batches: list[list[MainWeightPair]] = [[]]
    pairs, held = list(pairs), 0
    limit = max(param.numel() for param, _ in pairs)
    for pair in pairs:
        held += pair[0].numel()
        if held > limit:
            batches.append([])
            held = pair[0].numel()
        batches[-1].append(pair)
    return batches


def fused_adamw(params: list[nn.Parameter]) -> torch.optim.AdamW:
    """Returns fused AdamW, which a CUDA graph can hold: other implementations hold a copy of the parameters during a
    step."""
    on_gpu = params[0].is_cuda
    return torch.optim.AdamW(
        params, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True, capturable=on_gpu
    )


def allocate_gradient(param: nn.Parameter, dtype: torch.dtype, place: Tensor | None = None) -> None:
    """Allocates the tensor in which a parameter's gradient accumulates.

    In another format than the weight's it is `main_grad`: a hook adds each new gradient to it and frees that.
    place: the tensor to use; None: a new tensor.
    """
    kept = torch.zeros_like(param, dtype=dtype) if place is None else place
    if param.dtype == dtype:
        param.grad = kept
        return
    param.main_grad = kept  # type: ignore[attr-defined]

    def add(param: Tensor) -> None:
        if param.grad is None:  # its backward pass has deferred it
            return
        gradient(param).add_(param.grad)
        param.grad = None

    param.register_post_accumulate_grad_hook(add)


def gradient(param: Tensor) -> Tensor:
    """Returns the tensor in which a parameter's gradient accumulates."""
    main_grad = getattr(param, "main_grad", param.grad)
    assert main_grad is not None
    return main_grad


def global_norm(gradients: Sequence[Tensor], groups: Sequence[Any], device: torch.device) -> Tensor:
    """Returns the L2 norm of the gradients over all ranks of the groups."""
    squares = torch.zeros((), device=device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32)).square().sum()
    for group in groups:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_factor(norm: Tensor) -> Tensor:
    """Returns the factor by which gradients of this norm are clipped."""
    return (MAX_GRADIENT_NORM / (norm + 1e-6)).clamp(max=1.0)


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor that FSDP shards; otherwise the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]
