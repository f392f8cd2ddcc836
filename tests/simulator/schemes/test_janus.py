"""Janus: experts that move to the tokens, fetched in the layer before: bytes, choices, times by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.costs.estimate import Estimate
from meshcast.simulator.engine.play import ENGINES
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Gemm, Op
from meshcast.validation.contract.of_experts import span
from meshcast.validation.contract.played import play_job
from tests.simulator.schemes.expert_layers import TIMES, E, F, K, all_sent, job, layer, moved
from tests.simulator.schemes.small_jobs import job_on
from tests.strategies import examples


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
    sizes = {"layers": layers, "hidden": 32, "heads": 4, "vocab": 64, "seq": 64, "tied": False}
    model = {**sizes, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32}}
    schemes = {"use": "data/ddp", "over": "dp"}, {"use": "expert/janus", "over": "ep", "when": "always", **options}
    framework = {"name": "megatron-core", "set": {"regather": regather, "cuda_graphs": True}}
    views = {"experts": {"edp": 1, "ep": 4}}
    return job_on({"dp": 4}, *schemes, samples=4, model=model, views=views, framework=framework)


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
    for number in range(layers):
        fetched = max(fetched, starts[number - 1] if number else 0.0) + fetching
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
