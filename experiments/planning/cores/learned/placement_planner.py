"""Planners that train a policy to place groups of operators on accelerators and CPUs."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np

from meshcast.experiments.planning.device_graph import DeviceGraph
from meshcast.experiments.planning.planner import Planner, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.hardware.errors import PlanError


class LearnedPlacement(Planner):
    """Customise by: training.

    training: settings of `TrainingSettings` that differ from its defaults.
    """

    modes = ("paper",)
    unit = "s per sample"
    training: ClassVar[dict[str, Any]] = {}

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        trainer = _load_trainer(self.name)
        graph = DeviceGraph(problem.graph())
        cpus = int(settings_of(problem).get("devices", {}).get("cpus", 0))

        def price(devices: np.ndarray) -> float:
            return placement_seconds(graph, devices, problem.gpus, problem.memory)

        settings = trainer.TrainingSettings(**self.training)
        count = problem.gpus + cpus
        trained = trainer.train_placement(group_features(graph), count, price, budget.steps, budget.seed, settings)
        if trained is None:
            raise self.nothing_fits(problem, "All placements drawn failed: give more memory, or more steps")
        devices = np.array(trained.devices)
        pieces = graph.write_pieces((devices == device for device in range(count)), problem.gpus)
        reason = "operators are placed on subsets of devices, one by one"
        return Proposal({"pieces": pieces}, trained.seconds, trained.visited, None, reason)


def placement_seconds(graph: DeviceGraph, devices: np.ndarray, accelerators: int, memory: float) -> float:
    """Returns the load of the fullest device, where accelerators come before CPUs; infinite if any does not fit [s].

    devices: of every group of the graph [groups].
    """
    worst = 0.0
    for device in np.unique(devices):
        nodes = graph.members[devices == device].any(axis=0)
        if device < accelerators:
            load = float(graph.accelerator_seconds(nodes[None], memory)[0])
        else:
            load = float(graph.nodes.figures["cpu"][nodes].sum())
        worst = max(worst, load)
    return worst


def group_features(graph: DeviceGraph) -> np.ndarray:
    """Returns the features of every group: its share of each figure, and which groups it reads [groups, features]."""
    names = ("accelerator", "cpu", "send", "bytes")
    totals = np.stack([graph.members @ graph.nodes.figures[name] for name in names], axis=1)
    groups = len(graph.members)
    adjacency = np.zeros((groups, groups))
    for source, target in graph.groups.edges:
        adjacency[target, source] = 1.0
    order = np.argsort(graph.groups.order)[:, None] / max(1, groups - 1)
    return np.concatenate([totals / np.maximum(totals.max(axis=0), 1e-300), order, adjacency], axis=1)


def _load_trainer(name: str) -> Any:
    """Returns the module that trains. Raises PlanError where torch is absent."""
    try:
        return importlib.import_module("meshcast.experiments.planning.cores.learned.policy_gradient")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        rule = "it trains a policy with torch, which is not installed"
        raise PlanError(f"planner {name}", rule, "Install the extra: pip install -e '.[torch]'") from None
