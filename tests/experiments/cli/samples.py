"""Shared by the tests of commands: a small job, a runner of commands, an unprivileged user (whom modes restrict)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from meshcast.experiments.cli.app import app

ROOT = Path(__file__).resolve().parents[3]

JOB = """\
model: llama3-8b
cluster: dgx-h100:2
batch: {global: 16, micro: 1, sequence: 4096}
plan: {tp: 4, pp: 2}
"""

SCRIPT = """
#SBATCH --nodes=2
TP=${TP:-2}
SHAPE="--num-layers 8 --hidden-size ${HIDDEN:-512} --num-attention-heads 8 --seq-length 1024"
torchrun --nproc-per-node 8 pretrain_gpt.py $SHAPE --tensor-model-parallel-size $TP --micro-batch-size ${MICRO:-2} \\
    --global-batch-size ${BATCH:-32} --bf16 --vocab-size 32000 --max-position-embeddings 1024 --some-new-flag 3 --lr 1
"""

TABLE = """\
gpu,dtype,m,n,k,time_us,source
h100,bfloat16,512,4096,1024,10.2,AIC sglang 0.5
h100,bfloat16,4096,4096,1024,55,AIC sglang 0.5
h100,bfloat16,many,4096,1024,55,AIC sglang 0.5
a100,fp8_block,4096,4096,1024,80,vidur
"""

COMMAND_FILES = {
    "job.yaml": JOB,
    "open.yaml": "{model: llama3-8b, cluster: 'dgx-h100:1', batch: {global: 64}, plan: auto}",
    "small.yaml": "{model: {layers: 4, hidden: 256, heads: 8, vocab: 1024, seq: 128}, cluster: 'dgx-h100:1', "
    "batch: {global: 16, micro: 1}, plan: {tp: 2, pp: 2}}",
    "tiny.yaml": "{model: {layers: 1, hidden: 256, heads: 8, vocab: 1024, seq: 128}, "
    "cluster: {gpu: h100-sxm, gpus: 1}, batch: {global: 1}, plan: {}}",
    "experts.yaml": "{model: {preset: mixtral-8x7b, layers: 4}, cluster: 'dgx-h100:2', batch: {global: 16, micro: 1}, "
    "precision: fp8-delayed, plan: {tp: 2, pp: 2, ep: 4, recompute: selective}, run: {tokens: 1e9}}",
    "mixed.yaml": "{model: {preset: llama3-8b, layers: 8}, batch: {global: 16, microbatches: 4}, "
    "cluster: {groups: [{node: dgx-a100, nodes: 1}, {node: dgx-h100, nodes: 1}]}, "
    "plan: {stages: [{tp: 8, layers: 3}, {tp: 4, dp: 2, layers: 5}]}}",
    "small.sh": SCRIPT,
    "sweep.yaml": "{job: job.yaml, vary: {plan.tp: [4]}}",
    "grid.yaml": "{job: small.yaml, vary: {plan.tp: [1, 2, 3], batch.micro: [1, 2]}, where: ['plan.tp < 4']}",
    "rows.jsonl": '{"id": "x-1", "spec": {"class": "dense", "stack": "nemo"}}',
    "cases.jsonl": '{"schedule": "1f1b", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1}\nnot json\n',
    "table.csv": TABLE,
    "stuck.csv": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
}
"""Files that a command line may name."""

NOBODY = 65534


def run(*words: object) -> Result:
    """Runs meshcast with these arguments."""
    return CliRunner().invoke(app, [str(word) for word in words])


def answer(*words: object) -> Any:
    """Returns the answer of a command in JSON."""
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Runs as an unprivileged user for a while; root may read and write everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)
