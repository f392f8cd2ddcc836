"""Shared by the tests of bidirectional schedules: jobs with a pipeline."""

from __future__ import annotations

import math
from typing import Any


def job(plan: dict[str, Any], layers: int = 8, overlap: bool = True, batch: int = 16, **model: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": 64, "heads": 8, "vocab": 128, "seq": 32, "tied": False}
    gpus = math.prod(plan["mesh"].values())
    return {
        "model": {**sizes, **model},
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": {"name": "megatron-core", "set": {"overlap": {"dp": overlap, "pp": overlap}, "launch_s": 0.0}},
        "batch": {"global": batch},
        "plan": plan,
    }
