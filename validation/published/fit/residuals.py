"""Intervals: how far measured steps lie from their forecast, by regime.

Runs of known sources have all their settings. Runs of other regimes are told by strangers: their source is left out,
and flags are hidden. Coefficients were fitted to steps of known sources and programs: their residuals have no bias. A
profile that stands for that of another program is of a better tuned one as a rule: steps are longer than it says
(`BIASED`). The classes of models have one residual: none of them needs another for as many runs of left-out sources to
be inside.

Widths that hold nine of ten of the runs that they are set on hold fewer of a source that is left out. So that share is
raised (`LEVELS`) until nine of ten runs of left-out sources are inside, a regime after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.regimes import CLASSES, REGIMES, Regime, StepClass, residuals
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.published.fit.refit import FREEDOM, Row, corrections_without_source, source_weights
from meshcast.validation.published.summary import error_statistics

INSIDE = 0.90
"""Share of the runs of sources that are left out which intervals hold."""

TOLERANCE = 0.02
"""What that share may lack: a few runs of the hundreds of a regime, for which intervals would be much wider."""

LEVELS = tuple(round(0.85 + 0.005 * step, 3) for step in range(29))
"""Shares of the runs behind a width that it may hold."""

BIASED: tuple[Regime, ...] = ("family", "unknown")
"""Regimes whose steps are longer than forecast, by 0.05 and 0.10 in the logarithm, and so without any single source (by
0.03 or more, and 0.07 or more). Those of the others are as long, within 0.006."""

T_SCALE = Z90 / 2.132
"""Scale of a t distribution with `FREEDOM` degrees of freedom over the standard deviation of a normal one with the same
5 % and 95 % quantiles."""

MIN_SIGMA = 0.01
"""Least sigma of a regime in the search for its bias."""

ROUNDS = 30
"""Times that weights of runs and the most likely bias are found from one another."""


class RegimeResidual(NamedTuple):
    """Middle and standard deviation of log(measured / forecast) of the runs of a regime, without `others`."""

    bias: float
    sigma: float


@dataclass(frozen=True)
class RegimeError:
    """A run in a regime.

    row: of `forecast_derivatives`.
    log_ratio: logarithm of measured over forecast.
    others: sigma of the forecast without that of its regime.
    """

    row: Row
    regime: Regime
    log_ratio: float
    others: float

    def is_inside(self, residual: RegimeResidual) -> bool:
        """Returns whether the measured step lies in the interval."""
        return abs(self.log_ratio - residual.bias) <= Z90 * math.hypot(residual.sigma, self.others)

    def half_width(self, residual: RegimeResidual) -> float:
        """Returns half of the interval, as a share of the forecast."""
        return math.exp(residual.bias) * math.sinh(Z90 * math.hypot(residual.sigma, self.others))


HeldError = tuple[RegimeError, bool]
"""A run in a regime, and whether it lies in an interval with widths of all other sources."""


def list_errors(rows: Sequence[Row]) -> list[RegimeError]:
    """Returns the runs in all their regimes, those of strangers without the coefficients that their source has set."""
    return [
        RegimeError(
            row, held["regime"], held["log_ratio"] - (correction if held["regime"] != "source" else 0.0), held["others"]
        )
        for row, correction in zip(rows, corrections_without_source(rows), strict=True)
        for held in row["residuals"]
    ]


def measure_residuals(rows: Sequence[Row]) -> list[Row]:
    """Returns how the intervals of every regime hold, of all classes and of each, with its residual (see `_describe`).

    The level of a regime is the least with which `INSIDE` of the runs of left-out sources are inside, or nearly.
    """
    errors, described, narrowest = list_errors(rows), list[Row](), 0.0
    for regime in REGIMES:
        held = [error for error in errors if error.regime == regime]
        for level in LEVELS:
            judged = hold_left_out(held, level)
            if share_inside(judged) >= INSIDE - TOLERANCE:
                break
        residual = find_residual(held, level)
        # No regime is narrower than the better known before it.
        narrowest = max(narrowest, residual.sigma)
        residual = residual._replace(sigma=narrowest)
        described += [_describe(regime, name, level, judged, residual) for name in (None, *CLASSES)]
    return described


def hold_left_out(held: Sequence[RegimeError], level: float) -> list[HeldError]:
    """Returns the runs of a regime, and whether they are inside with widths of all other sources."""
    judged = []
    for source in sorted({error.row["source"] for error in held}):
        residual = find_residual([error for error in held if error.row["source"] != source], level)
        judged += [(error, error.is_inside(residual)) for error in held if error.row["source"] == source]
    return judged


def share_inside(held: Sequence[HeldError]) -> float:
    """Returns the share of runs inside; that which is wanted without any."""
    return fmean(inside for _, inside in held) if held else INSIDE


def find_residual(held: Sequence[RegimeError], level: float) -> RegimeResidual:
    """Returns the residual of a regime with which a share of its runs lies inside; a source counts with the root of its
    runs."""
    if not held:
        return RegimeResidual(0.0, 0.0)
    weights = source_weights([error.row for error in held])
    ratios, others = np.array([(error.log_ratio, error.others) for error in held]).T
    bias = find_bias(ratios, others, weights) if held[0].regime in BIASED else 0.0
    needed = np.sqrt(np.maximum(((ratios - bias) / Z90) ** 2 - others**2, 0.0))
    order = np.argsort(needed)
    reached = np.cumsum(weights[order]) / weights.sum()
    return RegimeResidual(bias, float(needed[order][min(int(np.searchsorted(reached, level)), len(held) - 1)]))


def find_bias(ratios: np.ndarray, others: np.ndarray, weights: np.ndarray) -> float:
    """Returns the most likely middle of logarithms of measured over forecast, by Student's t."""
    bias, variance = float(np.average(ratios, weights=weights)), float(np.var(ratios))
    for _ in range(ROUNDS):
        scales = T_SCALE**2 * (others**2 + variance)
        counts = weights * (FREEDOM + 1) / (FREEDOM + (ratios - bias) ** 2 / scales)
        bias = float(np.average(ratios, weights=counts / scales))
        spare = counts @ (((ratios - bias) / T_SCALE) ** 2 - others**2) / weights.sum()
        variance = max(float(spare), MIN_SIGMA**2)
    return bias


def _describe(
    regime: Regime, name: StepClass | None, level: float, held: Sequence[HeldError], residual: RegimeResidual
) -> Row:
    """Returns how the intervals of a regime hold, of a class or of all.

    `level`: share of the runs behind its widths that they hold. `inside`: of its runs, with these widths;
    `inside_left_out`: each source with widths of all others. `half_width`: the median half of an interval. `residual`:
    of the regime; `shipped`: that which ships. The others are statistics of forecast / measured - 1.
    """
    held = [(error, inside) for error, inside in held if name in (None, error.row["class"])]
    errors = [error for error, _ in held]
    return {
        "regime": regime, "class": name, "level": level, "rows": len(held),
        "sources": len({error.row["source"] for error in errors}),
        "inside": fmean(error.is_inside(residual) for error in errors) if errors else None,
        "inside_left_out": share_inside(held) if held else None,
        "half_width": median(error.half_width(residual) for error in errors) if errors else None,
        "residual": residual._asdict(), "shipped": asdict(residuals()[regime]),
        **error_statistics([math.expm1(-error.log_ratio) for error in errors]),
    }  # fmt: skip
