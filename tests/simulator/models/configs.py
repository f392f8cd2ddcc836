"""Configs of released models and their parameter counts (configs.yaml), with the variants that tests change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def unfold(value: Any) -> Any:
    """Returns a value of the table, with its lists as long as they are."""
    if not isinstance(value, dict):
        return value
    if "times" in value:
        return value["of"] * value["times"]
    return list(range(value["below"])) if "below" in value else {key: unfold(inner) for key, inner in value.items()}


def rename_keys(config: dict[str, Any], **names: str) -> dict[str, Any]:
    """Returns the config with other names for some keys."""
    return {names.get(key, key): value for key, value in config.items()}


_TABLE = unfold(yaml.load(Path(__file__).with_suffix(".yaml").read_text("utf-8"), yaml.CSafeLoader))

CONFIGS: dict[str, dict[str, Any]] = _TABLE["configs"]
COUNTS: dict[str, int] = _TABLE["counts"]
PRINTED: dict[str, tuple[float, float | None, str]] = _TABLE["printed"]
VISION: dict[str, dict[str, Any]] = _TABLE["vision"]
VISION_COUNTS: dict[str, int] = _TABLE["vision_counts"]
ENCODER_DECODERS: dict[str, dict[str, Any]] = _TABLE["encoder_decoders"]
ENCODER_DECODER_COUNTS: dict[str, int] = _TABLE["encoder_decoder_counts"]
RESNET: dict[str, Any] = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "num_labels": 1000}
ROUND_TRIP: dict[str, dict[str, Any]] = _TABLE["presets"]

GPT2, LLAMA, NEOX, OPT, BLOOM, FOUNDRY, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, V2, V2_LITE, V3, GEMMA = (
    ROUND_TRIP[name]
    for name in (
        *("gpt2-124m", "llama2-7b", "gpt-neox-20b", "opt-1.3b", "bloom-176b", "mpt-7b", "mistral-7b", "mixtral-8x7b"),
        *("qwen2-7b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "gemma-7b"),
    )
)
LLAMA4, NEMOTRON, MPT = ROUND_TRIP["llama4-scout"], ROUND_TRIP["nemotron3-nano-30b"], _TABLE["mpt"]["mpt"]
LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
