"""Schedules that depend on durations or decide at run time, held against the shortest possible order."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.activation_transfer import time_orders
from meshcast.simulator.scheduling.list_scheduler import PartialSchedule, reorder_at_run_time
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)
from meshcast.validation.pipelines.cases import answer
from tests.contract.played import PAID
from tests.draws import drawn_grid
from tests.simulator.engine.engines import check_reports
from tests.strategies import SECONDS, examples


def schedule(name: str, **options: Any) -> Schedule:
    kind = find_scheme(f"pipeline/{name}")
    found = kind(("pp",), kind.Options(**options))
    assert isinstance(found, Schedule)
    return found


def equal_durations(
    shape: PipelineShape, tf: float, tb: float, tw: float, hop: float = 0.0, kept: float | None = None
) -> PassDurations:
    """Every stage has the same durations."""
    n = shape.stages
    return PassDurations((tf,) * n, (tb,) * n, (tw,) * n, (0.0,) * n, hop, None if kept is None else (kept,) * n)


def played(one: Schedule, shape: PipelineShape, times: PassDurations) -> PartialSchedule:
    """A schedule played in its own orders, at the durations that it was given."""
    both = [b + w for b, w in zip(times.input_gradients, times.weight_gradients, strict=True)]
    each = {"F": times.forward, "B": times.input_gradients, "W": times.weight_gradients, "BW": both}

    def lasts(turn: ScheduleItem) -> float:
        assert isinstance(turn, Action)
        return each[turn.kind][turn.stage]

    return reorder_at_run_time(one, shape, one.orders(shape, times), lasts, times.hop)


@st.composite
def unequal_durations(draw: st.DrawFn, p: int) -> PassDurations:
    """Every stage has its own durations."""
    rows = [draw(st.lists(SECONDS, min_size=p, max_size=p)) for _ in range(3)]
    kept = draw(st.none() | st.lists(st.sampled_from([0.0, 0.25, 0.4, 0.95, 1.0]), min_size=p, max_size=p))
    forward, backward, weights = map(tuple, rows)
    hop = draw(st.sampled_from([0.0, 0.5, 3.0]))
    return PassDurations(forward, backward, weights, (0.0,) * p, hop, tuple(kept) if kept else None)


# ------------------------------------------------------------------------------------------------ zb-auto

# arXiv 2401.10241, tables 5 and 6: p, m, T_F, T_B, T_W, T_comm [ms]; bubble rates of ZB-1p and ZB-2p.
TABLES = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088, 0.0054),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.1421, 0.0038),
]


@pytest.mark.parametrize(
    ("p", "m", "tf", "tb", "tw", "hop", "one_p", "two_p"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] * row[1] > 500)) for row in TABLES],
)
def test_zb_auto_has_the_bubble_rates_of_the_paper(
    p: int, m: int, tf: float, tb: float, tw: float, hop: float, one_p: float, two_p: float
) -> None:
    case = {"schedule": "zb-auto", "p": p, "m": m, "t_f": tf, "t_b": tb, "t_w": tw, "hop": hop}
    assert answer(case)["bubble_rate_span"] == pytest.approx(one_p, abs=5.1e-5)
    assert answer({**case, "memory_limit": 2 * p})["bubble_rate_span"] == pytest.approx(two_p, abs=5.1e-5)


@given(data=st.data(), p=st.integers(1, 6), tf=SECONDS, tb=SECONDS, limit=st.integers(1, 3))
@examples(60)
def test_with_few_micro_batches_zb_auto_ends_with_a_single_w(
    data: st.DataObject, p: int, tf: float, tb: float, limit: int
) -> None:
    m, tw = data.draw(st.integers(1, p)), data.draw(SECONDS.filter(lambda tw: tw <= min(tf, tb)))
    case = {"schedule": "zb-auto", "p": p, "m": m, "t_f": tf, "t_b": tb, "t_w": tw, "memory_limit": limit * p}
    found = answer(case)
    assert found["makespan"] == pytest.approx((m + p - 1) * (tf + tb) + tw)
    assert max(found["in_flight_w"]) <= m


@pytest.mark.parametrize(("p", "rounds"), drawn_grid([1, 2, 3, 4, 8], [2, 3, 5]))
def test_zb_auto_with_equal_passes_is_zb_h1_and_idles_nowhere_in_twice_the_memory(p: int, rounds: int) -> None:
    case = {"p": p, "m": rounds * p, "t_f": 1, "t_b": 1, "t_w": 1}
    plain, auto = (answer({**case, "schedule": name}) for name in ("zb-h1", "zb-auto"))
    keys = ("makespan", "span_max", "bubble_rate", "in_flight_b", "in_flight_w")
    assert [auto[key] for key in keys] == [plain[key] for key in keys]
    twice = answer({**case, "schedule": "zb-auto", "memory_limit": 2 * p})
    assert twice["bubble_rate_span"] == 0
    assert max(twice["in_flight_w"]) == (2 * p if p > 1 else 2)


@given(data=st.data(), p=st.integers(1, 8), m=st.integers(1, 20), name=st.sampled_from(["zb-h1", "zb-h2"]))
@examples(60)
def test_zb_auto_never_loses_to_a_handmade_order_in_its_memory(data: st.DataObject, p: int, m: int, name: str) -> None:
    """What a step pays: the makespan if devices meet at its end, otherwise the longest span of a device."""
    times = data.draw(unequal_durations(p))
    rows = {"t_f": list(times.forward), "t_b": list(times.input_gradients), "t_w": list(times.weight_gradients)}
    share = {} if times.kept_for_weights is None else {"m_w": list(times.kept_for_weights)}
    case = {"p": p, "m": m, **rows, **share, "hop": times.hop}
    handmade = answer({**case, "schedule": name})
    limit = p if name == "zb-h1" else 2 * p - 1
    for barrier, key in ((True, "makespan"), (False, "span_max")):
        found = answer({**case, "schedule": "zb-auto", "memory_limit": limit, "barrier": barrier})
        assert found[key] <= handmade[key] * (1 + 1e-8)


def test_a_step_pays_the_makespan_as_long_as_devices_meet_at_its_end() -> None:
    """The order of the least longest span has a makespan that is 8.6 % longer than need be."""
    times = {"t_f": [2, 1, 0.5, 0.5], "t_b": [0.5, 1, 0.5, 1], "t_w": [1, 1, 2, 0.5]}
    apart, meeting = (answer({"schedule": "zb-auto", "p": 4, "m": 8, **times, "barrier": b}) for b in (False, True))
    assert apart["makespan"] == pytest.approx(1.086 * meeting["makespan"], rel=1e-3)
    assert apart["span_max"] < meeting["span_max"]


@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 20), limit=st.integers(1, 15))
@examples(100)
def test_zb_auto_stays_within_its_memory_and_never_deadlocks(data: st.DataObject, p: int, m: int, limit: int) -> None:
    times, shape, one = data.draw(unequal_durations(p)), PipelineShape(p, m), schedule("zb-auto", memory_limit=limit)
    orders = timetable(one, shape, times).orders
    kept = times.kept_for_weights or (0.4,) * p
    for device, order in enumerate(orders):
        held = 0.0
        for turn in order:
            assert isinstance(turn, Action)
            held += {"F": 1.0, "B": kept[device] - 1, "W": -kept[device]}[turn.kind]
            assert held <= limit + 1e-9
    assert orders == one.orders(shape, times), "the same durations, the same orders"


@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 20))
@examples(40)
def test_zb_auto_depends_on_ratios_of_durations_only(data: st.DataObject, p: int, m: int) -> None:
    times = data.draw(unequal_durations(p))
    rows = [tuple(8 * t for t in row) for row in (times.forward, times.input_gradients, times.weight_gradients)]
    slower = PassDurations(rows[0], rows[1], rows[2], times.recomputation, 8 * times.hop, times.kept_for_weights)
    assert schedule("zb-auto").orders(PipelineShape(p, m), slower) == schedule("zb-auto").orders(
        PipelineShape(p, m), times
    )


def test_recomputation_counts_as_part_of_the_backward_pass() -> None:
    shape = PipelineShape(3, 9)
    split = PassDurations((2.0,) * 3, (1.0,) * 3, (2.0,) * 3, (2.0,) * 3)
    assert schedule("zb-auto").orders(shape, split) == schedule("zb-auto").orders(
        shape, equal_durations(shape, 2, 3, 2)
    )


def test_less_than_one_micro_batch_of_memory_is_refused() -> None:
    found = answer({"schedule": "zb-auto", "p": 2, "m": 2, "t_f": 1, "t_b": 1, "t_w": 1, "memory_limit": 0.5})
    assert found["status"] == "refused" and "memory_limit" in found["reason"]


# ------------------------------------------------------------------------------------------------- varuna

TABLE = """
f0 f1 f2 f3 f4 f5 f6 f7 -- r0 b0 c0 r1 b1 c1 r2 b2 c2 -- -- -- r3 b3 c3 r4 b4 c4 r5 b5 c5 -- -- -- r6 b6 c6 r7 b7 c7
-- f0 f1 f2 f3 f4 f5 r0 b0 c0 r1 b1 c1 r2 b2 c2 f6 f7 -- r3 b3 c3 r4 b4 c4 r5 b5 c5 -- -- -- r6 b6 c6 r7 b7 c7 -- --
-- -- f0 f1 f2 r0 b0 c0 r1 b1 c1 r2 b2 c2 f3 f4 f5 r3 b3 c3 r4 b4 c4 r5 b5 c5 f6 f7 -- r6 b6 c6 r7 b7 c7 -- -- -- --
-- -- -- f0 b0 c0 f1 b1 c1 f2 b2 c2 -- -- -- f3 b3 c3 f4 b4 c4 f5 b5 c5 -- -- -- f6 b6 c6 f7 b7 c7 -- -- -- -- -- --
"""
"""Output of the generator published with arXiv 2111.04007 for p = 4, m = 8; b and c are the two slots of B."""

SLOTS = {"F": 1.0, "R": 1.0, "BW": 2.0}


def in_slots(turn: ScheduleItem) -> float:
    assert isinstance(turn, Action)
    return SLOTS[turn.kind]


def test_varuna_has_the_published_order() -> None:
    kinds = {"f": "F", "r": "R", "b": "BW"}
    for device, row in enumerate(TABLE.strip().splitlines()):
        wanted = [f"{device}{kinds[cell[0]]}{cell[1:]}" for cell in row.split() if cell[0] in kinds]
        assert [str(turn) for turn in schedule("varuna").order(PipelineShape(4, 8), device)] == wanted


@pytest.mark.parametrize(("p", "m", "slots"), [(2, 4, 18), (4, 8, 39), (8, 32, 147)])
def test_varuna_takes_the_published_number_of_slots(p: int, m: int, slots: int) -> None:
    found = answer({"schedule": "varuna", "p": p, "m": m, "t_f": 1, "t_b": 1, "t_w": 1, "t_r": 1})
    assert found["makespan"] == slots < 4 * (m + p - 1)


@given(p=st.integers(2, 12), m=st.integers(1, 40))
@examples(60)
def test_the_last_stage_of_varuna_is_fed_in_threes(p: int, m: int) -> None:
    shape, one = PipelineShape(p, m), schedule("varuna")
    play = reorder_at_run_time(one, shape, timetable(one, shape).orders, in_slots)
    assert max(play.free_at) == 3 * (m + p - 1 + (m - 1) // 3)


def jitter(shape: PipelineShape, seed: int) -> Callable[[ScheduleItem], float]:
    """Factors of 1 +- 40 % on every pass, the same in every play."""
    drawn = random.Random(seed)
    factors = {
        Action(stage, kind, k): drawn.uniform(0.6, 1.4)
        for stage in range(shape.stages)
        for kind in SLOTS
        for k in shape.microbatches
    }

    def lasts(turn: ScheduleItem) -> float:
        assert isinstance(turn, Action)
        return SLOTS[turn.kind] * factors[turn]

    return lasts


def static(one: Schedule) -> Schedule:
    """The same schedule without decisions at run time."""

    class Static(type(one)):  # type: ignore[misc]
        next_item = Schedule.next_item

    return Static(("pp",))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_without_jitter_the_run_time_rule_changes_nothing(p: int, m: int) -> None:
    shape, one = PipelineShape(p, m), schedule("varuna")
    orders = one.orders(shape)
    assert reorder_at_run_time(one, shape, orders, in_slots).orders == orders


@pytest.mark.parametrize(("p", "m", "gain"), [(2, 4, 0.08), (4, 8, 0.02), (4, 16, 0.03), (8, 32, 0.02)])
def test_with_jitter_a_forward_pass_pulled_ahead_gains_and_hardly_ever_costs(p: int, m: int, gain: float) -> None:
    shape, one = PipelineShape(p, m), schedule("varuna")
    orders, ratios = one.orders(shape), []
    for seed in range(30):
        lasts = jitter(shape, seed)
        ahead, frozen = (reorder_at_run_time(way, shape, orders, lasts) for way in (one, static(one)))
        assert [sorted(map(str, order)) for order in ahead.orders] == [sorted(map(str, order)) for order in orders]
        assert frozen.orders == orders
        ratios.append(max(ahead.free_at) / max(frozen.free_at))
    # A gradient may arrive while a pass that was pulled ahead runs: rarely, and the loss is small.
    assert max(ratios) <= 1.02 and sum(ratio > 1 for ratio in ratios) <= 1
    assert sum(ratios) / len(ratios) < 1 - gain


@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 12), name=st.sampled_from(["1f1b", "gpipe", "zb-auto"]))
@examples(40)
def test_orders_without_decisions_are_played_as_by_the_engine(data: st.DataObject, p: int, m: int, name: str) -> None:
    times, shape = data.draw(unequal_durations(p)), PipelineShape(p, m)
    times = replace(times, kept_for_weights=None)
    rows = {"t_f": list(times.forward), "t_b": list(times.input_gradients), "t_w": list(times.weight_gradients)}
    play = played(schedule(name), shape, times)
    found = answer({"schedule": name, "p": p, "m": m, **rows, "hop": times.hop})
    assert (max(play.free_at), max(play.spans)) == pytest.approx((found["makespan"], found["span_max"]))
    timed = time_orders(schedule(name), shape, play.orders, times)
    assert {item.item: (item.begin, item.end) for item in timed} == {
        action: (play.begin[action], play.end[action]) for action in play.end
    }
    assert times.equalised == equal_durations(shape, 1, 1, 1)


# ------------------------------------------------------------------------------------------- whole jobs


def job(use: str, *schemes: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "model": {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 32},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0}},
        "batch": {"global": 12},
        "plan": {"mesh": {"pp": 4}, "schemes": [{"use": f"pipeline/{use}", "over": "pp", **options}, *schemes]},
    }


FULL = {"use": "memory/recompute-full"}


@pytest.mark.parametrize(
    "config",
    [
        job("zb-auto"),
        job("zb-auto", memory_limit=8),
        job("zb-auto", {"use": "memory/recompute-selective"}, memory_limit=1),
        job("varuna", FULL),
    ],
    ids=["zb-1p", "zb-2p", "little memory", "varuna"],
)
def test_all_engines_agree_on_list_schedules(config: dict[str, Any]) -> None:
    check_reports(config)


def test_a_job_with_more_memory_for_zb_auto_takes_no_longer() -> None:
    reports = [simulate(job("zb-auto", memory_limit=limit)) for limit in (1, 2, 4, 8)]
    assert sorted((r.step_time for r in reports), reverse=True) == pytest.approx([r.step_time for r in reports])
    peaks = [max(peak.total for peak in report.play.peaks) for report in reports]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


@pytest.mark.parametrize("layers", [[3, 2, 2, 1], [1, 2, 2, 3], [1, 1, 1, 5], [4, 2, 1, 1]])
def test_a_job_with_zb_auto_takes_no_longer_than_with_zb_h1(layers: list[int]) -> None:
    found = []
    for use in ("zb-auto", "zb-h1"):
        config = job(use)
        config["plan"]["partition"] = layers
        found.append(simulate(config).step_time)
    assert found[0] <= found[1] * (1 + 1e-6)


def test_varuna_recomputes_nothing_on_its_last_stage() -> None:
    plan = resolve_plan(load_job(job("varuna", FULL)))
    _, program = build_program(plan, PAID)
    again = dict.fromkeys(range(4), 0)
    for task, turns, slot in zip(program.tasks, program.timetable.turns, program.timetable.slots, strict=True):
        again[slot.stage] += turns * sum(count for op, count in task.count_ops() if op.phase == "R")
    assert again[3] == 0 < again[1] == again[2]


# ------------------------------------------------------------------------------------------- the shortest

FEW = st.integers(1, 4)
WHOLE = st.integers(1, 6)


def test_orders_of_two_devices_are_at_known_distances_from_the_shortest() -> None:
    solve_shortest = pytest.importorskip(
        "meshcast.validation.pipelines.shortest", reason="needs ortools: pip install 'meshcast[search]'"
    ).solve_shortest
    shape = PipelineShape(2, 4)
    times = equal_durations(shape, 1, 1, 1)
    shortest = solve_shortest(schedule("1f1b"), shape, times)
    assert shortest.is_optimal and shortest.found == 13
    assert solve_shortest(schedule("1f1b"), shape, times, limit=2, span=True).found == 13
    assert solve_shortest(schedule("1f1b"), shape, times, limit=4, span=True).found == 12
    assert {
        name: max(played(schedule(name), shape, times).free_at) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    } == {"gpipe": 15, "1f1b": 15, "zb-h1": 13, "zb-h2": 13}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto"])
@given(data=st.data(), p=FEW, m=FEW, tf=WHOLE, tb=WHOLE, tw=WHOLE, hop=st.integers(0, 2))
@examples(12)
def test_no_order_is_shorter_than_the_shortest(
    name: str, data: st.DataObject, p: int, m: int, tf: int, tb: int, tw: int, hop: int
) -> None:
    solve_shortest = pytest.importorskip(
        "meshcast.validation.pipelines.shortest", reason="needs ortools: pip install 'meshcast[search]'"
    ).solve_shortest
    shape, one = PipelineShape(p, m), schedule(name)
    times = equal_durations(shape, tf, tb, tw, hop)
    play = played(one, shape, times)
    assert max(play.free_at) >= solve_shortest(one, shape, times).bound
    assert max(play.spans) >= solve_shortest(one, shape, times, span=True).bound


@pytest.mark.parametrize("seed", range(12))
def test_zb_auto_is_the_shortest_for_equal_stages(seed: int) -> None:
    solve_shortest = pytest.importorskip(
        "meshcast.validation.pipelines.shortest", reason="needs ortools: pip install 'meshcast[search]'"
    ).solve_shortest
    drawn = random.Random(seed)
    shape = PipelineShape(drawn.randint(2, 4), drawn.randint(2, 4))
    limit = shape.p * drawn.randint(1, 2)
    times = equal_durations(shape, *(drawn.randint(1, 8) for _ in range(3)), hop=drawn.randint(0, 2), kept=1.0)
    one = schedule("zb-auto", memory_limit=limit)
    shortest = solve_shortest(one, shape, times, limit, span=True)
    assert shortest.is_optimal and max(played(one, shape, times).spans) == pytest.approx(shortest.found)


@given(data=st.data(), p=FEW, m=FEW, rounds=st.integers(1, 2))
@examples(25)
def test_zb_auto_is_within_a_sixth_of_the_shortest(data: st.DataObject, p: int, m: int, rounds: int) -> None:
    solve_shortest = pytest.importorskip(
        "meshcast.validation.pipelines.shortest", reason="needs ortools: pip install 'meshcast[search]'"
    ).solve_shortest
    rows = [tuple(data.draw(st.lists(WHOLE, min_size=p, max_size=p))) for _ in range(3)]
    shape, limit = PipelineShape(p, m), rounds * p
    times = PassDurations(rows[0], rows[1], rows[2], (0.0,) * p, data.draw(st.integers(0, 2)), (1.0,) * p)
    one = schedule("zb-auto", memory_limit=limit)
    shortest = solve_shortest(one, shape, times, limit, span=True)
    assert shortest.bound <= max(played(one, shape, times).spans) <= shortest.found * 7 / 6


def test_the_solver_refuses_durations_that_are_no_multiples_of_a_step() -> None:
    solve_shortest = pytest.importorskip(
        "meshcast.validation.pipelines.shortest", reason="needs ortools: pip install 'meshcast[search]'"
    ).solve_shortest
    shape = PipelineShape(2, 2)
    assert solve_shortest(schedule("1f1b"), shape, equal_durations(shape, 0.5, 0.5, 0.25)).found == 3.25
    with pytest.raises(PlanError, match="Round the durations"):
        solve_shortest(schedule("1f1b"), shape, equal_durations(shape, 1e-7, 1, 1))


# --------------------------------------------------------------------------------------------------- v-zb


@pytest.mark.parametrize("p", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_v_zb_idles_less_than_zb_v_if_passes_take_unequal_times(p: int) -> None:
    """In chunk times of 4, 5 and 3 the authors' generator leaves 4 p - 7, their order for equal ones 4 (p - 1)."""
    case = {"p": p, "m": 3 * p, "v": 2, "t_f": 8, "t_b": 10, "t_w": 6}
    found, fixed = (answer({"schedule": name, **case}) for name in ("v-zb", "zb-v"))
    assert found["span_max"] - 3 * p * 24 == pytest.approx(4 * p - 7)
    assert fixed["span_max"] - 3 * p * 24 == pytest.approx(4 * (p - 1))
    assert max(found["in_flight_w"]) == 2 * p
    roomy = answer({"schedule": "v-zb", "memory_limit": 2 * p, **case})
    assert roomy["span_max"] < found["span_max"]


