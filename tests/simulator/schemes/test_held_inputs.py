"""Inputs of units with frozen weights, which the hooks of PyTorch's FSDP1 hold up to the end of a backward pass."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.engine.peak_memory import Peak
from meshcast.simulator.job.framework import load_framework

SHAPE = {"hidden": 512, "heads": 8, "ffn": 512, "vocab": 64, "seq": 4096, "tied": False}
FSDP: dict[str, Any] = {"fsdp": True}
INPUT = 2 * SHAPE["hidden"] * SHAPE["seq"]
"""Bytes of the input of a layer, and of its gradient."""


def peak_of(layers: int, holds: bool, plan: dict[str, Any], **job: Any) -> Peak:
    """The peak of a run whose layers decide it."""
    traits = {"memory": {"hooks_hold_inputs": holds}, **job.pop("traits", {})}
    fields = {
        "model": {**SHAPE, "layers": layers},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "framework": {"name": "hf-trainer", "set": traits},
        "batch": {"global": 8, "micro": 1},
        "train": {"mode": "lora"},
        "plan": {"recompute": "full", **plan},
        **job,
    }
    return simulate(fields).play.peaks[0]


def test_each_layer_adds_the_gradient_of_its_input_to_the_one_that_is_computed_last() -> None:
    more = [peak_of(6, holds, FSDP).total - peak_of(3, holds, FSDP).total for holds in (False, True)]
    assert more[1] - more[0] == pytest.approx(3 * INPUT, rel=0.02)


@pytest.mark.parametrize("plan", [FSDP, {**FSDP, "pp": 2, "schedule": "zb-h1"}])
def test_they_are_free_after_it(plan: dict[str, Any]) -> None:
    held, free = (peak_of(4, holds, plan) for holds in (True, False))
    assert held.left == pytest.approx(free.left) and held.total >= free.total


@pytest.mark.parametrize(
    ("plan", "job"),
    [
        (FSDP, {"train": {"mode": "full"}}),
        ({**FSDP, "recompute": "none"}, {}),
        ({"zero": 0}, {}),
        (FSDP, {"traits": {"gathers_apart": True}}),
    ],
)
def test_other_runs_hold_none(plan: dict[str, Any], job: dict[str, Any]) -> None:
    assert peak_of(4, True, plan, **job) == peak_of(4, False, plan, **job)


@pytest.mark.parametrize(
    ("release", "reentrant", "holds"),
    [("2023-09", True, False), ("2023-10", True, True), ("2025-12", True, True), ("2026-01", False, False)],
)
def test_checkpoints_of_transformers_were_reentrant(release: str, reentrant: bool, holds: bool) -> None:
    framework = load_framework("hf-trainer", release=release)
    assert framework.memory.hooks_hold_inputs == holds
    assert framework.reentrant_units == reentrant == (not framework.recompute_early_stop)
    assert load_framework("deepspeed", release=release).recompute_early_stop != reentrant
