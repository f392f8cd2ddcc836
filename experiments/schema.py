"""JSON Schemas (draft 2020-12) of the files that meshcast reads, made from the pydantic models that read them.

``meshcast schema`` prints them, for editors and for programs that write jobs. They do not express relations between
fields (which degrees fit which cluster), and they are stricter than meshcast, which also accepts quoted numbers and
``yes`` for true.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from meshcast.experiments.sweeps.grid import SweepFile
from meshcast.hardware import clusters, nodes
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.inline import ByGPU
from meshcast.hardware.mixed import ByGroups
from meshcast.hardware.schemas import BaseModel, dump, to_pydantic
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.job.batch import Batch, LogNormal, MicrobatchClass, Samples, Uniform
from meshcast.simulator.job.framework import (
    Bucket,
    CommunicationOverlap,
    Framework,
    LossKernels,
    ProcessMemory,
    framework_names,
)
from meshcast.simulator.job.job import (
    FrameworkChoice,
    JobFile,
    LongPlan,
    Precision,
    ReplicaPlan,
    RunLength,
    SchemeEntry,
    StagePlan,
)
from meshcast.simulator.job.plan_keys import PLAN_KEYS, SCHEME_KEYS, Replicas, ShortPlan, ShortStage, ShortStageEntry
from meshcast.simulator.models.load import ALIASES, presets
from meshcast.simulator.models.model import UNDESCRIBED, Model
from meshcast.simulator.models.parts import MLA, MoEShape, StateSpace
from meshcast.validation.measurements.measurement import Measurement
from meshcast.validation.published.rows import PublishedRun

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
KINDS = ("job", "sweep", "cluster", "model", "framework", "published", "measurement")

FRAMEWORK_PARTS = (Framework, CommunicationOverlap, Bucket, LossKernels, ProcessMemory)
SHAPES = (Model, MLA, MoEShape, StateSpace)
PLANS = (ShortPlan, ShortStageEntry, Replicas, LongPlan, StagePlan, ReplicaPlan)
JOB = (
    SweepFile,
    JobFile,
    Batch,
    MicrobatchClass,
    Samples,
    LogNormal,
    Uniform,
    FrameworkChoice,
    Precision,
    RunLength,
    SchemeEntry,
    *PLANS,
    *FRAMEWORK_PARTS,
    *SHAPES,
)
CLUSTERS = (Cluster, ByGPU, ByGroups)
FILES: dict[str, tuple[type[BaseModel], str]] = {
    "published": (PublishedRun, "A published run. Null or a missing key: not stated by the source."),
    "measurement": (
        Measurement,
        "Measured samples and the forecasts made before; times in seconds, memory in bytes.",
    ),
}
"""Files that are no part of a job: by kind, model and description."""


class Generator(GenerateJsonSchema):
    """Schemas without titles, which would repeat the field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return super().encode_default(dump(dft, mode="json", by_alias=True))


def schema(kind: str) -> Schema:
    """Returns the schema of one of `KINDS`: a job or a part of it, a sweep, a published run, a measurement file.

    Raises PlanError for another `kind`.
    """
    if kind not in KINDS:
        raise PlanError("KIND", "there is no schema of this name", nearest(kind, KINDS), kind)
    if kind in FILES:
        model, description = FILES[kind]
        made = model.model_json_schema(schema_generator=Generator)
        defs, made = made.pop("$defs"), made | {"description": description}
    else:
        defs = definitions()
        made = defs.pop(kind)
    return {"$schema": DRAFT, "title": f"meshcast {kind}", **made, "$defs": _select_definitions(made, defs)}


def options_schema(kind: str, model: type[BaseModel]) -> Schema:
    """Returns the schema of the options of a command: what each does, its type, bounds and default."""
    return {"$schema": DRAFT, **model.model_json_schema(schema_generator=Generator), "title": f"meshcast {kind}"}


