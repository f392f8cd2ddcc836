"""Mixers of recurrent and hybrid models: laws that hold for each of them, and what tells them apart by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.hardware.errors import ModelError, PlanError
from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Collective, Gemm, Memory
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.load import load_model
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import Played
from tests.draws import drawn_grid
from tests.simulator.models.lowered import backward_ops, describe_job, forward_ops, play

S, H, A, F = 64, 32, 4, 48
SHAPE: dict[str, Any] = {
    **{"layers": 4, "hidden": H, "heads": A, "ffn": F, "vocab": 128, "seq": S, "norm": "rmsnorm", "gated": True},
    **{"positions": "rope", "tied": False},
}
SSM = {"heads": 8, "head_dim": 8, "state": 16, "groups": 2, "chunk": 16}
SELECTIVE = {"heads": 2 * H, "head_dim": 1, "groups": 1, "state": 4, "rank": 2}
CONV = {"kind": "short-conv", "heads": H, "key_dim": 1, "conv": 3}
DELTA = {"kind": "gated-delta-net", "heads": 4, "key_dim": 8, "chunk": 16, "norm_place": "before"}
LSTM = {"kind": "mlstm", "heads": 4, "key_dim": 4, "value_dim": 8, "chunk": 16}
LRU = {"kind": "rg-lru", "heads": 4, "key_dim": 8, "layers": [0, 1, 3]}
RWKV = {"kind": "rwkv", "heads": H, "key_dim": 1}
LATENT = {"kv_lora_rank": 24, "qk_nope": 8, "qk_rope": 4, "v": 8}
KIMI = {"kind": "kimi-delta", "heads": 4, "key_dim": 8, "value_dim": 16, "rank": 8, "chunk": 16}

MODELS: dict[str, dict[str, Any]] = {
    "parallel": {"ssm": SSM | {"pattern": "P-P-", "norm": False}},
    "mamba-1": {"ssm": SELECTIVE | {"pattern": "M-*-"}},
    "mamba-1 with norms": {"ssm": SELECTIVE | {"pattern": "M-*-", "norm": "inputs"}},
    "short-conv": {"linear_attention": CONV, "full_every": 3},
    "windows beside convolutions": {
        **{"linear_attention": CONV | {"layers": [0, 1]}, "full_every": [3], "window": 16, "norm_place": "both"},
        **{"attention_gate": "heads", "qk_layernorm": True},
    },
    "kimi-delta": {"linear_attention": KIMI, "full_every": 4},
    "kimi-delta without latents": {"linear_attention": KIMI | {"rank": None}, "full_every": 4},
    "latent attention without rope": {"linear_attention": KIMI, "full_every": 2, "mla": LATENT, "positions": "none"},
    "gate of heads": {"linear_attention": KIMI, "full_every": 2, "mla": LATENT, "attention_gate": "heads"},
    "mlstm": {"linear_attention": LSTM},
    "rg-lru": {"linear_attention": LRU, "window": 16, "proj_bias": True, "mlp_bias": True},
    "rwkv": {"linear_attention": RWKV, "gated": False, "activation": "relu2"},
    "norms elsewhere": {
        **{"linear_attention": DELTA, "full_every": 4, "norm_place": "after", "qk_layernorm": "all"},
    },
}
"""A model of each mixer, by the fields that make it."""


def run(mixer: str, plan: Any = None, gpus: int = 1, **fields: Any) -> Played:
    return play(SHAPE | MODELS[mixer] | fields, plan, gpus)


# ------------------------------------------------------------------------------------ laws of every mixer


@pytest.mark.parametrize("mixer", MODELS)
def test_a_device_has_the_parameters_and_products_that_are_counted(mixer: str) -> None:
    """Backward passes have twice the products of forward passes."""
    model, played = load_model(SHAPE | MODELS[mixer]), run(mixer)
    assert sum(param.size for param in played.list_held(0)) == model.parameters
    counted = forward_matmul_flops(model, S, S, causal=True)
    attention = counted.pop("attention")
    products = sum(counted.values()) - counted["scan"]
    assert played.flops("F") == {"gemm": products, "attention": pytest.approx(attention)}
    assert played.flops("B", "W")["gemm"] == 2 * products
    assert counted["scan"] > 0


@pytest.mark.parametrize("mixer", MODELS)
def test_stages_hold_all_parameters_between_them(mixer: str) -> None:
    played = run(mixer, {"pp": 2}, gpus=2)
    held = [sum(param.size for param in played.list_held(device)) for device in (0, 1)]
    assert sum(held) == load_model(SHAPE | MODELS[mixer]).parameters and min(held) > 0


@pytest.mark.parametrize(("mixer", "sequence_parallel"), drawn_grid(MODELS, (False, True)))
def test_tensor_parallelism_divides_products_and_kernels(mixer: str, sequence_parallel: bool) -> None:
    """Two ranks do the products of one, and each half of the work of scans; projections are divided. What leads down
    to latents, and the receptance of MLPs, is done by both ranks, unless each has a part of the tokens."""
    whole, model = run(mixer), load_model(SHAPE | MODELS[mixer])
    halves = run(mixer, {"tp": 2, "sequence_parallel": sequence_parallel}, gpus=2)
    down_linear = 2 * (model.linear_attention.rank or 0) if model.linear_attention else 0
    down_latent = model.mla.kv_lora_rank + model.mla.qk_rope if model.mla else 0
    kinds = [model.kind(layer) for layer in model.every_layer]
    copied = sum(down_linear if kind.linear else down_latent for kind in kinds) + 4 * H * model.channel_mix
    twice = 0 if sequence_parallel else 2 * S * H * copied
    assert halves.flops("F")["gemm"] == whole.flops("F")["gemm"] + twice
    moved = [_work_of_scans(played) for played in (whole, halves)]
    assert moved[0] / 2 == moved[1] > 0
    shards = {param.name: param.total // param.size for param in params_of(halves.stages[0])}
    assert shards["norm1.weight"] == 1 and 2 in shards.values()


@pytest.mark.parametrize("mixer", MODELS)
def test_ranks_of_a_sequence_have_whole_sequences_of_scans(mixer: str) -> None:
    """Ulysses shards channels of scans; products are those of a share of the tokens."""
    whole = run(mixer)
    halves = run(mixer, {"mesh": {"cp": 2}, "schemes": [{"use": "sequence/ulysses", "over": "cp"}]}, gpus=2)
    assert halves.flops("F")["gemm"] == whole.flops("F")["gemm"]
    assert _work_of_scans(halves) == _work_of_scans(whole) / 2


def _work_of_scans(played: Played) -> float:
    """Bytes of convolutions and scans of the first layer, forward and backward; of selective scans their FLOPs."""
    works = [op.work for op in (*forward_ops(played), *backward_ops(played)) if isinstance(op.work, Memory)]
    moved = sum(work.bytes for work in works if work.what in ("conv", "scan"))
    return moved + sum(work.flops for work in works if work.what == "selective-scan")


# ------------------------------------------------------------------------------------- Mamba-2 in parallel


def test_attention_and_mamba_in_parallel_are_a_block_behind_one_norm() -> None:
    """Falcon-H1: the parameters of both blocks and one norm; one kernel adds both results to the stream."""
    both, mamba, attention = (
        load_model(SHAPE | {"layers": 1, "ssm": SSM | {"pattern": letter}}).parameter_parts["layers"]
        for letter in "PM*"
    )
    assert both == mamba + attention - H
    played = run("parallel", layers=1, ssm=SSM | {"pattern": "P"})
    norm, *_, residual = [op.work for op in forward_ops(played) if isinstance(op.work, Memory)]
    assert (norm.read, norm.write) == (2 * S * H, 2 * S * H)
    assert (residual.read, residual.write) == (3 * 2 * S * H, 2 * S * H)


def test_a_scan_without_a_norm_leads_to_the_output_projection() -> None:
    """Falcon-H1 has no norm over the gated result: no weight of its width, no kernel, no saved input of it."""
    with_norm, without = (run("parallel", ssm=SSM | {"pattern": "P-P-", "norm": flag}) for flag in (True, False))
    inner = SSM["heads"] * SSM["head_dim"]
    models = [played.plan.job.model for played in (with_norm, without)]
    assert models[0].parameters - models[1].parameters == 2 * inner
    kernels = [sum(isinstance(op.work, Memory) for op in forward_ops(played)) for played in (with_norm, without)]
    assert kernels[0] - kernels[1] == 1
    saved = [played.category_peak(0, "activations") for played in (with_norm, without)]
    assert saved[0] - saved[1] == 2 * (2 * S * inner + 4 * S)


# ------------------------------------------------------------------------------------------ short convolution


def test_a_short_convolution_by_hand() -> None:
    """LFM2: three projections as wide as the stream, a product, a convolution of three taps, a product, and back; of
    which all inputs are saved."""
    layers = [load_model(SHAPE | {"layers": n, "linear_attention": CONV}).parameters for n in (1, 2)]
    assert layers[1] - layers[0] == 4 * H * H + 3 * H + 3 * H * F + 2 * H
    wide = 2 * S * H
    kernels = [op.work for op in forward_ops(run("short-conv")) if isinstance(op.work, Memory)][1:4]
    assert [(work.what, work.read, work.write) for work in kernels] == [
        ("activation", 2 * wide, wide),
        ("conv", wide, wide),
        ("activation", 2 * wide, wide),
    ]
    more, less = (run("short-conv", layers=n, full_every=0).category_peak(0, "activations") for n in (5, 4))
    norms, mlp = 2 * 2 * wide + 2 * 4 * S, 3 * 2 * S * F
    assert more - less == norms + mlp + wide * (3 + 1 + 1 + 1)  # gates and values, their product, convolved, result


# -------------------------------------------------------------------------------------- Kimi delta attention


def test_a_decay_of_each_element_of_a_key_has_its_bytes() -> None:
    """Against a decay of each head every kernel that reads or writes decays moves so many more bytes."""
    heads = {key: value for key, value in KIMI.items() if key != "rank"} | {"kind": "gated-delta-net"}
    plain, fine = (run("kimi-delta", linear_attention=mixer) for mixer in (heads, KIMI | {"rank": None}))
    more = S * 4 * (8 - 1)  # elements of decays beyond those of heads
    moved = [
        [op.work.bytes for op in forward_ops(played) if isinstance(op.work, Memory) and op.work.what == "scan"]
        for played in (plain, fine)
    ]
    assert [(b - a) / more for a, b in zip(*moved, strict=True)] == [2 + 4, 4 + 4, 4, 4, 4]
    saved = [played.category_peak(0, "activations") for played in (plain, fine)]
    assert saved[1] - saved[0] == 3 * more * (2 + 4)


def test_decay_and_gate_through_latents_have_fewer_parameters() -> None:
    direct, latents = (load_model(SHAPE | {"layers": 1, "linear_attention": KIMI | {"rank": r}}) for r in (None, 8))
    keys, values = 4 * 8, 4 * 16
    assert direct.parameters - latents.parameters == H * (keys + values) - 8 * (2 * H + keys + values)


# --------------------------------------------------------------------------- what is beside mixers of hybrids


def test_latent_attention_without_rope_joins_keys() -> None:
    """Kimi Linear: no kernel rotates; keys are copied beside the part that heads share, queries stay where they are."""
    fields = {"linear_attention": None, "full_every": 0, "layers": 1}
    plain, joined = (run("latent attention without rope", **fields, positions=p) for p in ("rope", "none"))
    assert plain.plan.job.model.parameters == joined.plan.job.model.parameters
    kinds = [[op.work.what for op in forward_ops(played) if isinstance(op.work, Memory)] for played in (plain, joined)]
    assert kinds[1] == ["concat" if what == "rope" else what for what in kinds[0]] != kinds[0]
    concat = next(op.work for op in forward_ops(joined) if isinstance(op.work, Memory) and op.work.what == "concat")
    assert (concat.read, concat.write) == (2 * S * (A * 8 + 4), 2 * S * A * 12)


def test_a_gate_of_heads_is_a_projection_to_a_number_for_each() -> None:
    fields = {"linear_attention": None, "full_every": 0, "layers": 1}
    plain, gated = (run("gate of heads", **fields, attention_gate=gate) for gate in (False, "heads"))
    assert gated.plan.job.model.parameters - plain.plan.job.model.parameters == H * A
    assert gated.flops("F")["gemm"] - plain.flops("F")["gemm"] == 2 * S * H * A
    kernels = [[op.work for op in forward_ops(played) if isinstance(op.work, Memory)] for played in (plain, gated)]
    (more,) = [work for work in kernels[1] if work not in kernels[0]]
    assert (more.read, more.write) == (2 * S * (A * 8 + A), 2 * S * A * 8)


def test_layers_with_linear_attention_may_have_their_norms_elsewhere() -> None:
    """OLMo Hybrid: in front of the mixer and the MLP there, behind attention and the MLP in the others."""
    played = run("norms elsewhere")
    names = [[op.name for op in forward_ops(played, at) if "norm" in op.name or "residual" in op.name] for at in (1, 2)]
    assert [name for name in names[0] if "gated" not in name] == ["norm1", "residual1", "norm2", "residual2"]
    assert [name for name in names[1] if "qk" not in name] == ["proj.norm", "residual1", "down.norm", "residual2"]


# --------------------------------------------------------------------------------------------------- Mamba-1


def test_mamba_1_by_hand() -> None:
    """Parameters of Mamba's block (arXiv 2312.00752, section 3.6), and what its scan reads, writes, computes, saves."""
    inner, state, rank = 2 * H, 4, 2
    block = (
        H * 2 * inner + 5 * inner + inner * (rank + 2 * state) + (rank + 1) * inner + inner * (state + 1) + inner * H
    )
    assert load_model(SHAPE | MODELS["mamba-1"]).mamba_parameters == block
    assert load_model(SHAPE | MODELS["mamba-1 with norms"]).mamba_parameters == block + rank + 2 * state
    played = run("mamba-1")
    ahead, back = (
        [op.work for op in ops(played) if isinstance(op.work, Memory) and op.work.what == "selective-scan"]
        for ops in (forward_ops, backward_ops)
    )
    wide, shared, states = 2 * S * inner, 2 * S * 2 * state, 8 * inner * state
    assert [(work.read, work.write, work.flops) for work in ahead + back] == [
        (3 * wide + shared, 2 * wide + states, 7 * S * inner * state),
        (5 * wide + shared + states, 3 * wide + 2 * shared, 3 * 7 * S * inner * state),
    ]
    more, less = (
        run("mamba-1", layers=n, ssm=SELECTIVE | {"pattern": "M" * n}).category_peak(0, "activations") for n in (5, 4)
    )
    assert more - less == 2 * 2 * S * H + 4 * S + 6 * wide + states + shared + 2 * S * rank  # x, z, conv, dt, y, gated


