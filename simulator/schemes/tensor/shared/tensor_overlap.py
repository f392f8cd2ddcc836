"""Pairs of a collective and the products beside it: what overlap inside a block takes apart, whoever made them.

Where ranks cut a product's rows, an all-gather brings them in front of it (``all-gather, GEMM``), or a reduce-scatter
adds up and hands out those that it has made (``GEMM, reduce-scatter``). Such a pair needs no more than a part of the
rows at a time, so one part can move while another is computed. `find_gemm_collectives` finds them in what a site was lowered to,
forward, backward and in what is made again; `shift_shards` and `sum_shards` are what stands in for the collective when its parts
go from rank to rank directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from simulator.ir.mesh import Mesh
from simulator.ir.modules import Module, Unit
from simulator.ir.ops import BYTES, COMPUTE, Collective, Fragment, Gemm, Memory, Op, Work
from simulator.ir.scheme import LowerModule, TensorScheme
from simulator.lowering.rewrite import Rewrite, split_work, working_predecessors


@dataclass(frozen=True)
class OverlapSetting:
    """A GEMM [rows, inner] x [inner, columns] in bf16, of which each rank has a part, and its collective.

    p: ranks.
    flop_per_s: of one rank; memory traffic costs nothing.
    bytes_per_s: at which one rank sends.
    regather: the framework all-gathers inputs again in the backward pass.
    residual_elements: b s h of a layer on the same ranks (see `sent`).
    """

    p: int = 2
    rows: int = 1024
    inner: int = 64
    columns: int = 512
    flop_per_s: float = 1e9
    bytes_per_s: float = 1e6
    regather: bool = False
    residual_elements: int = 64 * 128

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


class TensorOverlap(TensorScheme, ABC):
    """Base of the schemes that stand beside a tensor scheme that cuts activations, whichever that is, and take over its
    pairs of communication and products. A scheme says what stands in for each: `replace_gather`, `replace_scatter`."""

    role = "overlap of tensor parallelism"
    most_axes = 0

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if not isinstance(module, Unit):
            return fragment
        rewrite = Rewrite(fragment)
        for pair in find_gemm_collectives(fragment, self.family, self.mesh):
            (self.replace_gather if pair.gathers else self.replace_scatter)(rewrite, pair)
        return rewrite.apply()

    @abstractmethod
    def replace_gather(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        """Puts other ops in the places of an all-gather and the products that read its rows."""

    @abstractmethod
    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        """Puts other ops in the places of a product and the reduce-scatter that adds up its rows."""


@dataclass(frozen=True, eq=False)
class GemmCollective:
    """A collective, and the products that read the rows that it gathers, or the one whose rows it adds up.

    ranks: in its group.
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
        """Bytes of one rank's rows."""
        return self.work.nbytes // self.ranks

    def rows(self, product: Op) -> list[Work]:
        """A product for the rows of one rank after another."""
        assert isinstance(product.work, Gemm)
        return split_work(product.work, self.ranks)


def find_gemm_collectives(fragment: Fragment, family: str, mesh: Mesh) -> list[GemmCollective]:
    """The pairs on the streams of a family of schemes. A product is in one of them at most: the one that moves more.

    Rows that are not the same number on every rank make no pair. Gradients of weights are none either: they sum over
    the rows, and run beside other collectives as they are; and weights that are gathered before use are not rows.
    """
    found: list[GemmCollective] = []
    tensors: dict[Op, set[str]] = defaultdict(set)
    for tensor_use in fragment.tensor_uses:
        if tensor_use.category != "parameters":
            tensors[tensor_use.op].add(tensor_use.key)
    for issued in (fragment.forward, fragment.backward):
        for op in issued:
            work = op.work
            if not isinstance(work, Collective) or op.stream.partition("-")[0] != family or work.members is not None:
                continue
            own = [one for one in issued if tensors[op] & tensors[one]]
            beside = _reading_gemms(op, own, issued) if work.operation == "all_gather" else _producing_gemm(op, own)
            ranks = mesh.size(work.axes)
            if (
                ranks > 1
                and beside
                and work.nbytes % ranks == 0
                and all(_row_count(one) % ranks == 0 for one in beside)
            ):
                found.append(GemmCollective(op, tuple(beside), ranks))
    chosen: list[GemmCollective] = []
    taken: set[Op] = set()
    for pair in sorted(found, key=lambda one: -one.work.nbytes):
        if not taken & set(pair.products):
            chosen.append(pair)
            taken |= set(pair.products)
    return chosen


def shift_shards(pair: GemmCollective, after: Sequence[Iterable[Op]]) -> list[Op]:
    """A shard from every rank to each other one in turn, in the place of a collective.

    after: what each of them waits for.
    """
    op, work = pair.collective, replace(pair.work, operation="shift", nbytes=pair.shard)
    turns = enumerate(after, 1)
    return [replace(op, name=f"{op.name} {i}", work=replace(work, by=i), after=[*waits]) for i, waits in turns]


def sum_shards(pair: GemmCollective, after: Iterable[Op]) -> Op:
    """The sum of the shards that have come from all ranks, in the place of a reduce-scatter."""
    add = Memory("add", pair.ranks * pair.shard, pair.shard)
    return replace(pair.collective, name=f"add {pair.collective.name}", stream=COMPUTE, work=add, after=[*after])


def _row_count(op: Op) -> float:
    assert isinstance(op.work, Gemm)
    return op.work.m


def _row_gemm(op: Op, phase: str) -> Gemm | None:
    """The product of rows that an op is, if it is one in this phase."""
    work = op.work
    return work if isinstance(work, Gemm) and work.layout != "nt" and op.phase == phase else None


def _reading_gemms(gather: Op, own: Sequence[Op], issued: Sequence[Op]) -> list[Op]:
    """The first product whose rows come from a gather, and those right behind it that need no more than it does.

    own: the ops that touch what the gather does.
    """
    assert isinstance(gather.work, Collective)
    nbytes = gather.work.nbytes

    def reads(op: Op) -> bool:
        work = _row_gemm(op, gather.phase)
        fits = work is not None and work.batch * work.m * work.k * BYTES[work.dtype] == nbytes
        return fits and op in own and gather in working_predecessors(op)

    first = next((i for i, op in enumerate(issued) if reads(op)), len(issued))
    behind = set(issued[first:])
    kernels = (op for op in issued[first:] if op.stream == COMPUTE)
    return list(takewhile(lambda op: reads(op) and not working_predecessors(op) & behind, kernels))


def _producing_gemm(scatter: Op, own: Sequence[Op]) -> list[Op]:
    """The product whose rows a reduce-scatter adds up, if nothing else has a part in them.

    A scatter that waits for its turn waits for the weight gradients that were issued before it as well.
    """
    assert isinstance(scatter.work, Collective)
    if scatter.work.operation != "reduce_scatter":
        return []
    waits = [op for op in working_predecessors(scatter) if op.phase == scatter.phase]
    work = _row_gemm(waits[0], scatter.phase) if len(waits) == 1 and waits[0] in own else None
    if work is None or work.batch * work.m * work.n * BYTES[work.out_dtype] != scatter.work.nbytes:
        return []
    return waits
