"""Reads a job file or a mapping, in short or long form, into a checked `Job` with every default filled."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from meshcast.hardware import GPU, Cluster, load_cluster
from meshcast.hardware.documents.explain import valid_keys
from meshcast.hardware.documents.plain_data import Fields, SomeFields, to_plain_data
from meshcast.hardware.errors import PlanError, shorten
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.plugins import add_plugins_beside, with_installed
from meshcast.hardware.remembered import remember
from meshcast.hardware.shared import MAX_DESCRIPTIONS, shared_flat
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch import LAUNCH_SUFFIXES, is_workload_manifest
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.routing import LOAD_SIGMA
from meshcast.simulator.job.batch import Batch
from meshcast.simulator.job.framework import (
    Format,
    Framework,
    QuantisedRecipe,
    framework_versions,
    load_framework,
    merge_fields,
)
from meshcast.simulator.job.fused_attention import find_gpu_without_flash
from meshcast.simulator.job.host_launches import host_pace
from meshcast.simulator.job.job import Job, JobFile, JobOrigin, LongPlan, Precision, SchemeEntry, Train
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.job.open_settings import sigmas_of_import, widen
from meshcast.simulator.job.program_rules import broken_rules, list_refused
from meshcast.simulator.job.recipe import (
    NO_RECIPE,
    Recipe,
    RecipeFacts,
    fill_plan,
    find_recipe,
    name_as_recipes,
    name_mixer,
)
from meshcast.simulator.job.release import find_month
from meshcast.simulator.job.remedies import suggest_key
from meshcast.simulator.job.samples import join_samples
from meshcast.simulator.job.shorthand import (
    add_early_stop,
    add_tensor_overlap,
    expand_plan,
    family_degree,
)
from meshcast.simulator.loading.token_routing import fill_routing, has_trained_router
from meshcast.simulator.models.adapter_targets import TARGETS, name_targets, usual_targets
from meshcast.simulator.models.adapters import Adapters
from meshcast.simulator.models.load import ModelSizes, is_preset, load_model
from meshcast.simulator.models.model import Model

if TYPE_CHECKING:
    from meshcast.simulator.formats.launch.imported_job import ImportedJob
    from meshcast.simulator.formats.launch.launch_file import LaunchFile


@with_installed
def load_job(
    source: str | Path | SomeFields,
    changes: str | Iterable[str] | SomeFields = (),
    base: str | Path | None = None,
) -> Job:
    """Returns the job of a YAML or JSON file, or of a mapping.

    source: path of the file, or the mapping.
    changes: changes to make first, such as ``plan.tp=4``, or a mapping, such as ``{"plan.tp": 4}``.
    base: folder of relative paths in the job; default: the folder of the file, for a mapping the current folder.
    Raises PlanError, ModelError or CatalogError for the first mistake.
    """
    changed = _write_changes(changes)
    beside = Path(source).parent if isinstance(source, str | Path) else Path()
    add_plugins_beside(Path(base) if base is not None else beside)
    read = read_job(source, changed)
    data, text, where, folder, _ = read
    file = validate_data(JobFile, data, f"{where} " if changed else where, PlanError, text="" if changed else text)

    with locate_errors(*read.origin):
        make = partial(_job, file, data, folder if base is None else Path(base), read.origin)
        job = make()
        if refused := list_refused(job):
            job = make(refused)
        if read.launch is not None:
            _refuse_stop(job, read.launch)
            unfollowed = (entry.shown for entry in read.launch.findings.approximated)
            job = widen(job, sigmas_of_import(job, read.launch.assumed, unfollowed))
        return job


class ReadJob(NamedTuple):
    """A job as read, not checked yet.

    data: its keys.
    text, where: of its file, for errors.
    folder: of its paths.
    launch: what a launch file of a training program says, if it is such.
    """

    data: Fields
    text: str
    where: str
    folder: Path
    launch: ImportedJob | None = None

    @property
    def origin(self) -> JobOrigin:
        """Where errors about its keys are: a line of the file, or a setting of a launch file."""
        return JobOrigin(self.where, self.text, self.launch.places if self.launch is not None else {})


def read_job(source: str | Path | SomeFields, changes: Iterable[str] = ()) -> ReadJob:
    """Reads a job as plain data and makes the changes. Raises PlanError for what is no mapping of keys to values."""
    folder, text, where = Path("."), "", "job"
    if isinstance(source, Mapping):
        data: Any = to_plain_data(source)
    elif not isinstance(source, (str, Path)):
        raise PlanError("job", "a job is the path of a file, or a mapping", "Name a YAML or JSON file", source)
    else:
        path = Path(source)
        folder = path.parent
        if path.suffix.lower() in LAUNCH_SUFFIXES or is_workload_manifest(path):
            return read_launch_job(path, changes)
        if is_preset(str(source)) and not path.exists():
            rule = "this is a preset of a model, and no job file has this name"
            remedy = f"Write `model: {source}` and `cluster: dgx-h100:8` into job.yaml, or begin with meshcast init"
            raise PlanError(str(source), rule, remedy)
        data, text, where = read_yaml(path, str(source), PlanError)
        if isinstance(data, dict) and not {"model", "cluster"} <= data.keys():
            from meshcast.simulator.formats.launch.detect import is_launch_file
            from meshcast.simulator.formats.launch.launch_file import read_launch_file

            if is_launch_file(read_launch_file(path)):
                return read_launch_job(path, changes)
        _refuse_model_config(data, path, where)
    if not isinstance(data, dict):
        raise PlanError(where, "a job is a mapping of keys to values", "Start with `model:` and `cluster:`", data)
    for change in _split_changes(changes):
        _apply_change(data, change)
    return ReadJob(data, text, where, folder)


def _refuse_model_config(data: Any, path: Path, where: str) -> None:
    """Raises PlanError if a file is the config.json of a model in place of a job, and says what the job looks like."""
    if isinstance(data, dict) and "model_type" in data and not {"model", "cluster"} & data.keys():
        rule = "this is the config.json of a model, and a job needs `model:` and `cluster:`"
        lines = f"`model: {path.name}`, `cluster: dgx-h100:1` and `plan: {{dp: 8}}`"
        remedy = f"Write a file beside it, for example job.yaml with the lines {lines}, and forecast that"
        raise PlanError(f"{where} model_type", rule, remedy, data["model_type"])


def read_launch_job(path: Path, changes: Iterable[str], form: str | None = None, gpus: int | None = None) -> ReadJob:
    """Reads the job of a launch file, with its changes applied.

    form: name of its format; None: it follows from what the file holds. gpus: their number, without a cluster.
    Raises PlanError for a file that cannot be read, OpenQuestions for one that leaves open what decides the answer.
    """
    # Only launch files need the modules of all programs.
    from meshcast.simulator.formats.launch.launch_file import read_launch_file
    from meshcast.simulator.formats.launch.programs.registry import find_format

    file = read_launch_file(path, suffix="" if form is None else find_format(form).suffix)
    return read_job_of_file(file, changes, form, gpus)


def read_job_of_file(
    file: LaunchFile, changes: Iterable[str], form: str | None = None, gpus: int | None = None
) -> ReadJob:
    """Reads the job of a launch file that is read; see `read_launch_job`."""
    from meshcast.simulator.formats.launch.changes import apply_changes
    from meshcast.simulator.formats.launch.convert import LEFT_OPEN, import_file

    changes = _split_changes(changes)
    imported = import_file(file, changes, gpus=gpus, form=form)
    names = [change.partition("=")[0].strip() for change in changes]
    # What the file is read with is in its job, to which the file may have added, such as how tokens are routed.
    applied = [change for change, name in zip(changes, names, strict=True) if name not in LEFT_OPEN]
    data = apply_changes(imported.job, applied, _apply_change)
    bounding = [(entry, apply_changes(job, applied, _apply_change)) for entry, job in imported.bounding]
    changed = {*names}
    places = {key: place for key, place in imported.places.items() if key not in changed}
    return ReadJob(
        data, "", file.where, file.folder, replace(imported, job=data, places=places, bounding=tuple(bounding))
    )


def _refuse_stop(job: Job, launch: ImportedJob) -> None:
    """Raises PlanError for a setting of a launch file with which its program stops at its start. What follows from
    assumptions and changes, and what the program does not have, remains a warning."""
    for broken in broken_rules(job):
        key = next((key for key in (broken.flat_key, broken.key) if key in launch.places), "")
        if broken.stops and key:
            remedy = "Change it; or forecast it all the same, as a job: "
            remedy += f"meshcast import {launch.where} --out job.yaml"
            raise PlanError(key, str(broken), remedy)


def _job(file: JobFile, data: Fields, base: Path, origin: JobOrigin, refused: Set[str] = frozenset()) -> Job:
    """Returns the job of a checked file: loads model, cluster and framework, and expands the plan. data: of the file.

    refused: keys of what the job does not take from recipes, see `list_refused`.
    """
    choice = file.framework
    load_framework(choice.name, choice.set, choice.release)  # its mistakes come first
    cluster = load_cluster(file.cluster, "cluster", base)
    model = load_model(_fill_sequence(file), "model", base)
    recipe = _find_recipe(file, cluster, model).leave_out(refused)
    plan = _resolve_paths(base, _expand(fill_plan(file.plan, recipe.plan), cluster, model, file.batch))
    framework, precision, old_gpu = _find_framework(file, merge_fields(recipe.traits, choice.set), cluster, plan)
    if framework.overlap.tp:
        plan = plan.with_schemes(lambda stage: add_tensor_overlap(stage, framework.tensor_overlap, cluster.domain))
    if framework.compile if framework.recompute_early_stop == "compiled" else framework.recompute_early_stop:
        plan = plan.with_schemes(lambda stage: add_early_stop(stage.schemes))
    drawn = [
        (_batch(joined, model, its_plan), its_plan)
        for joined, its_plan in join_samples(file.batch, plan, model, cluster, base)
    ]
    drawn = [(batch, fill_routing(its_plan, model, batch)) for batch, its_plan in drawn]
    batch, plan = drawn[0]
    framework = _widen_for_router(framework, plan)
    parts = {"framework": choice, "precision": file.precision}
    as_written = data | {key: part.model_dump(exclude_unset=True) for key, part in parts.items()}
    return Job.model_construct(  # of parts that are checked
        id=file.id,
        model=model,
        cluster=cluster,
        framework=framework,
        release=choice.release,
        taken=recipe.list_taken(choice.set | _state_formats(file), file.plan),
        without_flash=old_gpu,
        batch=batch,
        drawn=tuple(drawn) if len(drawn) > 1 else (),
        precision=precision,
        train=_train(file.train, model),
        plan=plan,
        run=file.run,
        noise=file.noise,
        published=file.published,
        as_written=as_written,
        folder=base,
        origin=origin,
    )


def _expand(plan: Fields, cluster: Cluster, model: Model, batch: Batch) -> LongPlan:
    """Returns the long form of a plan, made once for equal plans in short form."""
    gpus, node = cluster.gpus, cluster.gpus_per_node
    return shared_flat((LongPlan, gpus, node, model), plan, lambda: expand_plan(plan, gpus, model, node, batch))


def _widen_for_router(framework: Framework, plan: LongPlan) -> Framework:
    """Returns the framework with the sigma of the load that a trained router gives the busiest rank."""
    if not has_trained_router(plan):
        return framework
    return framework.model_copy(update={"sigmas": {**framework.sigmas, "load of the busiest rank": LOAD_SIGMA}})


def _find_framework(
    file: JobFile, traits: Mapping[str, object], cluster: Cluster, plan: LongPlan
) -> tuple[Framework, Precision, GPU | None]:
    """Returns the framework with the number formats of a job, these formats, and a GPU for which its fused attention
    has no kernel; None: it has it.

    traits: what the job and the recipes that it gets set.
    """
    choice = file.framework
    framework = load_framework(choice.name, {**traits}, choice.release)
    precision = _precision(file, framework, plan)
    of_file = file.optimizer, file.train.has_adapters, choice.release, "launch_s" in traits, "attention" in choice.set
    make = partial(_set_formats, file, traits, cluster, framework, precision)
    completed, old_gpu = remember(_completed, (framework, precision, cluster, of_file), make, MAX_DESCRIPTIONS)
    return completed, precision, old_gpu


_completed: dict[Hashable, tuple[Framework, GPU | None]] = {}
"""What `_set_formats` has returned, by all that it depends on."""


def _set_formats(
    file: JobFile, traits: Mapping[str, object], cluster: Cluster, framework: Framework, precision: Precision
) -> tuple[Framework, GPU | None]:
    """Returns the framework with number formats, and a GPU for which its fused attention has no kernel.

    framework: without the formats.
    """
    choice = file.framework
    quantised = precision.compute in get_args(QuantisedRecipe)
    formats: Fields = {
        "weights": "bf16" if quantised else precision.compute,
        "quantised": precision.compute if quantised else "",
        "gradients": precision.gradients,
        "main_weights": precision.main_weights,
        "moments": precision.moments,
        "update": _update(file, framework),
        "adapters": framework.adapters.model_dump()
        | ({} if file.train.has_adapters else {"weights": "", "units": False}),
    }
    if "launch_s" not in traits:
        formats["launch_s"] = framework.launch_s * host_pace(cluster)
    framework = load_framework(choice.name, {**traits, **formats}, choice.release)
    old_gpu = None if "attention" in choice.set else find_gpu_without_flash(framework, cluster)
    if old_gpu is not None:
        framework = load_framework(choice.name, {**traits, **formats, "attention": "unfused"}, choice.release)
    return framework, old_gpu


def _find_recipe(file: JobFile, cluster: Cluster, model: Model) -> Recipe:
    """Returns the settings of recipes that a job gets; none if it means no program, or says everything itself."""
    choice = file.framework
    if "name" not in choice.model_fields_set or not (choice.rules and choice.recipe):
        return NO_RECIPE
    profile = load_framework(choice.name, release=choice.release)
    degrees = {name: int(count) for name, count in file.plan.items() if isinstance(count, int)}
    facts = RecipeFacts(
        month=find_month(choice.release, framework_versions(choice.name), "framework.release")
        if choice.release
        else "",
        model=name_as_recipes(choice.name, model.name, ModelSizes.of(model)),
        experts=model.moe is not None,
        mixer=name_mixer(latent=model.mla, state_space=model.ssm or model.linear_attention),
        gpu=cluster.gpu.name,
        compute=file.precision.compute or profile.quantised or profile.weights,
        mode=file.train.mode,
        degrees={**degrees, "domain": cluster.domain},
        deterministic=bool(choice.set.get("deterministic")),
    )
    return find_recipe(choice.name, facts)


def write_choice(job: Job) -> dict[str, object]:
    """Returns the framework of a job that states all traits which it takes from recipes."""
    stated = job.to_dict()["framework"] | {"recipe": False}
    return {key: value for key, value in stated.items() if value not in (None, {})}


def state_recipes(data: SomeFields, opened: Iterable[str], base: Path) -> Fields:
    """Returns a job that states what it takes from recipes, but for keys that are opened, so that another plan of it
    takes no more.

    opened: dotted keys that a search varies. base: folder of relative paths in the job.
    """
    job = load_job(data, base=base)
    if not job.taken:
        return dict(data)
    varied = {key.removeprefix("plan.") for key in opened}
    taken = {key.removeprefix("plan."): value for key, value, _ in job.taken if key.startswith("plan.")}
    plain = {key: value for key, value in taken.items() if not isinstance(value, Mapping)}
    plan = fill_plan({**data.get("plan", {}), **dict.fromkeys(varied, True)}, plain)
    return {
        **data,
        "framework": write_choice(job),
        "plan": {key: value for key, value in plan.items() if key not in varied or key in data.get("plan", {})},
    }


def _state_formats(file: JobFile) -> dict[str, object]:
    """Returns the formats that a job states, as traits of the framework."""
    return file.precision.model_dump(include={"gradients", "main_weights", "moments"}, exclude_none=True)


def _fill_sequence(file: JobFile) -> Any:
    """Returns the model as the job describes it; the length of sequences that its fields leave out is that of the
    batch."""
    spec = file.model
    if isinstance(spec, Mapping) and not {"preset", "seq"} & spec.keys() and file.batch.sequence is not None:
        return {**spec, "seq": file.batch.sequence}
    return spec


def _resolve_paths(base: Path, plan: LongPlan) -> LongPlan:
    """Returns the plan with the paths in options of its schemes relative to the current folder."""

    def resolve_entry(entry: SchemeEntry) -> SchemeEntry:
        paths = _option_paths(base, entry.model_extra or {})
        return entry.model_copy(update=paths) if paths else entry

    return plan.with_schemes(lambda stage: tuple(map(resolve_entry, stage.schemes)))


def _option_paths(base: Path, options: SomeFields) -> Fields:
    """Returns the options of a scheme that name a file, with their paths relative to the current folder."""
    paths = {key: str(base / options[key]) for key in ("path", "counts", "trace") if isinstance(options.get(key), str)}
    inner = {key: _option_paths(base, value) for key, value in options.items() if isinstance(value, Mapping)}
    return paths | {key: {**options[key], **value} for key, value in inner.items() if value}


def _write_changes(changes: str | Iterable[str] | SomeFields) -> list[str]:
    """Changes as they are written on a command line: ``plan.tp=4``."""
    if isinstance(changes, Mapping):
        return [f"{field}={json.dumps(to_plain_data(value))}" for field, value in changes.items()]
    return [changes] if isinstance(changes, str) else list(changes)


def _split_changes(changes: Iterable[str]) -> list[str]:
    """Returns the changes, each of a single field: ``plan.tp=4,plan.pp=2`` is two."""
    changes, split = list(changes), list[str]()
    keys = valid_keys(JobFile, ()) if changes else []
    for change in changes:
        parts = re.split(r",(?=\s*[a-z_]+(?:\.\w+)*\s*=)", change) if "=" in change else [change]
        split += parts if parts[0].partition("=")[0].strip().split(".")[0] in keys else [change]
    return split


WORDS = {"framework": "name", "model": "preset", "precision": "compute"}
"""Sections of a job that may be a word, and the key that a word stands for."""


def _apply_change(data: Fields, change: str) -> None:
    """Applies a change such as ``plan.tp=4``; the value is read as YAML."""
    field, equals, value = (word.strip() for word in change.partition("="))
    if not equals or not all(field.split(".")):
        raise PlanError("--set", "a change is written field=value", "For example --set plan.tp=4", change)
    if "." not in field and field not in (keys := valid_keys(JobFile, ())):
        raise PlanError(f"--set {field}", "a job has no such key", suggest_key(field, keys))
    set_field(data, field, read_yaml(value, f"--set {field}", PlanError).data, f"--set {field}")


def set_field(data: Fields, field: str, value: Any, where: str) -> None:
    """Sets a field such as ``plan.tp``, or ``plan.schemes.1.routing`` in entry 1 of a list, of a job that is still
    plain data.

    where: place of the change, for error messages.
    """
    *parents, last = field.split(".")
    at: Any = data
    for i, key in enumerate(parents):
        if isinstance(at, list):
            if (number := read_digits(key)) is None or number >= len(at):
                name = ".".join(parents[:i])
                rule = f"{name} is a list with {len(at)} entries, of which {key!r} is none"
                raise PlanError(where, rule, f"The first one is {name}.0", value)
            inner = at[number]
        else:
            inner = at.setdefault(key, {})
            if at is data and key in WORDS and isinstance(inner, str):
                inner = data[key] = {WORDS[key]: inner}
        if not isinstance(inner, dict | list) or (isinstance(inner, list) and i + 1 == len(parents)):
            parent = ".".join(parents[: i + 1])
            rule = f"{parent} holds no fields: it is {shorten(inner)}"
            below = ".".join([*parents[i + 1 :], last])
            raise PlanError(where, rule, f"Set {parent} as a whole, to a mapping with {below}", value)
        at = inner
    at[last] = value


def _update(file: JobFile, framework: Framework) -> dict[str, object]:
    """Returns the memory of the update by the optimizer of the job; Adam's temporaries are those of no other."""
    name, update = file.optimizer.name, framework.update
    copies = update.moment_copies if name == "adam" else 0
    matrices = update.matrices.model_dump() | file.optimizer.options
    return {**update.model_dump(), "optimizer": name, "moment_copies": copies, "matrices": matrices}


