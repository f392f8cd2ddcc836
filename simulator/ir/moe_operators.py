"""The leaves of experts: what routes tokens to them, and what they do with these.

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
"""The view of the mesh that leaves of experts lie in."""


@dataclass(frozen=True, eq=False)
class ExpertCast(Cast):
    """The same of tokens at their experts."""

    view = EXPERTS


@dataclass(frozen=True, eq=False)
class TopK(Operator):
    """From a router's logits to the experts of a token and their weights."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("router", 2 * at.bytes(*self.ins), at.bytes(*self.ins, *self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("router", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins))]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Permute(Operator):
    """A copy of every token for each of its experts, in the order of the experts."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.outs), at.bytes(*self.ins))]


@dataclass(frozen=True, eq=False)
class Unpermute(Operator):
    """The results of a token's experts added up. ins: the results, and the weights of `TopK` that they bear."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("permute", at.bytes(*self.outs), at.bytes(*self.ins))]


@dataclass(frozen=True, eq=False)
class ExpertLinear(Linear):
    """A linear of every expert over the tokens routed to it, all of one rank in one grouped GEMM.

    Tokens are spread evenly. sorts: ``ins`` that come from several ranks, or ``outs`` that go there, are put in another
    order where a rank has several experts: by expert, then by rank.
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

    def _sorted(self, at: LocalShapes) -> list[Work]:
        if not self.sorts or not at.axes_of("e") or at.dims(self.weights[0])["e"] == 1:
            return []
        nbytes = at.bytes(*(self.ins if self.sorts == "ins" else self.outs))
        return [Memory("permute", nbytes, nbytes)]

    def forward(self, at: LocalShapes) -> list[Work]:
        first, sort = super().forward(at), self._sorted(at)
        return [*first, *sort] if self.sorts == "outs" else [*sort, *first]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        first, sort = super().backward_inputs(at), self._sorted(at)
        return [*sort, *first] if self.sorts == "outs" else [*first, *sort]


@dataclass(frozen=True, eq=False)
class ExpertActivation(Activation):
    """The activation between two linears of an expert, with the token's weight in the same kernel."""

    view = EXPERTS
