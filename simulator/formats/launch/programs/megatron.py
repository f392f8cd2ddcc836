"""Megatron-LM: the arguments of ``pretrain_gpt.py`` in a shell script, in a list, or as ``MODEL_ARGS`` of its tests.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/training/arguments.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.arguments import merge_settings
from meshcast.simulator.formats.launch.flat_settings import flatten_settings
from meshcast.simulator.formats.launch.keys import drop_inactive
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import DemandedVariable, Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.cuda_graphs import NAMES, read_graphs, write_graphs
from meshcast.simulator.formats.launch.programs.evaluations import (
    MICRO,
    EvaluationSettings,
    has_any,
    read_evaluation,
)
from meshcast.simulator.formats.launch.programs.megatron_model import (
    COMMAND_LINE,
    EXPERTS,
    FORKS,
    LATENT,
    MAMBA,
    SHAPE,
    omit_derived,
    read_shape,
    write_shape,
)
from meshcast.simulator.formats.launch.programs.megatron_plan import (
    DEGREES,
    EAGER_LOSS,
    TRAITS,
    read_fp8_attention,
    read_loss,
    read_plan,
    read_recipe,
    write_plan,
    write_recipe,
)
from meshcast.simulator.formats.launch.programs.megatron_verdicts import VERDICTS
from meshcast.simulator.formats.launch.quoting import quote_shell
from meshcast.simulator.formats.launch.reading import Reading, date_release, set_gpus
from meshcast.simulator.formats.launch.table import (
    OFF,
    UNSTATED,
    Keys,
    SettingRow,
    SomeKeys,
    Stated,
    is_null,
    write_rows,
)

OWN = (
    SettingRow("no_gradient_accumulation_fusion", "framework.set.fused_gradients", "switch", OFF, silent=True),
    SettingRow(
        "attention_backend",
        "framework.set.attention",
        "text",
        {"flash": "flash", "unfused": "unfused", "local": "unfused", "fused": "flash", "auto": "flash"},
        silent="flash",
    ),
    SettingRow("main_params_dtype", "precision.main_weights", "text", {"fp32": "fp32", "fp16": "fp16"}, silent="fp32"),
    SettingRow(
        "exp_avg_dtype", "precision.moments", "text", {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}, silent="fp32"
    ),
    SettingRow("no_overlap_p2p_communication", "framework.set.overlap.pp", "switch", OFF, silent=True),
)
"""Settings whose names only the command line has."""

FORMAT_NAMES = {"qkv_bias": "add_qkv_bias", "layernorm1p": "apply_layernorm_1p"}

BEFORE_CORE = "megatron-lm-2021"
"""The framework of releases before Megatron-Core."""

LEGACY = (
    *("DDP_impl", "data_impl", "mmap_warmup", "use_contiguous_buffers_in_ddp", "no_contiguous_buffers_in_local_ddp"),
    *("fp8_e4m3", "fp8_hybrid", "layernorm_epsilon", "no_query_key_layer_scaling", "checkpoint_activations"),
    *("checkpoint_num_layers", "distribute_checkpointed_activations", "activations_checkpoint_method"),
)
"""Settings that no release after September 2023 has: before Megatron-Core, and without Transformer Engine by default
(NVIDIA/Megatron-LM @3fb3e95ec6 of 2023-09-05 ends --DDP-impl, @bbab79f869 of 2022-05-16 the last three)."""

IN_CHUNKS, BY_METHOD, BY_SWITCH = "2021-07", "2022-04", "2023-04"
"""The last releases of Megatron-LM that recompute all layers in chunks or none, that have
``--activations-checkpoint-method``, and that take ``--checkpoint-activations``, which recomputes all layers."""

LEGACY_RELEASES = {
    "checkpoint_num_layers": IN_CHUNKS,  # gone with @23266c578b of 2021-08-19
    **dict.fromkeys(("activations_checkpoint_method", "distribute_checkpointed_activations"), BY_METHOD),
    "checkpoint_activations": BY_SWITCH,  # refused since @8619640132 of 2023-05-05
}
"""Last months of settings of NVIDIA/Megatron-LM; those by method are gone with @9aad9203aa of 2022-05-20."""

OTHER_MODELS = re.compile(
    r"pretrain_(t5|bert|retro|ict|vision|vlm|biencoder|realm|mimo)|finetune_race|pretrain_megatron_llava"
)
"""Entries that train other models than decoders of text."""

SECTIONS = ("language_model", "model_parallel", "MODEL_ARGS")
"""Sections of files whose settings are known by their names alone."""


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the arguments of a script or list, or the settings of a YAML file: that of ``--yaml-cfg``, or of a
    functional test of Megatron's."""
    return read_launch_arguments(file) if file.data is None else read_named_settings(file)


