"""A job as a flat mapping of dotted keys, and back: what tables of launch files read and write.

Most keys are those of a job file (``batch.micro``, ``model.moe.top_k``, ``framework.set.overlap.dp``, ``plan.tp``).
Schemes have keys by their family: ``plan.data: zero-1`` and ``plan.sequence: megatron-cp`` name a scheme, and
``plan.sequence.comm`` is an option of it. ``plan.recompute`` is none, selective, operators or full, ``run.steps``
the steps of the training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcast.hardware import load_cluster
from meshcast.simulator.formats.launch.table import Keys, SomeKeys
from meshcast.simulator.ir.registry import find_scheme, is_scheme
from meshcast.simulator.job.framework import Framework, framework_recipe, load_framework
from meshcast.simulator.job.job import Job, LongPlan, SchemeEntry, plan_to_dict
from meshcast.simulator.job.plan_keys import (
    PLAN_KEYS,
    SCHEME_KEYS,
    PlanKey,
    keys_alike,
    option_keys,
    state_scheme_name,
)
from meshcast.simulator.job.shorthand import CARRIED, expand_plan, family_degree, usual_schedule
from meshcast.simulator.models.load import PRESETS, load_model
from meshcast.simulator.models.model import Model

FAMILIES = ("pipeline", "data", "sequence", "tensor", "expert")
"""Families of schemes of which a plan has at most a single scheme here; further schemes, as in USP, have keys with a
number."""

UNWRITTEN = ("name", "title", "source", "fitted", "sigmas", "regime", "weights", "quantised")
"""Fields of a framework that are no traits, or that are those of the precision."""

DEFAULTS: SomeKeys = {
    f"plan.{key.flat}": key.usual
    for key in PLAN_KEYS.values()
    if key.usual not in (None, ()) and not (key.chooses and key.family in SCHEME_KEYS)
}
"""What a short plan means where it leaves these keys out."""


def flatten(prefix: str, value: Any) -> Keys:
    """Returns the dotted keys of nested mappings; empty mappings have none."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {key: member for name, inner in value.items() for key, member in flatten(f"{prefix}.{name}", inner).items()}


def nest(keys: SomeKeys, prefix: str = "") -> Keys:
    """Returns the nested mapping of the keys below a prefix; without a prefix, of all keys."""
    nested: Keys = {}
    below = f"{prefix}." if prefix else ""
    for key, value in keys.items():
        if key.startswith(below):
            *parents, last = key[len(below) :].split(".")
            at = nested
            for parent in parents:
                at = at.setdefault(parent, {})
            at[last] = value
    return nested


# ------------------------------------------------------------------------------------- job to keys


def flatten_job(job: Job) -> Keys:
    """Returns all keys of a checked job, every default filled."""
    keys: Keys = {"framework.name": job.framework.name, "cluster.gpus": job.cluster.gpus}
    keys |= flatten_model(job.model)
    keys |= flatten("batch", job.batch.to_dict())
    keys |= flatten("precision", job.precision.model_dump())
    if (optimizer := job.framework.update.optimizer) != "adam":
        keys["optimizer"] = optimizer
    keys |= flatten("train", job.train.model_dump(mode="json", exclude_none=True))
    traits = flatten_framework(job.framework)
    keys |= traits if job.train.has_adapters else {key: traits[key] for key in traits if ".adapters." not in key}
    keys |= flatten_plan(job.plan)
    if job.release is not None:
        keys["framework.release"] = job.release
    if job.run.tokens is not None:
        steps = job.run.tokens / (keys["batch.global"] * keys.get("batch.sequence", 1))
        keys |= {"run.steps": int(steps)} if steps == int(steps) else {"run.tokens": job.run.tokens}
    if (evaluation := job.run.evaluation) is not None and evaluation.micro is not None:
        sizes = {"micro": evaluation.micro, "sequence": evaluation.sequence or job.batch.longest}
        keys |= flatten("run.evaluation", sizes)
    if job.noise is not None:
        keys |= flatten("noise", job.noise.model_dump())
    return keys


def flatten_for_export(job: Job) -> Keys:
    """Returns the keys of a job, and what launch scripts depend on beyond it: the GPUs of a node, and their
    generation."""
    node = {"gpus_per_node": job.cluster.gpus_per_node, "architecture": job.cluster.node.gpu.architecture}
    return flatten_job(job) | flatten("cluster", node)


def flatten_model(model: Model) -> Keys:
    """Returns the fields of a model but for its name; those that are null are left out."""
    return flatten("model", model.model_dump(exclude_none=True, exclude={"name"}))


