"""Small spaces that the tests of searches share."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.search.space.space import Space
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step

TINY: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": [1, 2], "sequence": 2048},
    "plan": {"tp": [1, 2, 4], "pp": [1, 2], "chunks": [1, 2], "zero": [0, 1]},
}


def every_point(space: Space) -> list[tuple[dict[str, Any], StepAndMemory | None]]:
    """The fields of every point of a space, and its forecast; None if it breaks a rule."""
    found, shared = [], SharedWork()
    for group in space.groups():
        for pipeline in space.pipelines(group):
            for step in space.choices(group, pipeline):
                try:
                    forecast = forecast_step(space.job_of(group, pipeline, step), shared, energy=True)
                except MeshcastError:
                    forecast = None
                found.append((space.changes(group, pipeline, step), forecast))
    return found
