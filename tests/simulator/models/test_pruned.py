"""Layers that lack a block, or have a linear layer in its place: configs of Llama-Nemotron, counts by hand, shards."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.ops import Attention, Collective, Gemm
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import params_of
from tests.simulator.models.lowered import PLANS, backward_ops, forward_ops, play

ULTRA = (
    "16:0.4875x1 16:0.975x1 16:1.4625x6 16:1.95x1 0:0x4 16:1.95x3 16:4.875x2 0:0x6 16:4.875x3 0:0x5 16:4.875x3 "
    "16:2.4375x1 0:0x3 16:1.95x3 0:1.95x1 16:4.875x1 0:4.875x1 0:0x5 16:4.875x4 0:0x5 16:4.875x4 0:0x5 16:4.875x4 "
    "0:0x5 16:4.875x4 0:0x5 16:4.875x1 16:3.4125x3 0:0x2 16:2.925x1 16:2.4375x3 0:2.4375x2 16:2.4375x1 0:0x1 "
    "0:2.4375x7 16:2.4375x1 0:0x5 16:2.925x1 16:4.875x1 0:4.875x1 16:4.875x1 0:0x8 0:36.5625x1 0:0x8 0:39.0x1 0:0x8 "
    "0:31.40625x1 0:0x5 0:27.5625x1 0:1.95x1 16:1.95x1 16:2.4375x1 0:0x1 16:2.4375x2 16:3.4125x1 16:4.875x4 16:2.4375x1"
)
"""The layers of nvidia/Llama-3_1-Nemotron-Ultra-253B-v1 (llama_nemotron_config.py of Megatron-Bridge): heads of a group
and factor of the MLP, each so many times; 0: none."""


def unfold(layers: str) -> list[tuple[int, float]]:
    runs = (run.replace("x", ":").split(":") for run in layers.split())
    return [(int(group), float(factor)) for group, factor, times in runs for _ in range(int(times))]


def configure(hidden: int, heads: int, layers: list[tuple[int, float]], **changes: Any) -> dict[str, Any]:
    blocks = [
        {
            "attention": {"no_op": not group, "replace_with_linear": False, "n_heads_in_group": group or None},
            "ffn": {"no_op": not factor, "replace_with_linear": False, "ffn_mult": factor or None},
        }
        for group, factor in layers
    ]
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": len(layers)}
    more = {"vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False}
    return {"model_type": "nemotron-nas", "block_configs": blocks, **sizes, **more, **changes}


def test_parameters_and_products_of_the_released_model_are_those_of_its_list() -> None:
    hidden, layers = 16384, unfold(ULTRA)
    model = from_config(configure(hidden, 128, layers), name="Ultra-253B")
    attention = sum(2 * hidden * hidden * (1 + 1 / group) for group, _ in layers if group)
    widths = [int(2 * factor * hidden / 3) for _, factor in layers if factor]
    weights = attention + sum(3 * hidden * (width + -width % 256) for width in widths) + 128256 * hidden
    norms = sum(bool(group) + bool(factor) for group, factor in layers) + 1
    assert model.parameters == weights + (norms + 128256) * hidden == 253_401_268_224
    parts = forward_matmul_flops(model, 1, 8192, causal=False)
    assert parts.pop("attention") == 4 * 8192 * hidden * sum(group > 0 for group, _ in layers)
    assert sum(parts.values()) == 2 * weights
    assert (model.layers, layers.count((0, 0.0))) == (81, 81) and "81, of 162" in model.left_out[0]


SMALL = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 5120, "seq": 1024, "norm": "rmsnorm", "gated": True}


def shape(**fields: Any) -> Model:
    return load_model({**SMALL, "positions": "rope", "tied": False, **fields})


@pytest.mark.parametrize("plan", PLANS)
def test_shards_of_all_kinds_of_layers_are_those_of_the_model(plan: str) -> None:
    variants = [{"numbers": [1], "only": "mlp", "ffn": 512}, {"numbers": [2], "only": "attention"}]
    variants.append({"numbers": [3], "replaced": ["attention", "mlp"]})
    model = shape(variants=variants)
    params = [param for stage in play(model, PLANS[plan], gpus=8, batch=8).stages for param in params_of(stage)]
    assert sum(param.total for param in params) == model.parameters
    divided = PLANS[plan].get("tp", 1)
    assert all(param.total in (param.size, divided * param.size) for param in params)
    assert {param.total // param.size for param in params if param.name.endswith(".replaced")} == {divided}


def test_a_layer_of_one_block_is_half_of_a_whole_one() -> None:
    whole, mlp, attention = (forward_ops(play(shape(**only))) for only in ({}, {"only": "mlp"}, {"only": "attention"}))
    names = [op.name for op in whole]
    assert [op.name for op in attention] == names[: names.index("residual1") + 1]
    assert [op.name for op in mlp if op.name not in ("norm1", "residual1")] == names[names.index("norm2") + 1 : -1]


@pytest.mark.parametrize(("block", "divided"), [("attention", "proj"), ("mlp", "down")])
def test_a_linear_layer_in_place_of_a_block_is_divided_as_the_block(block: str, divided: str) -> None:
    model = shape(replaced=[block])
    parts = forward_matmul_flops(model, 1, 1024, causal=False)
    assert parts["proj" if block == "attention" else "mlp"] == 2 * 4 * 1024**2
    assert parts["qkv"] == parts["attention"] == 0 or block == "mlp"
    played = play(model, {"tp": 2, "sequence_parallel": False}, gpus=2, batch=2)
    forward = forward_ops(played)
    linear = next(op for op in forward if op.name == divided)
    assert isinstance(linear.work, Gemm) and (linear.work.n, linear.work.k) == (1024, 512)
    assert any(isinstance(op.work, Attention) for op in forward) == (block == "mlp")
    sent = [op.work for op in (*forward, *backward_ops(played)) if isinstance(op.work, Collective)]
    assert sorted(work.operation for work in sent) == ["all_gather", *["all_reduce"] * 3]
