"""Blocks: the ops of a pass through a unit with their dependencies, and their prices.

Two passes that a schedule overlaps (DualPipe) are interleaved into a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import AgingStore, RecentResults, remember, remembered_by
from meshcast.simulator.ir.ops import COMPUTE, FRAGMENT_BYTES, Attention, Fragment, Gemm, Host, Op, Param, UnitRun, Work
from meshcast.simulator.lowering.lower import drop_backward
from meshcast.simulator.program.categories import KINDS, axis_of, kind_of
from meshcast.simulator.program.memory_profile import (
    CATEGORIES,
    Event,
    Growth,
    Profile,
    block_events,
    growth_events,
    memory_events,
    release_weights,
)
from meshcast.simulator.scheduling.schedule import ActionKind

Price = Callable[[Work], tuple[float, float, float]]
"""Seconds that an op occupies its stream, their relative standard deviation (sigma), and the further seconds of latency
until other ops see its result."""

Prices = Price | Sequence[Price]
"""One price function for all devices of the pipeline, or one for each."""

SUMS = ("seconds", "weighted", "lasting", "flops")
"""Quantities that are summed over ops: seconds; seconds x sigma; seconds + latency; FLOPs."""

TensorKind = tuple[str, int]
"""Memory category and bytes of a tensor."""

INPUT = -1
"""In lists of places: the input of the pass, which no op of the block makes."""

FREE = (0.0, 0.0, 0.0)
"""The price of an op without work: it joins dependencies and takes no time."""


@dataclass(frozen=True)
class Port:
    """Where the input of a pass enters a block and its result leaves it.

    entry: places of the ops that wait for the input.
    exit: places of the ops that must end before the result exists.
    through: the result also waits for the input itself.
    """

    entry: tuple[int, ...] = ()
    exit: tuple[int, ...] = ()
    through: bool = True


@dataclass(eq=False)
class Block:
    """Ops of a pass through a unit, in issue order. A *place* is a position in `ops`.

    after: places that each op waits for.
    ports: a single port, or that of each of two overlapped passes.
    events: allocations and frees, see `Event`.
    """

    ops: list[Op]
    after: list[tuple[int, ...]]
    ports: tuple[Port, ...]
    events: list[Event]
    source: Op | None = None
    """The op without work that stands for the input of the pass; None where a pass has none."""

    @cached_property
    def _place(self) -> dict[Op, tuple[int, ...]]:
        return {op: (i,) for i, op in enumerate(self.ops)}

    @cached_property
    def memory(self) -> Profile:
        """The memory profile of a copy."""
        return Profile.of(self.events)

    @cached_property
    def event_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Memory events in order: places of ops, whether at the end of the op, bytes by category."""
        events = sorted(self.events, key=lambda event: event[:2])
        rows = np.zeros((len(events), len(CATEGORIES)))
        for row, (_, _, nbytes, category) in zip(rows, events, strict=True):
            row[CATEGORIES.index(category)] = nbytes
        places = np.array([max(place, 0) for place, *_ in events], int)
        return places, np.array([at_end for _, at_end, *_ in events], bool), rows

    @cached_property
    def tensors(self) -> list[tuple[bool, TensorKind, str]]:
        """Tensors in the order of `event_rows`: whether it is allocated or freed, its kind, and the stream for which
        the caching allocator allocates it: that of a data-parallel scheme, or "" for that of the kernels, where all
            others
        allocate."""
        tensors = []
        for place, _, nbytes, category in sorted(self.events, key=lambda event: event[:2]):
            stream = self.ops[max(place, 0)].stream
            kind = category, round(abs(nbytes))
            tensors.append((nbytes > 0, kind, stream if stream.startswith("data") else ""))
        return tensors

    @cached_property
    def streams(self) -> frozenset[str]:
        return frozenset(op.stream for op in self.ops)

    @cached_property
    def host_works(self) -> list[Host]:
        """The works of the host."""
        return [op.work for op in self.ops if isinstance(op.work, Host)]

    @cached_property
    def by_axis(self) -> dict[str, list[int]]:
        """Places of ops by the axis that their stream serves."""
        places: dict[str, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            places[axis_of(op)].append(i)
        return dict(places)

    @remembered_by(lambda block, params, forward: forward)
    def marks(self, params: Sequence[Param], forward: bool) -> tuple[tuple[int, ...], ...]:
        """Returns by parameter the places of its first use or, backward, of the ops that complete its gradient."""
        return tuple(self.behind(param.used if forward else param.ready) for param in params)

    def behind(self, op: Op) -> tuple[int, ...]:
        """Returns the places that must end before `op` has ended: the place of `op` if it is an op of this pass, for an
        op without work the places of all that it waits for, with `INPUT` for the input of the pass.

        An op of another pass has no place.
        """
        if op not in self._place:
            places = {place for other in op.after for place in self.behind(other)} if op.work is None else set()
            places |= {INPUT} if op is self.source else set()
            self._place[op] = tuple(sorted(places))
        return self._place[op]


@dataclass(eq=False)
class BlockPrices:
    """The prices of a block's ops: every pass of the block at equal prices shares an object.

    seconds: for which each op occupies its stream.
    sigma: relative standard deviation of the seconds.
    latency: from the end of an op until others see its result [s].
    results: what the engine has computed for the block at these prices.
    """

    block: Block
    seconds: tuple[float, ...]
    sigma: tuple[float, ...]
    latency: tuple[float, ...]
    results: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over the ops of a copy, by kind."""
        sums = np.zeros((len(KINDS), len(SUMS)))
        prices = zip(self.block.ops, self.seconds, self.sigma, self.latency, strict=True)
        for op, seconds, sigma, latency in prices:
            flops = op.work.flops if op.work is not None else 0.0
            sums[KINDS.index(kind_of(op))] += seconds, seconds * sigma, seconds + latency, flops
        return sums

    @cached_property
    def lasting(self) -> np.ndarray:
        """Time from the begin of each op until other ops see its result [s]."""
        return np.array(self.seconds) + np.array(self.latency)


@dataclass(eq=False)
class PricedBlock:
    """`count` copies of a block at its prices, in order."""

    prices: BlockPrices
    count: int

    @property
    def block(self) -> Block:
        return self.prices.block

    @property
    def seconds(self) -> tuple[float, ...]:
        return self.prices.seconds

    @property
    def sigma(self) -> tuple[float, ...]:
        return self.prices.sigma

    @property
    def latency(self) -> tuple[float, ...]:
        return self.prices.latency

    @property
    def sums(self) -> np.ndarray:
        return self.prices.sums

    @property
    def lasting(self) -> np.ndarray:
        return self.prices.lasting


def one_op(op: Op) -> Block:
    """Returns a block of a single op, which waits for the input of its action and makes the result."""
    return Block([op], [()], (Port((0,), (0,), through=False),), [])


def price_block(block: Block, count: int, price: Price) -> PricedBlock:
    """Prices `count` copies of a block; ops without work are free."""
    prices = [price(op.work) if op.work is not None else FREE for op in block.ops]
    seconds, sigma, latency = zip(*prices, strict=True) if prices else ((), (), ())
    return PricedBlock(BlockPrices(block, seconds, sigma, latency), count)


OP_BYTES = {"block": 600, "prices": 500, "events": 400, "side": 60}
"""Of a block, its prices, its memory events and priced side ops, each with what is computed from it, for an op,
roughly: from walks over what 14 plans of GPT-3 had left in memory. A block keeps its fragment, too."""

KEY_BYTES = 300
"""Of a key of these."""

TASK_BYTES = 12_000
"""Of a task with its matrices, roughly."""

UPDATE_BYTES = 15_000
"""Of an update with the ops of those that are played with it, roughly."""

SLOT_BYTES = 150
"""Of a slot with its messages, roughly: slots of a stage and kind share theirs."""

PHASES = {"BW": "RBW", "B": "RB", "W": "W", "R": "R"}
"""The phases of the backward ops that an action of each kind runs."""


class CompiledBlocks:
    """Blocks of lowered units, compiled once for each kind of pass.

    tasks: the tasks that programs have built from them (`simulator.program.task.Task`), by all that they depend on.
    equal_tasks: those without side ops by all that they are: of other meshes and stages they may be the same.
    updates: the tasks of updates, with the collectives that they share, by all that they depend on.
    sides: priced side ops, by the side ops and their price function.
    slots: what programs of a timetable have in common, by slot: messages, and which tasks are the same.
    """

    def __init__(self) -> None:
        self.tasks: RecentResults[Hashable, Any] = RecentResults(
            lambda task: TASK_BYTES if task.ahead or task.behind else KEY_BYTES
        )
        self.equal_tasks: RecentResults[Hashable, Any] = RecentResults(lambda _: TASK_BYTES)
        self.updates: RecentResults[Hashable, Any] = RecentResults(lambda _: UPDATE_BYTES)
        self.slots: RecentResults[Hashable, Any] = RecentResults(lambda columns: SLOT_BYTES * len(columns[-1]))
        self._prices: RecentResults[tuple[Block, Price], BlockPrices] = RecentResults(lambda _: KEY_BYTES)
        self._equal_prices: RecentResults[Hashable, BlockPrices] = RecentResults(
            lambda prices: OP_BYTES["prices"] * len(prices.seconds)
        )
        self.sides: RecentResults[Hashable, list[Any]] = RecentResults(
            lambda sides: sum(OP_BYTES["side"] * len(side.ops) + 2 * side.params.nbytes for side in sides)
        )
        self._blocks: RecentResults[tuple[Fragment, str, bool, Growth | None], Block] = RecentResults(
            lambda block: (OP_BYTES["block"] + FRAGMENT_BYTES) * len(block.ops)
        )
        self._events: RecentResults[tuple[Fragment, bool], dict[Op, list[Event]]] = RecentResults(
            lambda events: OP_BYTES["events"] * len(events)
        )

    @property
    def stores(self) -> list[AgingStore]:
        """All stores."""
        return [
            self.equal_tasks,
            self.tasks,
            self.updates,
            self._equal_prices,
            self._prices,
            self.sides,
            self.slots,
            self._blocks,
            self._events,
        ]

    def price(self, block: Block, price: Price) -> BlockPrices:
        """Returns the prices of a block; equal ones are the same object, whatever function makes them."""

        def share() -> BlockPrices:
            prices = price_block(block, 1, price).prices
            key = block, prices.seconds, prices.sigma, prices.latency
            return remember(self._equal_prices, key, lambda: prices)

        return remember(self._prices, (block, price), share)

    def block(self, unit_run: UnitRun, kind: str, again: bool, growth: Growth | None = None) -> Block:
        """Returns the block of a pass of a unit.

        again: recomputation has separate passes (R).
        growth: of gradients that have no memory before the pass.
        """
        key = (unit_run.fragment, kind, again, growth)
        return remember(self._blocks, key, lambda: self._compile(unit_run, kind, again, growth))

    def _compile(self, unit_run: UnitRun, kind: str, again: bool, growth: Growth | None) -> Block:
        if kind == ActionKind.AHEAD:
            return self._compile(drop_backward(unit_run), "F", again, None)
        fragment = unit_run.fragment
        phases = PHASES.get(kind, "")
        if again and kind != "R":
            phases = phases.replace("R", "")
        ops = fragment.forward if kind == "F" else [op for op in fragment.backward if op.phase in phases]
        split = kind in ("B", "W")
        backward = sorted(fragment.backward, key=lambda op: op.phase == "W") if split else fragment.backward
        takes, gives = unit_run.residual_in or "", unit_run.residual_out or ""
        entry, result = fragment.grad_entry.get(gives), fragment.grad_exit.get(takes)
        if kind == "F":
            entry, result = fragment.entry.get(takes), fragment.exit.get(gives)
        elif kind in ("W", "R"):
            entry = result = None
        after, port = resolve_dependencies(ops, entry, result)

        def make_events() -> dict[Op, list[Event]]:
            uses = release_weights(fragment.tensor_uses) if split else fragment.tensor_uses
            return memory_events(uses, fragment.forward, backward, unit_run)

        events = block_events(ops, after, remember(self._events, (fragment, split), make_events))
        if growth is not None and kind != "F":
            events += growth_events(ops, fragment.params, growth)
        return Block(list(ops), after, (port,), events, entry)


def resolve_dependencies(ops: Sequence[Op], entry: Op | None, result: Op | None) -> tuple[list[tuple[int, ...]], Port]:
    """Returns for each op the places that it waits for, and the port of the pass.

    An op without work is replaced by the ops that it waits for.
    entry, result: the ops without work that stand for the input and for the result of the pass.
    """
    sources = partial(_find_sources, place={op: i for i, op in enumerate(ops)}, entry=entry, known={})
    waits = [sources(op) for op in ops]
    after = [tuple(sorted(places)) for places, _ in waits]
    entries = tuple(i for i, (_, outside) in enumerate(waits) if outside)
    if result is None:
        return after, Port(entries, (), False)
    places, outside = sources(Op("result", after=[result]))
    return after, Port(entries, tuple(sorted(places)), outside)


Sources = tuple[set[int], bool]
"""The places of the ops that an op waits for, and whether it waits for the input."""


def _find_sources(op: Op, place: Mapping[Op, int], entry: Op | None, known: dict[Op, Sources]) -> Sources:
    """Returns the sources of an op. place, entry: see `resolve_dependencies`; known: of other ops, added to.

    A function inside of another that calls itself would keep all of these until garbage is collected.
    """
    if op not in known:
        places, outside = set[int](), False
        for other in op.after:
            if (at := place.get(other)) is not None:
                places.add(at)
            elif other is entry:
                outside = True
            elif other.work is None:
                more, too = _find_sources(other, place, entry, known)
                places |= more
                outside |= too
        known[op] = places, outside
    return known[op]


Where = dict[int, tuple[int, ...]]
"""By place in a block, its places in a longer block that contains the block."""


def concatenate(parts: Sequence[PricedBlock]) -> tuple[PricedBlock, list[list[Where]]]:
    """Joins all copies of all parts into a copy of a single part; each copy takes the result of that before.

    Returns also, for every part and copy, where its places are in the joint block.
    """
    issued: list[tuple[PricedBlock, int]] = []
    after: list[tuple[int, ...]] = []
    entry, events = list[int](), list[Event]()
    result, through, where = tuple[int, ...](), True, list[list[Where]]()
    for part in parts:
        (port,) = part.block.ports
        where.append([])
        for _ in range(part.count):
            start = len(issued)
            where[-1].append({INPUT: (*result, *((INPUT,) if through else ()))})
            for place, others in enumerate(part.block.after):
                waits = tuple(start + other for other in others)
                if place in port.entry:
                    waits += result
                    entry += [start + place] if through else []
                issued.append((part, place))
                after.append(tuple(sorted(set(waits))))
                where[-1][-1][place] = (start + place,)
            result = (*(result if port.through else ()), *(start + place for place in port.exit))
            through &= port.through
            events += [(start + place, *event) for place, *event in part.block.events]  # type: ignore[misc]
    ops = [part.block.ops[place] for part, place in issued]
    block = Block(ops, after, (Port(tuple(entry), result, through),), events)
    seconds, sigma, latency = (
        tuple(getattr(part, name)[place] for part, place in issued) for name in ("seconds", "sigma", "latency")
    )
    return PricedBlock(BlockPrices(block, seconds, sigma, latency), 1), where


def leave_multiprocessors(part: PricedBlock, taken: int, price: Price) -> PricedBlock:
    """Returns a copy of a block whose GEMMs and attention leave `taken` multiprocessors to communication beside
    them."""
    ops = [
        replace(op, work=replace(op.work, reserved=taken)) if isinstance(op.work, Gemm | Attention) else op
        for op in part.block.ops
    ]
    return price_block(replace(part.block, ops=ops), part.count, price)


def interleave(first: PricedBlock, second: PricedBlock) -> tuple[PricedBlock, tuple[dict[int, int], dict[int, int]]]:
    """Merges two passes, a copy of each, into a block by list scheduling: the op that can begin earliest is issued
    next. Of ops that a busy stream holds back alike the first is that whose inputs were ready first, or that from
    which the longest path leads to the end of its pass: of these two orders the shorter is kept. Every stream has
    its ops in that order; what is beside the kernels is issued behind those that precede it in its pass, whether its
    stream is busy or not.

    Returns also, for each pass, where its places are in the joint block.
    """
    parts = (first, second)
    paths = [_longest_paths(part) for part in parts]
    listed = min((_list_schedule(parts, priority) for priority in (None, paths)), key=lambda scheduled: scheduled[0])[1]
    issued = _issue_ahead(parts, listed)
    where: tuple[dict[int, int], dict[int, int]] = ({INPUT: INPUT}, {INPUT: INPUT})
    for number, (i, place) in enumerate(issued):
        where[i][place] = number
    moved = [_place_block(parts[i].block, where[i]) for i in (0, 1)]
    block = Block(
        [parts[i].block.ops[place] for i, place in issued],
        [tuple(sorted(where[i][j] for j in parts[i].block.after[place])) for i, place in issued],
        (moved[0].ports[0], moved[1].ports[0]),
        [*moved[0].events, *moved[1].events],
    )
    seconds, sigma, latency = (
        tuple(getattr(parts[i], name)[place] for i, place in issued) for name in ("seconds", "sigma", "latency")
    )
    return PricedBlock(BlockPrices(block, seconds, sigma, latency), 1), where


def _list_schedule(
    parts: tuple[PricedBlock, PricedBlock], longest: Sequence[Sequence[float]] | None
) -> tuple[float, list[tuple[int, int]]]:
    """Returns when the last result of two passes is seen [s], and the order of their ops: pass and place.

    longest: by pass and place, the time from the begin of an op to the end of its pass [s], if that is the priority.
    """
    issued: list[tuple[int, int]] = []
    free: dict[str, float] = defaultdict(float)
    # When the result of every op is seen; infinity before it is issued.
    seen = [[np.inf] * len(part.block.ops) for part in parts]
    queues = [(i, stream, places) for i in (0, 1) for stream, places in _queues(parts[i].block).items()]
    ready = [np.inf] * len(queues)
    """By queue, when the inputs of its next op are there."""
    while queues:
        best, at = (np.inf, np.inf), 0
        for number, (i, stream, places) in enumerate(queues):
            place = places[-1]
            if ready[number] == np.inf:
                ready[number] = max([seen[i][j] for j in parts[i].block.after[place]], default=0.0)
            rank = max(free[stream], ready[number]), -longest[i][place] if longest else ready[number]
            if rank < best:
                best, at = rank, number
        i, stream, places = queues[at]
        place = places.pop()
        free[stream] = best[0] + parts[i].seconds[place]
        seen[i][place] = free[stream] + parts[i].latency[place]
        issued.append((i, place))
        ready[at] = np.inf
        if not places:
            del queues[at], ready[at]
    return max(seconds for ends in seen for seconds in ends), issued


def _issue_ahead(parts: tuple[PricedBlock, PricedBlock], listed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns an order of ops, pass and place, in which the host waits for no network: an op beside the kernels is
    issued as soon as the kernels of its pass that precede it are, and what it waits for, if it is the next of its
    stream."""
    blocks = [part.block for part in parts]
    queues = defaultdict[str, list[tuple[int, int]]](list)
    for i, place in reversed(listed):
        queues[blocks[i].ops[place].stream].append((i, place))
    kernels = queues.pop(COMPUTE, [])
    following = [sorted((place for j, place in kernels if j == i), reverse=True) for i in (0, 1)]
    issued: dict[tuple[int, int], None] = {}

    def issue(op: tuple[int, int], queue: list[tuple[int, int]]) -> None:
        issued[op] = None
        queue.pop()

    def may_follow(i: int, place: int) -> bool:
        passed = not following[i] or place < following[i][-1]
        return passed and all((i, other) in issued for other in blocks[i].after[place])

    for op in listed:
        if op in issued:
            continue
        stream = blocks[op[0]].ops[op[1]].stream
        issue(op, kernels if stream == COMPUTE else queues[stream])
        if stream == COMPUTE:
            following[op[0]].pop()
        while ready := [queue for queue in queues.values() if queue and may_follow(*queue[-1])]:
            for queue in ready:
                issue(queue[-1], queue)
    return list(issued)


def _queues(block: Block) -> dict[str, list[int]]:
    """Returns the places on every stream, the first last."""
    queues: dict[str, list[int]] = defaultdict(list)
    for place in reversed(range(len(block.ops))):
        queues[block.ops[place].stream].append(place)
    return queues


def _longest_paths(part: PricedBlock) -> list[float]:
    """Returns for every place the time from the begin of its op to the end of the pass, if each op waits for its stream
    and its inputs only [s]."""
    block, paths = part.block, [0.0] * len(part.block.ops)
    behind: dict[str, float] = defaultdict(float)
    for place in reversed(range(len(block.ops))):
        stream = block.ops[place].stream
        paths[place] = part.seconds[place] + max(behind[stream], paths[place] + part.latency[place])
        behind[stream] = paths[place]
        for other in block.after[place]:
            paths[other] = max(paths[other], paths[place])
    return paths


def _place_block(block: Block, where: dict[int, int]) -> Block:
    """Returns a block with the ports and events of `block`, whose ops have moved to other places."""

    def places(some: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(where[i] for i in some)

    ports = tuple(Port(places(port.entry), places(port.exit), port.through) for port in block.ports)
    return Block([], [], ports, [(where[place], *event) for place, *event in block.events])  # type: ignore[misc]
