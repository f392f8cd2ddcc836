"""Activation transfers: BPipe's orders and bound, and the effect of transfers on time and memory."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError, ScheduleError
from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import Transfer
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.activation_transfer import ActivationTransfer, insert_transfers
from meshcast.simulator.scheduling.schedule import (
    ACTIVATION_TRANSFERS,
    Action,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)
from meshcast.validation.pipelines.cases import answer
from tests.contract.played import Ideal, Played, play_job, sent_between_stages
from tests.simulator.engine.engines import check_alike, check_reports, play_by_engines
from tests.strategies import SECONDS, examples, shapes, some

TRIPLE = st.tuples(SECONDS, SECONDS, SECONDS)


def bound(p: int) -> int:
    return math.ceil((p + 2) / 2)


def case(schedule: str, p: int, m: int, times: Any = (1, 1, 1), **more: Any) -> dict[str, Any]:
    found = answer(
        {"schedule": schedule, "p": p, "m": m, **dict(zip(("t_f", "t_b", "t_w"), times, strict=True)), **more}
    )
    assert found["status"] == "played", found
    return found


def orders(p: int, m: int) -> list[list[Action]]:
    schedule = find_scheme("pipeline/bpipe")(("pp",))
    assert isinstance(schedule, Schedule)
    return [actions_of(order) for order in timetable(schedule, PipelineShape(p, m)).orders]


# ------------------------------------------------------------------------------------------------- orders


def test_the_order_of_four_devices() -> None:
    found = case("bpipe", 4, 8, order=True)
    assert [" ".join(row) for row in found["order"]] == [
        "0F0 0F1 0E1 0F2 0E2 0F3 0L1 0BW0 0E3 0F4 0L2 0BW1 0E4 0F5 0L3 0BW2 0E5 0F6 0L4 0BW3 0E6 0F7 0L5 0BW4 0L6 0BW5 "
        "0BW6 0BW7",
        "1F0 1F1 1F2 1BW0 1F3 1BW1 1F4 1BW2 1F5 1BW3 1F6 1BW4 1F7 1BW5 1BW6 1BW7",
        "2F0 2F1 2BW0 2F2 2BW1 2F3 2BW2 2F4 2BW3 2F5 2BW4 2F6 2BW5 2F7 2BW6 2BW7",
        "0K1 0K2 3F0 3BW0 3F1 3BW1 3F2 0G1 3BW2 0K3 3F3 0G2 3BW3 0K4 3F4 0G3 3BW4 0K5 3F5 0G4 3BW5 0K6 3F6 0G5 3BW6 "
        "3F7 0G6 3BW7",
    ]
    assert found["in_flight_b"] == [3, 3, 2, 3]


@given(shape=shapes(most_p=12, most_m=40))
def test_the_passes_are_those_of_1f1b(shape: PipelineShape) -> None:
    plain = find_scheme("pipeline/1f1b")(("pp",))
    assert isinstance(plain, Schedule)
    for device, order in enumerate(orders(shape.p, shape.m)):
        passes = [action for action in order if action.kind not in ACTIVATION_TRANSFERS]
        assert passes == plain.order(shape, device)


@given(shape=shapes(most_p=12, most_m=40))
def test_a_micro_batch_is_evicted_once_and_loaded_back(shape: PipelineShape) -> None:
    found = orders(shape.p, shape.m)
    for x, order in enumerate(found):
        y, own = shape.p - 1 - x, Counter(action.kind for action in order if action.stage == x)
        moves = max(0, shape.m - bound(shape.p) + 1) if min(shape.m, shape.p - x) > bound(shape.p) else 0
        assert own["E"] == own["L"] == moves
        assert Counter(action.kind for action in found[y] if action.stage == x and x < y)["K"] == moves
        # In steady state at most one micro-batch is evicted and one loaded between two backward passes.
        backs = [at for at, action in enumerate(order) if action.kind == "BW" and action.stage == x]
        for begin, end in pairwise(backs):
            between = Counter(action.kind for action in order[begin:end] if action.stage == x)
            assert between["E"] <= 1 and between["L"] <= 1


@given(shape=shapes(most_p=12, most_m=32), times=TRIPLE)
def test_no_device_holds_more_than_the_bound(shape: PipelineShape, times: tuple[float, float, float]) -> None:
    """The bound holds, and the makespan is 1F1B's, for any durations of passes."""
    p, m = shape.p, shape.m
    found, plain = case("bpipe", p, m, times), case("1f1b", p, m, times)
    assert max(found["in_flight_b"]) == min(m, p, bound(p))
    assert found["in_flight_w"] == found["in_flight_b"]
    assert found["makespan"] == pytest.approx(plain["makespan"], rel=1e-12)
    assert found["span_max"] == pytest.approx(plain["span_max"], rel=1e-12)
    assert found["bubble_rate"] == pytest.approx(plain["bubble_rate"], rel=1e-9)


