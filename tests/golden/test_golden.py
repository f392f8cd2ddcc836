"""Forecasts are unchanged: an intended change is looked at and kept by `make golden`. And SimPy gives each of them."""

from __future__ import annotations

from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.ir.registry import scheme_names
from meshcast.simulator.report.report import Report
from meshcast.validation.selfcheck.replay import replay_on_simpy
from tests.golden import rewrite
from tests.golden.rewrite import (
    COMMAND,
    HERE,
    Change,
    alike,
    changes,
    fields,
    file_of,
    names,
    playable,
    reports,
    stored,
    summary,
    table,
    uses,
)
from tests.strategies import EVERY_EXAMPLE

pytestmark = pytest.mark.golden

LARGEST_REPLAY = inf if EVERY_EXAMPLE else 2_000
"""Ops of the largest step that is replayed."""


def count_ops(report: Report) -> int:
    """Returns the number of ops of the played steps of a job."""
    turns = chain.from_iterable(play.step.program.turns() for _, play in report.step_kinds or [(1, report.play)])
    return sum(times * sum(count for _, count in task.count_ops()) for task, times in turns)


@pytest.mark.parametrize("name", names())
def test_a_forecast_is_unchanged_and_that_of_simpy(name: str) -> None:
    """No job needs an engine that only SimPy has: that is contention, which a job does not ask for. `make test` replays
    the smaller steps; tests/contract plays every scheme by both."""
    _, whole, old = stored(name)
    if not playable(name):
        pytest.skip("needs a package of an extra: pip install 'meshcast[search]'")
    assert old is not None, f"There is no forecast in {file_of(name).name} yet; `{COMMAND}` writes it."
    ((_, report),) = reports([name])
    if found := changes(name, old, summary(report, whole)):
        text = f"The forecast of {name} has changed:\n\n{table(found)}\n\nIf that is meant, `{COMMAND}` rewrites it."
        pytest.fail(text, pytrace=False)
    if count_ops(report) < LARGEST_REPLAY:
        _, replayed = replay_on_simpy(report)
        assert replayed.agrees, str(replayed)


def test_every_scheme_occurs() -> None:
    missing = set(scheme_names()) - {use for name in names() for use in uses(name)}
    assert not missing, f"No job of {HERE.name}/ has {missing}: write one to a file there, then `{COMMAND}`."


def test_some_jobs_are_kept_whole() -> None:
    whole = [name for name in names() if stored(name).whole]
    assert whole and all(
        {"mfu.palm", "limits", "memory.stages.worst.stage"} <= set(kept_fields(name)) for name in whole
    )


def kept_fields(name: str) -> dict[str, Any]:
    return fields(stored(name).forecast or {})


def test_a_forecast_is_written_behind_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "HERE", tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text("# A note.\njob: {model: gpt2, cluster: dgx-h100:1}  # of one word each\n", "utf-8")
    assert stored("mine").forecast is None
    assert rewrite.main() == 0
    text = path.read_text("utf-8")
    assert text.startswith("# A note.\njob: {model: gpt2, cluster: dgx-h100:1}  # of one word each\nforecast:\n")
    ((_, report),) = reports(["mine"])
    new = summary(report, whole=False)
    assert changes("mine", stored("mine").forecast, new) == []
    rewrite.write("mine", {**new, "step_time_s": 1e-6})
    ((field, old, now),) = [change[1:] for change in changes("mine", stored("mine").forecast, new)]
    assert (field, old, now) == ("step_time_s", 1e-6, new["step_time_s"])
    assert rewrite.main() == 0 and path.read_text("utf-8") == text


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
def test_differences_that_count_as_a_change(old: Any, new: Any, noise: float, same: bool) -> None:
    assert alike(old, new, noise) == same


def test_a_change_is_printed_with_its_size() -> None:
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