def _precision(file: JobFile, framework: Framework, plan: LongPlan) -> Precision:
    """Returns the number formats with defaults filled; adapters that the framework keeps in a format have gradients in
    it, too."""
    stated = file.precision
    kept = framework.adapters.weights if file.train.has_adapters else ""
    compute = stated.compute or framework.quantised or framework.weights
    main_weights = kept or stated.main_weights or framework.main_weights
    return Precision(
        compute=compute,
        gradients=kept or stated.gradients or _gradient_format(compute, framework, plan),
        main_weights=main_weights,
        moments=stated.moments or (main_weights if framework.update.moments_as_weights else framework.moments),
    )


def _gradient_format(compute: str, framework: Framework, plan: LongPlan) -> Format:
    """Returns the format in which gradients are accumulated: fp32, or that of the weights."""
    if "fp32" in (compute, framework.gradients):
        return "fp32"
    weights: Format = "fp16" if compute == "fp16" else "bf16"
    if weights == "fp16" or not framework.update.bf16_gradients:
        return weights
    shards = {state for entry in plan.schemes for state in getattr(find_scheme(entry.use), "shards", ())}
    return weights if "gradients" in shards else framework.update.bf16_gradients


def _train(train: Train, model: Model) -> Train:
    """Returns the training mode with defaults filled.

    Raises PlanError for options of adapters without adapters, and for targets that the model does not have.
    """
    train = train.model_copy(update={"reference": _choose_reference(train)})
    if not train.has_adapters:
        for key in train.model_fields_set - {"mode", "reference"}:
            if (stated := getattr(train, key)) is not None:
                raise PlanError(f"train.{key}", "only adapters have it", "Say mode: lora, or leave it out", stated)
        return train
    targets = usual_targets(model) if train.targets is None else name_targets(train.targets, model)
    if not targets:
        raise PlanError("train.targets", "nothing would be trained", f"Name some of {', '.join(TARGETS)}", [])
    Adapters(rank := train.rank or DEFAULT_RANK, targets).check(model)
    stored = train.frozen_weights or ("nf4-double" if train.mode == "qlora" else None)
    return train.model_copy(update={"rank": rank, "targets": targets, "frozen_weights": stored})


