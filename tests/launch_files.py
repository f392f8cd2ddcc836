"""Launch files that tests share: a test, or an entry of a table, names one of them and changes what it is about.

A launch file is a mapping of
name: of the file, whose suffix says how `settings` are written.
settings: by name; of a script, flags of its `command`.
command: the text of the file, behind which the settings stand; it may hold the name of a text of TEXTS, in braces.
before, flags: text in front of it, and behind it.
recipe, builder: of torchtune. pod: of a manifest, the command that `settings` are flags of.
set, args, env, form, cluster, model, assume: what a user gives beside the file.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.formats.launch.convert import export_job, import_file
from meshcast.simulator.formats.launch.imported_job import Exported, ImportedJob
from meshcast.simulator.formats.launch.keys import flatten_job, nest
from meshcast.simulator.formats.launch.launch_file import LaunchFile, LaunchOptions, parse_launch_text
from meshcast.simulator.formats.launch.table import Keys
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from tests.jobs import change

_LAYERS = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000"
SHAPE = f"{_LAYERS} --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64"
_TRAINER = {"model_name_or_path": "m", "per_device_train_batch_size": 2, "bf16": True, "output_dir": "out"}
_TRAINER |= {"num_train_epochs": 3, "save_steps": 100, "logging_steps": 5, "model_max_length": 4096}
_FACTORY = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "full", "template": "x", "bf16": True}
_SWIFT = {"model": "m", "tuner_type": "lora", "torch_dtype": "bfloat16", "max_length": 4096, "lora_rank": 16}
_SWIFT |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "deepspeed": "zero3"}
_MEGATRON_SWIFT = {
    **{"model": "m", "tuner_type": "full", "tensor_model_parallel_size": 2, "max_length": 4096},
    **{"micro_batch_size": 2, "global_batch_size": 32, "recompute_granularity": "full"},
    **{"recompute_method": "uniform", "recompute_num_layers": 1, "sequence_parallel": True},
}
_FSDP = {
    **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"},
    **{"num_machines": 1, "num_processes": 8, "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
}
_ARGUMENTS = {"model_name_or_path": "m", "per_device_train_batch_size": 2, "bf16": True, "model_max_length": 4096}
_XTUNER = {
    **{"model.type": "SupervisedFinetune", "model.llm.pretrained_model_name_or_path": "m", "model.lora.r": 32},
    **{"train_dataloader.batch_size": 2, "train_dataloader.dataset.max_length": 4096, "sequence_parallel_size": 2},
    **{"optim_wrapper.type": "AmpOptimWrapper", "optim_wrapper.accumulative_counts": 8},
    **{"optim_wrapper.dtype": "float16", "optim_wrapper.optimizer.type": "AdamW"},
}
ZERO_3 = {
    **{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    **{"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
    "zero_optimization": {
        **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
        **{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "stage3_param_persistence_threshold": "auto",
    },
}
PRIMUS = """\
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:llama3.1_8B}.yaml
    overrides:
      global_batch_size: 64
      micro_batch_size: 2
      seq_length: 4096
      tensor_model_parallel_size: ${PRIMUS_TP:1}
