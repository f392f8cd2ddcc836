"""Simulated runs beside closed forms, beside an independent simulation, and the balance of their time."""

import math
import pickle
from typing import Any

import numpy as np
import pytest

from meshcast.simulator.runs.elastic import Elasticity
from meshcast.simulator.runs.failures import FailingUnits, Failure, FailureLog
from meshcast.simulator.runs.formulas import daly_interval, expected_goodput, expected_slowdown, young_interval
from meshcast.simulator.runs.span import CheckpointTier
from meshcast.simulator.runs.stragglers import Episodes, Jitter
from meshcast.simulator.runs.training import TIMES, RunSetting, SimulatedRun, simulate_run
from tests.draws import drawn

HOUR = 3600.0
STEP = 20.0


def one(seconds: float, shape: float = 1.0, lost: int = 0, nodes: int = 1) -> FailingUnits:
    return FailingUnits("node", 1, seconds, shape, lost, nodes)


def play(step: float, steps: int, **keys: Any) -> SimulatedRun:
    return simulate_run(RunSetting(Elasticity((step,)), steps, **keys), 0, 0)


def goodput(setting: RunSetting, runs: int, seed: int = 0) -> float:
    found = [simulate_run(setting, seed, number) for number in range(runs)]
    return sum(run.time_s["productive"] for run in found) / sum(run.seconds for run in found)


@pytest.mark.parametrize("step", [13.1, 0.1, 6.393063106437252])
def test_without_failures_a_run_takes_its_steps_exactly(step: float) -> None:
    for tiers in ((), (CheckpointTier(7),)):
        run = play(step, 100_003, tiers=tiers)
        assert run.seconds == 100_003 * step and run.steps == 100_003
        assert {name for name in TIMES if run.time_s[name]} == {"productive"}


def test_pauses_add_up_and_the_last_step_has_none() -> None:
    run = play(2.0, 100, tiers=(CheckpointTier(10, 3.0),), evaluation=(25, 40.0))
    assert (run.time_s["checkpoint"], run.time_s["evaluation"]) == (9 * 3.0, 3 * 40.0)
    assert run.seconds == 200 + 27 + 120


def log(*failures: Failure) -> tuple[FailureLog]:
    return (FailureLog(failures),)


def test_a_failure_loses_the_steps_since_the_checkpoint() -> None:
    # Steps 1 to 20 with two checkpoints end at 42; at 50.5 steps 21 to 24 are done, and half a second of the 25th.
    failure, tiers = log(Failure(50.5, "gpu", (0,))), (CheckpointTier(10, 1.0, 0.0, 5.0),)
    run = play(2.0, 100, sources=failure, tiers=tiers, detection=7.0, restart=11.0)
    assert run.time_s["lost_work"] == pytest.approx(8.5)
    assert (run.time_s["detection"], run.time_s["restart"]) == (7.0, 16.0)
    assert run.time_s["checkpoint"] == pytest.approx(9.0) and run.failures == {"gpu": 1}
    assert run.seconds == pytest.approx(200 + 9 + 8.5 + 23)


def test_a_failure_within_a_checkpoint_leaves_the_one_before() -> None:
    # Step 20 ends at 44 - 4 + 4 = 44: the first ten take 20 and their checkpoint 4, the next ten 20.
    run = play(2.0, 30, sources=log(Failure(43.5, "gpu")), tiers=(CheckpointTier(10, 4.0),))
    assert run.time_s["lost_work"] == pytest.approx(19.5)
    run = play(2.0, 30, sources=log(Failure(46.0, "gpu")), tiers=(CheckpointTier(10, 4.0),))
    assert run.time_s["lost_work"] == pytest.approx(20.0), "the second checkpoint was not complete"
    assert run.time_s["checkpoint"] == pytest.approx(4.0 + 2.0 + 4.0)


def test_an_asynchronous_checkpoint_counts_once_it_is_written() -> None:
    tiers = (CheckpointTier(10, 1.0, 15.0),)
    # Taken at 21, written at 36.
    early, late = (play(2.0, 15, sources=log(Failure(at, "gpu")), tiers=tiers) for at in (30.0, 37.0))
    assert early.time_s["lost_work"] == pytest.approx(29.0) and late.time_s["lost_work"] < 10


