"""Compares a traced step with the simulated step of the same job: seconds and calls by stream and class of kernel.

The measured side is a rank's trace of torch's profiler (`simulator.formats.kineto`): on a GPU its kernels, copies and
memsets, on a CPU the exclusive time of operators. The simulated side is the device that stands for this rank.
The seconds of a measured collective include its wait for the other ranks; those of a simulated collective do not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from meshcast.hardware import GPU, gpus
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.kineto import Event, Trace
from meshcast.simulator.ir.ops import COMPUTE, Collective, HostCopy, HostLaunch, HostUpdate
from meshcast.simulator.plan.checks import check_alike
from meshcast.simulator.report.report import Report
from meshcast.validation.traces.gpu_timeline import families_of, gpu_timeline
from meshcast.validation.traces.host_timeline import host_timeline
from meshcast.validation.traces.kernel_classes import CLASSES, class_of
from meshcast.validation.traces.timeline import STREAMS, UNATTRIBUTED, Slice, Timeline


@dataclass(frozen=True)
class ClassRow:
    """Seconds and calls of a class of kernels on a stream, measured (`real`) and simulated."""

    stream: str
    kind: str
    real: float
    real_calls: int
    simulated: float
    simulated_calls: int

    @property
    def ratio(self) -> float | None:
        """Simulated over measured seconds; None where either side has none."""
        return self.simulated / self.real if self.real and self.simulated else None


@dataclass(frozen=True)
class Comparison:
    """A measured and a simulated timeline of the same step.

    on: name of the GPU that was traced, or ``CPU``.
    device: pipeline device of the simulation that stands for the traced rank.
    framework_s: constant time of the framework in the simulated step that the measured step cannot have: it ends with
        its last kernel [s].
    """

    title: str
    on: str
    device: int
    real: Timeline
    simulated: Timeline
    notes: tuple[str, ...] = field(default=())
    framework_s: float = 0.0

    @cached_property
    def lines(self) -> list[ClassRow]:
        """A row for each class that occurs on either side, ordered by stream, then class."""
        keys = {*self.real.sums, *self.simulated.sums}
        ordered = sorted(keys, key=lambda key: (STREAMS.index(key[0]), CLASSES.index(key[1])))
        nothing = 0.0, 0
        return [ClassRow(*k, *self.real.sums.get(k, nothing), *self.simulated.sums.get(k, nothing)) for k in ordered]

    def explain_framework(self) -> list[str]:
        """Returns a note on the constant time of the framework, if the forecast has any: it is no error of the
        forecast."""
        if not self.framework_s:
            return []
        words = f"{self.framework_s * 1e3:,.4g} ms of the framework (step_overhead_s)"
        return [f"the forecast's step has {words}, which the trace's last kernel does not show"]

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer of ``--json``; times in seconds."""
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
            "framework_s": self.framework_s,
            "notes": list(self.notes),
        }


def compare_step(trace: Trace, report: Report, rank: int | None = None, step: int | None = None) -> Comparison:
    """Compares a step of a trace with the forecast of its job.

    rank: the traced rank, if the trace does not record it.
    step: index among the steps that the trace marks, negative from the end; None: the last.
    Raises PlanError for a trace of several processes, a rank outside the job's mesh, or a step that the trace does not
    have.
    """
    plan = report.play.plan
    check_alike(plan, "a comparison with a trace")
    check_process(trace)
    notes: list[str] = []
    if trace.world is not None and trace.world > 1 and trace.world != plan.mesh.world:
        rule = f"the job has {plan.mesh.world} ranks, the trace is from a run of {trace.world}"
        raise PlanError("trace", rule, "Name the job that was traced", trace.file)
    number = rank if rank is not None else trace.rank
    if number is None:
        number = 0
        if plan.mesh.world > 1:
            notes.append("the trace does not record its rank: rank 0 is assumed")
    if not 0 <= number < plan.mesh.world:
        rule = f"the ranks of the job are 0 to {plan.mesh.world - 1}"
        raise PlanError("--rank", rule, "Name the job that was traced, or another rank", number)
    axis = plan.ranks.pipeline_axis
    device = number // plan.mesh.stride(axis) % plan.mesh.size(axis) if axis in plan.mesh.axes else 0
    mark, remarks = find_step(trace, step)
    notes += remarks
    real = gpu_timeline(trace, plan, number, mark) if trace.on_gpu else host_timeline(trace, mark)
    measured, forecast, ambiguous = attribute_communication(real, simulated_timeline(report, device))
    if ambiguous:
        notes.append(f"the trace records no process group for {', '.join(ambiguous)}, which several schemes of it use")
    on = (trace.devices[0] if trace.devices else "GPU") if trace.on_gpu else "CPU"
    gpu = plan.ranks.clusters[device].gpu
    if differs(on, gpu):
        notes.append(f"the trace is of {on}, the job of {gpu.title or gpu.name}")
    framework_s = report.job.framework.step_overhead_s if trace.on_gpu else 0.0
    title = f"{report.job.model.name}, rank {number}"
    return Comparison(title, on, device, measured, forecast, tuple(notes), framework_s)


