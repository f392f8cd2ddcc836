"""Resolves plans whose pipeline stages, or whose replicas, differ.

Stages of unequal degrees (Alpa, Zheng et al. 2022, arXiv 2201.12023; DAPPLE, Fan et al. 2021, arXiv 2007.01045):
every pipeline device has a plan for its ranks. A micro-batch passes all of them, and each stage divides its
sequences over its data-parallel ranks.

Heterogeneous replicas: those of equal degrees run different numbers of micro-batches (Whale, Jia et al. 2022, arXiv
2011.09208), others have separate stages too (HexiScale, Yan et al. 2024, arXiv 2409.01143). All sum their gradients at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import HoldsUnequalShards, schemes_with
from meshcast.simulator.job.batch import Batch
from meshcast.simulator.job.job import Job, LongPlan, ReplicaPlan, StagePlan
from meshcast.simulator.job.shorthand import family_degree
from meshcast.simulator.plan.checks import ALWAYS, check_divisible, check_world
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.resolver import Resolver
from meshcast.simulator.plan.size import check_noisy_steps, check_size

CHECKS = tuple(check for check in ALWAYS if check is not check_world)
"""The checks of a stage; the GPUs of all stages are counted together."""


# ------------------------------------------------------------------------- stages of unequal degrees


def resolve_stages(job: Job, resolver: Resolver) -> Plan:
    """Returns the plan of a job whose stages have unequal degrees; each of heterogeneous replicas is a pipeline.

    Raises PlanError for the first rule that the plan breaks.
    """
    replicas, where = _replicas_with_stages(job), "plan.replicas[{}].stages" if job.plan.replicas else "plan.stages"
    _check_gpus(job, [stage for replica in replicas for stage in replica.stages])
    pipelines, first = [], 0
    alone = len(replicas) == 1
    for i, replica in enumerate(replicas):
        batch = _batch_of_replicas(job.batch, replica.microbatches or 1, 1)
        pipelines.append(_make_pipeline(job, replica.stages, batch, first, where.format(i), resolver, alone))
        first += sum(math.prod(stage.mesh.values()) for stage in replica.stages)
    if not alone:
        _check_flush(pipelines[0])
    pipelines = [
        _finish(pipeline, replica.stages, where.format(i), resolver)
        for i, (pipeline, replica) in enumerate(zip(_agree_on_model(pipelines), replicas, strict=True))
    ]
    if any(replica.microbatches is None for replica in replicas):
        counts = share_by_speed(pipelines, [1] * len(pipelines), _count_microbatches(job), resolver)
        return resolve_stages(_with_microbatches_of(job, replicas, counts), resolver)
    return _join(pipelines, job)


def _replicas_with_stages(job: Job) -> tuple[ReplicaPlan, ...]:
    """Returns the replicas of a job, each with its stages; all stages of the plan are those of a single replica.

    Raises PlanError where both are stated, or an entry stands for several.
    """
    replicas = job.plan.replicas
    if job.plan.stages and replicas:
        rule = "the stages of a plan are those of all its replicas, or each entry of plan.replicas has its own"
        raise PlanError("plan.replicas", rule, "Leave out plan.stages, or plan.replicas")
    if not replicas:
        share = job.batch.order or _count_microbatches(job)
        return (ReplicaPlan(microbatches=share, stages=job.plan.stages),)
    for i, replica in enumerate(replicas):
        if replica.dp != 1 or not replica.stages:
            rule = "replicas with stages of their own are listed one by one"
            raise PlanError(f"plan.replicas[{i}]", rule, "Give each entry its stages, and no dp")
    return replicas


def _join(pipelines: Sequence[Plan], job: Job) -> Plan:
    """Returns the plan of a job of a pipeline, or of several."""
    plan = replace(pipelines[0], job=job, pipelines=tuple(pipelines) if len(pipelines) > 1 else ())
    check_size(plan)
    check_noisy_steps(plan)
    return plan


def _count_microbatches(job: Job) -> int:
    """Micro-batches of a step, of all pipelines together."""
    assert job.batch.total is not None
    if job.batch.total % job.batch.micro:
        rule = f"it must be a multiple of the {job.batch.micro} sequences of a micro-batch, which all ranks share"
        near = max(1, round(job.batch.total / job.batch.micro)) * job.batch.micro
        raise PlanError("batch.global", rule, f"{near} would work", job.batch.total)
    return job.batch.total // job.batch.micro


def _check_gpus(job: Job, stages: Sequence[StagePlan]) -> None:
    sizes = [math.prod(stage.mesh.values()) for stage in stages]
    if sum(sizes) != job.cluster.gpus:
        rule = f"the stages have {' + '.join(map(str, sizes))} = {sum(sizes)} GPUs, the cluster {job.cluster.gpus}"
        where = "plan.stages" if job.plan.stages else "plan.replicas"
        raise PlanError(where, rule, "Change the degrees of a stage, or the number of nodes")


def _make_pipeline(
    job: Job, stages: Sequence[StagePlan], batch: Batch, first: int, where: str, resolver: Resolver, alone: bool
) -> Plan:
    """Returns a pipeline with the plans of its stages, without layers.

    batch: the pipeline's share of it.
    first: rank of its first GPU.
    alone: whether there is no other pipeline.
    """
    axes = {axis: len(stages) for entry in job.plan.schemes for axis in entry.over}
    long_plan = LongPlan(
        mesh=axes, schemes=job.plan.schemes, partition=job.plan.partition, pad_heads=job.plan.pad_heads
    )
    whole_job = job.model_copy(update={"plan": long_plan, "batch": batch})
    whole = resolver.prepare(whole_job, ())
    if whole.mesh.places:
        rule = f"{whole.schedule.use} places equal stages on other GPUs than their neighbours"
        raise PlanError(where, rule, "Use pipeline/1f1b, or stages of equal degrees")
    equal = alone and all((stage.mesh, stage.views) == (stages[0].mesh, stages[0].views) for stage in stages)
    stage_plans = []
    for i, stage in enumerate(stages):
        plan = _plan_stage(whole_job, stage, f"{where}[{i}]", resolver)
        mesh = plan.mesh if equal else plan.mesh.of_stage(plan.ranks.pipeline_axis, first)
        stage_plans.append(replace(plan, mesh=mesh))
        first += math.prod(stage.mesh.values())
    _check_holders(whole, stages, where)
    return replace(whole, stage_plans=tuple(stage_plans))


def _plan_stage(job: Job, stage: StagePlan, where: str, resolver: Resolver) -> Plan:
    """Returns the plan of a stage, without layers. job: of the pipeline, with its schedule alone."""
    whole = job.plan
    mesh, schemes = {**whole.mesh, **stage.mesh}, (*whole.schemes, *stage.schemes)
    plan = LongPlan(mesh=mesh, views=stage.views, schemes=schemes, partition=whole.partition, pad_heads=whole.pad_heads)
    share = _share_of_stage(job.batch, family_degree(plan, "data"), where)
    with _locate_in_stage(where, len(whole.schemes)):
        prepared = resolver.prepare(job.model_copy(update={"plan": plan, "batch": share}), CHECKS)
        return resolver.choose_alternatives(prepared)


def _share_of_stage(batch: Batch, replicas: int, where: str) -> Batch:
    """Returns the share of a micro-batch that a data-parallel rank of a stage has. Raises PlanError if it is broken."""
    for samples in [length.samples for length in batch.lengths] or [batch.micro]:
        if samples % replicas:
            rule = f"the {samples} sequences of a micro-batch must divide over its {replicas} data-parallel ranks"
            sizes = "batch.lengths" if batch.lengths else "batch.global or batch.microbatches"
            raise PlanError(where, rule, f"Change {sizes}, or its dp")
    return batch.with_share(replicas)


def _check_holders(plan: Plan, stages: Sequence[StagePlan], where: str) -> None:
    """Checks that stages that hold the same layers (bidirectional schedules) have equal degrees."""
    for part in range(plan.model_parts.count):
        first, *others = plan.model_parts.holders(part)
        for other in others:
            if stages[first].model_dump(exclude={"layers"}) != stages[other].model_dump(exclude={"layers"}):
                rule = f"{plan.schedule.use} holds the same layers on stages {first} and {other}, whose degrees differ"
                raise PlanError(f"{where}[{other}]", rule, "Give both the same degrees, or use pipeline/1f1b")


@contextmanager
def _locate_in_stage(where: str, before: int) -> Iterator[None]:
    """Places errors about the plan of a stage at its entry. before: schemes in front of those of the stage."""
    try:
        yield
    except PlanError as error:
        place = error.where
        if place.startswith("plan.schemes["):
            number, _, rest = place.removeprefix("plan.schemes[").partition("]")
            place = f"{where}.schemes[{int(number) - before}]{rest}"
        elif place.startswith("plan."):
            place = f"{where}.{place.removeprefix('plan.')}"
        raise PlanError(place, error.rule, error.remedy, error.value) from None


def _agree_on_model(pipelines: Sequence[Plan]) -> list[Plan]:
    """Returns the pipelines with the same size of the embedding, and number of padded heads, on all stages."""
    every = [stage_plan for pipeline in pipelines for stage_plan in pipeline.stage_plans]
    job = every[0].job
    tensor = math.lcm(*(stage_plan.ranks.tensor_ranks for stage_plan in every))
    rows = job.model.vocab
    rows = rows if rows % tensor == 0 else job.model.padded_vocab(job.framework.vocab_multiple * tensor)
    heads = math.lcm(*(stage_plan.ranks.head_ranks for stage_plan in every)) if job.plan.pad_heads else 1

    def set_sizes(plan: Plan) -> Plan:
        model = plan.job.model.pad_heads(heads) if job.plan.pad_heads else plan.job.model
        stages = tuple(set_sizes(stage_plan) for stage_plan in plan.stage_plans)
        job_with_sizes = plan.job.model_copy(update={"model": model})
        return replace(plan, job=job_with_sizes, vocab_rows=rows, stage_plans=stages)

    return [set_sizes(pipeline) for pipeline in pipelines]


def _finish(plan: Plan, stages: Sequence[StagePlan], where: str, resolver: Resolver) -> Plan:
    """Returns a pipeline with layers and slices, checked."""
    partition = tuple(_stated_layers(plan, stages, where)) or plan.job.plan.partition
    if partition == "by-cost":  # every stage may hold any layer
        _check_stages(plan, where, resolver)
    layers = resolver.layers(plan, partition)
    stage_plans = tuple(replace(stage_plan, layers=layers) for stage_plan in plan.stage_plans)
    _check_stages(replace(plan, layers=layers, stage_plans=stage_plans), where, resolver)
    return resolver.slice_sequences(replace(plan, layers=layers, stage_plans=stage_plans))


def _check_stages(plan: Plan, where: str, resolver: Resolver) -> None:
    """Checks that the ranks of every stage divide the dims of the layers that they hold; before these are known, of all
    layers."""
    for device, stage_plan in enumerate(plan.stage_plans):
        held = (
            tuple(part for part in range(plan.model_parts.count) if device in plan.model_parts.holders(part))
            if plan.layers
            else None
        )
        with _locate_in_stage(f"{where}[{device}]", len(plan.job.plan.schemes)):
            check_divisible(stage_plan, resolver.known.divisible, held)


def _stated_layers(plan: Plan, stages: Sequence[StagePlan], where: str) -> list[int]:
    """Returns the layers of every part of the model that the stages state; empty if they state none."""
    if all(stage.layers is None for stage in stages):
        return []
    layers = [0] * plan.model_parts.count
    for device, stage in enumerate(stages):
        parts = sorted(
            {plan.model_parts.of_stage(s) for s in range(plan.shape.stages) if plan.model_parts.device(s) == device}
        )
        key = f"{where}[{device}].layers"
        if stage.layers is None:
            raise PlanError(key, "every stage states its layers, or none", "Add it")
        each = stage.layers if isinstance(stage.layers, tuple) else (stage.layers / len(parts),) * len(parts)
        if len(each) != len(parts) or any(n != int(n) for n in each):
            rule = f"the stage holds {len(parts)} parts of the model, among which its layers divide"
            raise PlanError(key, rule, f"Give a list of {len(parts)} numbers", stage.layers)
        for part, n in zip(parts, each, strict=True):
            layers[part] = int(n)
    return layers


# ------------------------------------------------------------------------------- replicas of equal degrees


def resolve_replicas(job: Job, resolver: Resolver) -> Plan:
    """Returns the plan of a job whose replicas have the same mesh and run different numbers of micro-batches.

    Raises PlanError for the first rule that the plan breaks.
    """
    base = resolver.uniform(_with_microbatches(job, _usual_microbatches(job)))
    axis, inner = _replica_axis(base)
    replicas = job.plan.replicas or _kinds_of_replicas(base, axis, inner)
    if job.plan.share == "even" and any(replica.microbatches is None for replica in replicas):
        usual = _usual_microbatches(job)
        replicas = tuple(replica.model_copy(update={"microbatches": usual}) for replica in replicas)
    places = _places_of_replicas(replicas, base.mesh.size(axis), inner)
    if any(replica.microbatches is None for replica in replicas):
        count = _count_shared_microbatches(job, base.ranks.replicas // (base.mesh.size(axis) * inner))
        plans = [replace(base, positions=(axis, kind)) for kind in places]
        counts = share_by_speed(plans, [replica.dp for replica in replicas], count, resolver)
        return resolve_replicas(_with_microbatches_of(job, replicas, counts), resolver)
    # Of several batches that are drawn all have as many devices.
    if len({replica.microbatches for replica in replicas}) == 1 and not job.cluster.groups and not job.drawn:
        return replace(resolver.uniform(_with_microbatches(job, replicas[0].microbatches or 1)), job=job)
    _check_flush(base)
    plans = [
        replace(resolver.uniform(_with_microbatches(job, replica.microbatches or 1)), positions=(axis, kind))
        for replica, kind in zip(replicas, places, strict=True)
    ]
    return _join(_shard_states(plans), job)


def _places_of_replicas(replicas: Sequence[ReplicaPlan], count: int, inner: int) -> list[range]:
    """Returns the positions of each entry of replicas along their axis.

    count: of positions; inner: replicas of each.
    Raises PlanError unless the entries are all of them.
    """
    if sum(replica.dp for replica in replicas) != count * inner:
        rule = f"the replicas of all entries are the {count * inner} along the outermost data-parallel axis"
        raise PlanError("plan.replicas", rule, "Change a dp", [replica.dp for replica in replicas])
    for i, replica in enumerate(replicas):
        if replica.dp % inner:
            rule = f"experts are spread over {inner} neighbouring replicas, which must be in one entry"
            raise PlanError(f"plan.replicas[{i}].dp", rule, f"A multiple of {inner} would work", replica.dp)
    ends = [0, *accumulate(replica.dp // inner for replica in replicas)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def _count_shared_microbatches(job: Job, ranks: int) -> int:
    """Returns the micro-batches of a step, of all replicas together. ranks: that share a replica."""
    assert job.batch.total is not None
    each = job.batch.micro * ranks
    count, rest = divmod(job.batch.total, each)
    if rest:
        rule = f"it must be a multiple of batch.micro x ranks that share a replica = {job.batch.micro} x {ranks}"
        raise PlanError("batch.global", rule, f"{max(1, count) * each} would work", job.batch.total)
    return count


def _shard_states(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the plans of heterogeneous replicas with the shards of the states that their schemes give each one's
    ranks."""
    positions = [plan.positions for plan in plans if plan.positions is not None]
    axis, counts = positions[0][0], [len(places) for _, places in positions]
    memory = [min(float(cluster.gpu.memory) for cluster in plan.ranks.clusters) for plan in plans]
    schemes = [list(plan.schemes) for plan in plans]
    for scheme in schemes_with(plans[0].schemes, HoldsUnequalShards):
        if sizes := scheme.shard_sizes(axis, memory):
            mean = sum(size * count for size, count in zip(sizes, counts, strict=True)) / sum(counts)
            number = plans[0].schemes.index(scheme)
            for of_kind, size in zip(schemes, sizes, strict=True):
                of_kind[number] = scheme.with_shards(axis, max(sizes) / mean, size / mean)
    return [replace(plan, schemes=tuple(of_kind)) for plan, of_kind in zip(plans, schemes, strict=True)]


