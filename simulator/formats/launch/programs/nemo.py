"""NeMo: YAML files of NeMo 1, overrides of NeMo 2, and of Megatron-Bridge.

Source: NVIDIA/NeMo-Framework-Launcher @26e42fa9, launcher_scripts/conf/training; NVIDIA-NeMo/Megatron-Bridge
@067f987df, src/megatron/bridge/training/config.py and mixed_precision.py. Exported files are overrides of a
Megatron-Bridge recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.flat_settings import flatten_settings
from meshcast.simulator.formats.launch.keys import drop_inactive
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import Evidence, LaunchFormat
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
from meshcast.simulator.formats.launch.programs.megatron_plan import DEGREES, GROUPS, read_plan, read_recipe, write_plan
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import ON, Keys, SettingRow, Stated, is_null, read_switch, write_rows
from meshcast.simulator.formats.launch.verdicts import Approximation, NoInfluence, Verdicts

SECTIONS = [
    *("model", "model.config", "model.optim", "model.data", "train", "training", "ddp", "trainer"),
    *("trainer.strategy", "trainer.strategy.ddp", "optim", "optim.config", "optimizer", "data", "dataset"),
    *("comm_overlap", "dist", "mixed_precision", "trainer.plugins"),
]
"""Sections whose settings are known by their names alone."""

OWN = (
    SettingRow("overlap_grad_reduce", "framework.set.overlap.dp", "switch", ON),
    SettingRow("overlap_grad_sync", "framework.set.overlap.dp", "switch", ON),
    SettingRow("overlap_param_gather", "framework.set.overlap.updated_weights", "switch", ON),
    SettingRow("overlap_param_sync", "framework.set.overlap.updated_weights", "switch", ON),
    SettingRow("tp_comm_overlap", "framework.set.overlap.tp", "switch", ON),
    SettingRow("ub_tp_comm_overlap", "framework.set.overlap.tp", "switch", ON),
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
}
"""Compute formats by the names of Megatron-Bridge's mixed-precision recipes."""

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

NAMES = {"qkv_bias": "add_qkv_bias", "layernorm1p": "layernorm_zero_centered_gamma"}

PLACES = {
    **dict.fromkeys(("micro_batch_size", "global_batch_size", "train_iters"), "train"),
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32"), "ddp"),
    **dict.fromkeys(("use_megatron_fsdp", "data_parallel_sharding_strategy"), "ddp"),
    **dict.fromkeys(("use_distributed_optimizer", "num_distributed_optimizer_instances"), "ddp"),
    **dict.fromkeys(("use_precision_aware_optimizer", "optimizer_cpu_offload"), "optimizer"),
    **dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "optimizer"),
    **{"tp_comm_overlap": "comm_overlap", "use_tp_pp_dp_mapping": "dist"},
}
"""Sections of Megatron-Bridge other than ``model``."""

WITHOUT_INFLUENCE = (
    r"(run|exp_manager|hydra|logger|checkpoint|scheduler|rng|tokenizer|validation|profiling|log|resume|straggler|nvrx.*|ft|rerun.*|defaults|base_results.*|inference.*)(\..*)?"
    r"|(model|model\.\w+|data|optim|trainer|dataset)\.(tokenizer|sched|nsys_profile|data|data_prefix|plugins|callbacks|logger|ub_.*cfg|blend.*|megatron_.*|scheduler)\..*"
    r"|lr|min_lr|weight_decay|betas|eps|adam.*|clip_grad|bucket_cap_mb|contiguous_.*|grad_sync_dtype|name|accelerator|logger|enable_check.*|use_distributed_s.*|replace_sampler.*"
    r"|max_epochs|max_time|log_every.*|val_check.*|limit_.*|accumulate_grad.*|gradient_clip.*|init_method.*|use_scaled.*|ffn_dropout|kv_channels|apply_query.*|layernorm_eps.*"
    r"|do_layer_norm.*|pre_process|post_process|persist_layer.*|headscale|transformer_block.*|openai_gelu|normalize_att.*|apply_rope.*|attention_type|native_amp.*|hysteresis"
    r"|fp32_residual.*|fp16_lm.*|megatron_amp.*|grad_allreduce.*|grad_div.*|bias_.*fusion|masked_softmax.*|seed|resume.*|use_cpu_init.*|onnx_safe|apex_.*|gradient_as_bucket.*"
    r"|sync_batch.*|transformer_engine|mcore_gpt|fp8_.*|gc_.*|data_impl|splits_string|skip_warmup|num_workers|dataloader.*|reset_.*|eod_.*|index_.*|data_prefix"
    r"|no_seqlen.*|batch_p2p.*|overlap_p2p.*|use_emha|moe_aux.*|moe_z_loss.*|moe_router_load.*|moe_grouped.*|moe_router_pre.*|moe_permute.*|moe_router_dtype|eval_.*|manual_gc.*"
    r"|log_.*|save.*|load.*|rotary_base|rotary_inter.*|scale_.*|seq_len_inter.*|share_.*|variable_seq.*|test_.*|validation_.*|train_data.*|random_seed|add_position.*|softmax_scale"
    r"|sync_.*|hidden_act|cross_entropy_fusion_impl|rampup_.*|warmup.*|lr_.*|optimizer|sequence_parallel_comm.*|attention_softmax.*|window_.*|tiktoken.*|path|data_path|bf16|enabled|seq_length"
)

