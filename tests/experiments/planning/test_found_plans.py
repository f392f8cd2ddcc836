"""Plans that Alpa found on its authors' cluster, against what its planner finds here at this program's prices.

Wide-ResNet is not compared: jobs have no convolutions.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments.planning.planners.alpa import Alpa
from experiments.planning.pricing.job import JobProblem
from experiments.planning.problem import SearchBudget
from experiments.planning.profile import ProfileProblem
from experiments.planning.stages import PlannedStage
from tests.thinning import thinned

DENSE = ("gpt-760M", "gpt-1.3B", "gpt-2.6B", "gpt-6.7B", "gpt-15B", "gpt-39B")
EXPERTS = ("moe-690M", "moe-1.3B", "moe-2.4B", "moe-10B", "moe-27B", "moe-70B")

STATES = {"compute": "fp16", "gradients": "fp16", "main_weights": "fp16", "moments": "fp16"}
"""Of models with experts the authors train with Adafactor, whose states are next to nothing: the smallest of Adam's."""


class RecomputingAlpa(Alpa):
    """As the authors ran it."""

    recompute = ("full",)


class BothPlans(NamedTuple):
    """Stages as (layers, tp, dp) of both plans, their objectives and forecast step times [s].

    Experts are sharded over all GPUs of their stage.
    """

    ours: list[tuple[int, int, int]]
    theirs: list[tuple[int, int, int]]
    values: tuple[float, float]
    steps: tuple[float, float]