"""
_LLAMA3_8B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --hidden-dropout 0 --seq-length 8192 --micro-batch-size 1"
    " --vocab-size 128256"
)
_NEMO = {
    **{"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "encoder_seq_length": 2048},
    **{"micro_batch_size": 1, "global_batch_size": 8},
}
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 100
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model"]
"""
REGISTRY = '''
import os

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

SEQUENCES, TP = 2, 2


def _base(flavor: str, *, steps: int = 10) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry(flavor),
        training=TrainingConfig(local_batch_size=SEQUENCES, seq_len=2 * 4096, steps=steps),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B"),
        activation_checkpoint=SelectiveAC.Config(),
    )


def a_run() -> Trainer.Config:
    """Two replicas of shards."""
    config = _base("8B", steps=100)
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.tensor_parallel_degree = TP
    config.activation_checkpoint = FullAC.Config()
    config.compile = CompileConfig(enable=bool, components=["model"])
    config.compile.enable = not_known if os.path.exists("x") else True
    config.compile.enable = True
    return config
'''
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
_SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}
NANOTRON: dict[str, Any] = {
    "model": {"model_config": {"is_llama_config": True, **_SMALL}},
    "parallelism": {"dp": 2, "pp": 2, "tp": 2, "tp_mode": "REDUCE_SCATTER"},
    "tokens": {
        **{"sequence_length": 256, "train_steps": 15, "micro_batch_size": 2, "batch_accumulation_per_replica": 3}
    },
    "optimizer": {"zero_stage": 1, "accumulate_grad_in_fp32": True},
}
_ACTOR: dict[str, Any] = {
    **{"model_name": "meta-llama/Llama-3.2-1B", "train_global_batch_size": 32, "train_micro_batch_size": 1},
    **{"max_total_sequence_length": 1024, "precision": "bfloat16"},
    "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 1, "dp_replicate_size": 2, "cpu_offload": False},
    "megatron_cfg": {
        **{"enabled": False, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        **{"activation_checkpointing": False, "recompute_granularity": "full"},
        "optimizer": {"use_distributed_optimizer": True, "lr": 1e-5},
        "fp8_cfg": {"enabled": False, "fp8": "e4m3", "fp8_recipe": "blockwise"},
    },
}
_POLICY = {"policy": _ACTOR, "cluster": {"num_nodes": 2, "gpus_per_node": 8}}
_TUNE = "# tune run {recipe} --config here\nmodel: {_component_: torchtune.models.llama3_1.{builder}}\n"
_TUNE += "tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}\nbatch_size: 2\n"
_TUNE += "gradient_accumulation_steps: 4\ndtype: bf16\noptimizer: {_component_: torch.optim.AdamW}\n"
_PPO = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODELS/Qwen3-8B"
_PPO += " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
_BRIDGE = "train: {micro_batch_size: 2, global_batch_size: 16}\ndataset: {seq_length: 4096}\nddp: {}\n"
_LLAMA3: dict[str, Any] = {"set": ["model=llama3-8b"]}

TEXTS = {
    **{"shape": SHAPE, "llama3": _LLAMA3_8B, "primus": PRIMUS, "zero3": json.dumps(ZERO_3)},
    **{"nanotron": json.dumps(NANOTRON), "policy": json.dumps(_POLICY), "titan": TITAN, "registry": REGISTRY},
}

LAUNCHES: dict[str, dict[str, Any]] = {
    "any": {},
    "megatron": {
        **{"name": "run.sh", "command": f"torchrun pretrain_gpt.py {SHAPE} ", "form": "megatron"},
        "cluster": "dgx-h100:2",
    },
    "bridge": {
        **{"name": "run.yaml", "command": _BRIDGE, "form": "megatron-bridge", "model": "llama3-8b", "assume": True},
    },
    "megatron-deepspeed": {
        **{"name": "run.sh", "command": f"torchrun pretrain_gpt.py {SHAPE} --bf16 --no-pipeline-parallel --deepspeed "},
        "cluster": "dgx-h100:1",
    },
    "primus": {"name": "exp.yaml", "command": PRIMUS},
    "nemo 1": {
        "name": "run.yaml",
        "settings": {"trainer": {"devices": 8, "num_nodes": 1, "precision": "bf16"}, "model": _NEMO},
    },
    "trainer": {"name": "run.yaml", "settings": _TRAINER, "set": ["model=llama3-8b", "plan.zero=0"]},
    "trainer on deepspeed": {"name": "run.yaml", "settings": {**_TRAINER, "deepspeed": "z.json"}, **_LLAMA3},
    "accelerate": {"name": "run.yaml", "settings": {**_FSDP, **_TRAINER}, **_LLAMA3},
    "llamafactory": {"name": "run.yaml", "settings": _FACTORY, **_LLAMA3},
    "axolotl": {
        "name": "run.yaml",
        "settings": {"base_model": "m", "datasets": [{"path": "d"}], "micro_batch_size": 2, "sequence_len": 2048},
        **_LLAMA3,
    },
    "trl": {
        "name": "run.yaml",
        "settings": {"model_name_or_path": "m", "dataset_num_proc": 4, "packing_strategy": "bfd"},
        "set": ["model=llama3-8b", "plan.zero=0"],
    },
    "train.py": {"name": "run.sh", "command": "python train.py", "settings": {**_ARGUMENTS, "output_dir": "out"}}
    | _LLAMA3,
    "swift": {"name": "run.sh", "command": "NPROC_PER_NODE=8 swift sft", "settings": _SWIFT, **_LLAMA3},
    "megatron swift": {"name": "run.sh", "command": "NPROC_PER_NODE=8 megatron sft", "settings": _MEGATRON_SWIFT}
    | _LLAMA3,
    "xtuner": {
        **{"name": "own.py", "command": "from xtuner.model import SupervisedFinetune\n", "settings": _XTUNER},
        "set": ["model=llama3-8b", "plan.zero=2"],
    },
    "torchtitan": {
        **{"name": "run.toml", "command": "[model]\nname = 'llama3'\nflavor = '8B'\n", "form": "torchtitan"},
    },
    "torchtune": {
        "name": "run.yaml",
        "command": _TUNE,
        "recipe": "full_finetune_distributed",
        "builder": "llama3_1_8b",
    },
    "nanotron": {"name": "run.yaml", "settings": NANOTRON},
    "nemo-rl": {
        "name": "run.yaml",
        "settings": _POLICY,
    },
    "verl": {"name": "run.sh", "command": _PPO, "set": ["train.mode=full"]},
}
"""A launch file of every program; `any`: an entry states all of it."""


def write_launch_text(launch: Mapping[str, Any]) -> str:
    """Returns the text of a launch file."""
    text = fill("".join(launch.get(key, "") for key in ("before", "command", "flags")), launch)
    settings, name = launch.get("settings"), launch["name"]
    if settings is None:
        return str(text)
    if "pod" in launch:
        words = f"{launch['pod']} {_write_flags(settings)}".split()
        env = [{"name": "NPROC_PER_NODE", "value": "8"}]
        settings = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"env": env, "command": words}]}}
    if name.endswith(".json"):
        return json.dumps(settings)
    if name.endswith(".yaml"):
        return f"{text}{yaml.safe_dump(settings)}"
    if name.endswith(".py"):
        values = nest({key: value for key, value in settings.items() if value is not None})
        return text + "".join(f"{key} = {_write_python(value)}\n" for key, value in values.items())
    return f"{text} {_write_flags(settings)}\n"


