"""NeMo: YAML files of NeMo 1, and recipes of NeMo 2 by name, in Python files or commands that change them.

Source: NVIDIA/NeMo-Framework-Launcher @26e42fa9, launcher_scripts/conf/training; NVIDIA/NeMo @8cfedd7203,
nemo/collections/llm/recipes, nemo/lightning/pytorch/strategies/megatron_strategy.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.flat_settings import flatten_settings
from meshcast.simulator.formats.launch.keys import drop_inactive
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.launches import Launch
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.cuda_graphs import NAMES, read_graphs, write_graphs
from meshcast.simulator.formats.launch.programs.evaluations import EvaluationSettings, has_any, read_evaluation
from meshcast.simulator.formats.launch.programs.megatron_model import (
    CONFIGURATION,
    EXPERTS,
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
    GROUPS,
    read_fp8_attention,
    read_gathers,
    read_loss,
    read_optimizer_kind,
    read_plan,
    read_recipe,
    write_plan,
)
from meshcast.simulator.formats.launch.programs.megatron_verdicts import FAST, SLOW, judge
from meshcast.simulator.formats.launch.programs.megatron_verdicts import VERDICTS as MEGATRON_VERDICTS
from meshcast.simulator.formats.launch.programs.recipes import (
    CHANGED,
    UNTUNED,
    ask_about_changes,
    ask_for_function,
    find_function,
    follow_python,
    list_changes,
    list_defaults,
    list_functions,
    load_recipes,
    name_functions,
    read_options,
    read_python_settings,
)
from meshcast.simulator.formats.launch.programs.trainer import set_targets
from meshcast.simulator.formats.launch.python_text import Built, PythonText, Value
from meshcast.simulator.formats.launch.reading import Reading, set_gpus
from meshcast.simulator.formats.launch.table import (
    ON,
    UNSTATED,
    Keys,
    SettingRow,
    Stated,
    is_null,
    read_switch,
    read_words,
    write_rows,
)
from meshcast.simulator.formats.launch.verdicts import Approximation, NoInfluence, Verdicts
from meshcast.simulator.models.adapter_targets import DOWNS, PARTS, UPS

SECTIONS = [
    *("model", "model.config", "model.optim", "model.data", "train", "training", "ddp", "trainer", "model.arguments"),
    *("trainer.strategy", "trainer.strategy.ddp", "optim", "optim.config", "optimizer", "data", "dataset"),
    *("comm_overlap", "dist", "mixed_precision", "trainer.plugins", "model.config.optim", "trainer.strategy.fsdp"),
]
"""Sections whose settings are known by their names alone."""

EVALUATION = EvaluationSettings(("validation.eval_micro_batch_size", "model.data.validation_ds.micro_batch_size"))
"""Of Megatron-Bridge (training/config.py, ``validation``), and of a fine-tuning with NeMo 1; those of training without
a word, as all of NeMo 2 are."""

SAMPLES = "model.data.train_ds.max_seq_length"
"""Setting of the longest sample of a fine-tuning with NeMo 1."""

PLAIN = {
    **{f"{section}optim.name": "optim.name" for section in ("", "model.")},
    **{"name": "name", "dataset.sequence_length": "seq_length", SAMPLES: "seq_length"},
}
"""Plain names of settings whose names say less, or something else in another section."""

OWN = (
    SettingRow("overlap_grad_reduce", "framework.set.overlap.dp", "switch", ON),
    SettingRow("overlap_grad_sync", "framework.set.overlap.dp", "switch", ON),
    SettingRow("overlap_param_gather", "framework.set.overlap.updated_weights", "switch", ON),
    SettingRow("overlap_param_sync", "framework.set.overlap.updated_weights", "switch", ON),
    SettingRow("tp_comm_overlap", "framework.set.overlap.tp", "switch", ON),
    SettingRow("ub_tp_comm_overlap", "framework.set.overlap.tp", "switch", ON),
    SettingRow("apply_rope_fusion", "framework.set.eager.rope.fused", "switch", ON),
    SettingRow("moe_router_fusion", "framework.set.eager.router.fused", "switch", ON),
    SettingRow("make_vocab_size_divisible_by", "framework.set.vocab_multiple"),
    SettingRow("gradient_accumulation_fusion", "framework.set.fused_gradients", "switch", ON),
    SettingRow("use_flash_attention", "framework.set.attention", "switch", {True: "flash", False: "unfused"}),
    SettingRow(
        "attention_backend",
        "framework.set.attention",
        "text",
        {"flash": "flash", "unfused": "unfused", "local": "unfused", "fused": "flash"},
    ),
    SettingRow("encoder_seq_length", "batch.sequence"),
    SettingRow("rotary_percentage", "model.rope_share", "number"),
    SettingRow("max_steps", "run.steps"),
)

RECIPES = {
    **{"bf16_mixed": "bf16", "fp16_mixed": "fp16", "bf16_with_fp8_delayed_scaling_mixed": "fp8-delayed"},
    **{"bf16_with_fp8_current_scaling_mixed": "fp8-tensorwise", "bf16_with_mxfp8_mixed": "mxfp8"},
    **{"bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise", "bf16_with_nvfp4_mixed": "nvfp4"},
    **{"bf16_with_fp8_mixed": "fp8-delayed", "nemotron_h_bf16_with_fp8_current_scaling_mixed": "fp8-tensorwise"},
    **{"nanov2_bf16_with_fp8_current_scaling_mixed": "fp8-blockwise"},
    **{"nemotron_3_super_bf16_with_nvfp4_mixed": "nvfp4", "fp16_with_fp8_delayed_scaling_mixed": "fp8-delayed"},
    **{"fp16_with_mxfp8_mixed": "mxfp8", "fp16_with_fp8_current_scaling_mixed": "fp8-tensorwise"},
    **{"fp16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise"},
}
"""Compute formats by the names of mixed-precision recipes of NeMo 2 and Megatron-Bridge."""

PRECISIONS = {
    "bf16": "bf16",
    "16": "fp16",
    "fp16": "fp16",
    "32": "fp32",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "32-true": "fp32",
}
"""Formats by ``trainer.precision``."""

FUSIONS = ("bias_activation_fusion", "bias_dropout_add_fusion", "masked_softmax_fusion")
"""Fusions that are on by default."""

FUSES_ROPE = ("llama", "nemotron")
"""Families of models whose rotary embedding Megatron-Bridge fuses in recipes that nobody tuned, too (@067f987df,
src/megatron/bridge/models/llama/llama_bridge.py, nemotron/nemotron_bridge.py: apply_rope_fusion; the default
of Megatron-Core is off, megatron/core/transformer/transformer_config.py)."""

SAMPLE_TOKENS = {"squad": 200, "tulu3": 370}
"""Tokens of a packed sample, by the data.

