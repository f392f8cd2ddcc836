"""Intervals: the narrowest that hold, no narrower where less is known, set for sources that are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshcast.simulator.costs.regimes import CLASSES, REGIMES, Regime
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.published.fit.residuals import (
    INSIDE,
    TOLERANCE,
    RegimeError,
    find_residual,
    hold_left_out,
    list_errors,
    measure_residuals,
    share_inside,
)
from tests.validation.published.test_refit import row


def errors(ratios: Any, others: float = 0.0, source: str = "a", regime: Regime = "source") -> list[RegimeError]:
    return [RegimeError(row(float(ratio), source), regime, float(ratio), others) for ratio in ratios]


def test_the_residual_holds_a_share_of_the_runs_around_its_bias() -> None:
    """101 runs, evenly at -0.25 to 0.75, of a regime that has a bias and of one that has none."""
    ratios = np.linspace(-0.25, 0.75, 101)
    assert find_residual(errors(ratios, regime="family"), INSIDE) == pytest.approx((0.25, 0.45 / Z90), rel=0.03)
    assert find_residual(errors(ratios), INSIDE) == pytest.approx((0.0, 0.65 / Z90), rel=0.03)
    narrower = find_residual(errors(ratios, others=0.1), INSIDE)
    assert narrower.sigma**2 == pytest.approx((0.65 / Z90) ** 2 - 0.01, rel=0.05)


def test_a_few_slow_runs_hardly_move_the_bias() -> None:
    """Of 100 runs 92 lie within 0.05, evenly around 0.1, and 8 are longer by 0.6."""
    ratios = np.array([*np.linspace(0.05, 0.15, 92), *[0.7] * 8])
    assert find_residual(errors(ratios, regime="unknown"), INSIDE).bias == pytest.approx(0.1, abs=0.01)


def test_a_less_known_regime_is_at_least_as_wide_as_the_better_known() -> None:
    rows = [row(float(ratio), str(number % 4)) for number, ratio in enumerate(np.linspace(-0.2, 0.2, 100))]
    for known in rows:
        (residual,) = known["residuals"]
        known["residuals"].append(residual | {"regime": "program", "log_ratio": residual["log_ratio"] / 4})
    found = {regime["regime"]: regime for regime in measure_residuals(rows)}
    assert found["program"]["residual"]["sigma"] == found["source"]["residual"]["sigma"] > 0.1


def test_runs_are_held_against_widths_of_other_sources() -> None:
    """A wide source does not widen the interval that it is judged by."""
    narrow, wide = errors(np.linspace(-0.05, 0.05, 40)), errors(np.linspace(-0.5, 0.5, 40), source="b")
    assert share_inside(hold_left_out(narrow + wide, INSIDE)) < 0.6
    assert share_inside(hold_left_out(narrow, INSIDE)) == 0.0 and share_inside([]) == INSIDE


def test_the_share_of_a_width_is_raised_until_left_out_sources_are_inside() -> None:
    draw = np.random.default_rng(3)
    rows = []
    for number in range(12):
        shift = float(draw.normal(0, 0.08))
        rows += [row(shift + float(draw.normal(0, 0.02)), str(number)) for _ in range(20)]
    found = {(answer["regime"], answer["class"]): answer for answer in measure_residuals(rows)}
    assert list(found) == [(regime, name) for regime in REGIMES for name in (None, *CLASSES)]
    source = found["source", None]
    assert source["level"] > INSIDE - TOLERANCE and source["inside"] >= source["inside_left_out"]
    assert source["inside_left_out"] == pytest.approx(INSIDE, abs=0.03)
    assert source["half_width"] == pytest.approx(Z90 * source["residual"]["sigma"], rel=0.3)


def test_only_residuals_of_strangers_have_their_source_left_out() -> None:
    """Communication takes exp(0.2) times as long in all fitted sources but one, whose steps are as forecast."""
    rows = [row(0.1, name, gemm=0.5) for name in ("dgxc", "mlperf", "nemo") for _ in range(20)]
    rows += [row(0.0, "simumax", gemm=0.5), row(0.0, "nobody-has-seen", gemm=0.5)]
    for run in rows:
        run["residuals"].append(run["residuals"][0] | {"regime": "program"})
    found = {(error.row["source"], error.regime): error.log_ratio for error in list_errors(rows)}
    assert found["simumax", "source"] == 0.0 and found["simumax", "program"] == pytest.approx(-0.1, abs=0.01)
    assert found["nobody-has-seen", "program"] == 0.0  # nothing was fitted to its steps
