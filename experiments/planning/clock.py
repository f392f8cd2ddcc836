"""The CPU time of planners.

A search that has a plan ends with the best so far when its time is over; what has none until its end, such as a
dynamic program or the prices of a table, is refused at `PATIENCE` times as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

PATIENCE = 2.0
"""CPU time after which a computation without a plan is refused, in those of the limit."""


class OutOfTime(ValueError):
    """A computation has taken its CPU time and has no result yet."""


class TimeLimit(NamedTuple):
    """CPU time of this process at which a limit ends.

    seconds: that were allowed [s].
    search: when searches end [s].
    end: when everything else ends [s].
    """

    seconds: float
    search: float
    end: float


UNLIMITED = TimeLimit(math.inf, math.inf, math.inf)

_LIMIT: ContextVar[TimeLimit] = ContextVar("time_limit", default=UNLIMITED)


@contextmanager
def limiting_time(seconds: float) -> Iterator[None]:
    """Limits the CPU time of what runs inside. A limit within another limit ends no later."""
    now, outer = time.process_time(), _LIMIT.get()
    inner = TimeLimit(seconds, min(outer.search, now + seconds), min(outer.end, now + PATIENCE * seconds))
    token = _LIMIT.set(inner)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def seconds_left() -> float:
    """Returns the CPU time that a search still has; infinite without a limit [s]."""
    return max(0.0, _LIMIT.get().search - time.process_time())


def is_over() -> bool:
    """Returns whether a search should end with the best that it has."""
    return time.process_time() >= _LIMIT.get().search


def check_time() -> None:
    """Raises OutOfTime in what has no result before its end, if that takes too long."""
    limit = _LIMIT.get()
    if time.process_time() >= limit.end:
        raise OutOfTime(f"it has no plan after {PATIENCE * limit.seconds:g} s of CPU time")
