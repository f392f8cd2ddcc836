"""What papers on mixed clusters claim, as jobs: the gain of heterogeneous plans over the best, or the even, uniform
plan."""

from collections.abc import Iterable
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.report.report import Report
from tests.jobs import on_gpus

SHARED = SharedWork()
BERT_LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 30522, "seq": 512}
AMP_GPT2 = {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 52256, "seq": 1024}


def find_best(jobs: Iterable[dict[str, Any]]) -> Report:
    """The fastest of the jobs that fit."""
    found: Report | None = None
    for job in jobs:
        try:
            report = simulate(job, shared_work=SHARED)
        except PlanError:
            continue  # degrees that do not divide the batch
        if report.fits and (found is None or report.step_time < found.step_time):
            found = report
    assert found is not None
    return found


def grid(gpus: int, per_node: int, data: str, outer: str = "pp") -> Iterable[dict[str, Any]]:
    """Uniform plans of `gpus` GPUs. outer: the outermost axis, pp or dp."""
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            if tp <= per_node and gpus % (tp * pp) == 0:
                axes = sorted({"pp": pp, "dp": gpus // tp // pp}.items(), reverse=outer == "pp")
                schemes = ("pipeline/1f1b over pp", f"{data} over dp", "tensor/megatron over tp")
                yield on_gpus(gpus, {**dict(axes), "tp": tp}, *schemes)["plan"]


def test_whale() -> None:
    """Balanced shares of BERT-Large on V100 beside P100 are 1.2 to 1.4 times as fast as even ones (ATC 2022)."""

    def step(share: str) -> float:
        plan = {"mesh": {"dp": 16}, "schemes": [{"use": "data/ddp", "over": "dp"}], "share": share}
        job = {"model": BERT_LARGE, "cluster": "whale-v100-p100", "precision": "fp32", "plan": plan}
        return simulate({**job, "batch": {"global": 1024, "micro": 4}}).step_time

    assert 1.2 < step("even") / step("by-speed") < 1.4


@pytest.mark.slow
def test_amp() -> None:
    """The best plan with different layers beats the best uniform one by 1.54 +- 0.2 (arXiv 2210.07297, README of its
    code: GPT-2 with 24 layers in fp32, three nodes of 4 V100 and one of 4 T4)."""
    job = {"model": AMP_GPT2, "cluster": "amp-mixed", "framework": "megatron-deepspeed", "precision": "fp32"}

    def best(**more: Any) -> float:
        plans = [plan | more for outer in ("pp", "dp") for plan in grid(16, 4, "data/ddp", outer)]
        batches = [{"global": 32, "micro": micro} for micro in (1, 2, 4)]
        return find_best(job | {"plan": plan, "batch": batch} for plan in plans for batch in batches).step_time

    assert best() / best(partition="by-cost") == pytest.approx(1.54, abs=0.2)


@pytest.mark.slow
def test_hexiscale() -> None:
    """The MFU of the best heterogeneous plan on A100 beside H100 is that of equal GPUs to within 8 points (arXiv
    2409.01143: 3.5 on average for 7B to 30B, at equal peak)."""

    def best(cluster: Any, **more: Any) -> float:
        plans = [plan | more for outer in ("pp", "dp") for plan in grid(16, 8, "data/zero-1", outer)]
        batches = [{"global": 64, "micro": micro, "sequence": 4096} for micro in (1, 2)]
        jobs = ({"model": "llama3-8b", "cluster": cluster, "plan": p, "batch": b} for p in plans for b in batches)
        return find_best(jobs).mfu["palm"]

    mixed = {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}
    heterogeneous = best(mixed, partition="by-cost", share="by-speed")
    # Of as many FLOP/s in each kind of GPU alone: peaks of 312 and 989 TFLOP/s.
    equal = (312 * best("dgx-a100:2") + 989 * best("dgx-h100:2")) / (312 + 989)
    assert abs(equal - heterogeneous) < 0.08
    assert heterogeneous - best(mixed) > 0.1


@pytest.mark.slow
def test_metis() -> None:
    """On three kinds of GPUs, different layers and shares are 1.05 to 8.43 times as fast as uniform plans (ATC
    2024)."""
    nodes = [{"node": node, "nodes": 1} for node in ("g4dn", "p3-8", "a2-highgpu-4")]
    job = {"model": "gpt2-774m", "cluster": {"groups": nodes}, "precision": "fp16"}
    batches = [{"global": 96, "micro": micro} for micro in (1, 2, 4)]

    def best(**more: Any) -> float:
        # 12 GPUs: three stages, or three times as many replicas.
        plans = [plan | more for outer in ("pp", "dp") for plan in grid(12, 4, "data/zero-1", outer)]
        plans += [{**plan, "mesh": {**plan["mesh"], "pp": 3, "dp": 4 // plan["mesh"]["tp"]}} for plan in plans]
        return find_best(job | {"plan": plan, "batch": batch} for plan in plans for batch in batches).step_time

    assert 1.05 < best() / min(best(partition="by-cost"), best(share="by-speed")) < 8.43


@pytest.mark.slow
def test_cephalo() -> None:
    """On P100 beside RTX A6000, in whose memory 6.7B parameters hardly fit, shares of batch and of states of their own
    are 1.2 to 10.8 times as fast as FSDP, and as the best plan with different shares of the batch alone (ICS 2025)."""
    model = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 50257, "seq": 512}
    nodes = [{"node": node, "nodes": 1} for node in ("p100-8", "rtx-a6000-8")]
    job = {"model": model, "cluster": {"groups": nodes}, "framework": "torchtitan", "precision": "fp32"}
    recompute = {"use": "memory/recompute-full"}

    def best(plans: Iterable[dict[str, Any]]) -> float:
        both = [plan | {"schemes": [*plan["schemes"], *more]} for plan in plans for more in ([], [recompute])]
        batches = [{"global": 480, "micro": micro} for micro in (1, 2, 4)]
        return find_best(job | {"plan": plan, "batch": batch} for plan in both for batch in batches).step_time

    def shard(use: str, **more: Any) -> float:
        return best([{"mesh": {"dp": 16}, "schemes": [{"use": use, "over": "dp"}], **more}])

    cephalo = shard("data/cephalo", share="by-speed")
    assert 1.2 < shard("data/fsdp") / cephalo < 10.8
    whale = (plan | {"share": "by-speed"} for outer in ("pp", "dp") for plan in grid(16, 8, "data/zero-1", outer))
    assert 1.2 < best(whale) / cephalo < 10.8
