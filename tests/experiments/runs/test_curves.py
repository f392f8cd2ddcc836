"""Curves of goodput, the best interval, and what hardware is worth."""

import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshcast.experiments.render.matplotlib import runs as plots
from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.experiments.render.terminal.run import page
from meshcast.experiments.runs.curves import CurvePoint, RunCurves, draw_curves, find_best
from meshcast.experiments.runs.seeds import simulate_runs
from meshcast.simulator import load_job, simulate
from meshcast.simulator.report.formatting import format_seconds
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import RunPlan, make_run

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:4",
    "batch": {"global": 128},
    "run": {
        "days": 1,
        "seeds": 12,
        "price_per_gpu_hour": 2,
        "failures": {"rates": "none", "components": {"node": {"per": "node", "mtbf_hours": 4}}},
        "checkpoints": {"kind": "sharded", "stall_s": 20},
        "recovery": {"detection_s": 60, "scheduling_s": 30, "warm_up_s": 30, "spares": 1, "repair_hours": 2},
    },
}


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return make_run(simulate(load_job(JOB)))


@pytest.fixture(scope="module")
def curves(plan: RunPlan) -> RunCurves:
    return draw_curves(plan, 1)


def point(value: float, goodput: float) -> CurvePoint:
    return CurvePoint(value, goodput, (goodput, goodput), None, 1.0, None)


def test_the_best_interval_lies_between_points() -> None:
    values = [2.0**k for k in range(8)]
    points = tuple(point(value, 0.9 - 0.01 * math.log(value / 11.0) ** 2) for value in values)
    assert find_best(points) == pytest.approx(11.0)
    assert find_best(points[:3]) == 4.0


@pytest.mark.slow
def test_the_best_interval_is_near_dalys(curves: RunCurves, plan: RunPlan) -> None:
    daly = RunAnswer(plan, simulate_runs(plan, 1)).describe_checkpoints()["daly_s"]
    assert 0.4 < (curves.best_interval or 0.0) / daly < 2.5
    ends = curves.interval[0].goodput, curves.interval[-1].goodput
    assert max(one.goodput for one in curves.interval) > max(ends)


def test_fewer_failures_and_fewer_gpus_are_better(curves: RunCurves, plan: RunPlan) -> None:
    rising = [one.goodput for one in curves.mtbf]
    assert rising == sorted(rising)
    assert [one.value for one in curves.scale] == [8, 16, 32, 64, 128]
    assert curves.scale[0].goodput > curves.scale[-1].goodput
    for each in (*curves.interval, *curves.mtbf, *curves.scale):
        assert 0 <= each.interval[0] <= each.goodput <= each.interval[1] <= 1
    steps = [each.value / plan.report.step_time for each in curves.interval]
    assert steps == pytest.approx([round(count) for count in steps]) and min(steps) > 0.5


def test_spare_nodes_and_a_faster_store_are_worth_something(curves: RunCurves) -> None:
    spare, store = curves.worth
    assert spare.change.startswith("one spare") and spare.goodput > 0.01
    assert spare.cost == pytest.approx(2 * 8 * 24, rel=0.02)
    assert store.goodput >= 0


def test_points_whose_runs_do_not_end_have_a_reason(tmp_path: Path) -> None:
    """The curves go on past them, and so do their page and their plot."""
    components = {"node": {"per": "node", "mtbf_hours": 1}}
    keys = {"steps": 5000, "seeds": 1, "days": None, "failures": {"rates": "none", "components": components}}
    keys |= {"checkpoints": {"kind": "sharded", "stall_s": 20, "every_s": 800}}
    plan = make_run(simulate(load_job({**JOB, "run": {**JOB["run"], **keys, "most_events": 1500}})))
    found = draw_curves(plan, 1)
    longest, shortest = found.interval[-1].to_dict(), found.interval[0].to_dict()
    assert "never ends" in longest["reason"] and longest["goodput"] is longest["days"] is None
    assert shortest["reason"] is None and shortest["goodput"] > 0 and found.best_interval
    answer = RunAnswer(plan, simulate_runs(plan, 1))
    save(lambda: plots.run_curves(answer, found), tmp_path / "curves.png")
    console = Console(width=200, file=StringIO())
    console.print(page(answer, found))
    assert f"{format_seconds(longest['value'])}: the run never ends" in console.file.getvalue()


@pytest.mark.parametrize(
    ("checkpoints", "intervals"),
    [("none", []), ({"kind": "sharded", "stall_s": 20, "every_s": 1}, [1, 2, 3, 4, 8, 16])],
)
def test_without_failures_there_is_no_curve_of_their_rate(checkpoints: Any, intervals: list[int]) -> None:
    """Checkpoints are whole steps apart, at least one."""
    run = {"steps": 100, "seeds": 1, "failures": "none", "checkpoints": checkpoints}
    plan = make_run(simulate(load_job({**JOB, "run": run})))
    drawn = draw_curves(plan, 1)
    assert drawn.mtbf == () and len(drawn.worth) == bool(intervals) == (drawn.best_interval is not None)
    assert [point.value / plan.report.step_time for point in drawn.interval] == pytest.approx(intervals)


@pytest.mark.slow
def test_the_plots_are_drawn_alike_each_time(curves: RunCurves, plan: RunPlan, tmp_path) -> None:
    answer = RunAnswer(plan, simulate_runs(plan, 1))
    for width in ("column", "page", "slide"):
        for name in ("one", "two"):
            save(lambda: plots.stacked_bar(answer), tmp_path / f"{name}.svg", width)
            save(lambda: plots.run_curves(answer, curves), tmp_path / f"{name}-curves.svg", width)
        assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
        text = (tmp_path / "one-curves.svg").read_text("utf-8")
        assert text == (tmp_path / "two-curves.svg").read_text("utf-8") and "goodput" in text
