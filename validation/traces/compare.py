"""A real trace of one step against the simulated step of the same job, by stream and class of kernel.

The real side is one rank's trace of torch's profiler (`simulator.bridges.kineto`). On a GPU a slice is a kernel, a copy
or a memset; on a processor it is the time that an operator had for itself. The simulated side is what `report.trace`
writes: the played ops of the device that stands for that rank. Kernels of collectives last from the moment they are
launched, so a real one holds the waiting for the other ranks, which a simulated one does not.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from hardware.errors import PlanError
from simulator.bridges.kineto import ON_DEVICE, Event, Trace
from simulator.engine.occupancy import measure
from simulator.ir.ops import COMPUTE, Collective
from simulator.plan.plan import Plan
from simulator.report.report import Report
from validation.traces.kernel_classes import CLASSES, COMMUNICATES, class_of, classify, operation

ANY = "communication"
"""The stream of communication of which the trace does not say whom it served."""

STREAMS = (COMPUTE, "tensor", "sequence", "expert", "data", "pipeline", ANY)
"""All streams, by the family that they serve, from top to bottom."""

GLOO = "gloo:"

FAMILIES = (
    ("expert", r"expert_model|expert_tensor|(^|_)ep(_|$)"),
    ("data", r"data|(^|_)e?dp(_|$)|fsdp|replicate|shard"),
    ("tensor", r"tensor|(^|_)tp(_|$)"),
    ("pipeline", r"pipeline|embedding|(^|_)pp(_|$)"),
    ("sequence", r"context|sequence|(^|_)cp(_|$)"),
)
"""Families by the words that frameworks describe process groups with: ``mesh_tp``, ``TENSOR_MODEL_PARALLEL_GROUP``."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that ran. kind: its class. begin, seconds: from the begin of the step. stream: "" while not known.
    calls: 0 for a further stretch of what is counted already."""

    stream: str
    kind: str
    begin: float
    seconds: float
    name: str = ""
    calls: int = 1


@dataclass(frozen=True)
class Timeline:
    """One device's step. span: how long it took [s]."""

    slices: tuple[Slice, ...]
    span: float

    @cached_property
    def sums(self) -> dict[tuple[str, str], tuple[float, int]]:
        """Seconds and calls by stream and class."""
        found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
        for one in self.slices:
            found[one.stream, one.kind][0] += one.seconds
            found[one.stream, one.kind][1] += one.calls
        return {key: (seconds, int(calls)) for key, (seconds, calls) in found.items()}

    @cached_property
    def account(self) -> dict[str, float]:
        """The step [s] by computation, communication beside none of it, and idling; they add up to it."""
        compute = _covered(one for one in self.slices if one.stream == COMPUTE)
        busy = _covered(self.slices)
        return {"compute": compute, "exposed": busy - compute, "idle": max(0.0, self.span - busy)}

    @property
    def calls(self) -> int:
        """Kernels that were launched."""
        return sum(one.calls for one in self.slices)


def _covered(slices: Iterable[Slice]) -> float:
    """The length of the union of slices [s]."""
    spans = np.array([(one.begin, one.begin + one.seconds) for one in slices])
    return measure([(spans[:, 0], spans[:, 1])]) if len(spans) else 0.0


@dataclass(frozen=True)
class Line:
    """A line of the table: seconds and calls of one class on one stream. ratio: simulated over real."""

    stream: str
    kind: str
    real: float
    real_calls: int
    simulated: float
    simulated_calls: int

    @property
    def ratio(self) -> float | None:
        return self.simulated / self.real if self.real and self.simulated else None


@dataclass(frozen=True)
class Comparison:
    """A real step beside the simulated one. on: what the real one ran on."""

    title: str
    on: str
    device: int
    real: Timeline
    simulated: Timeline
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def lines(self) -> list[Line]:
        """All classes that occur on either side, in the order of the streams and the classes."""
        keys = {*self.real.sums, *self.simulated.sums}
        ordered = sorted(keys, key=lambda key: (STREAMS.index(key[0]), CLASSES.index(key[1])))
        nothing = 0.0, 0
        return [Line(*k, *self.real.sums.get(k, nothing), *self.simulated.sums.get(k, nothing)) for k in ordered]

    def to_dict(self) -> dict[str, Any]:
        """The JSON answer, in seconds."""
        sides = {"real": self.real, "simulated": self.simulated}
        return {
            "title": self.title,
            "on": self.on,
            "device": self.device,
            "step_s": {name: side.span for name, side in sides.items()},
            "account_s": {name: side.account for name, side in sides.items()},
            "calls": {name: side.calls for name, side in sides.items()},
            "rows": [
                {
                    "stream": line.stream,
                    "class": line.kind,
                    "real_s": line.real,
                    "real_calls": line.real_calls,
                    "simulated_s": line.simulated,
                    "simulated_calls": line.simulated_calls,
                    "ratio": line.ratio,
                }
                for line in self.lines
            ],
            "notes": list(self.notes),
        }