def fill(text: str, names: Mapping[str, Any]) -> str:
    """Returns a text with those of TEXTS, or of its launch file, in the places of their names."""
    texts = TEXTS | {name: names[name] for name in ("recipe", "builder") if name in names}
    return reduce(lambda filled, name: filled.replace(f"{{{name}}}", texts[name]), texts, text)


def _write_python(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    return f"dict({', '.join(f'{name}={_write_python(inner)}' for name, inner in value.items())})"


def _write_flags(settings: Mapping[str, Any]) -> str:
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
    return " ".join(f"--{key} {word}" for key, word in words.items() if word is not None)


def without(launch: Any, paths: list[str]) -> Any:
    """Takes keys (`a.b`) out of a launch file; returns it."""
    for path in paths:
        *outer, key = path.split(".")
        reduce(dict.__getitem__, outer, launch).pop(key)
    return launch


def write_companions(files: Mapping[str, Any]) -> None:
    """Writes the files beside a launch file into the current folder; mappings as JSON."""
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(fill(content, {}) if isinstance(content, str) else json.dumps(content), "utf-8")


def parse_launch(launch: Mapping[str, Any]) -> LaunchFile:
    """Returns a launch file with the options that it is read with."""
    words = tuple(shlex.split(launch.get("args", "")))
    options = LaunchOptions(launch.get("env", {}), words, assume_defaults=launch.get("assume", False))
    name = launch["name"]
    return parse_launch_text(write_launch_text(launch), name, Path(name).suffix, Path(), options)


def import_launch(launch: Mapping[str, Any]) -> ImportedJob:
    """Imports a launch file in the current folder, once its companions (`files`) are written."""
    write_companions(launch.get("files", {}))
    given = {key: launch.get(key) for key in ("cluster", "model", "form")}
    return import_file(parse_launch(launch), launch.get("set", ()), **given)


def read_launch(base: str, **changes: Any) -> ImportedJob:
    """Imports a launch file of LAUNCHES with changes."""
    return import_launch(change(LAUNCHES[base], changes))


def load_launch(launch: Mapping[str, Any]) -> Job:
    """Loads a launch file of the current folder as a job, with changes (`set`)."""
    (path := Path(launch["name"])).write_text(write_launch_text(launch), "utf-8")
    return load_job(path, launch.get("set", ()))


def keys_of(found: ImportedJob) -> Keys:
    """Returns the keys of the job of a launch file."""
    return flatten_job(load_job(found.job, base=Path()))


def load(job: dict[str, Any], folder: Path = Path()) -> Job:
    """Loads a job in a folder, as exports do."""
    return load_job(job, base=folder)


def accept(job: Job) -> None:
    """Checks nothing: most drawn degrees divide no real model."""


def export(job: Job | dict[str, Any], form: str, check: Any = accept) -> Exported:
    """Exports a job without asking whether a program could run it."""
    return export_job(load(job) if isinstance(job, dict) else job, form, load, check)


RUNS = resolve_plan
"""Checks that a program could run a job."""

TEXTS["xtuner"] = write_launch_text(LAUNCHES["xtuner"])
