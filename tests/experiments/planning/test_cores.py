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
from meshcast.experiments.planning.graph import find_contained, piece_totals
from meshcast.experiments.planning.planners.autoddl import descend_table
from meshcast.experiments.planning.planners.automap import search_tree
from meshcast.experiments.planning.planners.flexflow import walk_table
from meshcast.experiments.planning.planners.unity import bisect_weight
from meshcast.experiments.planning.table import Factor, FactorTable, Optimum, PendingFactor, PendingTable
from tests.draws import drawn
from tests.experiments.planning.random_tables import (
    best_by_brute_force,
    draw_graph,
    draw_stages,
    draw_table,
    every_assignment,
    stages_by_brute_force,
    weigh_memory,
)

SEEDS = range(30)


def search_by_tree(table: FactorTable, rollouts: int, seed: int = 0) -> Optimum:
    """A tree search that decides variables in their order and draws the others."""

    def complete(options: dict[str, int], draw: random.Random) -> dict[str, int]:
        return {name: options.get(name, draw.randrange(len(own))) for name, own in table.choices.items()}

    return search_tree(table, rollouts, [*table.choices], complete, seed, table.value)


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_elimination_and_the_integer_program_find_the_optimum(seed: int) -> None:
    table = draw_table(seed)
    best = best_by_brute_force(table)
    found, program = eliminate(table), solve_table(table)
    if math.isinf(best):
        assert found is None and program is None
        return
    assert found is not None and program is not None
    assert found.value == pytest.approx(best, rel=1e-12) and table.value(found.assignment) == pytest.approx(best)
    assert program.value == pytest.approx(best, rel=1e-9) and program.bound == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_the_frontier_is_that_of_brute_force(seed: int) -> None:
    table = draw_table(seed)
    costs = [(table.value(one), table.cost(one).nbytes) for one in every_assignment(table)]
    points = sorted({(value, nbytes) for value, nbytes in costs if math.isfinite(value)}, key=lambda one: one[::-1])
    front: list[tuple[float, float]] = []
    for value, nbytes in points:
        if not front or value < front[-1][0] - 1e-9:
            front.append((value, nbytes))
    found = trace_frontier(table)
    assert [one.nbytes for one in found] == [nbytes for _, nbytes in front]
    assert [one.value for one in found] == pytest.approx([value for value, _ in front])
    for one in found:
        assert table.value(one.assignment) == pytest.approx(one.value)
        assert table.cost(one.assignment).nbytes == pytest.approx(one.nbytes)


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_the_ends_of_the_frontier_and_the_program_within_every_memory(seed: int) -> None:
    table = draw_table(seed)
    front, best = trace_frontier(table), eliminate(table)
    assert bool(front) == (best is not None)
    if best is None:
        return
    assert front[-1].value == pytest.approx(best.value)
    for point in front:
        program = solve_table(table, point.nbytes)
        assert program is not None and program.value == pytest.approx(point.value)
        assert program.value == pytest.approx(best_by_brute_force(table, point.nbytes))
    assert solve_table(table, front[0].nbytes - 0.5) is None


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_random_searches_never_beat_the_optimum_and_come_near(seed: int) -> None:
    table = draw_table(seed, forbidden=0.0)
    best = eliminate(table)
    assert best is not None
    for found in (
        walk_table(table, 4000, seed=seed),
        search_by_tree(table, 1500, seed),
        descend_table(table, restarts=30, seed=seed),
    ):
        assert table.value(found.assignment) == pytest.approx(found.value)
        assert best.value * (1 - 1e-12) <= found.value <= best.value * 1.05


def test_a_walk_leaves_a_start_that_is_not_allowed_or_does_not_fit() -> None:
    cells = np.array([[math.inf, 5.0], [3.0, 9.0]])
    zeros = np.zeros((2, 2))
    table = FactorTable({"a": "xy", "b": "xy"}, [Factor(("a", "b"), cells, zeros, np.array([[0, 1], [8, 2]]) * 1.0)])
    assert walk_table(table, 200, {"a": 0, "b": 0}).value == 3.0
    assert walk_table(table, 200, {"a": 1, "b": 0}, memory=4.0).value == 5.0


