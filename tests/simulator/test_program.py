"""Programs and their play: what waits for what across actions, stages and devices, and what happens once a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from hardware.errors import ScheduleError
from simulator.engine.program import Program, compile_task
from simulator.engine.simpy_engine import play
from simulator.ops import Collective, Memory, Op, Transfer
from simulator.report.breakdown import breakdown
from tests.contract.measure import FREE, Ideal, Played, play_job
from tests.strategies import jobs

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16}
SLOW = Ideal(links=1e5)


def job(plan: dict[str, Any], gpus: int, **more: Any) -> dict[str, Any]:
    settings_ = {"name": "megatron-core", "set": more.pop("habits", {})}
    return {
        "model": {**MODEL, **more.pop("model", {})},
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": settings_,
        "plan": plan,
        **more,
    }


def begins(played: Played, device: int) -> list[float]:
    """When each action of a device begins its first op."""
    times = played.times.begin
    return [min(times[at : at + len(task.ops)]) for _, at, task in played.program.actions[device]]


# ------------------------------------------------------------------------------------------------- sends


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_send_is_waited_for_when_overlap_is_off(overlap: bool, schedule: str) -> None:
    habits = {"overlap": {"dp": True, "pp": overlap}}
    plan = {"pp": 2, "schedule": schedule}
    played = play_job(job(plan, 2, habits=habits, batch={"global": 4}), SLOW)
    ends = {played.program.ops[n].name: played.times.end[n] for n, _, _ in played.program.transfers}
    early = 0
    for device in range(2):
        starts = begins(played, device)
        actions = [action for action, _, _ in played.program.actions[device]]
        for action, start in zip(actions, starts[1:], strict=False):
            if (sent := ends.get(f"send {action}")) is not None:
                early += start < sent
                assert overlap or start >= sent
    assert bool(early) == overlap, "with overlap some action begins while the last result is on its way"


def test_waiting_for_sends_costs_the_time_of_the_sends() -> None:
    """GPipe, two devices, no other communication: the first device pays for each forward send but what hides it."""
    on, off = (
        play_job(job({"pp": 2}, 2, habits={"overlap": {"dp": True, "pp": pp}}, batch={"global": 4}), SLOW).times.span
        for pp in (True, False)
    )
    assert off > on


@settings(max_examples=30)
@given(told=jobs())
def test_a_stage_begins_when_its_input_has_come(told: dict[str, Any]) -> None:
    """The first kernel that needs the message begins no earlier than it arrives, latency included."""
    played = play_job(told, Ideal(links=1e6, latency=1e-4))
    program, times = played.program, played.times
    arrives = {program.ops[n].name: times.end[n] + program.latency[n] for n, _, _ in program.transfers}
    for actions in program.actions:
        for action, at, task in actions:
            if action.kind == "F":
                source = f"send {action.stage - 1}F{action.microbatch}"
            else:
                source = f"send {action.stage + 1}{action.kind}{action.microbatch}"
            if source in arrives and task.outside:
                assert min(times.begin[at + i] for i in task.outside) >= arrives[source] - 1e-12


def test_a_chunk_waits_for_the_chunk_before_it_on_its_own_device() -> None:
    """One device, two chunks, ZeRO-1: the second chunk waits for the last op of the first, gathers counted or not."""
    schemes = [
        {"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 2},
        {"use": "data/zero-1", "over": "dp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
    ]
    plan = {"mesh": {"pp": 1, "dp": 2, "tp": 2}, "schemes": schemes}
    played = play_job(job(plan, 4, batch={"global": 4}))
    program = played.program
    for action, at, task in program.actions[0]:
        if (action.stage, action.kind) == (1, "F"):
            (before,) = [(a, t) for other, a, t in program.actions[0] if other == (0, "F", action.microbatch)]
            result = before[0] + len(before[1].ops) - 1
            for i in task.outside:
                assert result in program.after[at + i], (action, program.ops[program.after[at + i][-1]])


# ------------------------------------------------------------------------------------------ once a step


@given(told=jobs())
def test_what_runs_in_the_first_or_last_micro_batch_runs_once(told: dict[str, Any]) -> None:
    played = play_job(told)
    program, shape = played.program, played.plan.shape
    for actions in program.actions:
        count: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
        of: dict[int, Op] = {}
        order: dict[tuple[int, str], list[int]] = defaultdict(list)
        for action, _, task in actions:
            order[action.stage, action.kind].append(action.microbatch)
            for op in task.ops:
                count[action.stage][op.when, id(op)] += 1
                of[id(op)] = op
        for counted in count.values():
            for (when, op), n in counted.items():
                assert n == (shape.m if when == "every" and of[op].phase != "U" else 1)
        for action, _, task in actions:
            turn = order[action.stage, action.kind]
            if any(op.when == "first" for op in task.ops):
                assert action.kind == "F" and action.microbatch == turn[0]
            if any(op.when == "last" for op in task.ops):
                assert action.kind == "BW" and action.microbatch == turn[-1]


@given(told=jobs())
def test_the_update_comes_last_and_clips_together(told: dict[str, Any]) -> None:
    """The norm of all gradients needs every device: its all-reduce begins and ends at the same time everywhere."""
    played = play_job(told)
    norms = []
    for device in range(played.plan.shape.p):
        done = max(played.times.end[number] for number, op in played.instances(device) if op.phase != "U")
        update = [number for number, op in played.instances(device) if op.phase == "U"]
        assert min(played.times.begin[number] for number in update) >= done * (1 - 1e-12)
        kinds = [op.work.what for _, op in played.instances(device) if op.phase == "U" and isinstance(op.work, Memory)]
        assert kinds == ["grad-norm", "adam", "zero-grad"]
        norms += [
            (played.times.begin[number], played.times.end[number])
            for number, op in played.instances(device)
            if op.name == "grad-norm" and isinstance(op.work, Collective)
        ]
    everyone = {axis for axis, size in played.plan.mesh.axes.items() if size > 1}
    assert len(norms) == (played.plan.shape.p if everyone else 0)
    assert len(set(norms)) <= 1


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_summed_between_the_ends(tied: bool, pp: int, chunks: int, zero: int) -> None:
    """Only with a pipeline: the first and the last device sum the gradients of their two copies, nobody else."""
    plan = {"pp": pp, "tp": 2, "chunks": chunks, "zero": zero}
    told = job(plan, 2 * pp, model={"tied": tied, "layers": 8}, batch={"global": 2 * pp})
    played = play_job(told)
    table = 128 * 64 // 2
    for device in range(pp):
        sums = [op.work for _, op in played.instances(device) if isinstance(op.work, Collective) and op.work.members]
        ends = tied and pp > 1 and device in (0, pp - 1)
        assert sums == [Collective("all_reduce", 4 * table, ("pp",), (0, pp - 1))] * ends
    if tied and pp > 1:
        ends_at = {
            played.times.end[number]
            for number, op in played.instances()
            if isinstance(op.work, Collective) and op.work.members
        }
        assert len(ends_at) == 1


# ------------------------------------------------------------------------------------------- the engine


def longest_path(program: Program) -> tuple[list[float], list[float]]:
    """Begin and end of every op, by relaxing in any order until nothing moves: no queue, no events, no SimPy."""
    before: list[list[int]] = [list(after) for after in program.after]
    previous: dict[int, int] = {}
    for queue in program.queues.values():
        previous |= dict(zip(queue[1:], queue, strict=False))
    count = len(program.ops)
    users: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for number in range(count):
        for other in {*before[number], *([previous[number]] if number in previous else [])}:
            users[other].append(number)
            missing[number] += 1
    begin, end = [0.0] * count, [0.0] * count
    ready = [number for number in range(count) if not missing[number]]
    while ready:
        number = ready.pop()
        starts = [end[other] + program.latency[other] for other in before[number]]
        if number in previous:
            starts.append(end[previous[number]])
        begin[number] = max(starts, default=0.0)
        end[number] = begin[number] + program.seconds[number]
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    assert not any(missing), "a circle"
    return begin, end


@given(told=jobs())
def test_the_engine_finds_the_longest_path(told: dict[str, Any]) -> None:
    played = play_job(told, Ideal(links=1e6, latency=3e-5))
    begin, end = longest_path(played.program)
    assert played.times.begin == pytest.approx(begin, rel=1e-9, abs=1e-15)
    assert played.times.end == pytest.approx(end, rel=1e-9, abs=1e-15)


@settings(max_examples=30)
@given(told=jobs())
def test_the_breakdown_adds_up(told: dict[str, Any]) -> None:
    for price in (Ideal(links=1e6, latency=3e-5), FREE):
        played = play_job(told, price)
        for device in range(played.plan.shape.p):
            account = breakdown(played.program, played.times, device)
            assert account.step == played.times.span
            assert sum(account.parts.values()) == pytest.approx(account.step, rel=1e-9)
            assert min(account.parts.values()) >= -1e-12 * account.step
            kernels = sum(
                played.program.seconds[number]
                for number, op in played.instances(device)
                if op.stream == "compute" and not isinstance(op.work, Collective)
            )
            counted = sum(account.parts[kind] for kind in ("gemm", "attention", "memory_bound", "optimizer"))
            assert counted >= kernels * (1 - 1e-9)
            if price is FREE:
                assert counted == pytest.approx(kernels)
                assert not any(account.parts[axis] for axis in ("tp", "dp", "pp"))


def test_what_waits_for_ever_is_found() -> None:
    program = Program(1)
    program.add(Op("first", work=Memory("add", 1, 1)), 1.0, 0.0, (1,), 0)
    program.add(Op("second", work=Memory("add", 1, 1)), 1.0, 0.0, (), 0)
    with pytest.raises(ScheduleError, match="first"):
        play(program)


def test_compiling_replaces_marks_by_what_they_wait_for() -> None:
    entry, other = Op("in"), Op("other")
    a = Op("a", work=Memory("add", 1, 1), after=[entry])
    mark = Op("mark", after=[a, other])
    b = Op("b", work=Memory("add", 1, 1), after=[mark])
    c = Op("c", work=Memory("add", 1, 1), after=[Op("far", after=[Op("farther", after=[b, entry])])])
    task = compile_task([a, b, c], lambda work: (2.0, 0.5), [], entry, Op("out", after=[c, mark]))
    assert task.after == [(), (0,), (1,)]
    assert task.outside == [0, 2]
    assert task.result == (0, 2)
    assert task.free == [0]
    assert (task.seconds, task.latency) == ([2.0] * 3, [0.5] * 3)


def test_the_backward_pass_waits_for_the_sums_of_the_loss() -> None:
    """The gradient of the logits needs the sum of exponentials over all vocabulary shards."""
    played = play_job(job({"tp": 2}, 2), SLOW)
    loss = max(played.times.end[n] for n, op in played.instances() if op.name == "loss")
    back = min(played.times.begin[n] for n, op in played.instances() if op.name == "dloss")
    assert back >= loss


def test_messages_name_both_ends() -> None:
    played = play_job(job({"pp": 4}, 4))
    for number, sender, receiver in played.program.transfers:
        work = played.program.ops[number].work
        assert isinstance(work, Transfer)
        assert (work.axis, work.source, work.target) == ("pp", sender, receiver)
        assert abs(sender - receiver) == 1
        assert number in played.program.queues[sender, "pipeline-forward" if receiver > sender else "pipeline-backward"]
