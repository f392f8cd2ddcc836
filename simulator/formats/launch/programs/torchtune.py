"""torchtune: recipe configurations in YAML, and ``tune run RECIPE --config NAME key=value`` in scripts.

The recipe is a word of the command; a configuration names it in the comment above its keys alone.

Source: pytorch/torchtune @bd2a0fc7, recipes/full_finetune_distributed.py, full_finetune_single_device.py,
lora_finetune_*.py, full_dpo_distributed.py, torchtune/_recipe_registry.py, models/*/_model_builders.py,
training/_distributed.py (shard_model), training/_activation_offloading.py, modules/loss/cross_entropy_loss.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshcast.hardware.documents.input_file import split_lines
from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.flat_settings import flatten_file
from meshcast.simulator.formats.launch.keys import flatten_model
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.evaluations import EvaluationSettings, read_evaluation
from meshcast.simulator.formats.launch.programs.nemo import read_overrides
from meshcast.simulator.formats.launch.programs.optimizers import set_optimizer
from meshcast.simulator.formats.launch.programs.policies import shard
from meshcast.simulator.formats.launch.programs.sharding import set_replicas
from meshcast.simulator.formats.launch.programs.trainer import (
    chunk_logits,
    double_samples,
    offload_checkpoints,
    set_adapter_dropout,
    set_chunked_loss,
    set_quantised_weights,
    set_recomputation,
    set_reference,
    set_targets,
    take_on,
)
from meshcast.simulator.formats.launch.programs.trainer_settings import (
    DATA,
    EITHER,
    EVALUATION,
    LENGTH,
    LITTLE,
    LOADING,
    NAMES,
    OPTIMISATION,
    PADDING,
    SAVING,
    SHORT,
    START,
    list_verdicts,
)
from meshcast.simulator.formats.launch.reading import Reading, set_gpus
from meshcast.simulator.formats.launch.references import fill_references
from meshcast.simulator.formats.launch.table import SettingRow, Stated, is_null, read_number, read_words
from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence
from meshcast.simulator.models.load import load_model

LLAMA = {"gated": True, "positions": "rope", "tied": False, "norm": "rmsnorm"}
"""What models like Llama have in common."""

BUILDERS: Mapping[str, Any] = {
    **{"llama2_7b": "llama2-7b", "llama2_13b": "llama2-13b", "llama2_70b": "llama2-70b"},
    **{"llama3_8b": "llama3-8b", "llama3_70b": "llama3-70b"},
    **{"llama3_1_8b": "llama3-8b", "llama3_1_70b": "llama3-70b", "llama3_1_405b": "llama3-405b"},
    **{"llama3_2_1b": "llama3.2-1b", "llama3_2_3b": "llama3.2-3b", "llama3_3_70b": "llama3-70b"},
    **{"llama4_scout_17b_16e": "llama4-scout"},
    **{"gemma_2b": "gemma-2b", "gemma_7b": "gemma-7b"},
    "mistral_7b": {"preset": "mistral-7b", "window": None},
    "phi3_mini": {**LLAMA, "layers": 32, "hidden": 3072, "heads": 32, "ffn": 8192, "vocab": 32064, "seq": 4096},
    "phi4_14b": {
        **{**LLAMA, "layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 10, "ffn": 17920},
        **{"vocab": 100352, "seq": 16384},
    },
    **{f"qwen2_{size}b": f"qwen2-{size.replace('_', '.')}b" for size in ("0_5", "1_5", "7")},
    **{f"qwen2_5_{size}b": f"qwen2-{size.replace('_', '.')}b" for size in ("0_5", "1_5", "7", "72")},
    **{f"qwen2_5_{size}b": f"qwen2.5-{size}b" for size in ("3", "14", "32")},
    **{f"qwen3_{size}b": f"qwen3-{size.replace('_', '.')}b" for size in ("0_6", "1_7", "4", "8", "14", "32")},
}
"""Models by the functions that build them, without what is around the size. Its Mistral has no window."""

BUILDER = re.compile(r"(?P<adapter>q?lora_)?(?P<model>\w+?)(_base|_instruct)?")

RECIPES = re.compile(
    r"\b((?:dev/)?(?:async_)?(?:ppo_|grpo_)full_finetune_\w+|full_finetune_\w+|lora_finetune_\w+|full_dpo_\w+|lora_dpo_\w+"
    r"|qat_lora_finetune_\w+|qat_distributed|qat_single_device|knowledge_distillation_\w+|eleuther_eval|generate|quantize)\b"
)
"""Names of recipes in a text."""

GENERATION = re.compile(r"ppo|grpo")
"""Recipes that generate between their steps."""

FOLLOWED = "followed"
"""Name of the setting that names the configuration whose settings are listed themselves."""

WITHOUT_TRAINING = ("eleuther_eval", "generate", "quantize")
"""Recipes that evaluate or convert a model."""

ROWS = (
    SettingRow("batch_size", "batch.micro"),
    SettingRow("gradient_accumulation_steps", "batch.accumulated", silent=1),
    SettingRow("tensor_parallel_dim", "plan.tp", silent=1),
    SettingRow("context_parallel_dim", "plan.cp", silent=1),
)

FORMATS = {"bf16": "bf16", "fp32": "fp32"}
"""Formats of ``dtype``; the recipes stop at fp16."""

# ------------------------------------------------------------------------------------------ reading


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a configuration, or of that which a command names, with the overrides behind it."""
    if file.launch is None:
        words = [Stated(word, word, "--args") for word in file.options.arguments]
        return _override({**_read_comment(file), **flatten_file(file, example="model:")}, read_overrides(words))
    launch = file.launch
    settings = {name: stated for launcher in launch.launchers for name, stated in launcher.settings.items()}
    settings = {name: stated for name, stated in settings.items() if name in ("nnodes", "nproc_per_node")}
    settings["recipe"] = Stated(launch.entry.rpartition(" ")[2], "recipe", launch.place)
    config = launch.arguments.get("config")
    companion = _find_configuration(file, str(config.value)) if config is not None else None
    if companion is not None:
        settings = {**flatten_file(companion, example="model:"), **settings}
    if config is not None:
        settings["config" if companion is None else FOLLOWED] = config
    return _override(settings, read_overrides(launch.positional))