@cache
def compare(name: str) -> BothPlans:
    profile = ProfileProblem("alpa-found-plans")
    row = profile.graph().names.index(name)
    model = dict(profile.settings["models"][name])
    gpus, batch, micro, clusters = (
        int(profile.graph().figures[key][row]) for key in ("gpus", "batch", "microbatches", "clusters")
    )
    experts = model.pop("experts", 0)
    ranks = math.gcd(experts, gpus) if experts else 1
    ffn = (8 if experts else 4) * model["hidden"]
    moe = {"experts": experts, "top_k": 2, "expert_ffn": ffn, "every": 2, "capacity": 1.0}
    job: dict[str, Any] = {
        "model": {"preset": "gpt3-5b", **model, "ffn": ffn, **({"moe": moe} if experts else {})},
        "cluster": {"node": "p3", "nodes": -(-gpus // 8), "gpus": gpus},
        "precision": STATES if experts else "fp16",
        "batch": {"global": batch, "micro": 1, "sequence": 1024},
        "plan": {"tp": 1, "dp": gpus, **({"ep": ranks} if experts else {})},
    }
    problem = JobProblem(job, microbatches=micro)
    found = RecomputingAlpa().plan(problem, SearchBudget())
    plan = found.plan["plan"]
    stages = plan.get("stages") or [{"layers": model["layers"], **plan}]
    table = problem.stages()
    theirs, first = [], 0
    for own, size, data, tensor in profile.settings["stages"][name]:
        layers = range(first, first + own * model["layers"] // clusters)
        wanted = {"tp": tensor, "dp": data, "recompute": "full"}
        if experts:
            wanted["ep"] = math.gcd(ranks, size)
        option = next(at for at, one in enumerate(table.options) if one.gpus == size and one.plan == wanted)
        theirs.append(PlannedStage(layers, option))
        first = layers.stop
    assert first == model["layers"]
    seconds = [float(table.seconds[one.layers[0], one.layers[-1], one.option]) for one in theirs]
    value = sum(seconds) + (micro - 1) * max(seconds)
    steps = problem.forecast(found.plan).step_time, problem.forecast(problem.stage_plan(table, tuple(theirs))).step_time
    degrees = [
        (len(one.layers), table.options[one.option].plan["tp"], table.options[one.option].plan["dp"]) for one in theirs
    ]
    return BothPlans([(one["layers"], one["tp"], one["dp"]) for one in stages], degrees, (found.value, value), steps)


@pytest.mark.parametrize("name", thinned(["gpt-760M", "gpt-1.3B", "gpt-15B"], keep=3))
def test_alpa_finds_the_meshes_that_its_authors_found(name: str) -> None:
    """As many stages of the same meshes. Theirs are cut between clusters of 3 or 4 layers, ours between any two: 13 and
    11 layers instead of 12 and 12, since the last stage has the vocabulary."""
    found = compare(name)
    assert [one[1:] for one in found.ours] == [one[1:] for one in found.theirs]
    assert all(abs(one[0] - other[0]) <= 1 for one, other in zip(found.ours, found.theirs, strict=True))
    assert found.ours == found.theirs if name == "gpt-15B" else found.values[0] < found.values[1]


@pytest.mark.slow
def test_stages_of_equal_meshes_are_as_good_as_theirs_of_unlike_ones() -> None:
    """2.6B on 8: they have 2, 2 and 4 GPUs, here two stages of 4 are 2 % faster, also in the forecast."""
    found = compare("gpt-2.6B")
    assert [one[1:] for one in found.theirs] == [(1, 2), (1, 2), (1, 4)]
    assert [one[1:] for one in found.ours] == [(1, 4), (1, 4)]
    assert 0.95 < found.values[0] / found.values[1] < 1 and 0.95 < found.steps[0] / found.steps[1] < 1


@pytest.mark.slow
def test_one_stage_over_two_nodes_is_better_for_an_objective_without_gradient_sums() -> None:
    """6.7B on 16: within 1 % of theirs by the objective, and slower in the forecast, which sums gradients between the
    nodes: the authors measured stages, sums included."""
    found = compare("gpt-6.7B")
    assert found.theirs == [(16, 4, 2)] * 2 and found.ours == [(32, 4, 4)]
    assert 0.98 < found.values[0] / found.values[1] < 1 < found.steps[0] / found.steps[1]


def test_larger_stages_do_not_cross_nodes() -> None:
    """39B on 64: they have 16 stages of 4 GPUs; seven of 8 and two of 4 are 0.5 % better by the objective, and 15 %
    slower in the forecast."""
    found = compare("gpt-39B")
    assert found.theirs == [(3, 4, 1)] * 16
    assert sorted(found.ours) == [(3, 4, 1)] * 2 + [(6, 8, 1)] * 7
    places = np.cumsum([0, *(tensor * data for _, tensor, data in found.ours)])
    assert all(place // 8 == (stop - 1) // 8 for place, stop in pairwise(places.tolist()))
    assert 0.98 < found.values[0] / found.values[1] < 1 < found.steps[0] / found.steps[1] < 1.2


@pytest.mark.parametrize(("name", "stages"), thinned([("moe-10B", 2), ("moe-70B", 8)], keep=2))
def test_alpa_finds_the_plans_of_its_authors_for_experts(name: str, stages: int) -> None:
    """One stage a node, of as many layers each, whose eight GPUs share samples and experts."""
    found = compare(name)
    assert found.ours == found.theirs
    assert {one[1:] for one in found.ours} == {(1, 8)} and len(found.ours) == stages


@pytest.mark.slow
def test_small_models_with_experts_have_other_stages_than_theirs() -> None:
    """On one node they have one stage of two GPUs, and two stages of two and of four. Here two stages of one GPU, and
    one stage, are 4 to 14 % faster, also in the forecast; what their stages took when they were measured is not public.
    """
    for name, stages in (("moe-690M", 2), ("moe-1.3B", 1), ("moe-2.4B", 1)):
        found = compare(name)
        assert len(found.ours) == stages and len(found.theirs) == 3 - stages
        assert 0.84 < found.values[0] / found.values[1] < 0.97 and 0.84 < found.steps[0] / found.steps[1] < 0.97


@pytest.mark.slow
def test_stages_of_experts_on_half_nodes_are_better_with_gradient_sums() -> None:
    """27B on 32: they have eight stages of half a node; four of a node are 5 % better by the objective, which has no
    sums of gradients, and 11 % slower in the forecast."""
    found = compare("moe-27B")
    assert found.theirs == [(2, 1, 4)] * 8 and found.ours == [(4, 1, 8)] * 4
    assert 0.94 < found.values[0] / found.values[1] < 1 < found.steps[0] / found.steps[1] < 1.15


@pytest.mark.parametrize("name", thinned((*DENSE, *EXPERTS), keep=("gpt-760M", "moe-10B")))
def test_no_found_plan_is_better_in_our_space(name: str) -> None:
    """The dynamic program is optimal at its own prices."""
    ours, theirs = compare(name).values
    assert ours <= theirs * (1 + 1e-9)
