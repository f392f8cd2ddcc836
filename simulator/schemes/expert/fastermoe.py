"""FasterMoE: popular experts are broadcast to all ranks, and the other tokens are exchanged in pipelined steps.

Routers have favourites, and all ranks wait for the rank that holds them. An expert that enough tokens choose is
broadcast to all ranks (*shadowed*), which process their tokens with it; its gradients are reduced to its owner. The
other tokens are exchanged in steps: in step j every group of g ranks sends to the j-th group further round, while the
experts compute the tokens of the step before.

    exchanges  S0 S1 S2 S3  shadows  R0   R1   R2   R3
    kernels       C0   C1   C2      C3

Ranks exchange the counts of their tokens, 8 bytes for each expert, as in expert/fastmoe, and all-gather them for the
policy, which the host applies: it waits for both. It calls the experts once for every step, and launches all of their
kernels anew (`_compute_fn` of cuda/fastermoe/smart_schedule.h); of what else it does in a layer nothing is modelled.

With B tokens on the most loaded rank, hidden size h and W weights of D bytes per expert, a layer takes about 3 B 2 W /
bw_mm + 4 B h D / bw_net; i shadows reduce B to the most loaded rank without these experts and cost i W D / bw_net
(twice that where gradients are counted too); D is 4 whatever the format. Experts are shadowed in descending order of
load as long as this estimate falls: none under even routing. All steps together send the bytes of an all-to-all; the
P/g steps are equal parts, so that they take the time of PipeMoE's closed form (expert/tutel). GEMMs of shadows belong
to the last step, which waits for them.

With a topology-aware gate (`outgoing`) at most a share of the tokens leaves its machine, with one of k copies each; the
others choose among the experts of their machine, in steps within machines, then between them. Where the first choice of
more tokens is an expert on another machine, those with the highest scores keep it. It changes the model.

References: He et al. 2022, doi 10.1145/3503221.3508418, section 4; constants, counts and gate: laekov/fastmoe @9d9cea8,
fmoe/fastermoe/shadow_policy.py, schedule.py and fmoe/gates/faster_gate.py.
"""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.modules import Module, MoE
from meshcast.simulator.ir.ops import BYTES, COMPUTE, Collective, Fragment, Op
from meshcast.simulator.ir.routing import ExpertLoad, Placement, Routing
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.schemes.expert.shared import token_dispatch as dispatch
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import ExpertRound, MoESizes

COUNT = 8
"""Bytes of a token count, a 64-bit integer."""

COUNTED_BYTES = 4
"""Bytes of an element in the estimate that chooses shadows (`data_size` of `global_policy`)."""


