"""Writes fits to calibration files: values with their meaning, the rows behind them, and how far rows lie from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import to_line
from meshcast.simulator.formats.launch.quoting import quote_text, quote_yaml
from meshcast.simulator.report.metrics import Z90

SHORT = 0.3
"""Share of launch from which on a kernel counts as short."""
MIN_SIGMA = 0.2
"""Least sigma of short or of long rows, in sigmas of all rows."""


def round_digits(value: float, digits: int = 4) -> float:
    """Returns a value as files state it."""
    return float(f"{value:.{digits}g}")


def nine_of_ten(values: np.ndarray) -> float:
    """Returns what nine of ten further values stay below: of n the 0.9 (n + 1)th, of fewer than ten the largest.

    A further value is as likely to be of any rank among all n + 1 (Vovk et al., "Algorithmic Learning in a Random
    World", 2005).
    """
    rank = min(math.ceil(0.9 * (len(values) + 1)), len(values)) - 1
    return float(np.partition(values, rank)[rank])


def find_sigmas(forecast: np.ndarray, measured: np.ndarray, launch: np.ndarray) -> dict[str, float]:
    """Returns the two sigmas of a cost model whose 90% intervals hold nine of ten rows, long and short ones.

    See `simulator.costs.coefficients.estimate_sigma`. All arrays in seconds; launch: the part of `forecast` that does
    not depend on the work. Forecasts should be those of a fit that has not seen the rows, where there is any.
    """
    far, share = np.abs(np.log(measured / forecast)) / Z90, np.clip(launch / forecast, 0.0, 1.0)
    short = share >= SHORT
    ends = [nine_of_ten(far)] * 2
    least = MIN_SIGMA * ends[0]
    for _ in range(30):  # each end from the rows near it, with the other as it is
        for end, rows, part in ((0, ~short, 1 - share), (1, short, share)):
            if rows.any():
                left = (far - ends[1 - end] * (1 - part))[rows] / part[rows]
                ends[end] = max(least, nine_of_ten(left))
    return {"sigma": round_digits(ends[0]), "sigma_short": round_digits(ends[1] if short.any() else ends[0])}


def text(title: str, data: Mapping[str, Any]) -> str:
    """Writes the text of a file: a line for each coefficient."""
    what = "coefficients of the cost models in simulator/costs, in SI; written by `meshcast calibrate`"
    lines = [f"# {to_line(title)}: {what}."]
    _add_lines(data, 0, lines)
    return "\n".join(lines) + "\n"


def _add_lines(data: Mapping[str, Any], depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for key, value in data.items():
        if isinstance(value, Mapping) and any(isinstance(entry, Mapping) for entry in value.values()):
            lines.append(f"{pad}{quote_yaml(key)}:")
            _add_lines(value, depth + 1, lines)
        elif isinstance(value, Mapping) and not {"value", "sigma_short"} & set(value):
            lines.append(f"{pad}{quote_yaml(key)}:" + ("" if value else " {}"))
            _add_lines(value, depth + 1, lines)
        elif isinstance(value, Mapping):
            inner = ", ".join(f"{quote_yaml(name)}: {_scalar(entry)}" for name, entry in value.items())
            lines.append(f"{pad}{quote_yaml(key)}: {{{inner}}}")
        else:
            lines.append(f"{pad}{quote_yaml(key)}: {_scalar(value)}")


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        digits = f"{value:.12g}"
        # YAML 1.1 reads 5e-06 as text.
        return digits.replace("e", ".0e") if "e" in digits and "." not in digits else digits
    return quote_text(value) if isinstance(value, str) else str(value)


def write(path: Path, title: str, data: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all. Raises OSError where it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text(title, data))
