"""Models: exact parameter counts, presets, and ways of describing one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.load import ALIASES, load_model, model_source, presets
from meshcast.simulator.models.model import LayerKind
from tests.simulator.models.counts import count_without_mtp
from tests.simulator.models.descriptions import EXPERTS, GPT, LATENT, MLA

_COUNTS = yaml.load(Path(__file__).with_name("counts.yaml").read_text("utf-8"), yaml.CSafeLoader)
EXACT: dict[str, tuple[int, str]] = _COUNTS["exact"]
ROUNDED: dict[str, tuple[float, float | None, float, str]] = _COUNTS["rounded"]

# Sizes as printed in Narayanan et al. 2021, table 1, and Korthikanti et al. 2022, table 3.
PRINTED = [
    *["megatron-1.7b", "megatron-3.6b", "megatron-7.5b", "megatron-18.4b", "megatron-39.1b", "megatron-76.1b"],
    *["megatron-145.6b", "megatron-310.1b", "megatron-529.6b", "megatron-1008b", "megatron-22b"],
]


def test_exact_counts() -> None:
    assert {name: [count_without_mtp(load_model(name)), source] for name, (_, source) in EXACT.items()} == EXACT


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_counts(name: str) -> None:
    total, active, within, _ = ROUNDED[name]
    m = load_model({"preset": name, "mtp": 0})
    assert m.parameters / 1e9 == pytest.approx(total, abs=within)
    if active:
        assert m.active_parameters / 1e9 == pytest.approx(active, abs=within)
    assert (m.active_parameters < m.parameters) == (m.moe is not None or m.diffusion is not None)


def test_printed_sizes() -> None:
    for name in PRINTED:
        printed = name.removeprefix("megatron-").removesuffix("b")
        decimals = len(printed.partition(".")[2])
        assert round(load_model(name).parameters / 1e9, decimals) == float(printed), name


def test_gpt_closed_form() -> None:
    """P = 12 L h^2 (1 + 13/(12 h) + (V + T)/(12 L h)), equation 2 of arXiv 2104.04473, and the final norm."""
    for name in PRINTED:
        m = load_model(name)
        closed = 12 * m.layers * m.hidden**2 + 13 * m.layers * m.hidden + (m.vocab + m.seq) * m.hidden
        assert m.parameters == closed + 2 * m.hidden


def test_every_preset_loads_and_names_its_source() -> None:
    for name in presets():
        assert load_model(name).name == name
        assert re.search(
            r"arXiv|doi|https?://|Hugging Face|github\.com|@[0-9a-f]{7}|NeMo-Framework|xai-org|et al\.",
            model_source(name),
        )
    for alias, name in ALIASES.items():
        assert alias not in presets()
        assert load_model(alias) == load_model(name)


def test_presets_are_sorted_by_size() -> None:
    for family in "megatron-", "mpt-", "bloom-", "mixtral-", "qwen3-", "opt-", "llama3-", "gpt2-":
        names = [n for n in presets() if re.fullmatch(rf"{family}[0-9].*", n)]
        assert len(names) > 1
        assert names == sorted(names, key=lambda name: load_model(name).parameters)


def test_parts_add_up() -> None:
    for name in presets():
        m = load_model(name)
        parts = m.parameter_parts
        assert list(parts) == [
            *("embedding", "embedding_norm", "positions", "layers", "projector", "final_norm", "head", "mtp")
        ]
        assert sum(parts.values()) == m.parameters
        assert (parts["head"] == 0) == (m.tied or m.contrastive is not None)


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


def test_null_is_the_default_and_absent_features_may_be_given() -> None:
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


def test_defaults_of_new_shapes() -> None:
    m = load_model(GPT)
    assert (m.mla, m.moe, m.window, m.mtp, m.qk_layernorm) == (None, None, None, 0, False)
    assert (m.position_rows, m.rope_share, m.parallel_residual, m.embedding_norm) == (2048, 1.0, False, False)
    assert m.kinds == {LayerKind(False, False): 24}
    latent = load_model(LATENT)
    assert (latent.head_dim, latent.kv_heads, latent.qk_layernorm) == (24, 16, True)
    assert (latent.query_width, latent.key_width, latent.value_width, latent.output_width) == (768, 768, 384, 384)
    assert latent.rope_width == 16
    shared = load_model(GPT | {"moe": EXPERTS | {"shared_experts": 3}}).moe
    assert shared is not None
    assert (shared.shared_ffn, shared.first_dense, shared.every, shared.capacity, shared.router_bias) == (
        *(96, 0, 1, None, False),
    )


def test_null_is_the_default_inside_too() -> None:
    nulls = {"shared_ffn": None, "dense_ffn": None, "capacity": None, "routing": None}
    assert load_model(GPT | {"moe": EXPERTS | nulls}) == load_model(GPT | {"moe": EXPERTS})
    assert load_model(LATENT | {"mla": MLA | {"q_lora_rank": None}}) == load_model(
        LATENT | {"mla": {key: MLA[key] for key in MLA if key != "q_lora_rank"}}
    )


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"first_dense": 3}, [3, 4, 5, 6, 7]),
        ({"every": 2}, [1, 3, 5, 7]),
        ({"every": 3, "first_dense": 1}, [3, 6]),
        ({"first_dense": 8}, []),
        ({"every": 9}, []),
    ],
)
def test_which_layers_have_experts(words: dict[str, int], layers: list[int]) -> None:
    m = load_model(GPT | {"layers": 8, "moe": EXPERTS | words})
    assert [layer for layer in range(8) if m.is_moe(layer)] == layers
    plain = load_model(GPT | {"layers": 8})
    assert m.parameters - plain.parameters == len(layers) * (m.layer_parameters(True) - m.layer_parameters())
    assert m.layer_parameters() == plain.layer_parameters()


@pytest.mark.parametrize(("every", "full"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (6, [5]), (7, [])])
def test_which_layers_slide(every: int, full: list[int]) -> None:
    m = load_model(GPT | {"layers": 6, "window": 128, "full_every": every})
    assert [layer for layer in range(6) if not m.kind(layer).local] == full
    assert sum(m.kinds.values()) == 6


def test_layers_that_are_full_need_others_that_are_not() -> None:
    with pytest.raises(ModelError, match="full_every is 2: without a window, chunks, blocks or linear attention"):
        load_model(GPT | {"full_every": 2})
    assert load_model(GPT | {"layers": 4, "attention_chunk": 64, "full_every": 4}).kinds[LayerKind(False, True)] == 3


def test_parameters_of_a_layer_with_experts() -> None:
    bare = GPT | {"norm": "rmsnorm", "positions": "rope"}
    dense, m = load_model(bare), load_model(bare | {"moe": EXPERTS | {"shared_experts": 1}, "gated": True})
    attention = dense.layer_parameters() - 2 * 2048 * 8192
    expert = 3 * 2048 * 32
    assert m.layer_parameters(True) == attention + 8 * 2048 + 8 * expert + expert
    assert m.layer_parameters(True, experts=2) == m.layer_parameters(True) - 6 * expert
    assert m.parameters - m.active_parameters == 24 * 6 * expert
    biased = load_model(bare | {"moe": EXPERTS | {"router_bias": True}, "mlp_bias": True})
    unbiased = load_model(bare | {"moe": EXPERTS})
    assert biased.layer_parameters(True) - unbiased.layer_parameters(True) == 8 + 8 * (32 + 2048)


@pytest.mark.parametrize(
    ("hidden", "experts", "last", "billions"),
    [(1024, 128, 128, 13), (2048, 128, 128, 52), (1024, 32, 64, 4), (2048, 64, 128, 31)],
)
def test_parameters_of_models_with_more_experts_in_later_layers(
    hidden: int, experts: int, last: int, billions: int
) -> None:
    """DeepSpeed-MoE (arXiv 2201.05596), tables 1 and 4: every second layer has experts, the last two of twelve more."""
    moe = {"experts": experts, "top_k": 1, "expert_ffn": 4 * hidden, "every": 2}
    pyramid = {"experts_from": [[20, last]], "shared_experts": 1, "residual": True} if last > experts else {}
    m = load_model({"layers": 24, "hidden": hidden, "heads": 16, "vocab": 50257, "seq": 2048, "moe": moe | pyramid})
    assert m.parameters == pytest.approx(billions * 1e9, rel=0.03)
    assert [m.kind(layer).routed for layer in (0, 1, 19, 21, 23)] == [0, experts, experts, last, last]
    expert = m.mlp_parameters(4 * hidden)
    plain = load_model({"layers": 24, "hidden": hidden, "heads": 16, "vocab": 50257, "seq": 2048})
    each = [experts] * 10 + [last] * 2
    fixed = 12 * (expert + 2 * hidden + 2) if pyramid else 0
    assert m.parameters - plain.parameters == sum(number * (expert + hidden) - expert for number in each) + fixed
    assert m.active_parameters == m.parameters - sum((number - 1) * expert for number in each)


def test_parameters_of_latent_attention() -> None:
    m = load_model(LATENT)
    queries = 2048 * 40 + 40 * 16 * (32 + 16)
    keys = 2048 * (64 + 16) + 64 * 16 * (32 + 24)
    assert m.attention_parameters == queries + keys + 40 + 64 + 16 * 24 * 2048
    assert load_model(LATENT | {"qk_layernorm": False}).attention_parameters == m.attention_parameters - 104


def test_multi_token_prediction_of_deepseek_v3() -> None:
    """11.5 B, README_WEIGHTS.md of deepseek-ai/DeepSeek-V3."""
    m = load_model("deepseek-v3")
    assert m.parameter_parts["mtp"] == pytest.approx(11.5e9, rel=0.01)
    assert load_model({"preset": "deepseek-v3", "mtp": 0}).parameters == count_without_mtp(m)


def test_small_parts_count() -> None:
    m = load_model(GPT)
    for words, more in (
        ({"embedding_norm": True}, 2 * 2048),
        ({"qk_layernorm": True}, 24 * 2 * 128),
        ({"position_rows": 2050}, 2 * 2048),
        ({"parallel_residual": True, "window": 512, "full_every": 2}, 0),
        ({"mtp": 2}, 2 * (2 * 4096 + 2 * 2048 * 2048 + m.layer_parameters())),
    ):
        changed = load_model(GPT | words)
        assert changed.parameters - m.parameters == more
    assert load_model(GPT | {"positions": "alibi"}).parameters == m.parameters - 2048 * 2048


def test_padded_vocab() -> None:
    m = load_model("gpt2-124m")
    assert m.padded_vocab(1) == 50257
    assert m.padded_vocab(128) == 50304
    assert m.padded_vocab(128 * 8) == 51200
    assert load_model("llama3-70b").padded_vocab(128) == 128256
    assert m.parameters == EXACT["gpt2-124m"][0], "the count is of the vocabulary as given"


def test_models_are_frozen_hashable_values() -> None:
    m = load_model("llama3-8b")
    assert hash(m) == hash(load_model("llama3.1-8b"))
    assert load_model(m) is m
    with pytest.raises(AttributeError):
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


def test_one_field_of_experts_can_be_changed() -> None:
    padded, whole = load_model({"preset": "mixtral-8x7b", "moe": {"capacity": 1.0}}), load_model("mixtral-8x7b")
    assert padded.moe is not None and whole.moe is not None
    assert padded.moe.model_copy(update={"capacity": None}) == whole.moe
    assert padded.parameters == whole.parameters
    assert load_model({"preset": "mixtral-8x7b", "moe": None}).moe is None
    assert load_model({"preset": "llama3-8b", "moe": EXPERTS}).moe == load_model(GPT | {"moe": EXPERTS}).moe
    with pytest.raises(ModelError, match=r"model\.moe\.top_k is 9"):
        load_model({"preset": "mixtral-8x7b", "moe": {"top_k": 9}})


def test_published_runs_have_the_parameters_they_print(tables: Any) -> None:
    """Every row of the data set: within 3 %, multi-token prediction left out.

    Left out are rows that print no parameters, or whose model has no published architecture.
    """
    rows = [json.loads(line) for line in tables.published_runs.read_text("utf-8").splitlines()]
    checked = 0
    for row in rows:
        words = {key: value for key, value in row["spec"]["model"].items() if key != "attention"}
        if words["layers"] is None or row["model"].get("params") is None:
            assert row["spec"]["class"] in ("hybrid-ssm", "other"), row["id"]
            continue
        m = load_model(words | {"seq": words["seq"] or 4096})
        assert count_without_mtp(m) == pytest.approx(row["model"]["params"], rel=0.03), row["id"]
        checked += 1
    assert checked > 0.9 * len(rows)


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


@pytest.mark.slow
def test_imports_stay_light() -> None:
    heavy = "numpy", "pandas", "torch", "matplotlib"
    code = f"import sys, simulator.models.flops; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
