"""Makes the record of a trace: what ran is divided into layers, each kind of which is recorded once."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshcast.simulator.models.trace.record import Record, Step, TracedPart, Work

LAYER = re.compile(r"(.*?)\.(\d+)")
"""The name of a layer: a list of modules, and a number; of nested lists the outermost."""


class TraceEvent(NamedTuple):
    """What tells the steps of layers and the residual stream apart.

    Attributes:
        event: enter (a module), leave, sum (of two tensors) or copy.
        module: the module that begins or ends.
        reads: the memory of tensors that are read.
        writes: the memory of the result.
        width: of the tensor that a module reads.
        rows: rows of this tensor.
    """

    event: str
    module: str = ""
    reads: tuple[int, ...] = ()
    writes: int = 0
    width: int = 0
    rows: int = 0


class ModuleTrace(NamedTuple):
    """What is known behind the run of a module.

    Attributes:
        tokens: those of the sequence.
        classes: class of every module by name.
        parameters: shape of every parameter by name, each tensor once.
        events: what ran, in order.
        work: of every module.
        norms: modules that normalise, each with whether it stores its weight - 1.
        dropout: the largest probability of a module that drops.
    """

    tokens: int
    classes: Mapping[str, str]
    parameters: Mapping[str, Sequence[int]]
    events: Sequence[Step | TraceEvent]
    work: Mapping[str, Work]
    norms: Mapping[str, bool]
    dropout: float


def fold(trace: ModuleTrace) -> Record:
    """Returns the record of a trace, each kind of layer once."""
    inside = _match_layers(trace)
    runs, others = _split_runs(trace, inside)
    ran, taken = Counter(name for name, _ in runs), set[str]()
    kinds, parts, numbers = dict[str, int](), list[TracedPart](), list[int]()
    for name, events in runs:
        part = _make_layer(trace, name, events, taken, ran[name])
        key = json.dumps(part.to_plain(), sort_keys=True)
        if key not in kinds:
            kinds[key] = len(parts)
            parts.append(part)
        numbers.append(kinds[key])
    parameters = {name: shape for name, shape in trace.parameters.items() if name not in taken}
    work = {name: work for name, work in trace.work.items() if not inside.fullmatch(name)}
    outside = TracedPart("", parameters, _read_steps(others, "", trace.norms, -1), work)
    first = runs[0][1][0] if runs else TraceEvent("enter")
    return Record(trace.tokens, first.width, tuple(parts), tuple(numbers), outside, trace.dropout)


def _match_layers(trace: ModuleTrace) -> re.Pattern[str]:
    """Returns what matches the names of layers and of their modules: of the list of modules that has most parameters,
    among the outermost lists that run."""
    ran = {event.module for event in trace.events if isinstance(event, TraceEvent)}
    lists = {match[1] for name in ran if (match := LAYER.fullmatch(name))}
    sizes: Counter[str] = Counter()
    for name, shape in trace.parameters.items():
        match = LAYER.match(name)
        if match and match[1] in lists:
            sizes[match[1]] += math.prod(shape)
    if not sizes:
        return re.compile("(?!)")
    return re.compile(re.escape(max(sizes, key=lambda name: sizes[name])) + r"\.(\d+)(?:\.(.*))?")


def _split_runs(
    trace: ModuleTrace, inside: re.Pattern[str]
) -> tuple[list[tuple[str, list[Step | TraceEvent]]], list[Step | TraceEvent]]:
    """Returns the runs of layers, each its name and what runs, its beginning first; and what runs outside. A step
    ``layers`` there is where the first layer runs."""
    runs, others = list[tuple[str, list[Step | TraceEvent]]](), list[Step | TraceEvent]()
    current: tuple[str, list[Step | TraceEvent]] | None = None
    for event in trace.events:
        match = inside.fullmatch(event.module)
        if isinstance(event, TraceEvent) and event.event == "enter" and match and match[2] is None:
            others += [] if runs else [Step("layers", "")]
            current = (event.module, [event])
            runs.append(current)
        elif isinstance(event, TraceEvent) and event.event == "leave" and current and event.module == current[0]:
            current = None
        else:
            (others if current is None else current[1]).append(event)
    return runs, others


def _make_layer(
    trace: ModuleTrace, name: str, events: Sequence[Step | TraceEvent], taken: set[str], runs: int
) -> TracedPart:
    """Returns a layer, with the parameters that no layer before it has. taken: these. runs: how often it runs."""
    start = f"{name}."
    parameters = {
        key.removeprefix(start): shape
        for key, shape in trace.parameters.items()
        if key.startswith(start) and key not in taken
    }
    taken |= {start + key for key in parameters}
    work = {
        module[len(start) :]: Work(*(amount / runs for amount in work))
        for module, work in trace.work.items()
        if f"{module}.".startswith(start)
    }
    entering = events[0].reads[0] if isinstance(events[0], TraceEvent) and events[0].reads else -1
    return TracedPart(trace.classes[name], parameters, _read_steps(events[1:], start, trace.norms, entering), work)


def _read_steps(
    events: Sequence[Step | TraceEvent], start: str, norms: Mapping[str, bool], entering: int
) -> tuple[Step, ...]:
    """Returns the steps of a layer, with names inside of it and with its norms. entering: the memory of its input."""
    copies: dict[int, int] = {}
    stream, steps = {entering}, list[Step]()
    for event in events:
        module = event.module[len(start) :]
        if isinstance(event, Step):
            steps.append(replace(event, module=module, parameter=event.parameter.removeprefix(start)))
            continue
        reads = [copies.get(tensor, tensor) for tensor in event.reads]
        if event.event == "copy":
            copies[event.writes] = reads[0]
        elif event.event == "sum" and stream.intersection(reads):
            stream.add(event.writes)
        elif event.event == "enter" and event.module in norms and reads:
            source = "input" if reads[0] == entering else "stream" if reads[0] in stream else "block"
            step = Step("norm", module, rows=event.rows, width=event.width, reads=source)
            steps.append(replace(step, shifted=norms[event.module]))
    return tuple(steps)
