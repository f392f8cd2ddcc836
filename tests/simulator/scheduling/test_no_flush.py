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

from meshcast.experiments.render.matplotlib import breakdown as breakdown_plot
from meshcast.experiments.render.matplotlib import memory, timeline
from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.hardware.errors import PlanError
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
from meshcast.validation.pipelines.cases import ScheduleCase, answer, count_weight_versions, period, replay
from tests.contract.played import FREE, PAID, Ideal, Played, play_job
from tests.draws import drawn_grid
from tests.simulator.engine.engines import LAUNCH, check_alike, on_catalog, play_by_engines, simulate_by_engines
from tests.simulator.scheduling.no_flush_jobs import job, shipped
from tests.strategies import NO_FLUSH, PRICES, SECONDS, examples, jobs, shapes

USES = ("pipeline/pipedream", "pipeline/pipedream-2bw")
both = pytest.mark.parametrize("use", USES)


def accepts(use: str, shape: PipelineShape) -> bool:
    return use == "pipeline/pipedream" or shape.m >= shape.p


# --------------------------------------------------------------------------------------- orders, versions


@both
@pytest.mark.parametrize(
    ("device", "row"),
    list(enumerate(["F0 F1 F2 F3 B0 F4 B1 F5 B2", "F0 F1 F2 B0 F3 B1", "F0 F1 B0 F2", "F0 B0 F1 B1"])),
)
def test_the_order_begins_as_it_is_published(use: str, device: int, row: str) -> None:
    order = shipped(use).order(PipelineShape(4, 100), device)
    order_text = " ".join(f"{action.kind.replace('BW', 'B')}{action.microbatch}" for action in actions_of(order))
    assert order_text.startswith(row + " ")


@both
@given(shape=shapes(), more=st.integers(1, 9))
def test_a_longer_run_begins_like_a_shorter_one(use: str, shape: PipelineShape, more: int) -> None:
    longer = PipelineShape(shape.p, shape.m + more)
    for device in range(shape.p):
        one, other = (list(shipped(use).order(some, device)) for some in (shape, longer))
        last = one.index(Action(device, "F", shape.m - 1))
        assert one[: last + 1] == other[: last + 1]


