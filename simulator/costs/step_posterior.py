"""What measured steps say of other steps of the same program and machine: a Gaussian process over their errors.

    log(measured / forecast) = sum over kinds of work k of   share(k) x(k)   + b + g(model, sizes) + error

- x is the logarithm of a factor on the time of a kind of work: a machine whose GEMMs are 8 % slower lengthens every
  step by 8 % of its share of GEMMs. b is what all steps of a source have in common, g what steps of a model on a GPU
  have, and those with like sizes share more of. All have the prior mean 0.
- Errors are of Student's t distribution, so a single odd step pulls little. The most probable values are found with
  weights of rows that are made anew in every round.
- Standard deviations of the prior (`StepPrior`) are those that make published steps of many sources most likely
  (`validation.learning.step_prior`); ``make docs-learning`` writes them.
- The forecast is corrected by what is certain: by the mean less `CERTAIN` standard deviations, or less `CONFIRMED`
  where rows held back were forecast better than without. A correction that is not certain is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache, cached_property
from math import copysign, exp, hypot, log
from pathlib import Path
from typing import TypedDict

import numpy as np

from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.records import dataclass

FILE = "step_prior.yaml"
"""The prior that ships."""
ROOM = Path(__file__).parent

FREEDOM = 4.0
"""Degrees of freedom of the errors of steps (`validation.published.fit.refit.FREEDOM`)."""
ROUNDS = 20
"""Maximum number of times that weights and values are found from one another."""
SETTLED = 1e-6
"""Largest change of a value between two rounds after which they end."""

CERTAIN, CONFIRMED = 3.5, 1.0
"""Standard deviations by which a correction is shortened: of too few rows to hold any back, or of rows that were not
forecast better; and of rows that were. With these, of draws of 1 to 40 rows of published sources 2 % are forecast worse
than without learning (`meshcast validate learning`)."""

GROUPS = ("gemm", "attention", "memory", "communication", "host", "bubble")
"""Kinds of work whose factors have a standard deviation of their own: the first word of a kind."""

SIZES = ("gpus", "tp", "pp", "cp", "ep", "micro", "sequence")
"""Sizes of a job that make steps alike."""


@dataclass(frozen=True)
class StepFeatures:
    """What the error of a step depends on.

    shares: of the busy time of a step by kind of work, a group and what it is of ("gemm fp8"); of the step: "bubble".
    model: shape of the model and name of the GPU.
    sizes: by their names, `SIZES`.
    """

    shares: Mapping[str, float]
    model: str
    sizes: Mapping[str, float]


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step beside its forecast.

    name: where it was measured.
    source: whose program and machine it ran on.
    features: of its forecast.
    measured, forecast: [s].
    """

    name: str
    source: str
    features: StepFeatures
    measured: float
    forecast: float

    @property
    def log_ratio(self) -> float:
        """Logarithm of measured over forecast."""
        return log(self.measured / self.forecast)


@dataclass(frozen=True)
class StepPrior:
    """Standard deviations of log(measured / forecast) of steps of a source.

    gemm, attention, memory, communication, host, bubble: of the factor on a kind of work.
    source: of what all steps of a source have in common.
    model: of what steps of a model on a GPU have in common.
    like: of what those with like sizes have in common.
    length: distance in logarithms of sizes at which that has fallen by 40 %.
    noise: scale of the error of a step.
    """

    gemm: float
    attention: float
    memory: float
    communication: float
    host: float
    bubble: float
    source: float
    model: float
    like: float
    length: float
    noise: float

    def covariance(self, rows: Sequence[StepFeatures], others: Sequence[StepFeatures]) -> np.ndarray:
        """Returns the covariance of the errors of steps without their noise [rows, others]."""
        kinds = sorted({kind for features in (*rows, *others) for kind in features.shares})
        scales = np.array([getattr(self, kind.partition(" ")[0]) for kind in kinds])
        left, right = (
            np.array([[step.shares.get(kind, 0.0) for kind in kinds] for step in steps]).reshape(len(steps), -1)
            * scales
            for steps in (rows, others)
        )
        same = np.array([[step.model == other.model for other in others] for step in rows], dtype=float)
        sizes = [np.log([[step.sizes[name] for name in SIZES] for step in steps]) for steps in (rows, others)]
        distances = ((sizes[0][:, None] - sizes[1][None]) ** 2).sum(axis=-1)
        like = self.like**2 * np.exp(-distances / (2 * self.length**2))
        common: np.ndarray = left @ right.T + self.source**2 + same * (self.model**2 + like)
        return common


@cache
def shipped_prior() -> StepPrior:
    """Returns the prior that ships."""
    return StepPrior(**read_shipped(ROOM / FILE).data)


