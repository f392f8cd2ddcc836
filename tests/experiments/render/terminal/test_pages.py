"""Pages of traces, measurements and the catalog: what stands in a cell, and what is left out of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.render.terminal import listing, measurements, traces
from meshcast.experiments.render.terminal.safe_console import SafeConsole
from meshcast.simulator import load_job, simulate
from tests.experiments.cli.samples import JOB


def test_a_trace_is_compared_with_the_forecast_of_its_job(tmp_path: Path) -> None:
    (job := tmp_path / "job.yaml").write_text(JOB, "utf-8")
    assert traces._forecast(job, None).step_time == simulate(load_job(job)).step_time


@pytest.mark.parametrize(("samples", "measured", "shown"), [(2, 1.0, False), (3, 1.0, True), (3, None, False)])
def test_samples_scatter_where_they_are_three(samples: int, measured: float | None, shown: bool) -> None:
    row: dict[str, Any] = {"group": "tp 2", "name": "step", "quantity": "seconds", "predicted": {}, "error": {}}
    text = io.StringIO()
    table = measurements.rows_table([row | {"measured": measured, "samples": samples, "spread": 0.25}])
    SafeConsole(text, 80, color_system=None).print(table)
    assert ("25" in text.getvalue()) == shown


def test_the_catalog_names_the_experts_of_a_model() -> None:
    blocks = {row["name"]: row["blocks"] or "" for row in listing.models()}
    assert "2 of 8 experts" in blocks["mixtral-8x7b"] and "experts" not in blocks["llama3-8b"]
