"""nanotron: its YAML file, the Python file that writes it, and ``run_train.py --config-file`` in scripts.

Source: huggingface/nanotron @2411b022, src/nanotron/config (config.py, parallelism_config.py, models_config.py),
helpers.py (init_optimizer_and_grad_accumulator), parallel/context.py, nn/attention.py; examples/moe/moe.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.optimizers import set_optimizer
from meshcast.simulator.formats.launch.programs.recipes import follow_python
from meshcast.simulator.formats.launch.programs.trainer import set_recomputation
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    EITHER,
    LITTLE,
    LOADING,
    LONG,
    NAMES,
    OPTIMISATION,
    SAVING,
    START,
    list_verdicts,
)
from meshcast.simulator.formats.launch.python_text import Built, Named, OpenValue, Value
from meshcast.simulator.formats.launch.reading import Reading, set_gpus
from meshcast.simulator.formats.launch.table import ON, SettingRow, Stated, is_null, read_number
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence

SHAPE = "model.model_config"
"""The section of the model."""

ROWS = (
    SettingRow("tokens.micro_batch_size", "batch.micro"),
    SettingRow("tokens.batch_accumulation_per_replica", "batch.accumulated"),
    SettingRow("tokens.sequence_length", "batch.sequence"),
    SettingRow("tokens.train_steps", "run.steps"),
    SettingRow("parallelism.tp", "plan.tp"),
    SettingRow("parallelism.pp", "plan.pp"),
    SettingRow("parallelism.context_parallel_size", "plan.cp", silent=1),
    SettingRow(
        "parallelism.tp_mode",
        "plan.tensor",
        "text",
        {"all_reduce": "megatron", "reduce_scatter": "megatron-sp"},
        silent="megatron",
    ),
    SettingRow(
        "parallelism.tp_linear_async_communication", "framework.set.overlap.gradients", "switch", ON, silent=False
    ),
    SettingRow("parallelism.tp_recompute_allgather", "framework.set.regather", "switch", ON, silent=True),
    SettingRow("model.make_vocab_size_divisible_by", "framework.set.vocab_multiple", silent=1),
)

MODEL = (
    SettingRow(f"{SHAPE}.num_hidden_layers", "model.layers", silent=32),
    SettingRow(f"{SHAPE}.hidden_size", "model.hidden", silent=4096),
    SettingRow(f"{SHAPE}.num_attention_heads", "model.heads", silent=32),
    SettingRow(f"{SHAPE}.num_key_value_heads", "model.kv_heads"),
    SettingRow(f"{SHAPE}.intermediate_size", "model.ffn", silent=11008),
    SettingRow(f"{SHAPE}.vocab_size", "model.vocab", silent=32000),
    SettingRow(f"{SHAPE}.tie_word_embeddings", "model.tied", "switch", ON, silent=False),
    SettingRow(f"{SHAPE}.attention_bias", "model.qkv_bias", "switch", ON, silent=False),
    SettingRow(f"{SHAPE}.sliding_window_size", "model.window"),
)
"""The shape, with the defaults of LlamaConfig and Qwen2Config."""

MIXTURE = (
    SettingRow(f"{SHAPE}.moe_config.num_experts", "model.moe.experts", silent=8),
    SettingRow(f"{SHAPE}.moe_config.top_k", "model.moe.top_k", silent=2),
    SettingRow(f"{SHAPE}.moe_config.moe_intermediate_size", "model.moe.expert_ffn", silent=1408),
)
"""Experts of Qwen2Config."""

EXAMPLE_MIXTURE = (
    SettingRow(f"{SHAPE}.moe_num_experts", "model.moe.experts", silent=1),
    SettingRow(f"{SHAPE}.num_experts_per_tok", "model.moe.top_k", silent=1),
    SettingRow(f"{SHAPE}.intermediate_size", "model.moe.expert_ffn"),
    SettingRow(f"{SHAPE}.moe_capacity_factor", "model.moe.capacity", "number"),
)
"""Experts of LlaMoEConfig, of its examples."""

FORMATS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float": "fp32", "half": "fp16"}

SCHEDULES = {"afab": "gpipe", "1f1b": "1f1b"}

RINGS = {"llama3_ring_attention": "all-gather", "ring": "ring", "ring_flash_triton": "ring"}
"""How context ranks exchange keys and values, by ``_attn_implementation``: Llama 3's gathers those of all ranks."""

SECTIONS = ("model", "parallelism", "tokens")
"""Sections that every file of it has."""

