"""Hybrid models of Mamba-2 blocks, attention, MLPs and experts: parameters, FLOPs, shards and memory by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Collective, Gemm, Memory
from meshcast.simulator.models.flops import causal, forward_matmul_flops, palm
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import LayerKind
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import Played
from tests.simulator.models.lowered import PLANS, backward_ops, forward_ops, play

S, H, A, V, F = 64, 32, 4, 128, 48
HEADS, D, N, G, CHUNK = 8, 8, 16, 2, 16
INNER, SHARED = HEADS * D, G * N
SSM = {"pattern": "MM*-", "heads": HEADS, "head_dim": D, "state": N, "groups": G, "chunk": CHUNK}
MODEL: dict[str, Any] = {
    **{"layers": 4, "hidden": H, "heads": A, "ffn": F, "vocab": V, "seq": S, "norm": "rmsnorm"},
    **{"positions": "none", "tied": False, "ssm": SSM},
}
MOE = {"experts": 4, "top_k": 2, "expert_ffn": 16}

PROJECTED = 2 * INNER + 2 * SHARED + HEADS
MAMBA = H * PROJECTED + INNER * H + (4 + 1) * (INNER + 2 * SHARED) + 3 * HEADS + INNER


def run(plan: Any = None, gpus: int = 1, **fields: Any) -> Played:
    return play(MODEL | fields, plan, gpus)


# ---------------------------------------------------------------------------------------------- the shape


def test_parameters_of_each_block() -> None:
    model = load_model(MODEL)
    assert model.mamba_parameters == MAMBA
    attention, mlp = 4 * H * H, 2 * H * F
    assert model.parameter_parts["layers"] == 4 * H + 2 * MAMBA + attention + mlp
    assert model.parameters == 2 * V * H + H + model.parameter_parts["layers"]
    assert model.active_parameters == model.parameters


def test_experts_of_a_hybrid() -> None:
    model = load_model(MODEL | {"moe": MOE, "layers": 5, "ssm": SSM | {"pattern": "MM*-E"}})
    assert [model.is_moe(layer) for layer in range(5)] == [False] * 4 + [True]
    assert model.parameters - load_model(MODEL).parameters == H + 4 * H + 4 * 2 * H * 16
    assert model.parameters - model.active_parameters == 2 * 2 * H * 16


def test_parameters_of_mamba2_1_3b() -> None:
    """Without attention: the largest but one of the Mamba-2 paper (arXiv 2405.21060), called 1.3 B."""
    ssm = {"pattern": "M" * 48, "heads": 64, "head_dim": 64, "state": 128, "groups": 1}
    shape = {"layers": 48, "hidden": 2048, "heads": 16, "vocab": 50288, "seq": 2048, "norm": "rmsnorm"}
    model = load_model({**shape, "positions": "none", "ssm": ssm})
    assert model.parameters / 1e9 == pytest.approx(1.3, abs=0.05)


def test_kinds() -> None:
    kinds = [(LayerKind(False, False, block), count) for block, count in (("M", 2), ("*", 1), ("-", 1))]
    assert [*load_model(MODEL).kinds.items()] == kinds


# --------------------------------------------------------------------------------------- FLOPs and bytes


def test_flops_by_part() -> None:
    parts = forward_matmul_flops(load_model(MODEL), 10, S, causal=True)
    assert parts["mamba"] == 2 * 2 * 10 * (H * PROJECTED + INNER * H)
    assert parts["scan"] == 2 * 7 * 10 * INNER * N
    assert parts["qkv"] == 2 * 10 * H * 3 * H and parts["proj"] == 2 * 10 * H * H
    assert parts["attention"] == 10 * S * 2 * H
    assert parts["mlp"] == 2 * 2 * 10 * H * F
    model = load_model(MODEL)
    assert causal(model, S) == 3 * sum(parts.values()) / 10
    assert palm(model, S) == 6 * model.parameters + 12 * H * S


def test_gemms_do_the_flops_of_the_projections() -> None:
    played = run()
    done = sum(op.work.flops for op in forward_ops(played) if isinstance(op.work, Gemm))
    assert done == 2 * S * (H * PROJECTED + INNER * H)
    weights = sum(op.work.flops for op in backward_ops(played) if isinstance(op.work, Gemm))
    assert weights == 2 * done


def test_traffic_of_the_scan() -> None:
    """Bytes of each forward kernel, in bf16, with states and C B^T in fp32."""
    works = [op.work for op in forward_ops(run()) if isinstance(op.work, Memory) and op.work.what in ("conv", "scan")]
    x, shared, steps = S * INNER, S * SHARED, S * HEADS
    states, scores = S // CHUNK * INNER * N, S * CHUNK * G
    assert [(work.read, work.write) for work in works] == [
        (2 * (x + 2 * shared), 2 * (x + 2 * shared)),  # convolution
        (2 * steps, 8 * steps),  # decays
        (2 * (x + shared) + 8 * steps, 4 * states),  # states of chunks
        (4 * states, 2 * states),  # states passed on
        (4 * shared, 4 * scores),  # C B^T
        (4 * scores + 2 * (2 * x + shared) + 2 * states + 8 * steps, 4 * x),  # output, before and after the gate
    ]


def test_a_scan_in_more_chunks_writes_more_states() -> None:
    """Bytes of states grow with the chunks, bytes of C B^T with their length."""
    done = {}
    for chunk in (8, 16):
        works = [op.work for op in forward_ops(run(ssm=SSM | {"chunk": chunk}), 1) if isinstance(op.work, Memory)]
        done[chunk] = sum(work.bytes for work in works)
    states, scores = S // 16 * INNER * N, S * 8 * G
    assert done[8] - done[16] == (4 + 4 + 2 + 2) * states - (4 + 4) * scores


def test_a_layer_is_one_norm_one_block_and_one_residual() -> None:
    played = run()
    assert [unit_run.count for unit_run in played.stages[0].unit_runs] == [1, 2, 1, 1, 1]
    whats = [[op.work.what for op in forward_ops(played, at) if isinstance(op.work, Memory)] for at in (1, 2, 3)]
    assert whats[0] == ["rms-norm", "conv", *["scan"] * 5, "rms-norm", "residual"]
    assert whats[1] == ["rms-norm", "residual"] and whats[2] == ["rms-norm", "gelu", "residual"]


def test_parameters_are_held() -> None:
    played = run()
    assert sum(param.size for param in played.list_held(0)) == played.plan.job.model.parameters


def test_activations_of_a_block() -> None:
    """Saved by a Mamba-2 block: the inputs of norm, projections and gated norm, z, x, B, C, dt, the ungated output, and
    the roots of both norms."""
    more = {**MODEL, "layers": 5, "ssm": SSM | {"pattern": "MMM*-"}}
    added = run(**more).category_peak(0, "activations") - run().category_peak(0, "activations")
    assert added == 2 * S * (2 * H + PROJECTED + 3 * INNER) + 2 * 4 * S


# ------------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_shards_heads_and_groups(sequence_parallel: bool) -> None:
    played = run({"tp": 2, "sequence_parallel": sequence_parallel}, gpus=2)
    shards = {param.name: param.total // param.size for param in params_of(played.stages[0])}
    sharded = ("wssm.z", "wssm.x", "wssm.B", "wssm.C", "wssm.dt", "wssm.out", "conv.x.weight", "A", "ssm.norm.weight")
    assert {shards[name] for name in sharded} == {2} and shards["norm1.weight"] == 1
    gemm = next(op.work for op in forward_ops(played) if isinstance(op.work, Gemm))
    assert (gemm.m, gemm.n, gemm.k) == (S, PROJECTED // 2, H)
    kinds = [op.work.operation for op in forward_ops(played) if isinstance(op.work, Collective)]
    assert kinds == (["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"])
    whole = run()
    scans = [
        sum(op.work.bytes for op in forward_ops(each) if isinstance(op.work, Memory) and op.work.what == "scan")
        for each in (whole, played)
    ]
    assert scans[0] == 2 * scans[1]


@pytest.mark.parametrize("use", ["sequence/ulysses", "sequence/megatron-cp"])
def test_context_parallelism_shards_the_heads_of_the_scan(use: str) -> None:
    """All-to-alls of z, x, B, C and dt, and one of the output: a rank has whole sequences of half the heads."""
    played = run({"mesh": {"cp": 2}, "schemes": [{"use": use, "over": "cp"}]}, gpus=2)
    sent = {op.name: op.work.nbytes for op in forward_ops(played) if isinstance(op.work, Collective)}
    assert set(op.work.operation for op in forward_ops(played) if isinstance(op.work, Collective)) == {"all_to_all"}
    assert sum(sent.values()) == 2 * S // 2 * (PROJECTED + INNER)
    conv = next(op.work for op in forward_ops(played) if isinstance(op.work, Memory) and op.work.what == "conv")
    assert conv.read == 2 * S * (INNER + 2 * SHARED) // 2


def test_blocks_of_a_hybrid_have_adapters() -> None:
    """By the names of modules of Megatron-Core and of Transformers alike."""
    job = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8}, "plan": {"dp": 8}}
    named = [["mixer.in_proj", "mixer.out_proj"], ["in_proj", "out_proj"], ["mixer_in", "mixer_out"]]
    steps = {simulate(job | {"train": {"mode": "lora", "targets": words}}).step_time for words in named}
    whole = simulate(job | {"train": {"mode": "lora"}})
    assert len(steps) == 1 and whole.step_time > max(steps)
    assert {"mixer_in", "mixer_out", "attn_qkv"} <= {*(whole.job.train.targets or ())}


@pytest.mark.parametrize("plan", [*PLANS.values(), {"dp": 8, "recompute": "full"}])
def test_whole_forecasts(plan: dict[str, Any]) -> None:
    """Of real models, with the parts of a step that any job has."""
    report = simulate({"model": "nemotron-h-8b", "cluster": "dgx-h100:1", "batch": {"global": 16}, "plan": plan})
    assert 0.2 < report.mfu["causal"] < 0.6
    low, high = report.interval_90
    assert low < report.step_time < high


def test_full_recompute_of_a_hybrid_keeps_the_inputs_of_layers() -> None:
    saved = {kind: run({"recompute": kind}).category_peak(0, "activations") for kind in ("none", "full")}
    assert saved["full"] < saved["none"] / 2
