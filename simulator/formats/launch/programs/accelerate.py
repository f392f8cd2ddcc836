"""Hugging Face Accelerate: its YAML file (FSDP 1 and 2, DeepSpeed, DDP, degrees), with or without those of a Trainer.

Source: huggingface/accelerate v1.15.0, src/accelerate/utils/dataclasses.py, commands/config and commands/launch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcast.simulator.formats.launch.keys import compose_model, nest
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.trainer import TrainerProgram, read_trainer_file, read_training
from meshcast.simulator.formats.launch.programs.trainer_settings import VERDICTS
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Keys
from meshcast.simulator.formats.launch.yaml_text import write_yaml

SEQUENCE_NAMES = ("max_length", "max_seq_length", "model_max_length", "block_size", "cutoff_len", "sequence_len")
"""Lengths of sequences, as programs on Accelerate name them."""

TRAINER = "per_device_train_batch_size"
"""The argument of the Trainer without which the file says nothing of a step."""


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    program = TrainerProgram(sequence_names=SEQUENCE_NAMES)
    read_training(reading, program)
    if TRAINER not in reading.stated and "deepspeed.train_micro_batch_size_per_gpu" not in reading.stated:
        reading.ask_key("batch.micro", 1, "the script, or arguments of the Trainer, say the batch of a process")
    if not set(program.checkpointing_names) & reading.stated.keys() and reading.keys["plan.recompute"] == "none":
        why = "no setting of this file recomputes layers; the script, or arguments of the Trainer, may"
        reading.assume("plan.recompute", "none", why)


def recognise(file: LaunchFile) -> Evidence:
    """A mapping with keys that only Accelerate has."""
    if not {"distributed_type", "compute_environment"} & file.keys:
        return Evidence.NONE
    return Evidence.CERTAIN if {"distributed_type", "compute_environment"} <= file.keys else Evidence.LIKELY


# ------------------------------------------------------------------------------------------- writing


def write(keys: Keys, header: list[str]) -> str:
    """A YAML file: Accelerate's keys, and behind them the arguments of the Trainer."""
    return write_yaml({**write_accelerate(keys), **write_trainer(keys)}, header)


def write_accelerate(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Accelerate's keys of a job."""
    gpus, each = keys["cluster.gpus"], keys.get("cluster.gpus_per_node", 8)
    compute = str(keys.get("precision.compute", "bf16"))
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _name_kind(keys),
        "mixed_precision": compute if compute in ("bf16", "fp16") else "fp8" if compute.startswith("fp8") else "no",
        "num_machines": -(-gpus // each),
        "num_processes": gpus,
    }
    if settings["distributed_type"] == "FSDP":
        settings["fsdp_config"] = _write_fsdp(keys)
    elif settings["distributed_type"] == "DEEPSPEED":
        settings["deepspeed_config"] = _write_deepspeed(keys)
    if degrees := _write_degrees(keys):
        settings["parallelism_config"] = degrees
    return settings


def _name_kind(keys: Mapping[str, Any]) -> str:
    data = str(keys.get("plan.data", "ddp"))
    return {"ddp": "MULTI_GPU", "fsdp": "FSDP"}.get(data, "DEEPSPEED")


def _is_second(keys: Mapping[str, Any]) -> bool:
    """Whether FSDP 2 is written: it has degrees, and is how PyTorch gathers into buffers."""
    degrees = any(keys.get(f"plan.{degree}", 1) > 1 for degree in ("tp", "cp"))
    return degrees or bool(keys.get("framework.set.gathers_apart"))


def _write_fsdp(keys: Mapping[str, Any]) -> dict[str, Any]:
    reshard = keys.get("plan.data.reshard", True)
    section: dict[str, Any] = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if _is_second(keys):
        section |= {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}
    else:
        hybrid = keys.get("plan.replicate", 1) > 1
        strategies = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") if hybrid else ("FULL_SHARD", "SHARD_GRAD_OP")
        section |= {"fsdp_version": 1, "fsdp_sharding_strategy": strategies[not reshard]}
        ahead = keys.get("plan.data.backward_prefetch", True)
        section["fsdp_backward_prefetch"] = "BACKWARD_PRE" if ahead else "NO_PREFETCH"
    section["fsdp_activation_checkpointing"] = keys.get("plan.recompute") == "full"
    section["fsdp_offload_params"] = "optimizer" in keys.get("plan.offload", ())
    section["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    return section


def _write_deepspeed(keys: Mapping[str, Any]) -> dict[str, Any]:
    data, offload = str(keys["plan.data"]), keys.get("plan.offload", ())
    stage = {"zero-1": 1, "zero-2": 2, "zero-offload": 2}.get(data, 3)
    replicas = keys["plan.dp"] * keys["batch.micro"]
    section = {"zero_stage": stage, "gradient_accumulation_steps": max(1, keys["batch.global"] // replicas)}
    if data == "zero-offload" or "optimizer" in offload:
        section["offload_optimizer_device"] = "cpu"
    elif data == "zero-infinity":
        section["offload_optimizer_device"] = keys.get("plan.data.optimizer", "cpu")
        if (parameters := keys.get("plan.data.parameters", "cpu")) != "gpu":
            section["offload_param_device"] = parameters
    return section


def _write_degrees(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The section of degrees of FSDP 2."""
    degrees = {name: keys.get(f"plan.{name}", 1) for name in ("tp", "cp")}
    copies = keys.get("plan.replicate", 1)
    if keys.get("plan.data") != "fsdp" or not (_is_second(keys) and (copies > 1 or max(degrees.values()) > 1)):
        return {}
    sizes = {"dp_replicate": copies, "dp_shard": keys["plan.dp"] // copies, **degrees}
    section: dict[str, Any] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if degrees["cp"] > 1:
        ring = keys.get("plan.sequence") == "ring"
        section["parallelism_config_cp_comm_strategy"] = "alltoall" if ring else "allgather"
    return section


def write_trainer(keys: Mapping[str, Any], sequence: str = "max_length") -> dict[str, Any]:
    """The arguments of the Trainer of a job. sequence: name of the length of sequences."""
    model = compose_model(nest(keys, "model"))
    settings: dict[str, Any] = {"model_name_or_path": model} if isinstance(model, str) else {}
    settings |= {
        "per_device_train_batch_size": keys["batch.micro"],
        "gradient_accumulation_steps": max(1, keys["batch.global"] // (keys["plan.dp"] * keys["batch.micro"])),
        sequence: keys["batch.sequence"],
        "gradient_checkpointing": keys.get("plan.recompute") == "full" and _name_kind(keys) != "FSDP",
        "optim": "adamw_torch_fused",
    }
    library = {"flash-2": "flash_attention_2", "flash-3": "flash_attention_3", "sdpa": "sdpa"}
    if keys.get("framework.set.attention") == "unfused":
        settings["attn_implementation"] = "eager"
    elif (name := keys.get("framework.set.attention_library")) in library:
        settings["attn_implementation"] = library[name]
    if keys.get("framework.set.compile"):
        settings["torch_compile"] = True
    if keys.get("run.steps"):
        settings["max_steps"] = keys["run.steps"]
    return settings


ACCELERATE = LaunchFormat(
    "accelerate", "Hugging Face Accelerate", ".yaml", recognise, read_trainer_file, interpret, write, VERDICTS
)
