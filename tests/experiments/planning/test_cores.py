"""The cores agree with each other and with brute force on random instances."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from meshcast.experiments.planning.cores import stage_dp
from meshcast.experiments.planning.cores.elimination import bound_objective, eliminate, least_objectives, trace_frontier
from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.cores.partition_dp import LastPiece, PartitionDP, start_costs
from meshcast.experiments.planning.cores.stage_dp import plan_stages
from meshcast.experiments.planning.graph import LayerGraph, find_contained, piece_totals
from meshcast.experiments.planning.planners.autoddl import Descents
from meshcast.experiments.planning.planners.automap import search_tree
from meshcast.experiments.planning.planners.flexflow import walk_table
from meshcast.experiments.planning.planners.unity import bisect_weight
from meshcast.experiments.planning.stages import StageOption
from meshcast.experiments.planning.table import Factor, FactorTable, Optimum, PendingFactor, PendingTable
from tests.draws import drawn
from tests.experiments.planning.random_tables import (
    best_by_brute_force,
    draw_graph,
    draw_stages,
    draw_table,
    every_assignment,
    every_pipeline,
    pipeline_value,
    stages_by_brute_force,
    weigh_memory,
)

SEEDS = drawn(range(30), keep=5)
any_seed = pytest.mark.parametrize("seed", SEEDS)


def search_by_tree(table: FactorTable, rollouts: int, seed: int = 0) -> Optimum:
    """A tree search that decides variables in their order and draws the others."""

    def complete(options: dict[str, int], draw: random.Random) -> dict[str, int]:
        return {name: options.get(name, draw.randrange(len(values))) for name, values in table.choices.items()}

    return search_tree(table, rollouts, [*table.choices], complete, seed, table.value)


def descend(table: FactorTable, seed: int) -> Optimum:
    """Thirty descents over a table of which every second factor is priced on demand."""
    lazy = [PendingFactor(factor.scope, factor.take) for factor in table.factors[::2]]
    descents = Descents(PendingTable(table.choices, table.factors[1::2], lazy, table.microbatches), seed)
    for _ in range(30):
        descents.run()
    return Optimum(descents.best.state, descents.best.rank, descents.visited)


@any_seed
def test_elimination_and_the_integer_program_find_the_optimum(seed: int) -> None:
    table = draw_table(seed)
    best, optimum, program = best_by_brute_force(table), eliminate(table), solve_table(table)
    assert (optimum is None) == (program is None) == math.isinf(best)
    if optimum is not None and program is not None:
        assert optimum.value == pytest.approx(best, rel=1e-12) == table.value(optimum.assignment)
        assert program.value == pytest.approx(best, rel=1e-9) and program.bound == pytest.approx(best, rel=1e-6)


@any_seed
def test_the_frontier_is_that_of_brute_force_and_of_the_program(seed: int) -> None:
    table = draw_table(seed)
    costs = [(table.cost(options).nbytes, table.value(options)) for options in every_assignment(table)]
    front = list[tuple[float, float]]()
    for nbytes, value in sorted({cost for cost in costs if math.isfinite(cost[1])}):
        if not front or value < front[-1][1] - 1e-9:
            front.append((nbytes, value))
    points, best = trace_frontier(table), eliminate(table)
    assert [point.nbytes for point in points] == [nbytes for nbytes, _ in front]
    assert [point.value for point in points] == pytest.approx([value for _, value in front])
    assert bool(points) == (best is not None)
    for point in points:
        assert table.value(point.assignment) == pytest.approx(point.value)
        assert table.cost(point.assignment).nbytes == pytest.approx(point.nbytes)
        program = solve_table(table, point.nbytes)
        assert program is not None and program.value == pytest.approx(point.value)
    if best is not None:
        assert points[-1].value == pytest.approx(best.value)
        assert solve_table(table, points[0].nbytes - 0.5) is None


@pytest.mark.parametrize("seed", drawn(range(30), keep=8))
def test_random_searches_never_beat_the_optimum_and_come_near(seed: int) -> None:
    table = draw_table(seed, forbidden=0.0)
    best = eliminate(table)
    assert best is not None
    for optimum in (
        walk_table(table, 4000, seed=seed),
        search_by_tree(table, 1500, seed),
        descend(table, seed),
    ):
        assert table.value(optimum.assignment) == pytest.approx(optimum.value)
        assert best.value * (1 - 1e-12) <= optimum.value <= best.value * 1.05


def test_a_walk_leaves_a_start_that_is_not_allowed_or_does_not_fit() -> None:
    cells, zeros = np.array([[math.inf, 5.0], [3.0, 9.0]]), np.zeros((2, 2))
    table = FactorTable({"a": "xy", "b": "xy"}, [Factor(("a", "b"), cells, zeros, np.array([[0, 1], [8, 2]]) * 1.0)])
    assert walk_table(table, 200, {"a": 0, "b": 0}).value == 3.0
    assert walk_table(table, 200, {"a": 1, "b": 0}, memory=4.0).value == 5.0


def test_a_tree_search_ends_when_it_has_tried_everything() -> None:
    table = draw_table(1, variables=3, forbidden=0.0)
    assert search_by_tree(table, 10_000).visited <= 2 * table.assignments + 3


@any_seed
def test_a_bisected_weight_of_memory_fits_and_is_no_better_than_the_program(seed: int) -> None:
    table = draw_table(seed, forbidden=0.0)
    front = trace_frontier(table)
    memory = front[len(front) // 2].nbytes
    gaps = (float(np.ptp(factor.nbytes)) for factor in table.factors)
    memory_alone = 10 * front[0].value / min(gap for gap in gaps if gap > 0)  # [s/byte]
    optimum = bisect_weight(
        lambda weight: eliminate(weigh_memory(table, weight)),
        lambda found: found is not None and table.cost(found.assignment).nbytes <= memory,
        memory_alone,
        40,
    )
    program = solve_table(table, memory)
    assert optimum is not None and program is not None
    assert table.value(optimum.assignment) >= program.value * (1 - 1e-9)


@any_seed
def test_the_least_objective_with_every_option_is_that_of_brute_force(seed: int) -> None:
    table = draw_table(seed, forbidden=0.3)
    least = {name: np.full(len(options), np.inf) for name, options in table.choices.items()}
    for assignment in every_assignment(table):
        for name, option in assignment.items():
            least[name][option] = min(least[name][option], table.value(assignment))
    for name, values in least_objectives(table).items():
        assert values == pytest.approx(least[name]), name


@any_seed
def test_pruned_options_leave_the_optimum_or_a_bound(seed: int) -> None:
    """Also where a worse objective is known, and where only some factors are priced."""
    table = draw_table(seed)
    best = best_by_brute_force(table)
    if not math.isfinite(best):
        return
    alone = [factor for factor in table.factors if len(factor.scope) == 1]
    pending = [PendingFactor(factor.scope, factor.take) for factor in table.factors if len(factor.scope) > 1]
    lazy = PendingTable(table.choices, alone, pending, table.microbatches)
    bounds = [bound_objective(lazy, known, cells) for known in (best, 1.3 * best) for cells in (0, 30, 10**6)]
    for bound in bounds:
        assert bound.value == pytest.approx(best) if bound.exact else bound.value <= best * (1 + 1e-9)
    assert bounds[2].exact and bounds[5].exact and not bounds[0].exact
    assert bounds[0].value <= bounds[1].value * (1 + 1e-9)
    with pytest.raises(ValueError, match="is part of an assignment"):
        bound_objective(lazy, 0.9 * best, 10**6)


def test_a_restriction_keeps_the_costs_of_what_is_left() -> None:
    table = draw_table(3, forbidden=0.0)
    smaller = table.restrict(lambda name, option: name != "v1" or option == 0)
    assert len(smaller.choices["v1"]) == 1
    best, restricted = eliminate(table), eliminate(smaller)
    assert best is not None and restricted is not None and restricted.value >= best.value
    assert smaller.value(restricted.assignment) == pytest.approx(table.value(restricted.assignment))


def test_tables_and_graphs_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="leaves v0 no option"):
        draw_table(3).restrict(lambda name, option: name != "v0")
    with pytest.raises(ValueError, match="must have arrays of shape"):
        FactorTable({"a": (0, 1)}, [Factor(("a",), np.zeros(3), np.zeros(3), np.zeros(3))])
    with pytest.raises(ValueError, match="cycle"):
        LayerGraph(["a", "b"], [(0, 1), (1, 0)], {})
    with pytest.raises(ValueError, match="more than 10 ideals"):
        LayerGraph([str(i) for i in range(9)], [], {}).ideals(10)


# ---------------------------------------------------------------------------------------------- stages


@any_seed
def test_stages_are_those_of_brute_force(seed: int) -> None:
    microbatches = (1, 2, 8)[seed % 3]
    table = draw_stages(seed, layers=5, gpus=4)
    best, plan = stages_by_brute_force(table, 4, microbatches), plan_stages(table, 4, microbatches)
    assert (plan is None) == math.isinf(best)
    if plan is not None:
        assert plan.value == pytest.approx(best) == pytest.approx(plan.bound)
        assert [layer for stage in plan.stages for layer in stage.layers] == [*range(5)]
        assert sum(table.options[stage.option].gpus for stage in plan.stages) == 4


@any_seed
def test_stages_inside_nodes_are_those_of_brute_force(seed: int) -> None:
    """Two nodes of 2 GPUs: stages of 2 and of 4 begin with a node; those of 3 fill none."""
    table, values = draw_stages(seed, layers=4, gpus=4), [math.inf]
    for cells in every_pipeline(table, 4):
        sizes = [option + 1 for _, _, option in cells]
        places = itertools.accumulate([0, *sizes[:-1]])
        crosses = (a // 2 != (a + size - 1) // 2 and (a % 2 or size % 2) for a, size in zip(places, sizes, strict=True))
        values += [] if any(crosses) else [pipeline_value(table, cells, 8)]
    plan = plan_stages(table, 4, 8, per_node=2)
    assert (plan is None) == math.isinf(min(values))
    assert plan is None or plan.value == pytest.approx(min(values))


@any_seed
def test_stages_in_their_places_are_those_of_brute_force(seed: int) -> None:
    """Options of the first kind on the first two GPUs, those of the second on the other three."""
    table = draw_stages(seed, layers=4, gpus=4)
    table = table._replace(options=tuple(StageOption(size, {}) for size in (1, 1, 2, 2)))
    places, values = [range(2), range(2, 5), range(2), range(2, 5)], [math.inf]
    for cells in every_pipeline(table, 5):
        ends = [*itertools.accumulate(table.options[option].gpus for _, _, option in cells)]
        inside = (
            places[option].start <= first and end <= places[option].stop
            for (_, _, option), first, end in zip(cells, [0, *ends], ends, strict=False)
        )
        values += [pipeline_value(table, cells, 7)] if all(inside) else []
    plan = plan_stages(table, 5, 7, places=places)
    assert (plan is None) == math.isinf(min(values))
    assert plan is None or plan.value == pytest.approx(min(values)) == pytest.approx(plan.bound)


@any_seed
def test_stages_without_time_have_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = draw_stages(seed, layers=5, gpus=4)
    monkeypatch.setattr(stage_dp, "is_over", lambda: True)
    best, plan = stages_by_brute_force(table, 4, 8), plan_stages(table, 4, 8)
    assert (plan is None) == math.isinf(best)
    if plan is not None:
        assert plan.bound <= best * (1 + 1e-9) and best <= plan.value * (1 + 1e-9)
        cells = [(stage.layers[0], stage.layers[-1], stage.option) for stage in plan.stages]
        assert plan.value == pytest.approx(pipeline_value(table, cells, 8))


# ---------------------------------------------------------------------------------------------- pieces of graphs


@any_seed
def test_ideals_are_all_sets_that_hold_their_predecessors(seed: int) -> None:
    graph = draw_graph(seed)
    every = {
        tuple(bool(bits >> node & 1) for node in range(7))
        for bits in range(2**7)
        if all(not bits >> b & 1 or bits >> a & 1 for a, b in graph.edges)
    }
    assert {tuple(row) for row in graph.ideals().tolist()} == every


@any_seed
def test_pieces_are_those_of_brute_force(seed: int) -> None:
    """Two devices that run a piece alone, or together in half the time and 1 more."""
    graph = draw_graph(seed, nodes=6)
    ideals = graph.ideals()
    load = piece_totals(ideals, graph.figures["forward"])
    loads, inside = {1: load, 2: load / 2 + 1}, find_contained(ideals)

    def least(ideal: int, devices: int) -> float:
        if ideal == 0:
            return 0.0 if devices == 0 else math.inf
        before = [other for other in range(len(ideals)) if inside[other, ideal]]
        ways = [(uses, load) for uses, load in loads.items() if uses <= devices]
        values = (max(least(other, devices - uses), load[other, ideal]) for other in before for uses, load in ways)
        return min(values, default=math.inf)

    def end(devices: int) -> list[LastPiece]:
        return [LastPiece(devices - uses, load, uses) for uses, load in loads.items() if uses <= devices]

    some = PartitionDP(lambda devices: start_costs(len(ideals)), end)
    every = PartitionDP(lambda devices: start_costs(len(ideals), -1 if devices else 0), end)
    value = float(every.costs(3)[-1, 0])
    assert value == pytest.approx(least(len(ideals) - 1, 3)) and some.costs(3)[-1, 0] <= value
    pieces = every.trace(3)
    assert max(loads[piece.option][piece.before, piece.behind] for piece in pieces) == pytest.approx(value)
    assert sum(piece.option for piece in pieces) == 3


@pytest.mark.parametrize("seed", drawn(range(6), keep=2))
@pytest.mark.parametrize("combine", [np.add, np.maximum])
def test_counted_resources_are_named_ones(seed: int, combine: np.ufunc) -> None:
    """Also where arrays are joined in blocks, and pieces may follow some counts only."""
    rng, states, units = np.random.default_rng(seed), 40, 60
    costs = [np.where(np.tri(states, k=-1).T > 0, rng.integers(1, 9, (states, states)), np.inf) for _ in range(2)]
    counts, allowed = (1, 3), rng.random(units + 1) < 0.7

    def begin(stages: int) -> np.ndarray:
        first = np.full((states, units + 1), np.inf)
        first[0, 0] = np.inf if stages else 0.0
        return first

    def end(stages: int) -> list[LastPiece]:
        kept = [allowed[: units + 1 - count] for count in counts]
        return [LastPiece(stages - 1, costs[way], way, counts[way], kept[way]) for way in range(2) if stages]

    def end_named(used: tuple[int, int]) -> list[LastPiece]:
        before = [(used[0] - 1, used[1] - count) for count in counts]
        return [LastPiece(key, costs[way], way) for way, key in enumerate(before) if min(key) >= 0 and allowed[key[1]]]

    counted = PartitionDP(begin, end, combine)
    named = PartitionDP(lambda used: start_costs(states, -1 if any(used) else 0), end_named, combine)
    for units_used in (25, 30):
        value = counted.costs(15)[-1, units_used]
        assert value == named.costs((15, units_used))[-1, 0]
        if np.isfinite(value):
            assert counted.trace(15, units=units_used) == named.trace((15, units_used))
