"""Reads from a job, in whatever form its plan is written, the fields that a search varies, and what these cannot say.

The fields are read from the long form by the table of the keys of a plan. What is left shows when the plan is
written anew in short form: whatever differs then, no search varies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshcast.experiments.search.space.data_schemes import DATA, left_to_framework
from meshcast.experiments.search.space.fields import (
    DATA_FIELD,
    FIELD_OF,
    FIELDS,
    MESH_ORDERS,
    PARTITIONS,
    read_recompute,
    write_value,
)
from meshcast.experiments.search.space.scheme_keys import (
    DATA_OPTIONS,
    DEFAULTS,
    NamedScheme,
    accompanies_others,
    name_scheme,
)
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.framework import Framework
from meshcast.simulator.job.job import Job, LongPlan, SchemeEntry
from meshcast.simulator.job.plan_keys import PLAN_KEYS, SCHEME_KEYS, PlanKey, choosing_keys, state_scheme_name
from meshcast.simulator.job.shorthand import CARRIED, family_degree
from meshcast.simulator.loading.load import load_job

SCHEMES = "plan.schemes."
"""Prefix of the fields that are the schemes of a family, such as ``plan.schemes.data``."""

FLAGS = tuple(f"plan.{name}" for name in CARRIED if not PLAN_KEYS[name].part)
"""Fields that both forms of a plan have, and that no search varies."""

GATHERING = ("zero-1", "zero-2")
"""Data schemes that all-gather updated weights once a step."""


@dataclass(frozen=True)
class ShortForm:
    """The plan of a job as a search states it.

    values: of the fields that a search varies, by their names in a point (`FIELDS`); None where a field makes no
        difference, as a schedule without a pipeline; all layers of a stage in `recomputed`. Empty for plans whose
        stages or replicas are heterogeneous.
    others: what a plan in short form cannot say, by field: in this plan, and in the plan with the same `values`.
    job: the job with the plan of these `values` in short form, as plain data; None if there is no such plan.
    named: fields in `NAMED_ALONE` that were read.
    """

    values: Fields
    others: dict[str, tuple[Any, Any]]
    job: Fields | None
    named: frozenset[str] = frozenset()

    def by_field(self) -> Fields:
        """Returns the values by field of a job, as `Certificate.fields` states them, without those of no effect."""
        idle = "plan.zero" if DATA_FIELD in self.named else DATA_FIELD
        stated = {field: self.values[name] for field, name in FIELDS.items() if name in self.values and field != idle}
        if self.values.get("recompute") == "full" and self.values["recomputed"] is None:
            stated[FIELD_OF["recomputed"]] = "all"
        return {field: value for field, value in stated.items() if value is not None}


def read_short_form(job: Job, named: frozenset[str] = frozenset()) -> ShortForm:
    """Returns the plan of a job as a search states it. named: fields in `NAMED_ALONE` that the search varies, or that
    its job states; what others would say is named among `others`."""
    plan = job.plan
    if plan.has_stages or plan.replicas:
        key = "stages" if plan.has_stages else "replicas"
        return ShortForm({}, {f"plan.{key}": ("with degrees or batches of their own", None)}, None)
    values = _read_values(job) | _read_named_schemes(job.plan, job.framework, named)
    written = {key: value for key, value in job.as_written.items() if key not in ("id", "published", "noise")}
    written["plan"] = _write_plan(values, named)
    stated = {option for entry in _family(plan, "data") for option in entry.model_extra or {}}
    for key, usual in DATA_OPTIONS.items():
        if usual is None and PLAN_KEYS[key].option not in stated:
            written["plan"].pop(key, None)  # it is left to the framework
    try:
        restated = load_job(written, base=job.folder)
    except MeshcastError as error:
        return ShortForm(values, {"plan": ("no plan in short form", error.rule)}, None, named)
    return ShortForm(values, _differences(plan, restated.plan), written, named)


def _read_values(job: Job) -> Fields:
    plan, overlap = job.plan, job.framework.overlap
    tp, cp, pp = (family_degree(plan, family) for family in ("tensor", "sequence", "pipeline"))
    values: Fields = {"tp": tp, "cp": cp, "pp": pp, "micro": job.batch.micro, "ep": _expert_ranks(plan)}
    values["etp"] = _expert_tensor_ranks(plan, values["ep"], tp)
    values |= {key.point: _chosen_value(plan, key, None) if tp > 1 else None for key in choosing_keys("tensor")}
    values["overlap_tp"] = overlap.tp if tp > 1 else None
    values |= {"schedule": None, "chunks": None, "partition": None, "overlap_pp": None}
    for entry in _family(plan, "pipeline") if pp > 1 else ():
        chunks = _options(entry).get("chunks", 1)
        values |= {"schedule": entry.use.partition("/")[2], "chunks": chunks, "overlap_pp": overlap.pp}
        values["partition"] = _partition(plan.partition, job.model.layers, pp * chunks)
    values |= {"data": None, "overlap_dp": None, "updated_weights": None, "shard": None, "mesh_order": None}
    if job.cluster.gpus > tp * pp:
        uses = [entry.use for entry in _family(plan, "data")]
        data = next((name for name in DATA if f"data/{name}" in uses), None)
        values |= {"data": data, "overlap_dp": overlap.dp, "shard": _shard_ranks(plan), "mesh_order": _mesh_order(plan)}
        values["updated_weights"] = overlap.updated_weights if overlap.dp and data in GATHERING else None
    return values | _read_memory(plan)


def _read_named_schemes(plan: LongPlan, framework: Framework, named: frozenset[str]) -> Fields:
    """Returns values of fields in `NAMED_ALONE`, by their names in a point; None where a field is not read, makes no
    difference, or is that of a plan without it. named: the fields to read."""
    families = {family for family, key in SCHEME_KEYS.items() if f"plan.{key}" in named}
    values: Fields = dict.fromkeys((*DEFAULTS, *DATA_OPTIONS))
    if "tensor" in families and family_degree(plan, "tensor") > 1:
        chosen = [f"tensor/{name}" for key in choosing_keys("tensor") for name in key.chooses.values()]
        usual = (*chosen, framework.tensor_overlap if framework.overlap.tp else "")
        others = [entry for entry in _family(plan, "tensor") if entry.use not in usual]
        if len(others) == 1:
            values["tensor"] = _name_entry(others[0])
            if not accompanies_others(values["tensor"]):
                values |= {key.point: None for key in choosing_keys("tensor")}
    for family in families & {"sequence", "expert"}:
        views = plan.views.get("experts", {}) if family == "expert" else {}
        ranks = max(family_degree(plan, family), views.get("ep", 1) * views.get("etp", 1))
        if ranks > 1 and len(entries := _family(plan, family)) == 1:
            values[family] = _name_entry(entries[0])
    for entry in _family(plan, "data") if "data" in families else ():
        values["data"] = entry.use.partition("/")[2]
    return values | _read_data_options(plan, framework, named)


def _read_data_options(plan: LongPlan, framework: Framework, named: frozenset[str]) -> Fields:
    """Returns values of options of the data scheme. named: the fields to read."""
    values: Fields = {}
    for entry in _family(plan, "data"):
        options, left = find_scheme(entry.use).Options, left_to_framework(framework)
        for key in DATA_OPTIONS:
            if f"plan.{key}" in named and (option := PLAN_KEYS[key].option) in options.model_fields:
                value = getattr(options.model_validate(entry.model_extra or {}), option)
                values[key] = left.get(key) if value is None else value
    return values


def _name_entry(entry: SchemeEntry) -> NamedScheme:
    """Returns the scheme of an entry, with the options that its plan states but for axes, which follow from degrees."""
    axes = find_scheme(entry.use).names_axes
    return name_scheme(entry.use, {k: v for k, v in (entry.model_extra or {}).items() if k not in axes})


def _read_memory(plan: LongPlan) -> Fields:
    values: Fields = {}
    for key in PLAN_KEYS.values():
        if key.family == "memory" and key.option:
            value = _option(plan, key.owner, key.option)
            values[key.point] = key.usual if value is None else value
    for key in choosing_keys("memory"):
        word = _chosen_value(plan, key, key.usual)
        modules = _option(plan, f"memory/{key.chooses.get(word)}", "modules")
        values[key.point] = read_recompute(modules) if modules else word
    return values


def _chosen_value(plan: LongPlan, key: PlanKey, usual: Any) -> Any:
    """Returns the value by which a key chooses a scheme of a plan, of several the last; `usual` without any."""
    uses = {entry.use for entry in plan.schemes}
    return next((value for value in reversed(key.chooses) if f"{key.family}/{key.chooses[value]}" in uses), usual)


def _option(plan: LongPlan, use: str, option: str) -> Any:
    """Returns the value of an option of a scheme; None if the plan lacks the scheme or the scheme the option."""
    return next((_options(entry).get(option) for entry in plan.schemes if entry.use == use), None)


def _expert_ranks(plan: LongPlan) -> int:
    """Returns expert-parallel ranks, whether their axis is of the mesh or of the experts' view of it."""
    sizes = plan.views.get("experts", {})
    if "ep" in sizes or not _family(plan, "expert"):
        return sizes.get("ep", 1)
    return family_degree(plan, "expert")


