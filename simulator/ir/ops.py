"""What a GPU executes: work, ops, and the fragments they come in.

*Work* says what is done and how much of it, in local shapes and bytes, and never how long it takes
(only ``simulator.costs`` knows seconds). Work is immutable and hashable, so equal work is priced once.
An *Op* is one piece of work on one in-order stream, with the ops it waits for. A *Fragment* is what a
scheme hands back for one site: its forward ops, its backward ops, what it keeps in memory and which
parameters it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

BYTES: dict[str, Any] = {
    **{"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5},
    **{"int64": 8, "int8": 1, "int4": 0.5, "bool": 1},
}
"""Bytes of one element of each number format, whole numbers but for those of four bits."""

WIDTH: dict[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0 + 4 / 128, "fp4": 0.5 + 1 / 16}
"""The same with its share of the scales, for tokens that travel with theirs: four bytes for 128 of fp8, one for 16 of
fp4."""


# ---------------------------------------------------------------------------------------------- work


@dataclass(frozen=True, slots=True)
class Gemm:
    """``batch`` products of an (m x k) with a (k x n) matrix: 2 m n k FLOPs each.

    layout: which operand is transposed, in BLAS letters: ``tn`` forward, ``nn`` gradient of the input,
    ``nt`` gradient of the weight. accumulate: the result is added to what lies in memory, in `out_dtype`
    (a weight gradient fused with its accumulation). what: the site it belongs to, for reports. groups: experts, by
    their tokens: (how many, tokens of each), ...; `m`, or `k` of a weight gradient, is then their mean, and `batch`
    their number. Those without tokens are left out. pace: see `slowest_rank`.
    """

    m: float
    n: int
    k: float
    batch: int = 1
    dtype: str = "bf16"
    layout: str = "tn"
    accumulate: bool = False
    out_dtype: str = "bf16"
    what: str = "gemm"
    groups: tuple[tuple[float, float], ...] = ()
    pace: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Least traffic to memory: each operand read once, the result written (and read when accumulated) once."""
        out = self.m * self.n * BYTES[self.out_dtype] * (2 if self.accumulate else 1)
        return 1.0 * self.batch * ((self.m * self.k + self.k * self.n) * BYTES[self.dtype] + out)


@dataclass(frozen=True, slots=True)
class Attention:
    """A fused attention kernel (scores never reach memory) over ``batch`` sequences.

    q, kv: positions of queries and keys; heads and kv_heads: local counts; qk_dim, v_dim: widths of a head;
    share: part of the q x kv rectangle that is computed (1/2 for causal self-attention). FLOPs forward: 2 b heads q kv
    (qk_dim + v_dim) share; backward 2.5 times that, for it computes the scores again. pace: see `slowest_rank`.
    """

    batch: int
    q: int
    kv: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    share: float = 0.5
    backward: bool = False
    dtype: str = "bf16"
    pace: float = 1.0

    @property
    def flops(self) -> float:
        forward = 2.0 * self.batch * self.heads * self.q * self.kv * (self.qk_dim + self.v_dim) * self.share
        return forward * (2.5 if self.backward else 1.0)

    @property
    def bytes(self) -> float:
        queries = self.batch * self.heads * self.q * (self.qk_dim + self.v_dim)
        keys = self.batch * self.kv_heads * self.kv * (self.qk_dim + self.v_dim)
        return 1.0 * (queries + keys) * BYTES[self.dtype] * (2 if self.backward else 1)


