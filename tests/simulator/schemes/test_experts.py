"""Layers with experts, by hand: messages, computation, kept activations and reductions."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import Collective, Fragment, Gemm, Memory, Op
from meshcast.validation.contract.measure import saved_bytes
from meshcast.validation.contract.played import Played, play_job
from tests.simulator.schemes.small_jobs import job_on

S, H, E, K, F = 16, 32, 8, 2, 24
MOE = {"experts": E, "top_k": K, "expert_ffn": F}
GPT = {"layers": 1, "hidden": H, "heads": 4, "vocab": 64, "seq": S, "positions": "rope", "norm": "rmsnorm"}
MODEL = {**GPT, "gated": True, "tied": False, "moe": MOE}
COPIES = K * S * H * 2
"""Bytes of the copies of all tokens of one sequence, in bf16."""


def spread(
    mesh: dict[str, int], view: dict[str, int] | None, *more: dict[str, Any], sp: bool = True, **fields: Any
) -> Played:
    """One micro-batch of one sequence on each replica."""
    schemes = [{"use": "pipeline/1f1b", "over": "pp"}] if "pp" in mesh else []
    schemes += [{"use": "data/zero-1", "over": "dp"}]
    schemes += [{"use": "sequence/all-gather", "over": "cp"}] if "cp" in mesh else []
    schemes += [{"use": f"tensor/megatron{'-sp' * sp}", "over": "tp"}] if "tp" in mesh else []
    if view:
        over = ["ep", "etp"] if "etp" in view else ["ep"]
        schemes.append({"use": "expert/all-to-all", "over": over})
    moe = {**MOE, **fields.pop("moe", {})}
    framework = {"name": "megatron-core", "set": fields.pop("framework", {})}
    model, views = {**MODEL, **fields, "moe": moe}, {"experts": view} if view else {}
    return play_job(job_on(mesh, *schemes, *more, samples=mesh["dp"], model=model, views=views, framework=framework))


def layer(played: Played) -> Fragment:
    """The one layer's."""
    return next(
        unit_run.fragment for stage_ops in played.stages for unit_run in stage_ops.unit_runs if unit_run.name == "layer"
    )


def on(ops: list[Op], stream: str) -> list[tuple[str, str, tuple[str, ...], int]]:
    """The collectives of a stream: operation, tensor, axes, bytes."""
    works = [(op.name, op.work) for op in ops if op.stream == stream and isinstance(op.work, Collective)]
    return [(work.operation, name.split(" ")[-1], work.axes, work.nbytes) for name, work in works]


def gemms(fragment: Fragment, name: str) -> list[tuple[int, int, int, int]]:
    """m, n, k and the number of products, forward."""
    works = [op.work for op in fragment.forward if op.name == name]
    return [(work.m, work.n, work.k, work.batch) for work in works if isinstance(work, Gemm)]


# -------------------------------------------------------------------------------------------------- traffic


def test_dispatch_and_combine_over_a_part_of_two_axes_are_one_all_to_all_each() -> None:
    """ep = 4 over half of dp and all of tp: tokens are cut by both, so copies of a rank's own tokens go to all four."""
    played = spread({"dp": 4, "tp": 2}, {"edp": 2, "ep": 4})
    own = COPIES // 2
    over = ("dp.1", "tp")
    assert on(layer(played).forward, "expert") == [
        ("all_to_all", "sent", over, own),
        ("all_to_all", "expert.down", over, own),
    ]
    assert on(layer(played).backward, "expert") == [
        ("all_to_all", "dexpert.down", over, own),
        ("all_to_all", "dsent", over, own),
    ]
    assert {name for _, name, *_ in on(layer(played).forward, "tensor")} == {"norm1", "proj"}