def _choose_reference(train: Train) -> str | None:
    """Returns what the reference of a training is: the trained model without its adapters where it has some, unless the
    job names a copy; None: there is no reference."""
    if not train.reference:
        return None
    if train.mode == "forward-only":
        raise PlanError("train.reference", "a forward-only job trains nothing", "Leave it out", train.reference)
    if train.reference == "adapters-off" and not train.has_adapters:
        rule = "it is the trained model without its adapters, and there are none"
        raise PlanError("train.reference", rule, "Say model, or mode: lora", train.reference)
    usual = "adapters-off" if train.has_adapters else "model"
    return usual if train.reference is True else str(train.reference)


def _batch(batch: Batch, model: Model, plan: LongPlan) -> Batch:
    """Returns the batch with defaults filled; of a plan whose stages have unequal degrees, micro-batches of a
    pipeline."""
    if batch.lengths:
        return _batch_of_classes(batch, plan)
    for where, order in _orders(batch, plan):
        if order:
            rule = "it lists classes of micro-batches, and batch.lengths states none"
            raise PlanError(where, rule, "Give a number of micro-batches, or batch.lengths", list(order))
    if batch.microbatches is not None and batch.total is not None and "micro" in batch.model_fields_set:
        rule = "batch.global, batch.micro and batch.microbatches: two of them give the third"
        raise PlanError("batch.microbatches", rule, "Leave one of them out", batch.microbatches)
    count, micro = _count_microbatches(batch, plan), batch.micro
    if count is not None:
        total = batch.total or count * micro
        if "micro" not in batch.model_fields_set and total % count == 0:
            micro = total // count
        if micro * count != total:
            near = max(1, round(total / count)) * count
            rule = f"it is {count:,} micro-batches of all replicas, of {micro} sequences each"
            raise PlanError("batch.global", rule, f"{near if micro == 1 else micro * count:,} would work", total)
    else:
        stages = family_degree(plan, "pipeline")
        total = batch.total or _count_replicas(plan) * micro * (4 * stages if stages > 1 else 1)
    filled = {"total": total, "micro": micro, "microbatches": None, "sequence": batch.sequence or model.seq}
    return batch.model_copy(update=filled)


