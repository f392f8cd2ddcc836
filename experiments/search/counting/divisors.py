"""Divisors of degrees."""

from __future__ import annotations

from collections.abc import Sequence


def list_divisors(number: int) -> list[int]:
    """All divisors of a number."""
    return [n for n in range(1, number + 1) if number % n == 0]


def list_divisors_of_any(numbers: Sequence[int], most: int) -> list[int]:
    """Divisors of any of some numbers, up to `most`."""
    return [n for n in range(1, most + 1) if any(number % n == 0 for number in numbers)]
