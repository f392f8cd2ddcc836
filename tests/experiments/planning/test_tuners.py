"""Unity's rewrites with placement, and Slapo's tuner."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest

from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.slapo import Slapo, SlapoSchedule, walk_grid
from meshcast.experiments.planning.planners.unity import RewriteSearch, Unity
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import ProfileProblem
from meshcast.experiments.planning.table import Factor, FactorTable
from tests.draws import drawn
from tests.experiments.planning.conftest import gpt, problem_of

# ----------------------------------------------------------------------------------------------------- Unity


def draw_layouts(seed: int, operators: int = 4) -> FactorTable:
    """A chain of operators that shard dims p or q over two axes, with a factor of three operators."""
    rng = np.random.default_rng(seed)
    options = tuple((("x", first), ("y", second)) for first, second in product(("", "p", "q"), repeat=2))
    names = [f"v{place}" for place in range(operators)]
    scopes = [(name,) for name in names] + list(pairwise(names)) + [tuple(names[:3])]
    factors = []
    for scope in scopes:
        shape = (len(options),) * len(scope)
        seconds = np.where(rng.random(shape) < (0.1 if len(scope) > 1 else 0), np.inf, rng.uniform(1, 9, shape))
        factors.append(Factor(scope, seconds, np.zeros(shape), rng.uniform(0, 5, shape)))
    return FactorTable(dict.fromkeys(names, options), factors)


@pytest.mark.parametrize("seed", drawn(range(10), keep=5))
def test_rewrites_without_pruning_reach_the_optimum(seed: int) -> None:
    """There are 4^4 graphs: none, p, q, or both for each operator; a rewrite changes one operator or one tensor's."""
    table = draw_layouts(seed)
    walk = RewriteSearch(table, most=10_000, alpha=math.inf)
    assert all(len(parts) == 4 for parts in walk.options)
    best, optimum = eliminate(table), walk.run([walk.graph_of({})])
    assert best is not None and optimum is not None
    assert optimum.value == pytest.approx(best.value, rel=1e-12)
    assert table.value(optimum.assignment) == pytest.approx(optimum.value) and walk.visited <= 4**4
    pruned = RewriteSearch(table).run([walk.graph_of({})])
    assert pruned is not None and pruned.value >= best.value * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_placement_of_a_graph_is_that_of_brute_force(seed: int) -> None:
    table = draw_layouts(seed)
    walk = RewriteSearch(table)
    graph = walk.graph_of({"v0": frozenset("pq"), "v1": frozenset("p"), "v3": frozenset("q")})
    kept = [parts[part] for parts, part in zip(walk.options, graph, strict=True)]
    assert [len(numbers) for numbers in kept] == [2, 3, 1, 3]
    best = min(table.value(dict(zip(table.choices, numbers, strict=True))) for numbers in product(*kept))
    optimum = walk.place(graph)
    assert (optimum is None) == math.isinf(best)
    assert walk.bound(graph) <= best
    if optimum is not None:
        assert optimum.value == pytest.approx(best) and table.value(optimum.assignment) == pytest.approx(best)


