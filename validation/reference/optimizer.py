"""Adam as mixed-precision trainers have it, alone or with its state divided over the replicas (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simulator.plan.plan import Plan
from validation.measurements.device import DTYPES
from validation.reference.parallel import gather_all, scatter_sum

LIMIT = 1.0
"""Largest norm of all gradients together; longer ones are shortened to it."""

RATE = 1e-4
"""Of learning."""

OverlappedPasses = tuple[nn.Parameter, nn.Parameter]
"""A parameter and its main weights."""


SLICE = 2**18
"""Elements whose squares are summed up at once: in fp32 a sum over millions of them loses digits."""


class Optimizer:
    """Clips by the norm of all gradients, then a step of fused AdamW.

    groups: the process groups over which gradients of different parameters lie, one after the other: tensor, pipeline,
    and the replicas where they hold shards (FSDP). Main weights are copies where they have another format than the
    weights; gradients lie in the format of the plan, from the start to the end.
    """

    def __init__(self, params: Iterable[nn.Parameter], plan: Plan, groups: Sequence[Any] = ()) -> None:
        framework = plan.job.framework
        self.params, self.groups = list(params), list(groups)
        self.main_dtype = DTYPES[framework.main_weights]
        for param in self.params:
            keep_gradient(param, DTYPES[framework.gradients])
        pairs = [(param, self._main(param)) for param in self.params]
        converts = any(gradient(param).dtype != self.main_dtype for param in self.params)
        parts = _parts(pairs) if converts else [pairs]
        self.adams = [(adamw([main for _, main in part]), part) for part in parts]

    def _main(self, param: nn.Parameter) -> nn.Parameter:
        same = param.dtype == self.main_dtype
        return param if same else nn.Parameter(param.detach().to(self.main_dtype))

    def _update(self, adam: torch.optim.Optimizer, pairs: Sequence[OverlappedPasses]) -> None:
        """A step of these parameters and their main weights."""
        for param, main in pairs:
            main.grad = gradient(param).to(self.main_dtype)
        adam.step()
        for param, main in pairs:
            if main is not param:
                param.copy_(main)
            if main.grad is not gradient(param):
                main.grad = None

    def step(self) -> Tensor:
        """Returns the norm of all gradients before they were shortened, a scalar on the device."""
        with torch.no_grad():
            gradients = [_local(gradient(param)) for param in self.params]
            counted = [g for g, p in zip(gradients, self.params, strict=True) if getattr(p, "counted", True)]
            norm = total_norm(counted, self.groups, gradients[0].device)
            torch._foreach_mul_(gradients, shortened(norm))
            for adam, some in self.adams:
                self._update(adam, some)
        return norm

    def zero_grad(self) -> None:
        """The gradients stay where they are, and become zero."""
        torch._foreach_zero_([_local(gradient(param)) for param in self.params])


class ZeroOptimizer:
    """The same, with main weights and moments of this rank's 1/n of the parameters only (ZeRO-1).

    group: the n replicas. Weights and gradients lie one behind the other in two tensors: gradients are scattered as
    sums, updated weights are gathered. groups: as of `Optimizer`, without the replicas.
    """

    def __init__(self, params: Iterable[nn.Parameter], plan: Plan, group: Any, groups: Sequence[Any] = ()) -> None:
        framework = plan.job.framework
        self.group, self.groups = group, [*groups, group]
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        # What other ranks count in the norm of the gradients stands at the end.
        self.params = sorted(params, key=lambda param: not getattr(param, "counted", True))
        first, total = self.params[0], sum(param.numel() for param in self.params)
        size = -(-total // self.ranks)
        self.weights = first.new_empty(self.ranks * size).detach()
        self.gradients = torch.zeros_like(self.weights, dtype=DTYPES[framework.gradients])
        counted, place = 0, 0
        for param in self.params:
            mine = slice(place, place := place + param.numel())
            self.weights[mine].copy_(param.detach().flatten())
            param.data = self.weights[mine].view_as(param)
            keep_gradient(param, DTYPES[framework.gradients], self.gradients[mine].view_as(param))
            counted += param.numel() if getattr(param, "counted", True) else 0
        self.weights[total:].zero_()
        self.mine = slice(self.rank * size, (self.rank + 1) * size)
        self.counted = min(max(counted - self.mine.start, 0), size)
        self.shard = nn.Parameter(self.weights[self.mine].to(DTYPES[framework.main_weights]))
        self.adam = adamw([self.shard])

    def step(self) -> Tensor:
        """Sums the gradients over the replicas and takes their mean, then as `Optimizer.step`."""
        with torch.no_grad():
            shard = self.gradients[self.mine]
            scatter_sum(shard, self.gradients, self.group)
            shard.div_(self.ranks)
            norm = total_norm(shard[: self.counted].split(SLICE), self.groups, shard.device)
            self.shard.grad = shard.mul_(shortened(norm)).to(self.shard.dtype)
            self.adam.step()
            self.shard.grad = None
            self.weights[self.mine].copy_(self.shard)
            gather_all(self.weights, self.weights[self.mine], self.group)
        return norm

    def zero_grad(self) -> None:
        """The gradients stay where they are, and become zero."""
        self.gradients.zero_()


def _parts(pairs: Iterable[OverlappedPasses]) -> list[list[OverlappedPasses]]:
    """Pairs in their order, in parts that are no larger than the largest parameter: gradients are converted a part at a
    time, so that the copies take no more memory than they must."""
    found: list[list[OverlappedPasses]] = [[]]
    pairs, held = list(pairs), 0
    limit = max(param.numel() for param, _ in pairs)
    for pair in pairs:
        held += pair[0].numel()
        if held > limit:
            found.append([])
            held = pair[0].numel()
        found[-1].append(pair)
    return found


def adamw(params: list[nn.Parameter]) -> torch.optim.AdamW:
    """The fused one: the others keep a copy of what they update for the length of a step."""
    return torch.optim.AdamW(params, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)


def keep_gradient(param: nn.Parameter, dtype: torch.dtype, place: Tensor | None = None) -> None:
    """Gives a parameter the gradient tensor that autograd adds to, in `place` where that is given.

    One of another format than the weight's is its `main_grad`, to which each new gradient is added and then dropped.
    """
    kept = torch.zeros_like(param, dtype=dtype) if place is None else place
    if param.dtype == dtype:
        param.grad = kept
        return
    param.main_grad = kept  # type: ignore[attr-defined]

    def add(one: Tensor) -> None:
        if one.grad is None:  # its backward pass has left it for later
            return
        gradient(one).add_(one.grad)
        one.grad = None

    param.register_post_accumulate_grad_hook(add)


def gradient(param: Tensor) -> Tensor:
    """The tensor in which the gradient of a parameter is summed up."""
    found = getattr(param, "main_grad", param.grad)
    assert found is not None
    return found


def total_norm(gradients: Sequence[Tensor], groups: Sequence[Any], device: torch.device) -> Tensor:
    """The norm of the gradients of all ranks in the groups."""
    squares = torch.zeros((), device=device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32)).square().sum()
    for group in groups:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def shortened(norm: Tensor) -> Tensor:
    """What gradients of this norm are multiplied with."""
    return (LIMIT / (norm + 1e-6)).clamp(max=1.0)


def _local(one: Tensor) -> Tensor:
    """The shard of this rank, where FSDP cuts the tensor."""
    return one.to_local() if hasattr(one, "to_local") else one  # type: ignore[no-any-return]
