"""FastMoE: counts of tokens are exchanged first, then exactly these tokens, expert by expert, into contiguous memory.

A rank counts its tokens for every expert and exchanges the counts, 8 bytes for each pair of source rank and expert.
Then global scatter sends exactly these tokens: for the first expert of every rank, for the second, and so on, so that
those of an expert lie together where they arrive and no kernel orders them again. The GEMMs of the experts of a rank
are launched singly, on 16 streams that run concurrently; global gather returns the results the same way. Nothing
evens out the routing and nothing overlaps: all ranks wait for the most loaded rank, in every exchange.

    router | counts | local scatter | expert 0: all-to-all, expert 1: all-to-all, ... | GEMMs | ... | local gather

With e = E/P experts on each of P ranks, k experts of a token and T tokens on a rank, a layer has 4 e all-to-alls of k T
h/e elements and another of E counts; a rank sends (P-1)/P of each under even routing. A shard of tensor-parallel ranks
that hold the same tokens (`slice_group`) is what the layouts of the view give: they divide the tokens, and all-gather
the results.

Not modelled: the host waits for the GPU before and after the GEMMs of each layer (`syncTorch`, `sync`).

References: He et al. 2021, arXiv 2103.13262, section 4; https://github.com/laekov/fastmoe, cuda/global_exchange.h,
cuda/parallel_linear.cuh and fmoe/functions.py.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from meshcast.simulator.ir.modules import Module, MoE, Stage, replace_children
from meshcast.simulator.ir.moe_operators import ExpertLinear
from meshcast.simulator.ir.ops import Collective, Fragment, Gemm, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Paper
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import (
    exchange_counts,
    exchange_expert_by_expert,
    find_all_to_alls,
)

COUNT = 8
"""Bytes of a token count, a 64-bit integer."""


class FastMoE(ExpertScheme):
    paper = Paper("arXiv:2103.13262", "FastMoE: A Fast Mixture-of-Expert Training System", 2021)

    class Options(ExpertScheme.Options):
        capacity: None = None  # type: ignore[assignment]
        """null: there is none, whatever the model says."""

    def capacity(self, moe: Any) -> None:
        return None

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        def keep_order(module: Module) -> Module:
            return replace(module, sorts="") if self.ranks > 1 and isinstance(module, ExpertLinear) else module

        return super().lower_stage(replace_children(stage, keep_order), inner)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        for op in (*fragment.forward, *fragment.backward):
            if isinstance(op.work, Gemm) and op.work.groups:
                op.launches *= module.experts // self.ranks
        parts, loads = self.mesh.parts(self.axes[:1]), self.options.routing.loads_by_place(self.ranks, module.experts)
        experts, remote = Rewrite(fragment), self.expert_load(module).remote
        for op in (op for ends in find_all_to_alls(fragment, parts) for op in ends):
            assert isinstance(op.work, Collective)
            exchange_expert_by_expert(experts, op, loads, round(op.work.nbytes / remote) if remote else 0)
        fragment = experts.apply()
        exchange_counts(fragment, parts, module.experts * COUNT)
        return fragment

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.top_k * setting.b * setting.s
        tokens, counts = 4 * slots * setting.h * 2, COUNT * setting.experts
        yield ClosedForm("sent_per_layer", (p - 1) / p * (tokens + counts), "section 4.2: counts, then the tokens")
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "section 4.1: E/P experts per rank")
        yield ClosedForm("rows_per_layer", slots, "section 4.2: no token is dropped or padded")
        if p > 1:
            yield ClosedForm("exchanges", 4 * setting.experts // p + 1, "global scatter: one for each expert of a rank")
