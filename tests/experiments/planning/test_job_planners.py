"""Planners at the prices of a job: equivalences, proofs, and plans that the engine plays."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest

from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.level_planner import SpaceRule, group_levels
from meshcast.experiments.planning.planner import find_planner, planner_names
from meshcast.experiments.planning.planners.autoddl import AutoDDL
from meshcast.experiments.planning.planners.dapple import LatencyBound, PrefixSearch, pipeline_latency
from meshcast.experiments.planning.planners.hypar import HyPar
from meshcast.experiments.planning.planners.tensoropt import TensorOpt
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.stage_layouts import StageOperators
from meshcast.experiments.planning.problem import SearchBudget, UnknownPart, allow_all
from meshcast.experiments.planning.stages import PlannedStage, StageOption, StageTable
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.experiments.planning.conftest import gpt, problem_of, propose
from tests.experiments.planning.random_tables import draw_stages, every_assignment, every_pipeline, weigh_memory

JOB_PLANNERS = [name for name in planner_names() if "ours" in find_planner(name).modes]


PLAYED = ("alpa-intra", "autoddl", "flexflow", "gspmd", "hypar", "mcap", "optcnn", "tofu")
"""A planner of each kind: intervals of stages, searches without a proof, annotations, levels, bytes, eliminations."""


@pytest.mark.parametrize("name", drawn(JOB_PLANNERS, keep=PLAYED))
def test_a_plan_is_a_job_that_the_engine_plays(name: str) -> None:
    proposal = propose(name)
    assert not proposal.not_executable and proposal.visited > 0
    assert load_job(gpt().job_of(proposal.plan)).cluster.gpus == 8
    forecast = gpt().forecast(proposal.plan)
    expected = forecast.peak_allocated if find_planner(name).unit == "bytes" else forecast.step_time
    assert forecast.fits and 0.8 < proposal.value / expected < 1.1
    assert proposal.proof is None or proposal.proof.gap >= 0


@pytest.mark.parametrize("name", planner_names())
def test_a_planner_states_its_paper_and_its_space(name: str) -> None:
    planner = find_planner(name)
    assert planner.paper.year >= 2016 and planner.restrictions and {*planner.modes} <= {"paper", "ours"}


def test_the_program_the_elimination_and_brute_force_agree() -> None:
    """On the operators of an MLP and of attention, all others as in the optimum."""
    table = gpt().operators({"x": 8})
    best = eliminate(table)
    assert best is not None
    program = solve_table(table)
    assert program is not None and program.value == pytest.approx(best.value, rel=1e-7)
    free = ("qkv", "core", "proj", "up", "act", "down")
    fixed = table.restrict(lambda name, option: name in free or option == table.choices[name][best.assignment[name]])
    least = min(fixed.value(assignment) for assignment in every_assignment(fixed))
    assert least == pytest.approx(best.value, rel=1e-12)


def test_the_program_within_a_memory_is_on_the_frontier() -> None:
    front = TensorOpt().frontier(gpt())
    table = gpt().operators({"x": 8})
    assert len(front) > 5
    for point in front[:: len(front) // 4]:
        program = solve_table(table, point.nbytes * (1 + 1e-6))
        assert program is not None and program.value == pytest.approx(point.value, rel=1e-5)


def test_the_ends_of_the_frontier() -> None:
    front = TensorOpt().frontier(gpt())
    assert front[-1].value == pytest.approx(propose("optcnn").value, rel=1e-12)
    lightest = eliminate(weigh_memory(gpt().operators({"x": 8}), 1.0))
    assert lightest is not None
    assert gpt().operators({"x": 8}).cost(lightest.assignment).nbytes == pytest.approx(front[0].nbytes, rel=1e-6)


def test_alpa_tries_every_mesh_and_is_never_worse_than_optcnn() -> None:
    assert propose("alpa-intra").value <= propose("optcnn").value * (1 + 1e-6)
    proof = propose("alpa-intra").proof
    assert proof is not None and proof.optimal


@pytest.mark.parametrize("name", ["automap", "autoddl"])
def test_searches_without_a_proof_come_near_the_optimum(name: str) -> None:
    best = min(propose(other).value for other in ("optcnn", "alpa-intra"))
    assert propose(name).proof is None and best * (1 - 1e-9) <= propose(name).value <= best * 1.05


def test_layouts_of_stages_are_optimal_for_every_number_of_layers() -> None:
    """The few programs of `StageOperators.layouts` leave out no better layout, with and without the model's ends."""
    problem, axes = problem_of(gpus=4, layers=6), {"x": 2, "y": 2}
    plan = problem.resolve(problem._annotate_axes(axes, [{"divide": {"all": None}}], {}))
    operators = StageOperators(plan, tuple(axes), problem.shared, problem.microbatches, allow_all)
    layouts = operators.layouts(problem.memory)
    assert 1 <= len(layouts) <= 12
    for layers, begin, end in product((1, 2, 4, 6), (False, True), (False, True)):
        table = operators.table(layers, begin, end)
        best = eliminate(table)
        values = [
            table.value({name: table.choices[name].index(layout[name]) for name in table.choices}) for layout in layouts
        ]
        assert best is not None and min(values) == pytest.approx(best.value, rel=1e-9)
    whole = eliminate(problem.operators(axes))
    assert whole is not None
    assert eliminate(operators.table(6, True, True)).value == pytest.approx(whole.value, rel=1e-3)  # type: ignore[union-attr]