def read_launch_arguments(file: LaunchFile) -> dict[str, Stated]:
    """Reads the arguments of the start that counts, and those of its launchers."""
    return merge_settings(file.launch) if file.launch is not None else {}


def read_named_settings(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a YAML file by their names, without the sections that they are in."""
    settings = {}
    for path, stated in flatten_settings(file.data, file.text, file.where).items():
        section, _, name = path.partition(".")
        if not name or section in SECTIONS:
            plain = (name or section).lstrip("-").replace("-", "_")
            settings[plain] = _fill_variables(replace(stated, shown=name or section), file.options.environment)
    return settings


VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
"""A variable of the shell in a YAML file, which ``envsubst`` or the shell behind it fills in."""


def _fill_variables(stated: Stated, environment: Mapping[str, str]) -> Stated:
    """Returns the setting with its variables filled in; those that nothing sets are unknown."""
    if not isinstance(stated.value, str):
        return stated
    unknown = tuple(name for name in VARIABLE.findall(stated.value) if name not in environment)
    value = VARIABLE.sub(lambda match: environment.get(match[1], match[0]), stated.value)
    return replace(stated, value=value, unknown=(*stated.unknown, *unknown))


def read_variable(file: LaunchFile, name: str) -> Stated | None:
    """Reads a variable that a script sets, or the ``ENV_VARS`` of a file of Megatron's functional tests."""
    text, where = file.text, file.where
    if "MODEL_ARGS" not in file.keys:
        words = file.run.variables.get(name, ()) if file.run is not None else ()
        known = len(words) == 1 and not words[0].unknown
        return Stated(words[0].text, name, f"{where}:{words[0].line}") if known else None
    word = re.search(rf"^[ \t]+{name}:[ \t]*['\"]?(\w+)", text, re.MULTILINE)
    return Stated(word[1], name, f"{where}:{text.count(chr(10), 0, word.start(1)) + 1}") if word else None


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    if (file := reading.take("yaml_cfg")) is not None and not is_null(file.value):
        companion = reading.read_companion(file)
        reading.add_stated(read_named_settings(companion) if companion is not None else {})
    refuse_other_models(reading)
    reading.read_rows((*DEGREES, *TRAITS, *OWN))
    keys = reading.keys
    read_shape(reading, (*COMMAND_LINE, *FORKS))
    read_batch(reading)
    read_plan(reading)
    _read_attention(reading)
    read_loss(reading, is_fused=False)
    read_precision(reading)
    reading.set_key("framework.set.cuda_graphs", read_graphs(reading), *NAMES)
    read_gpus(reading, "nnodes", "nproc_per_node")
    if (samples := reading.take_count("train_samples", decisive=False)) and "batch.global" in keys:
        if "run.steps" not in keys:
            reading.set_key("run.steps", max(1, samples // keys["batch.global"]), "train_samples")
    every = reading.take_count("save_interval", decisive=False)
    reading.set_checkpoints(every, reading.take_switch("async_save"), "save_interval")
    runs = has_any(reading.take("eval_iters", decisive=False), True)
    read_evaluation(reading, EVALUATION, runs, "eval_iters", "eval_interval")


EVALUATION = EvaluationSettings(("eval_micro_batch_size",))
"""Evaluations run behind the last step at least, unless ``--eval-iters`` is 0; of other micro-batches than training
since April 2026 (@d85365bd23)."""

APART_SINCE = "2026-04"
"""The first release whose evaluations have separate micro-batches."""


def refuse_other_models(reading: Reading) -> None:
    """Asks for the model where the entry of the program trains anything but a decoder of text."""
    entry = reading.file.launch.entry if reading.file.launch is not None else ""
    if OTHER_MODELS.search(entry):
        why = f"{entry} trains a model that is not a decoder of text alone, and its settings would be read as one"
        reading.ask(None, why, "model=model.yaml")
    elif reading.take_word("model_provider") not in ("", "gpt", "mamba", "hybrid"):
        reading.ask(reading.take("model_provider"), "it names a model that is in code", "model=model.yaml")


def read_batch(reading: Reading) -> None:
    """Asks for a micro-batch, without which the program does not start, and reads a schedule of global batches."""
    if not {"micro_batch_size", "batch_size"} & reading.stated.keys():
        reading.ask_key("batch.micro", 1, f"{reading.program} does not start without --micro-batch-size")
    schedule = reading.take("step_batch_size_schedule")
    sizes = re.findall(r":\s*(\d{1,18})\b", str(schedule.value)) if schedule is not None else ()
    if sizes:
        reading.set_key("batch.global", int(sizes[-1]), "step_batch_size_schedule")
        reading.approximate(schedule, f"steps of the last global batch, {sizes[-1]}, are forecast")


def _read_attention(reading: Reading) -> None:
    """Reads the kernels of attention, by default those of the releases that have the settings of the file."""
    is_legacy = any(name in reading.stated for name in LEGACY)
    is_legacy = is_legacy or reading.answers.get("framework.name") == BEFORE_CORE
    kernels = reading.take_word("transformer_impl") or ("local" if is_legacy else "transformer_engine")
    if is_legacy:
        reading.set_key("framework.name", BEFORE_CORE, *LEGACY)
        for name in LEGACY:
            reading.take(name)
        dated = [month for name, month in LEGACY_RELEASES.items() if name in reading.stated]
        date_release(reading, min(dated, default=None), "the last release that has settings of these names")
    if reading.take_switch(*FLASH):
        reading.set_key("framework.set.attention", "flash", *FLASH)
    elif kernels != "transformer_engine" and "attention_backend" not in reading.stated:
        reading.set_key("framework.set.attention", "unfused", "transformer_impl")
    if kernels not in ("transformer_engine", "local"):
        why = f"kernels of {kernels!r} are forecast as if they were those of Transformer Engine"
        reading.approximate(reading.take("transformer_impl"), why)
    if reading.take_word("attention_backend") == "fused":
        reading.set_key("framework.set.attention_library", "cudnn", "attention_backend")


FLASH = ("use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")
"""Settings for FlashAttention, the last four of deepspeedai/Megatron-DeepSpeed."""


def read_gpus(reading: Reading, nodes: str, each: str) -> None:
    """Reads the number of GPUs, from the arguments of the launcher or those of the resource manager."""
    count = next((number for name in (nodes, *NODES) if (number := _count(reading, name))), None)
    width = next((number for name in (each, *GPUS) if (number := _count(reading, name))), None)
    included = reading.take("include", "i", decisive=False)
    if included is not None and (slots := _count_included(str(included.value))):
        reading.set_key("cluster.gpus", slots, "include", "i")
    elif width:
        set_gpus(reading, count, width, each, nodes, *GPUS, *NODES)


def _count_included(text: str) -> int | None:
    """Returns the GPUs that ``deepspeed --include host:0,1@other:0,1`` names; None where a host is without numbers."""
    hosts = [host.partition(":")[2] for host in text.split("@")]
    return sum(len(host.split(",")) for host in hosts) if all(hosts) else None


NODES = ("num_nodes", "nodes", "sbatch_nodes")
GPUS = (
    *("num_gpus", "gpus_per_node", "ntasks_per_node", "gres", "sbatch_gpus_per_node", "sbatch_gres"),
    "sbatch_ntasks_per_node",
)
"""Settings of launchers for the number of nodes, and of GPUs of each."""


def _count(reading: Reading, name: str) -> int | None:
    """Reads a number of nodes or GPUs, if the file states it: an unknown variable is none."""
    stated = reading.take(name, decisive=False)
    digits = re.search(r"(\d+)$", str(stated.value)) if stated is not None else None
    return read_digits(digits[1]) if digits and not re.search(r"[$]", str(stated.value if stated else "")) else None


def read_precision(reading: Reading) -> None:
    """Reads the format of the GEMMs, of gradients and of the states of the optimizer."""
    half = "bf16" if reading.take_switch("bf16") else "fp16" if reading.take_switch("fp16") else "fp32"
    read_recipe(reading, half)
    read_fp8_attention(reading)
    in_fp32 = reading.take_switch("accumulate_allreduce_grads_in_fp32")
    in_bf16 = reading.take_switch("grad_reduce_in_bf16")
    main = reading.take_word("main_grads_dtype") or "fp32"
    low = main != "fp32" or in_bf16 or (half == "fp16" and not in_fp32)
    names = ("grad_reduce_in_bf16", "main_grads_dtype", "accumulate_allreduce_grads_in_fp32")
    reading.set_key("precision.gradients", half if low and half != "fp32" else "fp32", *names)
    if not reading.take_switch("use_precision_aware_optimizer"):
        for key in ("precision.main_weights", "precision.moments"):
            reading.set_key(key, "fp32")
    reading.take("exp_avg_sq_dtype")


FUSED_LOSS_SINCE = "2024-06"
"""The first release with ``--cross-entropy-loss-fusion``, which is off by default (NVIDIA/Megatron-LM @7b4a6d76c9)."""

BENCHMARK = "--mock-data --tokenizer-type NullTokenizer --lr 1e-4"
"""What Megatron-LM does not start without, and no job states."""


def write(keys: Keys, header: list[str]) -> str:
    """Writes a script that starts the run with torchrun."""
    settings = write_settings(keys)
    gpus = keys["cluster.gpus"]
    each = min(gpus, keys.get("cluster.gpus_per_node", 8))
    lines = ["#!/bin/bash", *(f"# {line}".rstrip() for line in header), ""]
    for variable in demand_variables(keys):
        name, value = variable.name, variable.value
        lines.append(f"export {name}={value}" if value is not None else f"unset {name}")
    lines += [""] if len(lines) > len(header) + 2 else []
    lines += [f"NNODES=${{NNODES:-{-(-gpus // each)}}}", f"GPUS_PER_NODE={each}", "", "ARGS=("]
    lines += [f"    {write_flag(name, value)}" for name, value in settings.items()]
    lines += [")", "", "torchrun --nnodes $NNODES --nproc-per-node $GPUS_PER_NODE \\"]
    lines += [
        "    --master-addr ${MASTER_ADDR:-localhost} --master-port ${MASTER_PORT:-29500} --node-rank ${NODE_RANK:-0} \\"
    ]
    lines += [f'    pretrain_gpt.py "${{ARGS[@]}}" {BENCHMARK} "$@"']
    return "\n".join(lines) + "\n"


def demand_variables(keys: Mapping[str, Any]) -> tuple[DemandedVariable, ...]:
    """Returns the number of hardware queues: 1 before Blackwell, so that kernels start in the order in which the layers
    of tp and cp issue them; with FSDP, whose collectives must not wait for kernels, never 1."""
    if keys.get("plan.data") in ("zero-2", "fsdp"):  # which `write_plan` says as Megatron FSDP
        return (DemandedVariable("CUDA_DEVICE_MAX_CONNECTIONS", refused="1"),)
    parallel = keys.get("plan.tp", 1) > 1 or keys.get("plan.cp", 1) > 1
    if parallel and keys.get("cluster.architecture") != "blackwell" and not keys.get("plan.pipeline.overlap_passes"):
        return (DemandedVariable("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)
    return ()


def remark(keys: Mapping[str, Any]) -> list[str]:
    """Returns what a script is, and what of a run is not in it."""
    lines = [
        f"It is a benchmark script: learning rate and data are not in a job, and are {BENCHMARK}.",
        "To change your own script use meshcast export JOB --against SCRIPT, which prints the settings to edit.",
    ]
    if not keys.get("run.steps"):
        lines.append("The job has no length in steps: run the script with --train-iters 50, for example.")
    if keys.get("model.positions") == "rope":
        lines.append("--rotary-base is not in a job either: here it is the default of Megatron-LM, 10,000.")
    return lines


def write_flag(name: str, value: Any) -> str:
    """Writes a flag with its value, quoted where the shell would divide it."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if isinstance(value, list | tuple):
        return " ".join([flag, *map(quote_shell, value)])
    return f"{flag} {quote_shell(value)}"


def write_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the arguments of a job, by their names with ``_``."""
    keys = drop_inactive(omit_derived(dict(keys)))
    parts = [*SHAPE, *COMMAND_LINE, *DEGREES, *TRAITS, *OWN]
    if "model.moe.experts" in keys:
        parts += EXPERTS
    if "model.mla.kv_lora_rank" in keys:
        parts += LATENT
    if "model.ssm.pattern" in keys:
        parts += MAMBA
    settings = {name: value for name, value in write_rows(parts, keys).items() if value is not False}
    if "num_query_groups" in settings:
        settings["group_query_attention"] = True
    if keys.get("model.dropout", UNSTATED) != 0.1:
        settings["attention_dropout"] = keys.get("model.dropout", 0.1)
    settings |= write_shape(keys, FORMAT_NAMES)
    plan = write_plan(keys)
    if "virtual_pipeline_model_parallel_size" in plan:
        plan["num_virtual_stages_per_pipeline_rank"] = plan.pop("virtual_pipeline_model_parallel_size")
    settings |= plan
    if "use_megatron_fsdp" in settings:
        settings["ckpt_format"] = "fsdp_dtensor"
    if keys.get("plan.data") == "ddp" or "overlap_grad_reduce" not in settings:  # which Megatron-LM refuses
        settings.pop("overlap_param_gather", None)
    if "sequence_parallel" not in settings:
        settings.pop("tp_comm_overlap", None)
    settings |= _write_precision(keys)
    if keys.get("framework.name") == BEFORE_CORE:
        settings |= {"DDP_impl": "local"}
        settings.pop("attention_backend", None)
        settings |= {"use_flash_attn": True} if keys.get("framework.set.attention") == "flash" else {}
        settings = _name_recomputation(settings, str(keys.get("framework.release", "")))
    if settings.keys() & {"main_params_dtype", "exp_avg_dtype", "optimizer_cpu_offload"}:
        settings["use_precision_aware_optimizer"] = True
        if "exp_avg_dtype" in settings:
            settings["exp_avg_sq_dtype"] = settings["exp_avg_dtype"]
    return settings | _write_kernels(keys) | _write_loss(keys) | _write_evaluation(keys)


def _write_evaluation(keys: SomeKeys) -> Keys:
    """Writes the micro-batches of evaluations, and a global batch where that of training does not hold them evenly."""
    is_old = keys.get("framework.name") == BEFORE_CORE or str(keys.get("framework.release", APART_SINCE)) < APART_SINCE
    if is_old or (micro := keys.get(MICRO)) is None:
        return {}
    settings: Keys = {"eval_interval": 1000, "eval_micro_batch_size": micro}
    sequences = micro * keys.get("plan.dp", 1)
    return settings if keys["batch.global"] % sequences == 0 else settings | {"eval_global_batch_size": sequences}


def _name_recomputation(settings: Keys, release: str) -> Keys:
    """Returns the settings with recomputation of layers by the names of a release; empty: of the last."""
    if settings.get("recompute_granularity") != "full" or not "" < release <= BY_SWITCH:
        return settings
    others = {name: value for name, value in settings.items() if not name.startswith("recompute_")}
    if settings["recompute_method"] == "uniform" or release <= IN_CHUNKS:
        return others | {"checkpoint_activations": True}
    if release > BY_METHOD:
        return settings
    number = settings["recompute_num_layers"]
    return others | {"activations_checkpoint_method": "block", "activations_checkpoint_num_layers": number}


def _write_loss(keys: SomeKeys) -> dict[str, bool]:
    """Writes the switch of the fused loss, which older releases do not have."""
    is_old = keys.get("framework.name") == BEFORE_CORE
    is_old = is_old or str(keys.get("framework.release", FUSED_LOSS_SINCE)) < FUSED_LOSS_SINCE
    return {} if is_old or EAGER_LOSS.items() <= keys.items() else {"cross_entropy_loss_fusion": True}


def _write_precision(keys: Mapping[str, Any]) -> dict[str, Any]:
    half, recipe = write_recipe(keys, "fp8_format")
    settings = {**({half: True} if half != "fp32" else {}), **recipe}
    gradients = keys.get("precision.gradients")
    if half == "fp16" and gradients == "fp32":
        settings["accumulate_allreduce_grads_in_fp32"] = True
    elif half == "bf16" and gradients == "bf16":
        settings["grad_reduce_in_bf16"] = True
    return settings


def _write_kernels(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of attention kernels and CUDA graphs."""
    settings: dict[str, Any] = {}
    if keys.get("framework.set.attention_library") == "cudnn" and keys.get("framework.set.attention") == "flash":
        settings["attention_backend"] = "fused"
    if keys.get("framework.set.deterministic"):
        settings["deterministic_mode"] = True
    return settings | write_graphs(keys.get("framework.set.cuda_graphs", False))


ENTRIES = re.compile(r"(^|/)(pretrain_\w+|train_rl)\.py$")
"""Scripts that Megatron-LM and its forks start."""


def recognise(file: LaunchFile) -> Evidence:
    """Arguments that only Megatron-LM has, or a YAML file of its functional tests or of ``--yaml-cfg``."""
    if file.data is not None:
        is_ours = "MODEL_ARGS" in file.keys or {"language_model", "model_parallel"} <= file.keys
        return Evidence.CERTAIN if is_ours else Evidence.NONE
    if file.launch is None or is_with_deepspeed(file):
        return Evidence.NONE
    has_flags = has_megatron_arguments(file.launch.arguments)
    if ENTRIES.search(file.launch.entry):
        return Evidence.CERTAIN if has_flags or "yaml_cfg" in file.launch.arguments else Evidence.POSSIBLE
    return Evidence.LIKELY if has_flags else Evidence.NONE


def is_with_deepspeed(file: LaunchFile) -> bool:
    """Returns whether a start gives the training to DeepSpeed."""
    return file.launch is not None and bool({"deepspeed", "deepspeed_config"} & file.launch.arguments.keys())


def has_megatron_arguments(arguments: Mapping[str, Stated]) -> bool:
    """Returns whether arguments are among those that only Megatron-LM and its forks have."""
    shape = {"num_layers", "hidden_size", "num_attention_heads"}
    return bool(
        {"tensor_model_parallel_size", "pipeline_model_parallel_size", "use_mcore_models"} & arguments.keys()
    ) or (bool({"micro_batch_size", "model_parallel_size"} & arguments.keys()) and bool(shape & arguments.keys()))


MEGATRON = LaunchFormat(
    "megatron",
    "Megatron-LM",
    ".sh",
    recognise,
    read,
    interpret,
    write,
    VERDICTS,
    demand_variables,
    read_variable,
    remark,
)