FOLLOWED = "followed"
"""Name of the setting that names the YAML file whose settings are listed themselves."""

WRITES = "written_by"
"""Name of the setting for a Python file that the script runs first, and that writes the YAML file."""


# ------------------------------------------------------------------------------------------ reading


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a YAML or Python file, or of the YAML file that a command names."""
    if file.suffix == ".py":
        return _read_python(file)
    if file.launch is None:
        return flatten_file(file, example="parallelism:")
    arguments = dict(file.launch.arguments)
    config = arguments.get("config_file")
    settings = {
        f"{launcher.name}.{name}": stated
        for launcher in file.launch.launchers
        for name, stated in launcher.settings.items()
    }
    if config is None:
        return settings | arguments
    settings |= _find_writer(file, f"{Path(str(config.value)).stem}.py")
    companion = file.find_companion(str(config.value))
    if companion is None:
        return settings | arguments
    settings[FOLLOWED] = config
    return {**flatten_file(companion, example="parallelism:"), **settings}


def _find_writer(file: LaunchFile, name: str) -> dict[str, Stated]:
    """Returns a setting for the Python file of this name that a script runs, by which the configuration may be
    written."""
    commands = file.run.commands if file.run is not None else ()
    lines = [command.line for command in commands for word in command.words if Path(word.text).name == name]
    return {WRITES: Stated(name, name, f"{file.where}:{lines[0]}")} if lines else {}


def _read_python(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of the configuration that a Python file builds."""
    text = follow_python(file)
    built = next(
        (call for call in reversed(text.calls) if call.last_name == "Config" and SECTIONS[1] in call.fields), None
    )
    settings: dict[str, Stated] = {}
    for path, value, line in built.walk() if built is not None else ():
        place = f"{file.where}:{line}"
        if isinstance(value, OpenValue):
            settings[path] = Stated(value.text, path, place, (value.text,))
        elif _is_plain(value):
            settings[path] = Stated(value.name.rpartition(".")[2] if isinstance(value, Named) else value, path, place)
    shape: Any = built
    for name in SHAPE.split("."):
        shape = shape.fields.get(name) if isinstance(shape, Built) else None
    if isinstance(shape, Built):
        kind = f"is_{shape.last_name.removesuffix('Config').lower()}_config"
        settings[f"{SHAPE}.{kind}"] = Stated(True, shape.last_name, f"{file.where}:{shape.line}")
    return settings


def _is_plain(value: Value) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else not isinstance(value, Built | ast.FunctionDef)


# -------------------------------------------------------------------------------------- interpreting


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.set_key("framework.name", "nanotron")
    if (config := reading.take("config_file")) is not None:
        why = "it names the configuration, which says model and plan and is not beside the script"
        reading.ask(config, why, "model=llama3-8b", "plan.tp=1")
    reading.ignore(reading.take(FOLLOWED), "the settings of its file are listed")
    if (writer := reading.take(WRITES)) is not None:
        why = "the script runs it before the training, and it may write the configuration anew: name that file"
        reading.ask(writer, why, "--assume-defaults")
    reading.read_rows(ROWS)
    _read_model(reading)
    set_recomputation(reading, reading.take_switch("parallelism.recompute_layer"), "parallelism.recompute_layer")
    _read_degrees(reading)
    _read_states(reading)
    stated = reading.take("optimizer.optimizer_factory.name")
    if stated is not None and not is_null(stated.value):
        set_optimizer(reading, stated, str(stated.value).lower())
    every = reading.take_count("checkpoints.checkpoint_interval", decisive=False)
    reading.set_checkpoints(every, False, "checkpoints.checkpoint_interval")


def _read_model(reading: Reading) -> None:
    """Reads the shape of the model, and its family, which a switch of its configuration tells."""
    keys = reading.keys
    if not any(name.startswith(f"{SHAPE}.") for name in reading.stated):
        return
    reading.read_rows(MODEL)
    if reading.take_switch(f"{SHAPE}.is_starcoder2_config"):
        why = "meshcast does not read the shape of StarCoder2: give the model"
        reading.ask(reading.take(f"{SHAPE}.is_starcoder2_config"), why, "model=llama3-8b")
    is_example = reading.take_switch(f"{SHAPE}.is_llamoe_config")
    kinds = [f"{SHAPE}.is_{kind}_config" for kind in ("llama", "qwen2", "llamoe")]
    for name in kinds:
        reading.take(name)
    # Of hidden_act the models have SwiGLU alone; the experts of the example have GELU.
    reading.set_key("model.gated", not is_example, *kinds, f"{SHAPE}.hidden_act")
    for key, value in (("positions", "rope"), ("norm", "rmsnorm"), ("dropout", 0.0)):
        reading.set_key(f"model.{key}", value)
    if "batch.sequence" in keys:
        reading.set_key("model.seq", keys["batch.sequence"], "tokens.sequence_length")
    if any(name.startswith(f"{SHAPE}.moe_config.") for name in reading.stated):
        reading.read_rows(MIXTURE)
        _read_shared_experts(reading)
    elif is_example:
        reading.read_rows(EXAMPLE_MIXTURE)
        reading.set_key("model.moe.expert_ffn", keys["model.ffn"], f"{SHAPE}.intermediate_size")


