"""What the programs on Hugging Face's Trainer share: batches, sequences, precision, sharding, checkpointing, adapters.

The settings are `TrainingArguments`, by their names; those of companion files as in `sharding`. Where a program's
defaults differ from the Trainer's, a `TrainerProgram` says so.

Sources: huggingface/transformers v4.57.3 and v5.24.0, src/transformers/training_args.py, trainer.py, modeling_utils.py;
huggingface/accelerate v1.15.0, src/accelerate/accelerator.py and utils/fsdp_utils.py (weights upcast to fp32 under
FSDP with mixed precision); huggingface/peft, src/peft/utils/constants.py (modules of adapters).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from meshcast.hardware.documents.input_file import split_lines
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.flat_settings import flatten_file, split_objects
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.launches import Launch
from meshcast.simulator.formats.launch.programs.evaluations import MICRO, EvaluationSettings, read_evaluation
from meshcast.simulator.formats.launch.programs.optimizers import read_optimizer
from meshcast.simulator.formats.launch.programs.sharding import (
    ACCELERATE_KEYS,
    FSDP,
    has_fsdp,
    name_launch_flags,
    name_settings,
    offload_checkpoints,
    read_accelerate,
    read_degrees,
    read_fsdp,
    read_zero,
)
from meshcast.simulator.formats.launch.reading import Reading, is_off, set_gpus
from meshcast.simulator.formats.launch.table import (
    Keys,
    SomeKeys,
    Stated,
    is_null,
    read_count,
    read_number,
    read_switch,
    read_words,
)
from meshcast.simulator.models.adapter_targets import ALL_LINEAR, know_module

EVALUATION_NAMES = ("per_device_eval_batch_size", "per_gpu_eval_batch_size")
EVALUATION = EvaluationSettings(EVALUATION_NAMES, 8)
"""Settings of the micro-batch of evaluations; 8 sequences without a word (training_args.py)."""


@dataclass(frozen=True)
class TrainerProgram:
    """A program on the Trainer, by its names and defaults where these differ from the Trainer's.

    micro: sequences of a micro-batch of a process; None: a script decides.
    micro_names: of the setting.
    sequence: tokens of a sequence; None: a script decides.
    sequence_names: of the setting.
    model_names: of the setting of the model.
    compute: format of the computation without a switch.
    loads: format in which trained weights lie in memory, where neither FSDP nor DeepSpeed keeps fp32 copies: fp32, that
        of the computation, or what the script and the release of transformers say.
    checkpointing: whether layers are recomputed.
    checkpointing_names: of the switches.
    reentrant: whether its checkpoints are reentrant, which recompute to the end of a layer; None: as the profile.
    fsdp_version: of FSDP, where the file does not say it.
    framework: its profile, where DeepSpeed does not run.
    evaluation: settings of the micro-batches of evaluations; None: the program reads them itself.
    packs: what of a batch is padding or packed, as a question about `batch.documents` may put it.
    """

    micro: int | None = 8
    micro_names: tuple[str, ...] = ("per_device_train_batch_size", "per_gpu_train_batch_size")
    sequence: int | None = None
    sequence_names: tuple[str, ...] = ()
    model_names: tuple[str, ...] = ("model_name_or_path",)
    compute: Literal["fp32", "bf16"] = "fp32"
    loads: Literal["fp32", "compute", "script"] = "script"
    checkpointing: bool = False
    checkpointing_names: tuple[str, ...] = (
        *("gradient_checkpointing", "activation_checkpointing", "grad_checkpoint", "use_gradient_checkpointing"),
    )
    reentrant: bool | None = None
    fsdp_version: int = 1
    framework: str = "hf-trainer"
    evaluation: EvaluationSettings | None = EVALUATION


# -------------------------------------------------------------------------------------------- settings


def read_trainer_file(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a script, of a YAML or of a JSON file: those of the Trainer, and those of launchers behind
    prefixes."""
    if file.launch is not None:
        settings = dict(split_objects(file.launch.arguments))
        for launcher in file.launch.launchers:
            if launcher.name == "accelerate launch":
                settings |= name_launch_flags(launcher.settings)
            else:
                settings |= {f"launcher.{name}": stated for name, stated in launcher.settings.items()}
        return name_settings(_complete_names(settings))
    settings = flatten_file(file, example="per_device_train_batch_size: 1")
    if "distributed_type" in settings or "compute_environment" in settings:
        settings = {_name_accelerate(name): stated for name, stated in settings.items()}
    return name_settings({**_read_comment(file), **settings})


STARTED = re.compile(r"accelerate launch\b[^\n]*?--config[_-]file[= ](?P<name>[^\s$]+)(?P<rest>[^\n]*)")
"""A command in a comment that starts a script with a configuration of Accelerate."""


