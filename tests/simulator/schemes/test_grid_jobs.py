"""Whole jobs with grids of tensor ranks and pipeline, data, sequence and expert parallelism."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.ops import Gemm
from meshcast.simulator.loading.load import load_job
from tests.contract.played import play_job
from tests.simulator.schemes.test_tensor_grid import AXES, TWOS, every_grid
from tests.strategies import some

# --------------------------------------------------------------------------------------------- whole jobs

SIZES = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "vocab": 128, "seq": 16}
MODERN = {**SIZES, "positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False}
MOE = {"experts": 8, "top_k": 2, "expert_ffn": 96, "shared_experts": 1, "first_dense": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope": 8, "qk_rope": 4, "v": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**SIZES, "dropout": 0.1},
    "llama": MODERN,
    "experts": {**MODERN, "moe": MOE},
    "latent": {**MODERN, "kv_heads": 8, "mla": LATENT},
    "further": {**SIZES, "mtp": 2},
    "side by side": {**SIZES, "parallel_residual": True, "embedding_norm": True, "qk_layernorm": True},
}


def job_of(use: str, model: str, data: str = "data/zero-1", view: bool = False, **more: Any) -> dict[str, Any]:
    """Two stages of two replicas of two sequence ranks around a grid of twos; eight samples a micro-batch."""
    sides = dict(zip(AXES[use], TWOS[use], strict=True))
    mesh = {"pp": 2, "dp": 2, "cp": 2, **sides}
    entries = [("pipeline/1f1b", "pp"), (data, "dp"), ("sequence/all-gather", "cp"), (use, list(sides))]
    schemes: list[dict[str, Any]] = [{"use": one, "over": over} for one, over in entries]
    views = {}
    if view:
        schemes.append({"use": "expert/all-to-all", "over": "ep"})
        views = {EXPERTS: {"edp": prod(mesh.values()) // 8, "ep": 4}}
    return {
        "model": MODELS[model],
        "cluster": {"gpu": "h100-sxm", "gpus": prod(mesh.values())},
        "framework": {"name": "megatron-core", "set": more.pop("set", {})},
        "batch": {"global": 32, "micro": 8},
        "plan": {"mesh": mesh, "views": views, "schemes": [*schemes, *more.pop("memory", [])]},
        **more,
    }


HOW: list[dict[str, Any]] = [
    {},
    {"data": "data/fsdp"},
    {"set": {"attention": "unfused", "regather": True}},
    {"precision": "fp8-delayed"},
    {"memory": [{"use": "memory/recompute-full"}]},
]


@pytest.mark.parametrize(("how", "model", "use"), some([*product(range(len(HOW)), MODELS, AXES)], 7))
def test_whole_jobs_do_the_models_work_and_give_all_memory_back(use: str, model: str, how: int) -> None:
    played = play_job(job_of(use, model, **HOW[how]))
    assert all(peak.left == 0 for peak in played.peaks)
    wanted = played.wanted
    assert played.flops("F") == pytest.approx(wanted)
    flash = 2.5 if played.plan.job.framework.attention == "flash" else 2
    assert played.flops("B", "W") == pytest.approx(
        {"gemm": 2 * wanted["gemm"], "attention": flash * wanted["attention"]}
    )


@every_grid
def test_experts_that_a_view_spreads_are_multiplied_where_they_lie(use: str) -> None:
    played = play_job(job_of(use, "experts", view=True))
    assert all(peak.left == 0 for peak in played.peaks)
    assert played.flops("F") == pytest.approx(played.wanted)
    held = [param for device in range(2) for param in played.held(device) if param.view]
    assert {param.total / param.size for param in held} == {4}
    grouped = [op for _, op in played.instances() if isinstance(op.work, Gemm) and op.work.groups]
    assert not any(op.name.endswith(" 0") for op in grouped)


@every_grid
def test_stages_send_each_other_the_part_of_a_rank(use: str) -> None:
    """Nothing of the residual stream is there twice."""
    played = play_job(job_of(use, "llama"))
    whole = 8 * 16 * 64 * 2 // 2  # of each sequence rank
    assert {
        unit_run.nbytes for stage_ops in played.stages for unit_run in stage_ops.unit_runs if unit_run.residual_out
    } == {  # type: ignore[union-attr]
        whole // prod(TWOS[use])
    }


@every_grid
def test_samples_divide_by_the_ranks_that_cut_them(use: str) -> None:
    job = {**job_of(use, "llama"), "batch": {"global": 2, "micro": 1}}
    with pytest.raises(PlanError, match=r"batch\.micro x data-parallel ranks = 2 must divide by dp x"):
        resolve_plan(load_job(job))


@every_grid
def test_sides_are_alike(use: str) -> None:
    job = job_of(use, "llama")
    mesh = {**job["plan"]["mesh"], AXES[use][-1]: 4}
    job = {**job, "cluster": {"gpu": "h100-sxm", "gpus": prod(mesh.values())}, "plan": {**job["plan"], "mesh": mesh}}
    with pytest.raises(PlanError, match=r"the same number of ranks along the axes .* = 2 or 4 would work"):
        resolve_plan(load_job(job))
