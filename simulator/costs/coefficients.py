"""What a law of costs is made of: coefficients with a meaning, which a fit chooses within bounds.

A law is a frozen dataclass of floats. Its fields are made with `coefficient`; those ``of="library"`` belong to the
program that brings the kernels (cuBLAS, FlashAttention-3, ...), at most four, the others to the GPU or the link, twelve
at most. Two more fields, `spread` and `spread_short`, say how far measurements lie from the law.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Coefficient:
    """One coefficient of a cost model.

    Attributes:
        meaning: in a few words, with its unit if it has one.
        low: least value that can be true.
        high: largest value that can be true.
        start: where a fit begins; never used in a forecast.
        of: whose it is, "gpu" (or the link) or "library".
        neutral: the value that changes nothing, for libraries that were not measured; None: there is none.
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
    """A field of a law."""
    return field(metadata={"coefficient": Coefficient(meaning, low, high, start, of, neutral)})


def coefficients(law: type) -> dict[str, Coefficient]:
    """The coefficients of `law` by name."""
    return {f.name: f.metadata["coefficient"] for f in fields(law) if "coefficient" in f.metadata}


def spread(law: Any, seconds: Any, launch: Any) -> Any:
    """Standard deviation of log(measured / seconds) of kernels of which `launch` seconds are no work.

    From `law.spread` of long kernels to `law.spread_short` of those that are all launch.
    """
    return law.spread + (law.spread_short - law.spread) * (launch / seconds)


# Laws are written once for one kernel (numbers) and for many (arrays in the fields of their work). Operators serve
# both; these are what operators cannot say.


def lower(one: Any, other: Any) -> Any:
    """The smaller of two numbers, element by element of arrays."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return one if one < other else other


def higher(one: Any, other: Any) -> Any:
    """The larger of two numbers, element by element of arrays."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return one if one > other else other


def ceil(one: Any, other: Any) -> Any:
    """How many of `other` cover `one`: rounded up, for whole numbers and others."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.ceil(one / other)  # several times faster than a floor division
    return -(-one // other)