@pytest.mark.parametrize(("p", "most"), [(2, 2), (3, 3), (4, 3), (5, 4), (6, 4), (7, 5), (8, 5), (16, 9)])
def test_the_bound(p: int, most: int) -> None:
    assert max(case("bpipe", p, 4 * p)["in_flight_b"]) == most
    assert max(case("1f1b", p, 4 * p)["in_flight_b"]) == p


def test_transfers_shorter_than_a_pass_are_hidden() -> None:
    """Activations are loaded one backward pass ahead: a shorter hop costs no more than in 1F1B."""
    for hop in (0.25, 1.0):
        assert case("bpipe", 8, 32, hop=hop)["makespan"] == case("1f1b", 8, 32, hop=hop)["makespan"]
    assert case("bpipe", 8, 32, hop=40)["makespan"] > case("1f1b", 8, 32, hop=40)["makespan"]


# ----------------------------------------------------------------------------------- transfers of any schedule


class Lent(Schedule):
    """GPipe on two devices; the first evicts micro-batches to the second."""

    name = "lent"
    needs_durations = True
    some: tuple[int, ...] = (0, 1)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        plain: list[list[ScheduleItem]] = [
            [Action(d, kind, k) for kind in ("F", "BW") for k in shape.microbatches] for d in range(shape.p)
        ]
        moves = [
            ActivationTransfer(Action(0, "F", k), 1, Action(0, "F", k + 1), Action(0, "BW", max(k - 1, 0)))
            for k in self.some
        ]
        return insert_transfers(self, shape, plain, moves, durations)


def test_transfers_are_put_before_the_pass_that_the_other_device_runs_then() -> None:
    shape = PipelineShape(2, 3)
    quick, slow = ((1.0, one) for one in (0.5, 4.0))
    back, nothing = (1.0, 1.0), (0.0, 0.0)
    found = [
        [
            " ".join(map(str, order))
            for order in Lent(("pp",)).orders(shape, PassDurations(times, back, nothing, nothing))
        ]
        for times in (quick, slow)
    ]
    assert found[0][0] == found[1][0] == "0F0 0E0 0F1 0E1 0F2 0L0 0L1 0BW0 0BW1 0BW2"
    assert found[0][1] == "0K0 1F0 0K1 1F1 1F2 1BW0 0G0 0G1 1BW1 1BW2"
    assert found[1][1] == "0K0 0K1 1F0 1F1 1F2 1BW0 0G0 0G1 1BW1 1BW2"


class GivenOrders(Lent):
    """Orders given by the test."""

    rows: list[list[ScheduleItem]] = []

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        return self.rows


@pytest.mark.parametrize(
    ("taken", "put", "words"),
    [
        ("0G0", None, "an activation transfer needs all of"),
        ("0E0", None, "an activation transfer needs all of"),
        (None, (0, 2, Action(0, "K", 0)), "is listed 2 times"),
        (None, (1, 0, Action(7, "K", 0)), "7K0"),
        (None, (0, 0, Action(0, "E", 0)), "is listed 2 times"),
    ],
    ids=["never given back", "never evicted", "kept twice", "no such stage", "evicted twice"],
)
def test_half_a_transfer_is_refused(taken: str | None, put: tuple[int, int, Action] | None, words: str) -> None:
    schedule, shape = GivenOrders(("pp",)), PipelineShape(2, 3)
    rows = Lent(("pp",)).orders(shape)
    schedule.rows = [[turn for turn in row if str(turn) != taken] for row in rows]
    if put:
        schedule.rows[put[0]].insert(put[1], put[2])
    with pytest.raises(ScheduleError, match=words):
        timetable(schedule, shape)


