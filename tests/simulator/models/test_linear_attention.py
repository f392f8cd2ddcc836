"""Linear attention: parameters, FLOPs and bytes of each kernel, shards, memory and refusals by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Collective, Gemm, Memory, Op
from meshcast.simulator.models.flops import forward_matmul_flops, palm
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import LayerKind
from meshcast.validation.contract.measure import params_of
from meshcast.validation.contract.played import Played
from tests.simulator.models.lowered import backward_ops, describe_job, forward_ops, play

S, H, A, V, F = 128, 32, 4, 128, 48
HEADS, KEYS, DK, DV, CHUNK = 8, 4, 8, 16, 32
DELTA = {"kind": "gated-delta-net", "heads": HEADS, "key_heads": KEYS, "key_dim": DK, "value_dim": DV, "chunk": CHUNK}
LIGHTNING = {"kind": "lightning", "heads": HEADS, "key_dim": DK, "chunk": CHUNK}
MODEL: dict[str, Any] = {
    **{"layers": 4, "hidden": H, "heads": A, "ffn": F, "vocab": V, "seq": S, "norm": "rmsnorm", "gated": True},
    **{"positions": "rope", "tied": False, "full_every": 4},
}
KEY, VALUE, LIGHT = KEYS * DK, HEADS * DV, HEADS * DK


def run(mixer: dict[str, Any], plan: Any = None, gpus: int = 1, **fields: Any) -> Played:
    return play(MODEL | {"linear_attention": mixer} | fields, plan, gpus)


def scans(ops: list[Op]) -> list[Memory]:
    return [op.work for op in ops if isinstance(op.work, Memory) and op.work.what in ("scan", "conv")]


# ---------------------------------------------------------------------------------------------- the shape


def test_parameters() -> None:
    mlp, norms, attention = 3 * H * F, 2 * H, 4 * H * H
    delta = H * (2 * KEY + 2 * VALUE + 2 * HEADS) + (2 * KEY + VALUE) * 4 + 2 * HEADS + DV + VALUE * H
    lightning = H * 4 * LIGHT + LIGHT + LIGHT * H
    for mixer, expected in ((DELTA, delta), (LIGHTNING, lightning)):
        model = load_model(MODEL | {"linear_attention": mixer})
        assert model.parameter_parts["layers"] == 4 * (mlp + norms) + 3 * expected + attention
        assert sum(param.size for param in run(mixer).list_held(0)) == model.parameters


def test_kinds_and_defaults() -> None:
    model = load_model(MODEL | {"linear_attention": {"kind": "lightning", "heads": 4, "key_dim": 8}})
    linear = model.linear_attention
    assert linear is not None
    assert (linear.key_heads, linear.value_dim, linear.chunk) == (4, 8, 256)
    assert [*model.kinds.items()] == [(LayerKind(False, False, linear=True), 3), (LayerKind(False, False), 1)]
    every = load_model(MODEL | {"full_every": 0, "linear_attention": DELTA})
    assert every.kinds == {LayerKind(False, False, linear=True): 4}


def test_flops_by_part() -> None:
    parts = forward_matmul_flops(load_model(MODEL | {"linear_attention": DELTA}), 10, S, causal=True)
    assert parts["qkv"] == 2 * 10 * H * (3 * (2 * KEY + 2 * VALUE + 2 * HEADS) + 3 * H)
    assert parts["proj"] == 2 * 10 * H * (3 * VALUE + H)
    assert parts["scan"] == 3 * 7 * 10 * HEADS * DK * DV
    assert parts["attention"] == 10 * S * 2 * H
    lightning = load_model(MODEL | {"linear_attention": LIGHTNING})
    assert forward_matmul_flops(lightning, 10, S, causal=True)["scan"] == 3 * 5 * 10 * HEADS * DK * DK
    assert palm(lightning, S) == 6 * lightning.parameters + 12 * H * S


# ------------------------------------------------------------------------------- FLOPs and bytes of kernels

N, CHUNKS = S * HEADS, S // CHUNK  # tokens x heads, chunks of a sequence
WIDE, GIVEN, VALUES, STATES, SCORES = N * DK, S * KEY, N * DV, CHUNKS * HEADS * DK * DV, N * CHUNK


def test_kernels_of_the_delta_rule() -> None:
    """Forward, in bf16: bytes, and FLOPs of chunkwise products (arXiv 2412.06464, section 3.3)."""
    found = scans(forward_ops(run(DELTA)))
    assert [(work.read, work.write) for work in found] == [
        (2 * (2 * GIVEN + VALUES), 2 * (2 * GIVEN + VALUES)),  # convolution
        (4 * N, 6 * N),  # alpha in fp32 and beta
        (4 * N, 4 * N),  # sums of log alpha
        (2 * (WIDE + VALUES) + 8 * N, 2 * (WIDE + VALUES + SCORES)),  # T, W and U
        (2 * (2 * WIDE + VALUES) + 4 * N, 2 * (STATES + VALUES)),  # states, and U - W S
        (2 * (2 * WIDE + VALUES + STATES) + 4 * N, 2 * VALUES),  # outputs
    ]
    within = 2 * CHUNK  # a product of C x C numbers and rows of a head
    assert [work.flops / N for work in found[3:]] == [
        within * (2 * DK + DV) + CHUNK * CHUNK / 3,  # K K^T, T K, T V, and the inverse
        2 * 2 * DK * DV,  # W S, K^T V
        within * (DK + DV) + 2 * DK * DV,  # Q K^T, (Q K^T) V, Q S
    ]
    assert not any(work.flops for work in found[:3])


def test_the_backward_pass_of_the_delta_rule_computes_states_again() -> None:
    """W, U and the states once more; then 9 products within chunks and 6 with states in all."""
    played = run(DELTA)
    ahead, back = scans(forward_ops(played)), scans(backward_ops(played))
    again = [work for work in back if not work.backward]
    assert [work.flops for work in again] == [2 * SCORES * (DK + DV), ahead[4].flops]
    rest = sum(work.flops for work in back if work.backward)
    assert rest == 2 * SCORES * (5 * DK + 4 * DV) + 6 * 2 * N * DK * DV + 4 * SCORES * CHUNK
    assert sum(work.bytes for work in back) > 2 * sum(work.bytes for work in ahead)


def test_kernels_of_lightning_attention() -> None:
    """arXiv 2401.04658, algorithms 1 and 2: one kernel forward, one for dQ, one for dK and dV."""
    played, wide = run(LIGHTNING), 2 * N * DK
    (ahead,), back = scans(forward_ops(played)), scans(backward_ops(played))
    assert (ahead.read, ahead.write) == (3 * wide, wide)
    assert ahead.flops == N * (4 * CHUNK * DK + 4 * DK * DK)
    assert [(work.read, work.write) for work in back] == [(3 * wide, wide), (4 * wide, 2 * wide)]
    assert [work.flops for work in back] == [
        N * (4 * CHUNK * DK + 4 * DK * DK),  # dO V^T, (dO V^T) K; dO S^T, K^T V
        N * (8 * CHUNK * DK + 6 * DK * DK),  # V dO^T, its product with Q, Q K^T, with dO; K dS, V dS^T, Q^T dO
    ]


def test_chunks_are_no_longer_than_a_sequence() -> None:
    (whole,) = scans(forward_ops(run(LIGHTNING | {"chunk": S})))
    (longer,) = scans(forward_ops(run(LIGHTNING | {"chunk": 10 * S})))
    assert whole == longer


def test_gemms_do_the_flops_of_the_projections() -> None:
    for mixer, projected, value in ((DELTA, 2 * KEY + 2 * VALUE + 2 * HEADS, VALUE), (LIGHTNING, 4 * LIGHT, LIGHT)):
        played = run(mixer)
        done = sum(op.work.flops for op in forward_ops(played) if isinstance(op.work, Gemm))
        assert done == 2 * S * (H * projected + value * H + 3 * H * F)
        assert sum(op.work.flops for op in backward_ops(played) if isinstance(op.work, Gemm)) == 2 * done


def test_no_kernel_beats_its_products() -> None:
    """A chunk of 4096 tokens makes lightning attention quadratic, and its kernels slower."""
    shape = {"kind": "lightning", "heads": 16, "key_dim": 128}

    def step_time(chunk: int) -> float:
        model = {"preset": "qwen3-0.6b", "full_every": 4, "linear_attention": shape | {"chunk": chunk}}
        return simulate(describe_job(model) | {"batch": {"global": 8, "micro": 8, "sequence": 4096}}).step_time

    steps = {chunk: step_time(chunk) for chunk in (64, 256, 4096)}
    assert steps[64] <= steps[256] < steps[4096]


# ------------------------------------------------------------------------------------------ memory and shards


def test_activations_of_a_block() -> None:
    """A layer saves what its mixer does: inputs of projections and norms, and what the kernels state."""

    def saved(mixer: dict[str, Any]) -> int:
        more = run(mixer, layers=8, full_every=8).category_peak(0, "activations")
        return int(more - run(mixer, layers=7, full_every=7).category_peak(0, "activations"))

    rest = 2 * S * (2 * H + 2 * H + 3 * F)  # inputs of both norms, normed twice, gate, up and their product
    rest += 2 * 4 * S  # roots of both norms
    delta = 2 * (S * (2 * KEY + 3 * VALUE + 2 * HEADS) + VALUES)  # q, k, v, z, alpha, beta; o; normed and gated
    delta += 2 * (2 * WIDE + VALUES + SCORES) + 6 * N  # normalised q and k, v, T; alpha and beta
    delta += 4 * S * HEADS  # roots of the norm of heads
    assert saved(DELTA) == rest + delta
    lightning = 2 * S * LIGHT * (3 + 3 + 1 + 1 + 1 + 1)  # before and after the activation; o, normed, gate, gated
    lightning += 4 * S
    assert saved(LIGHTNING) == rest + lightning


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mixer", [DELTA, LIGHTNING], ids=["delta", "lightning"])
def test_tensor_parallelism_shards_heads(mixer: dict[str, Any], sequence_parallel: bool) -> None:
    played, whole = run(mixer, {"tp": 2, "sequence_parallel": sequence_parallel}, gpus=2), run(mixer)
    shards = {param.name: param.total // param.size for param in params_of(played.stages[0])}
    assert {shards[name] for name in ("wlinear.q", "wlinear.k", "wlinear.v", "wlinear.z", "wlinear.out")} == {2}
    assert shards["linear.norm.weight"] == (2 if mixer is LIGHTNING else 1) and shards["norm1.weight"] == 1
    for field in ("bytes", "flops"):
        found = [sum(getattr(work, field) for work in scans(forward_ops(each))) for each in (whole, played)]
        assert found[0] == 2 * found[1]
    kinds = [op.work.operation for op in forward_ops(played) if isinstance(op.work, Collective)]
    once = ["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"]
    norm = ["all_reduce"] if mixer is LIGHTNING else []
    assert kinds == [*once[:-1], *norm, once[-1], *once]


@pytest.mark.parametrize("use", ["sequence/ulysses", "sequence/megatron-cp"])
@pytest.mark.parametrize("mixer", [DELTA, LIGHTNING], ids=["delta", "lightning"])
def test_context_parallelism_shards_the_heads_of_the_state(mixer: dict[str, Any], use: str) -> None:
    """All-to-alls of what the kernel reads and of its result: a rank has whole sequences of half the heads."""
    played = run(mixer, {"mesh": {"cp": 2}, "schemes": [{"use": use, "over": "cp"}]}, gpus=2)
    works = [op.work for op in forward_ops(played) if isinstance(op.work, Collective)]
    assert {work.operation for work in works} == {"all_to_all"}
    moved = 2 * KEY + 2 * VALUE + 2 * HEADS if mixer is DELTA else 4 * LIGHT
    assert sum(work.nbytes for work in works) == 2 * S // 2 * moved
    found = [sum(work.flops for work in scans(forward_ops(each))) for each in (run(mixer), played)]
    assert found[0] == 2 * found[1]


def test_a_residual_of_norms_reads_their_results() -> None:
    """MiniMax-01: both residual additions read what a norm made, which takes no more bytes and keeps no more."""
    plain, other = run(LIGHTNING), run(LIGHTNING, norm_residual=True)
    of = [[op.work for op in forward_ops(each) if op.name.startswith("residual")] for each in (plain, other)]
    assert of[0] == of[1]
    assert plain.category_peak(0, "activations") >= other.category_peak(0, "activations")
