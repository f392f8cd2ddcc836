"""Durations of a step while data-parallel replicas are missing: forecasts of the job with fewer of them."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Any

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.run_keys import ElasticPolicy, Recovery
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from meshcast.simulator.runs.checkpoints import StateSize
from meshcast.simulator.runs.elastic import Elasticity, PipelineTime
from meshcast.simulator.scheduling.schedule import PipelineShape


@dataclass
class ForecastSteps:
    """Forecasts of a plan without some of its replicas or nodes, as far as they are known.

    fewer: duration of a step by the number of missing replicas [s].
    alone: the same where the others have no more micro-batches than before [s].
    pipelines: times of pipelines of other depths; None before they are forecast.
    """

    fewer: dict[int, float] = field(default_factory=dict)
    alone: dict[int, float] = field(default_factory=dict)
    pipelines: tuple[PipelineTime, ...] | None = None
    shared: SharedWork = field(default_factory=SharedWork)


def make_elasticity(report: Report, recovery: Recovery, known: ForecastSteps | None = None) -> Elasticity:
    """Returns the policy of a job. known: forecasts of its plan; others are added.

    Raises PlanError where its plan cannot lose replicas.
    """
    step = report.step_time
    if recovery.elastic == "none":
        return Elasticity((step,))
    job, shape = report.job, report.play.plan.shape
    axis = _replica_axis(job)
    replicas = job.plan.mesh[axis]
    if replicas < 2:
        rule = "a run goes on without some of its replicas, and the plan has one"
        raise PlanError("run.recovery.elastic", rule, "Write elastic: none, or plan more replicas", recovery.elastic)
    batches = shape.m
    most = min(recovery.most_lost_replicas, replicas - 1)
    nodes = job.cluster.nodes / replicas
    known, steps, outside = ForecastSteps() if known is None else known, [step], 0.0
    pipelines: tuple[PipelineTime, ...] = ()
    if recovery.elastic in ("fewer-replicas", "templates") and (depth := _pipeline_axis(job, shape.p, nodes)):
        if known.pipelines is None:
            known.pipelines = time_pipelines(job, axis, depth, shape.p, batches, known.shared)
        whole = next((pipeline for pipeline in known.pipelines if pipeline.nodes == nodes), None)
        outside = max(step - whole.fixed - batches * whole.each, 0.0) if whole else 0.0
        pipelines = known.pipelines if whole else ()
    if not pipelines:
        steps += time_fewer_replicas(report, recovery.elastic, axis, most, known)
    return Elasticity(
        step_s=tuple(steps),
        policy=recovery.elastic,
        replicas=replicas,
        nodes_per_replica=nodes,
        doubled_stage=(2 * batches + shape.p - 1) / (batches + shape.p - 1) if shape.p > 1 else 2.0,
        reconfigure=recovery.reconfigure_s,
        overhead=recovery.redundancy_overhead if recovery.elastic == "redundant" else 0.0,
        pipelines=pipelines,
        batches=batches * replicas,
        outside=outside,
        most_missing=math.floor(most * nodes + 1e-9),
    )


def time_fewer_replicas(
    report: Report, policy: ElasticPolicy, axis: str, most: int, known: ForecastSteps
) -> list[float]:
    """Returns the durations of a step without 1, 2 .. `most` replicas, none shorter than that before [s].

    axis: of the replicas; known: forecasts of the plan; others are added.
    """
    job, shape, steps = report.job, report.play.plan.shape, [report.step_time]
    replicas, alone = job.plan.mesh[axis], policy == "quorum"
    times = known.alone if alone else known.fewer
    for missing in range(1, most + 1):
        if missing not in times:
            rest = load_job(drop_replicas(job, axis, missing, shape.m, alone), base=job.folder)
            times[missing] = simulate(rest, shared_work=known.shared).step_time
        longer = times[missing]
        if alone:  # of as many tokens as a whole step trains
            longer *= replicas / (replicas - missing)
        if policy == "reroute":
            longer -= _filled_bubble(longer - report.step_time, shape, replicas, missing)
        steps.append(max(longer, steps[-1]))
    return steps[1:]


def with_healing(elasticity: Elasticity, size: StateSize, cluster: Cluster, restart: float) -> Elasticity:
    """Returns the policy in which a replica that is back starts again and fetches the states from another.

    restart: until its processes run [s]. Raises PlanError where no other replica has all states.
    """
    if size.copies < 2:
        rule = "a replica fetches its states from another, and the replicas shard theirs"
        remedy = "Write plan.zero: 0, or shard the states over a part of the replicas (plan.shard)"
        raise PlanError("run.recovery.elastic", rule, remedy, elasticity.policy)
    part = size.nbytes * elasticity.replicas / cluster.gpus
    network = cluster.scale_out.bandwidth
    return replace(elasticity, rejoin=restart + (part / network if network else 0.0))


def _filled_bubble(longer: float, shape: PipelineShape, replicas: int, missing: int) -> float:
    """Returns the bubble of a step that micro-batches of missing nodes fill [s]: that of p - 1 micro-batches, each of v
    chunks.

    longer: what the step takes longer with fewer replicas, in which all stages have the further micro-batches [s].
    """
    further = -(-shape.m * replicas // (replicas - missing)) - shape.m
    return (shape.p - 1) / shape.v * longer / further if further else 0.0


def _pipeline_axis(job: Job, stages: int, nodes: float) -> str:
    """Returns the axis of the pipeline if a replica has several whole nodes, each with as many whole stages; else
    nothing."""
    axis = next((entry.over[0] for entry in job.plan.schemes if entry.use.startswith("pipeline/") and entry.over), "")
    return axis if nodes > 1 and nodes == round(nodes) and stages % round(nodes) == 0 else ""


def time_pipelines(
    job: Job, axis: str, depth: str, stages: int, batches: int, shared: SharedWork
) -> tuple[PipelineTime, ...]:
    """Returns the times of a pipeline on fewer and on more nodes, from two forecasts each: as few as its states fit on,
    and up to
    1 fewer than twice that, or those that it has (Oobleck's pipeline templates, section 4.1). Layers are partitioned
    by their costs. Ordered by nodes.

    axis: of the replicas.
    depth: of the stages.
    stages, batches: of a pipeline.
    """
    nodes = job.cluster.nodes // job.plan.mesh[axis]
    times: dict[int, PipelineTime] = {}

    def measure(count: int) -> bool:
        steps = []
        for microbatches in (batches, 2 * batches):
            alone = make_pipeline(job, axis, depth, stages // nodes * count, count, batches, microbatches)
            try:
                report = simulate(load_job(alone, base=job.folder), shared_work=shared)
            except PlanError:
                return False
            steps.append(report.step_time)
        each = (steps[1] - steps[0]) / batches
        times[count] = PipelineTime(count, max(steps[0] - batches * each, 0.0), each)
        return report.fits or count >= nodes

    least = nodes
    if not measure(nodes):
        return ()
    while least > 1 and measure(least - 1):
        least -= 1
    for count in range(nodes + 1, 2 * least):
        if not measure(count):
            break
    return tuple(times[count] for count in sorted(times) if count >= least)


def make_pipeline(
    job: Job, axis: str, depth: str, stages: int, nodes: int, batches: int, microbatches: int
) -> dict[str, Any]:
    """Returns the job with a single replica, in long form.

    stages: of its pipeline.
    nodes: on which it runs.
    batches: micro-batches of a replica of the job.
    microbatches: of the job returned.
    """
    fields = drop_replicas(job, axis, job.plan.mesh[axis] - 1, batches)
    fields["plan"]["mesh"][depth] = stages
    fields["batch"]["global"] = (job.batch.total or 0) // (batches * job.plan.mesh[axis]) * microbatches
    fields["cluster"] = _resize_cluster(job.cluster, nodes * job.cluster.gpus_per_node)
    if stages != job.plan.mesh[depth]:
        fields["plan"]["partition"] = "by-cost"
    return fields


def _replica_axis(job: Job) -> str:
    """Returns the outermost axis of the data scheme."""
    if job.plan.has_stages or job.plan.replicas or job.cluster.groups or job.batch.lengths:
        rule = "a run with missing replicas needs stages, replicas, nodes and micro-batches that are alike"
        raise PlanError("run.recovery.elastic", rule, "Write elastic: none")
    axes = (entry.over[0] for entry in job.plan.schemes if entry.use.startswith("data/") and entry.over)
    axis = next(axes, None)
    if axis is None:
        raise PlanError("run.recovery.elastic", "the plan has no data-parallel replicas", "Write elastic: none")
    return axis


def drop_replicas(job: Job, axis: str, missing: int, batches: int, alone: bool = False) -> dict[str, Any]:
    """Returns the job with fewer replicas, in long form. The others share all micro-batches of a step; where they do
    not divide them, every replica has as many as that with the most.

    axis: of the mesh, whose positions are replicas.
    batches: micro-batches of a replica.
    alone: whether the others have their own micro-batches alone.
    """
    before = job.plan.mesh[axis]
    left = before - missing
    each = batches if alone else -(-batches * before // left)
    fields = job.to_dict()
    fields["plan"]["mesh"] = {**fields["plan"]["mesh"], axis: left}
    for view in fields["plan"].get("views", {}).values():
        outer = next(iter(view))
        if view[outer] % before:
            rule = "the experts are spread over replicas, none of which can be missing"
            raise PlanError("run.recovery.elastic", rule, "Write elastic: none, or a smaller ep")
        view[outer] = view[outer] // before * left
    fields["batch"]["global"] = (job.batch.total or 0) // (batches * before) * each * left
    fields["batch"].pop("microbatches", None)
    fields["cluster"] = _resize_cluster(job.cluster, job.cluster.gpus // before * left)
    fields["run"] = {"tokens": None, "price_per_gpu_hour": None}
    fields.pop("published", None)
    return fields


def _resize_cluster(cluster: Cluster, gpus: int) -> Cluster:
    """Returns a cluster of the same nodes with so many GPUs; blocks of its fabric are left out."""
    has_blocks = any(level.blocks for level in cluster.fabric.levels)
    return Cluster(
        name=cluster.name,
        title=cluster.title,
        source=cluster.source,
        node=cluster.node,
        nodes=-(-gpus // cluster.gpus_per_node),
        gpus=gpus,
        fabric=cluster.fabric.model_copy(update={"levels": ()}) if has_blocks else cluster.fabric,
        assumed=cluster.assumed,
    )
