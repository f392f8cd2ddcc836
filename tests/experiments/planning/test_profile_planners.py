"""Planners on public profiles: the values of the authors' own code, and equivalences between planners."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from meshcast.experiments.planning.planner import Planner, Proposal, find_planner
from meshcast.experiments.planning.planners.auto_mtf import every_map, find_map
from meshcast.experiments.planning.planners.dapple import MachineNetwork
from meshcast.experiments.planning.planners.piper import choose_variants
from meshcast.experiments.planning.planners.tarnawski_ip import TarnawskiIP
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import PROFILES, NetworkLevel, ProfileProblem, profile_names
from meshcast.hardware.errors import PlanError
from tests.draws import drawn
from tests.experiments.planning.random_tables import GraphProblem, draw_graph, draw_placement

TEN_GIGABITS = 1.25e9
TARNAWSKI = {
    "bert24-inference": 17.7899,
    "bert24-training": 41.7458,
    "resnet50-inference": 33.7747,
    "resnet50-training": 78.6318,
}
"""Milliseconds of the authors' own plans."""

any_seed = pytest.mark.parametrize("seed", drawn(range(12), keep=4))


def plan(name: str, problem: Any, budget: SearchBudget | None = None) -> Proposal:
    return find_planner(name)().plan(problem, budget or SearchBudget())


@pytest.mark.parametrize(
    ("profile", "levels", "seconds", "replicas"),
    [
        ("vgg16", [(4, TEN_GIGABITS)], 0.17634916586666669, [[3], [1]]),
        ("vgg16", [(8, 25e9)], 0.08902892681142857, [[7], [1]]),
        ("vgg16", [(16, TEN_GIGABITS)], 0.05479489083076923, [[13], [2], [1]]),
        ("resnet50", [(4, TEN_GIGABITS)], 0.1519926032, [[2], [2]]),
        ("gnmt", [(4, TEN_GIGABITS)], 0.025868, [[1], [1], [1], [1]]),
        ("alexnet", [(16, TEN_GIGABITS)], 0.0150994944, None),
        ("vgg16", [(4, TEN_GIGABITS), (2, TEN_GIGABITS)], 0.1644167168, None),
    ],
)
def test_pipedream_finds_what_its_authors_code_finds(
    profile: str, levels: list[tuple[int, float]], seconds: float, replicas: list[list[int]] | None
) -> None:
    """Values of `optimizer_graph_hierarchical.py --activation_compression_ratio 1`; plans of equal value differ."""
    problem = ProfileProblem(f"pipedream-{profile}", [NetworkLevel(*level) for level in levels])
    proposal = plan("pipedream", problem)
    assert proposal.value == pytest.approx(seconds, rel=1e-9)
    assert proposal.proof is not None and proposal.proof.optimal and proposal.not_executable
    stages = proposal.plan["stages"]
    assert sorted(node for stage in stages for node in stage["nodes"]) == [*range(len(problem.graph().names))]
    if replicas is not None:
        assert [stage["replicas"] for stage in stages] == replicas
    if profile == "vgg16" and problem.gpus == 4:
        assert [len(stage["nodes"]) for stage in stages] == [17, 23]


@pytest.mark.parametrize(("graph", "milliseconds"), TARNAWSKI.items())
def test_tarnawski_finds_what_its_authors_code_finds(graph: str, milliseconds: float) -> None:
    proposal = plan("tarnawski-dp", ProfileProblem(f"tarnawski-{graph}"))
    assert 1e3 * proposal.value == pytest.approx(milliseconds, abs=5.1e-5 * max(1, milliseconds / 10))
    assert sum(piece["device"] == "cpu" for piece in proposal.plan["pieces"]) <= 1


@pytest.mark.parametrize("graph", drawn(TARNAWSKI, keep=4))
def test_the_integer_program_proves_the_placement_of_the_dynamic_program(graph: str) -> None:
    """On six accelerators. The authors gave Gurobi 20 minutes and a gap of 1 %."""
    problem = ProfileProblem(f"tarnawski-{graph}")
    proposal = plan("tarnawski-ip", problem, SearchBudget(seconds=120))
    assert proposal.value == pytest.approx(plan("tarnawski-dp", problem).value, rel=1e-6)
    assert proposal.proof is not None and proposal.proof.optimal


@pytest.mark.parametrize("seed", drawn(range(12), keep=4))
@pytest.mark.parametrize("chain", [False, True])
def test_the_integer_program_is_the_dynamic_program(seed: int, chain: bool) -> None:
    """On chains; elsewhere pieces of the program may read from each other, and only it finds them."""

    class Free(TarnawskiIP):
        contiguous = False

    problem = draw_placement(seed, 6, chain)
    dynamic, program = plan("tarnawski-dp", problem), plan("tarnawski-ip", problem)
    assert program.value <= dynamic.value * (1 + 1e-6)
    assert not chain or program.value == pytest.approx(dynamic.value, rel=1e-6)
    assert Free().plan(problem, SearchBudget()).value <= program.value * (1 + 1e-6)


