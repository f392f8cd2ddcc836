"""Hugging Face's Trainer: its arguments in a shell script, a YAML or a JSON file, for any script that parses them.

Source: huggingface/transformers v4.57.3 and v5.24.0, src/transformers/training_args.py and hf_argparser.py;
examples/pytorch/language-modeling/run_clm.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshcast.simulator.formats.launch.keys import flatten_model
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.sharding import ask_sharding, state_chat
from meshcast.simulator.formats.launch.programs.trainer import (
    LORA_NAMES,
    RANK_NAMES,
    TARGET_NAMES,
    TrainerProgram,
    approximate_loading,
    double_samples,
    follow_file,
    list_names,
    read_trainer_file,
    read_training,
    set_adapters,
    set_quantised_weights,
    set_reference,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import SHORT, VERDICTS
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated, read_count, read_words
from meshcast.simulator.models.load import load_model

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

COMMON = {"output_dir", "num_train_epochs", "gradient_checkpointing", "gradient_accumulation_steps"}
"""Those that scripts without the Trainer have, too."""

BATCHES = {"per_device_train_batch_size", "per_gpu_train_batch_size"}
"""Arguments that the Trainer alone has."""

FEW, MANY = 2, 5
"""Distinctive arguments that make it possible, and likely, that a file is of the Trainer."""


def read_script(reading: Reading) -> None:
    """Fills the keys of a job."""
    launch = reading.file.launch
    if launch is None and len(named := _list_configurations(reading.file)) > 1:
        _ask_configuration(reading, named)
        return
    _follow_files(reading)
    entry = launch.entry if launch is not None else ""
    sequence = next((length for script, length in SEQUENCES.items() if re.search(script, entry)), None)
    program = TrainerProgram(sequence=sequence, sequence_names=SEQUENCE_NAMES, model_names=MODEL_NAMES)
    if "zero_stage" in reading.stated and "deepspeed" in reading.stated:
        program = replace(program, micro=16, sequence=512)
        _read_chat(reading)
    elif not (DISTINCTIVE - COMMON) & reading.stated.keys() or is_own_loop(reading):
        program = replace(program, micro=None)
    _read_overrides(reading)
    read_training(reading, program)
    _read_pairs(reading, entry)
    if program.micro is None and (stated := reading.take(*BATCH_NAMES)) is not None:
        reading.ignore(stated, "the configuration of DeepSpeed, or --set batch.micro, says the batch")
    ask_sharding(reading)
    _read_adapters(reading)


def _ask_configuration(reading: Reading, named: list[str]) -> None:
    """Asks for what a file leaves to the command line that picks some of its configurations."""
    why = f"it holds configurations by name ({', '.join(named[:4])}, ...), of which a command line picks some"
    reading.ask(None, why, "model=llama3-8b")
    for key, example in (("batch.micro", 1), ("batch.sequence", 2048)):
        reading.ask_key(key, example, why)
    reading.ask(None, why, "plan.zero=3", "plan.fsdp=true")


def _follow_files(reading: Reading) -> None:
    """Adds the files of arguments that a command names."""
    launch = reading.file.launch
    words = list(launch.positional) if launch is not None else []
    if launch is not None and (stated := reading.stated.get("config")) is not None:
        words.append(stated)
    for word in words:
        if str(word.value).lower().endswith((".json", ".yaml", ".yml")):
            reading.take("config")
            follow_file(reading, word)


def _list_configurations(file: LaunchFile) -> list[str]:
    """Returns the names of configurations in a file that holds several."""
    data = file.data if isinstance(file.data, Mapping) else {}
    return [
        str(name) for name, part in data.items() if isinstance(part, Mapping) and len(DISTINCTIVE & set(part)) >= FEW
    ]


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a file; of a file with sections, those of a single training are named without them."""
    settings = read_trainer_file(file)
    if file.launch is None and len(_list_configurations(file)) == 1:
        settings = {name.rpartition(".")[2]: stated for name, stated in settings.items()}
    return settings


