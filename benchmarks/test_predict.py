"""How long a forecast takes, whole and by part. Run by hand: ``pytest benchmarks --benchmark-only``."""

from pathlib import Path

import pytest

from meshcast.simulator import load_job, simulate
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.engine.play import play
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.program.build import build
from meshcast.simulator.program.timetable import timetable
from meshcast.validation.published.answer import answers as published
from meshcast.validation.published.rows import read_shipped

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.startswith(("sweep-", "search-")))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_whole_forecast(benchmark, path):
    job = load_job(path)
    report = benchmark.pedantic(lambda: simulate(job).to_dict(), rounds=3)
    assert report["step_time_s"] > 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_lowering(benchmark, path):
    plan = resolve_plan(load_job(path))
    stages, _ = benchmark.pedantic(lambda: lower_stages(plan), rounds=3)
    assert len(stages) == plan.shape.stages


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_timetable(benchmark, path):
    plan = resolve_plan(load_job(path))
    table = benchmark.pedantic(lambda: timetable(plan.schedule, plan.shape), rounds=3)
    assert len(table.actions) >= 2 * plan.shape.stages * plan.shape.m


@pytest.mark.parametrize("engine", ["matrices", "sweep", "simpy", "shared"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_engine(benchmark, path, engine):
    """The program is built anew in every round, for blocks keep what was worked out about them."""

    def fresh():
        plan = resolve_plan(load_job(path))
        stages, updates = lower_stages(plan)
        table = timetable(plan.schedule, plan.shape)
        program = build(table, stages, lambda work: (1e-3, 0.0, 0.0), plan.ranks.pipeline_axis, True, updates)
        uses = [Costs(plan.job.cluster, plan.mesh).use] * program.devices
        return (program, engine), {"uses": uses}

    step = benchmark.pedantic(play, setup=fresh, rounds=3)
    benchmark.extra_info["ops"] = len(step.flat.ops)
    assert step.span > 0


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


def test_published_runs(benchmark):
    """The 21 rows that ship."""
    answered = benchmark.pedantic(lambda: list(published(list(read_shipped()), workers=1)), rounds=3)
    assert len(answered) == 21
