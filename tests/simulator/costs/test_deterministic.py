"""Deterministic mode: what adds in one order, and what that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.load import load
from meshcast.simulator import load_job, simulate
from meshcast.simulator.costs.kernels.libraries import ORDERED_BLOCKS, slow_down_in_order
from meshcast.simulator.ir.ops import Attention

JOB = {"model": "llama3-8b", "cluster": "dgx-h100:2", "batch": {"global": 64}}


def attention(heads: int, kv: int = 8192, batch: int = 1) -> Attention:
    return Attention(batch, kv, kv, heads, heads, 128, 128, backward=True)


def step(program: str, deterministic: bool, **keys: Any) -> Any:
    framework = {"name": program, "set": {"deterministic": deterministic}}
    return simulate({**JOB, "framework": framework, **keys})


@pytest.mark.parametrize(
    ("heads", "batch", "slower"),
    [
        (132, 1, 1.0),  # a block for each multiprocessor
        (133, 1, 2 * 132 / 133),  # one more begins a second round
        (32, 1, 2 * 13 * 132 / (64 * 32)),  # 5 blocks a head loop over 64 columns, 160 blocks in two rounds
        (1, 1, 132 / 64),  # no more blocks than columns
        (66, 2, 1.0),
    ],
)
def test_blocks_of_flash_attention_2_fill_rounds_of_multiprocessors(heads: int, batch: int, slower: float) -> None:
    work, gpu = attention(heads, batch=batch), load("gpus", "h100-sxm")
    assert slow_down_in_order("flash-2", work, gpu) == pytest.approx(slower)
    assert slow_down_in_order("flash-3", work, gpu) == slow_down_in_order("cudnn", work, gpu) == ORDERED_BLOCKS


def test_only_the_backward_pass_of_attention_is_slower() -> None:
    usual, ordered = (step("megatron-core", mode, plan={"tp": 1}).breakdown.parts for mode in (False, True))
    forward = 1 / 3.5  # of the FLOPs
    assert 1 < ordered["attention"] / usual["attention"] < 1 + (ORDERED_BLOCKS - 1) * (1 - forward) * 1.2
    assert ordered["gemm"] == pytest.approx(usual["gemm"])
    assert ordered["memory_bound"] > usual["memory_bound"]  # the loss is not fused


def test_megatron_overlaps_no_tensor_parallelism_and_sums_over_rings() -> None:
    job = {**JOB, "framework": {"name": "nemo", "set": {"deterministic": True}}, "plan": {"tp": 8}}
    loaded = load_job(job)
    assert loaded.framework.kernel_traits.rings_alone and not loaded.framework.overlap.tp
    assert "overlap.tp" not in [key for key, *_ in loaded.taken] and "gradients" in [key for key, *_ in loaded.taken]
    plan = {"tp": 8, "sequence_parallel": False}  # all-reduces in a node, which switches sum otherwise
    switches, rings = (step("megatron-core", mode, plan=plan).breakdown.parts["tp"] for mode in (False, True))
    assert rings > 1.1 * switches
    torchtitan = load_job({**JOB, "framework": {"name": "torchtitan", "set": {"deterministic": True}}})
    assert torchtitan.framework.kernel_traits.deterministic and not torchtitan.framework.kernel_traits.rings_alone


@pytest.mark.parametrize(("name", "text"), [
    ("train.sh",
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --bf16"
        " --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1"
        " --global-batch-size 8 --deterministic-mode"),
    ("job.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[debug]\ndeterministic = true\n'),
])  # fmt: skip
def test_launch_files_say_that_kernels_are_deterministic(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert load_job(tmp_path / name).framework.deterministic
