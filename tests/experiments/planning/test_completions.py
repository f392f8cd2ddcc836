"""Planners that complete a user's plan: Mesh-TensorFlow, PartIR, and OneFlow's search over signatures."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.auto_mtf import every_map
from meshcast.experiments.planning.planners.mesh_tensorflow import MeshTensorFlow
from meshcast.experiments.planning.planners.oneflow import OneFlow, ReducedTable, search_neighbourhoods
from meshcast.experiments.planning.planners.partir import (
    PartIR,
    Tactic,
    batch_tactic,
    embedding_tactic,
    megatron_tactic,
    spread_dims,
)
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.table import Factor, FactorTable
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.experiments.planning.conftest import gpt, problem_of
from tests.experiments.planning.random_tables import best_by_brute_force, draw_table
from tests.strategies import EVERY_EXAMPLE


def layouts_of(problem: JobProblem, axes: dict[str, int], assignment: dict[str, int]) -> dict[str, dict[str, str]]:
    """The dims of every operator, by axis; axes that shard nothing are left out."""
    options = problem.operators(axes).options(assignment)
    return {name: {axis: dim for axis, dim in layout if dim} for name, layout in options.items()}  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- Mesh-TensorFlow


def test_layouts_of_mesh_tensorflow_are_the_maps_of_auto_mtf() -> None:
    """A map is accepted if and only if no axis shards two dims of an operator: all 3^6 maps over two axes."""
    mesh = {"x": 2, "y": 4}
    table = gpt().operators(mesh)
    meet = [{dim for layout in layouts for _, dim in layout if dim} for layouts in table.choices.values()]  # type: ignore[attr-defined]
    legal = [*every_map(dict.fromkeys("abfhsv", 8), mesh, meet)]
    layouts = [layout for layout in every_map(dict.fromkeys("abfhsv", 8), mesh, []) if layout]  # no rules: the default

    def is_accepted(layout: dict[str, str]) -> bool:
        try:
            MeshTensorFlow(layout, mesh).solve(table, gpt(), SearchBudget())
        except PlanError:
            return False
        return True

    assert len(legal) > 31
    for layout in layouts if EVERY_EXAMPLE else layouts[::4]:
        assert is_accepted(layout) == (layout in legal)


def test_samples_over_all_gpus_are_data_parallelism() -> None:
    proposal = MeshTensorFlow({"b": "x"}).plan(gpt(), SearchBudget())
    assert gpt().forecast(proposal.plan).fits
    table = gpt().operators({"x": 8})
    data = {
        name: layouts.index((("x", "b"),)) if (("x", "b"),) in layouts else 0 for name, layouts in table.choices.items()
    }
    assert proposal.value == table.value(data)
    real = gpt().forecast({"plan": {"dp": 8}, "batch": {"global": 64, "micro": 2}})
    # Data parallelism reduces gradients in buckets beside the backward pass, an annotation does not.
    assert real.step_time < gpt().forecast(proposal.plan).step_time < 1.15 * real.step_time


@pytest.mark.parametrize("gpus", drawn([8, 16], keep=2))
def test_the_papers_layout_is_the_completion_of_gspmd_and_of_partir(gpus: int) -> None:
    """Three ways to say the Transformer's layout: rules for dims, annotated matrices, tactics."""
    problem = problem_of(gpus=gpus)
    plans = [find_planner(name)().plan(problem, SearchBudget()) for name in ("mesh-tensorflow", "gspmd", "partir")]
    assert len({proposal.value for proposal in plans}) == 1
    assert plans[0].plan == plans[2].plan


# ---------------------------------------------------------------------------------------------------- PartIR


@pytest.mark.parametrize(
    ("tactics", "counts"),
    [
        ([batch_tactic("x"), batch_tactic("y")], (0, 0)),
        ([megatron_tactic("x"), megatron_tactic("y")], (2, 2)),
        ([batch_tactic("x"), megatron_tactic("y"), embedding_tactic("y")], (2, 2)),
    ],
    ids=["BP", "MP", "BP+MP+EMB"],
)
def test_a_layer_has_the_all_reduces_of_the_paper(tactics: list[Tactic], counts: tuple[int, int]) -> None:
    """BP: none but those of the gradients once a step; MP: two a pass, and no other collective."""
    axes = {"x": 2, "y": 4}
    table = gpt().operators(axes)
    plan = gpt().annotate(table, PartIR().apply(table, tactics, [*axes]), axes)
    resolved = resolve_plan(load_job(gpt().job_of(plan)), gpt().shared)
    (run,) = make_lowering(resolved).run(resolved.model_parts.architecture.stage(range(0, 1), False, False)).unit_runs
    operations = [
        [op.work.operation for op in ops if isinstance(op.work, Collective)]
        for ops in (run.fragment.forward, run.fragment.backward)
    ]
    assert operations == [["all_reduce"] * count for count in counts]


