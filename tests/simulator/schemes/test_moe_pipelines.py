"""Experts that work while tokens are on their way, experts that move: times by hand, bytes and choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware import load_cluster
from hardware.errors import PlanError
from simulator import simulate
from simulator.costs.costs import Costs, Estimate
from simulator.engine.play import ENGINES
from simulator.ir.mesh import Mesh
from simulator.ir.ops import COMPUTE, Attention, Collective, Exchange, Fragment, Gemm, Memory, Op
from simulator.lowering.lower import Lowering
from simulator.lowering.rewrite import working_predecessors
from simulator.models.architecture import Architecture
from simulator.models.model import Model
from simulator.report.report import Report
from simulator.schemes.expert.shared.token_dispatch import find_rounds
from tests.contract.measure import make, sent, waits_for
from tests.contract.of_experts import span
from tests.contract.played import play_job
from tests.strategies import examples

H, F, E, K, S = 32, 32, 32, 2, 64
TIMES = st.integers(1, 64).map(lambda n: n / 8)
SHORT = st.integers(1, 64).map(lambda n: n / 256)


def layer(use: str, p: int = 4, experts: int = E, seq: int = S, **options: Any) -> Fragment:
    """One layer of experts on p ranks, one sequence on each."""
    mesh = Mesh({"dp": p}, {"experts": {"edp": 1, "ep": p}}, ["dp"])
    scheme = make(use, mesh, ("ep",), **options)
    moe = {"experts": experts, "top_k": K, "expert_ffn": F}
    model = scheme.adapt_model(Model(layers=1, hidden=H, heads=4, vocab=64, seq=seq, mlp_bias=False, moe=moe))
    stage = Architecture(model, 1, seq, 64, p).stage(range(1), False, False)
    (unit_run,) = Lowering(mesh, [make("data/ddp", mesh, ("dp",)), scheme]).run(stage).unit_runs
    return unit_run.fragment


def moved(fragment: Fragment, phases: str = "FBW") -> list[Collective]:
    ops = [op for op in (*fragment.forward, *fragment.backward) if op.stream.startswith("expert")]
    ops = [op for op in ops if op.phase in phases]
    return [op.work for op in ops if isinstance(op.work, Collective)]


def taken(
    fragment: Fragment, exchange: float, computing: float, phase: str = "F", sending: float = 0, starting: float = 0
) -> float:
    """Seconds of a round, in which all tokens take `exchange` one way, and all kernels of the experts `computing`; in
    whatever parts, each takes `sending` and `starting` more."""
    plain = next(one for one in find_rounds(layer("expert/all-to-all"), ["dp"]) if one.out.phase == phase)
    assert isinstance(plain.out.work, Collective)
    whole, flops = plain.out.work.nbytes, sum(op.work.flops for op in plain.inside if op.work)

    def lasts(op: Op) -> float:
        if op.phase != phase or op.work is None:
            return 0.0
        if isinstance(op.work, Collective) and op.stream == "expert":
            return sending + exchange * op.work.nbytes / whole
        begins = starting if "expert.up" in op.name and isinstance(op.work, Gemm) else 0.0
        return begins + (computing * op.work.flops / flops if "expert" in op.name else 0.0)

    return span(fragment.forward if phase == "F" else fragment.backward, lasts)


def chunk_round(t: float, u: float, r: int) -> float:
    """PipeMoE's closed form, of whole times."""
    t, u = t / r, u / r
    return max(2 * r * t + max(0.0, u - (r - 1) * t), 2 * t + r * u)


# ------------------------------------------------------------------------------------------------------ Tutel


@given(t=TIMES, u=TIMES, r=st.sampled_from([1, 2, 4, 8]), phase=st.sampled_from("FB"))
def test_consecutive_chunks_take_the_time_of_pipemoe(t: float, u: float, r: int, phase: str) -> None:
    found = taken(layer("expert/tutel", degree=r), t, u, phase)
    assert found == pytest.approx(chunk_round(t, u, r), rel=1e-9)
    assert found >= max(2 * t, u) * (1 - 1e-9)


@examples(50)
@given(t=TIMES, u=TIMES)
def test_without_latency_more_parts_are_never_slower(t: float, u: float) -> None:
    times = [taken(layer("expert/tutel", degree=r), t, u) for r in (1, 2, 4, 8)]
    assert times[0] == pytest.approx(2 * t + u)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