def test_rewrites_lead_from_the_whole_model_on_every_gpu_to_the_optimum() -> None:
    table = gpt().operators({"x": 8})
    walk = RewriteSearch(table, most=2500)
    start = walk.place(walk.graph_of({}))
    optimum, best = walk.run([walk.graph_of({})]), eliminate(table)
    assert start is not None and optimum is not None and best is not None
    assert start.value > 5 * best.value and optimum.value == pytest.approx(best.value, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_share_of_memory_finds_a_plan_that_fits(share: float) -> None:
    """Not below the integer program within that memory, and within 8 % of it; none fits into nothing."""
    problem = problem_of()
    table = problem.operators({"x": 8})
    best = eliminate(table)
    assert best is not None
    problem.memory = share * table.cost(best.assignment).nbytes
    optimum = Unity().solve(table, problem, SearchBudget())
    program = solve_table(table, problem.memory)
    assert optimum is not None and program is not None
    assert table.cost(optimum.assignment).nbytes <= problem.memory
    assert program.value * (1 - 1e-9) <= optimum.value <= 1.08 * program.value
    problem.memory = 1.0
    nothing = Unity().solve(table, problem, SearchBudget(steps=400))
    assert nothing is not None and math.isinf(nothing.value)


# ----------------------------------------------------------------------------------------------------- Slapo

EXPLORED = {
    (176, 1.0), (176, 0.92), (176, 0.84), (176, 0.67), (168, 0.84), (168, 0.67), (168, 0.5), (160, 0.67), (160, 0.5),
    (152, 0.67), (152, 0.5), (144, 0.5), (144, 0.34), (136, 0.5), (136, 0.34), (128, 0.5), (128, 0.34),
}  # fmt: skip
"""The points that the authors' tuner measured (`benchmark/plot/autotune.py`)."""


def test_slapo_measures_the_points_of_its_authors_and_finds_their_best() -> None:
    proposal = find_planner("slapo")().plan(ProfileProblem("slapo-batch-recompute"), SearchBudget())
    assert (proposal.plan["batch"], proposal.plan["share"]) == (144, 0.5)
    assert 1 / proposal.value == pytest.approx(130.9)
    points = [tuple(point) for point in proposal.plan["explored"]]
    assert len(points) == proposal.visited == 17 and set(points) == EXPLORED


@pytest.mark.parametrize("largest", [1, 3, 12, 30])
def test_the_walk_bisects_to_the_largest_batch_that_fits(largest: int) -> None:
    """Larger batches and less recomputation are faster, until memory ends: batch x (2 - share) <= largest."""
    batches, shares = [*range(1, 21)], [1.0, 0.5, 0.0]

    def measure(batch: int, share: float) -> float:
        return batch * (2 - share) if batch * (2 - share) <= largest else 0.0

    best, explored = walk_grid(batches, shares, measure, patience=100)
    assert best is not None
    assert best.throughput == max(measure(batch, share) for batch in batches for share in shares)
    first = [point.batch for point in explored if point.throughput]
    assert max(first) == min(20, largest)
    assert walk_grid(batches, shares, lambda batch, share: 0.0)[0] is None


@pytest.mark.slow
def test_slapo_tunes_a_job_by_forecasts() -> None:
    """The best of what it measures, and of a memory in which everything must be recomputed, a plan that recomputes."""
    problem = problem_of()
    proposal = find_planner("slapo")().plan(problem, SearchBudget())
    step = problem.forecast(proposal.plan)
    assert step.fits and proposal.value == pytest.approx(step.step_time)
    for tensor, micro in product((1, 2, 4, 8), (1, 2)):
        plan = {"tp": tensor, "dp": 8 // tensor, "recompute": "full"}
        rival = problem.forecast({"plan": plan, "batch": {"global": 64, "micro": micro}})
        assert not rival.fits or rival.step_time >= proposal.value * (1 - 1e-9)


def test_a_schedule_says_what_slapo_tunes() -> None:
    """Stages, kernels and forbidden combinations: no better than all forecasts of the grid, which the user narrows."""
    problem, budget = problem_of(gpus=4, layers=2), SearchBudget()
    schedule = SlapoSchedule(degrees=(1, 2), stages=(1, 2), replace=(False, True), checkpoint=(1.0, 0.5))
    tuned = Slapo(schedule).plan(problem, budget)
    space = Slapo(schedule).find_space_optimum(problem, tuned, budget)
    assert space is not None and space.forecast and space.value <= tuned.value * (1 + 1e-12) <= 1.1 * space.value
    assert problem.forecast(tuned.plan).step_time == pytest.approx(tuned.value)
    unfused = Slapo(schedule._replace(replace=(False,))).plan(problem, budget)
    assert unfused.plan["framework"] == {"set": {"attention": "unfused"}} and unfused.value > tuned.value

    def only_pipelines(tensor: int, stages: int, fuse: bool | None, replaced: bool | None) -> bool:
        return stages == 2 and tensor == 1

    piped = Slapo(schedule._replace(allows=only_pipelines)).plan(problem, budget)
    assert piped.plan["plan"]["pp"] == 2 and piped.plan["plan"]["tp"] == 1 and piped.value >= space.value
