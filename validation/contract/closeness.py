"""Whether what was measured equals what is stated."""

from __future__ import annotations

from math import isclose


def is_close(value: object, wanted: object, within: float = 1e-9) -> bool:
    """Returns whether numbers, or lists or mappings of numbers, are equal within a share, and a small number."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(is_close(value[key], wanted[key], within) for key in value)
    if isinstance(value, list | tuple) and isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(map(is_close, value, wanted, [within] * len(value)))
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return isclose(value, wanted, rel_tol=within, abs_tol=1e-9)
    return value is wanted
