"""Experts that work while tokens are on their way, experts that move: times by hand, bytes and choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, READ_BY_HOST, Collective, Exchange, Fragment, Gemm, Memory
from meshcast.simulator.lowering.lower import launch_on_host
from meshcast.simulator.lowering.rewrite import working_predecessors
from meshcast.simulator.report.report import Report
from meshcast.validation.contract.measure import waits_for
from meshcast.validation.contract.played import play_job
from tests.draws import drawn
from tests.simulator.schemes.expert_layers import TIMES, E, F, H, K, all_sent, job, layer, moved, taken

SHORT = st.integers(1, 64).map(lambda n: n / 256)


@cache
def tutel(degree: int) -> Fragment:
    return layer("expert/tutel", degree=degree)


def chunk_round(t: float, u: float, r: int) -> float:
    """PipeMoE's closed form, of whole times."""
    t, u = t / r, u / r
    return max(2 * r * t + max(0.0, u - (r - 1) * t), 2 * t + r * u)


# -------------------------------------------------------------------------------------------------------------- Tutel


@given(t=TIMES, u=TIMES, r=st.sampled_from([1, 2, 4, 8]), phase=st.sampled_from("FB"))
def test_consecutive_chunks_take_the_time_of_pipemoe(t: float, u: float, r: int, phase: str) -> None:
    found = taken(tutel(r), t, u, phase)
    assert found == pytest.approx(chunk_round(t, u, r), rel=1e-9)
    assert found >= max(2 * t, u) * (1 - 1e-9)


@given(t=TIMES, u=TIMES, sending=SHORT, starting=SHORT, r=st.sampled_from([1, 2, 4, 8]))
def test_every_part_pays_the_latency_of_its_exchange_and_kernels(
    t: float, u: float, sending: float, starting: float, r: int
) -> None:
    """a + b n/r seconds of either: the model by which PipeMoE chooses its degree."""
    found = taken(tutel(r), t, u, "F", sending, starting)
    assert found == pytest.approx(chunk_round(t + r * sending, u + r * starting, r), rel=1e-9)


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
    whole, cut = layer("expert/all-to-all"), tutel(r)
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


@pytest.mark.parametrize(("network", "ffn"), drawn([(400, 14336), (400, 64), (25, 2048), (3200, 512)], keep=2))
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
                "framework": {"set": {"launch_s": 0.0}},
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


def test_capacity_follows_the_most_popular_expert() -> None:
    """All slots are sent and computed: each expert has the number that the most popular one needs."""
    even, hot = layer("expert/tutel"), layer("expert/tutel", routing={"zipf": 1.0})
    shares = [1 / (j + 1) for j in range(E)]
    assert moved(hot)[0].nbytes / moved(even)[0].nbytes == pytest.approx(shares[0] * E / sum(shares), rel=0.05)


# ---------------------------------------------------------------------------------------------------------- FasterMoE


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
        token = 3 * 4 * alpha * H**2 / mm + 4 * H * 4 / net
        return loads[i] * token + i * transfers * 2 * alpha * H**2 * 4 / net

    wanted = next((i for i in range(p) if latency(i + 1) >= latency(i)), p)
    assert len(found) == wanted
    assert latency(wanted) <= latency(0)


def test_ranks_exchange_their_counts_and_gather_them_where_experts_may_be_shadowed() -> None:
    """8 bytes for each expert to its rank; of all ranks for the policy. The host waits for both, not for the router."""
    found = {}
    for shadow in (True, False):
        fragment = layer("expert/fastermoe", routing={"zipf": 1.0}, shadow=shadow)
        counted = [op for op in fragment.forward if op.tag == READ_BY_HOST]
        found[shadow] = {op.work.operation: op.work.nbytes for op in counted if isinstance(op.work, Collective)}
        waits = [op for op in launch_on_host(fragment, frozenset({"router"})).forward if op.name.startswith("wait")]
        assert [each.after[0].name for each in waits] == [op.name for op in counted]
    assert found == {True: {"all_to_all": 8 * E, "all_gather": 4 * 8 * E}, False: {"all_to_all": 8 * E}}


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
    steps = moved(fragment, "F")
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


# --------------------------------------------------------------------------------------------------------- whole jobs

USES = ("tutel", "fastermoe", "janus", "comet")


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
