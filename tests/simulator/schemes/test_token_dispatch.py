"""Token dispatch that sends each token once per node: the ops of a plan, their bytes, prices and resources."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load_cluster
from meshcast.hardware.topology import reach
from meshcast.simulator import simulate
from meshcast.simulator.costs.collectives.dispatch import Dispatch
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.kernel_prices import KernelTraits
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Exchange, Op
from meshcast.simulator.ir.routing import slowest_rank
from meshcast.simulator.lowering.rewrite import split_work
from meshcast.simulator.schemes.expert.hybrid_ep import exchange_buffer_bytes
from meshcast.validation.contract.of_experts import ExpertLayer
from meshcast.validation.contract.played import play_job
from tests.simulator.schemes.small_jobs import job_on

V3 = Exchange("dispatch", 4096, 7168, 8, 256, ("ep",), "fp8")


def spread(work: Exchange, ranks: int, nodes: int) -> Dispatch:
    """An exchange among ranks on so many nodes."""
    cluster = load_cluster({"gpu": "h800-sxm", "gpus": ranks, "gpus_per_node": ranks // nodes})
    return Dispatch.of(work, reach(cluster, range(ranks)))


def priced(ranks: int = 64, nodes: int = 8, gpu: str = "h800-sxm", **rates: float) -> Costs:
    cluster = {"gpu": gpu, "gpus": ranks, "gpus_per_node": ranks // nodes}
    return Costs(load_cluster(cluster), Mesh({"ep": ranks}), KernelTraits(rates))


# ------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize(("nodes", "wanted"), [(2, 1.99), (4, 3.61), (8, 5.29)])
def test_of_eight_experts_among_256_tokens_reach_so_many_nodes(nodes: int, wanted: float) -> None:
    work = replace(V3, most=nodes)
    assert spread(work, 8 * nodes, nodes).target_nodes == pytest.approx(wanted, abs=0.005)


def test_a_limit_of_nodes_chooses_among_their_experts_only() -> None:
    """4 of 8 nodes: as 4 nodes with half of the experts."""
    limited, alone = spread(V3, 64, 8), spread(replace(V3, experts=128), 32, 4)
    assert limited.target_nodes == pytest.approx(alone.target_nodes)
    assert limited.target_nodes < 4 < spread(replace(V3, most=8), 64, 8).target_nodes


@given(
    nodes=st.sampled_from([1, 2, 4]), each=st.sampled_from([1, 2]), own=st.sampled_from([1, 2]), topk=st.integers(1, 4)
)
def test_bytes_are_those_of_all_choices_counted_one_by_one(nodes: int, each: int, own: int, topk: int) -> None:
    """The distinct remote nodes and ranks of every set of experts that a token on the first rank may have."""
    ranks, experts = nodes * each, nodes * each * own
    topk = min(topk, experts)
    work = Exchange("combine", 10, 32, topk, experts, ("ep",), "bf16", most=nodes)
    chosen = [[expert // own for expert in taken] for taken in combinations(range(experts), topk)]
    far = [len({rank // each for rank in taken}) for taken in chosen]
    hops = [len(set(taken)) for taken in chosen]
    one, token = spread(work, ranks, nodes), 10 * 32 * 2
    # Every node is as likely to be a token's own as to be one of its experts'.
    assert one.network_bytes == pytest.approx(token * sum(far) / len(far) * (1 - 1 / nodes))
    # A copy comes to each distinct rank; of those on a node, one comes from the network.
    assert one.scale_up_bytes == pytest.approx(token * sum(hops) / len(hops) * (1 - nodes / ranks))
    assert one.network_bytes <= token * min(topk, nodes) * (1 - 1 / nodes) + 1e-9


def test_fp8_out_and_bf16_back_are_three_quarters_of_bf16_both_ways() -> None:
    """But for the scales, 4 bytes for 128 elements."""
    sent, back = replace(V3, dtype="fp8").nbytes, replace(V3, dtype="bf16").nbytes
    scales = V3.tokens * V3.topk * V3.hidden // 128 * 4
    assert (sent - scales + back) / (2 * back) == 0.75
    assert replace(V3, dtype="bf16").nbytes == 4096 * 8 * 7168 * 2


def test_parts_and_loads_count_tokens() -> None:
    assert [one.tokens for one in split_work(V3, 3)] == [1365, 1365, 1366]  # type: ignore[union-attr]
    assert slowest_rank(replace(V3, pace=1.5)).tokens == 6144


# --------------------------------------------------------------------------------------------------- the layer


def exchanges(setting: ExpertLayer, use: str = "expert/deepep") -> list[Op]:
    unit_run, _ = setting.layer(use)
    return [op for op in (*unit_run.fragment.forward, *unit_run.fragment.backward) if op.stream == "expert"]


def test_a_layer_has_four_exchanges_in_the_places_of_all_to_alls() -> None:
    """The gradient of a combination is a dispatch, that of a dispatch a combination."""
    setting = ExpertLayer(8, b=2, s=32, h=64, top_k=2)
    found, plain = exchanges(setting), exchanges(setting, "expert/all-to-all")
    works = [op.work for op in found]
    transfers = [(op.phase, work.operation, work.dtype) for op, work in zip(found, works, strict=True) if work]  # type: ignore[union-attr]
    assert transfers == [
        ("F", "dispatch", "fp8"),
        ("F", "combine", "bf16"),
        ("B", "dispatch", "bf16"),
        ("B", "combine", "bf16"),
    ]
    for work, other in zip(works, (op.work for op in plain), strict=True):
        assert isinstance(work, Exchange) and isinstance(other, Collective)
        assert (work.tokens, work.hidden, work.topk, work.experts) == (64, 64, 2, 8)
        assert replace(work, dtype="bf16").nbytes == other.nbytes
        assert work.axes == other.axes


MODEL = {
    "layers": 2, "hidden": 64, "heads": 4, "vocab": 64, "seq": 32, "tied": False,
    "moe": {"experts": 16, "top_k": 4, "expert_ffn": 32},
}  # fmt: skip


def job(use: str = "expert/deepep", sp: bool = True, memory: Any = None, **options: Any) -> dict[str, Any]:
    """Experts over all of dp x tp, on two nodes."""
    schemes = [
        {"use": "data/zero-1", "over": "dp"},
        {"use": f"tensor/megatron{'-sp' * sp}", "over": "tp"},
        {"use": use, "over": "ep", **options},
    ]
    schemes += [memory] if memory else []
    more = {"cluster": {"gpu": "h800-sxm", "gpus": 16, "gpus_per_node": 8}, "framework": {"name": "megatron-core"}}
    views = {"experts": {"edp": 1, "ep": 16}}
    return job_on({"dp": 8, "tp": 2}, *schemes, samples=16, model=MODEL, views=views, **more)


def test_recomputed_experts_send_their_tokens_again() -> None:
    again = play_job(job(memory={"use": "memory/recompute-selective", "modules": ["moe"]}))
    works = [op.work for _, op in again.instances() if isinstance(op.work, Exchange) and op.phase == "R"]
    assert {(work.operation, work.dtype) for work in works} == {("dispatch", "fp8"), ("combine", "bf16")}
    assert len(works) == 2 * 2 * again.plan.shape.m


def test_formats_nodes_and_multiprocessors_are_options() -> None:
    played = play_job(job(dispatch="bf16", gradients="fp8", most=1, sms=20))
    found = {(op.phase, op.work.operation): op.work for _, op in played.instances() if isinstance(op.work, Exchange)}
    assert [found[key].dtype for key in (("F", "dispatch"), ("B", "dispatch"), ("B", "combine"))] == [
        "bf16",
        "fp8",
        "bf16",
    ]
    assert {(work.most, work.sms) for work in found.values()} == {(1, 20)}


def test_uneven_routing_slows_token_dispatch() -> None:
    played = play_job(job(routing={"zipf": 1.0}))
    paces = {op.work.pace for _, op in played.instances() if isinstance(op.work, Exchange)}
    assert len(paces) == 1 and min(paces) > 1


def test_a_report_counts_exchanges_as_communication_of_experts() -> None:
    report = simulate(job())
    answer = report.to_dict()
    assert answer["breakdown_s"]["exposed"]["ep"] > 0
    borrowed = [line for line in answer["assumed"] if "dispatch" in line or "combine" in line]
    assert len(borrowed) == 2 and all("h100-sxm" in line for line in borrowed)
    plain = simulate(job("expert/all-to-all")).to_dict()["assumed"]
    assert not any("dispatch" in line for line in plain)


def test_contention_of_traffic_makes_a_step_no_shorter() -> None:
    assert simulate(job(), engine="shared").step_time >= simulate(job()).step_time * (1 - 1e-9)


# --------------------------------------------------------------------------------------------------- HybridEP


def test_hybrid_ep_dispatches_in_bf16_to_any_node_and_occupies_few_multiprocessors() -> None:
    played = play_job(job("expert/hybrid-ep"))
    works = {op.work for _, op in played.instances() if isinstance(op.work, Exchange)}
    assert {(work.library, work.sms, work.dtype) for work in works} == {("hybrid-ep", 16, "bf16")}
    assert all(spread(work, 16, 2).target_nodes == spread(replace(work, most=2), 16, 2).target_nodes for work in works)
    eight = play_job(job("expert/hybrid-ep", dispatch="fp8", sms=32))
    formats = {
        (op.phase, op.work.operation): op.work.dtype for _, op in eight.instances() if isinstance(op.work, Exchange)
    }
    assert formats[("F", "dispatch")] == "fp8" and formats[("B", "dispatch")] == formats[("F", "combine")] == "bf16"


def test_hybrid_ep_gathers_a_byte_for_each_token_and_expert_before_it_dispatches() -> None:
    """16 ranks, 16 tokens each of 16 experts; the backward pass finds its way by the same map."""
    instances = [op for _, op in play_job(job("expert/hybrid-ep")).instances()]
    gathers = [op for op in instances if op.name == "all_gather routing map"]
    dispatched = [op for op in instances if isinstance(op.work, Exchange) and op.work.operation == "dispatch"]
    assert {op.phase for op in gathers} == {"F"} < {op.phase for op in dispatched}
    assert len(gathers) == sum(op.phase == "F" for op in dispatched)
    (tokens,) = {op.work.tokens for op in dispatched if isinstance(op.work, Exchange)}
    assert {op.work.nbytes for op in gathers if isinstance(op.work, Collective)} == {16 * tokens * 16}


@pytest.mark.parametrize(
    ("domains", "wanted"), [(1, 4096 * 64 * (7168 * 2 + 256 * 4)), (8, 4096 * (64 + 7) * (7168 * 2 + 32 * 4))]
)
def test_the_buffer_of_hybrid_ep_is_that_of_its_documents(domains: int, wanted: int) -> None:
    """docs/Hybrid-EP_Implementation.md, section 4.2: 64 ranks, 256 experts, 4096 tokens of 7168 elements: 3.5 GiB and
    256 MiB in one NVLink domain; 3.5 GiB, 32 MiB, 392 MiB and 3.5 MiB in eight."""
    assert exchange_buffer_bytes(4096, 64, domains, 7168, 256) == wanted
    assert wanted / 2**30 == pytest.approx(3.75 if domains == 1 else (3.5 * 1024 + 32 + 392 + 3.5) / 1024)


@pytest.mark.parametrize("sp", [2, 1])
def test_the_buffer_of_hybrid_ep_lives_through_the_step(sp: int) -> None:
    """Two sequence-parallel ranks dispatch half a sequence each, four over two nodes."""
    given = job("expert/hybrid-ep")
    if sp == 1:
        given["plan"]["mesh"], given["plan"]["schemes"][1:2] = {"dp": 16}, []
    alone = {**given, "plan": {**given["plan"], "schemes": [*given["plan"]["schemes"][:-1]]}}
    alone["plan"]["schemes"].append({"use": "expert/all-to-all", "over": "ep"})
    stages = (simulate(one).to_dict()["memory"]["stages"][0] for one in (given, alone))
    hybrid, plain = (stage["by"]["buffers"] * 2**30 for stage in stages)
    assert hybrid - plain == pytest.approx(32 // sp * 17 * (64 * 2 + 16 // 2 * 4))


def test_hybrid_ep_is_faster_than_deepep_in_a_large_nvlink_domain() -> None:
    """GB200, 36 ranks, 16 multiprocessors: 613 GB/s in bf16, DeepEP 325 on 24 ranks (README_Hybrid-EP.md)."""
    costs = Costs(load_cluster("gb200-nvl72:18"), Mesh({"ep": 36, "dp": 2}))
    work = Exchange("dispatch", 4096, 7168, 8, 288, ("ep",), "bf16", 36, 16)
    assert costs.estimate(replace(work, library="hybrid-ep")).seconds < 0.75 * costs.estimate(work).seconds


# ----------------------------------------------------------------------------------------------------- prices


def test_a_node_needs_no_network() -> None:
    costs = priced(8, 1)
    use = costs.use(V3)
    assert use.links[2] == 0 and 0 < use.links[0] <= 1
    assert use.multiprocessors == pytest.approx(24 / 132)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_an_exchange_occupies_links_by_its_bytes(operation: str) -> None:
    costs, work = priced(), replace(V3, operation=operation, dtype="bf16")
    one, use = costs.estimate(work), costs.use(work)
    assert 0 < use.moving < one.seconds
    port = costs.cluster.scale_out.bandwidth
    assert use.links[2] * use.moving * port >= spread(work, 64, 8).network_bytes
    assert all(0 < share <= 1 for share in (use.links[0], use.links[2]))


@given(st.integers(1, 8192), st.sampled_from(["fp8", "bf16"]))
def test_more_tokens_and_wider_ones_take_longer(tokens: int, dtype: str) -> None:
    costs = priced()
    one = costs.estimate(replace(V3, tokens=tokens, dtype=dtype)).seconds
    assert costs.estimate(replace(V3, tokens=2 * tokens, dtype=dtype)).seconds > one
    assert costs.estimate(replace(V3, tokens=tokens, dtype="bf16")).seconds >= one
    assert math.isfinite(one)


def test_faster_links_make_it_faster() -> None:
    slow, fast = priced(communication=0.5), priced(communication=1.2)
    assert slow.estimate(V3).seconds > priced().estimate(V3).seconds > fast.estimate(V3).seconds


def test_within_a_node_it_is_no_slower_than_across() -> None:
    assert priced(64, 8).estimate(replace(V3, most=8)).seconds > priced(8, 1).estimate(V3).seconds


@pytest.mark.parametrize("gpu", ["h100-sxm", "b200-sxm", "a100-sxm-80", "mi300x"])
def test_every_gpu_has_a_price(gpu: str) -> None:
    assert 1e-5 < priced(16, 2, gpu).estimate(V3).seconds < 0.1
