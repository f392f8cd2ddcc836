"""Ring self-attention: traffic beside tensor parallelism, products, the scores that it keeps, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Gemm, UnitRun
from meshcast.simulator.models.flops import causal
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import lowered_stage, make, saved_bytes, sent_bytes
from meshcast.validation.contract.played import play_job
from tests.simulator.schemes.small_jobs import job_on

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
        totals.append(sent_bytes([*unit_run.fragment.forward, *unit_run.fragment.backward], mesh))
    assert totals == pytest.approx([8 * (ranks - 1) / ranks * 96 * 192 * 2] * 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_are_those_of_one_rank(ranks: int) -> None:
    def flops(unit_run: UnitRun) -> float:
        ops = [*unit_run.fragment.forward, *unit_run.fragment.backward]
        return sum(op.work.flops for op in ops if isinstance(op.work, Gemm) and op.work.what == "scores")

    assert ranks * flops(layer("sequence/rsa", ranks)[0]) == pytest.approx(flops(layer()[0]))


def test_saved_activations_are_divided() -> None:
    """Scores too: a rank has the rows of its own queries."""
    assert saved_bytes(layer("sequence/rsa", 4)[0]) * 4 == saved_bytes(layer()[0])


# ------------------------------------------------------------------------------------ projected keys and values

LINFORMER = GPT.model_copy(update={"bidirectional": True, "projected_keys": 16})


def projected(ranks: int, model: Model = LINFORMER) -> tuple[UnitRun, Mesh]:
    """A layer whose keys and values are projected to 16 positions."""
    mesh = Mesh({"x": ranks})
    (unit_run,) = lowered_stage(model, mesh, [make("sequence/rsa", mesh, ("x",))], attention="unfused").unit_runs
    return unit_run, mesh


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("seq", [96, 192])
def test_projected_keys_are_summed_whatever_the_length(ranks: int, seq: int) -> None:
    """All-reduces of keys and of values, b k h elements each, forward and backward: 4 (p-1)/p b k h a pass."""
    unit_run, mesh = projected(ranks, LINFORMER.model_copy(update={"seq": seq, "position_rows": seq}))
    for ops in (unit_run.fragment.forward, unit_run.fragment.backward):
        assert sent_bytes([op for op in ops if op.stream == "sequence"], mesh) == 4 * (ranks - 1) / ranks * 16 * 192 * 2


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_scores_and_projections_are_divided_and_projected_keys_are_not(ranks: int) -> None:
    """Memory is linear in the tokens of a rank: a b s k/p scores, in 2 + 1 + 2 bytes with dropout, and 2 s k/p weights;
    only 2 b k h elements are whole on every rank."""
    (one, _), (some, _) = projected(1), projected(ranks)
    whole = 2 * 16 * 192 * 2
    assert saved_bytes(some) - whole == (saved_bytes(one) - whole) / ranks
    kept = {use.key.rpartition(".")[2]: use.nbytes for use in some.fragment.tensor_uses if use.key.startswith("core.")}
    scores = 24 * 96 * 16 // ranks
    assert (kept["softmax"], kept["mask"], kept["dropped"]) == (2 * scores, scores, 2 * scores)
    weights = {param.name: param for param in some.fragment.params}
    for name in ("wk.projected", "wv.projected"):
        assert (weights[name].size, weights[name].total, weights[name].partial) == (96 * 16 // ranks, 96 * 16, ())

    def flops(unit_run: UnitRun) -> float:
        ops = [*unit_run.fragment.forward, *unit_run.fragment.backward]
        return sum(op.work.flops for op in ops if isinstance(op.work, Gemm))

    assert ranks * flops(some) == pytest.approx(flops(one))


def test_work_and_parameters_of_projected_keys() -> None:
    """Scores are of k keys in place of s, and two matrices [s, k] are added to each layer."""
    whole = LINFORMER.model_copy(update={"projected_keys": None})
    assert LINFORMER.parameters - whole.parameters == 2 * 96 * 16
    forward = [op.work.flops for op in projected(1)[0].fragment.forward if isinstance(op.work, Gemm)]
    head = 2 * 96 * 192 * 64
    assert causal(LINFORMER, 96) * 96 == pytest.approx(3 * (sum(forward) + head))


@pytest.mark.parametrize("use", ["sequence/rsa", "tensor/megatron", "tensor/megatron-sp"])
def test_a_step_with_projected_keys_does_the_work_of_one_rank(use: str) -> None:
    whole = linformer_job() | {"cluster": {"gpu": "h100-sxm", "gpus": 1}, "plan": {"mesh": {}, "schemes": []}}
    divided = linformer_job()
    divided["plan"]["schemes"] = [{"use": use, "over": "x"}]
    one, four = play_job(whole), play_job(divided)
    for phase in "FBW":
        assert four.flops(phase) == pytest.approx(one.flops(phase))
    assert [peak.left for peak in four.peaks] == [0]


def linformer_job() -> dict[str, Any]:
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 64, "seq": 64}
    model = {**sizes, "bidirectional": True, "dropout": 0.1, "projected_keys": 16}
    more = {"framework": {"name": "megatron-core", "set": {"attention": "unfused"}}, "batch": {"micro": 4}}
    return job_on({"x": 4}, {"use": "sequence/rsa", "over": "x"}, samples=4, model=model, **more)
