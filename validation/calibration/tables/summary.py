"""Errors of forecasts of measured rows: by GPU, operation, kind and class, by library, and of the worst rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshcast.simulator.report.metrics import Z90
from meshcast.validation.calibration.tables.rows import Z50, SampleComparison

SCORED = 20
"""Rows below which a cell is held against no goal."""

Goals = Mapping[tuple[str, str, str], tuple[float, float]]
"""Goals for the median and the 90th percentile of the absolute error, by operation, kind and class."""


def summary(held: Sequence[SampleComparison], rows: int, goals: Goals) -> dict[str, Any]:
    """All figures of some tables. rows: of the tables, refused ones included."""
    priced = sum(len(one.sample.index) for one in held)
    return {
        **figures(held),
        "rows": rows,  # of the tables, not of the figures
        "predicted": priced,
        "refused": rows - priced,
        "impossible": sum(int((one.priced.seconds < one.least * (1 - 1e-9)).sum()) for one in held),
        "cells": cells(held, goals),
        "libraries": libraries(held),
        "worst": worst(held),
    }


def cells(held: Sequence[SampleComparison], goals: Goals) -> list[dict[str, Any]]:
    """Figures of each GPU, operation, kind and class. met: their goal; None without one or with too few rows."""
    found = []
    for (gpu, operation, kind), own in group(held, "gpu", "operation", "kind").items():
        for name in sorted({name for one in own for name in one.sample.classes}):
            given = figures(own, name)
            if not given["rows"]:
                continue
            goal, met = goals.get((operation, kind, name)), None
            if goal and given["rows"] >= SCORED:
                met = given["median"] <= goal[0] and given["p90"] <= goal[1]
            words = {"gpu": gpu, "operation": operation, "kind": kind, "class": name}
            found.append({**words, **given, "goal": goal, "met": met})
    return found


def group(held: Sequence[SampleComparison], *by: str) -> dict[tuple[str, ...], list[SampleComparison]]:
    """Samples grouped by these fields, sorted by them."""
    found: dict[tuple[str, ...], list[SampleComparison]] = {}
    for one in held:
        found.setdefault(tuple(getattr(one.sample, name) for name in by), []).append(one)
    return dict(sorted(found.items()))


def libraries(held: Sequence[SampleComparison]) -> list[dict[str, Any]]:
    """Figures of each GPU, operation, library and kind."""
    return [
        {"gpu": gpu, "operation": operation, "library": library or "unnamed", "kind": kind} | figures(own)
        for (gpu, operation, library, kind), own in group(held, "gpu", "operation", "library", "kind").items()
    ]


def figures(held: Sequence[SampleComparison], name: str | None = None) -> dict[str, Any]:
    """Figures of the rows of one class; None: of all rows.

    median, p90, bias: of forecast / measured - 1 (absolute, absolute, signed). inside_90, inside_50: shares of rows
    inside the 90% and 50% intervals. borrowed: median absolute error with the coefficients of other hardware.
    """
    masks = [
        one.sample.classes.get(name, np.zeros(len(one.sample.index), bool)) if name else slice(None) for one in held
    ]
    rows = [
        (
            one.errors[mask],
            (np.abs(one.log_ratio) / np.maximum(one.priced.sigma, 1e-12))[mask],
            np.abs(one.borrowed_seconds / one.sample.seconds - 1)[mask],
        )
        for one, mask in zip(held, masks, strict=True)
    ]
    error, apart, other = (np.concatenate(column) for column in zip(*rows, strict=True)) if rows else [np.zeros(0)] * 3
    if not len(error):
        return {"rows": 0} | dict.fromkeys(("median", "p90", "bias", "inside_90", "inside_50", "borrowed"))
    return {
        "rows": len(error),
        "median": float(np.median(np.abs(error))),
        "p90": float(np.quantile(np.abs(error), 0.9)),
        "bias": float(np.median(error)),
        "inside_90": float(np.mean(apart <= Z90)),
        "inside_50": float(np.mean(apart <= Z50)),
        "borrowed": float(np.median(other)) if len(other := other[np.isfinite(other)]) else None,
    }


def worst(held: Sequence[SampleComparison], count: int = 12) -> list[dict[str, Any]]:
    """The rows with the largest errors, one for each GPU, operation and kind."""
    found = []
    for (gpu, operation, kind), own in group(held, "gpu", "operation", "kind").items():
        one = max(own, key=lambda each: float(np.max(np.abs(each.log_ratio))))
        at = int(np.argmax(np.abs(one.log_ratio)))
        given = {"gpu": gpu, "operation": operation, "kind": kind, "library": one.sample.library or "unnamed"}
        given |= {"shape": one.sample.shape(at), "measured_us": float(one.sample.seconds[at] * 1e6)}
        given |= {"predicted_us": float(one.priced.seconds[at] * 1e6), "error": float(one.errors[at])}
        found.append((abs(float(one.log_ratio[at])), given))
    return [given for _, given in sorted(found, key=lambda each: -each[0])[:count]]
