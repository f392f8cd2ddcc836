"""A global batch that a launch file leaves out follows from the degrees and sizes that a change sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshcast.experiments.sweeps.grid import load_sweep
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job, read_job

MEGATRON = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8"
MEGATRON += " --seq-length 256 --micro-batch-size 2"

NEMO = """\
trainer: {devices: 8, num_nodes: 1}
model:
  {micro_batch_size: 2, tensor_model_parallel_size: 1, num_layers: 4, hidden_size: 512, num_attention_heads: 8,
   encoder_seq_length: 256}
"""

FILES = {
    "run.sh": (MEGATRON, 1),
    "titan.toml": ("training = {local_batch_size = 2, seq_len = 256}", 1),
    "ds.json": (json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}), 3),
    "nemo.yaml": (NEMO, 1),
}
"""Launch files with micro-batches of 2 and no global batch, and the micro-batches that they accumulate."""

SETS = ("model=gpt2-124m", "cluster=dgx-h100:1", "batch.sequence=256")


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.write_text(FILES[path.name][0], "utf-8")
    return path


def sizes(job: Job) -> tuple[int, int, int]:
    """Sequences of a step, of a micro-batch, and micro-batches of a replica."""
    assert job.batch.total is not None
    replicas = job.cluster.gpus // (job.plan.mesh.get("tp", 1) * job.plan.mesh.get("pp", 1))
    return job.batch.total, job.batch.micro, job.batch.total // (job.batch.micro * replicas)


def test_the_global_batch_follows_from_changed_degrees(file: Path) -> None:
    rounds = FILES[file.name][1]
    assert sizes(load_job(file, SETS)) == (16 * rounds, 2, rounds)
    assert sizes(load_job(file, (*SETS, "plan.tp=4"))) == (4 * rounds, 2, rounds)
    assert sizes(load_job(file, (*SETS, "plan.tp=2", "batch.micro=3"))) == (12 * rounds, 3, rounds)
    assert sizes(load_job(file, (*SETS, "plan.tp=4", "batch.global=48"))) == (48, 2, 12)
    # A search compares plans of one batch.
    assert read_job(file, (*SETS, "plan.tp=auto")).data["batch"]["global"] == 16 * rounds


def test_a_global_batch_of_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{MEGATRON} --global-batch-size 32", "utf-8")
    assert sizes(load_job(path, (*SETS, "plan.tp=4"))) == (32, 2, 8)


def test_points_of_a_sweep_derive_their_own(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(MEGATRON, "utf-8")
    sweep = {"job": "run.sh", "vary": {"plan.tp": [1, 2], "batch.micro": [2, 4]}}
    job = load_sweep(sweep, tmp_path).job
    points = {(1, 2): (16, 2, 1), (2, 4): (16, 4, 1)}
    for (tp, micro), expected in points.items():
        assert sizes(load_job({**job, "batch": {**job["batch"], "micro": micro}}, [f"plan.tp={tp}"])) == expected
    stated = {**sweep, "vary": {"plan.tp": [1, 2], "batch.global": [16, 32]}}
    assert load_sweep(stated, tmp_path).job["batch"]["global"] == 16


def test_two_sizes_of_a_batch_give_the_third() -> None:
    job = {"model": "gpt2-124m", "cluster": "dgx-h100:1"}
    assert sizes(load_job({**job, "batch": {"micro": 2, "microbatches": 3}})) == (48, 2, 3)
    assert sizes(load_job({**job, "batch": {"global": 48, "microbatches": 3}})) == (48, 2, 3)
