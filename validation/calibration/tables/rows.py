"""Samples of measured rows with their forecasts: errors, and forecasts by coefficients of other hardware."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Z90, Z50 = 1.645, 0.6745
"""Half-widths of the intervals that hold 90 % and 50 % of a normal distribution [standard deviations]."""


class Rows(Protocol):
    """Rows of a table that differ in sizes only: a sample of kernels or of collectives.

    Attributes:
        gpu: its name in the catalog.
        operation: section of the cost model that prices it.
        library: library of the kernels.
        kind: kind of operation, by which errors are grouped.
        classes: named sets of rows, as masks.
        index: numbers of the rows in their table, from 0.
        seconds: measured [s].
    """

    @property
    def gpu(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def library(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def classes(self) -> dict[str, np.ndarray]: ...
    @property
    def index(self) -> np.ndarray: ...
    @property
    def seconds(self) -> np.ndarray: ...
    def shape(self, at: int) -> str:
        """Describes the sizes of one of its rows."""


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


class SampleComparison(NamedTuple):
    """A sample with its forecasts.

    Attributes:
        sample: the measured rows, a `Rows`.
        priced: their forecasts.
        borrowed_seconds: forecasts with the coefficients of the nearest other hardware [s], as if this one were not
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
