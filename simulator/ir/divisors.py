"""Divisors of a number: what a size can be divided by, in searches and in remedies of messages."""

from __future__ import annotations

from math import isqrt


def list_divisors(number: int) -> list[int]:
    """Returns all divisors of a number, rising; of the largest that a job may state in a millisecond or two.

    >>> list_divisors(12), list_divisors(999_999_937)
    ([1, 2, 3, 4, 6, 12], [1, 999999937])
    """
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
