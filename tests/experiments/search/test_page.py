"""The page of ``meshcast search``: whole figures, what is not shown, what nearly fills a GPU; and its progress."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.render.terminal.forecast import render
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.output import progress
from meshcast.experiments.search.output.page import page, run_with_progress
from meshcast.experiments.search.search_job import open_search
from meshcast.simulator.report.peak_errors import EVEN
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY

LARGE: dict[str, Any] = {
    "model": "llama3-70b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 2, "sequence": 8192},
    "plan": {"tp": "auto", "pp": "auto"},
}


def test_wide_fields_stand_below_the_table_and_no_figure_is_shortened() -> None:
    opened = {"auto": True, "tp": [1, 2], "pp": [1, 2], "schedule": ["1f1b", "interleaved-1f1b"]}
    text = render(page(run_with_progress(open_search({**TINY, "plan": opened}, top=6))))
    assert "…" not in text and "null" not in text and "[" not in text
    rows = re.findall(r"^ \d +([\d.]+ m?s) +[\d.]+ m?s to [\d.]+ m?s +[\d.]+%", text, re.MULTILINE)
    assert len(rows) == 6 == len(re.findall(r"^plan \d +\S", text, re.MULTILINE))


def test_plans_that_are_not_shown_are_named(tmp_path: Path) -> None:
    text = render(page(run_with_progress(open_search(TINY, top=1000))))
    assert "not shown  plans more than 5 % slower than the best one are not forecast" in text
    assert "not shown" not in render(page(run_with_progress(open_search(TINY, top=1))))


def test_a_plan_that_nearly_fills_a_gpu_is_named() -> None:
    job = {**LARGE, "cluster": "dgx-h100:8", "plan": {"tp": 8, "pp": 8, "recompute": ["full"]}}
    words = "; --memory-risk 1% leaves out plans that are as full"
    assert words not in render(page(run_with_progress(open_search(job))))
    batch, plan = {"global": 1024, "micro": 1, "sequence": 8192}, {"tp": 4, "pp": 4, "chunks": [5]}
    full = {**job, "cluster": "dgx-h100:64", "batch": batch, "plan": plan}
    text = render(page(run_with_progress(open_search(full, limits=SearchOptions(memory_risk=EVEN).limits))))
    assert words in " ".join(text.split()) and "fits in memory is faster" in text


def test_a_search_without_a_plan_names_the_smallest_need_and_what_to_open(tmp_path: Path) -> None:
    (job := tmp_path / "job.yaml").write_text(yaml.safe_dump(LARGE))
    text = " ".join(run("search", str(job)).stdout.split())
    assert re.search(r"smallest \d+\.\d GiB of [67]\d\.\d+ GiB: plan.tp 16, plan.pp 1", text)
    assert "Open plan.recompute, batch.micro, plan.sequence_parallel" in text
    assert "no plan of the space fits with 95 %, by the mo" in text
    refused = run("predict", str(job))
    assert (
        refused.exit_code == 2 and "the smallest need is" in refused.stderr and "plan.recompute=auto" in refused.stderr
    )


def test_the_smallest_need_is_that_of_a_forecast_where_there_is_one() -> None:
    result = run_with_progress(open_search(TINY, limits=SearchOptions(memory_margin=0.98).limits))
    assert result.smallest is not None and not result.best
    if result.forecasts:
        assert result.smallest.need == min(one.forecast.held for one in result.forecasts)


def test_progress_is_written_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    watch = progress.SearchProgress()
    found = Certificate(plans=9, fields={}, groups=4, opened=2, exact=3, step=2.0, incumbent=2.0, open_bound=1.5)
    for seconds in (1.0, 10.5, 11.0, 21.0):
        now[0] = seconds
        watch(found)
    lines = capsys.readouterr().err.splitlines()
    words = "2 of 4 groups, 3 forecasts, best 2.000 s, gap 25.0%"
    assert lines == [f"meshcast: 10 s: {words}", f"meshcast: 21 s: {words}"]
