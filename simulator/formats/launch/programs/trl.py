"""TRL: ``trl sft`` and its other trainers, and recipes in YAML for its scripts.

Defaults are those of release 1: huggingface/trl v1.16.0, trl/trainer/sft_config.py, base_config.py, dpo_config.py and
model_config.py. Layers are recomputed by default since v0.22; the loss works on chunks of tokens since v1.6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.launches import Launch
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.sharding import ask_sharding
from meshcast.simulator.formats.launch.programs.swift_settings import TUNERS
from meshcast.simulator.formats.launch.programs.trainer import (
    LORA_NAMES,
    RANK_NAMES,
    TARGET_NAMES,
    TrainerProgram,
    approximate_divergence,
    approximate_loading,
    double_samples,
    follow_file,
    list_names,
    read_trainer_file,
    read_training,
    set_adapters,
    set_chunked_loss,
    set_classes,
    set_quantised_weights,
    set_reference,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    LOADING,
    NAMES,
    OPTIMISATION,
    SHORT,
    VERDICTS,
    list_verdicts,
)
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Keys, Stated
from meshcast.simulator.formats.launch.verdicts import Approximation, NoInfluence

PROGRAM = TrainerProgram(
    sequence=1024,
    sequence_names=("max_length", "max_seq_length"),
    compute="bf16",
    loads="fp32",
    checkpointing=True,
    reentrant=False,
)
"""``bf16`` follows from ``fp16``; ``dtype`` is float32 (ModelConfig); ``gradient_checkpointing`` is on."""

OLD_PROGRAM = replace(PROGRAM, compute="fp32", loads="script", checkpointing=False, reentrant=None)
"""Releases before v0.20, whose configurations had the defaults of the Trainer (trl/trainer/sft_config.py @ v0.12)."""

OLD = {"evaluation_strategy", "max_seq_length", "use_flash_attention_2", "no_cuda", "fp16_backend"}
"""Settings that a release of transformers or TRL with the newer defaults does not take."""

OTHERS = {"block_size", "model_max_length", "cutoff_len", "max_seq_len", "sequence_len", "max_source_length"}
"""Lengths of sequences of other programs."""

GENERATING = ("grpo", "rloo", "ppo", "online_dpo", "gkd", "nash_md", "xpo", "gold", "distillation")
"""Trainers that generate in every step."""

PAIRS = ("dpo", "orpo", "cpo", "reward")
"""Trainers whose samples are pairs of texts."""

REFERENCES = ("dpo", "kto", "bco")
"""Trainers with a reference model."""

TRL_VERDICTS = list_verdicts(
    ("dataset_* truncation_mode eval_packing packing_strategy padding_free packing assistant_only_loss", DATA),
    ("completion_only_loss max_prompt_length max_completion_length formatting* max_num_* prompt_template", DATA),
    ("conversation* num_proc auto_insert* system_prompt", DATA),
    (
        "beta loss_type loss_weights ld_alpha rpo_alpha f_divergence* desirable* undesirable* use_weighting",
        OPTIMISATION,
    ),
    ("discopop* cpo_alpha simpo* lora_alpha lora_dropout lora_task_type use_rslora center_rewards*", OPTIMISATION),
    ("label_smoothing disable_dropout reference_free", OPTIMISATION),
    ("bnb_4bit_* use_bnb_nested_quant lora_modules_to_save ignore_bias_buffers", LOADING),
    ("benchmarks callbacks", NAMES),
    ("use_dora", Approximation("adapters of plain LoRA are forecast", SHORT)),
    ("sync_ref_model ref_model_* precompute_ref*", NoInfluence("the reference has the same size")),
    (
        "use_vllm vllm_* num_generations* generation_* temperature top_p top_k min_p",
        NoInfluence("rollouts are left out"),
    ),
    ("steps_per_generation num_iterations", NoInfluence("it says how often a rollout comes, not what a step does")),
)


ONLY = {
    "grpo": {"num_generations", "use_vllm"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "dpo": {"beta", "rpo_alpha", "precompute_ref_log_probs", "reference_free", "dpo_alpha"},
    "reward": {"center_rewards_coefficient"},
}
"""Settings that only these trainers have, those of other trainers left out."""


def _find_trainer(file: LaunchFile, stated: Mapping[str, Stated]) -> str:
    """Returns the name of the trainer: of the command, of the script, or what only its settings say."""
    entry = file.launch.entry.rpartition("/")[2] if file.launch is not None else ""
    words = re.split(r"[\s._-]+", entry)
    known = (*GENERATING, *PAIRS, "kto", "bco", "sft")
    named = next((name for name in known if name in words or name == entry.removesuffix(".py")), None)
    return named or next((name for name, settings in ONLY.items() if settings & stated.keys()), "sft")


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    stated = reading.take("config")
    if stated is not None:
        follow_file(reading, stated)
    for word in reading.file.launch.positional if reading.file.launch is not None else ():
        if str(word.value).endswith((".yaml", ".yml")):
            follow_file(reading, word)
    trainer = _find_trainer(reading.file, reading.stated)
    if trainer in GENERATING or {"num_generations", "use_vllm"} & reading.stated.keys():
        why = "it generates in every step, which meshcast does not forecast: the answer is a step of training alone"
        reading.ask(reading.take("num_generations", "use_vllm"), why, "batch.sequence=2048")
    is_old = bool(OLD & reading.stated.keys())
    read_training(reading, OLD_PROGRAM if is_old else PROGRAM)
    launch = reading.file.launch
    own_script = launch is not None and not re.match(r"trl\b", launch.entry)
    if own_script and not is_old and reading.take("gradient_checkpointing") is None:
        why = "TRL recomputes layers since v0.22, and the release that the script runs with is not known"
        reading.assume("plan.recompute", "full", why)
        unstated = Stated("", "gradient_checkpointing", reading.file.where)
        errs = "without recomputation the step is shorter and needs more memory"
        reading.approximate(unstated, why, errs, {"plan.recompute": "none"})
    ask_sharding(reading)
    _ask_format(reading)
    if trainer == "sft":
        _read_loss(reading)
    if trainer in PAIRS:
        _read_pairs(reading, trainer)
    if trainer in REFERENCES:
        set_reference(reading, Stated(trainer, trainer, reading.file.where))
    if trainer == "kto":
        approximate_divergence(reading, Stated(trainer, trainer, reading.file.where))
    _read_adapters(reading)


SWITCHES = {"bf16", "fp16"}
"""Switches of the Trainer for the format of the computation; own loops on Accelerate, such as those of Open-Instruct,
have none."""


def _ask_format(reading: Reading) -> None:
    """Asks for the format of the computation in the file of such a loop, without its command."""
    tracked = reading.take("with_tracking")
    if tracked is not None and reading.file.launch is None and not SWITCHES & reading.stated.keys():
        why = "scripts with this setting have no switch for the format: the command of Accelerate says it"
        reading.ask_key("precision.compute", "bf16", why, tracked)


def _read_pairs(reading: Reading, trainer: str) -> None:
    """Reads samples of two texts, each of which has a number of a reward model (trl/trainer/reward_trainer.py)."""
    double_samples(reading, None)
    if trainer == "reward":
        set_classes(reading, 1)


CHUNKED_LOSS: Keys = {"chunk_tokens": 256, "recomputed": True}
"""`_chunked_cross_entropy_loss` (huggingface/trl @f2cd5771, trl/trainer/sft_trainer.py): checkpoints of chunks, each
with the kernels of PyTorch."""


def _read_loss(reading: Reading) -> None:
    """Reads the loss of SFT, which has chunks of the logits at once unless it is told otherwise."""
    word = reading.take_word("loss_type")
    if word in ("", "chunked_nll", "nll", "dft"):  # sft_config.py of v1.16.0: "computes the loss the same way"
        set_chunked_loss(reading, CHUNKED_LOSS, "loss_type")


def _read_adapters(reading: Reading) -> None:
    bits = 4 if (four := take_on(reading, "load_in_4bit")) is not None else 8
    quantised = four or take_on(reading, "load_in_8bit")
    stated = take_on(reading, *LORA_NAMES)
    if stated is not None:
        set_adapters(reading, stated, 16, RANK_NAMES, *TARGET_NAMES, everywhere=False, dropout=True)
    if quantised is not None:
        set_quantised_weights(reading, bits, quantised, double=False)
        if stated is not None:  # sft_trainer.py: "the PEFT adapter weights are converted to bf16"
            reading.set_key("framework.set.adapters.weights", "")
    else:
        approximate_loading(reading, stated)


STRONG = {
    *("dataset_num_proc", "completion_only_loss", "assistant_only_loss", "packing_strategy", "padding_free"),
    *("max_prompt_length", "max_completion_length", "use_peft", "dataset_mixture", "dataset_mixer", "num_generations"),
    *("lora_task_type", "use_liger_loss"),
}
"""Settings that only TRL has."""


def _weigh_start(launch: Launch, names: set[str]) -> Evidence:
    """Returns how sure it is that a start is of TRL. names: of its settings."""
    if re.match(r"trl\b", launch.entry) or re.search(r"trl[/.]scripts", launch.entry):
        return Evidence.CERTAIN
    script = re.search(r"(^|/)(run_)?(sft|dpo|grpo|kto|rloo|orpo|cpo|reward(_modeling)?)\.py$", launch.entry)
    recipe = any(str(word.value).endswith((".yaml", ".yml")) for word in launch.positional)
    is_plain = {"model_name_or_path", "per_device_train_batch_size"} <= names and not OTHERS & names
    if script and (recipe or is_plain or names & (STRONG | {"dataset_name"})):
        return Evidence.CERTAIN
    if script and "config" in names:  # other programs have scripts of these names
        return Evidence.LIKELY
    is_ours = launch.entry.endswith(".py") and len(STRONG & names) > 1
    return Evidence.CERTAIN if is_ours else Evidence.NONE


def recognise(file: LaunchFile) -> Evidence:
    """Its command, its scripts, or its settings."""
    names = list_names(file)
    if names & TUNERS:
        return Evidence.NONE
    if file.launch is not None:
        return _weigh_start(file.launch, names)
    if OTHERS & names:
        return Evidence.NONE
    strong = len(STRONG & names)
    if strong > 1:
        return Evidence.CERTAIN
    return Evidence.LIKELY if strong or {"model_name_or_path", "dataset_name"} <= names else Evidence.NONE


TRL = LaunchFormat("trl", "TRL", ".yaml", recognise, read_trainer_file, interpret, None, {**TRL_VERDICTS, **VERDICTS})
