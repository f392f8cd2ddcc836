"""Jobs with uneven routing or a fixed capacity: how a plan states it, and its effects."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.formats.expert_counts import read_counts, read_routing, read_trace
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Op
from meshcast.simulator.ir.routing import Routing, slowest_rank
from meshcast.validation.contract.measure import sent_bytes
from meshcast.validation.contract.of_experts import ExpertLayer, sent_per_layer
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn_grid

S, H, E, K, F = 64, 32, 8, 2, 24
GPT = {"layers": 1, "hidden": H, "heads": 4, "vocab": 64, "seq": S, "positions": "rope", "norm": "rmsnorm"}
MOE = {"experts": E, "top_k": K, "expert_ffn": F}
SKEWED = {"zipf": 1.0}


def job(
    use: str,
    mesh: dict[str, int] | None = None,
    view: dict[str, int] | None = None,
    more: tuple[dict[str, Any], ...] = (),
    moe: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A layer with experts on four ranks, two experts each."""
    mesh, view = mesh or {"dp": 4}, view or {"edp": 1, "ep": 4}
    over = [axis for axis in view if axis != "edp"]
    schemes: list[dict[str, Any]] = [{"use": "data/ddp", "over": "dp"}]
    schemes += [{"use": f"expert/{use}", "over": over, **options}]
    schemes += [{"use": "sequence/all-gather", "over": "cp"}] if "cp" in mesh else []
    schemes += [{"use": "tensor/megatron-sp", "over": "tp"}] if "tp" in mesh else []
    return {
        "model": {**GPT, "gated": True, "tied": False, "moe": MOE | (moe or {})},
        "cluster": {"gpu": "h100-sxm", "gpus": math.prod(mesh.values())},
        "framework": {"set": {"launch_s": 0.0}},
        "batch": {"global": mesh["dp"]},
        "plan": {"mesh": mesh, "views": {"experts": view}, "schemes": [*schemes, *more]},
    }


def play(use: str, *args: Any, **options: Any) -> Played:
    return play_job(job(use, *args, **options))


# ------------------------------------------------------------------------------------------------- options


def test_a_trace_has_counts_for_each_step(tmp_path: Path) -> None:
    """In files of two kinds, as counts."""
    files = {
        "a.json": "[[1, 2], [[3, 4], [5, 6]]]",
        "b.csv": "1,2\n3,4\n",
        "c.json": "[1, 2, 3.5]",
        "d.csv": "1,2\n\n4, 5\n",
    }
    a, b, c, d = (tmp_path / name for name in files)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert read_trace(a) == (((1, 2),), ((3, 4), (5, 6))) and read_trace(b) == (((1, 2),), ((3, 4),))
    assert read_counts(c) == ((1, 2, 3.5),) and read_counts(d) == ((1, 2), (4, 5))
    assert read_routing("natural") == read_routing({"trained": "natural"}) == read_routing(read_routing("natural"))
    routing = read_routing({"trace": str(b)})
    assert routing.steps == 2 and routing.at_step(1).shares(2).tolist() == [[6 / 7, 8 / 7]]


def test_drift_swaps_so_many_experts_a_step() -> None:
    """Popularity is only passed on: five swaps of two in five steps of 20 experts; the same again for the same seed."""
    routing = read_routing({"zipf": 1.0, "drift": 0.1, "steps": 6})
    shares = [routing.at_step(step).shares(20)[0] for step in range(6)]
    assert all(sorted(one) == pytest.approx(sorted(shares[0])) for one in shares)
    assert [int((abs(one - other) > 1e-9).sum()) for one, other in pairwise(shares)] == [2] * 5
    other = read_routing({"zipf": 1.0, "drift": 0.1, "steps": 6, "seed": 1}).at_step(5).shares(20)[0]
    assert other.tolist() != shares[5].tolist()


def test_counts_are_found_from_the_folder_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps([8, 1, 1, 1, 1, 1, 1, 1]))
    (tmp_path / "job.json").write_text(json.dumps(job("all-to-all", routing={"counts": "counts.json"})))
    (text,) = [text for text in simulate(tmp_path / "job.json").assumed if "spread over the experts" in text]
    assert str(tmp_path / "counts.json") in text


# ---------------------------------------------------------------------------------------------- whole jobs


def on_experts(played: Played) -> list[Op]:
    """The collectives of the experts, in issue order."""
    return [op for _, op in played.instances() if op.stream == "expert"]


def at_experts(played: Played) -> list[Op]:
    return [op for _, op in played.instances() if "expert." in op.name and not isinstance(op.work, Collective | None)]


