"""How long a forecast takes, whole and by part. Run by hand: ``make bench``."""

from pathlib import Path

import pytest

from simulator import load_job, simulate
from simulator.engine.program import build
from simulator.engine.step import played
from simulator.engine.timetable import timetable
from simulator.forecast import lowered
from simulator.plan import Plan

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_whole_forecast(benchmark, path):
    job = load_job(path)
    report = benchmark.pedantic(lambda: simulate(job).to_dict(), rounds=3)
    assert report["step_time_s"] > 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_lowering(benchmark, path):
    plan = Plan(load_job(path))
    stages, _ = benchmark.pedantic(lambda: lowered(plan), rounds=3)
    assert len(stages) == plan.shape.stages


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_timetable(benchmark, path):
    plan = Plan(load_job(path))
    table = benchmark.pedantic(lambda: timetable(plan.schedule, plan.shape), rounds=3)
    assert len(table.actions) >= 2 * plan.shape.stages * plan.shape.m


@pytest.mark.parametrize("engine", ["matrices", "sweep", "simpy"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_engine(benchmark, path, engine):
    """The program is built anew in every round, for blocks keep what was worked out about them."""

    def fresh():
        plan = Plan(load_job(path))
        stages, updates = lowered(plan)
        table = timetable(plan.schedule, plan.shape)
        program = build(table, stages, lambda work: (1e-3, 0.0, 0.0), plan.pipeline_axis, True, updates)
        return (program, engine), {}

    step = benchmark.pedantic(played, setup=fresh, rounds=3)
    benchmark.extra_info["ops"] = len(step.flat.ops)
    assert step.span > 0
