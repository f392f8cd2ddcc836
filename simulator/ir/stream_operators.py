"""Operators of several residual streams of a token, the dim ``m``: hyper-connections.

In front of a block a linear layer over all streams makes coefficients, which collapse them to the input of the block;
behind it others mix the streams, and add the block's result to each. Kernels are fused as those of DeepSeek's training
(mHC, arXiv 2512.24880, section 4.3.1): each reads and writes the streams once, at the rate of residual additions, which
is not measured for them (`simulator.costs.kernels.memory.STREAMS_SIGMA`).
"""

from __future__ import annotations

import math

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.operators import Residual
from meshcast.simulator.ir.ops import Gemm, Memory, Work

KIND = "streams"
"""The kind of these kernels, see `Memory.what`."""


class RepeatStreams(Operator):
    """Copies of an embedding, one for each stream."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory(KIND, at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory(KIND, at.bytes(*self.outs), at.bytes(*self.ins), backward=True)]


@dataclass(frozen=True, eq=False)
class CollapseStreams(Operator):
    """The weighted sum outs[0] of the streams ins[0]; the weights, and the coefficients outs[1] behind the block if it
    has some, are sigmoids of products of all streams with the matrix weights[0] [m, h, j], behind the mean square of
    these. Sinkhorn iterations of a small matrix stay on the chip.

    grad_dtype: format of the gradient buffer to which the GEMM of the weight gradient adds its result.
    """

    grad_dtype: str = "fp32"

    def _product(self, at: LocalShapes, layout: str) -> Gemm:
        streams, sizes = at.dims(self.ins[0]), at.dims(self.weights[0])
        width, numbers = sizes["m"] * sizes["h"], sizes["j"]
        rows = math.prod(streams.values()) // width
        m, n, k = {"tn": (rows, numbers, width), "nn": (rows, width, numbers), "nt": (numbers, width, rows)}[layout]
        adds, dtype = layout != "tn", self.grad_dtype if layout == "nt" else self.ins[0].dtype
        return Gemm(m, n, k, 1, self.ins[0].dtype, layout, adds, dtype, what="linear")

    def forward(self, at: LocalShapes) -> list[Work]:
        return [self._product(at, "tn"), Memory(KIND, at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        read, written = at.bytes(*self.ins, *self.outs), at.bytes(*self.ins)
        return [Memory(KIND, read, written, backward=True), self._product(at, "nn")]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        return [self._product(at, "nt")]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("coefficients", self._numbers_bytes(at), "workspace")]

    def _numbers_bytes(self, at: LocalShapes) -> int:
        """Bytes of the numbers in fp32 from which coefficients are computed again, and of the mean square."""
        product = self._product(at, "tn")
        return 4 * int(product.m) * (product.n + 1)


@dataclass(frozen=True, eq=False)
class MixStreams(Operator):
    """outs[0] = the streams ins[0] mixed by a matrix of the coefficients ins[2], and the result of a block ins[1] times
    a coefficient of each stream.

    flops: of the products of a token with that matrix.
    """

    flops: float = 0.0

    def _kernel(self, at: LocalShapes, read: int, write: int, backward: bool) -> list[Work]:
        tokens = at.size(self.ins[1]) // int(at.dims(self.ins[1])["h"])
        return [Memory(KIND, read, write, backward, flops=(1 + backward) * tokens * self.flops)]

    def forward(self, at: LocalShapes) -> list[Work]:
        return self._kernel(at, at.bytes(*self.ins), at.bytes(*self.outs), backward=False)

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return self._kernel(at, at.bytes(*self.outs, *self.ins), at.bytes(*self.ins), backward=True)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class UpdateStreams(Operator):
    """All streams outs[0], and the first outs[1], from the streams ins[0] and, to correct them, the result of a layer
    ins[1], by few coefficients of a token: products of a tensor behind a norm, weights[0], with a router (AltUp).

    mixing: FLOPs of the products of a token with a matrix that mixes streams; 0: there is none.
    small: FLOPs of a token in its further products.
    """

    mixing: float = 0.0
    small: float = 0.0
    grad_dtype: str = "fp32"

    def _router(self, at: LocalShapes, layout: str) -> Gemm:
        sizes = at.dims(self.outs[1])
        width, numbers = sizes["h"], at.dims(self.ins[0])["m"]
        rows = at.size(self.outs[1]) // width
        m, n, k = {"tn": (rows, numbers, width), "nn": (rows, width, numbers), "nt": (numbers, width, rows)}[layout]
        dtype = self.grad_dtype if layout == "nt" else self.ins[0].dtype
        return Gemm(m, n, k, 1, self.ins[0].dtype, layout, layout != "tn", dtype, what="linear")

    def _kernels(self, at: LocalShapes, read: int, write: int, backward: bool) -> list[Work]:
        tokens, one = at.size(self.outs[1]) // int(at.dims(self.outs[1])["h"]), at.bytes(self.outs[1])
        flops = (1 + backward) * tokens * (self.mixing + self.small)
        norm = Memory("rms-norm", (1 + backward) * one, one, backward)
        return [norm, Memory(KIND, read, write, backward, flops=flops)]

    def forward(self, at: LocalShapes) -> list[Work]:
        norm, mix = self._kernels(at, at.bytes(*self.ins), at.bytes(self.outs[0]), backward=False)
        return [norm, self._router(at, "tn"), mix]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        read = at.bytes(self.outs[0], *self.ins)
        norm, mix = self._kernels(at, read, at.bytes(*self.ins), backward=True)
        return [mix, self._router(at, "nn"), norm]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        return [self._router(at, "nt")]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class SplitStreams(Operator):
    """The first stream, and all others, as views; their gradients are copied to one tensor."""

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory(KIND, at.bytes(*self.outs), at.bytes(*self.ins), backward=True)]


class AverageStreams(Operator):
    """The mean of the first stream and all others, each scaled to the length of the first."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory(KIND, at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory(KIND, at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class AttendToSums(Operator):
    """The sum outs[0] of what blocks of layers have added to the stream, ins[0] [m, h] in a row, by weights of a
    softmax: products of a query, weights[1], with these sums behind a norm, weights[0] (attention residuals)."""

    def _kernel(self, at: LocalShapes, read: int, write: int, backward: bool) -> list[Work]:
        return [Memory(KIND, read, write, backward, flops=(1 + backward) * 4.0 * at.size(*self.ins))]

    def forward(self, at: LocalShapes) -> list[Work]:
        return self._kernel(at, at.bytes(*self.ins), at.bytes(*self.outs), backward=False)

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return self._kernel(at, at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        """The weight of each sum, and its mean square, in fp32."""
        sums = at.dims(self.ins[0])
        return [("weights", 8 * at.size(*self.ins) // int(sums["h"]), "workspace")]


class AddToSum(Residual):
    """outs[0] = the sums ins[0] [m, h], to the last of which the result of a block ins[1] is added; where outs[0] has
    one more, the result begins it, and all are copied to stand in a row."""

    def _grows(self, at: LocalShapes) -> bool:
        return at.size(*self.outs) > at.size(self.ins[0])

    @property
    def pass_through(self) -> list[Tensor]:
        """The sums, whose gradient is the gradient of the output itself, or part of it."""
        return [self.ins[0]] if self.ins[0].sizes == self.outs[0].sizes else []

    def forward(self, at: LocalShapes) -> list[Work]:
        result = at.bytes(self.ins[1])
        moved = (at.bytes(*self.ins), at.bytes(*self.outs)) if self._grows(at) else (2 * result, result)
        return [Memory(KIND, *moved)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        """Where there is one more, gradients are views of that of all."""
        return []


class AddToStreams(Residual):
    """outs[0] = the streams ins[0], and the result of a block ins[1] times a coefficient, of ins[2], of each stream."""

    @property
    def pass_through(self) -> list[Tensor]:
        """The streams, whose gradient is the gradient of the output itself."""
        return [self.ins[0]]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        results = self.ins[1:]
        return [Memory(KIND, at.bytes(*self.outs, *results), at.bytes(*results), backward=True)]

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory(KIND, at.bytes(*self.ins), at.bytes(*self.outs))]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins[1:]
