"""Measured rows beside their forecasts."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Z90, Z50 = 1.645, 0.6745
"""Standard deviations to each side that hold 90 and 50 of 100 values."""


class Rows(Protocol):
    """Rows of a table that differ in sizes only: a sample of kernels or of collectives.

    Attributes:
        gpu: its name in the catalog.
        operation: section of the cost model that prices it.
        library: whose kernels they are.
        kind: by which errors are grouped.
        classes: named sets of rows.
        index: rows of the table, from 0.
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
        """The sizes of one of its rows, in words."""


class Priced(NamedTuple):
    """Forecasts of rows.

    Attributes:
        seconds: forecast [s].
        launch: the part of it that does not depend on the work [s].
        sigma: standard deviation of log(measured / forecast).
    """

    seconds: np.ndarray
    launch: np.ndarray
    sigma: np.ndarray


class Held(NamedTuple):
    """A sample beside its forecasts.

    Attributes:
        sample: the rows, a `Rows`.
        priced: their forecasts.
        borrowed: seconds with the coefficients of other hardware, NaN where there are none.
        least: time that no hardware can beat [s].
    """

    sample: Any
    priced: Priced
    borrowed: np.ndarray
    least: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """forecast / measured - 1."""
        return self.priced.seconds / self.sample.seconds - 1

    @property
    def far(self) -> np.ndarray:
        """log(measured / forecast)."""
        return np.log(self.sample.seconds / self.priced.seconds)
