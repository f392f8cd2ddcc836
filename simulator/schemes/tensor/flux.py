"""FLUX: the collectives of tensor parallelism are fused into the GEMM kernels, tile by tile.

All-gather and GEMM: a kernel of full size starts at once with the tiles of its rows; a tile of other rows waits
until copy engines have brought the shard of the rank that owns them. GEMM and reduce-scatter: each tile is written to
the rank that owns it as soon as it is computed, and the owner adds up the tiles of all ranks. GEMMs are not split, so
they keep their speed.

    all-gather |=======>                        GEMM |==========|
    GEMM       |=======-->            reduce-scatter   |=======>|= sum     --: tiles of the last shard to arrive

The scheme accompanies any tensor scheme that shards activations, and replaces all its pairs of all-gather and GEMM and
of GEMM and reduce-scatter, forward and backward. With T seconds of a GEMM and C of its transfer over p ranks,
all-gather and GEMM take max(T, C + T/p), as the tiles of the shard that arrives last follow it; several GEMMs of the
same rows are a single kernel. GEMM and reduce-scatter, whose tiles finish in n waves, take max(T + C/n, T/n + C):
nothing is sent before the first wave has finished, and the last is sent after the GEMM. The bytes sent are those of the
collective, sent directly to their owners. The tiles received from all ranks take the place of the GEMM's result, so
the buffers are those of an all-gather and a reduce-scatter. Copy engines and the GEMM itself write them: no kernel of
NCCL takes multiprocessors, and on PCIe they go where CUDA's peer access leads.

Not modelled: the multiprocessors and stalls that remote stores cost the warp-specialised kernels on Hopper, the tuning
of tile and chunk sizes, the other paths across nodes (NVSHMEM). All of a GEMM's tiles are of the same size.

References: Chang et al. 2024, arXiv 2406.06858; github.com/bytedance/flux @19831ca, docs/design.md and
src/coll/ths_op/all_gather_op.cc (`SPLIT`: the kernel waits for whole shards).
"""

from collections.abc import Iterable
from dataclasses import replace

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.ops import Gemm
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.lowering.rewrite import Rewrite, replace_dependencies, split_kernel, wave_count
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import (
    GemmCollective,
    OverlapSetting,
    ShardedRowsOverlap,
    shift_shards,
    sum_shards,
)


class Flux(ShardedRowsOverlap):
    paper = Paper(
        "arXiv:2406.06858", "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion", 2024
    )

    class Options(SchemeOptions):
        wave: int = Field(default=132, ge=1)
        """Tiles computed at a time, one per multiprocessor; 132 as on an H100."""

    def replace_gather(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op = pair.collective
        copies = shift_shards(pair, [op.after] * (pair.ranks - 1))
        rewrite.swap(op, copies, copies)
        parts = [split_kernel(product, (pair.ranks - 1) / pair.ranks) for product in pair.products]
        for product, (early, late) in zip(pair.products, parts, strict=True):
            early.after = replace_dependencies(product.after, {op: op.after})
            late.after = [early, *copies]
            # GEMMs of the same rows are a single kernel: the tiles of the last shard are the last of all.
            issued = [op for turn in zip(*parts, strict=True) for op in turn]
            rewrite.swap(product, issued if product is pair.products[0] else [], [late])

    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op, (product,) = pair.collective, pair.products
        assert isinstance(product.work, Gemm)
        waves = wave_count(product.work, self.options.wave)
        if waves == 1:
            sent = replace(op, work=replace(pair.work, operation="all_to_all", sms=0), after=[product])
            rewrite.swap(op, [sent, sum_shards(pair, [sent])])
            return
        first, rest = split_kernel(product, 1 / waves)
        rest.after = [*product.after, first]
        rewrite.swap(product, [first, rest], [rest])
        last = pair.work.nbytes // waves
        # The two parts of the transfer follow each other on their stream.
        before, behind = (
            replace(op, name=f"{op.name} {part}", work=replace(pair.work, operation="all_to_all", nbytes=nbytes, sms=0))
            for part, nbytes in (("streamed", pair.work.nbytes - last), ("last", last))
        )
        before.after, behind.after = [first], [rest]
        rewrite.swap(op, [before, behind, sum_shards(pair, [before, behind])])

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        p, n, whole = setting.p, wave_count(setting.gemm, self.options.wave), setting.gemm_s
        brought, sent = ((p - 1) / p * seconds for seconds in (setting.input_s, setting.output_s))
        gathered = max(whole, brought + whole / p) if p > 1 else whole
        yield ClosedForm("gather_seconds", gathered, "docs/design.md: a tile waits for the copy of its rows")
        scattered = max(whole + sent / n, whole / n + sent) if p > 1 else whole
        yield ClosedForm("scatter_seconds", scattered, "docs/design.md: a tile is sent once it is computed")
        yield ClosedForm("sent_per_layer", setting.sent, "arXiv 2405.07719, table 2: overlap changes no bytes")