def test_latents_of_channels_are_summed_over_their_ranks() -> None:
    """The latent of dt, B and C are partial sums of ranks forward, and their gradients backward."""
    played = run("mamba-1", {"tp": 2, "sequence_parallel": False}, gpus=2)
    sent = [
        sorted(op.work.nbytes for op in ops(played) if isinstance(op.work, Collective))
        for ops in (forward_ops, backward_ops)
    ]
    assert sent == [[2 * S * 2, 2 * S * 4, 2 * S * 4, 2 * S * H]] * 2


@pytest.mark.parametrize(
    ("mixer", "name"),
    [
        ("mamba-1", "selective scans of Mamba-1"),
        ("kimi-delta", "Kimi delta attention"),
        ("mlstm", "mLSTM"),
        ("rg-lru", "RG-LRU"),
        ("rwkv", "RWKV"),
        ("parallel", None),
    ],
)
def test_reports_say_whose_kernels_were_not_measured(mixer: str, name: str | None) -> None:
    report = simulate(describe_job(SHAPE | MODELS[mixer]))
    assert [text.split(" (")[0] for text in report.assumed if "(model." in text] == [name] * (name is not None)


def test_layers_may_have_convolutions_windows_or_neither() -> None:
    """LFM3: convolutions in the layers of the list, full attention in those of full_every, windows in the others."""
    kinds = [*map(load_model(SHAPE | MODELS["windows beside convolutions"]).kind, range(4))]
    assert [(kind.linear, kind.local) for kind in kinds] == [(True, False)] * 2 + [(False, True), (False, False)]
    with pytest.raises(ModelError, match=r"linear_attention\.layers"):
        load_model(SHAPE | {"linear_attention": CONV | {"layers": [2, 1]}})
    with pytest.raises(ModelError, match="window"):
        load_model(SHAPE | {"linear_attention": CONV, "window": 16})


