"""Plans that Alpa found on its authors' cluster, against what its planner finds here at this program's prices.

Wide-ResNet is not compared: jobs have no convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from meshcast.experiments.planning.planners.alpa import Alpa
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import ProfileProblem
from meshcast.experiments.planning.stages import PlannedStage, StageTable
from tests.draws import drawn

DENSE = ("gpt-760M", "gpt-1.3B", "gpt-2.6B", "gpt-6.7B", "gpt-15B", "gpt-39B")
EXPERTS = ("moe-690M", "moe-1.3B", "moe-2.4B", "moe-10B", "moe-27B", "moe-70B")

STATES = {"compute": "fp16", "gradients": "fp16", "main_weights": "fp16", "moments": "fp16"}
"""Of models with experts the authors train with Adafactor, whose states are next to nothing: the smallest of Adam's."""


GROUP = 2048
"""Tokens of a group, in which every expert of the authors' models has a capacity."""


class RecomputingAlpa(Alpa):
    """As the authors ran it; their plans are told by degrees alone."""

    recompute, programs = ("full",), False


class AuthorsSpace(JobProblem):
    """A job with the stages that Alpa's authors admit.

    cluster_layers: layers of a cluster: stages are of whole clusters. token_groups: groups of tokens of a micro-batch,
        which ranks share as wholes; 0: no experts.
    """

    cluster_layers, token_groups = 1, 0

    def stages(self, recompute: bool = True) -> StageTable:
        table = super().stages(recompute)
        first, last = np.indices(table.seconds.shape[:2])
        inside = (first % self.cluster_layers > 0) | ((last + 1) % self.cluster_layers > 0)
        seconds = np.where(inside[..., None], math.inf, table.seconds)
        if self.token_groups:
            seconds[..., [not self._admits(one.plan) for one in table.options]] = math.inf
        return table._replace(seconds=seconds)

    def _admits(self, plan: Mapping[str, Any]) -> bool:
        """Experts are sharded where one axis has samples or experts, not beside tensor parallelism."""
        sharded = int(plan.get("ep", 1)) > 1
        return self.token_groups % int(plan["dp"]) == 0 and not (sharded and int(plan["tp"]) > 1)


class BothPlans(NamedTuple):
    """Stages as (layers, tp, dp) of both plans, their objectives and forecast step times [s]."""

    ours: list[tuple[int, int, int]]
    theirs: list[tuple[int, int, int]]
    values: tuple[float, float]
    steps: tuple[float, float]


