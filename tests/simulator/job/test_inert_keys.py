"""Keys without effect are named, and have none: the forecast without them is the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.job.inert_keys import inert_keys
from meshcast.simulator.loading.load import load_job, set_field

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": 1, "sequence": 2048}, "framework": {"name": "megatron-core"},
}  # fmt: skip


def make_job(changes: dict[str, Any]) -> dict[str, Any]:
    job = copy.deepcopy(JOB)
    for field, value in changes.items():
        set_field(job, field, value, field)
    return job


@pytest.mark.parametrize(("key", "value", "others"), [
    ("plan.chunks", 4, {"plan.pp": 1, "plan.zero": 3}), ("plan.chunks", 4, {"plan.pp": 1, "plan.fsdp": True}),
    ("plan.partition", "by-cost", {}), ("plan.order", "dp-pp-cp-tp", {"plan.tp": 2}),
    ("plan.order", "dp-pp-cp-tp", {"plan.tp": 4, "plan.pp": 2}), ("plan.tp_scheme", "async-tp", {}),
    ("plan.sequence_parallel", False, {"plan.cp": 2}), ("plan.cp_scheme", "ulysses", {"plan.tp": 2}),
    ("plan.pad_heads", True, {"plan.tp": 4}), ("plan.share", "by-speed", {}), ("plan.zero", 2, {"plan.fsdp": True}),
    ("plan.zero", 3, {"plan.tp": 8}), ("plan.unit", 2, {"plan.fsdp": True, "plan.tp": 8}),
    ("plan.prefetch", 2, {"plan.fsdp": True, "plan.tp": 8}), ("plan.reshard", False, {"plan.fsdp": True, "plan.tp": 8}),
    ("plan.recompute", "full", {"train.mode": "forward-only"}),
    ("plan.recompute_layers", 2, {"train.mode": "forward-only", "plan.recompute": "full"}),
    ("plan.offload", ["optimizer"], {"train.mode": "forward-only"}),
    ("precision.gradients", "bf16", {"train.mode": "forward-only"}),
    ("precision.main_weights", "bf16", {"train.mode": "forward-only"}),
    ("precision.moments", "bf16", {"train.mode": "forward-only"}), ("framework.set.overlap.tp", True, {}),
    ("framework.set.overlap.dp", False, {"plan.tp": 8}), ("framework.set.overlap.pp", False, {"plan.tp": 2}),
    ("run.price_per_gpu_hour", 2.5, {}), ("run.carbon_kg_per_kwh", 0.4, {}), ("noise.slow", 1.3, {"noise.jitter": 0.0}),
    ("noise.persistent", True, {"noise.jitter": 0.0}), ("noise.stragglers", 0.1, {"noise.jitter": 0.0}),
])  # fmt: skip
def test_a_key_without_effect_is_named_and_has_none(key: str, value: Any, others: dict[str, Any]) -> None:
    given, without = (simulate(make_job(one)) for one in ({**others, key: value}, others))
    assert key in [one.key for one in inert_keys(given.job)]
    assert key not in [one.key for one in inert_keys(without.job)]
    assert any(text.startswith(f"{key}: ") and "no effect" in text for text in given.warnings)
    # Ops may be summed in another order where axes without ranks differ.
    assert given.step_time == pytest.approx(without.step_time, rel=1e-12)
    assert given.peak_device == pytest.approx(without.peak_device, rel=1e-12)
    assert given.step_times == pytest.approx(without.step_times, rel=1e-12)
    if key == "plan.chunks":
        assert given.step_time == without.step_time


@pytest.mark.parametrize("changes", [
    {"plan.pp": 2, "plan.chunks": 2, "plan.zero": 2},
    {"plan.pp": 1, "plan.schedule": "breadth-first", "plan.chunks": 2},
    {"plan.tp": 2, "plan.sequence_parallel": False},
    {"plan.cp": 2, "plan.tp": 2, "plan.cp_scheme": "ring", "plan.zero": 3},
    {"plan.fsdp": True, "plan.unit": 2, "plan.reshard": False, "plan.prefetch": 2},
    {"plan.pp": 2, "plan.order": "dp-pp-cp-tp", "plan.partition": "by-cost"},
    {"run.tokens": 1e9, "run.price_per_gpu_hour": 2.0, "run.carbon_kg_per_kwh": 0.1, "run.pue": 1.1},
    {"noise.stragglers": 0.1, "noise.slow": 1.2, "noise.persistent": True},
    {"framework.set.overlap.dp": False, "precision.gradients": "bf16", "plan.recompute": "full"},
])  # fmt: skip
def test_keys_that_act_are_accepted_silently(changes: dict[str, Any]) -> None:
    assert inert_keys(load_job(make_job(changes))) == []