Recipes train on SQuAD: 8 packs of 2,048 (NeMo, recipes/finetune_default.py) to 4,096 tokens (Megatron-Bridge v0.4.0,
recipes/llama/llama3.py) are 128 samples, 128 to 256 tokens each; a paragraph of 120 words and a question are 200.
Tulu 3, a mixture of instructions: 345, 379 and 392, by the samples of a pack in three cards of Megatron-Bridge
(@067f987df, examples/model_verification_cards: glm5-2, moonlight-16b-a3b, gpt-oss-20b)."""

DATA = re.compile(r"paths|data_prefix|dataset_root|(.*\.)?file_names")
"""Settings that name data, of NeMo 1 and of modules of data of NeMo 2."""

DECISIVE = {
    "tensor_model_parallel_size": "plan.tp",
    "pipeline_model_parallel_size": "plan.pp",
    "context_parallel_size": "plan.cp",
    "micro_batch_size": "batch.micro",
    "global_batch_size": "batch.global",
}
"""Settings that a recipe has, and that a file which changes a recipe leaves open without its name."""

VERDICTS: Verdicts = {
    **judge(
        Approximation("all stages and micro-batches recompute alike"),
        "activations_checkpoint_layers_per.*|num_micro_batches_with_.*",
    ),
    **judge(
        Approximation("packed samples are forecast as one sequence: state batch.documents", "the forecast is too slow"),
        r"packed|packed_sequence.*|offline_packing.*|.*\.packed_sequence.*|.*enable_.*packing",
    ),
    r"model\.mcore_customization_config\..*": Approximation(
        "attention and MLP are forecast one after the other: layers of Falcon alone read it", SLOW
    ),
    "comm_overlap": NoInfluence("its settings count by themselves"),
    "keep_mtp_spec_in_bf16": Approximation("the layer that predicts further tokens has the format of the others"),
    "token_drop": Approximation("no token is dropped"),
    "fp8_params|fp8_param_gather": MEGATRON_VERDICTS["fp8_param_gather|fp4_param_gather|fp8_param|fp4_param"],
    r"(model\.)?peft\..*": NoInfluence("the rank and the targets of adapters alone count"),
    **judge(
        NoInfluence("it is about logging, checkpoints, data or numbers of the update"),
        r"(run|exp_manager|hydra|logger|checkpoint|scheduler|rng|tokenizer|validation|profiling|log|resume|straggler|nvrx\w*|ft|rerun\w*|defaults|base_results\w*|inference\w*|recipe|callbacks|trainer\.callbacks|model\.tokenizer|data\.tokenizer|env_vars|tensor_inspect|fault_tolerance)(\..*)?",
        r"(model|model\.\w+|data|optim|trainer|dataset|optimizer)\.(tokenizer|sched|nsys_profile|data|data_prefix|plugins|callbacks|logger|ub_.*cfg|blend.*|megatron_.*|scheduler|lr_scheduler|config)\..*",
    ),
    **judge(
        NoInfluence("it is about logging, checkpoints, data or numbers of the update"),
        "betas|eps|contiguous_.*|accelerator|enable_check.*|use_distributed_s.*",
        "replace_sampler.*|max_epochs|max_time|log_every.*|val_check.*|limit_.*|accumulate_grad.*",
        "gradient_clip.*|use_scaled.*|layernorm_eps.*|hysteresis|gc_.*|data_impl|splits_string|skip_warmup",
        "pad_samples_to_global.*|index_.*|warmup.*|constant_steps|max_lr|path|random_seed|splits?|restore_.*|reset_lr.*|blend.*",
        "num_sanity.*|fn|bf16|fp16|enabled|scheduler|strategy|ddp|config|persistent_workers|pin_memory",
        "memmap.*|cache_.*|hf_tokenizer.*|should_pad_vocab|vocab_size_.*|use_hf.*|label_key|answer_only.*",
        "truncation.*|dataset_kwargs.*|setup_optimizers|progress_.*|plugins|trainer|data|dataset|optim|model|train",
        "precision_plugin|use_sharp|seq_len_interpolation.*|replace_progress.*",
    ),
    **judge(
        NoInfluence("it is a trait of kernels that the profile of the framework has"),
        "ffn_dropout|attention_type|headscale|do_layer_norm.*|pre_process|post_process|persist_layer.*",
        "transformer_block.*|normalize_att.*|sync_batch.*|use_emha|native_amp.*|megatron_amp.*|apex_.*",
        "grad_allreduce.*|grad_div.*|gradient_as_bucket.*|transformer_engine|mcore_gpt|hidden_act",
        "no_seqlen.*|share_token.*|scale_.*|sequence_parallel_comm.*|batch_p2p.*|overlap_p2p.*",
        "deallocate.*|params_dtype|pipeline_dtype|autocast_.*|variable_seq.*|bucket_cap_mb|async_grad.*",
        "cpu_offloading_.*|ub_.*|moe_grouped.*|moe_permute.*|window_.*|seq_length",
    ),
    **MEGATRON_VERDICTS,
    r"init_.*|.*\.(lr|seed|name|dir)": NoInfluence("it is about the run, not about a step"),
}


# ------------------------------------------------------------------------------------------ reading


def read(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a YAML file, of a Python file, or of a command with overrides."""
    if file.suffix == ".py":
        return read_nemo_python(file)
    if file.data is None:
        return read_nemo_command(file)
    if not isinstance(file.data, Mapping):
        raise PlanError(file.where, "such a file is a mapping of keys to values", "Start with model:")
    return read_sections(file)


