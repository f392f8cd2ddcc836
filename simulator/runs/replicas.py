"""Durations of a step while data-parallel replicas are missing: forecasts of the job with fewer of them."""

from __future__ import annotations

from typing import Any

from hardware.cluster import Cluster
from hardware.errors import PlanError
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.simulate import simulate
from simulator.job.job import Job
from simulator.job.load import load_job
from simulator.job.run_keys.keys import Recovery
from simulator.report.report import Report
from simulator.runs.elastic import Elasticity


def make_elasticity(report: Report, recovery: Recovery, fewer: dict[int, float] | None = None) -> Elasticity:
    """The policy of a job. fewer: durations of steps by the number of missing replicas [s], as far as they are known of
    its plan; others are added. Raises PlanError where its plan cannot lose replicas."""
    step = report.step_time
    if recovery.elastic == "none":
        return Elasticity((step,))
    job, plan = report.job, report.play.plan
    axis = _replica_axis(job)
    replicas = job.plan.mesh[axis]
    if replicas < 2:
        rule = "a run goes on without some of its replicas, and the plan has one"
        raise PlanError("run.recovery.elastic", rule, "Write elastic: none, or plan more replicas", recovery.elastic)
    stages, batches = plan.shape.p, plan.shape.m
    steps = [step]
    if recovery.elastic != "redundant":
        shared, known = SharedWork(), {} if fewer is None else fewer
        for missing in range(1, min(recovery.most_lost_replicas, replicas - 1) + 1):
            if missing not in known:
                left = load_job(drop_replicas(job, axis, missing, batches), base=job.folder)
                known[missing] = simulate(left, shared_work=shared).step_time
            steps.append(max(known[missing], steps[-1]))
    return Elasticity(
        step_s=tuple(steps),
        policy=recovery.elastic,
        replicas=replicas,
        nodes_per_replica=job.cluster.nodes / replicas,
        doubled_stage=(2 * batches + stages - 1) / (batches + stages - 1) if stages > 1 else 2.0,
        reconfigure=recovery.reconfigure_s,
        overhead=recovery.redundancy_overhead if recovery.elastic == "redundant" else 0.0,
    )


def _replica_axis(job: Job) -> str:
    """The outermost axis of the data scheme."""
    if job.plan.has_stages or job.plan.replicas or job.cluster.groups or job.batch.lengths:
        rule = "a run with missing replicas needs stages, replicas, nodes and micro-batches that are alike"
        raise PlanError("run.recovery.elastic", rule, "Write elastic: none")
    found = (entry.over[0] for entry in job.plan.schemes if entry.use.startswith("data/") and entry.over)
    axis = next(found, None)
    if axis is None:
        raise PlanError("run.recovery.elastic", "the plan has no data-parallel replicas", "Write elastic: none")
    return axis


def drop_replicas(job: Job, axis: str, missing: int, batches: int) -> dict[str, Any]:
    """The job with fewer replicas, in long form. The others share all micro-batches of a step; where they do not divide
    them, every replica has as many as the one with the most.

    axis: of the mesh, whose positions are replicas. batches: micro-batches of a replica.
    """
    before = job.plan.mesh[axis]
    left = before - missing
    each = -(-batches * before // left)
    found = job.to_dict()
    found["plan"]["mesh"] = {**found["plan"]["mesh"], axis: left}
    for view in found["plan"].get("views", {}).values():
        outer = next(iter(view))
        if view[outer] % before:
            rule = "the experts are spread over replicas, none of which can be missing"
            raise PlanError("run.recovery.elastic", rule, "Write elastic: none, or a smaller ep")
        view[outer] = view[outer] // before * left
    found["batch"]["global"] = (job.batch.total or 0) // (batches * before) * each * left
    found["batch"].pop("microbatches", None)
    gpus = job.cluster.gpus // before * left
    cluster = job.cluster
    found["cluster"] = Cluster(
        name=cluster.name,
        title=cluster.title,
        source=cluster.source,
        node=cluster.node,
        nodes=-(-gpus // cluster.gpus_per_node),
        gpus=gpus,
        fabric=cluster.fabric.model_copy(update={"levels": ()}) if _has_blocks(cluster) else cluster.fabric,
        assumed=cluster.assumed,
    )
    found["run"] = {"tokens": None, "price_per_gpu_hour": None}
    found.pop("published", None)
    return found


def _has_blocks(cluster: Cluster) -> bool:
    return any(level.blocks for level in cluster.fabric.levels)
