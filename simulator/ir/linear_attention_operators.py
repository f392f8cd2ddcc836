"""Operators of linear attention, whose state of each head has a fixed size; heads are the dim ``a``.

Kernels are priced by the bytes that each reads and writes, at the rate of Triton scans
(`simulator.costs.kernels.memory.SCAN_RATE`), and never faster than the matrix products that each computes at the peak
rate of the GPU. In what follows C are the tokens of a chunk, d_k and d_v the widths of a head of keys and of values.
"""

from __future__ import annotations

import math
from typing import ClassVar

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.mamba_operators import Scan
from meshcast.simulator.ir.modules import CompositeModule, LocalShapes, Operator
from meshcast.simulator.ir.operators import Linear, Norm
from meshcast.simulator.ir.ops import BYTES, Memory, Work


class LinearMixer(CompositeModule):
    """A block of linear attention."""

    label = "linear_attention"


class GatedNorm(Norm):
    """norm(x) * silu(z) in a kernel each way, for ins x and z (``FusedRMSNormGated`` of flash-linear-attention)."""

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        read, write = at.bytes(*self.ins, *self.outs), at.bytes(*self.ins)
        return [Memory(self._what, read, write, backward=True)]


@dataclass(frozen=True)
class DeltaSizes:
    """Local elements of the tensors of a rule with a state of each head.

    keys: of the queries, and of the keys, copied to the heads of values.
    projected: of the queries, and of the keys, before that.
    values: of the values, and of the output.
    steps: of beta: a number for each token and head.
    decays: of alpha: the same, or a number for each element of a key.
    states: of the states at the starts of all chunks.
    scores: of the products within all chunks: C numbers for each token and head.
    """

    keys: int
    projected: int
    values: int
    steps: int
    decays: int
    states: int
    scores: int

    @property
    def convolved(self) -> int:
        """Elements that pass the convolution: queries, keys and values."""
        return 2 * self.projected + self.values


@dataclass(frozen=True, eq=False)
class ChunkedState(Scan):
    """An operator over ins q, k, v, beta and alpha that goes through sequences chunk by chunk, with a state of each
    head.

    chunk: tokens of a chunk, C.
    key_dim, value_dim: d_k and d_v.
    """

    chunk: int = 64
    key_dim: int = 128
    value_dim: int = 128

    def sizes(self, at: LocalShapes) -> DeltaSizes:
        """Returns the local sizes."""
        q, _, v, beta, alpha = self.ins
        values, steps, tokens = at.size(v), at.size(beta), at.dims(v)["s"]
        chunks, length = math.ceil(tokens / self.chunk), min(self.chunk, tokens)
        states = steps // tokens * chunks * self.key_dim * self.value_dim
        return DeltaSizes(steps * self.key_dim, at.size(q), values, steps, at.size(alpha), states, steps * length)

    def _flops(self, n: DeltaSizes, within_keys: float, within_values: float, states: float) -> float:
        """Counts FLOPs of products within chunks over d_k and over d_v (2 C d of each token and head), and with states
        (2 d_k d_v)."""
        inside = within_keys * self.key_dim + within_values * self.value_dim
        return 2.0 * (n.scores * inside + n.steps * states * self.key_dim * self.value_dim)