def _check_flush(plan: Plan) -> None:
    """Checks that heterogeneous replicas meet at the end of every step."""
    if not plan.schedule.barrier:
        rule = f"replicas that differ meet at the end of every step, which {plan.schedule.use} does not wait for"
        raise PlanError("plan.replicas", rule, "Use pipeline/1f1b, or equal replicas", plan.schedule.use)


def _replica_axis(plan: Plan) -> tuple[str, int]:
    """Returns the outermost part of the mesh along which ranks are replicas, and how many replicas each position is."""
    parts = {part for scheme in plan.family("data") for part in scheme.over}
    outermost = next((part for part in plan.mesh.axes if part in parts and plan.mesh.size(part) > 1), None)
    if outermost is None:
        raise PlanError("plan.replicas", "the plan has one replica", "Leave it out, or add data-parallel ranks")
    named = next(axis for axis in plan.mesh.named_axes if outermost in plan.mesh.parts(axis))
    return outermost, plan.mesh.size(named) // plan.mesh.size(outermost)


def _kinds_of_replicas(plan: Plan, axis: str, inner: int) -> tuple[ReplicaPlan, ...]:
    """Returns neighbouring replicas on the same kinds of nodes."""

    def kinds(place: int) -> list[str]:
        return [
            cluster.node.name for cluster in replace(plan, positions=(axis, range(place, place + 1))).ranks.clusters
        ]

    neighbours = (list(replicas) for _, replicas in groupby(range(plan.mesh.size(axis)), kinds))
    return tuple(ReplicaPlan(dp=inner * len(replicas)) for replicas in neighbours)


