"""The timeline shows the played program: every action once, with bars from its begin to its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.path import Path as Outline
from rich.console import Console

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.views.devices import choose_devices
from meshcast.experiments.views.timeline import busy_shares, measure_occupation, replay_timelines, step_timelines
from meshcast.simulator import load_job, simulate
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.scheduling.schedule import GRADIENT_SUMS, OverlappedPasses, actions_of
from tests.draws import drawn
from tests.experiments.render.matplotlib.checks import check_figure, draw_styled, shown_texts


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
    return step_timelines(report, range(2))


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
    from meshcast.experiments.render.matplotlib.gantt import legend_entries

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
    edges = np.linspace(0, 10, 41)
    share = busy_shares([(np.array([0.1, 3.0]), np.array([1.2, 7.7]))], edges)
    assert share.max() <= 1 and share.min() >= 0
    assert float((share * np.diff(edges)).sum()) == pytest.approx(5.8)


def test_long_steps_get_windows_and_short_ones_do_not(report: Any) -> None:
    from meshcast.experiments.render.matplotlib.timeline import choose_panels

    span = report.play.step.span
    with matplotlib.rc_context(style.RC):
        assert [panel.numbers for panel in choose_panels(rows(report), span, 4, ["tp"], 7.0)] == [True]
        assert [panel.letter for panel in choose_panels(rows(report), 20 * span, 4, ["tp"], 7.0)] == ["", "a", "b"]


# ---------------------------------------------------------------------------- waits, windows, numbers


SIXTEEN: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "sequence": 2048},
    "plan": {"tp": 1, "pp": 16},
}


@pytest.fixture(scope="module")
def waiting() -> Any:
    """Its first pass waits for gathered parameters, and passes for tensor communication."""
    root = Path(__file__).resolve().parents[4]
    return simulate(load_job(root / "examples/gpt3-175b-dgx-a100.yaml", ["batch.global=512"]))


def all_rows(report: Any) -> list[Any]:
    return step_timelines(report, range(report.play.program.devices))


@pytest.fixture(scope="module")
def waiting_rows(waiting: Any) -> list[Any]:
    return all_rows(waiting)


@pytest.fixture(scope="module")
def waiting_figure(waiting: Any) -> Any:
    """Its timeline for a page."""
    from meshcast.experiments.render.matplotlib import timeline

    return draw_styled(timeline.timeline, waiting)


def test_waits_and_kernels_make_up_the_bars(waiting: Any, waiting_rows: list[Any]) -> None:
    flat = waiting.play.step.flat
    found = waiting_rows
    for row in found:
        assert (row.waits[:, 1] > row.waits[:, 0]).all()
        kernels = sum(
            flat.seconds[number]
            for (owner, stream), queue in flat.queues.items()
            for number in queue
            if owner == row.device and stream == COMPUTE
        )
        # Outside the bars are only the ops of the optimizer that are not drawn one by one.
        assert row.in_bars - row.in_waits == pytest.approx(kernels, rel=1e-3)
    shares = measure_occupation(found, waiting.play.step.span)
    assert sum(shares) == pytest.approx(1) and min(shares) > 0


def test_a_wait_has_not_the_colour_of_work(waiting_figure: Any, waiting_rows: list[Any]) -> None:
    """Where no kernel of a pass computes, a white, dotted area lies above its bar, if print can show it."""
    from meshcast.experiments.render.matplotlib.gantt import SEEN

    figure = waiting_figure
    axes = figure.axes[1]
    inches = axes.get_position().width * figure.get_size_inches()[0]
    start, stop = axes.get_xlim()
    least = SEEN * (stop - start) / inches / 1e3  # the axis is in ms
    expected = sum(
        int(((row.waits[:, 1] - row.waits[:, 0] >= least) & (row.waits[:, 0] * 1e3 < stop)).sum())
        for row in waiting_rows
    )
    drawn = [group for group in axes.collections if group.get_label() == "wait"]
    assert expected > 0 and sum(map(count_boxes, drawn)) == expected
    for group in drawn:
        assert group.get_hatch() and group.get_facecolor()[0][:3].tolist() == [1, 1, 1]
        assert group.get_zorder() > max(g.get_zorder() for g in axes.collections if g.get_label() in ("F", "BW"))
    assert any(text.get_text() == "wait inside a pass" for text in shown_texts(figure))


def count_boxes(group: Any) -> int:
    """The boxes of the areas of a group."""
    return sum(int((path.codes == Outline.MOVETO).sum()) for path in group.get_paths())


def test_bubble_and_idle_time_are_both_named(waiting: Any, waiting_figure: Any, waiting_rows: list[Any]) -> None:
    words = " ".join(text.get_text() for text in shown_texts(waiting_figure))
    share = waiting.breakdown.parts["bubble"] / waiting.step_time
    found = measure_occupation(waiting_rows, waiting.play.step.span)
    assert f"Pipeline bubble {share:.1%} of the step" in words and "the slowest" in words
    for part, name in (
        (found.computing, "kernels compute"),
        (found.waiting, "waits inside"),
        (found.between, "between passes"),
    ):
        assert f"{part:.1%} {name}" in words
    assert "Unlike the bubble" in words


def test_a_bar_is_split_at_its_waits() -> None:
    from meshcast.experiments.render.matplotlib.gantt import computing_pieces

    waits = np.array([[1.0, 1.1], [2.0, 3.0], [8.0, 9.0]])
    assert computing_pieces(0.5, 5.0, waits, 0.5) == [(0.5, 2.0), (3.0, 5.0)]
    assert computing_pieces(0.5, 5.0, waits, 0.05) == [(0.5, 1.0), (1.1, 2.0), (3.0, 5.0)]
    assert computing_pieces(4.0, 5.0, waits, 0.05) == [(4.0, 5.0)]


@pytest.mark.parametrize("width", drawn(["column", "page", "slide"], keep=("page",)))
def test_windows_of_time_do_not_overlap(waiting: Any, waiting_figure: Any, width: Any) -> None:
    from meshcast.experiments.render.matplotlib import timeline

    figure = waiting_figure if width == "page" else draw_styled(timeline.timeline, waiting, width=width)
    check_figure(figure, width)
    whole = figure.axes[0]
    first, second = (next(line for line in whole.lines if line.get_gid() == f"window {letter}") for letter in "ab")
    assert first.get_xdata()[1] < second.get_xdata()[0], "in time"
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            wide = min(one.x1, other.x1) - max(one.x0, other.x0)
            high = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert wide <= 0 or high <= 0, "on the paper"


@pytest.mark.parametrize("span", [1.3, 2.1, 40.0])
def test_windows_stay_apart_at_any_length(report: Any, span: float) -> None:
    from meshcast.experiments.render.matplotlib.timeline import choose_panels

    with matplotlib.rc_context(style.RC):
        panels, alone = (choose_panels(rows(report), span * report.play.step.span, n, ["tp"], 7.0) for n in (4, 1))
    if len(panels) > 1:
        assert panels[1].stop < panels[2].start
        assert "warm-up" in panels[1].words and alone[1].words == "start", "a stage alone has none"


@pytest.mark.parametrize("schedule", drawn(["1f1b", "dualpipe"], keep=2))
def test_sixteen_stages_have_numbers(schedule: str) -> None:
    from meshcast.experiments.render.matplotlib import timeline

    report = simulate(SIXTEEN | {"plan": {"tp": 1, "pp": 16, "schedule": schedule}})
    figure = draw_styled(timeline.timeline, report)
    axes = figure.axes[1]
    numbers = [text for text in axes.texts if text.get_text().isdecimal()]
    bars = sum(count_boxes(group) for group in axes.collections if group.get_label() in ("F", "BW", "B"))
    assert len(numbers) > 0.6 * bars > 20
    (patches,) = (group for group in axes.collections if group.get_label() == "number")
    assert count_boxes(patches) == len(numbers), "a patch keeps the hatch away from each"
    assert max(bar.get_zorder() for bar in axes.collections if bar is not patches) < patches.get_zorder()
    assert patches.get_zorder() < min(text.get_zorder() for text in numbers)


def test_rows_of_a_window_have_passes_in_it() -> None:
    from meshcast.experiments.render.matplotlib.timeline import choose_busy

    found = all_rows(simulate(SIXTEEN))
    end = found[4].begin[0]
    assert [row.device for row in choose_busy(found, 0.0, end, 4)] == [0, 1, 2, 3]
    assert [row.device for row in choose_busy(found, 0.0, end, 16)] == list(range(16))
    assert choose_devices(64, 5) == [0, 16, 32, 47, 63] and choose_devices(1, 5) == [0]


def test_rows_of_a_replay_are_its_passes() -> None:
    from meshcast.experiments.render.terminal.schedules import play_in_slots

    for name, v in (("1f1b", None), ("zb-h1", None), ("dualpipe", None), ("interleaved-1f1b", 2)):
        run = play_in_slots(name, 4, 8, v)
        found = replay_timelines(run, range(4))
        for row in found:
            assert list(zip(row.stage, row.kind, row.microbatch, strict=True)) == [
                (action.stage, str(action.kind), action.microbatch)
                for action in actions_of(run.table.orders[row.device])
            ]
            assert row.in_bars == pytest.approx(run.busy[row.device])
            assert row.is_paired == (name == "dualpipe")
        bubble = 1 - sum(run.busy) / 4 / run.makespan
        assert measure_occupation(found, run.makespan).between == pytest.approx(bubble)


def test_steps_of_jobs_name_what_is_not_drawn() -> None:
    from meshcast.experiments.render.matplotlib import schedules
    from meshcast.experiments.render.terminal.schedules import tabulate_shown

    batch, plan = {"global": 16}, {"tp": 8, "pp": 2}
    report = simulate({"model": "llama3-8b", "cluster": "dgx-h100:2", "batch": batch, "plan": plan})
    one = schedules.show_report("job", report)
    assert "(35 ms of the framework behind it, not drawn)" in one.notes
    assert "of all stages' time has no kernel" in one.notes
    table = Console(record=True, width=120)
    table.print(tabulate_shown([one]))
    heads, row = (table.export_text(clear=False).splitlines()[i].split() for i in (0, 2))
    assert heads[:3] == ["job", "chunks", "step"] and row[0] == "job" and len(row) == 6
    # No wait has the width that is drawn, so the legend has none.
    for seconds, is_drawn in ((1e-9, False), (0.1, True)):
        shown = one._replace(rows=[replace(part, waits=np.array([[0.0, seconds]])) for part in one.rows])
        figure = draw_styled(schedules.schedules, [shown], "Schedules", False)
        words = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert ("wait inside a pass" in words) == is_drawn


def test_schedules_have_one_axis_of_time() -> None:
    from meshcast.experiments.render.matplotlib import schedules
    from meshcast.experiments.render.terminal.schedules import play_in_slots

    names = ("1f1b", "zb-h1", "interleaved-1f1b")
    runs = [play_in_slots(name, 4, 8, 2 if name == "interleaved-1f1b" else None) for name in names]
    shown = [schedules.show_replay(name, run) for name, run in zip(names, runs, strict=True)]
    figure = draw_styled(schedules.schedules, shown, "Schedules", True)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    for axes, one, run in zip(figure.axes, shown, runs, strict=True):
        assert one.span == run.makespan and any(list(line.get_xdata()) == [one.span] * 2 for line in axes.lines)
        assert f"bubble {1 - sum(run.busy) / 4 / run.makespan:.1%}" in one.notes
    work = [sum(run.busy) for run in runs]
    assert work == pytest.approx([work[0]] * 3), "all do the same work, whatever the number of chunks"