def test_a_load_after_its_backward_pass_deadlocks() -> None:
    schedule, shape = GivenOrders(("pp",)), PipelineShape(2, 3)
    rows = Lent(("pp",)).orders(shape)
    load = Action(0, "L", 1)
    rows[0].remove(load)
    schedule.rows = [[*rows[0], load], rows[1]]
    with pytest.raises(ScheduleError, match="deadlocks") as refused:
        timetable(schedule, shape)
    assert ">0BW1<" in str(refused.value)


# ----------------------------------------------------------------------------------------------- whole jobs

MODEL = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16, "tied": False}


def job(
    schedule: str, m: int = 10, pp: int = 4, launch: float = 0.0, overlap: bool = True, **plan: Any
) -> dict[str, Any]:
    gpus = pp * plan.get("tp", 1) * plan.get("dp", 1)
    return {
        "model": MODEL,
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": {
            "name": "megatron-core",
            "set": {"launch_s": launch, "overlap": {"dp": True, "pp": overlap}, "dummy_gradients": False},
        },
        "batch": {"global": m * plan.get("dp", 1)},
        "plan": {"pp": pp, "schedule": schedule, **plan},
    }


PLANS = [{}, {"pp": 5, "partition": [2, 2, 2, 1, 1]}, {"tp": 2, "dp": 2}, {"pp": 8, "m": 14, "recompute": "full"}]


@pytest.mark.parametrize(("plan", "overlap", "launch"), some([*product(PLANS, (True, False), (0.0, 2e-6, 1e-3))], 5))
def test_all_engines_agree_on_transfers(plan: dict[str, Any], overlap: bool, launch: float) -> None:
    check_reports(job("bpipe", launch=launch, overlap=overlap, **plan))


@pytest.mark.slow
@examples(20)
@given(
    m=st.integers(1, 14),
    pp=st.sampled_from([4, 8]),
    launch=st.sampled_from([0.0, 1e-6, 1e-4]),
    price=st.builds(Ideal, links=st.sampled_from([1e5, 1e7, math.inf]), latency=st.sampled_from([0.0, 1e-4])),
)
def test_all_engines_agree_for_slow_transfers(m: int, pp: int, launch: float, price: Ideal) -> None:
    config = job("bpipe", m, pp, launch)
    check_alike(play_by_engines(config, price))


@examples(15)
@given(m=st.integers(1, 16), pp=st.sampled_from([2, 4, 8]))
def test_only_transfers_are_added_to_1f1b(m: int, pp: int) -> None:
    ours, plain = play_job(job("bpipe", m, pp)), play_job(job("1f1b", m, pp))
    assert ours.flops("F", "B", "W", "R") == plain.flops("F", "B", "W", "R")
    assert sent_between_stages(ours) == sent_between_stages(plain)
    assert [ours.resting(d) for d in range(pp)] == [plain.resting(d) for d in range(pp)]
    assert all(peak.left == 0 for peak in ours.peaks)


def moves_of(run: Played) -> list[tuple[int, int, int]]:
    """Bytes, sender and receiver of every transfer."""
    found = []
    for _, op in run.instances():
        if op.stream == "pipeline-moves" and op.work is not None:
            assert isinstance(op.work, Transfer)
            found.append((op.work.nbytes, op.work.source, op.work.target))
    return found


@pytest.mark.parametrize("plan", [{}, {"recompute": "selective"}, {"recompute": "full"}])
def test_a_transfer_has_the_bytes_that_a_forward_pass_saves(plan: dict[str, Any]) -> None:
    run = play_job(job("bpipe", 9, **plan))
    table = run.program.timetable
    forward = next(i for i, slot in enumerate(table.slots) if slot.stage == 0 and slot.kind == "F")
    saved = float(run.program.tasks[forward].memory.net.sum())
    assert Counter(moves_of(run)) == {(saved, 0, 3): 7, (saved, 3, 0): 7}


