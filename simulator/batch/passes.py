"""The kinds of passes of a plan as arrays: matrices, memory, and rows of those that are walked op by op."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, reduce
from itertools import accumulate

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember, remembered, remembered_by
from meshcast.simulator.batch.blocks import BlockArrays, Marks, SideArrays, Streams, flatten_block
from meshcast.simulator.batch.loops.arrays import HOST, PassKinds
from meshcast.simulator.batch.loops.matrices import multiply
from meshcast.simulator.batch.loops.peaks import add_profiles
from meshcast.simulator.batch.stages import LAYERS, StageForm
from meshcast.simulator.costs.power import PowerModel
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.program.block import FREE, SUMS, Block, BlockPrices, CompiledBlocks, Price
from meshcast.simulator.program.categories import KINDS
from meshcast.simulator.program.memory_profile import CATEGORIES, Growth, Profile
from meshcast.simulator.program.task import Flow, make_task
from meshcast.simulator.report.joules import block_joules, side_joules
from meshcast.simulator.scheduling.schedule import ActionKind

GRADIENT = "gradients"
"""Their category of memory."""


@dataclass(eq=False)
class TaskForm:
    """A pass of a kind of stage with any number of layers.

    blocks: of its units in the order of the pass, with the places of their parameters, and their number; 0: that of
        the layers.
    inputs, results: buffers of its input and of its results.
    freed: bytes of gradients that are freed at its end: of all that is no layer, and of a layer.
    """

    blocks: Sequence[tuple[Block, Marks, int]]
    forward: bool
    inputs: Sequence[Flow]
    results: Sequence[Flow]
    freed: tuple[float, float]

    def price(self, price: Price, arrays: PricedBlocks) -> PricedForm:
        """Returns the pass at some prices."""
        parts = tuple(arrays.find(block, marks, price) for block, marks, _ in self.blocks)
        return remember(arrays.forms, (self, parts), lambda: PricedForm(self, parts))


def make_form(stage: StageForm, backward: bool, growth: Growth | None, blocks: CompiledBlocks) -> TaskForm:
    """Makes the form of a pass from that of its stage."""
    kind = ActionKind.BACKWARD if backward else ActionKind.FORWARD
    task = make_task(stage.with_layers(LAYERS), kind, _leave_free, blocks, again=False, growth=growth)
    # Backward passes run the units in reverse order.
    counts = [stage.layers_of(run, 0) for run in stage.runs][:: -1 if backward else 1]
    parts = [(part.block, marks, n) for part, marks, n in zip(task.parts, task.marks, counts, strict=True)]
    results, freed = task.results, [0.0, 0.0]
    if backward and growth is not None and growth.freed:
        results = tuple(flow for flow in results if flow[1] != GRADIENT)
        for run in stage.runs:
            count = stage.layers_of(run, 0)
            grown = sum(growth(param) for param in run.fragment.params if param.trained)
            freed[count == 0] += (count or 1) * grown
    return TaskForm(parts, task.forward, task.inputs, results, (freed[0], freed[1]))


def _leave_free(work: Work) -> tuple[float, float, float]:
    """Returns no time, where prices are not asked for."""
    return FREE


class PricedForm:
    """A pass of a kind of stage with any number of layers, at its prices. parts: arrays of its units."""

    def __init__(self, form: TaskForm, parts: Sequence[BlockArrays]) -> None:
        self.form, self.parts = form, parts
        self.streams = sorted({stream for part in parts for stream in part.ops})
        self.ops = max((sum(part.ops.values()) for part in parts), default=0)
        self.copies_to_host = any(part.copies_to_host for part in parts)
        self._passes: dict[tuple[int, int, float], PassArrays] = {}

    def with_layers(self, layers: int, size: int, launch: float) -> PassArrays:
        """Returns the pass of a stage of so many layers.

        size: of states.
        launch: time of the host to launch an op [s].
        """
        return remember(self._passes, (layers, size, launch), lambda: self._make(layers, size, launch))

    def _make(self, layers: int, size: int, launch: float) -> PassArrays:
        form = self.form
        counts = [count or layers for *_, count in form.blocks]
        parts = list(zip(self.parts, counts, strict=True))
        params = [part.params * count for part, count in parts]
        numbers = list(accumulate(params if form.forward else params[::-1], initial=0))[:-1]
        freed = form.freed[0] + layers * form.freed[1]
        results = [*form.results, (freed, GRADIENT)] if freed else form.results
        matrix = reduce(
            lambda early, late: multiply(late, early), (part.power(size, launch, count) for part, count in parts)
        )
        used = np.zeros(size)
        used[self.streams] = 1.0
        issue = launch * sum(part.launches * count for part, count in parts)
        numbers = numbers if form.forward else numbers[::-1]
        memory = self._add_memory(counts, results)
        return PassArrays(self, counts, numbers, sum(params), np.vstack([matrix, used]), issue, memory)

    @cached_property
    def _memory(self) -> np.ndarray:
        """What its input and each of its parts leaves and holds at its peak, by category and in sum [parts, 2,
        categories + 1] [bytes]."""
        profiles = [Profile.step(nbytes, category) for nbytes, category in self.form.inputs]
        profiles += [part.prices.block.memory for part in self.parts]
        return np.array([((*part.net, part.grown), (*part.top, part.peak)) for part in profiles])

    def _add_memory(self, counts: Sequence[int], results: Sequence[Flow]) -> np.ndarray:
        """Returns what a pass leaves and holds at its peak; see `PassKinds`. counts: copies of its parts."""
        times = np.array([*[1] * len(self.form.inputs), *counts], float)
        memory = add_profiles(self._memory, times)
        for nbytes, category in results:
            memory[0, CATEGORIES.index(category)] -= nbytes
        memory[:, -1] = memory[:, :-1].sum(axis=1)
        return memory


@dataclass(eq=False)
class PassArrays:
    """A pass of a stage without side ops.

    counts, numbers: by part, its copies and its first parameter.
    params: number of all parameters.
    matrix, issue, memory: see `PassKinds`.
    """

    form: PricedForm
    counts: list[int]
    numbers: list[int]
    params: int
    matrix: np.ndarray
    issue: float
    memory: np.ndarray

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over its ops, by kind."""
        total = np.zeros((len(KINDS), len(SUMS)))
        for part, count in zip(self.form.parts, self.counts, strict=True):
            total += count * part.prices.sums
        return total

    @cached_property
    def ops(self) -> np.ndarray:
        """Number of its ops, by stream."""
        total = np.zeros(self.matrix.shape[1], np.int64)
        for part, count in zip(self.form.parts, self.counts, strict=True):
            for stream, ops in part.ops.items():
                total[stream] += count * ops
        return total

    @remembered_by(lambda task, model: model.gpu.name)
    def joules(self, model: PowerModel) -> np.ndarray:
        """Returns the energy of its kernels and of its communication beyond the idle power [J]."""
        joules = np.zeros(2)
        for part, count in zip(self.form.parts, self.counts, strict=True):
            joules += count * block_joules(part.prices, model)
        return joules


