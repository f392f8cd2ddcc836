"""Overlap of the collectives of tensor parallelism with the GEMMs before or after them: base of Async-TP and FLUX.

If ranks shard the rows of activations, an all-gather of rows precedes a GEMM, or a reduce-scatter of rows follows it. A
part of such a GEMM reads or produces only a part of the rows, so some rows can be sent while others are computed. If
they do not shard the rows, an all-reduce follows a GEMM.
`find_gemm_collectives` finds these pairs in a lowered unit: forward, backward and in recomputed passes. A scheme
replaces each pair; `shift_shards` and `sum_shards` are the ops in place of a collective if every rank sends its shards
directly to the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import ClassVar

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.capabilities import ChangesWholeUnits
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Module, Unit
from meshcast.simulator.ir.ops import BYTES, COMPUTE, Collective, Fragment, Gemm, Memory, Op, Work
from meshcast.simulator.ir.scheme import LowerModule, TensorScheme
from meshcast.simulator.ir.settings import OptionValues
from meshcast.simulator.lowering.rewrite import Rewrite, split_work_by, working_predecessors


@dataclass(frozen=True)
class OverlapSetting:
    """A setting of closed forms: a GEMM [rows, inner] x [inner, columns] in bf16 over p ranks, and its collective.

    p: ranks.
    flop_per_s: rate of a rank [FLOP/s]; memory traffic takes no time.
    bytes_per_s: rate at which a rank sends.
    regather: the framework all-gathers inputs again in the backward pass.
    residual_elements: b s h of a layer on the same ranks (see `sent`).
    options: of the scheme.
    """

    p: int = 2
    rows: int = 1024
    inner: int = 64
    columns: int = 512
    flop_per_s: float = 1e9
    bytes_per_s: float = 1e6
    regather: bool = False
    residual_elements: int = 64 * 128
    options: OptionValues = ()

    @property
    def gemm(self) -> Gemm:
        return Gemm(self.rows, self.columns, self.inner)

    @property
    def gemm_s(self) -> float:
        """Seconds of the whole GEMM."""
        return self.gemm.flops / self.flop_per_s

    @property
    def input_s(self) -> float:
        """Seconds in which a rank sends as many bytes as all rows of the input have."""
        return 2 * self.rows * self.inner / self.bytes_per_s

    @property
    def output_s(self) -> float:
        """Seconds in which a rank sends as many bytes as all rows of the output have."""
        return 2 * self.rows * self.columns / self.bytes_per_s

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a layer under Megatron sequence parallelism, forward and backward."""
        volume = 10 if self.regather else 8
        return volume * (self.p - 1) / self.p * self.residual_elements * 2

    @property
    def sent_reduced(self) -> float:
        """The same without sequence parallelism: two all-reduces forward and two backward."""
        return 8 * (self.p - 1) / self.p * self.residual_elements * 2


OF_SHARDED_ROWS = ("all_gather", "reduce_scatter")
"""Collectives where ranks shard the rows of activations."""


OVERLAP_ROLE = "overlap of tensor parallelism"
"""The role of the schemes beside a tensor scheme that overlap its communication."""