def compare(trace: Trace, report: Report, rank: int | None = None, step: int | None = None) -> Comparison:
    """One step of a trace beside the forecast of its job.

    rank: whose trace it is, where the file does not say. step: which of the steps that the trace marks, counted from 0
    (negative: from the last); None: the last.
    Raises PlanError for a rank that the job lacks, or a step that the trace lacks.
    """
    plan = report.play.plan
    notes: list[str] = []
    if trace.world is not None and trace.world > 1 and trace.world != plan.mesh.world:
        rule = f"the job has {plan.mesh.world} ranks, the trace is one of {trace.world}"
        raise PlanError("trace", rule, "Name the job that was traced", trace.file)
    number = rank if rank is not None else trace.rank
    if number is None:
        number = 0
        if plan.mesh.world > 1:
            notes.append("the trace does not say whose it is: taken for that of rank 0")
    if not 0 <= number < plan.mesh.world:
        rule = f"the ranks of the job are 0 to {plan.mesh.world - 1}"
        raise PlanError("--rank", rule, "Name the job that was traced, or another rank", number)
    axis = plan.pipeline_axis
    device = number // plan.mesh.stride(axis) % plan.mesh.size(axis) if axis in plan.mesh.axes else 0
    mark, said = marked(trace, step)
    notes += said
    real = of_gpu(trace, plan, number, mark) if trace.on_gpu else of_host(trace, mark)
    measured, forecast, unsaid = placed(real, simulated(report, device))
    if unsaid:
        notes.append(f"the trace does not say whom its {', '.join(unsaid)} served, and the plan has several")
    on = (trace.devices[0] if trace.devices else "GPU") if trace.on_gpu else "CPU"
    model = report.job.model.name
    return Comparison(f"{model}, rank {number}", on, device, measured, forecast, tuple(notes))


def marked(trace: Trace, step: int | None) -> tuple[Event | None, list[str]]:
    """The step that was asked for, None where the trace marks none; and what there is to say of it."""
    marks = trace.steps()
    if not marks:
        if step is not None:
            remedy = "Leave --step out: the trace is taken for one step"
            raise PlanError("--step", "the trace marks no steps", remedy, step)
        return None, ["the trace marks no step: all of it is taken for one"]
    at = -1 if step is None else step
    if not -len(marks) <= at < len(marks):
        raise PlanError("--step", f"the trace marks {len(marks)} steps", f"Write 0 to {len(marks) - 1}", step)
    several = f"the trace marks {len(marks)} steps, this is step {at % len(marks)} (from 0)"
    return marks[at], [several] if len(marks) > 1 else []


# --------------------------------------------------------------------------------------------- sides


def simulated(report: Report, device: int) -> Timeline:
    """The played step of one pipeline device: its ops, and the messages that come to it."""
    flat, times = report.play.step.flat, report.play.step.times
    families = _families(report.play.plan)
    found: list[Slice] = []
    coming = [(number, "pipeline") for number, _, receiver in flat.sent if receiver == device]
    own = [(n, stream) for (owner, stream), queue in flat.queues.items() if owner == device for n in queue]
    for number, stream in (*own, *coming):
        op, begin = flat.ops[number], times.begin[number]
        seconds = times.end[number] + flat.latency[number] - begin
        if op.work is not None and seconds > 0:
            serves = {stream.partition("-")[0]}
            if stream == COMPUTE and isinstance(op.work, Collective):  # an update waits for what it sends
                serves = {families.get(report.play.plan.axis_of(part), ANY) for part in op.work.axes}
            home = serves.pop() if len(serves) == 1 else ANY
            found.append(Slice(home, class_of(op), begin, seconds, op.name))
    return Timeline(tuple(sorted(found, key=lambda one: one.begin)), report.step_time)


