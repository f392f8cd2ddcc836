"""The operators of a mixture of experts: router top-k, permutation of tokens, and the layers of the experts.

Dims as in `simulator.ir.operators`, experts ``e``.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Module, Operator
from meshcast.simulator.ir.operators import Activation, Cast, Elementwise, Linear, PromotedSum, SavedCast, Sum
from meshcast.simulator.ir.ops import BYTES, Gemm, Memory, Work

EXPERTS = "experts"
"""The view of the mesh that shards the operators of experts."""


class ExpertCast(Cast):
    """A cast of tokens on the ranks of their experts."""

    view = EXPERTS


class ExpertSavedCast(SavedCast):
    """Converts activations of experts to 8 bits to save them."""

    view = EXPERTS


class TopK(Operator):
    """Top-k of the router's logits: the experts of each token and their weights."""

    undivided = ("k",)

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("router", 2 * at.bytes(*self.ins), at.bytes(*self.ins, *self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("router", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class Permute(Operator):
    """Copies every token once for each of its experts, in the order of the experts."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.outs), at.bytes(*self.ins))]


class Unpermute(Operator):
    """Adds up the results of each token's experts, weighted by `TopK`. ins: the results, and the weights."""

    sums = True

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.outs), at.bytes(*self.ins))]


class WeightedSum(Operator):
    """Adds the results of routed and of shared experts, weighted by the softmax of two numbers of each token; or weighs
    the result of shared experts by the sigmoid of a single number.

    ins: the results, and the numbers.
    """

    undivided = ("k",)

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", at.bytes(*self.outs, *self.ins), at.bytes(*self.ins))]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class ExpertPermute(Permute):
    """Copies every token once for each of its experts on this rank; the ranks of the experts hold all tokens."""

    view = EXPERTS


class ExpertUnpermute(Unpermute):
    """Adds up the results of each token's experts on this rank: a partial sum over the ranks of the experts."""

    view = EXPERTS


@dataclass(frozen=True, eq=False)
class ExpertLinear(Linear):
    """A linear layer of every expert over the tokens routed to it: a grouped GEMM over the experts of a rank.

    Every expert has as many tokens.

    sorts: which tensors (``ins``, ``outs``) a rank with several experts permutes from the order of the source ranks to
        the order of the experts, or back; empty: none.
    adds_bias: separate kernels add its bias to the results; otherwise the grouped GEMM does.
    one_kernel: the groups are in a single kernel, which casts the gradients that the activation's derivative makes.
    """

    sorts: str = ""
    adds_bias: bool = False
    one_kernel: bool = False
    view = EXPERTS

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        tokens, columns, inner, _ = super()._sizes(at)
        experts = at.dims(self.weights[0])["e"]
        return math.ceil(tokens / experts), columns, inner, experts

    def _groups(self, at: LocalShapes) -> tuple[tuple[int, int], ...]:
        tokens, _, _, experts = self._sizes(at)
        return ((experts, tokens),)

    def _product(self, at: LocalShapes, m: int, n: int, k: int, layout: str, **how: Any) -> Gemm:
        return replace(super()._product(at, m, n, k, layout, **how), one_kernel=self.one_kernel)

    def _permute(self, at: LocalShapes) -> list[Work]:
        if not self.sorts or not at.axes_of("e") or at.dims(self.weights[0])["e"] == 1:
            return []
        nbytes = at.bytes(*(self.ins if self.sorts == "ins" else self.outs))
        return [Memory("permute", nbytes, nbytes)]

    def _add_bias(self, at: LocalShapes, backward: bool = False) -> list[Work]:
        nbytes = at.bytes(*self.outs)
        return [Memory("expert-bias", nbytes, nbytes, backward)] if self.adds_bias else []

    def forward(self, at: LocalShapes) -> list[Work]:
        first, sort = [*super().forward(at), *self._add_bias(at)], self._permute(at)
        return [*first, *sort] if self.sorts == "outs" else [*sort, *first]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        first, sort = [*self._add_bias(at, backward=True), *super().backward_inputs(at)], self._permute(at)
        if self.one_kernel and self.sorts == "ins":
            first = [work for work in first if not isinstance(work, Memory)]
        return [*sort, *first] if self.sorts == "outs" else [*first, *sort]


