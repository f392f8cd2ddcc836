"""Every scheme in a plan with all other families: nothing is lost, and nothing is done or held twice."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.capabilities import KeepsOwnStates, KeepsSecondaryShards, ShardsStates, schemes_with
from meshcast.simulator.ir.ops import COMPUTE, HostUpdate, Memory
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.program import one_of
from meshcast.validation.contract.composed import AXES, chunks_for, complete_schemes, job_with
from meshcast.validation.contract.laws import STEP_LAWS
from meshcast.validation.contract.measure import saved_bytes
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn_grid
from tests.strategies import predicts_weights

STATES = ("parameters", "gradients", "optimizer")

ALL_AT_ONCE = "pipeline x fsdp x ring x megatron-sp x experts"
"""A plan that has a demanding scheme of every family."""

VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "defaults": {"memory": "memory/recompute-full"}, "set": {"regather": True}},
    {
        "defaults": {"data": "data/fsdp"},
        "options": {"memory/recompute-selective": {"modules": ["attention", "mlp", "moe"]}},
    },
    {"precision": "fp8-blockwise", "defaults": {"memory": "memory/recompute-full"}},
    {
        "set": {"attention": "unfused", "loss": {"whole_vocabulary": True}},
        "defaults": {"pipeline": "pipeline/zb-h1"},
    },
    {"precision": "fp8-delayed", "defaults": {"tensor": "tensor/megatron", "sequence": "sequence/ring"}},
    {"options": {"memory/recompute-selective": {"modules": ["core_attn", "moe"]}}, "set": {"regather": True}},
]
"""Changes of the other families, of number formats and of kernels."""

OF_ALL_REDUCES = ("tensor/domino", "tensor/coconet")
"""Schemes that accompany tensor parallelism without sequence parallelism."""


def job_of(use: str, variant: int) -> dict[str, Any]:
    """A scheme in a variant of the job; in the job itself, where it refuses the variant."""
    if use == ALL_AT_ONCE:
        others = {"data": "data/fsdp", "sequence": "sequence/ring"}
        return job_with(
            "pipeline/interleaved-1f1b", defaults=others, options={"pipeline/interleaved-1f1b": {"chunks": 2}}
        )
    reduced = {"tensor": "tensor/megatron"} if use in OF_ALL_REDUCES else {}
    if predicts_weights(use):
        reduced = {"data": "data/ddp"}
    changes = dict(VARIANTS[variant])
    job = job_with(use, defaults={**changes.pop("defaults", {}), **reduced}, **changes)
    try:
        resolve_plan(load_job(job))
    except PlanError:
        return job_with(use, defaults=reduced)
    return job


Composed = tuple[str, dict[str, Any], Played]


@pytest.fixture(
    scope="module",
    params=drawn_grid((*complete_schemes(), ALL_AT_ONCE), range(len(VARIANTS))),
    ids="{0[0]}-{0[1]}".format,
)
def composed(request: pytest.FixtureRequest) -> Composed:
    """A scheme, its job, and the step."""
    use, variant = request.param
    job = job_of(use, variant)
    return use, job, play_job(job)


@pytest.mark.parametrize("law", STEP_LAWS)
def test_a_law_holds(composed: Composed, law: str) -> None:
    use, _, played = composed
    assert [*STEP_LAWS[law](played, 2 if use == ALL_AT_ONCE else chunks_for(use))] == []


def test_all_families_communicate_and_weights_are_updated(composed: Composed) -> None:
    """So a step takes longer than the kernels of a device."""
    _, _, played = composed
    busy = [0.0, 0.0]
    for number, op in played.instances():
        busy[played.flat.device[number]] += played.flat.seconds[number] * (op.stream == COMPUTE)
    assert played.times.span > max(busy) > 0
    families = {op.stream.partition("-")[0] for op in played.counts} - {"memory", "host"}
    assert families == {"compute", *AXES}
    assert any(isinstance(op.work, Memory | HostUpdate) and op.phase == "U" for op in played.counts)


def test_full_recompute_keeps_the_inputs_of_layers_alone(composed: Composed) -> None:
    """Whatever a scheme does inside a layer, its result is discarded with the rest."""
    use, job, played = composed
    if {"use": "memory/recompute-full"} in job["plan"]["schemes"] and not use.startswith("pipeline/"):
        for stage_ops in map(one_of, played.stages):
            assert all(saved_bytes(run) == run.nbytes for run in stage_ops.unit_runs if run.name == "layer")
            assert any(op.phase == "R" for run in stage_ops.unit_runs for op in run.fragment.backward)


def test_resting_states_are_sharded_as_declared(composed: Composed) -> None:
    """bf16 weights, fp32 gradients, fp32 main weights and two moments; sharded weights are the main weights."""
    _, _, played = composed
    (scheme,) = schemes_with(played.plan.schemes, ShardsStates)
    for device in range(2):
        wanted: dict[str, float] = defaultdict(float)
        for param in played.list_held(device):
            cut = {state: played.plan.mesh.size(scheme.shards_at_rest(state, param)) for state in STATES}
            main = 4 if cut["parameters"] > 1 and scheme.updates_weights else 0
            for state, nbytes in (("parameters", main or 2), ("gradients", 4), ("optimizer", 12 - main)):
                wanted[state] += nbytes * param.size / cut[state] * (1 - sum(scheme.offloaded_to(state).values()))
            if isinstance(scheme, KeepsSecondaryShards) and (second := scheme.secondary_shards(param)) is not None:
                wanted["parameters"] += 2 * param.size / played.plan.mesh.size(second)
            if isinstance(scheme, KeepsOwnStates):
                wanted["optimizer"] += scheme.own_states(param).get("gpu", 0.0)
        assert played.resting(device) == pytest.approx(wanted)