def test_updates_come_after_the_gradients_that_they_need() -> None:
    order = shipped("pipeline/pipedream").order(PipelineShape(2, 4), 0)
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
    schedule = shipped(use)
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
    schedule, run = shipped(use), PipelineShape(shape.p, max(shape.m * batches, 4 * shape.p // shape.m * shape.m))
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
@examples(60)
@given(data=st.data(), shape=shapes(most_p=5, most_m=12), hop=st.sampled_from([0.0, 0.25, 2.0]))
def test_the_period_is_that_of_the_slowest_circuit(
    use: str, data: st.DataObject, shape: PipelineShape, hop: float
) -> None:
    if not accepts(use, shape):
        return
    lists = st.lists(SECONDS, min_size=shape.p, max_size=shape.p)
    forward, backward = data.draw(lists), data.draw(lists)
    case = {"schedule": use.partition("/")[2], "p": shape.p, "m": shape.m, "t_f": forward, "t_b": backward, "hop": hop}
    one = slowest(forward, backward, hop)
    every = shipped(use).microbatches_per_update(shape)
    assert answer(case)["period"] == pytest.approx(every * one, rel=1e-9)


@both
def test_a_single_batch_with_warmup_and_cooldown_is_that_of_1f1b(use: str) -> None:
    times = {"t_f": [1, 2, 1.5], "t_b": [2, 1, 3], "t_w": 0.5, "hop": 0.25, "order": True}
    for m in (3, 4, 7):
        found, flushed = (
            answer({"schedule": name, "p": 3, "m": m, **times}) for name in (use.partition("/")[2], "1f1b")
        )
        assert flushed["period"] is flushed["weight_versions"] is None
        same = set(found) - {"period", "weight_versions"}
        assert {key: found[key] for key in same} == {key: flushed[key] for key in same}


def test_versions_do_not_depend_on_how_much_is_asked() -> None:
    for p in (1, 2, 5, 8):
        for m in (1, 3, 8, 100):
            case = ScheduleCase(schedule="pipedream", p=p, m=m, t_f=1.0, t_b=1.0)
            assert count_weight_versions(case) == [p - i for i in range(p)]
            assert period(case) == 2
            if m >= p:
                assert count_weight_versions(case.model_copy(update={"schedule": "pipedream-2bw"})) == [2] * p


def test_two_versions_are_too_few_for_fewer_micro_batches_than_devices() -> None:
    found = answer({"schedule": "pipedream-2bw", "p": 4, "m": 3, "t_f": 1, "t_b": 1})
    assert found["status"] == "refused"
    assert "4 would work" in found["reason"] and "pipeline/pipedream" in found["reason"]
    with pytest.raises(PlanError, match="at least as many"):
        simulate(job("pipedream-2bw", pp=4, m=3))


def test_of_devices_of_nearly_equal_speed_the_slower_one_sets_the_period() -> None:
    case = {"schedule": "pipedream", "p": 3, "m": 3, "t_f": [1, 1, 1], "t_b": [2, 2.0000001, 2]}
    assert answer(case)["period"] == pytest.approx(3.0000001, rel=1e-9)


def test_a_cycle_is_found_where_all_devices_go_through_it() -> None:
    steady = np.arange(12.0)
    assert cycle(np.array([steady, steady + 5]), 4) == 1
    turns = steady + np.tile([0, 0.5, 0.25], 4)
    assert cycle(np.array([steady, turns]), 4) == 3
    assert cycle(np.array([steady, 1.01 * steady]), 4) is None, "one is still faster"


# --------------------------------------------------------------------------------------------- predict


def computing(run: Played) -> list[float]:
    """Compute time of every device in the whole run [s]."""
    return [
        sum(run.flat.seconds[n] for n in numbers)
        for (_, stream), numbers in sorted(run.flat.queues.items())
        if stream == COMPUTE
    ]


@both
@pytest.mark.parametrize(
    ("sizes", "partition"), drawn_grid([(1, 1), (1, 6), (2, 2), (3, 7), (4, 4), (4, 9), (4, 64)], ["even", "uneven"])
)
def test_with_free_communication_a_step_is_the_computation_of_the_slowest_device(
    use: str, sizes: tuple[int, int], partition: str
) -> None:
    """sizes: pipeline devices and micro-batches."""
    (pp, m) = sizes
    layers = {"layers": 12}
    split = {} if partition == "even" else {"partition": [12 - 2 * (pp - 1)] + [2] * (pp - 1)}
    config = job(use.partition("/")[2], pp, m, model=layers, **split)
    run = play_job(config, FREE, engine="matrices")
    (found,) = play_by_engines(config, FREE, [("matrices", True)])
    # Micro-batches and updates of a run, each in its share of a batch.
    assert found.seconds == pytest.approx(max(computing(run)) * m / run.plan.passes.played_shape.m, rel=1e-9)


def test_a_step_of_2bw_is_shorter_than_that_of_pipedream_and_of_1f1b() -> None:
    """It has no warm-up, and one update a batch."""
    steps = {
        name: simulate(job(name, model={"hidden": 512})).step_time for name in ("1f1b", "pipedream", "pipedream-2bw")
    }
    assert steps["pipedream-2bw"] < min(steps["1f1b"], steps["pipedream"])


def updates_of(run: Played, device: int) -> list[list[int]]:
    """Indices of the ops of every update, without markers."""
    return [
        [number for number in run.ops(action) if run.flat.ops[number].work is not None]
        for action in run.program.timetable.updates[device]
    ]


@both
@pytest.mark.parametrize(("data", "overlap"), drawn_grid([{"zero": 0}, {"zero": 1}, {"fsdp": True}], [True, False]))
def test_an_update_has_its_device_for_itself(use: str, overlap: bool, data: dict[str, Any]) -> None:
    """It begins after the reduction of the gradients, and the all-gather of weights follows it: nothing overlaps it."""
    framework = {"overlap": {"dp": overlap, "pp": overlap}}
    run = play_job(job(use.partition("/")[2], 2, 4, dp=2, tp=2, framework=framework, **data), PAID)
    ops, times = run.flat.ops, run.times
    reduced = 0
    for device in range(2):
        own = [n for n, op in run.instances(device) if op.work is not None and not op.stream.startswith("pipeline")]
        for numbers in updates_of(run, device):
            begin, end = min(times.begin[n] for n in numbers), max(times.end[n] for n in numbers)
            assert [ops[n].name for n in numbers].count("adam") == 1
            inside = set(numbers)
            assert all(times.end[n] <= begin + 1e-12 or times.begin[n] >= end - 1e-12 for n in own if n not in inside)
        reduced += sum(ops[n].name == "reduce grads" for n in own)
    updates = len(run.program.timetable.updates[0])
    each = run.plan.passes.played_shape.m if data.get("fsdp") else updates
    assert reduced > 0 and reduced % each == 0


@both
def test_devices_do_not_synchronise_at_their_updates(use: str) -> None:
    run = play_job(job(use.partition("/")[2], 4, 4, tp=2))
    assert not run.program.meetings and not run.program.updates
    norms = [op for _, op in run.instances() if op.name == "grad-norm"]
    assert not norms
    assert any(op.name == "grad-norm" for _, op in play_job(job("1f1b", 4, 4, tp=2)).instances())


@both
def test_shared_weights_are_reduced_at_every_update(use: str) -> None:
    """Tied embeddings: at every update the first and the last device exchange their gradients."""
    run = play_job(job(use.partition("/")[2], 4, 4, model={"tied": True}))
    sums = [op.work for _, op in run.instances() if isinstance(op.work, Collective) and op.work.axes == ("pp",)]
    assert len(sums) == 2 * len(run.program.timetable.updates[0])


@both
def test_memory_holds_versions_of_the_weights_and_1f1b_s_activations(use: str) -> None:
    unflushed, plain = (job(name, 4, 8, dp=2) for name in (use.partition("/")[2], "1f1b"))
    found, flushed = (simulate(one).play for one in (unflushed, plain))
    for device in range(4):
        copies = 4 - device if use == USES[0] else 2
        one, other = found.peaks[device].by, flushed.peaks[device].by
        assert one["parameters"] == pytest.approx(copies * other["parameters"])
        for category in ("gradients", "optimizer", "activations"):
            assert one[category] == pytest.approx(other[category])
        assert found.peaks[device].left == 0


def test_versions_of_sharded_weights_are_sharded_too() -> None:
    found, flushed = (simulate(job(name, 2, 4, dp=2, fsdp=True)).play for name in ("pipedream-2bw", "1f1b"))
    for one, other in zip(found.resting, flushed.resting, strict=True):
        # The newest weights are in the optimizer's format, older versions in the compute format.
        assert one["parameters"] == pytest.approx(other["parameters"] * (4 + 2) / 4)


@examples(25)
@given(job=jobs(NO_FLUSH, launch=LAUNCH, passes=24))
def test_all_engines_give_the_same_report(job: dict[str, Any]) -> None:
    check_steps(job)


@pytest.mark.slow
@examples(10)
@given(job=jobs(NO_FLUSH, launch=LAUNCH, passes=24, formats=("bf16",)))
def test_all_engines_agree_on_a_cluster_of_the_catalog(job: dict[str, Any]) -> None:
    check_steps(on_catalog(job, "dgx-h100"))


@pytest.mark.slow
@examples(20)
@given(job=jobs(NO_FLUSH, launch=(0.0, 1e-6, 1e-4), passes=24), price=PRICES)
def test_all_engines_agree_whatever_takes_longest(job: dict[str, Any], price: Ideal) -> None:
    found = play_by_engines(job, price)
    check_alike(found)
    for one in found[1:]:
        assert one.seconds == pytest.approx(found[0].seconds, rel=1e-9)


def check_steps(job: dict[str, Any]) -> None:
    """All engines agree on the run, on the first steps, and on one step, whose breakdown adds up to it."""
    found = simulate_by_engines(job)
    check_alike([report.play for report in found])
    first = found[0]
    for report in found:
        parts, step = report.breakdown.parts, report.play.seconds
        assert step == pytest.approx(first.play.seconds, rel=1e-9)
        assert sum(parts.values()) == pytest.approx(step, rel=1e-9)
        assert min(parts.values()) >= 0
        assert parts == pytest.approx(first.breakdown.parts, rel=0, abs=2e-9 * step)
        assert report.first_steps(4) == pytest.approx(first.first_steps(4), rel=1e-8)
        assert report.device == first.device
        assert report.sigma == pytest.approx(first.sigma, rel=1e-6)


def test_a_long_run_is_skipped_and_stays_the_same() -> None:
    for name in ("pipedream", "pipedream-2bw"):
        config = job(name, 4, 4, dp=2, tp=2, framework={"launch_s": 2e-6})
        one, other = (simulate(config, skip=skip).play for skip in (True, False))
        assert isinstance(one.step, ByMatrices) and isinstance(other.step, ByMatrices)
        assert one.step.play.skipped > 0 == other.step.play.skipped
        check_alike([one, other])
        assert all(NEVER not in one.step.play.of_device(device).entry for device in range(one.program.devices))


# -------------------------------------------------------------------------------------- several steps


def test_with_a_flush_all_steps_are_equal() -> None:
    report = simulate(job("1f1b"))
    assert report.first_steps(3) == [report.step_time] * 3
    assert report.first_steps(0) == []


@both
@pytest.mark.parametrize(("pp", "m"), [(1, 2), (2, 2), (4, 4), (4, 100)])
def test_only_the_first_step_has_a_warmup(use: str, pp: int, m: int) -> None:
    report = simulate(job(use.partition("/")[2], pp, m))
    first, *others = report.first_steps(300)
    assert first >= others[0] * (1 - 1e-9)
    assert pp == 1 or first > others[-1]
    assert others[-1] == pytest.approx(report.step_time, rel=1e-9)
    # The first steps are those of the run: when the last device has run the updates of that many batches.
    table, window = report.play.program.timetable, report.play.window
    assert window is not None
    per_step, ends = m // table.update_interval, window.moments.max(axis=0)
    overhead = report.job.framework.step_overhead_s
    for batches in range(1, len(ends) // per_step + 1):
        total = sum(report.first_steps(batches)) - batches * overhead
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
@pytest.mark.slow
def test_reports_of_a_run_can_be_read(use: str, tmp_path: Path) -> None:
    config = job(use.partition("/")[2], 2, 3, dp=2, framework={"launch_s": 1e-6})
    report = simulate(config)
    answered = json.loads(json.dumps(report.to_dict()))
    parts = answered["breakdown_s"]
    rest = sum(parts[name] for name in ("bubble", "optimizer", "host", "idle"))
    total = sum(parts["compute"].values()) + sum(parts["exposed"].values()) + rest
    assert total == pytest.approx(answered["step_time_s"], rel=1e-9)
    trace.write_trace(report, tmp_path / "run.json.gz")
    with gzip.open(tmp_path / "run.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert min(event["dur"] for event in events if event["ph"] == "X") >= 0
    updates = [event for event in events if event.get("cat") == "gpu_user_annotation" and event["args"]["kind"] == "O"]
    assert len(updates) == sum(map(len, report.play.program.timetable.updates))
    save(lambda: timeline.timeline(report), tmp_path / "timeline.png")
    save(lambda: memory.memory(report), tmp_path / "memory.png")
    save(lambda: breakdown_plot.breakdown([("", report)]), tmp_path / "breakdown.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("timeline", "memory", "breakdown"))


def test_replays_end() -> None:
    """A pipeline too deep to be played to its steady state is refused."""
    found = answer({"schedule": "pipedream", "p": 1024, "m": 8, "t_f": 1, "t_b": 1})
    assert found["status"] == "refused" and "steady" in found["reason"]
    assert replay(ScheduleCase(schedule="1f1b", p=64, m=8, t_f=1.0, t_b=1.0)).makespan == 71 * 2


# ---------------------------------------------------------------------------------- without a barrier
