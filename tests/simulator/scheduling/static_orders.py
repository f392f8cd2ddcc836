"""Static orders played at given times."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.scheduling.schedule import Schedule
from meshcast.validation.pipelines.cases import answer

ALIKE = (2, 2, 2)
"""Times of a device for which each of its two chunks takes 1."""

TIMES = [ALIKE, (1, 1.25, 0.75), (3, 2, 1), (1, 4, 1), (0.5, 4, 0.125), (1, 1, 0.25)]
"""t_f, t_b and t_w, of which t_w is never the longest."""


def played(schedule: str, p: int, m: int, times: Any = ALIKE, **more: Any) -> dict[str, Any]:
    t_f, t_b, t_w = times
    found = answer({"schedule": schedule, "p": p, "m": m, "t_f": t_f, "t_b": t_b, "t_w": t_w, **more})
    assert found["status"] == "played", found
    return found


def bubbles(found: dict[str, Any], m: int, times: Any = ALIKE) -> tuple[float, float]:
    """Bubble of the makespan, and of the longest span of a device."""
    work = m * sum(times)
    return found["makespan"] - work, found["span_max"] - work


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-9)


def shipped(use: str) -> Schedule:
    schedule = find_scheme(f"pipeline/{use}")(("pp",))
    assert isinstance(schedule, Schedule)
    return schedule
