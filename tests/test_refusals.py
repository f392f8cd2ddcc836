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
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from meshcast import search
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem
from meshcast.experiments.search.space.space import Space
from meshcast.experiments.sweeps.run import load_sweep
from meshcast.experiments.sweeps.selection import check_rows
from meshcast.hardware import load_cluster
from meshcast.hardware.errors import CatalogError, MeshcastError, ModelError, PlanError
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.simulator import simulate
from meshcast.simulator.costs.calibration.check import read_checked
from meshcast.simulator.formats.expert_counts import read_counts, read_trace
from meshcast.simulator.formats.launch.bash.script import run_script
from meshcast.simulator.formats.launch.imported_job import OpenQuestions
from meshcast.simulator.formats.torch_schedule import parse_csv
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.runs.failure_log import read_failure_log
from meshcast.simulator.runs.inputs import make_run
from meshcast.simulator.runs.least_run import LeastRun
from meshcast.validation.pipelines.cases import ScheduleCase, period, replay
from tests.experiments.cli.samples import COMMAND_FILES, run
from tests.experiments.planning.conftest import HUGE
from tests.experiments.search.spaces import COMPARED, SEARCHES
from tests.hardware.test_catalog import Box
from tests.jobs import CLUSTERS, JOBS, MODELS, ROWS, SPACES, SWEEPS, change
from tests.launch_files import LAUNCHES, import_launch, load_launch
from tests.simulator.models.configs import CONFIGS, ROUND_TRIP, VISION
from tests.validation.refused import READERS as MEASURED

TABLES = Path(__file__).with_name("refusals")


class Reader(NamedTuple):
    """Reads an input that is wrong.

    read: reads it; its argument is the input, in a folder of its own.
    error: class of the error.
    bases: inputs by name, which entries change.
    file: name of the file that holds an input which is `text`.
    files: files that are there for every input, by their names.
    """

    read: Callable[[Any], object]
    error: type[MeshcastError]
    bases: Mapping[str, Any] = {}
    file: str = ""
    files: Mapping[str, str] = {}


def simulate_changed(job: dict[str, Any]) -> object:
    """Forecasts a job with `changes`, as `--set` gives them."""
    changes = job.pop("changes", [])
    return simulate(load_job(job, changes) if changes else job)


def make_changed_run(job: dict[str, Any]) -> object:
    """Returns the run of a job, with four replicas unless its plan says otherwise."""
    usual = {"model": {"preset": "llama3-8b", "layers": 8}, "cluster": "dgx-h100:4", "batch": {"global": 64}}
    return make_run(simulate(load_job({**usual, "plan": {"tp": 2, "pp": 4, "dp": 4}, **job})))


def span_space(job: dict[str, Any]) -> object:
    """Returns the space of plans that a job leaves open."""
    return Space(job, Path("."))


def play_case(case: dict[str, Any]) -> object:
    """Plays a case of `meshcast validate pipeline`."""
    checked = validate_data(ScheduleCase, case, "case", PlanError)
    return period(checked), replay(checked)


def read_axes(mesh: dict[str, Any]) -> object:
    """Returns a mesh whose ranks a view reads again."""
    return Mesh(mesh["axes"], {"experts": mesh["view"]} if mesh["view"] else {}, tuple(mesh["axes"]))


def search_plans(job: Any) -> object:
    """Searches the plans of a job with `options`, as those of `meshcast.search`."""
    return search(job, **(job.pop("options", {}) if isinstance(job, dict) else {}))


def compare_plan(job: dict[str, Any]) -> object:
    """Holds a plan against the best one of a search."""
    return search(SEARCHES["tiny"], compare=[job])


def plan_problem(problem: dict[str, Any]) -> object:
    """Has a `planner` plan a job, or a profile with `levels` of (GPUs, bytes/s) and other settings."""
    planner, levels = find_planner(problem.pop("planner", "pipedream"))(), problem.pop("levels", [])
    job = problem.pop("job", None)
    levels = [NetworkLevel(*level) for level in levels]
    return planner.plan(JobProblem(job) if job else ProfileProblem(levels=levels, **problem), SearchBudget(steps=100))


