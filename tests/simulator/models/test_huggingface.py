"""Hugging Face configs: the models they describe, and keys that are refused rather than dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.models.huggingface import SUPPORTED, from_config
from meshcast.simulator.models.load import load_model
from tests.simulator.models.configs import (
    BLOOM,
    CONFIGS,
    ENCODER_DECODERS,
    GEMMA,
    GPT2,
    LATENTS,
    LLAMA,
    LLAMA4,
    MISTRAL,
    MIXTRAL,
    MPT,
    NEMOTRON,
    NEOX,
    OPT,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ROUND_TRIP,
    V2,
    V3,
    VISION,
)
from tests.simulator.models.configs import rename_keys as renamed
from tests.simulator.models.test_types import TYPES

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama3-70b"


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


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_configs_give_the_presets(name: str) -> None:
    """All but the default sequence: configs name the longest one that the model takes."""
    m = from_config(ROUND_TRIP[name], name=name)
    changed = {"seq": m.seq} | ({"position_rows": m.position_rows} if m.positions == "learned" else {})
    assert m == load_model({"preset": name, "name": name, **changed})


def test_every_kind_is_tried() -> None:
    tried = {
        config["model_type"]
        for config in (*ROUND_TRIP.values(), *CONFIGS.values(), *VISION.values(), *ENCODER_DECODERS.values(), *TYPES)
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
