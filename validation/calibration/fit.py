"""Fits a cost model to measurements: robust least squares of log(forecast / measured).

Coefficients stay within their bounds; those whose lower bound is positive are fitted on a log scale. A coefficient
belongs to the GPU or link, with a value for all measurements, or to the library of the kernels (cuBLAS, NCCL, ...),
with a value for each library; all are fitted together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from meshcast.hardware.documents.optional_package import import_optional
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import Coefficient, coefficients

LOSS = 0.03
"""Residuals of log(forecast / measured) beyond this count linearly, not squared."""

PRIOR_WIDTH = 0.3
"""Relative distance of a coefficient from its known value that weighs as much as a row that is `LOSS` off."""


class LibraryMeasurements(Protocol):
    """Measurements of a library.

    Attributes:
        library: library of the measured kernels.
        seconds: measured times, an array [s].
        own: coefficients of the GPU or link that the library has of its own.
    """

    @property
    def library(self) -> str: ...
    @property
    def seconds(self) -> np.ndarray: ...
    @property
    def own(self) -> tuple[str, ...]: ...


ROUNDS = 3
"""Maximum number of fits; each frees the coefficients that have had an effect since the fit before."""

Name = tuple[str, str | None]
"""A coefficient and the library that it belongs to; None for the GPU or the link."""

Scale = tuple[Callable[[float], float], Callable[[float], float]]
"""The functions to and from the scale of a coefficient."""

S = TypeVar("S", bound=LibraryMeasurements)


@dataclass(frozen=True)
class Fit:
    """The result of a fit. A coefficient that the measurements do not depend on has no error, and stays at its start.

    Attributes:
        values: coefficients of the GPU or link.
        errors: their relative standard errors.
        libraries: coefficients of each library; they may include some of the GPU or link that it has of its own.
        library_errors: their relative standard errors.
    """

    values: dict[str, float]
    errors: dict[str, float]
    libraries: dict[str, dict[str, float]]
    library_errors: dict[str, dict[str, float]]

    def make_model(self, model: type, library: str) -> Any:
        """Makes the cost model of a library, with sigmas of 0."""
        return model(**{**self.values, **self.libraries[library]}, sigma=0.0, sigma_short=0.0)


def fit(
    model: type,
    samples: Sequence[S],
    predict: Callable[[S, Any], np.ndarray],
    held: Mapping[str, float] | None = None,
    most: int = 4000,
    prior: Mapping[Name, float] | None = None,
    seen: Mapping[S, np.ndarray] | None = None,
) -> Fit:
    """Fits the coefficients of the cost model `model` to `samples`.

    predict: computes the seconds of a sample with a cost model.
    held: coefficients with fixed values.
    prior: known values, where the fit starts; a coefficient that the samples hardly determine stays near (a Gaussian
        prior, on the scale of the fit; see `PRIOR_WIDTH`). Without an entry every value is as likely.
    most: maximum number of evaluations.
    seen: for every sample the rows that count, a mask; without any all count.
    """
    problem = _Problem(model, samples, predict, held or {}, prior or {}, most, seen or {})
    best, free, solution = problem.start, list[Name](), None
    # A coefficient without effect stays at its start; one that has an effect after others have moved is freed then.
    for _ in range(ROUNDS):
        more = problem.list_effective(best, free)
        if not more:
            break
        free = [name for name in problem.every if name in free or name in more]
        solution, best = problem.solve(best, free)
    if solution is None:
        return problem.split(best)
    values, errors = problem.split(best), problem.split(problem.relative_errors(best, free, solution.jac))
    return Fit(values.values, errors.values, values.libraries, errors.libraries)


@dataclass(eq=False)
class _Problem(Generic[S]):
    """A fit; its fields are the arguments of `fit`."""

    model: type
    samples: Sequence[S]
    predict: Callable[[S, Any], np.ndarray]
    held: Mapping[str, float]
    prior: Mapping[Name, float]
    most: int
    seen: Mapping[S, np.ndarray]

    @cached_property
    def known(self) -> Mapping[str, Coefficient]:
        """The coefficients of the cost model by name."""
        return coefficients(self.model)

    @cached_property
    def libraries(self) -> list[str]:
        """The libraries of the samples."""
        return sorted({sample.library for sample in self.samples})

    @cached_property
    def every(self) -> list[Name]:
        """The coefficients, each with the library whose it is, or None for the GPU's."""
        of_library = [name for name, c in self.known.items() if c.of == "library"]
        return [
            *((name, None) for name, c in self.known.items() if c.of == "gpu"),
            *((name, library) for library in self.libraries for name in of_library),
        ]

    @cached_property
    def start(self) -> dict[Name, float]:
        """The values where the fit begins."""
        usual = {name: self.prior.get(name, self.known[name[0]].start) for name in self.every}
        return {name: self.held.get(name[0], value) for name, value in usual.items()}

    def split(self, at: Mapping[Name, float]) -> Fit:
        """Returns values by whose coefficients they are."""
        common = {name: value for (name, of), value in at.items() if of is None}
        own = {
            library: {name: value for (name, of), value in at.items() if of == library} for library in self.libraries
        }
        return Fit(common, {}, own, {library: {} for library in self.libraries})

    def residuals(self, at: Mapping[Name, float]) -> np.ndarray:
        """Returns log(forecast / measured) of all rows that count."""
        values = self.split(at)
        models = {library: values.make_model(self.model, library) for library in self.libraries}
        ratios = ((s, np.log(self.predict(s, models[s.library]) / s.seconds)) for s in self.samples)
        return np.concatenate([ratio[self.seen[s]] if self.seen else ratio for s, ratio in ratios])

    def list_effective(self, at: Mapping[Name, float], free: Sequence[Name]) -> list[Name]:
        """Returns the coefficients, neither free nor held, that any residual depends on."""
        first = self.residuals(at)
        asked = [name for name in self.every if name not in free and name[0] not in self.held]
        return [name for name in asked if _has_effect(self.residuals, at, name, self.known[name[0]], first)]

    def solve(self, best: Mapping[Name, float], free: Sequence[Name]) -> tuple[Any, dict[Name, float]]:
        """Fits the coefficients `free`, starting at `best`; returns the result of scipy and all coefficients."""
        least_squares = import_optional("scipy.optimize", "solvers", "calibrate").least_squares
        known = self.known
        scales = [_scale(known[name].low) for name, _ in free]

        def at(x: np.ndarray) -> dict[Name, float]:
            moved = zip(free, scales, x, strict=True)
            return {**best, **{name: float(back(value)) for name, (_, back), value in moved}}

        ends = [(known[name[0]].low, known[name[0]].high, best[name]) for name in free]
        low, high, begin = np.array([[to(v) for v in end] for (to, _), end in zip(scales, ends, strict=True)]).T
        span, distances = high - low, self._make_distances(free, scales)
        solution = least_squares(
            lambda x: np.concatenate([self.residuals(at(x)), distances(x)]),
            np.clip(begin, low + 1e-6 * span, high - 1e-6 * span),
            bounds=(low, high),
            loss="soft_l1",
            f_scale=LOSS,
            x_scale=span,
            diff_step=1e-4,
            max_nfev=max(10, self.most // (len(free) + 1)),
        )
        return solution, at(solution.x)

    def _make_distances(self, free: Sequence[Name], scales: Sequence[Scale]) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a residual for each known value: its distance on the scale of the fit, in widths of the prior times
        the loss."""
        prior, known = self.prior, self.known
        with_prior = [i for i, name in enumerate(free) if name in prior]
        center = np.array([scales[i][0](prior[free[i]]) for i in with_prior])
        on_log = [known[free[i][0]].low > 0 for i in with_prior]
        sizes = [max(abs(prior[free[i]]), known[free[i][0]].start) for i in with_prior]
        width = PRIOR_WIDTH * np.where(on_log, 1.0, sizes)
        return lambda x: LOSS * (x[with_prior] - center) / width

    def relative_errors(self, best: Mapping[Name, float], free: Sequence[Name], jac: np.ndarray) -> dict[Name, float]:
        """Returns relative standard errors from the curvature, with the scatter of the residuals themselves."""
        sigma = np.median(np.abs(self.residuals(best))) * 1.4826
        errors = sigma * np.sqrt(np.diag(np.linalg.inv(jac.T @ jac + 1e-9 * np.eye(len(free)))))
        relative: dict[Name, float] = {}
        for name, error in zip(free, errors, strict=True):
            c = self.known[name[0]]
            relative[name] = float(min(error / (1.0 if c.low > 0 else max(abs(best[name]), c.start)), 1.0))
        return relative


def fit_further(
    first: Fit,
    model: type,
    samples: Sequence[S],
    predict: Callable[[S, Any], np.ndarray],
    prior: Mapping[Name, float] | None = None,
    seen: Mapping[S, np.ndarray] | None = None,
) -> Fit:
    """Adds the coefficients of further libraries to a fit, library by library; those of the GPU or the link stay, but
    for the ones that a library has of its own."""
    libraries, errors = dict(first.libraries), dict(first.library_errors)
    for library in sorted({sample.library for sample in samples} - {*libraries}):
        rest = [sample for sample in samples if sample.library == library]
        held = {name: value for name, value in first.values.items() if name not in rest[0].own}
        more = fit(model, rest, predict, held=held, prior=prior, seen=seen)
        own = [name for name in rest[0].own if name in more.errors]
        libraries[library] = more.libraries[library] | {name: more.values[name] for name in own}
        errors[library] = more.library_errors[library] | {name: more.errors[name] for name in own}
    return Fit(first.values, first.errors, libraries, errors)


def _has_effect(
    residuals: Callable[[Mapping[Name, float]], np.ndarray],
    start: Mapping[Name, float],
    name: Name,
    c: Coefficient,
    first: np.ndarray,
) -> bool:
    """Returns whether any residual depends on a coefficient."""
    others = [value for value in (c.low + 0.3 * (c.high - c.low), c.high) if value != start[name]]
    return any(bool(np.any(residuals({**start, name: value}) != first)) for value in others)


def _scale(low: float) -> Scale:
    """Returns the functions to and from the scale of a coefficient: logarithmic if its lower bound is positive."""
    if low > 0:
        return np.log, np.exp
    return (lambda v: v), (lambda v: v)
