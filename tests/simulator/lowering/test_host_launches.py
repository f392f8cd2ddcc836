"""Launches of the host in layers with experts: waits for routers, CUDA graphs, and what the step takes."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.ir.graph_parts import SHARED, GraphModule
from meshcast.simulator.ir.host_calls import PassCalls
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Fragment, HostLaunch, Memory, Op
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.job.host_launches import NEWER_X86
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.lower import GRAPH_LAUNCHES, launch_graphs
from meshcast.simulator.lowering.scope import EXPERT_LAUNCHES, PADDED_LAUNCHES
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.shapes import LossShape
from meshcast.simulator.program.program import one_of
from meshcast.validation.contract.measure import backward_ops, forward_ops, lowered_stage
from meshcast.validation.contract.played import Played, play_job

EXPERTS, LAYERS = 8, 4
OUTSIDE_EXPERTS: tuple[GraphModule, ...] = ("attn", "moe_router", "moe_preprocess")


def job(launch: float, graphs: Any = False, capacity: float | None = None, **model: Any) -> dict[str, Any]:
    """A few layers on two GPUs with four experts each."""
    moe = {"experts": EXPERTS, "top_k": 2, "expert_ffn": 256, "capacity": capacity}
    shape = {"layers": LAYERS, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 512, "norm": "rmsnorm", "gated": True}
    traits = {"launch_s": launch, "cuda_graphs": graphs, "step_overhead_s": 0.0}
    return {
        "model": shape | {"moe": moe} | model,
        "cluster": {"gpu": "h100-sxm", "gpus": 2},
        "framework": {"name": "megatron-core", "set": traits},
        "batch": {"global": 8},
        "plan": {"mesh": {"dp": 2}, "views": {"experts": {"edp": 1, "ep": 2}}, "schemes": [
            {"use": "data/ddp", "over": "dp"}, {"use": "expert/all-to-all", "over": "ep"},
        ]},
    }  # fmt: skip


def launches(played: Played) -> dict[str, float]:
    """Launches by the ops that they launch, of one layer."""
    (layer,) = [run for run in one_of(played.stages[0]).unit_runs if run.count == LAYERS]
    ops = [*layer.fragment.forward, *layer.fragment.backward]
    return {op.name.removeprefix("launch "): op.work.number for op in ops if isinstance(op.work, HostLaunch)}


def test_the_host_waits_for_the_router_once_a_layer() -> None:
    """But not where a graph holds the step, or tokens beyond the capacity are dropped."""
    number = launches(play_job(job(1e-4)))
    assert [name for name in number if name.startswith("wait for")] == ["wait for top_k"]
    assert number["expert.up"] == 1 + EXPERT_LAUNCHES * (EXPERTS // 2) and number["proj"] == 1
    padded = play_job(job(1e-4, capacity=1.25))
    assert not launches(padded) and not launches(play_job(job(1e-4, graphs=True)))
    ups = [op for op in padded.counts if op.name == "expert.up" and not isinstance(op.work, Memory)]
    assert {op.launches for op in ups} == {1 + PADDED_LAUNCHES * (EXPERTS // 2)}


def test_kernels_that_are_not_fused_are_launched_one_by_one() -> None:
    slow = job(1e-4)
    eager, calls = load_framework("megatron-core").eager["router"], load_framework("megatron-core").calls["op"].forward
    assert not eager.fused
    number = launches(play_job(slow))
    assert number["top_k"] == eager.forward.kernels / calls and number["dtop_k"] == eager.backward.kernels / calls
    slow["framework"]["set"]["eager"] = {"router": {"fused": True}}
    assert launches(play_job(slow))["top_k"] == 1


def test_an_output_layer_in_pieces_is_launched_piece_by_piece() -> None:
    """Its kernels and those of the loss, forward and backward."""
    model, mesh = Model(layers=1, hidden=64, heads=4, vocab=128, seq=16), Mesh({})
    whole, cut = (
        {op: op.launches for op in forward_ops(stage) + backward_ops(stage)}
        for stage in (lowered_stage(model, mesh, ends=(True, True), loss=LossShape(pieces=n)) for n in (1, 3))
    )
    pieces = {op.name: launched for op, launched in cut.items() if launched != 1}
    assert set(whole.values()) == {1} and set(pieces.values()) == {3}
    assert set(pieces) == {"head", "dhead", "whead", "loss", "dloss"}


def test_the_hosts_of_other_gpus_have_another_pace() -> None:
    """A stated time is that of the job's own host."""
    jobs = {gpu: job(1e-4) | {"cluster": {"gpu": gpu, "gpus": 2}} for gpu in ("h100-sxm", "b200-sxm")}
    assert {load_job(config).framework.launch_s for config in jobs.values()} == {1e-4}
    for config in jobs.values():
        del config["framework"]["set"]["launch_s"]
    h100, b200 = (load_job(config).framework.launch_s for config in jobs.values())
    assert h100 == load_framework("megatron-core").launch_s and b200 == pytest.approx(NEWER_X86 * h100)


