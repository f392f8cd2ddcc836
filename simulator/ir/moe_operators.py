"""The operators of a mixture of experts: router top-k, permutation of tokens, and the layers of the experts.

Dims as in `simulator.ir.operators`, experts ``e``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.ir.layout import Tensor
from simulator.ir.modules import LocalShapes, Operator
from simulator.ir.operators import Activation, Cast, Linear
from simulator.ir.ops import Memory, Work

EXPERTS = "experts"
"""The view of the mesh that shards the operators of experts."""


@dataclass(frozen=True, eq=False)
class ExpertCast(Cast):
    """A cast of tokens on the ranks of their experts."""

    view = EXPERTS


@dataclass(frozen=True, eq=False)
class TopK(Operator):
    """Top-k of the router's logits: the experts of each token and their weights."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("router", 2 * at.bytes(*self.ins), at.bytes(*self.ins, *self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("router", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins))]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Permute(Operator):
    """Copies every token once for each of its experts, in the order of the experts."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.outs), at.bytes(*self.ins))]


@dataclass(frozen=True, eq=False)
class Unpermute(Operator):
    """Adds up the results of each token's experts, weighted by `TopK`. ins: the results, and the weights."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.outs), at.bytes(*self.ins))]


@dataclass(frozen=True, eq=False)
class ExpertLinear(Linear):
    """A linear layer of every expert over the tokens routed to it: one grouped GEMM over the experts of a rank.

    Every expert has as many tokens. sorts: which tensors (``ins``, ``outs``) a rank with several experts permutes from
        the order of the source ranks to the order of the experts, or back; empty: none.
    """

    sorts: str = ""
    view = EXPERTS

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        tokens, columns, inner, _ = super()._sizes(at)
        experts = at.dims(self.weights[0])["e"]
        return math.ceil(tokens / experts), columns, inner, experts

    def _groups(self, at: LocalShapes) -> tuple[tuple[int, int], ...]:
        tokens, _, _, experts = self._sizes(at)
        return ((experts, tokens),)

    def _permute(self, at: LocalShapes) -> list[Work]:
        if not self.sorts or not at.axes_of("e") or at.dims(self.weights[0])["e"] == 1:
            return []
        nbytes = at.bytes(*(self.ins if self.sorts == "ins" else self.outs))
        return [Memory("permute", nbytes, nbytes)]

    def forward(self, at: LocalShapes) -> list[Work]:
        first, sort = super().forward(at), self._permute(at)
        return [*first, *sort] if self.sorts == "outs" else [*sort, *first]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        first, sort = super().backward_inputs(at), self._permute(at)
        return [*sort, *first] if self.sorts == "outs" else [*first, *sort]


@dataclass(frozen=True, eq=False)
class ExpertActivation(Activation):
    """The activation between the two linear layers of an expert, with the router weight in the same kernel."""

    view = EXPERTS
