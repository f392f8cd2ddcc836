"""Keys of a job that change nothing in its forecast: of options whose scheme, axis or mode the job does not have.

Only what a job states counts. Keys that contradict others are errors elsewhere; these are valid, and would act in
another plan, which is what sweeps over several of them rely on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from meshcast.simulator.job.job import Job
from meshcast.simulator.job.plan_keys import PLAN_KEYS, ShortPlan


class InertKey(NamedTuple):
    """A key without effect. why: the reason, as the rest of a sentence."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}: {value} has no effect: {self.why}"


SINGLE_STAGE = "the pipeline has one stage"
FORWARD = "a forward-only job has no backward passes, gradients and optimizer"


def inert_keys(job: Job) -> list[InertKey]:
    """Returns the keys that a job states and that have no effect, in the order of the documentation."""
    written = job.as_written
    plan = written.get("plan", {})
    inert = [*_list_modes(job, written)]
    if isinstance(plan, Mapping) and not {"mesh", "schemes", "stages", "replicas"} & plan.keys():
        inert += _list_plan(job, plan)
    inert += _list_framework(job, written["framework"].get("set", {}))
    return [*inert, *_list_run(job), *_list_noise(written.get("noise"))]


DEGREES = {
    **{name: key.degree for name, key in PLAN_KEYS.items() if key.degree},
    **{"zero": "dp", "fsdp": "dp", "ep_scheme": "ep"},
    **{f"overlap.{name}": name for name in ("tp", "pp", "dp")},
}
"""Degrees without which keys of a plan, and traits of a framework, have no effect."""


def acts(job: Job, key: str) -> bool:
    """Returns whether a key of a plan, or a trait of the framework, has the ranks that it is about."""
    degree = DEGREES.get(key.removeprefix("plan."))
    if degree is None or job.plan.has_stages:
        return True
    experts = job.plan.views.get("experts", {})
    ranks = experts.get("ep", 1) if degree == "ep" else _size(job, degree)
    return ranks * (_size(job, "cp") if degree == "dp" else 1) > 1


def _size(job: Job, name: str) -> int:
    """Returns the ranks of a degree of the short form, which may be several axes."""
    mesh = job.plan.mesh
    sizes = [size for axis, size in mesh.items() if axis == name or axis.startswith(f"{name}-")]
    if name == "dp" and not sizes:
        sizes = [mesh.get("replicate", 1), mesh.get("shard", 1)]
    return math.prod(sizes)


def _list_modes(job: Job, written: Mapping[str, Any]) -> Iterator[InertKey]:
    """Yields the keys of training in a forward-only job."""
    if not job.forward_only:
        return
    for name, value in written["precision"].items():
        if name != "compute" and value is not None:
            yield InertKey(f"precision.{name}", value, FORWARD)
    plan = written.get("plan", {})
    for key in PLAN_KEYS.values():
        if key.family == "memory" and isinstance(plan, Mapping) and plan.get(key.name) not in (None, "none", [], ()):
            yield InertKey(f"plan.{key.name}", plan[key.name], FORWARD)


def _list_plan(job: Job, plan: Mapping[str, Any]) -> Iterator[InertKey]:
    """Yields the keys of a plan in short form, whose stages are alike."""
    tp, pp, cp, dp = (_size(job, name) for name in ("tp", "pp", "cp", "dp"))
    data = next((entry.use for entry in job.plan.schemes if entry.use.startswith("data/")), "data/ddp")

    def states(name: str, *defaults: Any) -> bool:
        return plan.get(name) is not None and plan[name] not in defaults

    if pp == 1 and plan.get("schedule") is None:  # schedules order the passes of a single stage, too
        for name, default in (("chunks", 1), ("partition", "even")):
            if states(name, default):
                yield InertKey(f"plan.{name}", plan[name], SINGLE_STAGE)
    if states("order", "pp-dp-cp-tp") and 1 in (pp, dp):
        yield InertKey("plan.order", plan["order"], SINGLE_STAGE if pp == 1 else "there is one replica")
    yield from _list_idle(plan, "tp", tp, "tp is 1")
    yield from _list_idle(plan, "cp", cp, "cp is 1")
    if states("pad_heads", False) and (job.model.heads % (tp * cp) == 0 or tp == 1):
        yield InertKey("plan.pad_heads", True, "the ranks divide the heads")
    if states("share", "even") and not job.cluster.groups:
        yield InertKey("plan.share", plan["share"], "all GPUs are of one kind")
    yield from _list_data(plan, data, dp * cp)


def _list_data(plan: Mapping[str, Any], data: str, ranks: int) -> Iterator[InertKey]:
    """Yields the keys of the data-parallel scheme.

    data: the scheme.
    ranks: over which it shards.
    """
    if plan.get("zero") is not None and plan.get("fsdp"):
        yield InertKey("plan.zero", plan["zero"], f"the plan has {data}")
    elif ranks == 1 and plan.get("zero"):
        yield InertKey("plan.zero", plan["zero"], "there is one replica, with nothing to shard over")
    yield from _list_idle(plan, "dp", ranks, "there is one replica")


def _list_idle(plan: Mapping[str, Any], degree: str, ranks: int, why: str) -> Iterator[InertKey]:
    """Yields the keys that have no effect over a single rank of a degree. ranks: of the plan."""
    for key in PLAN_KEYS.values() if ranks == 1 else ():
        if key.degree == degree and plan.get(key.name) not in (None, ShortPlan.model_fields[key.name].default):
            yield InertKey(f"plan.{key.name}", plan[key.name], why)


def _list_framework(job: Job, traits: Mapping[str, Any]) -> Iterator[InertKey]:
    """Yields overlap of the communication of axes with a single rank."""
    overlap = traits.get("overlap", {})
    if job.plan.has_stages or not isinstance(overlap, Mapping):
        return
    for name in ("tp", "pp", "dp"):
        ranks = _size(job, name) * (_size(job, "cp") if name == "dp" else 1)
        axes = {axis.partition("-")[0] for axis in job.plan.mesh}
        if overlap.get(name) is not None and ranks == 1 and name in {*axes, "dp"}:
            yield InertKey(f"framework.set.overlap.{name}", overlap[name], f"{name} is 1")


def _list_run(job: Job) -> Iterator[InertKey]:
    """Yields money and CO2 of a run of unknown length."""
    for name in ("price_per_gpu_hour", "carbon_kg_per_kwh"):
        if job.run.tokens is None and (value := getattr(job.run, name)) is not None:
            yield InertKey(f"run.{name}", value, "run.tokens is not given")


def _list_noise(noise: Any) -> Iterator[InertKey]:
    """Yields stragglers that are none, or no slower."""
    if not isinstance(noise, Mapping):
        return
    if not noise.get("stragglers"):
        for name, default in (("slow", 1), ("persistent", False)):
            if noise.get(name, default) != default:
                yield InertKey(f"noise.{name}", noise[name], "noise.stragglers is 0")
    elif noise.get("slow", 1) == 1:
        yield InertKey("noise.stragglers", noise["stragglers"], "noise.slow is 1: they are as fast as the others")
