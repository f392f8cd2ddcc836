"""Policies that place operators: against the proven optimum, and without torch."""

from __future__ import annotations

import sys
from itertools import islice

import numpy as np
import pytest

from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.tarnawski_ip import TarnawskiIP
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.hardware.errors import PlanError
from tests.draws import drawn
from tests.experiments.planning.random_tables import GraphProblem, draw_placement


def small_problem() -> GraphProblem:
    return draw_placement(0, nodes=8)


class FreePlacement(TarnawskiIP):
    contiguous = False


@pytest.mark.torch
@pytest.mark.parametrize("name", ["placement-rl", "spotlight"])
@pytest.mark.slow
def test_a_policy_comes_near_the_proven_optimum(name: str) -> None:
    pytest.importorskip("torch")
    optimum = FreePlacement().plan(small_problem(), SearchBudget()).value
    found = find_planner(name)().plan(small_problem(), SearchBudget(steps=960))
    assert optimum * (1 - 1e-6) <= found.value <= 1.06 * optimum
    assert found.visited == 960
    assert sorted(node for piece in found.plan["pieces"] for node in piece["nodes"]) == [*range(8)]


@pytest.mark.torch
@pytest.mark.parametrize("passes", drawn([1, 4], keep=2))
def test_a_policy_learns_where_groups_belong(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean time of what it draws falls to the least one, which a draw at random has once in 256."""
    torch = pytest.importorskip("torch")
    from meshcast.experiments.planning.cores.learned import policy_gradient
    from meshcast.experiments.planning.cores.learned.policy_gradient import PlacementPolicy, TrainingSettings, _train

    monkeypatch.setattr(policy_gradient, "CONVERGED", 0.0)  # the same policy goes on
    belong = np.arange(8) % 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy, generator = PlacementPolicy(np.eye(8), 2), torch.Generator().manual_seed(0)
        settings = TrainingSettings(passes=passes)
        batches = _train(policy, lambda devices: 1.0 + float((devices != belong).sum()), 1920, generator, settings, {})
        means = [float(seconds.mean()) for _, seconds in islice(batches, 60)]
    assert means[0] > 4 and means[-1] < 1.1


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "meshcast.experiments.planning.cores.learned.policy_gradient", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PlanError, match="Install the extra"):
        find_planner("spotlight")().plan(small_problem(), SearchBudget(steps=10))
