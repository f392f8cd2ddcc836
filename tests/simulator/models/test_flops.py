"""FLOP conventions: their formulas, and how they relate."""

from __future__ import annotations

import pytest

from meshcast.simulator.models.flops import (
    CONVENTIONS,
    causal,
    forward_matmul_flops,
    megatron_2021,
    mosaic_hfu,
    mosaic_mfu,
    palm,
    six_n,
)
from meshcast.simulator.models.load import load_model, presets
from meshcast.simulator.models.model import Model
from tests.draws import drawn

LENGTHS = [1, 1024, 8192, 131072]


MODELS = {name: load_model(name) for name in presets()}
PLAIN = [
    name
    for name, m in MODELS.items()
    if not (m.moe or m.mla or m.ssm or m.window or m.mtp or m.branches or m.diffusion)
]
GPT = [
    name
    for name in PLAIN
    if (m := MODELS[name])
    and not m.gated
    and m.ffn == 4 * m.hidden == 4 * m.heads * m.head_dim
    and m.kv_heads == m.heads
]


@pytest.fixture(params=drawn(MODELS, keep=4))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(params=drawn(PLAIN, keep=4))
def plain(request: pytest.FixtureRequest) -> Model:
    """Dense, with full attention."""
    return MODELS[request.param]


@pytest.mark.parametrize(("seq", "ratio"), [(4096, 1.05), (8192, 1.09), (32768, 1.25), (131072, 1.56)])
def test_palm_over_causal(seq: int, ratio: float) -> None:
    m = load_model("llama3-70b")
    assert palm(m, seq) / causal(m, seq) == pytest.approx(ratio, abs=0.005)


def test_palm_is_6n_and_full_attention(plain: Model) -> None:
    for seq in LENGTHS:
        attention = 12 * plain.layers * plain.heads * plain.head_dim * seq
        assert six_n(plain, seq) == 6 * plain.parameters
        assert palm(plain, seq) == pytest.approx(6 * plain.parameters + attention, rel=1e-14)


def test_causal_is_three_forward_passes(model: Model) -> None:
    for seq in LENGTHS:
        if seq < sum(branch.tokens or 1 for branch in model.branches):
            continue
        tokens = 4 * seq
        parts = forward_matmul_flops(model, tokens, seq, causal=True)
        assert causal(model, seq) * tokens == pytest.approx(3 * sum(parts.values()), rel=1e-14)


def test_causal_is_6n_of_the_products(plain: Model) -> None:
    """Linear layers do 2 FLOPs per weight and token; all other weights are norms, biases and tables."""
    seq = 2048
    matrices = plain.hidden * plain.head_dim * 2 * (plain.heads + plain.kv_heads)
    matrices += (3 if plain.gated else 2) * plain.hidden * plain.ffn
    products = plain.layers * matrices + plain.vocab * plain.hidden
    attention = 6 * plain.layers * plain.heads * plain.head_dim * seq
    assert causal(plain, seq) == pytest.approx(6 * products + attention, rel=1e-14)
    untied_table = 0 if plain.tied else plain.vocab * plain.hidden
    assert products == pytest.approx(plain.parameters - untied_table, rel=0.02)


def test_linear_layers_do_two_flops_for_each_active_weight(model: Model) -> None:
    """Active weights outside of GEMMs: norms, biases and tables, less than 1 % without the embedding for any model
    here.
    """
    parts = forward_matmul_flops(model, 1, model.seq, causal=True)
    products = (sum(parts.values()) - parts["attention"] - parts["scan"]) / 2 - model.mtp * model.vocab * model.hidden
    shapes = [*zip(model.branches, model.branch_tokens(model.seq), strict=True)] or [(model, model.seq)]
    tables = sum(shape.input_parameters["positions"] * tokens / model.seq for shape, tokens in shapes)
    words = [(shape, tokens) for shape, tokens in shapes if getattr(shape, "input_width", None) is None]
    tables += sum(model.vocab * shape.hidden * tokens / model.seq for shape, tokens in words) * (not model.tied)
    assert products == pytest.approx(model.active_parameters - tables, rel=0.01)


