"""Hugging Face configs: the model they describe, and what is refused rather than dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hardware.errors import ModelError
from simulator.models import from_config, load_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3-70b"

# The keys of openai-community/gpt2 that say anything about the model, and two that do not.
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


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


REFUSED = {
    "another architecture": (LLAMA | {"model_type": "mamba"}, "config.json.model_type", "fields of `model:` themselves"),
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
    "text for a flag": (LLAMA | {"tie_word_embeddings": "false"}, "config.json.tie_word_embeddings", "true or false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    config, where, told = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        from_config(config)  # type: ignore[arg-type]
    assert caught.value.where == where
    assert told in str(caught.value)
    assert "pydantic" not in str(caught.value)


FILES = {
    "empty": (b"", "not valid JSON"),
    "cut off": (b'{"model_type": "llama"', "not valid JSON"),
    "a key twice": (json.dumps(LLAMA).replace("{", '{"vocab_size": 5, ', 1).encode(), "'vocab_size' is given twice"),
    "a list": (b"[]", "mapping"),
    "binary": (b"\x80\x81\xff", "not valid JSON"),
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
    content, told = FILES[case]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path))
    assert told in str(caught.value)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(tmp_path))
