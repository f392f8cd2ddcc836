"""Hugging Face's Trainer: its arguments in a shell script, a YAML or a JSON file, for any script that parses them.

Source: huggingface/transformers v4.57.3 and v5.24.0, src/transformers/training_args.py and hf_argparser.py;
examples/pytorch/language-modeling/run_clm.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.trainer import (
    TrainerProgram,
    ask_sharding,
    follow_file,
    read_trainer_file,
    read_training,
    set_adapters,
    set_quantised_weights,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import VERDICTS
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import is_null

SEQUENCE_NAMES = (
    *("model_max_length", "max_seq_length", "max_seq_len", "block_size", "cutoff_len", "max_length", "seq_length"),
    *("max_len", "context_length", "max_source_length", "sequence_length"),
)
"""Lengths of sequences, as scripts on the Trainer name them."""

SEQUENCES: Mapping[str, int] = {r"run_clm\.py": 1024}
"""Lengths of sequences of scripts without a setting: `run_clm.py` cuts texts to min(1,024, what the model takes)."""

DISTINCTIVE = {
    *("per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("save_total_limit", "lr_scheduler_type", "warmup_ratio", "save_steps", "logging_steps", "output_dir"),
    *("evaluation_strategy", "eval_strategy", "report_to", "gradient_checkpointing", "remove_unused_columns"),
    "dataloader_num_workers",
}
"""Arguments by which a script on the Trainer is known."""

FEW, MANY = 3, 5
"""Distinctive arguments that make it possible, and likely, that a file is of the Trainer."""

LORA_NAMES = ("use_lora", "lora_enable", "lora", "use_peft", "peft", "q_lora", "use_qlora", "qlora")
"""Switches of scripts for low-rank adapters."""

RANK_NAMES = ("lora_r", "lora_rank", "lora_dim", "peft_lora_r", "rank")
TARGET_NAMES = ("lora_target_modules", "lora_target", "target_modules", "lora_target_module")


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    launch = reading.file.launch
    if launch is not None:
        for word in launch.positional:
            if str(word.value).lower().endswith((".json", ".yaml", ".yml")):
                follow_file(reading, word)
        if (stated := reading.stated.get("config")) is not None and str(stated.value).endswith(
            (".yaml", ".yml", ".json")
        ):
            reading.take("config")
            follow_file(reading, stated)
    entry = launch.entry if launch is not None else ""
    sequence = next((length for script, length in SEQUENCES.items() if re.search(script, entry)), None)
    names = (
        "model_name_or_path",
        "model_name",
        "model_id",
        "pretrained_model_name_or_path",
        "model_path",
        "base_model",
    )
    read_training(reading, TrainerProgram(sequence=sequence, sequence_names=SEQUENCE_NAMES, model_names=names))
    if not DISTINCTIVE & reading.stated.keys() and "deepspeed.train_micro_batch_size_per_gpu" not in reading.stated:
        reading.ask_key("batch.micro", 1, "the script says the batch of a process")
    ask_sharding(reading)
    _read_adapters(reading)


def _read_adapters(reading: Reading) -> None:
    stated = take_on(reading, *LORA_NAMES)
    bits = reading.take_count("bits", "quantization_bit") or 16
    four = take_on(reading, "load_in_4bit", "use_4bit", "q_lora", "use_qlora", "qlora", "use_4bit_quantization")
    eight = take_on(reading, "load_in_8bit", "use_8bit", "use_8bit_quantization")
    if stated is not None or bits < 16 or four is not None or eight is not None:
        switch = stated or four or eight or reading.take("bits", "quantization_bit")
        set_adapters(reading, switch, 8, RANK_NAMES, *TARGET_NAMES, everywhere=False)
    elif any(name in reading.stated for name in RANK_NAMES[:2]):
        rank = reading.take(*RANK_NAMES[:2])
        why = "it sets the rank of adapters, and no setting says that the script has adapters"
        reading.ask(rank, why, "train.mode=lora", "train.mode=full")
    if four is not None or bits == 4:
        set_quantised_weights(reading, 4, four or reading.take("bits", "quantization_bit"))
    elif eight is not None or bits == 8:
        set_quantised_weights(reading, 8, eight or reading.take("bits", "quantization_bit"))


def recognise(file: LaunchFile) -> Evidence:
    """A script or a mapping with arguments of the Trainer."""
    if file.launch is not None:
        names = {name for name, stated in file.launch.arguments.items() if not is_null(stated.value)}
        starts = {launcher.name for launcher in file.launch.launchers}
        if (
            re.search(r"(^|/)run_(clm|mlm|translation|summarization|seq2seq)\w*\.py$", file.launch.entry)
            and DISTINCTIVE & names
        ):
            return Evidence.CERTAIN
    else:
        names, starts = set(file.keys), set()
    known = len(names & DISTINCTIVE)
    if known >= MANY or (known and starts & {"accelerate launch"}):
        return Evidence.LIKELY
    if known >= FEW or names & {"deepspeed", "deepspeed_config"} or starts & {"deepspeed", "accelerate launch"}:
        return Evidence.POSSIBLE
    return Evidence.NONE


TRAINER = LaunchFormat(
    "trainer", "Hugging Face Trainer", ".yaml", recognise, read_trainer_file, interpret, None, VERDICTS
)
