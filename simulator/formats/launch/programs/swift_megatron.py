"""Megatron-SWIFT: ``megatron sft``, ``megatron pt`` and ``megatron rlhf`` of ms-swift, on Megatron-Core.

Source: modelscope/ms-swift @3602360a56 (release 4), swift/megatron/arguments/megatron_args.py (``MegatronArguments``,
``MegatronTunerMixin``) and megatron_base_args.py; @39bfc8a4ac (3.6), swift/megatron/argument/megatron_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs import megatron
from meshcast.simulator.formats.launch.programs.megatron_verdicts import VERDICTS
from meshcast.simulator.formats.launch.programs.swift_settings import (
    ADAPTERS,
    SHARED_VERDICTS,
    UNLIMITED,
    count_processes,
    follow_configuration,
    name_model,
    names_program,
    read_preferences,
    read_settings,
    read_task,
    weigh_settings,
)
from meshcast.simulator.formats.launch.programs.trainer import set_adapters
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    NAMES,
    OPTIMISATION,
    SAVING,
    START,
    list_verdicts,
)
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import ON, SettingRow, Stated

DEFAULTS: Mapping[str, Any] = {
    **{"micro_batch_size": 1, "global_batch_size": 16, "recompute_granularity": "selective", "bf16": True},
    **{"use_distributed_optimizer": True, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall"},
}
"""Defaults that are not those of Megatron-LM."""

RENAMED: Mapping[str, str] = {"max_steps": "train_iters", "save_steps": "save_interval"}
"""Names of Megatron-LM by those of ms-swift."""


ROWS = (SettingRow("gradient_accumulation_fusion", "framework.set.fused_gradients", "switch", ON),)
"""Settings that Megatron-LM has as switches that turn them off."""


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    follow_configuration(reading)
    name_model(reading)
    reading.read_model("model")
    reading.set_key("model.mtp", reading.take_count("mtp_num_layers") or 0, "mtp_num_layers")
    reading.take("mcore_model")
    count_processes(reading)
    _read_sequence(reading)
    _read_backend(reading)
    _set_defaults(reading)
    reading.read_rows(ROWS)
    megatron.interpret(reading)
    _read_tuning(reading)
    read_task(reading)
    read_preferences(reading)


def _read_sequence(reading: Reading) -> None:
    """Reads the tokens of a sequence: of a packed sequence, or the longest of a sample; otherwise they are asked
    for."""
    names = "packing_length", "max_length", "seq_length"
    stated = [name for name in names if name in reading.stated]
    if stated:
        reading.stated["seq_length"] = reading.stated.pop(stated[0])
    else:
        reading.ask_key("batch.sequence", reading.keys.get("model.seq", 2048), UNLIMITED)


LIBRARIES: Mapping[str, str] = {"flash_2": "flash-2", "flash_3": "flash-3"}
"""Libraries of attention by the words of ``attention_backend`` beside those of Megatron-LM."""


def _read_backend(reading: Reading) -> None:
    stated = reading.stated.get("attention_backend")
    word = str(stated.value) if stated is not None else ""
    if stated is not None and word.startswith("flash_"):
        reading.stated["attention_backend"] = replace(stated, value="flash")
        if word in LIBRARIES:
            reading.set_key("framework.set.attention_library", LIBRARIES[word], "attention_backend")


def _set_defaults(reading: Reading) -> None:
    """Gives settings the names of Megatron-LM, and those that the file leaves out the defaults of ms-swift."""
    settings = reading.stated
    for name, theirs in RENAMED.items():
        if name in settings:
            settings.setdefault(theirs, settings.pop(name))
    if reading.take_word("torch_dtype") in ("float16", "float32"):  # whose mixed precision is that of fp16
        settings.setdefault("fp16", replace(settings["torch_dtype"], value=True))
    is_fp16 = reading.take_switch("fp16")
    for name, value in DEFAULTS.items():
        if name != "bf16" or not is_fp16:
            settings.setdefault(name, Stated(value, name, "default of Megatron-SWIFT"))


def _read_tuning(reading: Reading) -> None:
    """Reads which weights are trained: without a word all are."""
    stated, kind = reading.take("tuner_type"), reading.take_word("tuner_type") or "full"
    if kind in ADAPTERS:
        set_adapters(reading, stated, 8, ("lora_rank",), "target_modules", everywhere=True)
        if "model.moe.experts" in reading.keys:  # a grouped linear layer has grouped adapters
            reading.set_key("framework.set.adapters.of_each_expert", True)
    else:
        reading.set_key("train.mode", "full", "tuner_type")


MEGATRON_SWIFT_VERDICTS = list_verdicts(
    ("logging_steps max_grad_norm", NAMES),
    ("lr_* learning_rate", OPTIMISATION),
    ("no_save_* save_* output_dir resume_from_checkpoint finetune perform_initialization", SAVING),
    ("seed local_rank", START),
)


def recognise(file: LaunchFile) -> Evidence:
    """Its command, its scripts, or its settings."""
    if names_program(file, "megatron"):
        return Evidence.CERTAIN
    if names_program(file, "swift"):
        return Evidence.NONE
    return weigh_settings(file, is_megatron=True)


MEGATRON_SWIFT = LaunchFormat(
    "megatron-swift",
    "Megatron-SWIFT",
    ".sh",
    recognise,
    read_settings,
    interpret,
    None,
    {**MEGATRON_SWIFT_VERDICTS, **SHARED_VERDICTS, **VERDICTS},
)
"""``megatron`` of ms-swift."""
