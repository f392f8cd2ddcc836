"""GShard: experts have a fixed capacity, so that every message and GEMM has the same size; excess tokens are dropped.

A router chooses k of the E experts for each token. With capacity factor c every expert has c k T/E slots for the T
tokens of a rank: tokens that find no slot are dropped (they only pass through the residual connection), slots that stay
empty are padding. So shapes are known before any token is routed, all messages and GEMMs are equal, and no rank waits
for another. The price is quality, and padding: if a share r of all choices finds a slot, (c - r)/c of the slots.

    router chooses: expert 0  # # # # #      slots   # # # | dropped # #      c = 1, k T/E = 3
                    expert 1  #              slots   # . . | padding . .

Each all-to-all over P ranks has c k T h elements, of which (P-1)/P are sent whatever the routing, and experts compute
c k T rows. Where neither plan nor model states c, it is 2: with k = 2 the paper has 2 N/E slots per expert for the N
tokens of a batch (k = 1 is Switch). If one rank holds all experts, their capacity is limited only where plan or model
state c.

With `einsum` set to S, tokens are dispatched by a GEMM with a one-hot matrix [S, E C], C = c k S/E, for each group of S
tokens, as in the paper's algorithm 2, and combined by another: 2 T (c k S) h FLOPs for either, on top of the model's.
Without it kernels copy tokens, as later implementations do.

References: Lepikhin et al. 2020 (GShard), arXiv 2006.16668, section 2.2, algorithms 1 and 2; Fedus et al. 2021
(Switch), arXiv 2101.03961.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from pydantic import Field

from simulator.ir.modules import Module, Operator
from simulator.ir.moe_operators import Permute, Unpermute
from simulator.ir.ops import BYTES, Fragment, Gemm, Memory, Op, TensorUse
from simulator.ir.scheme import ClosedForm, LowerModule, Paper
from simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting


class GShard(ExpertScheme):
    paper = Paper("arXiv:2006.16668", "GShard: Scaling Giant Models with Conditional Computation", 2020)
    default_capacity = 2.0

    class Options(ExpertScheme.Options):
        einsum: int | None = Field(default=None, ge=1, strict=True)
        """Tokens of a group that GEMMs with one-hot matrices dispatch and combine; null: kernels copy them."""

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if self.options.einsum and self.ranks > 1 and isinstance(module, Permute | Unpermute):
            self._dispatch_by_gemm(module, fragment)
        return fragment

    def _dispatch_by_gemm(self, module: Operator, fragment: Fragment) -> None:
        """Replaces the kernels that copy tokens by GEMMs."""
        back = isinstance(module, Unpermute)
        token, place = (module.outs[0], module.ins[0]) if back else (module.ins[0], module.outs[0])
        ((first,), (second,)) = fragment.forward, fragment.backward
        assert isinstance(first.work, Memory)
        hidden = int(token.dims["h"].size)
        tokens = (first.work.write if back else first.work.read) // (hidden * BYTES[token.dtype])
        groups = math.ceil(tokens / self.options.einsum)
        size = tokens / groups
        rows = float(place.dims["s"].unit) * size
        into = Gemm(rows, hidden, size, groups, token.dtype, what="dispatch")
        out = Gemm(size, hidden, rows, groups, token.dtype, what="dispatch")
        first.work, second.work = (out, replace(into, layout="nn")) if back else (into, replace(out, layout="nn"))
        mask = TensorUse(f"{module.name}.one-hot", round(tokens * rows * BYTES[token.dtype]), first, made=True)
        fragment.tensor_uses += [mask, replace(mask, op=second, made=False)]
        if back:
            # The gradient of the router weights needs the results of the experts, which are kept for it.
            work = Gemm(size, rows, hidden, groups, token.dtype, "nt", what="dispatch")
            fragment.backward.append(Op(f"{second.name} weights", work=work, after=[second], phase="B"))
            kept = next(
                tensor_use for tensor_use in fragment.tensor_uses if tensor_use.key.startswith(f"{place.name}@")
            )
            fragment.tensor_uses.append(replace(kept, op=fragment.backward[-1]))

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, c = setting.ep, setting.capacity or 2
        slots = c * setting.top_k * setting.b * setting.s
        yield ClosedForm(
            "sent_per_layer", 4 * (p - 1) / p * slots * setting.h * 2, "section 2.2: slots for c k T choices"
        )
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "section 3.2: E/P experts per rank")
        if p > 1:
            yield ClosedForm("rows_per_layer", slots, "algorithm 1: every slot is computed, filled or not")
            yield ClosedForm(
                "sent_by_the_busiest",
                4 * (p - 1) / p * slots * setting.h * 2,
                "section 2.2: shapes are known in advance",
            )
