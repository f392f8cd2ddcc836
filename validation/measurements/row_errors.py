"""Errors of the forecasts in measurement files, row by row and summarised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from meshcast.validation.measurements.measurement import Measurement, MeasurementRow

QUANTITIES = {"seconds": "time", "bytes": "memory"}
"""Quantity of a row, and its name in summaries."""

CLASS, WORK = "class", "work"
"""Keys in the shape of a row of kernels: their class, and if it is a single kernel the fields of its work."""


def row_answers(files: Sequence[tuple[str, Measurement]]) -> list[dict[str, Any]]:
    """Returns all rows of all files as plain data, in file order: the answer of ``--json``."""
    return [
        {
            "file": file,
            "name": row.name,
            "group": row.group,
            "class": row_class(row),
            "quantity": row.quantity,
            "measured": row.median,
            "spread": row.scatter,
            "samples": len(row.samples),
            "instrument": row.instrument,
            "predicted": {by: forecast.value for by, forecast in row.forecasts.items()},
            "interval_90": {by: [forecast.low, forecast.high] for by, forecast in row.forecasts.items()},
            "error": {by: row.error(by) for by in row.forecasts},
        }
        for file, measurement in files
        for row in measurement.rows
    ]


def row_class(row: MeasurementRow) -> str:
    """Returns the class of a row in summaries: of kernels, ``step``, ``pipeline actions``, ``optimizer``, a memory
    counter, or a collective; "" for others."""
    if kind := row.shape.get(CLASS, row.shape.get("operation", "")):
        return str(kind)
    words = row.name.split() or [""]
    if row.quantity == "bytes":
        return f"memory {words[-1]}"
    if words[0] == "step":
        return "step"
    if words[0] == "device":
        return "optimizer" if words[-1] == "optimizer" else "pipeline actions"
    return ""


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the number of rows and of measured rows, and error statistics by quantity and forecast."""
    summary: dict[str, Any] = {"rows": len(rows), "measured": sum(row["measured"] is not None for row in rows)}
    summary["forecasts"] = [
        {"quantity": QUANTITIES[quantity], "by": by, **error_statistics(selected, by)}
        for quantity in QUANTITIES
        for by in ("catalog", "calibration")
        if (selected := [row for row in rows if row["quantity"] == quantity and row["error"].get(by) is not None])
    ]
    classes = dict.fromkeys(row["class"] for row in rows if row["class"])
    summary["classes"] = [
        {"class": name, "by": by, **error_statistics(selected, by)}
        for name in classes
        for by in ("catalog", "calibration")
        if (selected := [row for row in rows if row["class"] == name and row["error"].get(by) is not None])
    ]
    return summary


def error_statistics(rows: Iterable[dict[str, Any]], by: str) -> dict[str, Any]:
    """Statistics of the errors of forecast `by`: count; median, 90th percentile and maximum of |error|; median error.

    inside_90: share of measured values inside the 90 % interval; None where no forecast has any (memory).
    """
    known = [row for row in rows if row["error"].get(by) is not None]
    values = np.array([row["error"][by] for row in known])
    bounded = [row for row in known if row["interval_90"][by][0] < row["interval_90"][by][1]]
    inside = [row["interval_90"][by][0] <= row["measured"] <= row["interval_90"][by][1] for row in bounded]
    return {
        "rows": len(known),
        "median": float(np.median(np.abs(values))),
        "p90": float(np.quantile(np.abs(values), 0.9)),
        "worst": float(np.abs(values).max()),
        "bias": float(np.median(values)),
        "inside_90": float(np.mean(inside)) if bounded else None,
    }


def median_scatter(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the median relative scatter of the time samples: a lower bound on the error against a single sample."""
    scatters = [row["spread"] for row in rows if row["measured"] is not None and row["quantity"] == "seconds"]
    return float(np.median(scatters)) if scatters else math.nan