def flatten_framework(framework: Framework) -> Keys:
    """Returns the traits of a framework; formats are keys of the precision."""
    dumped = framework.model_dump(exclude={*UNWRITTEN, "gradients", "main_weights", "moments"})
    del dumped["update"]["optimizer"]  # a key of the job
    return flatten("framework.set", dumped)


def flatten_plan(plan: LongPlan) -> Keys:
    """Returns the keys of a plan in long form."""
    keys: Keys = {f"plan.{name}": getattr(plan, name) for name in CARRIED}
    for short, family in (("pp", "pipeline"), ("dp", "data"), ("cp", "sequence"), ("tp", "tensor")):
        keys[f"plan.{short}"] = family_degree(plan, family)
    experts = plan.views.get("experts", {})
    keys |= {"plan.ep": experts.get("ep", 1), "plan.etp": experts.get("etp", keys["plan.tp"])}
    order = [axis for axis, size in plan.mesh.items() if size > 1]
    is_outer = "pp" in order and not {"dp", "replicate", "shard"}.isdisjoint(order[: order.index("pp")])
    keys["plan.order"] = "dp-pp-cp-tp" if is_outer else "pp-dp-cp-tp"
    keys["plan.recompute"] = "none"
    for entry in plan.schemes:
        keys |= _flatten_scheme(entry, plan, keys)
    for name, value in (("stages", plan.stages), ("replicas", plan.replicas)):
        if value:
            keys[f"plan.{name}"] = tuple(part.model_dump(mode="json") for part in value)
    return keys


def _flatten_scheme(entry: SchemeEntry, plan: LongPlan, keys: Keys) -> Keys:
    family, _, name = entry.use.partition("/")
    fields = find_scheme(entry.use).Options.model_fields
    options = {key: field.default for key, field in fields.items() if not field.is_required()}
    options |= entry.model_extra or {}
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items() if value is not None
    }
    if name.startswith("recompute-"):
        return {"plan.recompute": name.removeprefix("recompute-")} | flatten("plan.recompute", options)
    if name == "tiled-mlp":
        return {"plan.mlp_tiles": options["tiles"]}
    if family == "memory":
        what = options.pop("what", ("activations",)) if name == "offload" else True
        return {f"plan.{name}": tuple(what) if isinstance(what, list) else what} | flatten(f"plan.{name}", options)
    if family == "tensor" and not entry.over:
        family = "tensor_overlap"
    while f"plan.{family}" in keys:
        family += "+"
    if options.get("replicate") in plan.mesh and len(entry.over) == 1:
        keys["plan.replicate"] = plan.mesh[options.pop("replicate")]
    return {f"plan.{family}": name} | flatten(f"plan.{family}", options)


ALSO_ON_ONE_STAGE = ("plan.pipeline.overlap_passes", "plan.pipeline.delay_weight_gradients")
"""Options of a schedule that act without a pipeline, too."""


def drop_inactive(keys: SomeKeys) -> Keys:
    """Returns the keys without schemes and options that have no effect: those of degree 1."""
    active = dict(keys)
    inactive = {
        "plan.cp": "plan.sequence",
        "plan.ep": "plan.expert",
        "plan.pp": "plan.pipeline",
        "plan.tp": "plan.tensor",
    }
    for degree, scheme in inactive.items():
        if active.get(degree, 1) == 1:
            kept = {key: active[key] for key in ALSO_ON_ONE_STAGE if degree == "plan.pp" and active.get(key)}
            active = {key: value for key, value in active.items() if key != scheme and not key.startswith(f"{scheme}.")}
            active |= kept
    return active


def join_offload(keys: SomeKeys) -> Keys:
    """Returns the keys with a single word for optimizer states on the host: ZeRO-Offload is ZeRO-2 with them there."""
    joined, data = dict(keys), keys.get("plan.data")
    states = keys.get("plan.offload", ())
    if data in ("zero-offload", "zero-infinity"):
        joined["plan.offload"] = tuple(sorted({*states, "optimizer"}))
    elif data == "zero-2" and "optimizer" in states:
        joined |= {"plan.data": "zero-offload", "plan.data.delayed_update": False}
    if joined.get("plan.offload") == ("optimizer",):
        usual = {"plan.offload.fraction": 1.0, "plan.offload.overlap": False}  # other options are of activations
        options = [key for key in joined if key.startswith("plan.offload.")]
        idle = [key for key in options if key not in usual or joined[key] == usual[key]]
        joined = {key: value for key, value in joined.items() if key not in idle}
    return joined


