"""DeepEP: a token is sent once to each node that holds one of its experts, and from there to each rank that does.

An all-to-all sends a token k times, once for each of its experts. DeepEP sends it over the network once per distinct
*node* among them, and forwards it over NVLink to each distinct rank; results are added up on the way back. Tokens are
dispatched in 8 bits with their scales and combined in 16, and the router restricts the experts of a token to few nodes
so that the network can follow. The kernels occupy a few multiprocessors, which computation then lacks.

    rank --network--> one rank of node 1 --NVLink--> ranks with its experts
         --network--> one rank of node 2 --NVLink--> ranks with its experts

With n nodes of E/n experts each, the k experts of a token lie on n (1 - C(E - E/n, k) / C(E, k)) nodes: for E = 256 and
k = 8 on 1.99 of 2, 3.61 of 4, 5.29 of 8. Where they lie on at most M < n nodes, the same holds for M nodes with their E
M / n experts; ranks are counted likewise. For T tokens of h elements of w bytes, T h w nodes (1 - 1/n) bytes go over
the network and T h w ranks (1 - n/P) over NVLink. The gradient of a combine is a dispatch, that of a dispatch a
combine: four exchanges per layer and micro-batch.

`over` as in expert/all-to-all. Buffers of received tokens hold 16 bits per element.

References: DeepSeek-AI 2024 (DeepSeek-V3), arXiv 2412.19437, sections 2.1.2 and 3.2.2; the kernels:
https://github.com/deepseek-ai/DeepEP, README.
"""

from collections.abc import Iterable
from math import comb
from typing import Any, Literal

from pydantic import Field

from hardware.errors import PlanError
from simulator.ir.modules import Module, MoE
from simulator.ir.ops import BYTES, WIDTH, Collective, Exchange, Fragment, Op
from simulator.ir.scheme import ClosedForm, LowerModule, Paper
from simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from simulator.schemes.expert.shared.token_dispatch import MoESizes, find_all_to_alls


class DeepEP(ExpertScheme):
    paper = Paper("arXiv:2412.19437", "DeepSeek-V3 Technical Report", 2024)

    class Options(ExpertScheme.Options):
        dispatch: Literal["fp8", "bf16"] = "fp8"
        """Format in which tokens are dispatched; results are combined in bf16."""
        gradients: Literal["fp8", "bf16"] = "bf16"
        """Format in which gradients of results are dispatched."""
        most: int = Field(default=4, ge=1, strict=True)
        """Most nodes that hold experts of one token; at most the nodes of the group."""
        sms: int = Field(default=24, ge=1, strict=True)
        """Multiprocessors that the kernels occupy."""

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        if self.ranks > 1 and job.framework.weights != "bf16":
            rule = "the kernels of expert/deepep exchange tokens in bf16 and fp8"
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
                sent = self.options.gradients if out.phase == "B" else self.options.dispatch
                self._replace_all_to_all(out, "dispatch", sent, routed)
                for op in back:
                    self._replace_all_to_all(op, "combine", "bf16", routed)
        return fragment

    def _replace_all_to_all(self, op: Op, operation: str, dtype: str, routed: MoESizes) -> None:
        """Replaces an all-to-all, which counts a copy of a token for each of its experts, by a dispatch or combine."""
        work = op.work
        assert isinstance(work, Collective)
        tokens = round(work.nbytes / (BYTES["bf16"] * routed.hidden * routed.topk))
        shape = routed.hidden, routed.topk, routed.experts
        knobs = self.options.most, self.options.sms
        op.work = Exchange(operation, tokens, *shape, work.axes, dtype, *knobs, work.pace)
        op.name = op.name.replace(work.operation, operation)

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        n, p, k = setting.nodes, setting.ep, setting.top_k
        m = min(self.options.most, n)
        experts = setting.experts * m // n
        nodes = m * (1 - comb(experts - experts // m, k) / comb(experts, k))
        ranks = m * p // n * (1 - comb(experts - experts * n // (m * p), k) / comb(experts, k))
        tokens = setting.b * setting.s * setting.slots_per_token / k
        four = tokens * setting.h * (WIDTH["fp8"] + 3 * WIDTH["bf16"])
        yield ClosedForm("network_bytes", four * nodes * (1 - 1 / n), "3.2.2: once to each distinct node")
        yield ClosedForm("scale_up_bytes", four * ranks * (1 - n / p), "3.2.2: forwarded to each distinct rank")
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "3.2: E/P experts per rank")