def _usual_microbatches(job: Job) -> int | tuple[int, ...]:
    """Micro-batches of the first replica; of an equal share of the batch, where the plan states none."""
    if job.plan.replicas and job.plan.replicas[0].microbatches is not None:
        return job.plan.replicas[0].microbatches
    if job.batch.lengths:
        return (0,)
    assert job.batch.total is not None
    return max(1, job.batch.total // (job.batch.micro * family_degree(job.plan, "data")))


def _with_microbatches(job: Job, share: int | tuple[int, ...]) -> Job:
    """Returns the job of equal replicas that run these micro-batches each: their number, or their classes."""
    plan = job.plan.model_copy(update={"replicas": (), "share": "even"})
    batch = _batch_of_replicas(job.batch, share, family_degree(plan, "data"))
    return job.model_copy(update={"plan": plan, "batch": batch})


def _batch_of_replicas(batch: Batch, share: int | tuple[int, ...], replicas: int) -> Batch:
    """Returns the batch of `replicas` that run these micro-batches each: their number, or their classes."""
    if isinstance(share, tuple):
        sequences = sum(batch.lengths[number].samples for number in share)
        return batch.with_order(share).model_copy(update={"total": sequences * replicas})
    return batch.model_copy(update={"total": share * batch.micro * replicas})


def _with_microbatches_of(job: Job, replicas: Sequence[ReplicaPlan], counts: Sequence[int]) -> Job:
    filled = (replica.model_copy(update={"microbatches": n}) for replica, n in zip(replicas, counts, strict=True))
    return job.model_copy(update={"plan": job.plan.model_copy(update={"replicas": tuple(filled)})})


# ------------------------------------------------------------------------------------------------ by speed


def share_by_speed(plans: Sequence[Plan], replicas: Sequence[int], count: int, resolver: Resolver) -> list[int]:
    """Micro-batches of each replica with which the pipelines finish together, as far as whole micro-batches allow.

    A pipeline of p stages takes (m + p - 1) t for m micro-batches, t that of its slowest stage: each further
    micro-batch goes where it is done first.

    replicas: number of replicas of every plan, which run equal numbers.
    count: micro-batches of all replicas.
    """
    seconds = [_slowest_stage(plan, resolver) for plan in plans]
    shares = [1] * len(plans)
    left = count - sum(replicas)
    while left >= 0:
        fitting = [i for i, n in enumerate(replicas) if n <= left]
        if not fitting:
            break
        best = min(fitting, key=lambda i: (shares[i] + plans[i].shape.p) * seconds[i])
        shares[best] += 1
        left -= replicas[best]
    if left:
        rule = f"{count} micro-batches cannot be shared by groups of {', '.join(map(str, replicas))} equal replicas"
        raise PlanError("plan.share", rule, "Choose another batch.global, or fewer kinds of replicas")
    return shares


def _slowest_stage(plan: Plan, resolver: Resolver) -> float:
    """Returns the seconds of a micro-batch on the stage that takes longest."""
    costs, stages = resolver.pricing.price_layers(plan), [0.0] * plan.shape.p
    for part, (begin, layers, end) in enumerate(costs):
        device = plan.model_parts.holders(part)[0]
        stages[device] += sum(layers[layer] for layer in plan.model_parts.layers_of(part))
        stages[device] += begin * (part == 0) + end * (part == plan.model_parts.count - 1)
    return max(stages)