SHARED_EXPERTS = {"experts": EXPERTS, "top_k": 2, "expert_ffn": 256, "shared_experts": 1, "shared_ffn": 256}
IN_PARTS = {
    "attn": {"norm1", "qkv", "core", "proj", "residual1"},
    "moe_router": {"norm2", "router", "top_k", "shared.up", "shared.act", "shared.down"},
    "moe_preprocess": {"permute"},
    "moe": {"expert.up", "expert.act", "expert.down", "unpermute", "residual2"},
}
"""Operators of a layer with experts, by the module whose graph launches them in Megatron-Core; `moe` holds those of
`moe_router` and `moe_preprocess`, too."""


@pytest.mark.parametrize("modules", [("attn",), ("moe_router",), OUTSIDE_EXPERTS, ("attn", "moe"), ("moe",)])
def test_a_graph_launches_the_operators_of_its_modules_and_no_others(modules: tuple[GraphModule, ...]) -> None:
    """The host launches what is in no graph, and each graph with one of its ops."""
    graphed = set[str]().union(*(IN_PARTS[module] for module in modules))
    graphed |= IN_PARTS["moe_router"] | IN_PARTS["moe_preprocess"] if "moe" in modules else set()
    every = set[str]().union(*IN_PARTS.values())
    names = every & set(launches(play_job(job(1e-4, modules, moe=SHARED_EXPERTS))))
    assert names - graphed == every - graphed
    assert len(names & graphed) == 1


@given(st.lists(st.sampled_from(["", "attn", "router", SHARED, "mlp"]), max_size=12))
def test_ops_in_turn_share_a_graph(parts: list[str]) -> None:
    """A graph is launched with the first of its ops; what lies between two ops of a part is in its graph."""
    ops = [Op(f"op {i}", work=Memory("add", 1, 1), graph=part) for i, part in enumerate(parts)]
    launched = [op.launches for op in launch_graphs(Fragment(ops, [], {}, {}, {}, {})).forward]
    filled = list(parts)
    for i, part in enumerate(parts):
        sides = [side[0] for side in ([p for p in parts[i::-1] if p], [p for p in parts[i:] if p]) if side]
        filled[i] = part or (sides[0] if len(sides) == 2 and sides[0] == sides[1] else "")
    at = 0
    for inside, run in groupby(filled, key=bool):
        size = len(list(run))
        if not inside:
            assert launched[at : at + size] == [1.0] * size
        else:
            assert launched[at : at + size] == [0.0 if parts[at] == SHARED else GRAPH_LAUNCHES, *[0.0] * (size - 1)]
        at += size


def test_a_slow_host_paces_every_layer() -> None:
    """Kernels that end long before the next launch: the step is the time of all launches of a rank."""
    slow = 0.05
    report = simulate(job(slow))
    number = sum(op.work.number for _, op in play_job(job(slow)).instances(0) if isinstance(op.work, HostLaunch))
    assert report.step_time == pytest.approx(number * slow, rel=0.01)
    assert report.parts["host"] == pytest.approx(report.step_time, rel=0.02)


def test_the_wait_costs_time_only_where_the_host_is_slow() -> None:
    """Without the wait a host as fast as its GPU hides all launches; with it, the first kernels of each layer's experts
    begin a launch after the router, which nothing hides."""
    graphs, fast, slow = simulate(job(0.0, graphs=True)), simulate(job(1e-9)), simulate(job(1e-4))
    assert fast.step_time == pytest.approx(graphs.step_time, rel=1e-3)
    assert slow.step_time > 1.5 * graphs.step_time
    assert graphs.step_time < simulate(job(1e-4, OUTSIDE_EXPERTS)).step_time < slow.step_time
    waiting, padded = simulate(job(5e-5)), simulate(job(5e-5, capacity=1.0))
    assert waiting.parts["host"] > padded.parts["host"]


def packed(launch: float, documents: int | None = 128, fused: bool = False) -> dict[str, Any]:
    """The same layers without experts, with documents in a sequence and rotary embedding."""
    dense = job(launch, positions="rope")
    dense["model"] = {key: value for key, value in dense["model"].items() if key != "moe"}
    dense["framework"]["set"]["eager"] = {"rope": {"fused": fused}}
    dense["batch"] |= {"documents": documents}
    return dense | {"plan": {"mesh": {"dp": 2}, "schemes": [{"use": "data/ddp", "over": "dp"}]}}


def test_the_host_waits_for_all_before_it_reads_the_lengths_of_documents() -> None:
    """Once a layer, where several kernels rotate: a GPU that is slower than the host then waits for its launches."""
    waits = [name for name in launches(play_job(packed(1e-4))) if name.startswith("wait")]
    assert waits == ["wait before rope"]
    assert not launches(play_job(packed(1e-4, fused=True))) and not launches(play_job(packed(1e-4, documents=None)))
    pairs = [[simulate(packed(launch, fused=fused)).step_time for launch in (0.0, 2e-6)] for fused in (False, True)]
    (waiting, more), (fused, same) = pairs
    assert more - waiting > 5 * (same - fused) > 0


def test_each_phase_has_its_calls() -> None:
    assert [PassCalls(forward=1, backward=2, weights=3).of_phase(phase) for phase in "FBW"] == [1, 2, 3]
