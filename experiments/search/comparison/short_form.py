"""Reads from a job, in whatever form its plan is written, the fields that a search varies, and what these cannot say.

The fields of a plan in long form are found backwards: each scheme is held against those that the short form of a plan
expands to. What is left is found by writing the plan anew in short form: whatever differs then, no search varies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshcast.experiments.search.comparison.named_schemes import read_named_schemes
from meshcast.experiments.search.fields import (
    FIELDS,
    MESH_ORDERS,
    PARTITIONS,
    RECOMPUTE,
    read_recompute,
    state_sharding,
    write_value,
)
from meshcast.experiments.search.keys.data_schemes import DATA
from meshcast.experiments.search.keys.scheme_keys import DEFAULTS, UNITS
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.job import Job, LongPlan, SchemeEntry
from meshcast.simulator.job.shorthand import expand_plan, family_degree
from meshcast.simulator.loading.load import load_job

SCHEMES = "plan.schemes."
"""Prefix of the fields that are the schemes of a family, such as ``plan.schemes.data``."""

FLAGS = ("plan.pad_heads", "plan.share")

GATHERING = ("zero-1", "zero-2")
"""Data schemes that all-gather updated weights once a step."""


@dataclass(frozen=True)
class ShortForm:
    """The plan of a job as a search states it.

    values: of the fields that a search varies, by their names in a point (`FIELDS`); None where a field makes no
        difference, as a schedule without a pipeline; all layers of a stage in `recomputed`. Empty for plans whose
        stages or replicas are unlike.
    others: what a plan in short form cannot say, by field: in this plan, and in the plan with the same `values`.
    job: the job with the plan of these `values` in short form, as plain data; None if there is no such plan.
    named: fields in `NAMED_ALONE` that were read.
    """

    values: dict[str, Any]
    others: dict[str, tuple[Any, Any]]
    job: dict[str, Any] | None
    named: frozenset[str] = frozenset()

    def by_field(self) -> dict[str, Any]:
        """The values by field of a job, as `Certificate.fields` states them, without those that make no difference."""
        idle = "plan.zero" if "plan.dp_scheme" in self.named else "plan.dp_scheme"
        stated = {field: self.values[name] for field, name in FIELDS.items() if name in self.values and field != idle}
        if self.values.get("recompute") == "full" and self.values["recomputed"] is None:
            stated["plan.recompute_layers"] = "all"
        return {field: value for field, value in stated.items() if value is not None}


def read_short_form(job: Job, named: frozenset[str] = frozenset()) -> ShortForm:
    """The plan of a job as a search states it. named: fields in `NAMED_ALONE` that the search varies, or that its job
    states; what others would say is named among `others`."""
    plan = job.plan
    if plan.has_stages or plan.replicas:
        key = "stages" if plan.has_stages else "replicas"
        return ShortForm({}, {f"plan.{key}": ("with degrees or batches of their own", None)}, None)
    values = _read_values(job) | read_named_schemes(job.plan, job.framework, named)
    written = {key: value for key, value in job.as_written.items() if key not in ("id", "published", "noise")}
    written["plan"] = _write_plan(values, named)
    if not any("prefetch" in (entry.model_extra or {}) for entry in _family(plan, "data")):
        written["plan"].pop("prefetch", None)  # it is left to the framework
    try:
        made = load_job(written, base=job.folder)
    except MeshcastError as error:
        return ShortForm(values, {"plan": ("no plan in short form", error.rule)}, None, named)
    return ShortForm(values, _differences(plan, made.plan), written, named)


def _read_values(job: Job) -> dict[str, Any]:
    plan, overlap = job.plan, job.framework.overlap
    tp, cp, pp = (family_degree(plan, family) for family in ("tensor", "sequence", "pipeline"))
    found: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "micro": job.batch.micro, "ep": _expert_ranks(plan)}
    found["etp"] = _expert_tensor_ranks(plan, found["ep"], tp)
    found["sequence_parallel"] = found["overlap_tp"] = None
    if tp > 1:
        found["sequence_parallel"] = _matching(
            job, plan, "tensor", [{"sequence_parallel": one} for one in (True, False)]
        )
        found["overlap_tp"] = overlap.tp
    found |= {"schedule": None, "chunks": None, "partition": None, "overlap_pp": None}
    for entry in _family(plan, "pipeline") if pp > 1 else ():
        chunks = _options(entry).get("chunks", 1)
        found |= {"schedule": entry.use.partition("/")[2], "chunks": chunks, "overlap_pp": overlap.pp}
        found["partition"] = _partition(plan.partition, job.model.layers, pp * chunks)
    found |= {"data": None, "overlap_dp": None, "updated_weights": None, "shard": None, "mesh_order": None}
    if job.cluster.gpus > tp * pp:
        data = _matching(job, plan, "data", [_sharding(name) for name in DATA])
        found |= {"data": data, "overlap_dp": overlap.dp, "shard": _shard_ranks(plan), "mesh_order": _mesh_order(plan)}
        found["updated_weights"] = overlap.updated_weights if overlap.dp and data in GATHERING else None
    return found | _read_memory(job, plan)


def _read_memory(job: Job, plan: LongPlan) -> dict[str, Any]:
    """Recomputation and offloading."""
    uses = {entry.use: entry for entry in _family(plan, "memory")}
    recompute: str | tuple[str, ...] = "none"
    layers = None
    for word in reversed(RECOMPUTE):  # of a plan with both schemes it is the first that recomputes more
        made = [entry.use for entry in _family(_expand(job, {"recompute": word}), "memory")]
        if made and made[0] in uses:
            options = _options(uses[made[0]])
            recompute, layers = word, options.get("layers")
            if modules := options.get("modules"):
                recompute = read_recompute(modules)
            break
    (offload,) = _family(_expand(job, {"offload": ["optimizer"]}), "memory")
    what = tuple(_options(uses[offload.use]).get("what", ())) if offload.use in uses else ()
    return {"recompute": recompute, "recomputed": layers, "offload": what}


def _matching(job: Job, plan: LongPlan, family: str, shorts: Iterable[Mapping[str, Any]]) -> Any:
    """The value of the field in the short forms whose scheme of a family is that of the plan; None if none is."""
    uses = {entry.use for entry in _family(plan, family)}
    for short in shorts:
        if any(entry.use in uses for entry in _family(_expand(job, short), family)):
            return _data_name(short) if family == "data" else next(iter(short.values()))
    return None


def _sharding(name: str) -> dict[str, Any]:
    """A data scheme as keys of a plan in short form. name: as in `DATA`."""
    return dict(zip(("fsdp", "zero"), state_sharding(name), strict=True))


def _data_name(short: Mapping[str, Any]) -> str:
    return next(name for name in DATA if _sharding(name) == short)


def _expert_ranks(plan: LongPlan) -> int:
    """Expert-parallel ranks, whether their axis is one of the mesh or of the experts' view of it."""
    sizes = plan.views.get("experts", {})
    if "ep" in sizes or not _family(plan, "expert"):
        return sizes.get("ep", 1)
    return family_degree(plan, "expert")


