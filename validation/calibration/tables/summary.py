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
    """Returns all figures of some tables. rows: of the tables, refused ones included."""
    priced = sum(len(comparison.sample.index) for comparison in held)
    return {
        **figures(held),
        "rows": rows,  # of the tables, not of the figures
        "predicted": priced,
        "refused": rows - priced,
        "impossible": sum(
            int((comparison.priced.seconds < comparison.least * (1 - 1e-9)).sum()) for comparison in held
        ),
        "cells": cells(held, goals),
        "libraries": libraries(held),
        "worst": worst(held),
    }


def cells(held: Sequence[SampleComparison], goals: Goals) -> list[dict[str, Any]]:
    """Returns the figures of each GPU, operation, kind and class. met: their goal; None without a goal or with too few
    rows."""
    rows = []
    for (gpu, operation, kind), cell in group(held, "gpu", "operation", "kind").items():
        for name in sorted({name for comparison in cell for name in comparison.sample.classes}):
            errors = figures(cell, name)
            if not errors["rows"]:
                continue
            goal, met = goals.get((operation, kind, name)), None
            if goal and errors["rows"] >= SCORED:
                met = errors["median"] <= goal[0] and errors["p90"] <= goal[1]
            words = {"gpu": gpu, "operation": operation, "kind": kind, "class": name}
            rows.append({**words, **errors, "goal": goal, "met": met})
    return rows


def group(held: Sequence[SampleComparison], *by: str) -> dict[tuple[str, ...], list[SampleComparison]]:
    """Groups samples by these fields, sorted by them."""
    groups: dict[tuple[str, ...], list[SampleComparison]] = {}
    for comparison in held:
        groups.setdefault(tuple(getattr(comparison.sample, name) for name in by), []).append(comparison)
    return dict(sorted(groups.items()))


def libraries(held: Sequence[SampleComparison]) -> list[dict[str, Any]]:
    """Returns the figures of each GPU, operation, library and kind."""
    return [
        {"gpu": gpu, "operation": operation, "library": library or "unnamed", "kind": kind} | figures(cell)
        for (gpu, operation, library, kind), cell in group(held, "gpu", "operation", "library", "kind").items()
    ]


def figures(held: Sequence[SampleComparison], name: str | None = None) -> dict[str, Any]:
    """Returns the figures of the rows of a class; None: of all rows.

    median, p90, bias: of forecast / measured - 1 (absolute, absolute, signed). inside_90, inside_50: shares of rows
    inside the 90% and 50% intervals. borrowed: median absolute error with the coefficients of other hardware.
    """
    masks = [
        comparison.sample.classes.get(name, np.zeros(len(comparison.sample.index), bool)) if name else slice(None)
        for comparison in held
    ]
    rows = [
        (
            comparison.errors[mask],
            (np.abs(comparison.log_ratio) / np.maximum(comparison.priced.sigma, 1e-12))[mask],
            np.abs(comparison.borrowed_seconds / comparison.sample.seconds - 1)[mask],
        )
        for comparison, mask in zip(held, masks, strict=True)
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
    """Lists the rows with the largest errors, a row for each GPU, operation and kind."""
    rows = []
    for (gpu, operation, kind), cell in group(held, "gpu", "operation", "kind").items():
        comparison = max(cell, key=lambda each: float(np.max(np.abs(each.log_ratio))))
        at = int(np.argmax(np.abs(comparison.log_ratio)))
        row = {"gpu": gpu, "operation": operation, "kind": kind, "library": comparison.sample.library or "unnamed"}
        row |= {"shape": comparison.sample.shape(at), "measured_us": float(comparison.sample.seconds[at] * 1e6)}
        row |= {"predicted_us": float(comparison.priced.seconds[at] * 1e6), "error": float(comparison.errors[at])}
        rows.append((abs(float(comparison.log_ratio[at])), row))
    return [row for _, row in sorted(rows, key=lambda each: -each[0])[:count]]
