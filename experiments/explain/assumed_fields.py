"""What every assumed field is worth: the forecasts of a job with other values of the fields that it does not state.

Fields and their alternatives come from the schemas: both values of a flag, all words of an enumeration, and half and
twice the value of the figures in `SCALED` and of what was filled in of the cluster. An alternative that the rest of the
job rules out is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from meshcast.hardware.cluster import Fabric
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.inline import Network
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel
from meshcast.hardware.units import GIB, GIGA
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.framework import Framework, framework_names
from meshcast.simulator.job.job import Job, Precision
from meshcast.simulator.job.plan_keys import ShortPlan
from meshcast.simulator.loading.load import load_job, set_field
from meshcast.simulator.report.report import Report

SCALED = ("bucket.elements", "launch_s", "memory.context_gib", "step_overhead_s")
"""Numbers of a framework that differ between machines and releases. Its other numbers were counted in its code or
fitted on measured steps, which the residual of its regime covers."""

FACTORS = (0.5, 2.0)
"""Alternatives of a number, as multiples of it."""

BY_PRECISION = frozenset({"weights", "quantised", "gradients", "main_weights", "moments"})
"""Fields of a framework that a job states under `precision`."""

NO_TRAITS = frozenset({"regime"})
"""Fields of a framework that say something about its profile."""

REPLACED = {"bucket.elements": "reduce_bucket"}
"""Fields of a framework that have no effect with a scheme that has an option for the same thing."""

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe-v")
"""Pipeline schedules that a job may mean which names none: those of PyTorch (torch/distributed/pipelining/schedules.py)
but interleaved 1F1B, to which `plan.chunks` leads."""

UNUSUAL: dict[str, tuple[str | bool, ...]] = {
    "framework.name": ("reference",),
    "framework.set.launch_blocking": (True,),
    "precision.compute": ("fp32",),
}
"""Values in which nobody trains language models: the trainer of meshcast's measurements, a mode for finding errors,
and a format without tensor cores."""

Value = bool | int | float | str


@dataclass(frozen=True)
class Alternative:
    """Another value of an assumed field, and the forecast with it.

    step_time_s: of the job with this value [s].
    peak_device_gib: likewise, what nvidia-smi would show [GiB].
    fits: whether the job fits in memory with it.
    """

    value: Value
    step_time_s: float
    peak_device_gib: float
    fits: bool


@dataclass(frozen=True)
class AssumedField:
    """A field that a job does not state.

    name: as ``--set`` has it; of an option of a scheme, which ``--set`` cannot reach: `plan.schemes.USE.OPTION`.
    value: the assumed value; None: it follows from other fields.
    others: the other values that the schema admits.
    change: makes the job with another value. Raises MeshcastError if the rest of the job rules it out.
    """

    name: str
    value: Value | None
    others: tuple[Value, ...]
    change: Callable[[Value], Job]


@dataclass(frozen=True)
class AssumedFieldEffect:
    """What an assumed field is worth.

    step_time_s, peak_device_gib: with the assumed value.
    alternatives: those that the rest of the job admits, from the shortest step to the longest.
    """

    field: AssumedField
    step_time_s: float
    peak_device_gib: float
    alternatives: tuple[Alternative, ...]

    @property
    def step_effect_s(self) -> float:
        """Largest change of the step time [s], either way; 0 without an alternative."""
        return max((abs(alternative.step_time_s - self.step_time_s) for alternative in self.alternatives), default=0.0)

    @property
    def memory_effect_gib(self) -> float:
        """Largest change of the peak memory [GiB], either way; 0 without an alternative."""
        return max((abs(other.peak_device_gib - self.peak_device_gib) for other in self.alternatives), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the field in the JSON answer."""
        return {
            "field": self.field.name,
            "value": self.field.value,
            "step_effect_s": self.step_effect_s,
            "memory_effect_gib": self.memory_effect_gib,
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
        }


def forecast_alternatives(field: AssumedField, report: Report, shared_work: SharedWork) -> AssumedFieldEffect:
    """Forecasts a job with every other value of a field that the rest of the job admits.

    report: with the assumed value.
    """
    from meshcast.simulator import simulate

    forecasts = []
    for value in field.others:
        with suppress(MeshcastError):  # the plan or the hardware rules this value out
            other = simulate(field.change(value), shared_work=shared_work)
            forecasts.append(Alternative(value, other.step_time, other.peak_device / GIB, other.fits))
    alternatives = tuple(sorted(forecasts, key=lambda forecast: forecast.step_time_s))
    return AssumedFieldEffect(field, report.step_time, report.peak_device / GIB, alternatives)


def assumed_fields(report: Report) -> list[AssumedField]:
    """Returns the fields that the job of a forecast does not state, and that have other values than the assumed value.

    Fields that define the task are not among them: the model, the batch, the GPUs and the degrees of parallelism.
    """
    job = report.job
    fields = [
        *_framework_fields(report),
        *_precision_fields(job),
        *_plan_fields(job),
        *_scheme_options(report),
        *_cluster_fields(job),
    ]
    return [field for field in fields if field.others]


def admitted_values(annotation: Any) -> tuple[Value, ...]:
    """Returns the values of a flag or an enumeration by its type; () of any other type."""
    if annotation is bool:
        return (False, True)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return tuple(value for part in get_args(annotation) for value in admitted_values(part))
    return ()