@cache
def compare(name: str, replicated: bool | None = None, whole_clusters: bool = False) -> BothPlans:
    """Both plans of a model.

    replicated: whether ranks have copies of experts; None: as in the plan of the authors. whole_clusters: whether
    stages are of whole clusters of equally many layers.
    """
    profile = ProfileProblem("alpa-found-plans")
    row = profile.graph().names.index(name)
    model = dict(profile.settings["models"][name])
    gpus, batch, micro, clusters = (
        int(profile.graph().figures[key][row]) for key in ("gpus", "batch", "microbatches", "clusters")
    )
    experts = model.pop("experts", 0)
    replicated = name in profile.settings["replicated_experts"] if replicated is None else replicated
    ranks = math.gcd(experts, gpus) if experts and not replicated else 1
    ffn = (8 if experts else 4) * model["hidden"]
    moe = {"experts": experts, "top_k": 2, "expert_ffn": ffn, "every": 2, "capacity": 1.0}
    job: dict[str, Any] = {
        "model": {"preset": "gpt3-5b", **model, "ffn": ffn, **({"moe": moe} if experts else {})},
        "cluster": {"node": "p3", "nodes": -(-gpus // 8), "gpus": gpus},
        "precision": STATES if experts else "fp16",
        "framework": {"name": "megatron-core", "set": {"fused_gradients": False}},
        "batch": {"global": batch, "micro": 1, "sequence": 1024},
        "plan": {"tp": 1, "dp": gpus, **({"ep": ranks} if ranks > 1 else {})},
    }
    problem = AuthorsSpace(job, microbatches=micro)
    problem.cluster_layers = model["layers"] // clusters if whole_clusters else 1
    problem.token_groups = batch // micro * 1024 // GROUP if experts else 0
    found = RecomputingAlpa().plan(problem, SearchBudget())
    plan = found.plan["plan"]
    stages = plan.get("stages") or [{"layers": model["layers"], **plan}]
    table = problem.stages()
    theirs, first = [], 0
    for own, size, data, tensor in profile.settings["stages"][name]:
        layers = range(first, first + own * model["layers"] // clusters)
        wanted = {"tp": tensor, "dp": data, "recompute": "full"}
        if ranks > 1:
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


@pytest.mark.parametrize("name", drawn(["gpt-760M", "gpt-15B", "gpt-2.6B", "gpt-6.7B"], keep=4))
def test_alpa_finds_the_meshes_that_its_authors_found(name: str) -> None:
    """As many stages of the same meshes. Theirs are cut between clusters, ours between any two layers: 13 and 11
    layers instead of 12 and 12, since the last stage has the vocabulary."""
    found = compare(name)
    assert [one[1:] for one in found.ours] == [one[1:] for one in found.theirs]
    assert all(abs(one[0] - other[0]) <= 1 for one, other in zip(found.ours, found.theirs, strict=True))
    assert found.ours == found.theirs if name in ("gpt-6.7B", "gpt-15B") else found.values[0] < found.values[1]


@pytest.mark.slow
def test_cuts_between_clusters_explain_the_stages_of_two_gpus() -> None:
    """1.3B on 4: stages of 6, 13 and 5 layers on 1, 2 and 1 GPUs are 4 % better; no clusters of 4 layers make them."""
    found = compare("gpt-1.3B")
    assert found.ours == [(6, 1, 1), (13, 1, 2), (5, 1, 1)] and 0.95 < found.values[0] / found.values[1] < 0.97
    clusters = compare("gpt-1.3B", whole_clusters=True)
    assert clusters.ours == clusters.theirs == [(12, 1, 2)] * 2


@pytest.mark.slow
def test_larger_stages_do_not_cross_nodes() -> None:
    """39B on 64: they have 16 stages of 4 GPUs; seven of 8 and two of 4 are 0.5 % better by the objective, and 15 %
    slower in the forecast."""
    found = compare("gpt-39B")
    assert found.theirs == [(3, 4, 1)] * 16
    assert sorted(found.ours) == [(3, 4, 1)] * 2 + [(6, 8, 1)] * 7
    places = np.cumsum([0, *(tensor * data for _, tensor, data in found.ours)])
    assert all(place // 8 == (stop - 1) // 8 for place, stop in pairwise(places.tolist()))
    assert 0.98 < found.values[0] / found.values[1] < 1 < found.steps[0] / found.steps[1] < 1.2


@pytest.mark.parametrize("name", drawn(EXPERTS, keep=6))
def test_alpa_finds_the_plans_of_its_authors_for_experts(name: str) -> None:
    """The same meshes. The small models have copies of all experts (`force_batch_dim_to_mesh_dim`), the large ones
    shards; the other choice is slower."""
    found = compare(name)
    assert [one[1:] for one in found.ours] == [one[1:] for one in found.theirs]
    assert all(abs(one[0] - other[0]) <= 1 for one, other in zip(found.ours, found.theirs, strict=True))
    assert found.ours == found.theirs if name not in ("moe-1.3B", "moe-2.4B") else found.values[0] < found.values[1]
    copies = name in ("moe-690M", "moe-1.3B", "moe-2.4B")
    assert found.values[0] < compare(name, replicated=not copies).values[0]


@pytest.mark.parametrize("name", drawn((*DENSE, *EXPERTS), keep=("gpt-760M", "moe-690M")))
def test_no_found_plan_is_better_in_our_space(name: str) -> None:
    """The dynamic program is optimal at its own prices."""
    ours, theirs = compare(name).values
    assert ours <= theirs * (1 + 1e-9)
