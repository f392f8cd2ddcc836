"""Reads the ``config.json`` of a Hugging Face model.

Each supported ``model_type`` has a class (in `gpt`, `llama`, `gemma`, `moe`, `linear` ...) that states the keys it
reads, their defaults (those of the ``transformers`` library, release 4.57), the supported values, and the model.
Widths and counts that define a model have no default. Keys that do not change the cost of a step (token ids,
generation, initialisation, base and scaling of RoPE) are ignored. A key that does change it is read, or refused if its
value is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware.errors import ModelError, nearest
from simulator.models.huggingface.config import Config
from simulator.models.huggingface.gemma import Cohere2, Exaone4, Gemma2, Gemma3Text, Olmo2
from simulator.models.huggingface.gpt import GPT2, MPT, OPT, Bloom, Falcon, GPTNeoX, Nemotron, Starcoder2
from simulator.models.huggingface.hybrid import Mamba2, NemotronH
from simulator.models.huggingface.linear import MiniMax, MiniMaxText01, Qwen3Next
from simulator.models.huggingface.llama import (
    Exaone,
    Gemma,
    Granite,
    HunyuanDense,
    Llama,
    Mistral,
    Phi3,
    Qwen2,
    Qwen3,
)
from simulator.models.huggingface.moe import (
    DeepSeekV2,
    DeepSeekV3,
    Glm4MoE,
    GptOss,
    Grok1,
    HunyuanMoE,
    KimiK2,
    Llama4,
    Mixtral,
    Qwen2MoE,
    Qwen3MoE,
)
from simulator.models.model import Model, error_place, explain_errors

__all__ = ["SUPPORTED", "from_config"]

SUPPORTED: dict[str, type[Config]] = {
    "gpt2": GPT2,
    "gpt_neox": GPTNeoX,
    "opt": OPT,
    "bloom": Bloom,
    "mpt": MPT,
    "llama": Llama,
    "llama4_text": Llama4,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3MoE,
    "deepseek_v2": DeepSeekV2,
    "deepseek_v3": DeepSeekV3,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3Text,
    "phi3": Phi3,
    "granite": Granite,
    "exaone": Exaone,
    "exaone4": Exaone4,
    "olmo2": Olmo2,
    "cohere2": Cohere2,
    "starcoder2": Starcoder2,
    "falcon": Falcon,
    "nemotron": Nemotron,
    "gpt_oss": GptOss,
    "qwen2_moe": Qwen2MoE,
    "kimi_k2": KimiK2,
    "glm4_moe": Glm4MoE,
    "hunyuan_v1_dense": HunyuanDense,
    "hunyuan_v1_moe": HunyuanMoE,
    "grok-1": Grok1,
    "qwen3_next": Qwen3Next,
    "minimax": MiniMax,
    "minimax_text_01": MiniMaxText01,
    "nemotron_h": NemotronH,
    "mamba2": Mamba2,
}
"""Readers of configs by their ``model_type``."""


def from_config(
    config: Mapping[str, Any], where: str = "config.json", name: str | None = None, text: str = ""
) -> Model:
    """The model that a Hugging Face config describes.

    Args:
        config: the parsed ``config.json``.
        where: its place, for error messages.
        name: name of the model in reports; default: the config's ``_name_or_path``, else its ``model_type``.
        text: the text of the file, for the line numbers of error messages.

    Raises:
        ModelError: another ``model_type``, a missing key, or a value that meshcast does not support.
    """
    if not isinstance(config, Mapping):
        raise ModelError(where, "a Hugging Face config is a mapping", "Give the path of a config.json", config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in SUPPORTED:
        rule = "needed and missing" if kind is None else "meshcast does not support this architecture"
        remedy = nearest(str(kind), SUPPORTED) + ". Other models: give the fields of `model:` themselves"
        raise ModelError(error_place(where, "model_type", text), rule, remedy, kind)
    reader = SUPPORTED[kind]
    with explain_errors(where, text, reader.config_keys()):
        fields = reader.model_validate(config).fields()
        return Model.model_validate({"name": name or str(config.get("_name_or_path") or kind), **fields})
