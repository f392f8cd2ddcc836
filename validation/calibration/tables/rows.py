"""Samples of measured rows with their forecasts: errors, and forecasts by coefficients of other hardware."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from meshcast.hardware.errors import CatalogError
from meshcast.hardware.records import dataclass

Z50 = 0.6745
"""Half-width of the interval that holds 50 % of a normal distribution [standard deviations]."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table that differ in sizes only: a sample of kernels or of collectives.

    Attributes:
        operation: section of the cost model that prices it.
        gpu: its name in the catalog.
        library: library of the kernels, or program that called and timed the collectives; "" if unknown.
        index: numbers of the rows in their table, from 0.
        seconds: measured [s].
        kind: kind of operation, by which errors are grouped.
        classes: named sets of rows, as masks.
        own: coefficients of the GPU that the library has of its own, since its kernels use the hardware in another way.
    """

    operation: str
    gpu: str
    library: str
    index: np.ndarray
    seconds: np.ndarray
    kind: str
    classes: dict[str, np.ndarray] = field(default_factory=dict)
    own: tuple[str, ...] = ()

    def shape(self, at: int) -> str:
        """Describes the sizes of a row."""
        raise NotImplementedError


R = TypeVar("R", bound=Rows)


def find_name(patterns: Iterable[tuple[str, str]], text: object) -> str:
    """Returns the name beside the first pattern that is found in a text, "" if none is."""
    return next((name for pattern, name in patterns if re.search(pattern, str(text))), "")


def of_library(samples: Iterable[R], library: str) -> list[R]:
    """Returns the samples of a library."""
    return [sample for sample in samples if sample.library == library]


def count_rows(samples: Iterable[Rows]) -> dict[str, int]:
    """Returns the number of rows of every library, sorted by its name."""
    counts = Counter[str]()
    for sample in samples:
        counts[sample.library] += len(sample.index)
    return dict(sorted(counts.items()))


class RowForecasts(NamedTuple):
    """Forecasts of rows.

    Attributes:
        seconds: forecast [s].
        launch: the part of it that does not depend on the work [s].
        sigma: standard deviation of log(measured / forecast).
    """

    seconds: np.ndarray
    launch: np.ndarray
    sigma: np.ndarray

    @classmethod
    def of(cls, seconds: np.ndarray, launch: np.ndarray) -> RowForecasts:
        """Makes forecasts of a cost model whose sigmas are not known yet."""
        return cls(seconds, launch, np.zeros(len(seconds)))


class SampleComparison(NamedTuple):
    """A sample with its forecasts.

    Attributes:
        sample: the measured rows, a `Rows`.
        priced: their forecasts.
        borrowed_seconds: forecasts with the coefficients of the nearest other hardware [s], as if this were not
            calibrated; NaN where there are none.
        least: lower bound from the peak rates of the hardware [s].
    """

    sample: Any
    priced: RowForecasts
    borrowed_seconds: np.ndarray
    least: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """forecast / measured - 1."""
        return self.priced.seconds / self.sample.seconds - 1

    @property
    def log_ratio(self) -> np.ndarray:
        """log(measured / forecast)."""
        return np.log(self.sample.seconds / self.priced.seconds)


def compare(
    sample: Rows, priced: RowForecasts, borrow: Callable[[], RowForecasts], least: np.ndarray | float
) -> SampleComparison:
    """Returns a sample beside its forecasts. borrow: prices it with the coefficients of other hardware; it raises
    CatalogError where no other hardware has such a section."""
    shape = np.zeros(len(sample.index))
    try:
        borrowed = borrow().seconds
    except CatalogError:
        borrowed = shape + np.nan
    return SampleComparison(sample, priced, borrowed, least + shape)