@dataclass(frozen=True, eq=False)
class GatedDeltaRule(ChunkedState):
    """Causal convolution and chunked gated delta rule: o_t = S_t q_t, with the state
    S_t = S_(t-1) alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, for ins q, k, v, beta and alpha, which is a number
    for each head, or for each element of its keys (Kimi delta attention; ``chunk_kda`` has the same steps).

    The rule is computed chunk by chunk in its WY representation: W = T diag(beta) K and U = T diag(beta) V with T the
    inverse of a triangular matrix of K K^T, the states of the chunks in order, and the outputs. The kernels
    are those of ``chunk_gated_delta_rule`` of flash-linear-attention, with queries and keys copied to all heads of
    values and normalised to length 1 before. Saved for the backward pass are the inputs of the convolution, normalised
    queries and keys, values, alpha, beta and T; W, U and the states are computed again.

    Sources: Yang et al. 2024, arXiv 2412.06464, equation 10 and section 3.3; fla-org/flash-linear-attention 0.6.0,
    fla/ops/gated_delta_rule/chunk.py; ``Qwen3NextGatedDeltaNet`` of ``transformers``.
    """

    def _chunk_states(self, n: DeltaSizes, e: int) -> Memory:
        """Returns the kernel of the states of all chunks, and of U - W S."""
        read = e * (2 * n.keys + n.values) + 4 * n.decays
        return Memory("scan", read, e * (n.states + n.values), flops=self._flops(n, 0, 0, 2))

    def forward(self, at: LocalShapes) -> list[Work]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        copies = [Memory("concat", 2 * n.projected * e, 2 * n.keys * e)] if n.keys > n.projected else []
        inverse = n.scores * self.chunk / 3  # forward substitution: C^3 / 3 of each chunk and head
        return [
            Memory("conv", n.convolved * e, n.convolved * e),
            *copies,
            Memory("scan", e * (n.decays + n.steps), 4 * n.decays + e * n.steps),  # alpha and beta
            Memory("rms-norm", 2 * n.keys * e, 2 * n.keys * e),
            Memory("scan", 4 * n.decays, 4 * n.decays),  # sums of the logarithms of alpha
            Memory(  # T, W and U
                "scan",
                e * (n.keys + n.values) + 4 * (n.decays + n.steps),
                e * (n.keys + n.values + n.scores),
                flops=self._flops(n, 2, 1, 0) + inverse,
            ),
            self._chunk_states(n, e),
            Memory(
                "scan",
                e * (2 * n.keys + n.values + n.states) + 4 * n.decays,
                e * n.values,
                flops=self._flops(n, 1, 1, 1),
            ),
        ]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        both, rates = n.keys + n.values, 4 * (n.decays + n.steps)
        sums = [Memory("add", 2 * n.keys * e, 2 * n.projected * e)] if n.keys > n.projected else []
        return [
            Memory("scan", e * (both + n.scores) + rates, e * both, flops=self._flops(n, 1, 1, 0)),  # W, U
            self._chunk_states(n, e),
            Memory(  # dV within chunks
                "scan",
                e * (2 * n.keys + n.values) + 4 * n.decays,
                e * n.values,
                backward=True,
                flops=self._flops(n, 1, 1, 0),
            ),
            Memory(  # gradients of states
                "scan",
                e * (3 * n.keys + 2 * n.values) + 4 * n.decays,
                e * (n.states + n.values),
                backward=True,
                flops=self._flops(n, 0, 0, 3),
            ),
            Memory(  # dQ, dK, dW
                "scan",
                e * (3 * both + 2 * n.states) + 4 * n.decays,
                3 * e * n.keys + 4 * n.decays,
                backward=True,
                flops=self._flops(n, 2, 1, 3),
            ),
            Memory(  # through W, U and T: dK, dV, d beta, d alpha
                "scan",
                e * (2 * both + n.scores) + rates,
                e * both + rates,
                backward=True,
                flops=self._flops(n, 2, 2, 0) + 4.0 * n.scores * self.chunk,
            ),
            Memory("add", 2 * n.keys * e, n.keys * e),
            Memory("scan", 8 * n.decays, 4 * n.decays, backward=True),
            Memory("rms-norm", 4 * n.keys * e, 2 * n.keys * e, backward=True),
            Memory("scan", rates + e * (n.decays + n.steps), e * (n.decays + n.steps), backward=True),
            *sums,
            Memory("conv", 2 * n.convolved * e, n.convolved * e, backward=True),
        ]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        nbytes = e * (2 * n.keys + n.values + n.scores) + 4 * n.decays + e * n.steps
        return [("rule", nbytes, "workspace")]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        copied = n.keys > n.projected
        if not backward:
            first = 4 + copied  # of the kernel of T, W and U
            return [(first, first + 1, e * (n.keys + n.values)), (first + 1, first + 2, e * (n.states + n.values))]
        again = [(0, 4, e * n.keys), (0, 1, e * n.values), (1, 4, e * (n.states + n.values))]
        return [*again, (2, 5, e * n.values), (3, 4, e * n.states), (4, 8, 2 * e * n.keys), (4, 5, e * n.keys)]


