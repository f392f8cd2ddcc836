"""`search --out` and `--plot`: the plans that were forecast as rows, and as a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from meshcast.experiments.search.certificate.result import SearchResult, rank
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.output.plot import time_and_memory
from meshcast.experiments.search.search_job import open_search
from meshcast.simulator import simulate
from meshcast.simulator.loading.load import load_job, set_field
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(TINY), "utf-8")
    return path


def test_the_rows_are_the_plans_that_were_forecast(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "plans.parquet"
    answer = json.loads(run("search", job, "--top", "1", "--out", out, "--json").stdout)
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == answer["certificate"]["exact"] > 1 and [row["index"] for row in rows] == [*range(len(rows))]
    assert rows[0]["step_time_s"] == min(row["step_time_s"] for row in rows if row["status"] == "fits")
    for row in rows:
        changed: dict[str, Any] = json.loads(json.dumps(TINY))
        for field in answer["best"][0]["plan"]:
            set_field(changed, field, row[field], field)
        report = simulate(load_job(changed))
        assert (
            row["step_time_s"] == pytest.approx(report.step_time, rel=1e-12) and row["mfu_palm"] == report.mfu["palm"]
        )
        assert row["bound_s"] <= row["step_time_s"] * (1 + 1e-9) and row["status"] in ("fits", "does-not-fit")
    about = json.loads(pq.read_schema(out).metadata[b"meshcast"])
    assert about["certificate"]["space"] == answer["certificate"]["space"]
    assert run("search", job, "--out", out).exit_code == 0, "a file of an earlier search is replaced"
    assert not [*tmp_path.glob("*.writing")]


@pytest.mark.slow
def test_the_rows_of_a_search_are_drawn_like_those_of_a_sweep(job: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "plans.parquet", tmp_path / "heat.png"
    run("search", job, "--out", out)
    assert run("plot", out, "--out", plot, "--x", "plan.tp", "--y", "batch.micro").exit_code == 0 and plot.exists()


def test_a_plan_that_leaves_too_little_memory_free_does_not_fit(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "plans.parquet"
    run("search", job, "--out", out, "--memory-margin", "75%")
    for row in pq.read_table(out).to_pylist():
        fits = row["peak_device_gib"] <= row["capacity_gib"] * 0.25
        assert (row["status"] == "fits") == fits and bool(row["reason"]) != fits


def test_the_plot_shows_time_and_memory(job: Path, tmp_path: Path) -> None:
    made = open_search(job, limits=SearchOptions(memory_margin=0.1).limits)
    certificate = made.run()
    result = SearchResult(rank(made), certificate, tuple(made.forecasts))
    figure = time_and_memory(made, result)
    (axes,) = figure.axes
    points = {(x, y) for group in axes.collections for x, y in group.get_offsets().tolist()}
    assert len(points) == certificate.exact
    best = result.best[0].report
    assert any(x in (best.step_time, best.step_time * 1e3) for x, _ in points)
    words = " ".join(text.get_text() for text in [*figure.texts, *axes.texts])
    assert "tensor-parallel ranks" in words and "best: " in words and "with the margin" in words
    path = tmp_path / "search.svg"
    assert run("search", job, "--plot", path).exit_code == 0 and path.stat().st_size > 1000


def test_a_search_without_a_plan_writes_no_rows_and_draws_a_sentence(job: Path, tmp_path: Path) -> None:
    job.write_text(yaml.safe_dump({**TINY, "model": "llama3-70b"}), "utf-8")
    out, plot = tmp_path / "plans.parquet", tmp_path / "plans.png"
    result = run("search", job, "--out", out, "--plot", plot)
    assert result.exit_code == 0 and "No plan of the space fits with 95 %" in result.stdout
    assert "no plan of the space fits with 95 %, by the model" in result.stdout and "100.00%" not in result.stdout
    assert pq.read_table(out).num_rows == 0 and "plan.tp" in pq.read_schema(out).names and plot.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "plans.csv"], "--out is 'plans.csv': rows are written as .parquet. Write plans.parquet"),
        (["--out", "absent/plans.parquet"], "--out is 'absent/plans.parquet': the file cannot be written (there is no"),
        (["--out", "job.parquet"], "--out is 'job.parquet': the file exists and is not the result of a search"),
        (["--plot", "plans.jpg"], "--plot is 'plans.jpg': a figure is drawn as .png, .svg or .pdf. Write plans.png"),
        (
            ["--jobs-to", "job.parquet"],
            "--jobs-to is 'job.parquet': no files can be written into this folder (job.parquet",
        ),
    ],
)
def test_mistakes_are_explained_before_the_search(
    job: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.chdir(job.parent)
    Path("job.parquet").write_text("mine", "utf-8")
    result = run("search", job, *options)
    assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert words in result.stderr and Path("job.parquet").read_text("utf-8") == "mine"