def definitions() -> Schema:
    """Makes the definitions of all parts of a job by class name, and of the keys ``job``, ``model`` and so on."""
    _, made = models_json_schema(
        [(to_pydantic(model), "validation") for model in (*JOB, *CLUSTERS)], schema_generator=Generator
    )
    defs: Schema = made["$defs"]
    for model in JOB:
        for field, text in docstrings(model).items():
            optional = issubclass(model, ShortStage) and model.model_fields[field].default is None
            default = PLAN_KEYS[field].words if optional and field in PLAN_KEYS else ""
            text = re.sub(r"\[([^\[\]]*)\]\([^)]*\)", r"\1", text) + (f". Default: {default}" if default else "")
            defs[model.__name__]["properties"].get(field, {})["description"] = text
    defs |= {"model": _model(defs), "cluster": _cluster(defs), "framework": _framework(defs)}
    defs["plan"] = _plan(defs)
    defs["job"] = defs.pop("JobFile")
    defs["job"]["properties"] |= {key: _ref(key) for key in ("model", "cluster", "framework", "plan")}
    defs["sweep"] = _sweep(defs)
    return defs


def _sweep(defs: Schema) -> Schema:
    """Makes the schema of a sweep; its job need not have a model or cluster, since both may vary."""
    made: Schema = defs.pop("SweepFile")
    made["properties"]["job"] |= {"anyOf": [_word("the path of a job file", ["job.yaml"]), _free(defs["job"])]}
    number = {
        "anyOf": [{"type": "integer", "minimum": 1}, _word("a field, or a number that the job implies", ["gpus"])]
    }
    ends = {"type": "array", "items": {"type": "number"}, "minItems": 2}
    makers = {"divisors": number, "powers": ends | {"maxItems": 2}, "range": ends | {"maxItems": 3}}
    values: list[Schema] = [{"type": "array", "minItems": 1}]
    for name, argument in makers.items():
        one = {"type": "object", "properties": {name: argument}, "required": [name]}
        values.append(one | {"additionalProperties": False})
    made["properties"]["vary"]["additionalProperties"] = {"anyOf": values}
    return made


def _model(defs: Schema) -> Schema:
    """Makes the schema of a model: a name, fields, or a name with changes; null stands for a field's default."""
    words: Schema = {"source": {"type": "string", "description": "Public source of the fields."}}
    words |= {key: {"enum": [None, False, 0, "", [], {}]} for key in UNDESCRIBED}
    defs["Branch"]["required"] = ["layers"]  # it inherits what it leaves out
    defs["LayerVariant"]["required"] = ["numbers"]  # so it does
    for shape in SHAPES:
        entry = defs[shape.__name__]
        for key, field in entry["properties"].items():
            if key not in entry["required"] and {"type": "null"} not in field.get("anyOf", ()):
                entry["properties"][key] = {"anyOf": [field, {"type": "null"}]}
    defs["Model"]["required"].remove("vocab")  # a diffusion transformer has none
    defs["Model"]["anyOf"] = [{"required": ["vocab"]}, {"required": ["diffusion"]}]
    del defs["Modulation"]["required"]  # as wide as the model
    fields = {**defs["Model"]["properties"], **words}
    defs["Model"]["properties"] = fields
    changes = {key: {"anyOf": [_free(defs[key]), {"type": "null"}]} for key in ("MLA", "MoEShape", "StateSpace")}
    name = _word("a preset, or the path of a config.json, its folder, or a YAML file", [*presets(), *ALIASES])
    on_top = _free(defs["Model"]) | {"description": "A preset or file with changed fields.", "required": ["preset"]}
    on_top["properties"] = {"preset": name, **fields, "mla": changes["MLA"], "moe": changes["MoEShape"]}
    on_top["properties"]["ssm"] = changes["StateSpace"]
    return {"anyOf": [name, on_top, _ref("Model")]}


