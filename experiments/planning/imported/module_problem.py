"""A torch module on a cluster as a problem for planners of layer graphs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.imported.module_graph import ModuleOperator, merge_operators
from meshcast.experiments.planning.imported.operator_works import PassWorks
from meshcast.experiments.planning.problem import UnknownPart
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.hardware import load_cluster
from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.ir.mesh import Mesh

COPIES = 4
"""Weights, gradients and two moments of Adam, as often as the bytes of weights."""


class ModuleProblem(UnknownPart):
    """A module's layers, priced on the GPUs of a cluster by the kernels of the forecast, without the host's time.

    One micro-batch is the batch of the module's inputs.

    spec: ``FILE.py:FUNCTION``; the function returns the module and its inputs.
    cluster: as in a job. depth: names of a submodule's path that tell layers apart; 0: all.
    microbatches: of a step. chain: whether layers follow each other as they are executed, so that branches are no
        choice of a planner.

    Raises PlanError for a file or function that does not exist, without torch, and where the module cannot be traced.
    """

    mode = "paper"

    def __init__(self, spec: str, cluster: Any, depth: int = 0, microbatches: int = 8, chain: bool = False) -> None:
        operators = trace(spec)
        self.name, self.microbatches = spec, microbatches
        self.cluster = load_cluster(cluster)
        self.gpus, self.memory = self.cluster.gpus, float(self.cluster.gpu.memory)
        if len(self.cluster.kinds) > 1:
            rule = "its nodes are of several kinds, and planners of layer graphs know one"
            raise PlanError("cluster", rule, "Name nodes of one kind", str(self.cluster))
        self._costs = Costs(self.cluster, Mesh({"dp": self.gpus}))
        graph = merge_operators(operators, self._price, depth)
        self._graph = self._add_figures(graph.linearise() if chain else graph)
        self.settings: dict[str, Any] = {"devices": {"accelerators": self.gpus, "cpus": 0}}
        self.settings |= {"batch": microbatches, "microbatches": microbatches, **self._variants()}

    @property
    def levels(self) -> tuple[NetworkLevel, ...]:
        """The GPUs of a node, and the nodes, with the bandwidth of a GPU and of a node."""
        cluster = self.cluster
        inside = cluster.scale_up if cluster.node.scale_up else cluster.host
        local = min(cluster.gpus_per_node, cluster.gpus)
        found = [NetworkLevel(local, float(inside.bandwidth))] if local > 1 else []
        if cluster.gpus > local:
            found.append(NetworkLevel(cluster.gpus // local, local * float(cluster.scale_out.bandwidth)))
        return tuple(found)

    def graph(self) -> LayerGraph:
        """The graph. Raises PlanError if it has too many ideals for planners that go through all."""
        try:
            self._graph.ideals()
        except ValueError as error:
            remedy = "Plan a chain (--chain), or merge more operators into a layer: a smaller --depth"
            raise PlanError(f"problem {self.name}", str(error).partition(":")[0], remedy) from None
        return self._graph

    def _price(self, works: PassWorks) -> tuple[float, float]:
        """Seconds of the kernels of both passes."""
        forward, backward = (sum(self._costs.estimate(one).seconds for one in side) for side in works)
        return forward, backward

    def _add_figures(self, graph: LayerGraph) -> LayerGraph:
        """The graph with what placement reads: seconds on an accelerator, of sending an output, and bytes kept.

        There is no CPU; its column repeats the accelerator's.
        """
        own, links = graph.figures, [level.bandwidth for level in self.levels]
        both = own["forward"] + own["backward"]
        placed = {"accelerator": both, "cpu": both, "bytes": COPIES * own["parameters"] + own["kept"]}
        placed["send"] = own["activations"] / min(links) if links else 0 * both
        return LayerGraph(graph.names, graph.edges, {**own, **placed})

    def _variants(self) -> dict[str, Any]:
        """What Piper reads: every layer with its activations kept, or recomputed from its inputs."""
        own = self._graph.figures
        inputs = [sum(own["activations"][[*before]]) for before in self._graph.predecessors]
        rows = []
        for layer in range(len(self._graph.names)):
            weights = float(own["parameters"][layer])
            for again in (0, 1):
                seconds = (1 + again) * own["forward"][layer] + own["backward"][layer]
                in_flight = inputs[layer] if again else own["kept"][layer]
                rows.append([layer, 1, again, float(seconds), weights, float(in_flight), COPIES * weights])
        sent = [float(own["activations"][source]) for source, _ in self._graph.edges]
        bandwidth = float(np.min([level.bandwidth for level in self.levels])) if self.levels else float("inf")
        edges = [[*edge] for edge in self._graph.edges]
        return {"variants": rows, "sync": [], "edge_order": edges, "edge_bytes": sent, "bandwidth": bandwidth}


def trace(spec: str) -> list[ModuleOperator]:
    """The operators of the module that ``FILE.py:FUNCTION`` makes."""
    tracing = _load_tracing(spec)
    return list(tracing.trace_module(_load_function(spec), spec))


def _load_tracing(spec: str) -> Any:
    """The module that traces. Raises PlanError where torch is absent."""
    try:
        return importlib.import_module("meshcast.experiments.planning.imported.tracing")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        rule = "torch.export traces it, and torch is not installed"
        raise PlanError(spec, rule, "Install the extra: pip install -e '.[torch]'") from None


def _load_function(spec: str) -> Callable[[], Any]:
    """The function of ``FILE.py:FUNCTION``. Raises PlanError if there is none."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name.isidentifier():
        raise PlanError("module", "a module is named FILE.py:FUNCTION", "Write for example model.py:make_model", spec)
    if not path.is_file():
        raise PlanError("module", "there is no such file", "Name a Python file", file)
    made = importlib.util.spec_from_file_location(path.stem, path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    try:
        made.loader.exec_module(module)
    except Exception as error:
        rule = f"it cannot be imported: {type(error).__name__}: {error}"
        raise PlanError(file, rule, "Correct it, or install what it imports") from None
    function = getattr(module, name, None)
    if not callable(function):
        known = [one for one in vars(module) if not one.startswith("_") and callable(getattr(module, one))]
        raise PlanError(file, "it has no such function", nearest(name, known), name)
    return function  # type: ignore[no-any-return]
