"""Units: text with a unit is converted to an SI float when it is read.

Inside meshcast every quantity is a plain float in SI: bytes, bytes/s, FLOP/s, seconds, hertz, watts. Units are
case-sensitive because case carries meaning: ``GB/s`` is bytes and ``Gb/s`` is bits; ``GB`` is 10^9 and ``GiB`` 2^30.
"""

from __future__ import annotations

import math
import re

KIB, MIB, GIB, TIB = 2.0**10, 2.0**20, 2.0**30, 2.0**40
"""Bytes in a KiB, MiB, GiB and TiB."""

KILO, MEGA, GIGA, TERA, PETA, EXA = 1e3, 1e6, 1e9, 1e12, 1e15, 1e18

MICRO = 1e-6

_BYTES = {
    **{"B": 1.0, "kB": KILO, "MB": MEGA, "GB": GIGA, "TB": TERA},
    **{"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB},
}
_BITS = {"b": 1 / 8, "kb": KILO / 8, "Mb": MEGA / 8, "Gb": GIGA / 8, "Tb": TERA / 8}

UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bandwidth": {f"{unit}/s": size for unit, size in (_BYTES | _BITS).items()},
    "flops": {"FLOP/s": 1.0, "GFLOP/s": GIGA, "TFLOP/s": TERA, "PFLOP/s": PETA, "EFLOP/s": EXA},
    "time": {"s": 1.0, "ms": 1e-3, "us": MICRO, "µs": MICRO, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "frequency": {"Hz": 1.0, "kHz": KILO, "MHz": MEGA, "GHz": GIGA},
    "power": {"W": 1.0, "kW": KILO, "MW": MEGA},
    "count": {"": 1.0},
    "ratio": {"": 1.0, "%": 0.01},
}
"""Sizes of units in SI, by dimension and unit."""

RANGES: dict[str, tuple[float, float]] = {
    "bytes": (1.0, 1e21),
    "bandwidth": (1.0, 1e18),
    "flops": (1.0, 1e24),
    "time": (1e-15, 1e9),
    "frequency": (1.0, 1e15),
    "power": (1e-3, 1e12),
    "count": (1.0, 1e12),
    "ratio": (1e-6, 1e6),
}
"""Smallest and largest quantities above zero, by dimension, in SI. No hardware is near them, and beyond them times and
rates that follow from a quantity overflow."""

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(\D*)")


MAX_DIGITS = 18
"""Of a whole number in a text, as 64 bits hold."""


def read_digits(word: str) -> int | None:
    """Returns the number that a word of decimal digits is; None for another word: `int` takes neither the ``²`` that
    `str.isdigit` does nor thousands of digits."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= MAX_DIGITS else None


def parse(text: str | int | float, dimension: str) -> float:
    """Returns `text` (``"900 GB/s"``) as an SI float of `dimension`, of ``UNITS``.

    Only counts and ratios may be bare numbers: all other quantities need a unit. Quantities are finite and not
    negative, counts are whole. ValueErrors read "rule. remedy".
    """
    units = UNITS[dimension]
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ValueError(f"a {dimension} quantity is text with a unit. Write it like {_example(dimension)!r}")
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"not a number with a unit. Write it like {_example(dimension)!r}")
    number, unit = float(match[1]), match[2].strip()
    if unit not in units:
        rule = f"{unit!r} is not a unit of {dimension}" if unit else f"a {dimension} quantity needs its unit"
        valid = f"Units: {', '.join(u for u in units if u)}" if any(units) else "Write a bare number"
        raise ValueError(f"{rule}. {valid}")
    result = number * units[unit]
    if not math.isfinite(result) or result < 0:
        raise ValueError(f"a {dimension} quantity is finite and not negative. Write it like {_example(dimension)!r}")
    low, high = RANGES[dimension]
    if result and not low <= result <= high:
        unit = next(unit for unit, size in units.items() if size == 1.0)
        limits = f"from {low:g} {unit}".strip(), f"to {high:g} {unit}".strip()
        raise ValueError(f"a {dimension} quantity is {' '.join(limits)}. Write it like {_example(dimension)!r}")
    if dimension == "count" and result != int(result):
        raise ValueError("a count is whole. Write it like '8'")
    return result


def _example(dimension: str) -> str:
    return {
        "bytes": "80 GiB",
        "bandwidth": "450 GB/s",
        "flops": "989 TFLOP/s",
        "time": "0.6 us",
        "frequency": "1410 MHz",
        "power": "700 W",
        "count": "8",
        "ratio": "0.95",
    }[dimension]