def _cluster(defs: Schema) -> Schema:
    """Makes the schema of a cluster: a name, or one of the forms of `CLUSTERS`."""
    for key in ("groups", "assumed", "fabric_gpus"):  # meshcast fills them in
        del defs["Cluster"]["properties"][key]
    known = [*clusters(), *(f"{node}:1" for node in nodes())]
    name = _word("node:count, the name of a cluster, or the path of a YAML file", known)
    return {"anyOf": [name, *(_ref(form.__name__) for form in CLUSTERS)]}


def _framework(defs: Schema) -> Schema:
    """Makes the schema of a framework: a name, or a name with changed fields."""
    for part in FRAMEWORK_PARTS:
        defs[part.__name__] = _free(defs[part.__name__])
    names = {"type": "string", "enum": list(framework_names())}
    defs["FrameworkChoice"]["properties"] |= {"name": names, "set": _ref("Framework")}
    return {"anyOf": [names, _ref("FrameworkChoice")]}


def _plan(defs: Schema) -> Schema:
    """Makes the schema of a plan in short or long form; in the long form each scheme has its own options."""
    entry = defs.pop("SchemeEntry")["properties"]
    schemes = []
    for use in scheme_names():
        kind = find_scheme(use)
        made = kind.Options.model_json_schema(schema_generator=Generator)
        defs |= made.pop("$defs", {})
        properties = {"use": {"const": use}, "over": entry["over"], **made.get("properties", {})}
        about = f"{kind.paper.title} ({kind.paper.ref})"
        required = ["use", *made.get("required", ())]
        one = {"description": about, "properties": properties, "required": required}
        schemes.append({"type": "object", **one, "additionalProperties": False})
    defs["scheme"] = {"anyOf": schemes}
    short, long = defs["ShortPlan"]["properties"], defs["LongPlan"]["properties"]
    for plan in long, defs["StagePlan"]["properties"]:
        plan["schemes"]["items"] = _ref("scheme")
    for plan in short, defs["Replicas"]["properties"]:
        plan["stages"]["items"] = {"anyOf": [_ref("ShortStageEntry"), _ref("StagePlan")]}
    for family, key in SCHEME_KEYS.items():
        uses = [use for use in scheme_names() if use.startswith(f"{family}/")]
        short[key]["examples"] = [use.partition("/")[2] for use in uses]
    for plan in short, long:
        plan["partition"]["examples"] = ["even", "ends-as-layers", "by-cost", "by-memory", [8, 8, 8, 8]]
    return {"anyOf": [_ref("ShortPlan"), _ref("LongPlan")]}


def _free(made: Schema) -> Schema:
    """Returns the schema without required keys."""
    return {key: value for key, value in made.items() if key not in ("required", "anyOf")}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _word(what: str, examples: Iterable[str]) -> Schema:
    return {"type": "string", "minLength": 1, "description": what, "examples": list(examples)}


def _select_definitions(made: Schema, defs: Mapping[str, Schema]) -> Schema:
    """Selects the definitions that `made` refers to, directly or through others."""
    found, asked = set[str](), [made]
    while asked:
        for name in _names(asked.pop()) - found:
            found.add(name)
            asked.append(defs[name])
    return {name: defs[name] for name in sorted(found)}


def _names(made: Any) -> set[str]:
    """Returns the names of the definitions that a schema refers to directly."""
    if isinstance(made, dict):
        own = {made["$ref"].rpartition("/")[2]} if isinstance(made.get("$ref"), str) else set()
        return own.union(*map(_names, made.values()))
    return set().union(*map(_names, made)) if isinstance(made, list) else set()


@cache
def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Reads the docstring below each field of a `model`, by the field's name in files."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for base in model.__bases__:
        if issubclass(base, BaseModel) and base.__module__ == model.__module__:
            found |= docstrings(base)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            name = model.model_fields[field.target.id].alias or field.target.id
            found[name] = inspect.cleandoc(str(text.value.value)).replace("\n", " ")
    return found
