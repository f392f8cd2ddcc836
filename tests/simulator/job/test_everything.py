"""A job with nearly every key of a job, and framework settings that stand for schemes."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import load_job, simulate
from meshcast.simulator.job.framework import FUSED_KERNEL_TIME, load_framework
from meshcast.simulator.job.hardware_figures import HOST_RATES, hardware_figures

SETTINGS = {
    "attention": "flash", "cuda_graphs": False, "compile": False,
    "overlap": {"dp": True, "tp": False, "pp": True, "ep": False},
}  # fmt: skip
SCHEMES = [
    {"use": "pipeline/dualpipe", "over": "pp"},
    {"use": "data/fsdp", "over": "shard", "replicate": "replicate"},
    {"use": "sequence/ring", "over": "cp", "balance": "zigzag"},
    {"use": "expert/deepep", "over": "ep", "capacity": None, "routing": "balanced"},
    {"use": "memory/recompute-full", "layers": 4},
    {"use": "memory/offload", "what": ["optimizer"], "to": "cpu"},
]
MESH = {"pp": 16, "replicate": 2, "shard": 32, "cp": 2, "tp": 1}
NODES = {"gpu": "h800-sxm", "gpus_per_node": 8, "scale_up_domain": 8}
EVERYTHING: dict[str, Any] = {
    "model": {"preset": "deepseek-v3", "layers": 16},
    "train": {"mode": "full"},
    "cluster": {**NODES, "gpus": 2048, "inter": {"kind": "infiniband", "gbps_per_gpu": 400}},
    "framework": {"name": "megatron-core", "release": "25.09", "set": SETTINGS},
    "plan": {"mesh": MESH, "views": {"experts": {"edp": 2, "ep": 64, "etp": 1}}, "schemes": SCHEMES},
}


def test_all_of_it_is_forecast_at_once() -> None:
    answer = simulate(EVERYTHING).to_dict()
    assert answer["status"] == "fits"
    exposed, by = answer["breakdown_s"]["exposed"], answer["memory"]["stages"][0]["by"]
    assert all(exposed[axis] > 0 for axis in ("cp", "ep", "dp", "pp", "copy"))
    assert by["optimizer"] == 0 and by["parameters"] > 0


def test_the_long_form_is_the_same_job() -> None:
    once = load_job(EVERYTHING)
    again = load_job(once.to_dict())
    assert again.plan == once.plan and again.framework == once.framework and again.to_dict() == once.to_dict()


def test_host_memory_and_disks_are_figures_of_what_is_offloaded() -> None:
    resident, offloaded = (
        {figure.name for figure in hardware_figures(load_job(EVERYTHING), offloads)} for offloads in (False, True)
    )
    assert offloaded - resident == {f"host_{key}" for key in HOST_RATES}


def with_tensor(**overlap: bool) -> dict[str, Any]:
    return {
        "model": "llama3-8b",
        "cluster": "dgx-h100:1",
        "framework": {"name": "megatron-core", "set": {"overlap": overlap}},
        "plan": {"tp": 8},
        "batch": {"global": 8, "micro": 4},  # with less work on a GPU the host's calls for the parts take longer
    }


def test_overlap_of_tensor_parallelism_is_a_scheme_of_the_plan() -> None:
    plain, overlapped = load_job(with_tensor()), load_job(with_tensor(tp=True))
    uses = [entry.use for entry in overlapped.plan.schemes]
    before = [entry.use for entry in plain.plan.schemes]
    at = before.index("tensor/megatron-sp")
    assert uses == [*before[:at], "tensor/userbuffers", *before[at:]]
    assert [entry.use for entry in load_job(overlapped.to_dict()).plan.schemes] == uses
    assert simulate(overlapped).step_time < simulate(plain).step_time


def test_tensor_ranks_in_several_domains_do_not_overlap() -> None:
    job = with_tensor(tp=True) | {"model": "llama3-70b", "cluster": "dgx-h100:2", "plan": {"tp": 16}}
    plain = {**job, "framework": {"name": "megatron-core", "recipe": False}}
    told = "no overlap of tensor parallelism: its ranks are in several scale-up domains of 8 GPUs"
    assert simulate(job).step_time == simulate(plain).step_time
    assert told in simulate(job).assumed and told not in simulate(plain).assumed
    assert told not in simulate({**job, "plan": {"tp": 8}}).assumed


def test_a_plan_with_its_own_overlap_scheme_keeps_it() -> None:
    job = with_tensor(tp=True)
    schemes = [{"use": "tensor/flux"}, {"use": "tensor/megatron-sp", "over": "tp"}]
    loaded = load_job({**job, "plan": {"mesh": {"tp": 8}, "schemes": schemes}})
    assert [entry.use for entry in loaded.plan.schemes] == ["tensor/flux", "tensor/megatron-sp"]


@pytest.mark.parametrize("name", ["torchtitan", "llm-foundry", "reference"])
def test_a_compiler_fuses_memory_bound_kernels(name: str) -> None:
    """Eager kernels take longer, where a framework sets that; fused ones no longer than those of Megatron-Core."""

    def bound(compiled: bool) -> float:
        framework = {"name": name, "set": {"compile": compiled}}
        answer = simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "framework": framework}).to_dict()
        return float(answer["breakdown_s"]["compute"]["memory_bound"])

    chosen = load_framework(name)
    assert load_framework("megatron-core").rates["memory_bound"] == FUSED_KERNEL_TIME
    slower = bound(False) / bound(True)
    if chosen.eager:
        assert 1.5 < slower < 3.5
    else:
        assert slower == pytest.approx(max(1.0, chosen.rates.get("memory_bound", 1.0) / FUSED_KERNEL_TIME), rel=0.05)
