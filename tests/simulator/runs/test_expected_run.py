"""Every run ends: one that cannot is refused before it is simulated, and the others are what was expected of them."""

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import Report, load_job, simulate
from meshcast.simulator.runs.elastic import Elasticity
from meshcast.simulator.runs.endless import refuse_endless
from meshcast.simulator.runs.expected_run import Attempt, FailureGaps, FailureTimes, expect_run
from meshcast.simulator.runs.failures import FailingUnits
from meshcast.simulator.runs.inputs import make_run, replace_run_keys
from meshcast.simulator.runs.span import CheckpointTier
from meshcast.simulator.runs.stragglers import Episodes, Jitter
from meshcast.simulator.runs.training import RunSetting, TrainingProcess, simulate_run
from tests.draws import MORE

MTBF, STEP, EVENTS = 1000.0, 20.0, 4000


def fail(mtbf: float = MTBF, units: int = 1, shape: float = 1.0, lost: int = 0) -> FailingUnits:
    return FailingUnits("node", units, units * mtbf, shape, lost, 16)


def draw_setting(rng: random.Random) -> RunSetting:
    """A run whose work between checkpoints, recovery and repairs are 0.01 to 100 times the time between failures."""

    def ratio() -> float:
        return float(10 ** rng.uniform(-2, 2))

    every = max(1, round(ratio() * MTBF / STEP))
    tiers = [(), (CheckpointTier(every, 5.0, rng.choice([0.0, ratio() * MTBF]), 3.0),)]
    tiers.append((CheckpointTier(rng.choice([0, 1]), 0.0, 1.0, 1.0, 1), CheckpointTier(every, 1.0, 30.0, 5.0)))
    sources = [fail(units=rng.choice([1, 16]), shape=rng.choice([0.5, 1.0, 1.0, 8.0]), lost=rng.choice([0, 1, 2]))]
    policy = rng.choice(["none", "none", "fewer-replicas", "reroute", "templates", "redundant"])
    episodes = [(), (Episodes(MTBF * ratio(), MTBF, 3.0, rng.choice([0.0, MTBF * ratio()])),)]
    return RunSetting(
        Elasticity((STEP, 1.5 * STEP, 2 * STEP), policy, 4, 4.0, reconfigure=30.0),
        steps=every * rng.choice([1, 10]) + 1,
        horizon=rng.choice([math.inf, math.inf, 50 * MTBF]),
        jitter=Jitter(rng.choice([0.0, 0.5]), "lognormal", 16),
        episodes=rng.choice(episodes),
        sources=tuple(sources),
        tiers=rng.choice(tiers),
        detection=rng.choice([0.0, ratio() * MTBF]),
        restart=MTBF / 10,
        spares=rng.choice([None, 0, 2]),
        repair=ratio() * MTBF,
        most_events=EVENTS,
    )


def test_every_run_ends_or_is_refused() -> None:
    """Nearly all that do not end are seen before; what is expected to end does, or is given up at its limit."""
    ended = refused = given_up = 0
    for number in range(30 * min(MORE, 3)):
        setting = draw_setting(random.Random(number))
        try:
            refuse_endless(setting)
        except PlanError as error:
            refused += 1
            assert "never" in error.rule or "events" in error.rule, error
            continue
        process = TrainingProcess(setting, np.random.SeedSequence(number))
        try:
            run = process.run()
        except PlanError as error:
            given_up += 1
            assert error.where in ("run.most_events", "run.most_days")
        else:
            ended += 1
            assert run.steps == setting.steps or run.seconds > setting.horizon * (1 - 1e-9), (number, run.seconds)
    assert ended > 8 and refused > 5 and given_up < 5 * min(MORE, 3), (ended, refused, given_up)


FEASIBLE = [
    (1.0, 0.1, 0.0, None), (2.0, 0.0, 0.0, None), (0.1, 2.0, 0.0, None), (0.5, 1.0, 0.3, None), (0.5, 0.1, 0.0, 0),
    (0.2, 0.1, 0.0, 2),
]  # fmt: skip


