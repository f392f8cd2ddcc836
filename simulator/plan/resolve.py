"""Resolves the plan of a job to a `Plan`."""

from __future__ import annotations

from meshcast.simulator.ir.capabilities import HoldsUnequalShards
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.pricing import JobPricing
from meshcast.simulator.plan.resolver import KnownParts, Resolver


def resolve(job: Job, pricing: JobPricing, known: KnownParts) -> Plan:
    """Resolves and checks the plan of `job` with the durations and peaks of memory that `pricing` tells.

    known: parts of the plans of earlier jobs; new ones are added.
    Raises PlanError for the first rule that the plan breaks.
    """
    resolver = Resolver(pricing, known)
    with locate_errors(*job.origin):
        plan = job.plan
        if job.batch.rounds:
            from meshcast.simulator.plan.unlike_degrees import resolve_rounds

            return resolve_rounds(job, resolver)
        if not (plan.has_stages or plan.replicas or plan.share != "even" or _has_heterogeneous_shards(job)):
            return resolver.uniform(job)
        from meshcast.simulator.plan.asymmetric import resolve_replicas, resolve_stages

        return resolve_stages(job, resolver) if plan.has_stages else resolve_replicas(job, resolver)


def _has_heterogeneous_shards(job: Job) -> bool:
    """Returns whether a scheme may give ranks on heterogeneous nodes different shards of the states."""
    kinds = [find_scheme(entry.use) for entry in job.plan.schemes] if job.cluster.groups else []
    return any(issubclass(kind, HoldsUnequalShards) for kind in kinds)