class FusedExpertLinear(ExpertLinear):
    """A linear layer of every expert whose grouped GEMM permutes: a side of it holds tokens once each, the other a
    copy of a token for each of its experts.

    `sorts` names the side with tokens. ``ins``: the GEMM reads rows of tokens through an index; their gradient is the
    sum over the copies. ``outs``: the results of the copies are added up, weighted by the router (the second input).
    """

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        tokens, copies = at.dims(self._tokens), at.dims(self._copies)
        rows, experts = math.prod(copies[dim] for dim in "bse"), at.dims(self.weights[0])["e"]
        width = len(self.outs) * copies["f"] if self.sorts == "ins" else copies["f"]
        columns, inner = (width, tokens["h"]) if self.sorts == "ins" else (tokens["h"], width)
        return math.ceil(rows / experts), columns, inner, experts

    @property
    def _tokens(self) -> Tensor:
        return self.ins[0] if self.sorts == "ins" else self.outs[0]

    @property
    def _copies(self) -> Tensor:
        return self.outs[0] if self.sorts == "ins" else self.ins[0]

    def _unsummed_bytes(self, at: LocalShapes) -> int:
        """Bytes of the results of all copies, or of the gradients of all copies."""
        rows, columns, inner, experts = self._sizes(at)
        width = inner if self.sorts == "ins" else columns
        return int(rows * experts * width * BYTES[self._tokens.gradient.dtype])

    def _add_copies(self, at: LocalShapes) -> Memory:
        return Memory("permute", self._unsummed_bytes(at), at.bytes(self._tokens.gradient))

    def forward(self, at: LocalShapes) -> list[Work]:
        product = Linear.forward(self, at)
        return [*product, self._add_copies(at)] if self.sorts == "outs" else product

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        product = Linear.backward_inputs(self, at)
        return [*product, self._add_copies(at)] if self.sorts == "ins" else product

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        if backward != (self.sorts == "ins"):
            return []
        last = len(self.backward_inputs(at) if backward else self.forward(at)) - 1
        return [(last - 1, last, self._unsummed_bytes(at))]

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins[:1]


class ScatteringLinear(FusedExpertLinear):
    """The same with kernels whose backward pass reads grouped operands: rows of tokens, or of their gradients, are
    copied in the order of the experts for it. The results of the copies are kept, for the gradient of the weights of
    `TopK`, and their buffer holds the gradients then.
    """

    reuses_saved = True

    def _group(self, at: LocalShapes, also_read: int = 0) -> Memory:
        tokens, copies = at.bytes(self._tokens.gradient), self._unsummed_bytes(at)
        return Memory("permute", tokens + also_read, copies)

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        if self.sorts == "ins":
            return super().backward_inputs(at)
        return [self._group(at, also_read=self._unsummed_bytes(at)), *super().backward_inputs(at)]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        product = super().backward_weights(at)
        return [self._group(at), *product] if self.sorts == "ins" else product

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("copies", self._unsummed_bytes(at), "workspace")] if self.sorts == "outs" else []

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        if backward != (self.sorts == "ins"):
            return []
        # Gradients of the copies, and then the copies of the tokens for the gradient of the weights.
        return [(0, 2 if backward else 0, self._unsummed_bytes(at))]


class ArrivalOrderLinear(ExpertLinear):
    """A linear layer of experts whose GEMM reads or writes rows in the order of the source ranks; for its backward pass
    they are copied in the order of the experts.
    """

    def forward(self, at: LocalShapes) -> list[Work]:
        return Linear.forward(self, at)

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        product = Linear.backward_inputs(self, at)
        return [*self._permute(at), *product] if self.sorts == "outs" else product

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        product = super().backward_weights(at)
        return [*self._permute(at), *product] if self.sorts == "ins" else product


class ExpertActivation(Activation):
    """The activation between the two linear layers of an expert, with the router weight in the same kernel."""

    view = EXPERTS

    @property
    def _what(self) -> str:
        what = super()._what
        return "expert-activation" if what == "activation" else what


class ClampedExpertActivation(ExpertActivation):
    """The same by a kernel that does not clamp: others clamp its inputs before, in a copy that is saved beside them."""

    @property
    def _what(self) -> str:
        return "clamped-activation"

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("clamped", at.bytes(*self.ins), "activations")]


class KernelsActivation(ExpertActivation):
    """The same inside the kernels of the grouped GEMMs, which also cast its results."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory(self._what, 0, 0)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory(self._what, 0, 0, backward=True)]


class KernelsCast(ExpertCast):
    """A cast by the kernel that makes its input."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("cast", 0, 0)]


class RoutedLinear(Linear):
    """A linear layer of all experts of a rank together, over their tokens."""

    view = EXPERTS


class RoutedElementwise(Elementwise):
    """A kernel over the tokens of a rank's experts."""

    view = EXPERTS


class RoutedSum(Sum):
    """A sum of results of experts."""

    view = EXPERTS


class RoutedPromotedSum(PromotedSum):
    """A sum of results of experts in the wider of their number formats."""

    view = EXPERTS


ROUTED: dict[type[Module], type[Operator]] = {
    **{Linear: RoutedLinear, Elementwise: RoutedElementwise, Sum: RoutedSum, PromotedSum: RoutedPromotedSum},
}
"""Operators on the ranks of experts, in place of those of all ranks."""


def move_to_experts(module: Module) -> Module:
    """Returns an operator as it runs on the ranks of experts."""
    kind = ROUTED.get(type(module))
    return module if kind is None else kind(**{field.name: getattr(module, field.name) for field in fields(module)})
