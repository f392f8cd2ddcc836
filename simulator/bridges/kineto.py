"""Traces of torch's profiler (Kineto), as ``export_chrome_trace`` writes them: .json or .json.gz.

An event of the host (``cpu_op``) is an operator, nested by time in those that called it, on its thread. An event of a
GPU (``kernel``, ``gpu_memcpy``, ``gpu_memset``) lies on a stream; its launch by the host is the event of the runtime
with the same correlation, and the operators around the launch say what the kernel was for. Times are microseconds in
the file, in any order; here they are seconds from the begin of the earliest event.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hardware.errors import PlanError
from simulator.bridges.files import json_object, member

REMEDY = "Name a file that torch.profiler wrote with export_chrome_trace"

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on a GPU."""

ON_HOST = ("cpu_op", "user_annotation")
"""Categories of what the host does in words that say what for."""

LAUNCHES = ("cuda_runtime", "cuda_driver")

STEP = re.compile(r"ProfilerStep#\d+")
"""What the profiler calls a step that its schedule was told of."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that lasted. begin, seconds: on the trace's clock. lane: process and thread, or device and stream."""

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
class Stretch:
    """A stretch of time that an event of the host had for itself, none of those that it called running. around: names
    of the events that it is nested in, the nearest first."""

    event: Event
    begin: float
    end: float
    around: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """What one process did. events: sorted by their begin. rank, world: where the file says so. devices: GPUs' names.
    groups: descriptions of the process groups that the rank belongs to, with their ranks."""

    file: str
    events: tuple[Event, ...]
    rank: int | None = None
    world: int | None = None
    backend: str = ""
    devices: tuple[str, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, *categories: str) -> list[Event]:
        """The events of some categories, by their begin."""
        return [event for event in self.events if event.category in categories]

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU ran something."""
        return any(event.category in ON_DEVICE for event in self.events)

    def steps(self) -> list[Event]:
        """The steps that are marked in the trace, by their begin: of the profiler's schedule, or called ``step``.

        Marks in which nothing was issued are left out: schedules mark steps that they do not record.
        """
        marks = self.of("user_annotation")
        marks = [m for m in marks if STEP.fullmatch(m.name)] or [m for m in marks if m.name.lower() == "step"]
        work = self.of(*ON_DEVICE)
        issued = sorted([(self.launch(one) or one).begin for one in work] or [one.begin for one in self.of("cpu_op")])
        return [m for m in marks if bisect_left(issued, m.begin) < bisect_right(issued, m.end)]

    @cached_property
    def _launches(self) -> dict[int, Event]:
        """The launch of every kernel, by correlation."""
        found = self.of(*LAUNCHES)
        return {e.args["correlation"]: e for e in found if isinstance(e.args.get("correlation"), int)}

    @cached_property
    def _operators(self) -> dict[int, Event]:
        """Operators by their number in the file: what a kernel is joined to where its launch was not recorded."""
        found = self.of("cpu_op")
        return {e.args["External id"]: e for e in found if isinstance(e.args.get("External id"), int)}

    @cached_property
    def _nests(self) -> dict[tuple[str, str], _OpenSlices]:
        lanes: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.of(*ON_HOST):
            lanes[event.lane].append(event)
        return {lane: _OpenSlices(own) for lane, own in lanes.items()}

    def launch(self, kernel: Event) -> Event | None:
        """The event of the host that issued a kernel; None where the file does not say."""
        found = self._launches.get(_number(kernel.args.get("correlation")))
        return found or self._operators.get(_number(kernel.args.get("External id")))

    def around(self, kernel: Event) -> tuple[str, ...]:
        """Names of what the host was doing when it issued a kernel, the nearest first."""
        launch = self.launch(kernel)
        if launch is None or launch.lane not in self._nests:
            return ()
        return self._nests[launch.lane].around(launch.begin)

    def nest_events(self) -> list[tuple[Event, tuple[str, ...], int]]:
        """Every event of the host, names of those around it (the nearest first), and the place of the nearest of them
        in this list, -1 where there is none."""
        found: list[tuple[Event, tuple[str, ...], int]] = []
        for composite in self._nests.values():
            start = len(found)
            for event, parent in zip(composite.events, composite.parent, strict=True):
                found.append((event, composite.chain(parent), start + parent if parent >= 0 else -1))
        return found

    def stretches(self) -> list[Stretch]:
        """What every thread of the host did, each moment filed under the innermost operator."""
        found = [one for composite in self._nests.values() for one in composite.stretches()]
        return sorted(found, key=lambda one: (one.begin, one.end))


class _OpenSlices:
    """The events of one thread, nested by time."""

    def __init__(self, events: Sequence[Event]) -> None:
        # Of two that begin together the longer one holds the other.
        self.events = sorted(events, key=lambda event: (event.begin, -event.seconds))
        self.begins = [event.begin for event in self.events]
        self.parent: list[int] = []
        open_: list[int] = []
        for number, event in enumerate(self.events):
            while open_ and self.events[open_[-1]].end <= event.begin:
                open_.pop()
            self.parent.append(open_[-1] if open_ else -1)
            open_.append(number)

    def chain(self, number: int) -> tuple[str, ...]:
        """The event's name and the names of those around it, the nearest first."""
        names = []
        while number >= 0:
            names.append(self.events[number].name)
            number = self.parent[number]
        return tuple(names)

    def around(self, moment: float) -> tuple[str, ...]:
        """Names of what is going on at a moment, the nearest first."""
        number = bisect_right(self.begins, moment) - 1
        while number >= 0 and self.events[number].end < moment:
            number = self.parent[number]
        return self.chain(number)

    def stretches(self) -> Iterable[Stretch]:
        children: dict[int, list[Event]] = defaultdict(list)
        for number, parent in enumerate(self.parent):
            children[parent].append(self.events[number])
        for number, event in enumerate(self.events):
            around, at = self.chain(self.parent[number]), event.begin
            for child in children[number]:
                if child.begin > at:
                    yield Stretch(event, at, child.begin, around)
                at = max(at, child.end)
            if event.end > at:
                yield Stretch(event, at, event.end, around)


