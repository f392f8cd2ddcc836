"""Configs of released models: parameters against published counts, FLOPs by hand, shards, and whole forecasts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Collective, Gemm, Memory
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.huggingface.readers import find_reader
from meshcast.simulator.models.load import find_model, load_model, presets
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn
from tests.simulator.models.configs import CONFIGS, COUNTS, PRINTED, VISION
from tests.simulator.models.counts import count_without_mtp
from tests.simulator.models.lowered import PLANS, describe_job, forward_ops


def read(name: str, **changes: Any) -> Model:
    return from_config(CONFIGS[name] | changes, name=name)


LISTED = ["full_attention"] * 2 + ["sliding_attention"] * 2


@pytest.mark.parametrize(
    ("kind", "counted", "listed"),
    [
        ("dots1", {"sliding_window": 64, "max_window_layers": 2}, {"sliding_window": 64, "layer_types": LISTED}),
        ("minimax_m3_vl_text", {"moe_layer_freq": [0, 0, 1, 1]}, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}),
    ],
)
def test_kinds_of_layers_are_listed_or_told_otherwise(kind: str, counted: Any, listed: Any) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
    sizes |= {"num_hidden_layers": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    config = {"model_type": kind, **sizes}
    assert from_config(config | counted, name="a") == from_config(config | listed, name="a")


# ---------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_of_the_modelling_code(name: str) -> None:
    model = read(name)
    left_out = 0
    if CONFIGS[name]["model_type"] == "glm4_moe":
        assert model.moe is not None
        left_out = model.moe.experts * (model.layers - model.moe.first_dense) + model.parameter_parts["mtp"]
    assert model.parameters - left_out == COUNTS[name]


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_in_print(name: str) -> None:
    total, active, _ = PRINTED[name]
    model = read(name)
    assert count_without_mtp(model) / 1e9 == pytest.approx(total, abs=10 ** -_digits(total) / 2 * 1.01)
    if active is not None:
        # Publications leave out the table of embeddings, the output layer, both or neither.
        tables = (1 if model.tied else 2) * model.vocab * model.hidden
        least, most = model.active_parameters - model.parameter_parts["mtp"] - tables, model.active_parameters
        assert least / 1e9 - 0.5 * 10 ** -_digits(active) <= active <= most / 1e9 + 0.5 * 10 ** -_digits(active)


def _digits(printed: float) -> int:
    """Digits behind the point of a printed figure."""
    return len(f"{printed}".partition(".")[2].rstrip("0"))


@pytest.mark.parametrize(
    ("name", "numbers"), [("zai-org/GLM-4.5-Air", 110_468_824_832), ("zai-org/GLM-4.5", 358_337_791_296)]
)
def test_checkpoints_of_glm_have_copies_of_embedding_and_output_layer(name: str, numbers: int) -> None:
    """Numbers in the safetensors files, which the page of a model prints: multi-token prediction has an embedding, an
    output layer and a final norm of its own there, and here those of the model."""
    model = read(name)
    assert model.parameters + 2 * model.vocab * model.hidden + model.hidden == numbers


# --------------------------------------------------------------------------------------------- FLOPs by hand

# Weights that the matrix products of a token read, layer by layer, and twice the mean number of keys x layers x the
# width of all heads, of a causal sequence of 8192 tokens: (2 w - w w / 8192) in layers with a window w.
WINDOW = {w: 2 * w - w * w / 8192 for w in (128, 512, 2047, 4096)}
HAND: dict[str, tuple[float, float]] = {
    "google/gemma-2-2b": (26 * (2304 * (8 + 4 + 4) * 256 + 8 * 256 * 2304 + 3 * 2304 * 9216) + 2304 * 256000,
        (13 * WINDOW[4096] + 13 * 8192) * 8 * 256),
    "google/gemma-3-1b-pt": (26 * (1152 * (4 + 1 + 1) * 256 + 4 * 256 * 1152 + 3 * 1152 * 6912) + 1152 * 262144,
        (22 * WINDOW[512] + 4 * 8192) * 4 * 256),
    "microsoft/Phi-3-mini-4k-instruct": (32 * (4 * 3072 * 3072 + 3 * 3072 * 8192) + 3072 * 32064,
        32 * WINDOW[2047] * 3072),
    "Qwen/Qwen1.5-MoE-A2.7B": (24 * (4 * 2048 * 2048 + 2048 * (60 + 1) + 3 * 2048 * (4 * 1408 + 5632)) + 2048 * 151936,
        24 * 8192 * 2048),
    "allenai/OLMo-2-0325-32B": (64 * (5120 * (40 + 8 + 8 + 40) * 128 + 3 * 5120 * 27648) + 5120 * 100352,
        64 * 8192 * 5120),
    "ibm-granite/granite-3.1-2b-base": (40 * (2048 * (32 + 8 + 8 + 32) * 64 + 3 * 2048 * 8192) + 2048 * 49155,
        40 * 8192 * 2048),
    "CohereLabs/c4ai-command-r7b-12-2024": (32 * (4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 14336) + 4096 * 256000,
        (24 * WINDOW[4096] + 8 * 8192) * 4096),
    "bigcode/starcoder2-3b": (30 * (3072 * (24 + 2 + 2 + 24) * 128 + 2 * 3072 * 12288) + 3072 * 49152,
        30 * WINDOW[4096] * 3072),
    "tiiuae/falcon-7b": (32 * (4544 * (71 + 2 + 71) * 64 + 2 * 4544 * 4 * 4544) + 4544 * 65024, 32 * 8192 * 4544),
    "tiiuae/falcon-40b": (60 * (8192 * (128 + 16 + 128) * 64 + 8 * 8192 * 8192) + 8192 * 65024, 60 * 8192 * 8192),
    "LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct": (32 * (4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 14336) + 4096 * 102400,
        32 * 8192 * 4096),
    "LGAI-EXAONE/EXAONE-4.0-32B": (64 * (5120 * (40 + 8 + 8 + 40) * 128 + 3 * 5120 * 27392) + 5120 * 102400,
        (48 * WINDOW[4096] + 16 * 8192) * 5120),
    "tencent/Hunyuan-0.5B-Pretrain": (24 * (1024 * (16 + 8 + 8 + 16) * 128 + 3 * 1024 * 3584) + 1024 * 120818,
        24 * 8192 * 2048),
    "tencent/Hunyuan-A13B-Instruct": (
        32 * (4096 * (32 + 8 + 8 + 32) * 128 + 4096 * 64 + 3 * 4096 * 3072 * (8 + 1)) + 4096 * 128167,
        32 * 8192 * 4096),
    "nvidia/nemotron-4-15b": (32 * (6144 * (48 + 8 + 8 + 48) * 128 + 2 * 6144 * 24576) + 6144 * 256000,
        32 * 8192 * 6144),
    "openai/gpt-oss-20b": (24 * (2880 * (64 + 8 + 8 + 64) * 64 + 2880 * 32 + 4 * 3 * 2880 * 2880) + 2880 * 201088,
        (12 * WINDOW[128] + 12 * 8192) * 64 * 64),
    "hpcai-tech/grok-1": (64 * (6144 * (48 + 8 + 8 + 48) * 128 + 6144 * 8 + 2 * 3 * 6144 * 32768) + 6144 * 131072,
        64 * 8192 * 6144),
    # 46 layers, one of them dense, and one of multi-token prediction with an output layer
    "zai-org/GLM-4.5-Air": (
        47 * 4096 * (96 + 8 + 8 + 96) * 128 + 3 * 4096 * 10944 + 46 * (4096 * 128 + 3 * 4096 * 1408 * (8 + 1))
        + 2 * 4096 * 4096 + 2 * 4096 * 151552, 47 * 8192 * 96 * 128),
    # latents of 1536 and 512; widths of scores and values are 192 and 128
    "moonshotai/Kimi-K2-Base": (
        61 * (7168 * (1536 + 512 + 64) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168) + 3 * 7168 * 18432
        + 60 * (7168 * 384 + 3 * 7168 * 2048 * (8 + 1)) + 7168 * 163840, 61 * 8192 * 64 * (192 + 128) / 2),
    # a state is decayed, read twice and added to: 7 FLOPs of each element
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        36 * (2048 * (2 * 2048 + 2 * 4096 + 64) + 4096 * 2048 + 3.5 * 32 * 128 * 128)
        + 12 * 2048 * (2 * 16 + 2 + 2 + 16) * 256 + 48 * (2048 * (512 + 1) + 3 * 2048 * 512 * (10 + 1))
        + 2048 * 151936, 12 * 8192 * 16 * 256),
    # a state is decayed, added to and read: 5 FLOPs of each element
    "MiniMaxAI/MiniMax-Text-01-hf": (
        70 * (5 * 6144 * 8192 + 2.5 * 64 * 128 * 128) + 10 * 6144 * (64 + 8 + 8 + 64) * 128
        + 80 * (6144 * 32 + 2 * 3 * 6144 * 9216) + 6144 * 200064, 10 * 8192 * 8192),
    "MiniMaxAI/MiniMax-Text-01": (
        70 * (5 * 6144 * 8192 + 2.5 * 64 * 128 * 128) + 10 * 6144 * (64 + 8 + 8 + 64) * 128
        + 80 * (6144 * 32 + 2 * 3 * 6144 * 9216) + 6144 * 200064, 10 * 8192 * 8192),
    "AntonV/mamba2-1.3b-hf": (48 * (2048 * (2 * 4096 + 2 * 128 + 64) + 4096 * 2048 + 3.5 * 4096 * 128) + 2048 * 50288,
        0),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND)
def test_flops_by_hand(name: str) -> None:
    weights, seen = HAND[name]
    parts = forward_matmul_flops(read(name), 1, 8192, causal=True)
    assert sum(parts.values()) == pytest.approx(2 * weights + 2 * seen, rel=1e-12)


def test_every_kind_has_a_count_and_flops_by_hand() -> None:
    counted = {CONFIGS[name]["model_type"] for name in COUNTS}
    by_hand = {CONFIGS[name]["model_type"] for name in HAND}
    kinds = {config["model_type"] for config in CONFIGS.values()}
    assert counted | {"grok-1"} == kinds == by_hand


NO_ROTARY_DIM = "MiniMaxAI/MiniMax-Text-01-hf"
"""The copy for transformers does not state that RoPE rotates half of a head."""


@pytest.mark.parametrize("name", [name for name in CONFIGS if find_model(name) and name != NO_ROTARY_DIM])
def test_the_config_of_a_hub_id_is_that_of_its_preset(name: str) -> None:
    trained = {"name": name, "seq": 8192, "position_rows": 8192, "mtp": 0, "left_out": ()}
    model = read(name).model_dump(exclude_unset=True) | trained
    preset = load_model(str(find_model(name))).model_dump(exclude_unset=True) | trained
    assert Model.model_validate(model) == Model.model_validate(preset)


# --------------------------------------------------------------------------------------------- what is lowered


def job(name: str, layers: int, gpus: int = 1, plan: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A job of the first layers of a model."""
    config = CONFIGS[name]
    fewer = {key: layers for key in ("num_hidden_layers", "num_layers") if key in config}
    lists = ("layer_types", "attn_type_list")
    fewer |= {key: config[key][:layers] for key in lists if config.get(key)}
    model = from_config(config | fewer | changes, name=name).model_dump(exclude_unset=True)
    return describe_job(model | {"seq": 256}, plan, gpus, batch=4)


