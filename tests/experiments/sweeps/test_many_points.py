"""Sweeps of many points: plain plans are forecast by loops, and have the rows of single forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.sweeps import fingerprint
from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.grid import Sweep, load_sweep
from meshcast.simulator.batch import grid
from meshcast.simulator.batch.played import LoopForecast
from meshcast.simulator.report.report import Report
from tests.experiments.sweeps.sweeps import JOB

VARY = {
    "plan.tp": [2, 3],
    "plan.pp": [1, 2],
    "plan.chunks": [1, 2, 5],
    "batch.micro": [1, 2],
    "plan.zero": [0, 3],
    "framework": ["megatron-core", "colossalai"],
}


def forecast(of: Sweep, many: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Forecasts all points of a sweep. many: points from which on there are many."""
    monkeypatch.setattr(sweeps, "MANY", many)
    monkeypatch.setattr(grid, "HAS_COMPILER", True)
    return [row for number in range(-(-of.points // 64)) for row in sweeps.forecast_numbered(of, number, 64)]


def test_rows_are_those_of_single_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    of = load_sweep({"job": {**JOB, "run": {"tokens": "1T"}}, "vary": VARY})
    by_loops, report = list[Report](), grid.Grid.report

    def note_loops(self: grid.Grid, job: Any) -> Report:
        by_loops.append(answer := report(self, job))
        return answer

    monkeypatch.setattr(grid.Grid, "report", note_loops)
    singly, mine = (forecast(of, many, monkeypatch) for many in (10**9, 1))
    assert len(mine) == of.points
    for row, other in zip(mine, singly, strict=True):
        near = 1e-9 * other.get("step_time_s", 0.0)
        assert row == {
            name: pytest.approx(cell, rel=1e-9, abs=near) if isinstance(cell, float) else cell
            for name, cell in other.items()
        }
    fit = [row for row in mine if row["status"] != "invalid"]
    assert len(fit) == len(by_loops) and 20 < len(fit) < len(mine) - 20
    plain = [isinstance(answer.play, LoopForecast) for answer in by_loops]
    assert sum(plain) > 0.8 * len(plain)


def test_points_with_a_changed_file_have_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.yaml"
    of = load_sweep({"job": {**JOB, "model": str(model)}, "vary": {"plan.chunks": [1], "batch.micro": [1, 2]}})
    steps = []
    for layers in (12, 24):
        model.write_text(json.dumps({"preset": "gpt2-124m", "layers": layers}))
        steps.append([row["step_time_s"] for row in forecast(of, 1, monkeypatch)])
    assert all(late > 1.5 * early for early, late in zip(*steps, strict=True))


def test_rows_with_and_without_a_compiler_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    of = load_sweep({"job": JOB, "vary": VARY})
    monkeypatch.setattr(fingerprint, "MANY", of.points)
    first = fingerprint.fingerprint(of, 64)
    monkeypatch.setattr(fingerprint, "HAS_COMPILER", not fingerprint.HAS_COMPILER)
    assert fingerprint.changed_inputs(first, fingerprint.fingerprint(of, 64)) == ["loops"]
    monkeypatch.setattr(fingerprint, "MANY", of.points + 1)
    assert "loops" not in fingerprint.fingerprint(of, 64)
