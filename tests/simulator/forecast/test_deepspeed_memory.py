"""GPU memory of what DeepSpeed, nanotron and InternEvo hold beside states and activations, counted by hand from their
code, and runs that were out of memory."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.models.model import Model
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.report import Report

SHAPE: dict[str, Any] = {
    "layers": 6, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 1024, "seq": 8192, "norm": "rmsnorm",
    "positions": "rope", "tied": False,
}  # fmt: skip
"""A model whose activations are larger than its states."""
BUCKET = 10_000_000
"""Elements of a bucket, fewer than the gradients have."""
GIB = 2**30
LORA: dict[str, Any] = {"mode": "lora", "rank": 64}
"""Adapters, all of which are matrices."""


SHARED = SharedWork()


def forecast(name: str = "deepspeed", gpus: int = 4, seq: int = 8192, **job: Any) -> Report:
    traits = {"bucket": {"elements": BUCKET, "buffers": job.pop("buffers", int("deepspeed" in name))}}
    framework = {"name": name, "set": traits | job.pop("traits", {})}
    batch = {"global": gpus * job.pop("passes", 1) // job["plan"].get("cp", 1), "micro": 1, "sequence": seq}
    cluster = {"gpu": "a100-sxm-80", "gpus": gpus}
    described = {"model": SHAPE, "cluster": cluster, "framework": framework, "batch": batch} | job
    return simulate(described, shared_work=SHARED)


def parameters(report: Report) -> float:
    return float(report.job.model.parameters)


def most(report: Report, category: str) -> float:
    """The most bytes of a category at any moment of the step."""
    _, levels = report.play.memory(0)
    return float(levels[:, CATEGORIES.index(category)].max())


def updating(report: Report) -> float:
    """Bytes that the update holds beside the states, for each parameter."""
    return report.play.program.updates[0].memory.peak / parameters(report)


@pytest.mark.parametrize(
    ("plan", "overlap", "each"),
    [
        ({"zero": 2}, False, 2 + 2),  # a buffer and a flat copy
        ({"zero": 2}, True, 2 * 2 + 2),
        ({"zero": 2, "cp": 2, "cp_scheme": "ulysses"}, False, 2 + 2 + 4),  # reduced in fp32
        ({"mesh": {"dp": 4}, "schemes": [{"use": "data/zero-3", "over": "dp", "reduce_bucket": BUCKET}]}, True, 2 * 2),
    ],
)
def test_gradients_are_reduced_in_contiguous_buffers(plan: dict[str, Any], overlap: bool, each: int) -> None:
    """They come with the first gradient, and go with the last; stage 3 has its buffer before the first step."""
    report = forecast(plan=plan, traits={"overlap": {"dp": overlap}})
    assert most(report, "buffers") == pytest.approx(each * BUCKET)
    assert report.play.resting[0].get("buffers", 0.0) == pytest.approx(2 * BUCKET if "mesh" in plan else 0.0)


def test_stage_2_adds_whole_gradients_of_a_micro_batch_to_those_of_the_ones_before() -> None:
    one, two = (forecast(plan={"zero": 2}, passes=passes) for passes in (1, 2))
    assert [each.play.resting[0]["gradients"] / parameters(one) for each in (one, two)] == pytest.approx(
        [0.5, 1], rel=1e-3
    )
    assert updating(one) - updating(two) == pytest.approx(0.5, rel=1e-3)  # they are freed before


def test_in_buffers_one_gradient_alone_is_beside_its_copy() -> None:
    held, apart = (forecast(plan={"zero": 2}, buffers=count) for count in (1, 0))
    at_rest = parameters(held) * 2 / 4
    assert most(held, "gradients") - at_rest == pytest.approx(2 * 4096 * 1024, rel=1e-2)
    assert most(apart, "gradients") - at_rest > 2 * 6 * 1024**2


@pytest.mark.parametrize(
    ("zero", "precision", "traits", "bytes_each"),
    [
        (0, "fp16", {}, 4 + 4),  # FP16_Optimizer: each gradient in fp32, then all in one tensor
        (2, "bf16", {}, (2 + 4) / 4),
        (2, "bf16", {"moment_copies": 2}, (4 + 8) / 4),  # those of vectors hold the accumulated ones
        (3, "bf16", {}, (2 + 4) / 8),  # of a sub-group of half of the partition
        (3, "bf16", {"moment_copies": 2}, (4 + 8) / 8),
        (3, "fp16", {}, max((2 + 4) / 8, 3 / 4)),  # isinf of all gradients makes a copy and a mask
    ],
)
def test_the_update_flattens_and_converts_gradients(
    zero: int, precision: str, traits: dict[str, Any], bytes_each: float
) -> None:
    count = Model(**SHAPE).parameters
    # A sub-group of half of a partition, with the matrix that ends it.
    update = {"norm": 0, "sub_group": (count / 2 - 4096 * 1024) / 4, **traits}
    report = forecast(plan={"zero": zero}, precision=precision, traits={"update": update})
    assert updating(report) == pytest.approx(bytes_each, rel=1e-3)


def test_accumulated_gradients_are_freed_with_the_last_group_that_has_views_of_them() -> None:
    traits = {"update": {"norm": 0, "moment_copies": 2}, "bucket": {"elements": BUCKET, "buffers": 0}}
    apart = forecast(plan={"zero": 2}, traits=traits)
    assert updating(apart) == pytest.approx((4 + 8 - 2) / 4, rel=1e-3)  # each is a tensor of its own
    matrices = forecast(plan={"zero": 2}, traits=traits | {"bucket": {"elements": BUCKET, "buffers": 1}}, train=LORA)
    work = matrices.play.program.updates[0].memory.peak
    trained = matrices.play.resting[0]["optimizer"] / 12
    assert work == pytest.approx((4 + 8 - 2) * trained, rel=1e-2)


@pytest.mark.parametrize(("gpus", "buffers", "shares"), [(4, 1, 1), (64, 1, 4), (64, 0, 1)])
def test_contiguous_gradients_are_whole_of_every_parameter_of_a_share(gpus: int, buffers: int, shares: int) -> None:
    """An embedding of 3.4 shares of 64 ranks."""
    report = forecast(gpus=gpus, buffers=buffers, plan={"zero": 2}, model={**SHAPE, "vocab": 4096, "tied": True})
    held = sum(report.play.resting[0].get(name, 0.0) for name in ("gradients", "buffers"))
    assert held == pytest.approx(2 * parameters(report) / gpus * shares, rel=1e-3)


def test_the_norm_of_the_largest_gradient_is_taken_in_a_wider_format() -> None:
    update = {"norm": 10, "flattens": False, "converts": False}
    report = forecast(plan={"zero": 2}, traits={"update": update})
    assert updating(report) * parameters(report) == pytest.approx(10 * 4096 * 1024, rel=1e-3)


@pytest.mark.parametrize("scheme", [{"use": "data/zero-offload"}, {"use": "data/zero-infinity", "parameters": "gpu"}])
def test_an_update_on_the_host_takes_memory_there_and_none_of_the_gpu(scheme: dict[str, Any]) -> None:
    """fp32 weights, moments and gradients; and weights that are sent back (stage 2), or gradients as sent (stage 3)."""
    report = forecast(plan={"mesh": {"dp": 4}, "schemes": [{**scheme, "over": "dp"}]})
    assert updating(report) == 0.0
    assert report.play.offloaded[0]["cpu"] == pytest.approx((4 + 8 + 4 + 2) / 4 * parameters(report), rel=1e-3)


def test_whole_gradients_of_bf16_weights_are_accumulated_in_fp32_by_megatron_deepspeed() -> None:
    formats = {zero: forecast("megatron-deepspeed", precision="bf16", plan={"zero": zero}) for zero in (1, 2)}
    assert {zero: report.job.framework.gradients for zero, report in formats.items()} == {1: "fp32", 2: "bf16"}
    held = {zero: report.play.resting[0]["gradients"] / parameters(report) for zero, report in formats.items()}
    assert held == pytest.approx({1: 4 + 2, 2: 2 / 4}, rel=1e-3)
    stated = forecast("megatron-deepspeed", precision={"compute": "bf16", "gradients": "fp32"}, plan={"zero": 2})
    assert stated.play.resting[0]["gradients"] / parameters(stated) == pytest.approx(4 / 4, rel=1e-3)  # no stale ones


@pytest.mark.parametrize("passes", [1, 2])
def test_nanotron_has_the_gradients_of_a_pass_in_bf16_until_its_end(passes: int) -> None:
    short: dict[str, Any] = {"plan": {"zero": 1, "recompute": "full"}, "seq": 256, "passes": passes}
    report, without = (
        forecast("nanotron", traits={"update": {"fresh_gradients": fresh}}, **short) for fresh in (True, False)
    )
    assert report.play.resting[0]["gradients"] == pytest.approx((4 + 2) * parameters(report), rel=1e-3)  # and buckets
    grown = report.play.peaks[0].total - without.play.peaks[0].total
    assert 1.5 * parameters(report) < grown <= 2 * parameters(report)
    assert report.play.peaks[0].left == pytest.approx(without.play.peaks[0].left)


def test_internevo_flattens_a_bucket_while_that_before_is_reduced() -> None:
    report = forecast("internevo", plan={"zero": 1})
    assert most(report, "buffers") == pytest.approx(2 * 2 * BUCKET)
    assert updating(report) == pytest.approx(4 / 4, rel=1e-3)


REPORTED: dict[str, tuple[dict[str, Any], float]] = {
    # 28.28 GiB allocated, 3.14 more asked for, in `denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt)` of AdamW, whose
    # first step made the moments before any pass (`initialize_optimizer_states` until February 2024)
    "hiyouga/LlamaFactory #1221": (
        {"model": "llama-7b", "cluster": {"gpu": "v100-sxm2-32", "gpus": 8}, "plan": {"zero": 2}, "precision": "fp16"}
        | {"framework": {"name": "deepspeed", "release": "2023-02"}, "batch": {"sequence": 512, "global": 8}},
        28.28 + 3.14,
    ),
    "hiyouga/LlamaFactory #5977": (
        {"model": "llama3-8b", "cluster": {"gpu": "rtx-3090", "gpus": 8}, "plan": {"zero": 3}, "precision": "fp16"}
        | {"framework": {"name": "deepspeed", "release": "2024-11"}, "batch": {"sequence": 1024, "global": 8}},
        23.65,
    ),
    "hiyouga/LlamaFactory #8642": (
        {"model": "qwen3-32b", "cluster": "hgx-h200:1", "plan": {"zero": 2}, "precision": "bf16"}
        | {"framework": {"name": "deepspeed", "release": "2025-07"}, "batch": {"sequence": 1024, "global": 8}},
        139.8,
    ),
    # 79.33 GiB of A800
    "hiyouga/LlamaFactory #2959": (
        {"model": "qwen2.5-72b", "cluster": "dgx-a100:2", "plan": {"zero": 3}, "precision": "fp16"}
        | {"framework": {"name": "deepspeed", "release": "2024-03"}, "batch": {"sequence": 1024, "global": 64}},
        79.33,
    ),
}
"""Runs of ZeRO with checkpointing that were out of memory, and the GiB that their reports show to be too little."""


@pytest.mark.parametrize("source", REPORTED)
def test_runs_that_were_out_of_memory_do_not_fit(source: str) -> None:
    job, needed = REPORTED[source]
    plan = {**job["plan"], "recompute": "full"}
    report = simulate({**job, "plan": plan, "batch": {"micro": 1, **job["batch"]}})
    assert not report.fits
    if "#1221" in source:
        without = report.play.peaks[0].total - report.play.resting[0]["gradients"]
        assert without / GIB == pytest.approx(needed, rel=5e-3)


@pytest.mark.parametrize(
    ("zero", "recompute", "measured", "within"),
    [(2, "full", 43.8, 0.02), (2, "none", 62.3, 0.02), (3, "full", 52.8, 0.06), (3, "none", 75.2, 0.15)],
)
def test_stage_3_takes_more_than_stage_2_where_its_host_runs_ahead(
    zero: int, recompute: str, measured: float, within: float
) -> None:
    """A GPT of 7B over four ranks of Ulysses and two replicas, as nvidia-smi shows it (DeepSpeed issue 5305)."""
    report = simulate(
        {
            "model": {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 50257, "seq": 16384, "positions": "learned"},
            "cluster": "dgx-a100:1",
            "framework": {"name": "megatron-deepspeed", "set": {"attention": "flash"}},
            "batch": {"global": 16, "micro": 1, "sequence": 16384},
            "precision": "fp16",
            "plan": {"cp": 4, "dp": 2, "cp_scheme": "ulysses", "zero": zero, "recompute": recompute},
        }
    )
    assert report.peak_device / GIB == pytest.approx(measured, rel=within)
