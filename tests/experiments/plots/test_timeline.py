"""The timeline shows the played program: every action once, with bars from its begin to its end."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pytest

from experiments.plots import style
from simulator import simulate
from simulator.scheduling.schedule import GRADIENT_SUMS, OverlappedPasses, actions_of


@pytest.fixture(scope="module")
def report() -> Any:
    return simulate(
        {
            "model": "llama3-8b",
            "cluster": "dgx-h100:2",
            "batch": {"global": 8, "sequence": 4096},
            "plan": {"tp": 8, "pp": 2, "chunks": 2, "recompute": "full"},
        }
    )


def rows(report: Any) -> list[Any]:
    from experiments.plots.gantt.rows import device_row

    times = report.play.step.times
    return [device_row(report, d, np.asarray(times.begin), np.asarray(times.end)) for d in range(2)]


def test_every_action_has_one_bar(report: Any) -> None:
    for row in rows(report):
        bars = [(s, k, m) for s, k, m in zip(row.stage, row.kind, row.microbatch, strict=True) if k != "O"]
        actions = [action[:3] for action in report.play.program.timetable.orders[row.device]]
        assert bars == actions


def test_bars_follow_each_other_within_the_step(report: Any) -> None:
    for row in rows(report):
        assert (row.begin[1:] >= row.end[:-1] - 1e-12).all()
        assert row.begin[0] >= 0 and row.end[-1] <= report.play.step.span * (1 + 1e-12)


def test_the_loss_of_a_batch_is_drawn_between_its_phases() -> None:
    from experiments.plots.gantt.legend import legend_entries

    plan = {"schedule": {"use": "distmm", "branches": 2}, "stages": [{"dp": 6}, {"dp": 2}]}
    batch = {"global": 48, "microbatches": 2}
    report = simulate({"model": "clip-vit-l-14", "cluster": "dgx-a100:1", "batch": batch, "plan": plan})
    for row in rows(report):
        assert [kind for kind in row.kind if kind != "O"] == ["N", "N", "Y", "Z", "F", "BW", "F", "BW"]
    words = [entry.words for entry in legend_entries(rows(report), [], 1)]
    assert "loss of the batch" in words and "forward, output alone" in words


def test_the_passes_of_a_pair_share_one_bar() -> None:
    plan = {"pp": 2, "tp": 8, "schedule": "dualpipe"}
    report = simulate(
        {"model": "llama3-8b", "cluster": "dgx-h100:2", "batch": {"global": 8, "sequence": 4096}, "plan": plan}
    )
    for row, order in zip(rows(report), report.play.program.timetable.orders, strict=True):
        bars = [(s, k, m) for s, k, m in zip(row.stage, row.kind, row.microbatch, strict=True) if k != "O"]
        assert bars == [action[:3] for action in actions_of(order) if action.kind not in GRADIENT_SUMS]
        height = row.part[:, 1] - row.part[:, 0]
        paired = np.flatnonzero(height < 1)
        assert len(paired) == 2 * sum(isinstance(turn, OverlappedPasses) for turn in order) > 0
        assert (row.begin[paired[::2]] == row.begin[paired[1::2]]).all() and (height[paired] == 0.5).all()
        assert {row.kind[i] for i in paired[::2]} == {"F"}
        busy = float(((row.end - row.begin) * height).sum())
        assert busy <= report.play.step.span


def test_recomputation_lies_within_backward_bars(report: Any) -> None:
    for row in rows(report):
        assert len(row.again)
        for begin, end in row.again:
            inside = (row.begin <= begin) & (end <= row.end)
            assert [row.kind[i] for i in np.flatnonzero(inside)] == ["BW"]


def test_busy_shares_keep_the_total() -> None:
    from experiments.plots.gantt.rows import busy_share

    edges = np.linspace(0, 10, 41)
    share = busy_share([(np.array([0.1, 3.0]), np.array([1.2, 7.7]))], edges)
    assert share.max() <= 1 and share.min() >= 0
    assert float((share * np.diff(edges)).sum()) == pytest.approx(5.8)


def test_long_steps_get_windows_and_short_ones_do_not(report: Any) -> None:
    from experiments.plots.timeline import choose_panels

    span = report.play.step.span
    with matplotlib.rc_context(style.RC):
        assert [panel.numbers for panel in choose_panels(rows(report), span, 4, ["tp"], 7.0)] == [True]
        assert [panel.letter for panel in choose_panels(rows(report), 20 * span, 4, ["tp"], 7.0)] == ["", "a", "b"]


def test_shades_are_distinct_and_take_text() -> None:
    tones = style.shades(style.BLUE, 5)
    assert len(set(tones)) == 5 and tones == sorted(tones)
    assert style.ink_on(tones[0]) == "white" and style.ink_on(tones[-1]) == "black"