FUSIONS = ("bias_activation_fusion", "bias_dropout_add_fusion", "masked_softmax_fusion", "apply_rope_fusion")
"""Fusions that are on by default."""

REASONS = {
    "deterministic_mode": "deterministic kernels are forecast as the usual ones",
    "rampup_batch_size": "the forecast is of a step with the full global batch",
    "cross_entropy_loss_fusion": "the loss has the kernels of the framework's profile",
    "defer_embedding_wgrad_compute|wgrad_deferral_limit": "weight gradients of the output layer are not deferred",
    "activations_checkpoint_layers_per.*|num_micro_batches_with_.*": "all stages and micro-batches recompute alike",
    "moe_shared_expert_overlap": "shared experts are computed in turn with the token dispatch",
    "delay_wgrad_compute": "weight gradients are not moved behind other passes",
    r"(model\.)?peft.*|peft\..*": "adapters: state train.mode in the job",
}


VERDICTS: Verdicts = {
    **{pattern: Approximation(why) for pattern, why in REASONS.items()},
    WITHOUT_INFLUENCE: NoInfluence("it changes neither time nor memory"),
}


def read(file: LaunchFile) -> dict[str, Stated]:
    """The settings of a YAML file: by their names in known sections, elsewhere by their dotted names."""
    data, text, where = file.data, file.text, file.where
    if not isinstance(data, Mapping):
        raise PlanError(where, "such a file is a mapping of keys to values", "Start with model:")
    if isinstance(data.get("MODEL_ARGS"), Mapping):
        data = data["MODEL_ARGS"]
    found: dict[str, Stated] = {}
    for path, stated in flatten_settings(data, text, where).items():
        path = path.removeprefix("training.")
        section, _, name = path.rpartition(".")
        value = None if isinstance(stated.value, str) and stated.value.startswith("${") else stated.value
        if section in SECTIONS or not section:
            if name not in found or is_null(found[name].value):
                found[name] = Stated(value, path, stated.place)
        else:
            found[path] = Stated(value, path, stated.place)
    return found


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.read_rows((*DEGREES, *OWN))
    keys = reading.keys
    read_shape(reading, CONFIGURATION)
    sharding = ("", "distributed_fused_adam", "mcore_distributed_optim")
    if "use_distributed_optimizer" not in reading.stated and reading.take_word("name") in sharding:
        shown = reading.stated["name"].shown if "name" in reading.stated else "recipe"
        reading.stated = {**reading.stated, "use_distributed_optimizer": Stated(True, shown)}
    read_plan(reading)
    strategy, fsdp = reading.take_word("fsdp_sharding_strategy") or "full", reading.take_switch("fsdp")
    reading.take("fsdp_grad_reduce_dtype", "fsdp_sharded_checkpoint")
    if fsdp:
        reading.set_key("plan.data", "fsdp", "fsdp")
        reading.set_key("plan.data.reshard", strategy == "full", "fsdp_sharding_strategy")
    for name in FUSIONS:
        stated = reading.take(name)
        if stated is not None and stated.value is False:
            reading.approximate(stated, "kernels are fused as in the profile")
    reading.set_key("framework.name", "nemo")
    _read_precision(reading)
    switches = ("enable_cuda_graph", "external_cuda_graph")
    graphs = reading.take_word("cuda_graph_impl") not in ("", "none") or reading.take_switch(*switches)
    experts = "model.moe.experts" in keys and reading.take("cuda_graph_modules", "cuda_graph_scope") is not None
    if graphs:
        scope = "outside-experts" if experts else True
        reading.set_key("framework.set.cuda_graphs", scope, "cuda_graph_impl", *switches)
    intervals = (
        "checkpoint.save_interval",
        "exp_manager.checkpoint_callback_params.every_n_train_steps",
        "log.ckpt.every_n_train_steps",
    )
    reading.set_checkpoints(
        reading.take_count(*intervals),
        reading.take_switch("checkpoint.async_save", "ckpt_async_save", "dist_ckpt_async_save"),
        *intervals,
    )
    nodes, devices = reading.take_count("num_nodes"), reading.take_count("devices")
    if devices:
        reading.set_key("cluster.gpus", (nodes or 1) * devices, "devices")


