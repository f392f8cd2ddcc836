"""`search --robust`: ranks by the upper ends of intervals, wider for what nobody has run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import meshcast
from meshcast.simulator import simulate
from meshcast.simulator.report.report import Report
from meshcast.validation.published.measured_range.distance import distance_from_measured, widened_interval
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY

JOB = {**TINY, "plan": {**TINY["plan"], "recompute": ["none", "selective"]}}


def upper_end(report: Report) -> float:
    return widened_interval(report, distance_from_measured(report.play.plan))[1]


def test_plans_that_were_forecast_are_ranked_by_the_upper_ends() -> None:
    found = meshcast.search(JOB, robust=True, top=3)
    fastest = meshcast.search(JOB, top=3)
    ends = sorted(upper_end(simulate(one.job)) for one in found.forecasts if one.forecast.fits)
    assert [one.interval[1] for one in found.best] == ends[:3]
    assert all(one.interval[1] >= one.report.interval_90[1] for one in found.best)
    assert found.certificate.incumbent == fastest.certificate.incumbent == fastest.best[0].report.step_time
    assert fastest.best[0].distance is None and fastest.best[0].interval == fastest.best[0].report.interval_90


@pytest.mark.slow
def test_the_page_and_the_answer_say_so(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB), "utf-8")
    page = " ".join(run("search", path, "--robust", "--top", "2").stdout.split())
    assert "widened interval" in page and "of the plans that were forecast alone" in page
    assert "the proof is of the forecasts" in page and "distance" in page
    answer = json.loads(run("search", path, "--robust", "--top", "2", "--json").stdout)
    robust = [one["robust"] for one in answer["best"]]
    ends = [one["interval_90_s"][1] for one in robust]
    assert ends == sorted(ends) and all({"measured", "distance"} < one.keys() for one in robust)
    assert json.loads(run("search", path, "--json").stdout)["best"][0]["robust"] is None
