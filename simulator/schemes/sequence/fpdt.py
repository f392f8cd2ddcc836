"""FPDT (Ulysses-Offload): attention is computed chunk by chunk, and chunks wait for their turn in host memory.

As with sequence/ulysses, all-to-alls turn shards of the sequence into shards of the heads, but for one of u chunks of
the sequence after the other. A chunk is projected, exchanged and attends to the keys and values of all chunks before
it, which are copied to the host once they have been computed, and back one by one while the chunk before is at work
(double buffers). Backward, the chunks of keys and values take turns, and for each of them the later chunks of queries
are copied to the GPU, with the fp32 gradients of these, which go back to the host. So attention holds some chunks of
activations, however long the sequence.

    compute      qkv0  0x0  qkv1  1x0  1x1  qkv2  2x0  2x1  2x2  qkv3  3x0  ..     (queries x keys)
    memory-out        out0       out1            out2                 out3
    memory-in                                in0        in1       in0

With n tokens on p ranks, h and k the widths of queries and keys, it sends what Ulysses sends. Forward it copies
n/p (h + 2 h + 2 k) elements of 2 bytes and the row sums to the host, and (u-2)(u+1)/2 times the keys and values of a
chunk back, 2 k n/(p u) elements each, and chunk 0 once more for the backward pass. Of the u(u+1)/2 blocks only those on
the diagonal are masked. Partial outputs are merged, and gradients added up, in fp32, operation by operation. A block
waits for what is copied in: with the chunks of 65,536 tokens of the paper, whose blocks take longer, hardly ever.

MLPs and the loss run in chunks in the authors' program, too: memory/tiled-mlp, and `loss` of the framework. The inputs
of the layers stay where memory/recompute-full and memory/offload leave them.

Not modelled: the barriers between ranks, and what one layer holds on the host where it is recomputed. Masks but the
causal one, windows, documents, latent attention, tensor parallelism and products in 8 bits are refused, as the authors'
program has none of them.

References: Yao et al. 2024, arXiv 2408.16978; deepspeed/sequence/fpdt_layer.py of deepspeedai/DeepSpeed at
edaa7221 (`_FPDTGPUOffloadingAttentionImpl_`, and `_FPDTGPUAttentionImpl_` without `offload`). Run on a rank with 16
drawn shapes of 2 to 12 chunks, it copies as many bytes each way in each pass, and its blocks have the same order.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.mamba_operators import Scan
from meshcast.simulator.ir.modules import Module, Operator, SelfAttention
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import BYTES, Attention, Collective, Fragment, Gemm, HostCopy, Memory, Op, TensorUse
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, SchemeOptions
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.lowering.rewrite import replace_dependencies, split_work
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme

CHUNK_TOKENS = 65_536
"""Tokens of a chunk on all ranks (`chunk_size` of `FPDT_Attention`)."""


class Fpdt(RingScheme):
    role = "chunked attention"
    kernels, kernels_reason = "flash", "merges the outputs of chunks by their row sums"
    only_causal = True
    paper = Paper(
        "arXiv:2408.16978",
        "Training Ultra Long Context Language Model with Fully Pipelined Distributed Transformer",
        2024,
    )

    class Options(SchemeOptions):
        chunks: int | None = Field(default=None, ge=1, le=64)
        """Chunks of a sequence; null: as many as have 65,536 tokens each."""
        offload: bool = True
        """Whether chunks wait in host memory; false: on the GPU."""

    @property
    def token_order(self) -> str:
        return "by chunks"

    def layouts(self, operator: Operator) -> str | None:
        if isinstance(operator, Scan) or (isinstance(operator, CoreAttention) and operator.along == "s"):
            return "a"
        return "s" if operator.has("s") else None

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, self.options

    def count_chunks(self, tokens: int) -> int:
        """Returns the chunks of a sequence of so many tokens."""
        return self.options.chunks or max(1, tokens // CHUNK_TOKENS)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if not isinstance(module, SelfAttention):
            return fragment
        cores = [op.work for op in fragment.forward if isinstance(op.work, Attention)]
        chunks = self.count_chunks(cores[0].q) if len(cores) == 1 else 1
        return ChunkedAttention(fragment, chunks, self.options.offload).divide() if chunks > 1 else fragment

    def check_job(self, job: Any) -> None:
        sequence = job.batch.sequence
        chunks = self.count_chunks(job.batch.longest)
        if chunks == 1:
            return
        super().check_job(job)
        ranks = self.mesh.size(self.over)
        for tokens in (sequence, *(kind.sequence for kind in job.batch.lengths)):
            if (parts := self.count_chunks(tokens)) > 1 and tokens % (parts * ranks):
                rule = f"{self.use} divides {tokens:,} tokens into {parts} chunks over {ranks} ranks each"
                near = round(max(1, round(tokens / (parts * ranks))) * parts * ranks)
                raise PlanError("batch.sequence", rule, f"{near} would work", tokens)
        if job.model.mla is not None:
            rule = (
                f"{self.use} projects queries, keys and values by a product, and {job.model.name} has latent attention"
            )
            raise PlanError("plan.schemes", rule, "Use sequence/ulysses")
        if job.framework.quantised:
            rule = f"{self.use} projects chunks by products in 16 bits"
            raise PlanError("precision.compute", rule, "Use bf16, or sequence/ulysses", job.precision.compute)
        tensor = [entry for entry in job.plan.schemes if find_scheme(entry.use).family == "tensor"]
        if any(self.mesh.size(self.mesh.parts(axis)) > 1 for entry in tensor for axis in entry.over):
            rule = f"{self.use} multiplies a chunk with whole weights, and {tensor[0].use} divides them"
            raise PlanError("plan.schemes", rule, "Leave tensor parallelism out, or use sequence/ulysses")

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n, kv = setting.cp, setting.b * setting.s, setting.kv_width
        copied = max(kv, kv * p // setting.kv_heads)
        volume = (2 * setting.h + 2 * copied) * n / p * (p - 1) / p * 2
        yield ClosedForm("sent_forward", volume, "fpdt_layer.py: all-to-alls of all chunks, as of Ulysses")
        yield ClosedForm("sent_backward", volume, "fpdt_layer.py: all-to-alls of all chunks, as of Ulysses")
        chunks = self.count_chunks(setting.s)
        if chunks == 1:
            yield ClosedForm("attention_efficiency", 1.0, "every rank has whole sequences")
        elif self.options.offload:
            width, rows = 2 * setting.h + 2 * copied, 4 * setting.heads
            yield ClosedForm(
                "copied_out_forward",
                n / p * (2 * (width + setting.h) + rows),
                "fpdt_layer.py: inputs, q, k, v, o, row sums",
            )
            again = (chunks - 2) * (chunks + 1) // 2
            chunk = n / p / chunks
            yield ClosedForm(
                "copied_back_forward",
                chunk * (again * 4 * copied + 2 * width + rows),
                "fpdt_layer.py: keys and values of earlier chunks, and chunk 0 for the backward pass",
            )


Buffer = tuple[str, int]
"""Key of memory, and bytes."""

ROW_SUM_KERNELS = 8
"""Kernels on row sums of a merge (`_update_out_and_lse`): two factors, each a difference and its exponential, and the
new sums by a difference, an exponential, a logarithm and a sum. Together they read 12 row sums and write 8."""

AGAIN = "again"
"""What ends keys of memory that is copied back for the backward pass."""


class ChunkedAttention:
    """The division of attention into chunks of the sequence, computed in the order of DeepSpeed's fpdt_layer.py.

    Ops before the attention core, and behind its backward pass, are divided; so are the all-to-alls around it. The
    output projection, and its gradients, are of the whole sequence.

    whole: the fragment of attention with its projections.
    offload: whether chunks wait in host memory.
    """

    def __init__(self, whole: Fragment, chunks: int, offload: bool) -> None:
        self.whole, self.chunks, self.offload = whole, chunks, offload
        (self.core,) = (op for op in whole.forward if isinstance(op.work, Attention))
        self.back = next((op for op in whole.backward if isinstance(op.work, Attention)), None)
        self.ahead = self._select(whole.forward, waited_by(self.core))
        self.outward = all_to_alls(op for op in whole.forward if self.core in waited_by(op))
        self.inward = all_to_alls(op for op in whole.backward if self.back and op in waited_by(self.back))
        self.rest = self._select(whole.backward, {op for op in whole.backward if self.back in waited_by(op)})
        self.parts = {op: self._divide(op) for op in (*self.ahead, *self.outward, *self.inward, *self.rest)}
        self.whole_keys = self._find_whole_keys()
        self.q, self.k, self.v, self.o, self.rows = self._find_operands()
        self.widening = 4 / BYTES[self.core_work.dtype]
        self.forward, self.backward, self.uses = list[Op](), list[Op](), list[TensorUse]()

    def divide(self) -> Fragment:
        """Returns the fragment of the chunks."""
        undivided = {op for op in (*self.whole.forward, *self.whole.backward) if op not in self.parts}
        merged = self._run_forward()
        converted = self._run_backward()
        stands = dict(self.parts)
        stands[self.core] = merged
        if self.back is not None:
            stands[self.back] = converted
        for op in undivided:
            op.after = replace_dependencies(op.after, stands)
        return self._join(stands)

    # ------------------------------------------------------------------------------------------ what is divided

    @property
    def core_work(self) -> Attention:
        assert isinstance(self.core.work, Attention)
        return self.core.work

    def _select(self, issued: Sequence[Op], chosen: Collection[Op]) -> list[Op]:
        """Returns the chosen ops whose work is that of tokens, not of weights alone."""
        tokens = {use.op for use in self.whole.tensor_uses if "@" in use.key}
        weights = {use.op for use in self.whole.tensor_uses} - tokens
        return [
            op for op in issued if op in chosen and op not in weights and (op.phase != "W" or isinstance(op.work, Gemm))
        ]

    def _divide(self, op: Op) -> list[Op]:
        assert op.work is not None
        works = split_work(op.work, self.chunks)
        return [replace(op, name=f"{op.name} {i}", work=work, after=[]) for i, work in enumerate(works)]

    def _find_whole_keys(self) -> set[str]:
        """Returns the keys of tokens' memory that stays in one piece: that of ops which are not divided, and that which
        comes from outside or leaves."""
        inside = {*self.parts, self.core, self.back}
        uses = self.whole.tensor_uses
        written = {use.key for use in uses if use.made}
        read = {use.key for use in uses if not use.made}
        return {use.key for use in uses if use.op not in inside or use.key not in written & read}

    def _find_operands(self) -> list[Buffer]:
        """Returns the memory of queries, keys, values, output and row sums of the core."""
        sizes = {use.key: use.nbytes for use in self.whole.tensor_uses if use.op is self.core}
        results = {use.key for use in self.whole.tensor_uses if use.op is self.core and use.made}
        operands = [key for key in sizes if key not in results]
        rows = next(key for key in results if key.endswith(".lse"))
        (output,) = results - {rows}
        return [(key, sizes[key]) for key in (*operands, output, rows)]

    def _chunk(self, buffer: Buffer, i: int, where: str = "") -> Buffer:
        """Returns the memory of a chunk. where: of a copy of it."""
        key, nbytes = buffer
        if key in self.whole_keys and not where:
            return key, nbytes
        return f"{key} {i}{where and ' '}{where}", nbytes // self.chunks

    # -------------------------------------------------------------------------------------------------- ops

    def _use(self, op: Op, *memory: Buffer, writes: bool = False) -> None:
        self.uses += [TensorUse(key, nbytes, op, writes) for key, nbytes in memory]

    def _copy(self, name: str, memory: Sequence[Buffer], after: Iterable[Op], phase: str, counted: bool = False) -> Op:
        """Issues a copy of a chunk's memory to the host; counted: whether it then takes space there."""
        nbytes = sum(nbytes // (self.chunks if key in self.whole_keys else 1) for key, nbytes in memory)
        work = HostCopy(nbytes, activations=counted)
        op = self._issue(Op(f"copy out {name}", OUT, work, [*after], phase))
        self._use(op, *memory)
        return op

    def _copy_back(
        self, name: str, memory: Sequence[Buffer], after: Iterable[Op], phase: str, counted: bool = False
    ) -> Op:
        """Issues a copy of memory to the GPU. counted: whether it takes no space on the host from then on."""
        work = HostCopy(sum(nbytes for _, nbytes in memory), back=True, activations=counted)
        op = self._issue(Op(f"copy in {name}", IN, work, [*after], phase))
        self._use(op, *memory, writes=True)
        return op

    def _issue(self, op: Op) -> Op:
        (self.forward if op.phase == "F" else self.backward).append(op)
        return op

    def _kernel(self, name: str, work: Memory | Attention, after: Iterable[Op], phase: str, launches: float = 1) -> Op:
        return self._issue(Op(name, work=work, after=[*after], phase=phase, launches=launches))

    def _issue_parts(self, ops: Sequence[Op], i: int, core: Sequence[Op], also: Iterable[Op] = ()) -> list[Op]:
        """Issues the parts of a chunk. core: what stands for the attention core, or its backward pass; also: what they
        wait for, too."""
        stands: dict[Op, Sequence[Op]] = {op: [parts[i]] for op, parts in self.parts.items()}
        stands |= {op: core for op in (self.core, self.back) if op is not None}
        waits = [*also]
        for op in ops:
            part = self.parts[op][i]
            part.after = [*replace_dependencies(op.after, stands), *waits]
            self._issue(part)
        return [self.parts[op][i] for op in ops]

    def _block(self, work: Attention, diagonal: bool) -> Attention:
        """Returns the kernel of a chunk of queries and one of keys; those of all blocks have the FLOPs of the whole."""
        n = self.chunks
        share = n * work.share - (n - 1) / 2 if diagonal else 1.0
        return replace(work, q=work.q // n, kv=work.kv // n, share=share)

    # ------------------------------------------------------------------------------------------ forward pass

    def _run_forward(self) -> list[Op]:
        """Issues the forward pass; returns the ops behind which the output of each chunk exists."""
        whole = [op for op in self.whole.forward if op not in self.parts and op is not self.core]
        behind = [op for op in whole if self.core in waited_by(op)]
        self.forward += [op for op in whole if op not in behind]
        merged, copies = list[Op](), list[Op]()
        self.ends, sent = list[Op](), list[Op]()
        for i in range(self.chunks):
            self._issue_parts(self.ahead, i, [])
            there = replace_dependencies(self.core.after, {op: [parts[i]] for op, parts in self.parts.items()})
            before = sent
            if self.offload:
                operands = [self._chunk(operand, i) for operand in (self.q, self.k, self.v)]
                sent = [self._copy(f"qkv {i}", operands, there, "F", self.back is not None)]
                copies += [*self._copy_inputs(i), *sent]
            merged.append(self._attend(i, there, before, sent))
            self._issue_parts(self.outward, i, merged[-1:])
            if self.offload:
                output = [self._chunk(operand, i) for operand in (self.o, self.rows)]
                copies.append(self._copy(f"output {i}", output, merged[-1:], "F", self.back is not None))
        self.first: list[Op] = []
        if self.offload and self.back is not None:
            again = [self._chunk(operand, 0, AGAIN) for operand in (self.q, self.k, self.v, self.o, self.rows)]
            self.first = [self._copy_back("chunk 0", again, self.ends[-2:-1], "F", True)]
        if behind:
            behind[0].after += [*copies, *self.first]  # the host waits for all copies
        self.forward += behind
        return merged

    def _copy_inputs(self, i: int) -> list[Op]:
        """Copies the inputs of a chunk, which the gradients of weights read again, to the host."""
        inputs, entries = self._saved_inputs(), list(self.whole.entry.values())
        return [self._copy(f"input {i}", inputs, entries, "F", True)] if inputs else []

    def _saved_inputs(self) -> list[Buffer]:
        """Returns what is read before the core and again behind its backward pass, and comes from outside."""
        ahead, rest = {*self.ahead}, {*self.rest}
        read = {use.key for use in self.whole.tensor_uses if use.op in ahead and not use.made} & self.whole_keys
        return list(
            {use.key: use.nbytes for use in self.whole.tensor_uses if use.op in rest and use.key in read}.items()
        )

    def _attend(self, i: int, there: Sequence[Op], before: Sequence[Op], sent: Sequence[Op]) -> Op:
        """Issues the blocks of a chunk of queries; returns the op behind which its output exists.

        there: what brings its queries, keys and values.
        before, sent: their copies to the host, of the chunk before and of this.
        """
        waits, total = [*there], list[Op]()
        for j in range(i + 1):
            keys = [self._chunk(operand, j) for operand in (self.k, self.v)]
            if self.offload and j < i and i > 1:
                # Copied during the block before; the host asks for it when the block before that has ended.
                keys = [self._chunk(operand, j, f"for {i}") for operand in (self.k, self.v)]
                asked = [*self.ends[-2:-1], *(sent if j else before)]
                waits.append(self._copy_back(f"kv {j} for {i}", keys, asked, "F"))
            work = self._block(self.core_work, i == j)
            op = self._kernel(f"{self.core.name} {i} {j}", work, [*waits, *self.ends[-1:]], "F")
            self._use(op, self._chunk(self.q, i), *keys)
            total = self._merge((i, j), op, total)
            self.ends.append(total[-1])
            waits = [*sent] if j == 0 else []
        return total[-1]

    def _merge(self, at: tuple[int, int], block: Op, total: Sequence[Op]) -> list[Op]:
        """Merges the output of a block into that of its chunk, in fp32; returns the last op."""
        (i, j), (_, part), (_, rows) = at, self._chunk(self.o, 0, "part"), self._chunk(self.rows, 0, "part")
        wide, name = round(part * self.widening), f"merge {self.core.name} {i} {j}"
        kernels: list[tuple[Memory, float]] = [(Memory("cast", part, wide), 1)]
        if j:
            kernels += [
                (Memory("add", 12 * rows, 8 * rows), ROW_SUM_KERNELS),
                (Memory("add", 2 * (wide + rows), 2 * wide), 2),
                (Memory("add", 2 * wide, wide), 1),
            ]
        kernels += [(Memory("cast", 2 * wide, 2 * part), 2)] if i == j else []  # to exchange it, and to keep it
        ops = [block]
        for work, launches in kernels:
            ops.append(self._kernel(name, work, ops[-1:], "F", launches))
        sums = (f"{self.core.name} sum {i}", wide + rows)
        mine = (f"{self.core.name} part {i} {j}", part + rows)
        self._use(block, mine, writes=True)
        self._use(ops[1] if not j else ops[-1 - (i == j)], mine)
        self._use(ops[1], sums, writes=not j)
        self._use(ops[-1], sums)
        if j:  # the product of the part
            scaled = (f"{self.core.name} scaled {i} {j}", 2 * wide)
            self._use(ops[1], scaled, writes=True)
            self._use(ops[4], scaled)
        if i == j:
            self._use(ops[-1], self._chunk(self.o, i), writes=not (self.o[0] in self.whole_keys and i))
            self._use(ops[-1], self._chunk(self.rows, i), writes=True)
        return ops[-1:]

    # ----------------------------------------------------------------------------------------- backward pass

    def _run_backward(self) -> list[Op]:
        """Issues the backward pass; returns the ops behind which the gradients of each chunk exist."""
        if self.back is None:
            self.backward += self.whole.backward
            return []
        whole = [op for op in self.whole.backward if op not in self.parts and op is not self.back]
        behind = [op for op in whole if self.back in waited_by(op)]
        self.backward += [op for op in whole if op not in behind]
        turns = [(i, q) for i in range(self.chunks) for q in range(i, self.chunks)]
        gradients = _ChunkGradients(self, turns)
        converted = [gradients.run_turns(i) for i in range(self.chunks)]
        self.backward += behind
        return converted

    # ------------------------------------------------------------------------------------------ the fragment

    def _join(self, stands: dict[Op, list[Op]]) -> Fragment:
        """Returns the fragment. stands: the ops that stand for those that are divided."""
        for use in self.whole.tensor_uses:
            if use.op in self.parts:
                self._divide_use(use)
            elif use.op is not self.core and use.op is not self.back:
                self.uses.append(use)

        def end(op: Op) -> Op:
            ops = stands.get(op) or replace_dependencies([op], stands)
            return ops[0] if len(ops) == 1 else Op(op.name, after=list(ops), phase=op.phase)

        whole = self.whole
        exits, grad_exits = ({name: end(op) for name, op in ends.items()} for ends in (whole.exit, whole.grad_exit))
        params = [
            replace(param, ready=end(param.ready), used=stands.get(param.used, [param.used])[0])
            for param in whole.params
        ]
        joined = replace(whole, forward=self.forward, backward=self.backward, tensor_uses=self.uses)
        return replace(joined, exit=exits, grad_exit=grad_exits, params=params)

    def _divide_use(self, use: TensorUse) -> None:
        parts = self.parts[use.op]
        restored = self.offload and use.op.phase != "F" and use.key in dict(self._saved_inputs())
        for i, part in enumerate(parts):
            if restored:
                self._use(part, self._chunk((use.key, use.nbytes), i, AGAIN))
            elif use.key not in self.whole_keys:
                key, nbytes = self._chunk((use.key, use.nbytes), i)
                self.uses.append(replace(use, key=key, nbytes=nbytes, op=part))
            elif part in (parts[0], parts[-1]):
                self.uses.append(replace(use, op=part, made=use.made and not i))


class _ChunkGradients:
    """The backward pass of the attention core in turns of a chunk of keys and one of queries.

    turns: by turn, the numbers of the chunks of keys and of queries.
    """

    def __init__(self, attention: ChunkedAttention, turns: Sequence[tuple[int, int]]) -> None:
        self.attention, self.turns = attention, turns
        uses = [use for use in attention.whole.tensor_uses if use.op is attention.back]
        self.gradients = [(use.key, use.nbytes) for use in uses if use.made]
        self.arrives = next((use.key, use.nbytes) for use in uses if use.key.startswith("d:") and not use.made)
        self.first_turns = [turns.index((i, i)) for i in range(attention.chunks)]
        self.where = [AGAIN if attention.offload else ""] * attention.chunks
        self.ends, self.copied, self.waits = list[Op](), list[Op](), list(attention.first)
        self.inputs = self._load_inputs(0, list(attention.whole.grad_entry.values()))

    def run_turns(self, i: int) -> Op:
        """Issues the turns of a chunk of keys, and what follows on its gradients; returns the op behind which they
        exist."""
        a = self.attention
        for q in range(i, a.chunks):
            self._run_turn(self.first_turns[i] + q - i)
        nbytes = sum(nbytes for _, nbytes in self.gradients) // a.chunks
        work = Memory("cast", round(nbytes * a.widening), nbytes)
        converted = a._kernel(f"convert d{a.core.name} {i}", work, self.ends[-1:], "B", 3)
        a._use(converted, self._sum_of_queries(i), self._sum_of_keys(i))
        for buffer in self.gradients:
            a._use(converted, a._chunk(buffer, i), writes=True)
        parts = a._issue_parts(a.rest, i, [converted])
        for part in parts:
            if part.phase == "W":
                part.after += self.inputs
        if a.offload and i < a.chunks - 1:
            exchanged = all_to_alls(parts) or [converted]
            keys = [a._chunk(operand, i + 1, AGAIN) for operand in (a.k, a.v)]
            self.waits.append(a._copy_back(f"kv {i + 1}", keys, exchanged, "B", True))
            self.inputs = self._load_inputs(i + 1, exchanged)
        return converted

    def _load_inputs(self, i: int, after: Sequence[Op]) -> list[Op]:
        a = self.attention
        inputs = [a._chunk(buffer, i, AGAIN) for buffer in a._saved_inputs()] if a.offload else []
        return [a._copy_back(f"input {i}", inputs, after, "B", True)] if inputs else []

    def _sum_of_queries(self, q: int) -> Buffer:
        a, (_, nbytes) = self.attention, self.gradients[0]
        return f"d{a.core.name} sum q {q} {self.where[q]}", round(nbytes * a.widening) // a.chunks

    def _sum_of_keys(self, i: int) -> Buffer:
        a = self.attention
        nbytes = sum(nbytes for _, nbytes in self.gradients[1:])
        return f"d{a.core.name} sum kv {i}", round(nbytes * a.widening) // a.chunks

    def _gradient_of_output(self, q: int, i: int) -> Buffer:
        return self.attention._chunk(self.arrives, q, self.where[q] if i and q else "")

    def _run_turn(self, t: int) -> None:
        a, (i, q) = self.attention, self.turns[t]
        assert isinstance(a.back, Op) and isinstance(a.back.work, Attention)
        if t == 0:
            self._bring_gradient(0, [])
        part = sum(nbytes for _, nbytes in self.gradients) // a.chunks
        mine, sums = (f"d{a.core.name} part {i} {q}", part), [self._sum_of_queries(q), self._sum_of_keys(i)]
        begun = [*sums[1:]] * (q == i) + [*sums[:1]] * (t == 0 or (i == 0 and not a.offload))
        zeroed = a._kernel(
            f"make d{a.core.name} {i} {q}",
            Memory("zero-grad", 0, part + sum(n for _, n in begun)),
            self.ends[-1:],
            "B",
            3,
        )
        a._use(zeroed, mine, *begun, writes=True)
        if t == 0 and a.offload:
            self.waits.append(a._copy("dq 0", sums[:1], [zeroed], "B"))
        work = a._block(a.back.work, i == q)
        block = a._kernel(f"d{a.core.name} {i} {q}", work, [zeroed, *self.waits], "B")
        keys = [a._chunk(operand, i, AGAIN if a.offload else "") for operand in (a.k, a.v)]
        queries = [a._chunk(operand, q, self.where[q]) for operand in (a.q, a.o, a.rows)]
        a._use(block, *keys, *queries, self._gradient_of_output(q, i), mine)
        before, summed = self.where[q], self._sum_of_queries(q)
        self.waits = self._fetch(t + 1) if t + 1 < len(self.turns) else []
        wide = round(part * a.widening)
        added = a._kernel(f"add d{a.core.name} {i} {q}", Memory("add", part + wide, wide), [block, *self.waits], "B", 3)
        a._use(added, mine, summed, sums[1])
        self.ends.append(added)
        if a.offload:
            assert before == self.where[q]
            self.copied.append(a._copy(f"dq {q} of {i}", [summed], [added], "B"))

    def _bring_gradient(self, q: int, after: Sequence[Op]) -> list[Op]:
        """Exchanges the gradient of the output of a chunk, and copies it to the host."""
        a = self.attention
        assert a.back is not None
        arrived = a._issue_parts(a.inward, q, [], after) or list(a.back.after)
        if q == 0:
            self.waits += arrived
        if a.offload:
            a._copy(f"do {q}", [a._chunk(self.arrives, q)], arrived, "B")
        return arrived

    def _fetch(self, t: int) -> list[Op]:
        """Brings what a turn needs of its chunk of queries, during the turn before; returns what the turn waits for."""
        a, (i, q) = self.attention, self.turns[t]
        asked = [*self.ends[-1:], *self.copied[-1:]]
        arrived = self._bring_gradient(q, asked) if i == 0 else []
        if not a.offload or self.turns[t - 1][1] == q:
            return arrived
        self.where[q] = f"at {t}"
        saved = [a._chunk(operand, q, self.where[q]) for operand in (a.q, a.o, a.rows)]
        gradients = [self._gradient_of_output(q, i)] * (i > 0) + [self._sum_of_queries(q)]
        is_last = q == i or (q == a.chunks - 1 and i == q - 1)
        copies = [a._copy_back(f"queries {q} for {i}", saved, asked, "B", is_last)]
        return [*arrived, *copies, a._copy_back(f"dq {q} for {i}", gradients, asked, "B")]


def waited_by(op: Op) -> set[Op]:
    """Returns the ops that an op waits for, directly or through others."""
    seen, left = set[Op](), [*op.after]
    while left:
        other = left.pop()
        if other not in seen:
            seen.add(other)
            left += other.after
    return seen


def all_to_alls(ops: Iterable[Op]) -> list[Op]:
    """Returns the ops that are all-to-alls."""
    return [op for op in ops if isinstance(op.work, Collective) and op.work.operation == "all_to_all"]
