"""Resolves the plan of a job to a `Plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshcast.simulator.ir.capabilities import HoldsUnequalShards
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.resolver import (
    KnownParts,
    Resolver,
    SliceSeconds,
    StageLayerCosts,
    StepSeconds,
    WorkSeconds,
)

if TYPE_CHECKING:
    from meshcast.simulator.plan.by_memory import DevicePeaks
    from meshcast.simulator.plan.by_tensor import TensorCosts


def resolve(
    job: Job,
    layer_costs: StageLayerCosts,
    work_seconds: WorkSeconds,
    slice_seconds: SliceSeconds,
    step_seconds: StepSeconds,
    device_peaks: DevicePeaks,
    tensor_costs: TensorCosts,
    known: KnownParts | None = None,
) -> Plan:
    """Resolves and checks the plan of `job`.

    known: parts of the plans of earlier jobs; new ones are added.
    Raises PlanError for the first rule that the plan breaks.
    """
    resolver = Resolver(
        layer_costs,
        work_seconds,
        slice_seconds,
        step_seconds,
        device_peaks,
        tensor_costs,
        known if known is not None else KnownParts(),
    )
    with locate_errors(*job.origin):
        plan = job.plan
        if not (plan.has_stages or plan.replicas or plan.share != "even" or _has_unlike_shards(job)):
            return resolver.uniform(job)
        from meshcast.simulator.plan.asymmetric import resolve_replicas, resolve_stages

        return resolve_stages(job, resolver) if plan.has_stages else resolve_replicas(job, resolver)


def _has_unlike_shards(job: Job) -> bool:
    """Whether a scheme may give ranks on unlike nodes unlike shards of the states."""
    kinds = [find_scheme(entry.use) for entry in job.plan.schemes] if job.cluster.groups else []
    return any(issubclass(kind, HoldsUnequalShards) for kind in kinds)
