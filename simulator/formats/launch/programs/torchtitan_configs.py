"""torchtitan's models and configurations, as facts.

Source: pytorch/torchtitan @b5bcd76c6 (2026-08-21), torchtitan/models/*/__init__.py and config_registry.py; flavors that
are no longer there @v0.2.2, and Llama 2 before @4d88a8a44 (2024-12-03).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshcast.simulator.formats.launch.table import Keys, SomeKeys

FLAVORS: Mapping[tuple[str, str], str | SomeKeys] = {
    **{("llama2", size): f"llama2-{size}" for size in ("7b", "13b", "70b")},
    **{("llama3", size): f"llama3.2-{size}" for size in ("1b", "3b")},
    **{("llama3", size): f"llama3-{size}" for size in ("8b", "70b", "405b")},
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("deepseek_v3", "236b"): "deepseek-v2",
    ("deepseek_v3", "671b"): {"preset": "deepseek-v3", "mtp": 0},
    ("llama4", "17bx16e"): "llama4-scout",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    **{("qwen3", size): f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")},
    ("llama3", "debugmodel"): {
        **{"layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048, "seq": 2048},
        **{"gated": True, "positions": "rope", "tied": False, "norm": "rmsnorm"},
    },
}
"""Models by torchtitan's name and flavor, which may have a suffix for the kind of attention (``8B_flex``)."""

STOCK = "of torchtitan @b5bcd76c6"
"""What the place of a setting of its configurations ends with, behind the name of a configuration."""

REMOVED = ("llama2", "llama4")
"""Models that today's release has no more."""

LOOPED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
NO_GRAPHS = {"training.disable_cuda_graphs": True}
LOSS = {"compile.enable": True, "compile.components": ["loss"]}
LAYERS = {"compile.enable": True, "compile.components": ["model"]}
MUON = {"optimizer.name": "DistMuon"}
VARLEN = {"model_spec.attn_backend": "varlen"}
BACKEND = "model_spec.moe_comm_backend"


def _degree(kind: str, degree: int) -> Keys:
    """Returns the setting of a parallel degree."""
    return {f"parallelism.{kind}_parallel_degree": degree}


