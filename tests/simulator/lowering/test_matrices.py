"""The update of matrices by Muon: its products, what replicas and tensor ranks share of them, and what they send."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from meshcast.simulator.forecast.resident_memory import find_matrix_update
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Collective, Gemm, Op
from meshcast.simulator.lowering.matrices import CAP, Listed, Matrix, _gather, own_matrices
from meshcast.simulator.report.report import Report

H, F, LAYERS, SEQ, VOCAB = 1024, 4096, 4, 256, 32000
MODEL: dict[str, Any] = {
    "layers": LAYERS, "hidden": H, "heads": 8, "kv_heads": 4, "ffn": F, "vocab": VOCAB, "seq": SEQ,
    "gated": True, "norm": "rmsnorm", "positions": "rope",
}  # fmt: skip
SIDES = [(H, H), (H // 2, H), (H // 2, H), (H, H), (H, F), (H, F), (H, F)]
"""Shorter and longer sides of the matrices of a layer: queries, keys, values, projection; gate, up, down."""
JOINED = [*SIDES[:4], (H, 2 * F), (H, F)]
"""The same with gate and up projection in one matrix."""
ELEMENTS = LAYERS * sum(short * long for short, long in SIDES)
SHARED = SharedWork()


def flops(sides: list[tuple[int, int]], steps: int = 5, tp: int = 1) -> float:
    """Counts the FLOPs of the iterations of a layer, whose longer sides `tp` ranks share."""
    return sum(steps * (4 * short**2 * long / tp + 2 * short**3) for short, long in sides)


def forecast(optimizer: Any, name: str = "torchtitan", plan: dict[str, Any] | None = None, **more: Any) -> Report:
    job = {
        "model": MODEL | more.pop("model", {}),
        "cluster": {"gpu": "h100-sxm", "gpus": 8},
        "framework": {"name": name, "set": more.pop("set", {})},
        "batch": {"global": 8, "micro": 1},
        "plan": plan or {"dp": 8, "zero": 0},
        "optimizer": optimizer,
    }
    return simulate(job | more, shared_work=SHARED)


def update_ops(report: Report) -> list[Op]:
    return [op for task in report.play.program.updates for part in task.parts for op in part.block.ops]


def product_flops(report: Report) -> float:
    return sum(op.work.flops for op in update_ops(report) if isinstance(op.work, Gemm))


def sent(report: Report, operation: str) -> list[int]:
    works = (op.work for op in update_ops(report))
    return [work.nbytes for work in works if isinstance(work, Collective) and work.operation == operation]


@pytest.mark.parametrize("steps", [1, 5, 8])
def test_a_rank_that_has_all_matrices_computes_all(steps: int) -> None:
    """5 (4 s^2 l + 2 s^3) FLOPs each, of embedding, output layer, norms and no other optimizer none."""
    assert product_flops(forecast({"name": "muon", "steps": steps})) == LAYERS * flops(SIDES, steps)
    assert product_flops(forecast("lion")) == 0
    halves = forecast({"name": "muon", "steps": steps, "symmetric": True})
    assert product_flops(halves) == LAYERS * sum(
        steps * (2 * short**2 * long + short**2 * long + short**3) for short, long in SIDES
    )


def test_gate_and_up_projection_of_megatron_are_a_matrix() -> None:
    report = forecast("muon", "megatron-core", {"tp": 1, "zero": 0})
    assert product_flops(report) == LAYERS * flops(JOINED)


@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_own_whole_matrices(zero: int) -> None:
    """Of 28 equal matrices on 4 ranks each owns 7, and computes a quarter; states and time follow."""
    model = {"kv_heads": 8, "gated": False, "ffn": H}
    plan = {"tp": 2, "zero": zero}
    owned, whole = (
        forecast({"name": "muon", "tensor": "blockwise"}, "megatron-core", each, model=model)
        for each in (plan, {"tp": 2, "zero": 0})
    )
    assert product_flops(owned) == product_flops(whole) / 4
    assert not sent(owned, "all_to_all")
    states = [report.play.resting[0]["optimizer"] for report in (owned, whole)]
    assert states[0] == pytest.approx(states[1] / 4, rel=1e-3)


def test_the_busiest_owner_has_what_does_not_divide() -> None:
    """24 matrices of four sizes on 8 ranks: products of most work lie on different ranks, and none is cut."""
    shapes = {(512, 1024): 8, (1024, 1024): 8, (1024, 8192): 4, (1024, 4096): 4}
    matrices = Counter({Matrix(*shape, (), ("dp",), ""): number for shape, number in shapes.items()})
    elements = sum(matrix.elements * number for matrix, number in matrices.items())
    owned, most = own_matrices(matrices, 8)
    assert owned == {Matrix(1024, 8192, (), ("dp",), ""): 1}
    assert 8192 * 1024 <= most <= CAP * elements / 8
    everything, _ = own_matrices(matrices, 1)
    assert everything == matrices


def test_owners_have_equal_work_as_far_as_their_memory_lets_them() -> None:
    """A square of a million elements takes as long as four thin matrices of as many, or of twice as many."""
    square, thin, long = (Matrix(*sides, (), ("dp",), "") for sides in ((1024, 1024), (256, 4096), (64, 32768)))
    assert own_matrices(Counter({square: 1, thin: 3}), 2, math.inf) == (Counter({square: 1}), 3 * 2**20)
    assert own_matrices(Counter({square: 1, long: 4}), 2) == (Counter({square: 1, long: 2}), 5 * 2**20)


def test_more_replicas_than_matrices_have_one_each() -> None:
    matrix = Matrix(64, 64, (), ("dp",), "")
    assert own_matrices(Counter({matrix: 3}), 8) == (Counter({matrix: 1}), 64 * 64)


@pytest.mark.parametrize("together", [0, 1, 2])
def test_shards_are_exchanged_before_and_behind(together: int) -> None:
    """Twice 4 bytes of each element of the busiest rank, in as many rounds as there are shapes, or layers."""
    plan = {"fsdp": True}
    report = forecast("muon", plan=plan, set={"update": {"matrices": {"together": together}}})
    moved = sent(report, "all_to_all")
    assert len(moved) == 2 * {0: 4, 1: LAYERS, 2: LAYERS // 2}[together]
    assert sum(moved) >= 2 * 4 * ELEMENTS / 8
    narrow = {"together": together, "exchanged": "bf16"}
    assert 2 * sum(sent(forecast("muon", plan=plan, set={"update": {"matrices": narrow}}), "all_to_all")) == sum(moved)
    assert LAYERS * flops(SIDES) / 8 <= product_flops(report) < LAYERS * flops(SIDES)


def test_equal_matrices_of_a_batch_are_padded() -> None:
    """Of 8, 8 and 12 matrices of a shape, on 8 ranks, 1, 1 and 2."""
    report = forecast("muon", plan={"fsdp": True}, set={"update": {"matrices": {"batched": True, "together": 0}}})
    assert product_flops(report) == flops([(H, H), (H // 2, H), (H, F), (H, F)])


def test_ranks_that_have_whole_experts_exchange_none_of_these() -> None:
    moe = {"experts": 16, "top_k": 2, "expert_ffn": H}
    few, many = (
        sum(sent(forecast("muon", plan={"fsdp": True}, model={"moe": {**moe, "experts": number}}), "all_to_all"))
        for number in (4, 16)
    )
    each_has_one = forecast("muon", plan={"fsdp": True}, model={"moe": {**moe, "experts": 8}})
    assert sum(sent(each_has_one, "all_to_all")) == many
    assert product_flops(each_has_one) > LAYERS * flops([(H, H)] * 3)
    of_busiest = 2 * 4 * H * H * LAYERS // 2  # of two layers, one of the larger matrices of attention and router
    assert few > many == of_busiest


def test_every_rank_gathers_shards_of_all_matrices() -> None:
    report = forecast({"name": "muon", "replicas": "gather"}, plan={"fsdp": True})
    assert sum(sent(report, "all_gather")) == 4 * ELEMENTS
    assert product_flops(report) == LAYERS * flops(SIDES)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_share_gathers_the_matrices_that_it_cuts(ranks: int) -> None:
    """Moonlight: at most two matrices more than its share, so that replicas send less than with another all-gather."""
    rows = [Listed(Matrix(64, 64 * (i + 1), (), ("dp",), ""), 1, 4, f"w{i}") for i in range(3)]
    elements = sum(row.matrix.elements * row.layers for row in rows)
    found = find_matrix_update(forecast("muon").play.plan)  # any plan: formats alone matter
    assert found is not None
    share = _gather(rows, ranks, elements, found)
    computed = sum(matrix.elements * number for matrix, number in share.computed.items())
    assert share.moved == found.width * (computed - elements / ranks)
    assert 0 <= computed - elements / ranks < 2 * 64 * 64 * 3
    assert np.isclose(share.elements, elements / ranks)


@pytest.mark.parametrize(("tensor", "wanted"), [("duplicated", 1), ("blockwise", 0), ("distributed", 0)])
def test_tensor_ranks_share_matrices(tensor: str, wanted: int) -> None:
    """Duplicated: all of it after a gather in fp32; blockwise: the iterations of the shard; distributed: products of
    the shard and a whole square, with its sum in every iteration."""
    whole = forecast("muon", "megatron-core", {"tp": 1, "zero": 0})
    report = forecast({"name": "muon", "tensor": tensor}, "megatron-core", {"tp": 4, "zero": 0})
    gathered, summed = sum(sent(report, "all_gather")), sent(report, "all_reduce")
    assert gathered == wanted * 4 * ELEMENTS
    # The side that ranks do not share: of gate and up together F is the shared one.
    squares = [H, H, H, H, H, H]
    if tensor == "duplicated":
        assert product_flops(report) == product_flops(whole)
    elif tensor == "blockwise":
        shards = [(H // 4, H), (H // 8, H), (H // 8, H), (H // 4, H), (H, 2 * F // 4), (H, F // 4)]
        assert product_flops(report) == LAYERS * flops([tuple(sorted(sides)) for sides in shards])
    else:
        assert sorted(summed)[-5 * 6 * LAYERS :] == [2 * side**2 for side in squares for _ in range(5 * LAYERS)]
        shared = [(H, H), (H, H // 2), (H, H // 2), (H, H), (H, 2 * F), (H, F)]
        assert product_flops(report) == LAYERS * flops(shared, tp=4)


def test_the_update_holds_a_matrix_at_a_time() -> None:
    """8 bytes an element of the largest, and squares of its shorter side in bf16; as many as are batched together."""
    one, all_of_a_shape = (
        forecast("muon", set={"update": {"matrices": {"batched": batched}}}) for batched in (False, True)
    )
    peaks = [report.play.program.updates[0].memory.peak for report in (one, all_of_a_shape)]
    assert peaks[0] == 8 * H * F + 2 * 2 * H * H
    assert peaks[1] == 2 * LAYERS * peaks[0]


def test_muon_takes_longer_and_less_memory_than_adam() -> None:
    for plan in ({"dp": 8, "zero": 0}, {"dp": 8, "zero": 1}, {"fsdp": True}):
        adam, muon = (forecast(name, plan=plan) for name in ("adam", "muon"))
        assert muon.step_time > adam.step_time
        assert muon.play.resting[0]["optimizer"] < adam.play.resting[0]["optimizer"]


def test_soap_projects_what_it_has_into_bases_of_both_sides() -> None:
    """In fp32: the factors, and four projections of each side, 5 (2 m^2 n + 2 m n^2) FLOPs, in every step; in every
    tenth 3 products of each side, and its QR decomposition of about 2 n^3 FLOPs with its orthogonal matrix."""
    every = [product_flops(forecast({"name": "soap", "every": number})) for number in (10, 1)]
    decomposed = (every[1] - every[0]) * 10 / 9
    assert every[0] - decomposed / 10 == pytest.approx(
        LAYERS * sum(10 * short * long * (short + long) for short, long in SIDES)
    )
    cubes = LAYERS * sum(short**3 + long**3 for short, long in SIDES)
    assert decomposed == pytest.approx((6 + 2) * cubes, rel=0.05)
    assert all(op.work.dtype == "fp32" for op in update_ops(forecast("soap")) if isinstance(op.work, Gemm))


def test_sides_that_are_too_large_have_no_factor() -> None:
    """Of SOAP; Shampoo cuts the matrix into blocks."""
    report = forecast({"name": "soap", "largest": H, "every": 1_000_000})
    of_short = sum(10 * short**2 * long for short, long in SIDES)
    of_long = sum(10 * short * long**2 for short, long in SIDES if long <= H)
    assert product_flops(report) == pytest.approx(LAYERS * (of_short + of_long), rel=1e-4)
    blocks = forecast({"name": "shampoo", "largest": H, "every": 1_000_000})
    squares = [(short, H, long // H) for short, long in SIDES]
    wanted = sum(number * 4 * short * long * (short + long) for short, long, number in squares)
    assert product_flops(blocks) == pytest.approx(LAYERS * wanted, rel=1e-4)


@pytest.mark.parametrize("rank", [1.0, 0.25])
def test_dion_shares_decompositions(rank: float) -> None:
    """2 m n r FLOPs with the basis, as many for the new one, twice as many for momentum and weights: by all replicas,
    or by shards of a matrix; the decompositions of 28 matrices on 8 ranks by each for some."""
    optimizer = {"name": "dion", "rank": rank}
    plans = ({"dp": 8, "zero": 0}, {"fsdp": True})
    whole, shards = (forecast(optimizer, plan=plan) for plan in plans)
    products = LAYERS * sum(8 * short * long * rank * short for short, long in SIDES)
    alone = forecast(optimizer, plan={"dp": 1}, cluster={"gpu": "h100-sxm", "gpus": 1})
    decomposed = product_flops(alone) - products
    assert decomposed > 0
    assert products + decomposed / 8 <= product_flops(whole) < products + decomposed / 2
    assert product_flops(shards) < product_flops(whole)
    moved = [sum(sent(report, "all_gather")) for report in (whole, shards)]
    assert sum(sent(shards, "reduce_scatter")) == moved[1] and not sent(alone, "all_gather")
    # Tall matrices are those of replicas; of shards, all but two of a layer have H rows.
    assert moved[0] == 4 * LAYERS * sum(long * rank * short for short, long in SIDES)
