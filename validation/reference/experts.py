"""Mixture of experts: router, permute, grouped GEMMs, unpermute.

Every rank holds all experts, each sharded over the tensor-parallel ranks like an MLP; or, with expert parallelism, P
ranks hold E/P whole experts each, and all-to-alls dispatch the tokens and combine the results. Routing is forced to be
balanced: choice j of the token at position i is expert (i k + j) mod E. The router's probabilities still weigh the
experts' outputs and receive gradients; they are sent to the experts in an all-to-all of a number for each copy of a
token, which the forecast does not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from meshcast.simulator.models.model import Model
from meshcast.validation.reference import functions
from meshcast.validation.reference.sharded_parameter import ParameterSharding, sharded_parameter
from meshcast.validation.reference.tensor_parallel import AxisGroup, TensorGroup


class Experts(nn.Module):
    """Gated experts in place of an MLP. up [E/P, 2 f/tp, h] holds gate and up of each, down is [E/P, h, f/tp].

    With sequence parallelism a rank permutes its positions, and the permuted tokens are all-gathered.
    """

    def __init__(self, model: Model, tensor: TensorGroup, expert: AxisGroup) -> None:
        super().__init__()
        moe = model.moe
        assert moe is not None
        self.tensor, self.expert, self.experts, self.top_k = tensor, expert, moe.experts, moe.top_k
        e, f, h = moe.experts, moe.expert_ffn, model.hidden
        self.router = sharded_parameter(ParameterSharding(tensor), e, h)
        self.up = sharded_parameter(ParameterSharding(tensor, 1, (f, f), expert=expert), e, 2 * f, h)
        self.down = sharded_parameter(ParameterSharding(tensor, 2, (f,), expert=expert), e, h, f)

    def forward(self, x: Tensor) -> Tensor:
        share = self.combine_weights(F.linear(x, self.router))
        arrived = self.dispatch(self.tensor.enter_region(self.permute(x)))
        inner = self.activation(self.expert_gemm(arrived, self.up), self.dispatch(self.tensor.enter_region(share)))
        back = self.combine(self.expert_gemm(inner, self.down))
        return self.unpermute(self.tensor.leave_region(back), x)

    def dispatch(self, sent: Tensor) -> Tensor:
        """Sends each expert's n tokens to the rank that holds it: [E, n, ...] to [E/P, P n, ...]."""
        if self.expert.size == 1:
            return sent
        return self.expert.all_to_all(sent.unflatten(0, (self.expert.size, -1))).transpose(0, 1).flatten(1, 2)

    def combine(self, y: Tensor) -> Tensor:
        """Sends results back to the ranks of their tokens: [E/P, P n, ...] to [E, n, ...]."""
        if self.expert.size == 1:
            return y
        return self.expert.all_to_all(y.unflatten(1, (self.expert.size, -1)).transpose(0, 1)).flatten(0, 1)

    def combine_weights(self, logits: Tensor) -> Tensor:
        """Factors of the experts' outputs [E, tokens k / E, 1], from the router's logits [b, s, E]."""
        probabilities = logits.float().softmax(-1).flatten(0, 1)
        places = torch.arange(len(probabilities) * self.top_k, device=logits.device).view(-1, self.top_k)
        chosen = probabilities.gather(1, places % self.experts)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen.view(-1, self.experts).t().unsqueeze(-1).to(logits.dtype)

    def permute(self, x: Tensor) -> Tensor:
        """Copies each token to its experts: [b, s, h] to [E, tokens k / E, h]."""
        copies = _Permute.apply(x.flatten(0, 1), self.experts, self.top_k)
        return copies.unflatten(0, (self.experts, -1))  # type: ignore[no-any-return]

    def unpermute(self, y: Tensor, x: Tensor) -> Tensor:
        """Sums the outputs of each token's experts, in the order and shape of the tokens `x`."""
        return _Unpermute.apply(y.flatten(0, 1), self.experts, self.top_k).view_as(x)  # type: ignore[no-any-return]

    def activation(self, x: Tensor, share: Tensor) -> Tensor:
        """Computes SwiGLU times the combine weight."""
        return functions.swiglu(x, share)

    def expert_gemm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Computes a GEMM per expert, [E, n, in] by [E, out, in]: grouped where CUDA supports it, otherwise batched."""
        aligned = x.shape[-1] % 8 == 0 and weight.shape[1] % 8 == 0
        if x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm"):
            n = x.shape[1]
            ends = torch.arange(n, n * len(x) + 1, n, dtype=torch.int32, device=x.device)
            return F.grouped_mm(x.flatten(0, 1), weight.transpose(1, 2), offs=ends).unflatten(0, (-1, n))
        return torch.bmm(x, weight.transpose(1, 2))


def _permutation(tokens: int, experts: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the token of each copy in expert order [tokens k], and the k copies of each token [tokens, k]."""
    places = torch.arange(tokens * top_k, device=device)
    by_expert = places.view(-1, experts).t()
    copies = places.view(experts, -1).t()
    return (by_expert // top_k).flatten(), copies.reshape(tokens, top_k)


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: int, top_k: int) -> Any:
        ctx.sizes = experts, top_k
        token, _ = _permutation(len(x), experts, top_k, x.device)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        experts, top_k = ctx.sizes
        _, copies = _permutation(len(grad) // top_k, experts, top_k, grad.device)
        return F.embedding_bag(copies, grad.contiguous(), mode="sum"), None, None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, experts: int, top_k: int) -> Any:
        ctx.sizes = experts, top_k
        _, copies = _permutation(len(y) // top_k, experts, top_k, y.device)
        return F.embedding_bag(copies, y, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        experts, top_k = ctx.sizes
        token, _ = _permutation(len(grad), experts, top_k, grad.device)
        return grad.index_select(0, token), None, None
