"""How much larger errors of forecasts are where a field of the plan lies outside of what other sources have run.

Each source is left out in turn: combinations are condensed from the runs of all others, and each of its runs is held
against the nearest of them. With the fields F that lie outside of it, the errors are

    log(measured / forecast) ~ Student's t,   scale^2 = Q^2 (b^2 + sum over F of s(f)^2)

where b is the sigma of the interval on the side of the error, and Q makes the 90 % interval of the t distribution that
of a normal one. The s(f) >= 0 are the widening that the interval needs beyond its own sigma: most likely values, with
the weights of sources of `refit`. One field is fitted at a time; `pooled` gives one value to all. Most fields lie
outside in a few sources only, so a field has a value of its own only where its gain in log-likelihood is more than
`LEAST_GAIN`, and stays so without any one source; all others have the pooled one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.report.metrics import Z90
from validation.published.fit.refit import FREEDOM, source_weights
from validation.published.measured_range.combinations import condense, find_nearest
from validation.published.measured_range.plan_fields import NAMED, NUMBERS, TITLES
from validation.published.measured_range.survey import SurveyedRun

Q = Z90 / 2.132
"""Scale of a t distribution with `FREEDOM` degrees of freedom over the standard deviation of a normal one with the same
5 % and 95 % quantiles."""

GRID = np.arange(0.0, 0.4005, 0.005)
"""Sigmas that are tried."""

LEAST_GAIN = 2.0
"""Gain in log-likelihood that a sigma of its own needs: two standard errors."""


@dataclass(frozen=True)
class HeldRun:
    """A run held against the combinations of other sources.

    log_ratio: logarithm of measured over forecast.
    base: sigma of its interval on the side of the error.
    outside: fields outside of the nearest combination.
    """

    source: str
    log_ratio: float
    base: float
    outside: tuple[str, ...]


@dataclass(frozen=True)
class FieldSigma:
    """The widening that a field outside of what was run needs.

    field: name; ``pooled``: one for all.
    runs, sources: with the field outside.
    bias: weighted mean of log(measured / forecast) of these runs, and of all others.
    covered: share of these runs inside their 90 % interval.
    sigma: most likely.
    gain: in log-likelihood over 0.
    least, most: of `sigma`, with each source in turn left out; least_gain: of `gain`.
    """

    field: str
    runs: int
    sources: int
    bias: float
    covered: float
    sigma: float
    gain: float
    least: float
    most: float
    least_gain: float

    @property
    def own(self) -> bool:
        """Whether the runs determine a value of its own."""
        return min(self.gain, self.least_gain) > LEAST_GAIN


def hold_runs(runs: Sequence[SurveyedRun]) -> list[HeldRun]:
    """Every run whose task other sources have, too, held against the combinations of these."""
    found = []
    for task in sorted({run.plan.task for run in runs}, key=str):
        own = [run for run in runs if run.plan.task == task]
        for source in sorted({run.plan.source for run in own}):
            known = condense(run.plan for run in own if run.plan.source != source)
            for run in own if known else ():
                if run.plan.source == source:
                    _, outside = find_nearest(run.plan.fields, known)
                    base = math.hypot(run.sides[run.log_ratio > 0], run.others)
                    found.append(HeldRun(source, run.log_ratio, base, tuple(outside)))
    return found


def fit_sigmas(runs: Sequence[SurveyedRun]) -> list[FieldSigma]:
    """The widening of every field that lies outside in some run, the pooled one first."""
    held = hold_runs(runs)
    fields = [key for key in (*NAMED, *NUMBERS) if any(key in one.outside for one in held)]
    return [_fit(held, "pooled", fields), *(_fit(held, key, (key,)) for key in fields)]


def _fit(held: Sequence[HeldRun], name: str, fields: Collection[str]) -> FieldSigma:
    out = [one for one in held if _count(one, fields)]
    sigma, gain = _most_likely(held, fields)
    sources = sorted({one.source for one in out})
    without = [_most_likely([one for one in held if one.source != source], fields) for source in sources]
    weights = source_weights([{"source": one.source} for one in held])
    ratios = np.array([one.log_ratio for one in held])
    chosen = np.array([_count(one, fields) > 0 for one in held])
    inside = np.array([abs(one.log_ratio) <= Z90 * one.base for one in held])
    own = weights * chosen
    sigmas = [found for found, _ in without] or [0.0]
    return FieldSigma(
        field=name,
        runs=len(out),
        sources=len(sources),
        bias=float((own * ratios).sum() / own.sum()) if out else 0.0,
        covered=float((own * inside).sum() / own.sum()) if out else 1.0,
        sigma=sigma,
        gain=gain,
        least=min(sigmas),
        most=max(sigmas),
        least_gain=min((one for _, one in without), default=0.0),
    )


def _count(run: HeldRun, fields: Collection[str]) -> int:
    return sum(field in fields for field in run.outside)


def _most_likely(held: Sequence[HeldRun], fields: Collection[str]) -> tuple[float, float]:
    """The most likely sigma of every one of `fields`, and its gain in log-likelihood over 0."""
    likelihood = _likelihood(held, fields)
    values = [likelihood(float(sigma)) for sigma in GRID]
    best = int(np.argmax(values))
    return float(GRID[best]), values[best] - values[0]


def _likelihood(held: Sequence[HeldRun], fields: Collection[str]) -> Callable[[float], float]:
    weights = source_weights([{"source": one.source} for one in held])
    ratios, bases = np.array([one.log_ratio for one in held]), np.array([one.base for one in held])
    counts = np.array([_count(one, fields) for one in held])

    def likelihood(sigma: float) -> float:
        scale = Q * np.sqrt(bases**2 + counts * sigma**2)
        terms = -np.log(scale) - (FREEDOM + 1) / 2 * np.log1p((ratios / scale) ** 2 / FREEDOM)
        return float((weights * terms).sum())

    return likelihood


def format_sigmas(found: Sequence[FieldSigma]) -> str:
    """The fit as a table in Markdown."""
    lines = [
        "| field outside | runs | sources | bias % | inside % | sigma | gain | sigma, a source left out | its gain |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for one in found:
        lines.append(
            f"| {TITLES.get(one.field, one.field)} | {one.runs} | {one.sources} | {100 * one.bias:+.1f} | "
            f"{100 * one.covered:.0f} | {one.sigma:.3f} | {one.gain:.1f} | {one.least:.3f} to {one.most:.3f} | "
            f"{one.least_gain:.1f} |"
        )
    return "\n".join(lines)
