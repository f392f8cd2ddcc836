"""Claims of the papers of planners that no other test runs: structure, collectives, searches; and the table of all
claims in docs/planners.md.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.planning.graph import LayerGraph, antichain_states, find_contained, output_bytes
from meshcast.experiments.planning.planner import find_planner, planner_names
from meshcast.experiments.planning.planners.automap import Automap
from meshcast.experiments.planning.planners.dapple import MachineNetwork, PlacedPipelines, PlacedStage
from meshcast.experiments.planning.problem import Dims, SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem
from meshcast.simulator import load_job, simulate
from meshcast.validation.claims.measures import read_measure
from tests.experiments.planning.conftest import gpt

ROOT = Path(__file__).resolve().parents[3]

PUBLISHED = {
    *("mesh-tensorflow", "gspmd", "oneflow", "partir", "automap", "optcnn", "tofu", "hypar", "tensoropt", "autoddl"),
    *("flexflow", "alpa", "unity", "nnscaler", "slapo", "pipedream", "dapple", "autopipe", "tarnawski-dp", "piper"),
    *("tarnawski-ip", "aceso", "placement-rl", "spotlight"),
}
"""The planners whose claims are listed."""


def claim_rows() -> list[list[str]]:
    """The rows of the table of claims: planner, claim, theirs, ours, where it runs."""
    page = (ROOT / "docs" / "planners.md").read_text("utf-8")
    section = page.partition("## Claims of their papers")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] != "planner" and set(row[0]) != {"-"}]


def test_every_planner_has_a_claim_that_runs_or_a_reason() -> None:
    rows = claim_rows()
    assert {row[0] for row in rows} == PUBLISHED <= {*planner_names()}
    for planner, claim, theirs, ours, where in rows:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", where)
        assert tests or where.startswith("cannot run: "), f"{planner}: {claim}"
        assert theirs and bool(ours) == bool(tests), f"{planner}: {claim}"
        for file, name in tests:
            tree = ast.parse((Path(__file__).parent / file).read_text("utf-8"))
            assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, f"{file}::{name}"


def reduce_graph(graph: LayerGraph) -> set[int]:
    """The nodes that are left of a graph when nodes with one producer and one reader become edges, and edges between
    the same nodes one: OptCNN's eliminations."""
    nodes, edges = {*range(len(graph.names))}, {*graph.edges}
    while True:
        for node in nodes:
            before = {a for a, b in edges if b == node}
            behind = {b for a, b in edges if a == node}
            if len(before) == 1 and len(behind) == 1:
                edges = {one for one in edges if node not in one} | {(before.pop(), behind.pop())}
                nodes = nodes - {node}
                break
        else:
            return nodes


@pytest.mark.parametrize("profile", ["pipedream-vgg16", "pipedream-alexnet", "pipedream-resnet50"])
def test_eliminations_leave_two_nodes_of_convolutional_networks(profile: str) -> None:
    """Nodes for the sizes of a tensor, which compute nothing, are no layers."""
    graph = ProfileProblem(profile).graph()
    kinds = [row[1] for row in ProfileProblem(profile)._nodes]
    kept = [node for node, kind in enumerate(kinds) if kind != "Size"]
    place = {node: at for at, node in enumerate(kept)}
    edges = [(place[a], place[b]) for a, b in graph.edges if a in place and b in place]
    assert len(reduce_graph(LayerGraph([graph.names[one] for one in kept], edges, {}))) == 2


class OneModelAxis(Automap):
    """Without samples and positions, which the paper leaves to data parallelism around its axis."""

    def allows(self, name: str, layout: Dims) -> bool:
        return all(dim not in ("b", "s") for _, dim in layout)


