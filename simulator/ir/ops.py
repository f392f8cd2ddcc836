"""Ops of a device: work (kernels, collectives, copies), ops on streams, and the fragments that modules lower to.

*Work* says what a device executes and how much of it, in local shapes and bytes; only ``simulator.costs`` knows its
seconds. Work is immutable and hashable, so equal work is priced once. An *Op* is a piece of work on an in-order
stream, with the ops that it waits for. A *Fragment* is what a module lowers to: ops, memory and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass

BYTES: dict[str, Any] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
BYTES |= {"int64": 8, "int32": 4, "int8": 1, "int4": 0.5, "bool": 1}
"""Bytes of an element of each number format; an integer except for formats of four bits."""

WIDTH: dict[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0 + 4 / 128, "fp4": 0.5 + 1 / 16}
"""Bytes of an element of dispatched tokens, scales included: 4 bytes for 128 elements of fp8, 1 for 16 of fp4."""


class StoredFormat(NamedTuple):
    """A format in which matrices that are not trained are stored, in place of that of the computation.

    codes: bytes of an element, which are sharded as a weight is.
    constants: bytes of its block's scales for an element. They are no parameters: FSDP shards none, every rank has all.
    """

    codes: float
    constants: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes of an element."""
        return self.codes + self.constants


STORED_FORMATS: Mapping[str, StoredFormat] = {
    "fp8": StoredFormat(1.0),
    "int8": StoredFormat(1.0),
    "int4": StoredFormat(0.5, 2.5 / 128),
    "nf4": StoredFormat(0.5, 4 / 64),
    "nf4-double": StoredFormat(0.5, (1 + 4 / 256) / 64),
}
"""Formats of frozen weights by name.

fp8: primary weights of Transformer Engine, a scale a tensor. int8: LLM.int8, a scale a row (bitsandbytes 0.49.2,
bitsandbytes/nn/modules.py, Int8Params). int4: GPTQ and AWQ, a scale in 16 bits and a zero point in 4 for each group of
128. nf4: an fp32 maximum for each block of 64 (bitsandbytes/functional.py, quantize_4bit; also fp4); nf4-double: these
maxima in 8 bits, with an fp32 maximum for 256 of them (compress_statistics; QLoRA, arXiv 2305.14314, section 3)."""

