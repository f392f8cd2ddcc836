"""Small spaces that the tests of searches share, their points, and brute force over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.objectives import NEAR
from meshcast.experiments.search.space.space import LayerGroup, Pipeline, Space, StepChoice
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step

TINY: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": [1, 2], "sequence": 2048},
    "plan": {"tp": [1, 2, 4], "pp": [1, 2], "chunks": [1, 2], "zero": [0, 1]},
}
EXPERTS: dict[str, Any] = {
    **TINY,
    "model": {"preset": "mixtral-8x7b", "layers": 2},
    "plan": {"tp": [1, 4, 8], "ep": [1, 2, 4], "etp": "auto", "pp": [1, 2], "zero": [1, 3]},
}
MIXED: dict[str, Any] = {
    "model": {"layers": 6, "hidden": 1024, "heads": 16, "vocab": 50257, "seq": 1024},
    "cluster": {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]},
    "batch": {"global": 32},
}
"""Two kinds of nodes, whose plans are heterogeneous."""

RUN: dict[str, Any] = {
    "steps": 5_000,
    "seeds": 2,
    "price_per_gpu_hour": 2,
    "failures": {
        "rates": "none",
        "components": {
            "node": {"per": "node", "mtbf_hours": 3},
            "job": {"per": "job", "mtbf_hours": 1, "loses": "nothing"},
        },
    },
    "checkpoints": {"kind": ["sharded", "asynchronous"], "every_s": [30.0, 300.0]},
    "recovery": {"repair_hours": 1, "spares": [0, 2]},
}
RUNS: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 1, "sequence": 2048},
    "plan": {"tp": [1, 8], "zero": [0, 1]},
    "run": RUN,
}
"""Plans with eight choices of checkpoints and spares each."""

SEARCHES: dict[str, dict[str, Any]] = {
    "tiny": TINY, "experts": EXPERTS, "mixed": {**MIXED, "plan": "auto"}, "runs": {**RUNS, "plan": {"tp": 4}},
    "any": {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 8}},
}  # fmt: skip
"""Jobs that the entries of tests/refusals change."""

COMPARED: dict[str, dict[str, Any]] = {
    "tiny": {**TINY, "batch": {"global": 16, "micro": 1, "sequence": 2048}, "plan": {"tp": 4, "pp": 2, "chunks": 2}},
}
"""Plans that are held against the best one of `SEARCHES`."""

Point = tuple[LayerGroup, Pipeline, StepChoice]


def open_space(job: dict[str, Any], **plan: Any) -> Space:
    """Returns the space of a job, with another plan if one is stated."""
    return Space({**job, "plan": plan or job["plan"]}, Path("."))


def points_of(space: Space) -> list[Point]:
    return [
        (group, pipeline, step)
        for group in space.groups()
        for pipeline in space.pipelines(group)
        for step in space.choices(group, pipeline)
    ]


def plans_of(space: Space) -> list[dict[str, Any]]:
    """Returns the short form of every plan of a space."""
    return [space.job_of(*point)["plan"] for point in points_of(space)]


def every_point(space: Space, energy: bool = True) -> list[tuple[dict[str, Any], StepAndMemory | None]]:
    """Returns the fields of every point of a space, and its forecast; None if it breaks a rule."""
    shared = SharedWork()

    def forecast(point: Point) -> StepAndMemory | None:
        try:
            return forecast_step(space.job_of(*point), shared, energy=energy)
        except MeshcastError:
            return None

    return [(space.changes(*point), forecast(point)) for point in points_of(space)]


def run_search(job: dict[str, Any], **options: Any) -> Search:
    """Returns the search of a job, whatever its program runs, at its end."""
    search = Search([open_space(job)], **options)
    search.run()
    return search


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def interrupt_if(holds: Callable[[Certificate], bool]) -> Callable[[Certificate], None]:
    """Returns what interrupts a search that it watches once something holds of its certificate."""
    return lambda certificate: interrupt() if holds(certificate) else None


def is_accounted(certificate: Certificate) -> bool:
    """Whether each plan was decided on for one reason, or is left open."""
    cut = certificate.invalid + certificate.memory_bound + certificate.time_bound + sum(certificate.excluded.values())
    return cut + certificate.exact == certificate.decided == certificate.plans - certificate.open


def check_against_brute_force(job: dict[str, Any]) -> None:
    """Holds the best plans of a search, and its account of all others, against the forecasts of all."""
    search = run_search(job)
    points = every_point(search.space, energy=False)
    steps = sorted(forecast.step_time for _, forecast in points if forecast is not None and forecast.fits)
    near = [seconds for seconds in steps if seconds < (1 + NEAR) * steps[0]][: search.top]
    assert bool(search.best) == bool(near)
    assert [plan.forecast.step_time for plan in search.best[: len(near)]] == pytest.approx(near, rel=1e-12)
    certificate = search.certificate
    assert certificate.complete and certificate.gap == (0.0 if near else 1.0) and certificate.open == 0
    assert is_accounted(certificate) and certificate.plans == len(points)