@dataclass(frozen=True, eq=False)
class LightningAttention(Scan):
    """Lightning attention: o_t = q_t S_t with the state S_t = lambda S_(t-1) + k_t^T v_t, for ins q, k, v; lambda is a
    constant of each head.

    Two kernels, forward and backward, go through a sequence block by block, with the state on the chip: forward
    [(Q K^T) * M] V + Q S; backward first forwards for dQ, then backwards for dK and dV. They read their inputs once
    each. Inputs are saved for the backward pass, and no states.

    Sources: Qin et al. 2024, arXiv 2401.04658 (Lightning Attention-2), algorithms 1 and 2; MiniMax-01, arXiv
    2501.08313, section 2.2.

    chunk: tokens of a block, C.
    key_dim, value_dim: d_k and d_v.
    """

    chunk: int = 256
    key_dim: int = 128
    value_dim: int = 128

    def _flops(self, at: LocalShapes, within_keys: float, within_values: float, states: float) -> float:
        """Counts FLOPs of products within blocks over d_k and over d_v (2 C d of each token and head), and with the
        state (2 d_k d_v)."""
        heads, length = at.size(self.ins[0]) // self.key_dim, min(self.chunk, at.dims(self.ins[0])["s"])
        inside = length * (within_keys * self.key_dim + within_values * self.value_dim)
        return 2.0 * heads * (inside + states * self.key_dim * self.value_dim)

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("scan", at.bytes(*self.ins), at.bytes(*self.outs), flops=self._flops(at, 1, 1, 2))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        q, k, v = (at.bytes(tensor) for tensor in self.ins)
        gradient = at.bytes(*self.outs)
        return [
            Memory("scan", gradient + v + k, q, backward=True, flops=self._flops(at, 1, 1, 2)),
            Memory("scan", gradient + q + k + v, k + v, backward=True, flops=self._flops(at, 2, 2, 3)),
        ]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class ChunkwiseLSTM(ChunkedState):
    """An LSTM with a matrix as memory: o_t = S_t q_t / max(|n_t q_t|, 1), with the state
    S_t = f_t S_(t-1) + i_t v_t k_t^T and n_t the same sum of keys, for ins q, k, v, i and f.

    Kernels are those of ``mlstm_chunkwise`` (TFLA): forward the states of the chunks, and outputs; backward states
    again, their gradients, and a kernel each for dQ, dK and dV. Saved are inputs, and two numbers in fp32 of each token
    and head.

    Source: Beck et al. 2025, arXiv 2503.14376, section 3 and appendix B; NX-AI/mlstm_kernels.
    """

    def _chunk_states(self, n: DeltaSizes, e: int) -> Memory:
        """Returns the kernel of the states of all chunks."""
        read = e * (n.keys + n.values + 2 * n.steps)
        return Memory("scan", read, e * n.states, flops=self._flops(n, 0, 0, 1))

    def forward(self, at: LocalShapes) -> list[Work]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        read = e * (2 * n.keys + n.values + n.states + 2 * n.steps)
        outputs = Memory("scan", read, e * n.values + 8 * n.steps, flops=self._flops(n, 1, 1, 1))
        return [self._chunk_states(n, e), outputs]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        n, e = self.sizes(at), BYTES[self.ins[0].dtype]
        rates = 2 * e * n.steps + 8 * n.steps
        whole = e * (2 * n.keys + 2 * n.values + n.states) + rates
        kernels = (
            (e * (n.keys + n.values) + rates, e * n.states, self._flops(n, 0, 0, 1)),  # gradients of states
            (whole, e * n.keys, self._flops(n, 1, 1, 1)),  # dQ
            (whole, e * n.keys, self._flops(n, 1, 1, 1)),  # dK
            (whole - e * n.values, e * n.values, self._flops(n, 1, 1, 1)),  # dV
        )
        return [
            self._chunk_states(n, e),
            *(Memory("scan", read, write, backward=True, flops=flops) for read, write, flops in kernels),
            Memory("scan", 2 * e * (n.keys + n.values), 2 * e * n.steps, backward=True),  # of both gates
        ]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("normalisers", 8 * self.sizes(at).steps, "workspace")]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        states = self.sizes(at).states * BYTES[self.ins[0].dtype]
        return [(0, 3, states), (1, 4, states)] if backward else [(0, 1, states)]


class LinearRecurrence(Scan):
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t) of each channel, for ins x and the linear gates of i and a.

    A kernel each way that goes through sequences with the states on the chip. Inputs are saved, and the output.

    Source: De et al. 2024 (Griffin), arXiv 2402.19427, section 2.4 and appendix A.
    """

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("scan", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        read = at.bytes(*self.ins, *self.outs, *self.outs)
        return [Memory("scan", read, at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return (*self.ins, *self.outs)


class BlockLinear(Linear):
    """A linear layer within each head: outs[i] = ins[0] @ weights[i] with a block of a matrix [a, d] for each head, in
    a batched GEMM."""

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        taken = at.dims(self.ins[0])
        width = at.dims(self.weights[0])["d"]
        rows = math.prod(n for dim, n in taken.items() if dim != "a")
        return rows, width * len(self.outs), width, taken["a"] // width


class TokenShift(Operator):
    """Mixtures of every token with that before it, outs[i] = x w_i + (x of the token before) (1 - w_i), in a kernel
    each way. Where ranks hold parts of sequences, the single token that each needs of another is left out."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 2 * at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", at.bytes(*self.outs, *self.ins), at.bytes(*self.ins))]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class WeightedValues(Scan):
    """Sums of values of each channel with weights exp(k) that decay, over the sum of the weights, for ins k and v: a
    kernel each way (``wkv_forward`` and ``wkv_backward`` of RWKV-4), a thread for each channel.

    A token and channel has four exponentials forward, and is priced as so many elements of the state of a selective
    scan; backward computes them again, and those of gradients. Inputs and the output are saved.

    Source: Peng et al. 2023, arXiv 2305.13048, section 3 and appendix D; BlinkDL/RWKV-LM, RWKV-v4/cuda/wkv_cuda.cu.
    """

    EXPONENTIALS: ClassVar[int] = 4

    def forward(self, at: LocalShapes) -> list[Work]:
        flops = 7.0 * self.EXPONENTIALS * at.size(*self.outs)
        return [Memory("selective-scan", at.bytes(*self.ins), at.bytes(*self.outs), flops=flops)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        read = at.bytes(*self.ins, *self.outs, *self.outs)
        flops = 3 * 7.0 * self.EXPONENTIALS * at.size(*self.outs)
        return [Memory("selective-scan", read, at.bytes(*self.ins), backward=True, flops=flops)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return (*self.ins, *self.outs)
