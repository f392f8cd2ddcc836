"""How far real peaks of memory lie from their forecast, and how likely a plan therefore fits.

log(measured / forecast) of a peak is of Student's t distribution with `FREEDOM` degrees of freedom, with a separate
scale on either side of the forecast. Half of all runs lie on each side: a plan that needs all of its GPU fits with 50
%. The scales stand in `FILE`, a row for each framework profile, made by ``make docs-peak-errors`` from published runs
that were left out (`validation.published.fit.peak_spreads`).
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Literal

from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.records import dataclass
from meshcast.simulator.job.framework import Framework, load_framework

FILE = "peak_errors.yaml"

ROOM = Path(__file__).parent

FREEDOM = 4
"""Degrees of freedom of Student's t distribution, as of the errors of steps (`validation.published.fit.refit`)."""

FITS, FITS_AT_ALL = 0.95, 0.50
"""Probabilities from which a plan fits, and from which it is tight; below, it does not fit."""

RISK, EVEN = round(1 - FITS, 2), 1 - FITS_AT_ALL
"""The risk of lacking memory that searches take unless they are told, and the largest: plans with a larger risk do not
fit."""

Verdict = Literal["fits", "tight", "does-not-fit"]

STRANGER = "stranger"
"""Row of a program for which the profile of another program stands."""


@dataclass(frozen=True)
class PeakError:
    """Distribution of log(measured / forecast) of the peak memory of a program.

    below, above: scales of its two sides.
    rows, sources: of published peaks behind them: of the program itself, or of `program`.
    program: whose peaks these are; "others" where the program has none: then how far peaks of known programs lie from
        forecasts that were fitted to none of them.
    """

    below: float
    above: float
    rows: int
    sources: int
    program: str

    def probability(self, ratio: float) -> float:
        """Returns the probability that a peak is at most `ratio` times its forecast."""
        if ratio <= 0:
            return 0.0
        if math.isinf(ratio):
            return 1.0
        return self.share(math.log(ratio))

    def share(self, log_ratio: float) -> float:
        """Returns the share of peaks whose log(measured / forecast) is at most this."""
        x = log_ratio / (self.above if log_ratio > 0 else self.below)
        return 0.5 + x * (x * x + 6) / (2 * (x * x + 4) ** 1.5)

    def ratio(self, probability: float) -> float:
        """Returns what a peak over its forecast stays below with a probability between 0 and 1."""
        root = 2 * math.sqrt(probability * (1 - probability))
        x = 2 * math.sqrt(max(0.0, math.cos(math.acos(min(root, 1.0)) / 3) / root - 1))
        return math.exp(x * self.above) if probability > 0.5 else math.exp(-x * self.below)


@dataclass(frozen=True)
class MemoryFit:
    """How the memory of GPUs and hosts compares with what a plan needs.

    held: what the fullest GPU cannot do without: allocated memory, CUDA context and buffers of libraries [bytes].
    room: how many times its need the fullest GPU has as memory, or the fullest host that the plan offloads to.
    error: distribution of log(measured / forecast) of published peaks of the program.
    """

    held: float
    room: float
    error: PeakError

    @property
    def probability(self) -> float:
        """Probability that the plan fits."""
        return self.error.probability(self.room)

    @property
    def verdict(self) -> Verdict:
        """Whether the plan fits: from 95 % on; from 50 % on it is tight."""
        return judge(self.probability)


def judge(probability: float) -> Verdict:
    """Returns the verdict on a plan that fits with a probability."""
    return "fits" if probability >= FITS else "tight" if probability >= FITS_AT_ALL else "does-not-fit"


@cache
def _table() -> dict[str, PeakError]:
    return {name: PeakError(**row) for name, row in read_shipped(ROOM / FILE).data.items()}


@cache
def entry_of(profile: str, regime: str) -> str:
    """Returns the row of a framework profile with a regime.

    Where the regime is unknown and that of the profile is not, the profile stands for another program.
    """
    return STRANGER if regime == "unknown" != load_framework(profile).regime else profile


def peak_error_of(framework: Framework) -> PeakError:
    """Returns the distribution of peaks of a framework."""
    return _table()[entry_of(framework.name, framework.regime)]


def least_room(framework: Framework, risk: float) -> float:
    """Returns how many times its need by the forecast a GPU must have as memory, so that a plan fits but for a risk.

    With `EVEN` odds it is 1: plans fit by the forecast itself.
    """
    return peak_error_of(framework).ratio(1 - risk)