# ------------------------------------------------------------------------------------------- recurrent units


def test_an_lstm_with_a_matrix_as_memory_by_hand() -> None:
    """xLSTM: parameters, bytes and products of its kernels (arXiv 2503.14376, section 3), and what it saves."""
    heads, key, value, chunk = 4, 4, 8, 16
    block = H * (2 * heads * key + 2 * heads * value + 2 * heads) + 2 * heads + heads * value + heads * value * H
    assert load_model(SHAPE | MODELS["mlstm"]).linear_parameters == block
    played, e = run("mlstm"), 2
    tokens, keys, values = S * heads, S * heads * key, S * heads * value
    states = S // chunk * heads * key * value
    ahead = [op.work for op in forward_ops(played) if isinstance(op.work, Memory) and op.work.what == "scan"]
    within = 2 * chunk * (key + value)
    assert [(work.read, work.write, work.flops / tokens) for work in ahead] == [
        (e * (keys + values + 2 * tokens), e * states, 2 * key * value),
        (e * (2 * keys + values + states + 2 * tokens), e * values + 8 * tokens, within + 2 * key * value),
    ]
    back = [op.work for op in backward_ops(played) if isinstance(op.work, Memory) and op.work.what == "scan"]
    assert back[0] == ahead[0]
    assert sum(work.flops for work in back[1:]) == tokens * (3 * within + 4 * 2 * key * value)
    more, less = (run("mlstm", layers=n).category_peak(0, "activations") for n in (5, 4))
    norms, mlp = 2 * 2 * 2 * S * H + 2 * 4 * S, 3 * 2 * S * F
    mixer = e * (2 * keys + 2 * values + 2 * tokens) + 3 * e * values + 8 * tokens + 4 * S  # result, normed, gated
    assert more - less == norms + mlp + mixer


