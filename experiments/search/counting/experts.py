"""Refuses degrees of experts for a model without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcast.experiments.search.fields import AUTO
from meshcast.hardware.errors import PlanError
from meshcast.simulator.job.job import Job


def check_experts(job: Job, written: Mapping[str, Any]) -> None:
    """Refuses a degree of experts' tensor parallelism for a model without experts. written: the job's, open or not."""
    plan = written.get("plan")
    given = plan.get("etp") if isinstance(plan, Mapping) else None
    if job.model.moe is None and given not in (None, AUTO, [None]):
        rule = f"{job.model.name} has no experts, whose matrices these ranks share"
        raise PlanError("plan.etp", rule, "Leave it out, or choose a model with experts", given)
