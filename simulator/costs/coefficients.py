"""Coefficients of a cost model: each has a meaning, and a range within which a fit chooses its value.

A cost model is a frozen dataclass of floats whose fields `coefficient` declares. Coefficients ``of="library"``
belong to the program that brings the kernels (cuBLAS, FlashAttention-3, ...), at most four; the others belong to the
GPU or the link, at most twelve. Two more fields, `sigma` and `sigma_short`, state how far measurements lie from the
model.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass

Number = Any
"""A number, or an array with the number of each kernel."""


@dataclass(frozen=True)
class Coefficient:
    """One coefficient of a cost model.

    Attributes:
        meaning: in a few words, with the unit, if any, in brackets.
        low: smallest value that is physically possible.
        high: largest value that is physically possible.
        start: where a fit starts; forecasts never use it.
        of: "gpu" (or link) or "library".
        neutral: the value without any effect, used for libraries that were not measured; None if there is none.
    """

    meaning: str
    low: float
    high: float
    start: float
    of: str
    neutral: float | None = None


def coefficient(
    meaning: str, low: float, high: float, start: float, of: str = "gpu", neutral: float | None = None
) -> Any:
    """Declares a field of a cost model. See `Coefficient`."""
    return field(metadata={"coefficient": Coefficient(meaning, low, high, start, of, neutral)})


def coefficients(model: type) -> dict[str, Coefficient]:
    """Returns the coefficients of a cost model by name."""
    return {f.name: f.metadata["coefficient"] for f in fields(model) if "coefficient" in f.metadata}


def estimate_sigma(model: Any, seconds: Number, launch: Number) -> Number:
    """Returns the standard deviation of log(measured / forecast) of work of `seconds`, of which `launch` is overhead.

    Goes linearly from `model.sigma` for long work to `model.sigma_short` for work that is all launch.
    """
    return model.sigma + (model.sigma_short - model.sigma) * (launch / seconds)


# A cost model is written once, for a kernel (numbers) and for many (arrays in the fields of the work). Operators
# serve both; the functions below are what operators cannot express.


def minimum(a: Number, b: Number) -> Number:
    """Returns the smaller of two numbers, elementwise for arrays."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return a if a < b else b


def maximum(a: Number, b: Number) -> Number:
    """Returns the larger of two numbers, elementwise for arrays."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return a if a > b else b


def ceil_div(a: Number, b: Number) -> Number:
    """Returns a / b rounded up to a whole number, for integers, floats and arrays."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.ceil(a / b)  # several times faster than a floor division
    return -(-a // b)
