"""Programs and their play: dependencies across actions, stages and devices, and ops that run once a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import ScheduleError
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.engine.simpy_engine import play
from meshcast.simulator.engine.task_time import task_seconds
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Op, Param, Transfer
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.program.block import (
    INPUT,
    SUMS,
    CompiledBlocks,
    Port,
    PricedBlock,
    concatenate,
    interleave,
    resolve_dependencies,
)
from meshcast.simulator.program.build import build
from meshcast.simulator.program.categories import COMPUTING, KINDS
from meshcast.simulator.program.flatten import FlatProgram, FlatTask, flatten_task
from meshcast.simulator.program.join import join_timetables, shift_item
from meshcast.simulator.program.task import Task, make_task
from meshcast.simulator.program.timetable import Timetable, timetable
from meshcast.simulator.report.breakdown import breakdown
from meshcast.simulator.scheduling.schedule import Action, PassDurations, PipelineShape, Schedule
from tests.contract.measure import backward_ops, forward_ops, side_ops_of
from tests.contract.played import FREE, PAID, Ideal, Played, play_job, summed_over
from tests.draws import drawn_grid
from tests.strategies import changed, examples, jobs

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16}
SLOW = Ideal(links=1e5)


def job(plan: dict[str, Any], gpus: int, **more: Any) -> dict[str, Any]:
    settings_ = {"name": "megatron-core", "set": more.pop("framework", {})}
    return {
        "model": {**MODEL, **more.pop("model", {})},
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": settings_,
        "plan": plan,
        **more,
    }


def begins(played: Played, device: int) -> list[float]:
    """When each action of a device begins its first op."""
    return [min(played.times.begin[at] for at in played.ops(action)) for action in played.actions(device)]


# ------------------------------------------------------------------------------------------------- sends


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_send_is_waited_for_when_overlap_is_off(overlap: bool, schedule: str) -> None:
    framework = {"overlap": {"dp": True, "pp": overlap}}
    plan = {"pp": 2, "schedule": schedule}
    played = play_job(job(plan, 2, framework=framework, batch={"global": 4}), SLOW)
    ends = {played.flat.ops[n].name: played.times.end[n] for n, _, _ in played.flat.sent}
    early = 0
    for device in range(2):
        starts = begins(played, device)
        for action, start in zip(played.program.timetable.orders[device], starts[1:], strict=False):
            if (sent := ends.get(f"send {action}")) is not None:
                early += start < sent
                assert overlap or start >= sent
    assert bool(early) == overlap, "with overlap some action begins while the last result is on its way"


@examples(30)
@given(job=jobs())
def test_a_stage_begins_when_its_input_has_come(job: dict[str, Any]) -> None:
    """The first kernel that needs the message begins no earlier than it arrives, latency included."""
    played = play_job(job, Ideal(links=1e6, latency=1e-4))
    flat, times = played.flat, played.times
    arrives = {flat.ops[n].name: times.end[n] + flat.latency[n] for n, _, _ in flat.sent}
    met = 0
    for number, action in enumerate(played.program.timetable.actions):
        step = -1 if action.kind == "F" else 1
        source = f"send {action.stage + step}{action.kind}{action.microbatch}"
        if source in arrives:
            met += 1
            begin = min(times.begin[at] for at in played.ops(number) if at in reading(played, number))
            assert begin >= arrives[source] - 1e-12
    assert met == len(arrives)


def reading(played: Played, action: int) -> set[int]:
    """The ops of an action that read the output of the stage before, by the marks of its first unit run."""
    stage, kind, *_ = played.program.timetable.actions[action]
    unit_runs = played.stages[stage].unit_runs
    unit_run = unit_runs[0] if kind == "F" else unit_runs[-1]
    fragment = unit_run.fragment
    ops, mark = (
        (fragment.forward, fragment.entry[unit_run.residual_in or ""])
        if kind == "F"
        else (fragment.backward, fragment.grad_entry[unit_run.residual_out or ""])
    )
    start = played.flat.first[action] + len(side_ops_of(played.task(action).ahead))
    return {start + i for i, op in enumerate(ops) if id(mark) in direct(op)}


def direct(op: Op) -> set[int]:
    """The predecessors of an op, followed through marks."""
    found: set[int] = set()
    left = list(op.after)
    while left:
        other = left.pop()
        found.add(id(other))
        left += other.after if other.work is None else []
    return found


def test_a_chunk_waits_for_the_chunk_before_it_on_its_own_device() -> None:
    """One device, two chunks, ZeRO-1: the second chunk waits for the last op of the first, gathers counted or not."""
    schemes = [
        {"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 2},
        {"use": "data/zero-1", "over": "dp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
    ]
    plan = {"mesh": {"pp": 1, "dp": 2, "tp": 2}, "schemes": schemes}
    played = play_job(job(plan, 4, batch={"global": 4}))
    actions, flat = played.program.timetable.actions, played.flat
    for number, action in enumerate(actions):
        if (action.stage, action.kind) == (1, "F"):
            before = actions.index(Action(0, "F", action.microbatch))
            result = flat.behind[before] - 1
            assert flat.ops[result] is played.stages[0].unit_runs[-1].fragment.forward[-1]
            assert reading(played, number)
            for at in reading(played, number):
                assert result in flat.after[at], action


# ------------------------------------------------------------------------------------------ once a step


@examples(50)
@given(job=jobs())
def test_ops_of_the_first_or_last_micro_batch_run_once(job: dict[str, Any]) -> None:
    played = play_job(job)
    shape, actions = played.plan.shape, played.program.timetable.actions
    for stage in range(shape.stages):
        order = [action for action in actions if action.stage == stage]
        count: Counter[int] = Counter()
        of: dict[int, Op] = {}
        for action in order:
            turn = [other.microbatch for other in order if other.kind == action.kind]
            for at in played.ops(actions.index(action)):
                op = played.flat.ops[at]
                count[id(op)] += 1
                of[id(op)] = op
                if op.when == "first":
                    # Weights that were freed are gathered again for the first backward pass.
                    assert action.kind == ("F" if op.phase == "F" else "BW") and action.microbatch == turn[0]
                if op.when == "last":
                    assert action.kind == "BW" and action.microbatch == turn[-1]
        stage_ops = played.stages[stage]
        copies = Counter(id(op) for op in forward_ops(stage_ops) + backward_ops(stage_ops))
        again = stage_ops.again if played.gathers_again(stage) else ()
        once = Counter(id(op) for op in side_ops_of((*stage_ops.ahead, *again, *stage_ops.behind)))
        assert set(once) == {number for number, op in of.items() if op.when != "every"}
        assert count == Counter({number: shape.m * n for number, n in copies.items()}) + once


@examples(25)
@given(job=jobs(datas=("data/zero-1",)), elements=st.sampled_from([1.0, 500.0]))
def test_a_bucket_waits_for_its_gradients_and_weights_wait_for_theirs(job: dict[str, Any], elements: float) -> None:
    """Bucket by bucket, a reduction begins behind the last of its gradients, a use behind its gather."""
    framework = {"overlap": {"dp": True, "pp": True}, "bucket": {"elements": elements, "elements_per_rank": 0.0}}
    played = play_job(changed(job, **framework), SLOW)
    times = played.times
    for stage in range(played.plan.shape.stages):
        forward, backward = ends_of(played, stage)
        for action, each, begun in (
            (forward, 2, list(uses(played, stage, forward))),
            (backward, 4, list(gradients(played, stage, backward))),
        ):
            moments = defaultdict(list)
            for param, when in begun:
                if axes := summed_over(param, played.plan):
                    moments[axes].append((param, when))
            for at in played.ops(action):
                if played.flat.ops[at].stream != "data":
                    continue
                work = played.flat.ops[at].work
                assert isinstance(work, Collective)
                left = work.nbytes // each
                assert work.operation == ("all_gather" if action == forward else "reduce_scatter")
                while left > 0:
                    param, when = moments[work.axes].pop(0)
                    left -= param.size
                    if action == forward:
                        assert when >= times.end[at] - 1e-12, f"{param.name} is used before it has been gathered"
                    else:
                        assert times.begin[at] >= when - 1e-12, f"{param.name} is reduced before its gradient exists"
                assert left == 0
            assert not any(moments.values()), "every parameter is in a bucket"


def ends_of(played: Played, stage: int) -> tuple[int, int]:
    """The first forward and the last backward action of a stage."""
    own = [number for number, action in enumerate(played.program.timetable.actions) if action.stage == stage]
    forward, backward = (
        [number for number in own if played.program.timetable.actions[number].kind == kind] for kind in ("F", "BW")
    )
    return forward[0], backward[-1]


def uses(played: Played, stage: int, action: int) -> Iterator[tuple[Param, float]]:
    """When each parameter is first used in a forward pass."""
    start = played.flat.first[action] + len(side_ops_of(played.task(action).ahead))
    for unit_run in played.stages[stage].unit_runs:
        place = {id(op): i for i, op in enumerate(unit_run.fragment.forward)}
        for _ in range(unit_run.count):
            for param in unit_run.fragment.params:
                yield param, played.times.begin[start + place[id(param.used)]]
            start += len(place)


def gradients(played: Played, stage: int, action: int) -> Iterator[tuple[Param, float]]:
    """When the gradient of each parameter exists in a backward pass, last one first."""
    flat, times = played.flat, played.times
    name = f"send {stage + 1}BW{played.program.timetable.actions[action].microbatch}"
    came = max((times.end[n] + flat.latency[n] for n, _, _ in flat.sent if flat.ops[n].name == name), default=0.0)
    at = flat.first[action]
    for unit_run in reversed(played.stages[stage].unit_runs):
        fragment = unit_run.fragment
        for _ in range(unit_run.count):
            known = {id(op): times.end[at + i] + flat.latency[at + i] for i, op in enumerate(fragment.backward)}
            if unit_run.residual_out:
                known[id(fragment.grad_entry[unit_run.residual_out])] = came
            for param in reversed(fragment.params):
                yield param, moment(param.ready, known)
            came = moment(fragment.grad_exit[unit_run.residual_in], known) if unit_run.residual_in else 0.0
            at += len(fragment.backward)


def moment(op: Op, known: dict[int, float]) -> float:
    """When an op has ended, or the predecessors of a mark; an op of another pass has long ended."""
    if id(op) in known:
        return known[id(op)]
    return max((moment(other, known) for other in op.after), default=0.0) if op.work is None else 0.0


@examples(25)
@given(job=jobs())
def test_the_update_comes_last_and_clips_together(job: dict[str, Any]) -> None:
    """The norm of all gradients needs every device: its all-reduce begins and ends at the same time everywhere."""
    played = play_job(job)
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


@pytest.mark.parametrize(("tied", "pp", "chunks", "zero"), drawn_grid([True, False], [1, 2, 4], [1, 2], [0, 1]))
def test_a_tied_embedding_is_summed_between_the_ends(tied: bool, pp: int, chunks: int, zero: int) -> None:
    """Only with a pipeline: the first and the last device sum the gradients of their two copies, no other device."""
    plan = {"pp": pp, "tp": 2, "chunks": chunks, "zero": zero}
    config = job(plan, 2 * pp, model={"tied": tied, "layers": 8}, batch={"global": 2 * pp})
    played = play_job(config)
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


# --------------------------------------------------------------------------------------------- timetables

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved-1f1b": {"chunks": 2},
    "zb-h1": {},
    "zb-v": {},
    "hanayo": {"chunks": 2},
    "dualpipe": {},
    "seq1f1b": {"slices": 2},
    "bpipe": {},
}


@cache
def tabulate(name: str, m: int = 8, update_interval: int = 0) -> Timetable:
    """The timetable of a schedule of four devices whose passes last equally long."""
    kind, options = find_scheme(f"pipeline/{name}"), SCHEDULES[name]
    schedule = kind(("pp",), kind.Options(**options))
    assert isinstance(schedule, Schedule)
    shape = PipelineShape(4, m, schedule.chunks_per_device(), options.get("slices", 1))
    each = (1.0,) * shape.stages
    durations = PassDurations(each, each, each, each, 0.0) if schedule.needs_durations else None
    return timetable(schedule, shape, durations, update_interval)


PASSES = ("F", "B", "BW", "O")
"""Kinds whose results go to other stages, updates that are validated in turn among them."""

TABLES = [*((name, 0) for name in SCHEDULES), ("zb-h1", 4)]
"""Schedules with their micro-batches to an update: of one with a flush the devices validate updates in turn."""


@pytest.mark.parametrize(("name", "update_interval"), TABLES)
def test_a_slot_is_what_its_actions_have_in_common(name: str, update_interval: int) -> None:
    table = tabulate(name, 8, update_interval)
    runs, updates = defaultdict[tuple[int, str, int], list[int]](list), Counter[int]()
    for number, (action, device) in enumerate(zip(table.actions, table.device_of, strict=True)):
        slot = table.slots[table.slot[number]]
        assert (slot.stage, slot.kind, slot.variant) == action[:2] + action[3:]
        kind = {"W": "BW"}.get(action.kind, action.kind)  # either completes the gradients of weights
        runs[action.stage, kind, updates[device]].append(number)
        updates[device] += action.kind == "O"
    for numbers in runs.values():
        slots = [table.slots[table.slot[number]] for number in numbers]
        assert [slot.first for slot in slots] == [True] + [False] * (len(slots) - 1)
        assert [slot.last for slot in slots] == [False] * (len(slots) - 1) + [True]


@pytest.mark.parametrize(("name", "update_interval"), TABLES)
def test_an_action_needs_the_stages_that_give_to_its_stage(name: str, update_interval: int) -> None:
    table = tabulate(name, 8, update_interval)
    place = {action: at for at, action in enumerate(table.sequence)}
    for number, need in enumerate(table.need):
        slot, needs = table.slots[table.slot[number]], [need, *table.further_needs.get(number, ())]
        assert all(place[other] < place[number] for other in needs if other >= 0)
        givers = [table.slots[table.slot[other]] for other in needs if other >= 0]
        alike = [giver for giver in givers if slot.kind in PASSES and giver.kind in PASSES]
        takes = table.stages.takes_from(slot)
        assert {giver.stage for giver in alike} == set(takes if alike or slot.kind != "O" else ())
        assert all(slot.stage in table.stages.gives_to(giver) for giver in alike)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "hanayo"])
def test_rounds_recur_and_are_most_of_a_long_step(name: str) -> None:
    table = tabulate(name, 48)
    rounds = table.rounds
    assert rounds is not None
    begins = np.array(rounds.first)[table.device_of]
    turn = (np.arange(len(table.slot)) - begins) // rounds.length
    for number, need in enumerate(table.need):
        if 0 <= turn[number] < rounds.count:
            assert need < 0 or turn[need] <= turn[number]
        if 0 <= turn[number] < rounds.count - 1:
            later = number + rounds.length
            assert table.slot[later] == table.slot[number]
            assert table.need[later] == (need + rounds.length if need >= 0 else -1)
    read = {need for number, need in enumerate(table.need) if need >= 0 > turn[need] and turn[number] >= 0}
    assert sorted(rounds.waiting) == sorted(read)
    assert rounds.count * rounds.length * table.shape.p > 0.6 * len(table.slot)
    before, first, behind = (set(part.tolist()) for part in table.sequence_by_round)
    for numbers, inside in ((before, turn < 0), (first, turn == 0), (behind, turn >= rounds.count)):
        assert numbers == set(np.flatnonzero(inside).tolist())


def test_pipelines_side_by_side_have_the_actions_that_they_have_alone() -> None:
    tables = [tabulate("1f1b"), tabulate("bpipe"), tabulate("dualpipe"), tabulate("1f1b", 4)]
    joined, at, stage, device = join_timetables(tables), 0, 0, 0
    assert (joined.shape.p, joined.shape.m) == (16, 8) and joined.rounds is None
    place = {action: turn for turn, action in enumerate(joined.sequence)}
    for table in tables:
        assert joined.orders[device : device + 4] == [[shift_item(item, stage) for item in o] for o in table.orders]
        for number, action in enumerate(table.actions):
            assert joined.actions[at + number] == action._replace(stage=action.stage + stage)
            assert joined.device_of[at + number] == table.device_of[number] + device
            needs = [(table.need[number], joined.need[at + number])]
            more = table.further_needs.get(number, ()), joined.further_needs.get(at + number, ())
            for alone, beside in [*needs, *zip(*more, strict=True)]:
                assert beside == (alone + at if alone >= 0 else -1)
                assert beside < 0 or place[beside] < place[at + number]
            slot, other = table.slots[table.slot[number]], joined.slots[joined.slot[at + number]]
            assert other[1:5] == slot[1:5] and (other.stage, other.follows) == (slot.stage + stage, slot.follows)
            assert other.keeper == (slot.keeper + device if slot.keeper >= 0 else -1)
            assert joined.stages.owner(other) == table.stages.owner(slot) + device
            assert (other.partner and other.partner.stage) == (slot.partner and slot.partner.stage + stage)
            for shared, own in ((joined.stages.gives_to(other), table.stages.gives_to(slot)),) * (slot.kind != "O"):
                assert shared == tuple(stage + other_stage for other_stage in own)
        at, stage, device = at + len(table.slot), stage + len(table.stages.devices), device + table.shape.p


def test_further_results_lie_behind_the_actions_of_all_pipelines() -> None:
    """Each pipeline needs its own."""
    alone = tabulate("1f1b")
    count = len(alone.slot)
    further = range(count, count + 2)
    table = replace(alone, extra_results={0: further}, further_needs={5: tuple(further)})
    joined = join_timetables([table] * 3)
    assert joined.results == 3 * (count + 2)
    assert [*chain(*joined.extra_results.values())] == [*range(3 * count, joined.results)]
    for at in range(0, 3 * count, count):
        assert joined.further_needs[at + 5] == tuple(joined.extra_results[at])


# ------------------------------------------------------------------------------------------------- blocks


def depend(flat: FlatTask) -> list[Any]:
    """What the ops of a task wait for, in which order they are issued, and what its result waits for."""
    ops = [(op, seconds, latency, set(after)) for op, seconds, latency, _, after in flat.ops]
    return [ops, flat.outside, [set(places) for places in flat.result], flat.through]


@pytest.mark.parametrize("plan", [{"tp": 2, "pp": 2, "recompute": "full"}, {"pp": 2, "fsdp": True, "dp": 2}])
def test_joint_passes_are_those_that_they_are_made_of(plan: dict[str, Any]) -> None:
    """Copies in series as one block; and two passes as a pair, whose ops each wait for what they wait for alone."""
    played, blocks = play_job(job(plan, 4, model={"layers": 4}, batch={"global": 8})), CompiledBlocks()
    for stage in played.stages:
        tasks = [make_task(played.stage_ops(played.stages.index(stage)), kind, PAID, blocks) for kind in ("F", "BW")]
        joint: list[PricedBlock] = []
        for task in tasks:
            block, copies = concatenate(task.parts)
            before: set[int] = {INPUT}  # where a copy finds its input: the result of the one before
            for part, where_copies in zip(task.parts, copies, strict=True):
                (port,) = part.block.ports
                for own in where_copies:
                    assert {*own[INPUT]} == before
                    assert [block.block.ops[own[at][0]] for at in range(len(part.block.ops))] == part.block.ops
                    before = (before if port.through else set()) | {own[at][0] for at in port.exit}
            whole, parts = (Task(of, [], []) for of in ((block,), task.parts))
            assert depend(flatten_task(whole, 0.0)) == depend(flatten_task(parts, 0.0))
            assert whole.memory.top == pytest.approx(parts.memory.top)
            assert whole.memory.net == pytest.approx(parts.memory.net)
            joint.append(block)
        pair, where = interleave(joint[0], joint[1])
        for port, block, places in zip(pair.block.ports, joint, where, strict=True):
            (alone,) = block.block.ports
            assert (sorted(port.entry), sorted(port.exit)) == tuple(
                sorted(places[at] for at in ends) for ends in (alone.entry, alone.exit)
            )
            for at, op in enumerate(block.block.ops):
                assert pair.block.ops[places[at]] is op and pair.seconds[places[at]] == block.seconds[at]
                assert set(pair.block.after[places[at]]) == {places[other] for other in block.block.after[at]}
            for stream in block.block.streams:
                queue = [places[at] for at, op in enumerate(block.block.ops) if op.stream == stream]
                assert queue == sorted(queue), "a stream of a pass keeps its order"
        assert len(pair.block.ops) == sum(len(block.block.ops) for block in joint)
        assert pair.block.memory.net == pytest.approx(sum(block.block.memory.net for block in joint))
        together, *alone_seconds = (task_seconds(Task((part,), [], [])) for part in (pair, *joint))
        assert max(alone_seconds) <= together <= sum(alone_seconds) * (1 + 1e-12)


def test_a_message_between_two_kinds_of_gpus_is_that_of_the_slower() -> None:
    """By when it arrives: one occupies links for longer, the other has the latency."""
    played = play_job(job({"pp": 2}, 2))
    kinds = Ideal(links=1e7), Ideal(links=2e7, latency=1.0)
    for prices in (kinds, kinds[::-1]):
        program = build(played.program.timetable, played.stages, prices)
        assert {send.latency for _, send in program.sent} == {1.0}


# ------------------------------------------------------------------------------------------- the engine


def longest_path(program: FlatProgram) -> tuple[list[float], list[float]]:
    """Begin and end of every op, by relaxing in any order until nothing moves: no queue, no events, no SimPy."""
    before: list[list[int]] = [list(after) for after in program.after]
    previous: dict[int, int] = {}
    for queue in program.queues.values():
        previous |= dict(zip(queue[1:], queue, strict=False))
    host: dict[int, float] = defaultdict(float)
    issued = []
    for device, issue in zip(program.device, program.issue, strict=True):
        host[device] += issue
        issued.append(host[device] if issue else 0.0)
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
        starts = [issued[number], *(end[other] + program.latency[other] for other in before[number])]
        if number in previous:
            starts.append(end[previous[number]])
        begin[number] = max(starts)
        end[number] = begin[number] + program.seconds[number]
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    assert not any(missing), "a circle"
    return begin, end


@pytest.mark.parametrize("engine", ["simpy", "sweep"])
@examples(50)
@given(job=jobs(launch=(0.0, 1e-5, 1e-3)))
def test_the_engine_finds_the_longest_path(engine: Engine, job: dict[str, Any]) -> None:
    played = play_job(job, Ideal(links=1e6, latency=3e-5), engine=engine)
    begin, end = longest_path(played.flat)
    assert played.times.begin == pytest.approx(begin, rel=1e-9, abs=1e-15)
    assert played.times.end == pytest.approx(end, rel=1e-9, abs=1e-15)


@examples(30)
@given(job=jobs())
def test_the_breakdown_adds_up(job: dict[str, Any]) -> None:
    for price in (Ideal(links=1e6, latency=3e-5), FREE):
        played = play_job(job, price)
        for device in range(played.plan.shape.p):
            account = breakdown(played.program, played.step.span, played.step.occupancy(device), device)
            assert account.step == played.times.span
            assert sum(account.parts.values()) == pytest.approx(account.step, rel=1e-9)
            assert min(account.parts.values()) >= -1e-12 * account.step
            kernels = sum(
                played.flat.seconds[number]
                for number, op in played.instances(device)
                if op.stream == "compute" and not isinstance(op.work, Collective)
            )
            counted = sum(account.parts[kind] for kind in ("gemm", "attention", "memory_bound", "optimizer"))
            assert counted >= kernels * (1 - 1e-9)
            if price is FREE:
                assert counted == pytest.approx(kernels)
                assert sum(account.parts[axis] for axis in ("tp", "dp", "pp")) <= 1e-12 * account.step


@examples(30)
@given(job=jobs())
def test_sums_count_an_op_where_it_runs_and_a_message_at_both_ends(job: dict[str, Any]) -> None:
    played = play_job(job, Ideal(links=1e6, latency=3e-5))
    flat, sums = played.flat, played.program.sums
    wanted = np.zeros((played.plan.shape.p, len(COMPUTING) + 1, len(SUMS)))
    ends = {number: (sender, receiver) for number, sender, receiver in flat.sent}
    for number, op in enumerate(flat.ops):
        kind = (
            "gemm" if isinstance(op.work, Gemm) else "attention" if isinstance(op.work, Attention) else "memory_bound"
        )
        kind = "optimizer" if op.phase == "U" else kind
        place = COMPUTING.index(kind) if op.stream == "compute" else -1
        flops = op.work.flops if op.work is not None else 0.0
        for device in ends.get(number, flat.device[number : number + 1]):
            wanted[device, place] += flat.seconds[number], 0.0, flat.seconds[number] + flat.latency[number], flops
    beside = sums[:, len(COMPUTING) :].sum(axis=1, keepdims=True)
    assert KINDS[: len(COMPUTING)] == COMPUTING
    assert np.hstack([sums[:, : len(COMPUTING)], beside]) == pytest.approx(wanted)


def test_deadlocks_are_found() -> None:
    flat = FlatProgram()
    flat.add(Op("first", work=Memory("add", 1, 1)), 1.0, 0.0, 0.0, (1,), 0)
    flat.add(Op("second", work=Memory("add", 1, 1)), 1.0, 0.0, 0.0, (), 0)
    with pytest.raises(ScheduleError, match="first"):
        play(flat)


def test_compiling_replaces_marks_by_their_predecessors() -> None:
    entry, other = Op("in"), Op("other")
    a = Op("a", work=Memory("add", 1, 1), after=[entry])
    mark = Op("mark", after=[a, other])
    b = Op("b", work=Memory("add", 1, 1), after=[mark])
    c = Op("c", work=Memory("add", 1, 1), after=[Op("far", after=[Op("farther", after=[b, entry])])])
    assert resolve_dependencies([a, b, c], entry, Op("out", after=[c, mark])) == (
        [(), (0,), (1,)],
        Port((0, 2), (0, 2), False),
    )
    # A result that also waits for what comes in, by no op of this pass.
    assert resolve_dependencies([a], entry, Op("out", after=[a, entry]))[1] == Port((0,), (0,), True)
    assert resolve_dependencies([], entry, Op("out", after=[Op("mark", after=[entry])])) == ([], Port())


def test_the_backward_pass_waits_for_the_sums_of_the_loss() -> None:
    """The gradient of the logits needs the sum of exponentials over all vocabulary shards."""
    played = play_job(job({"tp": 2}, 2), SLOW)
    loss = max(played.times.end[n] for n, op in played.instances() if op.name == "loss")
    back = min(played.times.begin[n] for n, op in played.instances() if op.name == "dloss")
    assert back >= loss


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", "bpipe"])
def test_messages_name_both_ends(schedule: str) -> None:
    played = play_job(job({"pp": 4, "schedule": schedule}, 4, batch={"global": 8}))
    assert len(played.flat.sent) == 6 * played.plan.shape.m
    for number, sender, receiver in played.flat.sent:
        work = played.flat.ops[number].work
        assert isinstance(work, Transfer)
        assert (work.axis, work.source, work.target) == ("pp", sender, receiver)
        assert abs(sender - receiver) == 1
        stream = "pipeline-forward" if played.flat.ops[number].phase == "F" else "pipeline-backward"
        assert number in played.flat.queues[sender, stream]
        assert (receiver > sender) == (stream == "pipeline-forward") or schedule == "dualpipe"
    messages = [(number, op.work) for number, op in played.instances() if isinstance(op.work, Transfer)]
    assert len(messages) >= len(played.flat.sent) and (len(messages) > len(played.flat.sent)) == (schedule == "bpipe")
    assert all(work.source == played.flat.device[number] != work.target for number, work in messages)


def test_weight_gradients_of_an_embedding_alone_in_its_stage_wait_for_the_gradient_that_arrives() -> None:
    """Without tensor parallelism its input gradient has no kernel, and the next pass began too early."""
    job = {
        "model": {"preset": "llama3-8b", "layers": 2},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "batch": {"global": 8, "micro": 1, "sequence": 2048},
        "plan": {"pp": 4, "schedule": "zb-h1", "partition": "ends-as-layers"},
    }
    step = simulate(job).play.step
    flat, times = step.flat, step.times
    begins = sorted(times.begin[i] for i, op in enumerate(flat.ops) if op.name == "wembedding")
    arrivals = sorted(times.end[i] for i, sender, receiver in flat.sent if (sender, receiver) == (1, 0))
    assert len(begins) == len(arrivals) == 8
    assert all(begin >= arrival for begin, arrival in zip(begins, arrivals, strict=True))
    assert begins[0] > times.span / 10