def test_stages_of_layouts_of_their_own_are_played() -> None:
    """Two stages of two GPUs, one with the layouts of a program, one with Megatron's: a job near its objective."""
    problem = problem_of(gpus=4, layers=6)
    layouts = problem.layout_stages()
    assert layouts is not None
    table = problem.stages().join(layouts)
    own = next(n for n, option in enumerate(table.options) if option.gpus == 2 and "schemes" in option.plan)
    megatron = [option.plan for option in table.options].index({"tp": 2, "dp": 1, "recompute": "none"})
    cells = [(0, 2, own), (3, 5, megatron)]
    changes = problem.stage_plan(table, (PlannedStage(range(3), own), PlannedStage(range(3, 6), megatron)))
    forecast = problem.forecast(changes)
    seconds = [float(table.seconds[cell]) for cell in cells]
    once = max(float(table.once[cell]) for cell in cells)
    value = sum(seconds) + (problem.microbatches - 1) * max(seconds) + once
    assert forecast.step_time == pytest.approx(value, rel=0.12)
    assert forecast.fits and all(table.behind[cell] >= 0 for cell in cells)


@pytest.mark.parametrize("name", ["alpa", "nnscaler"])
def test_layouts_of_their_own_make_no_plan_worse(name: str) -> None:
    class Stages(JobProblem):
        layout_stages = None  # type: ignore[assignment]

    job = {"model": {"preset": "gpt3-5b", "layers": 4}, "cluster": {"node": "dgx-a100", "nodes": 1, "gpus": 4}}
    job |= {"batch": {"global": 64, "micro": 8}, "plan": {"tp": 2, "dp": 2}}
    plain, free = (find_planner(name)().plan(kind(job), SearchBudget()) for kind in (Stages, JobProblem))
    assert free.value <= plain.value * (1 + 1e-9)


def test_a_level_of_hypar_is_the_best_of_brute_force() -> None:
    """Of the operators with weights; all others as HyPar has chosen them."""
    problem = problem_of(gpus=2)
    table = problem.operators({"level0": 2}, HyPar().allows)
    best = eliminate(table)
    assert best is not None
    weighted = ("qkv", "proj", "up", "down")
    values = [
        table.value({**best.assignment, **dict(zip(weighted, choice, strict=True))})
        for choice in product(*(range(len(table.choices[name])) for name in weighted))
    ]
    assert min(values) == pytest.approx(best.value, rel=1e-12)
    assert HyPar().plan(problem, SearchBudget()).value == pytest.approx(best.value, rel=1e-12)


@pytest.mark.parametrize("name", drawn(["hypar", "tofu"], keep=2))
def test_all_levels_at_once_are_no_worse_and_pruned_as_the_whole_table(name: str) -> None:
    problem, axes, planner = problem_of(gpus=4), {"level0": 2, "level1": 2}, find_planner(name)()
    proposal = planner.plan(problem, SearchBudget())
    whole = eliminate(problem.pending_operators(axes, planner.allows).price_all())  # type: ignore[attr-defined]
    space = planner.find_space_optimum(problem, proposal, SearchBudget())
    assert whole is not None and space is not None and space.method == "pruned elimination"
    assert space.value == pytest.approx(whole.value, rel=1e-12)
    assert space.value <= proposal.value * (1 + 1e-12)


