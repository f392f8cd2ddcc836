"""Settings that a job leaves open widen its interval by their own effect, and only those."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator import load_job, simulate
from meshcast.simulator.job.open_settings import (
    HOST_BOUND_SIGMA,
    OVERLAPS,
    SIGMA,
    USUAL,
    WRONG,
    list_open_settings,
    sigma_of_open,
)
from meshcast.simulator.report.metrics import CAUSE
from meshcast.simulator.report.open_effects import MOVED
from meshcast.simulator.report.report import Report

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8}, "cluster": {"gpu": "h100-sxm", "gpus": 32}, "batch": {"global": 64},
    "plan": {"tp": 4, "pp": 2, "dp": 4},
}  # fmt: skip
STATED: dict[str, Any] = {
    "framework.name": "megatron-core", "framework.release": "2026-01", "framework.set.cuda_graphs": False,
    "framework.set.compile": False, "framework.set.overlap.dp": True, "framework.set.overlap.tp": False,
    "framework.set.overlap.pp": True, "framework.set.overlap.ep": False, "precision.gradients": "fp32",
    "precision.main_weights": "fp32", "batch.micro": 1, "plan.recompute": "none", "plan.sequence_parallel": True,
    "cluster.scale_up_domain": 8, "cluster.gpus_per_node": 8, "cluster.inter.kind": "infiniband",
    "cluster.inter.gbps_per_gpu": 400,
}  # fmt: skip


def causes(report: Report) -> dict[str, float]:
    return {name.removeprefix(CAUSE): value for name, value in report.sigmas.items() if name.startswith(CAUSE)}


def test_every_setting_counts_until_it_is_stated() -> None:
    """One after another is stated as its program has it: only its own contribution goes, at last there is none."""
    changes: dict[str, Any] = {}
    before, width = causes(simulate(load_job(JOB))), math.inf
    for key, value in STATED.items():
        changes[key] = value
        job = load_job(JOB, changes)
        report = simulate(job)
        assert key not in list_open_settings(job) and report.sigma <= width, key
        if key not in ("framework.name", "framework.release"):  # then its release is open; other kernels
            assert causes(report) == {name: sigma for name, sigma in before.items() if name != key}, key
        before, width = causes(report), report.sigma
    assert before == {} and list_open_settings(job) == ()
    assert {*SIGMA, *OVERLAPS, "precision.gradients"} == set(STATED)


@pytest.mark.parametrize("overlaps", [True, False])
def test_an_overlap_counts_with_what_hides_or_would_hide(overlaps: bool) -> None:
    """The reduction of gradients, open in a program with the overlap or without: about what a second forecast moves."""
    job = load_job(JOB | {"framework": {"name": "megatron-core", "set": {"overlap": {"dp": overlaps}}}})
    key = "framework.set.overlap.dp"
    job.as_written["framework"]["set"]["overlap"].pop("dp")
    report = simulate(job)
    seconds = report.breakdown.hidden["dp"] if overlaps else -report.breakdown.parts["dp"]
    assert causes(report)[key] == pytest.approx(
        math.sqrt(WRONG) * abs(math.log1p(MOVED["dp"] * seconds / report.step_time))
    )
    other = simulate(load_job(JOB | {"framework": {"name": "megatron-core", "set": {"overlap": {"dp": not overlaps}}}}))
    apart = other.step_time - report.step_time
    assert apart * (1 if overlaps else -1) > 0 and abs(apart) <= abs(seconds) * 1.5


def test_no_more_communication_hides_than_there_is_computation() -> None:
    """Over the slowest network that a job may have a step is all communication, and no overlap halves it."""
    network = {"gpu": "h100-sxm", "gpus": 16, "gpus_per_node": 1, "inter": {"kind": "infiniband", "gbps_per_gpu": 1e-3}}
    framework = {"name": "megatron-core", "set": {"overlap": {"dp": False}}}
    job = load_job(JOB | {"cluster": network, "framework": framework, "plan": {"zero": 0}})
    job.as_written["framework"]["set"]["overlap"].pop("dp")
    report = simulate(job)
    assert report.breakdown.parts["dp"] > 0.999 * report.step_time
    assert causes(report).get("framework.set.overlap.dp", 0.0) < 0.01


def test_graphs_matter_more_where_many_small_kernels_wait_for_the_host() -> None:
    graphs = "framework.set.cuda_graphs"
    sparse = load_job(JOB | {"model": "mixtral-8x7b", "plan": {"tp": 4, "ep": 8, "dp": 8}})
    assert sigma_of_open(sparse, graphs) == pytest.approx(math.sqrt(WRONG) * HOST_BOUND_SIGMA[graphs])
    assert sigma_of_open(load_job(JOB), graphs) == pytest.approx(math.sqrt(WRONG) * SIGMA[graphs])


def test_a_launch_file_widens_by_what_it_leaves_open_and_what_is_not_followed(tmp_path: Path) -> None:
    """A flag without influence changes nothing; one that nothing knows, and one that is approximated, a usual error."""
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
        "--global-batch-size 64 --bf16 --swiglu --tensor-model-parallel-size 4 --vocab-size 128256 "
    )
    sigmas = {}
    for name, more in (("plain", ""), ("inert", "--log-interval 10"), ("unknown", "--frobnicate-twice 3")):
        file = tmp_path / f"{name}.sh"
        file.write_text(f"torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py {flags} {more}\n", "utf-8")
        sigmas[name] = load_job(file, ["cluster=dgx-h100:4"]).framework.sigmas
    assert sigmas["inert"] == sigmas["plain"]
    assert sigmas["unknown"] == {**sigmas["plain"], "--frobnicate-twice": USUAL} and 0.01 < USUAL < 0.04
