"""SpecTrain: weights are predicted as far ahead as its authors state, at the cost of two kernels a tensor and pass."""

from __future__ import annotations

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Memory
from meshcast.simulator.scheduling.schedule import Action
from meshcast.validation.contract.played import play_job
from meshcast.validation.pipelines.cases import ScheduleCase, replay
from tests.simulator.scheduling.schedules import job


@pytest.mark.parametrize("p", [2, 4, 5])
def test_predictions_reach_to_the_end_of_a_micro_batch(p: int) -> None:
    """s of both passes is the number of updates of device i until the backward pass on the first device ends: p - 1 - i
    + floor(i/2) after a forward pass, floor(i/2) after a backward pass, for passes that take equally long."""
    run = replay(ScheduleCase(schedule="spectrain", p=p, m=6 * p, t_f=1, t_b=1))
    ends = [dict(zip(order, run.end[i], strict=True)) for i, order in enumerate(run.table.orders)]
    for device, known in enumerate(ends):
        updates = [known[Action(device, "BW", k)] for k in range(6 * p)]
        for k in range(2 * p, 4 * p):
            begin, done = known[Action(device, "F", k)] - 1, ends[0][Action(0, "BW", k)]
            assert sum(begin < update < updates[k] for update in updates) == p - 1 - device
            assert sum(updates[k] < update <= done for update in updates) == device // 2


def test_each_pass_predicts_all_weights_of_its_device() -> None:
    run = play_job(job("spectrain", 4, 8))
    for device in range(4):
        held = sum(param.size for param in run.list_held(device))
        for name, read, write in (("newest weights", 4, 2), ("predict weights", 2 + 8, 2)):
            some = [op for _, op in run.instances(device) if op.name == name]
            passes = 2 * run.plan.passes.played_shape.m
            works = [op.work for op in some if isinstance(op.work, Memory)]
            assert sum(work.read for work in works) == read * held * passes
            assert sum(work.write for work in works) == write * held * passes


@pytest.mark.parametrize(("main", "copies"), [("fp32", 1), ("bf16", 2)])
def test_one_copy_more_of_weights_without_main_weights(main: str, copies: int) -> None:
    formats = {"precision": {"main_weights": main}}
    ours, flushed = (simulate({**job(name, 4, 8), **formats}).play.peaks for name in ("spectrain", "1f1b"))
    for mine, theirs in zip(ours, flushed, strict=True):
        assert mine.by["parameters"] == pytest.approx(copies * theirs.by["parameters"])
        for category in ("gradients", "optimizer", "activations"):
            assert mine.by[category] == pytest.approx(theirs.by[category])
        assert mine.left == 0