def test_a_recurrent_unit_by_hand() -> None:
    """RecurrentGemma: parameters, a batched product of the blocks of both gates, bytes of its scan."""
    width, block = H, 8
    shape = SHAPE | MODELS["rg-lru"]
    gates, projections = 2 * width * (block + 1), 2 * width * (H + 1) + (width + 1) * H
    assert load_model(shape).linear_parameters == gates + projections + 5 * width + width
    played, wide = run("rg-lru"), 2 * S * width
    products = [op.work for op in forward_ops(played) if isinstance(op.work, Gemm)]
    assert [(work.m, work.n, work.k, work.batch) for work in products[:2]] == [(S, 2 * width, H, 1), (S, 16, 8, 4)]
    (scan,) = [op.work for op in forward_ops(played) if isinstance(op.work, Memory) and op.work.what == "scan"]
    (back,) = [op.work for op in backward_ops(played) if isinstance(op.work, Memory) and op.work.what == "scan"]
    assert [(work.read, work.write) for work in (scan, back)] == [(3 * wide, wide), (5 * wide, 3 * wide)]


def test_weighted_values_by_hand() -> None:
    """RWKV-4: parameters of time mix and channel mix; a kernel mixes neighbouring tokens, and one sums up values, with
    four exponentials for each token and channel."""
    model = load_model(SHAPE | MODELS["rwkv"])
    mixing, channels = 4 * H * H + 3 * H + 2 * H, 2 * H * F + H * H + 2 * H
    assert model.parameter_parts["layers"] == 4 * (mixing + channels + 2 * H)
    wide, works = 2 * S * H, [op.work for op in forward_ops(run("rwkv")) if isinstance(op.work, Memory)]
    shifts = [(work.read, work.write) for work in works if work.what == "add"]
    assert shifts == [(2 * wide, 3 * wide), (2 * wide, 2 * wide)]
    (scan,) = [work for work in works if work.what == "selective-scan"]
    assert (scan.read, scan.write, scan.flops) == (2 * wide, wide, 7 * 4 * S * H)