@given(t=TIMES, u=TIMES, sending=SHORT, starting=SHORT, r=st.sampled_from([1, 2, 4, 8]))
def test_every_part_pays_the_latency_of_its_exchange_and_kernels(
    t: float, u: float, sending: float, starting: float, r: int
) -> None:
    """a + b n/r seconds of either: the model by which PipeMoE chooses its degree."""
    found = taken(layer("expert/tutel", degree=r), t, u, "F", sending, starting)
    assert found == pytest.approx(chunk_round(t + r * sending, u + r * starting, r), rel=1e-9)


@examples(50)
@given(t=TIMES, starting=SHORT)
def test_where_experts_take_longest_the_best_degree_is_the_root(t: float, starting: float) -> None:
    """r = sqrt(2 b_c n / a_e): of powers of two that are played, the best is one of the two around it."""
    times = {r: taken(layer("expert/tutel", degree=r), t, 1000 * t, "F", 0.0, starting) for r in (1, 2, 4, 8)}
    best, root = min(times, key=lambda r: times[r]), math.sqrt(2 * t / starting)
    assert best <= max(1, root * 2) and best >= min(8, root / 2)


def test_gradients_of_weights_follow_all_parts() -> None:
    """Even where a framework lets all-to-alls wait for them, as this one does."""
    whole = layer("expert/all-to-all").backward
    assert any(
        op.name.startswith("wexpert")
        for op in working_predecessors(next(op for op in whole if op.name.endswith("dsent")))
    )
    fragment = layer("expert/tutel", degree=4)
    backward = fragment.backward
    weights = [i for i, op in enumerate(backward) if op.name.startswith("wexpert")]
    kernels = [i for i, op in enumerate(backward) if op.name.startswith("dexpert") and op.stream == COMPUTE]
    assert min(weights) > max(kernels) and len(weights) == 2
    last = max((op for op in backward if op.stream == "expert"), key=backward.index)
    assert not {backward[i] for i in weights} & waits_for(last)


@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_chunks_have_the_work_and_bytes_of_the_whole(r: int) -> None:
    whole, cut = layer("expert/all-to-all"), layer("expert/tutel", degree=r)
    for phases in ("F", "B", "W"):
        flops, nbytes = (
            [sum(of(op) for op in (*one.forward, *one.backward) if op.phase in phases) for one in (whole, cut)]
            for of in (lambda op: op.work.flops if op.work else 0, lambda op: getattr(op.work, "nbytes", 0))
        )
        assert flops[0] == pytest.approx(flops[1]) and nbytes[0] == nbytes[1]


@pytest.mark.parametrize(("p", "near"), [(8, 2), (8, 4), (16, 8), (4, 2)])
def test_two_levels_send_the_same_over_the_network_in_fewer_messages(p: int, near: int) -> None:
    """Each of four exchanges: among the p/near ranks at one place of all nodes go the bytes that leave a node, in one
    message each, behind two copies."""
    flat, levels = layer("expert/all-to-all", p), layer("expert/tutel", p, degree=1, two_level=near)
    for one, two, three in zip(moved(flat), moved(levels)[::2], moved(levels)[1::2], strict=True):
        assert two.members == tuple(range(near)) and three.members == tuple(range(0, p, near))
        n = p // near
        assert len(three.members) - 1 == n - 1 <= p - near
        assert three.nbytes * (n - 1) / n == one.nbytes * (p - near) / p
    copies = [op for op in levels.forward if op.stream == "expert" and isinstance(op.work, Memory)]
    assert len(copies) == 2 * 2
    assert all(isinstance(op.work, Memory) and op.work.read == moved(flat)[0].nbytes for op in copies)


@pytest.mark.parametrize(("network", "ffn"), [(400, 64), (400, 14336), (25, 2048), (3200, 512)])
def test_an_adaptive_degree_is_that_of_the_fastest_layer(network: float, ffn: int) -> None:
    """Among experts on all ranks, nothing else is communicated: the shortest step has the fastest layers."""

    def steps(degree: Any) -> Report:
        return simulate(
            {
                "model": {
                    "layers": 2, "hidden": 2048, "heads": 16, "vocab": 512, "seq": 4096,
                    "moe": {"experts": 16, "top_k": 2, "expert_ffn": ffn},
                },
                "cluster": {
                    "gpu": "h100-sxm", "gpus": 16, "gpus_per_node": 8,
                    "inter": {"kind": "infiniband", "gbps_per_gpu": network},
                },
                "batch": {"global": 16},
                "plan": {
                    "mesh": {"dp": 16},
                    "views": {"experts": {"edp": 1, "ep": 16}},
                    "schemes": [
                        {"use": "data/ddp", "over": "dp"},
                        {"use": "expert/tutel", "over": "ep", "degree": degree},
                    ],
                },
            }
        )  # fmt: skip

    times = {degree: steps(degree).step_time for degree in (1, 2, 4, 8)}
    best, chosen = min(times, key=lambda degree: times[degree]), steps("auto")
    assert chosen.step_time == pytest.approx(times[best])
    assert [text for text in chosen.assumed if "degree" in text] == [
        f"expert/tutel with degree = {best}, whose layers take least"
    ]
    assert not [text for text in steps(2).assumed if "degree" in text]