def run_command(line: str) -> object:
    """Runs a command line in this process; raises the error whose message it prints, after its remarks."""
    there = sorted(Path().rglob("*"))
    ended = run(*shlex.split(line))
    assert sorted(Path().rglob("*")) == there, "it is refused before anything is written"
    assert ended.exc_info and ended.exc_info[1], ended.output
    error = ended.exc_info[1].__context__
    if not isinstance(error, MeshcastError):  # typer's, of words that are none of the command
        raise PlanError("usage", f"{error}", "See --help")
    assert (ended.exit_code, ended.stdout) == (2, "") and ended.stderr.endswith(f"meshcast: {error}\n"), ended.output
    raise error


READERS: dict[str, Reader] = {
    "job": Reader(simulate_changed, PlanError, JOBS, "job.yaml"),
    "space": Reader(span_space, PlanError, SPACES),
    "model": Reader(load_model, ModelError, MODELS, "m.yaml"),
    "config": Reader(from_config, ModelError, {**ROUND_TRIP, **CONFIGS, **VISION}),
    "config file": Reader(load_model, ModelError, {}, "config.json"),
    "cluster": Reader(load_cluster, CatalogError, CLUSTERS, "c.yaml"),
    "job file": Reader(load_job, PlanError, {}, "job.yaml"),
    "value": Reader(lambda fields: validate_data(Box, fields, "box"), CatalogError),
    "yaml": Reader(read_yaml, CatalogError),
    "failure log": Reader(lambda name: read_failure_log(Path(name), nodes=4), PlanError, {}, "failures.csv"),
    "run": Reader(make_changed_run, PlanError),
    "least run": Reader(lambda job: LeastRun(load_job({**JOBS["gpt"], **job})), PlanError),
    "steps file": Reader(lambda name: read_checked(Path(name)), CatalogError, {}, "steps.yaml"),
    "pipeline": Reader(play_case, PlanError, {"": {"t_f": 1, "t_b": 1, "t_w": 1}}),
    "mesh": Reader(read_axes, PlanError),
    "scheme": Reader(lambda use: find_scheme(use, "plan.schedule"), PlanError),
    "expert counts": Reader(lambda path: read_counts(Path(path)), PlanError, {}, "a.json"),
    "expert trace": Reader(lambda path: read_trace(Path(path)), PlanError, {}, "a.json"),
    "launch file": Reader(import_launch, OpenQuestions, LAUNCHES),
    "changed launch file": Reader(load_launch, PlanError, LAUNCHES),
    "schedule": Reader(lambda text: parse_csv(text, "orders.csv").devices, PlanError),
    "script": Reader(lambda text: run_script(text, "run.sh"), PlanError),
    **{name: Reader(*reader) for name, reader in MEASURED.items()},
    "search": Reader(search_plans, PlanError, SEARCHES, "job.yaml"),
    "compared plan": Reader(compare_plan, PlanError, COMPARED),
    "planner": Reader(plan_problem, PlanError, {"huge": {"job": HUGE}}),
    "calibration": Reader(lambda name: read_checked(Path(name)), CatalogError, file="h100-sxm.yaml"),
    "sweep": Reader(load_sweep, PlanError, SWEEPS, "sweep.yaml"),
    "rows": Reader(lambda rows: check_rows("rows.parquet", rows, "Name a file"), PlanError, ROWS),
    "command": Reader(run_command, MeshcastError, files=COMMAND_FILES),
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
    files, without = {**reader.files, **changes.pop("files", {})}, changes.pop("without", [])
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


ERRORS = {error.__name__: error for error in (CatalogError, MeshcastError, ModelError, OpenQuestions, PlanError)}


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all inputs are read, one after the other; a folder for each takes a third of the time."""
    return tmp_path_factory.mktemp("refusals")


@pytest.mark.parametrize("refusal", [*read_tables()])
def test_refused(refusal: Refusal, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says where, which value, which rule and what would work."""
    monkeypatch.chdir(folder)
    for name, content in refusal.files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(refusal.error) as refused:
        refusal.reader.read(refusal.input)
    for path in Path().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    message = str(refused.value).replace(f"{folder}/", "")
    assert matches(refusal.says, message), message
    assert "pydantic" not in message and len(message) < 1_000
    assert "\n" not in message or refusal.error is OpenQuestions
    assert refused.value.where and refused.value.rule and refused.value.remedy
    told = json.loads(json.dumps(refused.value.to_dict()))
    assert told.keys() - {"questions"} == {"kind", "where", "value", "rule", "remedy"}
