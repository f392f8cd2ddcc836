"""What a search answers: `meshcast.search`, its page, its rows and its plot; and its progress."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import meshcast
from meshcast.experiments.render.terminal.forecast import render
from meshcast.experiments.search.certificate.result import SearchResult, rank
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.output import progress
from meshcast.experiments.search.output.page import page, run_with_progress
from meshcast.experiments.search.output.plot import time_and_memory
from meshcast.experiments.search.search_job import open_search
from meshcast.simulator import simulate
from meshcast.simulator.loading.load import load_job, set_field
from meshcast.simulator.report.peak_errors import EVEN
from meshcast.simulator.report.report import Report
from meshcast.validation.published.measured_range.distance import distance_from_measured, widened_interval
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY

FEW: dict[str, Any] = {
    **TINY,
    "batch": {"global": 8, "micro": [1, 2], "sequence": 2048},
    "plan": {"tp": [1, 2], "pp": [1, 2], "chunks": [1, 2], "zero": [0, 1]},
}
ROBUST: dict[str, Any] = {**FEW, "plan": {"tp": [1, 2], "pp": [1, 2], "recompute": ["none", "selective"]}}
LARGE: dict[str, Any] = {
    "model": "llama3-70b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 2, "sequence": 8192},
    "plan": {"tp": "auto", "pp": "auto"},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(FEW), "utf-8")
    return path


@cache
def searched(top: int) -> tuple[Search, SearchResult]:
    search = open_search(FEW, top=top)
    return search, run_with_progress(search)


def show(job: dict[str, Any], top: int = 10, **options: Any) -> str:
    """Returns the page of a search in one line."""
    search = open_search(job, top=top, limits=SearchOptions(**options).limits)
    return " ".join(render(page(run_with_progress(search))).split())


def test_the_best_plans_have_their_reports() -> None:
    calls = list[int]()
    result = meshcast.search(FEW, top=3, watch=lambda found: calls.append(found.exact))
    assert isinstance(result, meshcast.SearchResult) and 1 <= len(result.best) <= 3
    assert result.certificate.complete and result.certificate.gap == 0.0 and calls
    steps = [plan.report.step_time for plan in result.best]
    assert steps == sorted(steps) and steps[0] == result.certificate.incumbent
    assert simulate(result.best[0].job).step_time == pytest.approx(steps[0], rel=1e-12)
    assert {"plan.tp", "batch.micro"} <= result.best[0].changes.keys()
    answer = json.loads(json.dumps(result.to_dict()))
    assert answer["best"][0]["plan"] == result.best[0].changes and answer["certificate"]["gap"] == 0
    assert "compared" not in answer and answer["best"][0]["robust"] is None


def test_paths_are_found_from_the_folder_of_the_job(tmp_path: Path) -> None:
    job = {**FEW, "model": "model.yaml", "plan": {"tp": [1, 2]}}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(FEW["model"]))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    by_path, by_base = (meshcast.search(tmp_path / "job.yaml", top=1), meshcast.search(job, top=1, base=tmp_path))
    assert by_path.best[0].report.step_time == by_base.best[0].report.step_time


def test_plans_are_ranked_by_the_upper_ends_of_widened_intervals(tmp_path: Path) -> None:
    def upper_end(report: Report) -> float:
        return widened_interval(report, distance_from_measured(report.play.plan))[1]

    robust, fastest = (meshcast.search(ROBUST, robust=wanted, top=3) for wanted in (True, False))
    ends = sorted(upper_end(simulate(plan.job)) for plan in robust.forecasts if plan.forecast.fits)
    assert [plan.interval[1] for plan in robust.best] == ends[:3]
    assert all(plan.interval[1] >= plan.report.interval_90[1] for plan in robust.best)
    assert robust.certificate.incumbent == fastest.certificate.incumbent == fastest.best[0].report.step_time
    assert fastest.best[0].distance is None and fastest.best[0].interval == fastest.best[0].report.interval_90
    words = " ".join(render(page(robust)).split())
    assert "widened interval" in words and "of the plans that were forecast alone" in words
    assert "the proof is of the forecasts" in words and "distance" in words
    answers = [plan["robust"] for plan in robust.to_dict()["best"]]
    assert [answer["interval_90_s"][1] for answer in answers] == ends[:3]
    assert all({"measured", "distance"} < answer.keys() for answer in answers)


# ------------------------------------------------------------------------------------------- the page


def test_wide_fields_stand_below_the_table_and_no_figure_is_shortened() -> None:
    auto = ("recompute", "recompute_layers", "partition", "offload", "sequence_parallel")
    opened: dict[str, Any] = {**dict.fromkeys(auto, "auto")}
    opened |= {"tp": [2], "pp": [1, 2], "schedule": ["1f1b", "interleaved-1f1b"], "chunks": [1, 2], "zero": [1]}
    result = run_with_progress(open_search({**FEW, "plan": opened}, top=6))
    text = render(page(result))
    assert "…" not in text and "null" not in text and "[" not in text
    rows = re.findall(r"^ \d +([\d.]+ m?s) +[\d.]+ m?s to [\d.]+ m?s +[\d.]+%", text, re.MULTILINE)
    assert len(rows) == len(result.best) == len(re.findall(r"^plan \d +\S", text, re.MULTILINE)) == 6


def test_plans_that_are_not_shown_are_named() -> None:
    words = "not shown  plans more than 5 % slower than the best one are not forecast"
    assert words in render(page(searched(1000)[1])) and "not shown" not in render(page(searched(1)[1]))


def test_a_plan_that_nearly_fills_a_gpu_is_named() -> None:
    job = {**LARGE, "cluster": "dgx-h100:8", "plan": {"tp": 8, "pp": 8, "recompute": ["full"]}}
    words = "; --memory-risk 1% leaves out plans that are as full"
    assert words not in show(job)
    batch, plan = {"global": 1024, "micro": 1, "sequence": 8192}, {"tp": 4, "pp": 4, "chunks": [5]}
    full = show({**job, "cluster": "dgx-h100:64", "batch": batch, "plan": plan}, memory_risk=EVEN)
    assert words in full and "fits in memory is faster" in full


def test_a_search_without_a_plan_names_the_smallest_need_and_what_to_open(tmp_path: Path) -> None:
    (job := tmp_path / "job.yaml").write_text(yaml.safe_dump(LARGE))
    result = run_with_progress(open_search(LARGE))
    assert not result.best and result.certificate.complete and result.to_dict()["best"] == []
    text = " ".join(render(page(result)).split())
    assert re.search(r"smallest \d+\.\d GiB of [67]\d\.\d+ GiB: plan.tp 16, plan.pp 1", text)
    assert "Open plan.recompute, batch.micro, plan.sequence_parallel" in text
    assert "no plan of the space fits with 95 %, by the mo" in text
    refused = run("predict", str(job))
    assert refused.exit_code == 2 and "the smallest need is" in refused.stderr
    assert "plan.recompute=auto" in refused.stderr


def test_the_smallest_need_is_that_of_a_forecast_where_there_is_one() -> None:
    result = run_with_progress(open_search(FEW, limits=SearchOptions(memory_margin=0.98).limits))
    assert result.smallest is not None and not result.best
    if result.forecasts:
        assert result.smallest.need == min(plan.forecast.held for plan in result.forecasts)


def test_progress_is_written_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    watch = progress.SearchProgress()
    certificate = Certificate(plans=9, fields={}, groups=4, opened=2, exact=3, step=2.0, incumbent=2.0, open_bound=1.5)
    for seconds in (1.0, 10.5, 11.0, 21.0):
        now[0] = seconds
        watch(certificate)
    words = "2 of 4 groups, 3 forecasts, best 2.000 s, gap 25.0%"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"meshcast: 10 s: {words}", f"meshcast: 21 s: {words}"]


# ------------------------------------------------------------------------------------------- rows and plots


def test_the_rows_are_the_plans_that_were_forecast(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "plans.parquet"
    answer = json.loads(run("search", job, "--top", "1", "--out", out, "--json").stdout)
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == answer["certificate"]["exact"] > 1 and [row["index"] for row in rows] == [*range(len(rows))]
    assert rows[0]["step_time_s"] == min(row["step_time_s"] for row in rows if row["status"] == "fits")
    for row in rows:
        changed: dict[str, Any] = json.loads(json.dumps(FEW))
        for field in answer["best"][0]["plan"]:
            set_field(changed, field, row[field], field)
        report = simulate(load_job(changed))
        assert row["step_time_s"] == pytest.approx(report.step_time, rel=1e-12)
        assert row["mfu_palm"] == report.mfu["palm"]
        assert row["bound_s"] <= row["step_time_s"] * (1 + 1e-9) and row["status"] in ("fits", "does-not-fit")
    about = json.loads(pq.read_schema(out).metadata[b"meshcast"])
    assert about["certificate"]["space"] == answer["certificate"]["space"]
    assert run("search", job, "--out", out, "--memory-margin", "75%").exit_code == 0, "an earlier file is replaced"
    assert not [*tmp_path.glob("*.writing")]
    for row in pq.read_table(out).to_pylist():
        fits = row["peak_device_gib"] <= row["capacity_gib"] * 0.25
        assert (row["status"] == "fits") == fits and bool(row["reason"]) != fits


@pytest.mark.slow
def test_the_rows_of_a_search_are_drawn_like_those_of_a_sweep(job: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "plans.parquet", tmp_path / "heat.png"
    run("search", job, "--out", out)
    assert run("plot", out, "--out", plot, "--x", "plan.tp", "--y", "batch.micro").exit_code == 0 and plot.exists()


def test_the_plot_shows_time_and_memory() -> None:
    search = open_search(FEW, limits=SearchOptions(memory_margin=0.1).limits)
    certificate = search.run()
    result = SearchResult(rank(search), certificate, tuple(search.forecasts))
    figure = time_and_memory(search, result)
    (axes,) = figure.axes
    points = {(x, y) for group in axes.collections for x, y in group.get_offsets().tolist()}
    assert len(points) == certificate.exact
    best = result.best[0].report
    assert any(x in (best.step_time, best.step_time * 1e3) for x, _ in points)
    assert all(0 < y < 1 for marker in figure.artists for y in marker.get_ydata())
    words = " ".join(text.get_text() for text in [*figure.texts, *axes.texts])
    assert "tensor-parallel ranks" in words and "best: " in words and "with the margin" in words


def test_a_search_without_a_plan_writes_no_rows_and_draws_a_sentence(job: Path, tmp_path: Path) -> None:
    job.write_text(yaml.safe_dump({**FEW, "model": "llama3-70b"}), "utf-8")
    out, plot = tmp_path / "plans.parquet", tmp_path / "plans.svg"
    result = run("search", job, "--out", out, "--plot", plot)
    assert result.exit_code == 0 and "No plan of the space fits with 95 %" in result.stdout
    assert "no plan of the space fits with 95 %, by the model" in result.stdout and "100.00%" not in result.stdout
    assert pq.read_table(out).num_rows == 0 and "plan.tp" in pq.read_schema(out).names
    assert plot.stat().st_size > 1000
