"""The fixed set of kernels that are measured to calibrate a device (``meshcast calibrate``).

Sizes lie between those of models, so that no kernel of a model itself is fitted: GEMMs with odd multiples of 64,
sequence lengths that no preset has. Memory-bound kernels are those of the reference trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from meshcast.simulator.ir.ops import BYTES, Attention, Gemm, Memory, Work
from meshcast.simulator.job.framework import load_framework
from meshcast.validation.measurements.device import Device
from meshcast.validation.reference import functions
from meshcast.validation.reference.optimizer import clip_factor, global_norm
from meshcast.validation.reference.tensor_parallel import TensorGroup

Run = Callable[[], Any]


class KernelCase(NamedTuple):
    """A kernel: its work, and a function that allocates the operands and returns a function that runs the kernel."""

    work: Work
    make: Callable[[], Run]


class Sizes(NamedTuple):
    """Sizes of the set.

    Attributes:
        rows: tokens of GEMMs.
        weights: (n, k) of GEMMs.
        heads: (samples, positions, heads, key heads, width) of attention.
        streams: (rows, columns) of memory-bound kernels.
        logits: (tokens, columns) of the loss.
    """

    rows: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, int, int, int, int], ...]
    streams: tuple[tuple[int, int], ...]
    logits: tuple[tuple[int, int], ...]


SIZES = {
    "cpu": Sizes(
        (96, 320, 640),
        ((192, 320), (320, 192), (448, 320), (320, 896), (960, 320), (640, 640), (1920, 640), (640, 1728), (5120, 320)),
        ((1, 192, 4, 4, 64), (1, 320, 5, 5, 64), (2, 320, 4, 2, 64), (1, 640, 5, 5, 64), (1, 640, 3, 3, 128)),
        ((96, 320), (320, 320), (320, 896), (640, 640), (640, 1728), (1280, 1728), (2560, 2560)),
        ((96, 2560), (320, 5120), (640, 10240)),
    ),
    "cuda": Sizes(
        (320, 1344, 2880, 5440, 12096),
        ((960, 2880), (2880, 960), (2880, 2880), (8640, 2880), (2880, 7744), (5440, 5440), (16320, 5440)),
        (
            *((1, 1344, 20, 20, 128), (1, 2880, 20, 4, 128), (2, 5440, 10, 2, 128), (1, 8000, 8, 8, 128)),
            *((1, 6720, 20, 5, 64), (3, 1984, 20, 20, 64)),
        ),
        ((320, 2880), (1344, 2880), (2880, 2880), (5440, 5440), (12096, 5440), (12096, 16320)),
        ((1344, 16320), (2880, 40320)),
    ),
}  # fmt: skip
"""By kind of device."""


def make_cases(device: Device, dtype: str) -> Iterator[KernelCase]:
    """Yields all kernels of the set in `dtype`."""
    sizes = SIZES[device.kind]
    of = _KernelMaker(device, dtype)
    for m, (n, k) in product(sizes.rows, sizes.weights):
        yield from of.gemms(m, n, k)
    for shape in sizes.heads:
        yield from of.attention(*shape)
    for rows, columns in sizes.streams:
        yield from of.streams(rows, columns)
    for rows, columns in sizes.logits:
        yield from of.loss(rows, columns)


class _KernelMaker:
    def __init__(self, device: Device, dtype: str) -> None:
        self.device, self.dtype = device, dtype

    def _new(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, dtype=self.device.dtype(self.dtype), device=self.device.torch, requires_grad=grad)

    def gemms(self, m: int, n: int, k: int) -> Iterator[KernelCase]:
        """Yields the forward GEMM of a linear and the GEMMs of its input and weight gradients."""

        def forward() -> Run:
            x, weight = self._new(m, k), self._new(n, k)
            return lambda: F.linear(x, weight)

        def of_input() -> Run:
            grad, weight = self._new(m, n), self._new(n, k)
            return lambda: grad @ weight

        def of_weight() -> Run:
            grad, x = self._new(m, n), self._new(m, k)
            return lambda: grad.t() @ x

        yield KernelCase(Gemm(m, n, k, 1, self.dtype, "tn", out_dtype=self.dtype), forward)
        yield KernelCase(Gemm(m, k, n, 1, self.dtype, "nn", out_dtype=self.dtype), of_input)
        yield KernelCase(Gemm(n, k, m, 1, self.dtype, "nt", out_dtype=self.dtype), of_weight)

    def attention(self, b: int, s: int, heads: int, keys: int, width: int) -> Iterator[KernelCase]:
        """Yields causal attention, forward and backward."""

        def inputs(grad: bool) -> list[torch.Tensor]:
            return [self._new(b, s, n, width).transpose(1, 2).requires_grad_(grad) for n in (heads, keys, keys)]

        def forward() -> Run:
            q, k, v = inputs(False)
            return lambda: functions.attention(q, k, v)

        ahead, back = (Attention(b, s, s, heads, keys, width, width, 0.5, way, self.dtype) for way in (False, True))
        yield KernelCase(ahead, forward)
        yield KernelCase(back, lambda: _backward(functions.attention, inputs(True)))

    def streams(self, rows: int, columns: int) -> Iterator[KernelCase]:
        """Yields memory-bound kernels: norms, activations, rope, additions, gathers and the optimizer."""
        size = rows * columns * BYTES[self.dtype]

        def of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[bool], Callable[[], Run]]:
            def measured_pass(backward: bool) -> Callable[[], Run]:
                def make() -> Run:
                    inputs = [self._new(*shape, grad=backward) for shape in shapes]
                    return _backward(function, inputs) if backward else lambda: function(*inputs)

                return make

            return measured_pass

        rms = of(lambda x, w: functions.rms_norm(x, w, 1e-5), (1, rows, columns), (columns,))
        yield KernelCase(Memory("rms-norm", size, size), rms(False))
        yield KernelCase(Memory("rms-norm", 2 * size, size, True), rms(True))
        layer = of(lambda x, w, b: F.layer_norm(x, (columns,), w, b), (1, rows, columns), (columns,), (columns,))
        yield KernelCase(Memory("norm", size, size), layer(False))
        yield KernelCase(Memory("norm", 2 * size, size, True), layer(True))
        gated = of(functions.swiglu, (1, rows, 2 * columns))
        yield KernelCase(Memory("activation", 2 * size, size), gated(False))
        yield KernelCase(Memory("activation", 3 * size, 2 * size, True), gated(True))
        gelu = of(lambda x: F.gelu(x, approximate="tanh"), (1, rows, columns))
        yield KernelCase(Memory("gelu", size, size), gelu(False))
        yield KernelCase(Memory("gelu", 2 * size, size, True), gelu(True))
        shape = rows, columns
        yield KernelCase(Memory("residual", 2 * size, size), of(lambda x, y: x + y, shape, shape)(False))
        yield KernelCase(Memory("zero-grad", 0, size), of(lambda x: x.zero_(), shape)(False))
        yield KernelCase(Memory("add", 2 * size, size), of(lambda x, y: x.add_(y), shape, shape)(False))
        yield from self._rope(rows, columns)
        yield KernelCase(Memory("embedding", size, size), self._rows(rows, columns))
        norm = _clip if self.device.cuda else torch.linalg.vector_norm
        yield KernelCase(Memory("grad-norm", size, 0), of(norm, shape)(False))
        if self.device.cuda:
            yield KernelCase(Memory("bias-gradient", size, 0), of(lambda x: x.sum(0), shape)(False))
            yield KernelCase(Memory("convert", 6 * rows * columns, 6 * rows * columns), self._convert(rows, columns))
        yield self._adam(rows, columns)

    def _convert(self, rows: int, columns: int) -> Callable[[], Run]:
        """Makes the conversions of an update: gradients to fp32, main weights to the format of the weights."""

        def make() -> Run:
            weight, main = self._new(rows, columns), torch.randn(rows, columns, device=self.device.torch)
            return lambda: (weight.to(torch.float32), weight.copy_(main))

        return make

    def _rope(self, rows: int, columns: int) -> Iterator[KernelCase]:
        """Yields rotary embeddings of queries and keys, which are split from a tensor that also has the values."""
        heads = columns // 64
        table = functions.rope_table(rows, 64, 1e4, self.device.torch)
        size = 2 * rows * heads * 64 * BYTES[self.dtype]

        def forward() -> Run:
            qkv = self._new(1, rows, 3 * heads * 64)
            return lambda: functions.split_heads(qkv, heads, heads, table)

        def backward() -> Run:
            qkv = self._new(1, rows, 3 * heads * 64, grad=True)
            parts = functions.split_heads(qkv, heads, heads, table)
            grads = [torch.randn_like(part) for part in parts]
            return lambda: torch.autograd.grad(parts, qkv, grads, retain_graph=True)

        yield KernelCase(Memory("rope", size, size), forward)
        yield KernelCase(Memory("rope", size, size, True), backward)

    def _rows(self, rows: int, columns: int) -> Callable[[], Run]:
        def make() -> Run:
            ids = torch.randint(0, 2 * rows, (1, rows), device=self.device.torch)
            table = self._new(2 * rows, columns)
            return lambda: functions.embedding(ids, table, 0)

        return make

    def _adam(self, rows: int, columns: int) -> KernelCase:
        """Makes a fused Adam step on fp32 weights: reads gradient, weight, two moments; writes all but the gradient."""
        size = rows * columns

        def make() -> Run:
            weight = torch.nn.Parameter(torch.randn(rows, columns, device=self.device.torch))
            weight.grad = torch.randn_like(weight)
            adam = torch.optim.AdamW([weight], lr=1e-4, fused=True)
            return adam.step

        return KernelCase(Memory("adam", 16 * size, 12 * size), make)

    def loss(self, tokens: int, columns: int) -> Iterator[KernelCase]:
        """Yields cross-entropy forward; its backward pass, which overwrites the logits, is not in the set."""

        def make() -> Run:
            targets, group = torch.randint(0, columns, (1, tokens), device=self.device.torch), TensorGroup()
            logits = self._new(1, tokens, columns, grad=True)
            return lambda: functions.cross_entropy(logits, targets, group)

        traffic = load_framework("reference").loss.forward
        yield KernelCase(Memory("cross-entropy", traffic * tokens * columns, 0), make)


def _clip(gradient: torch.Tensor) -> None:
    """Scales a gradient by what its norm allows, as the reference optimizer does."""
    torch._foreach_mul_([gradient], clip_factor(global_norm([gradient], (), gradient.device)))


def _backward(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Run:
    """Runs the backward pass alone."""
    out = function(*inputs)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