def test_order_of_conventions(model: Model) -> None:
    for seq in LENGTHS:
        if seq < sum(branch.tokens or 1 for branch in model.branches):
            continue  # the stated tokens of a branch are no part of so short a sequence
        assert six_n(model, seq) < palm(model, seq)
        assert causal(model, seq) < megatron_2021(model, seq, recompute=False) < megatron_2021(model, seq)
        assert mosaic_hfu(model, seq) == pytest.approx(mosaic_mfu(model, seq) * 4 / 3, rel=1e-14)
        assert mosaic_hfu(model, seq) < mosaic_hfu(model, seq, flash=True)
        if not model.mtp:  # whose second pass of the output layer 6 N does not see
            assert causal(model, seq) < palm(model, seq)
        if model.query_width == model.output_width == model.hidden and not (model.window or model.attention_chunk):
            assert mosaic_mfu(model, seq) == pytest.approx(palm(model, seq), rel=1e-14)


@pytest.mark.parametrize("name", GPT)
def test_equation_3(name: str) -> None:
    """96 B s l h^2 (1 + s/(6h) + V/(16 l h)) of arXiv 2104.04473, for one token."""
    m = MODELS[name]
    l, h, s, v = m.layers, m.hidden, m.seq, m.vocab
    assert megatron_2021(m, s) == pytest.approx(96 * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h)), rel=1e-12)
    assert megatron_2021(m, s, recompute=False) == pytest.approx(
        72 * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)), rel=1e-12
    )


def test_equation_3_gives_the_published_throughput() -> None:
    """Table 1 of arXiv 2104.04473: 1008B on 3072 GPUs at 163 TFLOP/s each, batch 3072; section 5.1: 84 days."""
    m = load_model("megatron-1008b")
    seconds = megatron_2021(m, 2048) * 2048 * 3072 / (3072 * 163e12)
    tokens = 450e9  # what section 5.1 assumes
    assert seconds * tokens / (2048 * 3072) / 86400 == pytest.approx(84, rel=0.03)


