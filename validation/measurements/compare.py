"""Measurement files beside the forecasts that were written into them before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from validation.measurements.measurement import Measurement, Row

QUANTITIES = {"seconds": "time", "bytes": "memory"}
"""What is compared, by the quantities of rows."""


def answers(files: Sequence[tuple[str, Measurement]]) -> list[dict[str, Any]]:
    """Every row of some files, in their order: plain data, for ``--json``."""
    return [_answer(name, row) for name, one in files for row in one.rows]


def _answer(file: str, row: Row) -> dict[str, Any]:
    return {
        "file": file,
        "name": row.name,
        "group": row.group,
        "quantity": row.quantity,
        "measured": row.measured,
        "spread": row.spread,
        "samples": len(row.samples),
        "instrument": row.instrument,
        "predicted": {by: value.value for by, value in row.forecasts.items()},
        "interval_90": {by: [value.low, value.high] for by, value in row.forecasts.items()},
        "error": {by: row.error(by) for by in row.forecasts},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many rows there are and were measured, and errors by quantity and forecast."""
    told: dict[str, Any] = {"rows": len(rows), "measured": sum(row["measured"] is not None for row in rows)}
    told["forecasts"] = [
        {"quantity": QUANTITIES[quantity], "by": by, **errors(own, by)}
        for quantity in QUANTITIES
        for by in ("catalog", "calibration")
        if (own := [row for row in rows if row["quantity"] == quantity and row["error"].get(by) is not None])
    ]
    return told


def errors(rows: Iterable[dict[str, Any]], by: str) -> dict[str, Any]:
    """Count, median, 90th percentile and worst of the absolute error, bias, share inside the interval.

    inside: None where no row has an interval (memory).
    """
    own = [row for row in rows if row["error"].get(by) is not None]
    far = np.array([row["error"][by] for row in own])
    wide = [row for row in own if row["interval_90"][by][0] < row["interval_90"][by][1]]
    inside = [row["interval_90"][by][0] <= row["measured"] <= row["interval_90"][by][1] for row in wide]
    return {
        "rows": len(own),
        "median": float(np.median(np.abs(far))),
        "p90": float(np.quantile(np.abs(far), 0.9)),
        "worst": float(np.abs(far).max()),
        "bias": float(np.median(far)),
        "inside_90": float(np.mean(inside)) if wide else None,
    }


def share_of_noise(rows: Sequence[dict[str, Any]]) -> float:
    """The median scatter of the samples themselves: no forecast of a single one can be better."""
    found = [row["spread"] for row in rows if row["measured"] is not None and row["quantity"] == "seconds"]
    return float(np.median(found)) if found else math.nan