def of_gpu(trace: Trace, plan: Plan, rank: int, mark: Event | None) -> Timeline:
    """What the GPU ran of what was issued in the marked step, from its first kernel to the end of its last."""
    kernels = trace.of(*ON_DEVICE)
    busiest: dict[Any, float] = defaultdict(float)
    for one in kernels:
        busiest[str(one.args.get("device"))] += one.seconds
    device = max(busiest, key=lambda name: busiest[name])
    kernels = [one for one in kernels if str(one.args.get("device")) == device]
    if mark is not None:
        issued = [(one, (trace.launch(one) or one).begin) for one in kernels]
        kernels = [one for one, moment in issued if mark.begin <= moment <= mark.end]
    if not kernels:
        raise PlanError("--step", "no kernel was issued in it", "Name another step", mark.name if mark else None)
    first = min(one.begin for one in kernels)
    slices = [_kernel(trace, plan, rank, one, first) for one in kernels]
    return Timeline(tuple(slices), max(one.end for one in kernels) - first)


def _kernel(trace: Trace, plan: Plan, rank: int, kernel: Event, first: float) -> Slice:
    around, begin = trace.around(kernel), kernel.begin - first
    if not COMMUNICATES.search(kernel.name):
        return Slice(COMPUTE, classify(kernel.name, around), begin, kernel.seconds, kernel.name)
    # All-to-alls run in kernels called SendRecv: what torch calls the collective is surer than the kernel's name.
    told = str(kernel.args.get("Collective name") or "")
    names = [f"nccl:{told}", *(one for one in around if one.startswith("nccl:")), kernel.name]
    kind = next(filter(None, map(operation, names)), "other")
    return Slice(stream_of(trace, plan, rank, kernel), kind, begin, kernel.seconds, kernel.name)


def stream_of(trace: Trace, plan: Plan, rank: int, kernel: Event) -> str:
    """The stream of a collective, by what its process group is called or by its ranks; empty where neither tells."""
    told = [str(kernel.args.get(f"Process Group {key}") or "") for key in ("Description", "Name")]
    families = _families(plan)
    described = told[0].removeprefix("mesh_")
    if described in families:
        return families[described]
    if found := next((family for family, words in FAMILIES if re.search(words, described, re.I)), ""):
        return found
    listed = re.fullmatch(r"\[([\d, ]+)\]", str(kernel.args.get("Process Group Ranks") or ""))
    members = tuple(map(int, listed[1].split(","))) if listed and listed[1].strip(" ,") else None
    members = members or next((trace.groups[name] for name in told if name in trace.groups), ())
    return next((family for axis, family in families.items() if members == group(plan, rank, axis)), "")


def _families(plan: Plan) -> dict[str, str]:
    """What family the schemes of every axis belong to."""
    return {axis: one.use.partition("/")[0] for one in plan.schemes for axis in one.axes}