class TensorOverlap(TensorScheme, ChangesWholeUnits):
    """Base of the schemes that are used beside a tensor scheme and replace its pairs of collective and GEMM.

    Customise by: `replace_pair`.
    """

    role = OVERLAP_ROLE
    most_axes = 0
    collectives: ClassVar[tuple[str, ...]]
    """The collectives whose pairs are replaced."""

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if not isinstance(module, Unit):
            return fragment
        rewrite = Rewrite(fragment)
        for pair in find_gemm_collectives(fragment, self.family, self.mesh, self.collectives):
            self.replace_pair(rewrite, pair)
        return rewrite.apply()

    @abstractmethod
    def replace_pair(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        """Replaces a collective and its GEMMs."""


class ShardedRowsOverlap(TensorOverlap):
    """Base of those that overlap the all-gathers and reduce-scatters of Megatron sequence parallelism.

    Customise by: `replace_gather`, `replace_scatter`.
    """

    collectives = OF_SHARDED_ROWS

    def replace_pair(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        (self.replace_gather if pair.work.operation == "all_gather" else self.replace_scatter)(rewrite, pair)

    @abstractmethod
    def replace_gather(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        """Replaces an all-gather and the GEMMs that read its rows."""

    @abstractmethod
    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        """Replaces a GEMM and the reduce-scatter that sums its rows."""


@dataclass(frozen=True, eq=False)
class GemmCollective:
    """An all-gather with the GEMMs that read its rows, or a reduction with the GEMM that produces its rows.

    collective: the op of the all-gather, reduce-scatter or all-reduce.
    products: the GEMMs, a single GEMM for a reduction.
    ranks: number of ranks in the collective.
    """

    collective: Op
    products: tuple[Op, ...]
    ranks: int

    @property
    def work(self) -> Collective:
        work = self.collective.work
        assert isinstance(work, Collective)
        return work

    @property
    def gathers(self) -> bool:
        return self.work.operation == "all_gather"

    @property
    def shard(self) -> int:
        """Bytes of a rank's rows."""
        return self.work.nbytes // self.ranks

    def rows(self, product: Op, counts: Sequence[int]) -> list[Work]:
        """Splits a GEMM by its rows. counts: of the ranks that own the rows of each part."""
        assert isinstance(product.work, Gemm)
        return split_work_by(product.work, counts)


def find_gemm_collectives(
    fragment: Fragment, family: str, mesh: Mesh, collectives: Sequence[str] = OF_SHARDED_ROWS
) -> list[GemmCollective]:
    """Finds the pairs of such a collective and a GEMM on the streams of a family of schemes.

    A GEMM is in a single pair at most: that with the largest collective. Not paired are collectives whose rows the
        ranks do
    not divide, all-gathers of weights, and GEMMs of weight gradients, which sum over all rows and overlap with other
    collectives as they are.
    """
    pairs: list[GemmCollective] = []
    tensors: dict[Op, set[str]] = defaultdict(set)
    for tensor_use in fragment.tensor_uses:
        if tensor_use.category != "parameters":
            tensors[tensor_use.op].add(tensor_use.key)
    for issued in (fragment.forward, fragment.backward):
        for op in issued:
            work = op.work
            if not isinstance(work, Collective) or op.stream.partition("-")[0] != family:
                continue
            if work.members is not None or work.operation not in collectives:
                continue
            sharing = [other for other in issued if tensors[op] & tensors[other]]
            gemms = (
                _reading_gemms(op, sharing, issued) if work.operation == "all_gather" else _producing_gemm(op, sharing)
            )
            ranks = mesh.size(work.axes)
            if (
                ranks > 1
                and gemms
                and work.nbytes % ranks == 0
                and all(_row_count(gemm) % ranks == 0 for gemm in gemms)
            ):
                pairs.append(GemmCollective(op, tuple(gemms), ranks))
    return _choose_pairs(pairs)


def _choose_pairs(pairs: list[GemmCollective]) -> list[GemmCollective]:
    """Chooses pairs that share no GEMM, the largest collectives first."""
    chosen: list[GemmCollective] = []
    taken: set[Op] = set()
    for pair in sorted(pairs, key=lambda pair: -pair.work.nbytes):
        if not taken & set(pair.products):
            chosen.append(pair)
            taken |= set(pair.products)
    return chosen


PART_LAUNCHES = 1 / 7
"""Time of the host for each further part of a split GEMM or collective, over that of an op of the framework: a call of
the seven of an op. For a part of a GEMM the library chooses an algorithm anew (te_gemm: layouts, heuristic, launch);
for a part of a collective it launches a kernel to send and one to receive, records an event and makes two streams wait
for it (split_overlap_ag and split_overlap_rs of transformer_engine/pytorch/csrc/comm_gemm_overlap.h, NVIDIA/
TransformerEngine v1.9)."""


def make_part(op: Op, i: int, parts: int, work: Work, after: Iterable[Op]) -> Op:
    """Makes a part of an op, which the host launches together as a single op of the framework, each part but the first
    with calls of its own."""
    launches = (op.launches + PART_LAUNCHES * (parts - 1)) / parts
    return replace(op, name=f"{op.name} {i}", work=work, after=list(after), launches=launches)


def shift_shards(pair: GemmCollective, after: Sequence[Iterable[Op]], both_ways: Sequence[bool] = ()) -> list[Op]:
    """Makes shifts in place of a collective: every rank sends a shard to the rank 1, 2, ... further, by copy engines.

    after: by shift, the ops that it waits for.
    both_ways: whether a shift also sends a shard to the rank as far back; by default none does.
    """
    op, work = pair.collective, replace(pair.work, operation="shift", nbytes=pair.shard, sms=0)
    turns = enumerate(zip(after, both_ways or [False] * len(after), strict=True), 1)
    return [make_part(op, i, len(after), replace(work, by=i, both_ways=both), waits) for i, (waits, both) in turns]


def sum_shards(pair: GemmCollective, after: Iterable[Op]) -> Op:
    """Makes the kernel that adds up the shards received from all ranks, in place of a reduce-scatter and launched with
    their shifts."""
    add = Memory("add", pair.ranks * pair.shard, pair.shard)
    return replace(
        pair.collective, name=f"add {pair.collective.name}", stream=COMPUTE, work=add, after=[*after], launches=0.0
    )


def _row_count(op: Op) -> float:
    assert isinstance(op.work, Gemm)
    return op.work.m


def _row_gemm(op: Op, phase: str) -> Gemm | None:
    """Returns the work of an op if it is a GEMM in `phase` that is no weight gradient."""
    work = op.work
    return work if isinstance(work, Gemm) and work.layout != "nt" and op.phase == phase else None


def _reading_gemms(gather: Op, sharing: Sequence[Op], issued: Sequence[Op]) -> list[Op]:
    """Returns the first GEMM that reads the rows of an all-gather, and those right after it that wait for nothing else.

    sharing: the ops that use a tensor of the all-gather.
    """
    assert isinstance(gather.work, Collective)
    nbytes = gather.work.nbytes

    def reads(op: Op) -> bool:
        work = _row_gemm(op, gather.phase)
        fits = work is not None and work.batch * work.m * work.k * BYTES[work.dtype] == nbytes
        return fits and op in sharing and gather in working_predecessors(op)

    first = next((i for i, op in enumerate(issued) if reads(op)), len(issued))
    behind = set(issued[first:])
    kernels = (op for op in issued[first:] if op.stream == COMPUTE)
    return list(takewhile(lambda op: reads(op) and not working_predecessors(op) & behind, kernels))


def _producing_gemm(reduction: Op, sharing: Sequence[Op]) -> list[Op]:
    """Returns the GEMM whose rows a reduction sums, if it alone produces them.

    A reduction in issue order also waits for the weight gradients issued before it.
    """
    assert isinstance(reduction.work, Collective)
    waits = [op for op in working_predecessors(reduction) if op.phase == reduction.phase]
    work = _row_gemm(waits[0], reduction.phase) if len(waits) == 1 and waits[0] in sharing else None
    if work is None or work.batch * work.m * work.n * BYTES[work.out_dtype] != reduction.work.nbytes:
        return []
    return waits
