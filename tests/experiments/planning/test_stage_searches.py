"""Planners of stages besides Alpa and DAPPLE: nnScaler, AutoPipe, Aceso."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.cores.local_search import Shape, StageState
from meshcast.experiments.planning.cores.stage_dp import balance_stages, plan_stages
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.aceso import LayerWalk
from meshcast.experiments.planning.planners.autopipe import (
    AutoPipe,
    chain_table,
    move_blocks,
    play_1f1b,
    play_stages,
    slice_microbatches,
)
from meshcast.experiments.planning.planners.nnscaler import NnScaler
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import ProfileProblem
from meshcast.experiments.planning.stages import PlannedStage, StageOption, StageTable
from tests.draws import drawn
from tests.experiments.planning.conftest import gpt, problem_of, propose
from tests.experiments.planning.random_tables import (
    GraphProblem,
    cut_layers,
    draw_graph,
    draw_stages,
    every_pipeline,
    has_memory,
    pipeline_value,
)
from tests.strategies import EVERY_EXAMPLE

# -------------------------------------------------------------------------------------------------- nnScaler


@pytest.mark.parametrize("seed", drawn(range(20), keep=3))
def test_nnscalers_stages_are_those_of_brute_force(seed: int) -> None:
    microbatches = (1, 4, 16)[seed % 3]
    planner = NnScaler(degrees=(1, 2, 4))
    whole = draw_stages(seed, layers=5, gpus=4)
    table = planner.narrow(whole, 4, microbatches)
    assert [option.gpus for option in table.options] == [1, 2, 4]
    most = min(4, planner.most_stages(microbatches))
    values = [
        (microbatches - 1 + len(cells)) * max(float(table.seconds[cell]) for cell in cells)
        for cells in every_pipeline(table, 4)
        if len(cells) <= most
    ]
    best, plan = min(values, default=math.inf), balance_stages(table, 4, microbatches, most)
    assert (plan is None) == math.isinf(best)
    if plan is not None:
        assert plan.value == pytest.approx(best) and len(plan.stages) <= most
        assert [layer for stage in plan.stages for layer in stage.layers] == [*range(5)]


def test_the_defaults_of_nnscaler_bound_stages_and_their_forward_passes() -> None:
    """A fifth of bubbles at most: (s - 1) / (s - 1 + m) <= 0.2; a forward pass of half to twice its share."""
    planner = NnScaler()
    assert [planner.most_stages(count) for count in (1, 4, 8, 64)] == [1, 2, 3, 17]
    table = planner.narrow(gpt().stages(), 8, gpt().microbatches)
    for number, option in enumerate(table.options):
        kept = np.isfinite(table.seconds[:, :, number])
        if option.gpus == 8:
            assert kept[0, -1] and not kept[0, 0]
        if option.gpus == 1:
            assert not kept[0, -1]


def test_one_stage_of_nnscaler_is_an_integer_program_under_constraints() -> None:
    """Without constraints no worse than the one-axis program; a constraint leaves a smaller space."""
    free = propose("nnscaler")
    program = solve_table(gpt().operators({"x": 8}), gpt().memory)
    assert program is not None and free.value <= program.value * (1 + 1e-9)
    planner = NnScaler({"up": {"f"}, "qkv": {"a"}})
    bound = planner.plan(gpt(), SearchBudget())
    assert bound.value > free.value
    (scheme,) = bound.plan["plan"]["schemes"]
    divide = scheme["tables"][0]["divide"]
    assert divide["up"] in ({"x": "f"}, {"x": None}) and divide["qkv"] in ({"x": "a"}, {"x": None})
    assert not any(planner.allows_stage(option) for option in gpt().stages().options if option.plan["dp"] > 1)
    table = gpt().operators({"x": 8})
    assert table.restrict(planner.allows).assignments < table.assignments  # type: ignore[arg-type]


def test_a_pipeline_wins_for_nnscaler_where_operators_may_not_be_split() -> None:
    problem = problem_of(gpus=2, **{"global": 64, "micro": 2})
    names = [name for name in problem.operators({"x": 2}).choices if name != "stream"]
    planner = NnScaler(dict.fromkeys([*names, "stream"], ()))
    proposal = planner.plan(problem, SearchBudget())
    stages = proposal.plan["plan"]["stages"]
    assert [(stage["tp"], stage["dp"]) for stage in stages] == [(1, 1)] * 2
    assert problem.forecast(proposal.plan).fits
    assert proposal.value == pytest.approx(problem.forecast(proposal.plan).step_time, rel=0.15)


# -------------------------------------------------------------------------------------------------- AutoPipe


def play_borders(table: StageTable, borders: list[int], microbatches: int) -> float:
    """Seconds of the simulated step of stages between borders."""
    stages = [StageState(first, stop, Shape(1, 1, 1)) for first, stop in pairwise(borders)]
    return play_stages(table, stages, microbatches).seconds


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (4, 8), (4, 2), (6, 6)])
def test_the_step_of_equal_stages_is_that_of_1f1b(stages: int, microbatches: int) -> None:
    played = play_1f1b([1.0] * stages, [2.0] * stages, microbatches)
    assert played.seconds == pytest.approx(3.0 * (stages - 1 + microbatches))
    assert sum(played.critical) == pytest.approx(played.seconds)


def test_a_slow_stage_is_the_master_and_bounds_the_step() -> None:
    """Its passes, two forward passes on the way to it and two backward passes on the way back."""
    played = play_1f1b([1.0, 1.0, 4.0, 1.0], [2.0, 2.0, 8.0, 2.0], 16)
    assert played.master == 2
    assert played.seconds == pytest.approx(16 * 12 + 2 + 4)


@pytest.mark.parametrize("seed", drawn(range(24), keep=6))
def test_moves_end_near_the_best_of_all_partitions(seed: int) -> None:
    """Blocks of attention and of feed-forward layers, of different times, at the price of the simulated step."""
    forward = np.random.default_rng(seed).uniform(1, 4, 10)
    table = chain_table(forward, 2 * forward)
    balanced, moved = balance_stages(table, 4, 8), move_blocks(table, 4, 8)
    assert balanced is not None and moved is not None
    best = min(play_borders(table, borders, 8) for borders in cut_layers(10, 4))
    start = play_borders(table, [0, *(stage.layers.stop for stage in balanced.stages)], 8)
    assert best * (1 - 1e-12) <= moved.value <= min(start, 1.05 * best)
    assert [stage.layers.stop for stage in moved.stages][-1] == 10


def test_the_master_stage_is_not_always_the_slowest() -> None:
    """With few micro-batches the way back from the last stage counts: a move improves on the balanced partition."""
    improved, seeds = 0, 24 if EVERY_EXAMPLE else 12
    for seed in range(seeds):
        forward = np.random.default_rng(seed).uniform(1, 4, 10)
        table = chain_table(forward, 2 * forward)
        balanced, moved = balance_stages(table, 4, 4), move_blocks(table, 4, 4)
        assert balanced is not None and moved is not None
        start = play_borders(table, [0, *(stage.layers.stop for stage in balanced.stages)], 4)
        improved += moved.value < start * (1 - 1e-9)
    assert improved >= 5 / 24 * seeds


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_slices_halve_the_start_of_equal_stages(depth: int) -> None:
    """The last stage begins after half of the forward passes before it, and the step ends as much earlier."""
    forward, both = [1.0] * depth, [3.0] * depth
    whole = play_1f1b(forward, [2.0] * depth, 2 * depth)
    sliced, step = slice_microbatches(forward, both, 2 * depth)
    assert whole.startup == depth - 1 and step.startup == (depth - 1) / 2 and 1 <= sliced <= depth
    assert step.seconds == pytest.approx(whole.seconds - (depth - 1) / 2)
    fewer = play_1f1b(forward, [2.0] * depth, 2 * depth, sliced - 1)
    assert fewer.seconds > step.seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", drawn(range(12), keep=4))
def test_slices_never_lengthen_a_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forward = rng.uniform(1, 3, 5).tolist()
    both = [3 * seconds for seconds in forward]
    sliced, step = slice_microbatches(forward, both, 8)
    steps = [play_1f1b(forward, [2 * seconds for seconds in forward], 8, count).seconds for count in range(6)]
    assert steps[sliced] == step.seconds == pytest.approx(min(steps), rel=1e-12) and step.seconds <= steps[0]


def test_blocks_of_a_chain_are_planned() -> None:
    problem = GraphProblem(draw_graph(1, chain=True), 3)
    problem.settings["microbatches"] = 8
    proposal = AutoPipe().plan(problem, SearchBudget())
    assert [node for stage in proposal.plan["stages"] for node in stage] == [*range(7)] and proposal.not_executable
    vgg = AutoPipe().plan(ProfileProblem("pipedream-vgg16", gpus=4, microbatches=8), SearchBudget())
    assert len(vgg.plan["stages"]) == 4


def test_the_simulated_step_of_a_job_is_near_the_engines() -> None:
    proposal = find_planner("autopipe")().plan(gpt(), SearchBudget())
    assert proposal.value == pytest.approx(gpt().forecast(proposal.plan).step_time, rel=0.1)
    table = gpt().stages()
    number = [option.plan for option in table.options].index({"tp": 1, "dp": 4, "recompute": "none"})
    halves = table.take([number])
    plan = move_blocks(halves, 8, gpt().microbatches)
    assert plan is not None and len(plan.stages) == 2
    stages = tuple(PlannedStage(stage.layers, 0) for stage in plan.stages)
    assert plan.value == pytest.approx(gpt().forecast(gpt().stage_plan(halves, stages)).step_time, rel=0.15)


# ----------------------------------------------------------------------------------------------------- Aceso


@pytest.mark.parametrize("seed", drawn(range(20), keep=5))
def test_the_walk_reaches_or_nears_the_optimum_of_alpas_dynamic_program(seed: int) -> None:
    """Stages of one or two of eight GPUs, so of four to eight; their objective is the same."""
    microbatches = (4, 16)[seed % 2]
    table = draw_stages(seed, layers=8, gpus=2)
    best, walk = plan_stages(table, 8, microbatches), LayerWalk(table, 8, microbatches, 1000)
    state = walk.run()
    assert (state is None) == (best is None)
    if state is None or best is None:
        return
    value, stages = walk.price(state).value, walk.list_stages(state)
    assert best.value * (1 - 1e-12) <= value <= 1.02 * best.value
    cells = [(stage.layers[0], stage.layers[-1], stage.option) for stage in stages]
    assert value == pytest.approx(pipeline_value(table, cells, microbatches)) and has_memory(table, cells)
    assert sum(table.options[stage.option].gpus for stage in stages) == 8
    assert [layer for stage in stages for layer in stage.layers] == [*range(8)]


@pytest.mark.slow
def test_the_walk_leaves_a_start_far_from_the_optimum() -> None:
    """From balanced plans up to 1.6 times the optimum, and from ones that do not fit."""
    improved = rescued = 0
    for seed in range(20):
        table = draw_stages(seed, layers=8, gpus=2)
        walk = LayerWalk(table, 8, 4, 1000)
        starts = [walk.price(start) for number in range(1, 9) if (start := walk.start(number)) is not None]
        fitting = [priced.value for priced in starts if not max(priced.lacking)]
        state = walk.run()
        assert state is not None
        improved += bool(fitting) and walk.price(state).value < 0.9 * min(fitting)
        rescued += not fitting
    assert improved >= 5 and rescued >= 2


def two_shapes(seconds: float, recompute: float) -> StageTable:
    """Six layers on one GPU, or on two as replicas or by tensor parallelism, which is slower but needs less memory."""
    shapes = [(1, 1, "none"), (1, 1, "full"), (1, 2, "none"), (2, 1, "none")]
    options = tuple(StageOption(t * d, {"tp": t, "dp": d, "recompute": again}) for t, d, again in shapes)
    first, last = np.indices((6, 6))
    layers = np.where(first <= last, last - first + 1.0, np.inf)
    times = np.stack(
        [layers * seconds, layers * (seconds + recompute), layers * seconds / 2, layers * seconds / 1.6], -1
    )
    behind = np.stack([3 - layers, 6 - layers, 4 - layers, 6 - layers], -1)
    behind = np.where(np.isfinite(behind), np.maximum(behind, -1), -1).astype(int)
    return StageTable(options, times, times / 3, 0 * behind, behind)


def test_groups_follow_what_makes_a_stage_slow_and_primitives_trade_what_they_say() -> None:
    walk = LayerWalk(two_shapes(1.0, 2.0), 4, 8, 100)
    one, two, split = Shape(1, 1, 1), Shape(2, 1, 2), Shape(2, 2, 1)
    heavy = (StageState(0, 3, one), StageState(3, 4, one), StageState(4, 6, two))
    assert walk.price(heavy).options == (1, 0, 2)  # only the first must recompute
    names = [[primitive.name for primitive in group] for group in walk.groups(heavy, 0)]
    assert sorted(name for group in names for name in group) == sorted(primitive.name for primitive in walk.primitives)
    assert names[0] == ["move layers", "more replicas", "more tensor parallelism", "tensor parallelism for replicas"]
    by_name = {primitive.name: primitive for primitive in walk.primitives}
    (grown,) = by_name["more tensor parallelism"].apply(heavy, 0)
    assert [stage.shape for stage in grown] == [split, one, one]
    (traded,) = by_name["tensor parallelism for replicas"].apply(heavy, 2)
    assert traded[2].shape == split
    moved = [*by_name["move layers"].apply(heavy, 0)]
    assert all(stages[0].stop < 3 and stages[-1].stop == 6 for stages in moved) and moved
    assert walk.start(8) is None


@pytest.mark.slow
def test_aceso_finds_what_the_dynamic_program_finds_on_a_job() -> None:
    problem = problem_of(gpus=8, layers=4)
    best = plan_stages(problem.stages(), 8, problem.microbatches)
    proposal = find_planner("aceso")().plan(problem, SearchBudget())
    assert best is not None and best.value * (1 - 1e-12) <= proposal.value <= 1.02 * best.value
