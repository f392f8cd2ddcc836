"""Figures show the report's own numbers, lose no peak, and keep their words on the paper."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

from meshcast.experiments.cli import app as cli
from meshcast.experiments.render.matplotlib import breakdown, memory, sheet, style
from meshcast.experiments.views import memory as views
from meshcast.experiments.views import palette
from meshcast.experiments.views.breakdown import STEP_GROUPS
from meshcast.experiments.views.devices import choose_devices
from meshcast.simulator import simulate
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.figures import parts_of_step
from tests.draws import drawn
from tests.experiments.render.matplotlib.checks import check_figure, draw_styled, shown_texts

JOB = {"model": "llama3-8b", "cluster": "dgx-h100:2", "batch": {"global": 16, "sequence": 4096}}
PLANS: dict[str, dict[str, Any]] = {
    "one stage": {"plan": {"tp": 8}},
    "two stages": {"plan": {"tp": 4, "pp": 2, "chunks": 2}},
    "too large": {"plan": {"tp": 1, "pp": 2, "zero": 0}, "batch": {"global": 64, "micro": 4, "sequence": 8192}},
    "one gpu": {
        "model": {"preset": "llama3-8b", "layers": 2},
        "cluster": {"gpu": "h100-sxm", "gpus": 1, "gpus_per_node": 1},
        "plan": {},
    },
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return {name: simulate(JOB | change) for name, change in PLANS.items()}


@pytest.fixture(scope="module")
def memory_figures(reports: dict[str, Any]) -> dict[str, Figure]:
    return {name: draw_styled(memory.memory, report) for name, report in reports.items()}


@pytest.fixture(params=PLANS)
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def report(name: str, reports: dict[str, Any]) -> Any:
    return reports[name]


# -------------------------------------------------------------------------------------------- memory


def test_bars_are_the_peaks_of_the_report(report: Any) -> None:
    answer = report.to_dict()["memory"]
    found = views.device_memories(report)
    assert [bar.device for bar in found] == [stage["stage"] for stage in answer["stages"]]
    for bar, stage in zip(found, answer["stages"], strict=True):
        assert bar.allocated / 2**30 == pytest.approx(stage["peak_allocated_gib"])
        assert {name: nbytes / 2**30 for name, nbytes in bar.by.items()} == pytest.approx(stage["by"])
    full = views.fullest_device(found)
    assert full.allocated + full.fragmentation == pytest.approx(report.peak_reserved)
    assert full.total == pytest.approx(report.peak_device)


def test_peaks_up_to_the_room_for_tensors_fit(report: Any) -> None:
    full = views.fullest_device(views.device_memories(report))
    assert (full.allocated <= full.capacity - full.context) == report.fits


def test_drawn_bars_are_as_long_as_the_device_needs(name: str, report: Any, memory_figures: dict[str, Figure]) -> None:
    patches = memory_figures[name].axes[0].patches
    ends = {round(patch.get_x() + patch.get_width(), 6) for patch in patches}
    assert {round(bar.total / 2**30, 6) for bar in views.device_memories(report)} <= ends


def test_what_a_device_lacks_is_marked_beyond_its_memory(
    name: str, report: Any, memory_figures: dict[str, Figure]
) -> None:
    marked = [patch for patch in memory_figures[name].axes[0].patches if patch.get_hatch() == memory.EXCESS["hatch"]]
    lacking = [bar for bar in views.device_memories(report) if bar.free < 0]
    assert [patch.get_x() * 2**30 for patch in marked] == pytest.approx([bar.capacity for bar in lacking])
    assert [patch.get_width() * 2**30 for patch in marked] == pytest.approx([-bar.free for bar in lacking])
    assert bool(marked) == (name == "too large")


@given(st.integers(1, 200), st.data())
def test_chosen_devices_hold_the_ends_and_the_fullest(devices: int, data: Any) -> None:
    full = data.draw(st.integers(0, devices - 1))
    found = choose_devices(devices, memory.MAX_ROWS, full)
    assert len(found) == min(devices, memory.MAX_ROWS)
    assert {0, devices - 1, full} <= set(found) and found == sorted(set(found))
    assert max(np.diff(found), default=1) <= 2 * -(-devices // memory.MAX_ROWS)


@pytest.mark.parametrize(("moments", "count"), [(3, 10), (40, 10), (2000, 50), (1, 5)])
def test_columns_of_time_hold_the_highest_moment_in_them(moments: int, count: int) -> None:
    draw = np.random.default_rng(moments)
    # Moments often fall together, and on the edges of columns.
    when = np.sort(np.append(0.0, draw.integers(0, 4 * count, moments - 1) / 4))
    held = draw.integers(0, 9, (moments, 3)).astype(float)
    found = views.MemoryCurve(when, held, count).sample(count)
    total = held.sum(axis=1)
    for column, row in enumerate(found):
        before = np.flatnonzero(when <= column)[-1]
        inside = [before, *np.flatnonzero((when >= column) & (when < column + 1))]
        assert row.sum() == max(total[i] for i in inside)
        assert any((row == held[i]).all() for i in inside)
    assert found.sum(axis=1).max() == total[when < count].max()


def test_the_curve_keeps_the_peak(report: Any) -> None:
    full = views.fullest_device(views.device_memories(report))
    for count in (7, views.COLUMNS):
        found = views.memory_curve(report, full.device).sample(count)
        assert found.shape == (count, len(CATEGORIES))
        assert found.sum(axis=1).max() == pytest.approx(full.allocated, rel=1e-12)


def test_stairs_lose_only_steps_of_no_height() -> None:
    levels, edges = views.merge_levels(np.array([1.0, 1.0, 2.0, 2.0, 1.0]), np.arange(6.0))
    assert levels.tolist() == [1, 2, 1] and edges.tolist() == [0, 2, 4, 5]


def test_a_plan_that_does_not_fit_is_marked_red(reports: dict[str, Any], memory_figures: dict[str, Figure]) -> None:
    for name, report in reports.items():
        red = [text.get_text() for text in shown_texts(memory_figures[name]) if text.get_color() == palette.RED]
        assert any("does not fit" in words for words in red) == (not report.fits), name
    missing = (reports["too large"].peak_device - reports["too large"].usable[0]) / 2**30
    words = [text.get_text() for text in shown_texts(memory_figures["too large"])]
    assert any(f"{missing:.1f} GiB more than" in text for text in words)


# ----------------------------------------------------------------------------------------- breakdown


def test_parts_add_up_to_the_step(report: Any) -> None:
    parts = breakdown.step_parts(report)
    assert sum(part.took for part in parts.values()) == pytest.approx(report.step_time, rel=1e-7)
    hidden = {name: part.hidden for name, part in parts.items() if part.hidden}
    assert hidden == pytest.approx({name: s for name, s in report.breakdown.hidden.items() if s})


def test_every_part_has_a_name_and_a_colour(reports: dict[str, Any]) -> None:
    answer = reports["one stage"].to_dict()["breakdown_s"]
    parts = [*answer.pop("compute"), *answer.pop("exposed"), *answer]
    assert set(parts_of_step()) == set(palette.PARTS) == set(parts)
    assert sorted(key for keys in STEP_GROUPS for key in keys) == sorted(parts)


def test_rows_hold_the_figures_of_the_page(reports: dict[str, Any]) -> None:
    report = reports["two stages"]
    words = [text.get_text() for text in shown_texts(draw_styled(breakdown.breakdown, [("", report)]))]
    parts = breakdown.step_parts(report)
    assert f"{parts['gemm'].took * 1e3:,.1f}" in words
    assert f"{parts['tp'].hidden * 1e3:,.1f}" in words
    assert f"{report.step_time * 1e3:,.1f}" in words and "100.0" in words


def test_several_reports_share_one_scale(reports: dict[str, Any]) -> None:
    figure = draw_styled(breakdown.breakdown, list(reports.items()))
    bars = figure.axes[: len(reports)]
    assert len({axes.get_xlim() for axes in bars}) == 1
    unit = 1.0 if max(report.step_time for report in reports.values()) >= 2 else 1e3
    for axes, report in zip(bars, reports.values(), strict=True):
        end = max(patch.get_x() + patch.get_width() for patch in axes.patches)
        assert end == pytest.approx(report.step_time * unit, rel=1e-6)
    words = [text.get_text() for text in shown_texts(figure)]
    assert set(reports) <= set(words)


# ----------------------------------------------------------------------------------------- all of them


def test_no_words_leave_the_paper(name: str, report: Any, memory_figures: dict[str, Figure]) -> None:
    check_figure(memory_figures[name])
    check_figure(draw_styled(breakdown.breakdown, [("", report)]))


@pytest.mark.parametrize("count", drawn([2, 4, 9], keep=(2,)))
def test_no_words_of_a_comparison_leave_the_paper(reports: dict[str, Any], count: int) -> None:
    named = [(f"{name}, {'with a name that is far too long for a line ' * 4}", reports[name]) for name in reports]
    check_figure(draw_styled(breakdown.breakdown, (named * 3)[:count]))


@pytest.mark.parametrize(
    ("figure", "kind"),
    drawn(product(("memory", "breakdown", "several breakdowns"), ("png", "svg")), keep=[("breakdown", "svg")]),
)
def test_the_same_figure_gives_the_same_bytes(tmp_path: Path, reports: dict[str, Any], figure: str, kind: str) -> None:
    report = reports["two stages"]
    named = list(reports.items()) if figure == "several breakdowns" else [("", report)]
    first, second = tmp_path / f"first.{kind}", tmp_path / f"second.{kind}"
    for path in (first, second):
        sheet.save(lambda: memory.memory(report) if figure == "memory" else breakdown.breakdown(named), path)
    assert first.read_bytes() == second.read_bytes() and first.stat().st_size > 10_000


def test_widths_of_words() -> None:
    assert sheet.text_width("") == 0
    assert 0.5 < sheet.text_width("matrix products") < 1.0
    assert sheet.truncate_words("short", 1.0) == "short"
    cut = sheet.truncate_words("much longer than the room there is", 1.0)
    assert cut.endswith("...") and sheet.text_width(cut) <= 1.0


# ------------------------------------------------------------------------------------- command line


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("model: llama3-8b\ncluster: dgx-h100:2\nbatch: {global: 16}\nplan: {tp: 8, pp: 2}\n", "utf-8")
    return path


def run(job: Path, plot: str) -> Result:
    return CliRunner().invoke(cli.app, ["predict", str(job), "--plot", plot])


def test_a_folder_gets_every_figure(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there needs no sign that it is one."""
    names = ["breakdown.png", "memory.png", "timeline.png"]
    (folder := job.parent / "figures").mkdir()
    monkeypatch.setattr(style, "DPI", 20)
    for path, plot in ((folder, str(folder)), (job.parent / "new", f"{job.parent}/new/")):
        drawn = run(job, plot)
        assert drawn.exit_code == 0 and all(name in drawn.stdout for name in names), drawn.output
        assert sorted(file.name for file in path.iterdir()) == names
    assert all((folder / name).read_bytes() == (path / name).read_bytes() for name in names)


def test_a_file_gets_the_timeline_alone(job: Path) -> None:
    result = run(job, str(job.parent / "a.png"))
    assert result.exit_code == 0 and "timeline" in result.stdout and "memory.png" not in result.stdout
    assert sorted(path.name for path in job.parent.iterdir()) == ["a.png", "job.yaml"]


@pytest.mark.parametrize("name", ["absent/new/", "job.yaml/", "taken/", "taken", "new", ""])
def test_a_folder_that_cannot_be_drawn_into(job: Path, name: str) -> None:
    (job.parent / "taken" / "memory.png").mkdir(parents=True)
    before = sorted(job.parent.rglob("*"))
    result = run(job, f"{job.parent}/{name}" if name else "")
    assert result.exit_code == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "--plot" in result.stderr
    assert sorted(job.parent.rglob("*")) == before


def test_a_mistake_in_the_job_leaves_no_folder(job: Path) -> None:
    job.write_text("model: none", "utf-8")
    assert run(job, f"{job.parent}/new/").exit_code == 2
    assert not (job.parent / "new").exists()