def _expert_tensor_ranks(plan: LongPlan, ep: int, tp: int) -> int | None:
    """Returns expert-tensor-parallel ranks; None: as many as a plan in short form has by default."""
    ranks = plan.views["experts"].get("etp", 1) if "experts" in plan.views else None
    return None if ranks == 1 and (ep > 1 or tp == 1) else ranks


def _shard_ranks(plan: LongPlan) -> int | None:
    """Returns data-parallel ranks that share a copy of the states; None: all of them."""
    for entry in _family(plan, "data"):
        if copies := _options(entry).get("replicate"):
            return math.prod(plan.mesh.get(axis, 1) for axis in entry.over if axis != copies)
    return None


def _mesh_order(plan: LongPlan) -> str | None:
    """Returns which of pipeline and replicas is outermost in the mesh; None where either has a single rank."""
    wide, axes = _wide(plan.mesh), list(plan.mesh)
    places = [
        min((axes.index(axis) for entry in _family(plan, family) for axis in entry.over if axis in wide), default=-1)
        for family in ("pipeline", "data")
    ]
    return None if min(places) < 0 else MESH_ORDERS[int(places[1] < places[0])]


def _partition(partition: str | tuple[int, ...], layers: int, parts: int) -> str | tuple[int, ...]:
    """Returns a division of the layers by its name where it has any."""
    if isinstance(partition, str) or len(partition) != parts:
        return partition
    even, ends_as_layers = PARTITIONS
    if len({*partition}) == 1:
        return even
    first, *inner, last = partition
    most, left = divmod(layers + 2, parts)
    return ends_as_layers if not left and {*inner} <= {most} and first == last == most - 1 else partition