@any_seed
def test_tarnawski_on_a_chain_is_pipedream_without_replicas(seed: int) -> None:
    """With free transfers, where both count the seconds of pieces alone."""
    graph = draw_graph(seed, chain=True)
    both = graph.figures["forward"] + graph.figures["backward"]

    class Straight(find_planner("pipedream")):  # type: ignore[misc]
        most_replicas = 1

    straight = Straight().plan(GraphProblem(graph, 3, (NetworkLevel(3, math.inf),)), SearchBudget())
    problem = GraphProblem(graph, 3, accelerator=both, cpu=both, send=0 * both, bytes=0 * both)
    assert plan("tarnawski-dp", problem).value == pytest.approx(straight.value)


@any_seed
def test_pipedream_is_piper_without_tensor_parallelism(seed: int) -> None:
    """With free messages and gradient sums, whose formulas differ, and memory for everything."""
    graph = draw_graph(seed, chain=True)
    both = graph.figures["forward"] + graph.figures["backward"]
    problem = GraphProblem(graph, 4, (NetworkLevel(4, TEN_GIGABITS),), parameters=0 * both, activations=0 * both)
    edges = [list(edge) for edge in graph.edges]
    problem.settings |= {"batch": 12, "bandwidth": TEN_GIGABITS, "edge_order": edges, "edge_bytes": [0.0] * len(edges)}
    variants = [[node, 1, 0, float(seconds), 0, 0, 0] for node, seconds in enumerate(both)]
    problem.settings |= {"variants": variants, "sync": []}
    assert plan("piper", problem).value == pytest.approx(plan("pipedream", problem).value)


@pytest.mark.parametrize(
    ("gibibytes", "gpus", "batch", "milliseconds", "stages"),
    [
        (8, 8, 512, 165.85575, [(1, 1)] * 8),
        (4, 16, 512, 105.69475, [(1, 2), *[(1, 1)] * 9, *[(2, 1)] * 2, (1, 1)]),
        pytest.param(2, 32, 1920, 66.5495, [(1, 2), *[(1, 1)] * 7, *[(2, 1)] * 11, (1, 1)], marks=pytest.mark.slow),
        pytest.param(2, 128, 512, 16.7178639, None, marks=pytest.mark.slow),
        pytest.param(8, 64, 512, 20.957338, None, marks=pytest.mark.slow),
        pytest.param(80, 64, 512, 16.885418, [(1, 64)], marks=pytest.mark.slow),
    ],
)
def test_piper_finds_what_its_authors_code_finds(
    gibibytes: int, gpus: int, batch: int, milliseconds: float, stages: list[tuple[int, int]] | None
) -> None:
    """`algo.cpp` with its fast heuristic for variants and a bandwidth of 25 GiB/s; stages as (t, d)."""
    memory, bandwidth = gibibytes * 2**30, 25 * 2**30
    problem = ProfileProblem("piper-bert32-a100", gpus=gpus, memory=memory, batch=batch, bandwidth=bandwidth)
    proposal = plan("piper", problem)
    assert 1e3 * proposal.value == pytest.approx(milliseconds, rel=1e-6)
    degrees = [(stage["tp"], stage["dp"]) for stage in proposal.plan["stages"]]
    assert stages is None or degrees == stages
    assert sorted(node for stage in proposal.plan["stages"] for node in stage["nodes"]) == [*range(37)]


@pytest.mark.parametrize(
    ("profile", "machines", "batch", "micro", "speedup", "copies", "stages"),
    [
        ("vgg19", (8, 2), 2048, 32, 12.062334069274941, 1, [15, 1]),
        ("vgg19", (1, 16), 2048, 32, 10.305769605287798, 1, [14, 2]),
        ("vgg19", (2, 2), 2048, 32, 3.600074303801121, 1, [3, 1]),
        ("vgg19", (1, 4), 2048, 32, 3.478228739917088, 2, [4]),
        ("bert24", (2, 2), 96, 6, 3.4833532929593503, 2, [2, 2]),
        ("bert24", (4, 2), 96, 6, 6.206843715932707, 4, [4, 4]),
        ("bert48", (8, 2), 64, 2, 12.337061634796695, 8, [8, 8]),
        ("bert48", (1, 4), 64, 2, 3.6265387816006203, 1, [1, 1, 1, 1]),
        ("xlnet36", (8, 2), 128, 1, 14.816194280556267, 8, [8, 8]),
        ("amoebanet36", (8, 2), 128, 1, 11.875863950220603, 8, [8, 8]),
        ("amoebanet36", (1, 16), 128, 1, 8.108117854076118, 1, [11, 5]),
    ],
)
def test_dapple_finds_what_its_authors_code_finds(
    profile: str, machines: tuple[int, int], batch: int, micro: int, speedup: float, copies: int, stages: list[int]
) -> None:
    """Values of `SyncOrchestrate::orchestrate`, GPUs a stage; bandwidths of 25, 3 and 1 GB/s are those of its code."""
    levels = [NetworkLevel(machines[0], 25e9), NetworkLevel(machines[1], 3e9)]
    problem = ProfileProblem(f"dapple-{profile}", levels, batch=batch, micro_batch=micro, message_bandwidth=1e9)
    proposal = plan("dapple", problem)
    figures = problem.graph().figures
    whole = float((figures["forward"] + figures["backward"]).sum()) * batch / problem.settings["profile_batch"]
    assert whole / proposal.value == pytest.approx(speedup, rel=1e-12)
    assert proposal.plan["copies"] == copies and [len(stage["gpus"]) for stage in proposal.plan["stages"]] == stages
    nodes = sorted(node for stage in proposal.plan["stages"] for node in stage["nodes"])
    assert nodes == [*range(len(problem.graph().names))]


