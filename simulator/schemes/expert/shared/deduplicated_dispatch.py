"""Token dispatch that sends a token once to each node and rank of its experts, not once for each expert: base of the
schemes with such kernels.

They replace the all-to-alls of a layer, forward, backward and in recomputed passes; bytes: see `expert/deepep`. Tokens
are ordered by expert where they arrive, not before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from math import comb
from typing import Any, ClassVar

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import BYTES, WIDTH, Collective, Exchange, Fragment, Memory, Op
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule
from meshcast.simulator.lowering.rewrite import working_predecessors
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import MoESizes, find_all_to_alls


class DeduplicatedDispatch(ExpertScheme, ABC):
    """A subclass names its library of kernels and states formats, nodes and multiprocessors of the exchanges."""

    library: ClassVar[str]
    """Library of the kernels, as calibrations name it."""

    @abstractmethod
    def dispatch_format(self, phase: str) -> str:
        """Returns the number format in which tokens (phase F, R) or gradients of results (phase B) are dispatched."""

    @property
    @abstractmethod
    def multiprocessors(self) -> int:
        """Multiprocessors that the kernels occupy."""

    def most_nodes(self, nodes: int) -> int:
        """Returns the most nodes that hold experts of a token, of the nodes of the group."""
        return nodes

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        if self.ranks > 1 and job.framework.weights != "bf16":
            rule = f"the kernels of {self.use} exchange tokens in bf16 and fp8"
            remedy = "Choose precision.compute: bf16 or an fp8 recipe, or expert/all-to-all"
            raise PlanError("precision.compute", rule, remedy, job.precision.compute)
        if same := self.axes_with_same_tokens(job):
            rule = f"all ranks along {' and '.join(same)}, over which experts are distributed, have the same tokens"
            raise PlanError("plan.schemes", rule, "Shard the tokens over them: tensor/megatron-sp", self.use)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if isinstance(module, MoE) and self.ranks > 1:
            routed = MoESizes.of(module)
            for out, *back in find_all_to_alls(fragment, self.mesh.parts(self.axes[:1])):
                _leave_unordered(fragment, out, back)
                self._replace_all_to_all(out, "dispatch", self.dispatch_format(out.phase), routed)
                for op in back:
                    self._replace_all_to_all(op, "combine", "bf16", routed)
        return fragment

    def _replace_all_to_all(self, op: Op, operation: str, dtype: str, routed: MoESizes) -> None:
        """Replaces an all-to-all, which counts a copy of a token for each of its experts, by a dispatch or combine."""
        work = op.work
        assert isinstance(work, Collective)
        tokens = round(work.nbytes / (BYTES["bf16"] * routed.hidden * routed.topk))
        shape = routed.hidden, routed.topk, routed.experts
        most, sms = self.most_nodes(self.ranks), self.multiprocessors
        op.work = Exchange(operation, tokens, *shape, work.axes, dtype, most, sms, self.library, work.pace)
        op.name = op.name.replace(work.operation, operation)

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        n, p, k = setting.nodes, setting.ep, setting.top_k
        m = min(self.most_nodes(n), n)
        experts = setting.experts * m // n
        nodes = m * (1 - comb(experts - experts // m, k) / comb(experts, k))
        ranks = m * p // n * (1 - comb(experts - experts * n // (m * p), k) / comb(experts, k))
        tokens = setting.b * setting.s * setting.slots_per_token / k
        dispatched = WIDTH[self.dispatch_format("F")] + WIDTH[self.dispatch_format("B")]
        four = tokens * setting.h * (dispatched + 2 * WIDTH["bf16"])
        yield ClosedForm("network_bytes", four * nodes * (1 - 1 / n), "DeepSeek-V3, 3.2.2: once to each distinct node")
        yield ClosedForm("scale_up_bytes", four * ranks * (1 - n / p), "DeepSeek-V3, 3.2.2: forwarded to each rank")
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "DeepSeek-V3, 3.2: E/P experts per rank")


def _leave_unordered(fragment: Fragment, out: Op, back: list[Op]) -> None:
    """Takes the work off the kernels that order tokens by expert before a dispatch, and back after a combine: tokens
    are sent as they lie, and the ranks that receive them order them. What is left reads the map of the routing alone.
    """
    ends = working_predecessors(out)
    ends |= {op for op in (*fragment.forward, *fragment.backward) if working_predecessors(op) & {*back}}
    for op in ends:
        if isinstance(op.work, Memory) and op.work.what == "permute":
            op.work = replace(op.work, read=0, write=0)