@pytest.mark.parametrize(("work", "recovery", "write", "spares"), FEASIBLE)
def test_the_closed_form_is_what_is_simulated(work: float, recovery: float, write: float, spares: int | None) -> None:
    """work, recovery, write: over the mean time between failures."""
    every = round(work * MTBF / STEP)
    setting = RunSetting(
        Elasticity((STEP,)),
        every * 20,
        sources=(fail(units=16, lost=1),),
        tiers=(CheckpointTier(every, 0.0, write * MTBF),),
        restart=recovery * MTBF,
        spares=spares,
        repair=MTBF,
    )
    expected, seconds = expect_run(setting), [simulate_run(setting, 0, number).seconds for number in range(8)]
    assert expected.seconds == pytest.approx(np.mean(seconds), rel=0.15)
    if spares is None:
        attempts = math.exp(recovery + write) * math.expm1(work) + 1
        assert expected.attempts == pytest.approx(attempts)
        assert expected.seconds == pytest.approx(20 * MTBF * (attempts - 1), rel=0.01)


@pytest.mark.parametrize("shape", [0.7, 8.0])
def test_weibull_failures_are_drawn(shape: float) -> None:
    setting = RunSetting(
        Elasticity((STEP,)), 6000, sources=(fail(shape=shape),), tiers=(CheckpointTier(30),), restart=100.0
    )
    seconds = [simulate_run(setting, 0, number).seconds for number in range(8)]
    assert expect_run(setting).seconds == pytest.approx(np.mean(seconds), rel=0.2)
    # A part that lives about 1,000 s passes 2,000 s as good as never, where exponential times would.
    often = replace(setting, tiers=(CheckpointTier(100),))
    assert (expect_run(often).attempts > 1e6) == (shape == 8.0)


@pytest.mark.parametrize(("segments", "failures"), [(2, 0), (3, 2), (4, 2), (5, 4), (16, 10)])
def test_failures_come_until_all_segments_fit_between_them(segments: int, failures: int) -> None:
    """Of 4 s after a recovery of 2 s, and 1 s to be written: the drawn gaps hold 2, 0, 2, 0 and 4 of them. Beyond what
    was drawn as many fit between two failures as in the mean."""
    gaps = FailureGaps(10.0, np.array([10.0, 5.0, 12.0, 3.0, 20.0]))
    assert Attempt(2.0, 4.0, 1.0, segments).expect_failures(gaps) == pytest.approx(failures)


def test_varying_steps_pass_as_often_as_their_certain_duration() -> None:
    jitter, rng = Jitter(0.8, "lognormal", 4), np.random.default_rng(3)
    durations = jitter.draw(rng, 200_000)
    assert jitter.certain_duration(0.5) == pytest.approx(-2 * math.log(np.exp(-0.5 * durations).mean()), rel=0.01)
    assert jitter.certain_duration(1e-9) == pytest.approx(jitter.mean_duration(), rel=1e-6)
    assert Jitter().certain_duration(3.0) == pytest.approx(1.0)


def test_failures_of_many_nodes_need_checkpoints_that_survive_them() -> None:
    tiers = (CheckpointTier(1, 0.0, 1.0, 1.0, 1), CheckpointTier(400, 1.0, 1.0, 1.0))
    setting = RunSetting(Elasticity((STEP,)), 4000, sources=(fail(lost=1),), tiers=tiers)
    refuse_endless(setting)
    with pytest.raises(PlanError, match="one comes every 500"):
        refuse_endless(replace(setting, sources=(fail(lost=1), fail(500.0, lost=2))))


def test_the_remedy_ends() -> None:
    every_day = RunSetting(Elasticity((STEP,)), 40_000, sources=(fail(),), tiers=(CheckpointTier(4000, 1.0),))
    with pytest.raises(PlanError) as raised:
        refuse_endless(every_day)
    assert raised.value.where == "run.checkpoints" and "every_s" in raised.value.remedy
    every = round(float(raised.value.remedy.split()[3]) / STEP)
    better = replace(every_day, tiers=(CheckpointTier(every, 1.0),))
    assert expect_run(better).ends(better) and simulate_run(better, 0, 0).steps == 40_000
    for changes, where, words in (
        ({"restart": 20 * MTBF, "tiers": (CheckpointTier(1),)}, "run.recovery", "times as rare"),
        ({"tiers": ()}, "run.checkpoints", "Saving states"),
        ({"episodes": (Episodes(60.0, pause=61.0),)}, "run.stragglers.episodes", "rarer"),
        ({"episodes": (Episodes(60.0, pause=61.0, data=True),)}, "run.data_stalls", "rarer"),
        ({"episodes": (Episodes(1e-3, 1.0, 2.0),), "tiers": (CheckpointTier(1),)}, "run.most_events", "raise"),
    ):
        with pytest.raises(PlanError) as raised:
            refuse_endless(replace(every_day, **changes))
        assert raised.value.where == where and words in raised.value.remedy, changes
    waiting = replace(every_day, sources=(fail(units=16, lost=1),), tiers=(CheckpointTier(1),), repair=10 * MTBF)
    with pytest.raises(PlanError, match="waits") as raised:
        refuse_endless(replace(waiting, spares=0))
    assert raised.value.remedy.startswith("run.recovery.spares: ")


