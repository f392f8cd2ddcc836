"""Experts: a router, the tokens' copies on their way to the experts and back, and the experts' products.

All experts lie on each rank, cut over the tensor group as an MLP is. Routing is forced to be even, so that all experts
have equally many tokens: choice j of the token at position i is expert (i k + j) mod E. The router's probabilities
still weigh what the experts give, and have gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from simulator.models.model import Model
from validation.reference import functions
from validation.reference.layers import Cut, parameter
from validation.reference.parallel import TensorGroup


class Experts(nn.Module):
    """Gated experts in place of an MLP. up [E, 2 f/tp, h] holds gate and up of each, down is [E, h, f/tp].

    Tokens go to the experts behind the cut along the positions, as copies: those are gathered.
    """

    def __init__(self, model: Model, tensor: TensorGroup) -> None:
        super().__init__()
        moe = model.moe
        assert moe is not None
        self.tensor, self.experts, self.top_k = tensor, moe.experts, moe.top_k
        e, f, h = moe.experts, moe.expert_ffn, model.hidden
        self.router = parameter(Cut(tensor), e, h)
        self.up = parameter(Cut(tensor, 1, (f, f)), e, 2 * f, h)
        self.down = parameter(Cut(tensor, 2, (f,)), e, h, f)

    def forward(self, x: Tensor) -> Tensor:
        share = self.shares(F.linear(x, self.router))
        sent = self.tensor.enter(self.permute(x))
        inner = self.activation(self.product(sent, self.up), self.tensor.enter(share))
        return self.unpermute(self.tensor.leave(self.product(inner, self.down)), x)

    def shares(self, logits: Tensor) -> Tensor:
        """From the router's logits [b, s, E] to the weights of the experts' results: [E, tokens k / E, 1]."""
        probabilities = logits.float().softmax(-1).flatten(0, 1)
        places = torch.arange(len(probabilities) * self.top_k, device=logits.device).view(-1, self.top_k)
        chosen = probabilities.gather(1, places % self.experts)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen.view(-1, self.experts).t().unsqueeze(-1).to(logits.dtype)

    def permute(self, x: Tensor) -> Tensor:
        """A copy of each token for each of its experts: [b, s, h] to [E, tokens k / E, h]."""
        copies = _Permute.apply(x.flatten(0, 1), self.experts, self.top_k)
        return copies.unflatten(0, (self.experts, -1))  # type: ignore[no-any-return]

    def unpermute(self, y: Tensor, x: Tensor) -> Tensor:
        """The sum of the results of each token's experts, in the order and shape of the tokens `x`."""
        return _Unpermute.apply(y.flatten(0, 1), self.experts, self.top_k).view_as(x)  # type: ignore[no-any-return]

    def activation(self, x: Tensor, share: Tensor) -> Tensor:
        """SwiGLU, weighed."""
        return functions.swiglu(x, share)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """One product an expert, [E, n, in] by [E, out, in]: a grouped GEMM where CUDA has one, else a batched one."""
        aligned = x.shape[-1] % 8 == 0 and weight.shape[1] % 8 == 0
        if x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm"):
            n = x.shape[1]
            ends = torch.arange(n, n * len(x) + 1, n, dtype=torch.int32, device=x.device)
            return F.grouped_mm(x.flatten(0, 1), weight.transpose(1, 2), offs=ends).unflatten(0, (-1, n))
        return torch.bmm(x, weight.transpose(1, 2))


def _numbers(tokens: int, experts: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The token of every copy, in the order of the experts; and the copies of every token: [tokens k], [tokens, k]."""
    places = torch.arange(tokens * top_k, device=device)
    by_expert = places.view(-1, experts).t()
    copies = places.view(experts, -1).t()
    return (by_expert // top_k).flatten(), copies.reshape(tokens, top_k)


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: int, top_k: int) -> Any:
        ctx.sizes = experts, top_k
        token, _ = _numbers(len(x), experts, top_k, x.device)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        experts, top_k = ctx.sizes
        _, copies = _numbers(len(grad) // top_k, experts, top_k, grad.device)
        return F.embedding_bag(copies, grad.contiguous(), mode="sum"), None, None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, experts: int, top_k: int) -> Any:
        ctx.sizes = experts, top_k
        _, copies = _numbers(len(y) // top_k, experts, top_k, y.device)
        return F.embedding_bag(copies, y, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        experts, top_k = ctx.sizes
        token, _ = _numbers(len(grad), experts, top_k, grad.device)
        return grad.index_select(0, token), None, None
