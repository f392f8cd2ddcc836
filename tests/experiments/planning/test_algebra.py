"""Unity's algebraic substitutions: rewritten graphs compute the same, and are chosen together with partitions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.planning.cores.algebra import (
    AlgebraicGraph,
    AlgebraicMachine,
    compute_outputs,
    list_substitutions,
    read_graph,
)
from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.planners.unity import Unity, rewrite_algebra
from meshcast.experiments.planning.problem import SearchBudget, UnknownPart
from tests.draws import drawn

BRANCHES: dict[str, dict[str, Any]] = {
    "x": {"kind": "input", "width": 64},
    "a": {"kind": "linear", "inputs": ["x"], "width": 128},
    "b": {"kind": "linear", "inputs": ["x"], "width": 128},
    "ra": {"kind": "relu", "inputs": ["a"]},
    "rb": {"kind": "relu", "inputs": ["b"]},
    "c": {"kind": "concat", "inputs": ["ra", "rb"]},
    "y": {"kind": "linear", "inputs": ["c"], "width": 64},
}
"""Two linear layers with activations beside each other, as in an Inception block."""

MACHINE = AlgebraicMachine(4, 1e13, 1e12, 1e11, 5e-6, 4096, 2.0)


def draw_operators(seed: int) -> AlgebraicGraph:
    draw = random.Random(seed)
    operators: dict[str, dict[str, Any]] = {"x": {"kind": "input", "width": 4}}
    widths = {"x": 4}
    for place in range(7):
        kind, name, known = draw.choice(("linear", "linear", "relu", "add", "concat")), f"n{place}", [*widths]
        inputs = [draw.choice(known)]
        if kind == "add":
            inputs.append(draw.choice([other for other in known if widths[other] == widths[inputs[0]]]))
        if kind == "concat":
            inputs.append(draw.choice(known))
        operators[name] = {"kind": kind, "inputs": inputs}
        if kind == "linear":
            operators[name]["width"] = draw.choice((3, 4))
        widths[name] = operators[name].get(
            "width", sum(widths[i] for i in inputs) if kind == "concat" else widths[inputs[0]]
        )
    return read_graph(operators)


def values_of(graph: AlgebraicGraph, widths: dict[str, int], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rows = np.random.default_rng(5).normal(size=(6, widths["x"]))
    return compute_outputs(graph, {"x": rows}, weights)


@pytest.mark.parametrize("seed", drawn(range(30), keep=8))
def test_rewritten_graphs_compute_the_same(seed: int) -> None:
    """Up to three substitutions away, on drawn weights."""
    graph, rng = draw_operators(seed), np.random.default_rng(seed)
    widths = {name: operator.width for name, operator in graph}
    weights = {
        name: rng.normal(size=(widths[operator.inputs[0]], operator.width))
        for name, operator in graph
        if operator.kind == "linear"
    }
    outputs, level = values_of(graph, widths, weights), {graph}
    for _ in range(3):
        level = {*[rewritten for one in level for rewritten in list_substitutions(one)][:40]}
        for rewritten in level:
            values = values_of(rewritten, widths, weights)
            assert values.keys() >= outputs.keys()
            assert all(np.allclose(values[name], outputs[name]) for name in outputs)


def test_branches_become_one_linear_layer_with_its_activation() -> None:
    """Merging, moving and fusing leave two linear layers, one kernel each a pass."""
    best, visited = rewrite_algebra(read_graph(BRANCHES), MACHINE, 200)
    kinds = [operator.kind for _, operator in best.graph]
    assert kinds == ["input", "linear", "linear"] and dict(best.graph)["y"].inputs == (best.graph[1][0],)
    assert best.graph[1][1].relu and best.graph[1][1].width == 256 and visited > 5


def test_substitutions_and_partitions_are_chosen_together() -> None:
    """Never slower than the best partition of the graph as stated; and the best is that of all reachable graphs."""
    stated = eliminate(MACHINE.table(read_graph(BRANCHES)))
    best, _ = rewrite_algebra(read_graph(BRANCHES), MACHINE, 200)
    reached, queue = {read_graph(BRANCHES)}, [read_graph(BRANCHES)]
    while queue:
        for rewritten in list_substitutions(queue.pop()):
            if rewritten not in reached:
                reached.add(rewritten)
                queue.append(rewritten)
    values = [optimum.value for graph in reached if (optimum := eliminate(MACHINE.table(graph))) is not None]
    assert stated is not None and best.seconds < stated.value and best.seconds == pytest.approx(min(values))


def test_a_pair_of_matrices_is_divided_as_megatron_does_where_weights_are_large() -> None:
    """Few rows and wide layers: columns, then contracted, one sum of the output a pass; many rows: samples."""
    operators = {"x": BRANCHES["x"], "a": {"kind": "linear", "inputs": ["x"], "width": 65536}}
    operators |= {"r": {"kind": "relu", "inputs": ["a"]}, "y": {"kind": "linear", "inputs": ["r"], "width": 64}}
    few, _ = rewrite_algebra(read_graph(operators), MACHINE._replace(rows=256), 100)
    many, _ = rewrite_algebra(read_graph(operators), MACHINE._replace(rows=2**20), 100)
    assert few.partition[1:] == (("whole", "channels"), ("channels", "sums"))
    assert {layouts for layouts in many.partition} == {("rows", "rows")}


def test_unity_plans_a_graph_of_operators() -> None:
    problem = UnknownPart()
    problem.name, problem.gpus = "branches", 4
    names = ("flops", "memory_bandwidth", "link_bandwidth", "launch", "rows", "element")
    problem.settings = {"operators": BRANCHES, **dict(zip(names, MACHINE[1:], strict=True))}  # type: ignore[attr-defined]
    proposal = Unity().plan(problem, SearchBudget())
    assert len(proposal.plan["operators"]) == 3 and proposal.not_executable and proposal.visited > 5
