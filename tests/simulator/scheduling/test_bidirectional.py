"""Bidirectional schedules and overlapped passes: Chimera, DualPipe, DualPipe-V."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from time import process_time
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshcast.hardware.errors import ScheduleError
from meshcast.simulator import simulate
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.engine.longest_path import longest_path
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.forecast.step import play_forecast
from meshcast.simulator.ir.ops import COMPUTE, Attention, Gemm, Op
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import Block, BlockPrices, Port, PricedBlock, concatenate, interleave
from meshcast.simulator.program.build import build
from meshcast.simulator.program.flatten import flatten
from meshcast.simulator.program.messages import StageMessages
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.report.breakdown import breakdown
from meshcast.simulator.report.report import Report
from meshcast.simulator.scheduling.schedule import (
    Action,
    OverlappedPasses,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)
from meshcast.validation.contract.played import Ideal, play_job
from meshcast.validation.pipelines.cases import ScheduleCase, ScheduleReplay, replay
from tests.draws import drawn_grid
from tests.simulator.engine.engines import WAYS, check_alike, play_by_engines
from tests.simulator.scheduling.schedules import job_of, make_schedule
from tests.strategies import PAIRED, PRICES, SECONDS, TWO_WAYS, examples, jobs

# ------------------------------------------------------------------------------------------------------------- orders


def printed(name: str, shape: PipelineShape, device: int, whole: str = "B") -> str:
    """An order as papers print it: upper case for the first direction (or chunk), lower case for the second,
    micro-batches counted in each direction. whole: the letter of a whole backward pass."""
    schedule = make_schedule(name)

    def of(action: Action) -> str:
        number = action.microbatch - schedule.microbatches(shape, action.stage).start
        letter = whole if action.kind == "BW" else action.kind
        return f"{letter.lower() if action.stage >= shape.p else letter}{number}"

    def word(turn: ScheduleItem) -> str:
        return f"{{{of(turn.forward)}+{of(turn.backward)}}}" if isinstance(turn, OverlappedPasses) else of(turn)

    return " ".join(map(word, schedule.order(shape, device)))


PRINTED = {
    ("chimera", 4, "B"): {0: "F0 F1 f0 b0 f1 b1 B0 B1", 1: "F0 f0 F1 f1 b0 B0 b1 B1"},
    ("chimera", 8, "B"): {
        0: "F0 F1 f0 b0 f1 b1 B0 F2 B1 F3 f2 b2 f3 b3 B2 B3",
        1: "F0 f0 F1 f1 b0 B0 b1 B1 F2 f2 F3 f3 b2 B2 b3 B3",
    },
    ("dualpipe", 8, "D"): {
        0: "F0 F1 F2 f0 b0 w0 f1 {F3+d1} {f2+D0} d2 {f3+D1} d3 B2 W2 B3 W3",
        1: "F0 f0 F1 f1 F2 d0 {f2+D0} {F3+d1} {f3+D1} d2 D2 b3 B3 w3 W3",
    },
    ("dualpipe-v", 8, "D"): {
        0: "F0 F1 F2 F3 F4 F5 F6 f0 b0 w0 f1 b1 w1 f2 b2 w2 f3 {F7+d3} {f4+D0} d4 {f5+D1} d5 {f6+D2} d6 {f7+D3} d7 "
        "B4 W4 B5 W5 B6 W6 B7 W7",
        3: "F0 f0 F1 f1 F2 f2 F3 f3 F4 d0 {f4+D0} {F5+d1} {f5+D1} {F6+d2} {f6+D2} {F7+d3} {f7+D3} d4 D4 d5 D5 b6 B6 "
        "b7 B7 w6 W6 w7 W7",
    },
}


@pytest.mark.parametrize("at", PRINTED)
def test_orders_as_they_are_printed(at: tuple[str, int, str]) -> None:
    """In two directions the order of the other end is the same with both directions swapped."""
    name, m, whole = at
    for device, row in PRINTED[at].items():
        assert printed(name, PipelineShape(4, m, 2), device, whole) == row
        if name != "dualpipe-v":
            assert printed(name, PipelineShape(4, m, 2), 3 - device, whole) == row.swapcase()


# ------------------------------------------------------------------------------------------------------- closed forms


def max_idle(run: ScheduleReplay) -> float:
    """Devices have different numbers of overlapped pairs, so they are not equally busy."""
    return run.makespan - min(run.busy)


@given(apart=st.integers(1, 4), pairs=st.integers(1, 4), groups=st.integers(1, 3), tf=SECONDS, tb=SECONDS, tw=SECONDS)
def test_pairs_of_chimera_idle_like_fewer_devices(
    apart: int, pairs: int, groups: int, tf: float, tb: float, tw: float
) -> None:
    """D/f - 2 bubbles of equal passes in place of D - 2 (arXiv 2107.06925, section 3.6); none for f = D/2."""
    q = 2 * apart
    p, m = q * pairs, q * pairs * groups
    run = replay(ScheduleCase(schedule="chimera", p=p, m=m, t_f=tf, t_b=tb, t_w=tw, pairs=pairs))
    alone = replay(ScheduleCase(schedule="chimera", p=q, m=q * groups, t_f=tf, t_b=tb, t_w=tw))
    work = tf + tb + tw
    assert run.makespan - m * work == pytest.approx(alone.makespan - q * groups * work, abs=1e-9)
    assert max(run.in_flight("B")) == p and min(run.in_flight("B")) == p + 1 - apart


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@given(half=st.integers(1, 8), more=st.integers(0, 12), time=SECONDS, hidden=st.sampled_from([0, 0.25, 0.5, 1]))
def test_the_bubble_of_dualpipe(name: str, half: int, more: int, time: float, hidden: float) -> None:
    """For equal F, B and W, and a pair that takes between a whole backward pass and the sum of both passes. In a V half
    as many devices have two chunks each, of half the time."""
    pair, chunks = (3 - hidden) * time, 1 if name == "dualpipe" else 2
    p, m, each = 2 * half // chunks, (4 * half + 2 * more) // chunks, chunks * time
    case = ScheduleCase(schedule=name, p=p, m=m, t_f=each, t_b=each, t_w=each, t_pair=chunks * pair)
    assert max_idle(replay(case)) == pytest.approx((half - 1) * (pair + 2 * time - 3 * time))


@pytest.mark.parametrize("turns", [2, 3, 4])
@pytest.mark.parametrize(("p", "pair", "idle"), [(4, 12, 10), (8, 12, 30), (4, 9, 7), (8, 9, 21)])
def test_dualpipe_with_unequal_times_idles_less(p: int, pair: float, idle: float, turns: int) -> None:
    run = replay(ScheduleCase(schedule="dualpipe", p=p, m=turns * p, t_f=4, t_b=5, t_w=3, t_pair=pair))
    assert max_idle(run) == pytest.approx(idle)
    assert idle < (p / 2 - 1) * (pair + 8 - 9)


# -------------------------------------------------------------------------------------------------------------- pairs


def part(*ops: tuple[str, float, tuple[int, ...]], count: int = 1) -> PricedBlock:
    """A pass: ops with stream, duration and dependencies; the first waits for the input, the last makes the output."""
    after = [waits for *_, waits in ops]
    port, nothing = Port((0,), (len(ops) - 1,), False), (0.0,) * len(ops)
    block = Block([Op(f"{i}", stream) for i, (stream, *_) in enumerate(ops)], after, (port,), [])
    return PricedBlock(BlockPrices(block, tuple(seconds for _, seconds, _ in ops), nothing, nothing), count)


def test_overlapped_passes_take_turns_as_their_inputs_arrive() -> None:
    """The communication of each pass is hidden by the computation of the other, layer by layer."""
    forward = part((COMPUTE, 1, ()), ("expert", 3, (0,)), (COMPUTE, 1, (1,)), count=2)
    backward = part((COMPUTE, 2, ()), ("expert", 3, (0,)), (COMPUTE, 2, (1,)), count=2)
    both, where = interleave(concatenate([forward])[0], concatenate([backward])[0])
    assert [op.stream for op in both.block.ops].count("expert") == 4
    begin, end = play_block(both)
    # Each computes its next layer while the other communicates: 16 seconds instead of 10 and 14.
    assert [begin[where[0][i]] for i in range(6)] == [0, 1, 4, 5, 7, 11]
    assert [begin[where[1][i]] for i in range(6)] == [1, 4, 7, 9, 11, 14]
    assert max(end) == 16
    assert [(port.entry, port.exit) for port in both.block.ports] == [((at[0],), (at[5],)) for at in where]


def play_block(part: PricedBlock) -> tuple[list[float], list[float]]:
    """When the ops of a block begin and end."""
    begin, free, end = list[float](), dict[str, float](), list[float]()
    for op, seconds, after in zip(part.block.ops, part.seconds, part.block.after, strict=True):
        begin.append(max(free.get(op.stream, 0.0), *(end[i] for i in after), 0.0))
        free[op.stream] = begin[-1] + seconds
        end.append(free[op.stream])
    return begin, end


def test_of_two_passes_that_wait_for_a_busy_stream_the_longer_path_goes_first() -> None:
    """Four all-to-alls of the forward pass do not keep waiting that of the backward pass, behind which more follows."""
    forward = part((COMPUTE, 1, ()), *(("expert", 3, (0,)) for _ in range(4)))
    backward = part((COMPUTE, 1, ()), ("expert", 3, (0,)), (COMPUTE, 9, (1,)))
    for one, other in ((forward, backward), (backward, forward)):
        both, where = interleave(one, other)
        begin, end = play_block(both)
        assert begin[where[int(one is forward)][1]] <= 4 and max(end) == 16
    # All-to-alls of two equal passes take turns, that which was ready first before the other.
    one, other = (part((COMPUTE, 1, ()), ("expert", 3, (0,)), (COMPUTE, 1, (1,)), ("expert", 3, (2,))) for _ in "12")
    both, where = interleave(one, other)
    begin, _ = play_block(both)
    assert sorted((begin[where[i][at]], i) for i in (0, 1) for at in (1, 3)) == [(1, 0), (4, 1), (7, 0), (10, 1)]
    # Kernels of a pass run while its all-to-all, issued before them, waits for that of the other pass.
    forward = part((COMPUTE, 1, ()), ("expert", 10, (0,)), (COMPUTE, 4, (0,)), (COMPUTE, 1, (1, 2)))
    backward = part(("expert", 20, ()), (COMPUTE, 1, (0,)), (COMPUTE, 4, (1,)))
    both, where = interleave(forward, backward)
    assert play_block(both)[0][where[0][2]] == 1


@pytest.mark.parametrize("use", PAIRED)
@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_no_pair_begins_or_ends_a_stage(use: str, p: int) -> None:
    """The first forward and last backward pass of a stage, which data schemes extend, are never overlapped."""
    for m in range(2 * p, 4 * p, 2):
        slots = timetable(make_schedule(use.partition("/")[2]), PipelineShape(p, m, 2)).slots
        leaders = [slot for slot in slots if slot.partner]
        assert leaders and not any(slot.first for slot in leaders)
        assert not any(slot.partner.last for slot in leaders if slot.partner)


def program_in(plan: Plan, orders: list[list[ScheduleItem]], price: Ideal) -> tuple[Any, Program]:
    """The stages of a plan, and their program in other orders of the same placement of stages."""

    class Given(type(plan.schedule)):  # type: ignore[misc]
        name = "given"

        def orders(self, shape: PipelineShape, durations: Any = None) -> list[list[ScheduleItem]]:
            return orders

    stages, updates = lower_stages(plan)
    table = timetable(Given(plan.schedule.axes, plan.schedule.options, plan.mesh), plan.shape)
    messages, framework = StageMessages(plan.ranks.pipeline_axis), plan.job.framework
    return stages, build(table, stages, price, messages, framework.overlap.pp, updates, framework.launch_s)


# ------------------------------------------------------------------------------------------------------------ engines


def any_orders(schedule: Schedule, shape: PipelineShape, random: Random) -> list[list[ScheduleItem]]:
    """Random valid orders: whole or split backward passes, and some neighbours as overlapped pairs."""
    left: dict[Action, set[tuple[int, str, int]]] = {}
    stages = range(shape.stages)
    for stage in stages:
        for k in schedule.microbatches(shape, stage):
            before = {(other, "F", k) for other in schedule.predecessors(shape, stage)}
            behind = {(other, "B", k) for other in stages if stage in schedule.predecessors(shape, other)}
            left[Action(stage, "F", k)] = before
            split = random.random() < 0.4
            left[Action(stage, "B" if split else "BW", k)] = {(stage, "F", k), *behind}
            if split:
                left[Action(stage, "W", k)] = {(stage, "B", k)}
    orders: list[list[ScheduleItem]] = [[] for _ in range(shape.p)]
    done = set[tuple[int, str, int]]()
    soon, often = random.random(), random.choice([0.3, 1.0])
    while left:
        ready = [action for action, needs in left.items() if needs <= done]
        back = [action for action in ready if action.kind != "F"]
        action = random.choice(back if back and random.random() < soon else ready)
        del left[action]
        done.add((action.stage, action.kind[0], action.microbatch))
        order = orders[schedule.device(shape, action.stage)]
        last = order[-1] if order else None
        paired = isinstance(last, Action) and last.stage != action.stage and random.random() < often
        if paired and isinstance(last, Action) and {last.kind, action.kind} in ({"F", "B"}, {"F", "BW"}):
            order[-1] = OverlappedPasses(last, action) if last.kind == "F" else OverlappedPasses(action, last)
        else:
            order.append(action)
    return orders


@settings(examples(60), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    job=jobs((*TWO_WAYS, "pipeline/interleaved-1f1b"), launch=(0.0, 1e-6, 1e-4), passes=20),
    random=st.randoms(use_true_random=False),
    price=PRICES,
)
def test_all_engines_agree_on_any_order_with_pairs(job: dict[str, Any], random: Random, price: Ideal) -> None:
    plan = resolve_plan(load_job(job), price=price)
    try:
        stages, program = program_in(plan, any_orders(plan.schedule, plan.shape, Random(random.random())), price)
    except ScheduleError:
        # A deadlock: the passes of a pair wait for each other through other devices; or both have side ops.
        assume(False)
    ways = [play_forecast(plan, stages, program, engine=engine, skip=skip) for engine, skip in WAYS]
    assert all(peak.left == pytest.approx(0, abs=1e-6) for peak in ways[0].peaks)
    check_alike(ways)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_pass_after_an_empty_one_waits_for_the_sends(tp: int) -> None:
    """The stage of the embedding has no B; a device that waits for its sends still waits after it."""
    schemes = [{"use": "pipeline/dualpipe", "over": "pp"}, {"use": "tensor/megatron-sp", "over": "tp"}]
    config = job_of({"mesh": {"pp": 2, "tp": tp}, "schemes": schemes, "partition": [0, 2]}, layers=2, overlap=False)
    check_alike(play_by_engines(config, Ideal(links=1e5)))


# ------------------------------------------------------------------------------------------------- what overlap hides


def with_experts(use: str, dp: int, expert: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Experts over all replicas of two stages."""
    schemes = [
        {"use": f"pipeline/{use}", "over": "pp", **options},
        {"use": "data/zero-1", "over": "dp"},
        {"over": "ep", **expert},
    ]
    plan = {"mesh": {"pp": 2, "dp": dp}, "views": {"experts": {"edp": 1, "ep": dp}}, "schemes": schemes}
    return job_of(plan, batch=64, moe={"experts": 8, "top_k": 2, "expert_ffn": 64})