def test_memory_is_balanced() -> None:
    """The last device keeps activations of the first: of eight devices 1F1B's fullest holds 8 micro-batches, BPipe's 5,
    transfers in flight included. Where a pass is freed early, a keeper may have one more.
    """
    m, pp = 24, 8
    ours, plain = play_job(job("bpipe", m, pp)), play_job(job("1f1b", m, pp))
    one = moves_of(ours)[0][0]
    message = max(nbytes for some in sent_between_stages(plain).values() for nbytes in some)
    gained = plain.peaks[0].total - ours.peaks[0].total
    assert abs(gained - 3 * one) <= 2 * message, "but for messages that are in flight at the peak"
    taken = [ours.peaks[device].total - plain.peaks[device].total for device in range(pp)]
    assert taken[4] == taken[3] == 0 and min(taken[5:]) > 0
    assert 4 * one <= max(taken) <= 5 * one
    for device in range(pp):
        moments, levels = over_time_of(ours, device)
        assert levels.sum(axis=1).max() == pytest.approx(ours.peaks[device].total)
        assert (moments[1:] >= moments[:-1]).all()


def over_time_of(run: Played, device: int) -> Any:
    from meshcast.simulator.engine.peak_memory import over_time

    return over_time(run.program, run.flat, run.times, device, run.resting(device))


def test_a_backward_pass_waits_for_its_load() -> None:
    """Over slow links, where no transfer is hidden, every load ends before its backward pass begins."""
    run = play_job(job("bpipe", 6), Ideal(links=1e5))
    table, flat, times = run.program.timetable, run.flat, run.times
    where = {str(action): number for number, action in enumerate(table.actions)}
    for k in range(1, 5):
        come = times.end[flat.behind[where[f"0G{k}"]] - 1]
        gone = times.end[flat.behind[where[f"0E{k}"]] - 1]
        first = flat.first[where[f"0BW{k}"]]
        waits = [n for n in range(first, flat.behind[where[f"0BW{k}"]]) if times.begin[n] >= come]
        assert gone <= come and waits, "the backward pass begins after the load"
        assert times.end[flat.behind[where[f"0BW{k}"]] - 1] > come
    assert run.step.span > play_job(job("1f1b", 6), Ideal(links=1e5)).step.span


# ------------------------------------------------------------------------------------------------- places


