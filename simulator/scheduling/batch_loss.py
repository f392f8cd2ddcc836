"""The loss of a batch whose samples it couples (a contrastive loss): its actions put into orders.

A stage without a successor makes outputs: that of the whole model, or of any of its branches. Behind the last pass that
makes some stands LOSS; of two branches that end on different stages each computes its rows of the loss, so OUTPUTS
before it sends them to the other stage, and OUTPUT_GRADIENTS behind it takes the gradients that come back.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.hardware.errors import PlanError
from meshcast.simulator.scheduling.schedule import (
    BATCH_LOSS,
    Action,
    ActionKind,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)


def coupled_stages(schedule: Schedule, shape: PipelineShape) -> dict[int, tuple[int, ...]]:
    """Returns the stages whose outputs the loss of a batch couples, each with the others; none if it couples no
    samples."""
    if not shape.batch_loss or shape.forward_only:
        return {}
    followed = {before for stage in range(shape.stages) for before in schedule.predecessors(shape, stage)}
    ends = [stage for stage in range(shape.stages) if stage not in followed]
    return {stage: tuple(other for other in ends if other != stage) for stage in ends}


def insert_batch_loss(
    schedule: Schedule, shape: PipelineShape, orders: Sequence[Sequence[ScheduleItem]]
) -> Sequence[Sequence[ScheduleItem]]:
    """Orders with the loss of the batch, behind the last pass that makes an output for it.

    Raises PlanError if a backward pass comes before.
    """
    ends = coupled_stages(schedule, shape)
    if not ends:
        return orders
    extended = [list(order) for order in orders]
    for stage, others in ends.items():
        order = extended[schedule.device(shape, stage)]
        passes = [
            (at, action.kind) for at, item in enumerate(order) for action in actions_of([item]) if action.stage == stage
        ]
        kind = ActionKind.AHEAD if any(kind == ActionKind.AHEAD for _, kind in passes) else ActionKind.FORWARD
        last = max(at for at, each in passes if each == kind)
        if any(each in ("BW", "B") and at < last for at, each in passes):
            rule = f"{schedule.use} runs backward passes before all outputs of a batch are made, which its loss couples"
            raise PlanError("plan.schemes", rule, "Use pipeline/distmm", schedule.use)
        kinds = BATCH_LOSS if others else (ActionKind.LOSS,)
        order[last + 1 : last + 1] = [Action(stage, each, shape.m - 1) for each in kinds]
    return extended
