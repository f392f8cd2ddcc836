"""The execution of a graph of operators as tasks on GPUs and links, whole or from the first task on that a change
moves.

Every part of an operator is a task of each pass on its GPU, every overlap of a part's output with what a part on
another GPU reads is a task on the link between both, and so is every message of gradients and updated weights between
the parts that hold the same weights. A part reads all channels of its samples. A device runs its tasks in the order in
which they become ready (Jia et al. 2019, arXiv 1807.05358, sections 5.1 to 5.3; `src/runtime/simulator.cc` of
flexflow/FlexFlow, with updates that overlap the backward pass).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from meshcast.experiments.planning.graph import LayerGraph

FORWARD, BACKWARD, UPDATE, SEND, RETURN, REDUCE, SPREAD = range(7)
"""Kinds of tasks: passes, updates of weights, messages of outputs and of their gradients, of weights' gradients and of
updated weights."""

TaskKey = tuple[int, int, int, int, int]
"""A kind, an operator with its part, and for messages between operators the reader with its part."""

Span = tuple[Fraction, Fraction]
"""A part of a dim, from and to, of 0 to 1."""


class OperatorPlacement(NamedTuple):
    """How an operator is done: parts of its samples, parts of its channels, and the GPU of every part, those of the
    first part of the samples first."""

    samples: int
    channels: int
    devices: tuple[int, ...]

    def spans(self, part: int) -> tuple[Span, Span]:
        """Returns the samples and channels of a part."""
        sample, channel = divmod(part, self.channels)
        return _span(sample, self.samples), _span(channel, self.channels)


def _span(place: int, parts: int) -> Span:
    return Fraction(place, parts), Fraction(place + 1, parts)


def _overlap(one: Span, other: Span) -> Fraction:
    return max(Fraction(0), min(one[1], other[1]) - max(one[0], other[0]))


Placements = Mapping[int, OperatorPlacement]
"""The placement of every operator."""


class SimulatedTask(NamedTuple):
    """A task: its device (a GPU, or the link between two), its seconds, and the tasks before it."""

    device: tuple[int, ...]
    seconds: float
    after: tuple[TaskKey, ...]


class TaskRun(NamedTuple):
    """When a task becomes ready and when it ends [s]."""

    ready: float
    end: float


class SavedSimulation(NamedTuple):
    """Placements with their tasks and runs."""

    placements: dict[int, OperatorPlacement]
    tasks: dict[TaskKey, SimulatedTask]
    runs: dict[TaskKey, TaskRun]
    order: list[TaskKey]


class TaskSimulation:
    """The tasks of a graph under placements, and their execution.

    graph: with the figures ``forward``, ``backward`` [s], ``parameters`` and ``activations`` [bytes].
    bandwidth: of the link between two GPUs [bytes/s].
    tasks, runs: of the present placements; order: in which tasks became ready.
    replayed: tasks that were executed, of all simulations.
    """

    def __init__(self, graph: LayerGraph, bandwidth: Mapping[tuple[int, int], float]) -> None:
        self.graph, self.bandwidth, self.replayed = graph, bandwidth, 0
        self.figures = {name: graph.figures[name].tolist() for name in ("forward", "backward", "parameters")}
        self.output = graph.figures["activations"].tolist()
        self.readers: dict[int, list[int]] = {node: [] for node in range(len(graph.names))}
        for source, target in graph.edges:
            self.readers[source].append(target)
        self.placements: dict[int, OperatorPlacement] = {}
        self.tasks: dict[TaskKey, SimulatedTask] = {}
        self.runs: dict[TaskKey, TaskRun] = {}
        self.order: list[TaskKey] = []

    @property
    def seconds(self) -> float:
        """Of the step [s]."""
        return max((run.end for run in self.runs.values()), default=0.0)

    def simulate(self, placements: Placements) -> float:
        """Executes all tasks of these placements; returns the seconds of the step [s]."""
        self.placements = dict(placements)
        self.tasks = {}
        for node in range(len(self.graph.names)):
            self._add_tasks(node)
        self.runs, self.order = {}, []
        self._replay(0.0)
        return self.seconds

    def change(self, node: int, placement: OperatorPlacement) -> float:
        """Executes again, with another placement of an operator, what comes after the first task that it moves; returns
        the seconds of the step, as `simulate` would [s]."""
        producers = self.graph.predecessors[node]
        begins = [
            self.runs[FORWARD, source, part, -1, -1].end
            for source in producers
            for part in range(len(self.placements[source].devices))
        ]
        begin = min(begins, default=0.0)
        beside = {node, *producers, *self.readers[node]}
        self.tasks = {key: task for key, task in self.tasks.items() if key[1] not in beside and key[3] not in beside}
        self.placements[node] = placement
        for other in sorted(beside):
            self._add_tasks(other)
        for other in sorted(beside):  # messages between neighbours and others
            for source in self.graph.predecessors[other]:
                self._add_messages(source, other)
            for target in self.readers[other]:
                self._add_messages(other, target)
        self._replay(begin)
        return self.seconds

    def keep_state(self) -> SavedSimulation:
        """Returns the present state, to come back to after a change."""
        return SavedSimulation(dict(self.placements), self.tasks, self.runs, self.order)

    def restore_state(self, saved: SavedSimulation) -> None:
        self.placements, self.tasks, self.runs, self.order = saved

    # ------------------------------------------------------------------------------------------- tasks

    def _add_tasks(self, node: int) -> None:
        """Adds the passes of an operator, its updates, and the messages to it."""
        placement = self.placements[node]
        parts = len(placement.devices)
        for part, gpu in enumerate(placement.devices):
            before = self._arrivals(node, part)
            self.tasks[FORWARD, node, part, -1, -1] = SimulatedTask(
                (gpu,), self.figures["forward"][node] / parts, before
            )
            behind = ((FORWARD, node, part, -1, -1), *self._gradients(node, part))
            self.tasks[BACKWARD, node, part, -1, -1] = SimulatedTask(
                (gpu,), self.figures["backward"][node] / parts, behind
            )
        for source in self.graph.predecessors[node]:
            self._add_messages(source, node)
        if placement.samples > 1 and self.figures["parameters"][node]:
            self._add_updates(node, placement)

    def _overlaps(self, source: int, target: int) -> Iterator[tuple[int, int, float]]:
        """Yields the parts of which one reads from the other, with the bytes. A part reads all channels of its
        samples."""
        makes, read = self.placements[source], self.placements[target]
        for reader in range(len(read.devices)):
            samples = read.spans(reader)[0]
            for maker in range(len(makes.devices)):
                own, channels = makes.spans(maker)
                if common := _overlap(samples, own):
                    yield maker, reader, float(common * (channels[1] - channels[0])) * self.output[source]

    def _add_messages(self, source: int, target: int) -> None:
        makes, read = self.placements[source].devices, self.placements[target].devices
        for maker, reader, nbytes in self._overlaps(source, target):
            here, there = makes[maker], read[reader]
            if here != there:
                sent, back = self.bandwidth[here, there], self.bandwidth[there, here]
                key = source, maker, target, reader
                self.tasks[SEND, *key] = SimulatedTask(
                    (here, there), nbytes / sent, ((FORWARD, source, maker, -1, -1),)
                )
                self.tasks[RETURN, *key] = SimulatedTask(
                    (there, here), nbytes / back, ((BACKWARD, target, reader, -1, -1),)
                )

    def _arrivals(self, node: int, part: int) -> tuple[TaskKey, ...]:
        """Returns what the forward pass of a part waits for."""
        gpu, keys = self.placements[node].devices[part], list[TaskKey]()
        for source in self.graph.predecessors[node]:
            for maker, reader, _ in self._overlaps(source, node):
                if reader == part:
                    near = self.placements[source].devices[maker] == gpu
                    keys.append((FORWARD, source, maker, -1, -1) if near else (SEND, source, maker, node, part))
        return tuple(keys)

    def _gradients(self, node: int, part: int) -> tuple[TaskKey, ...]:
        """Returns what the backward pass of a part waits for behind its forward pass."""
        gpu, keys = self.placements[node].devices[part], list[TaskKey]()
        for target in self.readers[node]:
            for maker, reader, _ in self._overlaps(node, target):
                if maker == part:
                    near = self.placements[target].devices[reader] == gpu
                    keys.append((BACKWARD, target, reader, -1, -1) if near else (RETURN, node, part, target, reader))
        return tuple(keys)

    def _add_updates(self, node: int, placement: OperatorPlacement) -> None:
        """Adds the update of each part of the weights on the first GPU that holds it, gradients to it, weights back."""
        nbytes = self.figures["parameters"][node] / placement.channels
        for channel in range(placement.channels):
            holders = range(channel, len(placement.devices), placement.channels)
            first = placement.devices[channel]
            arrivals: list[TaskKey] = [(BACKWARD, node, channel, -1, -1)]
            for part in holders[1:]:
                gpu = placement.devices[part]
                gradient: TaskKey = (REDUCE, node, part, -1, -1)
                after: TaskKey = (BACKWARD, node, part, -1, -1)
                self.tasks[gradient] = SimulatedTask((gpu, first), nbytes / self.bandwidth[gpu, first], (after,))
                arrivals.append(gradient)
                update: TaskKey = (UPDATE, node, channel, -1, -1)
                self.tasks[SPREAD, node, part, -1, -1] = SimulatedTask(
                    (first, gpu), nbytes / self.bandwidth[first, gpu], (update,)
                )
            self.tasks[UPDATE, node, channel, -1, -1] = SimulatedTask((first,), 0.0, tuple(arrivals))

    # --------------------------------------------------------------------------------------- execution

    def _replay(self, begin: float) -> None:
        """Executes the tasks that become ready from a time on; those that did before keep their runs [s]."""
        kept = [key for key in self.order if self.runs[key].ready < begin and key in self.tasks]
        runs = {key: self.runs[key] for key in kept}
        free: dict[tuple[int, ...], float] = {}
        for key, run in runs.items():
            device = self.tasks[key].device
            free[device] = max(free.get(device, 0.0), run.end)
        missing, waiting = dict[TaskKey, int](), dict[TaskKey, list[TaskKey]]()
        queue: list[tuple[float, TaskKey]] = []
        for key, task in self.tasks.items():
            if key in runs:
                continue
            open_keys = [before for before in task.after if before not in runs]
            missing[key] = len(open_keys)
            for before in open_keys:
                waiting.setdefault(before, []).append(key)
            if not open_keys:
                queue.append((max((runs[before].end for before in task.after), default=0.0), key))
        heapq.heapify(queue)
        order = kept
        while queue:
            ready, key = heapq.heappop(queue)
            task = self.tasks[key]
            end = max(ready, free.get(task.device, 0.0)) + task.seconds
            free[task.device], runs[key] = end, TaskRun(ready, end)
            order.append(key)
            for behind in waiting.get(key, ()):
                missing[behind] -= 1
                if not missing[behind]:
                    latest = max(runs[before].end for before in self.tasks[behind].after)
                    heapq.heappush(queue, (latest, behind))
        self.replayed += len(missing)
        self.runs, self.order = runs, order

    def weights_nbytes(self, gpus: int) -> float:
        """Returns the bytes of weights of the fullest of some GPUs."""
        held = [0.0] * gpus
        for node, placement in self.placements.items():
            for gpu in placement.devices:
                held[gpu] += self.figures["parameters"][node] / placement.channels
        return max(held, default=-math.inf)


def link_bandwidths(widths: Sequence[int], rates: Sequence[float]) -> dict[tuple[int, int], float]:
    """Returns the bandwidth between every two GPUs of levels of a network, the innermost first [bytes/s]."""
    gpus = math.prod(widths)
    bandwidths = {}
    for here in range(gpus):
        for there in range(gpus):
            if here != there:
                size = 1
                for width, rate in zip(widths, rates, strict=True):
                    size *= width
                    if here // size == there // size:
                        bandwidths[here, there] = rate
                        break
    return bandwidths
