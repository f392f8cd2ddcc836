"""Planners of pipelines and their cores, against brute force and each other."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.planning.cores.ordered_stages import costs_of, partition_stages
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.adapipe import (
    AdaPipePlanner,
    Knapsack,
    StagePrices,
    UnitChoice,
    plan_phases,
)
from meshcast.experiments.planning.planners.galvatron import choose_strategies, decision_tree
from meshcast.experiments.planning.planners.graphpipe import decompose, plan_graph
from meshcast.experiments.planning.planners.varuna import VarunaPlanner
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.mixed import open_problem
from meshcast.experiments.planning.pricing.pipelines import uniform_pipelines
from meshcast.experiments.planning.pricing.stage_prices import range_totals
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem
from tests.draws import drawn
from tests.experiments.planning.conftest import problem_of
from tests.experiments.planning.random_tables import cut_layers

MIXED = {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}
TWO_KINDS: dict[str, Any] = {
    "model": {"preset": "gpt3-5b", "layers": 2},
    "cluster": MIXED,
    "batch": {"global": 16, "micro": 1},
    "plan": {"tp": 8, "dp": 2},
}

any_seed = pytest.mark.parametrize("seed", drawn(range(10), keep=3))


def test_galvatron_has_the_strategies_of_its_paper() -> None:
    """22 on 8 GPUs, over depths of 1, 2, 4 and 8."""
    assert sum(len(decision_tree(8 // depth)) for depth in (1, 2, 4, 8)) == 22


@any_seed
def test_strategies_of_layers_are_the_best_of_brute_force(seed: int) -> None:
    rng, layers = np.random.default_rng(seed), range(4)
    seconds, nbytes = rng.uniform(1, 9, (4, 3)), rng.integers(1, 9, (4, 3)) * 1.0
    for memory in (12.0, 20.0, math.inf):
        paths = [path for path in product(range(3), repeat=4) if nbytes[layers, path].sum() <= memory]
        best = min((seconds[layers, path].sum() for path in paths), default=math.inf)
        chosen = choose_strategies(seconds, nbytes, memory, units=int(min(memory, 99)))
        assert (chosen.cost if chosen else math.inf) == pytest.approx(best)
        assert chosen is None or seconds[layers, chosen.strategies].sum() == pytest.approx(chosen.cost)


def test_a_mixed_plan_of_galvatron_costs_what_the_engine_says() -> None:
    problem = problem_of(layers=24)
    proposal = find_planner("galvatron")().plan(problem, SearchBudget())
    forecast = problem.forecast(proposal.plan)
    assert len(proposal.plan["plan"]["schemes"][-1]["tables"]) > 2
    assert forecast.fits and proposal.value == pytest.approx(forecast.step_time, rel=1e-3)


CUTS = [[b - a for a, b in pairwise(borders)] for borders in cut_layers(6, 3)]
"""Layers of three stages, of all cuts of six."""


@any_seed
def test_partitions_over_list_heterogeneous_stages_are_the_best_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = [np.cumsum(rng.uniform(1, 5, (6, 6)), axis=1) for _ in range(3)]
    every = [costs_of(costs, layers) for layers in CUTS]
    balanced, short = partition_stages(costs), partition_stages(costs, 5)
    assert balanced is not None and balanced.value == pytest.approx(min(map(max, every)))
    assert short is not None and short.value == pytest.approx(min(sum(own) + 4 * max(own) for own in every))


@any_seed
def test_phases_of_1f1b(seed: int) -> None:
    """All suffixes kept: brute force over the recurrences. One kept, as in the paper: not below it."""
    rng = np.random.default_rng(seed)
    forward = [np.cumsum(rng.uniform(1, 5, (6, 6)), axis=1) for _ in range(3)]
    backward = [2 * seconds * rng.uniform(0.8, 1.5) for seconds in forward]

    def step(layers: list[int]) -> float:
        ahead, back = costs_of(forward, layers), costs_of(backward, layers)
        warm_up, ending = ahead[2], back[2]
        for stage in (1, 0):
            warm_up = ahead[stage] + max(warm_up + back[stage + 1], (2 - stage) * ahead[stage])
            ending = back[stage] + max(ending + ahead[stage + 1], (2 - stage) * back[stage])
        return warm_up + ending + 5 * max(a + b for a, b in zip(ahead, back, strict=True))

    least = min(map(step, CUTS))
    stages = [StagePrices(ahead, back) for ahead, back in zip(forward, backward, strict=True)]
    exact, paper = plan_phases(stages, 8, keep=0), plan_phases(stages, 8)
    assert exact is not None and exact.value == pytest.approx(least)
    assert paper is not None and paper.value >= least * (1 - 1e-12)
    ones = np.ones((3, 3))
    alike = plan_phases([StagePrices(ones, 2 * ones)] * 3, 8)
    assert alike is not None and alike.value == pytest.approx((8 + 2) * 3)


@any_seed
def test_the_units_that_are_recomputed_are_the_best_of_brute_force(seed: int) -> None:
    """Of four layers of two kinds; kept bytes are whole parts."""
    rng, kinds = np.random.default_rng(seed), [0, 1, 1, 0]
    seconds, kept = rng.uniform(1, 5, (3, 2)), rng.integers(1, 9, (3, 2)) * 2.0
    choices = [UnitChoice((name,), seconds[i][kinds], kept[i][kinds], 0.0) for i, name in enumerate("abc")]
    knapsack = Knapsack(choices, part=2.0)
    least = knapsack.least_seconds(range(4))
    for parts in range(4, 33):
        paths = [path for path in product(range(3), repeat=4) if kept[path, kinds].sum() <= 2 * parts]
        best = min((seconds[path, kinds].sum() for path in paths), default=math.inf)
        assert least[min(parts, len(least) - 1)] == pytest.approx(best)
        if paths:
            units = knapsack.choose(range(4), parts)
            chosen = ["abc".index(name) for (name,) in units]
            assert seconds[chosen, kinds].sum() == pytest.approx(best) and kept[chosen, kinds].sum() <= 2 * parts


def test_a_stage_recomputes_as_little_as_it_must() -> None:
    """Prices fall with memory, cheap units go first, and what is chosen costs and keeps what the prices say."""
    problem = problem_of(layers=8)
    plain = next(one for one in uniform_pipelines(problem, problem.stages()) if one.depth == 4)
    whole = plain.stage_bytes(1, 4)[0, 5]
    shares = {"none": 1.0, "norm": 0.97, "act": 0.85, "layer": 0.45, "refused": 0.2}
    extra, chosen = [], []
    for share in shares.values():
        problem.memory = share * whole * (1 + 1e-9)
        knapsacks = AdaPipePlanner()._price_units(problem, plain)
        prices = knapsacks.price(1)
        extra.append(prices.backward[0, 5] - range_totals(plain.units.backward)[0, 5])
        chosen.append({name for units in knapsacks.choose(1, 0, 5) for name in units})
    assert extra[0] == pytest.approx(0.0, abs=1e-12) and extra[1] > 1e-6 and math.isinf(extra[-1])
    assert extra == sorted(extra)
    assert chosen[0] == set() and chosen[1] <= {"norm", "act"} and "layer" not in chosen[2] and "layer" in chosen[3]


@pytest.mark.parametrize("model", ["gpt3-5b", pytest.param("deepseek-v2-lite", marks=pytest.mark.slow)])
def test_units_of_layers_of_several_kinds_are_chosen(model: str) -> None:
    """Where memory is short the plan recomputes parts of layers, and the engine plays it near its objective."""
    gpus = 4 if model == "gpt3-5b" else 8
    job = {"model": {"preset": model, "layers": 8}, "cluster": {"node": "dgx-a100", "nodes": 1, "gpus": gpus}}
    job |= {"batch": {"global": 64, "micro": 8}}
    problem = JobProblem({**job, "plan": {"tp": 4} if model == "gpt3-5b" else {"tp": 1, "dp": 8, "ep": 8}})
    rich = find_planner("adapipe")().plan(problem, SearchBudget())
    problem.memory = 0.45 * problem.forecast(rich.plan).peak_device
    short = find_planner("adapipe")().plan(problem, SearchBudget())
    units = [
        name
        for stage in short.plan["plan"].get("stages", [short.plan["plan"]])
        for scheme in stage["schemes"]
        if scheme["use"] == "memory/adapipe"
        for names in scheme["units"]
        for name in names
    ]
    assert units and short.value > rich.value
    assert 0.8 < short.value / problem.forecast(short.plan).step_time < 1.2


def test_mcap_is_no_fuller_than_an_even_partition() -> None:
    problem = problem_of(layers=16)
    proposal = find_planner("mcap")().plan(problem, SearchBudget())
    even = {**proposal.plan, "plan": {**proposal.plan["plan"], "partition": "even"}}
    assert problem.forecast(proposal.plan).peak_device <= problem.forecast(even).peak_device


def test_varuna_leaves_gpus_idle_and_cuts_layers_unevenly() -> None:
    """On 7 GPUs that two replicas of two stages, or one of five, may use; without memory for all layers on one."""
    job = {"model": {"preset": "gpt3-5b", "layers": 9}, "cluster": {"node": "dgx-h100", "nodes": 1, "gpus": 7}}
    problem = JobProblem({**job, "batch": {"global": 28, "micro": 1}, "plan": {"tp": 1, "dp": 7}})
    plans = [*VarunaPlanner()._space(problem)]
    used = {plan["plan"].get("pp", 1): plan["plan"].get("pp", 1) * plan["plan"]["dp"] for plan in plans}
    assert used == {1: 7, 2: 4, 3: 6, 4: 4, 5: 5, 6: 6, 7: 7}
    assert all(plan.get("cluster", {"gpus": 7})["gpus"] == used[plan["plan"].get("pp", 1)] for plan in plans)
    (four,) = {tuple(plan["plan"]["partition"]) for plan in plans if plan["plan"].get("pp") == 4}
    assert sum(four) == 9 and max(four) == 3
    forecast = problem.forecast(next(plan for plan in plans if plan["plan"].get("pp") == 4))
    assert forecast.fits and forecast.step_time > 0


of_two_kinds = cache(lambda: open_problem(TWO_KINDS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amp", "autopipe", "metis", "slapo"])
def test_the_optima_of_spaces_on_several_kinds_bound_what_is_found(name: str) -> None:
    problem = open_problem({**TWO_KINDS, "model": {"preset": "gpt3-5b", "layers": 4}, "plan": {"tp": 4, "dp": 4}})
    planner, budget = find_planner(name)(), SearchBudget()
    proposal = planner.plan(problem, budget)
    space = planner.find_space_optimum(problem, proposal, budget)
    assert space is not None
    value = problem.forecast(proposal.plan).step_time if space.forecast else proposal.value
    assert 0.6 * value < space.value <= value * (1 + 1e-9)
    if name == "metis":
        assert proposal.proof is not None and proposal.proof.optimal
        cut = planner.find_space_optimum(problem, proposal._replace(proof=None), budget)
        assert cut is not None and 0.8 * value < cut.value <= value


@pytest.mark.parametrize("name", drawn(["amp", "metis", "sailor"], keep=("metis",)))
def test_kinds_of_gpus(name: str) -> None:
    """Plans for both kinds are jobs near their objective; Metis gives the faster kind more."""
    proposal = find_planner(name)().plan(of_two_kinds(), SearchBudget())
    forecast = of_two_kinds().forecast(proposal.plan)
    assert forecast.fits and 0.45 < proposal.value / forecast.step_time < 1.2
    if name == "metis" and "cluster" in proposal.plan and (stages := proposal.plan["plan"].get("stages", [])):
        fast_last = proposal.plan["cluster"]["groups"][-1]["node"] == "dgx-h100"
        ends = stages[0]["layers"], stages[-1]["layers"]
        assert len(stages) >= 2 and (ends[0] == ends[1] or (ends[1] > ends[0]) == fast_last)


@pytest.mark.parametrize("name", drawn(["alpa", "optcnn", "varuna"], keep=("optcnn",)))
def test_planners_of_one_kind_plan_for_several(name: str) -> None:
    """Collectives between kinds take longer than on either."""
    proposal = find_planner(name)().plan(of_two_kinds(), SearchBudget())
    assert 0.5 < proposal.value / of_two_kinds().forecast(proposal.plan).step_time < 1.35


@pytest.mark.slow
def test_planners_of_one_kind_count_the_slowest_of_several() -> None:
    slow, fast = (JobProblem({**TWO_KINDS, "cluster": f"{node}:2"}) for node in ("dgx-a100", "dgx-h100"))
    mixed, axes = of_two_kinds(), {"x": 2, "y": 8}
    assert mixed.memory == min(slow.memory, fast.memory)
    for own, one, other in zip(*(problem.stages()[1:4] for problem in (mixed, slow, fast)), strict=True):
        assert np.array_equal(own, np.maximum(one, other))
    for own, one, other in zip(*(problem.operators(axes).factors for problem in (mixed, slow, fast)), strict=True):
        assert own.scope == one.scope == other.scope
        assert np.array_equal(own.seconds, np.maximum(one.seconds, other.seconds))


@pytest.mark.parametrize("name", ["vgg16", "alexnet"])
def test_graphpipe_on_chains_is_pipedream(name: str) -> None:
    problem = ProfileProblem(f"pipedream-{name}", [NetworkLevel(4, 1.25e9)])
    values = [find_planner(planner)().plan(problem, SearchBudget()).value for planner in ("graphpipe", "pipedream")]
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_branches_of_graphpipe_do_not_count_each_other() -> None:
    graph = LayerGraph("abcde", [(0, 1), (2, 3), (1, 4), (3, 4)], {})
    plan = plan_graph(decompose(graph), 5, lambda nodes, count: float(len(nodes)), lambda *_: True)
    assert plan is not None and (plan.value, plan.depth, len(plan.stages)) == (1.0, 3, 5)
