"""Zero-bubble schedules with post-validation: steps without a barrier at the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshcast.simulator import simulate
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.no_flush import extend_to_steady_state, peak_weight_versions
from meshcast.simulator.scheduling.schedule import PipelineShape, actions_of
from meshcast.validation.contract.played import FREE, PAID, play_job
from tests.draws import drawn
from tests.simulator.engine.drawn_kinds import ZERO_BUBBLE, without_barrier
from tests.simulator.scheduling.schedules import job, make_schedule


@pytest.mark.parametrize("name", drawn(ZERO_BUBBLE, keep=3))
def test_post_validation_repeats_the_order_of_a_batch(name: str) -> None:
    played = play_job(without_barrier(name))
    plain = play_job(job(name, 4, 12))
    every = played.plan.shape.m
    assert played.plan.passes.played_shape.m > every == plain.plan.passes.played_shape.m
    for device, order in enumerate(played.program.timetable.orders):
        batches = [[a for a in actions_of(order) if a.microbatch // every == i] for i in range(2)]
        passes = [[a._replace(microbatch=a.microbatch % every) for a in batch if a.kind != "O"] for batch in batches]
        assert passes[0] == passes[1] == list(actions_of(plain.program.timetable.orders[device]))
        # All passes of a batch precede the update, and those of the next follow it.
        turns = [a.microbatch // every for a in actions_of(order)]
        assert turns == sorted(turns)
        assert peak_weight_versions(played.plan.schedule, played.plan.shape, device, order) == 1


@pytest.mark.parametrize("name", drawn(ZERO_BUBBLE, keep=2))
def test_a_step_without_a_barrier_is_as_long_as_the_longest_span(name: str) -> None:
    """No shorter than the work of the slowest device, no longer than from the first begin to the last end."""
    free, met = simulate(without_barrier(name)), simulate(job(name, m=12))
    busy = max(free.sums[device, :, 0].sum() for device in range(4))
    assert free.play.seconds <= met.play.seconds * (1 + 1e-9)
    assert free.play.seconds >= met.step_time - met.parts["bubble"] - met.job.framework.step_overhead_s - busy
    assert [peak.total for peak in free.play.peaks] == [peak.total for peak in met.play.peaks]
    assert "no barrier" in " ".join(free.assumed)


@pytest.mark.parametrize(("p", "m"), [(4, 12), (8, 24)])
def test_zero_bubble_in_a_steady_state(p: int, m: int) -> None:
    """With equal F, B and W, no messages and 2p - 1 micro-batches in flight no device idles from step to step."""
    schedule, run = make_schedule("zb-h2", post_validation=True), extend_to_steady_state(PipelineShape(p, m), m)
    table = timetable(schedule, run, update_interval=m)
    free, ends = [0.0] * p, dict[Any, float]()
    for action in (table.actions[i] for i in table.sequence):
        before = {"F": (action.stage - 1, "F"), "B": (action.stage + 1, "B")}.get(action.kind)
        came = ends.get((*before, action.microbatch), 0.0) if before else 0.0
        free[action.stage] = max(free[action.stage], came) + (action.kind != "O")
        ends[action.stage, action.kind, action.microbatch] = free[action.stage]
    for device in range(p):
        updates = [ends[device, "O", k * m - 1] for k in (1, 2, 3)]
        assert np.diff(updates).tolist() == [3 * m, 3 * m]


@pytest.mark.slow
def test_noise_without_a_barrier_is_read_from_the_steady_state() -> None:
    still, noisy = (
        simulate(without_barrier("zb-h1") | {"noise": noise}) for noise in ({"steps": 2}, {"jitter": 0.2, "steps": 3})
    )
    assert still.step_times == pytest.approx([still.step_time] * 2, rel=1e-9)
    assert len(set(noisy.step_times)) == 3 and min(noisy.step_times) > still.step_time
    assert noisy.to_dict()["noise"]["mean_kernels_s"] == pytest.approx(
        still.to_dict()["noise"]["mean_kernels_s"], rel=0.1
    )


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_device_updates_by_the_norm_of_those_before_it(name: str) -> None:
    """The sum of the norms goes from device to device, as a message of its own, and no further than the last one."""
    run = play_job(without_barrier(name, tp=2), PAID)
    ops, times, flat = run.flat.ops, run.times, run.flat
    norms: dict[tuple[int, int], float] = {}
    for device, updates in enumerate(run.program.timetable.updates):
        for turn, action in enumerate(updates):
            named = {ops[number].name: number for number in run.ops(action)}
            norms[device, turn] = times.end[named["grad-norm"]]
            if device:
                assert times.begin[named["adam"]] > norms[device - 1, turn]
    sent = [(source, target) for number, source, target in flat.sent if ops[number].name.split()[1].find("O") > 0]
    assert sorted(set(sent)) == [(device, device + 1) for device in range(3)]
    assert len(sent) == 3 * len(run.program.timetable.updates[0])


def test_a_slow_first_device_delays_the_updates_of_all_others() -> None:
    def waits(partition: list[int]) -> float:
        run = play_job(without_barrier("zb-h1", model={"layers": 12}, partition=partition), FREE)
        last = run.program.timetable.updates[-1][0]
        named = {run.flat.ops[number].name: number for number in run.ops(last)}
        return run.times.begin[named["adam"]] - run.times.end[named["grad-norm"]]

    assert waits([9, 1, 1, 1]) > waits([1, 1, 1, 9]) >= 0
