"""The report of many plans: reading their files, fronts, axes and tables, and that a browser sorts them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'meshcast[report]')")

from meshcast.experiments.render.bokeh.load import PlanRows, RowsNote, load_rows, read_answer
from meshcast.experiments.render.bokeh.results import parallel, source
from meshcast.experiments.render.bokeh.results.plan_table import number_format
from meshcast.experiments.render.bokeh.results.summary import count_reasons
from meshcast.experiments.render.bokeh.results_report import report_results
from meshcast.experiments.views.pareto import find_front
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.figures import FIGURES
from tests.browser import Browser
from tests.draws import drawn

ANSWER = {
    "best": [
        {"plan": {"plan.tp": tp, "plan.recompute": word}, "step_time_s": 8.0 + tp, "interval_90_s": [7.0, 10.0],
         "tokens_per_s_per_gpu": 1000.0 - 10 * tp, "peak_device_gib": 70.0 - 5 * tp, "mfu": {"palm": 0.4}, "cost": None}
        for tp, word in ((1, "none"), (2, "full"), (4, "none"))
    ],
    "front": None,
    "certificate": {"space": {"plans": 12, "fields": {"plan.tp": [1, 2, 4]}}, "cut": {"invalid": 9}, "exact": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


def plans(count: int = 40) -> PlanRows:
    """Plans with a field of numbers and one of words, some of which do not fit or are invalid."""
    rows = []
    for index in range(count):
        status = ("fits", "fits", "does-not-fit", "invalid")[index % 4]
        row = {
            "index": index,
            "plan.tp": 2 ** (index % 3),
            "plan.recompute": ("full", None)[index % 2],
            "status": status,
        }
        row |= {"reason": f"tp = {index} does not divide" if status == "invalid" else None}
        known = status != "invalid"
        row |= {"step_time_s": 10.0 + index if known else None, "mfu_palm": 0.5 if known else None}
        row |= {"tokens_per_s_per_gpu": 1000.0 / (1 + index) if known else None, "limits": "GEMMs"}
        row |= {"peak_device_gib": 10.0 + (index * 7) % 60 if known else None}
        rows.append(row)
    return PlanRows("plans.parquet", rows, ["plan.tp", "plan.recompute"], {}, None, 3)


def test_the_rows_of_a_sweep(reference: Path) -> None:
    found = load_rows(reference)
    points = RowsNote.model_validate(json.loads(pq.read_schema(reference).metadata[b"meshcast"])).points
    assert found.excluded == points - len(found.rows)
    assert found.certificate is None and found.fields and len(found.rows) == sum(found.statuses.values())
    page = report_results(found)
    assert "Sweep of plans" in page and all(f'id="{name}"' in page for name in ("pareto", "parallel", "plans"))


def test_the_answer_of_a_search() -> None:
    found = read_answer("search.json", ANSWER)
    assert found.fields == ["plan.tp", "plan.recompute"]
    assert [row["step_time_s"] for row in found.fitting] == [9.0, 10.0, 12.0]
    page = report_results(found)
    assert "Search of plans" in page and "plans in the space" in page and "Certificate of the search" in page


@pytest.mark.parametrize("broken", [{"best": []}, {"best": [{"plan": {}}]}, {"best": [3]}])
def test_a_damaged_answer_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"search\.json"):
        read_answer("search.json", ANSWER | broken)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30), st.sampled_from([1, -1]))
def test_no_plan_dominates_one_of_the_front(points: list[tuple[int, int]], sign: int) -> None:
    x, y = (np.array(column, float) for column in zip(*points, strict=True))
    front = find_front("peak_device_gib", "cost" if sign > 0 else "tokens_per_s_per_gpu", x, y)
    better = [(a, sign * b) for a, b in points]
    mine = [better[i] for i in front]
    assert len(set(mine)) == len(mine) and list(x[front]) == sorted(x[front])

    def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    assert {*mine} == {one for one in better if not any(dominates(other, one) for other in better)}


def test_parallel_axes_by_hand() -> None:
    axes = {axis.name: axis for axis in parallel.list_axes(source.make_source(plans()))}
    assert list(axes) == ["tp", "recompute", "peak memory of a GPU [GiB]", "step time [s]", "tokens/s of a GPU"]
    assert axes["tp"].labels == [(0.0, "1"), (0.5, "2"), (1.0, "4")]
    step = axes["step time [s]"]
    assert (step.places.min(), step.places.max()) == (0.0, 1.0) and step.labels[0] == (0.0, "10")


def test_fitting_plans_come_first_and_best_first() -> None:
    made = source.make_source(plans())
    assert [row["status"] for row in made.rows] == ["fits"] * 20 + ["does-not-fit"] * 10
    rates = made.data.data["tokens_per_s_per_gpu"][: made.fitting]
    assert (np.diff(rates) <= 0).all()


def test_a_column_is_of_numbers_or_of_plain_text() -> None:
    kinds = {"number": (1, 2.5), "absent": (1, None), "truth": (True, False), "word": ("a\x1b", 3)}
    rows = [row | {name: values[i] for name, values in kinds.items()} for i, row in enumerate(plans(2).rows)]
    columns = source.make_source(PlanRows("plans.parquet", rows, [*kinds], {})).data.data
    numbers, *texts = (columns[f"f{i}"] for i in range(len(kinds)))
    assert numbers == [1, 2.5] and all(value.isprintable() for text in texts for value in text)


def test_only_the_best_of_very_many_plans_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_ROWS", 12)
    found = plans()
    assert len(source.make_source(found).rows) == 12
    assert "Listed are the 12 of 30 plans with the highest throughput." in report_results(found)


def test_reasons_that_differ_in_numbers_are_one() -> None:
    assert count_reasons(plans()) == ["10 plans: tp = 3 does not divide"]


def test_a_file_without_fitting_plans() -> None:
    found = plans()
    rows = [row | {"status": "does-not-fit"} for row in found.rows if row["status"] != "invalid"]
    page = report_results(PlanRows("large.parquet", rows, found.fields, {}))
    assert "No plan of this file fits." in page


def test_formats_of_numbers() -> None:
    forms = {name: number_format(FIGURES[name]) for name in ("step_time_s", "mfu_palm", "peak_device_gib", "days")}
    assert forms == {"step_time_s": "0,0.000", "mfu_palm": "0.0%", "peak_device_gib": "0,0.0", "days": "0,0.[000]"}
    assert all(number_format(figure) for figure in FIGURES.values())


def test_the_page_draws_no_error_of_the_library(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bokeh"):
        assert report_results(plans()) == report_results(plans())
    assert not caplog.records


@pytest.mark.parametrize("width", drawn([600, 1280], keep=2))
@pytest.mark.slow
def test_a_browser_sorts_the_table(browser: Browser, width: int) -> None:
    found = browser.open(report_results(plans()), width)
    assert found.idle
    assert (found.errors, found.requests) == ([], [])
    assert (found.inner, found.scroll) == (width, width)
    assert min(share for name, share in found.shares.items() if not name.startswith("plans")) > 0.001
    assert found.before != found.after == sorted(found.after)


@pytest.mark.slow
def test_many_plans_stay_small(tmp_path: Path, browser: Browser) -> None:
    found = browser.open(page := report_results(plans(20_000)), 1280)
    assert len(page.encode()) < 10e6
    assert found.idle and found.errors == []