@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 20), more=st.sampled_from([0, 0.5, 3]))
@examples(60)
def test_v_zb_stays_within_its_memory_and_never_deadlocks(data: st.DataObject, p: int, m: int, more: float) -> None:
    times = data.draw(unequal_durations(2 * p))
    one = schedule("v-zb", memory_limit=p + more)
    kept = times.kept_for_weights or (1.0,) * (2 * p)
    for order in timetable(one, PipelineShape(p, m, 2), times).orders:
        held = 0.0
        for action in actions_of(order):
            held += {"F": 1.0, "B": kept[action.stage] - 1, "W": -kept[action.stage]}[action.kind]
            assert held <= 2 * (p + more) * (1 + 1e-6)


def test_v_zb_says_how_much_memory_it_needs() -> None:
    with pytest.raises(PlanError, match="holds 4 before the first is back"):
        schedule("v-zb", memory_limit=3).check(PipelineShape(4, 8, 2))


# ------------------------------------------------------------------------------------------------- tessel


def search(p: int, m: int, **case: Any) -> dict[str, Any]:
    pytest.importorskip("ortools", reason="needs ortools: pip install 'meshcast[search]'")
    return answer({"schedule": "tessel", "p": p, "m": m, "order": True, **case})


def test_tessel_finds_1f1b_on_a_chain_of_equal_stages() -> None:
    """README of the authors' repository: forward passes of 1, backward of 2, memory for 4 micro-batches."""
    case = {"p": 4, "m": 8, "t_f": 1, "t_b": 1, "t_w": 1}
    assert search(**case, memory_limit=4)["order"] == answer({"schedule": "1f1b", "order": True, **case})["order"]


