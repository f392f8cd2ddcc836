"""The timeline of a traced process without a GPU: aten operators by their exclusive time, and gloo's collectives."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.kineto import Event, Trace
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.validation.traces.kernel_classes import classify, collective_of
from meshcast.validation.traces.timeline import Slice, Timeline

GLOO = "gloo:"


def host_timeline(trace: Trace, mark: Event | None) -> Timeline:
    """Returns the timeline of the marked step: operators by exclusive time, collectives by the time that gloo's threads
    took.

    mark: the event that encloses the step; None: the whole trace. Time in which Python runs between operators is idle.
    """
    begin, end = (mark.begin, mark.end) if mark else (-np.inf, np.inf)
    run = [event for event in trace.of("user_annotation") if event.name.startswith(GLOO) and begin <= event.begin < end]
    called = [event for event in trace.of("cpu_op") if event.name.startswith("c10d::") and begin <= event.begin < end]
    # Gloo implements reduce-scatter as an all-reduce, so torch's calls name the collectives; gloo runs them in order.
    names = [event.name for event in (called if len(called) == len(run) else run)]
    kinds = [collective_of(name) or "other" for name in names]
    slices = [Slice("", kind, event.begin, event.seconds, event.name) for event, kind in zip(run, kinds, strict=True)]
    communicating = unite_spans((event.begin, event.end) for event in run)
    for own_time in trace.self_times():
        if begin <= own_time.event.begin < end and _computes(own_time.event, own_time.callers):
            kind = _class_of(own_time.event, own_time.callers)
            # aten operators never wait for communication; autograd functions written in Python do.
            intervals = [(own_time.begin, own_time.end)]
            if not own_time.event.name.startswith("aten::"):
                intervals = _subtract(own_time.begin, own_time.end, communicating)
            slices += [Slice(COMPUTE, kind, start, stop - start, own_time.event.name, 0) for start, stop in intervals]
    if not slices:
        raise PlanError("--step", "no operator ran in it", "Name another step", mark.name if mark else None)
    calls = _count_calls(trace, begin, end)
    first = mark.begin if mark else min(slice_.begin for slice_ in slices)
    last = mark.end if mark else max(slice_.begin + slice_.seconds for slice_ in slices)
    counted = []
    for slice_ in sorted(slices, key=lambda slice_: slice_.begin):
        # The first slice of a class carries the count of all its operators.
        count = calls.pop(slice_.kind, 0) if slice_.stream == COMPUTE else 1
        counted.append(replace(slice_, begin=slice_.begin - first, calls=count))
    return Timeline(tuple(counted), last - first, first)


def _computes(event: Event, callers: tuple[str, ...]) -> bool:
    """Returns whether a host event is computation: an operator, but none that gloo runs inside a collective."""
    return event.category == "cpu_op" and not any(name.startswith(GLOO) for name in callers)


def _class_of(event: Event, callers: tuple[str, ...]) -> str:
    """Returns the class of an operator; a c10d operator only enqueues a collective, so it is `other`."""
    return "other" if event.name.startswith("c10d::") else classify(event.name, callers)


def _count_calls(trace: Trace, begin: float, end: float) -> dict[str, int]:
    """Counts operator calls by class. Of nested operators of a class (`linear`, `matmul`, `mm`) the innermost
    counts."""
    nested = trace.nest_events()
    kinds = [_class_of(event, callers) for event, callers, _ in nested]
    counts = [
        _computes(event, callers) and begin <= event.begin < end and _class_of(event, ()) == kind
        for (event, callers, _), kind in zip(nested, kinds, strict=True)
    ]
    calls: dict[str, int] = defaultdict(int)
    for number in reversed(range(len(nested))):  # nested operators follow that which contains them
        if counts[number]:
            calls[kinds[number]] += 1
            outer = nested[number][2]
            while outer >= 0:
                counts[outer] &= kinds[outer] != kinds[number]
                outer = nested[outer][2]
    return calls


def unite_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the union of intervals, as sorted disjoint intervals."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def _subtract(begin: float, end: float, holes: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the interval from `begin` to `end` minus the holes, which are sorted and disjoint."""
    left, at = [], begin
    for number in range(max(0, bisect_left(holes, (begin, begin)) - 1), len(holes)):
        start, stop = holes[number]
        if start >= end:
            break
        if stop > at:
            if start > at:
                left.append((at, start))
            at = stop
    return [*left, *([(at, end)] if at < end else [])]
