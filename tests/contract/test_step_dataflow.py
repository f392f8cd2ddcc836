"""Data flow of whole steps: options of schemes, gradient buckets that end inside a layer, and the check itself.

`tests.contract.test_composition` asks the same of every scheme in a plan with all families.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from meshcast.simulator.forecast.step import play_forecast
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.registry import find_scheme
from meshcast.validation.contract.composed import Options, job_with, of_family, with_options
from meshcast.validation.contract.played import Played, play_job
from meshcast.validation.contract.step_dataflow import StepFlow, step_problems
from tests.draws import drawn, drawn_grid
from tests.strategies import MODULES, changed

OPTIONS = [
    *with_options("expert", "data", "memory"),
    *((use, {"routing": {"zipf": 1.0}}) for use in of_family("expert")),
    *((use, {"modules": [module]}) for use in ("memory/recompute-selective",) for module in MODULES),
]


@pytest.mark.parametrize(("use", "options"), drawn([(use, options) for use, options in OPTIONS if options], keep=8))
def test_data_flow_with_each_option(use: str, options: Options) -> None:
    """Memory is given back and engines agree, too."""
    job = job_with(use, options={use: options})
    if use.startswith("data/") and find_scheme(use).least_axes < 2:
        two_data_axes(job)
    played = play_job(job)
    assert step_problems(played) == [] == [peak for peak in played.peaks if peak.left]
    by_matrices = play_forecast(played.plan, played.stages, played.program, engine="matrices")
    assert by_matrices.step.span == pytest.approx(played.step.span, rel=1e-9)


def two_data_axes(job: dict[str, Any]) -> None:
    """Changes a job to twice the replicas, on two axes: some options move data along one and then along the other."""
    job["plan"]["mesh"] = {"across": 2, **job["plan"]["mesh"]}
    job["plan"]["views"][EXPERTS]["edp"] *= 2
    job["cluster"]["gpus"] *= 2
    job["batch"]["global"] *= 2
    for entry in job["plan"]["schemes"]:
        if entry["use"].startswith("data/"):
            entry["over"] = ["across", *entry["over"]]


def small_buckets(use: str, **model: Any) -> Played:
    job = changed(job_with(use), bucket={"elements": 3000, "elements_per_rank": 0})
    return play_job({**job, "model": {**job["model"], **model}})


@pytest.mark.parametrize(("use", "tied"), drawn_grid(of_family("data"), (False, True)))
def test_reductions_wait_for_their_gradients(use: str, tied: bool) -> None:
    assert step_problems(small_buckets(use, tied=tied)) == []


def dependencies_between_passes(step: StepFlow) -> Iterator[tuple[int, int]]:
    """Pairs of an instance and one of another action, or beside the units, that it awaits by this dependency only."""
    flat = step.played.flat
    action_of = {at: number for number in range(len(flat.first)) for at in step.played.ops(number)}
    for number, after in enumerate(flat.after):
        for other in after:
            between = action_of.get(number) != action_of.get(other)
            beside = any(flat.ops[at].name in ("reduce grads", "gather params") for at in (number, other))
            if (between or beside) and not without(step, number, other).waits(number, other):
                yield number, other


def without(step: StepFlow, number: int, other: int) -> StepFlow:
    """A step in which one instance does not wait for another."""
    after = [*step.flat.after]
    after[number] = tuple(one for one in after[number] if one != other)
    return replace(step, flat=replace(step.flat, after=after))


def test_each_dependency_that_is_taken_away_is_seen() -> None:
    played = small_buckets("data/zero-1")
    step = StepFlow(played, played.flat)
    assert [*step.problems()] == []
    found = [*dependencies_between_passes(step)]
    assert len(found) > 20
    for number, other in found:
        assert [*without(step, number, other).problems()], (step.flat.ops[number], step.flat.ops[other])