class FasterMoE(ExpertScheme):
    paper = Paper(
        "doi:10.1145/3503221.3508418",
        "FasterMoE: Modeling and Optimizing Training of Large-Scale Dynamic Pre-Trained Models",
        2022,
    )

    class Options(ExpertScheme.Options):
        outgoing: float | None = Field(default=None, ge=0, le=1)
        """Largest share of a rank's tokens that leaves its machine; fastmoe: 0.14. null: no gate."""
        machine: int = Field(default=8, ge=1, strict=True)
        """Ranks of a machine, for the gate."""
        shadow: bool = True
        """Whether experts are shadowed."""
        group: int = Field(default=4, ge=1, strict=True)
        """Most ranks of a group; the largest divisor of the ranks up to it is taken."""
        bw_net: float = Field(default=6.25e9, gt=0)
        """Network bandwidth in the estimate that chooses shadows [bytes/s]."""
        bw_mm: float = Field(default=11.5e12, gt=0)
        """GEMM throughput in that estimate [FLOP/s]."""
        transfers: Literal[1, 2] = 1
        """Transfers of a shadow that it counts: 1 for the weights, 2 with their gradients."""

    @property
    def limits_outgoing(self) -> bool:
        """Whether there is a gate, and several machines."""
        return self.options.outgoing is not None and self.ranks > self.options.machine

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        moe, machine = job.model.moe, self.options.machine
        if not self.limits_outgoing or moe is None:
            return
        remedy = "Leave outgoing null, or change it"
        if self.ranks % machine:
            rule = f"the gate needs whole machines, and {self.ranks} ranks hold the experts"
            fits = [n for n in range(1, self.ranks) if self.ranks % n == 0]
            raise PlanError("plan.schemes", rule, f"machine = {' or '.join(map(str, fits))} would work", machine)
        if (capacity := self.capacity(moe)) is not None:
            raise PlanError(
                "plan.schemes", "the gate sends what is routed, without a capacity factor", remedy, capacity
            )
        if (nearby := min(moe.expert_counts) // self.ranks * machine) < moe.top_k:
            rule = f"the gate chooses {moe.top_k} experts of one machine, which has {nearby}"
            raise PlanError("plan.schemes", rule, remedy, machine)

    def assumptions(self, model: Any) -> Iterable[str]:
        yield from super().assumptions(model)
        if model.moe is not None and self.limits_outgoing:
            most = f"{self.options.outgoing:.0%}"
            yield f"a gate lets at most {most} of a rank's tokens leave their machine, which changes the model"

    def routing(self, module: MoE) -> Routing:
        """Returns the routing of a layer, behind the gate if there is any."""
        routing: Routing = self.options.routing
        if not self.limits_outgoing:
            return routing
        topk, options = MoESizes.of(module).topk, self.options
        return routing.limit_outgoing(self.ranks, module.experts, options.machine, options.outgoing, topk)

    def shadows(self, module: MoE) -> tuple[int, ...]:
        """Returns the experts of a layer that are broadcast to all ranks, the most popular first."""
        if not self.options.shadow or module.capacity is not None:
            return ()
        routed, width = MoESizes.of(module), COUNTED_BYTES
        copies = routed.copies / (self.mesh.size(self.mesh.views[self.view]) / self.mesh.size(self.axes))
        loads = copies / routed.experts * self.routing(module).shares(routed.experts).mean(axis=0)
        each = 3 * 2 * routed.weights / self.options.bw_mm + 4 * routed.hidden * width / self.options.bw_net
        shadow = self.options.transfers * routed.weights * width / self.options.bw_net
        taken: list[int] = []
        for expert in np.argsort(-loads, kind="stable"):
            before = loads.reshape(self.ranks, -1).sum(axis=1).max()
            loads[expert] = 0.0
            if each * (before - loads.reshape(self.ranks, -1).sum(axis=1).max()) <= shadow:
                break
            taken.append(int(expert))
        return tuple(taken)

    def expert_load(self, module: MoE) -> ExpertLoad:
        shadows = self.shadows(module) if self.ranks > 1 else ()
        hosts = Placement.with_shadows(self.ranks, module.experts, shadows)
        return self.routing(module).load(self.ranks, module.experts, module.capacity, hosts)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        number, rounds = len(self.shadows(module)), dispatch.find_rounds(fragment, self.mesh.parts(self.axes[:1]))
        self._exchange_counts(fragment, module)
        size = round(MoESizes.of(module).weights * BYTES[self.framework.weights])
        shadows = dispatch.broadcast_shadows(fragment, rounds[0], number, size) if number and rounds else []
        steps = Rewrite(fragment)
        for expert_round in rounds:
            last = self._exchange_in_steps(steps, expert_round, module)
            last.after += shadows if last.phase == "F" else []
        fragment = steps.apply()
        if shadows:
            dispatch.reduce_shadow_gradients(fragment, shadows)
        return fragment

    def _exchange_counts(self, fragment: Fragment, module: MoE) -> None:
        """Inserts the exchange of counts, and where experts may be shadowed their all-gather for the policy."""
        parts, counts = self.mesh.parts(self.axes[:1]), module.experts * COUNT
        if self.options.shadow and module.capacity is None:
            dispatch.exchange_counts(fragment, parts, self.ranks * counts, "all_gather")
        dispatch.exchange_counts(fragment, parts, counts)

    def _exchange_in_steps(self, steps: Rewrite, expert_round: ExpertRound, module: MoE) -> Op:
        """Splits a round into steps between groups; returns the first kernel of the last step."""
        assert isinstance(expert_round.out.work, Collective)
        ranks = self.mesh.size(expert_round.out.work.axes)
        machine = self.options.machine if self.limits_outgoing and ranks == self.ranks else ranks
        size = max(n for n in range(1, self.options.group + 1) if machine % n == 0)
        if machine < ranks:
            outgoing = self.routing(module).outgoing(ranks, module.experts, machine, self.shadows(module))
            return dispatch.exchange_within_machines(
                steps, expert_round, self.expert_load(module), outgoing, machine, size
            )
        first = next(op for op in expert_round.inside if op.stream == COMPUTE)
        return dispatch.exchange_between_groups(steps, expert_round, ranks, size) if ranks > size else first

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p = setting.ep
        slots = setting.b * setting.s * setting.slots_per_token
        counts = COUNT * setting.experts * (1 + p * (self.options.shadow and setting.capacity is None))
        yield ClosedForm(
            "sent_per_layer",
            (p - 1) / p * (4 * slots * setting.h * 2 + counts),
            "4.2: all steps send the bytes of one all-to-all; counts, for the policy of all ranks",
        )
        if p > self.options.group:
            steps = p // self.options.group
            yield ClosedForm("forward_round", setting.chunked_round_s(steps), "4.2: P/g steps")
            yield ClosedForm("backward_round", setting.chunked_round_s(steps), "4.2: P/g steps")
