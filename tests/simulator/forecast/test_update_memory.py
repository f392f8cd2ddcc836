"""Memory of what comes and goes within a step beside activations, counted by hand: gradients that the backward pass
makes, temporaries of the update, and logits of a loss over chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Collective, Gemm, Memory, Op
from meshcast.simulator.report.report import Report
from meshcast.validation.contract.played import play_job

MODEL: dict[str, Any] = {
    "layers": 6, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "seq": 256, "norm": "rmsnorm",
    "positions": "rope",
}  # fmt: skip
"""A model whose states are larger than the activations of a sample."""


SHARED = SharedWork()


def forecast(gpus: int = 1, batch: dict[str, Any] | None = None, **job: Any) -> Report:
    framework = {"name": job.pop("name", "hf-trainer"), **job.pop("framework", {})}
    described = {
        "model": MODEL | job.pop("model", {}),
        "cluster": {"gpu": "a100-sxm-80", "gpus": gpus},
        "framework": framework,
        "batch": batch or {"global": gpus, "micro": 1},
        "plan": {"recompute": "full"},
    }
    return simulate(described | job, shared_work=SHARED)


def peak(report: Report) -> float:
    return float(report.play.peaks[0].total)


def count_parameters(report: Report) -> float:
    return float(report.play.plan.job.model.parameters)


@pytest.mark.parametrize(("release", "copies"), [("2025-01", 1), ("2026-01", 0)])
def test_training_in_bf16_needs_2_bytes_for_each_of_weight_gradient_moments_and_copy(release: str, copies: int) -> None:
    """foundation-model-stack/fms-acceleration @876e2ed, a100_80gb.csv: 10.0 bytes a parameter of four models."""
    report = forecast(
        precision={"compute": "bf16", "main_weights": "bf16", "gradients": "bf16"}, framework={"release": release}
    )
    assert peak(report) == pytest.approx((8 + 2 * copies) * count_parameters(report), rel=1e-3 if copies else 0.2)


def test_gradients_have_no_memory_before_the_only_backward_pass_of_a_step() -> None:
    """At the loss, where activations are largest, those of two micro-batches are there, those of one are not."""
    model = {"layers": 2, "seq": 8192}
    updates = ({"set": {"update": {"gradients_to_none": frees}}} for frees in (True, False))
    one, kept = (forecast(model=model, framework=update) for update in updates)
    gradients = 2 * count_parameters(one)
    assert peak(kept) - peak(one) == pytest.approx(gradients, rel=1e-6)
    assert one.peak_device == pytest.approx(kept.peak_device)  # their places stay in the cache
    two = forecast(model=model, batch={"global": 2, "micro": 1})
    assert two.play.resting[0]["gradients"] == pytest.approx(gradients)


def test_memory_over_time_has_the_peak_of_the_update_and_ends_with_gradients_alone() -> None:
    report = forecast(framework={"release": "2025-01"})
    _, levels = report.play.memory(0)
    assert levels.sum(axis=1).max() == pytest.approx(peak(report))
    assert report.play.peaks[0].left == pytest.approx(2 * count_parameters(report))


@pytest.mark.parametrize(
    ("precision", "whole", "shard"),
    [
        ({"gradients": "bf16"}, 2 + 2, 12 + 4),  # and their shards in fp32
        ({"gradients": "bf16", "moments": "bf16"}, 2 + 2, 8),  # the precision-aware optimizer reads them as they are
        ({"gradients": "fp32"}, 2 + 4, 12),
    ],
)
def test_megatron_core_updates_with_gradients_in_fp32(precision: dict[str, str], whole: int, shard: int) -> None:
    """As Llama 3 70B over two replicas in Megatron-Bridge @067f987d (skills/nemo-mbridge-perf-activation-recompute):
    12.2 bytes a parameter, whatever is recomputed beside MLPs."""
    compute = {"compute": "bf16", **precision}
    report = forecast(2, name="megatron-core", precision=compute, plan={"zero": 1, "recompute": "full"})
    buffers = report.play.resting[0].get("buffers", 0.0)
    updating = report.play.peaks[0].update - buffers
    assert updating == pytest.approx((whole + shard / 2) * count_parameters(report), rel=1e-2)


def test_adam_reads_and_writes_every_state_once() -> None:
    """Of a parameter gradient, main weight and moments in fp32; weights in bf16 are written alone."""
    job = {"model": MODEL, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}}
    played = play_job(job)
    works = [op.work for _, op in played.instances() if isinstance(op.work, Memory) and op.work.what == "adam"]
    count = sum(param.size for param in played.list_held(0))
    assert [(work.read, work.write) for work in works] == [((4 + 4 + 8) * count, (2 + 4 + 8) * count)]


@pytest.mark.parametrize(("plan", "gpus", "times"), [({}, 1, 1), ({"zero": 0}, 4, 2), ({"zero": 3}, 4, 1)])
def test_ddp_has_every_gradient_in_a_bucket_too(plan: dict[str, Any], gpus: int, times: int) -> None:
    report = forecast(gpus, {"global": 2 * gpus, "micro": 1}, plan=plan)
    shards = gpus if plan.get("zero") == 3 else 1
    assert report.play.resting[0]["gradients"] == pytest.approx(times * 2 * count_parameters(report) / shards, rel=1e-3)


@pytest.mark.parametrize(("ep", "shards"), [(1, 4), (2, 2), (4, 1)])
def test_fsdp_keeps_main_weights_alone_of_experts_that_no_other_rank_has(ep: int, shards: int) -> None:
    """12 bytes for weights and moments in fp32; in bf16 they are whole for their passes alone."""
    experts = {"experts": 8, "top_k": 2, "expert_ffn": 4096}
    plan = {"mesh": {"dp": 4}, "views": {"experts": {"edp": 4 // ep, "ep": ep, "etp": 1}}}
    plan |= {"schemes": [{"use": "data/fsdp", "over": "dp"}, {"use": "expert/all-to-all", "over": "ep"}]}
    report = forecast(4, name="torchtitan", model={"moe": experts, "tied": False}, plan=plan)
    own = 6 * 2 * 1024 * 4096 * 8 / ep
    others = count_parameters(report) - own * ep
    states = report.play.resting[0]
    kept = 2 * 2 * 32000 * 1024  # the root unit
    held = states["parameters"] + states["optimizer"] - kept
    assert held == pytest.approx(12 * (others / 4 + own / shards), rel=1e-3)


def test_xla_reduces_the_gradients_of_large_matrices_one_by_one() -> None:
    """As many bytes; beside the largest one that before is being reduced, not those of two layers."""

    def sent(report: Report) -> int:
        works = [op.work for _, op in play_job(report.job.to_dict()).instances()]
        return sum(work.nbytes for work in works if isinstance(work, Collective) and work.operation == "reduce_scatter")

    traits: dict[str, Any] = {"name": "maxtext", "plan": {"fsdp": True}, "model": {"vocab": 1024}}
    apart, together = (
        forecast(4, framework={"set": {"bucket": {"elements": 1e6, "in_units": each}}}, **traits)
        for each in (True, False)
    )
    whole = [report.play.peaks[0].by["gradients"] - 4 * count_parameters(report) / 4 for report in (apart, together)]
    matrix = 4 * 4096 * 1024
    assert whole[0] < 2.5 * matrix and whole[1] > 5 * matrix
    assert sent(apart) == sent(together) > 0


@pytest.mark.parametrize("loss", [{"chunk_count": 4}, {"chunk_tokens": 2048}])
def test_a_loss_over_chunks_has_the_logits_of_one(loss: dict[str, Any]) -> None:
    model = {"layers": 1, "seq": 8192}
    whole, cut = (forecast(model=model, framework={"set": {"loss": traits}}) for traits in ({}, loss))
    assert cut.play.peaks[0].by["logits"] == pytest.approx(whole.play.peaks[0].by["logits"] / 4, rel=0.01)


def test_logits_that_are_recomputed_cost_one_gemm_of_the_head() -> None:
    def executed(recomputed: bool) -> float:
        report = forecast(framework={"set": {"loss": {"chunk_tokens": 128, "recomputed": recomputed}}})
        return float(np.sum(report.play.sums[..., 3]))

    work = Gemm(256, 32000, 1024, 1, "bf16", "tn", what="linear")
    assert executed(True) - executed(False) == pytest.approx(work.flops, rel=1e-6)


def test_every_chunk_reads_the_output_layer_and_adds_to_its_gradient() -> None:
    """A product for each chunk: as many FLOPs, the matrix read and its gradient added to as often, launches as many."""
    whole, cut = (_output_products(chunks) for chunks in (1, 4))
    assert cut.keys() == {"head", "dhead", "whead"}
    for name, op in cut.items():
        single, work = whole[name].work, op.work
        assert isinstance(single, Gemm) and isinstance(work, Gemm)
        assert (work.flops, work.batch, op.launches) == (single.flops, 4, 4 * whole[name].launches)
        assert work.bytes - single.bytes == 3 * 1024 * 32000 * (4 if name == "whead" else 2)


def _output_products(chunks: int) -> dict[str, Op]:
    report = forecast(framework={"set": {"loss": {"chunk_count": chunks}}})
    ops = (op for _, op in play_job(report.job.to_dict()).instances())
    return {op.name: op for op in ops if isinstance(op.work, Gemm) and op.name.endswith("head")}


def test_chunks_may_keep_what_they_save_for_the_backward_pass() -> None:
    """4 bytes a logit of all of them, not of one chunk of eight."""
    model, traits = {"layers": 1, "seq": 8192}, {"kept": 4, "peak": 12, "chunk_count": 8}
    losses = ({**traits, "kept_of_all": kept} for kept in (False, True))
    some, every = (
        forecast(model=model, framework={"set": {"loss": loss}}).play.peaks[0].by["logits"] for loss in losses
    )
    assert every - some == 4 * 8192 * 32000 * 7 / 8