@pytest.mark.parametrize(("links", "use"), drawn_grid([2e6, 1e7, 5e7], ["dualpipe", "dualpipe-v"]))
def test_overlap_hides_token_dispatch_and_combine(use: str, links: float) -> None:
    """Against the same orders with the passes of a pair one after the other."""
    config, price = with_experts(use, 4, {"use": "expert/all-to-all"}), Ideal(links=links)
    paired, free = play_job(config, price), play_job(config, replace(price, links=math.inf))
    orders = paired.plan.schedule.orders(paired.plan.shape)
    alone: list[list[ScheduleItem]] = [[*actions_of(order)] for order in orders]
    _, program = program_in(paired.plan, alone, price)
    assert paired.times.span < 0.98 * longest_path(flatten(program)).span
    for device in range(2):
        account = breakdown(paired.program, paired.times.span, paired.step.occupancy(device), device)
        assert account.hidden["ep"] > 0.2 * min(account.parts["ep"] + account.hidden["ep"], account.parts["gemm"])
    # No faster than the work of one stream.
    assert paired.times.span >= max(paired.program.sums[device, :4, 0].sum() for device in range(2))
    assert paired.times.span >= free.times.span * (1 - 1e-12)


def deepseek(use: str) -> Report:
    """The published configuration: 16 stages, experts over 64 ranks (arXiv 2412.19437, section 3.2)."""
    schemes = [
        {"use": use, "over": "pp"},
        {"use": "data/zero-1", "over": "dp"},
        {"use": "expert/all-to-all", "over": "ep"},
    ]
    plan = {"mesh": {"pp": 16, "dp": 128}, "views": {"experts": {"edp": 2, "ep": 64}}, "schemes": schemes}
    job = {"model": "deepseek-v3", "cluster": "hgx-h800:256", "precision": "fp8-blockwise"}
    batch = {"global": 15360, "micro": 1, "sequence": 4096}
    return simulate({**job, "batch": batch, "plan": {**plan, "partition": [3, *[4] * 14, 2]}})