@pytest.mark.parametrize(
    ("mixer", "fields", "where"),
    [
        ("parallel", {"ssm": SSM | {"pattern": "P-P-", "norm": "inputs"}}, "ssm.norm"),
        ("mamba-1", {"ssm": SELECTIVE | {"pattern": "M-*-", "norm": True}}, "ssm.norm"),
        ("mamba-1", {"ssm": SELECTIVE | {"pattern": "M-*-", "head_dim": 2}}, "ssm.head_dim or ssm.groups"),
        ("kimi-delta", {"linear_attention": KIMI | {"key_heads": 2}}, "linear_attention.key_heads"),
        ("short-conv", {"linear_attention": CONV | {"value_dim": 2}}, "linear_attention.key_heads"),
        ("short-conv", {"linear_attention": CONV | {"rank": 2}}, "linear_attention.rank"),
        ("norms elsewhere", {"norm_place": "both"}, "linear_attention.norm_place"),
        ("rwkv", {"full_every": 2}, "linear_attention.kind"),
        ("gate of heads", {"attention_gate": False, "sinks": True}, "sinks"),
        ("gate of heads", {"positions": "learned"}, "positions"),
    ],
)
def test_mixers_that_no_model_has_are_refused(mixer: str, fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ModelError) as refused:
        load_model(SHAPE | MODELS[mixer] | fields)
    assert refused.value.where.endswith(where)


@pytest.mark.parametrize(("mixer", "words"), [("mamba-1", "state-space layers"), ("rwkv", "linear attention")])
def test_rings_do_not_divide_sequences_of_scans(mixer: str, words: str) -> None:
    with pytest.raises(PlanError, match=f"sequence/ring shards the sequences that the .*{words}"):
        run(mixer, {"mesh": {"cp": 2}, "schemes": [{"use": "sequence/ring", "over": "cp"}]}, gpus=2)