@dataclass(frozen=True)
class StepCorrection:
    """What measured steps say of a step.

    log_ratio: logarithm of the factor on its forecast; 0: they say too little.
    middle, sigma: middle and standard deviation of log(measured / forecast) as the posterior has them, with the noise
        of a step.
    rows: measured steps behind it.
    """

    log_ratio: float
    middle: float
    sigma: float
    rows: int

    @property
    def factor(self) -> float:
        """Returns how many times as long the step is as its forecast."""
        return exp(self.log_ratio)


NOTHING_LEARNT = StepCorrection(0.0, 0.0, 0.0, 0)
"""Without any measured steps."""


@dataclass(frozen=True, eq=False)
class StepPosterior:
    """What measured steps of a source say.

    rows: the measured steps, at least one.
    confirmed: whether rows held back were forecast better with it.
    """

    rows: Sequence[MeasuredStep]
    confirmed: bool = False
    prior: StepPrior = field(default_factory=lambda: shipped_prior())

    @cached_property
    def ratios(self) -> np.ndarray:
        """Logarithms of measured over forecast of the rows."""
        return np.array([row.log_ratio for row in self.rows])

    @cached_property
    def covariance(self) -> np.ndarray:
        """Covariance of the rows without their noise."""
        features = [row.features for row in self.rows]
        return self.prior.covariance(features, features)

    @cached_property
    def weights(self) -> np.ndarray:
        """Inverse variances of the noise of the rows: those far from what the others say count little."""
        return find_weights(self.covariance, self.ratios, self.prior.noise)

    @cached_property
    def precision(self) -> np.ndarray:
        """Inverse of the covariance of the rows with their noise."""
        inverse: np.ndarray = np.linalg.inv(self.covariance + np.diag(1.0 / self.weights))
        return inverse

    @cached_property
    def left_out(self) -> np.ndarray:
        """What the other rows say of each: logarithms of factors."""
        pulls: np.ndarray = self.ratios - self.precision @ self.ratios / np.diag(self.precision)
        return pulls

    def correct(self, step: StepFeatures) -> StepCorrection:
        """Returns what the rows say of a step."""
        between = self.prior.covariance([step], [row.features for row in self.rows])[0]
        middle = float(between @ self.precision @ self.ratios)
        variance = float(self.prior.covariance([step], [step])[0, 0] - between @ self.precision @ between)
        sigma = max(variance, 0.0) ** 0.5
        sure = max(abs(middle) - (CONFIRMED if self.confirmed else CERTAIN) * sigma, 0.0)
        noise = self.prior.noise * (FREEDOM / (FREEDOM - 2)) ** 0.5
        return StepCorrection(copysign(sure, middle), middle, hypot(sigma, noise), len(self.rows))


def find_weights(covariance: np.ndarray, ratios: np.ndarray, noise: float) -> np.ndarray:
    """Returns the inverse variances of the noise of rows, most probable with errors of Student's t."""
    values = np.zeros(len(ratios))
    for _ in range(ROUNDS):
        weights = (FREEDOM + 1) / (FREEDOM * noise**2 + (ratios - values) ** 2)
        before, values = values, covariance @ np.linalg.solve(covariance + np.diag(1.0 / weights), ratios)
        if np.abs(values - before).max(initial=0.0) < SETTLED:
            break
    return weights


class LearntRow(TypedDict):
    """A measured step as a calibration file states it."""

    name: str
    source: str
    measured_s: float
    forecast_s: float
    model: str
    shares: dict[str, float]
    sizes: dict[str, float]


class LearntData(TypedDict):
    """Measured steps as a calibration file states them."""

    confirmed: bool
    rows: list[LearntRow]


def round_seconds(value: float) -> float:
    """Returns seconds as files state them."""
    return float(f"{value:.6g}")


def read_posterior(steps: LearntData) -> StepPosterior:
    """Returns what measured steps of a calibration file say."""
    rows = [
        MeasuredStep(
            row["name"],
            row["source"],
            StepFeatures(row["shares"], row["model"], row["sizes"]),
            row["measured_s"],
            row["forecast_s"],
        )
        for row in steps["rows"]
    ]
    return StepPosterior(rows, steps["confirmed"])


def write_posterior(posterior: StepPosterior) -> LearntData:
    """Returns them as a calibration file states them."""
    rows: list[LearntRow] = [
        {
            "name": row.name,
            "source": row.source,
            "measured_s": round_seconds(row.measured),
            "forecast_s": round_seconds(row.forecast),
            "model": row.features.model,
            "shares": {kind: round(share, 4) for kind, share in row.features.shares.items()},
            "sizes": dict(row.features.sizes),
        }
        for row in posterior.rows
    ]
    return {"confirmed": posterior.confirmed, "rows": rows}
