"""Megatron-Bridge: performance configurations by name, constants of Python files that change a recipe of the library.

Source: NVIDIA-NeMo/Megatron-Bridge @c81012934 (v0.4.2), scripts/performance/utils/utils.py (class WorkloadBaseConfig),
utils/overrides.py (set_workload_base_configs), utils/precision.py, configs/*/*_llm_pretrain.py; recipes/deepseek and
recipes/kimi for layouts of pipelines.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from meshcast.simulator.formats.launch.programs.recipes import UNTUNED, load_recipes
from meshcast.simulator.formats.launch.python_text import Built, Value
from meshcast.simulator.formats.launch.table import Stated

WORKLOAD = "WorkloadBaseConfig"
"""Class of the constants."""

DEFAULTS = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "global_batch_size", "micro_batch_size"), 1),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")),
}
"""Fields that replace those of the recipe also where a constant leaves them out."""

NAMES = {"num_gpus": "gpus", "moe_a2a_overlap": "overlap_moe_expert_parallel_comm"}
"""Fields whose settings have other names."""

FORMATS = {
    **{"BF16": "bf16_mixed", "FP8_CS": "bf16_with_fp8_current_scaling_mixed", "FP8_MX": "bf16_with_mxfp8_mixed"},
    **{"FP8_SC": "bf16_with_fp8_subchannel_scaling_mixed", "NVFP4": "bf16_with_nvfp4_mixed"},
}
"""Recipes of number formats by their words in the names of constants."""

NAME = re.compile(
    rf"(?P<model>\w+?)(_(?P<task>PRETRAIN|SFT|PEFT|LORA))?(_CONFIG)?_[A-Z]+\d+_(?P<format>{'|'.join(FORMATS)})(_\w+)?"
)
"""Names of constants: the model, the task, the GPU and the number format."""

FAMILIES: dict[str, dict[str, Value]] = {
    "deepseek_v3": {"recompute_granularity": "selective"},
    "kimi_k2": {"recompute_granularity": "selective"},
    "nemotron_3_nano": {"recompute_granularity": None, "cuda_graph_impl": "none"},
    "qwen3": {"recompute_granularity": None, "tp_comm_overlap": True},
}
"""What the scripts set for the models whose names start so (set_qwen3_common_configs and others), or the recipes of the
library at that release (recipes/nemotronh/nemotron_3_nano.py)."""

LAYOUTS = {4: "Et*16|t*16|t*16|t*13{}L", 8: "Et*8|(t*8|)*6t*5{}L", 16: "Et*4|(t*4|)*14t{}L"}
"""Layouts of DeepSeek-V3 and Kimi K2 by the number of stages, with room for layers that predict further tokens."""


class Workload(NamedTuple):
    """A named ``WorkloadBaseConfig``. values: fields that it states, each with the line."""

    name: str
    values: dict[str, tuple[Value, int]]


def find_workload(name: Value, value: Value) -> Workload | None:
    """Returns the workload that a constant holds; None for any other value. value: what the file builds."""
    if not isinstance(value, Built):
        return None
    if value.last_name == WORKLOAD:
        base: Workload | None = Workload(str(name), {})
    else:  # dataclasses.replace(BASE, field=...)
        base = find_workload(name, value.arguments[0]) if value.last_name == "replace" and value.arguments else None
    if base is None:
        return None
    stated = {field: (setting, value.lines.get(field, value.line)) for field, setting in value.fields.items()}
    return Workload(str(name), {**base.values, **stated})


def read_workload(workload: Workload, where: str) -> dict[str, Stated] | None:
    """Reads the settings of the recipe that a workload changes, with its changes; None if the library has no such
    recipe."""
    words = NAME.fullmatch(workload.name)
    if words is None:
        return None
    task = {"LORA": "peft", None: "pretrain"}.get(words["task"], str(words["task"]).lower())
    settings = load_recipes("megatron_bridge").find(f"{words['model'].lower()}_{task}_config")
    if settings is None:
        return None
    derived = _derive(words["model"].lower(), words["format"])
    constant = {name: Stated(value, name, f"{where} {workload.name}") for name, value in derived.items()}
    stated = {
        NAMES.get(name, name): Stated(value, name, f"{where}:{line}")
        for name, (value, line) in workload.values.items()
        if value is not None
    }
    defaults = {name: Stated(value, name, f"{where} ({WORKLOAD})") for name, value in DEFAULTS.items()}
    settings |= {**constant, **defaults, **stated}
    settings.pop(UNTUNED, None)  # set_workload_base_configs tunes it
    for name, value in (_follow_fields(workload, settings)).items():
        settings[name] = Stated(value, name, f"{where} (set_workload_base_configs)")
    return settings


def _derive(model: str, number_format: str) -> dict[str, Value]:
    """Returns what the scripts set for every workload of a model and a number format."""
    derived: dict[str, Value] = {"mixed_precision": FORMATS[number_format], "grad_reduce_in_fp32": False}
    derived |= next((settings for family, settings in FAMILIES.items() if model.startswith(family)), {})
    return derived | ({"tp_comm_overlap": False} if number_format == "NVFP4" else {})


def _follow_fields(workload: Workload, settings: dict[str, Stated]) -> dict[str, Value]:
    """Returns what the scripts set where a workload has a field."""
    fields = {name: value for name, (value, _) in workload.values.items() if value not in (None, False)}
    changed: dict[str, Value] = {"sequence_parallel": fields.get("tensor_model_parallel_size", 1) > 1}
    if "use_megatron_fsdp" in fields:
        changed |= {"data_parallel_sharding_strategy": "optim_grads_params", "use_precision_aware_optimizer": False}
    if "cpu_offloading_num_layers" in fields:
        changed |= {"cpu_offloading": True}
    if "recompute_modules" in fields:
        changed |= {"recompute_granularity": "selective"}
    if "recompute_num_layers" in fields:
        changed |= {"recompute_granularity": "full", "recompute_method": "block"}
    if "moe_a2a_overlap" in fields:
        changed |= {"delay_wgrad_compute": True}
    if "moe_token_dispatcher_type" in settings:
        backend = fields.get("moe_flex_dispatcher_backend")
        changed |= {"moe_token_dispatcher_type": "flex" if backend else "alltoall"}
        changed |= {"moe_hybridep_num_sms": 32} if backend == "hybridep" else {}
    if "pipeline_model_parallel_layout" in settings:
        stages = fields.get("pipeline_model_parallel_size", 1) * fields.get("virtual_pipeline_model_parallel_size", 1)
        further = "m" if "m" in str(settings["pipeline_model_parallel_layout"].value) else ""
        layout = fields.get("pp_layout") or LAYOUTS.get(stages, "").format(further)
        changed |= {"pipeline_model_parallel_layout": layout or None}
    return changed
