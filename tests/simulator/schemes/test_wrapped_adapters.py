"""Matrices of adapters that are units of FSDP1 inside of their layers, as the policy of PEFT wraps them."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.engine.play import Engine
from meshcast.simulator.ir.ops import Collective, HostLaunch
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.schemes.data.shared.gather_plan import BACKWARD_HOOKS, FORWARD_HOOKS
from meshcast.validation.contract.played import Played, play_job

LAYERS, HIDDEN, RANK = 3, 64, 4
MATRICES = 2 * 4 * LAYERS
"""Of adapters of queries, keys, values and the projection of every layer."""


def play(
    units: bool = True, recompute: str = "full", seq: int = 64, engine: Engine = "matrices", **more: Any
) -> Played:
    model = {"layers": LAYERS, "hidden": HIDDEN, "heads": 4, "ffn": 96, "vocab": 128, "seq": seq, "tied": False}
    traits = {"adapters": {"weights": "fp32", "separate": True, "eager": True, "units": units}, **more.pop("set", {})}
    job = {
        "model": model,
        "cluster": {"gpu": "a100-sxm-80", "gpus": 2},
        "framework": {"name": "hf-trainer", "release": "2025-01", "set": traits},
        "batch": {"global": 2, "micro": 1},
        "train": {"mode": "lora", "rank": RANK, "targets": ["attn_qkv", "attn_proj"]},
        "plan": {"fsdp": True, "recompute": recompute},
    }
    return play_job(job | more, engine=engine)


def moved(played: Played, operation: str) -> list[int]:
    works = (op.work for _, op in played.instances() if op.stream.startswith("data"))
    return [work.nbytes for work in works if isinstance(work, Collective) and work.operation == operation]


@pytest.mark.parametrize(("recompute", "passes"), [("full", 3), ("none", 2)])
def test_they_move_as_much_in_a_message_for_every_matrix_and_pass(recompute: str, passes: int) -> None:
    """But for three of the lowest layer, behind whose recomputation nothing reads them: no gradient is handed on."""
    apart, joined = play(recompute=recompute), play(False, recompute)
    lowest = 3 if recompute == "full" else 0
    small, large = (moved(played, "all_gather") for played in (apart, joined))
    assert sum(small) == sum(large) - lowest * 2 * RANK * HIDDEN
    assert len(small) - len(large) == MATRICES * passes - lowest
    small, large = (moved(played, "reduce_scatter") for played in (apart, joined))
    assert sum(small) == sum(large)
    assert (len(small), len(large)) == (MATRICES, LAYERS)
    assert apart.peaks[0].left == joined.peaks[0].left


def test_the_host_calls_hooks_before_every_pass_of_a_matrix() -> None:
    calls = [(op.phase, op.work.number) for _, op in play().instances() if isinstance(op.work, HostLaunch)]
    forward = [number for phase, number in calls if phase == "F"]
    assert len(forward) == MATRICES and len(calls) == 3 * MATRICES - 3
    assert min(forward) >= FORWARD_HOOKS < BACKWARD_HOOKS
    assert sum(number >= BACKWARD_HOOKS for _, number in calls) >= MATRICES - 3


def test_hooks_hide_behind_long_kernels() -> None:
    added = [play(seq=seq).step.span - play(False, seq=seq).step.span for seq in (64, 65_536)]
    total = MATRICES * 10e-6 * (2 * FORWARD_HOOKS + BACKWARD_HOOKS)
    assert 0.8 * total <= added[0] <= 1.2 * total and abs(added[1]) < 0.1 * added[0]


@pytest.mark.parametrize(
    "more", [{"set": {"gathers_apart": True}}, {"cluster": {"gpu": "a100-sxm-80", "gpus": 1}}, {"train": {}}]
)
def test_other_runs_have_none(more: dict[str, Any]) -> None:
    """FSDP2, a model on one GPU, training of all weights."""
    assert not any(isinstance(op.work, HostLaunch) for _, op in play(**more).instances())
    assert not load_framework("hf-trainer", release="2024-02").adapters.units


def test_engines_agree() -> None:
    slow, fast = (play(seq=4096, engine=engine) for engine in ("simpy", "matrices"))
    assert fast.step.span == pytest.approx(slow.step.span, rel=1e-9)
