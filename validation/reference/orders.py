"""What every device does in a step of the reference trainer: the plan's own orders, as far as it can play them."""

from __future__ import annotations

from hardware.errors import PlanError
from simulator.costs.costs import Costs
from simulator.forecast.simulate import build_program
from simulator.plan.plan import Plan
from simulator.scheduling.schedule import Action, OverlappedPasses

KINDS = ("F", "BW", "B", "W")
"""The kinds of actions that the reference trainer has."""

REMEDY = "Use a schedule whose actions are F, BW, B and W, one at a time, such as 1f1b, zb-h1 or zb-v"


def orders(plan: Plan) -> list[list[Action]]:
    """As the forecast from the catalog plays them, which tells how long passes last where a schedule weighs that.

    Raises PlanError for an action that the reference trainer lacks.
    """
    costs = Costs(plan.job.cluster, plan.mesh, plan.job.framework.speeds)
    _, program = build_program(plan, costs.estimate)
    return [[_known(plan, turn) for turn in order] for order in program.timetable.orders]


def _known(plan: Plan, turn: Action | OverlappedPasses) -> Action:
    if isinstance(turn, OverlappedPasses):
        raise PlanError("plan.schedule", "the reference trainer plays no two passes at once", REMEDY, str(turn))
    if turn.kind not in KINDS:
        raise PlanError("plan.schedule", "the reference trainer has no action of this kind", REMEDY, str(turn))
    if turn.kind in ("B", "W") and plan.job.model.moe:
        rule = "the reference model's experts make gradients of inputs and of weights at once"
        raise PlanError("plan.schedule", rule, "Use a schedule whose backward actions are BW", str(turn))
    return turn
