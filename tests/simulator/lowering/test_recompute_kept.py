"""Recompute by operator: kernels that are not repeated, what their results take of memory, and early stop."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.loading.load import load_job
from meshcast.validation.contract.measure import saved_bytes
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn_grid

SEQUENCES = ["all-gather", "ring", "dist-flash-attn", "ulysses", "megatron-cp"]


def job(sequence: str | None, keep: bool, inside: bool = True, **model: Any) -> dict[str, Any]:
    """Two layers on two replicas of four sequence ranks, or one, of two tensor ranks. inside: the memory scheme stands
    inside of the others."""
    cp = 4 if sequence else 1
    schemes: list[dict[str, Any]] = [
        {"use": "data/zero-1", "over": "dp"},
        *([{"use": f"sequence/{sequence}", "over": "cp"}] if sequence else []),
        {"use": "tensor/megatron-sp", "over": "tp"},
    ]
    memory: dict[str, Any] = {"use": "memory/recompute-full"}
    if keep:
        memory = {"use": "memory/recompute-operators", "save": ["attention"]}
    return {
        "model": {"layers": 2, "hidden": 64, "heads": 8, "vocab": 128, "seq": 256, "tied": False, **model},
        "cluster": {"gpu": "h100-sxm", "gpus": 4 * cp},
        "batch": {"global": 4},
        "plan": {"mesh": {"dp": 2, "cp": cp, "tp": 2}, "schemes": [*schemes, memory] if inside else [memory, *schemes]},
    }


def layer_bytes(played: Played) -> float:
    """Bytes that one layer keeps for its backward pass."""
    return next(saved_bytes(unit_run) for unit_run in played.stage_ops(0).unit_runs if unit_run.name == "layer")


@pytest.mark.parametrize(("sequence", "inside"), drawn_grid([None, *SEQUENCES], [True, False]))
def test_attention_is_not_computed_again(sequence: str | None, inside: bool) -> None:
    """Nor do its keys travel again. Its output and the sums of its rows are kept: 2 b s h bytes and 4 for every row and
    head, cut over sequence and tensor ranks; Ulysses reads the output in both of its layouts."""

    def travelling(played: Played) -> list[str]:
        return [op.name for _, op in played.instances() if op.phase == "R" and op.stream.startswith("sequence")]

    plain, kept = (play_job(job(sequence, keep, inside)) for keep in (False, True))
    assert plain.flops("R")["attention"] == plain.flops("F")["attention"]
    assert kept.flops("R") == {**plain.flops("R"), "attention": 0.0}
    for phases in (("F",), ("B", "W")):
        assert kept.flops(*phases) == plain.flops(*phases)
    assert kept.times.span < plain.times.span
    assert [peak.left for peak in kept.peaks] == [0]
    assert sequence in (None, "ulysses") or (travelling(plain) and not travelling(kept))
    ranks, outputs = 2 * (4 if sequence else 1), 2 if sequence == "ulysses" else 1
    if inside:
        assert layer_bytes(kept) - layer_bytes(plain) == (outputs * 2 * 256 * 64 + 4 * 256 * 8) / ranks
    if not sequence:
        # The backward pass of unfused attention reads its scores, so all but the last product is needed.
        unfused = {"name": "megatron-core", "set": {"attention": "unfused"}}
        played = play_job(job(None, True) | {"framework": unfused})
        assert any("core" in op.name for _, op in played.instances() if op.phase == "R")
        assert [peak.left for peak in played.peaks] == [0]


# ------------------------------------------------------------------------------------- policies by name


def policy(save: list[str], tp: int = 1, ep: int = 1, compile: bool = False, **model: Any) -> Played:
    """Two layers that recompute all but `save`, or all."""
    shape = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 192, "vocab": 128, "seq": 256, "tied": False}
    shape |= {"gated": True, "norm": "rmsnorm", "positions": "rope"}
    plan: dict[str, Any] = {"mesh": {"dp": ep, "tp": tp}}
    schemes = [{"use": "data/zero-1", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}]
    if ep > 1:
        plan["views"] = {"experts": {"edp": 1, "ep": ep, "etp": 1}}
        schemes.append({"use": "expert/all-to-all", "over": "ep"})
    memory = {"use": "memory/recompute-operators", "save": save} if save else {"use": "memory/recompute-full"}
    return play_job(
        {
            "model": shape | model,
            "cluster": {"gpu": "h100-sxm", "gpus": tp * ep},
            "framework": {"name": "megatron-core", "set": {"compile": compile}},
            "batch": {"global": 2 * ep, "micro": 2},
            "plan": plan | {"schemes": [*schemes, memory]},
        }
    )


QKV, PROJ, GATE = 64 * (64 + 2 * 16), 64 * 64, 64 * 192
"""Elements of the matrices of a layer of `policy`: queries, keys and values; projection; gate (up and down alike)."""


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("save", "repeated"),
    [
        ([], QKV + PROJ + 3 * GATE),
        (["qkv"], PROJ + 3 * GATE),
        (["qkv", "proj"], 3 * GATE),
        (["linear"], 0),
        # torchtitan repeats the second, fourth and sixth product: keys, projection, up.
        (["attention", "alternate_linear"], 64 * 16 + PROJ + GATE),
    ],
)
def test_products_that_are_saved_are_not_computed_again(save: list[str], repeated: int, tp: int) -> None:
    played = policy(save, tp)
    tokens = 2 * 256
    assert played.flops("R")["gemm"] == 2 * 2 * tokens * repeated
    assert (played.flops("R")["attention"] == 0) == ("attention" in save)
    assert [peak.left for peak in played.peaks] == [0]


def test_what_is_saved_costs_its_bytes() -> None:
    """Of multi-head latent attention what it multiplies by one matrix is one product: saved are queries, keys and
    values from their latent, the gate and the MLP's end; not the latent with the rotary key, the projection and up."""
    latent = {"mla": {"kv_lora_rank": 16, "qk_nope": 8, "qk_rope": 4, "v": 8}, "kv_heads": 8}
    kept: list[tuple[str, dict[str, Any], int]] = [
        ("qkv", {}, 64 + 32),
        ("proj", {}, 64),
        ("linear", {}, 64 + 32 + 64 + 2 * 192 + 64),
        ("alternate_linear", {}, 64 + 16 + 192 + 64),
        ("alternate_linear", latent, 8 * 12 + 8 * 8 + 8 * 8 + 192 + 64),
    ]
    for word, model, elements in kept:
        assert layer_bytes(policy([word], **model)) - layer_bytes(policy([], **model)) == 2 * 256 * 2 * elements


