"""Janus: the weights of experts are sent to the tokens instead of tokens to the experts, where that moves fewer bytes.

A rank still owns E/P of the experts. But where many tokens meet small experts, all ranks fetch the weights of all
experts, process their own tokens with them, and send the gradients of weights back to the owners, where they are
summed: no token travels, and no rank waits for a more loaded one. Weights do not depend on the router's choice, so they
are fetched during the layer before: those of the own machine beside the others, so that kernels begin with them.

    fetch experts   of layer 1   of layer 2   of layer 3
    kernels         layer 0      layer 1      layer 2

With T tokens on a rank, k experts per token, and E/P experts of w matrices h x f on each of the P ranks of n machines,
the bytes of tokens that leave a machine, dispatch and combine, relate to the bytes of weights that enter it, each once,
as

    R = 2 T k / (n (E/P) w f), which is T k / (4 n h E/P) for experts of 8 h^2 weights,

and so do their gradients. Experts move where R > 1. The all-gather crosses each machine's border once per expert; it is
repeated in the backward pass where the framework regathers (1.5 times the bytes), else the gathered weights are kept.
All near weights of a linear arrive before its first expert starts.

References: Liu, Wang, Jiang 2023, doi 10.1145/3603269.3604869: the data-centric paradigm, its ratio R, prefetching.
"""

from collections.abc import Hashable, Iterable
from typing import Literal

from pydantic import Field

from meshcast.simulator.ir.modules import Module, MoE, Operator, Stage, Unit
from meshcast.simulator.ir.ops import Collective, Fragment, Op, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, Paper, Rule
from meshcast.simulator.schemes.expert.shared.expert_fetch import (
    NEAR,
    fetch_a_unit_ahead,
    fetch_near_first,
    issue_fetches_first,
)
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import MoESizes

MOVING = "experts move"
"""The mark of a layer whose experts move."""


class Janus(ExpertScheme):
    paper = Paper(
        "doi:10.1145/3603269.3604869",
        "Janus: A Unified Distributed Training Framework for Sparse Mixture-of-Experts Models",
        2023,
    )

    class Options(ExpertScheme.Options):
        when: Literal["auto", "always", "never"] = "auto"
        """Whether experts move: auto where R > 1."""
        machine: int = Field(default=8, ge=1, strict=True)
        """Ranks of a machine, which fetch an expert once."""
        prefetch: bool = True
        """Whether experts are fetched during the layer before theirs; otherwise from the start of their layer on."""
        near_first: bool = True
        """Whether experts of the own machine are fetched beside the others, and compute while those come."""

    def marks_of(self, layer: MoE) -> frozenset[Hashable]:
        return frozenset({MOVING}) if self._moves_experts(layer) else super().marks_of(layer)

    def layouts(self, operator: Operator) -> Rule:
        rule = super().layouts(operator)
        if MOVING not in operator.marks:
            return rule
        parts = self.mesh.parts(self.axes[:1])
        divide = {part: dim for part, dim in rule.divide.items() if part not in parts}
        return Rule(divide, {part: "e" for part in parts if operator.has("e")})

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment, machine = super().lower(module, inner), self.options.machine
        if not isinstance(module, Unit):
            return fragment
        for use in fragment.tensor_uses:
            if use.made and use.category == "parameters" and self._gathers_experts(use.op):
                use.op.stream = NEAR
        if self.options.near_first and machine < self.ranks and self.ranks % machine == 0:
            fragment = fetch_near_first(fragment, machine, self.ranks)
        return issue_fetches_first(fragment)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        stage_ops = super().lower_stage(stage, inner)
        return fetch_a_unit_ahead(stage_ops) if self.options.prefetch else stage_ops

    def _moves_experts(self, module: MoE) -> bool:
        if self.ranks == 1 or self.options.when != "auto":
            return self.ranks > 1 and self.options.when == "always"
        return self.ratio(module) > 1

    def ratio(self, module: MoE) -> float:
        """R of a layer."""
        routed, machines = MoESizes.of(module), max(1, self.ranks // self.options.machine)
        sent = 2 * routed.copies * routed.hidden / self.mesh.size(self.mesh.views[self.view])
        return sent / (machines * routed.weights * routed.experts / self.ranks)

    def _gathers_experts(self, op: Op) -> bool:
        work, parts = op.work, self.mesh.parts(self.axes[:1])
        gathers = isinstance(work, Collective) and work.operation == "all_gather" and op.stream == self.family
        return gathers and {*work.axes} <= {*parts}  # type: ignore[union-attr]

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p, slots = setting.ep, setting.b * setting.s * setting.slots_per_token
        n = max(1, p // self.options.machine)
        ratio = 2 * slots / (n * setting.experts / p * 2 * setting.expert_ffn)
        elements = 2 * setting.expert_parameters if ratio > 1 else 4 * slots * setting.h
        yield ClosedForm("expert_parameters", setting.expert_parameters / p, "every rank owns E/P experts")
        yield ClosedForm("sent_per_layer", 2 * elements * (p - 1) / p, "experts or tokens, by the ratio R")
