"""Every source against a constant: is its forecast better than a single efficiency, also where it has set nothing?

The constant is the median share of the peak rate that runs of all other sources reached: of the same GPU and number
format, otherwise of the same format, otherwise of all. Without a source, coefficients that were fitted to published
runs are fitted to all others (`FITTED`), and those that it alone has set are what others say (`own_fits`). What code,
documents and logs state of its programs and clusters is no fit, and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from meshcast.validation.published.fit.refit import Row, corrections_without_source
from meshcast.validation.published.summary import error_statistics

MIN_RUNS = 10
"""Runs of a source that is compared."""


def compare_sources(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a row for each source of `MIN_RUNS` runs or more, in the order of their names.

    rows: of `forecast_derivatives`, of all classes; those without a forecast are left out.
    Each has `source` and `rows`, and statistics of forecast / measured - 1: `shipped`, `without` the source, and of the
    `constant`, None if no other source has runs.
    """
    known = [row for row in rows if row["shares"] is not None]
    without = {
        row["id"]: float(np.expm1(correction - row["without_own"]))
        for row, correction in zip(known, corrections_without_source(known), strict=True)
    }
    sources = []
    for source in sorted({row["source"] for row in known}):
        of_source = [row for row in known if row["source"] == source]
        if len(of_source) < MIN_RUNS:
            continue
        rest = [row for row in known if row["source"] != source]
        constants = [error for row in of_source if (error := _constant_error(row, rest)) is not None]
        sources.append(
            {
                "source": source,
                "rows": len(of_source),
                "shipped": error_statistics(np.expm1([-row["log_ratio"] for row in of_source]).tolist()),
                "without": error_statistics([without[row["id"]] for row in of_source]),
                "constant": error_statistics(constants) if constants else None,
            }
        )
    return sources


def _constant_error(row: Row, rest: Sequence[Row]) -> float | None:
    """Returns the error of the forecast by a single efficiency; None without runs of other sources, or a peak rate."""
    if row["efficiency"] is None:
        return None
    usable = [other for other in rest if other["efficiency"] is not None]
    for keys in (("gpu", "format"), ("format",), ()):
        if matching := [other["efficiency"] for other in usable if all(other[key] == row[key] for key in keys)]:
            return float(row["efficiency"] / median(matching) - 1)
    return None
