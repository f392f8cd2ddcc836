"""The errors for a space without points, and for a space of which all points are excluded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshcast.experiments.search.space.fields import FIELDS
from meshcast.hardware.errors import PlanError

if TYPE_CHECKING:
    from meshcast.experiments.search.space.space import Space


def explain_empty(space: Space) -> PlanError:
    """Returns the error for a space without points: no values of its fields divide GPUs, batch and layers."""
    if (error := _explain_shard(space)) is not None:
        return error
    job = space.loaded
    rule = (
        f"no values of the open fields make a plan: tp x cp x pp must divide the {job.cluster.gpus:,} GPUs, "
        f"batch.micro x dp the global batch of {job.batch.total:,}, pp x chunks the {job.model.layers:,} layers "
        "(two more with the partition ends-as-layers), plan.shard the data-parallel ranks"
    )
    remedy = "Give values that divide them, or write auto"
    if len(space.open) != 1:
        return PlanError("plan", rule, remedy)
    return PlanError(space.open[0], rule, remedy, [*space.values[FIELDS[space.open[0]]]])


def _explain_shard(space: Space) -> PlanError | None:
    """Returns the error for a space without points because of the ranks that share a copy of the states, if so."""
    values = space.values["shard"]
    ranks = {
        space.data_ranks(group, pipeline.place)[0]
        for group in space.groups()
        for pipeline, _ in space.count_pipelines(group)
    }
    if None in values or not ranks:
        return None
    stated = [*values] if "plan.shard" in space.open else values[0]
    schemes = space.values["data"]
    if not space.with_copies and not {*values} & ranks:
        several = f"none of {', '.join(schemes)} keeps" if len(schemes) > 1 else f"{schemes[0]} keeps no"
        rule = f"{several} copies of what it shards; zero-1 and fsdp may"
        return PlanError("plan.shard", rule, "Write zero: 1 or fsdp: true, or leave it out", stated)
    numbers = sorted(ranks)
    most = f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
    rule = f"it must divide the data-parallel ranks, of which the plans have {most}"
    return PlanError("plan.shard", rule, "Give values that divide them, or leave it out", stated)


def explain_excluded(plans: int, excluded: Mapping[str, int], space: Space) -> PlanError:
    """Returns the error for a space of which limits exclude all points. excluded: points by limit."""
    single, by_where, by_program = plans == 1, excluded["where"], excluded["program"]
    rule = "the only plan of the space is excluded" if single else f"all {plans:,} plans of the space are excluded"
    if by_where == plans:
        texts = " and ".join(constraint.text for constraint in space.constraints)
        return PlanError(space.constraints[0].where, rule, "Loosen it, or open more fields", texts)
    rule += f", {by_where:,} of them by constraints" if by_where else ""
    if by_program:
        program = space.loaded.framework.name
        rule += f", {by_program:,} of them" if by_program < plans else ""
        rule += f" by rules of {program}, which does not run {'it' if single else 'them'}"
        rule += f": {example}" if (example := space.explain_program()) else ""
        if by_where + by_program == plans:
            return PlanError("plan", rule, "Open more fields, or keep such plans with --any-program")
    rule += f"{', the others' if by_where or by_program else ''}: nobody has published a run with "
    rule += f"{'its' if single else 'their'} schedule, degrees and micro-batch on as many GPUs"
    return PlanError("--near-measured", rule, "Leave it out, or open more fields")