def test_levels_divide_the_ranks() -> None:
    with pytest.raises(PlanError, match="two_level"):
        play_job(job("expert/tutel", two_level=3))


def test_capacity_follows_the_most_popular_expert() -> None:
    """All slots are sent and computed: each expert has the number that the most popular one needs."""
    even, hot = layer("expert/tutel"), layer("expert/tutel", routing={"zipf": 1.0})
    shares = [1 / (j + 1) for j in range(E)]
    assert moved(hot)[0].nbytes / moved(even)[0].nbytes == pytest.approx(shares[0] * E / sum(shares), rel=0.05)


# --------------------------------------------------------------------------------------------------- FasterMoE


def shadows(routing: Any, use: str = "expert/fastermoe", **options: Any) -> list[Collective]:
    return [work for work in moved(layer(use, routing=routing, **options), "F") if work.operation == "broadcast"]


def counts(tmp_path: Any, row: Sequence[float]) -> dict[str, str]:
    path = tmp_path / "counts.csv"
    path.write_text(",".join(map(str, row)))
    return {"counts": str(path)}


@pytest.mark.parametrize("transfers", [1, 2])
def test_even_routing_shadows_nothing(transfers: int) -> None:
    fragment = layer("expert/fastermoe", transfers=transfers, bw_mm=1.0)
    assert not any(work.operation in ("broadcast", "reduce") for work in moved(fragment))


def test_one_expert_with_all_tokens_is_shadowed_and_no_other(tmp_path: Any) -> None:
    """B_w far above alpha H: 512 tokens come to it, and its weights are as much as 32 of them."""
    routing = counts(tmp_path, [0] * 5 + [1] + [0] * (E - 6))
    fragment = layer("expert/fastermoe", routing=routing)
    (weights,) = shadows(routing)
    assert weights.nbytes == 2 * 2 * H * F
    assert [work.nbytes for work in moved(fragment, "W")] == [weights.nbytes]
    # No token leaves its rank any more, and all ranks do as much.
    steps = [work for work in moved(fragment) if work.operation in ("all_to_all", "shift")]
    assert sum(work.nbytes for work in steps) == 0
    assert {op.work.pace for op in fragment.forward if isinstance(op.work, Gemm) and op.work.groups} == {1.0}


@given(st.integers(1, 40), st.sampled_from([1, 2]), st.sampled_from([1e9, 1e11]), st.sampled_from([1e12, 1e15]))
def test_the_greedy_choice_is_the_rule_of_the_paper(tenths: int, transfers: int, net: float, mm: float) -> None:
    """Against the latencies themselves, with one expert on a rank: lat = 3 B 4 a H^2/bw_mm + 4 B H D/bw_net + i 2 a H^2
    D/bw_net, as long as it falls."""
    p, seq = 8, 16
    routing = {"zipf": tenths / 10}
    found = shadows(routing, p=p, experts=p, seq=seq, transfers=transfers, bw_net=net, bw_mm=mm)
    popular = [(j + 1) ** -(tenths / 10) for j in range(p)]
    loads = [p * seq * K * one / sum(popular) for one in popular] + [0.0]
    alpha = F / H

    def latency(i: int) -> float:
        token = 3 * 4 * alpha * H**2 / mm + 4 * H * 2 / net
        return loads[i] * token + i * transfers * 2 * alpha * H**2 * 2 / net

    wanted = next((i for i in range(p) if latency(i + 1) >= latency(i)), p)
    assert len(found) == wanted
    assert latency(wanted) <= latency(0)


def test_shadows_live_until_their_gradients_are_added_up() -> None:
    fragment = layer("expert/fastermoe", routing={"zipf": 2.0})
    (reduced,) = {op.name for op in fragment.backward if isinstance(op.work, Collective) and op.name == "dshadow 0"}
    held = [tensor_use for tensor_use in fragment.tensor_uses if tensor_use.key == "shadows"]
    number = len(shadows({"zipf": 2.0}))
    assert [tensor_use.nbytes for tensor_use in held] == [number * 4 * H * F] * 2
    assert held[0].op.name == "shadow 0" and held[1].op.name == f"dshadow {number - 1}"
    assert reduced and all(p.ready is held[1].op for p in fragment.params if p.view)


