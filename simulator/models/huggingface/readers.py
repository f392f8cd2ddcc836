"""The readers of configs of decoders, by their ``model_type``."""

from __future__ import annotations

from meshcast.simulator.models.huggingface.config import Config
from meshcast.simulator.models.huggingface.gemma import Cohere2, Exaone4, Gemma2, Gemma3Text, Olmo2
from meshcast.simulator.models.huggingface.gpt import GPT2, MPT, OPT, Bloom, Falcon, GPTNeoX, Nemotron, Starcoder2
from meshcast.simulator.models.huggingface.hybrid import Mamba2, NemotronH
from meshcast.simulator.models.huggingface.linear import MiniMax, MiniMaxText01, Qwen3Next
from meshcast.simulator.models.huggingface.llama import (
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
from meshcast.simulator.models.huggingface.moe import (
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

DECODERS: dict[str, type[Config]] = {
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
