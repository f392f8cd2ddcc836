"""Schedules without a flush: endless orders, weight versions, updates between passes, steps in steady state."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.engine.maxplus import NEVER
from meshcast.simulator.engine.play import ByMatrices
from meshcast.simulator.engine.steady_state import cycle
from meshcast.simulator.ir.ops import COMPUTE, Collective
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.report import trace
from meshcast.simulator.scheduling.no_flush import (
    extend_to_steady_state,
    insert_updates,
    max_cycle_updates,
    peak_weight_versions,
)
from meshcast.simulator.scheduling.schedule import Action, PipelineShape, actions_of
from meshcast.validation.contract.played import FREE, PAID, play_job
from tests.draws import drawn_grid
from tests.simulator.engine.engines import check_alike, play_by_engines
from tests.simulator.scheduling.schedules import job, make_schedule, played
from tests.strategies import EVERY_EXAMPLE, SECONDS, shapes

USES = ("pipedream", "pipedream-2bw")
both = pytest.mark.parametrize("use", USES)


def accepts(use: str, shape: PipelineShape) -> bool:
    return use == "pipedream" or shape.m >= shape.p


# --------------------------------------------------------------------------------------- orders, versions


@both
def test_the_order_begins_as_it_is_published(use: str) -> None:
    for device, row in enumerate(["F0 F1 F2 F3 B0 F4 B1 F5 B2", "F0 F1 F2 B0 F3 B1", "F0 F1 B0 F2", "F0 B0 F1 B1"]):
        order = make_schedule(use).order(PipelineShape(4, 100), device)
        words = (f"{action.kind.replace('BW', 'B')}{action.microbatch}" for action in actions_of(order))
        assert " ".join(words).startswith(row + " ")


@both
@given(shape=shapes(), more=st.integers(1, 9))
def test_a_longer_run_begins_like_a_shorter_one(use: str, shape: PipelineShape, more: int) -> None:
    longer = PipelineShape(shape.p, shape.m + more)
    for device in range(shape.p):
        one, other = (list(make_schedule(use).order(some, device)) for some in (shape, longer))
        last = one.index(Action(device, "F", shape.m - 1))
        assert one[: last + 1] == other[: last + 1]


def test_updates_come_after_the_gradients_that_they_need() -> None:
    order = make_schedule("pipedream").order(PipelineShape(2, 4), 0)
    each, twice = (" ".join(str(action) for action in insert_updates(order, every)) for every in (1, 2))
    assert each == "0F0 0F1 0BW0 0O0 0F2 0BW1 0O1 0F3 0BW2 0O2 0BW3 0O3"
    assert twice == "0F0 0F1 0BW0 0F2 0BW1 0O1 0F3 0BW2 0BW3 0O3"
    split_passes = [Action(0, kind, k) for k in range(2) for kind in ("F", "B")]
    split_passes += [Action(0, "W", k) for k in range(2)]
    assert " ".join(map(str, insert_updates(split_passes, 2))).endswith("0W0 0W1 0O1")
    chunks = [Action(s, kind, 0) for kind, some in (("F", (1, 3)), ("BW", (3, 1))) for s in some]
    assert " ".join(map(str, insert_updates(chunks, 1))) == "1F0 3F0 3BW0 1BW0 1O0", "one for both stages of a device"


@both
@given(shape=shapes(most_p=5, most_m=12), batches=st.integers(1, 4))
def test_first_and_last_passes_count_from_update_to_update(use: str, shape: PipelineShape, batches: int) -> None:
    if not accepts(use, shape):
        return
    schedule = make_schedule(use)
    every = schedule.microbatches_per_update(shape)
    found = timetable(schedule, PipelineShape(shape.p, shape.m * batches), update_interval=every)
    for device, order in enumerate(found.orders):
        updates = [found.actions[i] for i in found.updates[device]]
        assert updates == [Action(device, "O", k) for k in range(every - 1, shape.m * batches, every)]
        spans = [-1, *(order.index(update) for update in updates)]
        for begin, end in pairwise(spans):
            own = range(found.starts[device] + begin + 1, found.starts[device] + end)
            for kind in ("F", "BW"):
                some = [found.slots[found.slot[i]] for i in own if found.actions[i].kind == kind]
                assert [slot.first for slot in some] == [at == 0 for at in range(len(some))]
                assert [slot.last for slot in some] == [at == len(some) - 1 for at in range(len(some))]


@both
@given(shape=shapes(most_p=6, most_m=12), batches=st.integers(3, 8))
def test_no_more_versions_are_held_than_micro_batches_use(use: str, shape: PipelineShape, batches: int) -> None:
    """Every micro-batch uses a version that exists at its forward pass; versions are counted one by one."""
    if not accepts(use, shape):
        return
    schedule, run = make_schedule(use), PipelineShape(shape.p, max(shape.m * batches, 4 * shape.p // shape.m * shape.m))
    every = schedule.microbatches_per_update(shape)
    for device in range(shape.p):
        order = insert_updates(schedule.order(run, device), every)
        made, wanted, most = 0, dict[int, int](), 1
        for action in actions_of(order):
            met = schedule.weight_version(shape, device, action.microbatch)
            if action.kind == "F":
                assert 0 <= met <= made
                wanted[action.microbatch] = met
            elif action.kind == "BW":
                assert wanted.pop(action.microbatch) == met
            else:
                made += 1
                coming = (schedule.weight_version(shape, device, k) for k in range(run.m) if k > action.microbatch)
                most = max(most, len({*wanted.values(), *(met for met in coming if met <= made), made}))
        assert peak_weight_versions(schedule, shape, device, order) == most
        if run.m >= 4 * shape.p * every:
            assert most == (shape.p - device if use == USES[0] else 2)


# ------------------------------------------------------------------------------------ validate pipeline


def slowest(forward: list[float], backward: list[float], hop: float) -> float:
    """Time of a micro-batch in steady 1F1B, from the critical circuits: j - i + 1 micro-batches go from device i to j
    and back in one round, through every device between."""
    u, p = [f + b for f, b in zip(forward, backward, strict=True)], len(forward)
    return max((sum(u[i : j + 1]) + 2 * (j - i) * hop) / (j - i + 1) for i in range(p) for j in range(i, p))


@both
@given(data=st.data(), shape=shapes(most_p=5, most_m=12), hop=st.sampled_from([0.0, 0.25, 2.0]))
def test_the_period_is_that_of_the_slowest_circuit(
    use: str, data: st.DataObject, shape: PipelineShape, hop: float
) -> None:
    """Also where another is nearly as slow."""
    lists = st.lists(SECONDS, min_size=shape.p, max_size=shape.p)
    forward, backward = data.draw(lists), data.draw(lists)
    every = make_schedule(use).microbatches_per_update(shape)
    if accepts(use, shape):
        answered = played(use, shape.p, shape.m, (forward, backward, 0.0), hop=hop)
        assert answered["period"] == pytest.approx(every * slowest(forward, backward, hop), rel=1e-9)
    nearly = played("pipedream", 3, 3, ([1, 1, 1], [2, 2.0000001, 2], 0.0))
    assert nearly["period"] == pytest.approx(3.0000001, rel=1e-9)


@both
def test_a_single_batch_with_warmup_and_cooldown_is_that_of_1f1b(use: str) -> None:
    for m in (3, 4, 7):
        ours, flushed = (
            played(name, 3, m, ([1, 2, 1.5], [2, 1, 3], 0.5), hop=0.25, order=True) for name in (use, "1f1b")
        )
        assert flushed["period"] is flushed["weight_versions"] is None
        same = set(ours) - {"period", "weight_versions"}
        assert {key: ours[key] for key in same} == {key: flushed[key] for key in same}


def test_a_cycle_is_found_where_all_devices_go_through_it() -> None:
    steady = np.arange(12.0)
    assert cycle(np.array([steady, steady + 5]), 4) == 1
    turns = steady + np.tile([0, 0.5, 0.25], 4)
    assert cycle(np.array([steady, turns]), 4) == 3
    assert cycle(np.array([steady, 1.01 * steady]), 4) is None, "one is still faster"


# --------------------------------------------------------------------------------------------- predict


@both
@pytest.mark.parametrize(
    ("sizes", "partition"),
    drawn_grid(
        [(1, 6), (2, 2), (3, 7), (4, 64), (1, 1), (4, 4), (4, 9)][: None if EVERY_EXAMPLE else 4], ["even", "uneven"]
    ),
)
def test_with_free_communication_a_step_is_the_computation_of_the_slowest_device(
    use: str, sizes: tuple[int, int], partition: str
) -> None:
    """sizes: pipeline devices and micro-batches."""
    pp, m = sizes
    split = {} if partition == "even" else {"partition": [12 - 2 * (pp - 1)] + [2] * (pp - 1)}
    config = job(use, pp, m, model={"layers": 12}, **split)
    run = play_job(config, FREE, engine="matrices")
    (play,) = play_by_engines(config, FREE, [("matrices", True)])
    queues = [numbers for (_, stream), numbers in run.flat.queues.items() if stream == COMPUTE]
    busy = max(sum(run.flat.seconds[n] for n in numbers) for numbers in queues)
    # Micro-batches and updates of a run, each in its share of a batch.
    assert play.seconds == pytest.approx(busy * m / run.plan.passes.played_shape.m, rel=1e-9)


def test_a_step_of_2bw_is_shorter_than_that_of_pipedream_and_of_1f1b() -> None:
    """It has no warm-up, and one update a batch."""
    twice, *others = (simulate(job(name, model={"hidden": 512})).step_time for name in (USES[1], USES[0], "1f1b"))
    assert twice < min(others)


@both
@pytest.mark.parametrize(("data", "overlap"), drawn_grid([{"zero": 0}, {"zero": 1}, {"fsdp": True}], [True, False]))
def test_an_update_has_its_device_for_itself(use: str, overlap: bool, data: dict[str, Any]) -> None:
    """It begins after the reduction of the gradients, and the all-gather of weights follows it: nothing overlaps it."""
    framework = {"overlap": {"dp": overlap, "pp": overlap}}
    run = play_job(job(use, 2, 4, dp=2, tp=2, framework=framework, **data), PAID)
    ops, times, reduced = run.flat.ops, run.times, 0
    for device, updates in enumerate(run.program.timetable.updates):
        busy = [n for n, op in run.instances(device) if op.work is not None and not op.stream.startswith("pipeline")]
        for action in updates:
            inside = {n for n in run.ops(action) if ops[n].work is not None}
            begin, end = min(times.begin[n] for n in inside), max(times.end[n] for n in inside)
            assert [ops[n].name for n in inside].count("adam") == 1
            assert all(times.end[n] <= begin + 1e-12 or times.begin[n] >= end - 1e-12 for n in {*busy} - inside)
        reduced += sum(ops[n].name == "reduce grads" for n in busy)
    each = run.plan.passes.played_shape.m if data.get("fsdp") else len(run.program.timetable.updates[0])
    assert reduced > 0 and reduced % each == 0


@both
def test_devices_do_not_synchronise_at_their_updates(use: str) -> None:
    """But for tied embeddings, whose gradients the first and the last device exchange."""
    run = play_job(job(use, 4, 4, tp=2, model={"tied": True}))
    assert not run.program.meetings and not run.program.updates
    assert not [op for _, op in run.instances() if op.name == "grad-norm"]
    sums = [op.work for _, op in run.instances() if isinstance(op.work, Collective) and op.work.axes == ("pp",)]
    assert len(sums) == 2 * len(run.program.timetable.updates[0])
    assert any(op.name == "grad-norm" for _, op in play_job(job("1f1b", 4, 4, tp=2)).instances())


@both
def test_memory_holds_versions_of_the_weights_and_1f1b_s_activations(use: str) -> None:
    ours, flushed = (simulate(job(name, 4, 8, dp=2)).play.peaks for name in (use, "1f1b"))
    for device, (mine, theirs) in enumerate(zip(ours, flushed, strict=True)):
        copies = 4 - device if use == "pipedream" else 2
        assert mine.by["parameters"] == pytest.approx(copies * theirs.by["parameters"])
        for category in ("gradients", "optimizer", "activations"):
            assert mine.by[category] == pytest.approx(theirs.by[category])
        assert mine.left == 0


def test_versions_of_sharded_weights_are_sharded_too() -> None:
    """The newest weights are in the optimizer's format, older versions in the compute format."""
    ours, flushed = (simulate(job(name, 2, 4, dp=2, fsdp=True)).play.resting for name in ("pipedream-2bw", "1f1b"))
    for mine, theirs in zip(ours, flushed, strict=True):
        assert mine["parameters"] == pytest.approx(theirs["parameters"] * (4 + 2) / 4)


