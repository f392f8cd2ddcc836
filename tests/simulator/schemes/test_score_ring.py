"""Ring self-attention: traffic beside tensor parallelism, products, the scores that it keeps, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hardware.errors import PlanError
from simulator import simulate
from simulator.ir.mesh import Mesh
from simulator.ir.ops import Collective, Gemm, UnitRun
from simulator.models.model import Model
from tests.contract.measure import lowered_stage, make, saved, sent

GPT = Model(layers=1, hidden=192, heads=24, vocab=64, seq=96, dropout=0.1)


def layer(use: str = "", ranks: int = 1) -> tuple[UnitRun, Mesh]:
    """A layer with unfused attention under one scheme over an axis of `ranks`."""
    mesh = Mesh({"x": ranks})
    schemes = [make(use, mesh, ("x",))] if use else []
    (unit_run,) = lowered_stage(GPT, mesh, schemes, attention="unfused").unit_runs
    return unit_run, mesh


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_layer_sends_as_much_as_tensor_parallelism(ranks: int) -> None:
    """Four all-reduces of the residual stream, 8 (p-1)/p b s h elements (BurstAttention, arXiv 2403.09347, table 1)."""
    totals = []
    for use in ("sequence/rsa", "tensor/megatron"):
        unit_run, mesh = layer(use, ranks)
        totals.append(sent([*unit_run.fragment.forward, *unit_run.fragment.backward], mesh))
    assert totals == pytest.approx([8 * (ranks - 1) / ranks * 96 * 192 * 2] * 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_are_those_of_one_rank(ranks: int) -> None:
    def flops(unit_run: UnitRun) -> float:
        ops = [*unit_run.fragment.forward, *unit_run.fragment.backward]
        return sum(op.work.flops for op in ops if isinstance(op.work, Gemm) and op.work.what == "scores")

    assert ranks * flops(layer("sequence/rsa", ranks)[0]) == pytest.approx(flops(layer()[0]))


def test_saved_activations_are_divided() -> None:
    """Scores too: a rank has the rows of its own queries."""
    assert saved(layer("sequence/rsa", 4)[0]) * 4 == saved(layer()[0])


def test_kernels_wait_for_every_message() -> None:
    unit_run, _ = layer("sequence/rsa", 4)
    hops = [op for op in unit_run.fragment.forward if isinstance(op.work, Collective)]
    assert len(hops) == 6
    for i, op in enumerate(unit_run.fragment.forward):
        if op in hops:
            assert unit_run.fragment.forward[i - 1] in op.after and op in unit_run.fragment.forward[i + 1].after


@pytest.mark.parametrize(
    ("attention", "others", "words"),
    [
        ("flash", [], "keeps the scores.*flash attention"),
        ("unfused", [{"use": "sequence/ring", "over": "far"}], "one token order"),
    ],
)
def test_what_it_does_not_support_is_refused(attention: str, others: list[dict[str, Any]], words: str) -> None:
    mesh = {"far": 2, "near": 2} if others else {"near": 4}
    job = {
        "model": {"layers": 1, "hidden": 64, "heads": 4, "vocab": 64, "seq": 64},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "framework": {"name": "megatron-core", "set": {"attention": attention}},
        "plan": {"mesh": mesh, "schemes": [*others, {"use": "sequence/rsa", "over": "near"}]},
    }
    with pytest.raises(PlanError, match=words):
        simulate(job)
