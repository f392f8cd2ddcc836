"""How much larger errors of forecasts are where a field of the plan lies outside of what other sources have run.

Each source is left out in turn: combinations are condensed from the runs of all others, and each of its runs is held
against the nearest of them. With the fields F that lie outside of it, the errors are

    log(measured / forecast) ~ Student's t,   scale^2 = Q^2 (b^2 + sum over F of s(f)^2)

around the bias of their regime, where b is the sigma of the interval, and Q makes the 90 % interval of the t
distribution that of a normal one. The s(f) >= 0 are the widening that the interval needs beyond its own sigma: most
likely values, with the weights of sources of `refit`. Each field is fitted alone first. It is kept if its gain in
log-likelihood is more than `MIN_GAIN`, also without any single source; the kept ones are then fitted together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Table, formatted_numbers
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.published.fit.refit import FREEDOM, source_weights
from meshcast.validation.published.measured_range.combinations import condense, find_nearest
from meshcast.validation.published.measured_range.plan_fields import NAMED, NUMBERS, TITLES
from meshcast.validation.published.measured_range.survey import SurveyedRun

Q = Z90 / 2.132
"""Scale of a t distribution with `FREEDOM` degrees of freedom over the standard deviation of a normal one with the same
5 % and 95 % quantiles."""

ROUNDS = 6
"""Times that each sigma is fitted with the others held, until none moves."""

GRID = np.arange(0.0, 0.4005, 0.005)
"""Sigmas that are tried."""

MIN_GAIN = 2.0
"""Gain in log-likelihood that a separate sigma needs: two standard errors."""


@dataclass(frozen=True)
class HeldRun:
    """A run held against the combinations of other sources.

    log_ratio: logarithm of measured over forecast, less the bias of its regime.
    base: sigma of its interval.
    outside: fields outside of the nearest combination.
    """

    source: str
    log_ratio: float
    base: float
    outside: tuple[str, ...]


@dataclass(frozen=True)
class FieldSigma:
    """The widening that a field outside of what was run needs.

    field: name.
    runs, sources: with the field outside.
    bias: weighted mean of log(measured / forecast) of these runs less that of all others.
    bias_error: its standard error, over sources left out.
    covered: share of these runs inside their 90 % interval.
    sigma: most likely.
    gain: in log-likelihood over 0.
    least, most: of `sigma`, with each source in turn left out; least_gain: of `gain`.
    """

    field: str
    runs: int
    sources: int
    bias: float
    bias_error: float
    covered: float
    sigma: float
    gain: float
    least: float
    most: float
    least_gain: float

    @property
    def kept(self) -> bool:
        """Whether the runs say that the interval needs to be wider."""
        return min(self.gain, self.least_gain) > MIN_GAIN


def hold_runs(runs: Sequence[SurveyedRun]) -> list[HeldRun]:
    """Lists every run whose task other sources have, too, held against the combinations of these."""
    held = []
    for task in sorted({run.plan.task for run in runs}, key=str):
        of_task = [run for run in runs if run.plan.task == task]
        for source in sorted({run.plan.source for run in of_task}):
            known = condense(run.plan for run in of_task if run.plan.source != source)
            for run in of_task if known else ():
                if run.plan.source == source:
                    _, outside = find_nearest(run.plan.fields, known)
                    held.append(HeldRun(source, run.log_ratio - run.bias, run.sigma, tuple(outside)))
    return held


def fit_sigmas(held: Sequence[HeldRun]) -> list[FieldSigma]:
    """Fits the widening of every field that lies outside in some run, fitted alone."""
    return [_fit(held, key) for key in (*NAMED, *NUMBERS) if any(key in run.outside for run in held)]


def fit_together(held: Sequence[HeldRun], fields: Sequence[str]) -> dict[str, float]:
    """Returns the most likely widenings of some fields, fitted together."""
    sample, sigmas = _Sample(held), dict.fromkeys(fields, 0.0)
    for _ in range(ROUNDS):
        for field in fields:
            others = sample.widen({name: sigma for name, sigma in sigmas.items() if name != field})
            sigmas[field], _ = sample.most_likely(field, others)
    return sigmas


def cover(held: Sequence[HeldRun], sigmas: Mapping[str, float]) -> tuple[float, float]:
    """Returns the share of runs with any of these fields outside that lie in their interval, as it is and widened."""
    sample = _Sample(held)
    out = np.any([sample.outside[field] for field in sigmas], axis=0)
    before, after = (sample.share_inside(out, variances) for variances in (sample.variances, sample.widen(sigmas)))
    return before, after


class _Sample:
    """Runs as arrays.

    outside: for each field, which runs have it outside.
    variances: squares of the sigmas of their intervals.
    """

    def __init__(self, held: Sequence[HeldRun]) -> None:
        self.weights = source_weights([{"source": run.source} for run in held])
        self.ratios = np.array([run.log_ratio for run in held])
        self.variances = np.array([run.base**2 for run in held])
        self.outside = {key: np.array([key in run.outside for run in held]) for key in (*NAMED, *NUMBERS)}

    def widen(self, sigmas: Mapping[str, float]) -> np.ndarray:
        """Returns the variances with the sigmas of the fields outside."""
        return np.asarray(self.variances + sum(self.outside[key] * sigma**2 for key, sigma in sigmas.items()))

    def most_likely(self, field: str, variances: np.ndarray) -> tuple[float, float]:
        """Returns the most likely sigma of a field, and its gain in log-likelihood over 0. variances: without it."""
        scale = Q * np.sqrt(variances + self.outside[field] * GRID[:, None] ** 2)
        terms = -np.log(scale) - (FREEDOM + 1) / 2 * np.log1p((self.ratios / scale) ** 2 / FREEDOM)
        values = terms @ self.weights
        best = int(np.argmax(values))
        return float(GRID[best]), float(values[best] - values[0])

    def bias(self, field: str) -> float | None:
        """Returns how much longer than forecast, in the logarithm, runs with the field outside took than the others.

        None if all runs have it outside, or none.
        """
        out = self.outside[field]
        if out.all() or not out.any():
            return None
        outside, rest = (float(np.average(self.ratios[some], weights=self.weights[some])) for some in (out, ~out))
        return outside - rest

    def share_inside(self, some: np.ndarray, variances: np.ndarray) -> float:
        """Returns the share of some runs in 90 % intervals with these variances."""
        inside = np.abs(self.ratios) <= Z90 * np.sqrt(variances)
        return float(np.average(inside[some], weights=self.weights[some]))


def _fit(held: Sequence[HeldRun], field: str) -> FieldSigma:
    sample, sources = _Sample(held), sorted({run.source for run in held if field in run.outside})
    rest = [_Sample([run for run in held if run.source != source]) for source in sources]
    sigma, gain = sample.most_likely(field, sample.variances)
    without = [sample_of.most_likely(field, sample_of.variances) for sample_of in rest]
    biases = [bias for sample_of in rest if (bias := sample_of.bias(field)) is not None]
    out = sample.outside[field]
    return FieldSigma(
        field=field,
        runs=int(out.sum()),
        sources=len(sources),
        bias=sample.bias(field) or 0.0,
        bias_error=math.sqrt((len(biases) - 1) * float(np.var(biases))) if len(biases) > 1 else math.inf,
        covered=sample.share_inside(out, sample.variances),
        sigma=sigma,
        gain=gain,
        least=min(sigma_of for sigma_of, _ in without),
        most=max(sigma_of for sigma_of, _ in without),
        least_gain=min(gain_of for _, gain_of in without),
    )


def format_fit(held: Sequence[HeldRun]) -> str:
    """Writes the fit as a page in Markdown."""
    fits = fit_sigmas(held)
    columns = (
        ("runs", ""),
        ("sources", ""),
        ("longer %", ""),
        ("inside %", ".0p"),
        ("sigma", ".3f"),
        ("gain", ".1f"),
    )
    table = Table("field outside", *formatted_numbers(*columns, ("sigma without a source", ""), ("gain", ".1f")))
    for fit in fits:
        longer = f"{100 * fit.bias:+.1f} +- {100 * fit.bias_error:.1f}"
        without = f"{fit.least:.3f} to {fit.most:.3f}"
        figures = longer, fit.covered, fit.sigma, fit.gain, without, fit.least_gain
        table.add(TITLES[fit.field], fit.runs, fit.sources, *figures)
    kept = fit_together(held, [fit.field for fit in fits if fit.kept])
    nothing = sum(not run.outside for run in held)
    lines = [render_table(table), f"{len(held)} runs whose task other sources have; {nothing} with no field outside."]
    if kept:
        before, after = cover(held, kept)
        together = ", ".join(f"{TITLES[field]} {sigma:.3f}" for field, sigma in kept.items())
        lines.append(f"Kept, fitted together: {together}. Inside, of runs with one of them: {before:.0%}, {after:.0%}.")
    return "\n".join(lines)