GATHERED_FORMATS: Mapping[str, float] = {
    **dict.fromkeys(("fp8", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise"), 1.0),
    **{"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16},
}
"""Bytes of an element of a weight that is gathered in the format of its recipe, scales included. Scales of a row are
those of whole rows, which shards do not have: `fp8-rowwise` gathers 16 bits (torchao, float8/config.py)."""

KEPT_FORMATS: Mapping[str, float] = {**GATHERED_FORMATS, "fp8-blockwise": 2.0, "mxfp8": 2 + 2 / 32, "nvfp4": 1 + 2 / 16}
"""Bytes of an element of a weight that stays in the format of its recipe: with blocks along rows, and along columns for
the product of its transpose."""

TRANSPOSED = ("ada", "hopper")
"""Architectures whose products in 8 bits take one order of the operands alone, so that a weight stays transposed, too
(Transformer Engine, common/util/cuda_runtime.cpp and pytorch/tensor/float8_tensor.py)."""

Message = tuple[int, int, int]
"""Sending rank, receiving rank, bytes."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """``batch`` products of an (m x k) with a (k x n) matrix: 2 m n k FLOPs each.

    m, n, k: rows, columns and contracted size of a product (elements).
    batch: number of products.
    dtype: number format of the operands.
    layout: transposed operands in BLAS letters: ``tn`` forward, ``nn`` input gradient, ``nt`` weight gradient.
    accumulate: whether the result is added to memory in `out_dtype` (fused gradient accumulation).
    out_dtype: number format of the result.
    what: kind of module, for reports.
    groups: of a grouped GEMM the experts by their tokens, (number of experts, tokens of each), without experts that
        have no tokens; `m`, or `k` of a weight gradient, is then the mean and `batch` the number of experts.
    pace: work of the slowest rank over the mean, see `routing.slowest_rank`.
    sms, reserved: multiprocessors that communicate in a fused kernel, and that are left to kernels beside it.
    scaling: ``row`` for 8-bit operands with a scale a row, which other libraries multiply; otherwise empty.
    part: share of a kernel, of `m` / `part` rows, that this is: it takes that share of the kernel's time. Above 1: so
        many kernels of `m` / `part` rows, one after the other, each with operands of its own.
    one_kernel: whether its groups are in a single kernel; otherwise as the training library launches them.
    tile: of a grouped GEMM whose program fixes its output tiles their rows, the rows that a tile loads, and (columns,);
        of a dense GEMM the fields of a `FixedTile`; otherwise empty.
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
    sms: int = 0
    reserved: int = 0
    scaling: str = ""
    part: float = 1.0
    one_kernel: bool = False
    tile: tuple[Any, ...] = ()

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Least traffic to memory: each operand read once, the result written (and read when accumulated) once."""
        out = self.m * self.n * BYTES[self.out_dtype] * (2 if self.accumulate else 1)
        right = self.k * self.n * (1.0 + (self.part - 1.0) * (self.part > 1.0))
        return 1.0 * self.batch * ((self.m * self.k + right) * BYTES[self.dtype] + out)


@dataclass(frozen=True, slots=True)
class Attention:
    """A fused attention kernel (scores are never written to memory) over ``batch`` sequences, or packed documents.

    FLOPs of the forward pass: 2 batch heads q kv (qk_dim + v_dim) share. The backward pass has 2.5 times as many,
    because it computes the scores again.

    q, kv: number of positions of queries and of keys.
    heads, kv_heads: local number of query heads and of key and value heads.
    qk_dim, v_dim: width of a head of queries and keys, and of values.
    share: share of the q x kv pairs that is computed (1/2 for causal self-attention).
    backward: whether this is the kernel of the backward pass.
    dtype: number format.
    pace: work of the slowest rank over the mean, see `routing.slowest_rank`.
    reserved: multiprocessors that it leaves to the communication kernels beside it.
    chosen: what has been chosen, and lies anywhere, or is scored to be: keys (``keys``) or blocks of keys (``blocks``);
        empty: nothing.
    """

    batch: float
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
    reserved: int = 0
    chosen: str = ""

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
    """A memory-bound kernel.

    what: norm, rms-norm, residual, activation (gated), expert-activation, clamped-activation, expert-bias, gelu, rope,
        embedding, softmax, dropout, add, cross-entropy, concat, cast, convert, router, permute, conv, scan,
        selective-scan, streams, adam, matrix-pass, row-cast, group-cast, row-gather, bias-gradient, grad-norm,
        zero-grad
    read, write: bytes read from and written to memory.
    backward: whether this is the kernel of the backward pass, for kinds that have both.
    pace: work of the slowest rank over the mean, see `routing.slowest_rank`.
    flops: FLOPs of the matrix products in it, and all of a selective-scan; those of all others are neglected.
    rows: of a kernel with a block a row, the number of rows where they may be too few to fill a GPU; 0: they fill it.
        Of a row-cast, their number; of a group-cast or row-gather, the number of blocks.
    """

    what: str
    read: int
    write: int
    backward: bool = False
    pace: float = 1.0
    flops: float = 0.0
    rows: int = 0

    @property
    def bytes(self) -> float:
        return 1.0 * (self.read + self.write)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective among the ranks of a mesh axis or several.

    operation: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, shift (every rank sends to the
        rank `by` positions further round the group, all at the same time), push_pull (to servers, and sums back).
    nbytes: bytes of the largest buffer on a rank, as nccl-tests counts them: the tensor of an all-reduce, the
        gathered tensor of an all-gather, the unreduced tensor of a reduce-scatter, all that a rank sends in an
        all-to-all (the share of the rank itself included), a message of a shift, what passes the busiest port each way
        in a push_pull.
    axes: the axes of the group.
    members: positions in the group of the ranks that take part; None: all.
    ranks: the global ranks that take part, where stages have unequal degrees; None: those of `members`.
    by, both_ways: distance of a shift, and whether every rank also sends a message to the rank as far back.
    targets: of a shift over different distances, the position that each position sends to; empty: as `by` says.
    pace: bytes of the slowest rank over the mean, see `routing.slowest_rank`.
    sms: multiprocessors that it takes from kernels; None: those of NCCL's kernel.
    """

    operation: str
    nbytes: int
    axes: tuple[str, ...]
    members: tuple[int, ...] | None = None
    by: int = 1
    both_ways: bool = False
    targets: tuple[int, ...] = ()
    pace: float = 1.0
    sms: int | None = None
    ranks: Sequence[int] | None = None

    flops = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A point-to-point message of `nbytes` from position `source` to position `target` of a mesh axis.

    pairs: all messages of cross-mesh resharding, between stages of different degrees; a rank receives `nbytes` at most.
    """

    nbytes: int
    axis: str
    source: int
    target: int
    pairs: tuple[Message, ...] = ()

    flops = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Token dispatch or combine by kernels such as DeepEP's: a token is sent once to each rank or node of its experts.

    operation: ``dispatch`` (tokens to the ranks of their experts) or ``combine`` (results back, and added up).
    tokens, hidden, topk: tokens of a rank; elements and experts of each token.
    experts, axes: experts on all ranks of the group together, and the axes of the group.
    dtype: number format of the tokens, which travel with their scales.
    most: largest number of nodes that the experts of a token lie on (node-limited routing).
    sms, library: multiprocessors that copy, and the library of the kernels, as calibrations name it.
    pace: tokens of the slowest rank over the mean, see `slowest_rank`.
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
    library: str = "deepep"
    pace: float = 1.0

    flops = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of an equivalent all-to-all, which sends a copy of a token to each of its experts."""
        return round(self.tokens * self.topk * self.hidden * WIDTH[self.dtype])


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of `nbytes` bytes between a GPU and its host.

    back: whether the copy is to the GPU.
    to: ``cpu`` for the memory of the host, ``nvme`` for its disks.
    activations: of saved activations, which take space there until they are copied back.
    """

    nbytes: int
    back: bool = False
    to: str = "cpu"
    activations: bool = False

    flops = 0.0


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """An optimizer update on the host, of the states that a GPU has offloaded.

    read, write: bytes read from and written to the memory of the host.
    loaded, stored: bytes of these that are read from disks before and written to disks after, in overlapped pieces.
    """

    read: int
    write: int
    loaded: int = 0
    stored: int = 0

    flops = 0.0

    @property
    def nbytes(self) -> int:
        return self.read + self.write


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """Launches by the host, of `number` ops of the framework."""

    number: float

    flops = 0.0


READ_BY_HOST = "read by the host"
"""Tag of an op whose result the host reads before it goes on: counts of tokens, without which it launches no kernels of
experts."""

Communication = Collective | Exchange | Transfer
Host = HostCopy | HostUpdate
Work = Gemm | Attention | Memory | Communication | Host | HostLaunch

COMPUTE = "compute"
"""The stream of the kernels. Streams of communication have the name of the family of schemes that communicates."""

IN_TURN = "in turn"
"""The tag of an op of an update that is as many kernels as it has launches; others are launched once."""


@dataclass(eq=False, slots=True)
class Op:
    """A piece of work on an in-order stream; without work a mark, which joins dependencies and is on no stream.

    name: name in traces.
    stream: the stream that executes it.
    work: the work; None: a mark.
    after: data dependencies; the order of a stream is implied.
    phase: F forward, B gradient of inputs, W gradient of weights, R recompute, U optimizer update.
    when: micro-batches in which it runs (every, first, last), or ``period``: in a step of each `Scheme.period`.
    tag: word by which the scheme that set it finds the op in the fragment of an enclosing module.
    launches: time of the host to launch its kernels, over that of an op of the framework.
    meeting: of a collective of an update, the name by which all devices that take part meet in it.
    priority: on links that ops share (engine ``shared``): those of a lower priority get what higher ones leave.
    graph: part of a layer whose CUDA graph launches it (`simulator.ir.graph_parts`); empty: the host does.
    """

    name: str
    stream: str = COMPUTE
    work: Work | None = None
    after: list[Op] = field(default_factory=list)
    phase: str = "F"
    when: str = "every"
    tag: str = ""
    launches: float = 1.0
    meeting: Hashable = None
    priority: int = 0
    graph: str = ""

    def copy(self) -> Op:
        """Returns a copy that waits for nothing. Lowering makes many, and `dataclasses.replace` takes several times as
        long."""
        meets = self.launches, self.meeting, self.priority, self.graph
        return Op(self.name, self.stream, self.work, [], self.phase, self.when, self.tag, *meets)

    @property
    def issued(self) -> float:
        """Its `launches`; a mark has none."""
        return self.launches if self.work is not None else 0.0

    def __repr__(self) -> str:
        return f"<{self.phase} {self.name} on {self.stream}>"


@dataclass(frozen=True, slots=True)
class TensorUse:
    """An op's use of a buffer. A buffer is allocated when its first op begins and freed when its last op ends.

    So an activation is saved for the backward pass exactly if a backward op uses it.

    key, nbytes: name and bytes of the buffer.
    op, made: the op that reads or writes it, and whether it writes it.
    category: workspace, logits or buffers; workspace that lives from a forward to a backward pass counts as
        activations.
    stays: whether it stays in memory even where recomputation produces it again, because other ops read it meanwhile.
    """

    key: str
    nbytes: int
    op: Op
    made: bool = False
    category: str = "workspace"
    stays: bool = False


@dataclass(slots=True)
class Param:
    """A parameter as a rank holds it.

    size: local elements.
    total: elements of the whole tensor.
    partial: axes over which its gradient is a partial sum.
    ready, used: the backward op after which its gradient is complete, and the first forward op that reads it.
    tied: whether it is the matrix that embedding and output layer share.
    copies: axes and number of neighbouring ranks on them that hold the same shard and sum its gradients.
    view, trained: the view of the mesh that shards its operator; whether it has a gradient and optimizer states.
    matrix: local elements of a matrix of a linear layer; 0 of other parameters.
    shape: local rows and columns of a matrix, also of an embedding; () of vectors and other tensors.
    recipe: quantisation recipe of the GEMMs that read it; empty: none.
    split: of a matrix of a linear layer, the axes that shard it, each with the side: 0 for rows, 1 for columns.
    in_layer: whether it belongs to a layer; otherwise to the embedding, the final norm or the output layer.
    stored: the format in which it is stored; None: that of the computation.
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
    matrix: int = 0
    in_layer: bool = True
    shape: tuple[int, ...] = ()
    stored: StoredFormat | None = None
    split: tuple[tuple[str, int], ...] = ()
    recipe: str = ""

    def count_moved(self, nbytes: float) -> int:
        """Returns the elements of `nbytes` bytes that a collective of the whole weight moves."""
        return self.size if self.stored is None else round(self.size * self.stored.codes / nbytes)


FRAGMENT_BYTES = 1_500
"""Of an op in a fragment with its work, its uses of buffers and its share of the parameters, roughly."""


def _find_copy(op: Op, copies: dict[Op, Op]) -> Op:
    """Returns the copy of an op, or of a mark outside of both passes. copies: of other ops, added to."""
    if op not in copies:
        copies[op] = op.copy()
        copies[op].after = [_find_copy(other, copies) for other in op.after]
    return copies[op]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Fragment:
    """The ops of a module in issue order.

    forward: the ops of the forward pass.
    backward: the ops of the backward pass, of phases B, W and R.
    entry, grad_entry: for each input, and gradient of an output, a mark: an op without work that waits for its maker.
    exit, grad_exit: for each output, and gradient of an input, the op after which it exists.
    params: the parameters.
    shared_weights: names of weights that another unit of the device holds.
    tensor_uses: buffers that the ops use.
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

    def count_bytes(self) -> int:
        """Counts the bytes that it takes itself, in the memory of this program, roughly."""
        return FRAGMENT_BYTES * (len(self.forward) + len(self.backward))

    def copy(self) -> Fragment:
        """Returns a copy with copies of all ops, which may then be changed."""
        copies = {op: op.copy() for ops in (self.forward, self.backward) for op in ops}
        mine = partial(_find_copy, copies=copies)
        for op, copied in list(copies.items()):
            copied.after = [copies.get(other) or mine(other) for other in op.after]
        fragment = replace(self, shared_weights=list(self.shared_weights))
        fragment.forward, fragment.backward = ([copies[op] for op in ops] for ops in (self.forward, self.backward))
        for name in ("entry", "exit", "grad_entry", "grad_exit"):
            setattr(fragment, name, {key: mine(op) for key, op in getattr(self, name).items()})
        fragment.params = [replace(param, ready=mine(param.ready), used=mine(param.used)) for param in self.params]
        uses = self.tensor_uses
        fragment.tensor_uses = [TensorUse(u.key, u.nbytes, mine(u.op), u.made, u.category, u.stays) for u in uses]
        return fragment


@dataclass(eq=False, slots=True)
class UnitRun:
    """A run of equal units of a stage: copies of a fragment in a row, each reading the output of that before.

    name, fragment, count: name and ops of a unit, and the number of units.
    residual_in, residual_out: names of the residual stream that enters, and of that which leaves.
    keys: names of the buffers of `residual_in` and `residual_out`.
    nbytes, nbytes_in: bytes of the residual stream that leaves, and of that which enters.
    allocated_before, freed_later: further buffers that a run played before this run allocates, or a run after it frees.
    marks: of the unit.
    layers: how many it joins.
    context_nbytes: see `Unit.context`.
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
    nbytes_in: int = 0
    marks: frozenset[Hashable] = frozenset()
    layers: int = 1
    context_nbytes: int = 0


class ShardMessages(NamedTuple):
    """Bytes of a micro-batch on a rank in the collectives of a stage that holds a shard of the vocabulary, as pipeline
    devices have: a broadcast to all of them, all-reduces one behind the other of what they compute forward, and of
    gradients (`simulator.scheduling.vocabulary`)."""

    shared: int
    joined: tuple[int, ...]
    gradients: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class SideOps:
    """Ops of a scheme on a separate stream, concurrent with the runs of units: gradient reductions, weight gathers.

    They run in order. Hooks of parameters issue them, which takes no time of the host.

    params: numbers of the parameters of each op, concatenated. The ops wait for the gradients of their parameters, or
        (`StageOps.ahead`) the first use of the parameters waits for the ops.
    starts: index in `params` of the first parameter of each op.
    formed: for ops that are formed at run time (Horovod's fusion cycles): the ops that replace these, from the time at
        which the gradient of each parameter is complete [s after the start of the backward pass].
    waits: further time until the result of each op is visible [s].
    after: earlier side ops, and for each op here the index of the op there that it waits for; -1: none.
    """

    ops: list[Op]
    params: np.ndarray
    starts: np.ndarray
    formed: Callable[[np.ndarray], list[SideOps]] | None = None
    waits: Sequence[float] = ()
    after: tuple[SideOps, np.ndarray] | None = None


@dataclass(eq=False, slots=True)
class StageOps:
    """The ops of a pipeline stage. Its parameters are numbered in forward order, copy after copy.

    unit_runs: the runs of equal units in forward order.
    ahead: side ops of the first forward pass of a step, from its start on, such as weight gathers.
    behind: side ops of the last backward pass of a step, and after it, such as gradient reductions.
    again: side ops of the first backward pass of a step after all forward passes: freed whole weights are gathered.
    whole_weights, whole_gradients: bytes of gathered weights, and of gradients, that live from first to last use.
    message_shares: ranks that hold the same results and send a share of them each.
    shared_gradients: bytes of gradients on a rank that are summed with those of other devices while passes run.
    batch_loss: the loss of a whole batch; its `nbytes` are of outputs that the stage makes, `nbytes_in` of others.
    held: what units of a backward pass leave in memory up to its end, in bytes and by category.
    shard_messages: of a shard of the vocabulary; otherwise None.
    """

    unit_runs: list[UnitRun] = field(default_factory=list)
    ahead: list[SideOps] = field(default_factory=list)
    behind: list[SideOps] = field(default_factory=list)
    again: list[SideOps] = field(default_factory=list)
    whole_weights: int = 0
    whole_gradients: int = 0
    message_shares: int = 1
    shared_gradients: int = 0
    batch_loss: UnitRun | None = None
    held: tuple[tuple[float, str], ...] = ()
    shard_messages: ShardMessages | None = None

    @property
    def message_nbytes(self) -> int:
        """Bytes that a rank sends to the next stage; of the gradient of that, bytes that it receives."""
        return (self.unit_runs[-1].nbytes + self.unit_runs[-1].context_nbytes) // self.message_shares

    def params(self) -> list[tuple[Param, int]]:
        """Returns the distinct parameters, each with the number of its copies (equal units)."""
        return [(param, unit_run.count) for unit_run in self.unit_runs for param in unit_run.fragment.params]

    def of_params(self, values: Sequence[float]) -> np.ndarray:
        """Returns the values of all parameters by their numbers, from a value for each distinct parameter."""
        parts, start = [], 0
        for unit_run in self.unit_runs:
            stop = start + len(unit_run.fragment.params)
            parts.append(np.tile(values[start:stop], unit_run.count))
            start = stop
        return np.concatenate(parts)
