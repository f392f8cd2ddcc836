"""What the reader of launch files makes of an entry: right, approximated, asked, refused, or another plan."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.imported_job import ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, reading_launch_files
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job, read_launch_job
from meshcast.simulator.models.load import find_model, load_model
from meshcast.simulator.models.model import Model
from tools.inputs.corpus import ExpectedShape, Facts, PublicFile

Outcome = Literal["right", "approximated", "asked", "refused", "asked needlessly", "not read", "another plan"]
"""`right`, `asked` and `refused` are what the entry expects; `approximated` is forecast with another plan, and says so;
`asked needlessly` and `not read` give no answer to a file that holds all that is needed; `another plan` is forecast
wrongly without a word."""

EXPECTED: tuple[Outcome, ...] = ("right", "asked", "refused")

SCHEDULES = {"interleaved": "interleaved-1f1b", "looped-bfs": "breadth-first"}
"""Names of schedules by those of the corpus, where they differ."""

STAGES = {
    "zero-offload": "zero-2",
    "zero-infinity": "zero-3",
    "mics": "zero-3",
    "zero-plus-plus": "zero-3",
    "zenflow": "zero-2",
}
"""What data-parallel ranks share out, by data schemes that say more."""

RECOMPUTED = {"operators": "selective-op"}
"""What is recomputed, in the words of the corpus."""

KEYS = {
    **{"tp": "plan.tp", "pp": "plan.pp", "cp": "plan.cp", "ep": "plan.ep", "replicate": "plan.replicate"},
    **{"chunks": "plan.pipeline.chunks", "precision": "precision.compute", "sequence": "batch.sequence"},
    **{"micro": "batch.micro", "global": "batch.global", "lora_rank": "train.rank"},
}
"""Keys of a job by facts that are such a key."""

ASKED_BY = {
    **{"model": ("model",), "cluster": ("cluster",), "gpus": ("cluster",), "mode": ("train",), "command": ("--",)},
    "lora_rank": ("train.rank",),
    **{"sequence": ("batch.sequence",), "micro": ("batch.micro",), "global": ("batch.",), "accumulate": ("batch.",)},
    **{"precision": ("precision",), "recompute": ("plan.recompute",), "sharding": ("plan.zero", "plan.fsdp")},
}
"""Beginnings of the keys that answer a question about a fact; of other facts a key of the plan does."""


@dataclass(frozen=True)
class Judgement:
    """What the reader made of an entry. misses: facts that differ, in words; or what it said instead of an answer."""

    entry: PublicFile
    outcome: Outcome
    misses: tuple[str, ...] = ()

    @property
    def is_expected(self) -> bool:
        """Whether the reader did what the entry expects."""
        return self.outcome in EXPECTED


def judge(entry: PublicFile, path: Path) -> Judgement:
    """Reads the file of an entry and holds what becomes of it against its facts. path: of the file."""
    options = read_command(entry.command)
    changes = [f"{key}={_write(value)}" for key, value in entry.given.items()]
    try:
        with reading_launch_files(options):
            imported, job = _read(path, changes)
    except OpenQuestions as asked:
        return _judge_questions(entry, asked, path, changes, options)
    except MeshcastError as error:
        return Judgement(entry, "refused" if entry.refuse else "not read", (str(error),))
    if entry.refuse and not entry.stated:
        return Judgement(entry, "another plan", (f"it is to be refused: {entry.refuse}",))
    differing = list(_compare(entry.expect, imported, job))
    named = _find_named(entry.expect, imported, job)
    misses = [_describe(*fact) for fact in differing if fact[0] not in named]
    misses += _find_unasked(entry, imported)
    if differing and not misses:
        return Judgement(entry, "approximated", tuple(_describe(*fact) for fact in differing))
    return Judgement(entry, "another plan" if misses else "asked" if entry.asks else "right", tuple(misses))


def read_command(command: str) -> LaunchOptions:
    """Returns the options of a command line such as ``--args '3 8' --env TP=4``."""
    words, environment, arguments = shlex.split(command), dict[str, str](), list[str]()
    for option, word in zip(words[::2], words[1::2], strict=True):
        if option == "--env":
            name, _, value = word.partition("=")
            environment[name] = value
        else:
            arguments += shlex.split(word)
    return LaunchOptions(environment, tuple(arguments))


def _read(path: Path, changes: list[str]) -> tuple[ImportedJob, Job]:
    read = read_launch_job(path, changes)
    assert read.launch is not None
    return read.launch, load_job(read.data, base=path.parent)


def _write(value: Any) -> str:
    """Returns a value of a change: words stay as they are."""
    return value if isinstance(value, str) else repr(value).replace("'", '"')


def _judge_questions(
    entry: PublicFile, asked: OpenQuestions, path: Path, changes: list[str], options: LaunchOptions
) -> Judgement:
    """Judges a file that was answered with questions: the facts that it holds are right nevertheless."""
    whys = tuple(str(question) for question in asked.questions)
    if not (entry.asks or entry.refuse):
        return Judgement(entry, "asked needlessly", whys)
    assumed = LaunchOptions(
        options.environment, options.arguments, options.program, options.start, assume_defaults=True
    )
    try:
        with reading_launch_files(assumed):
            imported, job = _read(path, changes)
    except MeshcastError:
        return Judgement(entry, "asked")
    named = _find_named(entry.expect, imported, job)
    misses = [
        f"{_describe(*fact)}, and not asked"
        for fact in _compare(entry.expect, imported, job)
        if fact[0] not in named and not any(_answers(question.answers, fact[0]) for question in asked.questions)
    ]
    return Judgement(entry, "another plan" if misses else "asked", tuple(misses))


def _answers(answers: tuple[str, ...], fact: str) -> bool:
    """Returns whether what a question takes as an answer is about a fact."""
    return any(word.startswith(ASKED_BY.get(fact, ("plan.", "--"))) for word in answers)


def _find_unasked(entry: PublicFile, imported: ImportedJob) -> Iterator[str]:
    """Yields what is to be asked for, and was neither asked for nor named as assumed."""
    named = {*imported.assumed, *(key.partition(".")[0] for key in imported.assumed)}
    for fact in entry.asks:
        if not any(key.startswith(ASKED_BY.get(fact, ("plan.",))) for key in named):
            yield f"{fact}: nothing determines it, and it was not asked for"


def _describe(name: str, expected: Any, read: Any) -> str:
    return f"{name}: {expected} expected, {read} read"


def _find_named(facts: Facts, imported: ImportedJob, job: Job) -> set[str]:
    """Returns the facts that differ and that an approximated setting names: the forecast that bounds its error has the
    expected key, or its reason says what lies in host memory instead."""
    differing = {name for name, _, _ in _compare(facts, imported, job)}
    named: set[str] = set()
    for entry in imported.findings.approximated:
        if entry.other:
            named |= differing - {name for name, _, _ in _compare(facts, imported, job, entry.other)}
        if "host memory" in entry.why:
            named |= differing & {"offload"}
    return named


def _compare(
    facts: Facts, imported: ImportedJob, job: Job, changed: Mapping[str, Any] = {}
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the facts that differ: name, what is expected, what was read. changed: keys of another forecast."""
    expected = facts.model_dump(exclude_none=True, by_alias=True)
    keys = {key: value for key, value in {**flatten_job(job), **changed}.items() if value is not None}
    read: dict[str, Any] = {name: keys.get(key) for name, key in KEYS.items()}
    read |= {name: read[name] or 1 for name in ("tp", "pp", "cp", "ep", "replicate", "chunks")}
    read |= _read_sharding(keys) | _read_optimizer(expected.get("optimizer", ""), imported)
    read |= _count_pairs(imported)
    read["gpus"] = job.cluster.gpus
    read["accumulate"] = job.batch.total // (job.batch.micro * keys["plan.dp"]) if job.batch.total else None
    read["schedule"] = keys.get("plan.pipeline")
    read["mode"] = _read_mode(expected.get("mode", ""), keys, imported)
    recompute = keys["plan.recompute"]
    read["recompute"] = RECOMPUTED.get(recompute, recompute)
    for name, value in expected.items():
        wanted = SCHEDULES.get(value, value) if name == "schedule" else value
        if name == "model":
            yield from _compare_models(facts.model, job.model)
        elif name == "schedule" and read["pp"] == 1:
            continue
        elif name in read and (sorted(read[name]) != sorted(wanted) if name == "offload" else read[name] != wanted):
            yield name, wanted, read[name]


