"""CUDA_LAUNCH_BLOCKING=1: the host waits for every op, so its launch adds to each and nothing overlaps."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.simulate import simulate

SERIAL = {"dp": False, "sharded_weights": False, "pp": False, "gradients": False}


def job(**framework: Any) -> dict[str, Any]:
    return {
        "model": "gpt3-5b",
        "cluster": "dgx-a100:2",
        "framework": {"name": "megatron-deepspeed", "set": {"overlap": SERIAL, "step_overhead_s": 0.0, **framework}},
        "batch": {"global": 16, "micro": 1},
        "plan": {"tp": 4, "pp": 2},
    }


def test_every_op_of_one_gpu_takes_the_time_of_its_launch_longer() -> None:
    plain = {**job(launch_s=0.0), "cluster": {"gpu": "a100-sxm-80", "gpus": 1}, "plan": {}, "model": "gpt3-5b"}
    blocking = {**plain, "framework": {**plain["framework"], "set": {**plain["framework"]["set"]}}}
    blocking["framework"]["set"] |= {"launch_s": 1e-4, "launch_blocking": True}
    short, long = simulate(plain), simulate(blocking)
    ops = sum(turns * sum(n for op, n in task.count_ops() if op.work) for task, turns in short.play.program.turns())
    assert ops > 1000
    assert long.step_time == pytest.approx(short.step_time + 1e-4 * ops, rel=1e-9)
    assert long.breakdown.parts["host"] == 0


def test_a_host_that_runs_ahead_hides_what_a_blocked_one_adds() -> None:
    ahead, blocked = simulate(job(launch_s=3e-5)), simulate(job(launch_s=3e-5, launch_blocking=True))
    assert blocked.step_time > 1.02 * ahead.step_time
    assert simulate(job(launch_s=0.0, launch_blocking=True)).step_time == simulate(job(launch_s=0.0)).step_time


@pytest.mark.parametrize("engine", ["sweep", "simpy"])
def test_engines_agree(engine: Engine) -> None:
    described = job(launch_s=1e-4, launch_blocking=True)
    assert simulate(described, engine).step_time == pytest.approx(simulate(described).step_time, rel=1e-9)
