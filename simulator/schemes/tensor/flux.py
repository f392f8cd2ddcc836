"""FLUX: communication is fused into the products of tensor parallelism, tile by tile.

In front of a product that needs all rows one kernel of full size starts at once: its tiles of own rows run first, and
a tile of others waits until copy engines have brought its rows. Behind a product whose rows are summed each tile is
written to the rank that owns it as soon as it is computed, and the owner adds up what has come. Products are not split,
so that they stay as fast as they were.

    gather  |=======>                      product |==========|
    product |==========|                    scatter |=========-|- sum       -|-: the tiles of the last wave

It stands beside a tensor scheme that cuts activations, whichever that is, and takes over all its pairs of all-gather
and product and of product and reduce-scatter, forward and backward. With a product of T seconds and a transfer of C it
takes max(T, C) in front; and behind, where tiles come in n waves, max(T, (1 - 1/n) C) + C/n, for the last wave is sent
when all is computed. Bytes sent are the same, and go straight to the rank that needs them. What came from all ranks
takes the place of the product's own result, so buffers are those of a gather and a scatter.

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
"""Rows and columns of an output tile: of the widest tiles of libraries on GPUs since Ampere."""


def wave_count(product: Gemm, wave: int) -> int:
    """How many waves the tiles of a product come in, `wave` of them at a time."""
    return ceil(ceil(product.m / TILE[0]) * ceil(product.n / TILE[1]) * product.batch / wave)


class Flux(TensorOverlap):
    paper = Paper(
        "arXiv:2406.06858", "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion", 2024
    )

    class Options(SchemeOptions):
        wave: int = Field(default=132, ge=1)
        """Tiles that are computed at a time, one to a multiprocessor; 132 as on an H100."""

    def replace_gather(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op = pair.collective
        copies = shift_shards(pair, [op.after] * (pair.ranks - 1))
        rewrite.swap(op, copies)
        for product in pair.products:
            product.after = replace_dependencies(product.after, {op: op.after})
            rewrite.swap(product, [product], [product, copies[-1]])

    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        op, (product,) = pair.collective, pair.products
        assert isinstance(product.work, Gemm)
        last = pair.work.nbytes // wave_count(product.work, self.options.wave)
        # Straight to the owners, from the begin of the product on, and one after the other on their stream.
        before, behind = (
            replace(op, name=f"{op.name} {part}", work=replace(pair.work, operation="all_to_all", nbytes=nbytes))
            for part, nbytes in (("streamed", pair.work.nbytes - last), ("last", last))
        )
        before.after, behind.after = list(product.after), [product]
        streamed = [before] if last < pair.work.nbytes else []
        rewrite.swap(op, [*streamed, behind, sum_shards(pair, [behind])])

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        p, n = setting.p, wave_count(setting.gemm, self.options.wave)
        brought, sent = ((p - 1) / p * whole for whole in (setting.input_s, setting.output_s))
        yield ClosedForm(
            "gather_seconds", max(setting.gemm_s, brought), "one kernel beside the copies that it waits for"
        )
        yield ClosedForm(
            "scatter_seconds",
            max(setting.gemm_s, (1 - 1 / n) * sent) + sent / n,
            "all but the last wave of tiles is sent beside the kernel",
        )
        yield ClosedForm("sent_per_layer", setting.sent, "arXiv 2405.07719, table 2, as without overlap")