@pytest.mark.parametrize(("p", "group", "n"), [(8, 1, 8), (8, 2, 4), (8, 4, 2), (8, 8, 1), (4, 8, 1), (6, 4, 2)])
def test_steps_between_groups_send_the_bytes_of_an_all_to_all(p: int, group: int, n: int) -> None:
    """Step j goes to the j-th group further round; the first stays in the group."""
    options = {"experts": 24, "seq": 48}
    flat, steps = layer("expert/all-to-all", p, **options), layer("expert/fastermoe", p, group=group, **options)  # type: ignore[arg-type]
    size, out = p // n, moved(steps)[:n]
    mesh = Mesh({"dp": p})
    if n > 1:
        assert [work.by for work in out[1:]] == [size * j for j in range(1, n)]
        assert out[0].members == tuple(range(size))
    assert all_sent(steps, mesh) == pytest.approx(all_sent(flat, mesh))


@pytest.mark.parametrize(("p", "machine", "group"), [(8, 4, 4), (8, 4, 2), (8, 2, 4), (16, 8, 4), (4, 2, 1), (8, 4, 1)])
@pytest.mark.parametrize("zipf", [0.0, 1.0])
def test_a_gate_keeps_most_tokens_on_their_machine(p: int, machine: int, group: int, zipf: float) -> None:
    """14 % of the tokens leave it, with one of K copies; the exchange within a machine brings what is left."""
    options = {"group": group, "machine": machine, "outgoing": 0.14, "shadow": False, "routing": {"zipf": zipf}}
    fragment, copies = layer("expert/fastermoe", p, seq=256, **options), 256 * K * H * 2  # type: ignore[arg-type]
    steps = [op.work for op in fragment.forward if op.stream == "expert" and isinstance(op.work, Collective)]
    out = steps[: len(steps) // 2]
    size = max(n for n in range(1, group + 1) if machine % n == 0)
    between = [work for work in out if work.members is None]
    assert len(out) == p // size and len(between) == (p - machine) // size
    assert {work.by // machine for work in between} == set(range(1, p // machine))
    assert all(work.by % machine == 0 for work in between)
    assert sum(work.nbytes for work in between) == pytest.approx(0.14 / K * copies, rel=1e-3)
    if not zipf:
        near = sum(work.nbytes * ((size - 1) / size if work.by == 1 and not i else 1) for i, work in enumerate(out))
        near -= sum(work.nbytes for work in between)
        assert near == pytest.approx((1 - 0.14 / K) * copies * (machine - 1) / machine, rel=1e-2)
    whole = layer("expert/all-to-all", p, seq=256)
    flops = [sum(op.work.flops for op in f.forward if op.work) for f in (whole, fragment)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-6)


def test_a_gate_needs_whole_machines_and_their_experts() -> None:
    for options, rule in (
        ({"machine": 3}, "whole machines"),
        ({"machine": 2, "capacity": 1.0}, "without a capacity factor"),
    ):
        with pytest.raises(PlanError, match=rule):
            play_job(job("expert/fastermoe", outgoing=0.14, **options))
    few = job("expert/fastermoe", outgoing=0.14, machine=1)
    few["model"]["moe"]["top_k"] = 3
    with pytest.raises(PlanError, match="3 experts of one machine, which has 2"):
        play_job(few)


def test_a_gate_is_played_alike_by_all_engines() -> None:
    one = job("expert/fastermoe", outgoing=0.14, machine=2, group=1, routing={"zipf": 1.0})
    played = play_job(one)
    assert [peak.left for peak in played.peaks] == [0, 0]
    spans = [play_job(one, engine=engine).step.span for engine in ENGINES[:3]]
    assert spans == pytest.approx([spans[0]] * 3, rel=1e-9)


def all_sent(fragment: Fragment, mesh: Mesh) -> float:
    return sent([op for op in (*fragment.forward, *fragment.backward) if op.stream.startswith("expert")], mesh)


# ------------------------------------------------------------------------------------------------------- Janus


@examples(50)
@given(
    p=st.sampled_from([2, 4, 8]),
    machine=st.sampled_from([1, 2, 4, 8]),
    seq=st.sampled_from([8, 16, 32, 64, 128, 256, 1024]),
)
def test_experts_move_where_that_is_fewer_bytes_between_machines(p: int, machine: int, seq: int) -> None:
    """Counted on both lowered forms: out and back (n-1)/n of the tokens of a machine's ranks, or, once each, the
    experts of other machines.
    """
    tokens, experts, chosen = (
        layer("expert/janus", p, seq=seq, machine=machine, when=when) for when in ("never", "always", "auto")
    )
    m = min(machine, p)
    n = p // m
    leaving = m * (n - 1) / n * sum(work.nbytes for work in moved(tokens, "F"))
    fetched = [work for work in moved(experts, "F") if work.members is None]
    coming = (p - 1) / p * sum(work.nbytes for work in fetched)
    ratio = seq * K * 2 / (n * E / p * 2 * F)
    if n > 1:
        assert ratio == pytest.approx(leaving / coming, rel=1e-4)
    wanted = "all_gather" if ratio > 1 else "all_to_all"
    assert {work.operation for work in moved(chosen, "F")} == {wanted}


def test_moving_experts_changes_neither_work_nor_weights_of_a_rank() -> None:
    tokens, experts = (layer("expert/janus", when=when) for when in ("never", "always"))
    for phases in ("F", "B", "W"):
        one, other = (
            sum(op.work.flops for op in (*f.forward, *f.backward) if op.work and op.phase in phases)
            for f in (tokens, experts)
        )
        assert one == pytest.approx(other)
    held = [[(p.name, p.size, p.partial) for p in f.params] for f in (tokens, experts)]
    assert held[0] == held[1]
    assert {work.operation for work in moved(experts, "W")} == {"reduce_scatter"}


def test_experts_are_fetched_from_the_begin_of_the_layer() -> None:
    fragment = layer("expert/janus", when="always")
    assert [op.name for op in fragment.forward[:2]] == ["gather wexpert.up", "gather wexpert.down"]
    begin = list(fragment.entry.values())
    assert all(op.after == begin for op in fragment.forward[:2])


@examples(40)
@given(near=TIMES, far=TIMES, u=TIMES, p=st.sampled_from([4, 8]))
def test_kernels_begin_with_the_experts_of_the_own_machine(near: float, far: float, u: float, p: int) -> None:
    """While the others come: (near experts once they are there, then the rest) of every linear."""
    fragment = layer("expert/janus", p, when="always", machine=2, prefetch=False)
    names = [op.name for op in fragment.forward if op.stream.startswith("expert-fetch")]
    assert names == [f"gather wexpert.{kind} {place}" for kind in ("up", "down") for place in ("near", "far")]

    def lasts(op: Op) -> float:
        if op.stream.startswith("expert-fetch"):
            return near if op.stream == "expert-fetch" else far
        return u * op.work.batch / E if isinstance(op.work, Gemm) and op.work.groups else 0.0

    first, rest = u * 2 / p, u * (p - 2) / p
    # The kernels of near experts, of both linears, come before those of the others.
    begun = max(near + first, 2 * near) + first
    wanted = max(max(begun, far) + rest, 2 * far) + rest
    assert span(fragment.forward, lasts) == pytest.approx(wanted, rel=1e-9)
    whole = layer("expert/janus", p, when="always", machine=p)
    for one in (fragment, whole):
        assert sum(op.work.flops for op in one.forward if op.work) == pytest.approx(
            sum(op.work.flops for op in whole.forward if op.work)
        )
    assert all_sent(fragment, Mesh({"dp": p})) == pytest.approx(all_sent(whole, Mesh({"dp": p})), rel=1e-3)


def fetching_job(layers: int, regather: bool = False, **options: Any) -> dict[str, Any]:
    return {
        "model": {
            "layers": layers, "hidden": 32, "heads": 4, "vocab": 64, "seq": 64, "tied": False,
            "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32},
        },
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "framework": {"name": "megatron-core", "set": {"regather": regather, "cuda_graphs": True}},
        "batch": {"global": 4},
        "plan": {
            "mesh": {"dp": 4},
            "views": {"experts": {"edp": 1, "ep": 4}},
            "schemes": [
                {"use": "data/ddp", "over": "dp"},
                {"use": "expert/janus", "over": "ep", "when": "always", **options},
            ],
        },
    }  # fmt: skip


@examples(15)
@given(fetching=st.integers(0, 64), attention=st.integers(1, 16), experts=st.integers(1, 16), layers=st.integers(1, 5))
def test_experts_are_fetched_during_the_layer_before(fetching: int, attention: int, experts: int, layers: int) -> None:
    """The fetch of a layer begins with the layer before, once the fetch before has ended; that of the first layer with
    the embedding, which takes no time.
    """

    def price(work: Any) -> Estimate:
        seconds = {"all_gather": fetching / 2}.get(getattr(work, "operation", ""), 0.0)
        if isinstance(work, Gemm) and work.groups:
            seconds = experts / 2
        return Estimate(attention if isinstance(work, Attention) else seconds, 0.0)

    starts, begin, fetched = [], 0.0, 0.0
    for layer in range(layers):
        fetched = max(fetched, starts[layer - 1] if layer else 0.0) + fetching
        starts.append(begin)
        begin = max(begin + attention, fetched) + experts
    for engine in ENGINES[:3]:
        played = play_job(fetching_job(layers), price, engine=engine)
        forward = [i for i, op in enumerate(played.flat.ops) if op.phase == "F" and op.work and op.stream == COMPUTE]
        assert max(played.times.end[i] for i in forward) == pytest.approx(begin, rel=1e-9)


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("machine", [8, 2])
def test_fetching_ahead_moves_the_same_bytes_and_no_later(regather: bool, machine: int) -> None:
    jobs = [fetching_job(4, regather, prefetch=ahead, machine=machine) for ahead in (True, False)]
    early, late = map(play_job, jobs)
    spans = [play_job(jobs[0], engine=engine).step.span for engine in ENGINES[:3]]
    assert spans == pytest.approx([spans[0]] * 3, rel=1e-9)
    sizes = [
        sorted(op.work.nbytes for _, op in played.instances() if isinstance(op.work, Collective))
        for played in (early, late)
    ]
    assert sizes[0] == sizes[1]
    assert early.times.span <= late.times.span
    assert [peak.left for peak in (*early.peaks, *late.peaks)] == [0, 0]
    weights = 8 * (2 * 32 * 32 + 32 + 32) * 2
    # Where gathered weights are kept for the backward pass, the last layer holds those of all layers either way.
    assert 0 <= early.peaks[0].total - late.peaks[0].total <= weights
    counts = [run.count for run in early.stages[0].unit_runs if run.name == "layer"]
    assert counts == ([1, 2, 1] if regather else [3, 1])


@pytest.mark.parametrize("use", ["tensor/megatron", "tensor/megatron-sp"])
def test_gathers_of_tokens_are_no_fetches(use: str) -> None:
    """Without sequence parallelism results are gathered over tensor ranks; experts that stay are as any others."""
    jobs = [job("expert/janus", when="never"), job("expert/all-to-all")]
    for one in jobs:
        one["plan"]["views"] = {"experts": {"edp": 4, "ep": 4}}
        one["plan"]["schemes"][2]["use"], one["plan"]["schemes"][3]["over"] = use, "ep"
    found = [play_job(one) for one in jobs]
    assert found[0].times == found[1].times


# ------------------------------------------------------------------------------------------------------- Comet


@given(t=TIMES, u=TIMES, tile=st.sampled_from([4, 8, 16, 32]), phase=st.sampled_from("FB"))
def test_all_but_a_tile_is_hidden(t: float, u: float, tile: int, phase: str) -> None:
    fragment, g = layer("expert/comet", tile=tile, panel=tile), u / 2
    rows, panels = S * K // tile, H // tile
    wanted = max(g + t / rows, t) + max(g + t / panels, t)
    assert taken(fragment, t, u, phase) == pytest.approx(wanted, rel=1e-9)


def test_no_product_is_cut() -> None:
    plain, fused = layer("expert/all-to-all"), layer("expert/comet", tile=8, panel=8, sms=0)
    products = [[op.work for op in f.forward + f.backward if isinstance(op.work, Gemm)] for f in (plain, fused)]
    assert products[0] == products[1]
    assert sum(work.nbytes for work in moved(plain)) == sum(work.nbytes for work in moved(fused))
    assert len(moved(fused)) == 2 * len(moved(plain))


def divided(use: str, p: int = 4, ep: int = 1, **options: Any) -> Fragment:
    """One layer of experts on p ranks, in `ep` groups whose ranks share every expert; one sequence on each rank."""
    mesh = Mesh({"dp": p}, {"experts": {"edp": 1, "ep": ep, "etp": p // ep}}, ["dp"])
    scheme = make(use, mesh, ("ep", "etp"), **options)
    moe = {"experts": E, "top_k": K, "expert_ffn": F}
    model = Model(layers=1, hidden=H, heads=4, vocab=64, seq=S, mlp_bias=False, moe=moe)
    stage = Architecture(model, 1, S, 64, p).stage(range(1), False, False)
    (unit_run,) = Lowering(mesh, [make("data/ddp", mesh, ("dp",)), scheme]).run(stage).unit_runs
    return unit_run.fragment


TOKENS = S * H * 2
"""Bytes of the tokens of a rank, in bf16."""


@pytest.mark.parametrize(("p", "ep"), [(4, 1), (8, 1), (4, 2), (2, 2)])
def test_divided_experts_gather_every_token_once(p: int, ep: int) -> None:
    """Not its copies, which all other schemes gather, as Megatron-Core's token dispatcher does: it permutes first."""
    fused = divided("expert/comet", p, ep, dispatch="all-gather")
    weights = p * S * K * 4
    for issued, names in ((fused.forward, ("all_gather", "all_gather")), (fused.backward, ("all_gather",))):
        gathered = [op.work for op in issued if isinstance(op.work, Collective) and op.work.operation in names]
        assert [work.nbytes for work in gathered] == [p * TOKENS, *([weights] if issued is fused.forward else [])]
        summed = [op for op in issued if isinstance(op.work, Collective) and op.work.operation == "reduce_scatter"]
        assert sum(op.work.nbytes for op in summed if op.name.endswith(("expert.down", "dsent"))) == p * TOKENS  # type: ignore[union-attr]
    copies = divided("expert/all-to-all", p, 1)
    assert [work.nbytes for work in moved(copies, "F")] == [p * K * TOKENS] * 2
    products = [
        [op.work for op in f.forward if isinstance(op.work, Gemm)]
        for f in (divided("expert/all-to-all", p, ep), divided("expert/comet", p, ep, dispatch="all-gather", sms=0))
    ]
    assert products[0] == products[1]


@given(c=TIMES, u=TIMES, panel=st.sampled_from([4, 8, 32]), phase=st.sampled_from("FB"))
def test_gathers_hide_behind_the_first_product_and_sums_behind_the_last(
    c: float, u: float, panel: int, phase: str
) -> None:
    """A rank starts with its own tokens: max(g, c); and sends all panels but the last: max(g, c (n - 1)/n) + c/n."""
    fragment, n, g = divided("expert/comet", panel=panel), H // panel, u / 2
    issued = fragment.forward if phase == "F" else fragment.backward
    flops = sum(op.work.flops for op in issued if op.phase == phase and isinstance(op.work, Gemm) and op.work.groups)

    def lasts(op: Op) -> float:
        if op.phase != phase or op.work is None:
            return 0.0
        if isinstance(op.work, Collective):
            # The router's weights take no time.
            return 0.0 if "chosen" in op.name else c * op.work.nbytes / (4 * TOKENS)
        return u * op.work.flops / flops if isinstance(op.work, Gemm) and op.work.groups else 0.0

    wanted = max(g, c) + max(g, c * (n - 1) / n) + c / n
    assert span(issued, lasts) == pytest.approx(wanted, rel=1e-9)


def test_tokens_come_in_the_way_that_sends_fewer_bytes() -> None:
    """P Q - 1 tokens for each of a rank's, or k ((P - 1)/P + Q - 1) copies."""
    for p, ep in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)):
        mesh = Mesh({"dp": p}, {"experts": {"edp": 1, "ep": ep, "etp": p // ep}}, ["dp"])
        ways = {}
        for way in ("auto", "all-to-all", "all-gather"):
            ops = [op for op in divided("expert/comet", p, ep, dispatch=way).forward if op.stream == "expert"]
            ways[way] = sent([op for op in ops if "chosen" not in op.name], mesh)
        assert ways["auto"] == min(ways.values()), (p, ep, ways)


def test_gathered_tokens_are_the_same_however_uneven_the_routing() -> None:
    even, hot = (
        divided("expert/comet", 4, 2, dispatch="all-gather", routing=routing) for routing in ("balanced", {"zipf": 1.5})
    )
    assert moved(even) == moved(hot)
    products = [op.work for op in hot.forward if isinstance(op.work, Gemm) and op.work.groups]
    assert all(work.pace > 1 for work in products)
    sizes = [
        {use.key: use.nbytes for use in f.tensor_uses if use.key.startswith(("norm2@", "sent@", "d:sent@"))}
        for f in (even, hot)
    ]
    assert sizes[0] == sizes[1]


def test_multiprocessors_of_a_fused_kernel_are_shared() -> None:
    """Copy engines bring gathered tokens; some multiprocessors of the last GEMM send results, and compute nothing."""
    fragment = divided("expert/comet", 4, 1, sms=20)
    products = [op.work for op in fragment.forward if isinstance(op.work, Gemm) and op.work.groups]
    assert [work.sms for work in products] == [0, 20]
    costs = Costs(load_cluster({"gpu": "h100-sxm", "gpus": 4}), Mesh({"dp": 4}))
    plain, fused = replace(products[1], sms=0), products[1]
    assert costs.estimate(fused).seconds == pytest.approx(costs.estimate(plain).seconds * 132 / 112)
    gather = next(op.work for op in fragment.forward if op.name == "all_gather sent")
    assert costs.use(gather).multiprocessors == 0 < costs.use(replace(gather, sms=None)).multiprocessors
    with pytest.raises(PlanError, match="sms below 132"):
        play_job(job("expert/comet", sms=132))


# --------------------------------------------------------------------------------------------------- whole jobs

USES = ("tutel", "fastermoe", "janus", "comet")


def job(use: str, *more: dict[str, Any], ep: bool = True, **options: Any) -> dict[str, Any]:
    schemes = [
        {"use": "pipeline/1f1b", "over": "pp"},
        {"use": "data/zero-1", "over": "dp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
        {"use": use, "over": ["ep", "etp"], **options},
    ]
    return {
        "model": {
            "layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 32, "tied": False,
            "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1},
        },
        "cluster": {"gpu": "h100-sxm", "gpus": 32},
        "framework": {"name": "megatron-core"},
        "batch": {"global": 32},
        "plan": {
            "mesh": {"pp": 2, "dp": 8, "tp": 2},
            "views": {"experts": {"edp": 2, "ep": 4, "etp": 2}},
            "schemes": [*schemes, *more],
        },
    }  # fmt: skip


@pytest.mark.parametrize("use", [*USES, "deepep"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-blockwise"])
@pytest.mark.parametrize("again", [None, "full", "moe"])
def test_whole_steps_do_all_work_and_give_memory_back(use: str, precision: str, again: str | None) -> None:
    """With experts that are divided too, in fp8, and computed again."""
    memory = {
        None: [],
        "full": [{"use": "memory/recompute-full"}],
        "moe": [{"use": "memory/recompute-selective", "modules": ["moe"]}],
    }[again]
    played, plain = (
        play_job({**job(f"expert/{name}", *memory), "precision": precision}) for name in (use, "all-to-all")
    )
    assert [peak.left for peak in played.peaks] == [0, 0]
    for phase in "FBWR":
        assert played.flops(phase) == pytest.approx(plain.flops(phase))


@pytest.mark.parametrize(
    "view", [{"edp": 2, "ep": 4, "etp": 2}, {"edp": 1, "ep": 1, "etp": 16}, {"edp": 4, "ep": 1, "etp": 4}]
)
@pytest.mark.parametrize("precision", ["bf16", "fp8-blockwise"])
@pytest.mark.parametrize("again", [None, "full", "moe"])
def test_gathered_tokens_in_whole_steps(view: dict[str, int], precision: str, again: str | None) -> None:
    memory = {
        None: [],
        "full": [{"use": "memory/recompute-full"}],
        "moe": [{"use": "memory/recompute-selective", "modules": ["moe"]}],
    }[again]
    jobs = [job("expert/comet", *memory, dispatch="all-gather", panel=8), job("expert/all-to-all", *memory)]
    for one in jobs:
        one["plan"]["views"] = {"experts": view}
        one["precision"] = precision
    played, plain = (play_job(one) for one in jobs)
    assert [peak.left for peak in played.peaks] == [0, 0]
    for phase in "FBWR":
        assert played.flops(phase) == pytest.approx(plain.flops(phase))
    spans = [play_job(jobs[0], engine=engine).step.span for engine in ENGINES[:3]]
    assert spans == pytest.approx([spans[0]] * 3, rel=1e-9)


@pytest.mark.parametrize("use", [*USES, "deepep"])
def test_uneven_routing_is_played(use: str) -> None:
    even, hot = (play_job(job(f"expert/{use}", routing=routing)) for routing in ("balanced", {"zipf": 1.5}))
    assert hot.times.span >= even.times.span * (1 - 1e-9)
    if use != "tutel":  # whose capacity grows with the most popular expert
        assert hot.flops("F") == pytest.approx(even.flops("F"))
    assert [peak.left for peak in hot.peaks] == [0, 0]


@pytest.mark.parametrize("use", USES)
def test_nothing_but_collectives_of_experts_changes(use: str) -> None:
    """Messages of other schemes are unchanged."""
    found = [
        sorted(
            (op.stream, op.work.operation, op.work.nbytes)
            for _, op in play_job(job(f"expert/{name}")).instances()
            if isinstance(op.work, Collective) and not op.stream.startswith(("expert", "data"))
        )
        for name in (use, "all-to-all")
    ]
    assert found[0] == found[1]
    assert not any(isinstance(op.work, Exchange) for _, op in play_job(job(f"expert/{use}")).instances())
