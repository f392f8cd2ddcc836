"""TA-MoE: the topology decides how many tokens each pair of ranks exchanges; near ranks get more, far ones fewer.

Even routing sends every pair as many tokens, and the slowest link between two ranks sets the time of the all-to-all.
TA-MoE measures the links and gives pair (i, j) a target c_ij in inverse proportion to its time per byte b_ij, smoothed
over the levels of the topology. A loss with weights that grow with the distance makes the router follow the targets,
and capacities of pairs, c times the target, limit what exceeds them.

                 even                     q = 3              targets of a rank on 2 nodes of 4 ranks, 16 tokens
    near, far    2 2 2 2 | 2 2 2 2        3 3 3 3 | 1 1 1 1

With G of P ranks on a node and q = b_far/b_near, a rank sends (P - G)/(P - G + q G) of its tokens to other nodes, in
place of (P - G)/P, beside those that stay on its node. Every expert still gets as many tokens in all. The price: counts
are exchanged first, and with a capacity what may be sent comes back; on a single node, where q = 1, nothing else
remains.

It changes the model: the router is assumed to follow the targets. Not modelled: more than two levels; the loss itself,
a product with a weight for each expert.

References: Chen et al. 2022, arXiv 2302.09915, sections 4.2 and 4.3; https://github.com/Chen-Chang/TA-MoE, moe/gate and
moe/utils.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import FitsModels
from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import Collective, Fragment, Work
from meshcast.simulator.ir.routing import ExpertLoad, Routing
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, Scheme
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import exchange_counts, find_all_to_alls
from meshcast.simulator.schemes.expert.shared.two_level_exchange import exchange_beside_nodes

COUNT, SAMPLE = 8, 1 << 26
"""Bytes of a token count, and of an all-to-all by which links are measured."""


class TAMoE(ExpertScheme, FitsModels):
    paper = Paper("arXiv:2302.09915", "TA-MoE: Topology-Aware Large Scale Mixture-of-Expert Training", 2023)

    class Options(ExpertScheme.Options):
        node: int | None = Field(default=None, ge=1, strict=True)
        """Ranks of a node; null: those joined at full speed in the cluster."""
        ratio: float | None = Field(default=None, ge=1)
        """Time of a byte between nodes over that within a node; null: as measured on the cluster."""

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        if (node := self.options.node) is not None and self.ranks % node:
            fits = [n for n in range(1, self.ranks + 1) if self.ranks % n == 0]
            remedy = f"node = {' or '.join(map(str, fits))} would work"
            raise PlanError("plan.schemes", f"node must divide the {self.ranks} ranks of the experts", remedy, node)

    def fit_models(self, job: Any, measure: Callable[[Work], float]) -> Scheme:
        places = [rank // job.cluster.domain for rank in self.mesh.ranks(self.axes[:1])]
        node = self.options.node or places.count(places[0])
        if self.ranks % node or not 1 < node < self.ranks:
            return self.with_options(node=self.options.node or self.ranks, ratio=self.options.ratio or 1.0)

        def measure_byte(members: range) -> float:
            work = Collective("all_to_all", SAMPLE, self.mesh.parts(self.axes[:1]), tuple(members))
            more = measure(replace(work, nbytes=2 * SAMPLE)) - measure(work)
            return more / (SAMPLE * (len(members) - 1) / len(members))

        far, near = measure_byte(range(0, self.ranks, node)), measure_byte(range(node))
        return self.with_options(node=node, ratio=self.options.ratio or max(1.0, far / near))

    @property
    def levels(self) -> tuple[int, float]:
        """Ranks of a node (all of them if it is not known), and the ratio."""
        return self.options.node or self.ranks, self.options.ratio or 1.0

    def targets(self, routing: Routing, experts: int) -> Routing:
        """Returns the routing of a router that follows the targets."""
        node, ratio = self.levels
        return routing.favour_machine(self.ranks, experts, node, ratio) if 1 < node < self.ranks else routing

    def assumptions(self, model: Any) -> Iterable[str]:
        yield from super().assumptions(model)
        if model.moe is not None and 1 < self.levels[0] < self.ranks:
            near = 1 - self.targets(Routing(), self.ranks).outgoing(self.ranks, self.ranks, self.levels[0])
            yield f"the router follows targets: {near:.0%} of the tokens stay on their node, which changes the model"

    def expert_load(self, module: MoE) -> ExpertLoad:
        targets, even = (self.targets(routing, module.experts) for routing in (self.options.routing, Routing()))
        if self.ranks == 1 or module.capacity is None:
            return targets.load(self.ranks, module.experts, module.capacity)
        sent = even.load(self.ranks, module.experts)
        return replace(sent, dropped=targets.exceeding(even, module.experts, module.capacity))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        remote, parts, levels = self.expert_load(module).remote, self.mesh.parts(self.axes[:1]), Rewrite(fragment)
        routing = Routing() if module.capacity else self.options.routing
        far = self.targets(routing, module.experts).outgoing(self.ranks, module.experts, self.levels[0])
        exchanges = [op for ends in find_all_to_alls(fragment, parts) for op in ends]
        for _ in range(1 if module.capacity is None else 2):
            exchange_counts(fragment, parts, module.experts * COUNT)
        for op in exchanges:
            assert isinstance(op.work, Collective)
            if far and self.mesh.size(op.work.axes) == self.ranks:
                even = round(op.work.nbytes / remote)
                leaving = even * remote * (self.ranks - 1) / self.ranks
                exchange_beside_nodes(levels, op, self.ranks, self.levels[0], leaving - far * even, far * even)
        return levels.apply()

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "E/P experts per rank")
        counts = COUNT * setting.experts * (1 if setting.capacity is None else 2)
        q, g = self.options.ratio or 1.0, self.options.node or p
        leaving = (q * (g - 1) + p - g) / (q * g + p - g) if p > g > 1 else (p - 1) / p
        sent = 4 * slots * setting.h * 2 * leaving + counts * (p - 1) / p
        yield ClosedForm("sent_per_layer", sent, "4.2: targets in inverse proportion to the time of a byte")
