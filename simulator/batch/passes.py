"""The kinds of passes of a plan as arrays: matrices, memory, and rows of those that are walked op by op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.batch.blocks import BlockArrays, SideArrays, Streams, flatten_part
from meshcast.simulator.batch.kernels import multiply
from meshcast.simulator.batch.stages import LAYERS, StageForm
from meshcast.simulator.program.block import CompiledBlocks, Price
from meshcast.simulator.program.memory_profile import Growth
from meshcast.simulator.program.task import Flow, make_task
from meshcast.simulator.scheduling.schedule import ActionKind

GRADIENT = "gradients"
"""Their category of memory."""


@dataclass(eq=False)
class PassKinds:
    """The kinds of passes of a plan, as `kernels.play_passes` and `kernels.find_peaks` read them.

    matrices, walked, used, issue, memory: by kind.
    table, whole, reals: of kinds that are walked. A row of the table: its parts, side ops ahead and behind, parameters,
        and whether it is forward; for every part where its block is in `whole` and `reals`, its copies and its first
        parameter; for all side ops where they are.
    room: most ops of a block, most parameters of a pass.
    """

    matrices: np.ndarray
    walked: np.ndarray
    used: np.ndarray
    issue: np.ndarray
    memory: np.ndarray
    table: np.ndarray
    whole: np.ndarray
    reals: np.ndarray
    room: np.ndarray


@dataclass(eq=False)
class TaskArrays:
    """A task without side ops. parts: their arrays with the number of copies; numbers: of first parameters."""

    parts: list[tuple[BlockArrays, int]]
    numbers: list[int]
    forward: bool
    memory: tuple[float, float, float, float]

    @property
    def params(self) -> int:
        """Number of all parameters."""
        return sum(part.params * count for part, count in self.parts)


@dataclass(eq=False)
class TaskForm:
    """A pass of a kind of stage with any number of layers.

    parts: arrays of its units in the order of the pass, and whether they are layers.
    inputs, results: buffers of its input and of its results.
    freed: bytes of gradients that are freed at its end: of all that is no layer, and of a layer.
    """

    parts: list[tuple[BlockArrays, bool]]
    forward: bool
    inputs: Sequence[Flow]
    results: Sequence[Flow]
    freed: tuple[float, float]

    def with_layers(self, layers: int) -> TaskArrays:
        """Returns the pass of a stage of so many layers."""
        parts = [(part, layers if is_layer else 1) for part, is_layer in self.parts]
        counts = [part.params * count for part, count in (parts if self.forward else reversed(parts))]
        numbers = list(accumulate(counts, initial=0))[:-1]
        freed = self.freed[0] + layers * self.freed[1]
        results = [*self.results, (freed, GRADIENT)] if freed else self.results
        memory = _add_memory(self.inputs, parts, results)
        return TaskArrays(parts, numbers if self.forward else numbers[::-1], self.forward, memory)


def make_form(
    stage: StageForm, backward: bool, price: Price, growth: Growth | None, blocks: CompiledBlocks, streams: Streams
) -> TaskForm:
    """Makes the form of a pass from that of its stage."""
    kind = ActionKind.BACKWARD if backward else ActionKind.FORWARD
    task = make_task(stage.with_layers(LAYERS), kind, price, blocks, again=False, growth=growth)
    parts = [
        (flatten_part(part, marks, streams), part.count == LAYERS)
        for part, marks in zip(task.parts, task.marks, strict=True)
    ]
    results, freed = task.results, [0.0, 0.0]
    if backward and growth is not None and growth.freed:
        results = tuple(flow for flow in results if flow[1] != GRADIENT)
        for run in stage.runs:
            freed[run.count == LAYERS] += sum(growth(param) for param in run.fragment.params if param.trained)
    return TaskForm(parts, task.forward, task.inputs, results, (freed[0], freed[1]))


def _add_memory(
    inputs: Sequence[Flow], parts: Sequence[tuple[BlockArrays, int]], results: Sequence[Flow]
) -> tuple[float, float, float, float]:
    """Returns what a task leaves and its peak, and of both the gradients [bytes]; see `Profile.in_series`."""
    held = gradients = highest = at_highest = 0.0

    def add(net: tuple[float, float], top: tuple[float, float], count: int) -> None:
        nonlocal held, gradients, highest, at_highest
        before = count - 1 if net[0] > 0 else 0
        if held + before * net[0] + top[0] > highest:
            highest = held + before * net[0] + top[0]
            at_highest = gradients + before * net[1] + top[1]
        held, gradients = held + count * net[0], gradients + count * net[1]

    for nbytes, category in inputs:
        net = nbytes, nbytes * (category == GRADIENT)
        add(net, net, 1)
    for part, count in parts:
        add(part.net, part.top, count)
    for nbytes, category in results:
        add((-nbytes, -nbytes * (category == GRADIENT)), (0.0, 0.0), 1)
    return held, highest, gradients, at_highest


class PassMaker:
    """Gathers the kinds of passes of a plan. launch: time of the host to launch an op [s]."""

    def __init__(self, streams: Streams, launch: float) -> None:
        self.streams, self.launch = streams, launch
        self._kinds: list[tuple[TaskArrays, Sequence[SideArrays], Sequence[SideArrays]]] = []

    def add(self, task: TaskArrays, ahead: Sequence[SideArrays] = (), behind: Sequence[SideArrays] = ()) -> int:
        """Adds a kind of pass, and returns its number."""
        self._kinds.append((task, ahead, behind))
        return len(self._kinds) - 1

    @property
    def copies_to_host(self) -> bool:
        """Whether any pass offloads anything."""
        return any(part.copies_to_host for task, _, _ in self._kinds for part, _ in task.parts)

    def finish(self) -> PassKinds:
        """Returns all kinds."""
        count, size = len(self._kinds), self.streams.size
        matrices, used = np.zeros((count, size, size)), np.zeros((count, size), bool)
        walked, issue, memory = np.full(count, -1), np.zeros(count), np.zeros((count, 4))
        pack, most = _Pack(), [0, 0]
        for number, (task, ahead, behind) in enumerate(self._kinds):
            streams = set[int]().union(*(part.streams for part, _ in task.parts))
            used[number, [*streams, *(side.stream for side in (*ahead, *behind))]] = True
            issue[number] = self.launch * sum(part.launches * copies for part, copies in task.parts)
            memory[number] = task.memory
            if ahead or behind:
                walked[number] = pack.add(task, ahead, behind)
                most = [max(most[0], *(part.ops for part, _ in task.parts)), max(most[1], task.params)]
            else:
                powers = [part.power(size, self.launch, copies) for part, copies in task.parts]
                matrices[number] = reduce(lambda early, late: multiply(late, early), powers)
        return PassKinds(matrices, walked, used, issue, memory, *pack.arrays(), np.array(most))


class _Pack:
    """Arrays of walked passes, one behind the other; equal blocks once."""

    def __init__(self) -> None:
        self._table: list[int] = []
        self._whole: list[np.ndarray] = []
        self._reals: list[np.ndarray] = []
        self._ends = [0, 0]
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, task: TaskArrays, ahead: Sequence[SideArrays], behind: Sequence[SideArrays]) -> int:
        """Adds a pass, and returns its row in the table."""
        row = len(self._table)
        self._table += [len(task.parts), len(ahead), len(behind), task.params, int(task.forward)]
        for (part, count), number in zip(task.parts, task.numbers, strict=True):
            self._table += [*self._place(part), count, number]
        for side in (*ahead, *behind):
            self._table += self._place(side)
        return row

    def _place(self, arrays: BlockArrays | SideArrays) -> tuple[int, int]:
        if id(arrays) not in self._places:
            self._places[id(arrays)] = self._ends[0], self._ends[1]
            self._whole.append(arrays.whole)
            self._reals.append(arrays.reals)
            self._ends = [self._ends[0] + len(arrays.whole), self._ends[1] + len(arrays.reals)]
        return self._places[id(arrays)]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the table, and all integers and floats."""
        whole, reals = self._whole or [np.zeros(0, np.int64)], self._reals or [np.zeros(0)]
        return np.array(self._table, np.int64), np.concatenate(whole), np.concatenate(reals)
