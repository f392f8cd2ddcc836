"""Schedules, the same played at given times, and small jobs of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.scheduling.schedule import Schedule
from meshcast.validation.pipelines.cases import answer

ALIKE = (2, 2, 2)
"""Times of a device for which each of its two chunks takes 1."""


def make_schedule(name: str, **options: Any) -> Schedule:
    kind = find_scheme(f"pipeline/{name}")
    assert issubclass(kind, Schedule)
    return kind(("pp",), kind.Options(**options))


def played(schedule: str, p: int, m: int, times: Any = ALIKE, **more: Any) -> dict[str, Any]:
    """What is answered to a case. times: t_f, t_b and t_w."""
    t_f, t_b, t_w = times
    answered = answer({"schedule": schedule, "p": p, "m": m, "t_f": t_f, "t_b": t_b, "t_w": t_w, **more})
    assert answered["status"] == "played", answered
    return answered


def bubbles(answered: dict[str, Any], m: int, times: Any = ALIKE) -> tuple[float, float]:
    """Bubble of the makespan, and of the longest span of a device."""
    work = m * sum(times)
    return answered["makespan"] - work, answered["span_max"] - work


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-9)


MODEL = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 32, "tied": False}


def job_of(plan: dict[str, Any], batch: int = 16, overlap: bool = True, **model: Any) -> dict[str, Any]:
    """A job with a plan in long form."""
    return {
        "model": {**MODEL, **model},
        "cluster": {"gpu": "h100-sxm", "gpus": math.prod(plan["mesh"].values())},
        "framework": {"name": "megatron-core", "set": {"overlap": {"dp": overlap, "pp": overlap}, "launch_s": 0.0}},
        "batch": {"global": batch},
        "plan": plan,
    }


def pipeline(use: str, *schemes: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The plan of a schedule on four devices."""
    return {"mesh": {"pp": 4}, "schemes": [{"use": f"pipeline/{use}", "over": "pp", **options}, *schemes]}


def job(
    schedule: str, pp: int = 4, m: int = 8, dp: int = 1, tp: int = 1, model: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A job with a plan in short form."""
    framework = {"launch_s": 0.0, **more.pop("framework", {})}
    return {
        "model": MODEL | (model or {}),
        "cluster": {"gpu": "h100-sxm", "gpus": pp * dp * tp},
        "framework": {"name": "megatron-core", "set": framework},
        "batch": {"global": m * dp},
        "plan": {"pp": pp, "dp": dp, "tp": tp, "schedule": schedule, **more},
    }
