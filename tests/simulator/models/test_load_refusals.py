"""Refused descriptions of models: where, and which rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.load import load_model
from tests.simulator.models.descriptions import EXPERTS, GPT, LATENT, MLA

REFUSED = {
    "unknown preset": ("llama3-71b", "model", "Did you mean 'llama3-70b'"),
    "empty name": ("", "model", "Valid:"),
    "no such file": ("models/mine/config.json", "model", "no such file"),
    "too long a name": ("a/" + "x" * 5000, "model", "no such file"),
    "zero byte": ("a\0b", "model", "Valid:"),
    "unknown home": ("~nobody-here/config.json", "model", "no such file"),
    "a number": (70, "model", "does not describe"),
    "null": (None, "model", "does not describe"),
    "a list": (["llama3-70b"], "model", "does not describe"),
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
    "attention kernel": (GPT | {"attention": "flash"}, "model.attention", "framework.set.attention"),
    "more experts than there are": (GPT | {"moe": EXPERTS | {"top_k": 9}}, "model.moe.top_k", "at most 8"),
    "more dense layers than layers": (
        *(GPT | {"moe": EXPERTS | {"first_dense": 25}}, "model.moe.first_dense", "24 layers in all"),
    ),
    "width of no shared experts": (GPT | {"moe": EXPERTS | {"shared_ffn": 64}}, "model.moe.shared_ffn", "both"),
    "shared experts of no width": (
        *(GPT | {"moe": EXPERTS | {"shared_experts": 1, "shared_ffn": 0}}, "model.moe.shared_ffn", "both or neither"),
    ),
    "experts from a layer that is not there": (
        *(GPT | {"moe": EXPERTS | {"experts_from": [[24, 16]]}}, "model.moe.experts_from", "below 24"),
    ),
    "layers not in order": (
        *(GPT | {"moe": EXPERTS | {"experts_from": [[8, 16], [4, 32]]}}, "model.moe.experts_from", "ascending"),
    ),
    "fewer experts later than a token passes": (
        *(GPT | {"moe": EXPERTS | {"top_k": 4, "experts_from": [[8, 2]]}}, "model.moe.top_k", "at most 2"),
    ),
    "nothing fixed beside the experts": (
        *(GPT | {"moe": EXPERTS | {"residual": True}}, "model.moe.residual", "shared_experts: 1"),
    ),
    "misspelt word of experts": (GPT | {"moe": EXPERTS | {"topk": 2}}, "model.moe.topk", "Did you mean 'top_k'"),
    "experts without width": (GPT | {"moe": {"experts": 8, "top_k": 2}}, "model.moe.expert_ffn", "missing"),
    "experts no mapping": (GPT | {"moe": 8}, "model.moe", "mapping"),
    "no capacity": (GPT | {"moe": EXPERTS | {"capacity": 0}}, "model.moe.capacity", "at least 0.01"),
    "endless capacity": (GPT | {"moe": EXPERTS | {"capacity": float("inf")}}, "model.moe.capacity", "finite"),
    "unknown routing": (GPT | {"moe": EXPERTS | {"routing": "random"}}, "model.moe.routing", "balanced"),
    "grouped latent attention": (LATENT | {"kv_heads": 4}, "model.kv_heads", "every head (16)"),
    "another width with mla": (LATENT | {"head_dim": 128}, "model.head_dim", "its v (24)"),
    "latent attention without rope": (LATENT | {"positions": "learned"}, "model.positions", "rope"),
    "odd latent rope": (LATENT | {"mla": MLA | {"qk_rope": 15}}, "model.mla.qk_rope", "even"),
    "biased latent attention": (LATENT | {"qkv_bias": True}, "model.qkv_bias", "without biases"),
    "half a latent": (LATENT | {"mla": {"q_lora_rank": 40}}, "model.mla.kv_lora_rank", "qk_nope, qk_rope, v"),
    "odd share of rope": (
        *(GPT | {"positions": "rope", "rope_share": 0.26}, "model.rope_share", "it would rotate 33"),
    ),
    "no share of rope": (GPT | {"rope_share": 0}, "model.rope_share", "above 0"),
    "short table of positions": (GPT | {"position_rows": 1024}, "model.position_rows", "seq 2048"),
    "window of nothing": (GPT | {"window": 0}, "model.window", "at least 1"),
    "empty name of a model": (GPT | {"name": ""}, "model.name", "empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    spec, where, message = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        load_model(spec, base=tmp_path)
    assert caught.value.where == where
    assert message in str(caught.value)
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
    "wrong word of experts": (
        *("m.yaml", b"preset: mixtral-8x7b\nmoe:\n  top_k: 2\n  capacity: 0\n", "m.yaml:4 moe.capacity"),
    ),
    "wrong relation of experts": ("m.yaml", b"preset: mixtral-8x7b\nmoe:\n  top_k: 9\n", "m.yaml:3 moe.top_k"),
    "circle": ("m.yaml", b"preset: m.yaml\n", "circle"),
    "some other file": ("m.txt", b"layers: 2\n", "m.txt"),
}


@pytest.mark.parametrize("case", FILES)
def test_refused_files(case: str, tmp_path: Path) -> None:
    name, content, message = FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(f"./{name}", base=tmp_path)
    assert message in str(caught.value)
