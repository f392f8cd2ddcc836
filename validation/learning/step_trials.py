"""Trials of learning from steps: some steps of a source are learnt from, its others are forecast.

The source is left out of everything: of coefficients (`step_sources`) and of the prior that says how far steps of a
source lie from their forecast (`step_prior`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import hypot
from statistics import fmean, median

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.step_posterior import StepPrior
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.learning.learn import Track
from meshcast.validation.learning.step_prior import fit_prior
from meshcast.validation.learning.step_sources import SourceStep
from meshcast.validation.learning.steps import learn_posterior
from meshcast.validation.published.answer import Answer

COUNTS = (0, 1, 2, 5, 10, 20, 40)
"""Numbers of steps that are learnt from; of a source with half as many at least."""
MIN_STEPS = 10
"""Steps of a source that is tried."""
TRIALS = 40
"""Draws of every source and number."""
KNOWN = 20
"""Steps of a source that are held back at least where draws are counted: of fewer the median error itself is not known
to a point."""
POINT = 0.01
"""Rise of the median error that is noticed."""


@dataclass(frozen=True)
class LearningTrial:
    """Steps that were learnt from, and what that did to the others.

    source, count: of the steps that were learnt from.
    held: how many steps were held back.
    before, after: their median errors without and with learning.
    whole: the same by corrections that are not shortened by what is not certain.
    inside_before, inside_after: shares of them in their 90 % interval.
    width_before, width_after: medians of half of that, in logarithms.
    """

    source: str
    count: int
    held: int
    before: float
    after: float
    whole: float
    inside_before: float
    inside_after: float
    width_before: float
    width_after: float


def try_sources(sources: Mapping[str, Sequence[SourceStep]], track: Track) -> Answer:
    """Returns what learning does to the steps of every source with enough of them.

    `sources`: each with its `steps` and, for each number of steps learnt from, `errors`: means over draws of medians;
    `not_shortened`: the same by corrections that are not shortened by what is not certain.
    `draws`: how many of those with `KNOWN` steps held back were forecast worse, and by more than a point. `prior`: of
    all sources.
    """
    tried = [name for name in sorted(sources) if len(sources[name]) >= MIN_STEPS]
    every = {name: [step.step for step in steps] for name, steps in sources.items()}
    prior = fit_prior([*every.values()])
    trials: list[LearningTrial] = []
    for name in track(tried, len(tried), "sources"):
        others = fit_prior([steps for other, steps in every.items() if other != name], prior)
        trials += draw_trials(name, sources[name], others, random.Random(name))
    return {
        "prior": asdict(prior),
        "counts": list(COUNTS),
        "trials": TRIALS,
        "sources": [_describe(name, len(sources[name]), trials) for name in tried],
        "draws": count_draws(trials),
        "intervals": [*_describe_intervals(trials)],
    }


def draw_trials(name: str, steps: Sequence[SourceStep], prior: StepPrior, rng: random.Random) -> list[LearningTrial]:
    """Returns the trials of a source."""
    counts = [count for count in COUNTS[1:] if 2 * count <= len(steps)]
    return [
        try_learning(name, drawn[:count], drawn[count:], prior)
        for count in counts
        for drawn in (rng.sample([*steps], len(steps)) for _ in range(TRIALS))
    ]


def try_learning(name: str, seen: Sequence[SourceStep], held: Sequence[SourceStep], prior: StepPrior) -> LearningTrial:
    """Learns from some steps of a source, and forecasts the others."""
    posterior = learn_posterior([step.step for step in seen], prior).posterior
    ratios = np.array([step.step.log_ratio for step in held])
    said = [posterior.correct(step.step.features) for step in held]
    reach = np.array(
        [(Z90 * step.sigma, Z90 * hypot(pull.sigma, step.others)) for step, pull in zip(held, said, strict=True)]
    )
    off = np.array([(step.bias, pull.middle) for step, pull in zip(held, said, strict=True)]) - ratios[:, None]
    inside = (np.abs(off) <= reach).mean(axis=0).tolist()
    after, whole = (
        _median_error(np.array([getattr(pull, name) for pull in said]) - ratios) for name in ("log_ratio", "middle")
    )
    widths = np.median(reach, axis=0).tolist()
    return LearningTrial(name, len(seen), len(held), _median_error(-ratios), after, whole, *inside, *widths)


def _median_error(log_errors: np.ndarray) -> float:
    return float(np.median(np.abs(np.expm1(log_errors))))


def count_draws(trials: Iterable[LearningTrial]) -> Answer:
    """Counts draws with enough steps held back that were forecast worse, and by more than a point."""
    rises = [trial.after - trial.before for trial in trials if trial.held >= KNOWN]
    return {
        "held": KNOWN,
        "draws": len(rises),
        "worse": sum(rise > 0 for rise in rises),
        "by_a_point": sum(rise > POINT for rise in rises),
        "most": max(rises, default=0.0),
    }


def _describe(name: str, steps: int, trials: Sequence[LearningTrial]) -> Answer:
    of_source = [trial for trial in trials if trial.source == name]
    errors = {"0": fmean(trial.before for trial in of_source)}
    whole = dict(errors)
    for count in COUNTS[1:]:
        if drawn := [trial for trial in of_source if trial.count == count]:
            errors[str(count)] = fmean(trial.after for trial in drawn)
            whole[str(count)] = fmean(trial.whole for trial in drawn)
    return {"source": name, "steps": steps, "errors": errors, "not_shortened": whole}


def _describe_intervals(trials: Sequence[LearningTrial]) -> Iterator[Answer]:
    """Yields how intervals hold by the number of steps learnt from."""
    for count in COUNTS[1:]:
        if drawn := [trial for trial in trials if trial.count == count]:
            yield {
                "steps": count,
                "sources": len({trial.source for trial in drawn}),
                "inside_before": fmean(trial.inside_before for trial in drawn),
                "inside_after": fmean(trial.inside_after for trial in drawn),
                "width_before": median(trial.width_before for trial in drawn),
                "width_after": median(trial.width_after for trial in drawn),
            }
