"""Operators of decoders that attend to the output of an encoder, the context."""

from __future__ import annotations

from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.operators import Boundary
from meshcast.simulator.ir.ops import Memory, Work


class KeepContext(Operator):
    """The end of an encoder: its output stays in memory until the backward pass of the decoder has its gradient.

    Its kernels have no bytes and take no time.
    """

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 0, 0)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 0, 0)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class ReadContext(Boundary):
    """A layer of a decoder reads the context; its gradient is added to that of the layers behind."""

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        nbytes = at.bytes(*self.ins)
        return [Memory("add", 2 * nbytes, nbytes)]


class HoldWeights(Boundary):
    """Holds a table that attention reads elsewhere: relative positions of a stack of layers (T5)."""