def test_the_most_loaded_rank_sets_the_time_of_the_layer() -> None:
    """Zipf's law on eight experts, two per rank: works state the mean, as under even routing; their factor is the load
    of rank 0, whose groups they have. Routers, copies and all ops outside of the experts are unchanged.
    """
    even, skewed = play("all-to-all"), play("all-to-all", routing=SKEWED)
    harmonic = sum(1 / (j + 1) for j in range(E))
    rho = (1 + 1 / 2) * 4 / harmonic
    assert len(at_experts(even)) == len(at_experts(skewed)) > 8
    for one, other in zip(at_experts(even), at_experts(skewed), strict=True):
        assert isinstance(other.work, Gemm | Memory)
        assert other.work.pace == pytest.approx(rho)
        work = replace(other.work, pace=1.0)
        assert one.work == (replace(work, groups=((2, 4 * K * S / E),)) if isinstance(work, Gemm) else work)
        if isinstance(other.work, Gemm):
            assert [count for count, _ in other.work.groups] == [1, 1]
            sizes = [4 * K * S / harmonic / (j + 1) for j in range(2)]
            assert [size for _, size in other.work.groups] == pytest.approx(sizes)
            assert sum(sizes) == pytest.approx(rho * 2 * 4 * K * S / E)
    for one, other in zip(on_experts(even), on_experts(skewed), strict=True):
        assert isinstance(one.work, Collective) and isinstance(other.work, Collective)
        assert other.work == replace(one.work, pace=other.work.pace)
        assert other.work.pace == pytest.approx(rho)
    experts = {*at_experts(skewed), *on_experts(skewed)}
    others = [op.work for _, op in skewed.instances() if op not in experts]
    assert {getattr(work, "pace", 1.0) for work in others} == {1.0}


@pytest.mark.parametrize(("use", "options"), [("all-to-all", {}), ("dropless", {"block": 1})])
def test_uneven_routing_takes_longer_and_does_the_same(use: str, options: dict[str, Any]) -> None:
    """The experts' time is rho times the balanced one; FLOPs and bytes over all ranks are conserved."""
    even, skewed, more = (play(use, routing={"zipf": s}, **options) for s in (0, 1, 2))
    assert even.flops("F") == skewed.flops("F") == skewed.wanted
    assert even.flops("B", "W") == skewed.flops("B", "W")
    assert sent_bytes(on_experts(even), even.plan.mesh) == pytest.approx(sent_bytes(on_experts(skewed), even.plan.mesh))
    assert even.times.span < skewed.times.span < more.times.span
    assert even.peaks[0].total < skewed.peaks[0].total < more.peaks[0].total
    products = [[op.work for op in at_experts(one) if isinstance(op.work, Gemm)] for one in (even, skewed)]
    rho = Routing(zipf=1.0).load(4, E).most_loaded
    for one, other in zip(*products, strict=True):
        assert slowest_rank(other).flops == pytest.approx(rho * one.flops, rel=0.01 if options else 1e-9), "whole rows"


def test_memory_is_that_of_the_most_loaded_rank() -> None:
    """Saved tensors of the experts grow by rho, all others are unchanged."""
    kept = [play("all-to-all", routing=routing).most_kept(0) for routing in ("balanced", SKEWED)]
    rho = Routing(zipf=1.0).load(4, E).most_loaded
    at_home = K * S * (H + 3 * F) * 2
    assert kept[1] - kept[0] == pytest.approx((rho - 1) * at_home, abs=8)


@pytest.mark.parametrize("routing", ["balanced", SKEWED, {"zipf": 3}])
def test_capacity_makes_all_ranks_alike(routing: Any) -> None:
    """The same times whatever the routing; c k T rows, whether the capacity is given in the plan or in the model."""
    one, other = play("all-to-all", capacity=1.25, routing=routing), play("all-to-all", moe={"capacity": 1.25})
    assert one.times == other.times and one.peaks == other.peaks
    assert one.plan.job.model.moe is not None and one.plan.job.model.moe.capacity == 1.25
    assert one.flops("F") == pytest.approx(one.wanted)
    assert [op.work.nbytes for op in on_experts(one) if isinstance(op.work, Collective)] == [1.25 * K * S * H * 2] * 4
    assumed = simulate(job("all-to-all", capacity=1.25, routing=routing)).assumed
    assert ("are dropped" in " ".join(assumed)) == (routing != "balanced")


def test_the_capacity_of_the_plan_overrides_that_of_the_model() -> None:
    """By default gshard's is two."""
    cases = [
        ("all-to-all", 1.0, 2.0, 1.0),
        ("gshard", None, None, 2.0),
        ("gshard", None, 1.25, 1.25),
        ("gshard", 1.5, 1.25, 1.5),
    ]
    for use, of_plan, of_model, c in cases:
        played = play(use, capacity=of_plan, moe={"capacity": of_model}, routing=SKEWED)
        sizes = {op.work.nbytes for op in on_experts(played) if isinstance(op.work, Collective)}
        assert sizes == {c * K * S * H * 2}
    assert play("dropless", moe={"capacity": 2.0}).plan.job.model.moe.capacity is None  # type: ignore[union-attr]
    assert not on_experts(play("gshard", view={"edp": 4, "ep": 1}))


