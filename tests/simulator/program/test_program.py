"""Programs and their play: dependencies across actions, stages and devices, and ops that run once a step."""

from __future__ import annotations

from collections import Counter, defaultdict
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
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Op, Transfer
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
from meshcast.simulator.scheduling.schedule import PassDurations, PipelineShape, Schedule
from meshcast.validation.contract.measure import backward_ops, forward_ops, side_ops_of
from meshcast.validation.contract.played import FREE, PAID, Ideal, Played, play_job
from meshcast.validation.contract.step_dataflow import step_problems
from tests.draws import drawn_grid
from tests.strategies import changed, examples, jobs

SLOW = Ideal(links=1e5)


def job(plan: dict[str, Any], gpus: int, **more: Any) -> dict[str, Any]:
    return {
        "model": {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16, **more.pop("model", {})},
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": {"name": "megatron-core", "set": more.pop("framework", {})},
        "plan": plan,
        **more,
    }


def begins(played: Played, device: int) -> list[float]:
    """When each action of a device begins its first op."""
    return [min(played.times.begin[at] for at in played.ops(action)) for action in played.actions(device)]


# ------------------------------------------------------------------------------------------------- sends


@pytest.mark.parametrize(("overlap", "schedule"), drawn_grid([True, False], ["1f1b", "gpipe"]))
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


@examples(50)
@given(job=jobs(), elements=st.sampled_from([1.0, 500.0]))
def test_data_flow_of_drawn_jobs(job: dict[str, Any], elements: float) -> None:
    """Passes wait for their inputs; bucket by bucket, reductions for gradients, and uses for gathered weights."""
    framework = {"overlap": {"dp": True, "pp": True}, "bucket": {"elements": elements, "elements_per_rank": 0.0}}
    assert step_problems(play_job(changed(job, **framework), engine="matrices")) == []


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
@given(job=jobs())
def test_the_update_comes_last_and_clips_together(job: dict[str, Any]) -> None:
    """The norm of all gradients needs every device: its all-reduce begins and ends at the same time everywhere."""
    played = play_job(job, engine="matrices")
    times, norms = played.times, []
    for device in range(played.plan.shape.p):
        ops = list(played.instances(device))
        update = [number for number, op in ops if op.phase == "U"]
        done = max(times.end[number] for number, op in ops if op.phase != "U")
        assert min(times.begin[number] for number in update) >= done * (1 - 1e-12)
        kinds = [op.work.what for _, op in ops if op.phase == "U" and isinstance(op.work, Memory)]
        assert kinds == ["grad-norm", "adam", "zero-grad"]
        meets = [number for number, op in ops if op.name == "grad-norm" and isinstance(op.work, Collective)]
        norms += [(times.begin[number], times.end[number]) for number in meets]
    everyone = any(size > 1 for size in played.plan.mesh.axes.values())
    assert len(norms) == played.plan.shape.p * everyone and len(set(norms)) <= 1


@pytest.mark.parametrize(("tied", "pp", "chunks", "zero"), drawn_grid([True, False], [2, 4, 1], [1, 2], [0, 1]))
def test_a_tied_embedding_is_summed_between_the_ends(tied: bool, pp: int, chunks: int, zero: int) -> None:
    """Only with a pipeline: the first and the last device sum the gradients of their two copies, no other device."""
    plan = {"pp": pp, "tp": 2, "chunks": chunks, "zero": zero}
    played = play_job(job(plan, 2 * pp, model={"tied": tied, "layers": 8}, batch={"global": 2 * pp}))
    ends_at = set()
    for device in range(pp):
        ops = [(n, op) for n, op in played.instances(device) if isinstance(op.work, Collective) and op.work.members]
        ends = tied and pp > 1 and device in (0, pp - 1)
        assert [op.work for _, op in ops] == [Collective("all_reduce", 4 * 128 * 64 // 2, ("pp",), (0, pp - 1))] * ends
        ends_at |= {played.times.end[number] for number, _ in ops}
    assert len(ends_at) == (tied and pp > 1)


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
        alike = [giver for giver in givers if {slot.kind, giver.kind} <= {"F", "B", "BW", "O"}]
        takes = table.stages.takes_from(slot)
        assert {giver.stage for giver in alike} == set(takes if alike or slot.kind != "O" else ())
        assert all(slot.stage in table.stages.gives_to(giver) for giver in alike)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "hanayo"])