def test_a_checkpoint_waits_until_the_one_before_is_written() -> None:
    run = play(1.0, 31, tiers=(CheckpointTier(10, 1.0, 14.0),))
    # The second and the third wait for 14 - 10 seconds.
    assert run.time_s["checkpoint"] == pytest.approx(3 * 1.0 + 2 * 4.0)


def test_failures_during_recovery_begin_it_anew() -> None:
    failures = log(Failure(10.0, "gpu"), Failure(14.0, "nic"))
    run = play(1.0, 20, sources=failures, detection=3.0, restart=5.0)
    assert (run.time_s["detection"], run.time_s["restart"]) == (6.0, pytest.approx(1.0 + 5.0))
    assert run.failures == {"gpu": 1, "nic": 1} and run.time_s["lost_work"] == pytest.approx(10.0)


def test_a_run_waits_for_repairs_without_spare_nodes() -> None:
    failures = log(Failure(10.0, "gpu", (1,), 100.0), Failure(15.0, "gpu", (2,), 200.0))
    waiting, spared = (play(1.0, 50, sources=failures, tiers=(CheckpointTier(1),), spares=n) for n in (0, 2))
    assert waiting.time_s["waiting_for_spares"] == pytest.approx(205.0)
    assert spared.time_s["waiting_for_spares"] == 0.0


def test_slow_episodes_and_pauses_are_straggling() -> None:
    episodes = (Episodes(500.0, 100.0, 1.5), Episodes(1000.0, pause=5.0), Episodes(2000.0, pause=10.0, data=True))
    run = play(1.0, 200_000, episodes=episodes)
    # Slow for a share 1 - exp(-100 / 500) of the time, in which 1 / 1.5 of the steps are done.
    slow = 1 - math.exp(-0.2)
    rate = (1 - slow) + slow / 1.5
    training = run.time_s["productive"] / rate
    pauses = run.seconds / 1000 * 5.0
    assert run.time_s["straggling"] == pytest.approx(training - run.time_s["productive"] + pauses, rel=0.05)
    assert run.time_s["data_stalls"] == pytest.approx(run.seconds / 2000 * 10, rel=0.2)


def test_jitter_adds_the_expected_maximum() -> None:
    jitter = Jitter(0.05, "lognormal", 16_384)
    run = play(3.0, 20_000, jitter=jitter)
    assert run.seconds == pytest.approx(20_000 * 3.0 * jitter.mean_duration(), rel=2e-3)


def test_spans_change_nothing_but_the_order_of_draws(monkeypatch) -> None:
    keys = {"sources": (one(200.0),), "tiers": (CheckpointTier(9, 0.5, 2.0),), "restart": 3.0}
    long = play(1.0, 3000, **keys)
    monkeypatch.setattr("meshcast.simulator.runs.training.SPAN", 1)
    short = play(1.0, 3000, **keys)
    assert short.failures == long.failures and short.steps == long.steps
    assert all(short.time_s[name] == pytest.approx(long.time_s[name], abs=1e-6) for name in TIMES)


def test_a_run_of_days_ends_with_the_step_that_runs_then() -> None:
    setting = RunSetting(Elasticity((7.0,)), None, horizon=1000.0, sources=(one(300.0),), restart=20.0)
    for number in range(20):
        assert 1000.0 <= simulate_run(setting, 0, number).seconds < 1020.0 + 7.0


def test_times_add_up_to_the_clock_of_the_simulation() -> None:
    from meshcast.simulator.runs.training import TrainingProcess

    setting = RunSetting(
        Elasticity((2.0, 2.5), "fewer-replicas", 4, 2.0),
        5000,
        jitter=Jitter(0.1, "exponential", 64),
        episodes=(Episodes(400.0, 60.0, 1.3), Episodes(700.0, pause=3.0, data=True)),
        sources=(one(900.0, 1.0, 1, 8), one(2500.0, 0.7, 0, 8)),
        tiers=(CheckpointTier(20, 0.5, 30.0, 4.0),),
        detection=10.0,
        restart=15.0,
        spares=1,
        repair=800.0,
        evaluation=(100, 12.0),
    )
    for number in range(5):
        trainer = TrainingProcess(setting, np.random.SeedSequence(1, spawn_key=(number,)))
        run = trainer.run()
        assert run.seconds == pytest.approx(trainer.env.now, rel=1e-9)
        assert min(run.time_s.values()) >= 0


