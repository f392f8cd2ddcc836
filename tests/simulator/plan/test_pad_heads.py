"""Heads that tensor parallelism does not divide: refused, or padded with dummy heads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.flops import CONVENTIONS
from meshcast.simulator.models.model import Model
from meshcast.simulator.report.report import Report
from tests.draws import drawn
from tests.jobs import on_gpus

GRID = on_gpus(8, {"dp": 2, "row": 2, "column": 2}, "data/ddp over dp", "tensor/summa-2d over row column")["plan"]
ULYSSES = on_gpus(
    8, {"dp": 2, "cp": 2, "tp": 2}, "data/zero-1 over dp", "sequence/ulysses over cp", "tensor/megatron-sp over tp"
)["plan"]


def job(heads: int = 25, plan: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """GPT-2 XL with another number of heads of the same width, padded."""
    model = {"layers": 2, "hidden": 1600, "heads": heads, "head_dim": 64, "vocab": 50304, "seq": 1024, **more}
    return {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus": 8},
        "batch": {"global": 16, "micro": 2},
        "plan": {"pad_heads": True, **(plan or {"tp": 2})},
    }


def figures(report: Report) -> tuple[Any, ...]:
    return report.step_time, report.breakdown.parts, report.hfu, [peak.by for peak in report.play.peaks]


@pytest.mark.parametrize(("plan", "padded"), [
    ({"tp": 2}, 26),
    ({"tp": 2, "pp": 2, "zero": 3}, 26),
    ({"tp": 4, "recompute": "full", "sequence_parallel": False}, 28),
    (GRID, 26),
    (ULYSSES, 28),
])  # fmt: skip
def test_padded_heads_are_computed_and_stored(plan: dict[str, Any], padded: int) -> None:
    """Time and memory are those of a model with that many heads; MFU counts the FLOPs of the model's own."""
    own, whole = simulate(job(plan=plan)), simulate(job(padded, plan))
    assert figures(own) == figures(whole)
    for name in ("palm", "causal"):
        ratio = CONVENTIONS[name](own.job.model, 1024) / CONVENTIONS[name](whole.job.model, 1024)
        assert ratio < 1 and own.mfu[name] == pytest.approx(ratio * whole.mfu[name], rel=1e-12)
    assert own.job.model.parameters < whole.job.model.parameters
    assert f"{padded - 25} of {padded} heads are padding" in own.warnings[0]
    assert not any("padding" in text for text in whole.warnings)


def test_adapters_of_dummy_heads_are_stored() -> None:
    train = {"mode": "lora", "rank": 8}
    assert figures(simulate(job() | {"train": train})) == figures(simulate(job(26) | {"train": train}))


@pytest.mark.parametrize("kv_heads", drawn([24, 8, 2, 1], keep=(8, 1)))
def test_heads_that_divide_are_not_padded(kv_heads: int) -> None:
    given_ = job(24, {"tp": 4}, kv_heads=kv_heads)
    kept, plain = simulate(given_), simulate({**given_, "plan": {"tp": 4}})
    assert figures(kept) == figures(plain) and kept.mfu == plain.mfu
    assert kept.warnings == ["plan.pad_heads: true has no effect: the ranks divide the heads"] and not plain.warnings


def test_a_job_is_written_with_the_option() -> None:
    one = load_job(job())
    assert one.to_dict()["plan"]["pad_heads"] and load_job(one.to_dict()).plan == one.plan
    assert "pad_heads" not in load_job(job(24, {"tp": 2, "pad_heads": False})).to_dict()["plan"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "padded"),
    [
        (25, 25, 2, (26, 26)),
        (3, 3, 8, (8, 8)),
        (40, 8, 16, (48, 8)),  # two ranks share a key/value head, whose five queries become six
        (14, 2, 4, (16, 2)),
        (15, 5, 2, (18, 6)),
        (71, 1, 8, (72, 1)),
    ],
)
def test_key_value_heads_keep_their_queries(heads: int, kv_heads: int, ranks: int, padded: tuple[int, int]) -> None:
    model = Model(layers=1, hidden=64, heads=heads, kv_heads=kv_heads, head_dim=8, vocab=8, seq=8).pad_heads(ranks)
    assert (model.heads, model.kv_heads) == padded


@given(kv_heads=st.integers(1, 20), group=st.integers(1, 12), ranks=st.integers(1, 32))
def test_ranks_have_equally_many(kv_heads: int, group: int, ranks: int) -> None:
    own = Model(layers=1, hidden=64, heads=kv_heads * group, kv_heads=kv_heads, head_dim=8, vocab=8, seq=8)
    model = own.pad_heads(ranks)
    assert model.heads % ranks == 0 and (model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0)
    assert model.kv_heads >= kv_heads and model.heads // model.kv_heads >= group
    assert model.pad_heads(ranks) == model
    if own.heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        assert model == own


def test_latent_attention() -> None:
    mla = {"kv_lora_rank": 64, "qk_nope": 32, "qk_rope": 16, "v": 32}
    given_ = job(head_dim=32, mla=mla, positions="rope")
    plan = resolve_plan(load_job(given_))
    assert (plan.model_parts.model.heads, plan.model_parts.model.kv_heads, plan.job.model.heads) == (26, 26, 25)
    assert figures(simulate(given_)) == figures(simulate(job(26, head_dim=32, mla=mla, positions="rope")))