@both
def test_a_long_run_is_skipped_and_stays_the_same(use: str) -> None:
    config = job(use, 4, 4, dp=2, tp=2, framework={"launch_s": 2e-6})
    short, whole = (simulate(config, skip=skip).play for skip in (True, False))
    assert isinstance(short.step, ByMatrices) and isinstance(whole.step, ByMatrices)
    assert short.step.play.skipped > 0 == whole.step.play.skipped
    check_alike([short, whole])
    assert all(NEVER not in short.step.play.of_device(device).entry for device in range(short.program.devices))


# -------------------------------------------------------------------------------------- several steps


@both
@pytest.mark.parametrize(("pp", "m"), [(1, 2), (2, 2), (4, 4), (4, 100)])
def test_only_the_first_step_has_a_warmup(use: str, pp: int, m: int) -> None:
    """With a flush all steps are equal."""
    report, flushed = simulate(job(use, pp, m)), simulate(job("1f1b", pp, m))
    assert flushed.first_steps(3) == [flushed.step_time] * 3 and flushed.first_steps(0) == []
    first, *others = report.first_steps(300)
    assert first >= others[0] * (1 - 1e-9) and (pp == 1 or first > others[-1])
    assert others[-1] == pytest.approx(report.step_time, rel=1e-9)
    # The first steps are those of the run: when the last device has run the updates of that many batches.
    table, window = report.play.program.timetable, report.play.window
    assert window is not None
    per_step, ends = m // table.update_interval, window.moments.max(axis=0)
    for batches in range(1, len(ends) // per_step + 1):
        total = sum(report.first_steps(batches)) - batches * report.job.framework.step_overhead_s
        assert total == pytest.approx(ends[batches * per_step - 1], rel=1e-9)


@pytest.mark.parametrize(("p", "every"), [(1, 1), (1, 9), (4, 1), (4, 4), (8, 8), (8, 1000), (64, 64), (64, 10_000)])
def test_a_run_is_no_longer_than_it_must_be(p: int, every: int) -> None:
    run = extend_to_steady_state(PipelineShape(p, every), every)
    assert run.m % every == 0 and run.m >= 5 * p
    assert run.m <= 7 * p if every == 1 else run.m <= 20 * every
    assert run.m == 3 * every or every < 8 * p, "the first batch and the last are left out"
    assert max_cycle_updates(PipelineShape(p, every), every) <= p


# ---------------------------------------------------------------------------------------------- reports


@both
def test_a_trace_of_a_run_has_every_update(use: str, tmp_path: Path) -> None:
    report = simulate(job(use, 2, 3, dp=2, framework={"launch_s": 1e-6}))
    trace.write_trace(report, tmp_path / "run.json.gz")
    with gzip.open(tmp_path / "run.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert min(event["dur"] for event in events if event["ph"] == "X") >= 0
    updates = [event for event in events if event.get("cat") == "gpu_user_annotation" and event["args"]["kind"] == "O"]
    assert len(updates) == sum(map(len, report.play.program.timetable.updates))