def _write_plan(values: SomeFields, named: frozenset[str]) -> Fields:
    plan = {key.name: values[key.point] for key in PLAN_KEYS.values() if key.part and key.point != "data"}
    if values["data"] and DATA_FIELD in named:
        plan[SCHEME_KEYS["data"]] = values["data"]
    elif values["data"]:
        plan |= state_scheme_name("data", values["data"])
    return {name: write_value(value) for name, value in plan.items() if value not in (None, ())}


def _family(plan: LongPlan, family: str) -> list[SchemeEntry]:
    return [entry for entry in plan.schemes if entry.use.partition("/")[0] == family]


def _options(entry: SchemeEntry) -> Fields:
    """Returns the options of a scheme, with their defaults."""
    read = find_scheme(entry.use).Options.model_validate(entry.model_extra or {})
    return {key: getattr(read, key) for key in type(read).model_fields}


def _changed_options(entry: SchemeEntry) -> Fields:
    """Returns the options of a scheme that the plan states and that are not their defaults."""
    fields, options = find_scheme(entry.use).Options.model_fields, _options(entry)
    usual = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    return {key: options[key] for key in entry.model_extra or {} if options[key] != usual[key]}


# -------------------------------------------------------------------------------- what the short form cannot say


def _differences(plan: LongPlan, restated: LongPlan) -> dict[str, tuple[Any, Any]]:
    """Returns what differs between a plan and that with the same values in short form, by field."""
    families = dict.fromkeys(entry.use.partition("/")[0] for form in (plan, restated) for entry in form.schemes)
    fields = ("plan.mesh", "plan.views", *(f"{SCHEMES}{family}" for family in families), *FLAGS)
    pairs = {field: (describe_part(plan, field), describe_part(restated, field)) for field in fields}
    if _roles(plan) == _roles(restated):  # names of axes are free
        del pairs["plan.mesh"]
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def describe_part(plan: LongPlan, field: str) -> Any:
    """Returns a part of a plan in long form: axes of mesh or experts in words, schemes of a family, a flag; or None."""
    if field.startswith(SCHEMES):
        return _describe_family(plan, field.removeprefix(SCHEMES))
    if field in ("plan.mesh", "plan.views"):
        axes = _wide(plan.mesh if field == "plan.mesh" else plan.views.get("experts", {}))
        return " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "one rank"
    return getattr(plan, field.partition(".")[2]) if field in FLAGS else None


def _wide(axes: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in axes.items() if size > 1}


def _roles(plan: LongPlan) -> list[tuple[str, int]]:
    """Returns the axes of several ranks in their order, each by the family of schemes over it: names are free."""
    role: dict[str, str] = {}
    for entry in plan.schemes:
        for axis in entry.over:
            role.setdefault(axis, entry.use.partition("/")[0])
    return [(role.get(axis, axis), size) for axis, size in _wide(plan.mesh).items()]


def _describe_family(plan: LongPlan, family: str) -> str:
    """Returns the schemes of a family with the options that are not the default, in words; none over single ranks."""
    sizes = {**plan.views.get("experts", {}), **plan.mesh}
    words = []
    for entry in _family(plan, family):
        if entry.over and all(sizes.get(axis, 1) == 1 for axis in entry.over):
            continue
        changed = _changed_options(entry)
        words.append(", ".join([entry.use.partition("/")[2], *(f"{key} {_describe(changed[key])}" for key in changed)]))
    return " + ".join(sorted(words)) or "none"


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    return str(value).lower() if isinstance(value, bool | None) else str(value)
