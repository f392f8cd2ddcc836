"""Dispatch of tokens by GEMMs with one-hot matrices, as in Mesh TensorFlow and GShard: base of the expert schemes with
experts of fixed capacity.

For each group of S tokens a one-hot matrix [S, E C], C = c k S/E, says which token fills which slot: its product with
the tokens fills the slots, and its product with the results of the experts combines them: 2 T (c k S) h FLOPs for
either, on top of the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, Operator
from meshcast.simulator.ir.moe_operators import Permute, Unpermute
from meshcast.simulator.ir.ops import BYTES, Fragment, Gemm, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting

GroupSize = Annotated[int, Field(ge=1, strict=True)]


class FixedCapacity(ExpertScheme):
    """Base of the expert schemes whose experts have slots for a fixed number of tokens."""

    default_capacity = 2.0

    class Options(ExpertScheme.Options):
        einsum: GroupSize | Literal["all"] | None = None
        """Tokens of a group that GEMMs with one-hot matrices dispatch and combine, all: those of a micro-batch; null:
        kernels copy them."""

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
        groups = 1 if self.options.einsum == "all" else math.ceil(tokens / self.options.einsum)
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

    def slots_per_rank(self, setting: ExpertSetting) -> float:
        """Slots for the tokens of a rank at a setting, c k T."""
        return (setting.capacity or self.default_capacity or 1) * setting.top_k * setting.b * setting.s

    def capacity_forms(self, setting: ExpertSetting, where: str) -> Iterable[ClosedForm]:
        """Yields the closed forms of fixed capacity. where: section or equation that defines it."""
        p, slots = setting.ep, self.slots_per_rank(setting)
        sent = 4 * (p - 1) / p * slots * setting.h * 2
        yield ClosedForm("sent_per_layer", sent, f"{where}: slots for c k T choices")
        if p > 1:
            yield ClosedForm("rows_per_layer", slots, f"{where}: every slot is computed, filled or not")
            yield ClosedForm("sent_by_the_busiest", sent, f"{where}: shapes are known in advance")
        if p > 1 and (size := self.options.einsum):
            tokens = setting.b * setting.s
            product = 2 * slots * (tokens if size == "all" else tokens / math.ceil(tokens / size)) * setting.h
            yield ClosedForm("dispatch_flops", (2 + 3) * product, f"{where}: two one-hot products forward, 3 backward")