def _read_shared_experts(reading: Reading) -> None:
    """Reads a shared expert, and which layers have experts."""
    if reading.take_switch(f"{SHAPE}.moe_config.enable_shared_expert"):
        width = reading.take_count(f"{SHAPE}.moe_config.shared_expert_intermediate_size") or 5632
        reading.set_key("model.moe.shared_experts", 1, f"{SHAPE}.moe_config.enable_shared_expert")
        reading.set_key("model.moe.shared_ffn", width, f"{SHAPE}.moe_config.shared_expert_intermediate_size")
    layers = reading.take(f"{SHAPE}.moe_config.layers")
    numbers = layers.value if layers is not None else None
    every = [[-1], list(range(reading.keys["model.layers"]))]
    if layers is not None and isinstance(numbers, list) and numbers not in every:
        reading.ask(layers, "experts of some layers alone are not read from it: give the model", "model=llama3-8b")


def _read_degrees(reading: Reading) -> None:
    """Reads the data-parallel ranks and what else divides the work: all degrees together are the GPUs."""
    keys = reading.keys
    replicas, experts = (
        reading.take_count("parallelism.dp"),
        reading.take_count("parallelism.expert_parallel_size") or 1,
    )
    names = "parallelism.dp", "parallelism.expert_parallel_size"
    if replicas is not None:
        reading.set_key("plan.dp", replicas * experts, *names)
        ranks = replicas * experts * keys.get("plan.tp", 1) * keys.get("plan.pp", 1) * keys["plan.cp"]
        reading.set_key("cluster.gpus", ranks, *names, "parallelism.tp", "parallelism.pp")
    else:
        _read_processes(reading)
    reading.set_key("plan.ep", experts, names[1])
    if experts > 1:
        why = "ranks of a group of experts share the samples of one data-parallel rank; each is forecast with its own"
        reading.approximate(reading.take(names[1]), why, "the forecast has more tokens in a step")
        word = reading.take_word(f"{SHAPE}.moe_config.token_dispatcher_type")
        scheme = "all-gather-dispatch" if word == "allgather" else "all-to-all"
        reading.set_key("plan.expert", scheme, f"{SHAPE}.moe_config.token_dispatcher_type")
        reading.set_key("plan.etp", keys.get("plan.tp", 1))
    if keys.get("plan.pp", 1) > 1:
        word = reading.take_word("parallelism.pp_engine") or "afab"
        if word not in SCHEDULES:
            reading.ask(
                reading.take("parallelism.pp_engine"), f"{word!r} is neither afab nor 1f1b", "plan.schedule=1f1b"
            )
        reading.set_key("plan.pipeline", SCHEDULES.get(word, "1f1b"), "parallelism.pp_engine")
    _read_attention(reading)


def _read_processes(reading: Reading) -> None:
    """Reads the GPUs of the launcher, where the configuration is not here."""
    each, nodes = reading.take_count("torchrun.nproc_per_node"), reading.take_count("torchrun.nnodes")
    if each:
        set_gpus(reading, nodes, each, "torchrun.nproc_per_node", "torchrun.nnodes")


def _read_attention(reading: Reading) -> None:
    """Reads the kernels of attention, which say how context ranks exchange keys and values."""
    name = f"{SHAPE}._attn_implementation"
    word = reading.take_word(name) or "flash_attention_2"
    if word == "sdpa":
        reading.set_key("framework.set.attention_library", "sdpa", name)
    elif word == "flex_attention":
        reading.approximate(reading.take(name), "FlashAttention-2 is forecast in place of FlexAttention", EITHER)
    elif word == "flash_attention_2":
        reading.take(name)
    if reading.keys["plan.cp"] > 1:
        reading.set_key("plan.sequence", RINGS.get(word, "ring"), name, "parallelism.context_parallel_size")


