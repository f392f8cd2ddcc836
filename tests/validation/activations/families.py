"""Small models of published families."""

from __future__ import annotations

from typing import Any

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 96, "seq": 16, "ffn": 96}
LLAMA = {**SMALL, **{"kv_heads": 2, "gated": True, "norm": "rmsnorm", "positions": "rope", "tied": False}}
GEMMA = {**LLAMA, "norm": "rmsnorm1p", "activation": "gelu"}
BARE = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}
MOE = {"experts": 4, "top_k": 2, "expert_ffn": 32}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope": 12, "qk_rope": 4, "v": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 32, "qk_layernorm": True},
    "mistral": {**LLAMA, "window": 8},
    "gemma": {**GEMMA, "kv_heads": 1, "head_dim": 32},
    "gemma-2": {**GEMMA, "norm_place": "both", "softcaps": ["attention"]},
    "gpt-2": {**SMALL, "dropout": 0.1, "activation": "gelu_new", "fused_qkv": True},
    "phi": {
        **{**SMALL, "positions": "rope", "rope_share": 0.5, "activation": "gelu_new"},
        **{"parallel_residual": True, "shared_norm": True},
    },
    "opt": {**SMALL, "dropout": 0.1, "activation": "relu"},
    "gpt-neox": {**SMALL, "positions": "rope", "rope_share": 0.25, "parallel_residual": True, "fused_qkv": True},
    "falcon": {
        **{**SMALL, **BARE, "positions": "rope", "kv_heads": 1, "fused_qkv": True},
        **{"parallel_residual": True, "shared_norm": True},
    },
    "nemotron": {**SMALL, **BARE, "positions": "rope", "kv_heads": 2, "activation": "relu2"},
    "deepseek": {**LLAMA, "kv_heads": 4, "mla": MLA},
    "mixtral": {**LLAMA, "moe": MOE},
    "qwen3-moe": {**LLAMA, "qk_layernorm": True, "moe": MOE},
}
UNFUSED = ("gemma-2",)
"""Families whose attention Transformers computes in separate operations: the fused kernels have no softcap."""
POLICIES = ("none", "full", "selective", "operators")
