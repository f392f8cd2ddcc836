"""The prior of steps: the standard deviations with which published steps of many sources are most likely.

Every source has factors, a bias and residuals of its own, drawn from the same prior (`StepPosterior`): an empirical
Bayes estimate by the marginal likelihood of their steps, Laplace's approximation of it for errors of Student's t. A
source counts with the root of its steps, of which at most `MAX_STEPS` are drawn. `START` pulls what the steps hardly
determine, with a standard deviation of 1 in the logarithm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, fields

import numpy as np

from meshcast.hardware.documents.optional_package import import_optional
from meshcast.simulator.costs.step_posterior import FREEDOM, MeasuredStep, StepPosterior, StepPrior

START = StepPrior(
    gemm=0.1, attention=0.15, memory=0.15, communication=0.3, host=0.3, bubble=0.3,
    source=0.06, model=0.04, like=0.04, length=1.0, noise=0.04,
)  # fmt: skip
"""Where the search begins."""
LOWEST, HIGHEST = 0.003, 3.0
"""Range of every value."""
MAX_STEPS = 40
"""Maximum number of steps of a source: the search takes their number to the third power."""
ITERATIONS = 15
MIXED = 3.0
"""Steps of a source that count in full."""


def fit_prior(sources: Sequence[Sequence[MeasuredStep]], start: StepPrior = START) -> StepPrior:
    """Returns the prior with which the steps of all sources are most likely."""
    minimize = import_optional("scipy.optimize", "solvers", "validate learning").minimize
    rng = random.Random(0)
    drawn = [rng.sample([*steps], min(len(steps), MAX_STEPS)) for steps in sources]
    begin, center = (np.log([*asdict(prior).values()]) for prior in (start, START))

    def loss(logarithms: np.ndarray) -> float:
        prior = _make_prior(logarithms)
        likelihoods = (MIXED * len(steps) ** -0.5 * log_likelihood(steps, prior) for steps in drawn)
        return float(((logarithms - center) ** 2).sum() / 2 - sum(likelihoods))

    ends = [(math.log(LOWEST), math.log(HIGHEST))] * len(begin)
    found = minimize(loss, begin, method="L-BFGS-B", bounds=ends, options={"maxiter": ITERATIONS})
    return _make_prior(found.x)


def _make_prior(logarithms: np.ndarray) -> StepPrior:
    values = np.exp(logarithms).tolist()
    return StepPrior(**dict(zip((field.name for field in fields(StepPrior)), values, strict=True)))


def log_likelihood(steps: Sequence[MeasuredStep], prior: StepPrior) -> float:
    """Returns the logarithm of the probability of the errors of the steps of a source, but for a constant."""
    posterior = StepPosterior(steps, prior=prior)
    pulls = posterior.precision @ posterior.ratios
    left = posterior.ratios - posterior.covariance @ pulls
    errors = -(FREEDOM + 1) / 2 * np.log1p((left / prior.noise) ** 2 / FREEDOM) - math.log(prior.noise)
    values = (posterior.ratios - left) @ pulls / 2
    curvature = np.log(posterior.weights).sum() - np.linalg.slogdet(posterior.precision)[1]
    return float(errors.sum() - values - curvature / 2)
