"""A published figure is compared with the forecast, whatever quantity it is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshcast.experiments.render.terminal.forecast import page
from meshcast.simulator import load_job, simulate
from meshcast.simulator.models import flops
from meshcast.simulator.report.report import Report

EXAMPLES = Path(__file__).parents[3] / "examples"
BARE = {"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}}


def report_with(**published: Any) -> Report:
    return simulate({**BARE, "published": {"source": "a paper, table 1", **published}})


def test_all_published_figures_give_the_same_error() -> None:
    """A run that was published to be a tenth faster than its forecast is forecast a ninth too slow."""
    bare = simulate(BARE)
    model = bare.job.model
    per_gpu = flops.causal(model, model.seq) * bare.tokens_per_s_per_gpu / 1e12
    figures = {
        "step_time_s": 0.9 * bare.step_time,
        "tokens_per_s_per_gpu": bare.tokens_per_s_per_gpu / 0.9,
        "tflops_per_gpu": per_gpu / 0.9,
        "mfu": bare.mfu["causal"] / 0.9,
    }
    for name, value in figures.items():
        published = report_with(**{name: value, "flops": "causal"}).to_dict()["published"]
        assert published["figure"] == name and published["published"] == value
        assert published["error"] == pytest.approx(1 / 0.9 - 1)
    assert "published" not in bare.to_dict()


def test_the_page_shows_both_figures() -> None:
    written = io.StringIO()
    Console(width=110, file=written).print(page(report_with(step_time_s=1.0)))
    text = " ".join(written.getvalue().split())
    assert "published 1.000 s a step, forecast" in text and "(a paper, table 1)" in text


def test_it_comes_back_in_the_job() -> None:
    job = load_job({**BARE, "published": {"mfu": 0.4, "source": "a paper"}})
    assert job.to_dict()["published"].keys() == {"mfu", "source", "flops"}
    assert load_job(job.to_dict()).published == job.published


@pytest.mark.parametrize("name", ["deepseek-v3-h800", "llama3-405b-dgx-h100"])
def test_the_largest_published_runs_are_forecast_end_to_end(name: str) -> None:
    answer = simulate(EXAMPLES / f"{name}.yaml").to_dict()
    published = answer["published"]
    assert answer["step_time_s"] > 0 and published["source"].startswith("arXiv")
    # The published figure lies in the interval.
    low, high = answer["interval_90_s"]
    assert low <= answer["step_time_s"] / (1 + published["error"]) <= high