class PricedBlocks:
    """Blocks as arrays by their prices: meshes on which communication takes as long share them. forms: passes made of
    them."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.forms: dict[Hashable, PricedForm] = {}
        self._works: dict[Block, tuple[list[Work], list[int]]] = {}
        self._blocks: dict[Hashable, BlockArrays] = {}

    def find(self, block: Block, marks: Marks, price: Price) -> BlockArrays:
        """Returns the arrays of a block. marks: the places of its parameters."""
        works, places = remember(self._works, block, lambda: _list_works(block))
        prices = tuple(map(price, works))

        def make() -> BlockArrays:
            of_ops = [prices[place] if place >= 0 else FREE for place in places]
            columns = zip(*of_ops, strict=True) if of_ops else ((), (), ())
            return flatten_block(BlockPrices(block, *columns), marks, self.streams)

        return remember(self._blocks, (block, prices), make)


def _list_works(block: Block) -> tuple[list[Work], list[int]]:
    """Returns the distinct works of a block, and by op the place of its work; -1: it has none."""
    places: dict[Work, int] = {}
    of_ops = [-1 if op.work is None else places.setdefault(op.work, len(places)) for op in block.ops]
    return list(places), of_ops


class PassMaker:
    """Gathers the kinds of passes of a plan."""

    def __init__(self) -> None:
        self._kinds: list[tuple[PassArrays, Sequence[SideArrays], Sequence[SideArrays]]] = []

    def add(self, task: PassArrays, ahead: Sequence[SideArrays] = (), behind: Sequence[SideArrays] = ()) -> int:
        """Adds a kind of pass, and returns its number."""
        self._kinds.append((task, ahead, behind))
        return len(self._kinds) - 1

    @property
    def copies_to_host(self) -> bool:
        """Whether any pass offloads anything."""
        return any(task.form.copies_to_host for task, _, _ in self._kinds)

    @property
    def count(self) -> int:
        """Number of kinds."""
        return len(self._kinds)

    @property
    def size(self) -> int:
        """Number of coordinates of states."""
        return self._kinds[0][0].matrix.shape[1]

    @remembered
    def pack(self, every: bool) -> PassKinds:
        """Returns all kinds. every: whether any may be walked; otherwise those with side ops alone."""
        tasks = [task for task, _, _ in self._kinds]
        pack, matrices = _Pack(), np.array([task.matrix for task in tasks])
        for number, side in self._sides():
            matrices[number, -1, (side.stream, HOST)] = 1.0
        rows = np.array([pack.add(*each) if every or each[1] or each[2] else -1 for each in self._kinds])
        memory, issue = np.array([task.memory for task in tasks]), np.array([task.issue for task in tasks])
        room = np.array((max(task.form.ops for task in tasks), max(task.params for task in tasks)))
        return PassKinds(matrices, issue, memory, rows, *pack.arrays(), room)

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` of all kinds, by kind of time."""
        sums = np.array([task.sums for task, _, _ in self._kinds])
        for number, side in self._sides():
            kind, added = side.side.sums
            sums[number, kind] += added
        return sums

    @cached_property
    def ops(self) -> np.ndarray:
        """Numbers of ops of all kinds, by stream."""
        ops = np.array([task.ops for task, _, _ in self._kinds])
        for number, side in self._sides():
            ops[number, side.stream] += len(side.side.ops)
        return ops

    def _sides(self) -> Iterator[tuple[int, SideArrays]]:
        """Yields all side ops with the number of their pass."""
        for number, (_, ahead, behind) in enumerate(self._kinds):
            yield from ((number, side) for side in (*ahead, *behind))

    def joules(self, model: PowerModel) -> np.ndarray:
        """Returns the energy of all kinds beyond the idle power [kinds, 2] [J]."""
        joules = np.array([task.joules(model) for task, _, _ in self._kinds])
        for number, side in self._sides():
            joules[number, 1] += side_joules(side.side, model)
        return joules


class _Pack:
    """Arrays of walked passes, one behind the other; equal blocks once."""

    def __init__(self) -> None:
        self._table: list[int] = []
        self._whole: list[np.ndarray] = []
        self._reals: list[np.ndarray] = []
        self._ends = [0, 0]
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, task: PassArrays, ahead: Sequence[SideArrays], behind: Sequence[SideArrays]) -> int:
        """Adds a pass, and returns its row in the table."""
        row = len(self._table)
        self._table += [len(task.counts), len(ahead), len(behind), task.params, int(task.form.form.forward)]
        for part, count, number in zip(task.form.parts, task.counts, task.numbers, strict=True):
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
