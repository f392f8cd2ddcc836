"""Types of models of ``transformers``: parameters of their configs, as its modelling code makes them.

A line of types.jsonl is the config that release 5.24 writes for a type by default (the last lines: that of a released
model), without the keys whose defaults the reader has too; `parameters` of the model that it builds on the meta device,
which has no multi-token prediction (those that it does not build, dbrx: of the checkpoint, mimo: of the Qwen 2 of its
shape, nemotron-nas: of Llama's modules in the order of its list, kimi_k3: of its published modules, by hand, minicpm:
of the Llama of its shape, nsa: of flash-linear-attention 0.6); `corrections`, numbers of routers that are buffers there
and parameters here (the correction of DeepSeek-V3 for each expert), less tables of sines that are frozen parameters
there; `products`, where there are neither recurrences nor branches of images: FLOPs of a forward pass over 256 tokens,
of an encoder with a decoder 256 of each, of its modules with eager attention in fake mode, as torch's
`FlopCounterMode` counts them, which does not see grouped products of routed experts (PyTorch 2.13); `weights`, of
models with recurrences, or whose eager code gives all tokens to all experts: those of products of two matrices, of
which attention and scans have none (of zamba also those that its code makes batch by batch, for the heads of a Mamba
block). `small`: a config of the same type with few narrow layers, of which a real pass over 64 tokens, or a real pass
of its `encoder` of images or sounds with its projector, is counted, routed experts included (kimi_k2: by the code of
DeepSeek-V3; minimax_m1: of `minimax`; gemma4: without the product by which its code takes means of patches).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.formats.launch.convert import export_job, import_file
from meshcast.simulator.formats.launch.launch_file import read_launch_file
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.undescribed import name_left_out
from meshcast.validation.contract.played import play_job
from tests.simulator.models.counts import count_without_mtp
from tools.pages.models import compare_small, count_products

TYPES = [json.loads(line) for line in Path(__file__).with_name("types.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("config", TYPES, ids=[config["model_type"] for config in TYPES])
def test_parameters_are_those_that_transformers_makes(config: dict[str, Any]) -> None:
    assert count_without_mtp(from_config(config)) == config["parameters"] + config["corrections"]


COUNTED = [config for config in TYPES if "products" in config or "weights" in config]


@pytest.mark.parametrize("config", COUNTED, ids=[config["model_type"] for config in COUNTED])
def test_products_of_a_forward_pass_are_those_that_torch_counts(config: dict[str, Any]) -> None:
    kind = "products" if "products" in config else "weights"
    assert count_products(from_config(config), kind) == pytest.approx(config[kind], rel=1e-3)


@pytest.mark.parametrize(("kind", "projected"), [("qwen2_audio", 750 * 1280), ("voxtral", 375 * (5120 + 3072))])
def test_encoders_of_sounds_have_the_products_that_torch_counts(kind: str, projected: int) -> None:
    """``FlopCounterMode`` counts 2,273,771,520,000 FLOPs for 3000 frames of 128 bins in either encoder."""
    model = from_config(next(config for config in TYPES if config["model_type"] == kind))
    trunk = model.model_copy(update={"branches": ()})
    whole, alone = (
        sum(forward_matmul_flops(shape, model.seq, model.seq, causal=False).values()) for shape in (model, trunk)
    )
    assert whole - alone == 2_273_771_520_000 + 2 * model.hidden * projected


SMALL_ONES = [config for config in TYPES if "small" in config]


@pytest.mark.parametrize("config", SMALL_ONES, ids=[config["model_type"] for config in SMALL_ONES])
def test_a_small_model_or_its_encoder_has_the_products_that_torch_counts(config: dict[str, Any]) -> None:
    """The work of a class token, one of hundreds in an encoder, is left out."""
    small = config["small"]
    difference = compare_small(config["model_type"], small)
    assert abs(difference) < (3e-3 if "encoder" in small else 1e-3)


SMOLLM3 = {
    **{"model_type": "smollm3", "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128},
    **{"intermediate_size": 128, "max_position_embeddings": 64, "num_key_value_heads": 4},
}


def test_layers_without_rope_have_full_attention_and_no_rope_kernels() -> None:
    """Every fourth layer of SmolLM3 lacks RoPE, as often as the config says, by a period or by a list."""
    model = from_config(SMOLLM3)
    assert [model.kind(layer).local for layer in range(8)] == [True, True, True, False] * 2
    listed = from_config(SMOLLM3 | {"no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 0]})
    assert listed.full_every == (1, 7) and not listed.full_rope
    all_rope, half, none = (
        simulate({"model": from_config(SMOLLM3 | {"no_rope_layers": ropes}).model_dump(), "cluster": "dgx-h100:1"})
        for ropes in ([1] * 8, [1, 0] * 4, [0] * 8)
    )
    saved = all_rope.step_time - half.step_time
    assert 0 < saved == pytest.approx(half.step_time - none.step_time, rel=1e-6)


def test_the_share_of_rope_is_read_from_either_place() -> None:
    """Configs of transformers 5 have it inside ``rope_parameters``."""
    glm = SMOLLM3 | {"model_type": "glm", "head_dim": 16}
    for said in ({"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}):
        assert from_config(glm | said).rope_share == 0.25


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("bamba", {"mlp_bias": True}, {"mlp_bias": True}),
        ("bert", {"is_decoder": True}, {"bidirectional": False}),
        ("ernie", {"use_task_id": True}, {"position_rows": 512 + 2 + 3}),
        ("cohere2_moe", {"first_k_dense_replace": 2}, {"full_every": (0, 1, *range(5, 40, 4))}),
        ("cwm", {"mlp_bias": True}, {"mlp_bias": True}),
        ("granite_swa", {"layer_rope_theta": [0, 1e4, 1e4, 1e4] * 6}, {"full_rope": False}),
        ("granite_swa", {"layer_rope_theta": [0] * 24}, {"positions": "none"}),
        ("minimax_m2", {"num_mtp_modules": 3}, {"mtp": 3}),
        ("hy_v3", {"num_nextn_predict_layers": 1}, {"mtp": 1}),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [4, 8]}}, {"full_every": (3, 7)}),
        ("bailing_hybrid", {"layer_group_size": 3}, {"full_every": 3}),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}}, {"positions": "none"}),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 8}, {"full_every": 2}),
        ("lfm3", {"use_sandwich_norm": False}, {"norm_place": "before"}),
        ("lfm2", {"block_auto_adjust_ff_dim": False}, {"ffn": 12288}),
        ("modernbert", {"global_attn_every_n_layers": 2}, {"full_every": (*range(0, 22, 2),)}),
    ],
)
def test_keys_that_change_a_step_change_the_model(kind: str, changes: dict[str, Any], words: dict[str, Any]) -> None:
    config = next(config for config in TYPES if config["model_type"] == kind)
    plain, changed = from_config(config), from_config(config | changes)
    assert changed == plain.model_copy(update={word: getattr(changed, word) for word in {*words, "moe"}})
    assert {word: getattr(changed, word) for word in words} == words != {word: getattr(plain, word) for word in words}


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("deepseek_v4", "num_nextn_predict_layers"),
        ("inkling_text", "num_mtp_layers"),
        ("qwen3_5_text", "mtp_num_hidden_layers"),
    ],
)
def test_layers_that_a_reader_leaves_out_are_named(kind: str, word: str) -> None:
    config = next(config for config in TYPES if config["model_type"] == kind)
    without, two = (from_config(config | {word: layers}) for layers in (0, 2))
    assert two.parameters == without.parameters and not name_left_out(without)
    assert name_left_out(two) == [
        f"model: layers of multi-token prediction (2, behind {two.layers} others) are left out"
    ]


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, NVFP4"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
            "compressed-tensors, 4 bits",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "gptq, 8 bits"),
        ("int8", "int8"),
    ],
)
def test_formats_of_a_checkpoint_are_named_and_change_no_shape(formats: Any, words: str) -> None:
    plain, released = from_config(SMOLLM3), from_config(SMOLLM3 | {"quantization_config": formats})
    assert released == plain.model_copy(update={"left_out": released.left_out})
    assert name_left_out(released) == [
        f"model: the quantisation of the checkpoint ({words}), in place of which precision and train.frozen_weights"
        " stand, is left out"
    ]


def test_experts_that_return_their_input_take_places_of_a_token_and_of_the_router() -> None:
    """Of 12 experts of a token of LongCat-Flash, from 768, 8 have matrices in the mean; the first of two layers has
    experts. ``transformers`` makes matrices for the others too."""
    config = next(config for config in TYPES if config["model_type"] == "longcat_flash")
    plain, zero = from_config(config), from_config(config | {"zero_expert_num": 256, "moe_topk": 12})
    assert plain.moe is not None and zero.moe is not None and zero.moe.top_k == 8 == plain.moe.top_k
    assert zero.parameters - plain.parameters == 28 * 256 * (6144 + 1)
    assert [layer for layer in zero.every_layer if zero.is_moe(layer)] == list(range(0, 56, 2))
    with pytest.raises(ModelError, match="a whole number in the mean"):
        from_config(config | {"zero_expert_num": 100})


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("falcon_h1", {"mamba_d_ssm": None}, {"heads": 128, "head_dim": 64}),
        ("falcon_h1", {"mamba_rms_norm": True}, {"norm": True}),
        ("falcon_mamba", {"expand": 16, "intermediate_size": 8192}, {"heads": 8192, "norm": "inputs0"}),
        ("mamba", {"time_step_rank": 64}, {"rank": 64}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, {"pattern": "M-*E" * 16}),
        ("jamba", {"num_experts": 1}, {"pattern": "M-M-M-M-*-M-M-M-" * 4}),
    ],
)
def test_keys_that_change_a_mamba_block_change_it(kind: str, changes: dict[str, Any], words: dict[str, Any]) -> None:
    config = next(config for config in TYPES if config["model_type"] == kind)
    plain, changed = from_config(config).ssm, from_config(config | changes).ssm
    assert plain is not None and changed == plain.model_copy(update=words) != plain


@pytest.mark.parametrize(
    ("kind", "changes", "rule"),
    [
        ("falcon_h1", {"projectors_bias": True}, "bias of the projections of Mamba-2 blocks"),
        ("falcon_h1", {"mamba_conv_bias": False}, "convolutions have a bias here"),
        ("falcon_h1", {"mamba_d_head": 64}, "128 heads are to be 1024 wide in all"),
        ("mamba", {"use_bias": True}, "bias of the projections of Mamba-1 blocks"),
        ("mamba", {"use_conv_bias": False}, "use_conv_bias"),
        ("jamba", {"mamba_proj_bias": True}, "bias of the projections of Mamba-1 blocks"),
        ("lfm2", {"conv_bias": True}, "biases of short convolutions"),
        ("lfm2_moe", {"layer_types": None}, "has no default"),
        ("lfm3", {"attention_bias": True}, "bias of attention in front of a norm"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("olmo_hybrid", {"attention_bias": True}, "bias of attention in front of a norm"),
        ("xlstm", {"use_bias": True}, "biases of xLSTM"),
        ("recurrent_gemma", {"attention_dropout": 0.1}, "dropout on attention alone"),
        ("mamba", {"model_type": "zaya"}, "attention between convolved latents"),
    ],
)
def test_what_is_not_described_is_refused(kind: str, changes: dict[str, Any], rule: str) -> None:
    config = next(config for config in reversed(TYPES) if config["model_type"] == kind)
    with pytest.raises(ModelError, match=rule):
        from_config(config | changes)


def test_layers_of_two_blocks_are_twice_as_many() -> None:
    """A layer of Granite 4 is a Mamba-2 block or attention, and then experts."""
    granite = SMOLLM3 | {
        **{"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
        **{"mamba_n_heads": 8, "mamba_d_state": 16, "num_local_experts": 4, "shared_intermediate_size": 32},
    }
    model = from_config(granite)
    assert model.ssm is not None and model.ssm.pattern == "ME*E" and model.layers == 4
    assert from_config(granite | {"num_local_experts": 0}).ssm.pattern == "M-*-"  # type: ignore[union-attr]


def test_listed_layers_go_to_megatron_and_back(tmp_path: Path) -> None:
    """``--window-attn-skip-freq`` is a number, or a list with 0 for the layers with full attention."""
    shape = {"layers": 6, "hidden": 64, "heads": 4, "vocab": 128, "seq": 64, "positions": "rope", "window": 32}
    job = load_job({"model": shape | {"full_every": [0, 5]}, "cluster": "dgx-h100:1"})
    exported = export_job(job, "megatron", lambda data, folder: load_job(data, base=folder), lambda job: None)
    assert "--window-attn-skip-freq '[0,1,1,1,1,0]'" in exported.text
    (path := tmp_path / "run.sh").write_text(exported.text)
    assert load_job(import_file(read_launch_file(path)).job).model.full_every == (0, 5)


def test_norms_behind_residual_additions_are_those_of_bert() -> None:
    """BERT-large: 335 M parameters with its head for masked tokens, as MLPerf trains it but for the pooler and the
    prediction of the next sentence; matrix products of a token by hand."""
    shape = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    model = from_config({"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, **shape})
    norms, tables = 49 * 2048, (30522 + 512 + 2) * 1024
    layers = 24 * (4 * 1024 * 1025 + 1024 * 4097 + 4096 + 4096 * 1024)
    assert model.parameters == tables + norms + layers + 1024 * 1025 + 2048 + 30522 == 335_174_458
    flops = forward_matmul_flops(model, 1, 512, causal=True)
    assert sum(flops.values()) == 2 * (24 * 12 * 1024**2 + 24 * 2 * 512 * 1024 + 1024 * (1024 + 30522))


SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "positions": "rope"}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope": 16, "qk_rope": 8, "v": 16}
TOWER = {"layers": 2, "tokens": 8, "input_width": 12, "hidden": 48, "projector": "mlp", "projector_ffn": 40}
DECODER = {"cross_attention": True, "positions": "learned", "position_rows": 34}
GEMMA = {"cross_attention": "own-tables", "norm": "rmsnorm", "norm_place": "both", "positions": "rope", "gated": True}
ENCODER = {"layers": 3, "tokens": 24, "heads": 2, "bidirectional": True, "final_norm": True}
SOUNDS = {
    **{"input_width": 12, "positions": "none"},
    "convolutions": [
        {"channels": 40, "kernel": 5, "stride": 2, "gated": True},
        {"channels": 64, "kernel": 3, "stride": 2},
    ],
}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 48, "shared_experts": 1}
HEADS: list[dict[str, Any]] = [
    {"qk_layernorm": "layer"},
    {"activation": "xielu"},
    {"inner_norms": True},
    {"attention_gate": "heads", "qkv_bias": True},
    {"value_dim": 24, "kv_heads": 2},
    {"keys_are_values": True, "value_norm": True},
    {"layer_scale": True},
    {"shared_keys": 1, "reading_ffn": 96, "qk_layernorm": True, "value_norm": True, "kv_heads": 2},
    {"window": 8, "full_every": 2, "local_attention": {"heads": 8, "kv_heads": 2, "head_dim": 24, "sinks": True}},
]
PARTS: list[dict[str, Any]] = [
    *HEADS,
    {"norm": "rmsnorm", "norm_place": "both", "moe": EXPERTS},
    {"norm": "rmsnorm", "moe": {**EXPERTS, "norm": True, "first_dense": 1}},
    {"norm": "rmsnorm", "norm_place": "both", "moe": {**EXPERTS, "norm": "each"}},
    {"moe": {**EXPERTS, "zero_experts": 2, "every": 2, "leading": True}},
    {"norm": "rmsnorm", "layer_input": {"vocab": 128, "width": 24}},
    {"head": ["transform", "bias"], "tied": True},
    {"head": ["bias"], "tied": False},
    {"norm": "rmsnorm0"},
    {"norm": "layernorm0"},
    {"branches": [{**TOWER, "projector_depth": 4}, {"layers": 0}]},
    {"branches": [{**TOWER, "merge": 2, "deepstack": 2}, {"layers": 0}]},
    {"branches": [{**TOWER, "merge": 2, "projector": "gated"}, {"layers": 0}]},
    {"branches": [{**TOWER, "merge": 2, "merge_by": "mean", "projector_norm": "plain"}, {"layers": 0}]},
    {"branches": [{**TOWER, "merge": 2, "merge_by": "linear", "projector_norm": "layer"}, {"layers": 0}]},
    {"branches": [{**TOWER, "merge": 2, "merge_by": "mlp", "projector_ffn": 24}, {"layers": 0}]},
    {"branches": [{**TOWER, "tokens": 1, "merge": 16, "merge_by": "convolutions"}, {"layers": 0}]},
    {"norm": "rmsnorm", "variants": [{"numbers": [0], "only": "mlp"}, {"numbers": [1], "replaced": ["attention"]}]},
    {"mla": {**LATENT, "index": {"heads": 2, "dim": 16, "top_k": 32}}, "norm": "rmsnorm"},
    {**DECODER, "branches": [{**ENCODER, "norm_residual": True}], "norm_residual": True, "tied": False},
    {**DECODER, "branches": [ENCODER], "embedding_norm": True, "qkv_bias": "queries-values"},
    {**DECODER, "branches": [{**ENCODER, **SOUNDS}], "qkv_bias": "queries-values"},
    {**DECODER, "branches": [{**ENCODER, **SOUNDS}], "tied": False},
    {**DECODER, **GEMMA, "branches": [{**ENCODER, "norm_place": "both"}], "tied": False},
    {**DECODER, **GEMMA, "branches": [ENCODER], "tied": True, "window": 4, "full_every": 2},
    {**DECODER, "branches": [{**ENCODER, "other": {"parameters": 64, "flops": 4 * 64**2}}], "other": {"parameters": 3}},
    {"branches": [{**TOWER, **SOUNDS, "hidden": 64, "merge": 2}, {"layers": 0}], "tied": True},
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_device_has_the_parameters_and_products_that_are_counted(part: dict[str, Any]) -> None:
    model = load_model({**SMALL, **part})
    played = play_job({"model": {**SMALL, **part}, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}})
    assert sum(param.size for param in played.list_held(0)) == model.parameters
    counted = forward_matmul_flops(model, 32, 32, causal=True)
    attention = counted.pop("attention")
    assert played.flops("F") == {"gemm": sum(counted.values()), "attention": pytest.approx(attention)}


def test_a_convolution_saves_its_input_once_and_its_kernel_reads_it_where_kernels_overlap() -> None:
    """Beside a linear layer from the same inputs: as many frames as strides multiply to, what the first convolution
    makes, before and behind its activation, and what the second makes."""
    towers = {"linear": {"input_width": 12, "input_bias": True}, "convolved": SOUNDS}
    saved = []
    for tower in towers.values():
        model = {**SMALL, **DECODER, "branches": [{**ENCODER, "positions": "none", **tower}]}
        played = play_job({"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}})
        saved.append(played.category_peak(0, "activations"))
    assert saved[1] - saved[0] == 2 * 24 * ((4 - 1) * 12 + 2 * (40 + 20) + 64)


@pytest.mark.parametrize("part", HEADS, ids=str)
def test_adapters_are_those_of_the_layers_that_have_the_heads(part: dict[str, Any]) -> None:
    job = {"model": {**SMALL, **part}, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}}
    played = play_job(job | {"train": {"mode": "lora", "rank": 4, "targets": ["attn_qkv", "attn_proj", "mlp_up"]}})
    adapters, held = played.plan.job.adapters, played.list_held(0)
    assert adapters is not None
    assert sum(param.size for param in held if param.trained) == adapters.parameters(played.plan.job.model)
    assert sum(param.size for param in held if not param.trained) == played.plan.job.model.parameters


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("part", HEADS, ids=str)
def test_tensor_ranks_divide_the_products_and_the_wide_parameters(
    part: dict[str, Any], sequence_parallel: bool
) -> None:
    model, shape = load_model({**SMALL, **part}), {**SMALL, **part}
    plan = {"tp": 2, "sequence_parallel": sequence_parallel}
    cluster = {"gpu": "h100-sxm", "gpus": 2}
    played = play_job({"model": shape, "cluster": cluster, "plan": plan, "batch": {"global": 1}})
    counted = forward_matmul_flops(model, 32, 32, causal=True)
    attention = counted.pop("attention")
    assert played.flops("F") == {"gemm": sum(counted.values()), "attention": pytest.approx(attention)}
    held = played.list_held(0)
    assert sum(param.total for param in held) == model.parameters
    wide = {"wq", "wo", "wup", "wdown", "o.norm.weight", "act.norm.weight", "sinks", "wgate"}
    assert all(param.total == 2 * param.size for param in held if param.name in wide)


@pytest.mark.parametrize(
    ("part", "width"),
    [
        ({"shared_keys": 1, "kv_heads": 2}, "64 elements a token beside the 64"),
        (
            {"layers": 4, "shared_keys": 2, "window": 8, "full_every": 2, "local_attention": {"kv_heads": 1}},
            "160 elements a token beside the 64",
        ),
        ({"norm": "rmsnorm", "layer_input": {"vocab": 128, "width": 24}}, "24 elements a token beside the 64"),
        ({"branches": [{**TOWER, "merge": 2, "deepstack": 2}, {"layers": 0}]}, "128 elements a token beside the 64"),
    ],
    ids=str,
)
def test_what_a_pipeline_leaves_out_is_named_and_a_single_stage_leaves_nothing_out(
    part: dict[str, Any], width: str
) -> None:
    shape = {**SMALL, **part}
    said = [
        [text for text in simulate({"model": shape, "cluster": "dgx-h100:1", "plan": {"pp": pp}}).assumed
         if "not sent to later stages" in text]
        for pp in (1, 2)
    ]  # fmt: skip
    assert not said[0] and len(said[1]) == 1 and width in said[1][0]


def test_stages_share_the_table_of_a_tied_output_layer_but_not_its_bias() -> None:
    shape = {**SMALL, "head": ["transform", "bias"], "tied": True}
    ends = [
        play_job({"model": shape, "cluster": {"gpu": "h100-sxm", "gpus": 2}, "plan": {"pp": 2}}).list_held(device)
        for device in (0, 1)
    ]
    assert [{param.name for param in held if param.tied} for held in ends] == [set(), {"head"}]
    assert sum(param.size for held in ends for param in held) == load_model(shape).parameters + 128 * 64