def _count_microbatches(batch: Batch, plan: LongPlan) -> int | None:
    """Returns the micro-batches of all replicas, where they are stated."""
    stated = [entry.count for entry in plan.replicas if entry.count is not None]
    if stated and len(stated) < len(plan.replicas):
        raise PlanError("plan.replicas", "every entry states its microbatches, or none", "Add the missing ones")
    if batch.microbatches is None:
        return sum(entry.dp * count for entry, count in zip(plan.replicas, stated, strict=False)) or None
    if stated:
        rule = "batch.microbatches is of all replicas, and plan.replicas states those of each"
        raise PlanError("batch.microbatches", rule, "Leave it out", batch.microbatches)
    return _count_replicas(plan) * batch.microbatches


def _count_replicas(plan: LongPlan) -> int:
    return 1 if plan.has_stages else family_degree(plan, "data")


def _batch_of_classes(batch: Batch, plan: LongPlan) -> Batch:
    """Returns the batch of micro-batches of different lengths with defaults filled; sizes are those of the class of
    most tokens."""
    for key in ("micro", "microbatches", "sequence", "documents"):
        if key in batch.model_fields_set:
            rule = "it is of micro-batches that are all alike, and batch.lengths states the sizes of every class"
            raise PlanError(f"batch.{key}", rule, "Leave it out", getattr(batch, key))
    if plan.share != "even":
        rule = "by-speed shares micro-batches of equal length"
        raise PlanError("plan.share", rule, "List the classes of every entry of plan.replicas", plan.share)
    if batch.rounds:
        return _batch_of_rounds(batch, plan)
    if not batch.order and not plan.replicas:
        batch = batch.with_order(range(len(batch.lengths)))
    if plan.replicas and batch.order:
        rule = "every entry of plan.replicas lists the classes of its own micro-batches"
        raise PlanError("batch.order", rule, "Leave it out", list(batch.order))
    orders = _orders(batch, plan)
    for where, order in orders:
        if not order:
            raise PlanError(where, "it lists the classes of its micro-batches, as batch.lengths numbers them", "Add it")
        if max(order) >= len(batch.lengths):
            rule = f"batch.lengths has the classes 0 to {len(batch.lengths) - 1}"
            raise PlanError(where, rule, "Name one of them, or add a class", max(order))
    if unused := {*range(len(batch.lengths))} - {number for _, order in orders for number in order}:
        rule = f"no micro-batch is of class {min(unused)}"
        raise PlanError(f"batch.lengths[{min(unused)}]", rule, "Leave it out, or name it in the order")
    weights = [replica.dp for replica in plan.replicas] or [_count_replicas(plan)]
    sequences = [sum(batch.lengths[number].samples for number in order) for _, order in orders]
    total = sum(weight * samples for weight, samples in zip(weights, sequences, strict=True))
    if batch.total not in (None, total):
        rule = "it is the sequences of all micro-batches"
        raise PlanError("batch.global", rule, f"{total:,} would work", batch.total)
    return batch.model_copy(update={"total": total, **_sizes_of_largest(batch)})


