"""Launch files and jobs that advice is given on."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

SHAPE = "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --swiglu --vocab-size 32000"
MEGATRON = f"""\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {SHAPE} --seq-length 2048 --max-position-embeddings 2048 \\
    --untie-embeddings-and-output-weights --tensor-model-parallel-size 4 --sequence-parallel \\
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --bf16 \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1  # as last time
"""
TITAN = """\
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 1
seq_len = 2048
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
ENGINE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
}
FACTORY = """\
model_name_or_path: Qwen/Qwen2-7B
stage: sft
finetuning_type: full
deepspeed: engine.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
ALONE = FACTORY.replace("deepspeed: engine.json\n", "")
EXPERTS = MEGATRON.replace(
    " --micro-batch-size 1",
    " --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --micro-batch-size 1",
).replace("--pipeline-model-parallel-size 2", "--expert-model-parallel-size 4")


class Launch(NamedTuple):
    """A launch file. name: of the file; text: of it. changes: that are given with it."""

    name: str
    text: str
    changes: tuple[str, ...] = ()


LAUNCHES = {
    "megatron": Launch("run.sh", MEGATRON),
    "experts": Launch("moe.sh", EXPERTS),
    "torchtitan": Launch("run.toml", TITAN, ("cluster=dgx-h100:1",)),
    "deepspeed": Launch(
        "engine.json",
        json.dumps(ENGINE, indent=2),
        ("model={preset: llama3-8b, layers: 8}", "cluster=dgx-h100:1", "batch.sequence=2048"),
    ),
    "llamafactory": Launch("run.yaml", FACTORY, ("cluster=dgx-a100:1", "model={preset: qwen2-7b, layers: 8}")),
    "does not fit": Launch("alone.yaml", ALONE, ("cluster=dgx-h100:1",)),
}


def write_launches(folder: Path) -> None:
    """Writes all launch files into a folder."""
    for launch in LAUNCHES.values():
        (folder / launch.name).write_text(launch.text, "utf-8")


def list_cases(folder: Path) -> list[Launch]:
    """Returns the cases that people brought, each with the changes that its owner gives; their texts are left out."""
    cases = []
    for line in (folder / "README.md").read_text("utf-8").splitlines():
        _, tick, rest = line.partition("`P ")
        words = shlex.split(rest.partition("`")[0]) if tick and "..." not in rest.partition("`")[0] else []
        if words and (folder / words[0]).is_file():
            changes = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--set"]
            cases.append(Launch(str(folder / words[0]), "", tuple(changes)))
    return cases
