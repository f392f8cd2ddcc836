"""Activations that rest in host memory between their passes: what is copied, when, and what it saves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.ops import HostCopy
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.schedule import ActionKind, PassDurations, PipelineShape, actions_of
from meshcast.validation.contract.played import PAID, Ideal, Played, play_job
from tests.simulator.scheduling.schedules import make_schedule

COPIES = (ActionKind.HOST_OUT, ActionKind.HOST_FREED, ActionKind.HOST_IN)


def orders(p: int, m: int, v: int, offloaded: int, copied: float) -> list[list[Any]]:
    """Orders of passes that take 1, and copies that take `copied`."""
    alike = (1.0,) * (p * v)
    durations = PassDurations(alike, alike, alike, (0.0,) * (p * v), copied=(copied,) * (p * v))
    schedule = make_schedule("grouped-interleaved", chunks=v, offloaded=offloaded)
    made = schedule.orders(PipelineShape(p, m, v), durations)
    timetable(schedule, PipelineShape(p, m, v), durations)
    return [actions_of(order) for order in made]


def held(order: list[Any]) -> int:
    """Most chunks in the memory of a device."""
    change = {"F": 1, ActionKind.HOST_FREED: -1, ActionKind.HOST_IN: 1, "W": -1}
    now, most = 0, 0
    for action in order:
        now += change.get(action.kind, 0)
        most = max(most, now)
    assert now == 0
    return most


@given(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4]), st.integers(1, 3), st.floats(0.01, 20.0))
def test_copies_lie_between_the_passes_of_their_activations(p: int, v: int, groups: int, copied: float) -> None:
    plain = orders(p, groups * p, v, 0, copied)
    for order, without in zip(orders(p, groups * p, v, v // 2, copied), plain, strict=True):
        assert [action for action in order if action.kind not in COPIES] == without
        place = {action: number for number, action in enumerate(order)}
        for action in order:
            if action.kind == ActionKind.HOST_OUT:
                turns = [place[action._replace(kind=kind)] for kind in ("F", *COPIES, "B")]
                assert turns == sorted(turns)
                assert action.stage < p * (v // 2)
        assert held(order) <= held(without)


def test_quick_copies_halve_what_a_device_holds_and_slow_ones_change_nothing() -> None:
    (first, *_), plain = orders(4, 16, 4, 2, 0.5), orders(4, 16, 4, 0, 0.5)
    assert held(first) <= 0.65 * held(plain[0])
    assert orders(4, 16, 4, 2, 1000.0) == plain


def test_as_many_are_copied_as_there_is_time_for() -> None:
    counts = [
        sum(action.kind == ActionKind.HOST_OUT for action in orders(4, 32, 4, 4, copied)[0])
        for copied in (0.5, 2.0, 4.0, 8.0)
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] > 2 * counts[-1] > 0


def play(offloaded: int, price: Ideal = PAID) -> Played:
    schemes = [{"use": "pipeline/grouped-interleaved", "over": "pp", "chunks": 4, "offloaded": offloaded}]
    job = {
        "model": {"layers": 16, "hidden": 64, "heads": 4, "vocab": 64, "seq": 64, "tied": False},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "batch": {"global": 16, "micro": 1},
        "plan": {"mesh": {"pp": 4}, "schemes": schemes},
    }
    return play_job(job, price=price)


def test_memory_falls_by_what_is_copied_and_the_step_stays() -> None:
    plain, copied = play(0), play(2)
    assert copied.step.span == pytest.approx(plain.step.span, rel=0.02)
    assert copied.peaks[0].by["activations"] < 0.9 * plain.peaks[0].by["activations"]
    sent = [op.work for _, op in copied.instances() if isinstance(op.work, HostCopy)]
    there, back = (sum(work.nbytes for work in sent if work.back == way) for way in (False, True))
    assert there == back > 0


def test_a_backward_pass_waits_for_its_copy_back() -> None:
    table = play(2).program.timetable
    numbers = {action: number for number, action in enumerate(table.actions)}
    back = [action for action in numbers if action.kind == ActionKind.HOST_IN]
    assert back
    for action in back:
        backward = numbers[action._replace(kind="B")]
        assert numbers[action] in (table.need[backward], *table.further_needs.get(backward, ()))