def _count_pairs(imported: ImportedJob) -> dict[str, Any]:
    """Returns the batches of settings that count pairs of preferences: facts count a pair once, a job its two
    sequences."""
    stated = {key: entry for entry in imported.findings.taken for key in entry.keys if _is_number(entry.value)}
    facts = {"micro": "batch.micro", "global": "batch.global"}
    counts = {fact: (str(stated[key].value), stated[key].keys[key]) for fact, key in facts.items() if key in stated}
    return {fact: int(word) for fact, (word, number) in counts.items() if word.isdecimal() and number == 2 * int(word)}


def _is_number(value: Any) -> bool:
    """Returns whether a setting states a count: if it names a file, all keys that the file changes are listed."""
    return str(value).isdecimal()


def _read_sharding(keys: dict[str, Any]) -> dict[str, Any]:
    """Returns what data-parallel ranks share out, and what lies in host memory."""
    data = keys["plan.data"]
    sharding = STAGES.get(data, data)
    if data == "fsdp" and keys.get("plan.data.reshard") is False:
        sharding = "fsdp-grad-op"
    offload = set(keys.get("plan.offload", ()))
    if data in ("zero-offload", "zero-infinity", "zenflow"):
        offload.add("optimizer")
    if keys.get("plan.data.parameters", "gpu") != "gpu":
        offload.add("parameters")
    if keys.get("plan.data.offload"):  # all that FSDP shards
        offload |= {"optimizer", "parameters"}
    return {"sharding": sharding, "offload": sorted(offload)}