def _expert_tensor_ranks(plan: LongPlan, ep: int, tp: int) -> int | None:
    """Expert-tensor-parallel ranks; None: as many as a plan in short form has by default."""
    ranks = plan.views["experts"].get("etp", 1) if "experts" in plan.views else None
    return None if ranks == 1 and (ep > 1 or tp == 1) else ranks


def _shard_ranks(plan: LongPlan) -> int | None:
    """Data-parallel ranks that share one copy of the states; None: all of them."""
    for entry in _family(plan, "data"):
        if copies := _options(entry).get("replicate"):
            return math.prod(plan.mesh.get(axis, 1) for axis in entry.over if axis != copies)
    return None


def _mesh_order(plan: LongPlan) -> str | None:
    """Which of the pipeline and the replicas is outermost in the mesh; None where one of them has a single rank."""
    wide, axes = _wide(plan.mesh), list(plan.mesh)
    places = [
        min((axes.index(axis) for entry in _family(plan, family) for axis in entry.over if axis in wide), default=-1)
        for family in ("pipeline", "data")
    ]
    return None if min(places) < 0 else MESH_ORDERS[int(places[1] < places[0])]


def _partition(given: str | tuple[int, ...], layers: int, parts: int) -> str | tuple[int, ...]:
    """A division of the layers by its name where it has one."""
    if isinstance(given, str) or len(given) != parts:
        return given
    even, ends_as_layers = PARTITIONS
    if len({*given}) == 1:
        return even
    first, *inner, last = given
    most, left = divmod(layers + 2, parts)
    return ends_as_layers if not left and {*inner} <= {most} and first == last == most - 1 else given


