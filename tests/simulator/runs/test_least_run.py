"""Lower bounds of the length of runs, held against simulated runs of drawn jobs."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import Report, load_job, simulate
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import make_run, replace_run_keys
from meshcast.simulator.runs.least_run import LeastRun
from meshcast.simulator.runs.training import simulate_run
from tests.draws import drawn

JOB: dict[str, Any] = {"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:4"}


@cache
def forecast(zero: int) -> Report:
    return simulate(load_job({**JOB, "plan": {"zero": zero}}))


def draw_run(rng: random.Random) -> dict[str, Any]:
    """Keys of a run with much of what makes it longer."""
    kind = rng.choice(["none", "full", "sharded", "asynchronous", "in-memory", "just-in-time"])
    checkpoints: dict[str, Any] = {"kind": kind, "write_gb_per_s": rng.choice([1.0, 20.0])}
    if kind not in ("none", "just-in-time") and rng.random() < 0.7:
        key, value = rng.choice([("every_steps", rng.choice([1, 7, 100])), ("every_s", rng.choice([60.0, 600.0]))])
        checkpoints[key] = value
    recovery = {
        "detection_s": rng.choice([0.0, 30.0]),
        "spares": rng.choice([None, 0, 1]),
        "repair_hours": rng.choice([0.1, 1.0]),
        "elastic": rng.choice(["none", "none", "fewer-replicas", "templates", "reroute"]),
        "reconfigure_s": rng.choice([5.0, 60.0]),
    }
    component = {"per": "node", "mtbf_hours": rng.choice([0.5, 4.0]), "shape": rng.choice([1.0, 2.0])}
    failures = {"rates": "none", "components": {"node": component, "job": {"per": "job", "mtbf_hours": 2.0}}}
    failures["components"]["job"]["loses"] = "nothing"
    stragglers = {
        "jitter": rng.choice([0.0, 0.05, 0.5]),
        "distribution": rng.choice(["normal", "lognormal", "exponential"]),
        "ranks": rng.choice([None, 1, 2]),
    }
    run = {"steps": rng.choice([1, 50, 1000]), "seeds": 2, "seed": rng.randrange(99), "checkpoints": checkpoints}
    return run | {"recovery": recovery, "failures": failures, "stragglers": stragglers}


@pytest.mark.parametrize("start", drawn(range(0, 48, 6), keep=4))
def test_no_run_is_shorter_than_its_bound(start: int) -> None:
    for number in range(start, start + 6):
        rng = random.Random(number)
        report = forecast(rng.choice([0, 1]))
        job = load_job({**JOB, "run": draw_run(rng)})
        try:
            plan = make_run(replace_run_keys(report, job))
        except PlanError as error:
            assert "just-in-time" in str(error)
            continue
        answer = RunAnswer(plan, [simulate_run(plan.setting, plan.seed, k) for k in range(plan.seeds)])
        for equal in (True, False):
            least, step = LeastRun(job, equal), report.step_time
            assert 0 <= least.seconds(step) <= answer.seconds, number
            bounds = least.seconds(np.array([step / 3, step, 3 * step]))
            assert bounds[1] == pytest.approx(least.seconds(step), rel=1e-12) and (np.diff(bounds) >= 0).all()


def test_the_bound_is_the_run_where_failures_destroy_nothing() -> None:
    """With a checkpoint after every step that costs nothing, a run loses part of a step at each failure."""
    component = {"per": "node", "mtbf_hours": 1.0}
    run = {
        "steps": 30_000,
        "seeds": 4,
        "checkpoints": {"kind": "sharded", "every_steps": 1, "stall_s": 0.0, "load_s": 20.0},
        "failures": {"rates": "none", "components": {"node": component}},
    }
    report, job = forecast(1), load_job({**JOB, "run": run})
    plan = make_run(replace_run_keys(report, job))
    answer = RunAnswer(plan, [simulate_run(plan.setting, plan.seed, k) for k in range(plan.seeds)])
    failures = sum(answer.failures.values())
    assert failures > 3 and answer.time_s["lost_work"] > 0
    assert LeastRun(job).seconds(report.step_time) <= answer.seconds
    assert LeastRun(job).seconds(report.step_time) >= answer.seconds - failures * report.step_time