def _read_precision(reading: Reading) -> None:
    """The compute format: a recipe of Megatron-Bridge, ``trainer.precision`` with fp8 settings, or switches."""
    named = reading.take_word("mixed_precision").replace("-", "_")
    if named in RECIPES:
        reading.set_key("precision.compute", RECIPES[named], "mixed_precision")
    elif named:
        reading.approximate(reading.take("mixed_precision"), f"understood are {', '.join(RECIPES)}")
    else:
        _read_trainer_precision(reading)
    in_fp32 = reading.take("grad_reduce_in_fp32")
    if in_fp32 is not None and not is_null(in_fp32.value):
        reading.set_key("precision.gradients", "fp32" if read_switch(in_fp32) else "bf16", "grad_reduce_in_fp32")
    for key, name in (("main_weights", "main_params_dtype"), ("moments", "exp_avg_dtype")):
        if (word := reading.take_word(name).removeprefix("torch.")) in ("fp32", "fp16", "bf16"):
            reading.set_key(f"precision.{key}", word, name)
    reading.take("use_precision_aware_optimizer", "exp_avg_sq_dtype")


def _read_trainer_precision(reading: Reading) -> None:
    word = reading.take_word("precision")
    base = PRECISIONS.get(word) or ("fp16" if reading.take_switch("fp16") else "bf16")
    fp8 = reading.take("fp8")
    if fp8 is not None and str(fp8.value).lower() in ("true", "false"):
        on = read_switch(fp8)
        delayed = on and reading.take_switch("fp8_hybrid", "fp8_e4m3") is not None
        reading.set_key("precision.compute", "fp8-delayed" if delayed else base, "fp8" if on else "precision")
    else:
        read_recipe(reading, base)
    if word and reading.keys["precision.compute"] == base:
        reading.origins["precision.compute"] = reading.stated["precision"]


def write(keys: Keys, header: list[str]) -> str:
    """A YAML file of overrides for a Megatron-Bridge recipe."""
    settings = write_settings(keys)
    sections: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "dataset": {}, "ddp": {}}
    for name, value in settings.items():
        sections.setdefault(PLACES.get(name, "model"), {})[name] = list(value) if isinstance(value, tuple) else value
    sections["dataset"]["seq_length"] = settings["seq_length"]
    body: dict[str, Any] = {section: one for section, one in sections.items() if one}
    compute = keys.get("precision.compute", "bf16")
    recipe = next((name for name, ours in RECIPES.items() if ours == compute), None)
    if recipe:
        body["mixed_precision"] = recipe
    elif compute == "fp32":
        body["trainer"] = {"precision": 32}
    lines = [f"# {line}".rstrip() for line in header]
    return "\n".join([*lines, *([""] if lines else [])]) + yaml.safe_dump(
        body, sort_keys=False, default_flow_style=None, width=120
    )


def write_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job by their names."""
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
    if keys.get("model.norm") == "layernorm1p":
        settings["normalization"] = "LayerNorm"
    if "max_steps" in settings:
        settings["train_iters"] = settings.pop("max_steps")
    settings |= {"attention_dropout": keys["model.dropout"]} if "model.dropout" in keys else {}
    settings |= write_shape(keys, NAMES) | write_plan(keys)
    if GROUPS[0] in settings:
        settings[GROUPS[1]] = settings.pop(GROUPS[0])
    if keys.get("plan.data") == "ddp":
        settings["use_distributed_optimizer"] = False
    settings["grad_reduce_in_fp32"] = keys.get("precision.gradients", "fp32") == "fp32"
    weights, moments = keys.get("precision.main_weights", "fp32"), keys.get("precision.moments", "fp32")
    if (weights, moments) != ("fp32", "fp32"):
        settings |= {"use_precision_aware_optimizer": True, "main_params_dtype": weights}
        settings |= {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    if graphs := keys.get("framework.set.cuda_graphs"):
        settings["cuda_graph_impl"] = "transformer_engine" if graphs == "outside-experts" else "full_iteration"
        if graphs == "outside-experts":
            settings["cuda_graph_modules"] = ["attn", "moe_router", "moe_preprocess"]
    return settings


def recognise(file: LaunchFile) -> Evidence:
    """A mapping with the sections of NeMo or Megatron-Bridge."""
    data = file.data
    if not isinstance(data, Mapping) or "cluster" in data:
        return Evidence.NONE
    training = data.get("training")
    inner: Mapping[Any, Any] = training if isinstance(training, Mapping) and "model" in training else data
    named = any(re.match(r"(trainer|model|data)\.", str(key)) for key in data)
    sections = isinstance(inner.get("model"), Mapping) and {"trainer", "train", "ddp", "dataset"} & inner.keys()
    return Evidence.LIKELY if named or sections else Evidence.NONE


NEMO = LaunchFormat("nemo", "NeMo", ".yaml", recognise, read, interpret, write, VERDICTS)