def _write_plan(values: Mapping[str, Any], named: frozenset[str]) -> dict[str, Any]:
    """A plan in short form."""
    keys = ("tp", "pp", "cp", "ep", "etp", "schedule", "chunks", "partition", "recompute", "sequence_parallel", "shard")
    keys_of_schemes = (*DEFAULTS, *UNITS)
    plan = {key: values[key] for key in (*keys, *keys_of_schemes) if values[key] is not None}
    plan |= {"order": values["mesh_order"]} if values["mesh_order"] else {}
    if values["data"]:
        plan |= {"dp_scheme": values["data"]} if "plan.dp_scheme" in named else _sharding(values["data"])
    if values["recomputed"] is not None:
        plan["recompute_layers"] = values["recomputed"]
    if values["offload"]:
        plan["offload"] = list(values["offload"])
    return {key: write_value(value) for key, value in plan.items()}


def _expand(job: Job, short: Mapping[str, Any]) -> LongPlan:
    """A plan in short form without degrees, in long form."""
    return expand_plan(short, job.cluster.gpus, job.model, job.cluster.gpus_per_node)


def _family(plan: LongPlan, family: str) -> list[SchemeEntry]:
    return [entry for entry in plan.schemes if entry.use.partition("/")[0] == family]


def _options(entry: SchemeEntry) -> dict[str, Any]:
    """The options of a scheme, with their defaults."""
    read = find_scheme(entry.use).Options.model_validate(entry.model_extra or {})
    return {key: getattr(read, key) for key in type(read).model_fields}


def _changed_options(entry: SchemeEntry) -> dict[str, Any]:
    """The options of a scheme that the plan states and that are not their defaults."""
    fields, options = find_scheme(entry.use).Options.model_fields, _options(entry)
    usual = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    return {key: options[key] for key in entry.model_extra or {} if options[key] != usual[key]}


# -------------------------------------------------------------------------------- what the short form cannot say


def _differences(given: LongPlan, made: LongPlan) -> dict[str, tuple[Any, Any]]:
    """What differs between a plan and that with the same values in short form, by field."""
    families = dict.fromkeys(entry.use.partition("/")[0] for plan in (given, made) for entry in plan.schemes)
    fields = ("plan.mesh", "plan.views", *(f"{SCHEMES}{family}" for family in families), *FLAGS)
    pairs = {field: (describe_part(given, field), describe_part(made, field)) for field in fields}
    if _roles(given) == _roles(made):  # names of axes are free
        del pairs["plan.mesh"]
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def describe_part(plan: LongPlan, field: str) -> Any:
    """A part of a plan in long form: the axes of its mesh or of its experts in words, the schemes of a family, a flag;
    None for other fields."""
    if field.startswith(SCHEMES):
        return _describe_family(plan, field.removeprefix(SCHEMES))
    if field in ("plan.mesh", "plan.views"):
        return _describe_axes(plan.mesh if field == "plan.mesh" else plan.views.get("experts", {}))
    return getattr(plan, field.partition(".")[2]) if field in FLAGS else None


def _wide(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes of more than one rank."""
    return {axis: size for axis, size in axes.items() if size > 1}


def _roles(plan: LongPlan) -> list[tuple[str, int]]:
    """The axes of more than one rank in their order, each by the family of schemes over it: names are free."""
    role: dict[str, str] = {}
    for entry in plan.schemes:
        for axis in entry.over:
            role.setdefault(axis, entry.use.partition("/")[0])
    return [(role.get(axis, axis), size) for axis, size in _wide(plan.mesh).items()]


def _describe_axes(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in _wide(axes).items()) or "one rank"


def _describe_family(plan: LongPlan, family: str) -> str:
    """The schemes of a family with the options that are not the default, in words; none over single ranks."""
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
