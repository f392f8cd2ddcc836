"""Experts that take every token that chooses them: none is dropped, and hardly any row is computed for nothing.

Experts of fixed capacity drop tokens where they are chosen often and compute padding where they are not. Here ranks
first tell each other how many tokens they are about to send, E/P counts for each pair; then exactly these travel, and
all experts of a rank are one block-sparse product, whose blocks of 128 rows hold tokens of one expert only. So each
expert has fewer than 128 rows of padding; but as nothing evens routing out, all ranks wait for the one whose experts
are chosen most, and what comes there must fit into its memory.

    router --> counts --> all-to-all --> [ expert 0: 128 | 128 | 37 + 91 padding ][ expert 1: 128 | ... ] --> all-to-all

All-to-alls of k T h elements, of which (P-1)/P are sent in the mean over ranks. To k T rows come, of all experts with
n tokens each, sum(128 ceil(n / 128) - n) rows of padding, where a capacity c that drops nothing has (c - 1) k T. With
one rank for all experts nothing is exchanged, and products are those of any grouped kernel.

References: Gale et al. 2022 (MegaBlocks), arXiv 2211.15841, sections 4 and 5.
"""

import math
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from simulator.ir.modules import Module, MoE
from simulator.ir.moe_operators import EXPERTS, Permute
from simulator.ir.ops import Collective, Fragment, Memory, Op
from simulator.ir.routing import ExpertLoad
from simulator.ir.scheme import ClosedForm, LowerModule, Paper
from simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting, expert_collectives

COUNT = 4
"""Bytes of a count of tokens, an integer of 32 bits."""


class Dropless(ExpertScheme):
    paper = Paper("arXiv:2211.15841", "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022)

    class Options(ExpertScheme.Options):
        capacity: None = None  # type: ignore[assignment]
        """null: none is fixed, whatever the model says."""
        block: int = Field(default=128, ge=1, strict=True)
        """Rows of a block, which holds tokens of one expert only."""

    def capacity(self, moe: Any) -> None:
        return None

    def expert_load(self, module: MoE) -> ExpertLoad:
        """Rows of the most laden rank, padding included."""
        found = super().expert_load(module)
        if self.ranks == 1:
            return found
        sent = next(operator for operator in module.operators() if isinstance(operator, Permute)).outs[0]
        # Those that divide an expert each have all its tokens.
        groups = self.mesh.size(self.mesh.views[EXPERTS]) // self.mesh.size(self.axes)
        rows = float(sent.dims["b"].size * sent.dims["s"].size) / (groups * module.experts)
        return found.pad_to_blocks(self.options.block / rows)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, MoE):
            self._exchange_counts(module, fragment)
        return fragment

    def _exchange_counts(self, module: MoE, fragment: Fragment) -> None:
        """Puts the exchange of counts behind the router, and tokens behind that."""
        for op in expert_collectives(fragment, self):
            if op.phase == "F" and isinstance(op.work, Collective) and op.work.operation == "all_to_all":
                chosen = [one for one in fragment.forward if isinstance(one.work, Memory) and one.work.what == "router"]
                work = Collective("all_to_all", module.experts * COUNT, op.work.axes)
                counts = Op("all_to_all counts", op.stream, work, chosen)
                fragment.forward.insert(fragment.forward.index(op), counts)
                op.after.append(counts)
                return

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, k = setting.ep, setting.top_k
        slots = k * setting.b * setting.s
        tokens, counts = 4 * slots * setting.h * 2, COUNT * setting.experts
        yield ClosedForm(
            "sent_per_layer", (p - 1) / p * (tokens + counts), "section 5: counts, then exactly the tokens"
        )
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "section 5: experts over ranks")
        yield ClosedForm("rows_per_layer", slots, "section 4: no token is dropped")
        if p > 1:
            rows = slots * p / setting.experts
            yield ClosedForm(
                "padding", 128 * math.ceil(rows / 128) / rows - 1, "section 5: less than a block each expert"
            )