def drop_idle_overlap(keys: SomeKeys) -> Keys:
    """Returns the keys without the overlap of what is not communicated."""
    idle = []
    if keys.get("plan.data") == "ddp":
        idle.append("framework.set.overlap.updated_weights")
    if keys.get("plan.tp", 1) == 1:
        idle.append("framework.set.overlap.tp")
    return {key: value for key, value in keys.items() if key not in idle}


# ------------------------------------------------------------------------------------- keys to job


BESIDE_SHAPES = ("model.moe.routing", "model.output.")
"""Begins of keys of a model that are no part of the shape by which presets are found."""


def compose_job(
    keys: SomeKeys,
    cluster: Any,
    model: Any,
    folder: Path = Path(),
    stated: frozenset[str] = frozenset(),
    plan_changes: SomeKeys | None = None,
) -> Keys:
    """Returns the job file of some keys, without what meshcast fills in anyway.

    cluster: that of the job.
    model: preset or path, in place of the keys of the model; None: those.
    folder: of relative paths.
    stated: keys that are written also where they equal what meshcast fills in.
    plan_changes: keys of a short plan that replace those that `keys` make.
    """
    profile, framework = _compose_framework(keys, stated)
    sequence = keys.get("batch.sequence")
    shape = {key: value for key, value in keys.items() if not key.startswith(BESIDE_SHAPES)}
    named = model if model is not None else compose_model(nest(shape, "model"))
    named = _add_traits(named, keys, folder)
    job: Keys = {"model": named, "cluster": cluster, "framework": framework}
    job["batch"] = {key: value for key, value in nest(keys, "batch").items() if value is not None}
    precision = nest(keys, "precision").items()
    if written := {
        key: value for key, value in precision if f"precision.{key}" in stated or value != _format(profile, key)
    }:
        job["precision"] = written
    if keys.get("optimizer", "adam") != "adam":
        job["optimizer"] = keys["optimizer"]
    train = nest(keys, "train")
    if train.get("mode", "full") != "full" or "train.mode" in stated or "reference" in train:
        job["train"] = train
    gpus = load_cluster(cluster, base=folder)
    loaded = load_model(named, base=folder)
    if plan := compose_plan(keys, loaded, gpus.gpus, gpus.gpus_per_node, stated, plan_changes or {}):
        job["plan"] = plan
    if run := _compose_run(keys, sequence):
        job["run"] = run
    return job


def _compose_run(keys: SomeKeys, sequence: int | None) -> Keys:
    """Returns how long a run is, and the size of its evaluations, as far as keys say it."""
    evaluation = nest(keys, "run.evaluation")
    run: Keys = {"evaluation": evaluation} if evaluation else {}
    if keys.get("run.tokens"):
        run["tokens"] = keys["run.tokens"]
    elif {"run.steps", "batch.global"} <= keys.keys() and sequence:
        run["tokens"] = float(keys["run.steps"] * keys["batch.global"] * sequence)
    return run


def _add_traits(model: str | SomeKeys, keys: SomeKeys, folder: Path) -> str | SomeKeys:
    """Returns the model of a job, in any form, with its head, the routing of its tokens and the further tokens that it
    predicts, as far as keys say so."""
    routing, output, depths = keys.get("model.moe.routing"), nest(keys, "model.output"), keys.get("model.mtp")
    depths = None if depths is None or load_model(model, base=folder).mtp == depths else depths
    if routing is None and depths is None and not output:
        return model
    fields: Keys = {"preset": model} if isinstance(model, str) else dict(model)
    fields |= {"output": output} if output else {}
    fields |= {"mtp": depths} if depths is not None else {}
    return fields | ({"moe": {**(fields.get("moe") or {}), "routing": routing}} if routing is not None else {})


def _compose_framework(keys: SomeKeys, stated: frozenset[str]) -> tuple[Framework, str | Keys]:
    """Returns the profile of a framework, and how a job names it with the traits that differ from those of its release.

    stated: keys that are written also where they equal the profile.
    """
    name, release = keys.get("framework.name", "megatron-core"), keys.get("framework.release")
    profile = load_framework(name, release=release)
    usual = flatten_framework(profile) | {"framework.set.regime": profile.regime}
    traits = {key: value for key, value in keys.items() if key in stated or usual.get(key, value) != value}
    changes = {"release": release, "set": nest(traits, "framework.set")}
    changes = {key: value for key, value in changes.items() if value}
    silent = {"recipe": False} if framework_recipe(name) else {}  # the file says what it sets
    return profile, {"name": name, **silent, **changes} if silent or changes else name


