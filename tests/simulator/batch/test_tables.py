"""Timetables as arrays against those of single forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from meshcast.simulator.batch.loops.arrays import ACTION, DEVICE, NEED, SLOT
from meshcast.simulator.batch.tables import make_table
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.schedule import Action, ActionKind, PipelineShape, Schedule


def make_plan(schedule: str, pp: int, chunks: int, batch: int) -> Plan:
    """Resolves a plan of a schedule."""
    plan: dict[str, Any] = {"pp": pp, "chunks": chunks, **({"schedule": schedule} if schedule else {})}
    sizes = {"global": batch, "micro": 1, "sequence": 128}
    return resolve_plan(load_job({"model": "gpt2-124m", "cluster": "dgx-a100:1", "batch": sizes, "plan": plan}))


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "batch"),
    [
        ("", 1, 1, 8),
        ("", 4, 1, 24),
        ("", 4, 3, 16),
        ("gpipe", 4, 1, 10),
        ("breadth-first", 2, 3, 8),
        ("dapple", 4, 1, 6),
    ],
)
def test_timetables_are_those_of_single_forecasts(schedule: str, pp: int, chunks: int, batch: int) -> None:
    plan = make_plan(schedule, pp, chunks, batch)
    single, mine = timetable(plan.schedule, plan.shape), make_table(plan.schedule, plan.shape)
    assert mine is not None
    assert [*zip(mine.stages, mine.backward, mine.first, mine.last, strict=True)] == [
        (slot.stage, slot.kind == ActionKind.BACKWARD, slot.first, slot.last) for slot in single.slots
    ]
    rows = mine.order.rows[np.argsort(mine.order.rows[:, ACTION])]
    assert mine.order.starts.tolist() == single.starts
    assert (mine.order.slot == single.slot_array).all() and (rows[:, SLOT] == single.slot_array).all()
    assert (rows[:, NEED] == single.need_array).all()
    assert (rows[:, DEVICE] == single.device_array).all()
    assert mine.turns.tolist() == single.turns
    assert (mine.devices.tolist(), mine.route[1]) == (single.stages.devices, tuple(single.stages.devices))
    place = {int(action): at for at, action in enumerate(mine.order.rows[:, ACTION])}
    assert all(place[need] < place[action] for action, need in enumerate(single.need) if need >= 0)


def test_other_actions_and_wrong_orders_have_no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (plan := make_plan("zb-h1", 2, 1, 8)) and make_table(plan.schedule, plan.shape) is None
    plan = make_plan("", 2, 1, 8)
    orders = [[Action(d, kind, k) for k in range(4) for kind in ("F", "BW")] for d in range(2)]
    shape = PipelineShape(2, 4)

    def table_of(changed: Sequence[Sequence[Action]]) -> object:
        monkeypatch.setattr(Schedule, "orders", lambda *_: changed)
        return make_table(plan.schedule, shape)

    assert table_of(orders) is not None
    assert table_of([orders[0][:-1], orders[1]]) is None  # a pass is missing
    assert table_of([orders[0][::-1], orders[1]]) is None  # backward passes come first
    assert table_of([[orders[0][-1], *orders[0][1:]], orders[1]]) is None  # one occurs twice
    assert table_of(orders[::-1]) is None  # devices have each other's stages
    late = [*orders[1][2:], *orders[1][:2]]
    assert table_of([orders[0], late]) is None  # each waits for the other
