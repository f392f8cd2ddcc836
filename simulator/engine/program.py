"""The program of a step: what every device executes, as chains of compiled blocks.

A fragment of a unit is compiled once per kind of pass into a *block* (ops in issue order, their dependencies). The
blocks of a stage's units, each so many times, make a *task*; the timetable says which device runs which task when. One
device stands for all ranks that execute the same thing. How a program is played is told in the other files here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from simulator.engine.kinds import KINDS, axis_of, kind_of
from simulator.engine.memory import CATEGORIES, Event, Profile, block_events, memory_events
from simulator.engine.timetable import Slot, Timetable
from simulator.ops import Beside, Chain, Collective, Fragment, Link, Op, Param, Transfer, Work

Price = Callable[[Work], tuple[float, float, float]]
"""Seconds that an op occupies its stream, the spread of that, the further latency until others see its result."""


SUMS = ("seconds", "weighted", "lasting", "flops")
"""What is summed over ops: seconds; seconds x spread; seconds and latency; FLOPs."""

COMING = -1
"""The place of what comes in."""

FREE = (0.0, 0.0, 0.0)
"""The price of a mark."""


@dataclass(eq=False)
class Block:
    """Ops of one pass through one unit, in issue order; places are positions in `ops`.

    after: places that each op waits for. entry: ops that wait for what comes in. exit: ops after which the result
    exists. through: the result also waits for what comes in, beyond what `exit` says.
    """

    ops: list[Op]
    after: list[tuple[int, ...]]
    entry: tuple[int, ...]
    exit: tuple[int, ...]
    through: bool
    events: list[Event]
    source: Op | None = None
    """The mark of what comes in."""
    tables: dict[Hashable, dict[Hashable, object]] = field(default_factory=dict, repr=False)
    """What the engine has worked out about the block, by its prices."""
    _marks: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def _place(self) -> dict[int, tuple[int, ...]]:
        return {id(op): (i,) for i, op in enumerate(self.ops)}

    @cached_property
    def memory(self) -> Profile:
        """What one copy does to memory."""
        return Profile.of(self.events)

    @cached_property
    def event_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What happens to memory, in order: places of ops, whether at their end, and bytes by category."""
        events = sorted(self.events, key=lambda event: event[:2])
        rows = np.zeros((len(events), len(CATEGORIES)))
        for row, (_, _, nbytes, category) in zip(rows, events, strict=True):
            row[CATEGORIES.index(category)] = nbytes
        places = np.array([max(place, 0) for place, *_ in events], int)
        return places, np.array([at_end for _, at_end, *_ in events], bool), rows

    @cached_property
    def streams(self) -> frozenset[str]:
        return frozenset(op.stream for op in self.ops)

    @cached_property
    def by_axis(self) -> dict[str, list[int]]:
        """Places by the axis that the op's stream serves."""
        found: dict[str, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            found[axis_of(op)].append(i)
        return dict(found)

    def marks(self, params: Sequence[Param], forward: bool) -> tuple[tuple[int, ...], ...]:
        """The places at which each parameter is first used or, backward, its gradient complete."""
        if self._marks is None:
            self._marks = tuple(self.behind(param.used if forward else param.ready) for param in params)
        return self._marks

    def behind(self, op: Op) -> tuple[int, ...]:
        """The places that stand behind an op of this pass or a mark (`COMING`: what comes in does); an op of another
        pass has none."""
        if id(op) not in self._place:
            found = {place for other in op.after for place in self.behind(other)} if op.work is None else set()
            found |= {COMING} if op is self.source else set()
            self._place[id(op)] = tuple(sorted(found))
        return self._place[id(op)]


@dataclass(eq=False)
class Part:
    """A block at its prices, `count` times in a row."""

    block: Block
    count: int
    seconds: tuple[float, ...]
    spread: tuple[float, ...]
    latency: tuple[float, ...]
    tables: dict[Hashable, object]
    """What the engine has worked out about the block at these prices."""

    @property
    def sums(self) -> np.ndarray:
        """`SUMS` over the ops of one copy, by kind."""
        found = self.tables.get("sums")
        if found is None:
            found = self.tables["sums"] = np.zeros((len(KINDS), len(SUMS)))
            prices = zip(self.block.ops, self.seconds, self.spread, self.latency, strict=True)
            for op, seconds, spread, latency in prices:
                flops = op.work.flops if op.work is not None else 0.0
                found[KINDS.index(kind_of(op))] += seconds, seconds * spread, seconds + latency, flops
        assert isinstance(found, np.ndarray)
        return found

    @cached_property
    def lasting(self) -> np.ndarray:
        """From the begin of every op until others see its result [s]."""
        return np.array(self.seconds) + np.array(self.latency)


@dataclass(eq=False)
class Side:
    """Priced ops beside the parts, one after another; see `simulator.ops.Beside`."""

    ops: list[Op]
    seconds: np.ndarray
    spread: np.ndarray
    latency: np.ndarray
    params: np.ndarray
    starts: np.ndarray

    @property
    def stream(self) -> str:
        return self.ops[0].stream

    @property
    def lasting(self) -> np.ndarray:
        """From the begin of every op until others see its result [s]."""
        return self.seconds + self.latency

    @cached_property
    def ends(self) -> np.ndarray:
        """When each op has ended if none waits for anything, from the begin of the first [s]."""
        return np.cumsum(self.seconds)


@dataclass(eq=False)
class Task:
    """All ops of one action: those beside it ahead of it, its parts one after another, those beside it behind it.

    takes, gives: bytes that come in at its begin and go out at its end, and the category of memory that they are.
    marks: for every part, the places at which each of its parameters is first used, or its gradient complete.
    numbers: for every part, the number of the first parameter of its first copy. forward: whether copies run in the
    order of the numbers.
    """

    parts: list[Part]
    ahead: list[Side]
    behind: list[Side]
    takes: float = 0.0
    gives: float = 0.0
    category: str = "workspace"
    marks: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    forward: bool = True

    @cached_property
    def memory(self) -> Profile:
        """What comes in is taken at the begin; what goes out is given back, or on, at the end."""
        parts = [(part.block.memory, part.count) for part in self.parts]
        comes = [(Profile.step(self.takes, self.category), 1)] if self.takes else []
        goes = [(Profile.step(-self.gives, self.category), 1)] if self.gives else []
        return Profile.chain([*comes, *parts, *goes])

    def copy_of(self, part: int, copy: int) -> int:
        """The number of the first parameter of a copy, counted as they run."""
        place = copy if self.forward else self.parts[part].count - 1 - copy
        return self.numbers[part] + place * len(self.marks[part])

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over all ops of one action, by kind."""
        found = np.zeros((len(KINDS), len(SUMS)))
        for part in self.parts:
            found += part.count * part.sums
        for side in (*self.ahead, *self.behind):
            sums = side.seconds.sum(), side.seconds @ side.spread, side.lasting.sum(), 0.0
            found[KINDS.index(kind_of(side.ops[0]))] += sums
        return found

    def counted(self) -> Iterator[tuple[Op, int]]:
        """Every op, with how often it runs in one action."""
        for part in self.parts:
            yield from ((op, part.count) for op in part.block.ops)
        for side in (*self.ahead, *self.behind):
            yield from ((op, 1) for op in side.ops)


@dataclass(eq=False)
class Send:
    """What carries the result of a slot's actions to another device."""

    work: Transfer
    stream: str
    seconds: float
    spread: float
    latency: float


@dataclass(eq=False)
class Program:
    """A step: tasks and sends by slot, the update of every device, and where devices meet in its collectives.

    received: by slot, bytes that come from another device.
    overlap_sends: a device goes on while it sends; otherwise its next action waits for the send. host: seconds that
    the host takes to issue one op. meetings: (device, place) of ops of the updates that begin together; the op in front
    of each tells that its device has come.
    """

    timetable: Timetable
    tasks: list[Task]
    sends: list[Send | None]
    received: list[int]
    updates: list[Task]
    meetings: list[list[tuple[int, int]]]
    overlap_sends: bool = True
    host: float = 0.0

    @property
    def devices(self) -> int:
        return self.timetable.shape.p

    def device_of(self, slot: int) -> int:
        return self.timetable.device(self.timetable.slots[slot].stage)

    def turns(self) -> Iterator[tuple[Task, int]]:
        """Every task of all devices, with the number of times that it runs."""
        yield from zip(self.tasks, self.timetable.turns, strict=True)
        yield from ((task, 1) for task in self.updates)

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over all ops of every device [devices, kinds, sums]; a message counts where it is sent and arrives."""
        turns = np.array(self.timetable.turns)
        distinct = {id(task): task for task in (*self.tasks, *self.updates)}
        index = {key: i for i, key in enumerate(distinct)}
        times = np.zeros((self.devices, len(distinct)))
        for number, task in enumerate(self.tasks):
            times[self.device_of(number), index[id(task)]] += turns[number]
        for device, task in enumerate(self.updates):
            times[device, index[id(task)]] += 1
        found = np.tensordot(times, np.array([task.sums for task in distinct.values()]), 1)
        sent = [(i, send) for i, send in enumerate(self.sends) if send is not None]
        if sent:
            message = np.array([(s.seconds, s.seconds * s.spread, s.seconds + s.latency, 0.0) for _, s in sent])
            message *= turns[[i for i, _ in sent], None]
            for end in ([s.work.source for _, s in sent], [s.work.target for _, s in sent]):
                np.add.at(found[:, KINDS.index("pp")], end, message)
        return found


def build(
    timetable: Timetable,
    stages: Sequence[Chain],
    price: Price,
    axis: str = "pp",
    overlap_sends: bool = True,
    updates: Sequence[Fragment] = (),
    host: float = 0.0,
) -> Program:
    """The program of a step. stages: what every virtual stage lowers to. axis: the pipeline's. updates: per device."""
    split = any(slot.kind == "W" for slot in timetable.slots)
    tasks: list[Task] = []
    sends: list[Send | None] = []
    received: list[int] = []
    made: dict[tuple[int, str, bool, bool], Task] = {}
    parts: dict[tuple[int, str], Part] = {}
    messages: dict[tuple[int, str], tuple[Send | None, int]] = {}
    for slot in timetable.slots:
        chain = stages[slot.stage]
        first, last = bool(chain.ahead) and slot.first, bool(chain.behind) and slot.last
        key = (id(chain), slot.kind, first and slot.kind == "F", last and slot.kind in ("BW", "W"))
        if key not in made:
            made[key] = _task(chain, slot, price, split, parts, made.get((*key[:2], False, False)))
        tasks.append(made[key])
        turn = slot.stage, slot.kind
        if turn not in messages:
            messages[turn] = _messages(timetable, slot, chain, price, axis)
        sends.append(messages[turn][0])
        received.append(messages[turn][1])
    tails, meetings = _updates(updates, price, axis if timetable.shape.p > 1 else None)
    return Program(timetable, tasks, sends, received, tails, meetings, overlap_sends, host)


def _messages(timetable: Timetable, slot: Slot, chain: Chain, price: Price, axis: str) -> tuple[Send | None, int]:
    """What a slot's actions send, and the bytes that they receive from another device."""
    forward, send = slot.kind == "F", None
    receiver = timetable.receiver(slot)
    if receiver is not None:
        stream = "pipeline-forward" if forward else "pipeline-backward"
        work = Transfer(chain.links[-1 if forward else 0].nbytes, axis, timetable.device(slot.stage), receiver)
        send = Send(work, stream, *price(work))
    source = slot.stage - 1 if forward else slot.stage + 1
    far = slot.kind != "W" and 0 <= source < timetable.shape.stages
    far = far and timetable.device(source) != timetable.device(slot.stage)
    return send, chain.links[0 if forward else -1].nbytes if far else 0


def _task(
    chain: Chain, slot: Slot, price: Price, split: bool, known: dict[tuple[int, str], Part], plain: Task | None
) -> Task:
    """A task; with `plain`, the same without ops beside it, as a start. known: parts that other chains share."""
    forward = slot.kind == "F"
    ahead = [_side(beside, price) for beside in chain.ahead] if forward and slot.first else []
    behind = [_side(beside, price) for beside in chain.behind] if slot.kind in ("BW", "W") and slot.last else []
    if plain is not None:
        return replace(plain, ahead=ahead, behind=behind)
    starts = np.cumsum([0, *(link.count * len(link.fragment.params) for link in chain.links)]).tolist()
    links = list(zip(chain.links, starts, strict=False))
    parts: list[Part] = []
    marks: list[tuple[tuple[int, ...], ...]] = []
    numbers: list[int] = []
    for link, start in links if forward else reversed(links):
        block = _block(link, slot.kind, split)
        key = id(link.fragment), slot.kind
        if key not in known:
            known[key] = _part(block, link.count, price)
        parts.append(known[key] if known[key].count == link.count else replace(known[key], count=link.count))
        marks.append(block.marks(link.fragment.params, forward))
        numbers.append(start)
    first, last = chain.links[0], chain.links[-1]
    ends = first.nbytes if first.takes else 0, last.nbytes if last.gives else 0
    takes, gives = {"F": ends, "W": (0, 0)}.get(slot.kind, ends[::-1])
    category = "activations" if forward else "workspace"
    return Task(parts, ahead, behind, takes, gives, category, marks, numbers, forward)


def _side(beside: Beside, price: Price) -> Side:
    known = {key: price(op.work) if op.work else FREE for key, op in {id(op): op for op in beside.ops}.items()}
    seconds, spread, latency = np.array([known[id(op)] for op in beside.ops]).T
    return Side(beside.ops, seconds, spread, latency, beside.params, beside.starts)


def _part(block: Block, count: int, price: Price) -> Part:
    prices = [price(op.work) if op.work is not None else FREE for op in block.ops]
    seconds, spread, latency = zip(*prices, strict=True) if prices else ((), (), ())
    return Part(block, count, seconds, spread, latency, block.tables.setdefault((seconds, spread, latency), {}))


def _block(link: Link, kind: str, split: bool) -> Block:
    """One pass of a link, compiled; kept with its fragment."""
    fragment = link.fragment
    key = (kind, split)
    if key not in fragment.compiled:
        ops = fragment.forward if kind == "F" else fragment.backward
        if kind in ("B", "W"):
            ops = [op for op in ops if (op.phase == "W") == (kind == "W")]
        backward = sorted(fragment.backward, key=lambda op: op.phase == "W") if split else fragment.backward
        entry, result = {
            "F": (fragment.entry.get(link.takes or ""), fragment.exit.get(link.gives or "")),
            "W": (None, None),
        }.get(kind, (fragment.grad_entry.get(link.gives or ""), fragment.grad_exit.get(link.takes or "")))
        after, waits, exit, through = compiled(ops, entry, result)
        if "events" not in fragment.compiled:
            fragment.compiled["events"] = memory_events(fragment.touches, fragment.forward, backward, link)
        events = block_events(ops, after, fragment.compiled["events"])  # type: ignore[arg-type]
        fragment.compiled[key] = Block(list(ops), after, waits, exit, through, events, entry)
    block = fragment.compiled[key]
    assert isinstance(block, Block)
    return block


def compiled(
    ops: Sequence[Op], entry: Op | None, result: Op | None
) -> tuple[list[tuple[int, ...]], tuple[int, ...], tuple[int, ...], bool]:
    """Dependencies as places: what each op waits for, the ops that wait for `entry`, what `result` waits for, and
    whether that includes `entry` itself. Marks are replaced by what they wait for."""
    place = {id(op): i for i, op in enumerate(ops)}
    found: dict[int, tuple[set[int], bool]] = {}

    def sources(op: Op) -> tuple[set[int], bool]:
        """Places that stand behind all that `op` waits for, and whether what comes in does too."""
        if id(op) not in found:
            places, outside = set[int](), False
            for other in op.after:
                if (at := place.get(id(other))) is not None:
                    places.add(at)
                elif other is entry:
                    outside = True
                elif other.work is None:
                    more, too = sources(other)
                    places |= more
                    outside |= too
            found[id(op)] = places, outside
        return found[id(op)]

    waits = [sources(op) for op in ops]
    after = [tuple(sorted(places)) for places, _ in waits]
    came = tuple(i for i, (_, outside) in enumerate(waits) if outside)
    if result is None:
        return after, came, (), False
    places, outside = sources(Op("result", after=[result]))
    return after, came, tuple(sorted(places)), outside


def _updates(
    updates: Sequence[Fragment], price: Price, axis: str | None
) -> tuple[list[Task], list[list[tuple[int, int]]]]:
    """The update of every device, with a mark in front of each collective over the pipeline's axis.

    The mark stays in the stream: its end is the moment at which this device has come.
    """
    tasks: list[Task] = []
    made: dict[int, tuple[Task, list[tuple[Collective, int, int]]]] = {}
    meetings: dict[tuple[Collective, int], list[tuple[int, int]]] = defaultdict(list)
    for device, fragment in enumerate(updates):
        if id(fragment) not in made:
            made[id(fragment)] = _update(fragment, price, axis)
        task, met = made[id(fragment)]
        tasks.append(task)
        for work, turn, place in met:
            meetings[work, turn].append((device, place))
    return tasks, list(meetings.values())


def _update(fragment: Fragment, price: Price, axis: str | None) -> tuple[Task, list[tuple[Collective, int, int]]]:
    """An update, and its collectives over `axis`: each with its turn among equal ones and its place."""
    ops: list[Op] = []
    own: dict[int, Op] = {}
    met: list[tuple[Collective, int, int]] = []
    for op in fragment.forward:
        after = [own.get(id(other), other) for other in op.after]
        if isinstance(op.work, Collective) and axis is not None and axis in op.work.axes:
            ops.append(Op(f"arrive {op.name}", op.stream, None, after, op.phase))
            after = ops[-1:]
            met.append((op.work, sum(work == op.work for work, _, _ in met), len(ops)))
        ops.append(Op(op.name, op.stream, op.work, after, op.phase))
        own[id(op)] = ops[-1]
    block = Block(ops, compiled(ops, None, None)[0], (), (), False, [])
    return Task([_part(block, 1, price)], [], []), met
