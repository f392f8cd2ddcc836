"""ScheMoE: compression, all-to-alls and experts of all chunks in one order, with exchanges within nodes beside others.

The tokens of a layer are split into r chunks with seven tasks each: compress (C1), all-to-all (A1), decompress (D1),
experts (E), and the same back (C2, A2, D2). Kernels share a stream, all-to-alls another, and the order is chosen so
that neither waits where it could run (OptSche): all C1, then D1, E and C2 of chunk after chunk, then all D2; an
all-to-all starts as soon as its chunk is there. Pipe-A2A splits each all-to-all: messages within a node go on a
separate stream at the same time as those between nodes.

    kernels       C1 C1 | D1 E C2 | D1 E C2 | D2 D2      between nodes  A1 A1 A2 A2      within nodes  a1 a1 a2 a2

Tokens of w bytes an element are sent with `bits` bits, 8 w/bits times fewer bytes. With M ranks on a node, P ranks and
t1, t2 seconds of a message within and between nodes, Pipe-A2A takes max(M t1, (P - M) t2) in place of the sum: at most
twice as fast. Without compression the order is PipeMoE's, T(r) = max(2 r t + max(0, u - (r - 1) t), 2 t + r u).

Not modelled: the speed of a compressor, zfp at a fixed rate or int8, is that of a pass through memory.

References: Shi et al. 2024, doi 10.1145/3627703.3650083, sections 3 to 5; https://github.com/Fragile-azalea/ScheMoE,
schemoe/impls/overlap.py and schemoe/custom/comm/pipe.cpp.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import BYTES, COMPUTE, Collective, Fragment, Memory, Op
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared.chunk_degree import ChosenDegree, Degree
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import chunk_round, find_rounds
from meshcast.simulator.schemes.expert.shared.two_level_exchange import exchange_beside_nodes


class ScheMoE(ChosenDegree):
    paper = Paper(
        "doi:10.1145/3627703.3650083",
        "ScheMoE: An Extensible Mixture-of-Experts Distributed Training System with Tasks Scheduling",
        2024,
    )

    class Options(ChosenDegree.Options):
        degree: Degree | Literal["auto"] = 2
        """Chunks of the tokens; auto: as linear models of all-to-all and experts say, without compression."""
        bits: int | None = Field(default=None, ge=1, le=32, strict=True)
        """Bits of an element of compressed tokens; zfp and int8: 8. null: tokens are not compressed."""
        node: int | None = Field(default=None, ge=2, strict=True)
        """Ranks of a node, whose exchanges are beside those between nodes; null: all are in a single all-to-all."""

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        node, bits, width = self.options.node, self.options.bits, 8 * BYTES[self.framework.weights]
        if node is not None and self.ranks > 1 and (self.ranks % node or node >= self.ranks):
            fits = [n for n in range(2, self.ranks) if self.ranks % n == 0]
            remedy = f"node = {' or '.join(map(str, fits)) or 'null'} would work"
            raise PlanError(
                "plan.schemes", f"node must divide the {self.ranks} ranks of the experts and be smaller", remedy, node
            )
        if bits is not None and bits >= width:
            rule = f"tokens have {width:g} bits an element, and compressed ones fewer"
            raise PlanError("plan.schemes", rule, f"bits below {width:g} would work", bits)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        rewrite, chunks = Rewrite(fragment), []
        for expert_round in find_rounds(fragment, self.mesh.parts(self.axes[:1])):
            out, *_, back = chunk_round(rewrite, expert_round, (1,) * self.degree_of(expert_round))
            chunks.append((out, back))
        fragment = rewrite.apply()
        exchanges = [op for ends in chunks for ops in ends for op in ops]
        if self.options.bits:
            ratio = 8 * BYTES[self.framework.weights] / self.options.bits
            exchanges = compress_exchanges(fragment, chunks, ratio)
        beside, node = Rewrite(fragment), self.options.node
        for op in exchanges if node else ():
            assert isinstance(op.work, Collective)
            if (ranks := self.mesh.size(op.work.axes)) > node:
                each = op.work.nbytes / ranks
                exchange_beside_nodes(beside, op, ranks, node, (node - 1) * each, (ranks - node) * each)
        return beside.apply()

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        width = (self.options.bits or 16) / 8
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "E/P experts per rank")
        yield ClosedForm("sent_per_layer", 4 * (p - 1) / p * slots * setting.h * width, "4.1: bits of an element")
        if p > 1 and self.options.degree != "auto" and not self.options.bits and not self.options.node:
            seconds = setting.chunked_round_s(self.options.degree)
            yield ClosedForm("forward_round", seconds, "3.2: the order without compression")
            yield ClosedForm("backward_round", seconds, "3.2: the order without compression")


def compress_exchanges(fragment: Fragment, chunks: Sequence[tuple[list[Op], list[Op]]], ratio: float) -> list[Op]:
    """Compresses the tokens of all-to-alls by `ratio`; returns these.

    All chunks are compressed first, on the stream of the kernels; then chunk after chunk is decompressed, computed and
    compressed again; the last decompressions follow, so that no kernel waits for a chunk while another could run.

    chunks: for each round the all-to-alls that dispatch its chunks, and those that combine them.
    """
    rewrite, exchanges = Rewrite(fragment), list[Op]()
    for outs, backs in chunks:
        issued = fragment.forward if outs[0] in fragment.forward else fragment.backward
        last: list[Op] = []
        for out, back in zip(outs, backs, strict=True):
            compress, sent, decompress = _compress_exchange(out, ratio)
            first = next(op for op in issued if out in op.after)
            rewrite.swap(out, [compress, sent], [decompress])
            rewrite.swap(first, [decompress, first])
            again, returned, end = _compress_exchange(back, ratio)
            last.append(end)
            behind = last if back is backs[-1] else []
            rewrite.swap(back, [again, returned, *behind], [end])
            exchanges += [sent, returned]
    rewrite.apply()
    return exchanges


def _compress_exchange(op: Op, ratio: float) -> tuple[Op, Op, Op]:
    """Returns an all-to-all of compressed tokens between the kernels that compress and decompress them."""
    work = op.work
    assert isinstance(work, Collective)
    small = round(work.nbytes / ratio)
    pack = Memory("cast", work.nbytes, small, pace=work.pace)
    unpack = replace(pack, read=small, write=work.nbytes)
    before = replace(op, name=f"compress {op.name}", stream=COMPUTE, work=pack)
    sent = replace(op, work=replace(work, nbytes=small), after=[before])
    return before, sent, replace(before, name=f"decompress {op.name}", work=unpack, after=[sent])