def test_later_tactics_keep_what_earlier_ones_decided() -> None:
    """Along one axis samples come first, and Megatron's tactic finds nothing left; in the other order heads stay."""
    table = gpt().operators({"x": 8})
    first = PartIR().apply(table, [batch_tactic("x")], ["x"])
    assert PartIR().apply(table, [batch_tactic("x"), megatron_tactic("x")], ["x"]) == first
    other = layouts_of(gpt(), {"x": 8}, PartIR().apply(table, [megatron_tactic("x"), batch_tactic("x")], ["x"]))
    assert other["qkv"] == {"x": "a"} and other["embedding"] == {"x": "b"}


@pytest.mark.parametrize(
    ("planner", "words"),
    [
        (PartIR([Tactic("x", {"qvk": "a"})]), "no such operator"),
        (PartIR([Tactic("x", {"qkv": "v"})]), "no layout in which x shards v"),
        (MeshTensorFlow({"b": "z"}), "no such axis"),
        (MeshTensorFlow({"q": "x"}), "no operator has such a dim"),
        (MeshTensorFlow({"b": "x", "h": "x"}), "axis x shards both b and h of embedding"),
    ],
)
def test_plans_of_users_that_break_a_rule_are_refused(planner: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        planner.plan(gpt(), SearchBudget())


def test_propagation_stops_where_neighbours_disagree() -> None:
    """On a chain of five, decided at its ends: each end takes its neighbour, and the middle stays whole."""
    names = ["v0", "v1", "v2", "v3", "v4"]
    table = FactorTable(
        dict.fromkeys(names, ("", "p", "q")),
        [Factor(pair, np.zeros((3, 3)), np.zeros((3, 3)), np.zeros((3, 3))) for pair in pairwise(names)],
    )
    assert spread_dims(table, {"v0": "p", "v4": "q"}, lambda name, dim: True) == {
        "v0": "p", "v1": "p", "v3": "q", "v4": "q",
    }  # fmt: skip
    assert spread_dims(table, {"v0": "p"}, lambda name, dim: name != "v2") == {"v0": "p", "v1": "p"}


# --------------------------------------------------------------------------------------------------- OneFlow


@pytest.mark.parametrize("seed", drawn(range(30), keep=6))
def test_eliminations_and_neighbourhoods_find_the_optimum_or_come_near(seed: int) -> None:
    table = draw_table(seed)
    best, optimum = best_by_brute_force(table), search_neighbourhoods(table)
    assert (optimum is None) == math.isinf(best)
    if optimum is not None:
        assert optimum.value == pytest.approx(table.value(optimum.assignment))
        assert best * (1 - 1e-12) <= optimum.value <= best * 1.05
        if not ReducedTable(table).groups:
            assert optimum.value == pytest.approx(best, rel=1e-12)


def draw_dense_table(seed: int, variables: int = 7, options: int = 4) -> FactorTable:
    """A table in which every pair of variables has a factor, so that no variable has few neighbours."""
    rng = np.random.default_rng(seed)
    names, shape = [f"v{place}" for place in range(variables)], (options, options)

    def draw(pair: tuple[str, str]) -> Factor:
        return Factor(pair, np.where(rng.random(shape) < 0.1, np.inf, rng.uniform(1, 9, shape)), *np.zeros((2, *shape)))

    return FactorTable(dict.fromkeys(names, tuple(range(options))), [draw(pair) for pair in combinations(names, 2)])


@pytest.mark.parametrize("seed", drawn(range(12), keep=4))
def test_neighbourhoods_of_entangled_tables_end_in_a_local_optimum(seed: int) -> None:
    """No merge is allowed here, so that the greedy steps do all: no single option improves what they find."""
    table = draw_dense_table(seed)
    reduced = ReducedTable(table, most=1)
    assert len(reduced.groups) == 7
    optimum, best = search_neighbourhoods(table, most=1), eliminate(table)
    assert optimum is not None and best is not None
    assert best.value * (1 - 1e-12) <= optimum.value <= best.value * 1.25
    for name, layouts in table.choices.items():
        values = [table.value({**optimum.assignment, name: option}) for option in range(len(layouts))]
        assert min(values) >= optimum.value * (1 - 1e-12)
    merged = search_neighbourhoods(table)
    assert merged is not None and merged.value >= best.value * (1 - 1e-12)


def test_oneflow_finds_the_optimum_of_a_job_and_keeps_set_signatures() -> None:
    best = find_planner("optcnn")().plan(gpt(), SearchBudget())
    assert OneFlow().plan(gpt(), SearchBudget()).value == pytest.approx(best.value, rel=1e-12)
    planner = OneFlow({"qkv": {"x": "a"}, "stream": {}})
    proposal = planner.plan(gpt(), SearchBudget())
    (scheme,) = proposal.plan["plan"]["schemes"]
    assert scheme["tables"][0]["divide"]["qkv"] == {"x": "a"} and scheme["stream"] == {"x": None}
    fixed = eliminate(gpt().operators({"x": 8}).restrict(planner.allows))  # type: ignore[arg-type]
    assert fixed is not None and proposal.value == pytest.approx(fixed.value, rel=1e-12)
    assert proposal.value > best.value