def run(name: str, layers: int, gpus: int = 1, plan: dict[str, Any] | None = None, **changes: Any) -> Played:
    return play_job(job(name, layers, gpus, plan, **changes))


LAYERS = {"google/gemma-3-1b-pt": 6, "CohereLabs/c4ai-command-r7b-12-2024": 4, "LGAI-EXAONE/EXAONE-4.0-32B": 4}
LAYERS |= {"MiniMaxAI/MiniMax-Text-01-hf": 8, "MiniMaxAI/MiniMax-Text-01": 8}


SHARDED = [name for name in CONFIGS if "falcon-7b" not in name]


@pytest.mark.parametrize("name", drawn(SHARDED, keep=4))
def test_all_parameters_are_held_and_sharded(name: str) -> None:
    """On one GPU all of them; with tp 2 the matrices by halves, and the vectors over the residual stream whole."""
    layers = LAYERS.get(name, 4)
    whole = run(name, layers)
    model = whole.plan.job.model
    held = sum(param.size for param in whole.list_held(0))
    vocab = next(param.total for param in whole.list_held(0) if param.name == "embedding") // model.hidden
    assert held - (vocab - model.vocab) * model.hidden * (1 if model.tied else 2) == model.parameters


def test_norms_around_and_behind_blocks() -> None:
    kernels = {
        "google/gemma-2-2b": "norm1 rope proj.norm residual1 norm2 act down.norm residual2",
        "allenai/OLMo-2-1124-7B": "qk_norm rope proj.norm residual1 act down.norm residual2",
        "CohereLabs/c4ai-command-r7b-12-2024": "norm1 rope act residual",
    }
    for name, names in kernels.items():
        assert [op.name for op in forward_ops(run(name, 2)) if isinstance(op.work, Memory)] == names.split()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_over_all_heads_sum_over_tensor_ranks(sequence_parallel: bool) -> None:
    played = run("allenai/OLMo-2-1124-7B", 2, 2, {"tp": 2, "sequence_parallel": sequence_parallel})
    collectives = {op.name: op.work for op in forward_ops(played) if isinstance(op.work, Collective)}
    (joined,) = [work for name, work in collectives.items() if name.startswith("qk_norm")]
    assert (joined.operation, joined.nbytes) == ("all_reduce", 2 * 4 * 256)
    shards = {param.name: param.total // param.size for param in params_of(played.stages[0])}
    assert shards["q.norm.weight"] == shards["k.norm.weight"] == 2 and shards["proj.norm.weight"] == 1
    # A norm behind a block reads whole sums, as a residual addition does.
    kinds = [op.work.operation for op in forward_ops(played) if isinstance(op.work, Collective)]
    once = ["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"]
    assert kinds == [*once[:-1], "all_reduce", once[-1], *once]


def test_capped_logits_and_scores() -> None:
    plain = run("google/gemma-2-2b", 2, attn_logit_softcapping=None, final_logit_softcapping=None)
    logits = run("google/gemma-2-2b", 2, attn_logit_softcapping=None)
    ending = [op.work for op in forward_ops(logits, -1) if op.name == "logits.cap"]
    assert [(work.read, work.write) for work in ending] == [(2 * 256 * 256000, 2 * 256 * 256000)]
    assert not [op for op in forward_ops(plain, -1) if op.name == "logits.cap"]
    both = run("google/gemma-2-2b", 2)
    assert [op.name for op in forward_ops(both)] == [op.name for op in forward_ops(logits)], "fused kernels cap scores"
    unfused = job("google/gemma-2-2b", 2) | {"framework": {"set": {"attention": "unfused"}}}
    core = [op.work for op in forward_ops(play_job(unfused)) if op.name.startswith("core")]
    scores = 2 * 8 * 256 * 256
    assert [(work.what, work.read, work.write) for work in core if isinstance(work, Memory)] == [
        ("gelu", scores, scores),
        ("softmax", scores, scores),
    ]


def test_a_gate_of_shared_experts_weighs_their_result() -> None:
    ops = {op.name: op.work for op in forward_ops(run("Qwen/Qwen1.5-MoE-A2.7B", 2))}
    gate, weigh = ops["shared.gate"], ops["shared.weigh"]
    assert isinstance(gate, Gemm) and (gate.m, gate.n, gate.k) == (256, 1, 2048)
    assert (weigh.read, weigh.write) == (2 * 256 * (2048 + 1), 2 * 256 * 2048)


def test_sinks_are_sharded_as_heads() -> None:
    played = run("openai/gpt-oss-20b", 2, 2, {"tp": 2})
    (sinks,) = {(param.total, param.size) for param in params_of(played.stages[0]) if param.name == "sinks"}
    assert sinks == (64, 32)


@pytest.mark.parametrize(("name", "plan"), drawn(product(SHARDED, PLANS), keep=7))
def test_whole_forecasts(name: str, plan: str) -> None:
    """Steps of the first layers; a pipeline has a stage of half of them."""
    split = PLANS[plan]
    if name == "AntonV/mamba2-1.3b-hf" and "tp" in split:  # one group, which tensor parallelism does not divide
        split = {"pp": 2, "dp": 4}
    forecast = simulate(job(name, LAYERS.get(name, 4), 8, split) | {"batch": {"global": 16}})
    low, high = forecast.interval_90
    assert low < forecast.step_time < high and 0 < forecast.mfu["causal"] < 0.8


@pytest.mark.parametrize("name", drawn([name for name in CONFIGS if read(name).moe], keep=6))
def test_experts_over_ranks(name: str) -> None:
    forecast = simulate(job(name, LAYERS.get(name, 4), 8, {"ep": 4, "dp": 8, "tp": 1}) | {"batch": {"global": 16}})
    assert forecast.step_time > 0


# -------------------------------------------------------------------------------------------------- presets


def emit_config(kind: str, model: Model, **other: Any) -> dict[str, Any]:
    """A config of `kind` from the fields of a model that the reader of this kind knows."""
    config: dict[str, Any] = {"model_type": kind}
    parts = [model, *(part for part in (model.mla, model.moe) if part is not None)]
    for name, field in find_reader(kind).model_fields.items():
        for part in parts:
            if hasattr(part, name):
                config[field.validation_alias.choices[0]] = getattr(part, name)  # type: ignore[union-attr]
                break
    return config | other


def preset_config(name: str) -> dict[str, Any] | None:
    """A config that describes a preset; None: no supported kind does, or no short one."""
    if name in NO_KIND:
        return None
    model, family = load_model(name), name.partition("-")[0]
    dropouts = {"attn_pdrop": model.dropout, "embd_pdrop": model.dropout, "attention_dropout": model.dropout}
    masks = {"use_sliding_window": False, "layer_types": None}
    if model.branches:
        like = {"clip-vit-l-14": "openai/clip-vit-large-patch14", "llava-1.5-7b": "llava-hf/llava-1.5-7b-hf"}
        return VISION[like[name]] if name in like else None
    if family.startswith("nemotron") and model.ssm:
        ssm = model.ssm
        return emit_config("nemotron_h", model, hybrid_override_pattern=ssm.pattern) | {
            **{"mamba_num_heads": ssm.heads, "mamba_head_dim": ssm.head_dim, "ssm_state_size": ssm.state},
            **{"n_groups": ssm.groups, "conv_kernel": ssm.conv, "chunk_size": ssm.chunk, "attention_bias": False},
        }
    if family == "deepseek" and not model.mla:
        return emit_config("llama", model)
    if family in ("deepseek", "kimi"):
        kind = "kimi_k2" if family == "kimi" else "deepseek_v3" if name == "deepseek-v3" else "deepseek_v2"
        corrected = model.moe is not None and model.moe.router_bias
        return emit_config(kind, model, topk_method="noaux_tc" if corrected else "greedy")
    if family == "llama4":
        chunked = ["full_attention" if (layer + 1) % 4 == 0 else "chunked_attention" for layer in range(model.layers)]
        return emit_config("llama4_text", model, intermediate_size=8192, layer_types=chunked, no_rope_layers=[])
    if family == "gpt" and model.moe:
        return emit_config("gpt_oss", model, layer_types=None)
    if family == "opt":
        return emit_config("opt", model)
    if family == "mpt":
        return emit_config("mpt", model, expansion_ratio=4, no_bias=False, attn_config={"alibi": False})
    if name.startswith("bloom-prequel"):
        return emit_config("falcon", model, multi_query=False, parallel_attn=False, bias=True, alibi=True)
    kinds = {
        **{"bloom": "bloom", "grok": "grok-1", "mistral": "mistral", "mixtral": "mixtral", "gemma": "gemma"},
        **{"nemotron3": "nemotron", "nemotron4": "nemotron", "qwen2": "qwen2", "qwen2.5": "qwen2", "qwen3": "qwen3"},
        **{
            "qwen1.5": "qwen2",
            "starcoder2": "starcoder2",
            "olmo2": "olmo2",
            "phi3": "phi3",
            "phi4": "phi3",
            "phi3.5": "phi3",
        },
        **{"gemma2": "gemma2"},
    }
    if family in kinds:
        kind = kinds[family] + ("_moe" if family == "qwen3" and model.moe else "")
        ends = {"embedding_dropout": 0.1, "attention_dropout": 0.1} if family == "starcoder2" else {}
        return emit_config(kind, model, attention_bias=False, **ends, **(masks if "qwen" in family else {}))
    if name == "gpt-neox-20b":
        return emit_config("gpt_neox", model)
    if model.norm == "rmsnorm":
        return emit_config("llama", model)
    return emit_config("gpt2", model) | dropouts


NO_KIND = {
    *("two-towers-2.3b", "seed-oss-36b", "olmo3-7b", "falcon-7b", "falcon-40b", "gemma3-1b", "deepseek-moe-16b"),
    *("glm4-9b", "glm4.5-air-106b", "glm4.6-355b", "hunyuan-a13b-80b", "minimax-m2-230b-a10b", "moonlight-16b-a3b"),
    *("olmoe-7b-a1b", "qwen2-57b-a14b", "qwen3-next-80b-a3b", "dit-xl-2-675m"),
}
"""Presets whose config is compared as it is (below), or is of a kind that is not read."""


@pytest.mark.parametrize("name", presets())
def test_presets_come_back_from_configs(name: str) -> None:
    config = preset_config(name)
    assert (config is None) == (name in NO_KIND)
    if config is not None:
        expected = load_model({"preset": name, "name": name})
        if name == "llava-1.5-7b":  # of which transformers pads the vocabulary, and the sequence is that of training
            expected = load_model({"preset": name, "name": name, "vocab": 32064, "seq": 4096})
        if config["model_type"] in ("gpt2", "falcon"):  # GPTs of other programs, as Transformers would write them
            expected = expected.model_copy(update={"fused_qkv": True})
        assert from_config(config, name=name) == expected