@pytest.mark.parametrize("m", [48, 36])
def test_rounds_recur_and_are_most_of_a_long_step(name: str, m: int) -> None:
    table = tabulate(name, m)
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
    """Begin and end of every op, by relaxing until nothing moves: no queue, no events, no SimPy."""
    previous: dict[int, int] = {}
    for queue in program.queues.values():
        previous |= dict(zip(queue[1:], queue, strict=False))
    host: dict[int, float] = defaultdict(float)
    begin, moved = [0.0] * len(program.ops), True
    for number, (device, issue) in enumerate(zip(program.device, program.issue, strict=True)):
        host[device] += issue
        begin[number] = host[device] if issue else 0.0
    end = [start + seconds for start, seconds in zip(begin, program.seconds, strict=True)]
    while moved:
        moved = False
        for number, after in enumerate(program.after):
            starts = [begin[number], *(end[other] + program.latency[other] for other in after)]
            starts += [end[previous[number]]] if number in previous else []
            if max(starts) > begin[number]:
                begin[number], moved = max(starts), True
                end[number] = begin[number] + program.seconds[number]
    return begin, end


@examples(50)
@given(job=jobs(launch=(0.0, 1e-5, 1e-3)), engine=st.sampled_from(["simpy", "sweep"]))
def test_the_engine_finds_the_longest_path(engine: Engine, job: dict[str, Any]) -> None:
    played = play_job(job, Ideal(links=1e6, latency=3e-5), engine=engine)
    begin, end = longest_path(played.flat)
    assert (*played.times.begin, *played.times.end) == pytest.approx((*begin, *end), rel=1e-9, abs=1e-15)


@examples(30)
@given(job=jobs(), price=st.sampled_from([Ideal(links=1e6, latency=3e-5), FREE]))
def test_the_breakdown_adds_up(job: dict[str, Any], price: Ideal) -> None:
    played = play_job(job, price)
    for device in range(played.plan.shape.p):
        account = breakdown(played.program, played.step.span, played.step.occupancy(device), device)
        assert account.step == played.times.span
        assert sum(account.parts.values()) == pytest.approx(account.step, rel=1e-9)
        assert min(account.parts.values()) >= -1e-12 * account.step
        own = [
            n for n, op in played.instances(device) if op.stream == "compute" and not isinstance(op.work, Collective)
        ]
        kernels, counted = sum(played.flat.seconds[n] for n in own), sum(account.parts[kind] for kind in COMPUTING)
        assert counted >= kernels * (1 - 1e-9)
        if price is FREE:
            assert counted == pytest.approx(kernels)
            assert sum(account.parts[axis] for axis in ("tp", "dp", "pp")) <= 1e-12 * account.step


@examples(30)
@given(job=jobs())
def test_sums_count_an_op_where_it_runs_and_a_message_at_both_ends(job: dict[str, Any]) -> None:
    played = play_job(job, Ideal(links=1e6, latency=3e-5), engine="matrices")
    flat, sums = played.flat, played.program.sums
    wanted = np.zeros((played.plan.shape.p, len(COMPUTING) + 1, len(SUMS)))
    ends = {number: (sender, receiver) for number, sender, receiver in flat.sent}
    for number, op in enumerate(flat.ops):
        kinds = {Gemm: "gemm", Attention: "attention"}
        kind = "optimizer" if op.phase == "U" else kinds.get(type(op.work), "memory_bound")
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
