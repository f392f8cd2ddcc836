"""Runs the tables of refusals in tests/refusals/: wrong inputs, each with what the message says.

A file is a mapping of readers (READERS) to bases to lists of entries. An entry is the input, as changes of the base,
and

input: the whole input, where it is no change of the base.
text: the file of the reader (`Reader.file`), whose path is the input.
times: how often the input or the text is repeated.
files: further files, by their names.
says: the message from its beginning: where, the value, the rule, what would work; `...` stands for any text, and what
    follows its last words is free.
without: keys of the base (`a.b`) that the input lacks.
as: the class of the error, where it is not the usual one of the reader.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from meshcast.experiments.search.space.space import Space
from meshcast.hardware import load_cluster
from meshcast.hardware.errors import CatalogError, MeshcastError, ModelError, PlanError
from meshcast.simulator import simulate
from meshcast.simulator.formats.launch.bash.script import run_script
from meshcast.simulator.formats.launch.imported_job import OpenQuestions
from meshcast.simulator.formats.torch_schedule import parse_csv
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from tests.jobs import CLUSTERS, JOBS, MODELS, SPACES, change
from tests.launch_files import LAUNCHES, import_launch, load_launch
from tests.simulator.models.configs import CONFIGS, ROUND_TRIP, VISION

TABLES = Path(__file__).with_name("refusals")


class Reader(NamedTuple):
    """Reads an input that is wrong.

    read: reads it; its argument is the input, in a folder of its own.
    error: class of the error.
    bases: inputs by name, which entries change.
    file: name of the file that holds an input which is `text`.
    """

    read: Callable[[Any], object]
    error: type[MeshcastError]
    bases: Mapping[str, Any] = {}
    file: str = ""


def simulate_changed(job: dict[str, Any]) -> object:
    """Forecasts a job with `changes`, as `--set` gives them."""
    changes = job.pop("changes", [])
    return simulate(load_job(job, changes) if changes else job)


def span_space(job: dict[str, Any]) -> object:
    """Returns the space of plans that a job leaves open."""
    return Space(job, Path("."))


READERS: dict[str, Reader] = {
    "job": Reader(simulate_changed, PlanError, JOBS, "job.yaml"),
    "space": Reader(span_space, PlanError, SPACES),
    "model": Reader(load_model, ModelError, MODELS, "m.yaml"),
    "config": Reader(from_config, ModelError, {**ROUND_TRIP, **CONFIGS, **VISION}),
    "config file": Reader(load_model, ModelError, {}, "config.json"),
    "cluster": Reader(load_cluster, CatalogError, CLUSTERS, "c.yaml"),
    "launch file": Reader(import_launch, OpenQuestions, LAUNCHES),
    "changed launch file": Reader(load_launch, PlanError, LAUNCHES),
    "schedule": Reader(lambda text: parse_csv(text, "orders.csv").devices, PlanError),
    "script": Reader(lambda text: run_script(text, "run.sh"), PlanError),
}


class Refusal(NamedTuple):
    """An entry of a table, with its reader and the input as it is read."""

    reader: Reader
    input: Any
    files: dict[str, str | bytes]
    says: str
    error: type[MeshcastError]


def read_entry(reader: Reader, base: Any, entry: dict[str, Any]) -> Refusal:
    """Returns the refusal of an entry."""
    wrong: Any
    changes = dict(entry)
    says, error, times = changes.pop("says"), changes.pop("as", reader.error.__name__), changes.pop("times", 1)
    files, without = changes.pop("files", {}), changes.pop("without", [])
    if "text" in changes:
        wrong, files = reader.file, {**files, reader.file: changes["text"] * times}
    elif "input" in changes:
        wrong = changes["input"] if times == 1 else changes["input"] * times
    else:
        wrong = change(copy.deepcopy(base), changes)
    for path in without:
        *outer, key = path.split(".")
        reduce(dict.__getitem__, outer, wrong).pop(key)
    return Refusal(reader, wrong, files, says, ERRORS[error])


ERRORS = {error.__name__: error for error in (CatalogError, ModelError, OpenQuestions, PlanError)}


def read_tables() -> Iterator[Any]:
    """Yields the refusals of all tables, each with its id: its file, and how its message begins."""
    for path in sorted(TABLES.glob("*.yaml")):
        table = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)
        for name, bases in table.items():
            reader = READERS[name]
            for base, entries in bases.items():
                for entry in entries:
                    yield pytest.param(read_entry(reader, reader.bases.get(base, {}), entry), id=entry["says"][:60])


def matches(says: str, message: str) -> bool:
    """Tells whether a message begins with what is said, with any text for `...`."""
    return re.match(".*".join(map(re.escape, re.split(r" ?\.\.\. ?", says))), message, re.DOTALL) is not None


@pytest.mark.parametrize("refusal", [*read_tables()])
def test_refused(refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says where, which value, which rule and what would work."""
    monkeypatch.chdir(tmp_path)
    for name, content in refusal.files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(refusal.error) as refused:
        refusal.reader.read(refusal.input)
    message = str(refused.value).replace(f"{tmp_path}/", "")
    assert matches(refusal.says, message), message
    assert "pydantic" not in message and len(message) < 1_000
    assert "\n" not in message or refusal.error is OpenQuestions
    assert refused.value.where and refused.value.rule and refused.value.remedy
