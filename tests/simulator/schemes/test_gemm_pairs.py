"""Pairs of a GEMM and a collective that async-TP, FLUX and Userbuffers overlap, and the buffers that they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Unit
from meshcast.simulator.ir.ops import Collective, Fragment, Gemm, Memory, Op, TensorUse
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.lowering.rewrite import working_predecessors
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import find_gemm_collectives
from meshcast.validation.contract.measure import list_ops, make
from tests.simulator.schemes.overlap_schemes import ALL, ASYNC, FLUX, USERBUFFERS, a_layer, every


def found(fragment: Fragment, t: int) -> list[tuple[str, str, list[str]]]:
    every = find_gemm_collectives(fragment, "tensor", Mesh({"tp": t}))
    return sorted((p.collective.phase, p.collective.name, [op.name for op in p.products]) for p in every)


@pytest.mark.parametrize("regather", [True, False])
def test_a_layer_has_four_pairs_forward_and_four_backward(regather: bool) -> None:
    """The all-gathers before and reduce-scatters after attention and feed-forward; all-gathers for weight gradients
    form no pair.
    """
    embedding, layer, ending = a_layer(4, regather=regather)
    assert found(layer, 4) == [
        ("B", "all_gather ddown", ["ddown"]),
        ("B", "all_gather dproj", ["dproj"]),
        ("B", "reduce_scatter dnorm1", ["dqkv"]),
        ("B", "reduce_scatter dnorm2", ["dup"]),
        ("F", "all_gather norm1", ["qkv"]),
        ("F", "all_gather norm2", ["up"]),
        ("F", "reduce_scatter down", ["down"]),
        ("F", "reduce_scatter proj", ["proj"]),
    ]
    assert found(embedding, 4) == []
    assert found(ending, 4) == [("B", "reduce_scatter dnorm.out", ["dhead"]), ("F", "all_gather norm.out", ["head"])]


def test_recomputed_gemms_are_overlapped_again() -> None:
    (_, layer, _) = a_layer(4, "memory/recompute-full")
    again = [one[1:] for one in found(layer, 4) if one[0] == "R"]
    assert again == [
        ("re all_gather norm1", ["re qkv"]),
        ("re all_gather norm2", ["re up"]),
        ("re reduce_scatter down", ["re down"]),
        ("re reduce_scatter proj", ["re proj"]),
    ]


@every
def test_a_scheme_without_pairs_is_left_as_it_is(use: str) -> None:
    for t, tensor in ((4, "megatron"), (1, "megatron-sp")):
        for one, other in zip(a_layer(t, tensor=tensor), a_layer(t, use, tensor=tensor), strict=True):
            assert list_ops(one.forward) == list_ops(other.forward) and list_ops(one.backward) == list_ops(
                other.backward
            )


def op(name: str, work: Any, *after: Op, stream: str = "compute", phase: str = "F") -> Op:
    return Op(name, stream, work, list(after), phase)


def gather(nbytes: int, *after: Op, axis: str = "tp", phase: str = "F") -> Op:
    return op("gather", Collective("all_gather", nbytes, (axis,)), *after, stream="tensor", phase=phase)


def stated(forward: Sequence[Op] = (), backward: Sequence[Op] = ()) -> Fragment:
    """A fragment of these ops: each collective uses one tensor, which its neighbours write or read."""
    ops = [*forward, *backward]
    moves = [one for one in ops if isinstance(one.work, Collective)]
    others = [
        (move, one)
        for move in moves
        for one in ops
        if move in working_predecessors(one) or one in working_predecessors(move)
    ]
    tensor_uses = [TensorUse(move.name, 1, one) for move, one in [*others, *zip(moves, moves, strict=True)]]
    return Fragment([*forward], [*backward], tensor_uses=tensor_uses)


MESH = Mesh({"tp": 4, "other": 2})


def test_products_right_behind_each_other_share_the_shards() -> None:
    """Others wait for the whole: one behind another kernel, one with rows from elsewhere, a gradient of a weight."""
    came = gather(2 * 8 * 16)
    q, kv = (op(name, Gemm(8, n, 16), came) for name, n in (("q", 32), ("kv", 8)))
    norm = op("norm", Memory("norm", 8, 8), came)
    late = op("late", Gemm(8, 4, 16), came)
    other = op("other", Gemm(8, 4, 32), norm)
    grad = op("grad", Gemm(16, 4, 8, layout="nt"), came, phase="W")
    frag = stated(forward=[came, q, kv, norm, late, other, grad])
    (pair,) = find_gemm_collectives(frag, "tensor", MESH)
    assert pair.products == (q, kv) and pair.gathers and pair.ranks == 4 and pair.shard == 64
    for use in ALL:
        new = make(use, MESH).lower(Unit("unit", ()), lambda _: frag.copy())
        place = {one.name: one for one in new.forward}
        last = place["gather 3"]
        for name in ("norm", "late", "grad"):
            assert last in working_predecessors(place[name])
        assert [one.name for one in new.forward if one.stream == "tensor"] == ["gather 1", "gather 2", "gather 3"]
        if use != FLUX:
            turns = [f"{name} {i}" for i in range(4) for name in ("q", "kv")]
            assert [one.name for one in new.forward if one.name.split()[0] in ("q", "kv")] == turns
            assert working_predecessors(place["kv 0"]) == {place["own gather"]} and working_predecessors(
                place["q 2"]
            ) == {place["gather 2"]}
        else:
            # One kernel: the rows of the shard that arrives last are computed last.
            turns = [one.name for one in new.forward if one.name.split()[0] in ("q", "kv")]
            assert turns == ["q 0", "kv 0", "q 1", "kv 1"]
            assert working_predecessors(place["q 0"]) == working_predecessors(place["kv 0"]) == set()
            assert last in working_predecessors(place["q 1"]) and last in working_predecessors(place["kv 1"])


def test_one_product_that_needs_another_is_not_in_the_same_pair() -> None:
    came = gather(2 * 8 * 16)
    one = op("one", Gemm(8, 16, 16), came)
    two = op("two", Gemm(8, 8, 16), came, one)
    (pair,) = find_gemm_collectives(stated(forward=[came, one, two]), "tensor", MESH)
    assert pair.products == (one,)


def test_a_product_between_two_collectives_goes_with_the_one_that_moves_more() -> None:
    for width, gathers in ((8, True), (64, False)):
        came = gather(2 * 8 * 16)
        product = op("product", Gemm(8, width, 16), came)
        work = Collective("reduce_scatter", 2 * 8 * width, ("other",))
        scatter = op("scatter", work, product, stream="tensor")
        (pair,) = find_gemm_collectives(stated(forward=[came, product, scatter]), "tensor", MESH)
        assert (pair.gathers, pair.ranks) == ((True, 4) if gathers else (False, 2))


def test_a_sum_that_waits_for_its_turn_waits_for_no_weight_gradient_any_more() -> None:
    product = op("product", Gemm(8, 16, 8, layout="nn"), phase="B")
    grad = op("grad", Gemm(8, 16, 8, layout="nt"), phase="W")
    work = Collective("reduce_scatter", 2 * 8 * 16, ("tp",))
    scatter = op("scatter", work, product, grad, stream="tensor", phase="B")
    frag = stated(backward=[product, grad, scatter])
    (pair,) = find_gemm_collectives(frag, "tensor", MESH)
    assert pair.products == (product,)
    for use in (ASYNC, FLUX):
        new = make(use, MESH).lower(Unit("unit", ()), lambda _: frag.copy()).backward
        assert not any(other.name == "grad" for one in new for other in working_predecessors(one))
        assert new[-1].name == "add scatter"
    # Bulk overlap of userbuffers: the whole sum runs during the weight gradient.
    kept = make(USERBUFFERS, MESH).lower(Unit("unit", ()), lambda _: frag.copy()).backward
    assert list_ops(kept) == list_ops(frag.backward)


@pytest.mark.parametrize(
    ("came", "work"),
    [
        (gather(2 * 8 * 16, axis="other"), Gemm(7, 4, 16)),  # not the gathered tensor
        (gather(2 * 6 * 16), Gemm(6, 4, 16)),  # six rows on four ranks
        (gather(2 * 8 * 16, axis="x"), Gemm(8, 4, 16)),  # one rank
        (gather(2 * 8 * 16, phase="W"), Gemm(8, 4, 16)),  # for another pass
        (gather(2 * 8 * 16), Gemm(8, 4, 16, layout="nt")),  # what the product sums over
        (gather(2 * 8 * 16), Memory("norm", 8, 8)),
        (replace(gather(2 * 8 * 16), stream="sequence"), Gemm(8, 4, 16)),  # of another family
    ],
)
def test_ops_that_form_no_pair(came: Op, work: Any) -> None:
    frag = stated(forward=[came, op("reader", work, came)])
    assert find_gemm_collectives(frag, "tensor", MESH) == []


def test_weights_that_are_gathered_are_no_rows() -> None:
    """Even if the sizes match: on a cube of ranks both operands of a GEMM are gathered."""
    rows, weights = gather(2 * 8 * 8), replace(gather(2 * 8 * 8), name="gather w")
    product = op("product", Gemm(8, 8, 8), rows, weights)
    frag = stated(forward=[weights, rows, product])
    frag.tensor_uses = [
        replace(t, category="parameters" if t.key == "gather w" else t.category) for t in frag.tensor_uses
    ]
    (pair,) = find_gemm_collectives(frag, "tensor", MESH)
    assert pair.collective is rows


def test_on_a_cube_of_ranks_every_product_keeps_its_own_pairs() -> None:
    mesh = Mesh({"i": 2, "j": 2, "l": 2})
    model = Model(layers=1, hidden=64, heads=8, vocab=128, seq=32, tied=False)
    stage = Architecture(model, 4, 32, 128).stage(range(1), False, False)
    (unit_run,) = Lowering(mesh, [make("tensor/3d", mesh, ("i", "j", "l"))], False).run(stage).unit_runs
    every = find_gemm_collectives(unit_run.fragment, "tensor", mesh)
    assert {one.name for pair in every for one in pair.products} >= {"proj", "up", "down", "dproj", "dup", "ddown"}
    assert all(pair.ranks == 2 and " w" not in pair.collective.name for pair in every)


def test_a_sum_of_several_is_no_pair() -> None:
    one, two = (op(name, Gemm(8, 16, 8)) for name in ("one", "two"))
    scatter = op("scatter", Collective("reduce_scatter", 2 * 8 * 16, ("tp",)), one, two, stream="tensor")
    assert find_gemm_collectives(stated(forward=[one, two, scatter]), "tensor", MESH) == []


# --------------------------------------------------------------------------------------------- memory held


@every
def test_only_the_buffers_of_the_scheme_are_added(use: str) -> None:
    """A shard before a GEMM; behind it two with async-TP, none where partial results take the place of the result."""
    shard = 32 * 64 * 2 // 4
    (_, plain, _), (_, layer, _) = a_layer(4), a_layer(4, use)

    def sizes(fragment: Fragment, buffers: bool) -> dict[str, int]:
        held: dict[str, int] = {}
        for tensor_use in fragment.tensor_uses:
            if (tensor_use.category == "buffers") == buffers:
                held[tensor_use.key] = max(held.get(tensor_use.key, 0), tensor_use.nbytes)
        return held

    assert sizes(plain, False) == sizes(layer, False)
    added = Counter((key[0], nbytes // shard) for key, nbytes in sizes(layer, True).items())
    before, behind = {("F", 1): 2, ("B", 1): 2}, {("F", 2): 2, ("B", 2): 2}
    assert added == {ASYNC: before | behind, USERBUFFERS: before, FLUX: {}}[use]
