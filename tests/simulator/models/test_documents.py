"""Packed documents: attention within each, as long as that of as many short sequences."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Attention
from meshcast.simulator.loading.load import load_job
from meshcast.validation.contract.played import Played, play_job


def job(sequence: int = 1024, micro: int = 1, plan: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    batch = {"global": 2 * micro, "micro": micro, "sequence": sequence, **more.pop("batch", {})}
    model = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512, "seq": 4096, "positions": "rope", **more}
    return {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "batch": batch,
        "plan": plan or {"tp": 2, "dp": 2},
    }


def kernels(played: Played) -> list[Attention]:
    return [op.work for _, op in played.instances() if isinstance(op.work, Attention)]


@pytest.mark.parametrize("document", [64, 256, 512])
def test_documents_of_one_length_are_as_many_sequences(document: int) -> None:
    packed = play_job(job(batch={"documents": document}))
    short = play_job(job(document, 1024 // document))
    for phases in (("F",), ("B", "W")):
        assert packed.flops(*phases) == short.flops(*phases)
    assert {(one.q, one.kv, one.batch) for one in kernels(packed)} == {(document, document, 1024 / document)}


def test_a_sample_of_lengths_has_its_pairs() -> None:
    """A token sees its own document: the mean length over tokens counts, not over documents."""
    lengths = [100, 300, 600]
    pairs = sum(length * length / 2 for length in lengths) / sum(lengths)
    (first, *_) = kernels(play_job(job(batch={"documents": lengths})))
    assert first.flops / (2 * 1 * 2 * 128 * 1024) == pytest.approx(pairs, rel=0.01)


def test_documents_longer_than_a_sequence_are_cut() -> None:
    assert play_job(job(batch={"documents": 5000})).flops("F") == play_job(job()).flops("F")


def test_a_window_may_be_shorter_than_a_document() -> None:
    wide, narrow = (
        play_job(job(batch={"documents": 256}, window=window)).flops("F")["attention"] for window in (256, 64)
    )
    assert narrow / wide == pytest.approx((2 * 64 * 256 - 64 * 64) / 256**2)


@pytest.mark.parametrize("use", ["all-gather", "ulysses"])
def test_ranks_that_share_a_sequence_share_its_pairs(use: str) -> None:
    plan = {
        "mesh": {"dp": 2, "cp": 2},
        "schemes": [{"use": "data/ddp", "over": "dp"}, {"use": f"sequence/{use}", "over": "cp"}],
    }
    one, other = play_job(job(plan=plan, batch={"documents": 128})), play_job(job(batch={"documents": 128}))
    assert one.flops("F")["attention"] == pytest.approx(other.flops("F")["attention"])


def test_packing_shortens_a_step() -> None:
    long = {"layers": 8, "hidden": 4096, "heads": 32, "vocab": 32000}
    whole, packed = (simulate(job(32768, batch=batch, **long)) for batch in ({}, {"documents": 2048}))
    assert packed.parts["attention"] < 0.15 * whole.parts["attention"]
    assert packed.parts["gemm"] == pytest.approx(whole.parts["gemm"])


def test_a_job_is_written_with_its_documents() -> None:
    one = load_job(job(batch={"documents": [100, 300]}))
    assert one.to_dict()["batch"]["documents"] == [100, 300]
    assert load_job(one.to_dict()).batch == one.batch and one.batch.document == 250
    assert "documents" not in load_job(job()).to_dict()["batch"]