def test_operators_cost_the_same_in_any_order_of_interchangeable_levels() -> None:
    """What `group_levels` rests on: on four nodes, of the levels over nodes and of those inside."""
    assert group_levels([2] * 4, 8) == [[0], [1, 2, 3]] and group_levels([3, 2, 2], 8) == [[0], [1, 2]]
    assert group_levels([2, 3], 2) == [[0], [1]]
    problem, axes = problem_of(gpus=32, **{"global": 64, "micro": 1}), {f"level{level}": 2 for level in range(5)}
    groups, allows = group_levels([2] * 5, 8), HyPar().allows
    assert groups == [[0, 1], [2, 3, 4]]
    ordered = problem.pending_operators(axes, SpaceRule(allows, groups))
    mixed = [[dim for _, dim in layout] for layout in ordered.choices["qkv"]]
    place = next(place for place, (b, d, *inner) in enumerate(mixed) if b != d and len({*inner}) > 1)
    kept = {name: [options[place % len(options)]] for name, options in ordered.choices.items()}
    table = problem.pending_operators(axes, SpaceRule(allows, groups, kept))
    assert len(table.choices["qkv"]) >= 6
    for factor in (factor for factor in table.factors if len(factor.scope) == 1):
        assert np.ptp(factor.seconds) == np.ptp(factor.once) == np.ptp(factor.nbytes) == 0


def test_levels_keep_what_is_decided_and_are_no_better_than_all_at_once() -> None:
    for name in ("hypar", "tofu"):
        (scheme,) = propose(name).plan["plan"]["schemes"]
        assert scheme["over"] == ["level0", "level1", "level2"]
    layouts = [
        layout
        for scheme in propose("tofu").plan["plan"]["schemes"]
        for layout in scheme["tables"][0]["divide"].values()
    ]
    assert all(dim for layout in layouts if layout for dim in layout.values())


@pytest.mark.parametrize("seed", drawn(range(6), keep=6))
def test_layouts_on_coarse_meshes_cost_the_same_on_finer_ones(seed: int) -> None:
    """What AutoDDL's bound rests on: it looks at meshes of prime factors alone."""
    problem, draw = gpt(), random.Random(seed)
    fine, parts = problem.pending_operators({"x0": 2, "x1": 2, "x2": 2}), [["x0"], ["x1", "x2"]]
    coarse = problem.operators({"x": 2, "y": 4})
    start = eliminate(coarse)
    assert start is not None
    drawn_cells = {**start.assignment, **{name: draw.randrange(4) for name in ("norm1", "act", "residual1", "norm2")}}
    layouts = {
        name: tuple(
            (axis, dim) for axes, (_, dim) in zip(parts, coarse.choices[name][place], strict=True) for axis in axes
        )
        for name, place in drawn_cells.items()
    }
    kept = {name: [fine.choices[name].index(layout)] for name, layout in layouts.items()}
    factors = [*(factor.take(kept) for factor in fine.factors), *(factor.price(kept) for factor in fine.pending)]
    value = sum(factor.objective(fine.microbatches).item() for factor in factors)
    assert value == pytest.approx(coarse.value(drawn_cells), rel=1e-9)


def test_autoddl_tries_every_factorisation_in_every_order() -> None:
    problem = UnknownPart()
    problem.gpus = 24
    widths = [tuple(axes.values()) for axes in AutoDDL().meshes(problem)]
    assert widths[0] == (24,) and len(widths) == len({*widths}) == 20 and {(2, 3, 4), (4, 3, 2)} <= {*widths}
    assert widths[-1] == (3, 2, 2, 2) and all(math.prod(factors) == 24 for factors in widths)


