"""A step put together from given times of actions: closed forms, and the same as orders played with these times."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshcast.simulator.costs.stragglers import slowest_pace
from meshcast.simulator.engine.play import play
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.ir.ops import Collective, Transfer, Work
from meshcast.simulator.loading.load import load_job
from meshcast.validation.measurements.forecasts import forecasters
from meshcast.validation.pipelines.cases import ScheduleCase, replay
from meshcast.validation.stages import action_forecasts
from meshcast.validation.stages.action_forecasts import forecast_actions, make_price
from meshcast.validation.stages.assembled_step import assemble_step
from tests.validation.distributed.jobs import GPT
from tests.validation.distributed.jobs import job as small_job


def job(m: int = 4, **plan: Any) -> dict[str, Any]:
    degrees = math.prod(plan.get(axis, 1) for axis in ("pp", "tp", "dp"))
    batch = {"micro": 1, "global": m * plan.get("dp", 1)}
    return {**small_job(degrees, {**GPT, "dropout": 0}, **plan), "batch": batch}


def price(hop: float = 0.0, collective: float = 0.0) -> Any:
    def of(work: Work) -> tuple[float, float, float]:
        if isinstance(work, Transfer):
            return 0.0, 0.0, hop
        return (collective, 0.0, 0.0) if isinstance(work, Collective) else (1.0, 0.0, 0.0)

    return of


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 4), (4, 8)])
def test_closed_form_of_equal_stages(schedule: str, p: int, m: int) -> None:
    """With the constant time of the framework behind the last update."""
    overhead = {"framework": {"name": "reference", "set": {"step_overhead_s": 0.125}}}
    plan = resolve_plan(load_job(job(m, pp=p, schedule=schedule) | overhead))
    forward, backward, update = 0.3, 0.7, 0.25
    seconds = {(stage, kind): time for stage in range(p) for kind, time in (("F", forward), ("BW", backward))}
    assert assemble_step(plan, price(), seconds, [update] * p) == pytest.approx(
        (m + p - 1) * (forward + backward) + update + 0.125
    )


@pytest.mark.parametrize(
    ("plan", "hop"),
    [({"pp": 2}, 0.0), ({"pp": 4, "schedule": "gpipe"}, 0.2), ({"pp": 4}, 0.2), ({"pp": 2, "chunks": 2}, 0.1)],
)
def test_unequal_stages_are_played_like_orders_with_given_times(plan: dict[str, Any], hop: float) -> None:
    of = resolve_plan(load_job(job(8, **plan)))
    shape = of.shape
    forward = [1.0 + 0.1 * stage for stage in range(shape.stages)]
    backward = [2.0 - 0.2 * stage for stage in range(shape.stages)]
    kinds = {"F": forward, "BW": backward}
    seconds = {(stage, kind): times[stage] for stage in range(shape.stages) for kind, times in kinds.items()}
    # A case gives the time of all chunks of a device.
    passes = {"t_f": [shape.v * time for time in forward], "t_b": [shape.v * time for time in backward]}
    schedule = "interleaved-1f1b" if shape.v > 1 else plan.get("schedule", "1f1b")
    wanted = replay(ScheduleCase(schedule=schedule, p=shape.p, m=shape.m, v=shape.v, hop=hop, **passes)).makespan
    assert assemble_step(of, price(hop), seconds, [0.0] * shape.p) == pytest.approx(wanted)


def test_messages_within_a_stage_are_forecast_separately() -> None:
    plan = resolve_plan(load_job(job(1, tp=2, sequence_parallel=False)))
    seconds = {(0, "F"): 1.0, (0, "BW"): 2.0}
    alone, joined = (assemble_step(plan, price(collective=each), seconds, [0.5]) for each in (0.0, 0.01))
    assert alone == pytest.approx(3.5)
    # Forward the embedding, two a layer, three of the loss; backward two a layer and the output layer's, behind weight
    # gradients that hide nothing; and the norm of all gradients.
    assert joined == pytest.approx(3.5 + 0.01 * (1 + 2 * 4 + 3 + 2 * 4 + 1 + 1))


def test_with_forecast_times_the_step_is_the_forecast() -> None:
    """The times of actions are read off the program that they are put into again."""
    (forecaster,) = forecasters(job(4, pp=2), None)
    actions, updates = forecast_actions(forecaster)
    seconds = {turn: value.value for turn, value in actions.items()}
    again = assemble_step(forecaster.plan, make_price(forecaster), seconds, [update.value for update in updates])
    _, program = build_program(forecaster.plan, make_price(forecaster))
    program.host = 0.0
    # The host is in the times of actions; on its own it would run ahead of them.
    assert again >= play(program).span
    assert again == pytest.approx(forecaster.step.value, rel=0.2)
    for value in (*actions.values(), *updates):
        assert 0 < value.low < value.value < value.high


def test_stages_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So kernels have the pace of one GPU, where those of the job have that of the slowest of four."""
    traits: list[Any] = []
    (forecaster,) = forecasters(job(4, pp=4), None)
    monkeypatch.setattr(action_forecasts, "Costs", lambda cluster, mesh, of_kernels, _: traits.append(of_kernels))
    make_price(forecaster)
    assert [of_kernels.pace for of_kernels in traits] == [slowest_pace(1)]