@pytest.mark.parametrize(("p", "limit"), [(3, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_tessel_uses_the_memory_that_it_is_given(p: int, limit: int) -> None:
    """Less memory than 1F1B needs makes the kernel longer, but not past what the forward passes of 1F1B in it take."""
    case = {"m": 4 * p, "t_f": 1, "t_b": 1, "t_w": 1}
    found = search(p, memory_limit=limit, **case)
    assert max(found["in_flight_b"]) <= limit
    same = answer({"schedule": "dapple", "policy": "A", "in_flight": limit, "p": p, **case})
    assert search(p, **case)["makespan"] < found["makespan"] <= same["makespan"] * (1 + 1e-9)


def test_tessel_balances_a_stage_that_takes_longer() -> None:
    """A step takes no longer than the way of one micro-batch, 18, and a period of the slowest device, 9, for every
    other one."""
    times = {"t_f": [1, 3, 1, 1], "t_b": [1, 3, 1, 1], "t_w": [1, 3, 1, 1]}
    found, fixed = search(4, 12, **times), answer({"schedule": "1f1b", "p": 4, "m": 12, **times})
    assert 1 + 12 * 9 + 2 <= found["makespan"] <= min(18 + 11 * 9, fixed["makespan"])


def test_tessel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlanError, match=r"needs OR-Tools.*meshcast\[search\]"):
        schedule("tessel").orders(PipelineShape(2, 4))
