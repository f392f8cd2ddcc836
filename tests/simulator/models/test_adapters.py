"""Adapters on frozen weights: computation, reductions and memory when only the adapters are trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.ops import Collective, Gemm, Memory
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.adapter_targets import Target
from meshcast.simulator.models.adapters import PLAIN_LAUNCHES
from meshcast.simulator.models.flops import causal, needed_flops, palm
from meshcast.validation.contract.measure import params_of, sent_bytes, side_ops_of
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn_grid
from tests.strategies import examples

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 128, "seq": 32, "ffn": 96}
ONE = {"batch": {"global": 1}, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "plan": {}}
GATED = MODEL | {"positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False}

TARGETS: tuple[Target, ...] = ("attn_qkv", "attn_proj", "mlp_up", "mlp_down")
"""The linear layers of a dense model."""

SHARDS = {"data/ddp": (1, 1), "data/zero-1": (1, 2), "data/fsdp": (2, 2)}
"""Number of ranks, of two, over which weights and optimizer states of adapters are sharded."""

targets_of = st.lists(st.sampled_from(TARGETS), min_size=1, unique=True)


def job(targets: Sequence[str] | None = TARGETS, rank: int = 4, model: Any = None, **more: Any) -> dict[str, Any]:
    plan = {"mesh": {"dp": 2}, "schemes": [{"use": "data/ddp", "over": "dp"}]}
    fields = {
        "model": model or GATED,
        "cluster": {"gpu": "h100-sxm", "gpus": 2},
        "batch": {"global": 4},
        "plan": plan,
        **({"train": {"mode": "lora", "rank": rank, "targets": list(targets)}} if targets is not None else {}),
    }
    return fields | more


def mesh_of(use: str = "data/ddp", over: str = "dp", **axes: int) -> dict[str, Any]:
    """A plan on these axes, and its cluster."""
    family = {"pp": "pipeline/1f1b", "cp": "sequence/all-gather", "tp": "tensor/megatron-sp"}
    schemes = [{"use": family.get(axis, use), "over": axis} for axis in axes]
    return {
        "plan": {"mesh": axes, "schemes": schemes},
        "cluster": {"gpu": "h100-sxm", "gpus": math.prod(axes.values())},
    }


def adapters_of(played: Played) -> int:
    adapters = played.plan.job.adapters
    assert adapters is not None
    return adapters.parameters(played.plan.job.model)


def widths(target: Target) -> int:
    """Inputs and outputs of a linear of `GATED`."""
    return {"attn_qkv": 64 + 64 + 32 + 32, "attn_proj": 64 + 64, "mlp_up": 64 + 2 * 96, "mlp_down": 96 + 64}[target]


@pytest.mark.parametrize("parts", [("q",), ("v",), ("q", "v"), ("q", "k", "v")])
@pytest.mark.parametrize("separate", [True, False])
def test_queries_keys_and_values_may_have_adapters_alone(parts: tuple[str, ...], separate: bool) -> None:
    """By the names of their modules; where they share one, it is of all of them."""
    framework = {"name": "megatron-core", "set": {"adapters": {"separate": separate}}}
    played = play_job(job([f"{part}_proj" for part in parts], framework=framework))
    outputs = {"q": 64, "k": 32, "v": 32}
    wanted = sum(64 + outputs[part] for part in parts) if separate else 64 + 64 + 32 + 32
    assert adapters_of(played) == 4 * 4 * wanted
    assert sum(param.size for param in params_of(played.stage_ops(0)) if param.trained) == 4 * 4 * wanted
    whole = play_job(job(["attn_qkv"], framework=framework))
    assert (played.times.span < whole.times.span) is (separate and len(parts) < 3)


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_layers_of_further_tokens_have_the_adapters_of_the_last_layer(layers: int) -> None:
    """Every third layer has experts in place of the MLP that has these adapters."""
    moe = {"experts": 4, "top_k": 2, "expert_ffn": 16, "every": 3}
    played = play_job(job(["mlp_up"], model=GATED | {"layers": layers, "mtp": 1, "moe": moe}))
    held = params_of(played.stage_ops(0))
    assert sum(param.size for param in held if param.trained) == adapters_of(played)


def test_the_module_w2_leads_back_beside_a_w3_and_up_without_one() -> None:
    """As InternLM2 names the linears of its MLP, and as the first Qwen does."""
    assert load_job(job(["w1", "w2", "w3"])).train.targets == ("mlp_up", "mlp_down")
    assert load_job(job(["w1", "w2"])).train.targets == ("mlp_up",)


@given(targets=targets_of, rank=st.integers(1, 9))
def test_an_adapter_has_rank_times_inputs_and_outputs(targets: list[Target], rank: int) -> None:
    played = play_job(job(targets, rank))
    wanted = 4 * rank * sum(widths(target) for target in targets)
    assert adapters_of(played) == wanted
    held = params_of(played.stage_ops(0))
    assert sum(param.size for param in held if param.trained) == wanted
    assert sum(param.size for param in held if not param.trained) == played.plan.job.model.parameters


NARROW = GATED | {"layers": 2}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 16}
LATENT = {"kv_heads": 4, "mla": {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope": 8, "qk_rope": 4, "v": 16}}
SHARED = {"moe": EXPERTS | {"shared_experts": 1, "first_dense": 1}}
SHAPES: dict[str, Any] = {
    "mixtral": {"moe": EXPERTS},
    "qwen2_moe": {"moe": EXPERTS | {"shared_experts": 1, "shared_ffn": 32, "shared_gate": True}, "qkv_bias": True},
    "deepseek_v2": LATENT | SHARED | {"layers": 3, "mla": LATENT["mla"] | {"q_lora_rank": None}},
    "deepseek_v3": LATENT | {"layers": 3, "moe": SHARED["moe"] | {"router_bias": True}},
    "hybrid": {
        "layers": 4,
        "ssm": {"pattern": "M*-E", "heads": 8, "head_dim": 16, "state": 8, "groups": 2},
        "moe": EXPERTS,
    },
}
"""Narrow models of the types of Transformers, and a hybrid."""

MLPS = ["gate_proj", "up_proj", "down_proj"]
UPPER = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_b_proj"]


@pytest.mark.parametrize(
    ("shape", "targets", "parameters"),
    [
        ("mixtral", "all-linear", 8856),
        ("mixtral", ["q_proj", "v_proj"], 1344),
        ("qwen2_moe", "all-linear", 10974),
        ("qwen2_moe", MLPS, 7488),
        ("deepseek_v2", "all-linear", 12564),
        ("deepseek_v2", MLPS, 8640),
        ("deepseek_v2", ["q_proj", "v_proj"], 1008),
        ("deepseek_v2", UPPER, 2916),
        ("deepseek_v3", "all-linear", 12996),
        ("deepseek_v3", MLPS, 8640),
        ("deepseek_v3", UPPER, 3564),
    ],
)
def test_adapters_are_as_many_as_peft_makes(shape: str, targets: list[str] | str, parameters: int) -> None:
    """Trainable parameters of LoraConfig(r=3) on models of these sizes, by PEFT 0.18.0 and Transformers 4.57.1."""
    train = {"mode": "lora", "rank": 3, "targets": targets}
    loaded = load_job(job(None, model=NARROW | SHAPES[shape], train=train, framework="hf-trainer"))
    assert loaded.adapters is not None and loaded.adapters.parameters(loaded.model) == parameters


@pytest.mark.parametrize(("shape", "each", "over"), drawn_grid(SHAPES, [True, False], ["ddp", "tp", "ep"]))
def test_adapters_on_any_linear_layer(shape: str, each: bool, over: str) -> None:
    """All that are counted are built, trained and freed; experts of a rank share one, or each has its own."""
    model = NARROW | SHAPES[shape]
    config = job(None, model=model, train={"mode": "lora", "rank": 3, "targets": "all-linear"})
    config |= mesh_of(dp=2, tp=2) if over == "tp" else {}
    if over == "ep":
        schemes = [{"use": "data/zero-1", "over": "dp"}, {"use": "expert/all-to-all", "over": "ep"}]
        config["plan"] = {"mesh": {"dp": 2}, "views": {"experts": {"edp": 1, "ep": 2}}, "schemes": schemes}
    adapters = {"separate": each, "of_each_expert": each, "eager": each}
    played = play_job(config | {"framework": {"name": "megatron-core", "set": {"adapters": adapters}}})
    held = sum(param.size for param in params_of(played.stage_ops(0)) if param.trained)
    layers = sum(kind.experts for kind in played.plan.job.model.kinds.elements())
    experts = layers * 3 * 4 * 3 * (64 + 16)
    assert [peak.left for peak in played.peaks] == [0]
    if over == "ddp":
        assert held == adapters_of(played)
    elif over == "ep":
        assert held == adapters_of(played) - (experts // 2 if each else 0)
    else:
        assert adapters_of(played) / 2 < held < adapters_of(played)
    loaded = played.plan.job
    assert loaded.adapters is not None
    assert (loaded.adapters.active_parameters(loaded.model) < adapters_of(played)) is each


def test_of_experts_whose_gemms_permute_no_adapters_are_known() -> None:
    schemes = [{"use": "data/zero-1", "over": "dp"}, {"use": "expert/comet", "over": "ep"}]
    plan = {"mesh": {"dp": 2}, "views": {"experts": {"edp": 1, "ep": 2}}, "schemes": schemes}
    config = job(None, model=NARROW | SHAPES["mixtral"], train={"mode": "lora"}, plan=plan)
    with pytest.raises(PlanError, match="permute"):
        play_job(config)
    assert play_job(config | {"train": {"mode": "lora", "targets": ["attn_proj"]}}).peaks


@given(targets=targets_of, tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]), use=st.sampled_from(list(SHARDS)))
@examples(30)
def test_memory_returns_to_its_baseline(targets: list[str], tp: int, pp: int, use: str) -> None:
    played = play_job(job(targets, **mesh_of(use, pp=pp, dp=2, tp=tp)))
    assert [peak.left for peak in played.peaks] == [0] * pp
    assert all(min(peak.by.values()) >= 0 for peak in played.peaks)


def products(played: Played, phase: str) -> float:
    return sum(op.work.flops for _, op in played.instances() if op.phase == phase and isinstance(op.work, Gemm))


@examples(50)
@given(targets=targets_of, rank=st.integers(1, 9))
def test_frozen_linears_have_input_gradients_only_and_adapters_both(targets: list[str], rank: int) -> None:
    """2 FLOPs per parameter and token forward, 2 for the gradient of the input, 2 for that of an adapter's weight; in
    the lowest layer no operator before the first adapter has a gradient.
    """
    lora, full = play_job(job(targets, rank)), play_job(job(None))
    tokens = 2 * 32  # two micro-batches on each of two ranks, of which one is counted
    more = 2.0 * tokens * adapters_of(lora)
    assert products(lora, "F") == pytest.approx(products(full, "F") + more)
    assert products(lora, "W") == pytest.approx(more)
    lowest = min(TARGETS.index(t) for t in targets if t in TARGETS)  # type: ignore[type-var]
    linears = {"attn_qkv": 64 * 128, "attn_proj": 64 * 64, "mlp_up": 64 * 192, "mlp_down": 96 * 64}
    spared = 2.0 * tokens * sum(linears[target] for target in TARGETS[: lowest + 1])
    narrow = {"attn_qkv": 64, "attn_proj": 64, "mlp_up": 64, "mlp_down": 96}[TARGETS[lowest]]
    spared += 2.0 * tokens * rank * narrow  # the lowest A hands no gradient on
    assert products(lora, "B") == pytest.approx(products(full, "B") + more - spared)


@pytest.mark.parametrize("use", SHARDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_only_adapters_are_reduced_and_have_states(use: str, overlap: bool) -> None:
    framework = {"name": "megatron-core", "set": {"overlap": {"dp": overlap}}}
    played = play_job(job(framework=framework, **mesh_of(use, dp=2)))
    total, frozen = adapters_of(played), played.plan.job.model.parameters
    states = played.resting(0)
    weights, optimizer = SHARDS[use]
    main = 4 if weights > 1 else 2
    assert states["parameters"] == pytest.approx(2 * frozen / weights + main * total / weights)
    assert states["gradients"] == pytest.approx(4 * total / weights)
    assert states["optimizer"] == pytest.approx((12 if weights == 1 else 8) * total / optimizer)
    data = [op for _, op in played.instances() if op.stream == "data" and isinstance(op.work, Collective)]
    reduced = sum(op.work.nbytes for op in data if op.work.operation != "all_gather")  # type: ignore[union-attr]
    turns = 2 if use == "data/fsdp" else 1
    assert reduced == 4 * total * turns


def test_fsdp_gathers_frozen_weights_forward_and_backward_and_scatters_none() -> None:
    """All units but the embedding, whose weights no gradient needs, come twice a micro-batch."""
    played = play_job(job(**mesh_of("data/fsdp", dp=2)))
    table = 2 * GATED["vocab"] * GATED["hidden"]
    data = [op.work for _, op in played.instances() if op.stream == "data" and isinstance(op.work, Collective)]
    gathered = sum(work.nbytes for work in data if work.operation == "all_gather")
    held = 2 * (played.plan.job.model.parameters + adapters_of(played))
    assert gathered == 2 * (2 * held - table)


def test_the_update_moves_the_states_of_adapters_only() -> None:
    played = play_job(job())
    (adam,) = [op.work for _, op in played.instances() if isinstance(op.work, Memory) and op.work.what == "adam"]
    assert (adam.read, adam.write) == (16 * adapters_of(played), 14 * adapters_of(played))


def test_the_host_launches_adapters_as_plain_linears() -> None:
    played = play_job(job())
    ops = [op for _, op in played.instances() if isinstance(op.work, Gemm)]
    for phase in {op.phase for op in ops}:
        (plain,) = {op.launches for op in ops if op.phase == phase and ".lora." in op.name}
        others = {op.launches for op in ops if op.phase == phase and ".lora." not in op.name}
        assert not others or (len(others) == 1 and plain == pytest.approx(PLAIN_LAUNCHES * max(others)))


def test_linears_keep_no_input_where_they_have_no_adapter() -> None:
    """The MLP's inner activation waits for the gradient of the second linear's weight alone."""
    tokens = 32 * 2  # bytes of one micro-batch and feature
    of = {targets: play_job(job(targets, 1)).peaks[0].total for targets in (("attn_qkv",), ("attn_qkv", "mlp_down"))}
    kept = of["attn_qkv", "mlp_down"] - of["attn_qkv",]
    assert kept >= 4 * 96 * tokens  # in all layers


@pytest.mark.parametrize("split", [True, False])
def test_tensor_ranks_exchange_no_more_than_the_latents(split: bool) -> None:
    """Adapters of a divided linear add the sum or the gathering of [tokens, rank] and its gradient, nothing wide."""
    use = "tensor/megatron-sp" if split else "tensor/megatron"
    plan = {"mesh": {"tp": 2}, "schemes": [{"use": use, "over": "tp"}]}
    cluster = {"gpu": "h100-sxm", "gpus": 2}

    def wire(targets: Sequence[str] | None) -> float:
        played = play_job(job(targets, 4, plan=plan, cluster=cluster, batch={"global": 1}))
        ops = [op for _, op in played.instances() if op.phase in "FB"]
        return sent_bytes((op for op in ops if op.stream == "tensor"), played.plan.mesh)

    latents, wide = 2 * 32 * 4, 2 * 32 * 64
    spared = wide * (1 if split else 2) / 2  # the lowest layer hands no gradient of its input on
    each = 4 * latents * (1 if split else 2) / 2  # four linears, an exchange each way
    assert wire(TARGETS) <= wire(None) - spared + 2 * 4 * each
    assert wire(TARGETS) > wire(None) - 2 * spared


def test_recomputed_layers_are_adapted_too() -> None:
    for memory in ("recompute-full", "recompute-selective"):
        plan = {"mesh": {"dp": 2}, "schemes": [{"use": "data/fsdp", "over": "dp"}, {"use": f"memory/{memory}"}]}
        played = play_job(job(plan=plan))
        assert played.peaks[0].left == 0
        assert products(played, "W") == pytest.approx(2.0 * 2 * 32 * adapters_of(played))


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-1f1b", "gpipe"])
def test_schedules_take_them(schedule: str) -> None:
    chunks = {"chunks": 2} if schedule == "interleaved-1f1b" else {}
    plan = {"mesh": {"pp": 2}, "schemes": [{"use": f"pipeline/{schedule}", "over": "pp", **chunks}]}
    played = play_job(job(plan=plan, model=GATED | {"layers": 8}))
    full = play_job(job(None, plan=plan, model=GATED | {"layers": 8}))
    assert [peak.left for peak in played.peaks] == [0, 0]
    assert max(p.total for p in played.peaks) < max(p.total for p in full.peaks)


def test_the_embedding_is_no_longer_summed_over_the_pipeline() -> None:
    """A tied table has two holders, which sum its gradients only where it is trained."""
    tied = {**mesh_of(pp=2, dp=1), "model": MODEL}
    for targets, wanted in ((None, 1), (TARGETS, 0)):
        updates = play_job(job(targets, **tied)).program.updates
        ops = [op for part in updates[0].parts for op in part.block.ops]
        found = [op for op in ops if isinstance(op.work, Collective) and op.work.nbytes > 4]
        assert len(found) == wanted


def test_adapters_of_quantised_linears_compute_in_plain_precision() -> None:
    played = play_job(job(precision={"compute": "fp8-delayed"}))
    named = {op.name: op.work for _, op in played.instances() if isinstance(op.work, Gemm)}
    assert named["qkv"].dtype == "fp8" and named["qkv.lora.a"].dtype == named["qkv.lora.b"].dtype == "bf16"
    assert [peak.left for peak in played.peaks] == [0]


@given(targets=targets_of, rank=st.integers(1, 64))
def test_model_flops_count_four_for_a_frozen_parameter(targets: list[Target], rank: int) -> None:
    loaded = load_job(job(targets, rank))
    model, adapters = loaded.model, loaded.adapters
    assert adapters is not None
    extra = 6 * adapters.parameters(model)
    assert needed_flops("palm", model, 32, adapters) == palm(model, 32) - 2 * model.parameters + extra
    attention = 6 * 4 * 64 * 32  # 6 L a d T of the causal half
    assert needed_flops("causal", model, 32, adapters) == pytest.approx(
        (causal(model, 32) - attention) * 2 / 3 + attention + extra
    )
    assert needed_flops("palm", model, 32, None) == palm(model, 32)


@given(
    targets=targets_of,
    use=st.sampled_from(list(SHARDS)),
    axes=st.sampled_from([{"pp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "tp": 2}]),
)
@examples(30)
def test_all_engines_agree(targets: list[str], use: str, axes: dict[str, int]) -> None:
    mesh = {axis: {**axes, "dp": 2}.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    config = job(targets, batch={"global": 8}, **mesh_of(use, **mesh))
    matrices, simpy = play_job(config, engine="matrices"), play_job(config, engine="simpy")
    assert matrices.step.span == pytest.approx(simpy.step.span, rel=1e-9)
    assert matrices.peaks == simpy.peaks


def test_the_buckets_hold_adapters_only() -> None:
    stage_ops = play_job(job()).stage_ops(0)
    sides = [*stage_ops.ahead, *stage_ops.behind]
    units = [unit_run for unit_run in stage_ops.unit_runs for _ in range(unit_run.count)]
    numbered = [param for unit in units for param in unit.fragment.params]
    assert side_ops_of(sides)
    assert all(numbered[number].trained for side in sides for number in side.params)


def test_experts_stay_frozen_with_adapted_attention() -> None:
    moe = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1}
    played = play_job(job(["attn_qkv", "attn_proj"], model=GATED | {"moe": moe}))
    assert played.peaks[0].left == 0
    assert products(played, "W") == pytest.approx(2.0 * 2 * 32 * adapters_of(played))


PEFT = {"weights": "fp32", "products": "fp32", "separate": True, "eager": True}
NAIVE = {"framework": {"name": "hf-trainer", "set": {"adapters": PEFT}}}


@given(targets=targets_of, rank=st.integers(1, 9))
@examples(20)
def test_adapters_of_peft_keep_their_input_in_fp32_each(targets: list[Target], rank: int) -> None:
    """A layer keeps for every adapter 4 bytes an element of its input and its latent, and a byte of a mask, where fused
    ones share what is kept in 16 bits: of the norms' results, and of the activation's; that of attention is there."""
    kept = []
    for kernels, dropout in ((PEFT, True), ({"weights": "", "separate": False, "eager": False}, False)):
        train = {"mode": "lora", "rank": rank, "targets": targets, "dropout": dropout}
        framework = {"name": "hf-trainer", "set": {"adapters": kernels}}
        jobs = (job(None, model=GATED | {"layers": n}, framework=framework, train=train, **ONE) for n in (2, 4))
        few, many = (play_job(config).peaks[0].by["activations"] for config in jobs)
        kept.append((many - few) / 2 / GATED["seq"])
    reads = {"attn_qkv": [64] * 3, "attn_proj": [64], "mlp_up": [64] * 2, "mlp_down": [96]}
    inputs = [width for target in targets for width in reads[target]]
    shared = 2 * sum({"attn_qkv": 64, "attn_proj": 0, "mlp_up": 64, "mlp_down": 96}[target] for target in targets)
    assert kept[0] - kept[1] == sum(5 * width + 4 * rank for width in inputs) - shared - 2 * rank * len(targets)


@given(targets=targets_of, rank=st.integers(1, 9))
@examples(20)
def test_adapters_of_peft_have_their_states_in_fp32(targets: list[Target], rank: int) -> None:
    train = {"mode": "lora", "rank": rank, "targets": targets}
    played = play_job(job(None, train=train, batch={"global": 4, "micro": 1}, **NAIVE))
    total, frozen = adapters_of(played), played.plan.job.model.parameters
    widths_of = {"attn_qkv": 3 * 64 + 128, "attn_proj": 128, "mlp_up": 2 * (64 + 96), "mlp_down": 96 + 64}
    assert total == 4 * rank * sum(widths_of[target] for target in targets)
    states = played.resting(0)
    assert (states["parameters"], states["optimizer"]) == (2 * frozen + 4 * total, 8 * total)
    (adam,) = [op.work for _, op in played.instances() if isinstance(op.work, Memory) and op.work.what == "adam"]
    assert (adam.read, adam.write) == (16 * total, 12 * total)


@pytest.mark.parametrize(("stored", "copies"), [(None, 0), ("int8", 0), ("nf4", 1)])
def test_autocast_alone_converts_inputs_beside_matrices_in_few_bits(stored: str | None, copies: int) -> None:
    """Under autocast an adapter of queries, keys or values reads its input in fp32 and converts it back, or takes it as
    it is; of 4 bits the result of the matrix is copied first. Without autocast the input is in fp32 in either case."""
    train = {"mode": "lora", "rank": 4, "targets": ["attn_qkv"], "frozen_weights": stored}
    for autocast in (True, False):
        framework = {"name": "hf-trainer", "set": {"adapters": PEFT | {"products": "" if autocast else "fp32"}}}
        ops = [op for _, op in play_job(job(None, train=train, framework=framework, **ONE)).instances()]
        forward = [op.name for op in ops if op.phase == "F" and ".lora." in op.name]
        converts, added = (sum(f".{word}" in name for name in forward) for word in ("convert", "copy"))
        per_adapter = 2 if autocast and stored is None else 0 if autocast else 1
        assert (converts, added) == (3 * 4 * per_adapter, 3 * 4 * copies)


def test_the_answer_states_the_trained_weights() -> None:
    answer = load_job(job(None, train={"mode": "lora"})).to_dict()
    assert answer["train"] == {"mode": "lora", "rank": 16, "targets": list(TARGETS)}
    assert load_job(answer).train == load_job(job(None, train={"mode": "lora"})).train
    assert "train" not in load_job(job(None)).to_dict()
