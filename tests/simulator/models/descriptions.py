"""Descriptions of models that tests change."""

from __future__ import annotations

GPT = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "seq": 2048}

EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 32}
MLA = {"q_lora_rank": 40, "kv_lora_rank": 64, "qk_nope": 32, "qk_rope": 16, "v": 24}
LATENT = GPT | {"norm": "rmsnorm", "positions": "rope", "mla": MLA}
