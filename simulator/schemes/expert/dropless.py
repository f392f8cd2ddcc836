"""MegaBlocks: no token is dropped, and the experts of a rank are a block-sparse GEMM with hardly any padding.

Experts of fixed capacity drop tokens where they are popular and compute padding where they are not. Here ranks first
exchange the numbers of tokens that they are about to send, E/P counts per pair of ranks; then exactly these tokens are
dispatched. All experts of a rank are a block-sparse GEMM whose blocks of 128 rows hold tokens of a single expert, so
each expert has fewer than 128 rows of padding. Nothing evens out the routing: all ranks wait for the most loaded rank,
whose memory must hold all tokens that arrive.

    router --> counts --> all-to-all --> [ expert 0: 128 | 128 | 37 + 91 padding ][ expert 1: 128 | ... ] --> all-to-all

All-to-alls of k T h elements, of which a rank sends (P-1)/P on average. For the k T rows that arrive, n of them for
each expert, sum(128 ceil(n / 128) - n) rows are padding; a capacity factor c that drops nothing pads (c - 1) k T. With
a single rank for all experts nothing is exchanged, and the GEMMs are those of any grouped kernel.

Not modelled: the kernels that sort tokens and make the topology of the sparse blocks anew for every batch.

References: Gale et al. 2022 (MegaBlocks), arXiv 2211.15841, sections 4 and 5.
"""

import math
from collections.abc import Iterable
from typing import Any

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.moe_operators import EXPERTS, Permute
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.routing import ExpertLoad
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import exchange_counts

COUNT = 4
"""Bytes of a token count, a 32-bit integer."""


class Dropless(ExpertScheme):
    paper = Paper("arXiv:2211.15841", "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022)

    class Options(ExpertScheme.Options):
        capacity: None = None  # type: ignore[assignment]
        """null: there is none, whatever the model says."""
        block: int = Field(default=128, ge=1, strict=True)
        """Rows of a block, which holds tokens of a single expert."""

    def capacity(self, moe: Any) -> None:
        return None

    def expert_load(self, module: MoE) -> ExpertLoad:
        """Returns the routing, with the padded rows of the most loaded rank."""
        load = super().expert_load(module)
        if self.ranks == 1:
            return load
        sent = next(operator for operator in module.operators() if isinstance(operator, Permute)).outs[0]
        # Ranks that shard an expert each have all of its tokens.
        groups = self.mesh.size(self.mesh.views[EXPERTS]) // self.mesh.size(self.axes)
        rows = float(sent.dims["b"].size * sent.dims["s"].size) / (groups * module.experts)
        return load.pad_to_blocks(self.options.block / rows)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, MoE):
            exchange_counts(fragment, self.mesh.parts(self.axes[:1]), module.experts * COUNT, late=True)
        return fragment

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, k = setting.ep, setting.top_k
        slots = k * setting.b * setting.s
        tokens, counts = 4 * slots * setting.h * 2, COUNT * setting.experts
        yield ClosedForm(
            "sent_per_layer", (p - 1) / p * (tokens + counts), "section 5: counts, then exactly the tokens"
        )
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "section 5: E/P experts per rank")
        yield ClosedForm("rows_per_layer", slots, "section 4: no token is dropped")
        if p > 1:
            rows = slots * p / setting.experts
            yield ClosedForm(
                "padding", 128 * math.ceil(rows / 128) / rows - 1, "section 5: less than one block per expert"
            )
