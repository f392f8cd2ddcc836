"""Which plans are plain: the compiled loops play them. All others are forecast singly."""

from __future__ import annotations

from meshcast.simulator.forecast.evaluation import make_evaluation, make_reference
from meshcast.simulator.forecast.program import plans_orders
from meshcast.simulator.ir.capabilities import HoldsBuffers, LowersByLayer, schemes_with
from meshcast.simulator.ir.ops import Host, StageOps
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import Schedule
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme

FAMILIES = frozenset(("pipeline", "data", "tensor", "sequence", "memory"))
"""Families of the schemes of plain plans."""


def is_plain(plan: Plan) -> bool:
    """Says whether a plan is plain, as far as it shows before its stages are lowered: micro-batches that are alike pass
    equal layers on equal ranks, in an order that no duration decides, and all steps are equal."""
    job, passes = plan.job, plan.passes
    if plan.stage_plans or plan.pipelines or job.forward_only or job.cluster.groups or job.noise is not None:
        return False
    if len(plan.slice_lengths) > 1 or job.batch.lengths or passes.update_interval or passes.microbatches_of_unit > 1:
        return False
    if job.model.cross_attention or job.model.contrastive is not None or job.framework.cuda_graphs:
        return False
    if not (_has_plain_schedule(plan) and _has_plain_schemes(plan)):
        return False
    return make_evaluation(plan) is None and make_reference(plan) is None


def _has_plain_schedule(plan: Plan) -> bool:
    """Says whether the order of passes depends on the shape of the pipeline alone, and all steps and stages are
    alike."""
    schedule = plan.schedule
    if plans_orders(plan) or not schedule.flush or schedule.directions > 1 or schedule.backwards_per_forward > 1:
        return False
    if plan.passes.steps > 1 or plan.passes.period > 1 or not plan.model_parts.architecture.has_equal_layers:
        return False
    kind = type(schedule)
    return kind.unused_roles is Schedule.unused_roles and kind.sums_early is Schedule.sums_early


def _has_plain_schemes(plan: Plan) -> bool:
    """Says whether the schemes of a plan lower stages layer by layer, all but that of the replicas."""
    inside = inner_schemes(plan)
    if not inside or plan.schemes[-len(inside) :] != inside or not isinstance(inside[0], DataScheme):
        return False
    memory, overlap = plan.job.framework.memory, plan.job.framework.overlap
    if not keeps_layers_alike(inside[0]) and memory.frees_behind and overlap.gathers_ahead:
        return False  # what the host has freed and the GPU still uses depends on the program
    if not {scheme.family for scheme in plan.schemes} <= FAMILIES or schemes_with(plan.schemes, HoldsBuffers):
        return False
    return all(_lowers_by_layer(scheme) for scheme in (plan.schedule, *inside[1:]))


def inner_schemes(plan: Plan) -> tuple[Scheme, ...]:
    """Returns the schemes of a plan but its schedule, outermost first."""
    return tuple(scheme for scheme in plan.schemes if scheme.family != "pipeline")


def find_data_scheme(plan: Plan) -> DataScheme:
    """Returns the data scheme of a plain plan."""
    return next(scheme for scheme in plan.schemes if isinstance(scheme, DataScheme))


def keeps_layers_alike(scheme: DataScheme) -> bool:
    """Says whether the ranks of a scheme have whole weights and gradients, and reduce these beside passes or behind
    them, so that its layers stay alike; otherwise a stage is lowered for its own number of layers."""
    if {"parameters", "gradients"} & {*scheme.shards}:
        return False
    return type(scheme).lower_stage is DataScheme.lower_stage


def _lowers_by_layer(scheme: Scheme) -> bool:
    """Says whether a scheme does the same with every layer of a stage."""
    if type(scheme).lower_stage is Scheme.lower_stage:
        return True
    return isinstance(scheme, LowersByLayer) and scheme.lowers_by_layer


def is_plain_stage(stage: StageOps) -> bool:
    """Says whether what a stage does beside its units is known beforehand, and nothing of it is of the host."""
    sides = *stage.ahead, *stage.behind
    if any(isinstance(op.work, Host) for side in sides for op in side.ops):
        return False
    if stage.again or stage.whole_weights or stage.whole_gradients or stage.held or stage.batch_loss is not None:
        return False
    return not any(side.formed or len(side.waits) or side.after for side in sides)
