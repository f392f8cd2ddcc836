"""Widths of intervals: the shortest that hold, no narrower where less is known, set for sources that are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshcast.simulator.costs.regimes import CLASSES, REGIMES, Regime
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.published.fit.residuals import (
    INSIDE,
    RegimeError,
    find_sides,
    hold_left_out,
    list_errors,
    measure_residuals,
    share_inside,
)
from tests.validation.published.test_refit import row

LEVEL: dict[Regime, float] = {"source": INSIDE}


def errors(ratios: Any, others: float = 0.0, source: str = "a", regime: Regime = "source") -> list[RegimeError]:
    return [RegimeError(row(float(ratio), source), regime, float(ratio), others) for ratio in ratios]


def test_residuals_are_the_shortest_interval_of_nine_of_ten_runs() -> None:
    """101 runs, evenly at -0.25 to 0.75: an interval that ends 10 % higher is longer, for it is that of a logarithm."""
    ratios = np.linspace(-0.25, 0.75, 101)
    below, above = find_sides(errors(ratios), LEVEL)["dense", "source"]
    assert (below, above) == pytest.approx((0.25 / Z90, 0.65 / Z90), rel=0.03)
    # No runs with experts: dense models' of the same regime.
    assert find_sides(errors(ratios), LEVEL)["experts", "source"] == (below, above)
    narrower, _ = find_sides(errors(ratios, others=0.1), LEVEL)["dense", "source"]
    assert narrower**2 == pytest.approx(below**2 - 0.01)


def test_a_slow_tail_is_not_balanced_by_a_side_without_one() -> None:
    """Of 100 runs 92 lie within 0.05, evenly, and 8 are longer by 0.4: the tail may be outside."""
    held = errors([*np.linspace(-0.05, 0.05, 92), *[0.4] * 8])
    sides = find_sides(held, LEVEL)["dense", "source"]
    assert sides[1] < 0.05 / 1.64 and sum(error.is_inside((sides[0] + 1e-4, sides[1] + 1e-4)) for error in held) >= 90


def test_a_less_known_regime_has_at_least_the_sides_of_the_better_known() -> None:
    ratios = np.linspace(-0.2, 0.2, 101)
    both = errors(ratios) + errors(ratios / 4, regime="program")
    sides = find_sides(both, LEVEL | {"program": INSIDE})
    assert sides["dense", "program"] == sides["dense", "source"] and sides["dense", "source"][0] > 0.1


def test_runs_are_held_against_widths_of_other_sources() -> None:
    """A wide source does not widen the interval that it is judged by."""
    narrow, wide = errors(np.linspace(-0.05, 0.05, 40)), errors(np.linspace(-0.5, 0.5, 40), source="b")
    assert share_inside(hold_left_out(narrow + wide, LEVEL)) < 0.6
    assert share_inside(hold_left_out(narrow, LEVEL)) == 0.0 and share_inside([]) == INSIDE


def test_the_share_of_a_width_is_raised_until_left_out_sources_are_inside() -> None:
    draw = np.random.default_rng(3)
    rows = []
    for source in range(12):
        shift = float(draw.normal(0, 0.08))
        rows += [row(shift + float(draw.normal(0, 0.02)), str(source)) for _ in range(20)]
    found = {(one["regime"], one["class"]): one for one in measure_residuals(rows)}
    assert list(found) == [(regime, name) for regime in REGIMES for name in (None, *CLASSES)]
    source = found["source", None]
    assert source["level"] > INSIDE and source["inside"] >= source["inside_left_out"]
    assert source["inside_left_out"] == pytest.approx(INSIDE, abs=0.03)
    assert source["half_width"] == pytest.approx(Z90 * found["source", "dense"]["above"], rel=0.3)


def test_only_residuals_of_strangers_have_their_source_left_out() -> None:
    """Communication takes exp(0.2) times as long in all fitted sources but one, whose steps are as forecast."""
    rows = [row(0.1, name, gemm=0.5) for name in ("dgxc", "mlperf", "nemo") for _ in range(20)]
    rows += [row(0.0, "simumax", gemm=0.5), row(0.0, "nobody-has-seen", gemm=0.5)]
    for one in rows:
        one["residuals"].append(one["residuals"][0] | {"regime": "program"})
    found = {(one.row["source"], one.regime): one.log_ratio for one in list_errors(rows)}
    assert found["simumax", "source"] == 0.0 and found["simumax", "program"] == pytest.approx(-0.1, abs=0.01)
    assert found["nobody-has-seen", "program"] == 0.0  # nothing was fitted to its steps
