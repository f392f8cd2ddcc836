"""What layers keep for the backward pass is to the byte what torch's own tracker counts of the same layers."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.contract.measure import saved_bytes
from tests.draws import drawn
from tests.validation.activations.apart import track
from tests.validation.activations.families import FAMILIES, POLICIES, UNFUSED

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

COMBINATIONS = [
    (family, policy, precision)
    for precision in ("bf16", "fp32")
    for family in FAMILIES
    for policy in POLICIES
    if not (family in UNFUSED and policy == "operators")  # torchtitan's list is of models with fused attention
]
FIRST = [("deepseek", "none", "bf16"), ("gpt-2", "operators", "bf16"), ("gemma-2", "selective", "bf16")]
"""Combinations of every run: with these each rule of `simulator.ir.saved` is held once, but those of experts."""
FIRST += [("qwen3-moe", "none", "bf16"), ("opt", "none", "fp32"), ("falcon", "full", "bf16"), ("phi", "none", "bf16")]


DIVIDED = [(family, policy) for family in ("llama", "qwen3", "mistral", "opt", "nemotron") for policy in POLICIES]
"""Families that torchtitan's division of layers serves, with what keeps memory at a time."""


def plan_of(family: str, policy: str, precision: str, ranks: int = 1) -> Plan:
    """The plan of a job of Transformers' own trainer."""
    attention = "unfused" if family in UNFUSED else "flash"
    job: dict[str, Any] = {
        "model": FAMILIES[family],
        "cluster": {"node": "dgx-h100", "nodes": 1, "gpus": ranks},
        "framework": {"name": "hf-trainer", "set": {"attention": attention}},
        "precision": dict.fromkeys(("compute", "gradients", "main_weights"), precision),
        "batch": {"micro": 2},
        "plan": {"recompute": policy, "tp": ranks, "tp_scheme": "megatron-sp"},
    }
    return resolve_plan(load_job(job))


def kept_on_a_rank(plan: Plan) -> float:
    """Bytes that a layer of a plan keeps."""
    (layer,) = [run for run in make_lowering(plan).run(plan.model_parts.stage(0)).unit_runs if run.name == "layer"]
    return saved_bytes(layer)


@pytest.mark.parametrize(("family", "policy", "precision"), drawn(COMBINATIONS, FIRST))
def test_a_layer_keeps_the_bytes_that_torch_tracks(
    family: str, policy: str, precision: str, apart: ProcessPoolExecutor
) -> None:
    plan = plan_of(family, policy, precision)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    tracked = apart.submit(track, "kept_by_a_layer", plan.job.model, family not in UNFUSED, policy, dtype)
    assert tracked.result() == kept_on_a_rank(plan)


@pytest.mark.parametrize(("family", "policy"), drawn(DIVIDED, [("qwen3", "none"), ("opt", "operators")]))
def test_so_does_a_layer_that_tensor_ranks_divide(family: str, policy: str, apart: ProcessPoolExecutor) -> None:
    plan = plan_of(family, policy, "bf16", ranks=2)
    tracked = apart.submit(track, "kept_by_a_layer", plan.job.model, True, policy, torch.bfloat16, 2)
    assert tracked.result() == kept_on_a_rank(plan)
