"""From fits to a calibration file: values with what they mean, the rows behind them, and how far rows lie from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from simulator.costs.coefficients import Coefficient, coefficients
from validation.calibration.fit import Fit

SHORT = 0.3
"""Kernels of which a larger share is launch are short."""
Z90 = 1.645
LEAST = 0.2
"""Of the spread of all rows, what remains at least of either end."""


def section(
    kind: type,
    found: Fit,
    spreads: Mapping[str, dict[str, Any]],
    unnamed: Mapping[str, dict[str, float]],
    rows: Mapping[str, int],
    formats: Mapping[str, str],
    sources: Mapping[str, str],
) -> dict[str, Any]:
    """A section of a file, as `simulator.costs.calibration` describes it.

    spreads, rows, formats, sources: by library; the spreads of its kinds of rows, too, where it has several (`kinds`).
    unnamed: spreads by number format.
    """
    known = coefficients(kind)
    libraries = {
        name: {
            "format": formats[name],
            "rows": rows[name],
            "source": sources[name],
            **spreads[name],
            "coefficients": _entries(known, values, found.library_errors[name]),
        }
        for name, values in found.libraries.items()
    }
    told = dict.fromkeys(part for source in sources.values() for part in source.split("; "))
    return {
        "common": {
            "rows": sum(rows.values()),
            "source": "; ".join(told),
            "coefficients": _entries(known, found.values, found.errors),
        },
        "libraries": libraries,
        "unnamed": {form: {key: _round(one) for key, one in each.items()} for form, each in unnamed.items()},
    }


def _entries(
    known: Mapping[str, Coefficient], values: Mapping[str, float], errors: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Of what was measured."""
    return {
        name: {"value": _round(value), "spread": _round(errors[name], 2), "meaning": known[name].meaning}
        for name, value in values.items()
        if name in errors
    }


def _round(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def spreads(predicted: np.ndarray, measured: np.ndarray, launch: np.ndarray) -> dict[str, float]:
    """The two spreads of a law (`simulator.costs.coefficients.spread`) that hold nine of ten rows, long and short ones.

    All arrays in seconds; launch: the part of `predicted` that is no work.
    """
    far, share = np.abs(np.log(measured / predicted)) / Z90, np.clip(launch / predicted, 0.0, 1.0)
    short = share >= SHORT
    ends = [float(np.quantile(far, 0.9))] * 2
    least = LEAST * ends[0]
    for _ in range(30):  # each end from the rows near it, given the other one
        for end, rows, part in ((0, ~short, 1 - share), (1, short, share)):
            if rows.any():
                left = (far - ends[1 - end] * (1 - part))[rows] / part[rows]
                ends[end] = max(least, float(np.quantile(left, 0.9)))
    return {"spread": _round(ends[0]), "spread_short": _round(ends[1] if short.any() else ends[0])}


def text(title: str, data: Mapping[str, Any]) -> str:
    """The file: one line a coefficient."""
    lines = [f"# {title}: coefficients of the laws in simulator/costs, in SI; written by `meshcast calibrate`."]
    _lines(data, 0, lines)
    return "\n".join(lines) + "\n"


def _lines(data: Mapping[str, Any], depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for key, value in data.items():
        if isinstance(value, Mapping) and any(isinstance(one, Mapping) for one in value.values()):
            lines.append(f"{pad}{key}:")
            _lines(value, depth + 1, lines)
        elif isinstance(value, Mapping) and not {"value", "spread_short"} & set(value):
            lines.append(f"{pad}{key}:" + ("" if value else " {}"))
            _lines(value, depth + 1, lines)
        elif isinstance(value, Mapping):
            inner = ", ".join(f"{name}: {_scalar(one)}" for name, one in value.items())
            lines.append(f"{pad}{key}: {{{inner}}}")
        else:
            lines.append(f"{pad}{key}: {_scalar(value)}")


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        told = f"{value:.12g}"
        # YAML 1.1 reads 5e-06 as text.
        return told.replace("e", ".0e") if "e" in told and "." not in told else told
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def write(path: Path, title: str, data: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all. Raises OSError where it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text(title, data), "utf-8")
    partial.replace(path)
