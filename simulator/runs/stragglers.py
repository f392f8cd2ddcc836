"""Steps wait for the slowest of n ranks: the maximum of n independent durations, drawn by its distribution function.

With F the distribution of a duration, that of the maximum is F^n. A uniform number U gives the maximum
F^-1(U^(1/n)), a single draw in place of n. Near 1 the power is computed from its complement, 1 - U^(1/n) = -expm1(ln U
/ n).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.job.run_keys import Distribution

CENTRAL = 0.425
"""Distance from 1/2 up to which the quantile has one form, and tails have others."""

LARGEST_EXPONENTIAL = 45.0
"""More than NumPy draws of a standard exponential distribution: the tail of its ziggurat begins at 7.70 and adds the
logarithm of 2^53 at most (Marsaglia and Tsang 2000, Journal of Statistical Software 5 (8))."""

_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4)
    + (1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4)
    + (5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0)
    + (3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1)
    + (6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2)
    + (2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4)
    + (1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)


def normal_quantile(upper: np.ndarray) -> np.ndarray:
    """Returns the standard normal values that are exceeded with these probabilities, to 1e-15 (Wichura 1988, algorithm
    AS 241, Applied Statistics 37 (3), 477-484). upper: probabilities between 0 and 1."""
    centre = 0.5 - upper
    root = np.sqrt(-np.log(np.minimum(upper, 1.0 - upper)))
    tail = np.where(root <= 5.0, _ratio(_TAIL, root - 1.6), _ratio(_FAR_TAIL, root - 5.0))
    middle = centre * _ratio(_CENTRE, CENTRAL**2 - centre**2)
    return np.where(np.abs(centre) <= CENTRAL, middle, np.copysign(tail, centre))


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], at: np.ndarray) -> np.ndarray:
    """Returns a ratio of two polynomials. polynomials: coefficients, that of the highest power first."""
    above, below = polynomials
    return np.polyval(above, at) / np.polyval(below, at)


@dataclass(frozen=True)
class Jitter:
    """Durations of a step relative to its forecast, on the slowest of several ranks.

    sigma: standard deviation of the duration on a rank; of its logarithm with lognormal. With exponential a rank
        takes 1 + sigma x, where x is exponentially distributed with mean 1.
    distribution: of the duration on a rank; its median is 1 with normal and lognormal.
    ranks: number of ranks, which vary independently.
    barrier: steps after which ranks wait for each other: 1, or more where replicas train alone for a while. What
        counts is then the mean duration of so many steps of a rank, which varies less: E[max over n of the sum of H] /
        (H E[t]).
    """

    sigma: float = 0.0
    distribution: Distribution = "lognormal"
    ranks: int = 1
    barrier: int = 1

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Durations of so many steps, each over the forecast."""
        if self.sigma == 0.0:
            return np.ones(count)
        rounds = -(-count // self.barrier)
        exceeded = -np.expm1(-rng.standard_exponential(rounds) / self.ranks)
        return np.repeat(self.quantile(np.maximum(exceeded, np.finfo(float).tiny)), self.barrier)[:count]

    def quantile(self, exceeded: np.ndarray) -> np.ndarray:
        """Returns the duration on a rank that is exceeded with these probabilities, over the forecast: of a step, or
        the mean of those between two barriers.

        The mean of several normal durations is normal. Of exponential ones it is gamma distributed, whose cube root is
        nearly normal (Wilson and Hilferty 1931); of lognormal ones nearly lognormal, with their mean and variance
        (Fenton 1960).
        """
        steps = self.barrier
        if self.distribution == "exponential":
            if steps == 1:
                return 1.0 - self.sigma * np.log(exceeded)
            root = 1 - 1 / (9 * steps) + normal_quantile(exceeded) / (3 * math.sqrt(steps))
            return 1.0 + self.sigma * np.maximum(root, 0.0) ** 3
        values = normal_quantile(exceeded)
        if self.distribution == "normal":
            return np.maximum(1.0 + self.sigma / math.sqrt(steps) * values, 0.0)
        variance = math.log1p(math.expm1(self.sigma**2) / steps)
        return np.exp((self.sigma**2 - variance) / 2 + math.sqrt(variance) * values)

    def least_duration(self) -> float:
        """Returns the duration, over the forecast, below which no step is drawn."""
        if self.sigma == 0.0:
            return 1.0
        exceeded = min(-math.expm1(-LARGEST_EXPONENTIAL / self.ranks), 1.0 - 2.0**-53)
        return float(self.quantile(np.array([exceeded]))[0])

    @remembered
    def mean_duration(self) -> float:
        """Returns the mean duration of a step over its forecast: that of the slowest rank."""
        return self._average(lambda durations: durations)

    @remembered
    def certain_duration(self, rate: float) -> float:
        """Returns the duration of equal steps that pass without a failure as often as these, over the forecast: -ln
        E[exp(-r t)] / r.

        rate: of failures, which come at exponentially distributed times, for each forecast duration.
        """
        passed = self._average(lambda durations: np.exp(-rate * durations))
        return -math.log(passed) / rate if passed > 0 else math.inf

    def _average(self, figure: Callable[[np.ndarray], np.ndarray]) -> float:
        """Returns the mean of a figure of the duration of a step on the slowest rank."""
        if self.sigma == 0.0:
            return float(figure(np.ones(1))[0])
        # Over F^-1(U^(1/n)), with U = exp(-e^t) so that both tails are resolved.
        grid = np.linspace(-40.0, 8.0, 20_001)
        rate = np.exp(grid)
        density = rate * np.exp(-rate)
        exceeded = np.clip(-np.expm1(-rate / self.ranks), np.finfo(float).tiny, 1.0 - 1e-16)
        return float(np.trapezoid(figure(self.quantile(exceeded)) * density, grid) / np.trapezoid(density, grid))


@dataclass(frozen=True)
class Episodes:
    """Times in which some part of the cluster is slow.

    every: mean time between two of them anywhere in the cluster [s]; they come as a Poisson process.
    seconds: mean duration, exponentially distributed [s].
    slowdown: factor on the duration of steps meanwhile.
    pause: time for which training stops at the beginning [s].
    data: whether training waits for data, and not for a part of the cluster.
    """

    every: float
    seconds: float = 0.0
    slowdown: float = 1.0
    pause: float = 0.0
    data: bool = False
    """The pause is then exponentially distributed with that mean."""

    def draw_pause(self, rng: np.random.Generator) -> float:
        """Returns the time for which training stops [s]."""
        return float(rng.exponential(self.pause)) if self.data and math.isfinite(self.pause) else self.pause
