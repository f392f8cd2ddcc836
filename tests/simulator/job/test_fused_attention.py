"""GPUs that are too old for the fused attention of a framework run unfused attention, and the forecast says so."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import load_job, simulate

JOB = {"model": "gpt2", "batch": {"global": 8, "sequence": 256}, "precision": "fp16"}


@pytest.mark.parametrize(("gpu", "framework", "attention"), [
    ("v100-sxm2-32", "megatron-core", "unfused"), ("t4", "megatron-core", "unfused"),
    ("a100-sxm-40", "megatron-core", "flash"), ("t4", {"name": "megatron-core", "release": "2023-05"}, "flash"),
    ("v100-sxm2-32", {"name": "megatron-core", "release": "2023-05"}, "unfused"),
    ("v100-sxm2-32", {"name": "megatron-core", "set": {"attention": "flash"}}, "flash"),
    ("v100-sxm2-32", "torchtitan", "flash"), ("v100-sxm2-32", "hf-trainer", "flash"),
    ("mi300x", "megatron-core", "flash"),
])  # fmt: skip
def test_attention_is_what_the_gpu_runs(gpu: str, framework: Any, attention: str) -> None:
    job = load_job({**JOB, "cluster": {"gpu": gpu, "gpus": 1}, "framework": framework})
    assert job.framework.attention == attention
    assert load_job(job.to_dict()).framework == job.framework


def test_the_forecast_says_so() -> None:
    sentence = "unfused attention: the fused kernels need compute capability 8.0, and v100-sxm2-32 has 7.0"
    old, new = (simulate({**JOB, "cluster": {"gpu": gpu, "gpus": 1}}) for gpu in ("v100-sxm2-32", "a100-sxm-40"))
    assert any(sentence in text for text in old.to_dict()["assumed"])
    assert not any("unfused" in text for text in new.to_dict()["assumed"])
    assert old.to_dict()["breakdown_s"]["compute"]["attention"] == 0.0


def test_one_old_kind_of_nodes_is_enough() -> None:
    groups = [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-1v", "nodes": 1}]
    job = load_job({**JOB, "batch": {"global": 16}, "cluster": {"groups": groups}})
    assert job.framework.attention == "unfused"
