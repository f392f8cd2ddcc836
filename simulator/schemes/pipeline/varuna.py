"""Varuna: only inputs of stages are kept; a pass is made again just before the gradient that needs it comes.

The order comes about in unit slots: forward passes, and those made again (R), take one, backward passes two. A device
takes, of what is ready, backward passes before those made again before forward passes. One is made again in the second
half of the next stage's backward pass. On the last stage, where backward passes follow at once, none is.

    device 0   F0 F1 F2 F3 .. .. R0 B0 B0 R1 B1 B1 R2 B2 B2 .. .. .. R3 B3 B3
    device 1   .. F0 F1 F2 R0 B0 B0 R1 B1 B1 R2 B2 B2 F3 .. .. R3 B3 B3
    device 2   .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. .. .. F3 B3 B3

At run time a device goes on with forward passes as long as it is too soon to make one again, so links and devices that
are now faster and now slower cost less than in a fixed order.

3 (m + p - 1 + floor((m-1)/3)) slots for p > 1; min(m, 3 (p-1-i)) inputs in flight on device i, one on the last.

References: Athlur et al. 2022, arXiv 2111.04007.
"""

from collections.abc import Callable, Iterable, Sequence

from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.greedy import pass_dependencies, schedule_greedily
from simulator.scheduling.schedule import Action, PassDurations, PipelineSetting, PipelineShape, Schedule, ScheduleItem

HALVES = "WBRF"
"""What a free device takes first. A backward pass is made of two halves, B and W, of which W follows at once."""


class Varuna(Schedule):
    paper = Paper("arXiv:2111.04007", "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", 2021)
    reorders_at_run_time = True
    required_roles = ("recompute scheme",)

    def unused_roles(self, shape: PipelineShape, stage: int) -> tuple[str, ...]:
        return self.required_roles if stage == shape.p - 1 else ()

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        waits = dict(pass_dependencies(self, shape, split_backward=True))
        for stage in range(shape.p - 1):
            for k in shape.microbatches:
                again = Action(stage, "R", k)
                waits[again] = [Action(stage, "F", k), Action(stage + 1, "B", k)]
                waits[Action(stage, "B", k)] = [again]
        halves = schedule_greedily(self, shape, waits, lambda action: (HALVES.index(action.kind), action.microbatch))
        return [[_whole(action) for action in order if action.kind != "W"] for order in halves]

    def next_item(
        self,
        shape: PipelineShape,
        left: Sequence[ScheduleItem],
        there: Callable[[ScheduleItem], bool],
        done: Callable[[Action], float],
    ) -> ScheduleItem:
        first = left[0]
        if isinstance(first, Action) and first.kind == "R":
            gradient = Action(first.stage + 1, "BW", first.microbatch)
            if done(gradient) < 0.5:
                ahead = (turn for turn in left if isinstance(turn, Action) and turn.kind == "F" and there(turn))
                return next(ahead, first)
        return first

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("in_flight_b", [min(m, max(1, 3 * (p - 1 - i))) for i in range(p)], "replay of the order")


def _whole(action: Action) -> Action:
    return action._replace(kind="BW") if action.kind == "B" else action