def test_reduce_scatters_that_are_saved_are_not_repeated() -> None:
    """Nor is the product before one, with a compiler. Without it that is repeated though nothing reads its result, and
    the saved product's partial sums stay beside their sum, as does the sum at the end of a layer."""
    tokens, tp = 2 * 256, 2
    plain, saved, compiled = (
        policy([*more, "alternate_linear"], tp, compile=word)
        for more, word in (([], False), (["reduce_scatter"], False), (["reduce_scatter"], True))
    )
    again, compiled_again = ({op.name for _, op in run.instances() if op.phase == "R"} for run in (saved, compiled))
    assert not any("reduce_scatter" in name for name in again | compiled_again)
    assert again - compiled_again == {"re proj"} and not compiled_again - again
    assert layer_bytes(saved) - layer_bytes(plain) == tokens * 64 * 2 / tp  # of the projection, a share of the tokens
    assert layer_bytes(saved) - layer_bytes(compiled) == tokens * 64 * 2  # partial sums of the MLP
    assert [peak.left for peak in saved.peaks] == [0]


EXPERTS = {"moe": {"experts": 4, "top_k": 2, "expert_ffn": 32, "shared_experts": 1, "shared_ffn": 48}}


def test_dispatch_and_combine_are_saved_and_products_of_experts_are_not() -> None:
    """Of the products only those of attention and of the shared expert count: queries, values, its gate and its last
    product are saved, the router's and those of the experts repeated."""
    tokens, ep = 2 * 256, 2
    plain, products, saved = (
        policy(save, ep=ep, **EXPERTS) for save in ([], ["alternate_linear"], ["alternate_linear", "all_to_all"])
    )
    experts = 3 * 2 * (2 * tokens) * 64 * 32
    router, shared = 2 * tokens * 64 * 4, 2 * tokens * 64 * 48
    attention = 2 * tokens * (64 * 16 + PROJ)
    assert products.flops("R")["gemm"] == 2 * ep * (attention + experts + router + shared)
    assert layer_bytes(products) - layer_bytes(plain) == tokens * 2 * (64 + 16 + 48 + 64)
    again = [op.name for _, op in saved.instances() if op.phase == "R"]
    assert not any("all_to_all" in name for name in again)
    assert layer_bytes(saved) - layer_bytes(products) == 2 * (2 * tokens) * 64 * 2