@pytest.mark.slow
def test_deepseek_v3_hides_token_dispatch_and_combine() -> None:
    """Communication takes longer than computation here, so at best all of that is hidden, on a device in the middle of
    the pipeline: 12.3 of 20 seconds."""
    plays = [(report := deepseek(use), report.play) for use in ("pipeline/dualpipe", "pipeline/1f1b")]
    paired, usual = (breakdown(play.program, play.step.span, play.step.occupancy(8), 8) for _, play in plays)
    assert paired.parts["ep"] < 0.65 * usual.parts["ep"]
    assert plays[0][0].step_time < 0.75 * plays[1][0].step_time


def test_deepseek_v3_is_forecast_within_a_second() -> None:
    took = math.inf
    for _ in range(3):
        begin = process_time()
        assert deepseek("pipeline/dualpipe").step_time > 0
        took = min(took, process_time() - begin)
        if took < 1:
            break
    assert took < 1


@pytest.mark.parametrize(("use", "apart"), [("dualpipe", 20), ("dualpipe-v", 20), ("1f1b", 0)])
def test_pairs_of_dualpipe_leave_multiprocessors_to_their_exchanges(use: str, apart: int) -> None:
    """DeepSeek-V3 (arXiv 2412.19437, section 3.5.1): 20 of the 132 multiprocessors of an H800 copy tokens."""
    options = {"overlap_passes": True} if use == "1f1b" else {}
    play = simulate(with_experts(use, 8, {"use": "expert/deepep", "sms": 20}, **options)).play
    pairs = [part.block for task in play.program.tasks for part in task.parts if len(part.block.ports) == 2]
    works = {op.work for block in pairs for op in block.ops if isinstance(op.work, Gemm | Attention)}
    assert {work.reserved for work in works} == {apart}
    costs = Costs(play.plan.job.cluster, play.plan.mesh)
    for work in works:
        slower = costs.estimate(work).seconds / costs.estimate(replace(work, reserved=0)).seconds
        assert slower == pytest.approx(132 / (132 - apart))
        assert costs.use(work).multiprocessors == pytest.approx(1 - apart / 132)