def _framework_fields(report: Report) -> Iterator[AssumedField]:
    """Yields the framework if the job names none, and the fields of its profile that the job does not set."""
    job = report.job
    stated = job.as_written["framework"]
    options = {name for scheme in report.play.plan.schemes for name in scheme.Options.model_fields}
    replaced = {path for path, option in REPLACED.items() if option in options}
    if "name" not in stated:
        yield _written_field(job, "framework.name", job.framework.name, framework_names())
    traits = job.framework.model_dump()
    for path, annotation in _leaves(Framework):
        value = _look_up(traits, path)
        others = admitted_values(annotation)
        if path in SCALED:
            others = tuple(value * factor for factor in FACTORS if value)
        if path not in BY_PRECISION | NO_TRAITS | replaced and _look_up(stated.get("set", {}), path) is None:
            yield _written_field(job, f"framework.set.{path}", value, others)


def _precision_fields(job: Job) -> Iterator[AssumedField]:
    """Yields the number formats that the job leaves to the framework."""
    for name, field in Precision.model_fields.items():
        if job.as_written["precision"].get(name) is None:
            yield _written_field(
                job, f"precision.{name}", getattr(job.precision, name), admitted_values(field.annotation)
            )


def _plan_fields(job: Job) -> Iterator[AssumedField]:
    """Yields the micro-batch, and the flags and words of a plan in short form; the long form states all of them."""
    batch, plan = job.as_written.get("batch", {}), job.as_written.get("plan", {})
    if "global" in batch and "micro" not in batch:  # otherwise the global batch follows the micro-batch
        yield _written_field(job, "batch.micro", job.batch.micro, _scale_count(job.batch.micro))
    if not {"mesh", "schemes"}.isdisjoint(plan):
        return
    for name, field in ShortPlan.model_fields.items():
        if name not in plan and not (name == "fsdp" and "zero" in plan):
            yield _written_field(job, f"plan.{name}", field.default, admitted_values(field.annotation))
    if plan.get("pp", 1) == 1:
        return
    pipeline = next(entry for entry in job.plan.schemes if entry.use.startswith("pipeline/"))
    if "schedule" not in plan:
        yield _written_field(job, "plan.schedule", pipeline.use.removeprefix("pipeline/"), SCHEDULES)
    if "chunks" not in plan:
        chunks = (pipeline.model_extra or {})["chunks"]
        yield _written_field(job, "plan.chunks", chunks, _scale_count(chunks))


HIDING_DISPATCH = ("overlap_passes", "delay_weight_gradients")
"""Options that hide the dispatch of tokens to experts."""


def _scheme_options(report: Report) -> Iterator[AssumedField]:
    """Yields the flags and words among the options of the plan's schemes that the job does not state."""
    plan = report.job.plan
    for place, (entry, scheme) in enumerate(zip(plan.schemes, report.play.plan.schemes, strict=True)):
        for name, field in scheme.Options.model_fields.items():
            if name in (entry.model_extra or {}):
                continue
            if name in HIDING_DISPATCH and not report.job.model.moe:
                continue

            def change(value: Value, place: int = place, name: str = name) -> Job:
                schemes = [*plan.schemes]
                schemes[place] = schemes[place].model_copy(update={name: value})
                return report.job.model_copy(update={"plan": plan.model_copy(update={"schemes": tuple(schemes)})})

            value = getattr(scheme.options, name)
            others = _without(value, admitted_values(field.annotation))
            yield AssumedField(f"plan.schemes.{entry.use}.{name}", value, others, change)


def _cluster_fields(job: Job) -> Iterator[AssumedField]:
    """Yields network and domains that a cluster described by its GPUs leaves open, and switches between nodes."""
    stated, cluster = job.as_written["cluster"], job.cluster
    networked = cluster.gpus > cluster.local_gpus
    if isinstance(stated, Mapping) and "gpu" in stated:
        sizes = {"gpus_per_node": cluster.gpus_per_node, "scale_up_domain": cluster.node.domain}
        for name, size in sizes.items():
            if stated.get(name) is None:
                yield _written_field(job, f"cluster.{name}", size, _scale_count(size))
        inter, nics = stated.get("inter", {}), cluster.node.nics
        if networked and nics:
            rate = cluster.scale_out.bandwidth * 8 / GIGA
            if inter.get("kind") is None:
                kinds = [kind for kind in get_args(Network) if kind != "none"]
                yield _written_field(job, "cluster.inter.kind", nics.link.family, kinds)
            if inter.get("gbps_per_gpu") is None:
                yield _written_field(job, "cluster.inter.gbps_per_gpu", rate, [rate * factor for factor in FACTORS])
    if networked and cluster.fabric == Fabric():
        yield AssumedField("cluster.fabric.oversubscription", 1.0, (2.0,), lambda value: _oversubscribe(job, value))


def _oversubscribe(job: Job, value: Value) -> Job:
    fabric = Fabric(oversubscription=float(value))
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"fabric": fabric})})


def _written_field(job: Job, name: str, value: Value | None, others: Iterable[Value]) -> AssumedField:
    """Returns a field that is set in the job as written, which is then read again."""

    def change(other: Value) -> Job:
        data = copy.deepcopy(job.as_written)
        set_field(data, name, other, name)
        return load_job(data, base=job.folder)

    return AssumedField(
        name,
        value,
        _without(value, (alternative for alternative in others if alternative not in UNUSUAL.get(name, ()))),
        change,
    )


def _without(value: Value | None, values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(other for other in values if other != value)


def _scale_count(count: int) -> tuple[int, ...]:
    """Returns half of an even number, and twice the number."""
    return (*([count // 2] if count % 2 == 0 else []), 2 * count)


def _leaves(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields paths and types of the fields of a model, those of nested models with dots."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}", kind


def _look_up(data: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a path of nested mappings; None if there is none."""
    value: Any = data
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