def _find_configuration(script: LaunchFile, name: str) -> LaunchFile | None:
    """Returns the configuration of a name: a path, or a name of torchtune's, which lie in ``recipes/configs``."""
    plain = re.sub(r"\.ya?ml$", "", name)
    paths = (name, f"{plain}.yaml", f"configs/{plain}.yaml", f"recipes/configs/{plain}.yaml")
    return next((file for path in paths if (file := script.find_companion(path)) is not None), None)


def _override(settings: Mapping[str, Stated], overrides: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings with those of the command line; a component may be named by its section alone."""
    named = {
        f"{name}._component_" if f"{name}._component_" in settings else name: stated
        for name, stated in overrides.items()
    }
    return fill_references({**settings, **named})


def _read_comment(file: LaunchFile) -> dict[str, Stated]:
    """Reads the recipe and the number of processes of the command that a comment of a configuration shows."""
    settings: dict[str, Stated] = {}
    comments = [
        (number, line) for number, line in enumerate(split_lines(file.text), 1) if line.lstrip().startswith("#")
    ]
    for number, line in sorted(comments, key=lambda entry: "tune run" not in entry[1]):
        place = f"{file.where}:{number}"
        if "recipe" not in settings and (named := RECIPES.search(line)) is not None:
            settings["recipe"] = Stated(named[1], "recipe of the comment", place)
        if "tune run" in line:
            for name in ("nnodes", "nproc_per_node"):
                if (count := re.search(rf"--{name}[= ](\d{{1,6}})\b", line)) is not None:
                    settings.setdefault(name, Stated(count[1], f"--{name} of the comment", place))
    return settings


# -------------------------------------------------------------------------------------- interpreting


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    recipe = reading.take_word("recipe").removesuffix(".py")
    if GENERATION.search(recipe):
        rule = f"it starts {recipe}, reinforcement learning with generation inside the training loop"
        raise PlanError(reading.file.where, rule, "Write its step of training as a job: see meshcast init")
    if recipe in WITHOUT_TRAINING:
        raise PlanError(reading.file.where, f"it starts {recipe}, which does not train", "Name the file of a training")
    reading.ignore(reading.take(FOLLOWED), "the settings of its file are listed")
    if (config := reading.take("config")) is not None:
        why = "it names a configuration, which says model and plan and is not beside the script"
        reading.ask(config, why, "model=llama3-8b")
    reading.set_key("framework.name", "torchtune")
    _read_model(reading)
    reading.read_rows(ROWS)
    _read_processes(reading, recipe)
    _read_sharding(reading, recipe)
    _read_sequence(reading)
    _read_precision(reading)
    _read_memory(reading)
    _read_update(reading)
    _read_kernels(reading)
    _read_further_models(reading, recipe)
    _read_saving(reading)
    every = reading.take("run_val_every_n_steps", decisive=False)
    runs = every is not None and not is_null(every.value)  # batch_size_val is batch_size without a word
    read_evaluation(reading, EvaluationSettings(("batch_size_val",)), runs, "run_val_every_n_steps")


def _read_model(reading: Reading) -> None:
    """Reads the model, and whether adapters alone are trained, by the function that builds it."""
    stated = reading.take("model._component_")
    name = str(stated.value).rpartition(".")[2] if stated is not None else ""
    match = BUILDER.fullmatch(name)
    adapter, plain = (match["adapter"] or "", match["model"]) if match is not None else ("", name)
    preset = BUILDERS.get(plain)
    if "model.layers" not in reading.keys and preset is not None:
        reading.set_key("model.preset", preset, "model._component_")
        reading.keys |= flatten_model(load_model(preset))
    elif "model.layers" not in reading.keys and stated is not None:
        why = f"meshcast has no preset of the model that {name} builds: give one, or a config.json"
        reading.ask(stated, why, "model=llama3-8b", "model=config.json")
    if not adapter:
        reading.set_key("train.mode", "full", "model._component_")
        return
    _read_adapters(reading)
    if (quantised := take_on(reading, "model.quantize_base")) is not None or adapter == "qlora_":
        set_quantised_weights(reading, 4, quantised or stated)


def _read_adapters(reading: Reading) -> None:
    """Reads which linear layers have adapters, and their rank."""
    reading.set_key("train.mode", "lora", "model._component_")
    reading.set_key("train.rank", reading.take_count("model.lora_rank") or 8, "model.lora_rank")
    set_adapter_dropout(reading)
    names = ["model.lora_attn_modules", *(["model.apply_lora_to_mlp"] if take_on(reading, MLP) is not None else [])]
    stated = reading.take(names[0])
    words = ["o_proj" if word == "output_proj" else word for word in read_words(stated)] if stated is not None else []
    words += ["gate_proj", "down_proj"] if len(names) > 1 else []
    set_targets(reading, words, stated, *names)
    why = "the adapter of the output layer is left out"
    reading.approximate(take_on(reading, "model.apply_lora_to_output"), why, LITTLE)
    why = "the magnitudes of DoRA are left out: adapters are forecast as plain LoRA"
    reading.approximate(take_on(reading, "model.use_dora"), why, SHORT)


MLP = "model.apply_lora_to_mlp"


def _read_processes(reading: Reading, recipe: str) -> None:
    """Reads the number of GPUs: 1, or those of the launcher."""
    each, nodes = reading.take_count("nproc_per_node"), reading.take_count("nnodes")
    if recipe.endswith("single_device"):
        reading.set_key("cluster.gpus", 1, "recipe")
    elif each:
        set_gpus(reading, nodes, each, "nproc_per_node", "nnodes")


def _read_sharding(reading: Reading, recipe: str) -> None:
    """Reads the mesh: a single GPU, or FSDP over what the other degrees leave."""
    if recipe.endswith("single_device"):
        reading.set_key("plan.data", "ddp", "recipe")
        return
    if not recipe:
        why = "the command names the recipe, which runs on one GPU or shards over several, and no comment shows it"
        reading.ask(None, why, "plan.fsdp=true", "plan.fsdp=false")
    shard(reading, "recipe")
    if take_on(reading, "fsdp_cpu_offload") is not None:
        reading.set_key("plan.data.offload", True, "fsdp_cpu_offload")
    reshards = reading.take("fsdp_reshard_after_forward")
    reading.set_key("plan.data.reshard", reshards is None or reading.take_switch("fsdp_reshard_after_forward"))
    copies = reading.take_count("data_parallel_replicate_dim") or 1
    stated = reading.take("data_parallel_shard_dim")
    shards = -1 if stated is None or is_null(stated.value) else read_number(stated)
    if shards > 0:
        set_replicas(reading, copies, int(shards), ("data_parallel_replicate_dim",), ("data_parallel_shard_dim",))
    else:
        reading.set_key("plan.replicate", copies, "data_parallel_replicate_dim")
        reading.ignore(stated, "all ranks that the other degrees leave share out the states")
    layers = reading.take("custom_sharded_layers")
    apart = layers is not None and not is_null(layers.value) and bool(read_words(layers))
    reading.set_key("framework.set.root_stays_gathered", not apart, "custom_sharded_layers")
    if reading.keys["plan.tp"] > 1:
        reading.take("tensor_parallel_plan._component_")
        reading.set_key("plan.tensor", "megatron-sp", "tensor_parallel_plan._component_")
    if reading.keys["plan.cp"] > 1:
        method = "context_parallel_rotate_method"
        reading.set_key("plan.sequence", "ring" if reading.take_word(method) == "alltoall" else "all-gather", method)


def _read_sequence(reading: Reading) -> None:
    """Reads the length of sequences. Without a longest sequence they are as long as the samples."""
    names = "tokenizer.max_seq_len", "dataset.max_seq_len"
    length = reading.take_count(*names)
    packed = take_on(reading, "dataset.packed")
    if length:
        reading.set_key("batch.sequence", length, *names)
    else:
        why = "no longest sequence is set: each micro-batch is as long as its longest sample"
        reading.ask_key("batch.sequence", 2048, why, reading.take(*names))
    if packed is not None:
        why = "packed samples are forecast as one sequence: state batch.documents"
        reading.approximate(packed, why, "the time of attention is too long")
    elif length:
        reading.approximate(reading.take(*names), f"{PADDING.why}", PADDING.errs)


def _read_precision(reading: Reading) -> None:
    """Reads the single format of weights, gradients and moments, and the recipe of products in 8 bits."""
    word = reading.take_word("dtype") or "bf16"
    if word not in FORMATS:
        reading.ask(
            reading.take("dtype"), f"the recipes train in bf16 or fp32, not in {word}", "precision.compute=bf16"
        )
    for key in ("compute", "gradients", "main_weights", "moments"):
        reading.set_key(f"precision.{key}", FORMATS.get(word, "bf16"), "dtype")
    if (stated := take_on(reading, "enable_fp8_training")) is not None:
        recipe = reading.take_word("fp8_recipe_name")
        names = "enable_fp8_training", "fp8_recipe_name"
        reading.set_key("precision.compute", "fp8-rowwise" if "rowwise" in recipe else "fp8-tensorwise", *names)
        reading.approximate(stated, "weights are gathered in 16 bits", "the step is too long")


def _read_memory(reading: Reading) -> None:
    """Reads which activations are recomputed or offloaded, as ``_setup_model`` does: with both settings of
    checkpointing neither acts."""
    switch = take_on(reading, "enable_activation_checkpointing")
    mode, option = reading.take_word("ac_mode"), reading.take_word("ac_option")
    names = "enable_activation_checkpointing", "ac_mode"
    if switch is not None:
        set_recomputation(reading, not mode, *names)
    elif mode == "full" or (mode == "selective" and read_digits(option) is not None):
        set_recomputation(reading, True, "ac_mode")
        if mode == "selective" and (layers := reading.keys.get("model.layers")):
            reading.set_key("plan.recompute.layers", max(1, layers // max(1, read_digits(option) or 0)), "ac_option")
    elif mode:
        why = "it saves the results of some operators, and recomputes the others"
        reading.ask(reading.take("ac_mode"), why, "plan.recompute=full", "plan.recompute=selective")
    else:
        set_recomputation(reading, False, names[0])
    if take_on(reading, "enable_activation_offloading") is not None:
        offload_checkpoints(reading, "enable_activation_offloading")


def _read_update(reading: Reading) -> None:
    """Reads the optimizer, and whether gradients are kept up to the update."""
    stated = reading.take("optimizer._component_")
    if stated is not None and not is_null(stated.value):
        word = str(stated.value).rpartition(".")[2].lower()
        set_optimizer(reading, stated, {"pagedadamw": "paged_adamw", "adam": "adamw"}.get(word, word))
    if (stated := take_on(reading, "optimizer_in_bwd")) is not None:
        why = "all gradients are forecast as kept up to the update, and each is updated and freed in the backward pass"
        reading.approximate(stated, why, "the forecast needs more memory, by the gradients")


def _read_kernels(reading: Reading) -> None:
    """Reads compilation, and a loss over chunks of the tokens."""
    switch = take_on(reading, "compile.model") if "compile.model" in reading.stated else take_on(reading, "compile")
    is_on = switch is not None or (
        "compile.model" not in reading.stated and any(name.startswith("compile.") for name in reading.stated)
    )
    reading.set_key("framework.set.compile", is_on, "compile", "compile.model")
    loss = reading.take("loss._component_")
    if loss is not None and re.search(r"Chunked|LinearCrossEntropy", str(loss.value)):
        chunks = reading.take_count("loss.num_output_chunks") or 8
        compiled = (is_on and "compile.loss" not in reading.stated) or take_on(reading, "compile.loss") is not None
        set_chunked_loss(reading, chunk_logits(chunks, compiled), "loss._component_", "loss.num_output_chunks")
    else:
        reading.ignore(loss, "the loss has the kernels of the profile")


def _read_further_models(reading: Reading, recipe: str) -> None:
    """Reads what preference pairs, a teacher and simulated quantisation add to a step."""
    stated = reading.take("recipe")
    if "dpo" in recipe:
        double_samples(reading, stated)
        set_reference(reading, stated)
    elif "knowledge_distillation" in recipe:
        why = "the teacher is left out: its weights, and its forward pass over the batch"
        reading.approximate(stated, why, "the step is too short, and the memory too small by the teacher's weights")
        reading.take("teacher_model._component_")
    elif "qat" in recipe:
        reading.approximate(stated, "the kernels that simulate quantised weights are left out", SHORT)


def _read_saving(reading: Reading) -> None:
    every = reading.take_count("save_every_n_steps", decisive=False)
    reading.set_checkpoints(every, reading.take_switch("enable_async_checkpointing"), "save_every_n_steps")


VERDICTS = list_verdicts(
    ("output_dir metric_logger* log_* profiler*", NAMES),
    ("*checkpointer* resume_from_checkpoint save_* use_distributed_state_dict", SAVING),
    ("tokenizer* dataset* collate_fn shuffle dataloader* datasets", DATA),
    ("*_val dataset_val*", EVALUATION),
    ("epochs max_steps_per_epoch total_epochs", LENGTH),
    ("seed device cudnn_deterministic_mode nnodes nproc_per_node", START),
    ("low_cpu_ram base_model_path", LOADING),
    (
        "optimizer.* lr_scheduler* clip_grad_norm loss* model.lora_alpha model.lora_dropout kd_* fake_quant*",
        OPTIMISATION,
    ),
    ("compile.*", NoInfluence("the profile of a compiler has its defaults")),
    ("teacher_model* quantizer*", NoInfluence("the recipe says what it adds")),
    ("tensor_parallel_plan*", NoInfluence("tensor_parallel_dim says how many ranks there are")),
    ("activation_offloading_use_streams", Approximation("copies to and from the host overlap", EITHER)),
    ("resize_token_embeddings", Approximation("the vocabulary of the model is forecast", LITTLE)),
    ("memory_efficient_fsdp_wrap", Approximation("units of sharding are forecast as the layers", LITTLE)),
    ("model.*", Decision("it changes the model that the function builds", ("model=llama3-8b",))),
    ("fsdp.cpu_offload", Decision("releases of 2024 read it, those behind them do not", ("plan.offload=[optimizer]",))),
)


def recognise(file: LaunchFile) -> Evidence:
    """Its command, or components of it in a configuration."""
    if file.launch is not None:
        return Evidence.CERTAIN if file.launch.entry.startswith("tune run") else Evidence.NONE
    sections = file.data.values() if isinstance(file.data, Mapping) else ()
    components = [str(inner.get("_component_", "")) for inner in sections if isinstance(inner, Mapping)]
    return Evidence.CERTAIN if any(name.startswith("torchtune.") for name in components) else Evidence.NONE


TORCHTUNE = LaunchFormat("torchtune", "torchtune", ".yaml", recognise, read, interpret, None, VERDICTS)
