"""The result of a calibration from tables: the data of a file, how far rows lie from it, and how unseen rows fare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshcast.validation.calibration.tables.rows import RowForecasts, Rows
from meshcast.validation.calibration.write import find_sigmas

FEWEST = 10
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
    blind_median: float | None
    blind_p90: float | None


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration file as data, and the errors of its libraries."""

    name: str
    data: dict[str, Any]
    libraries: list[LibraryErrors]


def count_errors(samples: Sequence[Rows], prices: Sequence[RowForecasts]) -> tuple[int, float, float]:
    """Number of rows, and median and 90th percentile of their absolute error."""
    far = np.concatenate([np.abs(p.seconds / s.seconds - 1) for s, p in zip(samples, prices, strict=True)])
    return len(far), float(np.median(far)), float(np.quantile(far, 0.9))


def sigmas_by_library(prices: Prices) -> dict[str, Sigmas]:
    """Returns the sigmas of the rows of every library, and of each of their kinds where there are several.

    A kind of which a library has fewer than `FEWEST` rows has the larger of the library's sigmas and of those of this
    kind in all libraries.
    """
    return {
        library: _sigmas_by_kind([pair for pair in prices if pair[0].library == library], prices)
        for library in sorted({rows.library for rows, _ in prices})
    }


def _sigmas_by_kind(own: Prices, every: Prices) -> Sigmas:
    """Returns the sigmas of the rows of a library. every: rows of all libraries."""
    of_all = sigmas_of_all(own)
    library: Sigmas = dict(of_all)
    kinds = sorted({rows.kind for rows, _ in own})
    for kind in kinds if len(kinds) > 1 else ():
        similar = [pair for pair in own if pair[0].kind == kind]
        sigmas = sigmas_of_all(similar)
        if sum(len(rows.index) for rows, _ in similar) < FEWEST:
            sigmas = sigmas_of_all([pair for pair in every if pair[0].kind == kind])
            sigmas = {key: max(sigma, of_all[key]) for key, sigma in sigmas.items()}
        library.setdefault("kinds", {})[kind] = sigmas
    return library


def sigmas_of_all(prices: Prices) -> dict[str, float]:
    """The sigmas of all rows together."""
    columns = zip(*((p.seconds, s.seconds, p.launch) for s, p in prices), strict=True)
    return find_sigmas(*(np.concatenate(column) for column in columns))