def test_without_sequence_parallelism_each_tensor_rank_sends_its_part() -> None:
    """All tensor ranks have all tokens: each drops the tokens of the other's experts, sends the rest, and the results
    are gathered. Nothing is sent twice.
    """
    played = spread({"dp": 4, "tp": 2}, {"edp": 2, "ep": 4}, sp=False)
    assert on(layer(played).forward, "expert") == [
        ("all_to_all", "sent", ("dp.1",), COPIES // 2),
        ("all_to_all", "expert.down", ("dp.1",), COPIES // 2),
        ("all_gather", "expert.down", ("tp",), COPIES),
    ]
    assert on(layer(played).backward, "expert") == [
        ("all_to_all", "dexpert.down", ("dp.1",), COPIES // 2),
        ("all_to_all", "dsent", ("dp.1",), COPIES // 2),
        ("all_gather", "dsent", ("tp",), COPIES),
    ]


def test_tokens_are_sliced_for_nothing() -> None:
    """Experts over the tensor ranks alone, all of which have all tokens: no rank sends a token forward."""
    forward = on(layer(spread({"dp": 1, "tp": 4}, {"edp": 1, "ep": 4}, sp=False)).forward, "expert")
    assert forward == [("all_gather", "expert.down", ("tp",), COPIES)]


def test_experts_over_context_parallel_ranks() -> None:
    played = spread({"dp": 1, "cp": 2, "tp": 2}, {"edp": 1, "ep": 4})
    assert on(layer(played).forward, "expert") == [
        ("all_to_all", "sent", ("cp", "tp"), COPIES // 4),
        ("all_to_all", "expert.down", ("cp", "tp"), COPIES // 4),
    ]
    assert {name for _, name, *_ in on(layer(played).forward, "sequence")} == {"k.rope", "v"}


def test_divided_experts_gather_their_tokens_and_scatter_their_results() -> None:
    """etp = 2 on the tensor ranks: behind the all-to-all the tokens of both are gathered; results are summed."""
    played = spread({"dp": 4, "tp": 2}, {"edp": 2, "ep": 2, "etp": 2})
    own = COPIES // 2
    assert on(layer(played).forward, "expert") == [
        ("all_to_all", "sent", ("dp.1",), own),
        ("all_gather", "sent", ("tp",), 2 * own),
        ("reduce_scatter", "expert.down", ("tp",), 2 * own),
        ("all_to_all", "expert.down", ("dp.1",), own),
    ]
    assert on(layer(played).backward, "expert") == [
        ("all_to_all", "dexpert.down", ("dp.1",), own),
        ("all_gather", "dexpert.down", ("tp",), 2 * own),
        ("reduce_scatter", "dsent", ("tp",), 2 * own),
        ("all_to_all", "dsent", ("dp.1",), own),
    ]
    # Half of every one of four experts, over the copies of four ranks' tokens.
    assert gemms(layer(played), "expert.up") == [(4 * K * S // 2 // E, 2 * F // 2, H, E // 2)]
    assert gemms(layer(played), "expert.down") == [(4 * K * S // 2 // E, H, F // 2, E // 2)]


def test_exchanges_of_experts_in_8_bits_are_those_in_16() -> None:
    """Tokens are cast where the GEMM reads them, and their gradients follow the weight gradients on their way back."""

    def exchanges(quantised: str) -> list[tuple[str, str, tuple[str, ...], int]]:
        fragment = layer(spread({"dp": 4, "tp": 2}, {"edp": 2, "ep": 2, "etp": 2}, framework={"quantised": quantised}))
        scatter = next(op for op in fragment.backward if op.name.startswith("reduce_scatter dsent"))
        assert any(op.phase == "W" and op.name == "wexpert.up" for op in scatter.after)
        moved = on(fragment.forward, "expert") + on(fragment.backward, "expert")
        return [(work, name.removesuffix(".fp8"), *rest) for work, name, *rest in moved]

    assert exchanges("fp8-delayed") == exchanges("")


@pytest.mark.parametrize("regather", [True, False])
def test_experts_keep_the_tokens_that_they_have_gathered(regather: bool) -> None:
    """Whatever the framework does with the inputs of other linears; their traffic is the experts'."""
    played = spread({"dp": 2}, {"edp": 1, "ep": 1, "etp": 2}, framework={"regather": regather})
    backward = on(layer(played).backward, "expert")
    assert ("all_gather", "sent", ("dp",), 2 * COPIES) in on(layer(played).forward, "expert")
    assert not [op for op in backward if op[:2] == ("all_gather", "sent")]
    assert not on(layer(played).backward, "data")


def test_without_a_view_experts_are_divided_as_any_mlp() -> None:
    """Tensor parallelism divides every expert; tokens go to no other rank, only their copies are gathered."""
    played = spread({"dp": 2, "tp": 2}, None)
    forward = on(layer(played).forward, "tensor")
    assert ("all_gather", "sent", ("tp",), COPIES) in forward
    assert ("reduce_scatter", "expert.down", ("tp",), COPIES) in forward
    assert not on(layer(played).forward, "expert")
    assert gemms(layer(played), "expert.up") == [(K * S // E, 2 * F // 2, H, E)]


def test_shared_experts_are_tensor_parallel() -> None:
    played = spread({"dp": 4, "tp": 2}, {"edp": 2, "ep": 4}, moe={"shared_experts": 2})
    assert gemms(layer(played), "shared.up") == [(S, 2 * 2 * F // 2, H, 1)]
    assert gemms(layer(played), "shared.down") == [(S, H, 2 * F // 2, 1)]
    forward = on(layer(played).forward, "tensor")
    assert forward.index(("all_gather", "norm2", ("tp",), S * H * 2)) < forward.index(
        ("reduce_scatter", "shared.down", ("tp",), S * H * 2)
    )
    (residual,) = [op.work for op in layer(played).forward if op.name == "residual2"]
    assert residual == Memory("residual", 3 * S * H * 2 // 2, S * H * 2 // 2)


def test_the_streams_do_not_depend_on_the_order_of_the_schemes() -> None:
    """Listed in front of the tensor scheme, experts do not take its traffic for theirs."""
    mesh, view = {"dp": 2, "tp": 2}, {"edp": 1, "ep": 4}
    schemes = [
        {"use": "expert/all-to-all", "over": "ep"},
        {"use": "tensor/megatron-sp", "over": "tp"},
        {"use": "data/zero-1", "over": "dp"},
    ]
    for order in (schemes, schemes[::-1]):
        job = job_on(mesh, *order, samples=2, model=MODEL, views={"experts": view})
        found = defaultdict(set)
        for op in layer(play_job(job)).forward:
            if isinstance(op.work, Collective):
                found[op.stream].add(op.name.split(" ")[-1])
        assert found == {"tensor": {"norm1", "proj"}, "expert": {"sent", "expert.down"}}


# ------------------------------------------------------------------------------------------------ computing


def test_work_of_the_experts_by_hand() -> None:
    """Eight ranks, two groups of four that hold all experts, two experts a rank."""
    played = spread({"dp": 8}, {"edp": 2, "ep": 4})
    fragment, own = layer(played), COPIES
    tokens = 4 * K * S // E  # of one expert: the copies of four ranks' tokens
    assert gemms(fragment, "router") == [(S, E, H, 1)]
    assert gemms(fragment, "expert.up") == [(tokens, 2 * F, H, 2)]
    assert gemms(fragment, "expert.down") == [(tokens, H, F, 2)]
    works = {
        op.name: (op.work.read, op.work.write)
        for op in fragment.forward
        if isinstance(op.work, Memory) and op.name not in ("expert.up", "expert.down")
    }
    assert works["permute"] == (own // K, own)
    assert works["unpermute"] == (own + S * K * 4, own // K)
    assert works["expert.act"] == (2 * K * S * F * 2, K * S * F * 2)
    sorts = [op.work for op in fragment.forward if op.name in ("expert.up", "expert.down") and not gemm(op)]
    assert sorts == [Memory("permute", own, own)] * 2, "by expert, then by rank"
    alone = layer(spread({"dp": 8}, {"edp": 1, "ep": 8})).forward
    assert not [op for op in alone if op.name == "expert.up" and not gemm(op)], "one expert has nothing to sort"


def gemm(op: Op) -> bool:
    return isinstance(op.work, Gemm)


@pytest.mark.parametrize(("capacity", "places"), [(None, 2), (1.0, 2), (1.25, 2.5), (2.0, 4)])
def test_capacity_fills_or_drops_places(capacity: float | None, places: float) -> None:
    played = spread({"dp": 4}, {"edp": 1, "ep": 4}, moe={"capacity": capacity})
    sent = S * places * H * 2
    assert {nbytes for *_, nbytes in on(layer(played).forward, "expert")} == {sent}
    assert gemms(layer(played), "expert.up") == [(4 * S * places / E, 2 * F, H, 2)]


def test_places_need_not_be_whole_for_a_sequence() -> None:
    """7 tokens of 1.25 places: 8.75 of a sequence, 17.5 of both ranks; each of two experts has room for nine."""
    moe = {"experts": 2, "top_k": 1, "capacity": 1.25}
    played = spread({"dp": 2}, {"edp": 1, "ep": 2}, seq=7, moe=moe)
    assert gemms(layer(played), "expert.up") == [(9, 2 * F, H, 1)]
    assert on(layer(played).forward, "expert")[0][3] == int(8.75 * H) * 2


@pytest.mark.parametrize(
    ("fields", "units"),
    [
        ({"first_dense": 3}, [["dense", 3, "moe", 1], ["moe", 4]]),
        (
            {"first_dense": 1, "every": 2},
            [["dense", 2, "moe", 1, "dense", 1], ["moe", 1, "dense", 1, "moe", 1, "dense", 1]],
        ),
        ({"every": 4}, [["dense", 3, "moe", 1], ["dense", 3, "moe", 1]]),
        ({"first_dense": 8}, [["dense", 4], ["dense", 4]]),
        ({}, [["moe", 4], ["moe", 4]]),
    ],
)
def test_which_layers_have_experts(fields: dict[str, Any], units: list[list[Any]]) -> None:
    played = spread({"pp": 2, "dp": 2}, {"edp": 1, "ep": 2}, layers=8, moe=fields)
    found = []
    for stage_ops in played.stages:
        layers = [unit_run for unit_run in stage_ops.unit_runs if unit_run.name == "layer"]
        routed = [any(op.name == "router" for op in unit_run.fragment.forward) for unit_run in layers]
        pairs = zip(layers, routed, strict=True)
        found.append([one for unit_run, moe in pairs for one in ("moe" if moe else "dense", unit_run.count)])
    assert found == units


@pytest.mark.parametrize(("period", "kinds"), [(0, 2), (2, 4)])
def test_kinds_of_layers_are_lowered_once_each(period: int, kinds: int) -> None:
    """With and without experts, with and without a window."""
    window = {"window": 4, "full_every": period} if period else {}
    fields = {"layers": 8, "moe": {"first_dense": 2}, **window}
    played = spread({"pp": 2, "dp": 2}, {"edp": 1, "ep": 2}, **fields)
    layers = [
        unit_run.fragment for stage_ops in played.stages for unit_run in stage_ops.unit_runs if unit_run.name == "layer"
    ]
    assert len(set(layers)) == kinds


# --------------------------------------------------------------------------------------------------- memory


def kept(*more: dict[str, Any], **fields: Any) -> float:
    played = spread({"dp": 4}, {"edp": 1, "ep": 4}, *more, **fields)
    (unit_run,) = [unit_run for unit_run in played.stages[0].unit_runs if unit_run.name == "layer"]
    return saved_bytes(unit_run, statistics=False)


ATTENTION = S * H * 2 * 5 + 4 * S * 4
"""Norm1's result, queries and keys turned, values and the result; row sums of four heads."""
STREAM = 2 * S * H * 2
"""Both residuals."""
MLP = S * H * 2 + S * E * 2 + COPIES + 3 * K * S * F * 2
"""Norm2's result, the router's logits; copies that have arrived, three tensors of the inner width. Weighted in front of
the last linear, results are not needed again."""


def test_activations_kept_by_a_layer_with_experts() -> None:
    assert kept() == STREAM + ATTENTION + MLP


def test_recomputed_tensors_are_not_kept() -> None:
    whole = kept()
    assert kept({"use": "memory/recompute-full"}) == STREAM / 2
    moe = kept({"use": "memory/recompute-selective", "modules": ["moe"]})
    assert moe == STREAM + ATTENTION + S * H * 2
    assert kept({"use": "memory/recompute-selective", "modules": ["core_attn", "moe"]}) < moe < whole


def test_experts_done_again_travel_again() -> None:
    """Recomputing them sends tokens to them once more, and back: six all-to-alls."""
    bare = spread({"dp": 4}, {"edp": 1, "ep": 4})
    again = spread({"dp": 4}, {"edp": 1, "ep": 4}, {"use": "memory/recompute-selective", "modules": ["moe"]})
    assert len(on(layer(bare).backward, "expert")) == 2
    assert len(on(layer(again).backward, "expert")) == 4
    names = [op.name for op in layer(again).backward if op.phase == "R" and gemm(op)]
    assert names == ["re router", "re expert.up", "re expert.down"]


# ------------------------------------------------------------------------------------------------ gradients


def test_gradients_of_experts_are_reduced_among_their_copies_only() -> None:
    """edp = 2 copies of the experts, dp = 4 of all else; ZeRO-1 cuts the optimizer's state alike."""
    played = spread({"dp": 4, "tp": 2}, {"edp": 2, "ep": 4})
    mesh = played.plan.mesh
    reduced = {
        op.work.axes: op.work.nbytes
        for _, op in played.instances()
        if isinstance(op.work, Collective) and op.name == "reduce grads"
    }
    experts = [param for param in played.list_held(0) if param.view]
    size = sum(param.size for param in experts)
    assert size == 3 * E * H * F // 4
    other = sum(param.size for param in played.list_held(0) if not param.view)
    assert reduced == {("dp.0",): 4 * size, ("dp.0", "dp.1"): 4 * other}
    assert mesh.size(("dp.0", "dp.1")) == 4 and mesh.size("dp.0") == 2
    assert played.resting(0)["optimizer"] == 12 * (size / 2 + other / 4)


def test_biases_of_divided_experts_are_no_partial_sums() -> None:
    """Behind the sum over the ranks that divide an expert each has the whole gradient of its last bias."""
    played = spread({"dp": 4}, {"edp": 2, "ep": 1, "etp": 2}, norm="layernorm")
    partial = {param.name: param.partial for param in played.list_held(0) if param.view}
    assert set(partial) == {f"{kind}expert.{name}" for kind in "wb" for name in ("gate", "up", "down")}
    assert set(partial.values()) == {("dp.0",)}


def test_buckets_of_experts_do_not_wait_for_other_buckets() -> None:
    """Buckets begin in the order in which they fill, whatever they are reduced over."""
    framework = {"bucket": {"elements": 1.0, "elements_per_rank": 0.0}}
    played = spread({"dp": 4}, {"edp": 2, "ep": 2}, layers=4, framework=framework)
    (behind,), (ahead,) = played.stages[0].behind, played.stages[0].ahead
    assert [len(behind.ops)] == [len(behind.params)] == [len(behind.starts)]
    assert behind.params.tolist() == sorted(behind.params.tolist(), reverse=True)
    assert ahead.params.tolist() == sorted(ahead.params.tolist())
    assert len({op.work.axes for op in behind.ops if isinstance(op.work, Collective)}) == 2


def test_experts_are_copies_where_tensor_ranks_are_the_only_others() -> None:
    """Without replicas but with copies of experts on tensor ranks, their gradients are reduced behind the backward."""
    played = spread({"dp": 1, "tp": 2}, {"edp": 2, "ep": 1})
    (work,) = {op.work for _, op in played.instances() if op.name == "reduce grads"}
    assert work == Collective("reduce_scatter", 4 * 3 * E * H * F, ("tp",))


# ----------------------------------------------------------------------------------------------------- plans


def test_shared_work_keeps_views_separate() -> None:
    """The same mesh with and without a view that no scheme claims: experts are copies, or parts of copies."""
    schemes = [{"use": "data/ddp", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}]
    mesh, both = {"dp": 2, "tp": 2}, ({}, {"experts": {"edp": 4}})
    jobs = [job_on(mesh, *schemes, samples=2, model=MODEL, views=views) for views in both]
    shop = SharedWork()
    alone = [simulate(one).to_dict() for one in jobs]
    assert [simulate(one, shared_work=shop).to_dict() for one in jobs] == alone
    assert alone[0]["memory"] != alone[1]["memory"]