def check_process(trace: Trace) -> None:
    """Raises PlanError for a file of several processes: their steps run at the same time, not after each other."""
    processes = {mark.lane[0] for mark in trace.steps()}
    if trace.rank is None and len(processes) > 1:
        rule = f"it has {len(processes)} processes, each with its own steps, and a trace of one is compared"
        remedy = "Name the file of one rank; of a forecast, predict JOB --trace FOLDER/ writes one for each stage"
        raise PlanError(trace.file, rule, remedy)


def differs(on: str, gpu: GPU) -> bool:
    """Returns whether a traced device, by the name that its driver gives it, is certainly another than a GPU."""
    if (on == "CPU") != (gpu.architecture == "cpu"):
        return True
    words, traced = gpu.name.lower().split("-"), on.lower()
    model = next((word for word in words if any(letter.isdigit() for letter in word)), "")
    if gpu.name not in gpus() or not model or not any(letter.isdigit() for letter in on):
        return False
    other_form = any(here in traced and there in words for here, there in (("pcie", "sxm"), ("sxm", "pcie")))
    return other_form or re.search(rf"(?<![a-z0-9]){model}(?![a-z0-9])", traced) is None


def find_step(trace: Trace, step: int | None) -> tuple[Event | None, list[str]]:
    """Finds the event that marks the requested step (None if the trace marks no steps), and notes for the reader."""
    marks = trace.steps()
    if not marks:
        if step is not None:
            remedy = "Leave --step out: the whole trace counts as one step"
            raise PlanError("--step", "the trace marks no steps", remedy, step)
        return None, ["the trace marks no steps: the whole trace counts as one"]
    at = -1 if step is None else step
    if not -len(marks) <= at < len(marks):
        raise PlanError("--step", f"the trace marks {len(marks)} steps", f"Write 0 to {len(marks) - 1}", step)
    number, last = at % len(marks), len(marks) - 1
    chosen = (
        f"compared is step {number} of the {len(marks)} steps (0 to {last}) that the trace marks: --step takes another"
    )
    return marks[at], [chosen] if len(marks) > 1 else []


def attribute_communication(real: Timeline, forecast: Timeline) -> tuple[Timeline, Timeline, list[str]]:
    """Returns both timelines with a stream for every collective, and the operations that several streams use.

    A trace without process groups does not tell which scheme issued a collective. If only a single stream of the
    forecast uses this operation, the collective goes there; otherwise the operation is `UNATTRIBUTED` on both sides. If
    the trace names the scheme of some collectives of an operation, only the others are `UNATTRIBUTED`.
    """
    homes: dict[str, set[str]] = defaultdict(set)
    for slice_ in forecast.slices:
        if slice_.stream != COMPUTE:
            homes[slice_.kind].add(slice_.stream)
    known = {slice_.kind for slice_ in real.slices if slice_.stream not in ("", COMPUTE)}
    unknown = {slice_.kind for slice_ in real.slices if not slice_.stream} - known
    home = {kind: next(iter(homes[kind])) for kind in unknown if len(homes[kind]) == 1}
    ambiguous = unknown - home.keys()

    def attribute(slice_: Slice) -> Slice:
        if slice_.stream == COMPUTE or (slice_.stream and slice_.kind not in ambiguous):
            return slice_
        return replace(slice_, stream=home.get(slice_.kind, UNATTRIBUTED))

    measured, played = (replace(side, slices=tuple(map(attribute, side.slices))) for side in (real, forecast))
    return measured, played, sorted(kind for kind in ambiguous if len(homes[kind]) > 1)


def simulated_timeline(report: Report, device: int) -> Timeline:
    """Returns the timeline of a pipeline device: its ops on the GPU, and the messages that it receives."""
    flat, times = report.play.step.flat, report.play.step.times
    families = families_of(report.play.plan)
    slices: list[Slice] = []
    received = [(number, "pipeline") for number, _, receiver in flat.sent if receiver == device]
    of_device = [(n, stream) for (owner, stream), queue in flat.queues.items() if owner == device for n in queue]
    for number, stream in (*of_device, *received):
        op, begin = flat.ops[number], times.begin[number]
        seconds = times.end[number] + flat.latency[number] - begin
        if op.work is not None and seconds > 0 and not isinstance(op.work, HostLaunch | HostUpdate):
            # Copies of the host count for the GPU's work: a trace does not say what they are for.
            served = {COMPUTE if isinstance(op.work, HostCopy) else stream.partition("-")[0]}
            if stream == COMPUTE and isinstance(op.work, Collective):  # the optimizer runs its collectives in sequence
                served = {families.get(report.play.plan.ranks.axis_of(part), UNATTRIBUTED) for part in op.work.axes}
            family = served.pop() if len(served) == 1 else UNATTRIBUTED
            slices.append(Slice(family, class_of(op), begin, seconds, op.name))
    return Timeline(tuple(sorted(slices, key=lambda slice_: slice_.begin)), report.step_time)
