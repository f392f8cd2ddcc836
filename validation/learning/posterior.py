"""The posterior of a section of a calibration: its coefficients move from the catalog's by as much as rows say.

The catalog's values are the prior of a robust fit (`validation.calibration.fit`), so that what rows do not determine
stays as it was. Whether the fit is better is judged on rows that it has not seen: rows are dealt into `FOLDS` parts
of like sizes, each is forecast by a fit to the others, and only where errors fall by more than chance explains (a
paired t-test of the absolute log errors, `CONFIDENCE`) is anything learnt. A table that agrees with the catalog thus
changes nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from meshcast.hardware.documents.optional_package import import_optional
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.validation.calibration.fit import Fit
from meshcast.validation.calibration.tables.calibrated import sigmas_of_all
from meshcast.validation.calibration.tables.rows import RowForecasts, Rows, count_rows, of_library
from meshcast.validation.calibration.write import round_digits

FOLDS = 5
"""Parts into which rows are dealt; each is held back once."""
MIN_ROWS = 4
"""Rows below which nothing can be held back."""
CONFIDENCE = 0.975
"""Probability with which unseen rows must be forecast better than by the catalog."""
LEAST_MOVE = 1e-3
"""Relative change of a coefficient from which on it counts as moved; files state four digits."""
PRIOR_ROWS = 20
"""Rows that the sigma of the catalog weighs as much as: a few rows of one machine do not show the scatter of all."""

S = TypeVar("S", bound=Rows)

Masks = Mapping[S, np.ndarray]
"""For a sample the rows that count, a mask."""

Data = dict[str, Any]
"""A section of a calibration file, or a part of it."""


@dataclass(frozen=True, eq=False)
class SectionEvidence(Generic[S]):
    """What a section of a calibration file is learnt from.

    Attributes:
        file: name of the GPU, or of the family of links or networks.
        section: of the file.
        model: its cost model.
        pairs: samples with their sources.
        known: coefficients in use, the prior.
        fit: returns the fit to the rows that count.
        price: returns the forecasts of a sample by coefficients.
        data: the section in use of this file; {} where it is borrowed.
        formats: number format of each library, as files state it.
        borrowed: sigma that is added to a borrowed section; 0 for one of its own.
    """

    file: str
    section: str
    model: type
    pairs: Sequence[tuple[S, str]]
    known: Fit
    fit: Callable[[Masks[S]], Fit]
    price: Callable[[S, Fit], RowForecasts]
    data: Mapping[str, object]
    formats: Mapping[str, str]
    borrowed: float

    @property
    def samples(self) -> list[S]:
        """The samples without their sources."""
        return [sample for sample, _ in self.pairs]


@dataclass(frozen=True)
class Move:
    """A coefficient that has moved.

    Attributes:
        name: of the coefficient.
        library: whose it is; "": the hardware's.
        before: value in the calibration in use.
        after: value learnt.
        sigma: its relative standard error.
        meaning: in words.
    """

    name: str
    library: str
    before: float
    after: float
    sigma: float
    meaning: str


@dataclass(frozen=True)
class Learnt:
    """What a section's rows say.

    Attributes:
        file: name of the GPU, or of the family of links or networks.
        section: of the file.
        rows: how many were used.
        before: median absolute error of the calibration in use on these rows.
        after: the same of fits that have not seen the row; None where nothing can be held back.
        moves: coefficients that have moved; () where unseen rows are not forecast better, and nothing is learnt.
        data: the section to write; {} without moves.
    """

    file: str
    section: str
    rows: int
    before: float
    after: float | None
    moves: tuple[Move, ...]
    data: Mapping[str, object]


def learn(evidence: SectionEvidence[S]) -> Learnt:
    """Returns what the rows of a section say, judged on rows held back."""
    before = _absolute_errors(evidence, evidence.known)
    count, median = len(before), _median_error(before)
    if count < MIN_ROWS:
        return Learnt(evidence.file, evidence.section, count, median, None, (), {})
    after = _errors_held_back(evidence)
    moves: tuple[Move, ...] = ()
    data: Mapping[str, object] = {}
    if is_better(before - after):
        fitted = evidence.fit({})
        moves = tuple(_list_moves(evidence, fitted))
        data = _make_section(evidence, fitted, moves) if moves else {}
    return Learnt(evidence.file, evidence.section, count, median, _median_error(after), moves, data)


def _absolute_errors(evidence: SectionEvidence[S], at: Fit) -> np.ndarray:
    """Returns |log(forecast / measured)| of all rows."""
    return np.concatenate([np.abs(np.log(evidence.price(s, at).seconds / s.seconds)) for s in evidence.samples])


def _median_error(log_errors: np.ndarray) -> float:
    return float(np.expm1(np.median(log_errors)))


def deal(samples: Sequence[Rows], parts: int) -> list[np.ndarray]:
    """Deals the rows of samples into parts of like sizes: for each sample the part of every row, from 0."""
    dealt, first = [], 0
    for sample in samples:
        ranks = np.argsort(np.argsort(sample.seconds, kind="stable"), kind="stable")
        dealt.append((ranks + first) % parts)
        first += len(ranks)  # samples of a single row go to one part after the other
    return dealt


def _errors_held_back(evidence: SectionEvidence[S]) -> np.ndarray:
    """Returns the same of every row by a fit that has not seen it."""
    samples = evidence.samples
    dealt = deal(samples, FOLDS)
    parts = np.concatenate(dealt)
    errors = np.zeros(len(parts))
    for part in np.unique(parts):
        fitted = evidence.fit({s: own != part for s, own in zip(samples, dealt, strict=True)})
        errors[parts == part] = _absolute_errors(evidence, fitted)[parts == part]
    return errors


def is_better(gains: np.ndarray) -> bool:
    """Returns whether the mean gain of unseen rows is more than chance explains: a paired, one-sided t-test."""
    scatter = float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
    limit = import_optional("scipy.stats", "solvers", "learn").t.ppf(CONFIDENCE, len(gains) - 1)
    return bool(float(np.mean(gains)) > limit * scatter)


def _list_moves(evidence: SectionEvidence[S], fitted: Fit) -> list[Move]:
    """Returns the coefficients that a fit has moved."""
    meanings = coefficients(evidence.model)
    parts = [("", evidence.known.values, fitted.values, fitted.errors)]
    for library, values in fitted.libraries.items():
        known = {**evidence.known.values, **evidence.known.libraries.get(library, {})}
        parts.append((library, known, values, fitted.library_errors.get(library, {})))
    return [
        Move(name, library, known[name], value, errors.get(name, 0.0), meanings[name].meaning)
        for library, known, values, errors in parts
        for name, value in values.items()
        if abs(value - known[name]) > LEAST_MOVE * max(abs(known[name]), abs(value))
    ]


def _make_section(evidence: SectionEvidence[S], fitted: Fit, moves: Sequence[Move]) -> Data:
    """Returns the section as files state it: that in use, with the coefficients that have moved."""
    section: Data = copy.deepcopy({**evidence.data}) or _state_borrowed(evidence)
    rows, sources = count_rows(evidence.samples), dict.fromkeys(source for _, source in evidence.pairs)
    of_rows = f"{'; '.join(sources)}, {sum(rows.values()):,} rows"
    common = section["common"]
    common["learnt"] = "; ".join(part for part in (common.get("learnt"), of_rows) if part)
    for library in fitted.libraries:
        section["libraries"].setdefault(library, _state_library(evidence, library))
    for move in moves:
        owner = section["libraries"][move.library] if move.library else common
        owner["coefficients"][move.name] = {
            "value": round_digits(move.after),
            "sigma": round_digits(move.sigma, 2),
            "before": round_digits(move.before),
            "meaning": move.meaning,
        }
    for library in rows:
        _update_sigmas(section, evidence, fitted, library)
    return section


def _state_borrowed(evidence: SectionEvidence[S]) -> Data:
    """Returns the section of hardware without one: what it borrows, with the larger sigma of borrowed coefficients."""
    section: Data = {
        "common": {"rows": 0, "source": "borrowed", "coefficients": _state_values(evidence, evidence.known.values)},
        "libraries": {},
        "unnamed": {},
    }
    for library in evidence.known.libraries:
        section["libraries"][library] = _state_library(evidence, library)
    for library, form in evidence.formats.items():
        entry = section["libraries"].get(library, _state_library(evidence, library))
        section["unnamed"].setdefault(form, {key: entry[key] for key in ("sigma", "sigma_short")})
    return section


def _state_values(evidence: SectionEvidence[S], values: Mapping[str, float]) -> Data:
    known = coefficients(evidence.model)
    return {
        name: {"value": round_digits(value), "sigma": evidence.borrowed, "meaning": known[name].meaning}
        for name, value in values.items()
    }


def _state_library(evidence: SectionEvidence[S], library: str) -> Data:
    """Returns a library that the section lacks: with the coefficients in use, and the sigmas of its rows by them."""
    samples = of_library(evidence.samples, library)
    sigmas = sigmas_of_all([(sample, evidence.price(sample, evidence.known)) for sample in samples])
    values = evidence.known.libraries.get(library, {})
    return {
        "format": evidence.formats.get(library, "any"),
        "rows": sum(len(sample.index) for sample in samples),
        "source": "; ".join(dict.fromkeys(source for sample, source in evidence.pairs if sample.library == library)),
        **{key: math.hypot(sigma, evidence.borrowed) for key, sigma in sigmas.items()},
        "coefficients": _state_values(evidence, values),
    }


def _update_sigmas(section: Data, evidence: SectionEvidence[S], fitted: Fit, library: str) -> None:
    """Mixes the scatter of the rows around the fit into the sigmas of their library, by numbers of rows."""
    samples = of_library(evidence.samples, library)
    scatter = sigmas_of_all([(sample, evidence.price(sample, fitted)) for sample in samples])
    count = sum(len(sample.index) for sample in samples)
    entry = section["libraries"].get(library)
    for holder in [entry] if entry else section["unnamed"].values():
        for key, sigma in scatter.items():
            squares = PRIOR_ROWS * holder[key] ** 2 + count * sigma**2
            holder[key] = round_digits(math.sqrt(squares / (PRIOR_ROWS + count)))
