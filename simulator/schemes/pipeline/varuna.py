"""Varuna: only stage inputs are kept; each forward pass is recomputed just before its gradient arrives.

Orders come from greedy list scheduling in slots: forward passes and recomputations (R) take a slot, backward passes
two. Of the ready passes a device takes backward passes first, then recomputations, then forward passes. A recomputation
runs in the second half of the next stage's backward pass. The last stage recomputes nothing: its backward passes follow
at once.

    device 0   F0 F1 F2 F3 .. .. R0 B0 B0 R1 B1 B1 R2 B2 B2 .. .. .. R3 B3 B3
    device 1   .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2 F3 .. .. R3 B3 B3
    device 2   .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. .. .. F3 B3 B3

At run time a device runs further forward passes while it is too early to recompute, so jitter of links and devices
costs less than in a fixed order (the paper's opportunistic scheduling).

The order takes 3 (m + p - 1 + floor((m-1)/3)) slots for p > 1. Device i holds min(m, 3 (p-1-i)) stage inputs in flight,
the last device 1.

References: Athlur et al. 2022, arXiv 2111.04007.
"""

from collections.abc import Callable, Iterable, Sequence

from meshcast.simulator.ir.capabilities import RequiresRoles
from meshcast.simulator.ir.scheme import RECOMPUTES, ClosedForm, Paper
from meshcast.simulator.scheduling.greedy import pass_dependencies, schedule_greedily
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    Schedule,
    ScheduleItem,
)

PRIORITY = "WBRF"
"""Kinds by priority. The two slots of a backward pass are B and W; W follows at once."""


class Varuna(Schedule, RequiresRoles):
    paper = Paper("arXiv:2111.04007", "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", 2021)
    reorders_at_run_time = True
    required_roles = (RECOMPUTES,)

    def unused_roles(self, shape: PipelineShape, stage: int) -> tuple[str, ...]:
        return self.required_roles if stage == shape.p - 1 else ()

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        dependencies = dict(pass_dependencies(self, shape, split_backward=True))
        for stage in range(shape.p - 1):
            for k in shape.microbatches:
                again = Action(stage, "R", k)
                dependencies[again] = [Action(stage, "F", k), Action(stage + 1, "B", k)]
                dependencies[Action(stage, "B", k)] = [again]
        slots = schedule_greedily(
            self, shape, dependencies, lambda action: (PRIORITY.index(action.kind), action.microbatch)
        )
        # B, the first half of a backward pass, stands for the whole pass.
        whole = {"B": "BW"}
        return [
            [action._replace(kind=whole.get(action.kind, action.kind)) for action in order if action.kind != "W"]
            for order in slots
        ]

    def next_item(
        self,
        shape: PipelineShape,
        remaining: Sequence[ScheduleItem],
        is_ready: Callable[[ScheduleItem], bool],
        fraction_done: Callable[[Action], float],
    ) -> ScheduleItem:
        first = remaining[0]
        if isinstance(first, Action) and first.kind == "R":
            gradient = Action(first.stage + 1, "BW", first.microbatch)
            if fraction_done(gradient) < 0.5:
                forward = (item for item in remaining if isinstance(item, Action) and item.kind == "F")
                return next(filter(is_ready, forward), first)
        return first

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("in_flight_b", [min(m, max(1, 3 * (p - 1 - i))) for i in range(p)], "replay of the order")