BATCH_NAMES = ("batch_size", "train_batch_size", "global_batch_size")
"""Batches as scripts without the Trainer name them."""

MODEL_NAMES = (
    *("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path", "model_path", "base_model"),
)
"""Models as scripts name them."""


PAIRED = re.compile(r"(^|[/_.-])(dpo|orpo|simpo|cpo|reward_model\w*|rm|rw)([/_.-]|$)", re.IGNORECASE)
"""Words in names of scripts and folders whose samples are pairs of texts."""

PAIRED_SETTINGS = ("use_dpo", "dpo_beta", "max_prompt_length", "beta")
"""Settings of scripts whose samples are pairs."""


def _read_pairs(reading: Reading, entry: str) -> None:
    """Reads whether a script compares pairs of texts: by a setting, by its name, or by the folder of its file."""
    chat = "zero_stage" in reading.stated
    stated = take_on(reading, *PAIRED_SETTINGS)
    name = f"{reading.file.folder.resolve()}/" if chat else entry
    if stated is None and not PAIRED.search(name):
        return
    shown = stated or Stated(name, name, reading.file.where)
    double_samples(reading, shown)
    if "dpo" in name.lower() or stated is not None:  # ORPO, SimPO and CPO have none
        set_reference(reading, shown)


OVERRIDES = {
    **{"n_embd": "model.hidden", "hidden_size": "model.hidden", "n_head": "model.heads"},
    **{"num_attention_heads": "model.heads", "n_layer": "model.layers", "num_hidden_layers": "model.layers"},
    **{"n_inner": "model.ffn", "intermediate_size": "model.ffn", "num_key_value_heads": "model.kv_heads"},
    "vocab_size": "model.vocab",
}
"""Keys of a model by the fields of configurations of transformers."""

KINDS = {"gpt2": "gpt2-124m", "opt": "opt-125m"}
"""Presets with the defaults of the configurations of models that ``--model_type`` names."""


def _read_overrides(reading: Reading) -> None:
    """Reads a model that starts from nothing: ``--model_type`` with the sizes of ``--config_overrides``."""
    kind = KINDS.get(reading.take_word("model_type"))
    fields = {name: entry for name, entry in reading.stated.items() if name in OVERRIDES}
    stated = reading.take("config_overrides", *fields)
    if stated is None or kind is None or reading.take(*MODEL_NAMES) is not None:
        return
    overrides = reading.stated.get("config_overrides")
    for text in read_words(overrides) if overrides is not None else ():
        name, equals, value = text.partition("=")
        fields |= {name: replace(stated, value=value)} if equals else {}
    reading.keys |= flatten_model(load_model(kind))
    for name, key in OVERRIDES.items():
        if name in fields:
            reading.set_key(key, read_count(fields[name]), "config_overrides", name)
    if "n_embd" in fields and "n_inner" not in fields:
        reading.set_key("model.ffn", 4 * reading.keys["model.hidden"], "config_overrides")
    if "n_head" in fields:
        reading.set_key("model.kv_heads", reading.keys["model.heads"], "config_overrides")
    if "gradient_checkpointing" in fields:
        reading.stated.setdefault("gradient_checkpointing", fields["gradient_checkpointing"])


def is_own_loop(reading: Reading) -> bool:
    """Returns whether a script trains without the Trainer, whose argument of the configuration is ``--deepspeed``."""
    return not BATCHES & reading.stated.keys() and "deepspeed_config" in reading.stated


def _read_chat(reading: Reading) -> None:
    """States what DeepSpeed-Chat makes of its flags."""
    state_chat(reading)
    rank = reading.stated.get("lora_dim")
    if rank is not None and str(rank.value) not in ("0", "none"):
        set_adapters(reading, rank, None, ("lora_dim",), everywhere=True)


