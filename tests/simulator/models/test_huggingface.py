"""Hugging Face configs: the models they describe, and keys that are refused rather than dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.huggingface import SUPPORTED, from_config
from meshcast.simulator.models.load import load_model
from tests.simulator.models.configs import CONFIGS, ENCODER_DECODERS, VISION, facts
from tests.simulator.models.configs import rename_keys as renamed

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama3-70b"

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


def test_the_example_is_the_preset() -> None:
    assert load_model(str(EXAMPLE)) == load_model("llama3-70b")
    assert load_model(str(EXAMPLE / "config.json")) == load_model("llama3-70b")
    assert load_model("llama3-70b/config.json", base=EXAMPLE.parent) == load_model("llama3-70b")


def test_gpt2() -> None:
    assert from_config(GPT2, name="gpt2-124m") == load_model("gpt2-124m")
    assert from_config(GPT2).name == "gpt2"
    assert from_config(GPT2 | {"_name_or_path": "openai-community/gpt2"}).name == "openai-community/gpt2"


def test_gpt2_defaults_and_options() -> None:
    bare = {key: GPT2[key] for key in ("model_type", "n_embd", "n_head", "n_layer", "n_positions", "vocab_size")}
    assert from_config(bare) == from_config(GPT2)
    assert from_config(GPT2 | {"n_inner": None}).ffn == 3072
    assert from_config(GPT2 | {"n_inner": 1000}).ffn == 1000
    assert not from_config(GPT2 | {"tie_word_embeddings": False}).tied
    none = {"resid_pdrop": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    assert from_config(GPT2 | none).dropout == 0
    other_names = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
    renamed = {key: value for key, value in GPT2.items() if key not in ("n_embd", "n_head", "n_layer", "n_positions")}
    assert from_config(renamed | other_names) == from_config(GPT2)


def test_llama_defaults_and_options() -> None:
    m = from_config(LLAMA, name="llama2-7b")
    assert m == load_model("llama2-7b")
    assert from_config(LLAMA | {"num_key_value_heads": None, "head_dim": None}, name="llama2-7b") == m
    assert from_config(LLAMA | {"tie_word_embeddings": True}).tied
    assert from_config(LLAMA | {"head_dim": 64}).head_dim == 64
    biased = from_config(LLAMA | {"attention_bias": True})
    assert (biased.qkv_bias, biased.proj_bias, biased.mlp_bias) == (True, True, False)
    assert biased.layer_parameters() - m.layer_parameters() == 4 * 4096
    biased = from_config(LLAMA | {"mlp_bias": True})
    assert biased.layer_parameters() - m.layer_parameters() == 2 * 11008 + 4096
    scaled = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
    assert from_config(LLAMA | scaled, name="llama2-7b") == m


# Keys of these configs that matter for cost; a missing key has the default of the library.
NEOX = facts("gpt_neox", 44, 6144, 64, 24576, 50432, 2048, rotary_pct=0.25, use_parallel_residual=True)
OPT = renamed(
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

ROUND_TRIP = {
    **{"gpt2-124m": GPT2, "llama2-7b": LLAMA, "gpt-neox-20b": NEOX, "opt-1.3b": OPT, "bloom-176b": BLOOM},
    **{"mpt-7b": FOUNDRY, "mistral-7b": MISTRAL, "mixtral-8x7b": MIXTRAL, "qwen2-7b": QWEN2, "qwen3-8b": QWEN3},
    **{"qwen3-30b-a3b": QWEN3_MOE, "deepseek-v2": V2, "deepseek-v2-lite": V2_LITE, "deepseek-v3": V3},
    **{"gemma-7b": GEMMA, "llama4-scout": LLAMA4, "nemotron3-nano-30b": NEMOTRON},
}


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_configs_give_the_presets(name: str) -> None:
    """All but the default sequence: configs name the longest one that the model takes."""
    m = from_config(ROUND_TRIP[name], name=name)
    changed = {"seq": m.seq} | ({"position_rows": m.position_rows} if m.positions == "learned" else {})
    assert m == load_model({"preset": name, "name": name, **changed})


def test_every_kind_is_tried() -> None:
    tried = {
        config["model_type"]
        for config in (*ROUND_TRIP.values(), *CONFIGS.values(), *VISION.values(), *ENCODER_DECODERS.values())
    }
    assert tried == set(SUPPORTED)


# Keys that are left out and mean the default of the library, here the value of the config anyway.
LEFT_OUT = {
    "gpt_neox": (NEOX, ["rotary_pct", "use_parallel_residual"]),
    "opt": (OPT, ["dropout", "attention_dropout", "word_embed_proj_dim"]),
    "bloom": (BLOOM, ["seq_length", "hidden_dropout", "attention_dropout"]),
    "mpt": (MPT, ["expansion_ratio", "no_bias", "learned_pos_emb", "resid_pdrop", "attn_config"]),
    "mistral": (MISTRAL, ["num_key_value_heads", "sliding_window"]),
    "mixtral": (MIXTRAL, ["num_key_value_heads", "num_local_experts", "num_experts_per_tok", "sliding_window"]),
    "qwen2": (QWEN2, ["use_sliding_window", "sliding_window", "max_window_layers"]),
    "qwen3": (QWEN3, ["head_dim"]),
    "qwen3_moe": (QWEN3_MOE, ["num_experts", "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size"]),
    "deepseek_v2": (V2, [*LATENTS, "q_lora_rank", "n_shared_experts", "moe_layer_freq"]),
    "deepseek_v3": (V3, [*LATENTS, "q_lora_rank", "n_routed_experts", "first_k_dense_replace", "topk_method"]),
    "gemma": (GEMMA, ["head_dim", "hidden_act", "num_key_value_heads"]),
    "nemotron_h": (NEMOTRON, ["head_dim", "conv_kernel", "chunk_size", "n_shared_experts", "mlp_hidden_act"]),
    "llama4_text": (LLAMA4, [key for key in LLAMA4 if key not in LLAMA and key not in ("model_type", "head_dim")]),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_defaults_are_those_of_the_library(kind: str) -> None:
    config, keys = LEFT_OUT[kind]
    assert from_config(without(config, *keys)) == from_config(config)


def test_mpt() -> None:
    released = from_config(MPT)
    assert released.parameters == 6_649_286_656, "mosaicml/mpt-7b, safetensors metadata"
    assert (released.positions, released.norm, released.mlp_bias) == ("alibi", "rmsnorm", False)
    attention = MPT["attn_config"]
    one = from_config(MPT | {"attn_config": attention | {"attn_type": "multiquery_attention"}})
    assert one.kv_heads == 1
    grouped = attention | {"attn_type": "grouped_query_attention", "kv_n_heads": 8, "alibi": False, "rope": True}
    assert (from_config(MPT | {"attn_config": grouped}).kv_heads) == 8
    assert (from_config(MPT | {"attn_config": grouped}).positions) == "rope"
    none = from_config(MPT | {"attn_config": {"alibi": False}, "learned_pos_emb": False})
    assert none.positions == "none"
    assert from_config(MPT | {"attn_config": {"sliding_window_size": 1023}}).window == 1024
    assert from_config(MPT | {"expansion_ratio": 2.5}).ffn == 10240
    glu = from_config(MPT | {"ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 10752}})
    assert (glu.gated, glu.ffn) == (True, 10752)


def test_chunks() -> None:
    scout = from_config(LLAMA4)
    assert (scout.attention_chunk, scout.full_every, scout.full_rope, scout.qk_layernorm) == (8192, 4, False, "l2")
    assert [scout.kind(layer).local for layer in range(8)] == [True, True, True, False] * 2
    other = from_config(LLAMA4 | {"no_rope_layers": [], "no_rope_layer_interval": 3})
    assert (other.full_every, other.full_rope) == (3, False)
    every_second = without(LLAMA4, "moe_layers") | {"interleave_moe_layer_step": 2, "use_qk_norm": False}
    assert [from_config(every_second).is_moe(layer) for layer in range(4)] == [False, True, False, True]
    assert not from_config(every_second).qk_layernorm
    dense = LLAMA4 | {"moe_layers": [], "no_rope_layers": [1] * 48, "layer_types": ["full_attention"] * 48}
    assert (from_config(dense).moe, from_config(dense).ffn, from_config(dense).attention_chunk) == (None, 16384, None)
    chunks = from_config(dense | {"layer_types": ["chunked_attention"] * 48})
    assert (chunks.attention_chunk, chunks.full_every, chunks.full_rope) == (8192, 0, True)


def test_windows() -> None:
    assert from_config(MISTRAL | {"sliding_window": None}).window is None
    on = QWEN2 | {"use_sliding_window": True, "sliding_window": 4096}
    assert from_config(on).window is None, "the first 28 layers, which are all, have none"
    assert from_config(on | {"max_window_layers": 0}).window == 4096
    every = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 7
    mixed = from_config(on | {"layer_types": every})
    assert (mixed.window, mixed.full_every) == (4096, 4)
    assert from_config(on | {"layer_types": ["full_attention"] * 28}).window is None
    assert from_config(QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 4096}).window == 4096


def test_experts() -> None:
    sparse = from_config(QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 6})
    assert [layer for layer in range(6) if sparse.is_moe(layer)] == [1, 3, 5]
    start = from_config(QWEN3_MOE | {"mlp_only_layers": [1, 0]})
    assert start.moe is not None and start.moe.first_dense == 2
    assert from_config(QWEN3_MOE | {"decoder_sparse_step": 49}).moe is None
    rare = from_config(V2 | {"moe_layer_freq": 3, "num_hidden_layers": 8})
    assert [layer for layer in range(8) if rare.is_moe(layer)] == [3, 6]
    last = from_config(V2 | {"first_k_dense_replace": 59})
    assert [layer for layer in range(60) if last.is_moe(layer)] == [59]
    assert from_config(V3 | {"num_hidden_layers": 3}).moe is None
    dense = from_config(V2 | {"n_routed_experts": None})
    assert dense.moe is None and dense.mla is not None
    unshared = from_config(V2 | {"n_shared_experts": None}).moe
    assert unshared is not None and unshared.shared_ffn == 0
    greedy = from_config(V3 | {"topk_method": "greedy", "num_nextn_predict_layers": 0})
    assert greedy.moe is not None and not greedy.moe.router_bias and greedy.mtp == 0


def test_biases_and_other_options() -> None:
    assert not from_config(NEOX | {"attention_bias": False}).qkv_bias
    assert from_config(NEOX | {"attention_bias": False}).mlp_bias
    assert not from_config(NEOX | {"use_parallel_residual": False}).parallel_residual
    assert not from_config(OPT | {"enable_bias": False}).mlp_bias
    assert from_config(QWEN3 | {"attention_bias": True}).proj_bias
    assert from_config(GEMMA | {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu"}) == from_config(GEMMA)
    assert from_config(GEMMA | {"hidden_activation": None}) == from_config(GEMMA)
    assert from_config(GEMMA | {"attention_bias": True}).qkv_bias
    assert from_config(BLOOM | {"hidden_dropout": 0.1, "attention_dropout": 0.1}).dropout == 0.1
    assert from_config(renamed(BLOOM, n_embed="hidden_size", n_layer="num_hidden_layers")) == from_config(BLOOM)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


REFUSED = {
    "experts over a latent": (NEMOTRON | {"moe_latent_size": 1024}, "config.json.moe_latent_size", "latent"),
    "further tokens of a hybrid": (
        *(NEMOTRON | {"num_nextn_predict_layers": 1}, "config.json.num_nextn_predict_layers", "multi-token"),
    ),
    "another architecture": (
        LLAMA | {"model_type": "mamba"},
        "config.json.model_type",
        "fields of `model:` themselves",
    ),
    "nearly an architecture": (LLAMA | {"model_type": "lama"}, "config.json.model_type", "Did you mean 'llama'"),
    "no model_type": (without(LLAMA, "model_type"), "config.json.model_type", "missing"),
    "model_type no text": (LLAMA | {"model_type": ["llama"]}, "config.json.model_type", "gpt2, gpt_neox"),
    "not a mapping": ([LLAMA], "config.json", "mapping"),
    "one key missing": (without(LLAMA, "vocab_size"), "config.json.vocab_size", "missing"),
    "three keys missing": (
        without(LLAMA, "vocab_size", "hidden_size", "intermediate_size"),
        "config.json.hidden_size",
        "hidden_size, intermediate_size, vocab_size",
    ),
    "gpt2 key missing": (without(GPT2, "n_embd"), "config.json.n_embd", "missing"),
    "null where needed": (LLAMA | {"hidden_size": None}, "config.json.hidden_size", "missing"),
    "activation": (LLAMA | {"hidden_act": "relu2"}, "config.json.hidden_act", "silu"),
    "gpt2 activation": (GPT2 | {"activation_function": "relu"}, "config.json.activation_function", "gelu"),
    "cross-attention": (GPT2 | {"add_cross_attention": True}, "config.json.add_cross_attention", "cross-attention"),
    "half a dropout": (GPT2 | {"attn_pdrop": 0.0}, "config.json.attn_pdrop", "resid_pdrop is 0.1"),
    "attention dropout": (LLAMA | {"attention_dropout": 0.1}, "config.json.attention_dropout", "attention alone"),
    "NaN dropout": (GPT2 | {"resid_pdrop": float("nan")}, "config.json.resid_pdrop", "finite"),
    "quantised": (LLAMA | {"quantization_config": {"bits": 4}}, "config.json.quantization_config", "quantised"),
    "text for a number": (LLAMA | {"hidden_size": "4096"}, "config.json.hidden_size", "whole number"),
    "a list for a number": (LLAMA | {"num_hidden_layers": [32]}, "config.json.num_hidden_layers", "whole number"),
    "zero layers": (LLAMA | {"num_hidden_layers": 0}, "config.json.num_hidden_layers", "at least 1"),
    "huge": (LLAMA | {"vocab_size": 10**18}, "config.json.vocab_size", "at most"),
    "NaN": (LLAMA | {"vocab_size": float("nan")}, "config.json.vocab_size", "whole number"),
    "kv heads": (LLAMA | {"num_key_value_heads": 5}, "config.json.num_key_value_heads", "divide heads (32)"),
    "head width": (LLAMA | {"hidden_size": 4097}, "config.json.hidden_size", "multiple of heads (32)"),
    "norm after the branches": (OPT | {"do_layer_norm_before": False}, "config.json.do_layer_norm_before", "after"),
    "narrow embedding": (OPT | {"word_embed_proj_dim": 512}, "config.json.word_embed_proj_dim", "hidden_size (2048)"),
    "no final norm": (OPT | {"_remove_final_layer_norm": True}, "config.json._remove_final_layer_norm", "final norm"),
    "norms without weights": (
        *(OPT | {"layer_norm_elementwise_affine": False}, "config.json.layer_norm_elementwise_affine", "weights"),
    ),
    "dropped layers": (OPT | {"layerdrop": 0.1}, "config.json.layerdrop", "whole layers"),
    "half a dropout of bloom": (BLOOM | {"hidden_dropout": 0.1}, "config.json.attention_dropout", "some places"),
    "residual from the norm": (
        *(BLOOM | {"apply_residual_connection_post_layernorm": True},),
        *("config.json.apply_residual_connection_post_layernorm", "norm's output"),
    ),
    "odd share of rope": (NEOX | {"rotary_pct": 0.27}, "config.json.rotary_pct", "would rotate 25"),
    "share of rope over one": (NEOX | {"rotary_pct": 1.5}, "config.json.rotary_pct", "at most 1"),
    "norms on all heads": (MPT | {"attn_config": {"qk_ln": True}}, "config.json.attn_config.qk_ln", "queries and keys"),
    "clipping": (MPT | {"attn_config": {"clip_qkv": 6}}, "config.json.attn_config.clip_qkv", "clipping"),
    "a prefix": (MPT | {"attn_config": {"prefix_lm": True}}, "config.json.attn_config.prefix_lm", "prefix"),
    "attention by document": (
        *(MPT | {"attn_config": {"attn_uses_sequence_id": True}},),
        *("config.json.attn_config.attn_uses_sequence_id", "document"),
    ),
    "attention no mapping": (MPT | {"attn_config": "flash"}, "config.json.attn_config", "mapping"),
    "half a dropout of mpt": (MPT | {"attn_config": {"attn_pdrop": 0.1}}, "config.json.attn_config.attn_pdrop", "both"),
    "unknown mlp": (MPT | {"ffn_config": {"ffn_type": "mb_moe"}}, "config.json.ffn_config.ffn_type", "mptmlp"),
    "differing layers": (MPT | {"block_overrides": {"order": []}}, "config.json.block_overrides", "differ"),
    "windows in some layers": (
        *(QWEN2 | {"use_sliding_window": True, "max_window_layers": 14}, "config.json.max_window_layers", "every n-th"),
    ),
    "chunks in some layers": (
        *(LLAMA4 | {"no_rope_layers": [1] * 47 + [0], "layer_types": ["chunked_attention"] * 48},),
        *("config.json.no_rope_layers", "full attention"),
    ),
    "no rope without chunks": (LLAMA4 | {"attention_chunk_size": None}, "config.json.no_rope_layers", "full attention"),
    "types of too few layers": (QWEN3 | {"layer_types": ["full_attention"]}, "config.json.layer_types", "36 layers"),
    "unknown type of layer": (
        *(QWEN3 | {"layer_types": ["linear_attention"] * 36}, "config.json.layer_types[0]", "full_attention"),
    ),
    "scattered dense layers": (QWEN3_MOE | {"mlp_only_layers": [0, 5]}, "config.json.mlp_only_layers", "at the start"),
    "a layer that is no number": (QWEN3_MOE | {"mlp_only_layers": ["0"]}, "config.json.mlp_only_layers[0]", "whole"),
    "too many experts a token": (MIXTRAL | {"num_experts_per_tok": 9}, "config.json.num_experts_per_tok", "at most 8"),
    "experts without a choice": (without(V2, "num_experts_per_tok"), "config.json.num_experts_per_tok", "missing"),
    "grouped latent attention": (
        V3 | {"num_key_value_heads": 8},
        "config.json.num_key_value_heads",
        "every head (128)",
    ),
    "odd latent rope": (V3 | {"qk_rope_head_dim": 63}, "config.json.qk_rope_head_dim", "even"),
    "biased latent attention": (V2 | {"attention_bias": True}, "config.json.attention_bias", "bias of latent"),
    "four-bit weights": (V3 | {"quantization_config": {"bits": 4}}, "config.json.quantization_config", "quantised"),
    "zero window": (MISTRAL | {"sliding_window": 0}, "config.json.sliding_window", "at least 1"),
    "text for a flag": (LLAMA | {"tie_word_embeddings": "false"}, "config.json.tie_word_embeddings", "true or false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    config, where, message = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        from_config(config)  # type: ignore[arg-type]
    assert caught.value.where == where
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)


FILES = {
    "empty": (b"", "not valid JSON"),
    "cut off": (b'{"model_type": "llama"', "not valid JSON"),
    "a key twice": (json.dumps(LLAMA).replace("{", '{"vocab_size": 5, ', 1).encode(), "'vocab_size' is given twice"),
    "a list": (b"[]", "mapping"),
    "binary": (b"\x80\x81\xff", "not UTF-8 text"),
    "nested without end": (b"[" * 200_000, "nested too deeply"),
    "a number of 5000 digits": (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "a wrong value": (json.dumps(LLAMA | {"vocab_size": -1}, indent=1).encode(), "config.json:8 vocab_size is -1"),
    "a wrong relation": (
        json.dumps(LLAMA | {"num_key_value_heads": 5}, indent=1).encode(),
        "config.json:9 num_key_value_heads is 5",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_refused_files(case: str, tmp_path: Path) -> None:
    content, message = FILES[case]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path))
    assert message in str(caught.value)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["umt5", "bart"])
def test_encoders_with_decoders_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="by cross-attention, t5 and mt5 are supported"):
        from_config({"model_type": kind, "d_model": 512})


@pytest.mark.parametrize(
    ("folder", "more", "name"),
    [
        ("inputs", {}, "llama"),
        ("inputs", {"_name_or_path": "meta-llama/Llama-2-7b"}, "meta-llama/Llama-2-7b"),
        ("llama2-7b", {"_name_or_path": "other"}, "llama2-7b"),
        ("my-llama", {}, "my-llama"),
    ],
)
def test_a_config_is_named_after_its_folder_if_that_says_what_it_holds(
    folder: str, more: dict[str, Any], name: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llama"} | more))
    assert load_model("config.json", base=tmp_path / folder).name == name
    assert load_model(f"{folder}/config.json", base=tmp_path).name == folder
