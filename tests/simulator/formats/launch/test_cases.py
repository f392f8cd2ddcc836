"""What people brought and got another plan for: files and the files beside them, each read as the job that it is.

Files of single programs are tested with their programs: torchtitan's two stacks of checkpointing and its rule on
key/value heads, Axolotl's degrees, defaults and arguments of scripts of Megatron-LM.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.explain.assumed_fields import assumed_fields
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, current_options, reading_launch_files
from meshcast.simulator.loading.load import load_job, read_launch_job
from tests.simulator.formats.launch.test_trainer import ZERO_3

ZERO_2 = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True}}
TUNING = {"stage": "sft", "do_train": True, "finetuning_type": "full", "per_device_train_batch_size": 1}
LONG: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"}
LONG |= {"num_machines": 1, "num_processes": 8, "max_length": 1 << 20, "model_name_or_path": "Qwen/Qwen3-8B"}
LONG |= {"per_device_train_batch_size": 1, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
LONG |= {"parallelism_config": {"parallelism_config_dp_shard_size": 1, "parallelism_config_cp_size": 8}}
SEVEN = "cluster={node: hgx-a800, nodes: 1, gpus: 7}"


def words_of(settings: dict[str, Any]) -> str:
    """The command of a script that has these settings as arguments."""
    flags = (f"--{name}" if value is True else f"--{name} {value}" for name, value in settings.items())
    return f"torchrun --nproc_per_node 8 src/train.py {' '.join(flags)}\n"


@pytest.mark.parametrize(
    ("name", "text", "changes", "expected"),
    [
        (
            "seven.yaml",
            yaml.safe_dump(
                {**TUNING, "model_name_or_path": "Qwen/Qwen2.5-32B", "deepspeed": "zero3.json", "cutoff_len": 1024}
                | {"gradient_accumulation_steps": 2, "bf16": True}
            ),
            [SEVEN],
            {"plan.data": "zero-3", "plan.dp": 7, "plan.recompute": "full", "precision.compute": "bf16"}
            | {"batch.micro": 1, "batch.global": 14, "batch.sequence": 1024, "train.mode": "full"},
        ),
        (
            "fp16.yaml",
            yaml.safe_dump(
                {**TUNING, "model_name_or_path": "Qwen/Qwen2-7B", "deepspeed": "zero2.json", "cutoff_len": 512}
                | {"gradient_accumulation_steps": 1, "fp16": True}
            ),
            ["cluster=dgx-a100-40:1"],
            {"plan.data": "zero-2", "plan.dp": 8, "plan.recompute": "full", "precision.compute": "fp16"}
            | {"batch.micro": 1, "batch.global": 8, "batch.sequence": 512, "train.mode": "full"},
        ),
        (
            "run.sh",
            words_of(
                {"deepspeed": "zero3.json", **TUNING, "model_name_or_path": "Qwen/Qwen2.5-32B", "cutoff_len": 1024}
                | {"gradient_accumulation_steps": 2, "bf16": True}
            ),
            ["model=qwen2.5-32b"],
            {"plan.data": "zero-3", "plan.dp": 8, "plan.recompute": "full", "precision.compute": "bf16"}
            | {"batch.micro": 1, "batch.global": 16, "batch.sequence": 1024, "train.mode": "full"},
        ),
        (
            "long.yaml",
            yaml.safe_dump(LONG),
            [],
            {"plan.data": "fsdp", "plan.cp": 8, "plan.sequence": "all-gather", "plan.recompute": "full"}
            | {"precision.compute": "bf16", "batch.global": 1, "batch.sequence": 1 << 20}
            | {"framework.set.attention_library": "sdpa", "framework.set.loss.chunk_tokens": 256},
        ),
        (
            "usual.sh",
            "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 64 --seq-length 4096"
            " --bf16 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
            " --overlap-grad-reduce --overlap-param-gather --attention-backend flash",
            ["model=llama3-8b"],
            {"plan.data": "zero-1", "plan.tp": 2, "plan.tensor": "megatron-sp", "precision.compute": "bf16"}
            | {"framework.set.overlap.dp": True, "framework.set.overlap.updated_weights": True},
        ),
    ],
)
def test_a_file_and_the_file_beside_it_are_one_plan(
    tmp_path: Path, name: str, text: str, changes: list[str], expected: dict[str, Any]
) -> None:
    for beside, data in {"zero3": ZERO_3, "zero2": ZERO_2}.items():
        (tmp_path / f"{beside}.json").write_text(json.dumps(data), "utf-8")
    (tmp_path / name).write_text(text, "utf-8")
    job = load_job(tmp_path / name, changes)
    keys = flatten_job(job)
    assert {key: keys.get(key) for key in expected} == expected
    taken = read_launch_job(tmp_path / name, changes).launch.findings.taken  # type: ignore[union-attr]
    unstated = {field.name for field in assumed_fields(simulate(job))}
    assert not unstated & {key for entry in taken for key in entry.keys}, "what the file states is not called unstated"
    assert "framework.set.bucket.elements" not in unstated or "plan.data.reduce_bucket" not in keys


CASES = Path(__file__).resolve().parents[5] / "shared" / "cases"
COMMANDS: dict[str, dict[str, Any]] = {
    f'01-lf-qwen32b-7xa800.yaml --set "{SEVEN}"': {"plan.data": "zero-3", "plan.dp": 7, "plan.recompute": "full"},
    "03-titan-llama7b-full.toml --set cluster=grand-teton-h100:1 --set model=llama2-7b": {
        **{"plan.data": "fsdp", "plan.dp": 8, "plan.recompute": "full", "batch.global": 64}
    },
    "03-titan-llama7b-sac.toml --set cluster=grand-teton-h100:1 --set model=llama2-7b": {
        **{"plan.data": "fsdp", "plan.dp": 8, "plan.recompute": "operators", "batch.global": 64}
    },
    "05-titan-dsv3-16b.toml": {"plan.data": "fsdp", "plan.ep": 8, "plan.recompute": "operators", "batch.micro": 4},
    "13-trl-qwen3-8b-1m.yaml": {"plan.data": "fsdp", "plan.cp": 8, "plan.recompute": "full", "batch.global": 1},
    "19-axolotl-qwen3-8b-tp-cp.yaml": {"plan.data": "fsdp", "plan.dp": 2, "plan.tp": 2, "plan.cp": 2},
    "27-slurm-colon-default.sbatch": {"plan.tp": 4, "plan.pp": 2, "batch.micro": 1, "batch.global": 288},
    '28-positional.sh --args "dsw 8B 1 64 4096 2 1"': {"plan.data": "zero-1", "plan.tp": 2, "batch.global": 64},
    "29-script-dir.sh": {"plan.data": "zero-1", "plan.tp": 2, "precision.compute": "bf16", "batch.global": 64},
    "36-lf-qwen7b-zero2-a100-40.yaml --set cluster=dgx-a100-40:1": {
        **{"plan.data": "zero-2", "plan.recompute": "full", "precision.compute": "fp16", "batch.sequence": 512}
    },
    "38-trainer-args.sh --set model=qwen2.5-32b": {"plan.data": "zero-3", "batch.global": 16, "batch.sequence": 1024},
}
"""What `meshcast predict` forecasts of public reports, by what stands behind it."""


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases that people brought are not beside this repository")
@pytest.mark.parametrize(("command", "expected"), COMMANDS.items())
def test_a_case_that_was_brought_gives_its_plan(command: str, expected: dict[str, Any]) -> None:
    name, *options = shlex.split(command)
    given = dict(zip(options[::2], options[1::2], strict=True))
    changes = [value for option, value in zip(options[::2], options[1::2], strict=True) if option == "--set"]
    with reading_launch_files(LaunchOptions(arguments=tuple(given.get("--args", "").split()))):
        keys = flatten_job(load_job(CASES / name, changes))
    assert {key: keys.get(key) for key in expected} == expected


MEMORY: dict[str, float] = {
    # its script states --fp16 and --use-flash-attn-triton
    "26-ulysses-or-tp-7b.yaml --set plan.zero=2 --set framework.set.attention=flash --set precision=fp16": 43.8,
    "26-ulysses-or-tp-7b.yaml --set plan.zero=2 --set framework.set.attention=flash --set precision=fp16"
    " --set plan.recompute=none": 62.3,
    '09-gpt2-774m-v100.sh --set "cluster={gpu: v100-sxm2-32, gpus: 1}"': float("inf"),
}
"""Memory of a GPU that people read off [GiB]; infinite: the run was out of memory."""


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases that people brought are not beside this repository")
@pytest.mark.parametrize(("command", "measured"), MEMORY.items())
def test_a_case_that_was_brought_needs_its_memory(command: str, measured: float) -> None:
    name, *options = shlex.split(command)
    report = simulate(load_job(CASES / name, options[1::2]))
    assert report.fits == (measured < float("inf"))
    assert not report.fits or report.peak_device / 2**30 == pytest.approx(measured, rel=0.06)


QWEN = (
    "17-titan-qwen3-30b-scaling.yaml --set cluster=dgx-b200:{n} --set plan.mesh.dp={gpus}"
    " --set plan.views.experts.edp={n}"
)
COUNTED: dict[str, tuple[str, float]] = {
    "05-titan-dsv3-16b.toml": ("peak_reserved", 73.32),
    "05-titan-dsv3-16b.toml --set batch.micro=8 --set batch.global=64": ("peak_reserved", float("inf")),
    QWEN.format(n=1, gpus=8): ("peak_reserved", 167.93),
    QWEN.format(n=2, gpus=16): ("peak_reserved", 138.75),
    QWEN.format(n=16, gpus=128): ("peak_reserved", 114.78),
    "13-trl-qwen3-8b-1m.yaml --set plan.offload=[activations]": ("peak_allocated", 52.3),  # the file does not say so
}
"""Memory that the allocator reserved, or tensors took, as a program logged it [GiB]; infinite: out of memory."""


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases that people brought are not beside this repository")
@pytest.mark.parametrize(("command", "measured"), COUNTED.items())
def test_a_case_that_was_brought_counts_its_memory(command: str, measured: tuple[str, float]) -> None:
    name, *options = shlex.split(command)
    report, (counter, gib) = simulate(load_job(CASES / name, options[1::2])), measured
    assert report.fits == (gib < float("inf"))
    assert not report.fits or getattr(report, counter) / 2**30 == pytest.approx(gib, rel=0.06)


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases that people brought are not beside this repository")
def test_a_case_that_its_program_refuses_is_refused() -> None:
    with pytest.raises(PlanError, match="4 tensor ranks do not divide 2 key/value heads"):
        load_job(CASES / "18-titan-kv-heads.toml", ["model=qwen2.5-3b"])


def test_options_end_with_their_block() -> None:
    outer, inner = (LaunchOptions(arguments=(word,)) for word in ("outer", "inner"))
    with reading_launch_files(outer):
        with reading_launch_files(inner):
            assert current_options() is inner
        assert current_options() is outer
    assert current_options() == LaunchOptions()