def _sizes_of_largest(batch: Batch) -> Fields:
    """Returns the sizes of the class of most tokens."""
    largest = max(batch.lengths, key=lambda length: (length.padded_tokens, length.sequence))
    return {"micro": largest.samples, "sequence": largest.sequence, "documents": largest.documents}


def _batch_of_rounds(batch: Batch, plan: LongPlan) -> Batch:
    """Returns the batch of groups of ranks of different degrees with defaults filled."""
    if batch.order or plan.replicas or plan.has_stages:
        where = "batch.order" if batch.order else "plan.replicas" if plan.replicas else "plan.stages"
        raise PlanError(where, "batch.rounds states what every group of ranks runs", "Leave it out")
    usual = family_degree(plan, "sequence")
    ranks = family_degree(plan, "data") * usual
    run = [number for groups in batch.rounds for group in groups for number in group]
    if unused := {*range(len(batch.lengths))} - {*run}:
        rule = f"no micro-batch is of class {min(unused)}"
        raise PlanError(f"batch.lengths[{min(unused)}]", rule, "Leave it out, or name it in a round")
    if run and max(run) >= len(batch.lengths):
        rule = f"batch.lengths has the classes 0 to {len(batch.lengths) - 1}"
        raise PlanError("batch.rounds", rule, "Name one of them, or add a class", max(run))
    degrees = sorted({batch.degree_of(number, usual) for number in run})
    for smaller, larger in pairwise([*degrees, ranks]):
        if larger % smaller:
            rule = f"groups of {smaller} and of {larger} of the dp x cp = {ranks} ranks do not nest"
            raise PlanError("batch.lengths", rule, "Choose degrees of which one divides the next", degrees)
    for i, groups in enumerate(batch.rounds):
        _check_round(batch, groups, usual, ranks, f"batch.rounds[{i}]")
    total = sum(batch.lengths[number].samples for number in run)
    if batch.total not in (None, total):
        raise PlanError(
            "batch.global", "it is the sequences of all micro-batches", f"{total:,} would work", batch.total
        )
    return batch.model_copy(update={"total": total, **_sizes_of_largest(batch)})


