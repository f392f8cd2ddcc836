"""The smallest check from end to end, in well under a second: run it first."""

from __future__ import annotations

import json

from meshcast.simulator import simulate
from meshcast.validation.pipelines.cases import answer

JOB = {
    "model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32},
    "cluster": "dgx-h100:1",
    "plan": {"tp": 2, "pp": 2},
}


def test_a_job_is_forecast() -> None:
    report = simulate(JOB)
    answer = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert answer["status"] == "fits" and report.fits
    assert 0 < answer["interval_90_s"][0] < answer["step_time_s"] < answer["interval_90_s"][1] < 1
    parts = answer["breakdown_s"]
    exposed, compute = parts.pop("exposed"), parts.pop("compute")
    total = sum(parts.values()) + sum(exposed.values()) + sum(compute.values())
    assert abs(total - answer["step_time_s"]) < 1e-9
    assert [entry["use"] for entry in answer["job"]["plan"]["schemes"]] == [
        "pipeline/1f1b",
        "data/zero-1",
        "tensor/megatron-sp",
    ]
    assert len(answer["memory"]["stages"]) == 2


def test_a_schedule_is_played() -> None:
    found = answer({"schedule": "1f1b", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1})
    assert (found["makespan"], found["in_flight_b"]) == (15, [2, 1])
