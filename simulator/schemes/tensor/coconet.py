"""CoCoNeT: an all-reduce is fused with the point-wise work behind it, and overlaps the GEMM before it chunk by chunk.

An all-reduce is a reduce-scatter and an all-gather. Dropout and residual addition behind it act on each element alone,
so they move between the two, on 1/p of the elements (RS-C-AG). All three become a communication kernel. The GEMM
computes its rows in the order in which the ring sends them, and that kernel starts on a chunk as soon as it is there.

    Megatron     GEMM ============|  all-reduce ========|  dropout, add ==|
    split        GEMM ============|  RS ====|  =|  AG ====|
    fuse         GEMM ============|  RS, dropout, add, AG ========|
    overlap      GEMM ============|
                        RS, dropout, add, AG ========|

It accompanies a tensor scheme that all-reduces (Megatron without sequence parallelism), and replaces these pairs in
forward passes. With p ranks, T seconds of the GEMM, C of the all-reduce and n chunks, overlap takes T/n + (1-1/n)
max(T, C) + C/n; the bytes sent are those of the all-reduce. The fused kernel does the point-wise work in the time of
its messages.

Not modelled: multiprocessors that the GEMM lacks beside the kernel, but for contention; the masks of dropout, of which
a rank makes 1/p and the backward pass, which stays as it is, reads all; the paper's other programs: messages between
pipeline stages, and the optimizer between RS and AG in a single kernel (data/weight-update-sharding has three).

References: Jangda et al. 2022, arXiv 2105.05720, sections 3, 5 and 6.2; doi 10.1145/3503222.3507778.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.ops import Memory, Op
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.lowering.rewrite import Rewrite, split_work, split_work_by, working_predecessors
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import (
    GemmCollective,
    OverlapSetting,
    TensorOverlap,
    make_part,
)


class CoCoNeT(TensorOverlap):
    paper = Paper(
        "arXiv:2105.05720",
        "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine Learning Workloads",
        2021,
    )
    collectives = ("all_reduce",)

    class Options(SchemeOptions):
        schedule: Literal["split", "fuse", "overlap"] = "overlap"
        """RS-C-AG as three kernels, as one, or as one that overlaps the GEMM."""
        chunks: int = Field(default=16, ge=1, strict=True)
        """Chunks of a GEMM, in the order of the ring; the default is assumed: one for each rank of the paper's node."""

    def replace_pair(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        if pair.collective.phase == "B":
            return
        behind = self._point_wise(rewrite, pair)
        if self.options.schedule == "split":
            self._split(rewrite, pair, behind)
            return
        op, (product,) = pair.collective, pair.products
        inputs = [
            other for kernel in behind for other in kernel.after if op not in {other, *working_predecessors(other)}
        ]
        if self.options.schedule == "fuse" or self.options.chunks == 1:
            moved = [replace(op, after=[*op.after, *inputs])]
        else:
            # The first chunk is computed before the kernel can start, the last is sent when all are computed.
            n = self.options.chunks
            first, rest = split_work_by(product.work, (1, n - 1))  # type: ignore[arg-type]
            parts = [make_part(product, i, 2, work, product.after) for i, work in enumerate((first, rest))]
            streamed, last = split_work_by(pair.work, (n - 1, 1))
            moved = [make_part(op, 0, 2, streamed, [parts[0], *inputs]), make_part(op, 1, 2, last, [parts[1]])]
            rewrite.swap(product, parts, parts)
        rewrite.swap(op, moved, moved)
        for kernel in behind:
            rewrite.swap(kernel, [], moved)
        if behind:  # the sum itself never reaches memory
            uses = rewrite.fragment.tensor_uses
            rewrite.fragment.tensor_uses = [use for use in uses if not (use.op is op and use.made)]

    def _point_wise(self, rewrite: Rewrite, pair: GemmCollective) -> Sequence[Op]:
        """Returns the kernels that act on each element of the sum alone, and wait for nothing that is issued behind
        it."""
        issued = rewrite.fragment.forward if pair.collective.phase == "F" else rewrite.fragment.backward
        place = {op: i for i, op in enumerate(issued)}
        return [
            op
            for op in issued
            if isinstance(op.work, Memory)
            and op.work.what == "residual"
            and op.phase == pair.collective.phase
            and pair.collective in (before := working_predecessors(op))
            and all(place.get(other, -1) <= place[pair.collective] for other in before)
        ]

    def _split(self, rewrite: Rewrite, pair: GemmCollective, behind: Sequence[Op]) -> None:
        """Makes RS, the point-wise kernels on the elements of a rank, and AG of their result."""
        op = pair.collective
        shards = [
            replace(kernel, work=split_work(kernel.work, pair.ranks)[0]) for kernel in behind if kernel.work is not None
        ]
        scatter, gather = (
            replace(
                op,
                name=f"{operation} of {op.name}",
                work=replace(pair.work, operation=operation),
                launches=op.launches / 2,
                after=list(after),
            )
            for operation, after in (("reduce_scatter", op.after), ("all_gather", ()))
        )
        gather.after = shards[-1:] or [scatter]
        rewrite.swap(op, [scatter] if behind else [scatter, gather])
        for kernel, shard in zip(behind, shards, strict=True):
            rewrite.swap(kernel, [shard, gather] if kernel is behind[-1] else [shard])

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        p, n = setting.p, self.options.chunks
        product, reduced = setting.gemm_s, 2 * (p - 1) / p * setting.output_s
        together = product / n + (1 - 1 / n) * max(product, reduced) + reduced / n
        seconds = together if self.options.schedule == "overlap" else product + reduced
        yield ClosedForm("reduce_seconds", seconds, "section 5: the kernel starts on a chunk as soon as it is computed")
        yield ClosedForm("sent_per_reduced_layer", setting.sent_reduced, "an all-reduce is RS and AG")
