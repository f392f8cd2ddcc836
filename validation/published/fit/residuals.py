"""Widths of intervals: how far measured steps lie from their forecast, by class and regime.

Runs of known sources have all their settings. Runs of other regimes are told by strangers: their source is left out,
and flags are hidden. The two sides of a residual are those of the shortest interval that holds a share of the runs, for
with tails of unlike length one that leaves as many outside on each side is longer than it need be. Those of an unknown
program are equal, for the profile that stands for it may be faster or slower than it.

Widths that hold nine of ten of the runs that they are set on hold fewer of a source that is left out. So that share is
raised (`LEVELS`) until nine of ten runs of left-out sources are inside, a regime after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

import numpy as np

from meshcast.simulator.costs.regimes import CLASSES, REGIMES, Regime, StepClass, residuals
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.published.fit.refit import Row, corrections_without_source, source_weights
from meshcast.validation.published.summary import error_statistics

INSIDE = 0.90
"""Share of the runs of sources that are left out which intervals hold."""

TOLERANCE = 0.02
"""What that share may lack: a few runs of the hundreds of a regime, for which intervals would be much wider."""

LEVELS = tuple(round(0.88 + 0.01 * step, 2) for step in range(11))
"""Shares of the runs behind a width that it may hold."""

FEW = 50
"""Runs below which a class of a regime has no residual of its own."""

Sides = tuple[float, float]
Key = tuple[StepClass, Regime]


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

    @property
    def key(self) -> Key:
        """Class and regime."""
        return self.row["class"], self.regime

    def ends(self, sides: Sides) -> Sides:
        """Returns how far the interval reaches below and above the forecast, as logarithms."""
        below, above = (Z90 * math.hypot(side, self.others) for side in sides)
        return below, above

    def is_inside(self, sides: Sides) -> bool:
        """Returns whether the measured step lies in the interval."""
        below, above = self.ends(sides)
        return -below <= self.log_ratio <= above

    def half_width(self, sides: Sides) -> float:
        """Returns half of the interval, as a share of the forecast."""
        below, above = self.ends(sides)
        return (math.exp(above) - math.exp(-below)) / 2


HeldError = tuple[RegimeError, bool]
"""A run in a regime, and whether it lies in an interval with widths of all other sources."""


def list_errors(rows: Sequence[Row]) -> list[RegimeError]:
    """Returns the runs in all their regimes, those of strangers without the coefficients that their source has set."""
    return [
        RegimeError(
            row, one["regime"], one["log_ratio"] - (correction if one["regime"] != "source" else 0.0), one["others"]
        )
        for row, correction in zip(rows, corrections_without_source(rows), strict=True)
        for one in row["residuals"]
    ]


def measure_residuals(rows: Sequence[Row]) -> list[Row]:
    """Returns how the intervals of every regime hold, of all classes and of each, with its residual (see `_describe`).

    The level of a regime is the least one with which `INSIDE` of the runs of left-out sources are inside, or nearly.
    """
    errors = list_errors(rows)
    levels: dict[Regime, float] = {}
    left_out: dict[Regime, list[HeldError]] = {}
    for regime in REGIMES:
        trials = {level: hold_left_out(errors, levels | {regime: level}) for level in LEVELS}
        levels[regime] = next(
            (level for level in LEVELS if share_inside(trials[level]) >= INSIDE - TOLERANCE), LEVELS[-1]
        )
        left_out[regime] = trials[levels[regime]]
    sides = find_sides(errors, levels)
    return [
        _describe(regime, name, levels[regime], left_out[regime], sides)
        for regime in REGIMES
        for name in (None, *CLASSES)
    ]


def hold_left_out(errors: Sequence[RegimeError], levels: Mapping[Regime, float]) -> list[HeldError]:
    """Returns the runs of the last regime of `levels`, and whether they are inside with widths of all other sources."""
    (regime,) = [*levels][-1:]
    held = [error for error in errors if error.regime == regime]
    judged = []
    for source in sorted({error.row["source"] for error in held}):
        sides = find_sides([error for error in errors if error.row["source"] != source], levels)
        judged += [(error, error.is_inside(sides[error.key])) for error in held if error.row["source"] == source]
    return judged


def share_inside(held: Sequence[HeldError]) -> float:
    """Returns the share of runs inside; that which is wanted without any."""
    return fmean(inside for _, inside in held) if held else INSIDE


def find_sides(errors: Sequence[RegimeError], levels: Mapping[Regime, float]) -> dict[Key, Sides]:
    """Returns the sigmas of both sides of every class and regime that `levels` has.

    A class with fewer than `FEW` runs has, on each side, the larger of dense models' and of its own in the regime that
    is better known. No regime is narrower than the better known one: it then has the larger of both on each side.
    """
    sides: dict[Key, Sides] = {}
    for name in CLASSES:
        better = 0.0, 0.0
        for regime, level in levels.items():
            held = [error for error in errors if error.key == (name, regime)]
            if name == "dense" or len(held) >= FEW:
                own = _sides_of(held, level, is_symmetric=regime == "unknown")
            else:
                own = _larger_sides(sides["dense", regime], better)
            sides[name, regime] = better = _larger_sides(own, better) if sum(own) < sum(better) else own
    return sides


def _describe(
    regime: Regime,
    name: StepClass | None,
    level: float,
    held: Sequence[HeldError],
    sides: Mapping[Key, Sides],
) -> Row:
    """Returns how the intervals of a regime hold, of one class or of all.

    `level`: share of the runs behind its widths that they hold. `inside`: of its runs, with these widths;
    `inside_left_out`: each source with widths of all others. `half_width`: the median half of an interval. `below`,
    `above`: sigmas of both sides, of a class; `shipped`: those that ship. The others are statistics of
    forecast / measured - 1.
    """
    held = [(error, inside) for error, inside in held if name in (None, error.row["class"])]
    errors = [error for error, _ in held]
    shipped = asdict(residuals()[name, regime]) if name else None
    below, above = sides[name, regime] if name else (None, None)
    return {
        "regime": regime, "class": name, "level": level, "rows": len(held),
        "sources": len({error.row["source"] for error in errors}),
        "inside": fmean(error.is_inside(sides[error.key]) for error in errors) if errors else None,
        "inside_left_out": share_inside(held) if held else None,
        "half_width": median(error.half_width(sides[error.key]) for error in errors) if errors else None,
        "below": below, "above": above, "shipped": shipped,
        **error_statistics([math.expm1(-error.log_ratio) for error in errors]),
    }  # fmt: skip


def _larger_sides(first: Sides, second: Sides) -> Sides:
    return max(first[0], second[0]), max(first[1], second[1])


def _sides_of(held: Sequence[RegimeError], level: float, is_symmetric: bool) -> Sides:
    """Returns the sigmas below and above the forecast with which a share of the runs lies inside.

    is_symmetric: the sides are equal; otherwise they are those of the shortest interval, for with tails of unlike
        length the one that leaves equal shares outside on each side is longer than it need be.
    """
    if not held:
        return 0.0, 0.0
    weights = source_weights([error.row for error in held]) / len(held)
    others = np.array([error.others for error in held])
    ratios = np.array([error.log_ratio for error in held])
    if is_symmetric:
        both = _needed_sigmas(np.abs(ratios), others)
        order = np.argsort(both)
        needed = float(both[order][np.searchsorted(np.cumsum(weights[order]), level)])
        return needed, needed
    below, above = (_needed_sigmas(np.maximum(sign * ratios, 0.0), others) for sign in (-1, 1))
    usual, order = float(np.median(others)), np.argsort(above)
    choices: list[tuple[float, float, float]] = []
    for low in np.unique([0.0, *below]).tolist():
        shares = np.cumsum(np.where(below[order] <= low, weights[order], 0.0))
        if shares[-1] >= level:
            high = float(above[order][np.searchsorted(shares, level)])
            span = math.exp(Z90 * math.hypot(high, usual)) - math.exp(-Z90 * math.hypot(low, usual))
            choices.append((span, low, high))
    _, low, high = min(choices)
    return low, high


def _needed_sigmas(reaches: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the sigmas with which Z90 x hypot(sigma, others) is as far as each run lies."""
    return np.sqrt(np.maximum((reaches / Z90) ** 2 - np.square(others), 0.0))
