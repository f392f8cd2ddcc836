"""Forecasts are what they were: a change that is meant is looked at and kept by `make golden`."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.ir.registry import scheme_names
from simulator.job.load import load_job
from tests.golden.rewrite import COMMAND, HERE, Change, alike, changes, forecasts, jobs, stored, table

pytestmark = pytest.mark.golden

NAMES = list(jobs())


@pytest.mark.parametrize("name", NAMES)
def test_a_forecast_is_what_it_was(name: str) -> None:
    old = stored(name)
    assert old is not None, f"There is no golden prediction of {name} that can be read; `{COMMAND}` makes it."
    ((_, new),) = forecasts([name])
    if found := changes(name, old, new):
        text = f"The forecast of {name} has changed:\n\n{table(found)}\n\nIf that is meant, `{COMMAND}` rewrites it."
        pytest.fail(text, pytrace=False)


def test_files_and_jobs_belong_together() -> None:
    assert {path.stem for path in HERE.glob("*.json")} == set(NAMES), f"`{COMMAND}` puts it right"


def test_all_schemes_and_gpus_occur() -> None:
    loaded = [load_job(job) for job in jobs().values()]
    assert {entry.use for job in loaded for entry in job.plan.schemes} == set(scheme_names())
    assert {job.cluster.gpu.name for job in loaded} == {"a100-sxm-80", "h100-sxm"}


@pytest.mark.parametrize(
    ("old", "new", "noise", "same"),
    [
        (1.0, 1.0 + 5e-10, 0.0, True),
        (1.0, 1.0 + 2e-9, 0.0, False),
        (0.0, 1e-13, 1e-12, True),
        (None, 1e-13, 1e-12, True),
        (0.0, 1e-11, 1e-12, False),
        (None, 1.0, 1e-12, False),
        (None, 0.0, 0.0, False),
        ("fits", "fits", 0.0, True),
        ("fits", "does-not-fit", 0.0, False),
        ([], ["tp leaves"], 0.0, False),
    ],
)
def test_what_counts_as_a_change(old: Any, new: Any, noise: float, same: bool) -> None:
    assert alike(old, new, noise) == same


def test_a_change_is_told_with_its_size() -> None:
    old = {"status": "fits", "step_time_s": 2.0, "breakdown_s": {"bubble": 0.5}, "limits": "a", "hfu": 0.25}
    new = {"status": "fits", "step_time_s": 2.1, "breakdown_s": {"bubble": 0.25}, "limits": "b" * 30, "mfu": 0.5}
    found = changes("job", old, new)
    assert [change.field for change in found] == ["step_time_s", "breakdown_s.bubble", "limits", "mfu", "hfu"]
    lines = table(found).splitlines()
    assert lines[0].split() == ["job", "field", "old", "new", "change"]
    assert lines[1].split() == ["job", "step_time_s", "2", "2.1", "+5.00", "%"]
    assert lines[2].split() == ["job", "breakdown_s.bubble", "0.5", "0.25", "-50.00", "%"]
    assert lines[3:6] == ["job  limits", "       old: a", f"       new: {'b' * 30}"]
    assert lines[6].split() == ["job", "mfu", "-", "0.5"]
    assert lines[7].split() == ["job", "hfu", "0.25", "-"]
    assert len(table([Change("job", "limits", "a" * 80, "b")]).splitlines()) == 4
