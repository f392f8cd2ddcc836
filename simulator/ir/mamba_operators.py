"""The operators of Mamba blocks, over the dims of `simulator.ir.operators`; heads and groups are the dim ``a``."""

from __future__ import annotations

import math
from typing import ClassVar

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import CompositeModule, LocalShapes, Operator
from meshcast.simulator.ir.ops import BYTES, Memory, Work


class Mamba(CompositeModule):
    """A Mamba block."""

    label = "mamba"


@dataclass(frozen=True)
class ScanSizes:
    """Local elements of the tensors of a scan.

    values: of the values x, the gate z and the output.
    shared: of B, and of C.
    steps: step sizes dt, a size for each token and head.
    states: of the states at the ends of all chunks.
    scores: of C B^T within all chunks, a matrix for each group.
    """

    values: int
    shared: int
    steps: int
    states: int
    scores: int

    @property
    def convolved(self) -> int:
        """Elements that pass the convolution: x, B and C."""
        return self.values + 2 * self.shared


class Scan(Operator):
    """An operator that goes through sequences in order, heads side by side: ranks need whole sequences."""

    undivided = ("s",)


class TokenConvolution(Operator):
    """A causal convolution of each channel along the sequence, with an activation if there is any, in a kernel each way
    (``causal_conv1d_fn``): y = conv(x). Its input is saved. Where ranks hold parts of sequences, the few tokens that
    each needs of another are left out."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("conv", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("conv", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class Convolution(TokenConvolution, Scan):
    """The same in a block that has whole sequences on every rank."""


@dataclass(frozen=True, eq=False)
class SSDScan(Scan):
    """Causal convolution, chunked scan and gate of a Mamba-2 block, as ``mamba_split_conv1d_scan_combined`` of the
    package mamba_ssm computes them: y = scan(conv(x, B, C), dt) * silu(z), for ins z, x, B, C, dt.

    The scan is computed chunk by chunk, by five kernels: cumulative decays, states of the chunks, states passed from
    chunk to chunk, C B^T, and the output. The backward pass computes all but the output again. States and C B^T are in
    fp32, and states are rounded to the format of x before they are multiplied. The kernels are priced by their bytes,
    at the rate of `simulator.costs.kernels.memory.SCAN_RATE`: with some 6 x values x state FLOPs forward, their matrix
    products are too few to bound them. Inputs and the output before the gate are saved for the backward pass.

    Sources: Dao and Gu 2024, arXiv 2405.21060, section 6; state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py.

    chunk: tokens of a chunk.
    state: width of the state of each element of a head.
    """

    chunk: int = 128
    state: int = 128

    def sizes(self, at: LocalShapes) -> ScanSizes:
        """Returns the local sizes."""
        z, _, b, _, dt = self.ins
        values, shared, steps = at.size(z), at.size(b), at.size(dt)
        tokens = at.dims(z)["s"]
        chunks = math.ceil(tokens / self.chunk)
        states = values // tokens * chunks * self.state
        return ScanSizes(values, shared, steps, states, shared // self.state * min(self.chunk, tokens))

    def forward(self, at: LocalShapes) -> list[Work]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        outputs = 2 * n.values * e  # before and after the gate
        return [
            *self._convolve_and_prepare(n, e, 2 * n.states),
            Memory("scan", 4 * n.scores + e * (2 * n.values + n.shared) + 2 * n.states + 8 * n.steps, outputs),
        ]

    def _convolve_and_prepare(self, n: ScanSizes, e: int, passed: int) -> list[Work]:
        """Returns the work up to the output, which the backward pass repeats. passed: bytes of the states that are
        passed on."""
        return [
            Memory("conv", n.convolved * e, n.convolved * e),
            Memory("scan", n.steps * e, 8 * n.steps),  # decays
            Memory("scan", e * (n.values + n.shared) + 8 * n.steps, 4 * n.states),  # states of chunks
            Memory("scan", 4 * n.states, passed),
            Memory("scan", 2 * n.shared * e, 4 * n.scores),  # C B^T
        ]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        return [
            *self._convolve_and_prepare(n, e, 4 * n.states),
            Memory("scan", 3 * n.values * e, 2 * n.values * e, backward=True),  # dz, d out
            Memory("scan", e * (n.values + n.shared) + 4 * n.steps, 4 * n.states, backward=True),  # d states
            Memory("scan", 8 * n.states, 4 * n.states, backward=True),  # passed back; both are rounded
            Memory(  # dx, d dt
                "scan",
                e * (2 * n.values + n.shared) + 4 * n.scores + 2 * n.states + 8 * n.steps,
                n.values * e + 4 * n.steps,
                backward=True,
            ),
            Memory("scan", e * (n.values + n.shared) + 2 * n.states + 8 * n.steps, 4 * n.shared, backward=True),  # dB
            Memory("scan", e * (n.values + n.shared) + 2 * n.states + 4 * n.steps, 4 * n.shared, backward=True),  # dC
            Memory("scan", 2 * n.values * e + 8 * n.steps, 4 * n.scores, backward=True),  # d (C B^T)
            *(Memory("scan", 4 * n.scores + (4 + e) * n.shared, n.shared * e, backward=True) for _ in "BC"),
            Memory("scan", 2 * n.values * e + 4 * n.scores + 8 * n.steps, 4 * n.steps, backward=True),  # d decays
            Memory("scan", 12 * n.steps, n.steps * e, backward=True),
            Memory("conv", 2 * n.convolved * e, n.convolved * e, backward=True),
        ]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        n = self.sizes(at)
        return [("ungated", n.values * BYTES[self.ins[0].dtype], "workspace")]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        if not backward:
            return [(0, 5, n.convolved * e), (1, 5, 8 * n.steps), (2, 3, 4 * n.states), (3, 5, 2 * n.states)]
        gradients = [(5, 8, n.values * e), (8, 16, n.convolved * e)]
        states = [(2, 3, 4 * n.states), (3, 7, 4 * n.states), (6, 7, 4 * n.states), (7, 10, 4 * n.states)]
        return [(0, 16, n.convolved * e), (1, 15, 8 * n.steps), *states, (4, 14, 4 * n.scores), *gradients]


@dataclass(frozen=True, eq=False)
class SelectiveScan(Scan):
    """Scan and gate of a Mamba-1 block, as ``selective_scan_fn`` of the package mamba_ssm computes them: y =
    scan(x, dt, B, C) * silu(z), for ins x, z, dt, B, C.

    A kernel each way goes through sequences with the states of channels in registers, and writes them every `BLOCK`
    tokens. Backward it computes the states again. Inputs, the output before the gate and these states are saved. The
    fused ``mamba_inner_fn``, which computes the convolution and dt again backward, keeps less.

    Source: Gu and Dao 2023, arXiv 2312.00752, section 3.3; state-spaces/mamba, csrc/selective_scan.

    state: width of the state of each channel.
    """

    state: int = 16

    BLOCK: ClassVar[int] = 2048

    def _flops(self, at: LocalShapes) -> float:
        """Counts 7 FLOPs for each element of the state and token, see `simulator.models.flops`."""
        return 7.0 * at.size(self.ins[0]) * self.state

    def _states(self, at: LocalShapes) -> int:
        """Returns the bytes of the states that are written: a decay and a state in fp32."""
        x = self.ins[0]
        tokens = at.dims(x)["s"]
        return int(at.size(x) // tokens) * math.ceil(tokens / self.BLOCK) * self.state * 8

    def forward(self, at: LocalShapes) -> list[Work]:
        written = 2 * at.bytes(*self.outs) + self._states(at)
        return [Memory("selective-scan", at.bytes(*self.ins), written, flops=self._flops(at))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        read = at.bytes(*self.ins, *self.outs, *self.outs) + self._states(at)
        written = at.bytes(*self.ins[:3]) + 4 * at.size(*self.ins[3:])
        return [
            Memory("selective-scan", read, written, backward=True, flops=3 * self._flops(at)),
            Memory("convert", 4 * at.size(*self.ins[3:]), at.bytes(*self.ins[3:]), backward=True),
        ]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("ungated", at.bytes(*self.outs) + self._states(at), "workspace")]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        return [(0, 1, 4 * at.size(*self.ins[3:]))] if backward else []
