"""Configs of released models, as far as their keys matter for cost, and the parameter counts of these models.

A count is that of all tensors, a tied matrix once, as the modelling code of ``transformers`` 4.57.3 makes them for that
config (on the meta device; kimi_k2, exaone and grok-1, which have code of their own, by the sum that the test states).
PRINTED holds what the publication of a model says: parameters, those that a token passes, and where.
"""

from __future__ import annotations

from typing import Any

WORDS = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"


def facts(kind: str, *shape: int, **other: Any) -> dict[str, Any]:
    """A config of `kind` with layers, width, heads, width of the MLP, vocabulary and positions, and other keys."""
    return {"model_type": kind} | dict(zip((*WORDS, "max_position_embeddings"), shape, strict=True)) | other


def rename_keys(config: dict[str, Any], **names: str) -> dict[str, Any]:
    """The config with other names for some keys."""
    return {names.get(key, key): value for key, value in config.items()}


CONFIGS: dict[str, dict[str, Any]] = {
    "google/gemma-2-2b": facts(
        *("gemma2", 26, 2304, 8, 9216, 256000, 8192),
        **{"num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "google/gemma-2-9b": facts(
        *("gemma2", 42, 3584, 16, 14336, 256000, 8192), num_key_value_heads=8, head_dim=256, sliding_window=4096
    ),
    "google/gemma-3-1b-pt": facts(
        *("gemma3_text", 26, 1152, 4, 6912, 262144, 32768),
        **{"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "microsoft/Phi-3-mini-4k-instruct": facts(
        *("phi3", 32, 3072, 32, 8192, 32064, 4096), num_key_value_heads=32, sliding_window=2047
    ),
    "microsoft/Phi-4-mini-instruct": facts(
        *("phi3", 32, 3072, 24, 8192, 200064, 131072),
        **{"num_key_value_heads": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "zai-org/GLM-4.5-Air": facts(
        *("glm4_moe", 46, 4096, 96, 10944, 151552, 131072),
        **{"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "use_qk_norm": False},
        **{"partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    ),
    "zai-org/GLM-4.5": facts(
        *("glm4_moe", 92, 5120, 96, 12288, 151552, 131072),
        **{"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "use_qk_norm": True},
        **{"partial_rotary_factor": 0.5, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1536, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": facts(
        *("qwen2_moe", 24, 2048, 16, 5632, 151936, 8192),
        **{"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        **{"shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "use_sliding_window": False},
        **{"sliding_window": 32768, "max_window_layers": 21},
    ),
    "Qwen/Qwen2-57B-A14B": facts(
        *("qwen2_moe", 28, 3584, 28, 18944, 151936, 131072),
        **{"num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560},
        **{"shared_expert_intermediate_size": 20480, "decoder_sparse_step": 1, "use_sliding_window": False},
        **{"sliding_window": 65536, "max_window_layers": 28},
    ),
    "allenai/OLMo-2-1124-7B": facts(*("olmo2", 32, 4096, 32, 11008, 100352, 4096), num_key_value_heads=32),
    "allenai/OLMo-2-0325-32B": facts(*("olmo2", 64, 5120, 40, 27648, 100352, 4096), num_key_value_heads=8),
    "ibm-granite/granite-3.1-2b-base": facts(
        *("granite", 40, 2048, 32, 8192, 49155, 131072),
        **{"num_key_value_heads": 8, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": facts(
        *("cohere2", 32, 4096, 32, 14336, 256000, 132096),
        **{"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4},
        **{"logit_scale": 0.25, "attention_bias": False},
    ),
    "bigcode/starcoder2-3b": facts(
        *("starcoder2", 30, 3072, 24, 12288, 49152, 16384),
        **{"num_key_value_heads": 2, "sliding_window": 4096, "use_bias": True},
        **{"attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1},
    ),
    "tiiuae/falcon-7b": {
        **{"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71},
        **{"vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
        **{"new_decoder_architecture": False},
    },
    "tiiuae/falcon-40b": {
        **{"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128},
        **{"vocab_size": 65024, "num_kv_heads": 8, "parallel_attn": True, "bias": False, "alibi": False},
        **{"new_decoder_architecture": True},
    },
    "tiiuae/falcon-rw-1b": {
        **{"model_type": "falcon", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32},
        **{"vocab_size": 50304, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    },
    "tiiuae/falcon-11B": {
        **{"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 4096, "num_attention_heads": 32},
        **{"vocab_size": 65024, "num_kv_heads": 8, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        **{"ffn_hidden_size": 16384, "max_position_embeddings": 8192},
    },
    "LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct": rename_keys(
        facts(*("exaone", 32, 4096, 32, 14336, 102400, 4096), num_key_value_heads=8, activation_function="silu"),
        num_hidden_layers="num_layers",
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": facts(
        *("exaone4", 30, 2048, 32, 4096, 102400, 65536),
        **{"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "sliding_window": None},
        **{"sliding_window_pattern": None, "layer_types": ["full_attention"] * 30},
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": facts(
        *("exaone4", 64, 5120, 40, 27392, 102400, 131072),
        **{"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
    ),
    "tencent/Hunyuan-0.5B-Pretrain": facts(
        *("hunyuan_v1_dense", 24, 1024, 16, 3584, 120818, 262144),
        **{"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "use_cla": False},
    ),
    "tencent/Hunyuan-A13B-Instruct": facts(
        *("hunyuan_v1_moe", 32, 4096, 32, 3072, 128167, 32768),
        **{"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "num_experts": 64},
        **{"moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32},
    ),
    "nvidia/nemotron-4-15b": facts(
        *("nemotron", 32, 6144, 48, 24576, 256000, 4096), num_key_value_heads=8, partial_rotary_factor=0.5
    ),
    "openai/gpt-oss-20b": facts(
        *("gpt_oss", 24, 2880, 64, 2880, 201088, 131072),
        **{"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
        **{"sliding_window": 128, "attention_bias": True, "quantization_config": {"quant_method": "mxfp4"}},
        **{"layer_types": ["sliding_attention", "full_attention"] * 12},
    ),
    "openai/gpt-oss-120b": facts(
        *("gpt_oss", 36, 2880, 64, 2880, 201088, 131072),
        **{"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    "moonshotai/Kimi-K2-Base": facts(
        *("kimi_k2", 61, 7168, 64, 18432, 163840, 131072),
        **{"num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 0, "quantization_config": {"quant_method": "fp8"}},
    ),
    "hpcai-tech/grok-1": facts(
        *("grok-1", 64, 6144, 48, 32768, 131072, 8192),
        **{"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True},
        **{"max_attn_value": 30.0, "output_multiplier_scale": 0.5773502691896257},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": facts(
        *("qwen3_next", 48, 2048, 16, 5120, 151936, 262144),
        **{"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4},
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
        **{"linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1},
    ),
    "MiniMaxAI/MiniMax-Text-01-hf": facts(
        *("minimax", 80, 6144, 64, 9216, 200064, 10240000),
        **{"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32, "num_experts_per_tok": 2},
        **{"block_size": 256, "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10},
    ),
    "MiniMaxAI/MiniMax-Text-01": facts(
        *("minimax_text_01", 80, 6144, 64, 9216, 200064, 10240000),
        **{"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32, "num_experts_per_tok": 2},
        **{"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10, "postnorm": True, "rotary_dim": 64},
    ),
    "AntonV/mamba2-1.3b-hf": {
        **{"model_type": "mamba2", "num_hidden_layers": 48, "hidden_size": 2048, "num_heads": 64, "head_dim": 64},
        **{"vocab_size": 50288, "state_size": 128, "n_groups": 1, "expand": 2, "tie_word_embeddings": True},
        **{"chunk_size": 256},
    },
    "mistralai/Mamba-Codestral-7B-v0.1": {
        **{"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "num_heads": 128, "head_dim": 64},
        **{"vocab_size": 32768, "state_size": 128, "n_groups": 8, "expand": 2, "tie_word_embeddings": False},
    },
}

LANGUAGE_OF_QWEN = facts(
    *("qwen2", 28, 3584, 28, 18944, 152064, 32768),
    **{"num_key_value_heads": 4, "tie_word_embeddings": False, "use_sliding_window": False, "max_window_layers": 28},
)
VISION: dict[str, dict[str, Any]] = {
    "llava-hf/llava-1.5-7b-hf": {
        **{"model_type": "llava", "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        **{"projector_hidden_act": "gelu"},
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {
            **{"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096},
            **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
        },
    },
    "google/gemma-3-4b-pt": {
        **{"model_type": "gemma3", "mm_tokens_per_image": 256},
        "text_config": {
            **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
            **{"num_hidden_layers": 34, "sliding_window": 1024},
        },
        "vision_config": {
            **{"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "patch_size": 14},
            **{"intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27},
            "vision_use_head": False,
        },
    },
    "Qwen/Qwen2-VL-7B-Instruct": LANGUAGE_OF_QWEN
    | {
        "model_type": "qwen2_vl",
        "vision_config": {
            **{"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584},
            **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
        },
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": LANGUAGE_OF_QWEN
    | {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3},
            **{"out_hidden_size": 3584, "patch_size": 14, "window_size": 112, "spatial_merge_size": 2},
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "openai/clip-vit-large-patch14": {
        **{"model_type": "clip", "projection_dim": 768},
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "vision_config": {
            **{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
            **{"num_hidden_layers": 24, "patch_size": 14},
        },
    },
}
"""Models that see images."""

VISION_COUNTS: dict[str, int] = {
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
    "google/gemma-3-4b-pt": 4_300_079_472,  # also safetensors on the page of the model
    "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "openai/clip-vit-large-patch14": 427_616_513,
}

COUNTS: dict[str, int] = {
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    # Less the 128 (160) corrections of each router, which are buffers there, and multi-token prediction.
    "zai-org/GLM-4.5-Air": 106_852_245_504,
    "zai-org/GLM-4.5": 352_797_814_784,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen/Qwen2-57B-A14B": 57_408_658_944,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "ibm-granite/granite-3.1-2b-base": 2_533_531_648,
    "CohereLabs/c4ai-command-r7b-12-2024": 8_028_033_024,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "tiiuae/falcon-7b": 6_921_720_704,
    "tiiuae/falcon-40b": 41_303_293_952,
    "tiiuae/falcon-rw-1b": 1_311_625_216,
    "tiiuae/falcon-11B": 10_836_484_096,
    "LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct": 7_818_448_896,
    "LGAI-EXAONE/EXAONE-4.0-1.2B": 1_279_391_488,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32_003_216_384,
    "tencent/Hunyuan-0.5B-Pretrain": 539_010_048,
    "tencent/Hunyuan-A13B-Instruct": 80_393_183_232,
    "nvidia/nemotron-4-15b": 15_628_775_424,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "moonshotai/Kimi-K2-Base": 1_026_408_232_448,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "MiniMaxAI/MiniMax-Text-01-hf": 456_089_655_296,
    "MiniMaxAI/MiniMax-Text-01": 456_089_655_296,
    "AntonV/mamba2-1.3b-hf": 1_343_757_312,
    "mistralai/Mamba-Codestral-7B-v0.1": 7_285_403_648,
}

PRINTED: dict[str, tuple[float, float | None, str]] = {
    "google/gemma-2-2b": (2.614341888, None, "page of the model: safetensors"),
    "google/gemma-3-1b-pt": (0.999885952, None, "page of the model: safetensors"),
    "microsoft/Phi-3-mini-4k-instruct": (3.821079552, None, "page of the model: safetensors"),
    "allenai/OLMo-2-1124-7B": (7.298617344, None, "page of the model: safetensors"),
    "ibm-granite/granite-3.1-2b-base": (2.533531648, None, "page of the model: safetensors"),
    "Qwen/Qwen1.5-MoE-A2.7B": (14.315784192, 2.7, "page of the model: safetensors; its name"),
    "Qwen/Qwen2-57B-A14B": (57, 14, "its name"),
    "openai/gpt-oss-20b": (20.914757184, 3.6, "page of the model: safetensors; arXiv 2508.10925, table 1"),
    "openai/gpt-oss-120b": (116.829156672, 5.1, "page of the model: safetensors; arXiv 2508.10925, table 1"),
    "moonshotai/Kimi-K2-Base": (1026.408232448, 32.6, "page of the model: safetensors; arXiv 2507.20534, table 2"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79.674391296, 3, "page of Qwen/Qwen3-Coder-Next: safetensors; its name"),
    "MiniMaxAI/MiniMax-Text-01": (456, 45.9, "arXiv 2501.08313, abstract"),
    "tencent/Hunyuan-A13B-Instruct": (80, 13, "README of Tencent-Hunyuan/Hunyuan-A13B"),
}
"""Parameters, and those that a token passes, in units of 1e9 as printed (None: not printed), and where."""

ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "google-t5/t5-base": {
        **{"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        **{"vocab_size": 32128, "n_positions": 512, "relative_attention_num_buckets": 32, "dropout_rate": 0.1},
    },
    "google-t5/t5-11b": {
        **{"model_type": "t5", "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128},
        **{"vocab_size": 32128, "n_positions": 512},
    },
    "google/flan-t5-xxl": {
        **{"model_type": "t5", "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
        **{"vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    },
    "google/mt5-base": {
        **{"model_type": "mt5", "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
        **{"vocab_size": 250112, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    },
}
"""Encoders with decoders."""

ENCODER_DECODER_COUNTS: dict[str, int] = {
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-11b": 11_307_321_344,
    "google/flan-t5-xxl": 11_135_332_352,
    "google/mt5-base": 582_401_280,
}

# Configs of presets.

# The keys of openai-community/gpt2 that describe the model, and two that do not.
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
# Keys of these configs that matter for cost; a missing key has the default of the library.
NEOX = facts("gpt_neox", 44, 6144, 64, 24576, 50432, 2048, rotary_pct=0.25, use_parallel_residual=True)
OPT = rename_keys(
    facts("opt", 24, 2048, 32, 8192, 50272, 2048, dropout=0.1, attention_dropout=0.0, word_embed_proj_dim=2048),
    intermediate_size="ffn_dim",
)
BLOOM: dict[str, Any] = {
    **{"model_type": "bloom", "n_layer": 70, "n_embed": 14336, "num_attention_heads": 112, "vocab_size": 250880},
    **{"seq_length": 2048, "hidden_dropout": 0.0, "attention_dropout": 0.0, "pretraining_tp": 4},
}
MPT: dict[str, Any] = {
    **{"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4},
    **{"vocab_size": 50432, "max_seq_len": 2048, "no_bias": True, "learned_pos_emb": True, "resid_pdrop": 0},
    **{"attn_config": {"alibi": True, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": None, "qk_ln": False}},
}
FOUNDRY = MPT | {"vocab_size": 50368, "no_bias": False, "attn_config": {"alibi": False, "attn_impl": "flash"}}
MISTRAL = facts("mistral", 32, 4096, 32, 14336, 32000, 32768, num_key_value_heads=8, sliding_window=4096)
MIXTRAL = facts(
    *("mixtral", 32, 4096, 32, 14336, 32000, 32768),
    **{"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
)
WINDOWS_OFF = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
QWEN2 = facts("qwen2", 28, 3584, 28, 18944, 152064, 131072, num_key_value_heads=4, **WINDOWS_OFF)
QWEN3 = facts("qwen3", 36, 4096, 32, 12288, 151936, 40960, num_key_value_heads=8, head_dim=128)
QWEN3_MOE = facts(
    *("qwen3_moe", 48, 2048, 32, 6144, 151936, 40960),
    **{"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": None},
)
LLAMA4 = facts(
    *("llama4_text", 48, 5120, 40, 8192, 202048, 131072),
    **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": 16},
    **{"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "moe_layers": list(range(48)), "use_qk_norm": True},
    **{"no_rope_layers": [1, 1, 1, 0] * 12, "attention_chunk_size": 8192, "attn_temperature_tuning": True},
)
LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2 = facts(
    *("deepseek_v2", 60, 5120, 128, 12288, 102400, 163840),
    **{"num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 160, "n_shared_experts": 2},
    **{"num_experts_per_tok": 6, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "moe_layer_freq": 1},
    **LATENTS,
)
V2_LITE = V2 | {
    **{"num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 10944},
    **{"num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64, "moe_intermediate_size": 1408},
}
V3 = facts(
    *("deepseek_v3", 61, 7168, 128, 18432, 129280, 163840),
    **{"num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1},
    **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
    **{"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
    **LATENTS,
)
GEMMA = facts("gemma", 28, 3072, 16, 24576, 256000, 8192, num_key_value_heads=16, head_dim=256, hidden_act="gelu")
NEMOTRON = facts(
    *("nemotron_h", 52, 2688, 32, 1856, 131072, 262144),
    **{"num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128},
    **{"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_groups": 8},
    **{"conv_kernel": 4, "chunk_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6},
    **{"moe_intermediate_size": 1856, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712},
    **{"mlp_hidden_act": "relu2"},
)

ROUND_TRIP: dict[str, dict[str, Any]] = {
    **{"gpt2-124m": GPT2, "llama2-7b": LLAMA, "gpt-neox-20b": NEOX, "opt-1.3b": OPT, "bloom-176b": BLOOM},
    **{"mpt-7b": FOUNDRY, "mistral-7b": MISTRAL, "mixtral-8x7b": MIXTRAL, "qwen2-7b": QWEN2, "qwen3-8b": QWEN3},
    **{"qwen3-30b-a3b": QWEN3_MOE, "deepseek-v2": V2, "deepseek-v2-lite": V2_LITE, "deepseek-v3": V3},
    **{"gemma-7b": GEMMA, "llama4-scout": LLAMA4, "nemotron3-nano-30b": NEMOTRON},
}