@dataclass(frozen=True, slots=True)
class Memory:
    """A kernel bound by memory traffic: `read` and `write` bytes, FLOPs not worth counting.

    what: norm, rms-norm, residual, activation (gated), gelu (plain), rope, embedding, softmax, dropout, cross-entropy,
    add, concat, cast, router, permute, grad-norm, adam, zero-grad. backward: of a backward pass, where both have one.
    pace: see `slowest_rank`.
    """

    what: str
    read: int
    write: int
    backward: bool = False
    pace: float = 1.0

    flops = 0.0

    @property
    def bytes(self) -> float:
        return 1.0 * (self.read + self.write)


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication among the ranks of one or more mesh axes.

    operation: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, shift. nbytes: the largest buffer
    on one rank, as nccl-tests counts it: the tensor of an all-reduce, the gathered tensor of an all-gather, the
    unreduced one of a reduce-scatter, all that one rank sends (its own share included) in an all-to-all. In a shift
    every rank sends that much to the one `by` positions further round the group, all at the same time.
    members: positions in the group that take part; None for all of them. pace: see `slowest_rank`.
    """

    operation: str
    nbytes: int
    axes: tuple[str, ...]
    members: tuple[int, ...] | None = None
    by: int = 1
    pace: float = 1.0

    flops = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A point-to-point message of `nbytes` from position `source` to position `target` of one mesh axis."""

    nbytes: int
    axis: str
    source: int
    target: int

    flops = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tokens to the ranks of their experts (operation `dispatch`), or their results back and added up (`combine`), by
    kernels that know what an all-to-all does not: a token whose experts lie on one rank, or one node, goes there once.

    tokens: of one rank, each of `hidden` elements of `dtype` with their scales; topk: experts of each, of so many
    `experts`, which the ranks of `axes` hold. most: nodes that the experts of a token lie on at most. sms:
    multiprocessors that copy. pace: see `slowest_rank`.
    """

    operation: str
    tokens: int
    hidden: int
    topk: int
    experts: int
    axes: tuple[str, ...]
    dtype: str = "bf16"
    most: int = 4
    sms: int = 24
    pace: float = 1.0

    flops = 0.0

    @property
    def nbytes(self) -> int:
        """What an all-to-all would count: a copy for each expert, on whatever rank."""
        return round(self.tokens * self.topk * self.hidden * WIDTH[self.dtype])


@dataclass(frozen=True, slots=True)
class HostCopy:
    """`nbytes` between a GPU and the memory of its node's host (to: ``cpu``) or the disks behind it (``nvme``); `back`
    to the GPU, else away from it."""

    nbytes: int
    back: bool = False
    to: str = "cpu"

    flops = 0.0


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """An optimizer's turn on the host, over what one GPU has there: `read` and `write` bytes of its memory.

    loaded, stored: of these, what is read from disks before, and written to them behind, piece by piece meanwhile.
    """

    read: int
    write: int
    loaded: int = 0
    stored: int = 0

    flops = 0.0

    @property
    def nbytes(self) -> int:
        return self.read + self.write


Communication = Collective | Exchange | Transfer
Host = HostCopy | HostUpdate
Work = Gemm | Attention | Memory | Communication | Host


def slowest_rank(work: Any) -> Any:
    """What the rank does of `work` that the others wait for.

    One device stands for all ranks that run the same ops. Where they do not all do the same amount of it, `work` states
    the mean, which is what adds up over ranks, and `pace` how many times that the most laden rank does. The groups of a
    product are those of that rank already.
    """
    pace = getattr(work, "pace", 1.0)
    if pace == 1.0:
        return work
    if isinstance(work, Gemm):
        m, k = (work.m, pace * work.k) if work.layout == "nt" else (pace * work.m, work.k)
        return replace(work, m=m, k=k, pace=1.0)
    if isinstance(work, Attention):
        return replace(work, share=pace * work.share, pace=1.0)
    if isinstance(work, Memory):
        return replace(work, read=round(pace * work.read), write=round(pace * work.write), pace=1.0)
    if isinstance(work, Exchange):
        return replace(work, tokens=round(pace * work.tokens), pace=1.0)
    return replace(work, nbytes=round(pace * work.nbytes), pace=1.0)


# ----------------------------------------------------------------------------------------------- ops

COMPUTE = "compute"
"""The stream of the kernels. The other streams carry the name of the family that communicates."""


@dataclass(eq=False, slots=True)
class Op:
    """One piece of work on one in-order stream. Without work it is a mark: it joins dependencies and is on no stream.

    after: data dependencies only (the order of a stream needs none). phase: F forward, B gradient of inputs,
    W gradient of weights, R recompute, U update. when: in which micro-batches it runs (every, first, last), or
    that it runs in one step of a period only (period, of an update; see `Scheme.period`). tag: by which the scheme that
    set it finds the op again in the fragment of an enclosing module.
    """

    name: str
    stream: str = COMPUTE
    work: Work | None = None
    after: list[Op] = field(default_factory=list)
    phase: str = "F"
    when: str = "every"
    tag: str = ""

    def __repr__(self) -> str:
        return f"<{self.phase} {self.name} on {self.stream}>"


@dataclass(frozen=True, slots=True)
class TensorUse:
    """`op` needs `nbytes` of memory named `key` to exist while it runs; `made` says that it writes it.

    Memory lives from the begin of the first op that touches it to the end of the last one: an activation is saved
    for the backward pass exactly when a backward op touches it. category: workspace, logits or buffers; what lives from
    a forward to a backward pass counts as activations unless it is one of the other two. stays: it is kept even where
    what made it is done again, for others need it in between.
    """

    key: str
    nbytes: int
    op: Op
    made: bool = False
    category: str = "workspace"
    stays: bool = False


@dataclass(slots=True)
class Param:
    """A weight as one rank holds it.

    size: local elements; total: elements of the whole tensor; partial: axes over which its gradient is a partial
    sum; ready: the backward op after which its gradient is complete; used: the first forward op that reads it.
    copies: axes and number of neighbours on them that hold the same part (of key and value heads fewer than ranks)
    and sum its gradients. view: the view of the mesh that its site lies in. trained: it has a gradient and states of
    the optimizer; others only rest.
    """

    name: str
    size: int
    total: int
    partial: tuple[str, ...]
    ready: Op
    used: Op
    tied: bool = False
    copies: tuple[tuple[str, ...], int] | None = None
    view: str = ""
    trained: bool = True


@dataclass(eq=False, slots=True)
class Fragment:
    """The ops of one site in issue order; `backward` is the combined one, each op tagged B, W or R.

    entry, grad_entry: a mark per tensor that comes in (an input; the gradient of an output). exit, grad_exit: the op
    after which an output, or the gradient of an input, exists. borrowed: weights that are another unit's on the device.
    """

    forward: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    entry: dict[str, Op] = field(default_factory=dict)
    exit: dict[str, Op] = field(default_factory=dict)
    grad_entry: dict[str, Op] = field(default_factory=dict)
    grad_exit: dict[str, Op] = field(default_factory=dict)
    params: list[Param] = field(default_factory=list)
    shared_weights: list[str] = field(default_factory=list)
    tensor_uses: list[TensorUse] = field(default_factory=list)

    def copy(self) -> Fragment:
        """The same with ops of its own, to which something can be added."""
        own: dict[Op, Op] = {}

        def mine(op: Op) -> Op:
            if op not in own:
                own[op] = found = replace(op, after=[])
                found.after = [mine(other) for other in op.after]
            return own[op]

        def marks(of: dict[str, Op]) -> dict[str, Op]:
            return {name: mine(op) for name, op in of.items()}

        return Fragment(
            [mine(op) for op in self.forward],
            [mine(op) for op in self.backward],
            marks(self.entry),
            marks(self.exit),
            marks(self.grad_entry),
            marks(self.grad_exit),
            [replace(param, ready=mine(param.ready), used=mine(param.used)) for param in self.params],
            list(self.shared_weights),
            [replace(tensor_use, op=mine(tensor_use.op)) for tensor_use in self.tensor_uses],
        )


@dataclass(eq=False, slots=True)
class UnitRun:
    """A unit of a stage: `count` copies of one fragment in a row, each taking what the one before gives.

    takes, gives: names of the tensor that comes in and of the one that goes out. keys: under which memory they are
    touched. nbytes: of what goes on from copy to copy. found, left: other memory that is taken in a link played before
    this one, or given back in one played after it. marks: those of the unit.
    """

    name: str
    fragment: Fragment
    count: int = 1
    residual_in: str | None = None
    residual_out: str | None = None
    keys: tuple[str | None, str | None] = (None, None)
    nbytes: int = 0
    allocated_before: tuple[str, ...] = ()
    freed_later: tuple[str, ...] = ()
    marks: frozenset[Hashable] = frozenset()


@dataclass(eq=False, slots=True)
class SideOps:
    """Ops that a scheme puts beside the links of a chain, one after another on a stream of their own.

    params: numbers of the parameters that each has to do with, one op's after another's, from `starts` on: the ops wait
    for their gradients, or (ahead) their first use waits for the ops. They are issued by hooks, and take no time of the
    host that issues the links' ops.

    Ops that are formed while the program runs: `formed` gives those that stand in place of these, from the seconds at
    which each parameter's gradient is complete, counted from the begin of the backward pass. waits: further seconds
    until others see the result of each op. after: ops beside that were put there before, and for each op here the place
    of the one there that it waits for; -1: of none.
    """

    ops: list[Op]
    params: np.ndarray
    starts: np.ndarray
    formed: Callable[[np.ndarray], list[SideOps]] | None = None
    waits: Sequence[float] = ()
    after: tuple[SideOps, np.ndarray] | None = None


@dataclass(eq=False, slots=True)
class StageOps:
    """What a stage lowers to: its links in forward order, and what schemes put beside them.

    ahead: beside the forward pass, in front of it. behind: beside the backward pass, at its end. Parameters are
    numbered in forward order, copy after copy.
    """

    unit_runs: list[UnitRun] = field(default_factory=list)
    ahead: list[SideOps] = field(default_factory=list)
    behind: list[SideOps] = field(default_factory=list)

    def params(self) -> list[tuple[Param, int]]:
        """The distinct parameters, each with the number of its copies."""
        return [(param, unit_run.count) for unit_run in self.unit_runs for param in unit_run.fragment.params]

    def of_params(self, values: Sequence[float]) -> np.ndarray:
        """Of a value for each distinct parameter, those of all by their numbers."""
        parts, start = [], 0
        for unit_run in self.unit_runs:
            stop = start + len(unit_run.fragment.params)
            parts.append(np.tile(values[start:stop], unit_run.count))
            start = stop
        return np.concatenate(parts)
