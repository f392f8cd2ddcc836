"""Attention in steps, a block of scores each: each step computes queries against the keys at hand, lowered by the
schemes inside, while what the next step needs arrives in a second buffer.

The outputs of the steps are merged by their row sums (online softmax), in fp32 until the last step; gradients are added
up. A kernel merges an output (Transformer Engine), or *eager* kernels do, each for an operation of

    out - sigmoid(sum' - sum) (out - out')

on fp32 copies of the outputs (torch.distributed.tensor.experimental). *Scripted* merges are these operations in a
kernel of TorchScript's fuser (zhuzilin/ring-flash-attention and USP, utils.py); the copies before and behind all merges
stay. In both running sums of gradients are fp32, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from meshcast.simulator.ir.attention_mask import DIAGONAL, WHOLE, RankShare, ScoreBlock
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import LowerModule

STREAM = "sequence"
INNER = "sequence-inner"
"""The stream of a ring inside another ring: both send at the same time, to different neighbours."""

Shares = tuple[Fraction, float]
"""A share of the work, mean over ranks, and the pace of the most loaded rank (see `slowest_rank`)."""

KernelBytes = tuple[int, int, bool]
"""Bytes that a kernel reads and writes, and whether all ranks work on the whole."""

MergeKernels = Literal["fused", "scripted", "eager"]

HALF = Fraction(1, 2)


def mask_blocks(
    token_order: str, ranks: int, bidirectional: bool = False, tile: tuple[int, int] | None = None
) -> list[ScoreBlock]:
    """Returns the score blocks that `ranks` compute in turn: first that of their keys, then those of the keys of
    the rank 1, 2, ... places before them. tile: as in `RankShare`."""
    steps = ([(rank, (rank - i) % ranks) for rank in range(ranks)] for i in range(ranks))
    return [mask_block(token_order, pairs, bidirectional, tile) for pairs in steps]


def mask_block(
    token_order: str, pairs: Sequence[tuple[int, int]], bidirectional: bool = False, tile: tuple[int, int] | None = None
) -> ScoreBlock:
    """Returns the score block of a step. Bidirectional attention computes all of it, causal attention shares.

    pairs: for every rank the numbers of the parts of a sequence that its queries and the keys at hand are from.

    Of a rank's keys the half before its queries counts. Otherwise the order of positions decides what the mask
    leaves where the keys are from an earlier part, and where they are from a later part:

    contiguous (the r-th part of the positions on rank r): the whole block; nothing.
    striped (every p-th position): the half of the block with its diagonal; the half without it.
    zigzag (parts r and 2p-1-r of 2p): all queries against the first half of the keys; the second half of the queries
        against all keys.
    """
    if bidirectional:
        return WHOLE
    signs = Counter((query > key) - (query < key) for query, key in pairs)
    diagonal, behind, front = (Fraction(signs[sign], len(pairs)) for sign in (0, 1, -1))
    cases = {
        "contiguous": (RankShare(behind),),
        "striped": (
            RankShare(behind, pairs=HALF, diagonals=HALF, tile=tile),
            RankShare(front, pairs=HALF, diagonals=-HALF, tile=tile),
        ),
        "zigzag": (RankShare(behind, keys=HALF), RankShare(front, queries=HALF)),
    }
    shares = (RankShare(diagonal, pairs=HALF, tile=tile), *cases[token_order])
    return ScoreBlock(tuple(share for share in shares if share.ranks))


class AttentionSteps:
    """The attention of an operator in steps, each for a score block, whose outputs are merged `merges` times.

    Inside an off-diagonal block of an outer ring all steps are equal parts of that block.

    merge: the kernels of a merge.
    start: a shift that brings the first step its operands; it moves no bytes yet. None: a rank's shards are the first.
    """

    def __init__(
        self,
        operator: CoreAttention,
        inner: LowerModule,
        ring_axes: tuple[str, ...],
        mask_blocks: Sequence[ScoreBlock],
        merges: int,
        merge: MergeKernels = "fused",
        start: Collective | None = None,
    ) -> None:
        self.start = start
        self.operator, self.ring_axes, self.count, self.merges_left = operator, ring_axes, len(mask_blocks), merges
        self.merge, self.in_fp32 = merge, merge != "fused"
        inside = operator.block if operator.block not in (None, DIAGONAL) else None
        self.step_operators = [
            replace(operator, name=f"{operator.name} {i}", block=inside or block) for i, block in enumerate(mask_blocks)
        ]
        self.step_fragments = [inner(part) for part in self.step_operators]
        self.stream = STREAM if operator.block is None else INNER
        self.q, self.k, self.v = (tensor.name for tensor in operator.ins)
        self.o = operator.outs[0].name
        out = self.fragment = Fragment(entry={t.name: Op(f"{t.name} in") for t in operator.ins})
        out.grad_entry = {self.o: Op(f"d{self.o} in", phase="B")}
        for step in self.step_fragments:
            for name in (self.q, self.k, self.v):
                step.entry[name].after.append(out.entry[name])
            step.grad_entry[self.o].after.append(out.grad_entry[self.o])
        self._sums: list[Op] = []
        self.lse = max(
            t.nbytes for t in self.step_fragments[0].tensor_uses if t.key == f"{self.step_operators[0].name}.lse"
        )

    @property
    def do(self) -> str:
        """The gradient of the output, with ``d:``: of its 8-bit copy, where the projection behind reads that."""
        stems = (use.key.partition("@")[0] for use in self.step_fragments[0].tensor_uses)
        return next(stem for stem in stems if stem.partition(".")[0] == f"d:{self.o}")

    def nbytes(self, *names: str) -> int:
        """Counts the local bytes of tensors; of gradients, with ``d:`` in front of the name."""
        tensor_uses = self.step_fragments[0].tensor_uses
        return sum(max(t.nbytes for t in tensor_uses if t.key.startswith(f"{name}@")) for name in names)

    def memory_key(self, what: str, i: int | str = "") -> str:
        return f"{self.operator.name}.{what}{i}"

    def take_over_memory(self, i: int, forward: Mapping[str, str], backward: Mapping[str, str]) -> None:
        """Takes over the memory uses of step i.

        forward, backward: memory keys in place of those of tensors (gradients: ``d:``).

        Forward, the output and its row sums get keys of the step; backward, those of the merged output. What a step
        recomputes is the step's.
        """
        step, lse = self.step_fragments[i], f"{self.step_operators[i].name}.lse"
        merged = self.count > 1
        ahead = {self.o: self.memory_key("o", i)} if merged else {}
        ahead |= {lse: self.memory_key("lse", i if merged else ""), **forward}
        back = {lse: self.memory_key("lse"), **backward}
        inside = set(step.forward)
        for tensor_use in step.tensor_uses:
            stem, of_tensor, _ = tensor_use.key.partition("@")
            key = (ahead if tensor_use.op in inside else back).get(stem, tensor_use.key)
            if of_tensor and "~" in tensor_use.key:
                key = f"{tensor_use.key}.{i}"
            self.fragment.tensor_uses.append(replace(tensor_use, key=key))

    def use_memory(self, op: Op, *memory: tuple[str, int], made: bool = False) -> None:
        """Notes that `op` uses memory, as keys and bytes."""
        self.fragment.tensor_uses += [TensorUse(key, nbytes, op, made) for key, nbytes in memory]

    def use_tensors(self, op: Op, *names: str, made: bool = False) -> None:
        """Notes that `op` writes or reads tensors (gradients: ``d:``) in their layouts outside the steps."""
        stems = dict.fromkeys(names)
        for step in self.step_fragments:
            for tensor_use in step.tensor_uses:
                stem, at, _ = tensor_use.key.partition("@")
                if at and stem in stems and stems[stem] is None and "~" not in tensor_use.key:
                    stems[stem] = tensor_use.key
        self.use_memory(op, *((key, self.nbytes(name)) for name, key in stems.items() if key), made=made)

    def partial_output(self, i: int) -> list[tuple[str, int]]:
        """Returns the memory of the output of step i and of its row sums."""
        return [(self.memory_key("o", i), self.nbytes(self.o)), (self.memory_key("lse", i), self.lse)]

    def shift(self, name: str, nbytes: float, by: int, after: Iterable[Op], phase: str, pace: float = 1) -> Op:
        """Sends from every rank to the rank `by` places further round the group."""
        work = Collective("shift", round(nbytes), self.ring_axes, by=by, pace=pace)
        return Op(f"{name} {self.operator.name}", self.stream, work, list(after), phase)

    def bring_first(self, name: str, nbytes: int, after: Iterable[Op], phase: str, back: bool = False) -> Op:
        """Returns the shift that brings the first step its operands, or takes results back; some ranks may send
        nothing."""
        assert self.start is not None
        targets = self.start.targets
        if back:
            targets = tuple(sorted(range(len(targets)), key=targets.__getitem__))
        moving = Fraction(sum(i != to for i, to in enumerate(targets)), len(targets))
        work = replace(self.start, nbytes=round(nbytes * moving), targets=targets, pace=float(1 / moving))
        return Op(f"{name} {self.operator.name}", self.stream, work, list(after), phase)

    def merge_output(self, shares: Shares, after: Sequence[Op], *parts: tuple[str, int]) -> None:
        """Merges a partial output, in memory `parts`, into the running output, both rescaled by their row sums."""
        self.merges_left -= 1
        first, last = not self._sums, not self.merges_left
        total = self.nbytes(self.o) // BYTES[self.operator.outs[0].dtype] * 4
        behind = [*(self._sums or [self.step_fragments[0].exit[self.o]]), *after]
        ops = self._kernels(f"merge {self.operator.name}", self._merge_bytes(first, last, total), shares, behind, "F")
        if first:
            self.use_memory(ops[0], *self.partial_output(0))
        if self.in_fp32 or not (first and last):
            self.use_through(ops, (self.memory_key("sum"), total), made=first)
        if self.merge == "eager":
            # The fp32 copy of the partial output, the difference, and the product or the new output.
            self.use_through(ops, (self.memory_key("merged", self.merges_left), 3 * total), made=True)
        elif self.in_fp32:  # the new output beside the old one
            self.use_through(ops, (self.memory_key("merged", self.merges_left), total), made=True)
        self.use_through(ops, *parts)
        self.use_memory(ops[-1], (self.memory_key("lse"), self.lse), made=first)
        if last:
            self.use_tensors(ops[-1], self.o, made=True)
            self.fragment.exit = {self.o: ops[-1]}
        self._sums = ops[-1:]
        self.fragment.forward += ops

    def _merge_bytes(self, first: bool, last: bool, total: int) -> list[KernelBytes]:
        """Returns what the kernels of a merge read and write. total: bytes of the output in fp32."""
        part, lse = self.nbytes(self.o), self.lse
        if not self.in_fp32:
            return [((part if first else total) + part + 2 * lse, (part if last else total) + lse, False)]
        # Row sums: two differences and two functions of them, and the new sums.
        sums = (8 * lse, 5 * lse, False)
        merge = [(part, total, False), sums, (2 * total, total, False), (total + lse, total, False)]
        merge = [*merge, (2 * total, total, False)]
        if self.merge == "scripted":
            merge = [(total + part + 2 * lse, total + lse, False)]
        begin, end = [(part, total, True)] * first, [(total, part, True)] * last
        return [*begin, *merge, *end]

    def add_gradients(
        self, name: str, nbytes: int, shares: Shares, after: Sequence[Op], ends: tuple[bool, bool] | None = None
    ) -> list[Op]:
        """Adds gradients of `nbytes` to the running sum; those beside fp32 outputs are in fp32.

        ends: whether this is the first, and whether it is the last sum; None: the running sum is in fp32 before and
            after, in separate memory.
        """
        total, (first, last) = 2 * nbytes if self.in_fp32 else nbytes, ends if self.in_fp32 and ends else (False, False)
        begin, end = [(nbytes, total, True)] * first, [(total, nbytes, True)] * last
        ops = self._kernels(f"add {name}", [*begin, (nbytes + total, total, False), *end], shares, after, "B")
        if self.in_fp32 and ends:
            self.use_through(ops, (self.memory_key(f"d:sum {name}"), total), made=first)
        self.fragment.backward += ops
        return ops

    def use_through(self, ops: Sequence[Op], *memory: tuple[str, int], made: bool = False) -> None:
        """Notes that successive kernels use memory, which the first of them writes or reads."""
        self.use_memory(ops[0], *memory, made=made)
        if len(ops) > 1 or made:
            self.use_memory(ops[-1], *memory)

    def convert_gradients(self, name: str, moved: tuple[int, int], after: Sequence[Op]) -> Op:
        """Converts gradients to fp32, or back. moved: bytes before and after."""
        ops = self._kernels(f"convert {name}", [(*moved, True)], (Fraction(1), 1.0), after, "B")
        self.fragment.backward += ops
        return ops[0]

    def _kernels(
        self, name: str, moved: Iterable[KernelBytes], shares: Shares, after: Sequence[Op], phase: str
    ) -> list[Op]:
        """Makes successive kernels; those that do not work on the whole work on `shares` of it."""
        mean, pace = shares
        ops: list[Op] = []
        for read, write, whole in moved:
            work = Memory("add", read, write) if whole else Memory("add", round(mean * read), round(mean * write))
            work = work if whole else replace(work, pace=pace)
            ops.append(Op(name, work=work, after=[*(ops[-1:] or after)], phase=phase))
        return ops
