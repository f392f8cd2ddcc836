"""Tables at the prices of a job: operators and stages against the forecast of what they describe."""

from __future__ import annotations

import random

import pytest

from experiments.planning.cores.elimination import eliminate
from experiments.planning.planners.alpa import submeshes
from experiments.planning.pricing.job import JobProblem
from experiments.planning.stages import PlannedStage
from experiments.planning.table import Assignment, FactorTable
from hardware.errors import PlanError
from simulator.engine.task_time import task_seconds
from simulator.forecast.lowering import make_lowering
from simulator.forecast.planning import resolve_plan
from simulator.forecast.resident_memory import DeviceParams, resident_bytes
from simulator.ir.ops import StageOps
from simulator.job.load import load_job
from simulator.lowering.offload import saved_activations
from simulator.plan.plan import Plan
from simulator.program.block import CompiledBlocks
from simulator.program.task import make_task
from tests.experiments.planning.conftest import problem_of

MESHES = [{"x": 8}, {"x": 2, "y": 4}]


def assign(table: FactorTable, dims: tuple[str, ...], stream: tuple[str, ...]) -> dict[str, int]:
    """Every operator sharded along the first of some dims that it has, over all axes."""
    found = {}
    for name, options in table.choices.items():
        legal = {dim for option in options for _, dim in option}  # type: ignore[attr-defined]
        wanted = next((dim for dim in (stream if name == "stream" else dims) if dim in legal), "")
        found[name] = options.index(tuple((axis, wanted) for axis, _ in options[0]))  # type: ignore[attr-defined]
    return found


def lower_layer(
    problem: JobProblem, table: FactorTable, assignment: Assignment, axes: dict[str, int]
) -> tuple[Plan, StageOps]:
    """The plan of an assignment, and its first layer as the forecast lowers it."""
    plan = resolve_plan(load_job(problem.job_of(problem.annotate(table, assignment, axes))), problem.shared)
    return plan, make_lowering(plan).run(plan.architecture.stage(range(0, 1), False, False))


def forecast_layer(problem: JobProblem, plan: Plan, stage: StageOps) -> float:
    """Seconds of both passes of a layer on an idle GPU."""
    price = problem.shared.costs(plan).estimate
    tasks = (make_task(stage, kind, price, again=False, blocks=CompiledBlocks()) for kind in ("F", "BW"))
    return sum(task_seconds(task) for task in tasks)


def table_layer(problem: JobProblem, table: FactorTable, assignment: Assignment) -> tuple[float, float]:
    """Seconds and bytes of one layer by the table."""
    (unit,) = resolve_plan(problem.job, problem.shared).architecture.stage(range(0, 1), False, False).units
    inside = {operator.name for operator in unit.operators()} | {"stream"}
    costs = [one.at(assignment) for one in table.factors if set(one.scope) <= inside]
    layers = problem.job.model.layers
    return sum(one.seconds for one in costs) / layers, sum(one.nbytes for one in costs) / layers


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_named_plans_and_the_optimum_cost_what_the_forecast_says(
    model: str, axes: dict[str, int], request: pytest.FixtureRequest
) -> None:
    problem = request.getfixturevalue(model)
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
def test_drawn_plans_cost_little_more_than_the_forecast(gpt: JobProblem, axes: dict[str, int]) -> None:
    """More may overlap in the forecast than a factor sees."""
    table, draw = gpt.operators(axes), random.Random(1)
    for _ in range(8):
        assignment = {name: draw.randrange(len(options)) for name, options in table.choices.items()}
        plan, stage = lower_layer(gpt, table, assignment, axes)
        real, (seconds, nbytes) = forecast_layer(gpt, plan, stage), table_layer(gpt, table, assignment)
        assert 0.9 < real / seconds < 1.0 + 1e-9
        states = sum(resident_bytes(plan, DeviceParams(stage.params())).values())
        saved = sum(saved_activations(stage.unit_runs[0]).values())
        assert 0.95 < (states + saved) / nbytes < 1.0 + 1e-9


def test_a_forecast_of_the_whole_plan_is_near_its_value(gpt: JobProblem) -> None:
    """Apart from what the host takes at every step, which no plan changes."""
    table = gpt.operators({"x": 8})
    for dims, stream in ((("a", "f", "v"), ()), (("a", "f", "v", "s"), ("s",)), (("b",), ("b",))):
        assignment = assign(table, dims, stream)
        found = gpt.forecast(gpt.annotate(table, assignment, {"x": 8}))
        assert found.step_time - gpt.job.framework.step_overhead_s == pytest.approx(table.value(assignment), rel=0.02)
        assert found.peak_allocated == pytest.approx(table.cost(assignment).nbytes, rel=0.25)


def test_axes_must_have_all_gpus_and_models_layers_of_one_kind(gpt: JobProblem) -> None:
    with pytest.raises(PlanError, match="axes of 4 ranks on 8 GPUs"):
        gpt.operators({"x": 4})
    with pytest.raises(PlanError, match="leave qkv no layout"):
        gpt.operators({"x": 8}, lambda name, layout: name != "qkv")
    with pytest.raises(PlanError):
        problem_of("mixtral-8x7b").operators({"x": 8})


def test_a_stage_costs_what_its_plan_says(gpt: JobProblem) -> None:
    """One stage, and two of them: sum + (m - 1) x maximum is near the engine's step."""
    table = submeshes(gpt.stages(), 8)
    layers, tried = table.layers, 0
    for number, option in enumerate(table.options):
        for cut in (0, layers // 2):
            stages = (PlannedStage(range(layers), number),)
            if cut:
                stages = (PlannedStage(range(cut), number), PlannedStage(range(cut, layers), number))
            if option.gpus * len(stages) != 8:
                continue
            cells = [(one.layers[0], one.layers[-1], number) for one in stages]
            if any(table.behind[cell] < len(stages) - 1 - place for place, cell in enumerate(cells)):
                continue
            own = [float(table.seconds[cell]) for cell in cells]
            once = max(float(table.once[cell]) for cell in cells)
            found = gpt.forecast(gpt.stage_plan(table, stages))
            assert found.fits
            step = sum(own) + (gpt.microbatches - 1) * max(own) + once
            assert step == pytest.approx(found.step_time, rel=0.15), option
            tried += 1
    assert tried >= 6


def test_the_graph_of_a_job_is_a_chain_with_its_levels() -> None:
    problem = problem_of(gpus=16)
    graph = problem.graph()
    assert graph.is_chain and len(graph.names) == problem.job.model.layers + 2
    assert [level.width for level in problem.levels] == [8, 2]
    assert problem.levels[0].bandwidth > problem.levels[1].bandwidth > 1e9
