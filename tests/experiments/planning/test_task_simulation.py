"""FlexFlow's simulated execution: closed forms, changes against whole simulations, and its walk over placements."""

from __future__ import annotations

import pytest

from meshcast.experiments.planning.cores.task_simulation import OperatorPlacement, TaskSimulation, link_bandwidths
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.flexflow import PlacementWalk
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem
from tests.draws import drawn
from tests.experiments.planning.conftest import gpt, propose
from tests.experiments.planning.random_tables import draw_graph

TWO_BY_TWO = link_bandwidths([2, 2], [5.0, 2.0])


def test_links_are_those_of_the_innermost_common_level() -> None:
    assert TWO_BY_TWO[0, 1] == TWO_BY_TWO[3, 2] == 5.0 and TWO_BY_TWO[1, 2] == TWO_BY_TWO[0, 3] == 2.0


def chain(*seconds: float, outputs: float = 0.0, weights: float = 0.0) -> LayerGraph:
    count = len(seconds)
    figures = {"forward": seconds, "backward": [2 * s for s in seconds]}
    figures |= {"parameters": [weights] * count, "activations": [outputs] * count}
    return LayerGraph([f"n{i}" for i in range(count)], [(i, i + 1) for i in range(count - 1)], figures)


def test_a_chain_on_a_gpu_takes_its_passes() -> None:
    simulation = TaskSimulation(chain(1.0, 2.0, 3.0, outputs=9.0, weights=9.0), TWO_BY_TWO)
    assert simulation.simulate({node: OperatorPlacement(1, 1, (0,)) for node in range(3)}) == 18.0


def test_data_parallelism_ends_with_the_sums_of_the_first_layer() -> None:
    """Passes take half; the last layer's gradients are summed beside the first's backward pass, and go and come back
    over one link each: 2 x 3 bytes at 5 bytes/s."""
    simulation = TaskSimulation(chain(1.0, 1.0, outputs=7.0, weights=3.0), TWO_BY_TWO)
    halves = {node: OperatorPlacement(2, 1, (0, 1)) for node in range(2)}
    assert simulation.simulate(halves) == pytest.approx(3.0 + 2 * 3.0 / 5.0)


def test_operators_on_different_gpus_send_outputs_and_gradients() -> None:
    simulation = TaskSimulation(chain(1.0, 1.0, outputs=6.0), TWO_BY_TWO)
    apart = {0: OperatorPlacement(1, 1, (0,)), 1: OperatorPlacement(1, 1, (2,))}
    assert simulation.simulate(apart) == pytest.approx(6.0 + 2 * 6.0 / 2.0)


def test_parts_of_channels_share_no_weights_and_read_all_channels() -> None:
    simulation = TaskSimulation(chain(1.0, 1.0, outputs=6.0, weights=5.0), TWO_BY_TWO)
    columns = {node: OperatorPlacement(1, 2, (0, 1)) for node in range(2)}
    assert simulation.simulate(columns) == pytest.approx(3.0 + 2 * 3.0 / 5.0)
    assert simulation.weights_nbytes(4) == 5.0


@pytest.mark.parametrize("seed", drawn(range(8), keep=3))
def test_a_change_is_simulated_as_the_whole(seed: int) -> None:
    """Tasks, runs and step are those of a simulation from the start, and a rejected change leaves no trace."""
    graph = draw_graph(seed)
    walk = PlacementWalk(graph, TWO_BY_TWO, 4, 1e9, SearchBudget(seed=seed))
    simulation, replayed, tasks = walk.simulation, 0, 0
    simulation.simulate({node: walk.draw_placement(node) for node in walk.nodes})
    for step in range(30):
        before, seconds = simulation.keep_state(), simulation.seconds
        node, simulation.replayed = walk.draw.choice(walk.nodes), 0
        changed = simulation.change(node, walk.draw_placement(node))
        whole = TaskSimulation(graph, TWO_BY_TWO)
        assert changed == pytest.approx(whole.simulate(simulation.placements), rel=1e-12)
        assert simulation.tasks == whole.tasks and simulation.runs == whole.runs
        replayed, tasks = replayed + simulation.replayed, tasks + len(whole.tasks)
        if step % 3 == 0:
            simulation.restore_state(before)
            assert simulation.seconds == seconds
    assert replayed < 0.95 * tasks


@pytest.mark.parametrize(("profile", "steps"), drawn([("vgg16", 60), ("alexnet", 200)], keep=2))
def test_placements_beat_data_parallelism_where_weights_are_large(profile: str, steps: int) -> None:
    """On links of 10 Gb/s fully connected layers go to fewer GPUs, or are divided along channels: subsets of GPUs."""
    problem = ProfileProblem(f"pipedream-{profile}", [NetworkLevel(4, 1.25e9)])
    graph, gpus = problem.graph(), tuple(range(4))
    simulation = TaskSimulation(graph, link_bandwidths([4], [1.25e9]))
    data = simulation.simulate({node: OperatorPlacement(4, 1, gpus) for node in range(len(graph.names))})
    proposal = find_planner("flexflow")().plan(problem, SearchBudget(seconds=6, steps=steps))
    placements = {
        entry["node"]: OperatorPlacement(entry["samples"], entry["channels"], tuple(entry["devices"]))
        for entry in proposal.plan["operators"]
    }
    assert simulation.simulate(placements) == pytest.approx(proposal.value) and proposal.value < data / 1.3
    assert any(len(at.devices) < 4 for at in placements.values()) and proposal.not_executable


def test_the_engine_judges_layouts_of_a_job() -> None:
    """The value is the forecast of the step, no worse than of data parallelism or of the table's best."""
    proposal, optimum = map(propose, ("flexflow", "optcnn"))
    steps = [gpt().forecast(plan.plan).step_time for plan in (proposal, optimum)]
    assert proposal.value == steps[0] <= 1.05 * steps[1]
