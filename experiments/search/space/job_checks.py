"""Refuses jobs and plans for which there are no bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshcast.experiments.search.space.fields import AUTO, DATA_FIELD, check_partition
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.job import Job
from meshcast.simulator.scheduling.vocabulary import ShardsVocabulary

CLOSED = ("dp", "stages", "replicas", "share", "mesh", "schemes")
"""Keys of a plan that the bounds do not know: degrees follow from those that a search may vary."""


def check_plan(plan: Any) -> None:
    """Refuses plans for which there are no bounds."""
    if not isinstance(plan, Mapping):  # `load_job` explains it
        return
    for key in CLOSED:
        if plan.get(key) is not None:
            words = "of degrees such as tp and pp" if key in ("mesh", "schemes") else f"without {key}"
            rule = f"a search takes a plan in short form, {words}"
            raise PlanError(f"plan.{key}", rule, "Leave it out, or use `meshcast sweep`", plan[key])
    for field, words in (("plan.schedule", "schedule"), (DATA_FIELD, "data scheme")):
        if isinstance(stated := plan.get(field.removeprefix("plan.")), Mapping):
            rule = f"a search takes a {words} by its name, without options"
            raise PlanError(field, rule, "Write its name alone, or use `meshcast sweep`", dict(stated))
    if (partition := plan.get("partition")) is not None:
        check_partition(partition)


def check_schedules(names: Sequence[str]) -> None:
    """Refuses schedules that do not exist without an option, and those of which there are no bounds."""
    for name in names:
        schedule = find_scheme(f"pipeline/{name}")
        options = schedule.Options.model_fields
        if issubclass(schedule, ShardsVocabulary):
            rule = "the bounds of a search place the whole embedding and output layer on a stage each"
            raise PlanError("plan.schedule", rule, "Leave it out, or use `meshcast sweep`", name)
        if needed := [key for key, field in options.items() if field.is_required()]:
            keys = ", ".join(needed)
            rule = f"it needs the option {keys}, and a search takes a schedule by its name, without options"
            raise PlanError("plan.schedule", rule, "Leave it out, or use `meshcast sweep`", name)


def check_job(job: Job, written: Mapping[str, Any]) -> None:
    """Refuses jobs for which there are no bounds."""
    batch = job.batch
    check_batch(written.get("batch", {}))
    reasons = {
        "cluster": ("without --heterogeneous all nodes are of one kind", bool(job.cluster.groups)),
        "model": ("a model is one chain of layers", bool(job.model.encoder_layers)),
        "train.mode": ("a step has backward passes", job.forward_only),
        "batch": ("micro-batches are alike", bool(batch.lengths)),
    }
    for where, (rule, broken) in reasons.items():
        if broken:
            remedy = (
                "Add --heterogeneous (heterogeneous=True)" if where == "cluster" else "Use `meshcast sweep` for others"
            )
            raise PlanError(where, f"in a search {rule}", remedy)


def check_batch(sizes: Mapping[str, Any]) -> None:
    """Refuses batches that plans cannot share. sizes: as the job states them."""
    if sizes.get("global") is None:
        rule = "a search compares plans of one global batch, and the job does not state it"
        raise PlanError("batch.global", rule, "Write for example batch: {global: 1024}")
    for key in ("microbatches", "samples"):
        if sizes.get(key) is not None:
            rule = "a search takes the size of a micro-batch, batch.micro"
            raise PlanError(f"batch.{key}", rule, "Write batch.micro in its place, or use `meshcast sweep`", sizes[key])


def check_experts(job: Job, written: Mapping[str, Any]) -> None:
    """Refuses a degree of experts' tensor parallelism for a model without experts. written: the job's, open or not."""
    plan = written.get("plan")
    degree = plan.get("etp") if isinstance(plan, Mapping) else None
    if job.model.moe is None and degree not in (None, AUTO, [None]):
        rule = f"{job.model.name} has no experts, whose matrices these ranks share"
        raise PlanError("plan.etp", rule, "Leave it out, or choose a model with experts", degree)


def without_choice(job: Job) -> list[str]:
    """Returns the fields of a plan that have a single value at most, and that ``plan: auto`` leaves alone."""
    fields = [] if job.model.moe else ["plan.etp"]
    fields += ["plan.shard"] if job.cluster.gpus <= job.cluster.scale_up_domain else []
    return fields + (["plan.order"] if job.cluster.gpus <= job.cluster.gpus_per_node else [])
