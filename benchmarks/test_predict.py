"""How long a forecast takes, whole and by part. Run by hand: ``make bench``."""

from pathlib import Path

import pytest

from simulator import load_job, simulate
from simulator.engine.program import Builder
from simulator.engine.simpy_engine import play
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
def test_engine(benchmark, path):
    plan = Plan(load_job(path))
    stages, updates = lowered(plan)
    program = Builder(
        plan.shape, plan.schedule, stages, lambda work: (1e-3, 0.0), plan.pipeline_axis, True, updates
    ).build()
    times = benchmark.pedantic(lambda: play(program), rounds=3)
    benchmark.extra_info["ops"] = len(program.ops)
    assert times.span > 0