def read(path: Path) -> Trace:
    """Reads a trace. Raises PlanError for a file that is none."""
    data = json_object(path, REMEDY)
    rows = [
        (f"{path} traceEvents.{i}", row)
        for i, row in enumerate(member(data, "traceEvents", list, str(path), REMEDY))
        if not isinstance(row, dict) or row.get("ph") == "X"
    ]
    found = [_event(row, where) for where, row in rows]
    if not any(event.category in (*ON_DEVICE, "cpu_op") for event in found):
        raise PlanError(str(path), "it holds no operator and no kernel", REMEDY)
    first = min(begin for begin, event in zip(_begins(rows), found, strict=True) if event.category != "Trace")
    # Moments are far from zero (years, in microseconds): differences are formed before the unit is changed.
    moved = [
        Event(e.name, e.category, (begin - first) * 1e-6, e.seconds, e.lane, e.args)
        for begin, e in zip(_begins(rows), found, strict=True)
    ]
    given = data.get("distributedInfo")
    given = given if isinstance(given, dict) else {}
    rank, world = (given[key] if isinstance(given.get(key), int) else None for key in ("rank", "world_size"))
    events = tuple(sorted(moved, key=lambda event: (event.begin, -event.seconds)))
    return Trace(str(path), events, rank, world, str(given.get("backend", "")), _devices(data), _groups(given))


def _begins(rows: Iterable[tuple[str, dict[str, Any]]]) -> list[float]:
    return [float(row["ts"]) for _, row in rows]


def _event(row: Any, where: str) -> Event:
    """An event, its begin still to be filled in."""
    if not isinstance(row, dict):
        raise PlanError(where, "an object belongs here", REMEDY, row)
    for key in ("ts", "dur"):
        value = row.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e18:
            raise PlanError(f"{where} {key}", "a number of microseconds belongs here", REMEDY, value)
    if row["dur"] < 0:
        raise PlanError(f"{where} dur", "nothing lasts less than no time", REMEDY, row["dur"])
    args = row.get("args")
    lane = str(row.get("pid", "")), str(row.get("tid", ""))
    name, category = str(row.get("name", "")), str(row.get("cat", ""))
    return Event(name, category, 0.0, row["dur"] * 1e-6, lane, args if isinstance(args, dict) else {})


def _number(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _devices(data: dict[str, Any]) -> tuple[str, ...]:
    found = data.get("deviceProperties")
    return tuple(str(one.get("name", "")) for one in found if isinstance(one, dict)) if isinstance(found, list) else ()


def _groups(given: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Process groups by their description, or by their number where they have none."""
    found: dict[str, tuple[int, ...]] = {}
    config = given.get("pg_config")
    for one in config if isinstance(config, list) else []:
        if isinstance(one, dict) and isinstance(one.get("ranks"), list):
            name = one.get("pg_desc")
            named = str(name if name not in (None, "", "undefined") else one.get("pg_name", ""))
            found[named] = tuple(rank for rank in one["ranks"] if isinstance(rank, int))
    return found
