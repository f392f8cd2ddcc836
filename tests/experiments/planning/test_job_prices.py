"""Tables at the prices of a job: operators and stages against the forecast of what they describe."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.planners.alpa import submeshes
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.stages import PlannedStage
from meshcast.experiments.planning.table import Assignment, FactorTable
from meshcast.hardware.errors import PlanError
from meshcast.simulator.engine.task_time import task_seconds
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.resident_memory import DeviceParams, resident_bytes
from meshcast.simulator.ir.ops import StageOps
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.offload import saved_activations
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import CompiledBlocks
from meshcast.simulator.program.task import make_task
from tests.draws import drawn, drawn_grid
from tests.experiments.planning.conftest import gpt, problem_of
from tests.experiments.planning.random_tables import has_memory, pipeline_value

MESHES = [{"x": 8}, {"x": 2, "y": 4}]


def assign(table: FactorTable, dims: tuple[str, ...], stream: tuple[str, ...]) -> dict[str, int]:
    """Every operator sharded along the first of some dims that it has, over all axes."""
    assignment = {}
    for name, options in table.choices.items():
        legal = {dim for option in options for _, dim in option}  # type: ignore[attr-defined]
        wanted = next((dim for dim in (stream if name == "stream" else dims) if dim in legal), "")
        assignment[name] = options.index(tuple((axis, wanted) for axis, _ in options[0]))  # type: ignore[attr-defined]
    return assignment


def lower_layer(
    problem: JobProblem, table: FactorTable, assignment: Assignment, axes: dict[str, int]
) -> tuple[Plan, StageOps]:
    """The plan of an assignment, and its first layer as the forecast lowers it."""
    plan = resolve_plan(load_job(problem.job_of(problem.annotate(table, assignment, axes))), problem.shared)
    return plan, make_lowering(plan).run(plan.model_parts.architecture.stage(range(0, 1), False, False))


def forecast_layer(problem: JobProblem, plan: Plan, stage: StageOps) -> float:
    """Seconds of both passes of a layer on an idle GPU."""
    price = problem.shared.costs(plan).estimate
    tasks = (make_task(stage, kind, price, again=False, blocks=CompiledBlocks()) for kind in ("F", "BW"))
    return sum(task_seconds(task) for task in tasks)


def table_layer(problem: JobProblem, table: FactorTable, assignment: Assignment) -> tuple[float, float]:
    """Seconds and bytes of one layer by the table."""
    (unit,) = resolve_plan(problem.job, problem.shared).model_parts.architecture.stage(range(0, 1), False, False).units
    inside = {operator.name for operator in unit.operators()} | {"stream"}
    costs = [factor.at(assignment) for factor in table.factors if set(factor.scope) <= inside]
    layers = problem.job.model.layers
    return sum(cost.seconds for cost in costs) / layers, sum(cost.nbytes for cost in costs) / layers


@pytest.mark.parametrize(("axes", "model"), drawn_grid(MESHES, ["llama3-8b", "gpt3-5b"]), ids=str)
def test_named_plans_and_the_optimum_cost_what_the_forecast_says(model: str, axes: dict[str, int]) -> None:
    problem = problem_of(model) if model != "gpt3-5b" else gpt()
    table = problem.operators(axes)
    best = eliminate(table)
    assert best is not None
    plans = {
        "megatron": assign(table, ("a", "f", "v"), ()),
        "megatron-sp": assign(table, ("a", "f", "v", "s"), ("s",)),
        "data": assign(table, ("b",), ("b",)),
        "best": best.assignment,
    }
    for name, assignment in plans.items():
        real = forecast_layer(problem, *lower_layer(problem, table, assignment, axes))
        assert table_layer(problem, table, assignment)[0] == pytest.approx(real, rel=1e-9), name


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_drawn_plans_cost_little_more_than_the_forecast(axes: dict[str, int]) -> None:
    """More may overlap in the forecast than a factor sees."""
    table, draw = gpt().operators(axes), random.Random(1)
    for _ in range(8):
        assignment = {name: draw.randrange(len(options)) for name, options in table.choices.items()}
        plan, stage = lower_layer(gpt(), table, assignment, axes)
        real, (seconds, nbytes) = forecast_layer(gpt(), plan, stage), table_layer(gpt(), table, assignment)
        assert 0.9 < real / seconds < 1.0 + 1e-9
        states = sum(resident_bytes(plan, DeviceParams(stage.params())).values())
        saved = sum(saved_activations(stage.unit_runs[0]).values())
        assert 0.95 < (states + saved) / nbytes < 1.0 + 1e-9


def test_a_forecast_of_the_whole_plan_is_near_its_value() -> None:
    """Apart from what the host takes at every step, which no plan changes."""
    table = gpt().operators({"x": 8})
    for dims, stream in ((("a", "f", "v"), ()), (("a", "f", "v", "s"), ("s",)), (("b",), ("b",))):
        assignment = assign(table, dims, stream)
        forecast = gpt().forecast(gpt().annotate(table, assignment, {"x": 8}))
        assert forecast.step_time - gpt().job.framework.step_overhead_s == pytest.approx(
            table.value(assignment), rel=0.02
        )
        assert forecast.peak_allocated == pytest.approx(table.cost(assignment).nbytes, rel=0.25)


@pytest.mark.parametrize(
    ("axes", "allows", "words"),
    [
        ({"x": 4}, None, "axes of 4 ranks on 8 GPUs"),
        ({"x": 8}, lambda name, layout: name != "qkv", "leave qkv no layout"),
        ({"w": 2, "x": 2, "y": 2}, lambda name, layout: name != "qkv", "leave qkv no layout"),
    ],
)
def test_axes_have_all_gpus_and_operators_a_layout(axes: dict[str, int], allows: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        gpt().operators(axes, *[allows] * bool(allows))


@pytest.mark.parametrize(
    ("axes", "ep"), drawn([({"x": 8}, 8), ({"x": 2, "y": 4}, 4), ({"x": 4, "y": 2}, 4)], keep=3), ids=str
)
def test_experts_have_the_layout_of_their_scheme(axes: dict[str, int], ep: int) -> None:
    """Plans of a table with experts are jobs, forecast near their value, also where groups of experts span axes."""
    job = {"model": {"preset": "mixtral-8x7b", "layers": 2}, "cluster": "dgx-h100:1"}
    problem = JobProblem({**job, "batch": {"global": 64, "micro": 2}, "plan": {"tp": 1, "dp": 8, "ep": ep}})
    table = problem.operators(axes)
    best, draw = eliminate(table), random.Random(0)
    assert best is not None and table.choices["expert.up"] == ((),)
    drawn = [{name: draw.randrange(len(options)) for name, options in table.choices.items()} for _ in range(5)]
    for assignment in (best.assignment, *(assignment for assignment in drawn if table.value(assignment) < math.inf)):
        plan = problem.annotate(table, assignment, axes)
        assert plan["plan"]["views"] == {"experts": {"edp": 8 // ep, "ep": ep}}
        step = problem.forecast(plan).step_time - problem.job.framework.step_overhead_s
        assert 0.9 < table.value(assignment) / step < 1.06
    assert best.value <= min(map(table.value, drawn))


def test_layers_of_several_kinds_share_their_variables() -> None:
    """The first layer of the model has no experts; a layer more costs what its own operators do."""
    job = {"cluster": "dgx-h100:1", "batch": {"global": 64, "micro": 2}, "plan": {"tp": 1, "dp": 8, "ep": 8}}
    tables = {}
    for layers in (2, 3):
        problem = JobProblem({**job, "model": {"preset": "deepseek-v2-lite", "layers": layers}})
        tables[layers] = problem.operators({"x": 8})
    few, many = tables[2], tables[3]
    assert {"up", "shared.up", "expert.up"} <= few.choices.keys() and few.choices == many.choices
    sums = {}
    for layers, table in tables.items():
        best = eliminate(table)
        assert best is not None
        sums[layers] = table.value(best.assignment)
        forecast = problem.forecast(problem.annotate(table, best.assignment, {"x": 8})) if layers == 3 else None
        assert forecast is None or 0.85 < sums[layers] / forecast.step_time < 1.06
    assert sums[2] < sums[3]
    dense = [factor for factor in few.factors if factor.scope == ("up",)]
    again = [factor for factor in many.factors if factor.scope == ("up",)]
    assert len(dense) == 1 and np.allclose(dense[0].seconds, again[0].seconds, rtol=1e-12)


def test_a_stage_costs_what_its_plan_says() -> None:
    """One stage, and two of them: sum + (m - 1) x maximum is near the engine's step."""
    problem, tried = gpt(), 0
    table = submeshes(problem.stages(), 8)
    last = table.layers - 1
    for number, option in enumerate(table.options):
        for cells in ([(0, last, number)], [(0, last // 2, number), (last // 2 + 1, last, number)]):
            if option.gpus * len(cells) != 8 or not has_memory(table, cells):
                continue
            stages = tuple(PlannedStage(range(first, end + 1), number) for first, end, _ in cells)
            step = pipeline_value(table, cells, problem.microbatches) + max(float(table.once[cell]) for cell in cells)
            forecast = problem.forecast(problem.stage_plan(table, stages))
            assert forecast.fits and step == pytest.approx(forecast.step_time, rel=0.15), option
            tried += 1
    assert tried >= 6


def test_the_graph_of_a_job_is_a_chain_with_its_levels() -> None:
    problem = problem_of(gpus=16)
    graph = problem.graph()
    assert graph.is_chain and len(graph.names) == problem.job.model.layers + 2
    model = problem.job.model  # whose tied table is at both ends
    assert sum(graph.figures["parameters"]) == pytest.approx(2 * (model.parameters + model.vocab * model.hidden))
    assert [level.width for level in problem.levels] == [8, 2]
    assert problem.levels[0].bandwidth > problem.levels[1].bandwidth > 1e9