def test_jobs_of_full_recompute_that_keeps_results_say_the_same() -> None:
    described = job(None, True)
    old = {"use": "memory/recompute-full", "keep": ["core_attn"], "layers": 2}
    described["plan"]["schemes"][-1] = old
    entry = load_job(described).plan.schemes[-1]
    assert (entry.use, entry.model_extra) == ("memory/recompute-operators", {"save": ["attention"], "layers": 2})


# ------------------------------------------------------------------------------------- early stop


def stopping(early_stop: bool, keep: bool = False, **model: Any) -> dict[str, Any]:
    described = job(None, keep, **model)
    described["plan"]["schemes"][-1]["early_stop"] = early_stop
    return described


@pytest.mark.parametrize(("keep", "gated"), drawn_grid([True, False], [True, False]))
def test_what_only_makes_the_output_of_a_layer_is_not_computed_again(keep: bool, gated: bool) -> None:
    """The last linear layer of the MLP, h x f of the h (4 h + 2 f) or h (4 h + 3 f) of a layer, and the collective
    behind it."""
    whole, early = (play_job(stopping(one, keep, gated=gated, ffn=192)) for one in (False, True))
    last = 2 * 2 * 4 * 256 * 64 * 192  # layers, samples, tokens, h, f
    assert whole.flops("R")["gemm"] - early.flops("R")["gemm"] == last
    for phases in (("F",), ("B", "W")):
        assert whole.flops(*phases) == early.flops(*phases)
    again = [{op.name for _, op in played.instances() if op.phase == "R"} for played in (whole, early)]
    assert {name for name in again[0] - again[1] if "down" in name} and again[1] < again[0]
    assert early.times.span < whole.times.span and layer_bytes(early) == layer_bytes(whole)
    assert [peak.left for peak in early.peaks] == [0]


def test_of_the_gate_of_a_frozen_mlp_its_function_alone_is_computed_again() -> None:
    """Its product, which a frozen linear layer does not save, is not made: one tensor read, one written, of three."""
    framework = {"name": "hf-trainer", "set": {"compile": False}}
    described = stopping(True, gated=True, ffn=192) | {"framework": framework}
    described |= {"train": {"mode": "lora", "rank": 4, "targets": ["attn_qkv"]}}
    traffic = {}
    for mode in ("lora", "full"):
        played = play_job(described if mode == "lora" else {**described, "train": {"mode": "full"}})
        again = [op.work for _, op in played.instances() if op.phase == "R" and op.name == "re act"]
        traffic[mode] = sum(work.read + work.write for work in again) / len(again)
    assert traffic["lora"] == 2 / 3 * traffic["full"]


def test_frameworks_that_stop_early_say_so_in_the_plan() -> None:
    described = {"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"fsdp": True, "recompute": "full"}}

    def options(framework: Any) -> Any:
        return load_job({**described, "framework": framework}).plan.schemes[-1].model_extra or {}

    assert options("maxtext") == {"early_stop": True}
    assert options("megatron-core") == options({"name": "maxtext", "set": {"recompute_early_stop": False}}) == {}
    eager = {"name": "torchtitan", "set": {"compile": False}}
    assert options("torchtitan") == options({**eager, "release": "2025-08"}) == {"early_stop": True}
    assert options({**eager, "release": "2025-09"}) == {}
