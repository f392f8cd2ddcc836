"""Parts that few models have: several residual streams, attention to compressed entries, indexers that layers share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware import load
from meshcast.simulator import simulate
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.kernels import attention, memory
from meshcast.simulator.ir.ops import Attention, Memory
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.undescribed import name_unsent
from meshcast.validation.contract.played import Played, play_job, sent_between_stages

TYPES = [json.loads(line) for line in Path(__file__).with_name("types.jsonl").read_text().splitlines()]
SHIPPED = Calibration.shipped()
SMALL: dict[str, Any] = {
    **{"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "positions": "rope", "norm": "rmsnorm"},
    "gated": True,
}
ALTUP: dict[str, Any] = {
    **{"altup": {"streams": 4, "laurel_rank": 6}, "layer_input": {"vocab": 128, "width": 24}, "norm_place": "both"},
    **{"qk_layernorm": True, "value_norm": True, "kv_heads": 2},
}
SSM = {"pattern": "MSSMSS", "heads": 4, "head_dim": 32, "state": 8, "groups": 2}
SHARED: dict[str, Any] = {
    **{"layers": 6, "ssm": SSM, "positions": "none", "head_dim": 32, "gated": True},
    "shared_block": {"blocks": 2, "adapter_rank": 4},
}
EXPERTS = {"moe": {"experts": 4, "top_k": 2, "expert_ffn": 48, "shared_experts": 1}}
STREAMS = {"hyper_connections": {"streams": 4}}
LATENTS = {"q_lora_rank": 24, "out_groups": 2, "out_rank": 12}
HEADS = {"kv_heads": 1, "head_dim": 16, "window": 8, "sinks": True}
INDEX = {"heads": 2, "dim": 8, "top_k": 4}
ENTRIES: dict[str, Any] = {**HEADS, "compressed": {**LATENTS, "rate": 4, "overlaps": True, "index": INDEX}}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope": 16, "qk_rope": 8, "v": 16}
SHARING = {
    "mla": {**MLA, "index": {**INDEX, "shared": True}},
    "variants": [{"numbers": [0], "mla": {**MLA, "index": INDEX}}],
}
BRANCHES = {"size": 4, "top_k": 2, "length": 4, "stride": 2, "branches": True, "window": 6}
BLOCKS: list[dict[str, Any]] = [
    {"blocks": {"size": 4, "top_k": 3, "index": {"heads": 2, "dim": 8}}, "qk_layernorm": True, **EXPERTS},
    {"blocks": {"size": 4, "top_k": 3, "index": {"heads": 2, "dim": 8}}, "full_every": [0], "mtp": 1},
    {"blocks": {"size": 8, "top_k": 2, "each_head": True}, "attention_gate": True},
    {"blocks": {"size": 8, "top_k": 2, "length": 4, "stride": 2, "coarse": 4}, "full_every": 2},
    {"blocks": {"size": 8, "top_k": 2, "from_tokens": 33}},
    {"blocks": BRANCHES},
    {"blocks": {**BRANCHES, "own_keys": True, "pool": "linear"}, "value_dim": 24, "qkv_bias": True},
]
PARTS: list[dict[str, Any]] = [
    *({"kv_heads": 2, **part} for part in BLOCKS),
    STREAMS,
    ALTUP,
    SHARED,
    {**SHARED, "ssm": {**SSM, "head_dim": 1, "groups": 1, "heads": 128, "rank": 5}, "shared_block": {}},
    {**SHARED, "positions": "rope", "shared_block": {"adapter_rank": 4, "adapts_attention": True}},
    {"hyper_connections": {"streams": 3, "mixes": False}, **EXPERTS},
    {**HEADS, "compressed": LATENTS},
    {**HEADS, "compressed": {**LATENTS, "rate": 8}},
    ENTRIES,
    {**ENTRIES, **STREAMS, **EXPERTS},
    SHARING,
    {"mla": MLA, "attention_gate": True, "sinks": True},
    {"kv_heads": 2, "head_experts": 4, "proj_bias": True, "moe": {**EXPERTS["moe"], "sum_bias": True}},
    {
        **{"positions": "none", "distance_profiles": {"width": 6, "extent": 12}, "token_convolutions": 4},
        **{"moe": {**EXPERTS["moe"], "shared_gate": "each"}, "result_scale": True, "qk_layernorm": True},
        **{"window": 8, "full_every": 2, "local_attention": {"heads": 8, "kv_heads": 2}},
    },
]


def play(part: dict[str, Any], gpus: int = 1, **plan: Any) -> Played:
    """Plays a step of a small model with a part on a few GPUs."""
    cluster = {"gpu": "h100-sxm", "gpus": gpus}
    return play_job({"model": {**SMALL, **part}, "cluster": cluster, "plan": plan, "batch": {"global": 1}})


def mixed(played: Played) -> float:
    """Returns the FLOPs of the products that mix streams, of all forward passes over all ranks."""
    works = ((op, count) for op, count in played.counts.items() if op.phase == "F")
    kernels = [(op.work, count) for op, count in works if isinstance(op.work, Memory) and op.work.what == "streams"]
    return sum(count * work.flops for work, count in kernels) * played.ranks


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_device_has_the_parameters_and_products_that_are_counted(part: dict[str, Any]) -> None:
    model, played = load_model({**SMALL, **part}), play(part)
    assert sum(param.size for param in played.list_held(0)) == model.parameters
    counted = forward_matmul_flops(model, 32, 32, causal=True)
    of_attention, flops = counted.pop("attention"), played.flops("F")
    assert flops["attention"] == pytest.approx(of_attention)
    assert flops["gemm"] + mixed(played) == sum(counted.values()) - counted["scan"]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_sequence_parallel_ranks_repeat_only_what_every_rank_has_to_compute(part: dict[str, Any]) -> None:
    """The key that all heads share, and an indexer over all positions, are computed by both ranks; streams are not."""
    model, played = load_model({**SMALL, **part}), play(part, 2, tp=2, sequence_parallel=True)
    held = played.list_held(0)
    assert sum(param.total for param in held) == model.parameters
    repeated = [param for param in held if "windex" in param.name or (param.name == "wk" and model.compressed)]
    again = sum(param.size for param in repeated if "entries" not in param.name)
    counted = forward_matmul_flops(model, 32, 32, causal=True)
    counted = {part: flops for part, flops in counted.items() if part not in ("attention", "scan")}
    assert played.flops("F")["gemm"] + mixed(played) == sum(counted.values()) + 2 * 32 * again


def test_stages_send_all_streams() -> None:
    plain, *several = (sent_between_stages(play(part, 2, pp=2)) for part in ({}, STREAMS, ALTUP))
    assert several == 2 * [{key: [4 * nbytes for nbytes in sent] for key, sent in plain.items()}] != []


def test_streams_stay_in_memory_for_the_backward_pass() -> None:
    """A connection keeps its streams, its coefficients (8 + 16 numbers in fp32, and the mean square), and the result of
    the block; in place of it a residual addition keeps nothing."""
    plain, several, more = (play({**part, "layers": n}) for part, n in (({}, 1), (STREAMS, 1), (STREAMS, 2)))
    one_more = play({"layers": 2}).most_kept(0) - plain.most_kept(0)
    tokens, streams, coefficients = 32, 4 * 64 * 2, 4 * (24 + 1 + 20)
    # The input of the block's norm is the sum of the streams, which a plain layer keeps in its stream's place.
    assert more.most_kept(0) - several.most_kept(0) - one_more == 2 * tokens * (streams + coefficients + 2 * 64)


def test_a_matrix_of_every_token_mixes_its_streams() -> None:
    """Twice a layer, a matrix 4 x 4 times 4 streams of 64; coefficients are 4 + 4 + 16 products with all streams."""
    played, plain = play(STREAMS), play({})
    assert mixed(played) == 2 * 2 * 32 * 2 * 4 * 4 * 64
    coefficients = 2 * 2 * (4 + 4 + 16) + 4
    assert played.flops("F")["gemm"] - plain.flops("F")["gemm"] == 2 * 32 * 4 * 64 * coefficients


def test_independent_streams_cost_less_than_mixed_ones() -> None:
    """Hunyuan 4 mixes none: fewer coefficients, and no gradient of the streams in the second kernel."""
    job = {"cluster": "dgx-h100:1", "batch": {"global": 8}}
    shape = {**SMALL, "hidden": 1024, "seq": 2048}
    times = [
        simulate({**job, "model": {**shape, **part}}).step_time
        for part in ({}, {"hyper_connections": {"streams": 4, "mixes": False}}, STREAMS)
    ]
    assert times == sorted(set(times))


def test_entries_that_an_indexer_could_all_choose_are_all_attended_to() -> None:
    """More entries than exist are as many; fewer are fewer pairs, down to those of the window."""
    compressed = {**LATENTS, "rate": 4, "overlaps": True}
    index = [{"heads": 2, "dim": 8, "top_k": n} for n in (2, 8, 100)]
    parts = [{}, *({"index": each} for each in index)]
    models = [load_model({**SMALL, **HEADS, "compressed": compressed | part}) for part in parts]
    every, few, all_of, more = (forward_matmul_flops(model, 1, 32, causal=True)["attention"] for model in models)
    layers, entries = 2, 32 / 4
    scores = layers * entries * 2 * 8
    assert more - scores == all_of - scores == every > few - scores
    plain = load_model({**SMALL, **HEADS, "compressed": LATENTS})
    assert every - forward_matmul_flops(plain, 1, 32, causal=True)["attention"] == layers * entries * 2 * 64


@pytest.mark.parametrize(("what", "sigma"), [("keys", 0.3), ("blocks", math.log(1.6)), ("streams", 0.3)])
def test_kernels_that_no_measurement_checks_are_less_certain(what: str, sigma: float) -> None:
    gpu = load("gpus", "h100-sxm")
    if what == "streams":
        model = SHIPPED.kernel_model(gpu, "memory").model
        known, derived = (memory.price(Memory(kind, 10**8, 10**8), gpu, model) for kind in ("add", "streams"))
    else:
        fused = SHIPPED.kernel_model(gpu, "attention").model
        work = (Attention(1, 4096, 4096, 8, 8, 128, 128, chosen=chosen) for chosen in ("", what))
        known, derived = (attention.price(each, gpu, fused) for each in work)
    assert derived.seconds == known.seconds
    assert derived.sigma == pytest.approx(math.hypot(known.sigma, sigma), rel=1e-3)


def test_an_interval_is_wider_with_keys_that_an_indexer_chooses() -> None:
    job = {"cluster": "dgx-h100:1", "batch": {"global": 8}}
    shape = {**SMALL, "hidden": 512, "seq": 4096, "norm": "rmsnorm"}
    reports = [
        simulate({**job, "model": {**shape, "mla": {**MLA, **index}}})
        for index in ({}, {"index": {"heads": 4, "dim": 64, "top_k": 2048}})
    ]
    widths = [report.interval_90[1] / report.interval_90[0] for report in reports]
    assert widths[1] > widths[0]


DEEPSEEK = {
    **{"model_type": "deepseek_v4", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4},
    **{"vocab_size": 128, "max_position_embeddings": 64, "moe_intermediate_size": 32, "n_routed_experts": 8},
    **{"o_groups": 2, "head_dim": 16, "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, [128, 128, 128, 4, 128, 4]),
        ({"compress_ratios": [0, 0, 4, 128, 4, 128]}, [None, None, 4, 128, 4, 128]),
        ({"layer_types": ["sliding_attention"] * 6}, [None] * 6),
        ({"compress_rates": {"heavily_compressed_attention": 64}}, [64, 64, 64, 4, 64, 4]),
    ],
)
def test_every_layer_has_the_entries_of_its_type(changes: dict[str, Any], rates: list[int | None]) -> None:
    model = from_config(DEEPSEEK | changes)
    found = dict.fromkeys(range(6), model.compressed)
    found |= {number: variant.compressed for variant in model.variants for number in variant.numbers}
    assert [part and part.rate for part in found.values()] == rates


def test_a_token_passes_as_many_experts_of_heads_as_queries_share_a_key() -> None:
    """Queries of the others, and their rows of the output layer, are parameters that no token passes."""
    shape = {**SMALL, **EXPERTS, "kv_heads": 2}
    plain, mixture = load_model(shape), load_model({**shape, "head_experts": 5})
    router, expert = 64 * 5, 2 * 64 * 2 * 16
    assert mixture.parameters - plain.parameters == 2 * (router + 3 * expert)
    assert mixture.active_parameters - plain.active_parameters == 2 * router


def test_biases_by_distance_take_memory_for_every_head_and_distance() -> None:
    """Of a layer with full attention all distances with a profile, of one with a window those of it."""
    shape = {"positions": "none", "window": 8, "full_every": 2, "distance_profiles": {"width": 6, "extent": 12}}
    several = play({**shape, "distance_profiles": {"width": 6, "extent": 28}})
    assert several.most_kept(0) - play(shape).most_kept(0) == 32 * 4 * (28 - 12) * 2
    local = play({**shape, "full_every": 0})
    wide = play({**shape, "full_every": 0, "window": 16})
    assert wide.most_kept(0) - local.most_kept(0) == 2 * 32 * 4 * (16 - 8) * 2


BLT = next(config for config in TYPES if config["model_type"] == "blt")


def test_bytes_are_counted_for_every_patch() -> None:
    """FLOPs of linear layers over 256 bytes in 64 patches, the patcher's included, as torch's `FlopCounterMode` counts
    them in modules of ``transformers`` 5.24 that are given such patches."""
    model = from_config(BLT | {"max_position_embeddings": 256, "local_attention_window_len": 256})
    parts = forward_matmul_flops(model, 64, 64, causal=True)
    stacks = {(1, 1024), (9, 1024), (14, 768)}
    scores = 256 * 256 * 2 * sum(layers * hidden for layers, hidden in stacks)
    crossed = 64 * 4 * 4 * 2 * (1024 + 9 * 1024)
    assert sum(parts.values()) - parts["attention"] - scores - crossed == pytest.approx(297_932_423_168, rel=1e-5)


def test_larger_patches_are_fewer_tokens_of_more_bytes() -> None:
    few, many = (from_config(BLT | {"patch_size": size}) for size in (8, 4))
    assert few.seq == many.seq / 2 and few.parameters == many.parameters == 4633127680
    assert few.outside and many.outside and few.outside.flops > 1.9 * many.outside.flops


def test_layers_that_share_a_block_hold_it_once_and_use_it_each() -> None:
    """A further use adds a Mamba block, a linear layer and adapters; its products are those of the whole block."""
    few, many = (
        load_model(
            {**SMALL, **SHARED, "layers": n, "ssm": {**SSM, "pattern": pattern}, "shared_block": {"adapter_rank": 4}}
        )
        for n, pattern in ((2, "MS"), (3, "MSS"))
    )
    plain = load_model(
        {**SMALL, **SHARED, "layers": 3, "ssm": {**SSM, "pattern": "MMS"}, "shared_block": {"adapter_rank": 4}}
    )
    use = 64 * 64 + 4 * (64 + 2 * 256)
    assert many.parameters - few.parameters == plain.parameters - few.parameters + use
    products = [sum(forward_matmul_flops(model, 1, 32, causal=True).values()) for model in (plain, many)]
    block = 2 * 64 * 3 * 4 * 32 + 4 * 32 * 64 + 3 * 64 * 256
    assert products[1] - products[0] == 2 * (block + use) + 2 * 32 * 4 * 32


def test_every_stage_with_a_use_holds_the_shared_block() -> None:
    played = play({**SHARED, "shared_block": {"adapter_rank": 4}}, 2, pp=2)
    names = [[param.name for param in played.list_held(device)] for device in (0, 1)]
    assert all(held.count("wshared.q") == 1 for held in names)
    assert any("the embedding that shared blocks read" in text for text in name_unsent(played.plan.job.model, 2))


def test_first_layers_choose_experts_by_a_table_without_corrections() -> None:
    few, many = (from_config(DEEPSEEK | {"num_hash_layers": n}) for n in (0, 4))
    assert few.parameters - many.parameters == 4 * 8