_ROWS: tuple[tuple[str, str, str, int, int, int, str, SomeKeys], ...] = (
    ("llama3_debugmodel", "llama3", "debugmodel", 8, 2048, 10, "selective", {**LOOPED}),
    ("llama3_8b", "llama3", "8B", 1, 8192, 1000, "selective", {}),
    (
        "llama3_8b_first_85_pct_layers_nvfp4",
        "llama3",
        "8B",
        1,
        8192,
        1000,
        "selective",
        {
            "model_spec.converters": ["NVFP4LinearConverter"],
            "converters.NVFP4LinearConverter.fqns": "the first 85 % of the layers",
            **LAYERS,
        },
    ),
    (
        "llama3_8b_mxfp8",
        "llama3",
        "8B",
        1,
        8192,
        1000,
        "selective",
        {"model_spec.converters": ["MXFP8LinearConverter"], **LAYERS},
    ),
    ("llama3_70b", "llama3", "70B", 8, 8192, 1000, "full", _degree("tensor", 8)),
    (
        "llama3_405b",
        "llama3",
        "405B",
        2,
        8192,
        3000,
        "full",
        {
            "model_spec.converters": ["Float8LinearConverter"],
            "converters.Float8LinearConverter.filter_fqns": ["lm_head"],
            **_degree("tensor", 8),
            "compile.enable": True,
            "compile.enable_async_tensor_parallel": True,
        },
    ),
    (
        "deepseek_v3_16b",
        "deepseek_v3",
        "16B",
        4,
        4096,
        1000,
        "selective",
        {**NO_GRAPHS, **LOOPED, **_degree("expert", 8), **LOSS},
    ),
    (
        "deepseek_v3_16b_hybridep",
        "deepseek_v3",
        "16B",
        4,
        4096,
        1000,
        "selective",
        {BACKEND: "hybridep", "model_spec.non_blocking_capacity_factor": 1.0, **LOOPED, **_degree("expert", 8), **LOSS},
    ),
    (
        "deepseek_v3_16b_minimal_async_ep",
        "deepseek_v3",
        "16B",
        4,
        4096,
        1000,
        "selective",
        {
            BACKEND: "minimal_async_ep",
            "parallelism.data_parallel_shard_degree": 1,
            "parallelism.enable_sequence_parallel": False,
            **LOSS,
        },
    ),
    (
        "deepseek_v3_671b",
        "deepseek_v3",
        "671B",
        4,
        4096,
        10000,
        "selective",
        {**NO_GRAPHS, **LOOPED, **_degree("expert", 2), **LOSS},
    ),
    (
        "deepseek_v3_671b_float8",
        "deepseek_v3",
        "671B",
        4,
        4096,
        10000,
        "selective",
        {
            "model_spec.converters": ["Float8LinearConverter", "Float8GroupedExpertsConverter"],
            "converters.Float8LinearConverter.filter_fqns": ["lm_head", "router.gate"],
            **NO_GRAPHS,
            **LOOPED,
            **_degree("expert", 2),
            **LOSS,
        },
    ),
    ("qwen3_0_6b", "qwen3", "0.6B", 4, 4096, 10, "selective", {}),
    ("qwen3_1_7b", "qwen3", "1.7B", 4, 4096, 100, "selective", {}),
    (
        "qwen3_8b_first_85_pct_layers_nvfp4",
        "qwen3",
        "8B",
        1,
        2048,
        180,
        "selective",
        {
            **VARLEN,
            "model_spec.converters": ["NVFP4LinearConverter"],
            "converters.NVFP4LinearConverter.fqns": "the first 85 % of the layers",
            **LAYERS,
        },
    ),
    ("qwen3_14b", "qwen3", "14B", 4, 4096, 3000, "full", {}),
    ("qwen3_30b_a3b", "qwen3", "30B-A3B", 2, 4096, 3000, "full", {}),
    ("qwen3_32b", "qwen3", "32B", 2, 4096, 3000, "full", {}),
    (
        "qwen3_moe_deepep",
        "qwen3",
        "debugmodel_moe",
        2,
        512,
        10,
        "selective",
        {BACKEND: "deepep", **NO_GRAPHS, **_degree("expert", 4)},
    ),
    ("sft_qwen3_8b_math", "qwen3", "8B", 1, 2048, 180, "selective", {**VARLEN}),
    ("gpt_oss_20b", "gpt_oss", "20b", 1, 8192, 10000, "full", {}),
    ("gpt_oss_120b", "gpt_oss", "120b", 1, 8192, 10000, "full", {}),
    ("qwen35_0_8b", "qwen3_5", "0.8B", 4, 4096, 1000, "selective", {}),
    ("qwen35_2b", "qwen3_5", "2B", 4, 4096, 1000, "selective", {}),
    ("qwen35_4b", "qwen3_5", "4B", 4, 4096, 1000, "full", {}),
    ("qwen35_9b", "qwen3_5", "9B", 4, 4096, 1000, "full", {**_degree("tensor", 2)}),
    ("qwen35_27b", "qwen3_5", "27B", 4, 4096, 1000, "full", {**_degree("tensor", 4)}),
    (
        "qwen35_35b_a3b",
        "qwen3_5",
        "35B-A3B",
        4,
        4096,
        1000,
        "full",
        {**NO_GRAPHS, **_degree("tensor", 2), **_degree("expert", 8)},
    ),
    (
        "qwen35_122b_a10b",
        "qwen3_5",
        "122B-A10B",
        4,
        4096,
        1000,
        "full",
        {**NO_GRAPHS, **_degree("tensor", 4), **_degree("expert", 8)},
    ),
    (
        "qwen35_397b_a17b",
        "qwen3_5",
        "397B-A17B",
        4,
        4096,
        1000,
        "full",
        {**NO_GRAPHS, **_degree("tensor", 8), **_degree("expert", 16)},
    ),
    (
        "moonlight_16b_a3b",
        "kimi_k2_7",
        "moonlight-16B-A3B",
        4,
        4096,
        10000,
        "full",
        {**MUON, **NO_GRAPHS, **_degree("expert", 8)},
    ),
    ("kimi_vl_a3b", "kimi_k2_7", "Kimi-VL-A3B", 1, 4096, 10000, "full", {**MUON, **NO_GRAPHS, **_degree("expert", 8)}),
    (
        "kimi_k2_5",
        "kimi_k2_7",
        "Kimi-K2.5",
        4,
        4096,
        10000,
        "full",
        {**MUON, **NO_GRAPHS, **LOOPED, **_degree("expert", 8), **LOSS},
    ),
    ("muse_glimmer_30b", "muse_glimmer", "30B", 1, 8192, 1000, "full", {}),
    ("muse_glimmer_30b_mm", "muse_glimmer", "30B_mm", 1, 8192, 1000, "full", {**NO_GRAPHS}),
)
"""Function, model, flavor, sequences of a micro-batch, tokens of each, steps, activation checkpointing, others."""

STOCK_CONFIGS: Mapping[str, SomeKeys] = {
    name: {
        "model_spec.name": model,
        "model_spec.flavor": flavor,
        "training.num_tokens_per_microbatch_per_dp_rank": sequences * tokens,
        "training.max_context_length": tokens,
        "training.steps": steps,
        "activation_checkpoint": mode,
        "loss.name": "ChunkedLossWrapper",
        **others,
    }
    for name, model, flavor, sequences, tokens, steps, mode, others in _ROWS
}
"""Settings of its configurations, where they are not the defaults, by the name of the function."""


def find_model_name(function: str) -> str:
    """Returns the model of torchtitan that the name of a function has in it (``sft_qwen3_8b``); empty: none."""
    if function in STOCK_CONFIGS:
        return str(STOCK_CONFIGS[function]["model_spec.name"])
    names = {name for name, _ in FLAVORS}
    return next((name for name in names if re.search(rf"(^|_){name}(_|$)", function)), "")


def find_stock_config(name: str, module: str) -> SomeKeys | None:
    """Returns the settings of a configuration of torchtitan; None if it has none of this name.

    module: as ``--module`` names it; empty: any.
    """
    stock = STOCK_CONFIGS.get(name)
    model = module.removeprefix("torchtitan.models.").removesuffix(".config_registry")
    return stock if stock is not None and model in ("", stock["model_spec.name"]) else None
