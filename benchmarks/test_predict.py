"""How long a forecast takes, whole and by part. Run by hand: ``make bench``."""

import json
from pathlib import Path

import pytest

from experiments.jobs import answers
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


def test_many_jobs(benchmark):
    """GPT-3 175B on 1,024 A100s: 240 plans, half of which are valid; extra_info tells how many a second."""
    lines = [
        json.dumps(
            {
                "model": "gpt3-175b",
                "cluster": "dgx-a100:128",
                "batch": {"global": 1536, "micro": micro, "sequence": 2048},
                "plan": {"tp": tp, "pp": pp, "chunks": chunks},
            }
        )
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8, 16)
        for micro in (1, 2, 4, 8)
        for chunks in (1, 2, 3)
    ]
    found = benchmark.pedantic(lambda: list(answers(lines, "jobs", Path("."))), rounds=3)
    valid = sum("error" not in answer for answer in found)
    benchmark.extra_info["valid jobs a second"] = valid / benchmark.stats["min"]
    assert valid == 120


def test_a_long_pipeline(benchmark):
    """64 stages and 512 micro-batches."""
    job = load_job(
        {
            "model": {"preset": "gpt3-175b", "layers": 64},
            "cluster": "dgx-a100:64",
            "batch": {"global": 512, "micro": 1, "sequence": 2048},
            "plan": {"tp": 8, "pp": 64},
        }
    )
    report = benchmark.pedantic(lambda: simulate(job).to_dict(), rounds=3)
    assert report["step_time_s"] > 0