def _read_optimizer(expected: str, imported: ImportedJob) -> dict[str, str]:
    """Compares the optimizer: a job has the states of others than Adam, or names them among what is not followed."""
    unfollowed = " ".join(shown for shown, _ in imported.findings.unfollowed).lower()
    is_adam = re.fullmatch(r"(fused-?)?adamw?(-fused|-torch)*", expected) is not None
    is_told = "optimizer" in imported.job or "optim" in unfollowed
    return {"optimizer": expected if is_adam or is_told else "adamw"}


def _read_mode(expected: str, keys: dict[str, Any], imported: ImportedJob) -> str:
    """Returns which weights are trained; partly frozen ones a job has not, so they are to be named as not followed."""
    mode = keys.get("train.mode", "full")
    findings = imported.findings
    unfollowed = bool(findings.approximated or findings.questions)
    if (expected, mode) == ("freeze", "full") and unfollowed:
        return expected
    return expected if expected == "qlora" and keys.get("train.frozen_weights") else str(mode)


def _compare_models(expected: ExpectedShape | str | None, model: Model) -> Iterator[tuple[str, Any, Any]]:
    """Yields the sizes of a model that differ; of a name, if there is a preset of it."""
    if isinstance(expected, str):
        preset = find_model(expected)
        if preset is not None and load_model(preset).parameters != model.parameters:
            yield "model", preset, f"{model.parameters / 1e9:.2f} B parameters"
        return
    sizes = expected.model_dump(exclude_none=True) if expected is not None else {}
    experts = model.moe
    read = {name: getattr(model, name, None) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    if experts is not None:
        read |= {"experts": experts.experts, "top_k": experts.top_k, "expert_ffn": experts.expert_ffn}
    for name, size in sizes.items():
        if read.get(name) != size and not (name == "vocab" and _is_padded(size, read["vocab"])):
            yield f"model.{name}", size, read.get(name)


def _is_padded(stated: int, read: int | None) -> bool:
    """Returns whether a vocabulary is the stated one, padded."""
    return read is not None and stated <= read < stated * 1.05 + 1024
