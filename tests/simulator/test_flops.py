"""FLOP conventions: their formulas, and how they relate."""

from __future__ import annotations

import pytest

from simulator.models import Model, load_model, presets
from simulator.models.flops import (
    CONVENTIONS,
    causal,
    forward_matmul_flops,
    megatron_2021,
    mosaic_hfu,
    mosaic_mfu,
    palm,
    six_n,
    step_flops,
)

LENGTHS = [1, 1024, 8192, 131072]


@pytest.fixture(params=presets())
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(request.param)


@pytest.mark.parametrize(("seq", "ratio"), [(4096, 1.05), (8192, 1.09), (32768, 1.25), (131072, 1.56)])
def test_palm_over_causal(seq: int, ratio: float) -> None:
    m = load_model("llama3-70b")
    assert palm(m, seq) / causal(m, seq) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("seq", LENGTHS)
def test_palm_is_6n_and_full_attention(model: Model, seq: int) -> None:
    attention = 12 * model.layers * model.heads * model.head_dim * seq
    assert six_n(model, seq) == 6 * model.parameters
    assert palm(model, seq) == pytest.approx(6 * model.parameters + attention, rel=1e-14)


@pytest.mark.parametrize("seq", LENGTHS)
def test_causal_is_three_forward_passes(model: Model, seq: int) -> None:
    tokens = 4 * seq
    parts = forward_matmul_flops(model, tokens, seq, causal=True)
    assert causal(model, seq) * tokens == pytest.approx(3 * sum(parts.values()), rel=1e-14)


def test_causal_is_6n_of_the_products(model: Model) -> None:
    """Linear layers do 2 FLOPs per weight and token; what is no product is norms, biases, tables."""
    seq = 2048
    matrices = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    matrices += (3 if model.gated else 2) * model.hidden * model.ffn
    products = model.layers * matrices + model.vocab * model.hidden
    attention = 6 * model.layers * model.heads * model.head_dim * seq
    assert causal(model, seq) == pytest.approx(6 * products + attention, rel=1e-14)
    untied_table = 0 if model.tied else model.vocab * model.hidden
    assert products == pytest.approx(model.parameters - untied_table, rel=0.01)


@pytest.mark.parametrize("seq", LENGTHS)
def test_order_of_conventions(model: Model, seq: int) -> None:
    assert six_n(model, seq) < palm(model, seq)
    assert causal(model, seq) < palm(model, seq) < mosaic_hfu(model, seq) < mosaic_hfu(model, seq, flash=True)
    assert causal(model, seq) < megatron_2021(model, seq, recompute=False) < megatron_2021(model, seq)
    assert mosaic_hfu(model, seq) == pytest.approx(mosaic_mfu(model, seq) * 4 / 3, rel=1e-14)
    if model.heads * model.head_dim == model.hidden:
        assert mosaic_mfu(model, seq) == pytest.approx(palm(model, seq), rel=1e-14)


@pytest.mark.parametrize("name", [name for name in presets() if not name.startswith("llama")])
def test_equation_3(name: str) -> None:
    """96 B s l h^2 (1 + s/(6h) + V/(16 l h)) of arXiv 2104.04473, for one token."""
    m = load_model(name)
    l, h, s, v = m.layers, m.hidden, m.seq, m.vocab
    assert megatron_2021(m, s) == pytest.approx(96 * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h)), rel=1e-12)
    assert megatron_2021(m, s, recompute=False) == pytest.approx(
        72 * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)), rel=1e-12
    )


def test_equation_3_gives_the_published_throughput() -> None:
    """Table 1 of arXiv 2104.04473: 1008B on 3072 GPUs at 163 TFLOP/s each, batch 3072; section 5.1: 84 days."""
    m = load_model("megatron-1008b")
    seconds = step_flops("megatron_2021", m, 2048, 3072) / (3072 * 163e12)
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
        **dict.fromkeys(("router", "experts", "shared", "mtp"), 0),
        "head": 2 * 7 * 8 * 11,
    }
    halved = forward_matmul_flops(m, 7, 5, causal=True)
    assert halved.pop("attention") * 2 == parts.pop("attention")
    assert halved == parts
    gated = forward_matmul_flops(m.model_copy(update={"gated": True}), 7, 5, causal=True)
    assert gated["mlp"] * 2 == parts["mlp"] * 3
    assert all(isinstance(flops, int) for flops in gated.values())


def test_linear_in_tokens(model: Model) -> None:
    one, many = (forward_matmul_flops(model, tokens, 4096, causal=True) for tokens in (1, 12288))
    assert {part: flops * 12288 for part, flops in one.items()} == many


def test_step_flops() -> None:
    m = load_model("llama3-8b")
    for name, convention in CONVENTIONS.items():
        assert step_flops(name, m, 8192, 128) == convention(m, 8192) * 8192 * 128
