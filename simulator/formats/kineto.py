"""Reads traces of torch's profiler (Kineto), as ``export_chrome_trace`` writes them: .json or .json.gz.

A host event (``cpu_op``) is an operator on a thread, nested by time in the operators that called it. A GPU event
(``kernel``, ``gpu_memcpy``, ``gpu_memset``) lies on a stream; its launch is the event of the CUDA runtime with the same
correlation id, and the operators that enclose the launch show the purpose of the kernel. Files hold microseconds, in
any order; here times are seconds since the start of the earliest event."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshcast.hardware.documents.input_file import TRACE
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import json_object, member

MAX_VALUES = 100_000_000
"""Most values of a trace: some 15 letters each, in a file of the largest size."""

REMEDY = "Name a file that torch.profiler wrote with export_chrome_trace"

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of GPU events."""

ON_HOST = ("cpu_op", "user_annotation")
"""Categories of host events whose names show a purpose."""

LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of launches."""

MAX_NESTED = 200
"""Most host events of a thread that may run at the same time, each inside of that before it: for every kernel all of
them are looked at."""

MAX_NAMES = 50_000
"""Most names of operators and kernels: each is held against the patterns of all classes, 0.2 ms a name."""

STEP = re.compile(r"ProfilerStep#\d+")
"""The profiler's name of a step."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a trace.

    Attributes:
        name: of the operator or kernel.
        category: ``cat`` of the file.
        begin: start [s].
        seconds: duration [s].
        lane: process and thread, or device and stream.
        args: ``args`` of the file.
    """

    name: str
    category: str
    begin: float
    seconds: float
    lane: tuple[str, str]
    args: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(frozen=True, slots=True)
class SelfTime:
    """An interval in which a host event ran itself, and none of the operators that it called.

    Attributes:
        event: the operator.
        begin: start [s].
        end: end [s].
        callers: names of the events that enclose it, innermost first.
    """

    event: Event
    begin: float
    end: float
    callers: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """The trace of a process.

    Attributes:
        file: its name.
        events: sorted by their start.
        rank: of the process; None if the file does not say.
        world: number of ranks; None if the file does not say.
        backend: of torch.distributed.
        devices: names of the GPUs.
        groups: ranks of the process groups that the rank belongs to, by their description.
    """

    file: str
    events: tuple[Event, ...]
    rank: int | None = None
    world: int | None = None
    backend: str = ""
    devices: tuple[str, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, *categories: str) -> list[Event]:
        """Returns the events of some categories, by their start."""
        return [event for event in self.events if event.category in categories]

    @property
    def on_gpu(self) -> bool:
        """Whether the trace has GPU events."""
        return any(event.category in ON_DEVICE for event in self.events)

    def steps(self) -> list[Event]:
        """Returns the marked steps, by their start: those of the profiler's schedule, or annotations called ``step``.

        Marks without any launch are left out: schedules also mark steps that they do not record.
        """
        marks = self.of("user_annotation")
        marks = [m for m in marks if STEP.fullmatch(m.name)] or [m for m in marks if m.name.lower() == "step"]
        work = self.of(*ON_DEVICE)
        launches = [self.launch(kernel) or kernel for kernel in work] or self.of("cpu_op")
        launched = sorted(event.begin for event in launches)
        return [m for m in marks if bisect_left(launched, m.begin) < bisect_right(launched, m.end)]

    @cached_property
    def _launches(self) -> dict[int, Event]:
        launches = self.of(*LAUNCHES)
        return {e.args["correlation"]: e for e in launches if isinstance(e.args.get("correlation"), int)}

    @cached_property
    def _operators(self) -> dict[int, Event]:
        """Operators by external id: they stand for launches that were not recorded."""
        operators = self.of("cpu_op")
        return {e.args["External id"]: e for e in operators if isinstance(e.args.get("External id"), int)}

    @cached_property
    def _call_trees(self) -> dict[tuple[str, str], _CallTree]:
        lanes: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.of(*ON_HOST):
            lanes[event.lane].append(event)
        return {lane: _CallTree(events, self.file) for lane, events in lanes.items()}

    def launch(self, kernel: Event) -> Event | None:
        """Returns the host event that launched a kernel; None if the file does not say."""
        launch = self._launches.get(_number(kernel.args.get("correlation")))
        return launch or self._operators.get(_number(kernel.args.get("External id")))

    def callers(self, kernel: Event) -> tuple[str, ...]:
        """Returns the names of the host events that enclose the launch of a kernel, innermost first."""
        launch = self.launch(kernel)
        if launch is None or launch.lane not in self._call_trees:
            return ()
        return self._call_trees[launch.lane].enclosing(launch.begin)

    def nest_events(self) -> list[tuple[Event, tuple[str, ...], int]]:
        """Returns every host event, the names of its callers (innermost first), and the index of its caller in this
        list (-1 if it has none)."""
        nested: list[tuple[Event, tuple[str, ...], int]] = []
        for tree in self._call_trees.values():
            start = len(nested)
            for event, parent in zip(tree.events, tree.parent, strict=True):
                nested.append((event, tree.chain(parent), start + parent if parent >= 0 else -1))
        return nested

    def self_times(self) -> list[SelfTime]:
        """Returns the self times of all host events: each moment of a thread counts for the innermost operator."""
        times = [time for tree in self._call_trees.values() for time in tree.self_times()]
        return sorted(times, key=lambda time: (time.begin, time.end))


class _CallTree:
    """The host events of a thread, nested by time.

    Raises PlanError for more than `MAX_NESTED` at the same time.
    """

    def __init__(self, events: Sequence[Event], file: str) -> None:
        # Of two that start together the longer encloses the other.
        self.events = sorted(events, key=lambda event: (event.begin, -event.seconds))
        self.begins = [event.begin for event in self.events]
        self.parent: list[int] = []
        open_: list[int] = []
        for number, event in enumerate(self.events):
            while open_ and self.events[open_[-1]].end <= event.begin:
                open_.pop()
            self.parent.append(open_[-1] if open_ else -1)
            open_.append(number)
            if len(open_) > MAX_NESTED:
                rule = f"more than {MAX_NESTED} host events run at the same time on thread {event.lane[1]}"
                raise PlanError(file, rule, REMEDY, event.name)

    def chain(self, number: int) -> tuple[str, ...]:
        """Returns the name of an event and those of its callers, innermost first."""
        names = []
        while number >= 0:
            names.append(self.events[number].name)
            number = self.parent[number]
        return tuple(names)

    def enclosing(self, moment: float) -> tuple[str, ...]:
        """Returns the names of the events that run at a moment [s], innermost first."""
        number = bisect_right(self.begins, moment) - 1
        while number >= 0 and self.events[number].end < moment:
            number = self.parent[number]
        return self.chain(number)

    def self_times(self) -> Iterable[SelfTime]:
        """Yields the self times of all events."""
        children: dict[int, list[Event]] = defaultdict(list)
        for number, parent in enumerate(self.parent):
            children[parent].append(self.events[number])
        for number, event in enumerate(self.events):
            callers, at = self.chain(self.parent[number]), event.begin
            for child in children[number]:
                if child.begin > at:
                    yield SelfTime(event, at, child.begin, callers)
                at = max(at, child.end)
            if event.end > at:
                yield SelfTime(event, at, event.end, callers)


def read(path: Path) -> Trace:
    """Reads a trace. Raises PlanError for a file that is no trace."""
    data = json_object(path, REMEDY, TRACE, constants=True, repeated=True, most=MAX_VALUES)
    rows = [
        (f"{path} traceEvents.{i}", row)
        for i, row in enumerate(member(data, "traceEvents", list, str(path), REMEDY))
        if not isinstance(row, dict) or row.get("ph") == "X"
    ]
    read_events = [_event(row, where) for where, row in rows]
    if not any(event.category in (*ON_DEVICE, "cpu_op") for event in read_events):
        raise PlanError(str(path), "it holds no operator and no kernel", REMEDY)
    names = {event.name for event in read_events if event.category in (*ON_DEVICE, *ON_HOST)}
    if len(names) > MAX_NAMES:
        rule = f"{len(names):,} names of operators and kernels, at most {MAX_NAMES:,} are read"
        raise PlanError(str(path), rule, "Record fewer steps, and mark no events by numbers")
    first = min(begin for begin, event in zip(_begins(rows), read_events, strict=True) if event.category != "Trace")
    # Times are far from zero (years, in microseconds): differences are taken before the unit is changed.
    moved = [
        Event(e.name, e.category, (begin - first) * 1e-6, e.seconds, e.lane, e.args)
        for begin, e in zip(_begins(rows), read_events, strict=True)
    ]
    info = data.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = (info[key] if _number(info.get(key)) >= 0 else None for key in ("rank", "world_size"))
    events = tuple(sorted(moved, key=lambda event: (event.begin, -event.seconds)))
    return Trace(str(path), events, rank, world, str(info.get("backend", "")), _devices(data), _groups(info))


def _begins(rows: Iterable[tuple[str, dict[str, Any]]]) -> list[float]:
    return [float(row["ts"]) for _, row in rows]


def _event(row: Any, where: str) -> Event:
    """Returns an event whose start is filled in later."""
    if not isinstance(row, dict):
        raise PlanError(where, "an object belongs here", REMEDY, row)
    for key in ("ts", "dur"):
        value = row.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e18:
            raise PlanError(f"{where} {key}", "a number of microseconds belongs here", REMEDY, value)
    if row["dur"] < 0:
        raise PlanError(f"{where} dur", "a duration is not negative", REMEDY, row["dur"])
    args = row.get("args")
    lane = str(row.get("pid", "")), str(row.get("tid", ""))
    name, category = str(row.get("name", "")), str(row.get("cat", ""))
    return Event(name, category, 0.0, row["dur"] * 1e-6, lane, args if isinstance(args, dict) else {})


def _number(value: Any) -> int:
    """Returns a whole number from 0; -1 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else -1


def _devices(data: dict[str, Any]) -> tuple[str, ...]:
    listed = data.get("deviceProperties")
    devices = [device for device in listed if isinstance(device, dict)] if isinstance(listed, list) else []
    return tuple(str(device.get("name", "")) for device in devices)


def _groups(info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of process groups by their description, or by their number if they have none."""
    groups: dict[str, tuple[int, ...]] = {}
    config = info.get("pg_config")
    for group in config if isinstance(config, list) else []:
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            description = group.get("pg_desc")
            name = description if description not in (None, "", "undefined") else group.get("pg_name", "")
            groups[str(name)] = tuple(rank for rank in group["ranks"] if _number(rank) >= 0)
    return groups
