"""torch's private pipelining names stay in one module, which says so if an installed torch lacks them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from tests.validation.distributed.jobs import job

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from meshcast.validation.distributed import torch_pipelining  # noqa: E402
from meshcast.validation.distributed.pipeline import PipelinePasses  # noqa: E402
from meshcast.validation.distributed.trainer import check  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
WITH_PRIVATE_NAMES = {
    "validation/distributed/torch_pipelining.py",
    "tests/simulator/formats/test_torch_schedule.py",  # compares the bridge's files with those of torch's schedules
    "tests/validation/distributed/test_torch_pipelining.py",
}

PRIVATE = re.compile(
    r"torch\.distributed\.pipelining\S* import .*\b_|\b_PipelineScheduleRuntime\(|\b_ComputationType\b|\._load_csv\b"
    r"|_comp_type_to_function_map|pipeline_order_with_comms|args_recv_info|grad_recv_info|dw_builder|act_send_info"
    r"|_prepare_(?:forward|backward)_infra|_setup_(?:forward|backward)_recv_info|_one_chunk\("
)
NEAR = re.compile(
    "pipelin|PipelineScheduleRuntime|ComputationType|_load_csv|comp_type_to|_recv_info|dw_builder|act_send|_one_chunk"
)


def test_one_module_uses_private_names() -> None:
    packages = ("hardware", "simulator", "validation", "experiments", "tests", "benchmarks")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}
    near = {name: text for name, text in texts.items() if NEAR.search(text)}  # the whole pattern takes long
    assert {name for name, text in near.items() if PRIVATE.search(text)} == WITH_PRIVATE_NAMES


@pytest.mark.parametrize("name", ["_load_csv", "get_fwd_recv_ops"])
def test_a_torch_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for names in ("RUNTIME_NAMES", "STAGE_NAMES"):
        if name in getattr(torch_pipelining, names):
            monkeypatch.setattr(torch_pipelining, names, (f"{name}_of_old",))
    with pytest.raises(PlanError, match=rf"has no {name}_of_old.* Install torch 2\.\d+ to 2\.\d+"):
        check(resolve_plan(load_job(job(2, pp=2))))
    check(resolve_plan(load_job(job(2, tp=2))))


def test_a_torch_without_the_runtime_or_an_attribute_is_refused(monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
    plan = resolve_plan(load_job(job(2, pp=2)))
    with monkeypatch.context() as patch:
        patch.setattr(torch_pipelining, "INSTANCE_NAMES", ("args_recv_info", "recv_buffers"))
        with pytest.raises(PlanError, match="LeanPipelineStage of torch's pipelining has no recv_buffers"):
            PipelinePasses(plan, {0: torch.nn.Identity()}, ranks(plan, 0))
    monkeypatch.setattr(torch_pipelining, "schedules", SimpleNamespace(__name__="torch.distributed.pipelining"))
    with pytest.raises(PlanError, match="has no _PipelineScheduleRuntime"):
        check(plan)
