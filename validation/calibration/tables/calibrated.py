"""The result of a calibration from tables: the data of a file, how far rows lie from it, and how unseen rows fare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import Coefficient, coefficients
from meshcast.validation.calibration.fit import Fit
from meshcast.validation.calibration.tables.rows import RowForecasts, Rows, count_rows
from meshcast.validation.calibration.tables.table import LibraryTable
from meshcast.validation.calibration.write import find_sigmas, round_digits

MIN_ROWS = 10
"""Rows of a library, a link or a network below which nothing is fitted to it."""

Prices = Sequence[tuple[Rows, RowForecasts]]
"""Rows with their forecasts."""

Sigmas = dict[str, Any]
"""`sigma` and `sigma_short`, and these by kind of rows under `kinds` where there are several."""


@dataclass(frozen=True)
class LibraryErrors:
    """Errors of the rows of a library, with its own coefficients and blindly: with the mean of all others.

    Attributes:
        section: of the calibration.
        library: whose rows they are.
        rows: how many.
        median: of the absolute error.
        p90: 90th percentile of the absolute error.
        blind_median: the same without having seen the library; None where there is no other library.
        blind_p90: likewise.
    """

    section: str
    library: str
    rows: int
    median: float
    p90: float
    blind_median: float | None = None
    blind_p90: float | None = None

    @classmethod
    def of(cls, section: str, library: str, seen: Prices, blind: Prices = ()) -> LibraryErrors:
        """Counts the errors of rows. blind: the same rows, priced without having seen the library."""
        counted = (*_count_errors(seen), *(_count_errors(blind)[1:] if blind else ()))
        return cls(section, library, *counted)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration file as data, and the errors of its libraries."""

    name: str
    data: dict[str, Any]
    libraries: list[LibraryErrors]


def _count_errors(prices: Prices) -> tuple[int, float, float]:
    """Returns the number of rows, and the median and 90th percentile of their absolute error."""
    far = np.concatenate([np.abs(forecasts.seconds / rows.seconds - 1) for rows, forecasts in prices])
    return len(far), float(np.median(far)), float(np.quantile(far, 0.9))


def pair_sources(tables: Sequence[LibraryTable]) -> list[tuple[Any, str]]:
    """Returns the samples of tables, each with its source."""
    return [(sample, table.source(sample)) for table in tables for sample in table.samples]


def sigmas_by_library(prices: Prices) -> dict[str, Sigmas]:
    """Returns the sigmas of the rows of every library, and of each of their kinds where there are several.

    A kind of which a library has fewer than `MIN_ROWS` rows has the larger of the library's sigmas and of those of this
    kind in all libraries.
    """
    return {
        library: _sigmas_by_kind([pair for pair in prices if pair[0].library == library], prices)
        for library in sorted({rows.library for rows, _ in prices})
    }


def _sigmas_by_kind(prices: Prices, all_prices: Prices) -> Sigmas:
    """Returns the sigmas of the rows of a library. every: rows of all libraries."""
    of_all = sigmas_of_all(prices)
    library: Sigmas = dict(of_all)
    kinds = sorted({rows.kind for rows, _ in prices})
    for kind in kinds if len(kinds) > 1 else ():
        similar = [pair for pair in prices if pair[0].kind == kind]
        sigmas = sigmas_of_all(similar)
        if sum(len(rows.index) for rows, _ in similar) < MIN_ROWS:
            sigmas = sigmas_of_all([pair for pair in all_prices if pair[0].kind == kind])
            sigmas = {key: max(sigma, of_all[key]) for key, sigma in sigmas.items()}
        library.setdefault("kinds", {})[kind] = sigmas
    return library


def sigmas_of_all(prices: Prices) -> dict[str, float]:
    """Returns the sigmas of all rows together."""
    columns = zip(*((p.seconds, s.seconds, p.launch) for s, p in prices), strict=True)
    return find_sigmas(*(np.concatenate(column) for column in columns))


def make_section(
    model: type,
    fitted: Fit,
    sigmas: Mapping[str, Sigmas],
    unnamed: Mapping[str, Mapping[str, float]],
    pairs: Sequence[tuple[Rows, str]],
    formats: Mapping[str, str],
) -> dict[str, Any]:
    """Makes a section of a calibration file, as `simulator.costs.calibration.calibration` describes it.

    model: the cost model.
    fitted: its coefficients.
    sigmas, formats: by library.
    unnamed: sigmas by number format.
    pairs: all samples with their sources.
    """
    known, rows = coefficients(model), count_rows(sample for sample, _ in pairs)
    sources = {name: [source for sample, source in pairs if sample.library == name] for name in rows}
    libraries = {
        name: {
            "format": formats[name],
            "rows": rows[name],
            "source": "; ".join(dict.fromkeys(sources[name])),
            **sigmas[name],
            "coefficients": _list_coefficients(known, values, fitted.library_errors[name]),
        }
        for name, values in fitted.libraries.items()
    }
    parts = dict.fromkeys(part for name in rows for source in sources[name] for part in source.split("; "))
    return {
        "common": {
            "rows": sum(rows.values()),
            "source": "; ".join(parts),
            "coefficients": _list_coefficients(known, fitted.values, fitted.errors),
        },
        "libraries": libraries,
        "unnamed": {
            form: {key: round_digits(sigma) for key, sigma in sigmas.items()} for form, sigmas in unnamed.items()
        },
    }


def _list_coefficients(
    known: Mapping[str, Coefficient], values: Mapping[str, float], errors: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Returns the coefficients that measurements depend on."""
    return {
        name: {
            "value": round_digits(value),
            "sigma": round_digits(errors[name], 2),
            "meaning": known[name].meaning,
        }
        for name, value in values.items()
        if name in errors
    }
