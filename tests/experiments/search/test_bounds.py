"""Lower bounds of the points of a space, held against forecasts of drawn points."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from experiments.search.bounds import Bounds
from experiments.search.groups import GroupBounds, Known
from experiments.search.search import ROUNDING
from experiments.search.space import Space
from hardware.errors import MeshcastError
from simulator.forecast.step import forecast_step
from simulator.job.load import load_job

OPEN = {field: "auto" for field in ("overlap.tp", "overlap.dp", "overlap.pp", "overlap.updated_weights")}

JOBS = {
    "dense": {"model": {"preset": "gpt3-175b", "layers": 24}, "cluster": "dgx-a100:16", "batch": {"global": 192}},
    "unfused": {"model": "opt-6.7b", "cluster": "dgx-a100:2", "framework": "torchtitan", "batch": {"global": 64}},
    "cp": {
        "model": {"preset": "llama3-8b", "layers": 8},
        "cluster": "dgx-h100:2",
        "batch": {"global": 32, "sequence": 8192},
    },
    "experts": {"model": {"preset": "mixtral-8x7b", "layers": 8}, "cluster": "dgx-h100:2", "batch": {"global": 64}},
}


def space_of(name: str) -> Space:
    job = JOBS[name]
    overlap = {field.partition(".")[2]: value for field, value in OPEN.items()}
    framework = {"name": job.get("framework", "megatron-core"), "set": {"overlap": overlap}}
    return Space({**job, "framework": framework, "plan": "auto"}, Path("."))


def audit(name: str, seed: int, wanted: int) -> list[tuple[float, float]]:
    """Bounds over forecasts, of time and of memory, of `wanted` drawn points."""
    rng, space = random.Random(seed), space_of(name)
    bounds, every_group, found = Bounds(space), space.groups(), list[tuple[float, float]]()
    groups = GroupBounds(space, bounds)
    while len(found) < wanted:
        group = rng.choice(every_group)
        pipelines = space.pipelines(group)
        if not pipelines:
            continue
        for _ in range(4):
            pipeline = rng.choice(pipelines)
            step = rng.choice(space.steps(group, pipeline.pp))
            bound = bounds.bound_points(group, pipeline, [step])
            if bound is None:
                continue
            try:
                forecast = forecast_step(load_job(space.job_of(group, pipeline, step)), bounds.shared)
            except MeshcastError:
                continue
            found.append((bound[0] / forecast.step_time, bound[1] / forecast.peak_device))
            assert max(found[-1]) <= 1 + ROUNDING, (group, pipeline, step)
            family = [one for one in space.steps(group, pipeline.pp) if one.data == step.data]
            together = bounds.bound_points(group, pipeline, family)
            assert together is not None
            assert together[0] <= forecast.step_time * (1 + ROUNDING), (group, pipeline, step)
            assert together[1] <= forecast.peak_device * (1 + ROUNDING), (group, pipeline, step)
            assert bounds.bound_kernels(group) <= forecast.step_time * (1 + ROUNDING), (group, pipeline, step)
            coarse, _ = groups.open(group)
            while coarse is not None:
                own = (at for at in range(len(coarse.places)) if coarse.pipeline(at) == pipeline)
                at = next((at for at in own if step in groups.steps(coarse, at)), None)
                assert at is not None or not forecast.fits, (group, pipeline, step)
                if at is not None:
                    assert coarse.seconds[at] <= forecast.step_time * (1 + ROUNDING), (group, pipeline, step)
                coarse = groups.refine(coarse) if coarse.known is not Known.PASSES else None
    return found


@pytest.mark.parametrize("name", JOBS)
def test_no_bound_is_above_its_forecast(name: str) -> None:
    ratios = audit(name, 0, 10)
    # Bounds that cut nothing would hold as well.
    assert max(time for time, _ in ratios) > 0.8 and max(memory for _, memory in ratios) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_bound_is_above_its_forecast_at_many_points(name: str, seed: int) -> None:
    audit(name, seed, 50)