SETTINGS = [(d, restart) for d in (5.0, 30.0, 120.0, 300.0) for restart in (0.0, 60.0, 300.0, 900.0, 1800.0)]


def check_daly(d: float, restart: float, runs: int) -> None:
    every = max(1, round(daly_interval(d, HOUR) / STEP))
    segments = round(400 * HOUR / (every * STEP))  # of 400 hours; the last of them has no checkpoint
    setting = RunSetting(
        Elasticity((STEP,)), every * segments, sources=(one(HOUR),), tiers=(CheckpointTier(every, d),), restart=restart
    )
    assert goodput(setting, runs) == pytest.approx(expected_goodput(every * STEP, d, restart, HOUR), rel=0.01)


@pytest.mark.parametrize(("d", "restart"), drawn([(30.0, 300.0), (120.0, 60.0)], keep=2))
def test_goodput_is_that_of_dalys_formula(d: float, restart: float) -> None:
    check_daly(d, restart, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "restart"), SETTINGS)
def test_goodput_is_that_of_dalys_formula_in_twenty_settings(d: float, restart: float) -> None:
    check_daly(d, restart, 40)


def test_dalys_interval_is_the_best_one() -> None:
    for d in (1.0, 30.0, 300.0):
        best = min(range(1, 20_000), key=lambda t: expected_slowdown(float(t), d, 100.0, HOUR))
        assert daly_interval(d, HOUR) == pytest.approx(best, rel=0.02)
    assert young_interval(30.0, HOUR) == pytest.approx(math.sqrt(2 * 30 * HOUR))
    assert daly_interval(8000.0, HOUR) == HOUR


def independent(shape: float, every: int, d: float, restart: float, segments: int, rng: np.random.Generator) -> float:
    """Goodput of a run of one unit with Weibull times, written without the simulator: segment after segment."""
    scale = HOUR / math.gamma(1 + 1 / shape)
    now, next_failure, need = 0.0, scale * rng.weibull(shape), every * STEP + d
    for _ in range(segments):
        while now + need > next_failure:
            now = next_failure
            next_failure = now + scale * rng.weibull(shape)
            while now + restart > next_failure:
                now = next_failure
                next_failure = now + scale * rng.weibull(shape)
            now += restart
        now += need
    return segments * every * STEP / now


@pytest.mark.parametrize("shape", drawn([0.7, 1.5, 3.0], keep=3))
def test_weibull_failures_beside_an_independent_simulation(shape: float) -> None:
    every, d, restart = 24, 30.0, 120.0
    keys = {"sources": (one(HOUR, shape),), "tiers": (CheckpointTier(every, d),), "restart": restart}
    rng = np.random.default_rng(9)
    known = np.mean([independent(shape, every, d, restart, 2000, rng) for _ in range(20)])
    assert goodput(RunSetting(Elasticity((STEP,)), every * 2000, **keys), 6) == pytest.approx(known, rel=0.01)


def test_a_failure_wastes_the_write_and_half_an_interval() -> None:
    """Gemini's equation 1 (Wang et al. 2023, SOSP): t_ckpt + 1 / 2f + t_rtvl, for failures that are rare."""
    write, every, load = 90.0, 30, 40.0
    tiers = (CheckpointTier(every, 0.0, write, load),)
    setting = RunSetting(Elasticity((5.0,)), 200_000, sources=(one(5000.0),), tiers=tiers)
    runs = [simulate_run(setting, 2, number) for number in range(4)]
    failures = sum(run.failures["node"] for run in runs)
    wasted = sum(run.time_s["lost_work"] + run.time_s["restart"] for run in runs) / failures
    # Failures before the first checkpoint after a recovery find an older one, as far back as they come themselves.
    assert wasted == pytest.approx(write + every * 5.0 / 2 + load, rel=0.06)


def test_a_run_is_the_same_whoever_simulates_it() -> None:
    setting = RunSetting(Elasticity((1.0,)), 500, sources=(one(100.0),), jitter=Jitter(0.1, "normal", 4))
    first = simulate_run(setting, 3, 7)
    assert simulate_run(pickle.loads(pickle.dumps(setting)), 3, 7) == first
    assert simulate_run(setting, 3, 8) != first and simulate_run(setting, 4, 7) != first
    assert isinstance(first, SimulatedRun)
