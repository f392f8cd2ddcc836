"""Every plot in every width: type of 7 pt, words on the paper and apart, rows that keep to the height of a slide."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from meshcast.experiments.explain.sensitivity import Sensitivities
from meshcast.experiments.render.matplotlib import (
    breakdown,
    communication,
    heatmap,
    memory,
    roofline,
    scaling,
    schedules,
    stage_memory,
    style,
    timeline,
    tornado,
)
from meshcast.experiments.render.matplotlib.measured import calibration, measurements, published, traces
from meshcast.experiments.render.matplotlib.sheet import text_width
from meshcast.experiments.render.terminal.schedules import play_in_slots
from meshcast.experiments.sweeps.scaling import forecast_curve
from meshcast.experiments.views.communication import communication_matrix
from meshcast.experiments.views.heatmap import group_cells
from meshcast.experiments.views.roofline import step_roofline
from meshcast.experiments.views.tornado import StepRange, Tornado
from meshcast.simulator import simulate
from meshcast.validation.traces.timeline import Slice, Timeline
from tests.draws import drawn
from tests.experiments.render.matplotlib.checks import check_figure, draw_styled, shown_texts

LLAMA: dict[str, Any] = {"model": "llama3-8b", "batch": {"global": 64, "sequence": 4096}}
JOBS: dict[str, dict[str, Any]] = {
    "pp 4": LLAMA | {"cluster": "dgx-h100:2", "plan": {"tp": 4, "pp": 4, "chunks": 2, "recompute": "full"}},
    "pp 16": {
        "model": {"preset": "llama3-8b", "layers": 32},
        "cluster": "dgx-h100:2",
        "batch": {"global": 64, "sequence": 2048},
        "plan": {"tp": 1, "pp": 16, "schedule": "dualpipe"},
    },
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return {name: simulate(job) for name, job in JOBS.items()}


def keeps_height(figure: Any, width: Any) -> bool:
    size = style.WIDTHS[width]
    return bool(figure.get_size_inches()[1] * size.zoom <= size.tallest + 0.02)


@pytest.mark.parametrize(
    ("name", "width"), drawn(product(JOBS, style.WIDTHS), keep=[("pp 4", "page"), ("pp 16", "column")])
)
@pytest.mark.slow
def test_figures_of_a_forecast(reports: dict[str, Any], name: str, width: Any) -> None:
    report = reports[name]
    tall: list[tuple[Any, ...]] = [
        (timeline.timeline, report),
        (memory.memory, report),
        (stage_memory.stage_memory, report),
        (roofline.roofline, report, step_roofline(report)),
        (communication.communication, report, communication_matrix(report)),
    ]
    for make, *arguments in tall:
        figure = draw_styled(make, *arguments, width=width)
        check_figure(figure, width)
        assert keeps_height(figure, width), make
    check_figure(draw_styled(breakdown.breakdown, [("", report)], width=width), width)
    several = [(f"{name}, {'a name too long for a line ' * 5}", one) for name, one in reports.items()]
    check_figure(draw_styled(breakdown.breakdown, several, width=width), width)


@pytest.mark.parametrize(("width", "has_bars"), [("page", True), ("column", False)])
def test_the_note_of_a_breakdown_is_of_what_is_drawn(reports: dict[str, Any], width: Any, has_bars: bool) -> None:
    figure = draw_styled(breakdown.breakdown, [("", reports["pp 4"])], width=width)
    check_figure(figure, width)
    words = " ".join(text.get_text() for text in figure.texts)
    hatched = [patch for axes in figure.axes for patch in axes.patches if patch.get_hatch() == "////"]
    assert bool(hatched) == has_bars == ("Hatched and pale" in words)
    assert "hidden ms" in words and "overlapped by computation and not part of the sum" in words


@pytest.mark.parametrize("width", drawn(style.WIDTHS, keep=("column",)))
@pytest.mark.parametrize(
    ("names", "p", "m"),
    [(("1f1b", "zb-h1", "dualpipe"), 8, 16), pytest.param(("gpipe",), 64, 96, marks=pytest.mark.slow)],
)
def test_schedules(names: tuple[str, ...], p: int, m: int, width: Any) -> None:
    shown = [schedules.show_replay(name, play_in_slots(name, p, m, None)) for name in names]
    figure = draw_styled(schedules.schedules, shown, "Pipeline schedules", True, width=width)
    check_figure(figure, width)
    assert keeps_height(figure, width)


@pytest.mark.parametrize("width", drawn(style.WIDTHS, keep=("slide",)))
def test_tornado(width: Any, reports: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bars = [StepRange(f"framework.set.the_figure.number_{i}", 1.0, 1.1, "") for i in range(40)]
    monkeypatch.setattr(tornado, "make_tornado", lambda of: Tornado(1.05, bars, bars, ()))
    figure = draw_styled(tornado.tornado, Sensitivities(reports["pp 4"], (), ()), width=width)
    check_figure(figure, width)
    assert keeps_height(figure, width)
    assert any("narrower bars are left out" in text.get_text() for text in shown_texts(figure))


def test_more_room_never_shows_fewer_devices() -> None:
    shown = [schedules.show_replay("gpipe", play_in_slots("gpipe", 24, 4, None))]
    with matplotlib.rc_context(style.settings("page")):
        drawn = [schedules._choose_bars(shown, room, [], False)[1][0] for room in np.arange(0.5, 8, 0.05)]
    assert drawn == sorted(drawn) and drawn[-1] == 24


def test_rows_of_a_tornado_are_divided() -> None:
    assert tornado.split_rows(30, 6, 16) == (6, 16)
    assert tornado.split_rows(12, 6, 16) == (6, 6)
    assert tornado.split_rows(12, 20, 3) == (9, 3)
    assert tornado.split_rows(12, 20, 20) == (6, 6)


# -------------------------------------------------------------------------------- sweeps and scaling


@pytest.fixture(scope="module")
def curve() -> Any:
    return forecast_curve(LLAMA | {"cluster": "dgx-h100:1", "plan": {"tp": 8}}, [8, 16, 20, 64, 512], "weak", None)


@pytest.mark.parametrize("width", drawn(style.WIDTHS, keep=("page",)))
def test_scaling(curve: Any, width: Any) -> None:
    figure = draw_styled(scaling.scaling, curve, width=width)
    check_figure(figure, width)
    words = [text.get_text() for text in shown_texts(figure)]
    assert {"90% interval", "ideal scaling", "forecast"} <= set(words), "dashes and band have a legend"
    assert any("Not possible with this plan: 20 GPUs" in text for text in words), "no number of GPUs is dropped"
    for point in curve.known:
        assert f"{point.gpus:,}" in words and f"{curve.efficiency(point):.1%}" in words
    axes = figure.axes[0]
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] == 0
    line = next(line for line in axes.lines if len(line.get_xdata()) == len(curve.known))
    assert list(line.get_ydata()) == [point.tokens_per_s / point.gpus for point in curve.known]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    ends = [end / point.gpus for point in curve.known for end in point.interval]
    assert set(ends) <= set(band.tolist())
    areas = [area.get_paths()[0].vertices[:, 1] for area in figure.axes[1].collections if area.get_paths()]
    assert min(area.min() for area in areas) == 0 and max(area.max() for area in areas) == pytest.approx(1)


def sweep_rows() -> list[dict[str, Any]]:
    rows = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            for micro in (1, 2):
                status = "does-not-fit" if tp * pp < 4 else "invalid" if (tp, pp) == (8, 4) else "fits"
                value = None if status == "invalid" else 100.0 * tp / pp * micro
                rows.append(
                    {
                        "plan.tp": tp, "plan.pp": pp, "batch.micro": micro, "status": status, "reason": "a rule",
                        "tokens_per_s_per_gpu": value, "peak_device_gib": 90.0 + micro, "capacity_gib": 80.0,
                    }
                )  # fmt: skip
    return [row for row in rows if (row["plan.tp"], row["plan.pp"]) != (1, 4)]


@pytest.mark.parametrize("width", drawn(style.WIDTHS, keep=("page",)))
def test_every_cell_of_a_heatmap_has_a_value_or_a_reason(width: Any) -> None:
    value = "tokens_per_s_per_gpu"
    found = group_cells(sweep_rows(), "plan.tp", "plan.pp", value)
    figure = draw_styled(heatmap.heatmap, found, "plan.tp", "plan.pp", value, "A sweep", ["24 plans"], width=width)
    check_figure(figure, width)
    cells, scale = figure.axes
    words = [text.get_text().replace("\n", " ") for text in cells.texts]
    for (tp, pp), cell in found.items():
        if cell.best is None:
            assert cell.note in ("too large", "invalid")
        else:
            assert f"{cell.best[value]:,.0f}" in words, (tp, pp)
    assert words.count("not in the sweep") == 1 and words.count("invalid") == 1
    assert words.count("too large 91 GiB") == 3, "with the least memory that a plan needs"
    notes = " ".join(text.get_text() for text in figure.texts)
    assert all(f"{reason}: {meaning}" in notes for reason, meaning in heatmap.MEANING.items())
    best = [cell.best[value] for cell in found.values() if cell.best is not None]
    ends = [label.get_text() for label in scale.get_yticklabels()]
    assert ends[0] == f"{min(best):,.0f}" and ends[-1] == f"{max(best):,.0f}", "the scale of colours"
    right = scale.get_position().x1 * figure.get_size_inches()[0]
    assert right + text_width(ends[-1]) > figure.get_size_inches()[0] - 0.5, "no part of the sheet is empty"


# ------------------------------------------------------------------------------------- measured values


def measured_rows() -> list[dict[str, Any]]:
    rows = []
    for i in range(12):
        seconds, nbytes = 10.0 ** (i / 4 - 3), 2.0 ** (26 + i)
        for quantity, measured, wider in (("seconds", seconds, 0.2), ("bytes", nbytes, 0.0)):
            errors = {"catalog": 0.05 * (i - 5), "calibration": 0.01 * i}
            predicted = {by: measured * (1 + error) for by, error in errors.items()}
            interval = {by: [value * (1 - wider), value * (1 + wider)] for by, value in predicted.items()}
            rows.append(
                {"quantity": quantity, "measured": measured, "error": errors, "interval_90": interval}
            )  # fmt: skip
    return rows


BEFORE = {"forecast_written": "2026-01-01T00:00:00+00:00", "measured": "2026-01-01T00:10:00+00:00"}
AFTER = {"forecast_written": "2026-01-02T00:00:00+00:00", "measured": "2026-01-01T00:10:00+00:00"}


@pytest.mark.parametrize("width", drawn(style.WIDTHS, keep=("page",)))
def test_measurements(width: Any) -> None:
    figure = draw_styled(measurements.forecasts, measured_rows(), [BEFORE, AFTER], width=width)
    check_figure(figure, width)
    times, memories = figure.axes
    for axes in (times, memories):
        assert any(list(line.get_ydata()) == [1, 1] for line in axes.lines), "a line at 1"
    whiskers = [group for group in times.collections if type(group).__name__ == "LineCollection"]
    lows = sorted(float(path.vertices[0, 1]) for group in whiskers for path in group.get_paths())
    expected = [row["interval_90"][by][0] / row["measured"] for row in measured_rows()[::2] for by in row["error"]]
    assert lows == pytest.approx(sorted(expected)), "90 % intervals"
    assert not any(type(group).__name__ == "LineCollection" for group in memories.collections)


def test_the_title_says_when_forecasts_were_written() -> None:
    assert measurements.describe_times([BEFORE]) == ["The forecasts were written before the measurements."]
    assert measurements.describe_times([AFTER, AFTER]) == ["The forecasts were written after the measurements."]
    assert "1 of 2 files" in measurements.describe_times([BEFORE, AFTER])[0]
    assert measurements.describe_times([{**BEFORE, "measured": None}]) == []


@pytest.mark.parametrize("width", drawn(style.WIDTHS, keep=("page",)))
def test_published_runs_fill_the_sheet(width: Any) -> None:
    dots = [published.Dot(f"source {i % 7}", 1.5**i, 1.5**i * 1.02, 1.4**i, 1.6**i) for i in range(20)]
    far = published.Dot("source 0", 3.0, 30.0, 20.0, 40.0)
    figure = draw_styled(published.compare_dots, [*dots, far], "Step time", "s", 30, width=width)
    check_figure(figure, width)
    assert keeps_height(figure, width) or width == "column"
    reach = max(axes.get_position().x1 for axes in figure.axes[:2])
    assert reach > 0.94, "no part of the sheet is empty"
    marks = [group for group in figure.axes[1].collections if len(group.get_paths()) == 1]
    edge = figure.axes[1].get_ylim()[1]
    placed = [tuple(group.get_offsets()[0]) for group in marks if len(group.get_offsets()) == 1]
    assert (3.0, pytest.approx(edge)) in placed, "a dot beyond the axes is marked at their end"
    assert any("1 beyond a ratio of 4" in text.get_text() for text in figure.texts)


def test_ratios_without_a_time_are_not_written() -> None:
    assert traces.format_ratio(1e-15, 0.007) == "" and traces.format_ratio(0.0, 1.0) == ""
    assert traces.format_ratio(1e-3, 1.5e-3) == "1.50"
    assert traces.format_ratio(1e-6, 1.0) == "> 100" and traces.format_ratio(1.0, 1e-6) == "< 0.01"


def test_every_stream_of_a_trace_has_a_lane() -> None:
    axes = Figure().subplots()
    traces._draw_lanes(axes, Timeline((), 1.0), ["compute", "tp"], 2.0, 1.0)
    bands = [sorted(image.get_extent()[2:]) for image in axes.images]
    assert [(low <= tick <= high) for tick, (low, high) in zip(axes.get_yticks(), bands, strict=True)] == [True] * 2
    assert bands[0][1] < bands[1][0]


def test_the_lanes_of_a_trace_have_the_colours_of_the_bars() -> None:
    found = traces.mix_colours([Slice("compute", "gemm", 0.0, 1.0)], np.array([0.0, 1.0, 2.0]))
    assert found[0] == pytest.approx(traces.LOOKS["gemm"]) and found[1] == pytest.approx((1, 1, 1))


@pytest.mark.parametrize("width", drawn(style.WIDTHS, keep=("page",)))
def test_errors_beyond_the_axis_are_marked(tmp_path: Path, width: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"gpu": "h100-sxm", "operation": "gemm", "kind": "bf16", "rows": 40, "goal": (0.05, 0.1)}
    given = [
        {**cell, "class": "all", "median": 0.04, "p90": 0.2},
        {**cell, "class": "small", "median": 0.3, "p90": 1.7},
        {**cell, "class": "tiny", "median": 0.8, "p90": 2.5},
    ]
    monkeypatch.setattr(calibration, "cells", lambda held, goals: given)
    monkeypatch.setattr(calibration, "figures", lambda held: {"rows": 120, "median": 0.1, "inside_90": 0.9})
    figure = draw_styled(calibration.errors, [], {}, width=width)
    check_figure(figure, width)
    words = [text.get_text() for text in figure.texts]
    assert "170%" in words and "80%-250%" in words and any("Arrow" in text for text in words)
    arrows = [group for group in figure.axes[0].collections if group.get_offsets()[0][0] == calibration.END]
    assert len(arrows) == 2