def _read_states(reading: Reading) -> None:
    """Reads what data-parallel ranks share out, and the formats of weights, gradients and moments."""
    stage = reading.take("optimizer.zero_stage")
    shards = stage is not None and not is_null(stage.value) and read_number(stage) > 0
    reading.set_key("plan.data", "zero-1" if shards else "ddp", "optimizer.zero_stage")
    word = reading.take_word("model.dtype").removeprefix("torch.") or "bfloat16"
    if word not in FORMATS:
        reading.ask(reading.take("model.dtype"), f"understood are {', '.join(FORMATS)}", "precision.compute=bf16")
    compute = FORMATS.get(word, "bf16")
    reading.set_key("precision.compute", compute, "model.dtype")
    accumulates = reading.take_switch("optimizer.accumulate_grad_in_fp32")
    for key in ("gradients", "main_weights", "moments"):
        reading.set_key(f"precision.{key}", "fp32" if accumulates else compute, "optimizer.accumulate_grad_in_fp32")
    if mebibytes := reading.take_count("model.ddp_bucket_cap_mb"):
        reading.set_key("framework.set.bucket.elements", mebibytes * 2**19, "model.ddp_bucket_cap_mb")


VERDICTS = list_verdicts(
    ("general* logging* metrics_logging* profiler* s3_upload* lighteval*", NAMES),
    ("checkpoints*", SAVING),
    ("tokens.val_check_interval tokens.limit_*", NoInfluence("nothing calls DistributedTrainer.validation_step")),
    ("data_stages* tokenizer*", DATA),
    ("optimizer.*", OPTIMISATION),
    ("model.init_method* experimental_*", LOADING),
    ("torchrun.* *.nodes *.gres *.job_name *.qos *.output *.error", START),
    (
        f"{SHAPE}._use_doc_masking",
        Approximation("attention over whole sequences is forecast: state batch.documents", LONG),
    ),
    (f"{SHAPE}.no_rope_layer", Approximation("every layer is forecast with rotary positions", LITTLE)),
    (f"{SHAPE}.z_loss_enabled", Approximation("the loss is forecast without its square of the logarithm", LITTLE)),
    (f"{SHAPE}._fused* {SHAPE}._use_qkv_packed", Approximation("kernels are those of the profile", EITHER)),
    (
        f"{SHAPE}.*_token_id {SHAPE}.initializer_range {SHAPE}.max_position_embeddings {SHAPE}.pretraining_tp"
        f" {SHAPE}.rms_norm_eps {SHAPE}.rope_* {SHAPE}.use_cache {SHAPE}.z_loss* {SHAPE}.log_attn_probs"
        f" {SHAPE}.flex_attention_mask {SHAPE}.ring_attn_heads_k_stride {SHAPE}.moe_config.router_aux_loss_coef"
        f" {SHAPE}.*_config {SHAPE}.hidden_act",
        NoInfluence("it changes values, not the work of a step"),
    ),
    ("parallelism.pp_engine", NoInfluence("there is one stage")),
    (f"{SHAPE}.*", Decision("it changes the model", ("model=llama3-8b",))),
)


def recognise(file: LaunchFile) -> Evidence:
    """Recognises the sections of a configuration, a Python file that builds it, or a command with it."""
    if file.launch is not None:
        config = file.launch.arguments.get("config_file")
        companion = file.find_companion(str(config.value)) if config is not None else None
        if companion is not None and _has_sections(companion):
            return Evidence.CERTAIN
        return Evidence.LIKELY if config is not None and file.launch.entry.endswith("run_train.py") else Evidence.NONE
    if file.suffix == ".py":
        builds = (
            re.search(r"^[ \t]*(from|import) nanotron\b", file.text, re.MULTILINE) and "ParallelismArgs" in file.text
        )
        return Evidence.CERTAIN if builds else Evidence.NONE
    return Evidence.CERTAIN if _has_sections(file) else Evidence.NONE


def _has_sections(file: LaunchFile) -> bool:
    """Returns whether a file has the sections of a configuration."""
    if not isinstance(file.data, Mapping) or not set(SECTIONS) <= file.keys:
        return False
    model, parallelism = file.data["model"], file.data["parallelism"]
    return isinstance(model, Mapping) and isinstance(parallelism, Mapping) and {"dp", "tp", "pp"} <= parallelism.keys()


NANOTRON = LaunchFormat("nanotron", "nanotron", ".yaml", recognise, read, interpret, None, VERDICTS)
