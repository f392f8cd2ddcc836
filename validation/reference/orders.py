"""The order of actions of each pipeline device, for the reference trainer."""

from __future__ import annotations

from meshcast.hardware.errors import PlanError
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import Action, OverlappedPasses

KINDS = ("F", "BW", "B", "W")
"""Kinds of actions that the reference trainer can run."""

REMEDY = "Use a schedule whose actions are F, BW, B and W, one at a time, such as 1f1b, zb-h1 or zb-v"


def action_orders(plan: Plan) -> list[list[Action]]:
    """Returns actions of each device in order; schedules that need durations of passes get those of the catalog's
    forecast.

    Raises PlanError for an action that the reference trainer cannot run.
    """
    costs = Costs(plan.job.cluster, plan.mesh, plan.job.framework.kernel_traits)
    _, program = build_program(plan, costs.estimate)
    return [[_check_action(plan, turn) for turn in order] for order in program.timetable.orders]


def _check_action(plan: Plan, turn: Action | OverlappedPasses) -> Action:
    if isinstance(turn, OverlappedPasses):
        raise PlanError(
            "plan.schedule", "the reference trainer cannot overlap a forward and a backward pass", REMEDY, str(turn)
        )
    if turn.kind not in KINDS:
        raise PlanError("plan.schedule", "the reference trainer cannot run actions of this kind", REMEDY, str(turn))
    if turn.kind in ("B", "W") and plan.job.model.moe:
        rule = "the reference model's experts compute input and weight gradients together"
        raise PlanError("plan.schedule", rule, "Use a schedule whose backward actions are BW", str(turn))
    return turn
