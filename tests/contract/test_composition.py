"""Every scheme in a plan with all other families: nothing is lost, and nothing is done or held twice."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import product
from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.capabilities import KeepsOwnStates, KeepsSecondaryShards, ShardsStates, schemes_with
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.ops import HostUpdate, Memory
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.program import one_of
from tests.contract.composed import AXES, SCHEMES, chunks_for, entries_with
from tests.contract.measure import saved
from tests.contract.of_sequence import has_frames, kernels_for
from tests.contract.played import FREE, PAID, Played, copies_of, play_job
from tests.contract.step_dataflow import step_problems
from tests.strategies import some

STATES = ("parameters", "gradients", "optimizer")

MOE = {"experts": 8, "top_k": 2, "expert_ffn": 24, "shared_experts": 1, "first_dense": 1, "every": 2}


def job_with(use: str, overlap: bool) -> dict[str, Any]:
    """Four micro-batches through two devices, with experts on four ranks."""
    sizes = {"layers": 8, "hidden": 64, "heads": 8, "kv_heads": 4, "vocab": 128, "seq": 32}
    kind_of_gpt = {"positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False}
    entries, mesh = entries_with(use)
    gpus = math.prod(mesh.values())
    replicas = math.prod(size for axis, size in mesh.items() if axis.startswith("dp"))
    framework = {"overlap": {"dp": overlap, "pp": overlap}, "attention": kernels_for(use)}
    return {
        "model": {**sizes, **kind_of_gpt, **({"frames": 4} if has_frames(find_scheme(use)) else {}), "moe": MOE},
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": {"name": "megatron-core", "set": framework},
        "batch": {"global": 16 * replicas, "micro": 4},
        "plan": {"mesh": mesh, "views": {EXPERTS: {"edp": gpus // 2 // 4, "ep": 4}}, "schemes": entries},
    }


ALL_AT_ONCE = "pipeline x fsdp x ring x megatron-sp x experts"
"""A plan that has a demanding scheme of every family."""


def all_at_once(overlap: bool) -> dict[str, Any]:
    job = job_with("pipeline/interleaved-1f1b", overlap)
    plan = job["plan"]
    others = {"data/zero-1": "data/fsdp", "sequence/all-gather": "sequence/ring"}
    schemes = [{**entry, "use": others.get(entry["use"], entry["use"])} for entry in plan["schemes"]]
    schemes[0]["chunks"] = 2
    return {**job, "plan": {**plan, "schemes": schemes}}


PLANS = [
    pytest.param((use, overlap), id=f"{use}-{overlap}", marks=() if overlap else pytest.mark.slow)
    for use in (*SCHEMES, ALL_AT_ONCE)
    for overlap in (True, False)
]
"""Jobs with communication that is hidden; those without are slow tests."""


SHARED = SharedWork()
"""Plans of this module differ in one scheme or two, and share the units that these leave as they are."""

Composed = tuple[str, dict[str, Any], Played, float]


@pytest.fixture(scope="module", params=PLANS)
def composed(request: pytest.FixtureRequest) -> Composed:
    """A scheme, its job, the step, and the duration of a step with free communication."""
    use, overlap = request.param
    job = all_at_once(overlap) if use == ALL_AT_ONCE else job_with(use, overlap)
    return use, job, play_job(job, shared=SHARED), play_job(job, FREE, engine="matrices", shared=SHARED).step.span


def test_every_pass_is_made_once(composed: Composed) -> None:
    use, _, played, _ = composed
    shape, ways = played.plan.shape, played.plan.schedule.directions
    assert (shape.p, shape.v) == (2, (2 if use == ALL_AT_ONCE else chunks_for(use)) * ways)
    kinds = Counter(action.kind for action in played.program.timetable.actions)
    assert (
        kinds["F"] == kinds["BW"] + kinds["W"] == shape.stages * played.plan.passes.played_shape.m * shape.slices / ways
    )
    assert kinds["B"] == kinds["W"]


def test_data_flow(composed: Composed) -> None:
    _, _, played, _ = composed
    assert step_problems(played) == []


def test_memory_is_given_back_and_flops_are_conserved(composed: Composed) -> None:
    _, _, played, _ = composed
    assert all(peak.left == 0 for peak in played.peaks)
    wanted = played.wanted
    assert played.flops("F", dispatch=False) == pytest.approx(wanted)
    backward = {"gemm": 2 * wanted["gemm"], "attention": 2.5 * wanted["attention"]}
    assert played.flops("B", "W", dispatch=False) == pytest.approx(backward)


def test_all_families_communicate_and_weights_are_updated(composed: Composed) -> None:
    _, _, played, free = composed
    assert played.times.span > free > 0
    families = {op.stream.partition("-")[0] for op in played.counts} - {"memory", "host"}
    assert families == {"compute", *AXES}
    assert any(isinstance(op.work, Memory | HostUpdate) and op.phase == "U" for op in played.counts)


def test_all_parameters_are_held_as_often_as_is_declared(composed: Composed) -> None:
    """Each way through the devices has weights of its own."""
    _, _, played, _ = composed
    plan = played.plan
    once = 0.0
    for device in range(2):
        for param in played.held(device):
            assert param.size * played.ranks / copies_of(param, plan) == pytest.approx(param.total)
            once += param.total
    assert once == pytest.approx(plan.schedule.directions * plan.model_parts.model.parameters)


def test_resting_states_are_sharded_as_declared(composed: Composed) -> None:
    """bf16 weights, fp32 gradients, fp32 main weights and two moments; sharded weights are the main weights."""
    _, _, played, _ = composed
    (scheme,) = schemes_with(played.plan.schemes, ShardsStates)
    for device in range(2):
        wanted: dict[str, float] = defaultdict(float)
        for param in played.held(device):
            cut = {state: played.plan.mesh.size(scheme.shards_at_rest(state, param)) for state in STATES}
            main = 4 if cut["parameters"] > 1 and scheme.updates_weights else 0
            for state, nbytes in (("parameters", main or 2), ("gradients", 4), ("optimizer", 12 - main)):
                wanted[state] += nbytes * param.size / cut[state] if not scheme.offloaded_to(state) else 0
            if isinstance(scheme, KeepsSecondaryShards) and (second := scheme.secondary_shards(param)) is not None:
                wanted["parameters"] += 2 * param.size / played.plan.mesh.size(second)
            if isinstance(scheme, KeepsOwnStates):
                wanted["optimizer"] += scheme.own_states(param).get("gpu", 0.0)
        assert played.resting(device) == pytest.approx(wanted)


INSIDE = [use for use in SCHEMES if use.partition("/")[0] not in ("pipeline", "memory")]


@pytest.mark.parametrize(("regather", "use"), some([*product((True, False), INSIDE)], 8))
def test_full_recompute_keeps_the_inputs_of_layers_alone(use: str, regather: bool) -> None:
    """Whatever a scheme does inside a layer, its result is discarded with the rest."""
    job = job_with(use, overlap=True)
    job["framework"]["set"]["regather"] = regather
    schemes = [entry for entry in job["plan"]["schemes"] if not entry["use"].startswith("memory/")]
    whole = {**job["plan"], "schemes": [*schemes, {"use": "memory/recompute-full"}]}
    stages, _ = lower_stages(resolve_plan(load_job({**job, "plan": whole}), price=PAID))
    for stage_ops in stages:
        for unit_run in one_of(stage_ops).unit_runs:
            assert saved(unit_run) == unit_run.nbytes or unit_run.name != "layer"
