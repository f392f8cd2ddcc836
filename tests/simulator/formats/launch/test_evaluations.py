"""Evaluations of launch files, read as each program runs them, and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.formats.launch.convert import export_job, import_text
from meshcast.simulator.formats.launch.launch_file import LaunchOptions
from meshcast.simulator.loading.load import load_job

MEGATRON = "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size 16 "
BRIDGE = "{train: {micro_batch_size: 2, global_batch_size: 16}, dataset: {seq_length: 4096}, ddp: {}, "
TUNE = "# tune run --nproc_per_node 8 full_finetune_distributed\nbatch_size: 2\n"
TUNE += "model: {_component_: torchtune.models.llama3.llama3_8b}\ntokenizer: {max_seq_len: 4096}\n"
TITAN = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nseq_len = 4096\nlocal_batch_size = 2\n"
PIPELINE = "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 1\n"
AXOLOTL = "base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 2\nsequence_len: 4096\ndatasets: []\n"
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_fused_linear_cross_entropy: true\n"
SWIFT = "swift sft --tuner_type full --model Qwen/Qwen3-8B --dataset a --max_length 4096 "
NANOTRON = "parallelism: {dp: 8, tp: 1, pp: 1}\nmodel: {model_config: {num_hidden_layers: 2}}\n"
NANOTRON += "tokens: {micro_batch_size: 2, sequence_length: 4096, val_check_interval: 5, limit_val_batches: 4}\n"
XTUNER = (
    "from xtuner.engine import X\nmodel = dict(llm=dict(pretrained_model_name_or_path='meta-llama/Meta-Llama-3-8B'))\n"
)
RL = "policy: {model_name: meta-llama/Meta-Llama-3-8B, train_micro_batch_size: 2, train_global_batch_size: 16,"
RL += " max_total_sequence_length: 4096, dtensor_cfg: {enabled: true}}\n"


@pytest.mark.parametrize(
    ("form", "text", "evaluation"),
    [
        ("megatron", MEGATRON, None),
        ("megatron", f"{MEGATRON} --eval-interval 100 --eval-micro-batch-size 8", {"micro": 8}),
        ("megatron", f"{MEGATRON} --eval-iters 0 --eval-micro-batch-size 8", None),
        ("megatron-bridge", f"{BRIDGE} validation: {{eval_micro_batch_size: 8}}}}", {"micro": 8}),
        ("megatron-bridge", f"{BRIDGE} validation: {{eval_micro_batch_size: 8, eval_iters: 0}}}}", None),
        ("nemo", "trainer: {limit_val_batches: 32}\nmodel: {micro_batch_size: 2, global_batch_size: 16}", None),
        (
            "nemo",
            "model: {micro_batch_size: 2, global_batch_size: 16, data: {validation_ds: {micro_batch_size: 8}}}",
            {"micro": 8},
        ),
        ("torchtune", TUNE + "batch_size_val: 8\n", None),
        ("torchtune", TUNE + "batch_size_val: 8\nrun_val_every_n_steps: 10\n", {"micro": 8}),
        ("torchtune", TUNE + "run_val_every_n_steps: 10\n", None),
        ("torchtitan", TITAN, None),
        ("torchtitan", TITAN + "[validation]\nenable = true\n", {"micro": 8, "sequence": 2048}),
        (
            "torchtitan",
            TITAN + PIPELINE + "[validation]\nenable = true\nseq_len = 512\nlocal_batch_size = 6\n",
            {"micro": 3, "sequence": 512},
        ),
        ("axolotl", AXOLOTL + "val_set_size: 0.0\nevals_per_epoch: 4\neval_batch_size: 8\n", None),
        ("axolotl", AXOLOTL + "val_set_size: 0.1\neval_batch_size: 8\n", None),
        ("axolotl", AXOLOTL + "val_set_size: 0.1\nevals_per_epoch: 4\neval_batch_size: 8\n", {"micro": 8}),
        ("axolotl", AXOLOTL + "val_set_size: 0.1\nevals_per_epoch: 4\n", None),
        ("axolotl", AXOLOTL + LIGER + "val_set_size: 0.1\nevals_per_epoch: 4\n", {"micro": 2}),
        ("axolotl", AXOLOTL + LIGER + "rl: dpo\nval_set_size: 0.1\nevals_per_epoch: 4\n", {"micro": 4}),
        ("ms-swift", SWIFT, None),
        ("ms-swift", SWIFT + "--split_dataset_ratio 0.01", {"micro": 1}),
        ("ms-swift", SWIFT + "--val_dataset b --per_device_eval_batch_size 8", {"micro": 8}),
        ("ms-swift", SWIFT + "--val_dataset b --eval_strategy no", None),
        ("llamafactory", "stage: sft\nfinetuning_type: full\ntemplate: x\ndo_eval: true\n", {"micro": 8}),
        ("nanotron", NANOTRON, None),
        ("xtuner", XTUNER + "val_dataloader = dict(batch_size=8)\n", None),
        ("xtuner", XTUNER + "val_dataloader = dict(batch_size=8)\nval_cfg = dict(type='ValLoop')\n", {"micro": 8}),
        ("nemo-rl", RL + "sft: {val_period: 10, val_micro_batch_size: 8}\n", {"micro": 8}),
        ("nemo-rl", RL + "sft: {val_period: 0, val_micro_batch_size: 8}\n", None),
        ("nemo-rl", RL + "dpo: {val_period: 10}\n", {"micro": 2}),
    ],
)
def test_evaluations_are_those_of_the_program(form: str, text: str, evaluation: dict[str, int] | None) -> None:
    silent = LaunchOptions(assume_defaults=True)
    job = import_text(text, "file", form, "dgx-h100:1", "llama3-8b", options=silent).job
    assert job.get("run", {}).get("evaluation") == evaluation


FSDP: dict[str, Any] = {"plan": {"fsdp": True}}


@pytest.mark.parametrize(
    ("form", "job", "sequence"),
    [
        ("megatron", {}, None),
        ("megatron-bridge", {}, None),
        ("torchtitan", {"framework": {"name": "torchtitan", "release": "2025-11"}, **FSDP}, 512),
        ("llamafactory", {"framework": "llama-factory", **FSDP}, None),
        ("axolotl", {"framework": "axolotl", **FSDP}, 512),
        ("accelerate", {"framework": "hf-trainer", **FSDP}, None),
    ],
)
def test_evaluations_are_written(form: str, job: dict[str, Any], sequence: int | None) -> None:
    evaluation = {"micro": 3, **({"sequence": sequence} if sequence else {})}
    batch = {"global": 64, "micro": 2, "sequence": 4096}
    fields = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": batch, "run": {"evaluation": evaluation}}
    exported = export_job(load_job(fields | job), form, load_in, resolve_plan)
    assert not [key for key in exported.unsaid if "evaluation" in key]


def load_in(job: dict[str, Any], folder: Path) -> Any:
    return load_job(job)


def test_a_program_that_evaluates_on_the_batches_of_training_is_told_so() -> None:
    batch = {"global": 64, "micro": 2, "sequence": 4096}
    fields = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": batch, "run": {"evaluation": {"micro": 3}}}
    assert "run.evaluation.micro" in export_job(load_job(fields), "nemo", load_in, resolve_plan).unsaid


@pytest.mark.parametrize(("version", "saves"), [(1, "units"), (2, "shards")])
def test_a_state_dict_that_fsdp_is_not_told_is_accelerates(version: int, saves: str) -> None:
    settings = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": version}, "per_device_train_batch_size": 1}
    settings |= {"model_name_or_path": "meta-llama/Meta-Llama-3-8B", "max_length": 4096}
    silent = LaunchOptions(assume_defaults=True)
    job = import_text(json.dumps(settings), "file", "trainer", "dgx-h100:1", options=silent).job
    assert load_job(job).framework.memory.saves == saves
