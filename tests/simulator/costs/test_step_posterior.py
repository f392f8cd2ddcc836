"""Measured steps correct the forecast of others by what they show, and by no more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from meshcast.simulator.costs.step_posterior import (
    CERTAIN,
    SIZES,
    MeasuredStep,
    StepFeatures,
    StepPosterior,
    read_posterior,
    shipped_prior,
    write_posterior,
)

SAME = dict.fromkeys(SIZES, 8.0)


def step(ratio: float, gemm: float = 0.6, model: str = "a", **sizes: float) -> MeasuredStep:
    """Returns a step that takes exp(ratio) times its forecast."""
    shares = {"gemm bf16": gemm, "communication dp": 1 - gemm, "bubble": 0.0}
    return MeasuredStep("run", "mine", StepFeatures(shares, model, SAME | sizes), math.exp(ratio), 1.0)


def test_steps_as_forecast_change_nothing() -> None:
    pull = StepPosterior([step(0.0)] * 5, True).correct(step(0.0).features)
    assert pull.log_ratio == pull.middle == 0 and pull.rows == 5


@pytest.mark.parametrize("ratio", [0.12, -0.12])
def test_what_steps_have_in_common_is_learnt(ratio: float) -> None:
    """The more of them say so, the nearer the correction comes, from below."""
    pulls = [StepPosterior([step(ratio)] * count, True).correct(step(0).features) for count in (1, 3, 10, 30)]
    sizes = [pull.log_ratio / ratio for pull in pulls]
    assert sizes == sorted(sizes) and sizes[0] >= 0 and 0.7 < sizes[-1] < 1
    sigmas = [pull.sigma for pull in pulls]
    assert sigmas == sorted(sigmas, reverse=True) and sigmas[-1] > shipped_prior().noise


def test_steps_whose_communication_is_slow_lengthen_those_that_communicate_most() -> None:
    rows = [step(0.3 * (1 - gemm), gemm, str(gemm)) for gemm in np.linspace(0.1, 0.9, 12).tolist()]
    posterior = StepPosterior(rows, True)
    least, most = (posterior.correct(step(0, gemm, "other").features).middle for gemm in (0.95, 0.05))
    assert most > 0.2 and abs(least) < 0.05


def test_like_steps_share_more() -> None:
    posterior = StepPosterior([step(0.1)] * 2)
    same, larger, other = (
        posterior.correct(features).middle
        for features in (step(0).features, step(0, gpus=4096.0).features, step(0, model="b").features)
    )
    assert same > larger > other > 0


def test_a_single_odd_step_pulls_little() -> None:
    quiet = [step(0.01 * sign) for sign in (1, -1) * 4]
    assert abs(StepPosterior([*quiet, step(0.6)]).correct(step(0).features).middle) < 0.02


def test_what_is_not_confirmed_is_shortened_more() -> None:
    rows = [step(0.12)] * 5
    sure, unsure = (StepPosterior(rows, confirmed).correct(step(0).features) for confirmed in (True, False))
    assert sure.middle == unsure.middle and sure.log_ratio > unsure.log_ratio
    assert StepPosterior([step(0.05)]).correct(step(0).features).log_ratio == 0 < CERTAIN


def test_each_step_is_judged_by_the_others() -> None:
    rows = [step(0.1, 0.3), step(0.12, 0.5), step(0.09, 0.7, "b"), step(0.11, 0.6)]
    for place, said in enumerate(StepPosterior(rows).left_out.tolist()):
        others = [row for number, row in enumerate(rows) if number != place]
        assert said == pytest.approx(StepPosterior(others).correct(rows[place].features).middle, abs=0.005)


def test_a_file_says_the_same() -> None:
    posterior = StepPosterior([step(0.1, 0.25), step(0.2, 0.5, "b", tp=2.0)], True)
    read = read_posterior(write_posterior(posterior))
    assert replace(read.rows[1], measured=posterior.rows[1].measured) == posterior.rows[1] and read.confirmed
    assert read.correct(step(0).features).middle == pytest.approx(posterior.correct(step(0).features).middle, 1e-4)
