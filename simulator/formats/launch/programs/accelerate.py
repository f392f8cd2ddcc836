"""Hugging Face Accelerate: its YAML file (FSDP 1 and 2, DeepSpeed, DDP, degrees), with or without those of a Trainer.

Source: huggingface/accelerate v1.15.0, src/accelerate/utils/dataclasses.py, commands/config and commands/launch.py.
"""

from __future__ import annotations

import json

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.hf_trainer import read_script
from meshcast.simulator.formats.launch.programs.trainer import (
    TrainerProgram,
    assume_no_recomputation,
    read_trainer_file,
    read_training,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import VERDICTS
from meshcast.simulator.formats.launch.programs.trainer_writing import (
    count_passes,
    has_adapters,
    is_second_fsdp,
    name_adapted_modules,
    name_attention,
    name_model,
    name_optimizer,
    name_strategy,
    recomputes,
    shards_by_deepspeed,
    shards_by_fsdp,
    write_deepspeed,
    write_evaluation,
    write_formats,
    write_fsdp,
)
from meshcast.simulator.formats.launch.programs.trl import CHUNKED_LOSS
from meshcast.simulator.formats.launch.quoting import quote_shell
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Keys, SomeKeys
from meshcast.simulator.formats.launch.yaml_text import write_yaml

SEQUENCE_NAMES = ("max_length", "max_seq_length", "model_max_length", "block_size", "cutoff_len", "sequence_len")
"""Lengths of sequences, as programs on Accelerate name them."""

SECTIONS = ("fsdp_config", "accelerate.fsdp_config")
"""Sections with settings of FSDP."""

TRAINER = "per_device_train_batch_size"
"""The argument of the Trainer without which the file says nothing of a step."""


def interpret(reading: Reading) -> None:
    """Fills the keys of a job: a script that it launches is on the Trainer."""
    if reading.file.launch is not None:
        read_script(reading)
        return
    program = TrainerProgram(sequence_names=SEQUENCE_NAMES)
    read_training(reading, program)
    if TRAINER not in reading.stated and "deepspeed.train_micro_batch_size_per_gpu" not in reading.stated:
        reading.ask_key("batch.micro", 1, "the script, or arguments of the Trainer, say the batch of a process")
    switches = {*program.checkpointing_names, *(f"{name}.activation_checkpointing" for name in SECTIONS)}
    if not switches & reading.stated.keys():
        why = "no setting of this file recomputes layers; the script, or arguments of the Trainer, may"
        assume_no_recomputation(reading, why)
    if "max_length" in reading.stated:
        why = "max_length is a setting of TRL, whose SFT has the logits of 256 tokens at a time since v1.6"
        for key, value in CHUNKED_LOSS.items():
            reading.assume(f"framework.set.loss.{key}", value, why)


def recognise(file: LaunchFile) -> Evidence:
    """Recognises a mapping with keys that only Accelerate has."""
    if not {"distributed_type", "compute_environment"} & file.keys:
        return Evidence.NONE
    return Evidence.CERTAIN if {"distributed_type", "compute_environment"} <= file.keys else Evidence.LIKELY


# ------------------------------------------------------------------------------------------- writing

CONFIGURATION, DEEPSPEED = "accelerate.yaml", "deepspeed.json"
"""Files that the script writes."""


def write(keys: Keys, header: list[str]) -> str:
    """Writes a script that writes the files of Accelerate and of DeepSpeed, and starts a script on the Trainer with
    them."""
    files = {CONFIGURATION: write_yaml(write_accelerate(keys), [])}
    arguments = write_arguments(keys)
    if shards_by_deepspeed(keys):
        files[DEEPSPEED] = json.dumps(write_deepspeed(keys), indent=2) + "\n"
        arguments["deepspeed"] = DEEPSPEED
    lines = ["#!/bin/bash", *(f"# {line}".rstrip() for line in header)]
    for name, text in files.items():
        lines += [f"cat > {name} <<'END'", text.rstrip(), "END"]
    words = [f"--{name} {quote_shell(value)}" for name, value in arguments.items()]
    command = [f"accelerate launch --config_file {CONFIGURATION} train.py", *words]
    return "\n".join([*lines, " \\\n    ".join(command)]) + "\n"


def write_accelerate(keys: SomeKeys) -> Keys:
    """Writes Accelerate's keys of a job."""
    gpus, each = keys["cluster.gpus"], keys.get("cluster.gpus_per_node", 8)
    compute = str(keys.get("precision.compute", "bf16"))
    kind = "FSDP" if shards_by_fsdp(keys) else "MULTI_GPU" if not shards_by_deepspeed(keys) else "DEEPSPEED"
    settings: Keys = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": compute if compute in ("bf16", "fp16") else "fp8" if compute.startswith("fp8") else "no",
        "num_machines": -(-gpus // each),
        "num_processes": gpus,
    }
    if kind == "FSDP":
        settings["fsdp_config"] = _write_fsdp_section(keys)
    elif kind == "DEEPSPEED":
        settings["deepspeed_config"] = {"deepspeed_config_file": DEEPSPEED}
    if degrees := _write_degrees(keys):
        settings["parallelism_config"] = degrees
    return settings


def _write_fsdp_section(keys: SomeKeys) -> Keys:
    section: Keys = {f"fsdp_{name}": value for name, value in write_fsdp(keys).items()}
    if not is_second_fsdp(keys):
        section["fsdp_sharding_strategy"] = name_strategy(keys).upper()
    section["fsdp_activation_checkpointing"] = recomputes(keys) and not _is_reentrant(keys)
    return section


def _is_reentrant(keys: SomeKeys) -> bool:
    """Returns whether checkpoints are reentrant, which those of FSDP are not."""
    return not keys.get("framework.set.recompute_early_stop", True)


def _write_degrees(keys: SomeKeys) -> Keys:
    """Writes the section of degrees: those of FSDP 2, or sequences that DeepSpeed shards by heads."""
    if shards_by_deepspeed(keys) and keys.get("plan.sequence") == "ulysses":
        ranks = {"dp_shard_size": keys["plan.dp"], "sp_size": keys["plan.cp"], "sp_backend": "deepspeed"}
        return {f"parallelism_config_{name}": value for name, value in ranks.items()}
    degrees = {name: keys.get(f"plan.{name}", 1) for name in ("tp", "cp")}
    copies = keys.get("plan.replicate", 1)
    is_used = is_second_fsdp(keys) and (copies > 1 or max(degrees.values()) > 1)
    if not (shards_by_fsdp(keys) and is_used):
        return {}
    sizes = {"dp_replicate": copies, "dp_shard": keys["plan.dp"] // copies, **degrees}
    section: Keys = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if degrees["cp"] > 1:
        ring = keys.get("plan.sequence") == "ring"
        section["parallelism_config_cp_comm_strategy"] = "alltoall" if ring else "allgather"
    return section


def write_arguments(keys: SomeKeys) -> Keys:
    """Writes the arguments of the Trainer of a job."""
    settings: Keys = {
        "model_name_or_path": name_model(keys) or "config.json",
        "max_length": keys["batch.sequence"],
        "per_device_train_batch_size": keys["batch.micro"],
        "gradient_accumulation_steps": count_passes(keys),
        **write_formats(keys),
        "gradient_checkpointing": recomputes(keys) and (_is_reentrant(keys) or not shards_by_fsdp(keys)),
        "optim": name_optimizer(keys),
    }
    if settings["gradient_checkpointing"]:
        settings["gradient_checkpointing_kwargs"] = json.dumps({"use_reentrant": _is_reentrant(keys)})
    if (name := name_attention(keys)) is not None:
        settings["attn_implementation"] = name
    if keys.get("framework.set.compile"):
        settings["torch_compile"] = True
    if has_adapters(keys):
        modules = name_adapted_modules(keys)
        settings |= {"use_lora": True, "lora_r": keys.get("train.rank", 16), "lora_target_modules": ",".join(modules)}
    if keys.get("run.steps"):
        settings["max_steps"] = keys["run.steps"]
    return settings | write_evaluation(keys)


ACCELERATE = LaunchFormat(
    "accelerate",
    "Hugging Face Accelerate",
    ".sh",
    recognise,
    read_trainer_file,
    interpret,
    write,
    VERDICTS,
    remark=lambda keys: ["train.py stands for a script on the Trainer, which names the data set."],
)
