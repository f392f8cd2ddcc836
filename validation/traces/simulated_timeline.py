"""The timeline of one pipeline device in a simulated step."""

from __future__ import annotations

from meshcast.simulator.ir.ops import COMPUTE, Collective, HostCopy, HostLaunch, HostUpdate
from meshcast.simulator.report.report import Report
from meshcast.validation.traces.gpu_timeline import families_of
from meshcast.validation.traces.kernel_classes import class_of
from meshcast.validation.traces.timeline import UNATTRIBUTED, Slice, Timeline


def simulated_timeline(report: Report, device: int) -> Timeline:
    """Timeline of a pipeline device: its own ops on the GPU, and the messages that it receives."""
    flat, times = report.play.step.flat, report.play.step.times
    families = families_of(report.play.plan)
    slices: list[Slice] = []
    received = [(number, "pipeline") for number, _, receiver in flat.sent if receiver == device]
    own = [(n, stream) for (owner, stream), queue in flat.queues.items() if owner == device for n in queue]
    for number, stream in (*own, *received):
        op, begin = flat.ops[number], times.begin[number]
        seconds = times.end[number] + flat.latency[number] - begin
        if op.work is not None and seconds > 0 and not isinstance(op.work, HostLaunch | HostUpdate):
            # Copies of the host count for the GPU's own work: a trace does not say what they are for.
            served = {COMPUTE if isinstance(op.work, HostCopy) else stream.partition("-")[0]}
            if stream == COMPUTE and isinstance(op.work, Collective):  # the optimizer runs its collectives in sequence
                served = {families.get(report.play.plan.ranks.axis_of(part), UNATTRIBUTED) for part in op.work.axes}
            family = served.pop() if len(served) == 1 else UNATTRIBUTED
            slices.append(Slice(family, class_of(op), begin, seconds, op.name))
    return Timeline(tuple(sorted(slices, key=lambda one: one.begin)), report.step_time)
