"""Measured rows beside their forecasts."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Z90, Z50 = 1.645, 0.6745
"""Standard deviations to each side that hold 90 and 50 of 100 values."""


class Rows(Protocol):
    """What a sample of kernels or of collectives says of its rows.

    gpu: its name in the catalog. operation: section of the law that prices it. library: whose kernels. kind: what
    errors are grouped by. classes: named sets of rows.
    index: rows of the table, from 0. seconds: measured.
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
    """Forecasts of rows [s], the part of them that is launch, and the spread of log(measured / forecast)."""

    seconds: np.ndarray
    launch: np.ndarray
    spread: np.ndarray


class Held(NamedTuple):
    """A sample beside its forecasts.

    borrowed: seconds as the calibrations of other hardware would tell, NaN where there are none. least: what no
    hardware can beat [s].
    """

    sample: Any  # a Rows
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