def test_padding_and_dropping_are_no_work_of_the_model() -> None:
    """MFU counts the FLOPs of the model: the same with any capacity."""
    reports = [simulate(job("all-to-all", capacity=c)) for c in (None, 1.0, 4.0)]
    needed = [report.mfu["causal"] * report.step_time for report in reports]
    assert needed == pytest.approx([needed[0]] * 3)


def test_a_large_model_pays_for_uneven_experts() -> None:
    """Mixtral on 64 GPUs, an expert a GPU: the more uneven, the slower; places for twice the tokens cost more than even
    routing without them, and less than waiting for an expert that most tokens choose. Blocks fill up, unless they hold
    more rows than an expert gets (65536). The host waits for counts behind the launch of the kernel that orders tokens,
    which hides its launches: dropless experts take at least as long as even routing whose launches take no time."""

    def seconds(use: str, launch: float | None = None, **options: Any) -> float:
        schemes = [{"use": "data/zero-1", "over": "dp"}, {"use": f"expert/{use}", "over": "ep", **options}]
        plan = {"mesh": {"dp": 64}, "views": {"experts": {"edp": 8, "ep": 8}}, "schemes": schemes}
        model = {"preset": "mixtral-8x7b", "layers": 4}
        traits = {"framework": {"set": {"launch_s": launch}}} if launch is not None else {}
        job = {"model": model, "cluster": "dgx-h100:8", "batch": {"global": 64}, "plan": plan, **traits}
        return simulate(job, shared_work=shared).step_time

    shared = SharedWork()

    even, uneven, most = (seconds("all-to-all", routing={"zipf": s}) for s in (0, 0.5, 2))
    padded = seconds("gshard", routing={"zipf": 2})
    assert even < uneven < most
    assert even < padded < most
    assert padded == seconds("all-to-all", capacity=2.0)
    kernels = seconds("all-to-all", launch=0.0, routing={"zipf": 0})
    assert (1 - 1e-12) * kernels <= seconds("dropless") < 1.01 * even < uneven
    assert uneven < seconds("dropless", routing={"zipf": 0.5}) * 1.01
    assert seconds("dropless", block=100_000) > 1.1 * even


@pytest.mark.parametrize("use", ["all-to-all", "dropless", "gshard"])
def test_recomputed_experts_have_the_same_load(use: str) -> None:
    again = {"use": "memory/recompute-selective", "modules": ["moe"]}
    for more in ((), (again,)):
        played = play(use, more=more, routing=SKEWED)
        paces = {op.work.pace for op in at_experts(played) if isinstance(op.work, Gemm)}
        assert len(paces) == 1
    repeated = [op for op in at_experts(played) if op.phase == "R"]
    assert repeated and all(peak.left == 0 for peak in played.peaks)


def test_one_rank_computes_uneven_groups() -> None:
    """All experts on each rank: no rank waits for another, and the groups are the routed ones."""
    played = play("all-to-all", view={"edp": 4, "ep": 1}, routing=SKEWED)
    products = [op.work for op in at_experts(played) if isinstance(op.work, Gemm)]
    assert {work.pace for work in products} == {1.0}
    assert {len(work.groups) for work in products} == {E}
    assert simulate(job("all-to-all", view={"edp": 4, "ep": 1}, routing={"zipf": 3})).step_time > 0


def test_ranks_that_shard_experts_gather_the_tokens_of_the_most_loaded() -> None:
    view = {"edp": 1, "ep": 2, "etp": 2}
    mesh = {"dp": 2, "tp": 2}
    even, skewed = (play("all-to-all", mesh, view, routing=routing) for routing in ("balanced", SKEWED))
    sigma = Routing(zipf=1.0).load(2, E)
    for one, other in zip(on_experts(even), on_experts(skewed), strict=True):
        assert isinstance(one.work, Collective) and isinstance(other.work, Collective)
        pace = sigma.busiest_exchange if other.work.operation == "all_to_all" else sigma.most_loaded
        assert other.work == replace(one.work, pace=pace)


# ----------------------------------------------------------------------------------------------- schemes


@given(ep=st.sampled_from([2, 4, 8]), k=st.sampled_from([1, 2, 4]), c=st.sampled_from([0.5, 1.0, 1.25, 2.0, 4.0]))
def test_padded_volume_is_linear_in_capacity_and_choices(ep: int, k: int, c: float) -> None:
    """E C h b (P-1)/P each time, whatever the routing; c k = 1 moves each token once, and one choice half of two."""
    setting = ExpertLayer(ep=ep, top_k=k, capacity=c)
    once = setting.b * setting.s * setting.h * 2 * (ep - 1) / ep
    assert sent_per_layer(setting, "expert/gshard") == pytest.approx(4 * c * k * once)
    assert sent_per_layer(replace(setting, top_k=2 * k), "expert/gshard") == pytest.approx(8 * c * k * once)
    assert sent_per_layer(replace(setting, capacity=1 / k), "expert/gshard") == pytest.approx(4 * once)


