"""Statistics of errors, and the baseline forecast."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.validation.published.baseline import add_baselines
from meshcast.validation.published.summary import error_statistics, quantile, summarize_answers


def row(
    measured: float | None,
    predicted: float,
    source: str = "a",
    gpu: str = "h100-sxm",
    low: float = 0.9,
    high: float = 1.1,
    seconds_at_peak: float | None = None,
    memory: float | None = None,
) -> dict[str, Any]:
    return {
        "id": f"{source}-1", "status": "predicted", "reason": None,
        "predicted": {
            "step_time_s": predicted, "interval_90_s": [predicted * low, predicted * high],
            "peak_memory_gib": 1.0, "peak_device_gib": 1.0, "capacity_gib": 80.0, "fits": True,
        },
        "error": predicted / measured - 1 if measured else None, "memory_error": memory,
        "peak": "bf16", "at_peak_s": seconds_at_peak, "baseline": None,
        "source": source, "gpu": gpu, "class": "dense", "stack": "nemo", "regime": "program",
    }  # fmt: skip


def refused(reason: str, source: str | None = "a") -> dict[str, Any]:
    answer = row(None, 1.0) | {"status": "refused", "reason": reason, "predicted": None, "source": source}
    return answer | {"gpu": None, "class": None, "stack": None, "regime": None} if source is None else answer


def test_runs_that_do_not_fit_are_named() -> None:
    misfit = row(10, 11, "b")
    misfit["predicted"] |= {"peak_device_gib": 81.0, "fits": False}
    assert summarize_answers([row(10, 11), misfit, refused("no")])["does_not_fit"] == ["b-1"]


def test_figures_of_hand_made_rows() -> None:
    rows = [
        row(10, 11, memory=0.2),  # +10 %, inside
        row(10, 8, memory=-0.1),  # -20 %, outside
        row(10, 10.5, "b"),  # +5 %
        row(None, 3, "b"),  # predicted, nothing to compare with
        refused("plan.schemes[0].use is 'x': no such scheme"),
        refused("plan.schemes[2].use is 'x': no such scheme", "b"),
        refused("runs.jsonl:7: not valid JSON", None),
    ]
    summary = summarize_answers(rows)
    assert (summary["rows"], summary["predicted"], summary["refused"], summary["compared"]) == (7, 4, 3, 3)
    assert summary["median"] == pytest.approx(0.1) and summary["mean"] == pytest.approx(0.35 / 3)
    assert summary["p90"] == pytest.approx(0.18) and summary["bias"] == pytest.approx(0.05)
    assert summary["inside_interval"] == pytest.approx(2 / 3)
    assert summary["memory"] == pytest.approx({"compared": 2, "median": 0.15, "mean": 0.15, "p90": 0.19, "bias": 0.05})
    assert {name: of["rows"] for name, of in summary["by_source"].items()} == {"a": 3, "b": 3}
    assert summary["by_source"]["b"]["bias"] == pytest.approx(0.05)
    assert summary["by_stack"]["nemo"]["rows"] == 6 and set(summary["by_gpu"]) == {"h100-sxm"}
    assert summary["refusals"] == {"plan.schemes.use is 'x': no such scheme": 2, "runs.jsonl:7: not valid JSON": 1}


def test_nothing_to_compare_has_no_errors() -> None:
    summary = summarize_answers([refused("no")])
    assert summary["median"] is None and summary["inside_interval"] is None and summary["memory"]["compared"] == 0
    assert summarize_answers([])["rows"] == 0


def test_a_forecast_faster_than_its_work_is_named() -> None:
    summary = summarize_answers(
        [row(10, 4, seconds_at_peak=5.0), row(10, 6, "fine", seconds_at_peak=5.0), row(10, 6, "unknown")]
    )
    assert summary["faster_than_peak"] == ["a-1"]


def test_the_naive_forecast_knows_the_work_alone() -> None:
    # Shares of peak: 0.5 and 0.4 in a, 0.25 in b; another GPU with 0.2.
    rows = [
        row(10, 9, seconds_at_peak=5.0),
        row(10, 9, seconds_at_peak=4.0),
        row(20, 9, "b", seconds_at_peak=5.0),
        row(5, 9, "c", "a100-sxm-80", seconds_at_peak=1.0),
        row(5, 9, "c", "a100-sxm-80"),
        refused("no"),
    ]
    add_baselines(rows)
    baselines = [one["baseline"] for one in rows]
    assert [one and one["step_time_s"] for one in baselines] == pytest.approx([12.5, 10, 12.5, 5, None, None])
    assert [one and one["error"] for one in baselines[:4]] == pytest.approx([0.25, 0, -0.375, 0])
    # Of other sources: a from b (0.25), b from a (0.45), c from all, of the same format (0.4).
    assert [one["error_from_other_sources"] for one in baselines[:4]] == pytest.approx([1, 0.6, 0.25 / 0.45 - 1, -0.5])


def test_a_single_source_has_no_other() -> None:
    rows = [row(10, 9, seconds_at_peak=5.0)]
    add_baselines(rows)
    assert rows[0]["baseline"]["error_from_other_sources"] is None
    assert summarize_answers(rows)["baseline_from_other_sources"]["median"] is None


@given(st.lists(st.floats(-0.9, 10), min_size=1, max_size=40))
def test_errors_are_ordered_and_bounded(found: list[float]) -> None:
    statistics = {key: value for key, value in error_statistics(found).items() if value is not None}
    sizes = sorted(map(abs, found))
    assert sizes[0] <= statistics["median"] <= statistics["p90"] <= sizes[-1]
    assert min(found) <= statistics["bias"] <= max(found)
    assert quantile(sizes, 0.0) == sizes[0] and quantile(sizes, 1.0) == sizes[-1]
