"""What messages about degrees suggest would work: every suggestion makes a job that loads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate

JOB: dict[str, Any] = {
    "model": "llama3-70b", "cluster": "dgx-h100:64", "batch": {"global": 1024, "micro": 1, "sequence": 8192},
    "plan": {"tp": 8, "pp": 4},
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model": "deepseek-v3", "cluster": "dgx-h100:100", "batch": {"global": 8192, "micro": 1, "sequence": 4096},
    "plan": {"tp": 2, "pp": 8, "ep": 64, "partition": "ends-as-layers"},
}  # fmt: skip


@pytest.mark.parametrize(("job", "changes", "remedy"), [
    (JOB, {"cluster": "dgx-h100:63"}, "32 or 64 nodes would work"),
    (JOB, {"cluster": "dgx-h100:50", "plan": {"tp": 8, "pp": 8}}, "32 or 64 nodes would work"),
    (JOB, {"plan": {"tp": 12, "pp": 4}}, "With pp = 4, tp = 8 would work"),
    (JOB, {"plan": {"tp": 8, "pp": 5}}, "With tp = 8, pp = 4 would work"),
    (EXPERTS, {}, "64 or 128 nodes would work"),
    (EXPERTS, {"cluster": "dgx-h100:127"}, "64 or 128 nodes would work"),
])  # fmt: skip
def test_what_would_work_works(job: dict[str, Any], changes: dict[str, Any], remedy: str) -> None:
    data = {**job, **changes}
    with pytest.raises(PlanError) as refused:
        load_job(data)
    assert remedy in refused.value.remedy
    for nodes in re.findall(
        r"\d+(?= or \d+ nodes|(?<= or )\d+(?= nodes))|(?<= or )\d+(?= nodes)", refused.value.remedy
    ):
        assert load_job({**data, "cluster": f"dgx-h100:{nodes}"}).cluster.gpus == 8 * int(nodes)
    for name, degree in re.findall(r"(\w+) = (\d+) would work", refused.value.remedy):
        load_job({**data, "plan": {**data["plan"], name: int(degree)}})


def test_the_group_of_micro_batches_is_written_as_a_job_has_it() -> None:
    job = {
        **JOB,
        "cluster": "dgx-h100:16",
        "batch": {"global": 40, "micro": 1},
        "plan": {"tp": 8, "pp": 4, "chunks": 2},
    }
    with pytest.raises(PlanError) as refused:
        simulate(job)
    schedule = re.search(r"plan.schedule: (\{.*\})", refused.value.remedy)
    assert schedule is not None and "change batch.global or plan.dp" in refused.value.remedy
    plan = {**job["plan"], "schedule": yaml.safe_load(schedule[1])}
    assert simulate({**job, "plan": plan}).step_time > 0