@pytest.mark.parametrize(("group", "groups"), [(S, 1), (32, 2), (24, 3), (10**6, 1)])
def test_dense_dispatch_is_products_with_one_hot_matrices(group: int, groups: int) -> None:
    """2 T (c k S) h FLOPs for each of dispatch and combine forward; backward the same, and once more for the weights
    of results. All of it comes on top of the model's."""
    bare, dense = play("gshard"), play("gshard", einsum=group)
    each = 4 * 2 * S * (2 * K * S / groups) * H
    for phase, products in (("F", 2), ("B", 3), ("W", 0)):
        more = dense.flops(phase)["gemm"] - bare.flops(phase)["gemm"]
        assert more == pytest.approx(products * each)
    masks = 2 * S * (2 * K * S / groups) * 2
    results = 2 * K * S * H * 2
    assert dense.most_kept(0) - bare.most_kept(0) == pytest.approx(masks + results, abs=2)
    assert all(peak.left == 0 for peak in dense.peaks)
    assert not any(op.name.endswith("permute") and isinstance(op.work, Memory) for _, op in dense.instances())


def test_counts_travel_before_tokens() -> None:
    """E/P integers for each pair, once the router has chosen; tokens wait for them, copies of tokens do not."""
    played = play("dropless")
    counts, dispatch = on_experts(played)[:2]
    assert counts.work == Collective("all_to_all", E * 4, dispatch.work.axes)  # type: ignore[union-attr]
    assert [op.name for op in counts.after] == ["top_k"]
    assert counts in dispatch.after
    assert len(on_experts(played)) == 5
    permute = next(op for _, op in played.instances() if op.name == "permute")
    assert counts not in permute.after


@pytest.mark.parametrize(
    ("lengths", "routing", "view"),
    drawn_grid(
        [(64, 16), (520, 128), (512, 128)],
        [SKEWED, "balanced"],
        [{"edp": 1, "ep": 4}, {"edp": 2, "ep": 2}, {"edp": 1, "ep": 2, "etp": 2}],
    ),
)
def test_experts_compute_whole_blocks(lengths: tuple[int, int], routing: Any, view: dict[str, int]) -> None:
    """The groups of the most loaded rank are multiples of the block, each by less than one above its tokens."""
    seq, block = lengths
    config = job("dropless", {"dp": 2, "tp": 2}, view, routing=routing, block=block)
    played = play_job(config | {"batch": {"global": 2, "sequence": seq}})
    sigma = read_routing(routing).load(view["ep"], E)
    rows = 2 * seq * K / view["edp"] / E
    for op in at_experts(played):
        if isinstance(op.work, Gemm):
            sizes = [size for count, size in op.work.groups for _ in range(count)]
            mean = op.work.k if op.work.layout == "nt" else op.work.m
            assert mean == rows
            assert sizes == pytest.approx(
                [math.ceil(share * rows / block - 1e-9) * block for share in sigma.expert_loads]
            )
            assert op.work.pace == pytest.approx(sum(sizes) / rows / len(sizes))
    assert played.flops("F") == pytest.approx(played.wanted)


def test_folding_changes_only_the_traffic_of_experts() -> None:
    """Messages of attention do not depend on how experts are distributed; the all-to-alls of all ranks together carry
    the same bytes however tokens are sharded, and states are sharded over edp copies.
    """
    views = [{"edp": 4, "ep": 2}, {"edp": 1, "ep": 8}, {"edp": 2, "ep": 4}, {"edp": 1, "ep": 4, "etp": 2}]
    found = set()
    for view in views:
        played = play("all-to-all", {"dp": 2, "cp": 2, "tp": 2}, view)
        outside = [op for _, op in played.instances() if op.stream in ("tensor", "sequence")]
        assert any(isinstance(op.work, Attention) for _, op in played.instances())
        found.add(sent_bytes(outside, played.plan.mesh))
        assert math.prod(view.values()) == played.plan.mesh.world
    assert len(found) == 1
    meshes = [{"dp": 2, "cp": 1, "tp": 4}, {"dp": 2, "cp": 4, "tp": 1}, {"dp": 2, "cp": 2, "tp": 2}]
    lowered = [play("all-to-all", mesh, views[1]) for mesh in meshes]
    totals = [8 * sent_bytes(on_experts(one), one.plan.mesh) for one in lowered]
    assert totals == pytest.approx([4 * K * 2 * S * H * 2 * 7 / 8] * 3)
