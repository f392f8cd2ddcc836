"""Tarnawski et al.: the placement of least maximal load as an integer program, contiguous or not.

Binaries say which device a colour class is on; for every node and accelerator two variables say that its output leaves
it, and that it enters. Contiguity of a device: a mark is set at every node from which the device is reached; a node
that does not belong to the device, but reads from it, must not be marked (arXiv 2006.16423). Two
contiguous pieces may read from each other, which no chain of ideals has, so the program may be better than the dynamic
program. Solved by CP-SAT of OR-tools, in whole numbers of a fine unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import seconds_left
from meshcast.experiments.planning.device_graph import DeviceGraph
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.hardware.documents.optional_package import import_optional
from meshcast.simulator.ir.scheme import Paper

GRAIN = 10**9
"""Units in the time of all groups on accelerators, and in the memory of an accelerator."""

WORKERS = 4
"""Strategies of CP-SAT that run beside each other."""


class DevicePlacement(NamedTuple):
    """A placement.

    groups: of every device, accelerators first.
    load: of the fullest device [s].
    bound: no placement has a lower load [s].
    branches: of the solver.
    """

    groups: list[list[int]]
    load: float
    bound: float
    branches: int


class PlacementProgram:
    """The least largest load of placements of a graph on accelerators of some memory [bytes] and on CPUs.

    Coefficients are rounded down: the program's optimum is no higher than that of exact ones.
    """

    def __init__(self, graph: DeviceGraph, accelerators: int, cpus: int, memory: float) -> None:
        self.cp = import_optional("ortools.sat.python.cp_model", "search", "the planner tarnawski-ip")
        self.model: Any = self.cp.CpModel()
        self.graph, self.accelerators, self.devices, self.memory = graph, accelerators, accelerators + cpus, memory
        self.groups, self.nodes = graph.members.shape
        self.unit = float(graph.nodes.figures["accelerator"].sum()) / GRAIN
        self.on = [[self.model.new_bool_var("") for _ in range(self.devices)] for _ in range(self.groups)]
        for group in self.on:
            self.model.add_exactly_one(group)
        self._forbid_unsupported()
        self._add_loads(self._add_transfers())
        self._order_devices()

    def _sum_figure(self, kind: str, unit: float) -> np.ndarray:
        """Returns a figure of every group in whole units, rounded down."""
        return np.floor(self.graph.members @ self.graph.nodes.figures[kind] / unit).astype(np.int64)

    def _forbid_unsupported(self) -> None:
        supported = self.graph.nodes.figures.get("supported", np.ones(self.nodes))
        for group in np.flatnonzero((self.graph.members & (supported == 0)[None]).any(axis=1)).tolist():
            for device in range(self.accelerators):
                self.model.add(self.on[group][device] == 0)

    def _add_transfers(self) -> list[Mapping[int, list[Any]]]:
        """Returns by accelerator whether the output of a node leaves it, and enters it: once for all readers."""
        group_of, send = self.graph.members.argmax(axis=0), self.graph.nodes.figures["send"]
        readers: dict[int, set[int]] = {}
        for source, target in self.graph.nodes.edges:
            if group_of[source] != group_of[target] and send[source] > 0:
                readers.setdefault(source, set()).add(int(group_of[target]))
        transfers: list[Mapping[int, list[Any]]] = []
        for device in range(self.accelerators):
            crossing: dict[int, list[Any]] = {}
            for node, groups in readers.items():
                crossing[node] = [self.model.new_bool_var("leaves"), self.model.new_bool_var("enters")]
                leaves, enters = crossing[node]
                here = self.on[group_of[node]][device]
                for there in (self.on[group][device] for group in groups):
                    self.model.add_bool_or([leaves, here.negated(), there])
                    self.model.add_bool_or([enters, there.negated(), here])
            transfers.append(crossing)
        return transfers

    def _add_loads(self, transfers: list[Mapping[int, list[Any]]]) -> None:
        """Demands of the largest load to be at least that of every device; accelerators have so much memory."""
        accelerator, cpu = (self._sum_figure(kind, self.unit) for kind in ("accelerator", "cpu"))
        nbytes = self._sum_figure("bytes", self.memory / GRAIN)
        send = np.floor(self.graph.nodes.figures["send"] / self.unit).astype(np.int64)
        most = int(max(accelerator.sum() + 2 * send.sum(), cpu.sum()))
        self.largest = self.model.new_int_var(0, most, "largest load")
        for device in range(self.devices):
            on = [group[device] for group in self.on]
            if device >= self.accelerators:
                self.model.add(self.cp.LinearExpr.weighted_sum(on, cpu.tolist()) <= self.largest)
                continue
            self.model.add(self.cp.LinearExpr.weighted_sum(on, nbytes.tolist()) <= GRAIN)
            crossing = [(way, int(send[node])) for node, ways in transfers[device].items() for way in ways]
            terms = [*zip(on, accelerator.tolist(), strict=True), *crossing]
            variables, seconds = zip(*terms, strict=True)
            self.model.add(self.cp.LinearExpr.weighted_sum(variables, seconds) <= self.largest)
        self.model.minimize(self.largest)

    def _order_devices(self) -> None:
        """Breaks the symmetry of accelerators: group g is on the first g + 1 of them, or on a CPU."""
        for group in range(min(self.groups, self.accelerators)):
            for device in range(group + 1, self.accelerators):
                self.model.add(self.on[self.graph.groups.order[group]][device] == 0)

    def require_contiguity(self) -> None:
        """Demands that no path of the forward graph leaves a device and comes back."""
        for device in range(self.devices):
            reaches = [self.model.new_bool_var("") for _ in range(self.groups)]
            for group in range(self.groups):
                self.model.add_implication(self.on[group][device], reaches[group])
            for source, target in self.graph.groups.edges:
                here, there = self.on[source][device], self.on[target][device]
                self.model.add_implication(reaches[target], reaches[source])
                self.model.add_bool_or([here.negated(), reaches[target].negated(), there])

    def solve(self) -> DevicePlacement | None:
        """Returns the best placement that is known in time; None if there is none."""
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = WORKERS
        solver.parameters.max_time_in_seconds = seconds_left()
        status = solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None
        placed = [
            [number for number in range(self.groups) if solver.value(self.on[number][device])]
            for device in range(self.devices)
        ]
        load = max(self._load(groups, device) for device, groups in enumerate(placed))
        bound = load if status == self.cp.OPTIMAL else min(load, solver.best_objective_bound * self.unit)
        return DevicePlacement(placed, load, bound, int(solver.num_branches))

    def _load(self, groups: list[int], device: int) -> float:
        nodes = self.graph.members[groups].any(axis=0)
        if device >= self.accelerators:
            return float(nodes @ self.graph.nodes.figures["cpu"])
        return float(self.graph.accelerator_seconds(nodes[None], self.memory * (1 + self.groups / GRAIN))[0])


class TarnawskiIP(Planner):
    paper = Paper("arXiv:2006.16423", "Efficient Algorithms for Device Placement of DNN Graph Operators", 2020)
    restrictions = ("shard or replicate operators",)
    modes = ("paper",)
    unit = "s per sample"
    contiguous = True
    """Whether the nodes of every device must be contiguous in the forward graph."""

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        graph = DeviceGraph(problem.graph())
        cpus = int(settings_of(problem).get("devices", {}).get("cpus", 0))
        program = PlacementProgram(graph, problem.gpus, cpus, problem.memory)
        if self.contiguous:
            program.require_contiguity()
        placement = program.solve()
        if placement is None:
            raise self.nothing_fits(problem, "Give more devices or memory, or the solver more time")
        pieces = graph.write_pieces(placement.groups, problem.gpus)
        proof = PlanProof(placement.bound, placement.load, "constraint programming")
        reason = "operators are placed on subsets of devices, one by one"
        return Proposal({"pieces": pieces}, placement.load, placement.branches, proof, reason)
