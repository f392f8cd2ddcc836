"""Attention residuals: sums by hand, what pipelines send, what layers save, and the parameters of Kimi K3."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Collective, Memory
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import Played
from tests.simulator.models.lowered import PLANS, describe_job, forward_ops, play

SMALL: dict[str, Any] = {
    **{"layers": 6, "hidden": 256, "heads": 4, "vocab": 512, "seq": 128, "norm": "rmsnorm", "gated": True},
    **{"positions": "rope", "tied": False},
}
STREAM = 2 * 128 * 256
"""Bytes of a stream of a sequence."""

# Keys of moonshotai/Kimi-K3 that matter for cost.
K3_TEXT: dict[str, Any] = {
    **{"model_type": "kimi_linear", "num_hidden_layers": 93, "hidden_size": 7168, "num_attention_heads": 96},
    **{"intermediate_size": 33792, "vocab_size": 163840, "max_position_embeddings": 1048576, "hidden_act": "situ"},
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"num_key_value_heads": 96, "mla_use_nope": True, "mla_use_output_gate": True, "attn_res_block_size": 12},
    **{"num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072},
    **{"routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "first_k_dense_replace": 1},
    "linear_attn_config": {
        **{"full_attn_layers": [*range(4, 93, 4), 93], "head_dim": 128, "num_heads": 96},
        **{"short_conv_kernel_size": 4, "use_full_rank_gate": True},
    },
}
K3 = {"model_type": "kimi_k3", "text_config": K3_TEXT, "vision_config": {"qkv_hidden_size": 1536}}


def run(plan: Any = None, gpus: int = 1, **fields: Any) -> Played:
    return play(SMALL | {"attention_residuals": {"block": 2}} | fields, plan, gpus, batch=gpus)


def count_sums(layers: int, block: int) -> tuple[int, list[int]]:
    """The sums that a pass reads, and those in front of every layer and behind the last, layer by layer as its code."""
    slots, read, before = 0, 0, list[int]()
    for layer in range(layers):
        before.append(slots + 1)
        read += slots + 1 if slots else 0
        slots += layer % block == 0
        read += slots + 1
    return read + slots + 1, [*before, slots + 1]


def test_kimi_k3_has_the_parameters_of_its_modules() -> None:
    h, width = 7168, 96 * 128
    delta = 5 * h * width + h * 128 + 128 * width + h * 96 + 4 * 3 * width + 96 + width + 128
    latent = h * 1536 + 1536 + 1536 * 96 * 192 + h * 576 + 512 + 512 * 96 * 256 + 2 * h * width
    experts = 896 * 3 * 3584 * 3072 + 2 * h * 3584 + 3584 + 3 * h * 6144 + 896 * (h + 1)
    layers = 69 * delta + 24 * latent + 3 * h * 33792 + 92 * experts + 93 * (2 + 4) * h
    text = layers + 3 * h + 2 * 163840 * h
    assert from_config(K3_TEXT).parameters == text and text / 1e9 == pytest.approx(2779.5, abs=0.05)
    layer = 2 * 1024 + 4 * 1024 * 1536 + 2 * 1024 * 4096
    tower = 27 * layer + 4096 * 1024 + 588 * 1024 + 1024 + 4096 * (4096 + h) + h
    assert from_config(K3).parameters == text + tower


@pytest.mark.parametrize(("layers", "block"), [(6, 2), (7, 3), (5, 1), (3, 8)])
def test_products_are_those_of_all_sums_that_are_read(layers: int, block: int) -> None:
    """Of a sum 2 h FLOPs for its score, and 2 h for its share."""
    read, _ = count_sums(layers, block)
    model = load_model({**SMALL, "layers": layers, "attention_residuals": {"block": block}})
    assert forward_matmul_flops(model, 1, 128, causal=True)["streams"] == 4 * 256 * read
    kernels = [op.work for run_ in run(layers=layers, attention_residuals={"block": block}).stages[0].unit_runs
               for op in run_.fragment.forward * run_.count if op.name.startswith("sums")]  # fmt: skip
    moved = [work.read for work in kernels if isinstance(work, Memory) and work.what == "streams"]
    assert sum(moved) == read * STREAM


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_hold_the_parameters_that_are_counted(plan: str) -> None:
    played = run(PLANS[plan], gpus=8)
    params = [param for stage in played.stages for param in params_of(stage)]
    assert sum(param.total for param in params) == played.plan.job.model.parameters


def test_a_stage_sends_all_sums_forward_and_their_gradients_back() -> None:
    """As many as ``get_tensor_shapes`` is told for Kimi K3 with stages of 12 layers: 2, 3 ... 8 streams."""
    partition = [12] * 7 + [9]
    played = run({"pp": 8, "partition": partition}, gpus=8, layers=93, attention_residuals={"block": 12})
    _, before = count_sums(93, 12)
    sent = [stage.message_nbytes for stage in played.stages[:-1]]
    assert sent == [before[12 * i] * STREAM for i in range(1, 8)] == [n * STREAM for n in range(2, 9)]
    assert [stage.unit_runs[0].nbytes_in for stage in played.stages[1:]] == sent


def saved(layers: int, block: int, plan: Any = None) -> float:
    return run(plan, layers=layers, attention_residuals={"block": block}).category_peak(0, "activations")


def test_a_layer_inside_of_a_block_saves_no_sums_again() -> None:
    """The seventh layer has three sums in front of it where blocks have four layers, and two in a single block: it
    saves a weight and a mean square of the third, for attention and for the MLP."""
    assert saved(7, 4) - saved(6, 4) == saved(7, 100) - saved(6, 100) + 2 * 128 * 8
    full = {"recompute": "full"}
    assert saved(8, 4, full) - saved(7, 4, full) == STREAM
    # The four sums behind a layer that begins one are held anew, and what reads them behind the last layer saves more.
    assert saved(9, 4, full) - saved(8, 4, full) == 4 * STREAM + 128 * 8


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_exchange_what_they_exchange_around_a_residual_addition(sequence_parallel: bool) -> None:
    plan = {"tp": 2, "sequence_parallel": sequence_parallel}
    plain, sums = (
        [op.work for op in forward_ops(run(plan, 2, attention_residuals=part)) if isinstance(op.work, Collective)]
        for part in (None, {"block": 2})
    )
    assert [(work.operation, work.nbytes) for work in plain] == [(work.operation, work.nbytes) for work in sums]


def test_kimi_k3_has_a_forecast_that_names_what_is_derived() -> None:
    text = K3_TEXT | {"num_hidden_layers": 12, "num_experts": 64, "max_position_embeddings": 4096}
    text["linear_attn_config"] = K3_TEXT["linear_attn_config"] | {"full_attn_layers": [4, 8, 12]}
    plan = {"tp": 8, "pp": 2, "ep": 8, "zero": 1}
    job = describe_job(from_config(text), plan, gpus=64, batch=64) | {"cluster": "dgx-h100:8"}
    report = simulate(job)
    assert 0 < report.mfu["causal"] < 0.8
    assert any("model.attention_residuals" in line for line in report.assumed)
