"""The fields of a job that a search may vary, and which of them a job leaves open: ``auto``, or a list of values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshcast.experiments.search.space.scheme_keys import DEFAULTS, NAMED_ALONE, SchemeWithOptions, scheme_namer
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.simulator.job.job import Job, JobFile
from meshcast.simulator.job.plan_keys import (
    PLAN_KEYS,
    SCHEME_KEYS,
    ShortPlan,
    chosen_scheme,
    keys_alike,
    state_scheme_name,
)
from meshcast.simulator.job.shorthand import usual_schedule

AUTO = "auto"

CLUSTER = "cluster"
"""The field of which a search takes a list of values, each with a separate space."""


def _fields_of(part: str) -> dict[str, str]:
    """Returns the keys of a plan by which a search varies a part of it, with their names in a point."""
    return {f"plan.{key.name}": key.point for key in PLAN_KEYS.values() if key.part == part}


FIELDS: dict[str, str] = {
    **_fields_of("ranks"),
    "batch.micro": "micro",
    **_fields_of("layers"),
    "framework.set.overlap.tp": "overlap_tp",
    **_fields_of("stages"),
    **_fields_of("passes"),
    "framework.set.overlap.dp": "overlap_dp",
    "framework.set.overlap.updated_weights": "updated_weights",
    "framework.set.overlap.pp": "overlap_pp",
    **_fields_of("named"),
}
"""Fields of a job that a search may vary, with their names in a point."""

FIELD_OF = {name: field for field, name in FIELDS.items()}
"""The field of a job by its name in a point."""

RUN_FIELDS = (
    *("run.checkpoints.kind", "run.checkpoints.every_steps", "run.checkpoints.every_s", "run.checkpoints.store"),
    *("run.checkpoints.copies", "run.checkpoints.store_every_s"),
    *("run.recovery.spares", "run.recovery.elastic", "run.recovery.most_lost_replicas"),
)
"""Fields of the run that a search by days or cost of runs may vary; the step does not depend on them."""

PARTITIONS = ("even", "ends-as-layers")

RECOMPUTE = ("none", *PLAN_KEYS["recompute"].chooses)
"""Words of `plan.recompute`, which may also list modules."""

MESH_ORDERS = PLAN_KEYS["order"].auto
"""Orders of the axes of the mesh, the usual order first."""

OPTIONAL = (*(key.point for key in PLAN_KEYS.values() if key.part and key.usual is None), *DEFAULTS)
"""Fields of a point whose values may be null: the default of a plan."""

MAY_BE_ZERO = ("data", *(key.point for key in PLAN_KEYS.values() if "0" in map(str, key.auto)))
"""Fields of a point whose values may be 0."""

DATA_KEYS = keys_alike(SCHEME_KEYS["data"])
"""Keys of a plan that state the data scheme."""

DATA_FIELD = f"plan.{SCHEME_KEYS['data']}"
"""The field of data schemes by their names."""

FOLLOWING = {
    "plan.dp": "Leave it out: data parallelism takes the remaining GPUs",
    "plan.fsdp": "Leave it out, and write zero: auto, which tries FSDP as well",
}
"""What to do about fields of a plan that follow from those that a search varies."""


def is_open(field: str, value: Any) -> bool:
    """Returns whether a value leaves a field open: ``auto``, or for a field in `FIELDS` a list that no plan may state
    itself, as it may state the layers of all stages, which states it offloads, and which modules it recomputes."""
    if field not in FIELDS or not isinstance(value, list):
        return bool(value == AUTO)
    if field == "plan.partition":
        return bool(value) and all(isinstance(name, str) for name in value)
    if field == "plan.offload":
        return any(isinstance(part, list) for part in value)
    if field == "plan.recompute":  # of modules, unless it has any of the words, or several such lists
        return not value or any(isinstance(module, list) or module in RECOMPUTE for module in value)
    return True


def check_open_job(job: SomeFields) -> None:
    """Raises PlanError for what a job, as it was read, states wrongly beside its open fields."""
    closed = copy.deepcopy(split_run_fields(job)[0])
    opens_plan(closed)  # refuses other values of the key `auto`
    plan = closed.get("plan")
    if plan == AUTO:
        closed["plan"] = {}
    elif isinstance(plan, dict):
        plan.pop(AUTO, None)
    if isinstance(clusters := closed.get(CLUSTER), list):
        closed[CLUSTER] = clusters[:1]
    moved: Fields = {}
    _move_open_fields(closed, "", moved)
    closed |= {name: value for name, value in moved.items() if "." not in name}  # no section is open but these
    validate_data(JobFile, closed, "job", PlanError)


def opens_field(change: str) -> bool:
    """Returns whether a change of a job, such as ``plan.tp=auto``, opens a field, or the whole plan."""
    field, _, word = (part.strip() for part in change.partition("="))
    value = read_yaml(word, f"--set {field}", PlanError).data
    return is_open(field, value) or (isinstance(value, Mapping) and AUTO in value)


def has_open_fields(job: SomeFields) -> bool:
    """Returns whether a job, as it was read, leaves fields open that a search may vary; without a plan not."""
    fields: Fields = {}
    _move_open_fields(dict(job), "", fields)
    whole = "plan" in job and opens_plan(job)
    others = isinstance(job.get(CLUSTER), list) or bool(split_run_fields(job)[1])
    return whole or others or not fields.keys().isdisjoint(FIELDS)


def opens_plan(job: SomeFields) -> bool:
    """Returns whether a job opens the whole plan: none, ``plan: auto``, or a key `auto`; PlanError for its value."""
    plan = job.get("plan", AUTO)
    if not isinstance(plan, Mapping) or AUTO not in plan:
        return bool(plan == AUTO)
    if plan[AUTO] not in (None, True, False, AUTO):
        rule = "it opens the fields that the plan does not state, and has no value but true or false"
        raise PlanError(f"plan.{AUTO}", rule, "Write for example plan: {auto: true, zero: 1}", plan[AUTO])
    return plan[AUTO] is not False


def split_clusters(job: SomeFields) -> list[SomeFields]:
    """Returns the job on each of its clusters. Raises PlanError for an empty list, or a cluster that is named twice."""
    clusters = job.get(CLUSTER)
    if clusters == AUTO:
        rule = "a search compares clusters that the job lists"
        raise PlanError(CLUSTER, rule, "Write for example cluster: [dgx-h100:32, dgx-h100:64]", clusters)
    if not isinstance(clusters, list):
        return [job]
    if not clusters:
        raise PlanError(CLUSTER, "the list is empty", "Write for example [dgx-h100:32, dgx-h100:64]", clusters)
    if AUTO in clusters:
        rule = "a search compares clusters that the job lists"
        raise PlanError(CLUSTER, rule, "Leave auto out, and list every cluster", clusters)
    if twice := next((cluster for i, cluster in enumerate(clusters) if cluster in clusters[:i]), None):
        raise PlanError(CLUSTER, "the list has this cluster twice", "Leave one out", twice)
    return [{**job, CLUSTER: cluster} for cluster in clusters]


def split_open_fields(job: SomeFields) -> tuple[Fields, Fields]:
    """Returns the job without its open fields, and what it states for each of them."""
    rest: Fields = dict(job)
    if isinstance(rest.get("framework"), str):
        rest["framework"] = {"name": rest["framework"]}
    opened = _open_whole_plan(rest) if opens_plan(rest) else {}
    if isinstance(rest["plan"], Mapping):
        rest["plan"] = {key: value for key, value in rest["plan"].items() if key != AUTO}
    moved: Fields = {}
    _move_open_fields(rest, "", moved)
    for field in moved:
        if field not in FIELDS:
            rule = "a search does not vary this field"
            raise PlanError(field, rule, FOLLOWING.get(field) or nearest(field, list(FIELDS)), moved[field])
    opened |= moved
    plan = rest["plan"]
    layers = FIELD_OF["recomputed"].removeprefix("plan.")
    if "plan.recompute" in opened and isinstance(plan, dict) and plan.get(layers) is not None:
        opened[FIELD_OF["recomputed"]] = [plan.pop(layers)]  # where layers are recomputed
    order = [field for field in FIELDS if field in opened]
    return rest, {field: opened[field] for field in order}


def _open_whole_plan(job: Fields) -> Fields:
    """Returns the fields that an open plan does not state, each ``auto``; writes what it states into the job."""
    stated = job["plan"] if isinstance(job.get("plan"), Mapping) else {}
    opened = {field: AUTO for field in FIELDS if field.startswith("plan.") and field not in NAMED_ALONE}
    if not stated.keys().isdisjoint(DATA_KEYS):
        del opened["plan.zero"]
    opened = {field: AUTO for field in opened if field.partition(".")[2] not in stated}
    job["plan"] = dict(stated)
    batch = job.get("batch", {})
    if isinstance(batch, Mapping) and "micro" not in batch:
        opened["batch.micro"] = AUTO
    return opened | {"framework.set.overlap.tp": AUTO}


def split_run_fields(job: SomeFields) -> tuple[Fields, Fields]:
    """Returns the job without the open fields of its run, and what it states for each: ``auto``, or a list."""
    run, fields = job.get("run"), Fields()
    if not isinstance(run, Mapping):
        return dict(job), fields
    rest = dict(run)
    for part in ("checkpoints", "recovery"):
        keys = rest.get(part)
        if part == "checkpoints" and (keys == AUTO or isinstance(keys, list)):
            keys = {"kind": keys}  # a word is short for its kind
        if not isinstance(keys, Mapping):
            continue
        values = {key: value for key, value in keys.items() if value == AUTO or isinstance(value, list)}
        fields |= {f"run.{part}.{key}": value for key, value in values.items() if f"run.{part}.{key}" in RUN_FIELDS}
        rest[part] = {key: value for key, value in keys.items() if f"run.{part}.{key}" not in fields}
    return {**job, "run": rest}, {field: fields[field] for field in RUN_FIELDS if field in fields}


def _move_open_fields(part: Fields, where: str, fields: Fields) -> None:
    for key, value in list(part.items()):
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            part[key] = inner = dict(value)
            _move_open_fields(inner, f"{name}.", fields)
        elif is_open(name, value):
            fields[name] = part.pop(key)


def check_values(field: str, name: str, values: Sequence[Any], usual: Any) -> None:
    """Refuses an empty list, and values that are not of the kind of a field."""
    if not values:
        raise PlanError(field, "there are no values", "Give one at least, or write auto", list(values))
    kind, *others = _admitted_types(field, name, usual)
    if wrong := [value for value in values if type(value) not in (kind, *others)]:
        known = {int: "whole numbers", bool: "true or false", str: "words", list: "lists"}[kind]
        rule = f"its values are {known}{', not null' if wrong[0] is None else ''}"
        raise PlanError(field, rule, "Correct them, or write auto", wrong[0])
    if name == "partition":
        for partition in values:
            check_partition(partition)
    numbers = [value for value in values if kind is int and value is not None]
    if numbers and min(numbers) < (least := 0 if name in MAY_BE_ZERO else 1):
        raise PlanError(field, f"its values are {least} or more", "Correct them, or write auto", min(numbers))


def _admitted_types(field: str, name: str, usual: Any) -> tuple[type, ...]:
    """Returns the types of the values of a field: that of most of them first."""
    null = (type(None),) if name in OPTIONAL else ()
    if field == DATA_FIELD or name in DEFAULTS:
        return (str, type(None), *((dict,) if name in DEFAULTS else ()))
    if name == "recompute":
        return (str, list, *null)
    return (int if name in ("data", *OPTIONAL) else list if name == "offload" else type(usual), *null)


def check_partition(partition: Any) -> None:
    if partition not in PARTITIONS:
        rule = f"a search takes the partitions {' and '.join(PARTITIONS)}"
        raise PlanError("plan.partition", rule, "Write one of them, or use `meshcast sweep`", partition)


def reader_of(field: str) -> Callable[[Any], Any]:
    """Returns what turns a value of a field that a job states into that of a point."""
    key = PLAN_KEYS.get(field.removeprefix("plan."))
    if key is None:
        return _keep
    if key.point == "data" and key.chooses:
        return lambda value: key.chooses[value]
    if key.option == "use":
        return schedule_name if key.family == "pipeline" else scheme_namer(key.family)
    readers: dict[str, Callable[[Any], Any]] = {"offload": tuple, "recompute": read_recompute}
    return readers.get(key.point, _keep)


def _keep(value: Any) -> Any:
    return value


def values_of(job: Job, written: SomeFields) -> Fields:
    """Returns the values of the fields that a job states, or their defaults."""
    stated = {key: value for key, value in written.get("plan", {}).items() if value is not None}
    plan, overlap, values = ShortPlan.model_validate(stated), job.framework.overlap, Fields()
    for field, name in FIELDS.items():
        if field.startswith("plan."):
            key, value = PLAN_KEYS[field.removeprefix("plan.")], getattr(plan, field.removeprefix("plan."))
            usual = None if key.option == "use" else key.usual
            values[name] = reader_of(field)(usual if value is None else value)
    return values | {
        "micro": job.batch.micro,
        "schedule": schedule_name(plan.schedule or usual_schedule(plan.chunks or 1)),
        "data": values["data"] if stated.get(SCHEME_KEYS["data"]) is not None else chosen_scheme(plan, "data"),
        "overlap_tp": overlap.tp,
        "overlap_dp": overlap.dp,
        "updated_weights": overlap.updated_weights,
        "overlap_pp": overlap.pp,
    }


def list_fields(opened: SomeFields, plan: SomeFields) -> dict[str, str]:
    """Returns the fields in `FIELDS` with their names in a point: of the two that state the data scheme, that which a
    job opens or states. opened: the open fields. Raises PlanError if both are open."""
    if DATA_FIELD in opened and "plan.zero" in opened:
        rule = "the data schemes of a search are listed in one field, and the job opens plan.zero as well"
        remedy = "Leave zero out, and list ddp, zero-1, zero-2, zero-3 and fsdp here"
        raise PlanError(DATA_FIELD, rule, remedy, opened[DATA_FIELD])
    named = DATA_FIELD in opened or plan.get(SCHEME_KEYS["data"]) is not None
    idle = "plan.zero" if named else DATA_FIELD
    return {field: name for field, name in FIELDS.items() if field != idle}


def read_recompute(recompute: Any) -> str | tuple[str, ...]:
    """Returns what a plan recomputes, as a point has it: a word, or modules; `core_attn` alone is `selective`."""
    if isinstance(recompute, str):
        return recompute
    return "selective" if [*recompute] == ["core_attn"] else tuple(recompute)


def schedule_name(schedule: Any) -> str:
    return str(schedule).removeprefix("pipeline/")


def state_values(fields: Sequence[str], values: SomeFields) -> Fields:
    """Returns values of fields as a job states them. values: by their names in a point."""
    changes: Fields = {}
    for field in fields:
        value = values[FIELDS[field]]
        if field == "plan.zero":
            changes |= {f"plan.{key}": stated for key, stated in state_scheme_name("data", value).items()}
        else:
            changes[field] = write_value(value)
    return changes


def write_value(value: Any) -> Any:
    if isinstance(value, SchemeWithOptions):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value
