"""Resolves plans whose ranks form groups of different context-parallel degrees within a step.

The data- and context-parallel ranks of a plan are one row of ranks. In every round of a step it is divided into groups
of neighbours; each group shares the sequences of its micro-batches, and runs them one after another. At the end of a
round all ranks wait for each other, so a step takes the sum over rounds of the slowest group of each. It is forecast on
a rank that is in the slowest group of every round. Weights and optimizer states do not know of the groups: gradients
are summed over the whole row at the end of the step.

Groups of a degree are a view of the mesh (`simulator.ir.mesh`), so degrees nest: one divides the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import ShardsStates, schemes_with
from meshcast.simulator.job.batch import Batch
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.shorthand import family_degree
from meshcast.simulator.models.flops import needed_flops
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.resolver import Resolver


def resolve_rounds(job: Job, resolver: Resolver) -> Plan:
    """Returns the plan of a job whose batch has rounds, on the ranks that are in the slowest group of each.

    Raises PlanError for the first rule that the plan breaks.
    """
    _check_parts(job)
    plan = resolver.uniform(job.model_copy(update={"batch": job.batch.with_order(range(len(job.batch.lengths)))}))
    if plan.passes.period > 1:
        rule = "groups of different degrees sum their gradients in every step"
        raise PlanError("batch.rounds", rule, "Use data/ddp, data/zero-1 or data/fsdp")
    if any("parameters" in scheme.shards for scheme in schemes_with(plan.schemes, ShardsStates)):
        _check_single_microbatches(job)
    seconds = [_price(class_plan, resolver) for class_plan in plan.passes.classes]

    def last(group: Sequence[int]) -> float:
        return sum(seconds[number] for number in group)

    return with_groups(plan, [max(groups, key=last) for groups in job.batch.rounds])


def with_groups(plan: Plan, groups: Iterable[Sequence[int]]) -> Plan:
    """Returns the plan of ranks that are in these groups. groups: by round, the classes of their micro-batches."""
    order = tuple(number for group in groups for number in group)
    job = plan.job.model_copy(update={"batch": plan.job.batch.with_order(order)})
    return replace(plan, job=job, shape=replace(plan.shape, m=len(order), classes=order))


def with_fullest_groups(plan: Plan) -> Plan | None:
    """Returns the plan of ranks that have the micro-batch of most tokens a rank; None where those of `plan` do."""
    batch, usual = plan.job.batch, family_degree(plan.job.plan, "sequence")
    tokens = [kind.padded_tokens / (kind.cp or usual) for kind in batch.lengths]
    if not batch.rounds or max(tokens) == max(tokens[number] for number in batch.order):
        return None
    groups = (max(of_round, key=lambda group: max(tokens[number] for number in group)) for of_round in batch.rounds)
    return with_groups(plan, groups)


def find_degrees(plan: Plan) -> list[int]:
    """Returns the context-parallel degrees of the groups of a step, the smallest first."""
    usual = family_degree(plan.job.plan, "sequence")
    return sorted({kind.cp or usual for kind in plan.job.batch.lengths})


def busy_share(plan: Plan) -> float:
    """Returns the FLOPs of all ranks over those that they had if all were in the slowest group of every round."""
    batch, usual = plan.job.batch, family_degree(plan.job.plan, "sequence")
    ranks = family_degree(plan.job.plan, "data") * usual
    flops = [
        kind.padded_tokens
        * needed_flops("causal", plan.job.model, Batch(documents=kind.documents).document or kind.sequence)
        for kind in batch.lengths
    ]
    slowest = sum(flops[number] / batch.degree_of(number, usual) for number in batch.order)
    return sum(flops[number] for of_round in batch.rounds for group in of_round for number in group) / ranks / slowest


def _price(plan: Plan, resolver: Resolver) -> float:
    """Returns the seconds of the passes of a micro-batch through all layers, forward and backward."""
    (costs,) = resolver.pricing.price_layers(plan)
    return costs.begin + sum(costs.layers) + costs.end


def _check_parts(job: Job) -> None:
    """Checks that the ranks of a job are a row that groups divide, with whole layers."""
    plan, where = job.plan, "batch.rounds"
    if family_degree(plan, "pipeline") > 1:
        rule = "groups of different degrees are forecast without a pipeline"
        raise PlanError(where, rule, "Use tensor parallelism or fully sharded weights, pp = 1")
    if job.model.moe is not None:
        rule = f"{job.model.name} has experts, and ranks of different groups meet in none of their micro-batches"
        raise PlanError(where, rule, "Use groups of one degree")
    sequence = [entry for entry in plan.schemes if entry.use.startswith("sequence/") and entry.over]
    data = [axis for entry in plan.schemes if entry.use.startswith("data/") for axis in entry.over]
    if len(sequence) != 1 or len(sequence[0].over) != 1 or len(data) > 1:
        rule = "groups of different degrees are of one data-parallel axis and one axis of one sequence scheme"
        raise PlanError(where, rule, "State plan.cp, and no shard")
    axes = list(plan.mesh)
    row = [axis for axis in axes if axis in (*data, *sequence[0].over)]
    if (data and axes.index(row[0]) + 1 != axes.index(row[1])) or row != [*data, *sequence[0].over]:
        rule = "groups are neighbours along the data-parallel axis and, within it, the axis of the sequence scheme"
        raise PlanError("plan.mesh", rule, "Name them next to each other, the data-parallel axis first", axes)


def _check_single_microbatches(job: Job) -> None:
    """Checks that all groups of a round run as many micro-batches, where they gather the weights of each together."""
    if any(len(group) != 1 for groups in job.batch.rounds for group in groups):
        rule = "ranks gather the weights of every micro-batch together, so each group runs one in a round"
        raise PlanError("batch.rounds", rule, "Pack the samples of a group, or use data/zero-1")