def _format(profile: Framework, key: str) -> str:
    return profile.quantised or profile.weights if key == "compute" else str(getattr(profile, key))


def compose_plan(
    keys: SomeKeys,
    model: Model,
    gpus: int,
    node: int,
    stated: frozenset[str] = frozenset(),
    changes: SomeKeys | None = None,
) -> Keys:
    """Returns the plan: in short form if that can say it, otherwise in long form.

    model: of the job.
    node: GPUs of a node.
    stated: keys that are written also where they equal the default.
    changes: keys of a short plan that replace those that `keys` make.
    """
    kept, changes = _drop_defaults(keys, stated), changes or {}
    short = _replace_keys(compose_short_plan(keys, gpus, stated), changes)
    rest = _list_options(kept, {PLAN_KEYS[key].flat.partition(".")[0] for key in changes})
    if not rest:
        return short
    long = plan_to_dict(expand_plan(short, gpus, model, node))
    for key, value in rest.items():
        _, family, option = key.split(".")
        for entry in long["schemes"]:
            if entry["use"].startswith(f"{family}/") or entry["use"].startswith(f"memory/{family}"):
                entry[option] = list(value) if isinstance(value, tuple) else value
    return long


def compose_short_plan(keys: SomeKeys, gpus: int, stated: frozenset[str] = frozenset()) -> Keys:
    """Returns what a plan in short form says of some keys, without the options that only a long one states.

    gpus: of the cluster. stated: keys that are written also where they equal the default.
    """
    kept = _drop_defaults(keys, stated)
    names = ("tp", "pp", "cp", "dp", "ep", "etp", "order", "partition", "pad_heads", "share", "offload", "mlp_tiles")
    values = {key: kept[f"plan.{key}"] for key in names if f"plan.{key}" in kept}
    short: Keys = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if (copies := kept.get("plan.replicate", 1)) > 1:
        degrees = [kept.get(f"plan.{key}", 1) for key in ("tp", "pp", "cp")]
        short["shard"] = kept.get("plan.dp", gpus // math.prod(degrees)) // copies
    return short | _name_schemes(kept, stated)


def _drop_defaults(keys: SomeKeys, stated: frozenset[str]) -> Keys:
    """Returns the keys of a plan that are not what a short plan means without them, or that are stated."""
    said = {key: value for key, value in keys.items() if key.startswith("plan.") and value is not None}
    kept = {key: value for key, value in said.items() if key in stated or DEFAULTS.get(key) != value}
    has_experts = said.get("plan.ep", 1) > 1
    if said.get("plan.etp") == (1 if has_experts else said.get("plan.tp", 1)):
        kept.pop("plan.etp", None)
    return kept


def _replace_keys(short: SomeKeys, changes: SomeKeys) -> Keys:
    """Returns the plan in short form with changed keys, each in place of all that choose the same scheme."""
    replaced = {name for key in changes for name in (key, *keys_alike(key))}
    return {key: value for key, value in short.items() if key not in replaced} | dict(changes)


def _list_options(kept: SomeKeys, replaced: set[str]) -> Keys:
    """Returns the options that only a plan in long form states. replaced: families whose schemes a change replaces."""
    return {
        key: value
        for key, value in kept.items()
        if key.count(".") == 2
        and key.split(".")[1] not in replaced
        and not _is_short(key, value, kept)
        and value != _usual(key, kept)
    }


def _name_schemes(kept: SomeKeys, written: frozenset[str]) -> Keys:
    """Returns the keys of a short plan that name schemes, where they are not the defaults, or are to be written."""
    short = _name_schedule(kept)
    for family in ("data", "sequence", "expert", "tensor"):
        scheme = kept.get(f"plan.{family}", DEFAULTS[f"plan.{family}"])
        for name, value in state_scheme_name(family, scheme).items():
            key = PLAN_KEYS[name]
            is_written = f"plan.{family}" in written and key.chooses.get(value) == scheme and _acts(key, kept)
            if value != key.usual or is_written:
                short[name] = value
    for key in option_keys("data"):
        usual = _usual(f"plan.{key.flat}", kept)
        if (value := kept.get(f"plan.{key.flat}", usual)) != usual:
            short[key.name] = value
    if "plan.recompute" in kept:
        short["recompute"] = kept["plan.recompute"]
    if kept.get("plan.recompute.layers") is not None and kept.get("plan.recompute") == "full":
        short["recompute_layers"] = kept["plan.recompute.layers"]
    return short


def _name_schedule(kept: SomeKeys) -> Keys:
    """Returns the keys of a short plan that name its schedule, where it is not the default."""
    short: Keys = {}
    options: Keys = {
        key.rpartition(".")[2]: list(value) if isinstance(value, tuple) else value
        for key, value in kept.items()
        if key.startswith("plan.pipeline.") and (key.endswith(".chunks") or value != _usual(key, kept))
    }
    chunks = options.pop("chunks", 1)
    schedule = kept.get("plan.pipeline", DEFAULTS["plan.pipeline"])
    usual = find_scheme(f"pipeline/{schedule}").Options.model_fields["chunks"].default
    if chunks > 1 and (schedule == "interleaved-1f1b" or chunks != usual):
        short["chunks"] = chunks
    if options:
        # The default of a number of chunks is not named: a change of the chunks takes that of theirs.
        named = {"use": schedule} if schedule != usual_schedule(chunks) else {}
        short["schedule"] = {**named, **options}
    elif schedule != usual_schedule(chunks):
        short["schedule"] = schedule
    return short


def _acts(key: PlanKey, kept: SomeKeys) -> bool:
    """Returns whether the degree of a key is above 1, so that it has an effect."""
    return key.degree in ("", "dp") or kept.get(f"plan.{key.degree}", 1) > 1


def _is_short(key: str, value: Any, kept: SomeKeys) -> bool:
    """Returns whether a short plan says the option of a scheme."""
    _, family, option = key.split(".")
    if family == "pipeline" or (family == "data" and option in [key.option for key in option_keys(family)]):
        return True
    if family == "recompute" and option == "layers":
        return kept.get("plan.recompute") == "full"
    return family == "recompute" and option == "modules" and tuple(value) == ("core_attn",)


def _usual(key: str, kept: SomeKeys) -> Any:
    _, family, option = key.split(".")
    usual = DEFAULTS.get(f"plan.{family}")
    name = kept.get(f"plan.{family}", usual)
    use = {"recompute": f"memory/recompute-{name}", "offload": "memory/offload"}.get(family, f"{family}/{name}")
    field = find_scheme(use).Options.model_fields.get(option) if is_scheme(use) else None
    return None if field is None or field.is_required() else field.default


SHAPES_OF_OTHERS = frozenset({"deepseek-coder-6.7b", "internlm2-7b", "mistral-7b-v0.3"})
"""Presets that have the shape of Llama 7B or of Llama 3 8B, with another vocabulary: it is not what a file of
that shape means that states none."""


def find_preset_vocabulary(fields: Keys) -> tuple[str, int] | None:
    """Returns name and vocabulary of a preset that has this shape but for the vocabulary; None if there is none.

    Of several it is that whose sequences have the length of the file's, or the next length.
    """
    by_distance: dict[int, tuple[str, int]] = {}
    for file in sorted(PRESETS.glob("*.yaml")):
        text = file.read_text("utf-8") if file.stem not in SHAPES_OF_OTHERS else ""
        if re.search(rf"^hidden: {fields.get('hidden')}$", text, re.M) and re.search(
            rf"^layers: {fields.get('layers')}$", text, re.M
        ):
            preset = load_model(file.stem)
            unstated = {"vocab": preset.vocab, "seq": preset.seq, "dropout": preset.dropout}  # dropout changes no shape
            if compose_model(fields | unstated) == file.stem:
                by_distance.setdefault(abs(preset.seq - fields.get("seq", preset.seq)), (file.stem, preset.vocab))
    return by_distance[min(by_distance)] if by_distance else None


def compose_model(fields: Keys) -> Any:
    """Returns the name of a preset of this shape, if there is one; with its changes, if it differs in little; or the
    fields."""
    wanted = load_model(fields)
    near: Keys = {}
    skeleton = {
        key: value for key, value in fields.items() if getattr(Model.model_fields[key], "default", None) != value
    }
    for file in sorted(PRESETS.glob("*.yaml")):
        text = file.read_text("utf-8")
        if not re.search(rf"^hidden: {wanted.hidden}$", text, re.M) or not re.search(
            rf"^layers: {wanted.layers}$", text, re.M
        ):
            continue
        preset = load_model(file.stem)
        changes = {
            key: getattr(wanted, key)
            for key in Model.model_fields
            if key != "name" and getattr(wanted, key) != getattr(preset, key)
        }
        if wanted.positions != "learned":
            for key in ("seq", "position_rows"):
                changes.pop(key, None)
        if wanted.score_dropout == (wanted.dropout > 0):  # it follows
            changes.pop("score_dropout", None)
        if not changes:
            return file.stem
        if changes.keys() == {"dropout"}:
            near = {"preset": file.stem, **changes}
    return near or skeleton