def test_a_run_is_given_up_at_its_limits() -> None:
    """Also where nothing was expected to go wrong, or nobody asked."""
    setting = RunSetting(Elasticity((STEP,)), 10_000, sources=(fail(),), restart=50 * MTBF, most_events=500)
    with pytest.raises(PlanError, match="after 500 events: 0 of 10,000 steps"):
        simulate_run(setting, 0, 0)
    with pytest.raises(PlanError, match="after 2 days"):
        simulate_run(replace(setting, most_seconds=2 * 86_400.0, most_events=5000), 0, 0)
    # Of a run that its horizon ends, a recovery that begins anew for ever ends, too.
    assert simulate_run(replace(setting, horizon=10 * MTBF, detection=50 * MTBF), 0, 0).seconds >= 10 * MTBF


def test_a_run_tells_how_far_it_is() -> None:
    told: list[float] = []
    setting = RunSetting(Elasticity((1.0,)), 20_000, sources=(fail(50.0),), tiers=(CheckpointTier(1),))
    simulate_run(setting, 0, 0, told.append)
    assert len(told) > 2 and told == sorted(told) and 0 == told[0] < told[-1] < 1


@cache
def forecast() -> Report:
    return simulate(load_job({"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:4"}))


EXTREMES: list[dict[str, Any]] = [
    {"failures": {"mtbf_factor": 1e-300}},
    {"failures": {"rates": "none", "components": {"x": {"per": "job", "mtbf_hours": 1e-300}}, "mtbf_factor": 1e-300}},
    {"failures": {"components": {"x": {"per": "job", "mtbf_hours": 1e-300, "shape": 2.0}}}},
    {"failures": {"mtbf_factor": 1e-9}, "days": 1.0},
    {"failures": {"mtbf_factor": 1e-4}, "days": 0.1, "recovery": {"detection_s": 1e8}},
    {"checkpoints": {"write_gb_per_s": 1e-300}},
    {"checkpoints": {"kind": "in-memory", "write_gb_per_s": 1e-300, "bandwidth_factor": 1e-300}},
    {"checkpoints": {"kind": "sharded", "every_s": 1e8, "bandwidth_factor": 1e-300}},
    {"data_stalls": {"every_hours": 1e-320, "seconds": 60.0}},
    {"data_stalls": {"every_hours": 0.01, "seconds": 60.0}},
    {"stragglers": {"episodes": {"x": {"per": "gpu", "every_hours": 1e-9, "slowdown": 2.0}}}},
    {"stragglers": {"episodes": {"x": {"every_hours": 1e-320, "pause_s": 1e8}}}},
    {"evaluation": {"every_steps": 1, "seconds": 1e8}},
    {"recovery": {"spares": 0, "repair_hours": 1e12}, "steps": 1_000_000_000},
    {"stragglers": {"jitter": 2.0, "ranks": 1_000_000}, "steps": 100_000},
]


@pytest.mark.parametrize("run", EXTREMES, ids=lambda run: str(run)[:60])
def test_extreme_jobs_end_or_are_refused(run: dict[str, Any]) -> None:
    keys = {"steps": 1000, "most_events": 5000, **run}
    job = load_job({"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:4", "run": keys})
    try:
        plan = make_run(replace_run_keys(forecast(), job))
        assert math.isfinite(simulate_run(plan.setting, 0, 0).seconds)
    except PlanError as error:
        assert error.where.startswith("run.") and "nan" not in str(error)


def test_no_failures_are_expected_where_none_happen() -> None:
    times = FailureTimes(())
    assert times.list_losses() == [] and Attempt(1.0, 1e9).expect_failures(times.gaps()) == 0.0
    assert expect_run(RunSetting(Elasticity((2.0,)), 100, evaluation=(10, 3.0))).seconds == 200 + 9 * 3.0
