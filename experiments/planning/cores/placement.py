"""Placement of colour classes on devices as an integer program, solved by HiGHS.

Tarnawski et al. 2020, arXiv 2006.16423
"""

from __future__ import annotations

import numpy as np

from experiments.planning.cores.solver import load_solver
from experiments.planning.device_graph import DeviceGraph


class PlacementProgram:
    """Variables (group on device, output in and out of an accelerator, marks, the largest load) and rows."""

    def __init__(self, graph: DeviceGraph, accelerators: int, cpus: int) -> None:
        self.graph, self.accelerators, self.devices = graph, accelerators, accelerators + cpus
        self.groups, self.nodes = graph.members.shape
        self.group_of = graph.members.argmax(axis=0)
        self.moves = self.groups * self.devices
        self.marks = self.moves + 2 * self.nodes * accelerators
        self.load = self.marks + self.groups * self.devices
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        for group in range(self.groups):
            self._row([(self.on(group, device), 1.0) for device in range(self.devices)], 1.0, 1.0)

    def on(self, group: int, device: int) -> int:
        """The place of the binary of a group on a device."""
        return group * self.devices + device

    def _row(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        self.entries += [(len(self.low), place, value) for place, value in terms]
        self.low.append(low)
        self.high.append(high)

    def add_loads(self, memory: float) -> None:
        """The largest load is at least that of every device; accelerators have so much memory."""
        figures, members = self.graph.nodes.figures, self.graph.members
        own = {kind: members @ figures[kind] for kind in ("accelerator", "cpu", "bytes")}
        for device in range(self.devices):
            kind = "accelerator" if device < self.accelerators else "cpu"
            terms = [(self.on(group, device), float(own[kind][group])) for group in range(self.groups)]
            if device < self.accelerators:
                for node in range(self.nodes):
                    out = self.moves + 2 * (node * self.accelerators + device)
                    terms += [(out, float(figures["send"][node])), (out + 1, float(figures["send"][node]))]
                scaled = [(self.on(group, device), float(own["bytes"][group]) / memory) for group in range(self.groups)]
                self._row(scaled, -np.inf, 1.0)
            self._row([*terms, (self.load, -1.0)], -np.inf, 0.0)
        pairs = {(a, int(self.group_of[a]), int(self.group_of[b])) for a, b in self.graph.nodes.edges}
        for node, own_group, reader in sorted(pairs):
            if own_group != reader and figures["send"][node] > 0:
                for device in range(self.accelerators):
                    out = self.moves + 2 * (node * self.accelerators + device)
                    here, there = self.on(own_group, device), self.on(reader, device)
                    self._row([(out, 1.0), (here, -1.0), (there, 1.0)], 0.0, np.inf)
                    self._row([(out + 1, 1.0), (there, -1.0), (here, 1.0)], 0.0, np.inf)

    def order_devices(self) -> None:
        """Accelerators are alike: the groups of device d have d or more groups before them, so group g is on the first
        g + 1 accelerators or on a CPU."""
        for group in range(min(self.groups, self.accelerators)):
            for device in range(group + 1, self.accelerators):
                self._row([(self.on(self.graph.groups.order[group], device), 1.0)], 0.0, 0.0)

    def require_contiguity(self) -> None:
        """No path of the forward graph leaves a device and comes back."""
        for device in range(self.devices):
            mark = [self.marks + group * self.devices + device for group in range(self.groups)]
            for group in range(self.groups):
                self._row([(mark[group], 1.0), (self.on(group, device), -1.0)], 0.0, np.inf)
            for source, target in self.graph.groups.edges:
                self._row([(mark[source], 1.0), (mark[target], -1.0)], 0.0, np.inf)
                terms = [(mark[target], 1.0), (self.on(target, device), -1.0), (self.on(source, device), 1.0)]
                self._row(terms, -np.inf, 1.0)

    def solve(self, seconds: float):  # type: ignore[no-untyped-def]  # scipy's result has no stub
        """The solution of the program within some seconds of the solver."""
        count = self.load + 1
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = load_solver().coo_matrix((values, (rows, columns)), shape=(len(self.low), count)).tocsr()
        cost = np.zeros(count)
        cost[self.load] = 1.0
        integral = np.zeros(count)
        integral[: self.moves] = 1
        most = np.ones(count)
        most[self.load] = np.inf
        return load_solver().milp(
            cost,
            integrality=integral,
            bounds=load_solver().Bounds(0, most),
            constraints=load_solver().LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )
