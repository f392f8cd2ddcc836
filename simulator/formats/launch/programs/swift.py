"""ms-swift: ``swift sft``, ``swift pt`` and ``swift rlhf`` on Hugging Face's Trainer, releases 2 to 4.

Source: modelscope/ms-swift @3602360a56 (release 4), swift/trainers/arguments.py, swift/arguments/sft_args.py,
tuner_args.py, base_args/model_args.py, base_args.py and quant_args.py, swift/trainers/mixin.py, swift/config/*.json,
swift/sequence_parallel; @39bfc8a4ac (3.6); @0e4e9c3446 (2.4), swift/llm/utils/argument.py and ds_config/*.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.evaluations import EvaluationSettings, has_any, read_evaluation
from meshcast.simulator.formats.launch.programs.optimizers import set_optimizer
from meshcast.simulator.formats.launch.programs.sharding import name_settings
from meshcast.simulator.formats.launch.programs.swift_settings import (
    ADAPTERS,
    EACH,
    NODES,
    SHARED_VERDICTS,
    UNLIMITED,
    count_processes,
    follow_configuration,
    is_second_release,
    name_model,
    names_program,
    read_preferences,
    read_settings,
    read_task,
    refuse_device_map,
    weigh_settings,
)
from meshcast.simulator.formats.launch.programs.trainer import (
    EVALUATION_NAMES,
    LIGER_LOSS,
    TrainerProgram,
    read_training,
    set_adapters,
    set_chunked_loss,
    set_quantised_weights,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import EITHER, LONG, UNITS, VERDICTS, list_verdicts
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated, is_null
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision

PROGRAM = TrainerProgram(
    micro=1,
    sequence_names=("packing_length", "max_length"),
    model_names=("model",),
    compute="bf16",
    loads="compute",
    checkpointing=True,
    evaluation=None,
)
"""trainers/arguments.py: micro-batches of 1, checkpointing; model_args.py: the format of the checkpoint, in which it is
loaded, is that of the computation."""

ACCUMULATED = 16
"""Samples of a step without ``gradient_accumulation_steps`` (trainers/arguments.py, and argument.py of release 2)."""

ZERO = "zero_optimization."
EARLY: Mapping[str, Any] = {
    **{f"{ZERO}overlap_comm": False, f"{ZERO}reduce_bucket_size": 2e8, f"{ZERO}allgather_bucket_size": 2e8},
}
LATE: Mapping[str, Any] = {
    **{f"{ZERO}overlap_comm": False, f"{ZERO}reduce_bucket_size": "auto", f"{ZERO}sub_group_size": 1e9},
    **{f"{ZERO}stage3_prefetch_bucket_size": "auto", f"{ZERO}stage3_param_persistence_threshold": "auto"},
    **{f"{ZERO}stage3_max_live_parameters": 1e9, f"{ZERO}stage3_max_reuse_distance": 1e9},
}
OPTIMIZER, PARAMETERS = {f"{ZERO}offload_optimizer.device": "cpu"}, {f"{ZERO}offload_param.device": "cpu"}

FILES: Mapping[str, Mapping[str, Any]] = {
    "zero0": {f"{ZERO}stage": 0, **EARLY},
    "zero1": {f"{ZERO}stage": 1, **EARLY},
    "zero2": {f"{ZERO}stage": 2, **EARLY},
    "zero3": {f"{ZERO}stage": 3, **LATE},
    "zero2_offload": {f"{ZERO}stage": 2, **EARLY, **OPTIMIZER},
    "zero3_offload": {f"{ZERO}stage": 3, **LATE, **OPTIMIZER, **PARAMETERS},
    "default-zero2": {f"{ZERO}stage": 2, **EARLY, f"{ZERO}overlap_comm": True},
    "default-zero3": {f"{ZERO}stage": 3, **LATE, f"{ZERO}overlap_comm": True},
    "zero2-offload": {f"{ZERO}stage": 2, **EARLY, **OPTIMIZER, f"{ZERO}overlap_comm": True},
    "zero3-offload": {f"{ZERO}stage": 3, **LATE, **PARAMETERS, f"{ZERO}overlap_comm": True},
}
"""Settings of the files of DeepSpeed behind names: swift/config, and with ``-`` llm/ds_config of release 2."""

FSDP2: Mapping[str, Any] = {
    **{"fsdp": "full_shard auto_wrap", "fsdp_config.version": 2, "fsdp_config.reshard_after_forward": True},
    **{"fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_config.activation_checkpointing": True},
}
"""Settings of swift/config/fsdp2.json."""

SWIFT_VERDICTS = list_verdicts(
    ("tuner_backend", Approximation("kernels of transformers are forecast, not those of unsloth", LONG)),
    (
        "lisa_* use_flash_ckpt use_logits_to_keep experts_impl rope_scaling max_model_len",
        Approximation("it is left out", EITHER),
    ),
    ("model_layer_cls_name fsdp_config.transformer_cls* accelerate.fsdp_config.transformer_cls*", UNITS),
    (
        "fsdp_num",
        Decision("TorchAcc shards the model over as many GPUs, which is not read", ("plan.fsdp=true", "plan.zero=0")),
    ),
    ("train_backend tp pp", Decision("Megatron runs the training, whose degrees are not read here", ("plan.tp=1",))),
    ("galore_* adalora_* boft_* vera_* reft_* llamapro_* fourier_* adapter_*", Approximation("it is left out", EITHER)),
)


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    follow_configuration(reading)
    is_second = is_second_release(reading.file)
    name_model(reading)
    _read_names(reading)
    _read_attention(reading)
    reading.read_model("model")
    sequence = 2048 if is_second else _ask_sequence(reading)
    program = replace(PROGRAM, sequence=sequence, reentrant=_is_reentrant(reading))
    _set_formats(reading, is_second)
    count_processes(reading)
    refuse_device_map(reading)
    read_training(reading, program)
    _read_parallelism(reading)
    _read_accumulation(reading)
    _assume_format(reading, is_second)
    _read_tuning(reading, is_second)
    if take_on(reading, "use_liger_kernel") is not None:
        set_chunked_loss(reading, LIGER_LOSS, "use_liger_kernel")
    _read_evaluation(reading, is_second)
    read_task(reading)
    read_preferences(reading)


def _read_evaluation(reading: Reading, is_second: bool) -> None:
    """Reads how many sequences an evaluation runs at once, as often as checkpoints, where samples are set aside for it.

    is_second: of release 2, which sets 1 % aside by itself (llm/utils/argument.py, ``dataset_test_ratio``).
    """
    aside = has_any(reading.take(*SHARES, decisive=False), is_second)
    aside = aside or any(take_on(reading, name) is not None for name in SAMPLES)
    runs = aside and reading.take_word(*SWITCHES) != "no"
    read_evaluation(reading, EvaluationSettings(EVALUATION_NAMES, 1), runs, *SWITCHES, *SHARES, *SAMPLES)


SWITCHES = ("eval_strategy", "evaluation_strategy")
SHARES = ("split_dataset_ratio", "dataset_test_ratio")
SAMPLES = ("val_dataset", "cached_val_dataset")
"""Settings for when there are evaluations, for the share of the samples that they have, and for separate samples
(arguments/sft_args.py, ``_val_dataset_exists`` and ``_init_eval_strategy``)."""


def _read_attention(reading: Reading) -> None:
    """Gives FlashAttention 2 the name that transformers has for it."""
    stated = reading.stated.get("attn_impl")
    if stated is not None and str(stated.value) == "flash_attn":
        reading.stated["attn_impl"] = replace(stated, value="flash_attention_2")


def _read_names(reading: Reading) -> None:
    """Adds the settings of files that ms-swift has itself: those of DeepSpeed and of FSDP, by their names."""
    stated = reading.stated.get("deepspeed")
    if stated is not None and (settings := FILES.get(str(stated.value))) is not None:
        _keep_name(reading, "deepspeed")
        reading.add_stated(_expand(stated, settings, "deepspeed."))
    if (stated := reading.take("zero_hpz_partition_size")) is not None:
        reading.stated["deepspeed.zero_optimization.zero_hpz_partition_size"] = stated
    stated = reading.stated.get("fsdp")
    if stated is not None and str(stated.value) == "fsdp2":
        _keep_name(reading, "fsdp")
        reading.add_stated(_expand(stated, FSDP2))
    elif stated is not None and str(stated.value).endswith(".json"):
        _keep_name(reading, "fsdp")
        if (file := reading.read_companion(stated)) is not None:  # sft_args.py: full_shard auto_wrap of FSDP 2
            usual = {"fsdp": replace(stated, value=FSDP2["fsdp"]), "fsdp_config.version": replace(stated, value=2)}
            reading.add_stated({**usual, **_drop_remarks(name_settings(flatten_file(file)))})


def _keep_name(reading: Reading, name: str) -> None:
    """Keeps a setting that names a file of ms-swift as taken, but not as the name of a companion."""
    reading.stated[f"{name}_name"] = reading.stated.pop(name)
    reading.take(f"{name}_name")


def _drop_remarks(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings of a file of FSDP without its remarks, and with the Trainer's name for offloaded
    activations."""
    named = {"fsdp_config.activation_cpu_offload": "activation_offloading"}
    return {named.get(name, name): stated for name, stated in settings.items() if not name.startswith("_")}


def _expand(stated: Stated, settings: Mapping[str, Any], prefix: str = "") -> dict[str, Stated]:
    """Returns the settings of a file behind a name, each shown behind the setting that names it."""
    return {
        f"{prefix}{name}": Stated(value, f"{stated.shown} {stated.value}, {name}", stated.place)
        for name, value in settings.items()
    }


def _ask_sequence(reading: Reading) -> int:
    """Asks for the length of sequences, which without a setting are cut at the limit of the model alone."""
    limit = int(reading.keys.get("model.seq", 2048))
    if not any(name in reading.stated for name in PROGRAM.sequence_names):
        reading.ask_key("batch.sequence", limit, UNLIMITED)
    return limit


HALF_CHECKPOINTS = re.compile(r"(?i)llama-?2-|vicuna|chatglm[23]")
"""Models whose config.json says float16."""


def _set_formats(reading: Reading, is_second: bool) -> None:
    """Sets the switches of mixed precision that follow from the format of the weights: fp16 of float32, too."""
    stated = reading.stated.get("torch_dtype")
    word = str(stated.value).lower() if stated is not None else ""
    if stated is not None and word == "auto":
        reading.take("torch_dtype")
        stated = None
    model = reading.stated.get("model")
    if stated is None and not is_second and model is not None and HALF_CHECKPOINTS.search(str(model.value)):
        stated, word = model, "float16"
    if stated is not None and word in ("float16", "fp16", "float32", "fp32") and "bf16" not in reading.stated:
        is_full = is_second and word in ("float32", "fp32")
        reading.stated.setdefault("bf16" if is_full else "fp16", replace(stated, value=not is_full))


def _assume_format(reading: Reading, is_second: bool) -> None:
    """Names the format of checkpoints as an assumption where the file does not say it."""
    word, compute = reading.take_word("torch_dtype"), reading.keys["precision.compute"]
    if word not in ("", "auto"):
        reading.set_key("precision.compute", compute, "torch_dtype", compute)
    elif not is_second and compute == "bf16" and not isinstance(reading.origins["precision.compute"], Stated):
        why = "torch_dtype in the config.json of the checkpoint decides, which is bfloat16 of most models"
        reading.assume("precision.compute", "bf16", why)


def _is_reentrant(reading: Reading) -> bool:
    """Returns whether checkpoints are reentrant: with DeepSpeed, FSDP and in a single process (trainers/mixin.py)."""
    sharded = any(name.startswith(("deepspeed", "fsdp", "accelerate.")) for name in reading.stated)
    return sharded or not {EACH, NODES} & reading.stated.keys()


def _read_parallelism(reading: Reading) -> None:
    """Reads ranks that share a sequence by heads, and tensor ranks of DeepSpeed."""
    if (size := reading.take_count("sequence_parallel_size")) and size > 1:
        reading.set_key("plan.cp", size, "sequence_parallel_size")
        reading.set_key("plan.sequence", "ulysses", "sequence_parallel_size")
    if size := reading.take_count("deepspeed_autotp_size"):
        reading.set_key("plan.tp", size, "deepspeed_autotp_size")


def _read_accumulation(reading: Reading) -> None:
    """Sets the accumulated passes where the file leaves them out: for 16 samples of a step over all processes."""
    names = ("gradient_accumulation_steps", "deepspeed.gradient_accumulation_steps")
    if any(name in reading.stated and not is_null(reading.stated[name].value) for name in names):
        return
    gpus, micro = reading.keys.get("cluster.gpus"), reading.keys["batch.micro"]
    if gpus is None:
        why = f"without it {ACCUMULATED} samples of a step are divided over the processes, and nothing says how many"
        reading.ask_key("batch.global", ACCUMULATED, why)
    else:
        reading.set_key("batch.accumulated", max(1, -(-ACCUMULATED // (micro * gpus))))


def _read_tuning(reading: Reading, is_second: bool) -> None:
    """Reads which weights are trained: without a word, adapters are."""
    stated = reading.take("tuner_type")
    kind = reading.take_word("tuner_type") or "lora"
    if kind == "full":
        reading.set_key("train.mode", "full", "tuner_type")
    elif kind in ADAPTERS:
        _name_targets(reading)
        targets = "target_modules"
        set_adapters(reading, stated, 8, ("lora_rank",), targets, everywhere=not is_second, dropout=True)
        if kind != "lora":
            reading.approximate(stated, f"adapters of plain LoRA are forecast, not of {kind}", EITHER)
    else:
        why = f"meshcast does not describe {kind}: it trains all weights, or adapters of low rank"
        reading.ask(stated, why, "train.mode=lora", "train.mode=full")
    bits = reading.take_word("quant_bits")
    method = reading.take_word("quant_method")
    if method == "fp8":
        reading.set_key("train.frozen_weights", "fp8", "quant_method")
    elif bits not in ("", "0"):
        set_quantised_weights(reading, read_digits(bits) or 8, reading.take("quant_bits"))
        if method not in ("", "bnb"):
            why = f"blocks of bitsandbytes are forecast, not those of {method}"
            reading.approximate(reading.take("quant_method"), why, "the memory errs by the scales of blocks")
    for name in ("optimizer", "use_galore"):
        if (optimizer := take_on(reading, name)) is not None and str(optimizer.value) not in ("lorap", "multimodal"):
            set_optimizer(reading, optimizer, "galore" if name == "use_galore" else str(optimizer.value).lower())


def _name_targets(reading: Reading) -> None:
    """Gives the words of release 2 for the usual layers, queries, keys and values, their names."""
    stated = reading.stated.get("target_modules")
    if stated is not None and str(stated.value).upper() in ("DEFAULT", "AUTO"):
        reading.stated["target_modules"] = replace(stated, value="q_proj,k_proj,v_proj")


def recognise(file: LaunchFile) -> Evidence:
    """Its command, its scripts, or its settings."""
    if names_program(file, "megatron"):
        return Evidence.NONE
    if names_program(file, "swift"):
        return Evidence.CERTAIN
    return weigh_settings(file, is_megatron=False)


SWIFT = LaunchFormat(
    "ms-swift",
    "ms-swift",
    ".sh",
    recognise,
    read_settings,
    interpret,
    None,
    {**SWIFT_VERDICTS, **SHARED_VERDICTS, **VERDICTS},
)