def test_forward_by_part() -> None:
    m = load_model(
        {"layers": 3, "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 10, "vocab": 11, "seq": 5}
    )
    parts = forward_matmul_flops(m, 7, 5, causal=False)
    assert parts == {
        "qkv": 3 * 2 * 7 * 8 * (24 + 2 * 12),
        "attention": 3 * 4 * 7 * 5 * 24,
        "proj": 3 * 2 * 7 * 24 * 8,
        "mlp": 3 * 2 * (2 * 7 * 8 * 10),
        **dict.fromkeys(("inputs", "router", "experts", "shared", "mamba", "scan", "projector", "streams"), 0),
        **dict.fromkeys(("mtp", "other", "modulation"), 0),
        "head": 2 * 7 * 8 * 11,
    }
    halved = forward_matmul_flops(m, 7, 5, causal=True)
    assert halved.pop("attention") * 2 == parts.pop("attention")
    assert halved == parts
    gated = forward_matmul_flops(m.model_copy(update={"gated": True}), 7, 5, causal=True)
    assert gated["mlp"] * 2 == parts["mlp"] * 3
    assert all(isinstance(flops, int) for flops in gated.values())


SMALL = {"layers": 5, "hidden": 8, "heads": 4, "vocab": 11, "seq": 16, "norm": "rmsnorm", "positions": "rope"}


def test_latent_attention_by_part() -> None:
    mla = {"q_lora_rank": 5, "kv_lora_rank": 7, "qk_nope": 3, "qk_rope": 2, "v": 6}
    m = load_model(SMALL | {"mla": mla})
    parts = forward_matmul_flops(m, 32, 16, causal=True)
    down, up = 8 * 5 + 8 * (7 + 2), 5 * 4 * (3 + 2) + 7 * 4 * (3 + 6)
    assert parts["qkv"] == 5 * 2 * 32 * (down + up)
    assert parts["attention"] == 5 * 32 * 16 * (4 * (3 + 2) + 4 * 6)
    assert parts["proj"] == 5 * 2 * 32 * 4 * 6 * 8
    straight = forward_matmul_flops(load_model(SMALL | {"mla": mla | {"q_lora_rank": None}}), 32, 16, causal=True)
    assert straight["qkv"] == 5 * 2 * 32 * (8 * 4 * (3 + 2) + 8 * (7 + 2) + 7 * 4 * (3 + 6))
    assert palm(m, 16) == 6 * m.parameters + 6 * 5 * 16 * (4 * 5 + 4 * 6)


def test_experts_by_part() -> None:
    moe = {"experts": 6, "top_k": 2, "expert_ffn": 3, "shared_experts": 2, "first_dense": 1, "every": 2, "dense_ffn": 9}
    m = load_model(SMALL | {"moe": moe, "gated": True})
    assert [m.is_moe(layer) for layer in range(5)] == [False, False, True, False, True]
    parts = forward_matmul_flops(m, 32, 16, causal=True)
    assert parts["router"] == 2 * 2 * 32 * 8 * 6
    assert parts["experts"] == 2 * 2 * (3 * 2 * 32 * 8 * 3)
    assert parts["shared"] == 2 * (3 * 2 * 32 * 8 * 6)
    assert parts["mlp"] == 3 * (3 * 2 * 32 * 8 * 9)
    assert six_n(m, 16) == 6 * m.active_parameters == 6 * (m.parameters - 2 * 4 * 3 * 8 * 3)


def test_padding_of_experts_is_work_but_no_work_of_the_model() -> None:
    moe = {"experts": 6, "top_k": 2, "expert_ffn": 3}
    loose, padded = (load_model(SMALL | {"moe": moe | {"capacity": c}}) for c in (None, 1.5))
    done = [forward_matmul_flops(m, 32, 16, causal=True) for m in (loose, padded)]
    assert done[1].pop("experts") == 1.5 * done[0].pop("experts")
    assert done[0] == done[1]
    for convention in CONVENTIONS.values():
        assert convention(loose, 16) == pytest.approx(convention(padded, 16), rel=1e-14)


@pytest.mark.parametrize("window", [1, 3, 8, 15, 16, 17, 40])
def test_windows(window: int) -> None:
    """Pairs of a token and the tokens before it, the token itself counting half."""
    seq = 16
    m = load_model(SMALL | {"window": window, "full_every": 2})
    assert [m.kind(layer).local for layer in range(5)] == [True, False, True, False, True]
    pairs = sum(min(token + 1, window) for token in range(seq)) - 0.5 * min(window, seq)
    full = seq * seq / 2
    attention = forward_matmul_flops(m, seq, seq, causal=True)["attention"]
    assert attention == pytest.approx((3 * pairs + 2 * full) * 4 * m.hidden, rel=1e-14)
    assert forward_matmul_flops(m, seq, seq, causal=False)["attention"] == 5 * seq * seq * 4 * m.hidden
    assert palm(m, seq) - six_n(m, seq) == 12 * m.hidden * (3 * min(window, seq) + 2 * seq)


@pytest.mark.parametrize("chunk", [1, 3, 8, 15, 16, 40])
def test_chunks(chunk: int) -> None:
    """Pairs of a token and the tokens before it in its chunk, the token itself counting half."""
    seq = 16
    m = load_model(SMALL | {"attention_chunk": chunk, "full_every": 2})
    assert [m.kind(layer).local for layer in range(5)] == [True, False, True, False, True]
    pairs = sum(token % chunk + 0.5 for token in range(seq))
    attention = forward_matmul_flops(m, seq, seq, causal=True)["attention"]
    assert attention == pytest.approx((3 * pairs + 2 * seq * seq / 2) * 4 * m.hidden, rel=1e-14)
    assert forward_matmul_flops(m, seq, seq, causal=False)["attention"] == 5 * seq * seq * 4 * m.hidden
    assert palm(m, seq) - six_n(m, seq) == pytest.approx(12 * m.hidden * (3 * 2 * pairs / seq + 2 * seq), rel=1e-14)


def test_multi_token_prediction_is_layers_a_projection_and_the_output_layer_again() -> None:
    moe = {"experts": 6, "top_k": 2, "expert_ffn": 3, "first_dense": 1}
    m, without = (load_model(SMALL | {"moe": moe, "mtp": mtp}) for mtp in (2, 0))
    parts, fewer = (forward_matmul_flops(each, 32, 16, causal=True) for each in (m, without))
    assert parts["mtp"] == 2 * (2 * 32 * 16 * 8)
    assert parts["head"] == 3 * fewer["head"]
    assert parts["mlp"] == fewer["mlp"]
    for part, count in {"qkv": 5, "attention": 5, "proj": 5, "router": 4, "experts": 4}.items():
        assert parts[part] * count == fewer[part] * (count + 2)


def test_linear_in_tokens(model: Model) -> None:
    one, many = (forward_matmul_flops(model, tokens, 4096, causal=True) for tokens in (1, 12288))
    assert {part: flops * 12288 for part, flops in one.items()} == pytest.approx(many, rel=1e-14)