def _read_adapters(reading: Reading) -> None:
    """Reads whether adapters are trained, and which: as settings, quantised weights or the name of the script say.

    Asks where a rank alone is set.
    """
    stated, (bits, quantised) = take_on(reading, *LORA_NAMES), _find_bits(reading)
    if stated is not None and stated.shown.endswith("use_llm_lora"):
        reading.stated.setdefault("lora_rank", stated)
    _read_frozen_parts(reading, stated)
    entry = reading.file.launch.entry if reading.file.launch is not None else ""
    switch = stated or quantised
    if switch is not None:
        set_adapters(reading, switch, None, RANK_NAMES, *TARGET_NAMES, everywhere=False)
    elif re.search("lora|peft", entry):
        set_adapters(reading, None, None, RANK_NAMES, *TARGET_NAMES, everywhere=False)
        reading.assume("train.mode", "lora", f"{entry} has it in its name")
    elif "train.mode" not in reading.keys and (rank := reading.take(*RANK_NAMES[:2])) is not None:
        why = "it sets the rank of adapters, and no setting says that the script has adapters"
        reading.ask(rank, why, "train.mode=lora", "train.mode=full")
    if quantised is not None:
        set_quantised_weights(reading, bits, quantised)
    else:
        approximate_loading(reading, switch)


def _find_bits(reading: Reading) -> tuple[int, Stated | None]:
    """Returns the bits of frozen weights, and the setting that says so; None: they have 16."""
    for bits, names in QUANTISED.items():
        if (stated := take_on(reading, *names)) is not None:
            return bits, stated
    bits = reading.take_count(*BITS_NAMES) or 16
    return bits, reading.take(*BITS_NAMES) if bits < 16 else None


def _read_frozen_parts(reading: Reading, adapters: Stated | None) -> None:
    """Reads which parts of a multimodal model are frozen, where the language model is named. adapters: their switch."""
    if "freeze_llm" not in reading.stated:
        return
    parts = FROZEN_PARTS if adapters is None else ("freeze_llm", *FROZEN_PARTS)
    for name in parts:
        if (frozen := take_on(reading, name)) is not None and adapters is not None:
            reading.ignore(frozen, "adapters alone are trained")
        elif frozen is not None:
            reading.approximate(frozen, "the language model alone is forecast, without encoders of images", SHORT)


FROZEN_PARTS = ("freeze_backbone", "freeze_mlp", "freeze_vit")
"""Parts of a multimodal model beside its language model."""

QUANTISED: Mapping[int, tuple[str, ...]] = {
    4: ("load_in_4bit", "use_4bit", "q_lora", "use_qlora", "qlora", "use_4bit_quantization"),
    8: ("load_in_8bit", "use_8bit", "use_8bit_quantization"),
}
"""Switches of scripts for frozen weights of few bits."""

BITS_NAMES = ("bits", "quantization_bit", "load_in_kbits", "load_in_bits")
"""Bits of the weights under adapters."""


def recognise(file: LaunchFile) -> Evidence:
    """Recognises a script or a mapping with arguments of the Trainer."""
    names, starts = list_names(file), set[str]()
    if file.launch is not None:
        starts = {launcher.name for launcher in file.launch.launchers}
        if (
            re.search(r"run_(clm|mlm|translation|summarization|seq2seq)\w*\.py$", file.launch.entry)
            and DISTINCTIVE & names
        ):
            return Evidence.CERTAIN
    known = len(names & DISTINCTIVE)
    if file.launch is None and _list_configurations(file):
        return Evidence.POSSIBLE
    if file.launch is not None and (names & BATCHES or known >= MANY or (known and "accelerate launch" in starts)):
        return Evidence.LIKELY
    if known >= FEW or names & {"deepspeed", "deepspeed_config"} or starts & {"deepspeed", "accelerate launch"}:
        return Evidence.POSSIBLE
    return Evidence.NONE


TRAINER = LaunchFormat("trainer", "Hugging Face Trainer", ".yaml", recognise, read, read_script, None, VERDICTS)