def _read_comment(file: LaunchFile) -> dict[str, Stated]:
    """Reads the configuration of Accelerate of the command with which a comment of a file says that this is started."""
    lines = [(number, line.strip()) for number, line in enumerate(split_lines(file.text), 1)]
    comments = [(number, line.lstrip("# ")) for number, line in lines if line.startswith("#")]
    text = re.sub(r"\\\s*\n", " ", "\n".join(line for _, line in comments))
    started = next((match for match in STARTED.finditer(text) if Path(file.where).name in match["rest"]), None)
    if started is None:
        return {}
    line = next((number for number, comment in comments if started["name"] in comment), 1)
    shown = "--config_file of the comment"
    return {"accelerate.config_file": Stated(started["name"], shown, f"{file.where}:{line}")}


ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
"""Arguments that decide the batch or the memory, and that argparse takes abbreviated."""

SHORTEST = 10
"""Letters of an abbreviation that stands for an argument for sure."""


def _complete_names(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings of a command with the arguments of the Trainer that it abbreviates written out."""
    completed: dict[str, Stated] = {}
    for name, stated in settings.items():
        meant = [full for full in ARGUMENTS if len(name) >= SHORTEST and full.startswith(name)]
        completed[meant[0] if len(meant) == 1 else name] = stated
    return completed


def read_environment(launch: Launch, *names: str) -> dict[str, Stated]:
    """Returns the variables of these names that a start has."""
    return {
        name: Stated(word.text, name, launch.place, word.unknown)
        for name in names
        if (word := launch.environment.get(name)) is not None
    }


def _name_accelerate(name: str) -> str:
    return f"accelerate.{name}" if name.partition(".")[0] in ACCELERATE_KEYS else name


def list_names(file: LaunchFile) -> set[str]:
    """Returns the names of the settings of a file: of a command also those of the file that it gives to the program."""
    if file.launch is None:
        return set(file.keys)
    names = {name for name, stated in file.launch.arguments.items() if not is_null(stated.value)}
    given_files = [*file.launch.positional, *(file.launch.arguments[name] for name in ("config",) if name in names)]
    for stated in given_files:
        if not stated.unknown and str(stated.value).lower().endswith((".yaml", ".yml", ".json")):
            companion = file.find_companion(str(stated.value))
            names |= set(companion.keys) if companion is not None else set()
    return names


def follow_file(reading: Reading, stated: Stated) -> None:
    """Adds the settings of the YAML or JSON file that a command names in place of arguments."""
    if (file := reading.read_companion(stated)) is not None:
        reading.add_stated(name_settings(flatten_file(file)))


# -------------------------------------------------------------------------------------------- the job


def read_training(reading: Reading, program: TrainerProgram) -> None:
    """Fills the keys of a job from the arguments of the Trainer and the files that they name."""
    reading.read_model(*program.model_names)
    reading.set_key("model.mtp", 0)  # classes of transformers have no layers that predict further tokens
    _add_companions(reading)
    read_accelerate(reading)
    _read_batch(reading, program)
    read_sequence(reading, program)
    _read_sharding(reading, program)
    _read_precision(reading, program)
    _read_checkpointing(reading, program)
    _read_attention(reading)
    read_optimizer(reading, "deepspeed.optimizer.type", "optim")
    _read_compilation(reading)
    _read_length(reading)
    if program.evaluation is not None:
        _read_evaluation(reading, program.evaluation)
    _read_processes(reading)


DEEPSPEED_FILES = ("deepspeed", "deepspeed_config", "ds_config", "deepspeed_config_file", "deepspeed_config_path")
"""Arguments of scripts that name a configuration of DeepSpeed."""


def _add_companions(reading: Reading) -> None:
    """Adds the files of DeepSpeed and FSDP that arguments of the Trainer name."""
    files = {**dict.fromkeys(DEEPSPEED_FILES, "deepspeed."), "fsdp_config": "fsdp_config."}
    for name, prefix in files.items():
        stated = reading.stated.get(name)
        if stated is None or is_null(stated.value) or isinstance(stated.value, bool):
            continue
        reading.take(name)
        if (file := reading.read_companion(stated)) is not None:
            reading.add_stated(name_settings(flatten_file(file, prefix, "{")))


def _read_batch(reading: Reading, program: TrainerProgram) -> None:
    names = *program.micro_names, "deepspeed.train_micro_batch_size_per_gpu"
    _read_agreeing(reading, "batch.micro", program.micro, *names)
    names = (
        "gradient_accumulation_steps",
        "deepspeed.gradient_accumulation_steps",
        "accelerate.deepspeed_config.gradient_accumulation_steps",
        "accelerate.gradient_accumulation_steps",
    )
    _read_agreeing(reading, "batch.accumulated", 1, *names)
    stated = reading.take("deepspeed.train_batch_size")
    if stated is not None and not is_null(stated.value):
        reading.set_key("batch.global", read_count(stated), "deepspeed.train_batch_size")
    if "batch.micro" not in reading.keys and program.micro is None:
        if "batch.global" in reading.keys:
            # DeepSpeedConfig._set_batch_related_parameters
            reading.keys["batch.per_rank"] = reading.keys.get("batch.accumulated", 1)
        else:
            reading.ask_key("batch.micro", 1, "the script says the batch of a process")


def _read_agreeing(reading: Reading, key: str, default: int | None, *names: str) -> None:
    """Reads a count that several files may state. Where they differ, the Trainer stops."""
    answers = ("batch.micro=...",) if key == "batch.micro" else ("batch.global=...",)
    counts = {name: count for name in names if (count := reading.take_count(name, answers=answers)) is not None}
    if len(set(counts.values())) > 1:
        first, *rest = (reading.stated[name] for name in counts)
        why = f"it differs from {first.shown}, which is {first.value}: the Trainer stops there"
        reading.ask(rest[0], why, f"{key}={first.value}")
    if counts:
        reading.set_key(key, next(iter(counts.values())), *counts)
    elif default is not None and not any(reading.stated[name].unknown for name in names if name in reading.stated):
        reading.set_key(key, default)


def read_sequence(reading: Reading, program: TrainerProgram) -> None:
    """Reads the length of sequences; of a script that does not state it, it is asked for."""
    names = program.sequence_names
    if reading.file.launch is not None and not any(name in reading.stated for name in names):
        names = (*names, *(name for name in reading.stated if ABBREVIATED.match(name)))
    halves = ("max_source_length", "max_target_length")
    if set(halves) <= reading.stated.keys() and not (set(names) - set(halves)) & reading.stated.keys():
        lengths = [reading.take_count(name, answers=("batch.sequence=...",)) for name in halves]
        if all(lengths):
            reading.set_key("batch.sequence", sum(length or 0 for length in lengths), *halves)
            return
    if count := reading.take_count(*names, answers=("batch.sequence=...",)):
        reading.set_key("batch.sequence", count, *(name for name in names if name in reading.stated))
    elif program.sequence is not None:
        reading.set_key("batch.sequence", program.sequence)
    elif not any(reading.stated[name].unknown for name in names if name in reading.stated):
        why = "the script decides how many tokens a sequence has, and no setting says it"
        reading.ask_key("batch.sequence", 2048, why)


ABBREVIATED = re.compile(
    r"max_seq(_l(e(n(g(th?)?)?)?)?)?|model_max(_l(e(n(g(th?)?)?)?)?)?|cutoff(_l(en?)?)?|block(_s(i(ze?)?)?)?"
)
"""Lengths of sequences as a command may abbreviate them: argparse takes what an argument begins with."""


def _read_sharding(reading: Reading, program: TrainerProgram) -> None:
    """Reads DeepSpeed, FSDP, or plain data parallelism: arguments of the Trainer count more than Accelerate's file."""
    kind = reading.take_word("accelerate.distributed_type")
    reading.set_key("framework.name", program.framework)
    if any(name.startswith("deepspeed.") for name in reading.stated):
        read_zero(reading)
    elif has_fsdp(reading):
        read_fsdp(reading, program.fsdp_version)
    elif kind == "megatron_lm":
        why = "Accelerate hands over to Megatron-LM, whose degrees meshcast does not read from this file"
        reading.ask(reading.take("accelerate.distributed_type"), why, "plan.tp=1")
        reading.set_key("plan.data", "ddp", "accelerate.distributed_type")
    else:
        _set_replicas_alone(reading)
        if mebibytes := reading.take_count("ddp_bucket_cap_mb"):
            reading.set_key("framework.set.bucket.elements", mebibytes * 2**18, "ddp_bucket_cap_mb")
    read_degrees(reading)


def _set_replicas_alone(reading: Reading) -> None:
    """Sets plain data parallelism; it is asked for where Accelerate has the file of another machine."""
    launch = reading.file.launch
    starts = {launcher.name for launcher in launch.launchers} if launch is not None else set()
    if "accelerate launch" in starts and "accelerate.distributed_type" not in reading.stated:
        why = "accelerate launch without --config_file takes the configuration of the machine, which is not here"
        reading.assume("plan.data", "ddp", why)
        if launch is not None and not launch.entry.startswith("axolotl"):  # whose file says how states are shared out
            reading.ask(None, why, "plan.zero=0", "plan.zero=3", "plan.fsdp=true")
    else:
        reading.set_key("plan.data", "ddp", "accelerate.distributed_type")


# ----------------------------------------------------------------------------------------- precision

HALF = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
"""Formats of 16 bits by their names in PyTorch."""

LOADING = ("torch_dtype", "dtype", "model_dtype")
"""Settings of the format in which a script loads weights."""


def _read_precision(reading: Reading, program: TrainerProgram) -> None:
    """Reads the format of the computation, and with which formats weights and states lie in memory."""
    switches = dict(_find_switches(reading))
    _ask_about_mismatch(reading, switches)
    compute = next(iter(switches.values()), None)
    mixed = compute is not None
    if compute is None:
        stated = reading.take("bf16")
        is_off = stated is not None and not is_null(stated.value) and not read_switch(stated)
        mixed = program.compute == "bf16" and not is_off
        compute = "bf16" if mixed else "fp32"
    loaded = HALF.get(reading.take_word(*LOADING).removeprefix("torch."), "")
    if not mixed and loaded:
        reading.set_key("precision.compute", loaded, *LOADING)
        _set_states(reading, loaded, *LOADING)
        return
    names = [name for name, word in switches.items() if word == compute]
    reading.set_key("precision.compute", compute, *names)
    if reading.take_switch("tf32") and compute == "fp32":
        why = "GEMMs are forecast in fp32, and run in TF32"
        reading.approximate(reading.take("tf32"), why, "the step is too long, the memory is the same")
    if mixed and reading.keys["plan.data"] == "ddp" and reading.keys["framework.name"] != "deepspeed":
        _read_states(reading, program, compute, loaded)


def _find_switches(reading: Reading) -> Iterator[tuple[str, str]]:
    """Yields the settings that say the format of mixed precision, those that count more first."""
    for word in ("bf16", "fp16"):
        for name in (word, f"deepspeed.{word}.enabled", f"deepspeed.{'bfloat16' if word == 'bf16' else word}.enabled"):
            stated = reading.take(name, answers=("precision.compute=bf16",))
            if stated is not None and not is_null(stated.value) and read_switch(stated):
                yield name, word
    word = reading.take_word("accelerate.mixed_precision")
    if word in ("bf16", "fp16"):
        yield "accelerate.mixed_precision", word
    elif word == "fp8":
        yield "accelerate.mixed_precision", "fp8-delayed"


def _ask_about_mismatch(reading: Reading, switches: dict[str, str]) -> None:
    """Asks for the format where DeepSpeed's JSON enables another than the arguments: the Trainer stops (``fill_match``
    of transformers' integrations/deepspeed.py)."""
    arguments = {word for name, word in switches.items() if name == word}
    enabled = {word: name for name, word in switches.items() if name.startswith("deepspeed.")}
    if arguments and enabled and arguments.isdisjoint(enabled):
        word, name = next(iter(enabled.items()))
        why = f"it enables {word} and the arguments {min(arguments)}: the Trainer stops at this mismatch"
        reading.ask(reading.stated[name], why, f"precision.compute={min(arguments)}", f"precision.compute={word}")


def _set_states(reading: Reading, word: str, *names: str) -> None:
    """Sets weights without fp32 copies: gradients and moments have the format of the weights."""
    for key in ("gradients", "main_weights", "moments"):
        reading.set_key(f"precision.{key}", word, *names)


def _read_states(reading: Reading, program: TrainerProgram, compute: str, loaded: str) -> None:
    """Sets the formats of weights and states under DDP, where nothing but autocast converts."""
    if compute == "bf16" and (loaded or program.loads == "compute"):
        _set_states(reading, compute, *LOADING)
        return
    reading.set_key("precision.gradients", "fp32", *LOADING)
    if compute == "bf16" and program.loads == "script" and reading.take_word(*LOADING) in ("", "auto"):
        why = (
            "weights are forecast in fp32 with autocast, as transformers before release 5 loads them; from release 5 "
            "on, or with torch_dtype in the script, all states have 16 bits"
        )
        other = {f"precision.{key}": "bf16" for key in ("gradients", "main_weights", "moments")}
        stated = reading.take(*LOADING, "bf16", "accelerate.mixed_precision")
        reading.approximate(stated, why, "the forecast may need up to 10 bytes a parameter too much", other)


# --------------------------------------------------------------------------- recomputation and kernels


SHARDED = "fsdp_config.activation_checkpointing", "accelerate.fsdp_config.activation_checkpointing"
"""Switches of Accelerate's checkpoints, which lie inside the units of FSDP and are not reentrant (`CheckpointImpl.
NO_REENTRANT` in accelerate/accelerator.py)."""


def _read_recomputation(reading: Reading, program: TrainerProgram) -> tuple[str, ...] | None:
    """Reads whether layers are recomputed, and returns the switches that say so, None if they are not: a switch that is
    on counts more than others that are off."""
    stated = {name: reading.take(name) for name in (*program.checkpointing_names, *SHARDED)}
    switches = {
        name: read_switch(entry) for name, entry in stated.items() if entry is not None and not is_null(entry.value)
    }
    trainer = [name for name in switches if name not in SHARDED]
    is_on = any(switches.values()) or (program.checkpointing and not trainer)
    agreeing = [name for name, switch in switches.items() if switch == is_on]
    reading.set_key("plan.recompute", "full" if is_on else "none", *agreeing)
    for name in switches:
        if name not in agreeing:
            reading.ignore(stated[name], "another setting recomputes layers")
    return tuple(agreeing) if is_on else None


def _read_checkpointing(reading: Reading, program: TrainerProgram) -> None:
    switches = _read_recomputation(reading, program)
    if switches is None:
        return
    kwargs = [f"{name}_kwargs" for name in ("gradient_checkpointing", "activation_checkpointing")]
    names = tuple(f"{name}.use_reentrant" for name in kwargs)
    stated = reading.take(*names)
    is_stated = stated is not None and not is_null(stated.value)
    reentrant = read_switch(stated) if stated is not None and is_stated else program.reentrant
    names = names if is_stated else ()
    if sharded := tuple(name for name in switches if name in SHARDED):
        reentrant, names = False, sharded
    if reentrant is not None:
        reading.set_key("framework.set.recompute_early_stop", not reentrant, *names)
        if reading.keys.get("plan.data") == FSDP:
            reading.set_key("framework.set.reentrant_units", reentrant)
            reading.set_key("framework.set.memory.hooks_hold_inputs", reentrant)
    every = reading.take_count(*(f"{name}.every_n_layers" for name in kwargs)) or 1
    if every > 1 and (layers := reading.keys.get("model.layers")):
        reading.set_key(
            "plan.recompute.layers", max(1, layers // every), *(f"{name}.every_n_layers" for name in kwargs)
        )
    offloads = "activation_offloading", "accelerate.fsdp_config.activation_checkpointing_offload"
    if take_on(reading, *offloads) is not None:
        offload_checkpoints(reading, *offloads)


def set_recomputation(reading: Reading, is_on: bool, *names: str) -> None:
    """Sets whether all layers are recomputed. names: of the settings that say so."""
    reading.set_key("plan.recompute", "full" if is_on else "none", *names)


def assume_no_recomputation(reading: Reading, why: str, stated: Stated | None = None) -> None:
    """Assumes that no layer is recomputed, unless a change of the job says it; a second forecast bounds the error.

    stated: a setting of how layers are recomputed.
    """
    reading.assume("plan.recompute", "none", why)
    if "plan.recompute" in reading.answers:
        return reading.ignore(stated, "a change of the job says it")
    stated = stated or Stated("", "recomputation", reading.file.where)
    errs = "with recomputation the step is longer and needs less memory"
    reading.approximate(stated, why, errs, {"plan.recompute": "full"})


ATTENTIONS: Mapping[str, SomeKeys] = {
    "sdpa": {"attention_library": "sdpa"},
    "flash_attention_2": {"attention_library": "flash-2"},
    "flash_attention_3": {"attention_library": "flash-3"},
    "eager": {"attention": "unfused"},
}
"""Traits of the framework by ``attn_implementation``."""

FLASH_SWITCHES = ("use_flash_attn", "use_flash_attention", "use_flash_attention_2", "flash_attn")
"""Switches of scripts for FlashAttention 2."""


def set_attention(reading: Reading, word: str, *names: str) -> None:
    """Sets which kernels compute attention. word: ``attn_implementation``. names: of the settings that say so."""
    traits = ATTENTIONS.get(word)
    if traits is None:
        why = f"{word} is not described; PyTorch's scaled_dot_product_attention is forecast"
        reading.approximate(reading.take(*names), why, "the time of attention may err either way")
        return
    for trait, value in traits.items():
        reading.set_key(f"framework.set.{trait}", value, *names)


def _read_attention(reading: Reading) -> None:
    names = "attn_implementation", "_attn_implementation", "attn_impl"
    if word := reading.take_word(*names):
        set_attention(reading, word.rpartition("/")[2].replace("-", "_"), *names)
        return
    for name in FLASH_SWITCHES:
        stated = reading.take(name)
        if stated is not None and str(stated.value).lower() in ("true", "1", "yes"):
            set_attention(reading, "flash_attention_2", name)


LIGER_LOSS: Keys = {"kept": 0, "peak": 0, "sharded_peak": 0, "chunk_tokens": "liger"}
"""The loss of Liger's kernels (linkedin/Liger-Kernel, src/liger_kernel/ops/fused_linear_cross_entropy.py): the gradient
of the logits of a chunk in their place."""

CUT_LOSS: Keys = {**LIGER_LOSS, "recomputed": True}
"""Cut cross-entropy (apple/ml-cross-entropy, Wijmans et al. 2024, arXiv 2411.09009): tiles of logits, computed again in
the backward pass; here in tiles as large as Liger's chunks."""


def set_chunked_loss(reading: Reading, traits: SomeKeys, *names: str) -> None:
    """Sets a loss that never has the logits of all tokens at once. names: of the settings that say so."""
    for key, value in traits.items():
        reading.set_key(f"framework.set.loss.{key}", value, *names)


WHOLE_LOGITS: Keys = {"forward": 4, "backward": 8, "kept": 2, "peak": 6}
"""Compiled cross entropy of chunks of logits that are there, in 16 bits: two reads, a read and a write, and the copy
that joins the gradients of chunks (axolotl-ai-cloud/axolotl, src/axolotl/monkeypatch/loss/chunked.py)."""


def chunk_logits(chunks: int, compiled: bool) -> Keys:
    """Returns the loss whose chunks have a projection each, and whose gradients follow in the backward pass.

    Eager kernels save the log-softmax of all chunks in fp32 and compute both gradients of a chunk; compiled kernels
    save the logits in 16 bits. Source: meta-pytorch/torchtune @bd2a0fc7c, torchtune/modules/loss/cross_entropy_loss.py.
    """
    kernels = {"forward": 4, "backward": 4, "kept": 2, "peak": 4} if compiled else {"kept": 4, "peak": 12}
    return kernels | {"sharded_peak": 0, "chunk_count": chunks, "kept_of_all": True}


def _read_compilation(reading: Reading) -> None:
    names = "torch_compile", "torch_compile_backend", "torch_compile_mode"
    stated = {name: reading.take(name) for name in names}
    backends = "accelerate.dynamo_config.backend", "accelerate.dynamo_backend"
    backend = reading.take_word(*backends)
    is_on = any(
        entry is not None and not is_null(entry.value) and entry.value is not False for entry in stated.values()
    )
    off = stated["torch_compile"]
    if off is not None and str(off.value).lower() in ("false", "0"):
        is_on = any(stated[name] is not None and not is_null(stated[name].value) for name in names[1:])  # type: ignore[union-attr]
    if is_on or backend not in ("", "no"):
        reading.set_key("framework.set.compile", True, *names, *backends)


# ------------------------------------------------------------------------------------------- adapters

LORA_NAMES = (
    *("use_lora", "use_peft_lora", "lora_enable", "lora", "use_peft", "peft", "q_lora", "use_qlora", "qlora"),
    *("peft_enabled", "enable_lora", "use_llm_lora"),
)
"""Switches of scripts for low-rank adapters."""

RANK_NAMES = ("lora_r", "lora_rank", "lora_dim", "peft_lora_r", "rank")
TARGET_NAMES = ("lora_target_modules", "lora_target", "target_modules", "lora_target_module", "trainable")

EVERYWHERE = ("all", "all-linear", "all_linear", "lora_all_linear")
"""Words for adapters on all linear layers."""

PARAMETER_NAMES = ("lora_target_parameters", "target_parameters")
"""Settings of PEFT for adapters of parameters that are no linear layers, such as those of fused experts."""


DROPOUT_NAMES = ("lora_dropout", "lora.lora_dropout", "model.lora_dropout")


def set_adapters(
    reading: Reading,
    stated: Stated | None,
    rank: int | None,
    rank_names: tuple[str, ...],
    *target_names: str,
    everywhere: bool,
    dropout: bool = False,
) -> None:
    """Sets low-rank adapters.

    stated: the setting that says so.
    rank: without a setting; None: a script decides, and it is asked for.
    rank_names, target_names: of the settings.
    everywhere: whether all linear layers have adapters without a setting; otherwise queries and values.
    dropout: whether their inputs have dropout without a setting.
    """
    mode = [name for name, entry in reading.stated.items() if entry is stated]
    reading.set_key("train.mode", "lora", *mode)
    count = reading.take_count(*rank_names, answers=("train.rank=...",))
    if count is None and rank is None:
        reading.ask_key("train.rank", 8, "the script decides the rank of adapters, and no setting says it")
    else:
        reading.set_key("train.rank", count or rank, *rank_names)
    set_adapter_dropout(reading, dropout)
    _read_targets(reading, stated, target_names, everywhere)
    _read_checkpoint_format(reading)


CHECKPOINT_FORMATS = re.compile(r"(?i)[-_.](?:(?P<fp8>fp8)|(?P<bnb>bnb)|gptq|awq|w[48]a16|int[48])(?![a-z])")
"""In the ids of checkpoints whose weights are quantised: what loads them leaves them so."""


def _read_checkpoint_format(reading: Reading) -> None:
    """Reads the format of frozen weights from the id of a checkpoint that has them quantised; a setting for their bits
    counts before it."""
    name = next((name for name in CHECKPOINT_IDS if name in reading.stated), "")
    text = str(reading.stated[name].value) if name else ""
    word = CHECKPOINT_FORMATS.search(text)
    if word is not None and word["fp8"]:
        reading.set_key("train.frozen_weights", "fp8", name)
    elif word is not None:
        bits = 8 if re.search(r"(?i)int8|w8a16|8[-_]?bit", text) else 4
        set_quantised_weights(reading, bits, reading.stated[name], grouped=word["bnb"] is None)


CHECKPOINT_IDS = ("model_name_or_path", "base_model", "model", "model_id", "model_name", "model_path")
"""Settings for the id of a checkpoint."""


def set_adapter_dropout(reading: Reading, usual: bool = False) -> None:
    """Sets whether the inputs of adapters have dropout. usual: without a setting."""
    share = reading.take(*DROPOUT_NAMES, decisive=False)
    if usual if share is None or is_null(share.value) else read_number(share) > 0:
        reading.set_key("train.dropout", True, *DROPOUT_NAMES)


def _read_targets(reading: Reading, adapters: Stated | None, names: tuple[str, ...], everywhere: bool) -> None:
    """Reads which linear layers have adapters. everywhere: all of them, without a setting."""
    stated = reading.take(*names)
    words = [word.lower() for word in read_words(stated)] if stated is not None else []
    words = [word for word in words if word not in ("none", "null")]
    on_all = (not words and everywhere) or bool(set(words) & set(EVERYWHERE))
    modules = [ALL_LINEAR] if on_all else words or ["q_proj", "v_proj"]
    parameters = reading.take(*PARAMETER_NAMES)
    if parameters is not None and not is_null(parameters.value):
        modules = [*(modules if words or on_all else ()), *(word.lower() for word in read_words(parameters))]
        why = "adapters of experts are forecast on their tokens; PEFT adds A B to the weights of all experts"
        errs = "the step is too short, and the memory too small by a copy of these weights"
        reading.approximate(parameters, why, errs)
    set_targets(reading, modules, stated or adapters, *names, *PARAMETER_NAMES)


def set_targets(reading: Reading, words: Sequence[str], stated: Stated | None, *names: str) -> None:
    """Sets the linear layers with adapters.

    words: names of modules.
    stated: the setting that an approximation is about.
    names: of the settings that say so.
    """
    known = [name for word in words if (name := know_module(word)) is not None]
    if unknown := [word for word in words if know_module(word) is None]:
        why = f"meshcast does not know which layers {', '.join(unknown)} are"
        reading.approximate(stated, why, "the memory and time of adapters err a little")
    if known:
        reading.set_key("train.targets", tuple(known), *names)


def approximate_loading(reading: Reading, stated: Stated | None) -> None:
    """Lists that frozen weights are forecast in 16 bits, where a script loads them in fp32."""
    if not any(name in reading.stated for name in LOADING) and reading.keys.get("precision.compute") != "fp32":
        why = "frozen weights are forecast in the format of the computation; without dtype they are loaded in fp32"
        reading.approximate(stated, why, "the forecast needs up to 2 bytes a frozen parameter less")


def approximate_freezing(reading: Reading, stated: Stated | None) -> None:
    """Lists a setting that trains a part of the weights: all are forecast, and adapters bound the error."""
    why = "all weights are forecast as trained, though some are frozen"
    reading.approximate(stated, why, "the forecast is too slow, and needs more memory", {"train.mode": "lora"})


DOUBLE_NAMES = (
    *("double_quantization", "use_bnb_nested_quant", "bnb_4bit_use_double_quant", "use_nested_quant", "double_quant"),
    *("use_double_quant", "bnb_config_kwargs.bnb_4bit_use_double_quant"),
    *(f"{part}.quantization_config.bnb_4bit_use_double_quant" for part in ("llm", "model")),
)
"""Switches for scales of 4-bit blocks that are quantised themselves."""


def set_quantised_weights(
    reading: Reading, bits: int, stated: Stated | None, double: bool = True, grouped: bool = False
) -> None:
    """Sets matrices of 8 or 4 bits under adapters (QLoRA).

    double: whether scales of blocks are quantised themselves, without a setting.
    grouped: whether they are those of a checkpoint of GPTQ or AWQ.
    """
    names = [name for name, entry in reading.stated.items() if entry is stated]
    if bits == 8:
        reading.set_key("train.frozen_weights", "int8", *names)
        why = "forward products of LLM.int8 are forecast as conversions to 16 bits and products in these"
        reading.approximate(stated, why, "the step may be too long")
        return
    reading.set_key("train.mode", "qlora", *names)
    nested = reading.take(*DOUBLE_NAMES, decisive=False)
    is_double = double if nested is None or is_null(nested.value) else reading.take_switch(*DOUBLE_NAMES)
    kind = "int4" if grouped else "nf4-double" if is_double else "nf4"
    reading.set_key("train.frozen_weights", kind, *names, *DOUBLE_NAMES)
    if bits != 4:
        why = f"frozen weights of {bits} bits are forecast with 4"
        reading.approximate(stated, why, "the memory errs by the difference")


def set_classes(reading: Reading, classes: int, *names: str) -> None:
    """Sets the logits of a head in place of those of the vocabulary: a reward is a single one
    (``AutoModelForSequenceClassification`` with ``num_labels=1``). names: settings that say so."""
    reading.set_key("model.output.classes", classes, *names)


def double_samples(reading: Reading, stated: Stated | None) -> None:
    """Doubles the micro-batch: a sample is a pair of texts, chosen and rejected, which pass the model together."""
    micro = reading.keys.get("batch.micro")
    if micro:
        origin = reading.origins.get("batch.micro")
        names = [name for name, entry in reading.stated.items() if entry is origin]
        reading.set_key("batch.micro", 2 * micro, *names)
        why = f"a sample is a pair of texts: {micro} of them are forecast as {2 * micro} sequences of full length"
        shown = origin if isinstance(origin, Stated) else stated
        reading.approximate(shown, why, "the step of shorter texts is shorter; its sequences are twice its samples")
        if (sequences := reading.keys.get(MICRO)) is not None:
            evaluated = reading.origins[MICRO]
            reading.set_key(
                MICRO, 2 * sequences, *(name for name in reading.stated if reading.stated[name] is evaluated)
            )
        if (total := reading.keys.get("batch.global")) is not None:
            reading.set_key("batch.global", 2 * total, "deepspeed.train_batch_size")


PRECOMPUTED = ("precompute_ref_log_probs", "precompute_ref_log_prob")
"""Switches of a reference that reads all samples before the training."""

REFERENCE_MODELS = ("ref_model", "ref_model_name_or_path", "rl_adapter_ref_model")
"""Settings for a reference that is a separate model, beside adapters, too."""


def set_reference(reading: Reading, stated: Stated | None) -> None:
    """Sets the reference that a training compares with: the model without its adapters if it has some, unless a file
    names a copy (huggingface/trl @f2cd5771, trl/trainer/dpo_trainer.py; hiyouga/LLaMA-Factory @ff6d4d12e, src/
    llamafactory/train/trainer_utils.py, create_ref_model; axolotl-ai-cloud/axolotl @067b021c8, src/axolotl/train.py).

    stated: the setting that says so.
    """
    named = reading.take(*REFERENCE_MODELS)
    if reading.take_switch(*PRECOMPUTED):
        return
    names = [name for name, entry in reading.stated.items() if entry is stated]
    is_copy = named is not None and not is_off(named)
    reading.set_key("train.reference", "model" if is_copy else True, *(REFERENCE_MODELS if is_copy else names))


def approximate_divergence(reading: Reading, stated: Stated | None) -> None:
    """Lists the passes of KTO that are left out (trl/trainer/kto_trainer.py, _compute_kl_logps)."""
    why = "two forward passes over shuffled pairs, which estimate the divergence, are left out"
    reading.approximate(stated, why, "the step is too short by them")


# ----------------------------------------------------------------------------------- length, processes


def _read_length(reading: Reading) -> None:
    """Reads how long a run is and how often it saves."""
    stated = reading.take("max_steps", decisive=False)
    if stated is not None and not is_null(stated.value) and read_number(stated) > 0:
        reading.set_key("run.steps", read_count(stated), "max_steps")
    elif stated is not None:
        reading.ignore(stated, "the data set decides how many steps a run has")
    saved = reading.take("save_steps", decisive=False)
    strategy = reading.take_word("save_strategy") or "steps"
    if saved is not None and not is_null(saved.value) and strategy == "steps" and read_number(saved) >= 1:
        reading.set_checkpoints(read_count(saved), False, "save_steps")


def _read_evaluation(reading: Reading, settings: EvaluationSettings) -> None:
    """Reads how many sequences an evaluation runs at once, between steps or behind the last (``do_eval``).

    Without a function that computes metrics the Trainer keeps losses alone (`evaluate`: prediction_loss_only).
    """
    switches = "eval_strategy", "evaluation_strategy"
    runs = reading.take_word(*switches) in ("steps", "epoch") or take_on(reading, "do_eval") is not None
    read_evaluation(reading, settings, runs, *switches, "do_eval")


def _read_processes(reading: Reading) -> None:
    """Reads how many GPUs the launcher starts processes on."""
    names: tuple[str, ...] = ("accelerate.num_processes", "launcher.nproc_per_node", "launcher.num_gpus")
    each = reading.take_count(*names, decisive=False) if _is_number(reading, *names) else None
    nodes = 1
    if each is None:
        each, names = _count_devices(reading), ("launcher.include",)
    elif names[0] not in reading.stated or "accelerate.num_machines" not in reading.stated:
        nodes = _count_nodes(reading)  # Accelerate counts the processes of all of its machines, here of a single one
    elif _is_number(reading, "accelerate.num_machines"):
        machines = reading.take_count("accelerate.num_machines", decisive=False) or 1
        nodes, each = (machines, each // machines) if each % machines == 0 else (1, each)
    reading.take("accelerate.num_machines", decisive=False)
    if each:
        set_gpus(reading, nodes, each, *names)


def _is_number(reading: Reading, *names: str) -> bool:
    """Returns whether the first of these settings is a number: torchrun also takes ``gpu`` and ``auto``."""
    stated = next((reading.stated[name] for name in names if name in reading.stated), None)
    return stated is not None and not stated.unknown and bool(read_digits(str(stated.value)))


def _count_nodes(reading: Reading) -> int:
    """Returns the nodes of torchrun or DeepSpeed; of an elastic range, the most."""
    stated = reading.take("launcher.nnodes", "launcher.num_nodes", decisive=False)
    last = str(stated.value).rpartition(":")[2] if stated is not None else ""
    return read_digits(last) or 1


def _count_devices(reading: Reading) -> int | None:
    """Returns the GPUs that a script names, or 1 for a program without a launcher; None: those of the machine."""
    launch = reading.file.launch
    included = reading.take("launcher.include", decisive=False)
    if included is not None:
        return sum(host.count(",") + 1 for host in str(included.value).split("@") if ":" in host) or None
    if launch is None:
        return None
    starts = {launcher.name for launcher in launch.launchers} & STARTERS
    visible = launch.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.unknown and visible.text.strip():
        count = visible.text.count(",") + 1
        if count > 1 and not starts and launch.entry.endswith(".py"):
            why = "one process copies the model to all GPUs (nn.DataParallel); a process for each is forecast"
            stated = Stated(visible.text, "CUDA_VISIBLE_DEVICES", launch.place)
            reading.approximate(stated, why, "the forecast is too fast")
        return count
    return None if starts or not launch.entry.endswith(".py") else 1


STARTERS = {
    *("accelerate launch", "torchrun", "deepspeed", "python -m torch.distributed.run", "srun", "mpirun"),
    "python -m torch.distributed.launch",
}
"""Launchers of several processes."""


def take_on(reading: Reading, *names: str) -> Stated | None:
    """Reads the first of these settings that is on: not null, not false. All of them count as understood."""
    stated = [entry for name in names if (entry := reading.take(name)) is not None]
    return next((entry for entry in stated if str(entry.value).lower() not in OFF and not is_null(entry.value)), None)


OFF = ("false", "0", "no")
"""Values of switches that are off."""