def across_nodes(pp: int, tp: int, **options: Any) -> dict[str, Any]:
    """Stages of which 8 / tp lie in a node."""
    schemes = [{"use": "pipeline/bpipe", "over": "pp", **options}, {"use": "tensor/megatron-sp", "over": "tp"}]
    return {
        "model": {"layers": 4 * pp, "hidden": 4096, "heads": 32, "vocab": 51200, "seq": 2048},
        "cluster": f"dgx-a100:{pp * tp // 8}",
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0}},
        "batch": {"global": 4 * pp, "micro": 2},
        "plan": {"mesh": {"pp": pp, "tp": tp}, "schemes": schemes},
    }


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8, 11])
def test_partners_have_neighbouring_places(pp: int) -> None:
    schedule = find_scheme("pipeline/bpipe")(("pp",))
    assert isinstance(schedule, Schedule)
    places = [schedule.place(PipelineShape(pp, 2 * pp), device) for device in range(pp)]
    assert sorted(places) == list(range(pp))
    assert [places[pp - 1 - x] - places[x] for x in range(pp // 2)] == [1] * (pp // 2)


def test_activations_move_inside_a_node_and_not_between_nodes() -> None:
    shared = SharedWork()
    costs = {
        pair: shared.costs(resolve_plan(load_job(across_nodes(8, 4, pair_adjacent=pair)), shared))
        for pair in (True, False)
    }
    nbytes = 1 << 30
    within = shared.costs(resolve_plan(load_job(across_nodes(8, 2)), shared)).estimate(Transfer(nbytes, "pp", 0, 7))
    for x in range(4):
        near, far = (costs[pair].estimate(Transfer(nbytes, "pp", x, 7 - x)).seconds for pair in (True, False))
        assert near == pytest.approx(within.seconds)
        # In the order of stages only the two in the middle share a node or are in neighbouring ones; no pair does here.
        assert far > 5 * near
    # Neighbouring stages, of which every second pair shared a node, no longer do.
    between = [costs[True].estimate(Transfer(nbytes, "pp", x, x + 1)).seconds for x in range(7)]
    assert min(between[:3] + between[4:]) > 5 * within.seconds > between[3]


def test_a_step_across_nodes_is_as_short_as_without_transfers() -> None:
    def seconds(**options: Any) -> float:
        return simulate(across_nodes(8, 2, **options)).step_time

    plain = across_nodes(8, 2)
    plain["plan"]["schemes"][0] = {"use": "pipeline/1f1b", "over": "pp"}
    assert seconds() <= 1.02 * simulate(plain).step_time
    assert seconds(pair_adjacent=False) > 1.1 * seconds()


def test_all_engines_agree_on_places() -> None:
    check_reports(across_nodes(4, 4))


# ------------------------------------------------------------------------------------------------- MPress


def mpress_orders(p: int, m: int, **options: Any) -> list[list[Action]]:
    kind = find_scheme("pipeline/mpress")
    schedule = kind(("pp",), kind.Options(**options))
    assert isinstance(schedule, Schedule)
    return [actions_of(order) for order in timetable(schedule, PipelineShape(p, m)).orders]


@pytest.mark.parametrize("p", [4, 6, 8])
def test_mpress_spreads_what_a_device_holds_above_the_limit(p: int) -> None:
    """Over all devices with room, of which none holds more; BPipe's partners are one for each."""
    keepers: dict[int, set[int]] = {}
    for device, order in enumerate(mpress_orders(p, 3 * p)):
        for action in order:
            if action.kind == "K":
                keepers.setdefault(action.stage, set()).add(device)
    assert set(keepers) == {i for i in range(p) if p - i > bound(p)}
    assert all(min(own) > p // 2 - 1 for own in keepers.values())
    assert max(map(len, keepers.values())) > 1
    assert max(case("mpress", p, 3 * p)["in_flight_b"]) == bound(p)


def test_mpress_with_a_larger_limit_swaps_less_and_below_the_least_refuses() -> None:
    swaps = [
        sum(action.kind == "E" for order in mpress_orders(8, 24, memory_limit=n) for action in order) for n in (5, 6, 8)
    ]
    assert swaps == sorted(swaps, reverse=True) and swaps[-1] == 0
    with pytest.raises(PlanError, match="no device with room below 5 micro-batches"):
        simulate(mpress_job({"use": "pipeline/mpress", "over": "pp", "memory_limit": 4}))


def mpress_job(*schemes: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"preset": "gpt3-5b", "layers": 24},
        "cluster": {"gpu": "v100-sxm2-32", "gpus": 8, "gpus_per_node": 8},
        "precision": {"compute": "fp16"},
        "batch": {"global": 32, "micro": 1, "sequence": 1024},
        "plan": {"mesh": {"pp": 8}, "schemes": list(schemes)},
    }


def test_mpress_with_recomputed_and_offloaded_layers() -> None:
    """Each frees memory of the fullest device; what is swapped over NVLink takes less time than what is recomputed."""
    d2d = {"use": "pipeline/mpress", "over": "pp", "memory_limit": 5}
    plain = {"use": "pipeline/1f1b", "over": "pp"}
    recompute, offload = {"use": "memory/recompute-full", "layers": 1}, {"use": "memory/offload", "layers": 1}
    one, swapped, both, host, again = (
        simulate(mpress_job(*schemes))
        for schemes in ((plain,), (d2d,), (d2d, recompute), (d2d, offload), (plain, {"use": "memory/recompute-full"}))
    )
    assert one.peak_allocated > swapped.peak_allocated > both.peak_allocated
    assert swapped.peak_allocated > host.peak_allocated
    assert one.step_time * (1 - 1e-12) <= swapped.step_time < 1.05 * one.step_time < again.step_time