def group(plan: Plan, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks of the group along an axis that a rank belongs to."""
    mesh = plan.mesh
    steps = [mesh.stride(part) for part in mesh.parts(axis) if part in mesh.axes]
    sizes = [mesh.axes[part] for part in mesh.parts(axis) if part in mesh.axes]
    own = sum(rank // step % size * step for step, size in zip(steps, sizes, strict=True))
    return tuple(rank - own + other for other in mesh.ranks((axis,)))


def of_host(trace: Trace, mark: Event | None) -> Timeline:
    """What a process without a GPU did: operators, each for the time that it had for itself, and what gloo did beside.

    A step is all that lies in its mark. What Python does between operators is idling.
    """
    begin, end = (mark.begin, mark.end) if mark else (-np.inf, np.inf)
    talks = [one for one in trace.of("user_annotation") if one.name.startswith(GLOO) and begin <= one.begin < end]
    asked = [one for one in trace.of("cpu_op") if one.name.startswith("c10d::") and begin <= one.begin < end]
    # Gloo makes a reduce-scatter of an all-reduce; what was asked for says so. It is done in the order in which it was.
    names = [one.name for one in (asked if len(asked) == len(talks) else talks)]
    kinds = [operation(name) or "other" for name in names]
    found = [Slice("", kind, one.begin, one.seconds, one.name) for one, kind in zip(talks, kinds, strict=True)]
    holes = _union(talks)
    for one in trace.stretches():
        if begin <= one.event.begin < end and _computes(one.event, one.around):
            kind = _host_class(one.event, one.around)
            # Operators of torch itself wait for nobody; functions written in Python wait for what they send.
            pieces = [(one.begin, one.end)]
            if not one.event.name.startswith("aten::"):
                pieces = _without(one.begin, one.end, holes)
            found += [Slice(COMPUTE, kind, start, stop - start, one.event.name, 0) for start, stop in pieces]
    if not found:
        raise PlanError("--step", "no operator ran in it", "Name another step", mark.name if mark else None)
    calls = _calls(trace, begin, end)
    first = mark.begin if mark else min(one.begin for one in found)
    last = mark.end if mark else max(one.begin + one.seconds for one in found)
    counted = []
    for slice_ in sorted(found, key=lambda one: one.begin):
        own = calls.pop(slice_.kind, 0) if slice_.stream else 1
        counted.append(replace(slice_, begin=slice_.begin - first, calls=own))
    return Timeline(tuple(counted), last - first)


def _computes(event: Event, around: tuple[str, ...]) -> bool:
    """Whether an event of the host is computation: in marks' own time Python runs, gloo's operators are its own."""
    return event.category == "cpu_op" and not any(name.startswith(GLOO) for name in around)


def _host_class(event: Event, around: tuple[str, ...]) -> str:
    # What calls a collective only issues it.
    return "other" if event.name.startswith("c10d::") else classify(event.name, around)


def _calls(trace: Trace, begin: float, end: float) -> dict[str, int]:
    """Operators that were called, by class: the innermost whose own name says it (`mm` in `matmul` in `linear`)."""
    nested = trace.nested()
    kinds = [_host_class(event, around) for event, around, _ in nested]
    counts = [
        _computes(event, around) and begin <= event.begin < end and _host_class(event, ()) == kind
        for (event, around, _), kind in zip(nested, kinds, strict=True)
    ]
    found: dict[str, int] = defaultdict(int)
    for number in reversed(range(len(nested))):  # those inside come behind
        if counts[number]:
            found[kinds[number]] += 1
            outer = nested[number][2]
            while outer >= 0:
                counts[outer] &= kinds[outer] != kinds[number]
                outer = nested[outer][2]
    return found


def _union(events: Sequence[Event]) -> list[tuple[float, float]]:
    """What events cover, as ordered intervals apart from each other."""
    found: list[tuple[float, float]] = []
    for one in sorted(events, key=lambda event: event.begin):
        if found and one.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], one.end)
        else:
            found.append((one.begin, one.end))
    return found


def _without(begin: float, end: float, holes: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is left of an interval."""
    left, at = [], begin
    for start, stop in islice(holes, max(0, bisect_left(holes, (begin, begin)) - 1), None):
        if start >= end:
            break
        if stop > at:
            if start > at:
                left.append((at, start))
            at = stop
    return [*left, *([(at, end)] if at < end else [])]


def placed(real: Timeline, forecast: Timeline) -> tuple[Timeline, Timeline, list[str]]:
    """Both with a stream for all communication.

    Where the trace says of an operation whom it served, what it does not say that of served no single family. Where it
    never does, and one stream of the forecast alone has that operation, it is that one; otherwise the operation is one
    line for all. The names of such operations come third.
    """
    homes: dict[str, set[str]] = defaultdict(set)
    for one in forecast.slices:
        if one.stream != COMPUTE:
            homes[one.kind].add(one.stream)
    known = {one.kind for one in real.slices if one.stream not in ("", COMPUTE)}
    lost = {one.kind for one in real.slices if not one.stream} - known
    home = {kind: next(iter(homes[kind])) for kind in lost if len(homes[kind]) == 1}
    joined = lost - home.keys()

    def settled(one: Slice) -> Slice:
        if one.stream == COMPUTE or (one.stream and one.kind not in joined):
            return one
        return replace(one, stream=home.get(one.kind, ANY))

    measured, played = (Timeline(tuple(map(settled, side.slices)), side.span) for side in (real, forecast))
    return measured, played, sorted(kind for kind in joined if len(homes[kind]) > 1)
