"""The readers of configs by their ``model_type``; the module of a reader is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from meshcast.simulator.models.huggingface.config import Config

DECODERS = {
    "gpt2": "gpt.GPT2",
    "gpt_neox": "gpt.GPTNeoX",
    "opt": "gpt.OPT",
    "bloom": "gpt.Bloom",
    "mpt": "gpt.MPT",
    "llama": "llama.Llama",
    "llama4_text": "moe.Llama4",
    "mistral": "llama.Mistral",
    "mixtral": "moe.Mixtral",
    "qwen2": "llama.Qwen2",
    "qwen3": "llama.Qwen3",
    "qwen3_moe": "moe.Qwen3MoE",
    "deepseek_v2": "moe.DeepSeekV2",
    "deepseek_v3": "moe.DeepSeekV3",
    "gemma": "llama.Gemma",
    "gemma2": "gemma.Gemma2",
    "gemma3_text": "gemma.Gemma3Text",
    "phi3": "llama.Phi3",
    "granite": "llama.Granite",
    "exaone": "llama.Exaone",
    "exaone4": "gemma.Exaone4",
    "olmo2": "gemma.Olmo2",
    "cohere2": "gemma.Cohere2",
    "starcoder2": "gpt.Starcoder2",
    "falcon": "gpt.Falcon",
    "nemotron": "gpt.Nemotron",
    "gpt_oss": "moe.GptOss",
    "qwen2_moe": "moe.Qwen2MoE",
    "kimi_k2": "moe.KimiK2",
    "glm4_moe": "moe.Glm4MoE",
    "hunyuan_v1_dense": "llama.HunyuanDense",
    "hunyuan_v1_moe": "moe.HunyuanMoE",
    "grok-1": "moe.Grok1",
    "qwen3_next": "linear.Qwen3Next",
    "minimax": "linear.MiniMax",
    "minimax_text_01": "linear.MiniMaxText01",
    "nemotron_h": "hybrid.NemotronH",
    "mamba2": "hybrid.Mamba2",
    "smollm3": "dense.SmolLM3",
    "seed_oss": "dense.SeedOss",
    "olmo3": "dense.Olmo3",
    "arcee": "dense.Arcee",
    "jais2": "dense.Jais2",
    "glm": "dense.Glm",
    "glm4": "dense.Glm4",
    "ernie4_5": "dense.Ernie45",
    "ministral": "dense.Ministral",
    "ministral3": "dense.Ministral3",
    "helium": "dense.Helium",
    "internlm3": "dense.HeadsOf128",
    "iquestcoder": "dense.HeadsOf128",
    "cohere": "dense.Cohere",
    "stablelm": "dense.StableLM",
    "olmoe": "experts.Olmoe",
    "flex_olmo": "experts.FlexOlmo",
    "phimoe": "experts.PhiMoE",
    "granitemoe": "experts.GraniteMoE",
    "granitemoeshared": "experts.GraniteMoE",
    "dbrx": "experts.Dbrx",
    "exaone_moe": "experts.ExaoneMoE",
    "mellum": "experts.Mellum",
    "minimax_m2": "experts.MiniMaxM2",
    "dots1": "experts.Dots1",
    "solar_open": "experts.SolarOpen",
    "hy_v3": "experts.HYV3",
    "ernie4_5_moe": "experts.Ernie45MoE",
    "minicpm3": "experts.MiniCPM3",
}
"""Module and class of the readers of decoders."""

SUPPORTED = DECODERS | {
    "llava": "vision.Llava",
    "gemma3": "vision.Gemma3",
    "qwen2_vl": "vision.Qwen2VL",
    "qwen2_5_vl": "vision.Qwen25VL",
    "clip": "vision.CLIP",
    "t5": "encoder_decoder.T5",
    "mt5": "encoder_decoder.MT5",
}
"""The same of all readers."""


def find_reader(kind: str) -> type[Config]:
    """Returns the class that reads configs of a ``model_type``, a key of `SUPPORTED`."""
    module, name = SUPPORTED[kind].split(".")
    reader: type[Config] = getattr(import_module(f"meshcast.simulator.models.huggingface.{module}"), name)
    return reader
