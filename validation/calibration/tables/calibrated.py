"""What a calibration from tables tells besides its file: how far rows lie from it, and how it fares unseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from validation.calibration.tables.rows import Priced, Rows
from validation.calibration.write import spreads

FEWEST = 10
"""Rows of a library, a link or a network below which nothing is fitted to it."""


@dataclass(frozen=True)
class Known:
    """A library's rows as its own coefficients price them, and blindly: by the middle of all others.

    median, p90: of the absolute error; blind_*: the same without having seen the library, None where there is no other.
    """

    section: str
    library: str
    rows: int
    median: float
    p90: float
    blind_median: float | None
    blind_p90: float | None


@dataclass(frozen=True)
class Calibrated:
    """A file as data, and how its libraries fare."""

    name: str
    data: dict[str, Any]
    libraries: list[Known]


def errors(samples: Sequence[Rows], prices: Sequence[Priced]) -> tuple[int, float, float]:
    """How many rows there are, and median and 90th percentile of their absolute error."""
    far = np.concatenate([np.abs(p.seconds / s.seconds - 1) for s, p in zip(samples, prices, strict=True)])
    return len(far), float(np.median(far)), float(np.quantile(far, 0.9))


def spreads_of(prices: Sequence[tuple[Rows, Priced]]) -> dict[str, Any]:
    """The spreads of a library's rows, and those of each of their kinds where there are several."""
    kinds: dict[str, list[tuple[Rows, Priced]]] = {}
    for pair in prices:
        kinds.setdefault(pair[0].kind, []).append(pair)
    told: dict[str, Any] = dict(plain_spreads(prices))
    if len(kinds) > 1:
        told["kinds"] = {
            kind: plain_spreads(own)
            for kind, own in sorted(kinds.items())
            if sum(len(rows.index) for rows, _ in own) >= FEWEST
        }
    return told


def plain_spreads(prices: Sequence[tuple[Rows, Priced]]) -> dict[str, float]:
    """Those of all rows together."""
    columns = zip(*((p.seconds, s.seconds, p.launch) for s, p in prices), strict=True)
    return spreads(*(np.concatenate(column) for column in columns))
