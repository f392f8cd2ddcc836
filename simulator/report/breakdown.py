"""Where the time of one device goes: an exclusive account that adds up to the step, and what was hidden beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.engine.program import Program
from simulator.engine.simpy_engine import Times
from simulator.ops import COMPUTE, Attention, Gemm, Op
from simulator.scheme import SHORT

EXPOSED = ("tp", "cp", "ep", "dp", "pp", "copy")
"""Communication by axis. Where two run at once without computation beside them, the time counts for the first."""

COMPUTING = ("gemm", "attention", "memory_bound", "optimizer")


@dataclass
class Breakdown:
    """Seconds of one device by what they were spent on; all but `hidden` add up to `step`."""

    step: float
    parts: dict[str, float] = field(default_factory=dict)
    """gemm, attention, memory_bound, optimizer, the exposed axes, bubble, idle."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication that ran beside computation (or beside communication that was counted), by axis."""


def kind_of(op: Op) -> str:
    """The part of the breakdown that an op's time belongs to."""
    if op.stream != COMPUTE:
        return SHORT[op.stream.partition("-")[0]]
    if op.phase == "U":
        return "optimizer"
    if isinstance(op.work, Gemm):
        return "gemm"
    return "attention" if isinstance(op.work, Attention) else "memory_bound"


def breakdown(program: Program, times: Times, device: int) -> Breakdown:
    """The account of `device` from 0 to the end of the step."""
    edges: list[tuple[float, int, str]] = []
    busy: dict[str, float] = dict.fromkeys(EXPOSED, 0.0)

    def interval(number: int, kind: str) -> None:
        begin, end = times.begin[number], times.end[number] + program.latency[number]
        if end > begin:
            edges.extend(((begin, 1, kind), (end, -1, kind)))
            if kind in busy:
                busy[kind] += end - begin

    for (owner, _), queue in program.queues.items():
        if owner == device:
            for number in queue:
                interval(number, kind_of(program.ops[number]))
    for number, _, receiver in program.transfers:
        if receiver == device:
            interval(number, "pp")

    step = times.span
    order = (*COMPUTING, *EXPOSED)
    parts = dict.fromkeys((*order, "bubble", "idle"), 0.0)
    running = dict.fromkeys(order, 0)
    nothing = "bubble" if program.devices > 1 else "idle"
    now = 0.0
    for at, change, kind in sorted(edges, key=lambda edge: (edge[0], edge[1])):
        if at > now:
            parts[next((k for k in order if running[k]), nothing)] += at - now
            now = at
        running[kind] += change
    parts[nothing] += max(0.0, step - now)
    hidden = {kind: busy[kind] - parts[kind] for kind in EXPOSED if busy[kind] > parts[kind] * (1 + 1e-12)}
    return Breakdown(step, parts, hidden)
