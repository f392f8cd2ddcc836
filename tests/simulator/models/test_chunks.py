"""Chunked attention: within chunks of a sequence, as within packed documents of one length."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Attention
from meshcast.simulator.report.report import Report
from meshcast.validation.contract.played import play_job
from tests.draws import drawn

CP = {"mesh": {"dp": 2, "cp": 2}, "schemes": [{"use": "data/ddp", "over": "dp"}]}


def job(chunk: int | None = None, plan: dict[str, Any] | None = None, batch: Any = None, **more: Any) -> dict[str, Any]:
    model = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 512, "seq": 1024, "positions": "rope", **more}
    return {
        "model": {**model, "attention_chunk": chunk},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "batch": {"global": 4, **(batch or {})},
        "plan": plan or {"tp": 2, "dp": 2},
    }


def figures(report: Report) -> tuple[Any, ...]:
    return report.step_time, report.breakdown.parts, report.hfu, [peak.by for peak in report.play.peaks]


@pytest.mark.parametrize("chunk", drawn([1500, 1024], keep=2))
def test_a_chunk_of_the_whole_sequence_is_full_attention(chunk: int) -> None:
    chunked, full = simulate(job(chunk)), simulate(job())
    assert figures(chunked) == figures(full) and chunked.mfu == full.mfu


@pytest.mark.parametrize("chunk", drawn([64, 256, 512], keep=2))
def test_chunks_are_documents_of_that_length(chunk: int) -> None:
    """The same kernels, time and memory; only MFU counts the pairs that the model needs."""
    chunked, packed = simulate(job(chunk)), simulate(job(batch={"documents": chunk}))
    assert figures(chunked) == figures(packed) and chunked.mfu["causal"] < packed.mfu["causal"]
    full = play_job(job()).flops("F")["attention"]
    assert play_job(job(chunk)).flops("F")["attention"] == pytest.approx(full * chunk / 1024)


@pytest.mark.parametrize("chunk", [300, 700, 1000])
def test_the_last_chunk_may_be_shorter(chunk: int) -> None:
    full, rest = divmod(1024, chunk)
    share = (full * chunk**2 + rest**2) / 1024**2
    chunked, whole = play_job(job(chunk)), play_job(job())
    for phases in (("F",), ("B", "W")):
        assert chunked.flops(*phases)["attention"] == pytest.approx(share * whole.flops(*phases)["attention"])


@pytest.mark.parametrize(("chunk", "document", "as_chunk"), [(256, 64, 64), (64, 256, 64), (256, 1024, 256)])
def test_the_shorter_of_chunk_and_document_counts(chunk: int, document: int, as_chunk: int) -> None:
    both = play_job(job(chunk, batch={"documents": document}))
    assert both.flops("F") == pytest.approx(play_job(job(as_chunk)).flops("F"))


def test_full_layers_attend_to_everything_without_rope() -> None:
    """Llama 4: of four layers the last is full, without RoPE, and without a norm of queries and keys."""
    played = play_job(job(128, full_every=4, full_rope=False, qk_layernorm="l2"))
    units = [unit for stage in played.stages for unit in stage.unit_runs if unit.name == "layer"]  # type: ignore[union-attr]
    assert [unit.count for unit in units] == [3, 1]
    for unit, local in zip(units, (True, False), strict=True):
        names = {op.name for op in unit.fragment.forward}
        (core,) = [op.work for op in unit.fragment.forward if isinstance(op.work, Attention)]
        assert core.kv == (128 if local else 1024)
        assert names & {"rope", "qk_norm"} == ({"rope", "qk_norm"} if local else set())
        assert not any("q.norm" in param.name for param in unit.fragment.params)


@pytest.mark.parametrize("use", ["all-gather", "ulysses", "megatron-cp"])
def test_ranks_that_share_a_sequence_share_its_pairs(use: str) -> None:
    scheme = {"use": f"sequence/{use}", "over": "cp", **({"comm": "all_gather"} if use == "megatron-cp" else {})}
    plan = {**CP, "schemes": [*CP["schemes"], scheme]}  # type: ignore[misc]
    shared, whole = play_job(job(128, plan)), play_job(job(128))
    assert shared.flops("F")["attention"] == pytest.approx(whole.flops("F")["attention"])


def test_scores_in_memory_are_all_computed() -> None:
    unfused = {"framework": {"name": "megatron-core", "set": {"attention": "unfused"}}}
    assert figures(simulate({**job(128), **unfused})) == figures(simulate({**job(), **unfused}))


def test_llama_4_scout() -> None:
    """At 64 Ki tokens three of four layers cost an eighth of their scores."""
    given = {
        "model": {"preset": "llama4-scout", "layers": 8},
        "cluster": "dgx-h100:8",
        "batch": {"global": 32, "sequence": 65536},
        "plan": {"tp": 8, "pp": 2, "ep": 8, "recompute": "full"},
    }
    whole = {**given, "model": {**given["model"], "attention_chunk": 65536}}  # type: ignore[dict-item]
    chunked, full = simulate(given), simulate(whole)
    assert chunked.parts["attention"] / full.parts["attention"] == pytest.approx(1 / 4 + 3 / 4 / 8, rel=0.05)