@pytest.mark.parametrize("gpus", [8, 16])
def test_gspmd_completes_the_annotations_to_megatron_inside_data_parallelism(gpus: int) -> None:
    """Heads and columns of four linear layers are annotated: a layer has two all-reduces a pass, as in Megatron-LM."""
    problem = problem_of(gpus=gpus)
    (scheme,) = find_planner("gspmd")().plan(problem, SearchBudget()).plan["plan"]["schemes"]
    outer, inner = ([], "x") if gpus == 8 else (["x"], "y")
    expected = {"qkv": "a", "core": "a", "proj": "a", "up": "f", "act": "f", "down": "f"}
    expected |= {name: None for name in ("norm1", "residual1", "norm2", "residual2")}
    divide = {name: scheme["tables"][0]["divide"][name] for name in expected}
    assert divide == {name: {**dict.fromkeys(outer, "b"), inner: dim} for name, dim in expected.items()}
    plan = {"plan": {"mesh": {inner: gpus} if not outer else {"x": 2, "y": 8}, "schemes": [scheme]}}
    resolved = resolve_plan(load_job(problem.job_of({**plan, "batch": {"global": 64, "micro": 16}})), problem.shared)
    (run,) = make_lowering(resolved).run(resolved.model_parts.architecture.stage(range(0, 1), False, False)).unit_runs
    for ops in (run.fragment.forward, run.fragment.backward):
        assert [op.work.operation for op in ops if isinstance(op.work, Collective)] == ["all_reduce"] * 2


@pytest.mark.parametrize("microbatches", [2, 8])
@pytest.mark.parametrize("seed", drawn(range(10), keep=3))
def test_dapple_is_no_better_than_brute_force_over_its_latency_nor_that_than_the_bound(
    seed: int, microbatches: int
) -> None:
    table = draw_stages(seed, layers=5, gpus=4)
    stages, value = PrefixSearch(table, 4, microbatches).run()
    best = min(
        pipeline_latency(
            table, [PlannedStage(range(first, last + 1), option) for first, last, option in cells], microbatches
        )
        for cells in every_pipeline(table, 4, fits=False)
    )
    assert value >= best * (1 - 1e-12)
    if math.isfinite(value):
        assert value == pytest.approx(pipeline_latency(table, stages, microbatches)) and value <= 1.5 * best
    known = min(value, 1.2 * best)
    assert 0.9 * best < LatencyBound(table, 4, microbatches).bound(known) <= best * (1 + 1e-12)


def test_the_latency_of_equal_stages_is_that_of_1f1b() -> None:
    """p (F + B) + (m - 1) (F + B) and the gradient sum of the first stage, which ends last."""
    seconds = np.full((4, 4, 1), 3.0)
    table = StageTable((StageOption(1, {}),), seconds, seconds / 3, 0 * seconds + 0.5, np.full(seconds.shape, 9))
    stages = [PlannedStage(range(layer, layer + 1), 0) for layer in range(4)]
    assert pipeline_latency(table, stages, 8) == pytest.approx(4 * 3 + 7 * 3 + 0.5)


def test_one_gpu_has_one_plan() -> None:
    problem, names = (
        problem_of(gpus=1, layers=1, **{"global": 8, "micro": 1}),
        ("optcnn", "hypar", "tensoropt", "autoddl"),
    )
    values = {round(find_planner(name)().plan(problem, SearchBudget()).value, 9) for name in names}
    assert len(values) == 1


def test_a_cluster_of_gpus_without_a_node_is_priced() -> None:
    inter = {"kind": "infiniband", "gbps_per_gpu": 400}
    cluster = {"gpu": "h800-sxm", "gpus": 8, "gpus_per_node": 8, "scale_up_domain": 8, "inter": inter}
    job = {"model": {"preset": "gpt3-5b", "layers": 2}, "batch": {"global": 64, "micro": 4}, "plan": {"tp": 2}}
    problem = JobProblem({**job, "cluster": cluster})
    assert problem.forecast(find_planner("optcnn")().plan(problem, SearchBudget()).plan).fits


@pytest.mark.parametrize(
    "name",
    drawn(
        ["gspmd", "hypar", "mesh-tensorflow", "nnscaler", "oneflow", "partir", "tofu"],
        keep=lambda name: name != "nnscaler",
    ),
)
def test_planners_of_operators_plan_models_with_experts(name: str) -> None:
    job = {"model": {"preset": "mixtral-8x7b", "layers": 2}, "cluster": "dgx-h100:1"}
    problem = JobProblem({**job, "batch": {"global": 64, "micro": 1}, "plan": {"tp": 1, "dp": 8, "ep": 8}})
    proposal = find_planner(name)().plan(problem, SearchBudget(5.0, 200))
    assert proposal.plan["plan"]["views"]["experts"] == {"edp": 1, "ep": 8}
    assert 0.8 < proposal.value / problem.forecast(proposal.plan).step_time < 1.06
