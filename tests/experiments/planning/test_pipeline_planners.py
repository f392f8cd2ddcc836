"""Planners of pipelines and their cores, against brute force and each other."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.planning.cores.ordered_stages import costs_of, partition_stages
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.adapipe import AdaPipePlanner, StagePrices, plan_phases
from meshcast.experiments.planning.planners.galvatron import choose_strategies, decision_tree
from meshcast.experiments.planning.planners.graphpipe import decompose, plan_graph
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.mixed import open_problem
from meshcast.experiments.planning.pricing.pipelines import uniform_pipelines
from meshcast.experiments.planning.pricing.stage_prices import range_totals
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem
from meshcast.hardware.errors import PlanError
from tests.draws import drawn
from tests.experiments.planning.conftest import problem_of

MIXED = {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}


def test_galvatron_has_the_strategies_of_its_paper() -> None:
    """22 on 8 GPUs, over depths of 1, 2, 4 and 8."""
    assert sum(len(decision_tree(8 // depth)) for depth in (1, 2, 4, 8)) == 22


@pytest.mark.parametrize("seed", range(10))
def test_strategies_of_layers_are_the_best_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(1, 9, (4, 3))
    nbytes = rng.integers(1, 9, (4, 3)) * 1.0
    for memory in (12.0, 20.0, math.inf):
        values = [
            sum(seconds[layer, strategy] for layer, strategy in enumerate(path))
            for path in product(range(3), repeat=4)
            if sum(nbytes[layer, strategy] for layer, strategy in enumerate(path)) <= memory
        ]
        path = choose_strategies(seconds, nbytes, memory, units=int(min(memory, 99)))
        assert (path.cost if path else math.inf) == pytest.approx(min(values, default=math.inf))
        assert path is None or seconds[range(4), path.strategies].sum() == pytest.approx(path.cost)


def test_a_mixed_plan_of_galvatron_costs_what_the_engine_says() -> None:
    problem = problem_of(layers=24)
    found = find_planner("galvatron")().plan(problem, SearchBudget())
    forecast = problem.forecast(found.plan)
    assert len(found.plan["plan"]["schemes"][-1]["tables"]) > 2
    assert forecast.fits and found.value == pytest.approx(forecast.step_time, rel=1e-3)


def cuts(layers: int, stages: int) -> list[list[int]]:
    borders = ([0, *one, layers] for one in combinations(range(1, layers), stages - 1))
    return [[b - a for a, b in pairwise(one)] for one in borders]


@pytest.mark.parametrize("seed", range(8))
def test_partitions_over_list_heterogeneous_stages_are_the_best_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = [np.cumsum(rng.uniform(1, 5, (6, 6)), axis=1) for _ in range(3)]
    every = [costs_of(costs, one) for one in cuts(6, 3)]
    balanced, short = partition_stages(costs), partition_stages(costs, 5)
    assert balanced is not None and balanced.value == pytest.approx(min(map(max, every)))
    assert short is not None and short.value == pytest.approx(min(sum(one) + 4 * max(one) for one in every))


@pytest.mark.parametrize("seed", range(8))
def test_phases_of_1f1b(seed: int) -> None:
    """All suffixes kept: brute force over the recurrences. One kept, as in the paper: not below it."""
    rng = np.random.default_rng(seed)
    forward = [np.cumsum(rng.uniform(1, 5, (6, 6)), axis=1) for _ in range(3)]
    backward = [2 * one * rng.uniform(0.8, 1.5) for one in forward]

    def step(layers: list[int]) -> float:
        ahead, back = costs_of(forward, layers), costs_of(backward, layers)
        warm_up, ending = ahead[2], back[2]
        for stage in (1, 0):
            warm_up = ahead[stage] + max(warm_up + back[stage + 1], (2 - stage) * ahead[stage])
            ending = back[stage] + max(ending + ahead[stage + 1], (2 - stage) * back[stage])
        return warm_up + ending + 5 * max(a + b for a, b in zip(ahead, back, strict=True))

    least = min(map(step, cuts(6, 3)))
    stages = [StagePrices(ahead, back, 0 * ahead) for ahead, back in zip(forward, backward, strict=True)]
    exact, paper = plan_phases(stages, 8, keep=0), plan_phases(stages, 8)
    assert exact is not None and exact.value == pytest.approx(least)
    assert paper is not None and paper.value >= least * (1 - 1e-12)
    ones = np.ones((3, 3))
    alike = plan_phases([StagePrices(ones, 2 * ones, 0 * ones)] * 3, 8)
    assert alike is not None and alike.value == pytest.approx((8 + 2) * 3)


@pytest.mark.parametrize("gibibytes", [6.0, 9.0, 14.0])
def test_a_stage_recomputes_as_few_layers_as_it_must(gibibytes: float) -> None:
    problem = problem_of(layers=16)
    problem.memory = gibibytes * 2**30
    pipelines = [pipeline for pipeline in uniform_pipelines(problem, problem.stages()) if pipeline.depth == 4]
    full, plain = (next(one for one in pipelines if one.option.plan["recompute"] == way) for way in ("full", "none"))
    prices = AdaPipePlanner()._price(problem, plain, full, 1)
    saved = 3 * (plain.units.kept - full.units.kept)[1]
    slower = (full.units.forward + full.units.backward - plain.units.forward - plain.units.backward)[1]
    for first, last in combinations(range(16), 2):
        cell, layers = (first, last), last - first + 1
        again, nbytes = prices.recomputed[cell], full.stage_bytes(1, 4)[cell]
        if np.isinf(prices.backward[cell]):
            assert nbytes > problem.memory
        elif plain.stage_bytes(1, 4)[cell] > problem.memory:
            assert nbytes + (layers - again) * saved <= problem.memory < nbytes + (layers - again + 1) * saved
            assert prices.backward[cell] == pytest.approx(range_totals(plain.units.backward)[cell] + again * slower)
        else:
            assert again == 0


def test_mcap_is_no_fuller_than_an_even_partition() -> None:
    problem = problem_of(layers=16)
    found = find_planner("mcap")().plan(problem, SearchBudget())
    even = {**found.plan, "plan": {**found.plan["plan"], "partition": "even"}}
    assert problem.forecast(found.plan).peak_device <= problem.forecast(even).peak_device


@pytest.fixture(scope="module")
def of_two_kinds() -> Any:
    job = {"model": {"preset": "gpt3-5b", "layers": 4}, "cluster": MIXED, "batch": {"global": 16, "micro": 1}}
    return open_problem({**job, "plan": {"tp": 8, "dp": 2}})


@pytest.mark.slow
def test_the_optima_of_spaces_on_several_kinds_bound_what_is_found() -> None:
    job = {"model": {"preset": "gpt3-5b", "layers": 4}, "cluster": MIXED, "batch": {"global": 16, "micro": 1}}
    problem = open_problem({**job, "plan": {"tp": 4, "dp": 4}})
    for name in ("amp", "autopipe", "metis", "slapo"):
        planner, budget = find_planner(name)(), SearchBudget()
        found = planner.plan(problem, budget)
        space = planner.find_space_optimum(problem, found, budget)
        assert space is not None
        value = problem.forecast(found.plan).step_time if space.forecast else found.value
        assert 0.6 * value < space.value <= value * (1 + 1e-9), name
        if name == "metis":
            assert found.proof is not None and found.proof.optimal
            cut = planner.find_space_optimum(problem, found._replace(proof=None), budget)
            assert cut is not None and 0.8 * value < cut.value <= value


@pytest.mark.parametrize("name", drawn(["amp", "metis", "sailor"], keep=("metis",)))
def test_kinds_of_gpus(of_two_kinds: Any, name: str) -> None:
    """Plans for both kinds are jobs near their objective; Metis gives the faster kind more."""
    found = find_planner(name)().plan(of_two_kinds, SearchBudget())
    forecast = of_two_kinds.forecast(found.plan)
    assert forecast.fits and 0.45 < found.value / forecast.step_time < 1.2
    if name == "metis" and "cluster" in found.plan:
        stages = found.plan["plan"].get("stages", [])
        groups = [group["node"] for group in found.plan["cluster"]["groups"]]
        assert len(stages) >= 2
        ends = stages[0]["layers"], stages[-1]["layers"]
        assert (ends[1] >= ends[0]) == (groups[-1] == "dgx-h100") or ends[0] == ends[1]


@pytest.mark.parametrize("name", drawn(["alpa", "optcnn", "varuna"], keep=("optcnn",)))
def test_planners_of_one_kind_plan_for_several(of_two_kinds: Any, name: str) -> None:
    """Collectives between kinds take longer than on either."""
    found = find_planner(name)().plan(of_two_kinds, SearchBudget())
    assert 0.5 < found.value / of_two_kinds.forecast(found.plan).step_time < 1.35


@pytest.mark.slow
def test_planners_of_one_kind_count_the_slowest_of_several() -> None:
    job = {"model": {"preset": "gpt3-5b", "layers": 2}, "batch": {"global": 16, "micro": 1}, "plan": {"tp": 8, "dp": 2}}
    mixed = open_problem({**job, "cluster": MIXED})
    slow, fast = (JobProblem({**job, "cluster": f"{node}:2"}) for node in ("dgx-a100", "dgx-h100"))
    assert mixed.memory == min(slow.memory, fast.memory)
    for own, one, other in zip(*(problem.stages()[1:4] for problem in (mixed, slow, fast)), strict=True):
        assert np.array_equal(own, np.maximum(one, other))
    axes = {"x": 2, "y": 8}
    for own, one, other in zip(*(problem.operators(axes).factors for problem in (mixed, slow, fast)), strict=True):
        assert own.scope == one.scope == other.scope
        assert np.array_equal(own.seconds, np.maximum(one.seconds, other.seconds))


def test_graphpipe_on_chains_is_pipedream_and_branches_do_not_count_each_other() -> None:
    for name in ("vgg16", "alexnet"):
        problem = ProfileProblem(f"pipedream-{name}", [NetworkLevel(4, 1.25e9)])
        values = [find_planner(one)().plan(problem, SearchBudget()).value for one in ("graphpipe", "pipedream")]
        assert values[0] == pytest.approx(values[1], rel=1e-12)
    graph = LayerGraph("abcde", [(0, 1), (2, 3), (1, 4), (3, 4)], {})
    found = plan_graph(decompose(graph), 5, lambda nodes, count: float(len(nodes)), lambda *one: True)
    assert found is not None and (found.value, found.depth, len(found.stages)) == (1.0, 3, 5)
    with pytest.raises(PlanError, match="neither a series nor parallel"):
        find_planner("graphpipe")().plan(ProfileProblem("pipedream-gnmt", [NetworkLevel(4, 1e9)]), SearchBudget())
