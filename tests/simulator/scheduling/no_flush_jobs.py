"""Schedules, and small jobs of them."""

from __future__ import annotations

from typing import Any

from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.scheduling.schedule import Schedule


def shipped(use: str) -> Schedule:
    schedule = find_scheme(use)(("pp",))
    assert isinstance(schedule, Schedule)
    return schedule


MODEL = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 32, "tied": False}


def job(
    schedule: str, pp: int = 4, m: int = 8, dp: int = 1, tp: int = 1, model: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    framework = {"launch_s": 0.0, **more.pop("framework", {})}
    return {
        "model": MODEL | (model or {}),
        "cluster": {"gpu": "h100-sxm", "gpus": pp * dp * tp},
        "framework": {"name": "megatron-core", "set": framework},
        "batch": {"global": m * dp},
        "plan": {"pp": pp, "dp": dp, "tp": tp, "schedule": schedule, **more},
    }
