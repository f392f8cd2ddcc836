"""Runs the tables of readings/: what settings of launch files mean.

A table is a mapping of laws to launch files of tests/launch_files.py to lists of entries. An entry changes the file,
and says what the job is then.

without: keys of the launch file that it lacks (`settings.bf16`).
files: companions, by their names.
means: keys of the job; those that are null are not there.
plan: the plan of the job as a whole, in short keys.
job: keys of the job as the import writes them.
told: approximated settings, with words of what is said of each; those that are null are not approximated.
saves: the checkpoints of the run; `meshcast run` alone reads them.
program: whose file it is.
same: changes (with `without`) that make another file of the same job; a list of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.render import render_job
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.jobs import change
from tests.launch_files import LAUNCHES, import_launch, keys_of, without

TABLES = Path(__file__).with_name("readings")
SAID = ("means", "plan", "job", "told", "program", "saves", "same", "without")


def read_tables() -> Iterator[Any]:
    """Yields the launch files of all tables, each with what is said of it; its id is its law."""
    for path in sorted(TABLES.glob("*.yaml")):
        for law, bases in yaml.load(path.read_text("utf-8"), yaml.CSafeLoader).items():
            for base, entries in bases.items():
                for entry in entries:
                    yield pytest.param(apply_entry(LAUNCHES[base], entry), entry, id=law)


def apply_entry(base: Any, entry: Mapping[str, Any]) -> Any:
    """Returns the launch file of an entry."""
    changes = {key: value for key, value in entry.items() if key not in SAID}
    return without(change(copy.deepcopy(base), changes), entry.get("without", []))


ENTRIES = [*read_tables()]
SAVED = [entry for entry in ENTRIES if "saves" in entry.values[1]]
PRINTED = [*SAVED, *drawn([entry for entry in ENTRIES if entry not in SAVED], keep=10)]


@pytest.mark.parametrize(("launch", "entry"), ENTRIES)
def test_read(launch: Any, entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = import_launch(launch)
    keys = keys_of(found)
    assert {key: _as_list(keys.get(key)) for key in entry.get("means", {})} == entry.get("means", {})
    assert found.job.get("plan", {}) == entry.get("plan", found.job.get("plan", {}))
    assert {key: found.job.get(key) for key in entry.get("job", {})} == entry.get("job", {})
    assert found.form == entry.get("program", found.form)
    assert found.checkpoints == entry.get("saves", found.checkpoints)
    for shown, words in entry.get("told", {}).items():
        assert_told(found, shown, words)
    same = entry.get("same", [])
    for changes in same if isinstance(same, list) else [same]:
        assert keys_of(import_launch(apply_entry(launch, changes))) == keys


@pytest.mark.parametrize(("launch", "entry"), PRINTED)
def test_what_is_printed_is_the_job(
    launch: Any, entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `meshcast import`: checkpoints are a comment alone."""
    monkeypatch.chdir(tmp_path)
    found = import_launch(launch)
    printed = render_job(found)
    assert load_job(yaml.safe_load(printed)) == load_job(found.job)
    assert "checkpoints" not in found.job.get("run", {})  # a sweep of the file would simulate whole runs
    assert ("meshcast run reads it from the file" in printed) == bool(found.checkpoints)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def assert_told(found: ImportedJob, shown: str, words: str | None) -> None:
    """Holds what is said of an approximated setting against words of it."""
    told = [f"{entry.why} {entry.errs}" for entry in found.findings.approximated if entry.shown == shown]
    assert bool(told) == (words is not None), told
    assert not told or str(words) in told[0]
