"""Operators of attention whose scores have a bias by distance (Inkling)."""

from __future__ import annotations

import math

from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes
from meshcast.simulator.ir.operators import CoreAttention, Linear
from meshcast.simulator.ir.ops import Memory, Work


class DistanceBias(Linear):
    """A bias [b, s, a] of every query, head and distance, from states [b, s, a] of every head: each is multiplied with
    the profiles weights[0] [r, n], that are a number for each distance and element of a state."""

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        profiles = at.dims(self.weights[0])
        rows = math.prod(at.dims(self.ins[0]).values()) // profiles["r"]
        return rows, profiles["n"], profiles["r"], 1


class BiasedAttention(CoreAttention):
    """Attention whose scores have a bias, of ins[3], for each query and distance. A fused kernel adds it to the scores
    that it computes, and its bytes move beside those of queries and keys."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [*super().forward(at), Memory("add", at.bytes(self.ins[3]), 0)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        nbytes = at.bytes(self.ins[3])
        return [*super().backward_inputs(at), Memory("add", nbytes, nbytes, backward=True)]

    @property
    def read_by_later_slices(self) -> tuple[Tensor, ...]:
        return self.ins[1:3] if self.tokens_after else ()
