"""Imports launch files as jobs, and exports jobs as launch files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshcast.hardware import load_cluster
from meshcast.hardware.errors import MeshcastError, PlanError, nearest, to_line
from meshcast.hardware.load import read_yaml
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.detect import detect_program
from meshcast.simulator.formats.launch.imported_job import Exported, ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import (
    compose_job,
    drop_idle_overlap,
    drop_inactive,
    find_preset_vocabulary,
    flatten_for_export,
    flatten_job,
    flatten_model,
    join_offload,
    nest,
)
from meshcast.simulator.formats.launch.launch_file import LaunchFile, LaunchOptions, parse_launch_text
from meshcast.simulator.formats.launch.program import LaunchFormat
from meshcast.simulator.formats.launch.programs.megatron_model import NO_VOCABULARY
from meshcast.simulator.formats.launch.programs.registry import EXPORTS, find_format
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import DEGREES, Keys, SomeKeys, Stated
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.job.plan_keys import ShortPlan
from meshcast.simulator.models.load import load_model

MODELS_ELSEWHERE = ("torchtitan", "deepspeed")
"""Programs whose models are code beside the launch file."""

LEFT_OPEN = ("model", "cluster")
"""Keys of a job that most launch files leave out."""

UNWRITTEN_KEYS = ("cluster.gpus_per_node", "cluster.architecture", "framework.release")
"""Keys that launch files depend on, and do not state."""

SHAPE_OF_FILE = "the preset of the shape that the file states"

DERIVED_FROM = (*DEGREES, "batch.micro", "batch.global")
"""Keys of a job that training programs derive others from: the global batch from the number of replicas, say."""

NODE, NODE_GPUS = "dgx-h100", 8
"""The node that is assumed: no launch file says what GPUs it runs on."""


def import_file(
    file: LaunchFile,
    changes: Iterable[str] = (),
    cluster: Any = None,
    model: Any = None,
    gpus: int | None = None,
    form: str | None = None,
) -> ImportedJob:
    """Returns the job of a launch file.

    changes: of the job, such as ``plan.tp=4``: what follows from them in the program, such as a global batch that the
        file leaves out, is derived from these, and what they say is not asked for.
    cluster, model: of the job, which most files do not state.
    gpus: their number, without a cluster.
    form: name of its format; None: what the file holds tells it.
    Raises PlanError for a file that cannot be read, OpenQuestions for a file that leaves open what decides the answer.
    """
    program = find_format(form) if form is not None else detect_program(file)
    answers = {name.strip(): value.strip() for name, _, value in (change.partition("=") for change in changes)}
    parts = {name: read_yaml(answers[name], f"--set {name}", PlanError).data for name in answers if name in LEFT_OPEN}
    cluster, model = parts.get("cluster", cluster), parts.get("model", model)
    answers |= {"model": str(model)} if model is not None else {}
    counts = {key: read_digits(value) for key, value in answers.items() if key in DERIVED_FROM}
    changed = {key: count for key, count in counts.items() if count}
    settings = program.read(file)
    if not settings:
        rule = f"it states no setting of {program.program}"
        raise PlanError(file.where, rule, f"Name a {program.suffix} file of {program.program}")
    shape = flatten_model(load_model(model, base=file.folder)) if model is not None else {}

    def read_filled(without: Stated | None = None) -> FilledReading:
        reading = Reading(program.program, file, {**settings}, answers, without)
        reading.keys |= shape
        _ask_about_script(reading)
        program.interpret(reading)
        return _fill_reading(reading, program, cluster, model, gpus, changed)

    filled = read_filled()
    filled.reading.sort_settings(program.verdicts, lambda stated: _find_influence(stated, filled, read_filled))
    return _finish_import(filled, program, changed)


def import_text(
    text: str,
    where: str,
    form: str,
    cluster: Any = None,
    model: Any = None,
    gpus: int | None = None,
    folder: Path = Path(),
    changes: Iterable[str] = (),
    options: LaunchOptions | None = None,
) -> ImportedJob:
    """Returns the job of the text of a launch file.

    where, form: name of the file and of its format, whose suffix counts where the name has none; see `import_file`.
    """
    file = parse_launch_text(text, where, Path(where).suffix.lower() or find_format(form).suffix, folder, options)
    return import_file(file, changes, cluster, model, gpus, form)


FORCED = ("moe_router_force_load_balancing", "debug.moe_force_load_balance")
"""Switches that spread tokens over experts evenly, for benchmarks: of Megatron-Core, and of torchtitan @b5bcd76c6
(config/configs.py)."""

RANDOM = ("mock_data", "mock")
"""Switches of tokens that are random, which a router spreads nearly evenly."""


def _fill_routing(reading: Reading, program: LaunchFormat, model: str | SomeKeys | None) -> None:
    """Sets how tokens are routed to experts that have several ranks, by the file or by a change of the plan: on data,
    as a router that learns does.

    model: what the file names; None where its keys state a shape.
    """
    keys = reading.keys
    moe = load_model(model, base=reading.file.folder).moe if model is not None else keys.get("model.moe.experts")
    has_ranks = keys.get("plan.ep", 1) > 1 or not reading.answers.keys().isdisjoint(("plan", "plan.ep"))
    if not moe or not has_ranks:
        return
    if reading.take_switch(*FORCED):
        reading.set_key("model.moe.routing", "forced-balanced", *FORCED)
    elif program.names_data(reading) and not reading.take_switch(*RANDOM) and keys.get("model.moe.routing") is None:
        reading.set_key("model.moe.routing", program.routing)


def _ask_about_script(reading: Reading) -> None:
    """Asks about the places where the reader of a script was lost, and which of several trainings is meant."""
    file = reading.file
    if file.launch is None or file.run is None:
        return
    for place in dict.fromkeys((*file.run.lost, *file.launch.lost, *file.launch.command.lost)):
        where = Stated("", "", f"{file.where}:{place.line}")
        if "--args" in place.why:  # the script as it lies there has none
            reading.approximate(replace(where, shown='"$@"'), f"the script is forecast without arguments: {place.why}")
        else:
            reading.ask(where, place.why, *(f"--env {name}=..." for name in place.variables), "--assume-defaults")
    if len(file.rivals) > 1:
        listed = ", ".join(f"{number}: {launch.entry} ({launch.place})" for number, launch in enumerate(file.rivals, 1))
        reading.ask(None, f"it starts {len(file.rivals)} trainings, {listed}", "--start 1")


def _degrees(changed: Keys) -> Keys:
    return {key: value for key, value in changed.items() if key in DEGREES}


@dataclass(frozen=True)
class FilledReading:
    """A reading with what its program leaves to others.

    model, cluster: of the job; no model where the file states a shape.
    microbatches: of a replica, if the global batch is derived from them.
    """

    reading: Reading
    model: Any
    cluster: Any
    microbatches: int | None

    @property
    def keys(self) -> Keys:
        """The keys that the job is composed of, with its cluster."""
        return {**self.reading.keys, "cluster": self.cluster, "cluster.gpus": None}


def _find_influence(
    stated: Stated, filled: FilledReading, read_filled: Callable[[Stated], FilledReading]
) -> SomeKeys | None:
    """Returns the keys that a setting changes, with their values; None if the file cannot be read without it."""
    try:
        rest = read_filled(stated).keys
    except PlanError:
        return None
    keys = filled.keys
    return {key: keys.get(key) for key in {**keys, **rest} if keys.get(key) != rest.get(key)}


def _fill_reading(
    reading: Reading, program: LaunchFormat, cluster: Any, model: Any, gpus: int | None, changed: Keys
) -> FilledReading:
    """Fills in the model, the cluster, the batch and the copies of a reading."""
    keys, file = reading.keys, reading.file
    keys |= _degrees(changed)
    model = model if model is not None else _read_model(reading, program)
    cluster = _choose_cluster(reading, cluster, gpus)
    loaded = load_cluster(cluster, base=file.folder)
    microbatches = _fill_batch(reading, loaded.gpus, changed)
    if "batch.sequence" not in keys and model is not None:
        sequence = load_model(model, base=file.folder).seq
        reading.ask_key("batch.sequence", sequence, "the file states no length of sequences")
    _fill_sharding(reading, loaded.gpus, loaded.gpus_per_node, changed)
    _fill_routing(reading, program, model)
    return FilledReading(reading, model, cluster, microbatches)


def _finish_import(filled: FilledReading, program: LaunchFormat, changed: Keys) -> ImportedJob:
    """Returns the job of a reading whose settings are sorted."""
    reading, model, cluster = filled.reading, filled.model, filled.cluster
    keys, file = reading.keys, reading.file
    questions = reading.findings.questions
    if questions and not file.options.assume_defaults:
        raise OpenQuestions(file.where, tuple(questions))
    if questions:
        keys["framework.set.regime"] = "unknown"
    places = {key: origin.where for key, origin in reading.origins.items() if not isinstance(origin, str)}
    stated = frozenset(places)
    places |= {key: f"--set {key}" for key in _degrees(changed)}
    plan_changes = _read_plan_changes(reading.answers)

    def compose(keys: SomeKeys) -> dict[str, Any]:
        return compose_job(keys, cluster, model, file.folder, stated, plan_changes)

    with locate_errors(file.where, "", places):
        _fill_vocabulary(reading)
        job = compose(keys)
        bounding = [(entry, compose({**keys, **entry.other})) for entry in reading.findings.approximated if entry.other]
    return ImportedJob(
        job,
        _comment_keys(reading, None if model is not None else job["model"]),
        reading.assumed,
        {key: keys.get(key) for key in reading.assumed},
        reading.findings,
        file.where,
        program.name,
        places,
        filled.microbatches,
        nest(keys, "run.checkpoints"),
        tuple(bounding),
        reading.stated,
    )


def _read_plan_changes(answers: Mapping[str, str]) -> dict[str, Any]:
    """Returns the changes of keys of a short plan other than degrees, for the plan may need to be in long form."""
    fields = {field.removeprefix("plan."): value for field, value in answers.items() if field.startswith("plan.")}
    values = {
        key: read_yaml(value, f"--set plan.{key}", PlanError).data
        for key, value in fields.items()
        if key in ShortPlan.model_fields and f"plan.{key}" not in DEGREES
    }
    return {key: value for key, value in values.items() if not _is_open(value)}


def _is_open(value: Any) -> bool:
    """Returns whether a value leaves a choice to a search."""
    return value == "auto" or (isinstance(value, list) and "auto" in value)


def _read_model(reading: Reading, program: LaunchFormat) -> Any:
    """Returns the preset that a file names; None if it states a shape. Raises OpenQuestions if it does neither."""
    if "model.preset" in reading.keys:
        return reading.keys["model.preset"]
    if not {"model.layers", "model.hidden", "model.heads"} <= reading.keys.keys():
        why = "it does not state the layers, hidden size and heads of a model"
        why += f", which {program.program} takes from elsewhere" if program.name in MODELS_ELSEWHERE else ""
        if not any(question.answers[:1] == ("model=llama3-8b",) for question in reading.findings.questions):
            reading.ask(None, why, "model=llama3-8b")
        raise OpenQuestions(reading.file.where, tuple(reading.findings.questions))
    return None


def _comment_keys(reading: Reading, model: Any) -> dict[str, str]:
    """Returns by key of the job where its value is from. model: that of the shape that the file states, if any."""
    comments = {
        key: f"{origin.shown}" if not isinstance(origin, str) else origin for key, origin in reading.origins.items()
    }
    comments |= {key: f"assumed: {why}" for key, why in reading.assumed.items()}
    comments.pop("framework.name", None)
    if "run.steps" in comments:
        comments["run.tokens"] = comments["run.steps"]
    if isinstance(model, str) or (model is not None and "preset" in model):
        comments["model" if isinstance(model, str) else "model.preset"] = SHAPE_OF_FILE
    return comments


def _fill_vocabulary(reading: Reading) -> None:
    """Fills in a vocabulary that nothing tells: that of a preset of otherwise the same shape, if there is one."""
    if reading.assumed.get("model.vocab", "").startswith(NO_VOCABULARY):
        preset = find_preset_vocabulary(nest(reading.keys, "model"))
        if preset is not None:
            name, count = preset
            reading.assume("model.vocab", count, f"{NO_VOCABULARY}{count:,} of {name}, which has this shape")


def _choose_cluster(reading: Reading, cluster: Any, gpus: int | None) -> Any:
    """Returns the cluster of the job: that stated, or as many GPUs of the usual kind as the file, or its degrees,
    say."""
    keys = reading.keys
    if cluster is not None:
        return cluster
    why = f"{reading.program} does not say which GPUs"
    stated = gpus or keys.get("cluster.gpus")
    least = _fewest_gpus(reading.keys_of_file())
    total: int = least if "plan.dp" in keys else math.lcm(least, NODE_GPUS)
    if stated and (gpus or stated % least == 0):
        total = stated
    if stated is None:
        why = f"{why}, nor how many: the fewest nodes for its degrees"
    elif total != stated:
        why = f"{why}; its degrees do not divide the {stated} that it states: the fewest nodes for them"
    if (each := keys.get("cluster.gpus_per_node", NODE_GPUS)) != NODE_GPUS:
        why = f"{why}; it has {each} on each of its nodes, where nodes of {NODE_GPUS} are assumed"
    nodes = -(-total // NODE_GPUS)
    assumed: Any = f"{NODE}:{nodes}" if total == nodes * NODE_GPUS else {"node": NODE, "nodes": nodes, "gpus": total}
    reading.assume("cluster", assumed, why)
    return assumed


def _fewest_gpus(keys: Keys) -> int:
    """Returns the fewest GPUs for the degrees of a plan."""
    ranks = math.prod(keys.get(f"plan.{key}", 1) for key in ("tp", "pp", "cp", "dp"))
    if "plan.dp" not in keys:
        ranks *= keys.get("plan.replicate", 1)
    return math.lcm(ranks, keys.get("plan.pp", 1) * keys.get("plan.ep", 1) * keys.get("plan.etp", 1))


def _fill_batch(reading: Reading, gpus: int, changed: Keys) -> int | None:
    """Fills in a global batch that the file leaves out: a micro-batch of each replica, or what the program accumulates.

    changed: see `import_text`.
    Returns the micro-batches of a replica, if the global batch is derived from them.
    """
    keys, now = reading.keys, {**reading.keys, **changed}
    if "batch.samples.join" in keys:  # it follows from the samples
        for key in ("batch.global", "batch.micro", "batch.accumulated", "run.steps"):
            keys.pop(key, None)
        return None
    accumulated, per_rank = keys.pop("batch.accumulated", 1), keys.pop("batch.per_rank", None)
    drained = keys.pop("batch.drained", None)
    ranks = _ranks_of_replica(now)
    if gpus % ranks:
        return None
    replicas = gpus // ranks
    if per_rank is not None and now["batch.global"] % (per_rank * replicas) == 0:
        micro = now["batch.global"] // (per_rank * replicas)
        reading.set_key("batch.micro", micro, *_names_behind(reading, "batch.global"))
    if drained and now.get("batch.global", 0) > replicas * drained:
        origin, rounds = reading.origins.get("batch.global"), now["batch.global"] / (replicas * drained)
        reading.approximate(
            origin if isinstance(origin, Stated) else None,
            f"{reading.program} accumulates gradients over {rounds:.4g} passes through the pipeline of {drained} "
            "sequences each, and drains it after every one; the forecast has all micro-batches in one pass",
            "the forecast is too fast",
        )
    if keys.get("batch.global") is not None:
        return None
    total = replicas * now.get("batch.micro", 1) * accumulated
    reading.set_key("batch.global", total, *_names_behind(reading, "batch.accumulated"))
    return int(accumulated)


def _names_behind(reading: Reading, key: str) -> list[str]:
    """Returns the names of the setting behind a key."""
    origin = reading.origins.get(key)
    return [name for name, stated in reading.stated.items() if stated is origin]


def _ranks_of_replica(keys: Keys) -> int:
    """Returns the ranks of a replica of the model."""
    return math.prod(keys.get(f"plan.{key}", 1) for key in ("tp", "pp", "cp"))


def _fill_sharding(reading: Reading, gpus: int, node: int, changed: Keys) -> None:
    """Fills in the copies of sharded states, of groups that a file states by their size, or as the GPUs of a node."""
    keys = reading.keys
    origin = reading.origins.get("plan.shard_nodes") or reading.origins.get("plan.mics")
    size = node if keys.pop("plan.shard_nodes", False) else keys.pop("plan.mics", None)
    ranks = _ranks_of_replica({**keys, **changed})
    if size and gpus % (ranks * size) == 0:
        keys["plan.replicate"] = gpus // (ranks * size)
        reading.origins["plan.replicate"] = origin or ""


def export_job(
    job: Job, form: str, load: Callable[[dict[str, Any], Path], Job], check: Callable[[Job], object]
) -> Exported:
    """Exports a job as a launch file, with a header that lists what the file cannot say.

    load: reads a job in a folder (`simulator.loading.load.load_job`).
    check: raises a MeshcastError for a job that no program could run (`simulator.forecast.planning.resolve_plan`).
    What the file cannot say is told by reading it back, on the cluster of the job: every key that then differs.
    Raises PlanError, with these keys, where no program could run what the file says.
    """
    check(job)
    chosen = find_format(form)
    if chosen.write is None:
        raise PlanError("--to", "such files are read, not written", nearest(form, EXPORTS), form)
    keys = flatten_for_export(job)
    text = chosen.write(keys, [])
    cluster, model, silent = job.as_written["cluster"], job.as_written["model"], LaunchOptions(assume_defaults=True)
    try:
        stated = model if form in MODELS_ELSEWHERE else None
        back = import_text(text, "exported file", form, cluster, stated, folder=job.folder, options=silent)
    except OpenQuestions:  # a config.json beside the file is the model
        back = import_text(text, "exported file", form, cluster, model, folder=job.folder, options=silent)
    read = load(back.job, job.folder)
    unsaid = compare_keys(keys, flatten_job(read))
    try:
        check(read)
    except MeshcastError as error:
        differing = "; ".join(_describe_difference(key, *values) for key, values in unsaid.items())
        rule = f"{chosen.program} cannot be told {differing}. The rest does not run ({error.where}: {error.rule})"
        raise PlanError("--to", rule, "Change these keys of the job, or name another program", form) from None
    header = [f"Made by meshcast export --to {form}, for {job.cluster.gpus} GPUs."]
    header += [*describe_unsaid(unsaid, chosen.program, job), *chosen.remark(keys)]
    suffix = chosen.write_suffix(keys) if chosen.write_suffix is not None else chosen.suffix
    return Exported(chosen.write(keys, [to_line(line) for line in header]), suffix, unsaid)


def compare_keys(wanted: SomeKeys, actual: SomeKeys) -> dict[str, tuple[Any, Any]]:
    """Returns the keys in which two jobs differ, with both values.

    Traits of another framework, and options of another scheme, do not count on top of its name.
    """
    wanted, actual = (drop_idle_overlap(drop_inactive(keys)) for keys in (wanted, actual))
    if {"zero-offload", "zero-infinity"} & {wanted.get("plan.data"), actual.get("plan.data")}:
        wanted, actual = join_offload(wanted), join_offload(actual)
    differing = {
        key: (wanted.get(key), actual.get(key))
        for key in {**wanted, **actual}
        if key not in UNWRITTEN_KEYS and wanted.get(key) != actual.get(key)
    }
    if actual.get("model.positions") != "learned":  # the default length of sequences, where the batch states it
        for key in ("model.seq", "model.position_rows"):
            differing.pop(key, None)
    names = {key: "framework.set." if key == "framework.name" else f"{key}." for key in differing}
    return {
        key: values
        for key, values in differing.items()
        if not any(key.startswith(below) for name, below in names.items())
    }


def describe_unsaid(unsaid: Mapping[str, tuple[Any, Any]], program: str, job: Job) -> list[str]:
    """Returns the lines of a header on what a file cannot say."""
    cluster = job.as_written["cluster"]
    named = f": {cluster}" if isinstance(cluster, str) else ""
    lines = [f"{program} is not told which GPUs to run on{named}."]
    if unsaid:
        lines.append(f"What {program} cannot be told here (what the job says, and what this file means):")
        lines += [f"  {_describe_difference(key, *values)}" for key, values in unsaid.items()]
    else:
        lines.append("It says everything else that the job says.")
    return lines


def _describe_difference(key: str, mine: object, theirs: object) -> str:
    return f"{key}: {_show(mine)}; here {_show(theirs)}"


def _show(value: Any) -> str:
    """Returns a value in a single line."""
    text = "none" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) < 60 else text[:57] + "..."
