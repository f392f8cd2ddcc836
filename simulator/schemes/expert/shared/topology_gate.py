"""A gate that knows the topology: a limited share of the tokens leaves its machine, with one copy each.

Where the first choice of more tokens is an expert on another machine, those with the highest scores keep it, and all
other copies choose among the experts of their own machine (laekov/fastmoe, fmoe/gates/faster_gate.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import MoE
from meshcast.simulator.ir.routing import Routing
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme
from meshcast.simulator.schemes.expert.shared.token_dispatch import MoESizes


class GatedScheme(ExpertScheme):
    """Base of the expert schemes with such a gate."""

    class Options(ExpertScheme.Options):
        outgoing: float | None = Field(default=None, ge=0, le=1)
        """Largest share of a rank's tokens that leaves its machine; fastmoe: 0.14. null: no gate."""
        machine: int = Field(default=8, ge=1, strict=True)
        """Ranks of a machine, for the gate."""

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
        if (own := min(moe.expert_counts) // self.ranks * machine) < moe.top_k:
            rule = f"the gate chooses {moe.top_k} experts of one machine, which has {own}"
            raise PlanError("plan.schemes", rule, remedy, machine)

    def assumptions(self, model: Any) -> Iterable[str]:
        yield from super().assumptions(model)
        if model.moe is not None and self.limits_outgoing:
            most = f"{self.options.outgoing:.0%}"
            yield f"a gate lets at most {most} of a rank's tokens leave their machine, which changes the model"

    def routing(self, module: MoE) -> Routing:
        """The routing of a layer behind the gate."""
        found: Routing = self.options.routing
        if not self.limits_outgoing:
            return found
        topk, options = MoESizes.of(module).topk, self.options
        return found.limit_outgoing(self.ranks, module.experts, options.machine, options.outgoing, topk)