def test_policies_choose_gpus_of_empty_machines_of_those_in_use_and_of_all() -> None:
    network = MachineNetwork(3, 2, 25e9, 3e9, 1e9)
    used = frozenset({0})
    assert network.place(used, 2) == [frozenset({2, 3}), frozenset({1, 2})]
    assert network.place(used, 1) == [frozenset({2}), frozenset({1})]
    assert network.place(used, 6) == []
    assert not network.spans(frozenset({2, 3})) and network.spans(frozenset({1, 2}))


@pytest.mark.parametrize("seed", range(10))
def test_variants_are_chosen_within_the_memory(seed: int) -> None:
    """Never better than brute force, and what fits is found."""
    rng = np.random.default_rng(seed)
    seconds = np.stack([rng.uniform(1, 2, 6), rng.uniform(2, 3, 6)], axis=1)
    memory = np.stack([rng.uniform(5, 9, 6), rng.uniform(1, 4, 6)], axis=1)
    for limit in (memory[:, 1].sum() * 0.99, memory[:, 1].sum() * 1.01, 30.0, 60.0):
        choices = [np.array(choice) for choice in product((0, 1), repeat=6)]
        fitting = [choice for choice in choices if memory[np.arange(6), choice].sum() <= limit]
        best = min((float(seconds[np.arange(6), choice].sum()) for choice in fitting), default=math.inf)
        value = float(choose_variants(seconds, memory[None], limit)[0])
        assert value >= best * (1 - 1e-12) and math.isinf(value) == math.isinf(best)


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({}, {"a": "m2", "c": "m1"}),
        ({"undivided": ["a", "c"]}, {}),
        ({"mesh": {"m1": 4, "m2": 2, "m3": 1}}, {"a": "m2", "b": "m3", "c": "m1"}),
    ],
)
def test_auto_mtf_finds_what_its_authors_tests_expect(settings: dict[str, Any], layout: dict[str, str]) -> None:
    """`layout_optimizer_test.py`: the plain graph, dims that cannot be divided, and a tie broken by an axis of one."""
    proposal = plan("auto-mtf", ProfileProblem("auto-mtf-einsum", **settings))
    assert proposal.plan["layout"] == layout
    if not settings:
        assert proposal.value == (3 + 1) * (25 + 25 + 25) * 4 - 2


def test_maps_of_three_dims_that_meet_over_two_axes() -> None:
    """One without entries, six with one, six with two: as in the authors' test of their assignments."""
    maps = list(every_map({"s1": 8, "s2": 8, "s3": 8}, {"m1": 4, "m2": 8}, [{"s1", "s2", "s3"}]))
    assert len(maps) == 13 and {} in maps and {"s1": "m2", "s2": "m1"} in maps
    assert {"s1": "m2", "s3": "m2"} not in maps
    with pytest.raises(ValueError, match="over 2000000 maps"):
        find_map(dict.fromkeys("abcdefghijklmnop", 2), {"x": 2, "y": 2}, [], lambda layout: 0.0)


@pytest.mark.parametrize("name", drawn(profile_names(), keep=4))
def test_a_profile_names_its_source(name: str) -> None:
    problem = ProfileProblem(name)
    source = problem.settings["source"]
    assert {"repository", "commit", "file", "licence"} <= source.keys() and len(source["commit"]) == 40
    assert len(problem.graph().names) >= 3


def test_profiles_stay_small() -> None:
    assert sum(path.stat().st_size for path in PROFILES.iterdir()) < 400_000


def test_problems_say_what_they_lack() -> None:
    problem = ProfileProblem("pipedream-vgg16")
    with pytest.raises(PlanError, match="no operator tables"):
        problem.operators({"x": 2})
    with pytest.raises(PlanError, match="no stage tables"):
        problem.stages()
    assert issubclass(find_planner("tarnawski-dp"), Planner)
