"""The most popular experts come to all ranks, and tokens of all others go to theirs group by group of ranks.

Routers have favourites, and all ranks wait for the one that holds them. An expert that enough tokens choose is sent to
all ranks (*shadowed*), which pass their own tokens through it, and its gradients are added up at its owner. The other
tokens go step by step: in step j every group of g ranks sends to the j-th group further round and hears from the j-th
before, while the experts work on what came the step before.

    exchanges  S0 S1 S2 S3  shadows  R0   R1   R2   R3
    kernels       C0   C1   C2      C3

With B tokens at the rank with most to do, hidden width h and W weights of D bytes an expert, a layer takes about
3 B 2 W / bw_mm + 4 B h D / bw_net; i shadows leave the B of the most laden rank without these experts and cost
i W D / bw_net (twice that where gradients are counted too). In descending order of load experts are shadowed as long as
that falls: none under even routing. Steps send what one all-to-all does; P/g of them are parts of like size, so that
they take as long as in PipeMoE's closed form (expert/tutel). Products of shadows are a part of the last step's, which
waits for them.

References: He et al. 2022, doi 10.1145/3503221.3508418, section 4; constants: laekov/fastmoe, fmoe/fastermoe.
"""

from collections.abc import Iterable
from typing import Literal

import numpy as np
from pydantic import Field

from simulator.ir.modules import Module, MoE
from simulator.ir.ops import BYTES, Collective, Fragment, Op
from simulator.ir.routing import ExpertLoad
from simulator.ir.scheme import ClosedForm, LowerModule, Paper
from simulator.lowering.rewrite import Rewrite
from simulator.schemes.expert.shared.expert_parallel import ExpertScheme, ExpertSetting
from simulator.schemes.expert.shared.token_dispatch import (
    ExpertRound,
    MoESizes,
    broadcast_shadows,
    chunk_round,
    chunked_round_s,
    find_rounds,
    reduce_shadow_gradients,
    shift_between_groups,
)


class FasterMoE(ExpertScheme):
    paper = Paper(
        "doi:10.1145/3503221.3508418",
        "FasterMoE: Modeling and Optimizing Training of Large-Scale Dynamic Pre-Trained Models",
        2022,
    )

    class Options(ExpertScheme.Options):
        shadow: bool = True
        """Whether experts are shadowed."""
        group: int = Field(default=4, ge=1, strict=True)
        """Ranks of a group, at most; those that hold experts divide by it."""
        bw_net: float = Field(default=6.25e9, gt=0)
        """Rate of the network that the choice of shadows supposes [bytes/s]."""
        bw_mm: float = Field(default=11.5e12, gt=0)
        """Rate of products that it supposes [FLOP/s]."""
        transfers: Literal[1, 2] = 1
        """Transfers of a shadow that it counts: of the weights alone, or of their gradients too."""

    def shadows(self, module: MoE) -> tuple[int, ...]:
        """The experts of a layer that come to all ranks, the most popular first."""
        if not self.options.shadow or module.capacity is not None:
            return ()
        routed, width = MoESizes.of(module), BYTES[self.framework.weights]
        copies = routed.copies / (self.mesh.size(self.mesh.views[self.view]) / self.mesh.size(self.axes))
        loads = copies / routed.experts * self.options.routing.shares(routed.experts).mean(axis=0)
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
        stay = self.shadows(module) if self.ranks > 1 else ()
        found: ExpertLoad = self.options.routing.load(self.ranks, module.experts, module.capacity, stay)
        return found

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, MoE) or self.ranks == 1:
            return fragment
        number, found = len(self.shadows(module)), find_rounds(fragment, self.mesh.parts(self.axes[:1]))
        nbytes = round(MoESizes.of(module).weights * BYTES[self.framework.weights])
        shadows = broadcast_shadows(fragment, found[0], number, nbytes) if number and found else []
        steps = Rewrite(fragment)
        for one in found:
            last = self._exchange_in_steps(steps, one)
            last.after += shadows if last.phase == "F" else []
        fragment = steps.apply()
        if shadows:
            reduce_shadow_gradients(fragment, shadows)
        return fragment

    def _exchange_in_steps(self, steps: Rewrite, one: ExpertRound) -> Op:
        """Puts steps between groups in the place of a round; the first kernel of the last one."""
        assert isinstance(one.out.work, Collective)
        ranks = self.mesh.size(one.out.work.axes)
        size = max(n for n in range(1, self.options.group + 1) if ranks % n == 0)
        if ranks == size:
            return one.inside[0]
        out, first, *_, back = chunk_round(steps, one, ranks // size)
        for parts in (out, back):
            shift_between_groups(parts, size)
        return first[-1]

    def closed_forms(self, setting: ExpertSetting) -> Iterable[ClosedForm]:
        p = setting.ep
        slots = setting.b * setting.s * setting.slots_per_token
        yield ClosedForm(
            "sent_per_layer", 4 * (p - 1) / p * slots * setting.h * 2, "4.2: steps send what one exchange does"
        )
        if p > self.options.group:
            yield ClosedForm(
                "forward_round",
                chunked_round_s(p // self.options.group, setting.exchange_s, setting.compute_s),
                "4.2: P/g steps",
            )
            yield ClosedForm(
                "backward_round",
                chunked_round_s(p // self.options.group, setting.exchange_s, setting.compute_s),
                "4.2: P/g steps",
            )
