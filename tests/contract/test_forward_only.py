"""Forward-only jobs: every scheme in a plan with all other families, without backward passes, gradients and updates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.capabilities import KeepsSecondaryShards, ShardsStates, schemes_with
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.timetable import Timetable, timetable
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule, VShape
from meshcast.validation.contract.composed import complete_schemes, job_with, of_family
from meshcast.validation.contract.of_pipeline import exists
from meshcast.validation.contract.played import PAID, Played, play_job
from meshcast.validation.contract.step_dataflow import step_problems
from tests.draws import drawn
from tests.simulator.engine.engines import check_alike, play_by_engines
from tests.strategies import chain_options, examples, jobs_of_all

FORWARD_ONLY = {"train": {"mode": "forward-only"}}

ONE_STEP = {use: {"period": 1} for use in complete_schemes() if "period" in find_scheme(use).Options.model_fields}
"""A period counts updates, of which there are none."""

Both = tuple[dict[str, Any], Played, Played]


@pytest.fixture(scope="module", params=drawn(complete_schemes(), keep=6))
def both(request: pytest.FixtureRequest) -> Both:
    """The job, its step of training, and its forward-only step."""
    job = job_with(request.param, options=ONE_STEP)
    return job, play_job(job, engine="matrices"), play_job(job | FORWARD_ONLY)


def test_all_forward_passes_run_and_nothing_else(both: Both) -> None:
    _, _, forward = both
    shape, ways = forward.plan.shape, forward.plan.schedule.directions
    actions = forward.program.timetable.actions
    assert {action.kind for action in actions} == {"F"}
    assert len({*actions}) == len(actions) == shape.stages * shape.m * shape.slices / ways
    assert {op.phase for op in forward.counts} == {"F"}
    assert forward.flops("F", dispatch=False) == pytest.approx(forward.wanted)


def test_data_flow(both: Both) -> None:
    assert step_problems(both[2]) == []


def test_memory_holds_weights_and_what_later_operators_read(both: Both) -> None:
    _, training, forward = both
    (data,) = schemes_with(forward.plan.schemes, ShardsStates)
    for device, peak in enumerate(forward.peaks):
        assert peak.left == 0
        assert min(peak.by.values()) >= 0
        assert not peak.by.get("gradients") and not peak.by.get("optimizer")
        assert peak.total < training.peaks[device].total
        weights = 0.0
        for param in forward.list_held(device):
            cut = forward.plan.mesh.size(data.shards_at_rest("parameters", param))
            weights += 2 * param.size / cut if not data.offloaded_to("parameters") else 0
            if isinstance(data, KeepsSecondaryShards) and (second := data.secondary_shards(param)) is not None:
                weights += 2 * param.size / forward.plan.mesh.size(second)
        assert forward.resting(device) == pytest.approx({"parameters": weights, "gradients": 0, "optimizer": 0})


def test_it_takes_no_longer_than_training(both: Both) -> None:
    _, training, forward = both
    assert 0 < forward.times.span < training.step.span


@given(job=jobs_of_all())
@examples(60, daily=2)
def test_any_job(job: dict[str, Any]) -> None:
    """Engines agree, memory returns to its baseline, and a step of training takes longer."""
    forward = job | FORWARD_ONLY
    if resolve_plan(load_job(job)).passes.period > 1:
        with pytest.raises(PlanError, match="a period counts updates"):
            resolve_plan(load_job(forward))
        return
    found = play_by_engines(forward, PAID)
    check_alike(found)
    assert [peak.left for peak in found[0].peaks] == pytest.approx([0] * len(found[0].peaks), abs=1e-6)
    assert found[0].step.span <= play_job(job, engine="matrices").step.span * (1 + 1e-9)


# --------------------------------------------------------------------------------------------- pipelines


def forward_timetable(use: str, p: int, m: int, v: int = 1) -> Timetable:
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    schedule = kind(("pp",), kind.Options(chunks=v, **chain_options(use)), Mesh({"pp": p}))
    slices = max(1, len(schedule.slices))
    return timetable(schedule, PipelineShape(p, m, v * kind.directions, slices, forward_only=True))


def slots(table: Timetable) -> int:
    """Duration of a step whose passes take a slot each."""
    free, end = [0] * table.shape.p, dict[int, int]()
    for action in table.sequence:
        device = table.device_of[action]
        needs = (table.need[action], *table.further_needs.get(action, ()))
        end[action] = free[device] = max(free[device], *(end[need] for need in needs if need >= 0), 0) + 1
    return max(free)


V_SHAPES = [use for use in of_family("pipeline") if issubclass(find_scheme(use), VShape)]

INTERLEAVED = ("pipeline/grouped-interleaved", "pipeline/interleaved-1f1b", "pipeline/interleaved-zb")

STREAMING = [use for use in of_family("pipeline") if use not in ("pipeline/hanayo", "pipeline/vocabulary-1f1b")]
"""All schedules but waves, whose devices at both ends have two stages in a row, and shards of the vocabulary, which
have no forward pass without the backward pass of others."""


@pytest.mark.parametrize("use", STREAMING)
@given(data=st.data())
@examples(40)
def test_on_equal_stages_micro_batches_stream_through_the_pipeline(use: str, data: st.DataObject) -> None:
    """m + p - 1 slots of a device; a chunk is an equal part of such a slot. Bidirectional schedules fill from both
    ends: one slot less."""
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    v = 2 if use in (*V_SHAPES, *INTERLEAVED) else 1
    shapes = [(p, m) for p in range(1, 9) for m in range(p, 25) if m % p == 0 or use not in INTERLEAVED]
    p, m = data.draw(
        st.sampled_from([(p, m) for p, m in shapes if exists(kind, PipelineShape(p, m, v * kind.directions))])
    )
    table = forward_timetable(use, p, m, v)
    if use in V_SHAPES:
        wanted = v * (m + p - 1)
    elif kind.directions > 1:
        wanted = m + p - 2
    else:
        wanted = m * v * table.shape.slices + p - 1
    assert slots(table) == wanted