def read_sections(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a YAML file, and of those that its list of defaults names, as Hydra does."""
    data = file.data.get("MODEL_ARGS") if isinstance(file.data.get("MODEL_ARGS"), Mapping) else file.data
    settings = name_plainly(flatten_settings(data, file.text, file.where))
    defaults = data.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        for group, option in entry.items() if isinstance(entry, Mapping) else ((None, entry),):
            name = "/".join(str(part) for part in (group, option) if part is not None)
            companion = None if option in (None, "_self_") else file.find_companion(f"{name}.yaml")
            if companion is not None and isinstance(companion.data, Mapping):
                settings = {**read_sections(companion), **settings}
    return settings


def name_plainly(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings by their names in known sections, elsewhere by their dotted names."""
    plain: dict[str, Stated] = {}
    for path, stated in settings.items():
        if stated.value == {}:
            continue
        path = path.removeprefix("training.").removeprefix("recipe.")
        section, _, name = path.rpartition(".")
        value = None if isinstance(stated.value, str) and stated.value.startswith("${") else stated.value
        is_plain = section in SECTIONS and name != "name"
        key = PLAIN.get(path) or (name if is_plain or not section else path)
        if key not in plain or is_null(plain[key].value):
            plain[key] = replace(stated, value=value, shown=path)
    return plain


def divide_overrides(launch: Launch) -> Launch:
    """Returns the start of a program with the overrides behind an option (``-y trainer.devices=8``) as separate
    words."""
    arguments, words = {}, list(launch.positional)
    for name, stated in launch.arguments.items():
        values = list(stated.value) if isinstance(stated.value, list | tuple) else [stated.value]
        kept = [value for value in values if not re.match(r"[+~]*[a-z_]\w*(\.\w+)+=", str(value))]
        words += [replace(stated, value=value) for value in values if value not in kept]
        if len(kept) < len(values):
            stated = replace(stated, value=kept[0] if len(kept) == 1 else kept or True)
        arguments[name] = stated
    return replace(launch, arguments=arguments, positional=tuple(words))


def read_overrides(words: Iterable[Stated]) -> dict[str, Stated]:
    """Reads the settings of words such as ``trainer.devices=8`` on a command line."""
    settings = {}
    for word in words:
        name, equals, value = str(word.value).partition("=")
        name = name.lstrip("+~-")
        if equals and re.fullmatch(r"[\w.]+", name):
            settings[name] = replace(word, value=_read_value(value), shown=name)
    return settings


def _read_value(text: str) -> Value:
    """Reads a value of an override, a list in brackets as a list."""
    plain = text.strip().strip("'\"")
    inner = re.fullmatch(r"\[(.*)\]", plain)
    return [word.strip().strip("'\"") for word in inner[1].split(",") if word.strip()] if inner else plain


def read_nemo_command(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of ``nemo llm pretrain --factory NAME a.b=8``, or of a script of NeMo 1 with overrides."""
    if file.launch is None:
        return {}
    launch = divide_overrides(file.launch)
    around = {name: stated for launcher in launch.launchers for name, stated in launcher.settings.items()}
    dotted = {name: stated for name, stated in launch.arguments.items() if "." in name}
    settings = name_plainly({**dotted, **read_overrides(launch.positional)})
    kind = "finetune" if re.search(r"finetune|tuning", launch.entry + str(launch.positional)) else "pretrain"
    factory = launch.arguments.get("factory")
    if factory is not None:
        return {**around, **read_factory(factory, kind), **settings}
    if (config := launch.arguments.get("config_name")) is not None:
        folder = launch.arguments.get("config_path")
        name = f"{folder.value}/{config.value}" if folder is not None else str(config.value)
        companion = file.find_companion(name if name.endswith(".yaml") else f"{name}.yaml")
        if companion is None:
            return {**around, **settings, "config_name": config}
        return {**read_sections(companion), **settings}
    return {**around, **settings}


def read_factory(stated: Stated, kind: str) -> dict[str, Stated]:
    """Reads the settings of a recipe, as in ``llama3_8b(num_nodes=2)``. kind: pretrain or finetune."""
    name, _, inner = str(stated.value).strip("'\"").partition("(")
    arguments = {key: replace(stated, value=_read_value(value)) for key, value in re.findall(r"(\w+)=([^,)]+)", inner)}
    return read_nemo_recipe(name, kind, arguments, stated)


ARGUMENTS = {
    **{"num_gpus_per_node": "devices", "tensor_parallelism": "tensor_model_parallel_size"},
    **{"pipeline_parallelism": "pipeline_model_parallel_size", "context_parallelism": "context_parallel_size"},
    **{
        "virtual_pipeline_parallelism": "virtual_pipeline_model_parallel_size",
        "expert_parallelism": "expert_model_parallel_size",
    },
    **{"sequence_parallelism": "sequence_parallel", "precision_config": "mixed_precision"},
    **{"pipeline_parallelism_type": "pipeline_dtype", "max_train_steps": "max_steps"},
}
"""Arguments of the functions of recipes, and what they set."""

VARIANTS = ("performance_mode", "peft_scheme", "packed_sequence", "dir", "name", "fn")
"""Arguments of the functions of recipes that choose a variant, or say nothing about a step."""


def read_nemo_recipe(name: str, kind: str, arguments: Mapping[str, Stated], stated: Stated) -> dict[str, Stated]:
    """Reads the settings of a recipe of NeMo 2 with the arguments of its function; without it the name alone."""
    scheme = arguments.get("peft_scheme")
    is_full = scheme is not None and (is_null(scheme.value) or str(scheme.value).lower() == "none")
    is_fast = "performance_mode" in arguments and read_switch(arguments["performance_mode"])
    recipes = load_recipes("nemo")
    ends = (
        f".{kind}{'.full' if is_full else ''}{'.performance' if is_fast else ''}",
        f".{kind}{'.full' if is_full else ''}",
        f".{kind}",
    )
    settings = next((row for end in ends if (row := recipes.find(f"{name}{end}")) is not None), None)
    changes = {ARGUMENTS.get(key, key): value for key, value in arguments.items() if key not in VARIANTS}
    if settings is None:
        return {**changes, "recipe": replace(stated, value=name)}
    packed = arguments.get("packed_sequence")
    if packed is not None and read_switch(packed):
        settings |= {
            "packed": packed,
            "global_batch_size": replace(packed, value=8),
            "seq_length": replace(packed, value=4096),
        }
    if kind == "finetune":  # default_finetune_recipe
        settings["data"] = Stated("SquadDataModule", "data", f"recipe {name}")
    return {**settings, **changes}


def read_nemo_python(file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of the recipe that a Python file builds, or of what it passes to NeMo's functions: that of
    the function which the command line names (``--factory``), or the last."""
    text = follow_python(file)
    options = read_options(file.options.arguments)
    overrides = {name: Stated(value, name, "--args") for name, value in options.items() if "." in name}
    if (function := find_function(text, options.get("factory"))) is not None:
        return {**_read_function(text, function, file), **name_plainly(overrides)}
    built = _find_built(text.calls)
    if built is None:
        if len(rivals := list_functions(text, FUNCTION)) > 1:
            return name_functions("--factory", rivals, file.where)
        text.call_functions()
        built = _find_built(text.calls)
    return {**_read_built(text, built, file), **name_plainly(overrides)} if built is not None else {}


FUNCTION = re.compile(r"^(pretrain|finetune)_recipe$")
"""Functions of a module that make a recipe, and its kind."""

MADE = {"model", "peft"}
"""Settings of a recipe that functions of other modules make."""


def _read_function(text: PythonText, function: ast.FunctionDef, file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of the recipe that a function of the file makes, over those that NeMo has by the file's name.

    What functions of other modules make of it is in the recipe of NeMo.
    """
    built = text.call(function)
    if not isinstance(built, Built):
        return {}
    settings, kind, stem = _read_built(text, built, file), FUNCTION.match(function.name), Path(file.where).stem
    variant = {
        name: Stated(value, name, f"{file.where}:{function.lineno}")
        for name, value in list_defaults(function).items()
        if name in VARIANTS
    }
    known = read_nemo_recipe(stem, kind[1], variant, Stated(stem, function.name, file.where)) if kind else {}
    if "model" not in known:
        return settings
    classes, silent = load_recipes("nemo").classes, silent_overlaps(file)
    dropped = {name for name, stated in settings.items() if stated == silent.get(name)} | {CHANGED}
    dropped |= {name for name in MADE & settings.keys() if str(settings[name].value) not in classes}
    formats = {"precision", "mixed_precision", "plugins"}
    if formats & settings.keys():
        known = {name: stated for name, stated in known.items() if name not in formats}
    return {**known, **{name: stated for name, stated in settings.items() if name not in dropped}}


def _read_built(text: PythonText, built: Built, file: LaunchFile) -> dict[str, Stated]:
    """Reads the settings of a recipe, with what the file changes of it."""
    settings = read_python_settings(built, file.where)
    changes = list_changes(text, built, file.where)
    stated = Stated(built.name, built.name, f"{file.where}:{built.line}")
    recipe = RECIPE_CALL.search(built.name)
    if recipe is None:
        plain = {ARGUMENTS.get(name, name): value for name, value in name_plainly(settings).items()}
        return {**silent_overlaps(file), **plain, **changes}
    arguments = {name: value for name, value in settings.items() if "." not in name and name not in ("model", "peft")}
    rest = {name: value for name, value in settings.items() if name not in arguments}
    if not recipe[1]:
        return {**name_plainly(rest), **changes, "recipe": stated}
    return {**read_nemo_recipe(recipe[1], recipe[2], arguments, stated), **name_plainly(rest), **changes}


def silent_overlaps(file: LaunchFile) -> dict[str, Stated]:
    """Returns what DistributedDataParallelConfig has where a file does not say it: nothing overlaps."""
    names = ("overlap_grad_reduce", "overlap_param_gather")
    return {name: Stated(False, name, f"{file.where} (DistributedDataParallelConfig)") for name in names}


RECIPE_CALL = re.compile(r"(?:^|\.)(\w*)\.(pretrain|finetune)_recipe$")
"""Calls of recipes: the module and the kind."""

FUNCTIONS = re.compile(r"^(nemo\.collections\.)?llm\.(api\.)?(pretrain|finetune|train)$")
"""Functions of NeMo 2 that train the model of their arguments."""


def _find_built(calls: Iterable[Built]) -> Built | None:
    """Returns the last call of a recipe, or of a function that trains a model of its arguments."""
    built = [
        call
        for call in calls
        if RECIPE_CALL.search(call.name) or (FUNCTIONS.search(call.name) and {"trainer", "model"} & call.fields.keys())
    ]
    return built[-1] if built else None


# -------------------------------------------------------------------------------------- interpreting


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    ask_about_changes(reading)
    for name in ("recipe", "config_name"):
        if (stated := reading.take(name)) is not None:
            source = load_recipes("nemo").source.partition(",")[0]
            why = f"meshcast has no recipe or file {stated.value!r} ({source})"
            reading.ask(stated, why, "model=llama3-8b", "plan.tp=1")
    ask_for_function(reading)
    interpret_configuration(reading)
    launch = reading.file.launch  # NeMo 1 fuses the loss where it is told to, GPTConfig of NeMo 2 by itself
    read_loss(reading, launch.entry.startswith("nemo llm") if launch is not None else reading.file.suffix == ".py")
    longest = reading.take("seq_length")
    if longest is not None and longest.shown == SAMPLES:
        reading.approximate(longest, "every sample is forecast as the longest", SLOW)
    nodes, devices = reading.take_count("num_nodes", "nnodes"), reading.take_count("devices", "nproc_per_node")
    if devices:
        set_gpus(reading, nodes, devices, "devices", "num_nodes", "nproc_per_node", "nnodes")


def interpret_configuration(reading: Reading) -> None:
    """Fills the keys of a job from settings in the words of Megatron-Core's configuration classes."""
    reading.read_rows((*DEGREES, *OWN))
    _read_model(reading)
    _set_optimizer_sharding(reading)
    read_optimizer_kind(reading, "optim.name")
    read_plan(reading, silent_share=0.0)
    strategy, fsdp = reading.take_word("fsdp_sharding_strategy") or "full", reading.take_word("fsdp")
    reading.take("fsdp_grad_reduce_dtype", "fsdp_sharded_checkpoint")
    if fsdp in ("true", "megatron", "pytorch"):
        reading.set_key("plan.data", "fsdp", "fsdp")
        reading.set_key("plan.data.reshard", strategy == "full", "fsdp_sharding_strategy")
    for name in FUSIONS:
        stated = reading.take(name)
        if stated is not None and stated.value is False:
            reading.approximate(stated, "kernels are fused as in the profile of the framework", FAST)
    reading.set_key("framework.name", "nemo")
    _read_untuned_recipe(reading)
    _read_packed_samples(reading)
    _read_precision(reading)
    read_fp8_attention(reading)
    read_adapters(reading)
    if graphs := read_graphs(reading):
        reading.set_key("framework.set.cuda_graphs", graphs, *NAMES)
    intervals = (
        "checkpoint.save_interval",
        "exp_manager.checkpoint_callback_params.every_n_train_steps",
        "log.ckpt.every_n_train_steps",
    )
    asynchronous = reading.take_switch("checkpoint.async_save", "ckpt_async_save", "dist_ckpt_async_save")
    reading.set_checkpoints(reading.take_count(*intervals, decisive=False), asynchronous, *intervals)
    numbers = ("limit_val_batches", "validation.eval_iters", "eval_iters")
    runs = has_any(reading.take(*numbers, decisive=False), True)
    read_evaluation(reading, EVALUATION, runs, *numbers, "val_check_interval", "validation.eval_interval")


def _read_model(reading: Reading) -> None:
    """Reads the model: that of a recipe or of a class, with the fields that the file changes, or a whole shape."""
    classes = load_recipes("nemo").classes
    for name in ("config", "model"):
        if (stated := reading.take(name)) is not None and str(stated.value) in classes:
            reading.stated["model"] = replace(stated, value=classes[str(stated.value)])
            break
    named = reading.take("model")
    if "model.layers" in reading.keys or named is None or is_null(named.value):
        read_shape(reading, CONFIGURATION)
        return
    if "num_layers" in reading.stated and "hidden_size" in reading.stated:
        read_shape(reading, CONFIGURATION)
        return
    reading.read_model("model")
    if "model.layers" not in reading.keys:
        return
    before = {key: value for key, value in reading.keys.items() if key.startswith("model.")}
    reading.read_rows(replace(row, silent=UNSTATED) for row in (*SHAPE, *CONFIGURATION, *EXPERTS, *LATENT))
    if any(reading.keys[key] != value for key, value in before.items() if key != "model.preset"):
        reading.keys.pop("model.preset", None)


def _read_untuned_recipe(reading: Reading) -> None:
    """Reads which kernels are fused, and whether the recipe works and nobody tuned it."""
    if not reading.take_switch(UNTUNED):
        return
    reading.set_key("framework.set.regime", "family", UNTUNED)
    fuses = str(reading.keys.get("model.preset", "")).startswith(FUSES_ROPE)
    if "framework.set.eager.rope.fused" not in reading.keys and not fuses:
        reading.set_key("framework.set.eager.rope.fused", False, UNTUNED)


def _read_packed_samples(reading: Reading) -> None:
    """Reads samples that are packed into sequences, each with its attention, where schemes have whole sequences."""
    keys = reading.keys
    has_sequences = keys.get("plan.cp", 1) == 1 or keys.get("plan.sequence.comm", "p2p") != "p2p"
    if "packed" in reading.stated and has_sequences and reading.take_switch("packed"):
        word = reading.take_word("dataset", "data") or "squad"
        named = next((name for name in SAMPLE_TOKENS if name in word), "tulu3")
        why = f"samples are packed, and no file says how long they are: as those of {named}"
        reading.assume("batch.documents", SAMPLE_TOKENS[named], why)


def names_data(reading: Reading) -> bool:
    """Returns whether a file names the data of its training; recipes for pre-training have MockDataModule (NVIDIA/NeMo,
    nemo/collections/llm/recipes)."""
    names = ("data_impl", "data", *filter(DATA.fullmatch, reading.stated))
    words = [str(stated.value).lower() for name in names if (stated := reading.take(name, decisive=False)) is not None]
    return any(word not in ("none", "mmap", "[]") for word in words) and not any("mock" in word for word in words)


def _set_optimizer_sharding(reading: Reading) -> None:
    """Shards the optimizer where its name says so, or nothing says that it does not."""
    sharding = ("", "distributed_fused_adam", "mcore_distributed_optim")
    if "use_distributed_optimizer" not in reading.stated and reading.take_word("optim.name") in sharding:
        stated = reading.stated.get("optim.name", Stated(True, "recipe"))
        reading.add_stated({"use_distributed_optimizer": replace(stated, value=True)})


def ask_for_recipe(reading: Reading) -> None:
    """Asks for what a file that changes a recipe leaves open: the recipe, or the settings themselves."""
    missing = {name: key for name, key in DECISIVE.items() if name not in reading.stated}
    if missing:
        why = f"it changes a recipe that it does not name, and leaves {', '.join(missing)} to it"
        answers = ("--args '--recipe llama3_8b_pretrain_config'", *(f"{key}=1" for key in missing.values()))
        reading.ask(None, why, *answers)


USUAL_MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers with adapters that LoRA has by default (NVIDIA/NeMo, nemo/collections/llm/peft/lora.py;
NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/peft/lora.py)."""

CORE_MODULES: dict[str, str] = {
    **{"attn_qkv": "linear_qkv", "attn_q": "linear_q_proj", "attn_proj": "linear_proj"},
    **{"attn_q_down": "linear_q_down_proj", "attn_q_up": "linear_q_up_proj"},
    **{"attn_kv_down": "linear_kv_down_proj", "attn_kv_up": "linear_kv_up_proj"},
    **{"mixer_in": "in_proj", "mixer_out": "out_proj"},
    **{**dict.fromkeys(UPS, "linear_fc1"), **dict.fromkeys(DOWNS, "linear_fc2")},
}
"""Names in Megatron-Core of linear layers with adapters."""

FORMER_MODULES: dict[str, str] = {
    **{"attn_qkv": "attention_qkv", "attn_proj": "attention_dense", "mlp_up": "mlp_fc1", "mlp_down": "mlp_fc2"},
}
"""The same in NeMo 1."""


def read_adapters(reading: Reading) -> None:
    """Reads the adapters of a fine-tuning (nemo/collections/llm/peft/lora.py: rank 32 on all linear layers)."""
    names = ("peft", "peft.peft_scheme", "model.peft.peft_scheme", "peft_scheme")
    scheme = reading.take_word(*names)
    if scheme in ("", "none", "false"):
        return
    if scheme not in ("lora", "qlora", "dora", "canonical_lora", "canonicallora"):
        reading.ask(reading.take(*names), f"{scheme!r} are adapters that meshcast does not describe", "train.mode=lora")
        return
    if scheme not in ("lora", "qlora"):
        reading.approximate(reading.take(*names), f"adapters of {scheme} are forecast as LoRA", FAST)
    reading.set_key("train.mode", "qlora" if scheme == "qlora" else "lora", *names)
    ranks = ("dim", "peft.dim", "model.peft.lora_tuning.adapter_dim", "peft.lora_tuning.adapter_dim")
    reading.set_key("train.rank", reading.take_count(*ranks) or 32, *ranks)
    targets = ("target_modules", "peft.target_modules", "model.peft.lora_tuning.target_modules")
    stated = reading.take(*targets)
    words = read_words(stated) if stated is not None and not is_null(stated.value) else USUAL_MODULES
    set_targets(reading, words, stated, *targets)


def _read_precision(reading: Reading) -> None:
    """Reads the compute format: a recipe by name, ``trainer.precision`` with fp8 settings, or switches."""
    names = ("mixed_precision", "plugins")
    stated = reading.take(*names)
    named = reading.take_word(*names).replace("-", "_")
    if named in RECIPES:
        reading.set_key("precision.compute", RECIPES[named], *names)
        if RECIPES[named] not in ("bf16", "fp16"):
            read_gathers(reading)
        reading.ignore(reading.take("precision"), f"{named} counts")
    elif named in ("", "megatronmixedprecision", "mixedprecisionconfig"):
        _read_trainer_precision(reading)
    else:
        reading.ask(stated, f"{named!r} is no recipe of number formats that meshcast knows", "precision.compute=bf16")
        _read_trainer_precision(reading)
    in_fp32 = reading.take("grad_reduce_in_fp32")
    if in_fp32 is not None and not is_null(in_fp32.value):
        reading.set_key("precision.gradients", "fp32" if read_switch(in_fp32) else "bf16", "grad_reduce_in_fp32")
    formats = {"gradients": "grad_sync_dtype", "main_weights": "main_params_dtype", "moments": "exp_avg_dtype"}
    for key, name in formats.items():
        word = reading.take_word(name).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        if word in ("fp32", "fp16", "bf16"):
            reading.set_key(f"precision.{key}", word, name)
    reading.take("use_precision_aware_optimizer")
    reading.take("exp_avg_sq_dtype")


def _read_trainer_precision(reading: Reading) -> None:
    word = reading.take_word("precision")
    half = reading.take("bf16")
    is_off = half is not None and half.value in (False, "false", "False")
    usual = "fp16" if reading.take_switch("fp16") else "fp32" if is_off else "bf16"
    base = PRECISIONS.get(word) or usual
    fp8 = reading.take("fp8")
    if fp8 is not None and str(fp8.value).lower() in ("true", "false"):
        on = read_switch(fp8)
        reading.set_key("precision.compute", "fp8-delayed" if on else base, "fp8" if on else "precision")
        for name in ("fp8_hybrid", "fp8_e4m3"):
            reading.ignore(reading.take(name), "both formats take the same time" if on else "fp8 is off")
        if on:
            read_gathers(reading)
    else:
        read_recipe(reading, base)
    if word and reading.keys["precision.compute"] == base:
        reading.set_key("precision.compute", base, "precision")


# --------------------------------------------------------------------------------------- recognising

ENTRIES = re.compile(
    r"(^|/)megatron_(gpt|t5|bert|mamba|llama)\w*(pretraining|finetuning|sft|peft_tuning|continue_training)\.py$"
    r"|^nemo llm"
)
"""Scripts of NeMo 1, and the command of NeMo 2."""


def recognise(file: LaunchFile) -> Evidence:
    """Recognises YAML with the sections of NeMo 1, Python that imports NeMo 2, or a start of either."""
    if file.suffix == ".py":
        return (
            Evidence.CERTAIN
            if re.search(r"^[ \t]*(from|import)\s+nemo(\.|_run|\s)", file.text, re.MULTILINE)
            else Evidence.NONE
        )
    if file.launch is not None:
        return Evidence.CERTAIN if ENTRIES.search(file.launch.entry) else Evidence.NONE
    if not isinstance(file.data, Mapping) or "cluster" in file.data:
        return Evidence.NONE
    inner = file.data.get("training")
    data: Mapping[Value, Value] = inner if isinstance(inner, Mapping) and "model" in inner else file.data
    is_dotted = any(re.match(r"(trainer|data)\.", str(key)) for key in data)
    if is_dotted or (isinstance(data.get("model"), Mapping) and isinstance(data.get("trainer"), Mapping)):
        return Evidence.LIKELY
    return Evidence.NONE


# ------------------------------------------------------------------------------------------ writing

SPELLINGS = {"qkv_bias": "add_qkv_bias", "layernorm1p": "layernorm_zero_centered_gamma"}
"""Traits of a shape whose names differ from those of Megatron-LM."""

FORMER = {
    "overlap_grad_reduce": ("model.optim", "overlap_grad_sync"),
    "overlap_param_gather": ("model.optim", "overlap_param_sync"),
    "tp_comm_overlap": ("model", "ub_tp_comm_overlap"),
    "seq_length": ("model", "encoder_seq_length"),
    "train_iters": ("trainer", "max_steps"),
    "use_megatron_fsdp": ("model", "fsdp"),
}
"""Sections and names of NeMo 1 for settings of Megatron-Core."""


def write(keys: Keys, header: list[str]) -> str:
    """Writes a YAML file of NeMo 1."""
    optimizer = "fused_adam" if keys.get("plan.data") == "ddp" else "distributed_fused_adam"
    body: dict[str, dict[str, Value]] = {"trainer": {}, "model": {}, "model.optim": {"name": optimizer}}
    for name, value in write_settings(keys).items():
        section, former = FORMER.get(name, ("model", name))
        body[section][former] = list(value) if isinstance(value, tuple) else value
    model = body["model"]
    model.pop("use_distributed_optimizer", None)
    if model.pop("data_parallel_sharding_strategy", None) == "optim_grads" and "fsdp" in model:
        model["fsdp_sharding_strategy"] = "grad"
    compute = keys.get("precision.compute", "bf16")
    if compute in PRECISIONS.values():
        body["trainer"]["precision"] = {"fp16": "16", "fp32": "32"}.get(compute, compute)
    elif compute == "fp8-delayed":
        model |= {"fp8": True, "fp8_hybrid": True}
    elif recipe := next((name for name, ours in RECIPES.items() if ours == compute), None):
        model["mixed_precision"] = recipe
    model["optim"] = body.pop("model.optim")
    if keys.get("train.mode") in ("lora", "qlora"):
        rank, modules = write_adapters(keys, FORMER_MODULES)
        model["peft"] = {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": rank, "target_modules": modules}}
    lines = [*(f"# {line}".rstrip() for line in header), *([""] if header else [])]
    return "\n".join(lines) + to_yaml(body, default_flow_style=None, width=120)


def write_adapters(keys: Mapping[str, Value], modules: Mapping[str, str]) -> tuple[int, list[str]]:
    """Writes the rank of adapters, and the linear layers that have them. modules: their names by target."""
    targets = ("attn_qkv" if target in PARTS and target not in modules else target for target in keys["train.targets"])
    return int(keys.get("train.rank", 32)), list(
        dict.fromkeys(modules[target] for target in targets if target in modules)
    )


def write_settings(keys: Mapping[str, Value]) -> dict[str, Value]:
    """Writes the settings of a job by their names."""
    keys = drop_inactive(omit_derived(keys))
    parts = [
        *SHAPE,
        *CONFIGURATION,
        *(row for row in OWN if row.name not in ("rotary_percentage", "use_flash_attention", "encoder_seq_length")),
        *DEGREES,
    ]
    for key, rows in (("model.moe.experts", EXPERTS), ("model.mla.kv_lora_rank", LATENT), ("model.ssm.pattern", MAMBA)):
        if key in keys:
            parts += rows
    settings = write_rows(parts, keys)
    settings |= {name: keys.get(key, 1) for name, key in DECISIVE.items()}  # also the defaults: a recipe has others
    if keys.get("model.norm") == "layernorm1p":
        settings["normalization"] = "LayerNorm"
    if keys.get("model.gated") and keys.get("model.activation") == "gelu":
        settings["activation"] = "geglu"
    if "max_steps" in settings:
        settings["train_iters"] = settings.pop("max_steps")
    settings |= {"attention_dropout": keys["model.dropout"]} if "model.dropout" in keys else {}
    settings |= write_shape(keys, SPELLINGS) | write_plan(keys)
    if GROUPS[0] in settings:
        settings[GROUPS[1]] = settings.pop(GROUPS[0])
    if keys.get("plan.data") == "ddp":
        settings["use_distributed_optimizer"] = False
    settings["cross_entropy_loss_fusion"] = not EAGER_LOSS.items() <= keys.items()
    settings["grad_reduce_in_fp32"] = keys.get("precision.gradients", "fp32") == "fp32"
    weights, moments = keys.get("precision.main_weights", "fp32"), keys.get("precision.moments", "fp32")
    if (weights, moments) != ("fp32", "fp32"):
        settings |= {"use_precision_aware_optimizer": True, "main_params_dtype": weights}
        settings |= {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    if keys.get("framework.set.deterministic"):
        settings["deterministic_mode"] = True
    return settings | write_graphs(keys.get("framework.set.cuda_graphs", False))


NEMO = LaunchFormat("nemo", "NeMo", ".yaml", recognise, read, interpret, write, VERDICTS, names_data=names_data)