def _check_round(batch: Batch, groups: Sequence[Sequence[int]], usual: int, ranks: int, where: str) -> None:
    """Checks that the groups of a round are all ranks, in their order."""
    first = 0
    for j, group in enumerate(groups):
        degrees = {batch.degree_of(number, usual) for number in group}
        if len(degrees) != 1:
            rule = "the micro-batches of a group have one context-parallel degree"
            raise PlanError(f"{where}[{j}]", rule, "Name classes of one cp", list(group))
        if first % (degree := degrees.pop()):
            rule = f"a group of {degree} ranks begins at a multiple of {degree}, and this one at {first}"
            raise PlanError(f"{where}[{j}]", rule, "Begin with the largest groups")
        first += degree
    if first != ranks:
        rule = f"the groups of a round have all of the dp x cp = {ranks} ranks"
        raise PlanError(where, rule, "Correct the cp of a class, or name another group", first)


def _orders(batch: Batch, plan: LongPlan) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the classes of the micro-batches of every kind of replica, with the key that states them."""
    if not plan.replicas:
        return [("batch.order", batch.order)]
    stated = [replica.microbatches if isinstance(replica.microbatches, tuple) else () for replica in plan.replicas]
    return [(f"plan.replicas[{i}].microbatches", order) for i, order in enumerate(stated)]


DEFAULT_RANK = 16
"""Default rank of adapters."""
