"""Numbers of tokens with a suffix: 8k tokens of a sequence, 10T tokens of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping

LENGTH_SUFFIXES = {"k": 2**10, "m": 2**20}
"""Suffixes of lengths of sequences: 8k is 8,192, as in the names of models and benchmarks."""

RUN_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
"""Suffixes of the tokens of a run: 10T is 10^13, as in reports."""

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z])", re.ASCII)


def read_length(value: object) -> object:
    """Returns the tokens of a sequence that a text such as ``8k`` says; what is none comes back as it is."""
    number = _read_suffix(value, LENGTH_SUFFIXES)
    return int(number) if number is not None and number == int(number) else value


def read_tokens(value: object) -> object:
    """Returns the tokens of a run that a text such as ``1.5T`` says; what is none comes back as it is."""
    number = _read_suffix(value, RUN_SUFFIXES)
    return value if number is None else float(number)


def _read_suffix(value: object, sizes: Mapping[str, float]) -> float | None:
    match = NUMBER.fullmatch(value.strip().lower()) if isinstance(value, str) and len(value) < 30 else None
    return float(match[1]) * sizes[match[2]] if match and match[2] in sizes else None