def test_automap_finds_megatrons_layer_on_a_model_axis() -> None:
    """Heads, and columns and rows of the feed-forward layer."""
    found = OneModelAxis().plan(gpt(), SearchBudget(steps=4_000))
    (scheme,) = found.plan["plan"]["schemes"]
    divide = scheme["tables"][0]["divide"]
    assert {name: divide[name]["x"] for name in ("qkv", "core", "proj", "up", "act", "down")} == {
        **dict.fromkeys(("qkv", "core", "proj"), "a"),
        **dict.fromkeys(("up", "act", "down"), "f"),
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_conversions_send_the_bytes_of_oneflows_table(ranks: int) -> None:
    """Of a tensor of T bytes all ranks together send (p - 1) T to gather it, as much to sum it into shards, and twice
    as much to sum it whole."""
    job: dict[str, Any] = {
        "model": {"preset": "gpt3-5b", "layers": 2},
        "cluster": {"node": "dgx-h100", "nodes": 1, "gpus": ranks},
        "framework": "megatron-core",
        "batch": {"global": 4, "micro": 1},
    }

    def sent(scheme: str, operation: str) -> float:
        plan = {"mesh": {"tp": ranks}, "schemes": [{"use": f"tensor/{scheme}", "over": "tp"}]}
        report = simulate(load_job({**job, "plan": plan}))
        value = read_measure(report, f"sent_gib.tp.{operation}")
        assert isinstance(value, list)
        return ranks * float(value[0])

    whole = sent("megatron", "all_reduce")
    scattered, gathered = (sent("megatron-sp", one) for one in ("reduce_scatter", "all_gather"))
    passes, layers, microbatches, tensor = 2, 2, 4, 2048 * 4096 * 2 / 2**30
    hidden = 2 * passes * layers * microbatches * tensor
    embedding = microbatches * tensor
    assert whole == pytest.approx(2 * (ranks - 1) * (hidden + 2 * embedding), rel=1e-3)
    assert scattered == pytest.approx((ranks - 1) * (hidden + 2 * embedding), rel=1e-3)
    assert gathered >= scattered


DAPPLE = ("vgg19", 2048, 32), ("bert24", 96, 6), ("bert48", 64, 2), ("xlnet36", 128, 1), ("amoebanet36", 128, 1)
"""Profiles, with the batch and the micro-batch."""


@pytest.mark.parametrize(
    ("profile", "batch", "micro", "machines"),
    [(*row, machines) for machines in ((8, 2), (1, 16)) for row in DAPPLE],
)
def test_plans_of_dapple_are_up_to_three_times_as_fast_as_those_of_pipedream(
    profile: str, batch: int, micro: int, machines: tuple[int, int]
) -> None:
    """In synchronous training, by DAPPLE's step; PipeDream's stages are on GPUs one after another."""
    levels = [NetworkLevel(machines[0], 25e9), NetworkLevel(machines[1], 3e9)]
    problem = ProfileProblem(f"dapple-{profile}", levels, batch=batch, micro_batch=micro, message_bandwidth=1e9)
    found = find_planner("dapple")().plan(problem, SearchBudget())
    graph, times = problem.graph(), batch / problem.settings["profile_batch"]
    figures = graph.figures
    whole = {name: times * values for name, values in figures.items()}
    flat = ProfileProblem(f"dapple-{profile}", [one for one in levels if one.width > 1])
    theirs = find_planner("pipedream")().plan(flat, SearchBudget()).plan["stages"]
    states = antichain_states(graph)
    states = states[np.argsort(states.sum(axis=1), kind="stable")]
    network = MachineNetwork(machines[1], machines[0], 25e9, 3e9, 1e9)
    both = whole["forward"] + whole["backward"]
    pipelines = PlacedPipelines(
        *(network, states @ both, states @ figures["parameters"], times * output_bytes(graph, states)),
        *(find_contained(states), batch, micro),
    )
    done, used, stages, slowest = np.zeros(len(graph.names), bool), 0, [], 0.0
    for stage in theirs:
        begin = int(np.flatnonzero((states == done).all(axis=1))[0])
        done[stage["nodes"]] = True
        end = int(np.flatnonzero((states == done).all(axis=1))[0])
        count = int(np.prod(stage["replicas"]))
        stages.append(PlacedStage(begin, end, frozenset(range(used, used + count))))
        slowest, used = max(slowest, float(both[stage["nodes"]].sum()) / count), used + count
    for one, other in pairwise(stages):
        message = network.transfer_seconds(one.devices, other.devices, float(pipelines.sent[one.end]))
        slowest = max(slowest, message)
    ratio = pipelines.price(stages, 1, slowest).seconds / found.value
    assert used == 16 and 1 - 1e-9 <= ratio <= 3.23


def test_autopipe_prices_a_ninth_of_what_piper_prices() -> None:
    """On the chain of AmoebaNet-36 and 4 GPUs; it takes a fiftieth of the time."""
    problem = ProfileProblem("dapple-amoebanet36", gpus=4, microbatches=8, batch=8, bandwidth=25e9, sync=[])
    problem.memory = 1e12
    graph = problem.graph()
    seconds = graph.figures["forward"] + graph.figures["backward"]
    weights, outputs = graph.figures["parameters"], graph.figures["activations"]
    problem.settings["variants"] = [[at, 1, 0, float(one), float(weights[at]), 0, 0] for at, one in enumerate(seconds)]
    problem.settings["edge_bytes"] = [float(outputs[source]) for source, _ in problem.settings["edge_order"]]
    visited = {name: find_planner(name)().plan(problem, SearchBudget()).visited for name in ("autopipe", "piper")}
    assert 9 * visited["autopipe"] < visited["piper"]
