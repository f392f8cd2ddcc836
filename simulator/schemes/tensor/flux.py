"""FLUX: the collectives of tensor parallelism are fused into the GEMM kernels, tile by tile.

All-gather and GEMM: one kernel of full size starts at once with the tiles of its own rows; a tile of other rows waits
until copy engines have brought them. GEMM and reduce-scatter: each tile is written to the rank that owns it as soon as
it is computed, and the owner adds up the tiles of all ranks. GEMMs are not split, so they keep their speed.

    all-gather |=======>                        GEMM |==========|
    GEMM       |==========|           reduce-scatter |=========-|- sum       -|-: the tiles of the last wave

The scheme accompanies any tensor scheme that shards activations, and replaces all its pairs of all-gather and GEMM and
of GEMM and reduce-scatter, forward and backward. With T seconds of a GEMM and C of its transfer, all-gather and GEMM
take max(T, C); GEMM and reduce-scatter, whose tiles finish in n waves, take max(T, (1 - 1/n) C) + C/n, since the last
wave is sent after the GEMM. The bytes sent are those of the collective, sent directly to their owners. The tiles
received from all ranks take the place of the GEMM's own result, so the buffers are those of an all-gather and a
reduce-scatter.

References: Chang et al. 2024, arXiv 2406.06858; design and kernels: github.com/bytedance/flux, docs/design.md.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from pydantic import Field

from simulator.ir.ops import Gemm
from simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from simulator.lowering.rewrite import Rewrite, replace_dependencies
from simulator.schemes.tensor.shared.tensor_overlap import (
    GemmCollective,
    OverlapSetting,
    TensorOverlap,
    shift_shards,
    sum_shards,
)

TILE = (128, 256)
"""Rows and columns of an output tile: the widest tiles of GEMM libraries on GPUs since Ampere."""


def wave_count(product: Gemm, wave: int) -> int:
    """Waves in which the output tiles of a GEMM are computed. wave: tiles computed at a time."""
    return ceil(ceil(product.m / TILE[0]) * ceil(product.n / TILE[1]) * product.batch / wave)


class Flux(TensorOverlap):
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
        for product in pair.products:
            product.after = replace_dependencies(product.after, {op: op.after})
            rewrite.swap(product, [product], [product, *copies])

    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op, (product,) = pair.collective, pair.products
        assert isinstance(product.work, Gemm)
        last = pair.work.nbytes // wave_count(product.work, self.options.wave)
        # Tiles go to their owners from the start of the GEMM on; the two parts follow each other on their stream.
        before, behind = (
            replace(op, name=f"{op.name} {part}", work=replace(pair.work, operation="all_to_all", nbytes=nbytes))
            for part, nbytes in (("streamed", pair.work.nbytes - last), ("last", last))
        )
        before.after, behind.after = list(product.after), [product]
        streamed = [before] if last < pair.work.nbytes else []
        rewrite.swap(op, [*streamed, behind, sum_shards(pair, [*streamed, behind])])

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        p, n = setting.p, wave_count(setting.gemm, self.options.wave)
        brought, sent = ((p - 1) / p * whole for whole in (setting.input_s, setting.output_s))
        yield ClosedForm(
            "gather_seconds", max(setting.gemm_s, brought), "one kernel overlaps with the copies that it waits for"
        )
        yield ClosedForm(
            "scatter_seconds",
            max(setting.gemm_s, (1 - 1 / n) * sent) + sent / n,
            "all but the last wave of tiles is sent during the kernel",
        )
        yield ClosedForm("sent_per_layer", setting.sent, "arXiv 2405.07719, table 2: overlap changes no bytes")
