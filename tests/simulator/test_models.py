"""Models: exact parameter counts, presets, ways of describing one, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hardware.errors import ModelError
from simulator.models import ALIASES, load_model, preset_source, presets

GPT = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "seq": 2048}

# Counts of the published checkpoints (sum of all tensors; a tied matrix once).
EXACT = {
    "gpt2-124m": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}

# Sizes as printed in Narayanan et al. 2021, table 1, and Korthikanti et al. 2022, table 3.
PRINTED = [
    *["megatron-1.7b", "megatron-3.6b", "megatron-7.5b", "megatron-18.4b", "megatron-39.1b", "megatron-76.1b"],
    *["megatron-145.6b", "megatron-310.1b", "megatron-529.6b", "megatron-1008b", "megatron-22b"],
]


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_exact_counts(name: str, count: int) -> None:
    assert load_model(name).parameters == count


@pytest.mark.parametrize("name", PRINTED)
def test_printed_sizes(name: str) -> None:
    printed = name.removeprefix("megatron-").removesuffix("b")
    decimals = len(printed.partition(".")[2])
    assert round(load_model(name).parameters / 1e9, decimals) == float(printed)


def test_gpt_closed_form() -> None:
    """P = 12 L h^2 (1 + 13/(12 h) + (V + T)/(12 L h)), equation 2 of arXiv 2104.04473, and the final norm."""
    for name in PRINTED:
        m = load_model(name)
        closed = 12 * m.layers * m.hidden**2 + 13 * m.layers * m.hidden + (m.vocab + m.seq) * m.hidden
        assert m.parameters == closed + 2 * m.hidden


def test_every_preset_loads_and_names_its_source() -> None:
    assert len(presets()) == 19
    for name in presets():
        assert load_model(name).name == name
        assert len(preset_source(name)) > 10
        assert (load_model(name).dropout == 0.1) == (not name.startswith("llama"))
    for alias, name in ALIASES.items():
        assert alias not in presets()
        assert load_model(alias) == load_model(name)


def test_presets_are_sorted_by_size() -> None:
    names = [name for name in presets() if name.startswith("megatron")]
    assert names == sorted(names, key=lambda name: load_model(name).parameters)


def test_parts_add_up() -> None:
    for name in presets():
        m = load_model(name)
        parts = m.parameter_parts
        assert list(parts) == ["embedding", "embedding_norm", "positions", "layers", "final_norm", "head", "mtp"]
        assert sum(parts.values()) == m.parameters
        assert (parts["head"] == 0) == m.tied


def test_defaults() -> None:
    m = load_model(GPT)
    assert (m.kv_heads, m.head_dim, m.ffn) == (16, 128, 8192)
    assert m.qkv_bias and m.proj_bias and m.mlp_bias
    assert (m.name, m.gated, m.tied, m.positions, m.norm, m.dropout) == (
        *("custom", False, True, "learned", "layernorm", 0.0),
    )
    for norm in ("rmsnorm", "layernorm1p"):
        other = load_model(GPT | {"norm": norm})
        assert not (other.qkv_bias or other.proj_bias or other.mlp_bias)
    assert load_model(GPT | {"norm": "rmsnorm"}).norm_parameters == 2048
    assert load_model(GPT | {"norm": "layernorm1p"}).norm_parameters == 4096


def test_null_is_the_default_and_absent_features_may_be_said() -> None:
    published = {"kv_heads": None, "positions": None, "moe": None, "mla": None, "mtp": 0, "qk_layernorm": False}
    assert load_model(GPT | published) == load_model(GPT)


def test_head_width_may_differ_from_hidden() -> None:
    m = load_model(GPT | {"hidden": 2049, "head_dim": 128, "ffn": 8192})
    assert m.head_dim == 128
    assert m.layer_parameters() == (
        4 * 2049 + 2049 * 3 * 2048 + 3 * 2048 + 2048 * 2049 + 2049 + 2 * 2049 * 8192 + 8192 + 2049
    )


def test_biases_count() -> None:
    bare = load_model(GPT | {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}).layer_parameters()
    assert load_model(GPT | {"proj_bias": False, "mlp_bias": False}).layer_parameters() - bare == 3 * 2048
    assert load_model(GPT | {"qkv_bias": False, "mlp_bias": False}).layer_parameters() - bare == 2048
    assert load_model(GPT | {"qkv_bias": False, "proj_bias": False}).layer_parameters() - bare == 8192 + 2048


def test_padded_vocab() -> None:
    m = load_model("gpt2-124m")
    assert m.padded_vocab(1) == 50257
    assert m.padded_vocab(128) == 50304
    assert m.padded_vocab(128 * 8) == 51200
    assert load_model("llama3-70b").padded_vocab(128) == 128256
    assert m.parameters == EXACT["gpt2-124m"], "the count is of the vocabulary as given"


def test_models_are_frozen_hashable_values() -> None:
    m = load_model("llama3-8b")
    assert hash(m) == hash(load_model("llama3.1-8b"))
    assert load_model(m) is m
    with pytest.raises(ValueError):
        m.layers = 3  # type: ignore[misc]


def test_changes_on_a_preset_move_the_defaults() -> None:
    cut = load_model({"preset": "llama3-70b", "layers": 16})
    whole = load_model("llama3-70b")
    assert cut.layers == 16
    assert whole.parameters - cut.parameters == 64 * whole.layer_parameters()
    assert cut.name == "llama3-70b with layers 16"
    assert load_model({"preset": "llama3-70b", "layers": 16, "name": "cut"}).name == "cut"
    wide = load_model({"preset": "gpt3-175b", "hidden": 6144})
    assert (wide.head_dim, wide.ffn) == (64, 24576)
    assert load_model({"preset": "llama3-70b"}) == whole


def test_model_files(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("layers: 2\nhidden: 64\nheads: 4\nvocab: 100\nseq: 32\nsource: a made-up one\n")
    assert load_model("own.yaml", base=tmp_path).name == "own"
    assert load_model(str(own)) == load_model("own.yaml", base=tmp_path)
    (tmp_path / "cut.yaml").write_text("preset: own.yaml\nlayers: 1\nname: cut\n")
    assert load_model("cut.yaml", base=tmp_path) == load_model(
        {"preset": "own.yaml", "layers": 1, "name": "cut"}, base=tmp_path
    )


def test_changes_on_a_config(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    m = load_model({"preset": str(tmp_path), "hidden": 128})
    assert (m.hidden, m.ffn, m.head_dim) == (128, 512, 32)


REFUSED = {
    "unknown preset": ("llama3-71b", "model", "Did you mean 'llama3-70b'"),
    "empty name": ("", "model", "Valid:"),
    "no such file": ("models/mine/config.json", "model", "no such file"),
    "too long a name": ("a/" + "x" * 5000, "model", "no such file"),
    "zero byte": ("a\0b", "model", "Valid:"),
    "unknown home": ("~nobody-here/config.json", "model", "no such file"),
    "a number": (70, "model", "no description"),
    "null": (None, "model", "no description"),
    "a list": (["llama3-70b"], "model", "no description"),
    "nothing": ({}, "model.layers", "layers, hidden, heads, vocab, seq"),
    "misspelt field": (GPT | {"kv_head": 4}, "model.kv_head", "Did you mean 'kv_heads'"),
    "null under an unknown key": (GPT | {"width": None}, "model.width", "no such key"),
    "a key that is no text": (GPT | {3: 4}, "model[3]", "text"),
    "unknown preset below": ({"preset": "gpt4", "layers": 2}, "model.preset", "Valid:"),
    "preset no text": ({"preset": 3}, "model.preset", "name or a path"),
    "misspelt change": ({"preset": "llama3-8b", "layer": 2}, "model.layer", "Did you mean 'layers'"),
    "heads that do not divide": (GPT | {"heads": 17}, "model.hidden", "multiple of heads (17)"),
    "kv_heads that do not divide": (GPT | {"kv_heads": 3}, "model.kv_heads", "Possible: 1, 2, 4, 8, 16"),
    "more kv_heads than heads": (GPT | {"kv_heads": 32}, "model.kv_heads", "divide heads (16)"),
    "odd rope": (GPT | {"positions": "rope", "head_dim": 127}, "model.head_dim", "even"),
    "zero": (GPT | {"layers": 0}, "model.layers", "at least 1"),
    "negative": (GPT | {"hidden": -2048}, "model.hidden", "at least 1"),
    "huge": (GPT | {"hidden": 10**30}, "model.hidden", "at most"),
    "too deep": (GPT | {"layers": 20_000}, "model.layers", "at most 10000"),
    "a fraction": (GPT | {"layers": 2.5}, "model.layers", "whole number"),
    "text for a number": (GPT | {"layers": "24"}, "model.layers", "whole number"),
    "true for a number": (GPT | {"layers": True}, "model.layers", "whole number"),
    "infinite width": (GPT | {"ffn": float("inf")}, "model.ffn", "whole number"),
    "NaN dropout": (GPT | {"dropout": float("nan")}, "model.dropout", "finite"),
    "dropout of one": (GPT | {"dropout": 1.0}, "model.dropout", "below 1"),
    "text for a flag": (GPT | {"tied": "yes"}, "model.tied", "true or false"),
    "unknown norm": (GPT | {"norm": "batchnorm"}, "model.norm", "layernorm"),
    "unknown positions": (GPT | {"positions": "sinusoidal"}, "model.positions", "rope"),
    "state-space layers": (GPT | {"ssm": {"state": 128}}, "model.ssm", "no block"),
    "attention kernel": (GPT | {"attention": "flash"}, "model.attention", "framework.set.attention"),
    "empty name of a model": (GPT | {"name": ""}, "model.name", "empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    spec, where, told = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        load_model(spec, base=tmp_path)
    assert caught.value.where == where
    assert told in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "pydantic" not in str(caught.value)


FILES = {
    "not yaml": ("m.yaml", b"layers: [", "m.yaml"),
    "duplicate key": ("m.yaml", b"layers: 1\nlayers: 2\n", "twice"),
    "a list": ("m.yaml", b"- 1\n", "mapping"),
    "empty": ("m.yaml", b"", "mapping"),
    "binary": ("m.yaml", b"\xff\xfe\x00", "UTF-8"),
    "wrong field": (*("m.yaml", b"layers: 2\nhidden: 63\nheads: 4\nvocab: 9\nseq: 8\n", "m.yaml:2 hidden"),),
    "unknown preset": ("m.yaml", b"layers: 2\npreset: lama3-8b\n", "m.yaml:2 preset"),
    "circle": ("m.yaml", b"preset: m.yaml\n", "circle"),
    "some other file": ("m.txt", b"layers: 2\n", "m.txt"),
}


@pytest.mark.parametrize("case", FILES)
def test_refused_files(case: str, tmp_path: Path) -> None:
    name, content, told = FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(f"./{name}", base=tmp_path)
    assert told in str(caught.value)


def test_imports_stay_light() -> None:
    heavy = "numpy", "pandas", "torch", "matplotlib"
    code = f"import sys, simulator.models.flops; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