def test_a_tree_search_ends_when_it_has_tried_everything() -> None:
    table = draw_table(1, variables=3, forbidden=0.0)
    assert search_by_tree(table, 10_000).visited <= 2 * table.assignments + 3


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_a_bisected_weight_of_memory_fits_and_is_no_better_than_the_program(seed: int) -> None:
    table = draw_table(seed, forbidden=0.0)
    front = trace_frontier(table)
    memory = front[len(front) // 2].nbytes
    gaps = (float(np.ptp(factor.nbytes)) for factor in table.factors)
    memory_alone = 10 * front[0].value / min(gap for gap in gaps if gap > 0)  # [s/byte]
    found = bisect_weight(
        lambda weight: eliminate(weigh_memory(table, weight)),
        lambda one: one is not None and table.cost(one.assignment).nbytes <= memory,
        memory_alone,
        40,
    )
    program = solve_table(table, memory)
    assert found is not None and program is not None
    assert table.value(found.assignment) >= program.value * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_least_objective_with_every_option_is_that_of_brute_force(seed: int) -> None:
    table = draw_table(seed, forbidden=0.3)
    least = {name: np.full(len(options), np.inf) for name, options in table.choices.items()}
    for one in every_assignment(table):
        for name, option in one.items():
            least[name][option] = min(least[name][option], table.value(one))
    for name, found in least_objectives(table).items():
        assert found == pytest.approx(least[name]), name


@pytest.mark.parametrize("seed", range(12))
def test_pruned_options_leave_the_optimum_or_a_bound(seed: int) -> None:
    """Also where a worse objective is known, and where only some factors are priced."""
    table = draw_table(seed)
    best = best_by_brute_force(table)
    if not math.isfinite(best):
        return
    alone = [factor for factor in table.factors if len(factor.scope) == 1]
    pending = [PendingFactor(one.scope, one.take) for one in table.factors if len(one.scope) > 1]
    lazy = PendingTable(table.choices, alone, pending, table.microbatches)
    bounds = [bound_objective(lazy, known, cells) for known in (best, 1.3 * best) for cells in (0, 30, 10**6)]
    for one in bounds:
        assert one.value == pytest.approx(best) if one.exact else one.value <= best * (1 + 1e-9)
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
    with pytest.raises(ValueError, match="leaves v0 no option"):
        table.restrict(lambda name, option: name != "v0")


def test_a_factor_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="must have arrays of shape"):
        FactorTable({"a": (0, 1)}, [Factor(("a",), np.zeros(3), np.zeros(3), np.zeros(3))])


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_stages_are_those_of_brute_force(seed: int) -> None:
    microbatches = (1, 2, 8)[seed % 3]
    table = draw_stages(seed, layers=5, gpus=4)
    best, found = stages_by_brute_force(table, 4, microbatches), plan_stages(table, 4, microbatches)
    assert (found is None) == math.isinf(best)
    if found is not None:
        assert found.value == pytest.approx(best) == pytest.approx(found.bound)
        assert [layer for one in found.stages for layer in one.layers] == [*range(5)]
        assert sum(table.options[one.option].gpus for one in found.stages) == 4


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_stages_inside_nodes_are_those_of_brute_force(seed: int) -> None:
    """Two nodes of 2 GPUs: stages of 2 and of 4 begin with a node; those of 3 fill none."""
    table = draw_stages(seed, layers=4, gpus=4)
    best = math.inf
    for cuts in range(8):
        borders = [0, *(layer + 1 for layer in range(3) if cuts >> layer & 1), 4]
        for options in itertools.product(range(4), repeat=len(borders) - 1):
            place, seconds = 0, []
            for number, option in enumerate(options):
                cell = borders[number], borders[number + 1] - 1, option
                crosses = place // 2 != (place + option) // 2 and (place % 2 or option not in (1, 3))
                fits = table.behind[cell] >= len(options) - 1 - number
                seconds.append(math.inf if crosses or not fits else float(table.seconds[cell]))
                place += option + 1
            if place == 4:
                best = min(best, sum(seconds) + 7 * max(seconds))
    found = plan_stages(table, 4, 8, per_node=2)
    assert (found is None) == math.isinf(best)
    assert found is None or found.value == pytest.approx(best)


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_stages_without_time_have_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = draw_stages(seed, layers=5, gpus=4)
    monkeypatch.setattr(stage_dp, "is_over", lambda: True)
    best, found = stages_by_brute_force(table, 4, 8), plan_stages(table, 4, 8)
    assert (found is None) == math.isinf(best)
    if found is not None:
        assert found.bound <= best * (1 + 1e-9) and best <= found.value * (1 + 1e-9)
        own = [float(table.seconds[one.layers[0], one.layers[-1], one.option]) for one in found.stages]
        assert found.value == pytest.approx(sum(own) + 7 * max(own))


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_ideals_are_all_sets_that_hold_their_predecessors(seed: int) -> None:
    graph = draw_graph(seed)
    rows = {tuple(row) for row in graph.ideals().tolist()}
    every = {
        tuple(bool(bits >> node & 1) for node in range(7))
        for bits in range(2**7)
        if all(not bits >> b & 1 or bits >> a & 1 for a, b in graph.edges)
    }
    assert rows == every


@pytest.mark.parametrize("seed", drawn(SEEDS, keep=3))
def test_pieces_are_those_of_brute_force(seed: int) -> None:
    """Two devices that run a piece alone, or together in half the time and 1 more."""
    graph = draw_graph(seed, nodes=6)
    ideals = graph.ideals()
    load = piece_totals(ideals, graph.figures["forward"])
    loads = {1: load, 2: load / 2 + 1}
    inside = find_contained(ideals)

    def least(ideal: int, devices: int) -> float:
        if ideal == 0:
            return 0.0 if devices == 0 else math.inf
        below = [one for one in range(len(ideals)) if inside[one, ideal]]
        return min(
            (
                max(least(one, devices - uses), load[one, ideal])
                for one in below
                for uses, load in loads.items()
                if uses <= devices
            ),
            default=math.inf,
        )

    def end(devices: int) -> list[LastPiece]:
        return [LastPiece(devices - uses, load, uses) for uses, load in loads.items() if uses <= devices]

    some = PartitionDP(lambda devices: start_costs(len(ideals)), end)
    every = PartitionDP(lambda devices: start_costs(len(ideals), -1 if devices else 0), end)
    value = float(every.costs(3)[-1, 0])
    assert value == pytest.approx(least(len(ideals) - 1, 3)) and some.costs(3)[-1, 0] <= value
    pieces = every.trace(3)
    assert max(loads[piece.option][piece.before, piece.behind] for piece in pieces) == pytest.approx(value)
    assert sum(piece.option for piece in pieces) == 3


@pytest.mark.parametrize("seed", range(6))
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


def test_a_cycle_is_refused() -> None:
    from meshcast.experiments.planning.graph import LayerGraph

    with pytest.raises(ValueError, match="cycle"):
        LayerGraph(["a", "b"], [(0, 1), (1, 0)], {})
    with pytest.raises(ValueError, match="more than 10 ideals"):
        LayerGraph([str(i) for i in range(9)], [], {}).ideals(10)
