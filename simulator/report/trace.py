"""Chrome trace of a played step, for ui.perfetto.dev and chrome://tracing.

A process is a pipeline device, a thread one of its streams, a slice an op. Arrows lead from a send to the op on the
other device that waits for it; counters show memory by category. Format: "Trace Event Format", JSON object form. Times
are in microseconds [us], rounded to one grid, so that consecutive ops stay consecutive in the file; equal forecasts
give equal bytes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from hardware.units import GIB
from simulator.ir.ops import COMPUTE, Op, Transfer, Work
from simulator.program.categories import kind_of
from simulator.program.memory_profile import CATEGORIES
from simulator.report.report import Report, product_version
from simulator.scheduling.schedule import OverlappedPasses

ACTIONS, HOST = "actions", "host"

THREADS = (
    ACTIONS,
    HOST,
    COMPUTE,
    "tensor",
    "tensor-row",
    "sequence",
    "sequence-inner",
    "expert",
    "expert-fetch",
    "expert-fetch-far",
    "data",
    "pipeline-forward",
    "pipeline-backward",
    "pipeline-moves",
    "pipeline-sums",
    "pipeline",
    "memory",
)
"""Threads of every process from top to bottom. All but the first two are streams; a family may have more of them."""

SPOKEN = {"memory": "copy"}
"""Name of a thread where it differs from its stream: "memory" would be taken for the counter of the memory."""

STRIDE = 100
"""Thread ids of a process start at its id times this, so they are unique and differ from ids of processes."""

SAMPLES = 2000
"""Maximum number of memory samples of one device."""

LEVEL = 6
"""Level of compression: Python's default takes longer and saves next to nothing."""

UPDATE = "O"
"""Name of the optimizer's action."""


def write_trace(report: Report, path: str | Path) -> None:
    """Writes the trace of a forecast, compressed if `path` ends in .gz.

    Raises OSError if the file cannot be written.
    """
    with ExitStack() as opened:
        file: Any = opened.enter_context(open(path, "wb"))
        if str(path).lower().endswith(".gz"):
            # No time and no file name in the header: the bytes depend on the forecast alone.
            file = opened.enter_context(gzip.GzipFile("", "wb", LEVEL, file, mtime=0))
        trace = _Trace(report)
        file.write(f'{{"displayTimeUnit":"ms","otherData":{_json(trace.about())},"traceEvents":[\n'.encode())
        separator = ""
        for lines in trace.events():
            if lines:
                file.write((separator + ",\n".join(lines)).encode())
                separator = ",\n"
        file.write(b"\n]}\n")


class _Trace:
    """Events of one forecast, each a line of JSON."""

    def __init__(self, report: Report) -> None:
        self.report, self.play = report, report.play
        self.program, self.flat = report.play.program, report.play.step.flat
        # Ticks per microsecond: 1000, and more for steps below a second, so that a tick is at most 1e-9 of the step.
        self.scale = 10 ** max(3, math.ceil(3 - math.log10(report.play.step.span or 1.0)))
        times = report.play.step.times
        self.begin, self.end = self.ticks(times.begin), self.ticks(times.end)
        turns = [turn for order in self.program.timetable.orders for turn in order]
        # Both actions of an overlapped pair have the name of the pair.
        played = [str(turn) for turn in turns for _ in range(2 if isinstance(turn, OverlappedPasses) else 1)]
        self.actions = [*played, *[UPDATE] * self.program.devices]
        self.owner = self._owners()
        self.streams: dict[int, list[str]] = defaultdict(list)
        for (device, stream), queue in self.flat.queues.items():
            if any(self.flat.ops[number].work is not None for number in queue):
                self.streams[device].append(stream)
        streams = {stream for found in self.streams.values() for stream in found}
        self.threads = sorted({*THREADS, *streams}, key=lambda name: (_position(name), name))
        self._texts: dict[Op, tuple[str, str]] = {}

    def ticks(self, seconds: Any) -> np.ndarray:
        """Moments [s] in ticks."""
        return np.rint(np.asarray(seconds, float) * (1e6 * self.scale)).astype(np.int64)

    def us(self, ticks: np.ndarray) -> list[float]:
        """Ticks in microseconds; with at most 15 digits the shortest decimal is exact."""
        return (ticks / self.scale).tolist()

    def _owners(self) -> np.ndarray:
        """Index in `actions` of every op's action; of a pair that of its first action."""
        owner = np.empty(len(self.flat.ops), int)
        for action in range(len(self.program.timetable.slot)):
            own = slice(self.flat.first[action], self.flat.behind[action] + self._sends(action))
            owner[own] = action - self._follows(action)
        for device, numbers in enumerate(self.flat.updates):
            owner[numbers] = len(self.program.timetable.slot) + device
        return owner

    def _sends(self, action: int) -> int:
        """Number of sends after the ops of an action."""
        slot = self.program.timetable.slot[action]
        return sum(send is not None for send in (self.program.sends[slot], *self.program.others.get(slot, ())))

    def _follows(self, action: int) -> bool:
        """Whether an action is overlapped with the one before it."""
        table = self.program.timetable
        return table.slots[table.slot[action]].follows

    # ------------------------------------------------------------------------------------------ parts

    def about(self) -> dict[str, Any]:
        """Metadata of the trace: job, result and version."""
        report = self.report
        return {
            "id": report.job.id,
            "meshcast": product_version(),
            "step_time_s": report.step_time,
            "interval_90_s": list(report.interval_90),
            "job": report.job.to_dict(),
        }

    def events(self) -> Iterator[list[str]]:
        """All events in batches; a slice comes before the arrows that start or end at it."""
        for device in range(self.program.devices):
            yield self.names(device)
            yield self.action_slices(device)
            yield self.host_slices(device)
            for stream in sorted(self.streams[device], key=self.threads.index):
                yield self.slices(device, stream)
        yield self.arrows()
        for device in range(self.program.devices):
            yield self.counters(device)

    def names(self, device: int) -> list[str]:
        """Names and order of a process and its threads."""
        ranks = describe_ranks(sorted(self.play.plan.device_ranks(device).tolist()))
        lines = [
            _metadata_event("process_name", device, 0, {"name": f"device {device} ({ranks})"}),
            _metadata_event("process_sort_index", device, 0, {"sort_index": device}),
        ]
        for place, name in enumerate(self.threads):
            if name in (ACTIONS, *self.streams[device]) or (name == HOST and self._has_host):
                tid = self.tid(device, name)
                lines.append(_metadata_event("thread_name", device, tid, {"name": SPOKEN.get(name, name)}))
                lines.append(_metadata_event("thread_sort_index", device, tid, {"sort_index": place}))
        return lines

    @property
    def _has_host(self) -> bool:
        return self.program.host > 0 or self.report.job.framework.step_overhead_s > 0

    def tid(self, device: int, thread: str) -> int:
        """Unique id of a thread over all processes."""
        return device * STRIDE + 1 + self.threads.index(thread)

    def slices(self, device: int, stream: str) -> list[str]:
        """Slices of a stream, one for every op that has work."""
        ops, actions, flat = self.flat.ops, self.actions, self.flat
        numbers = np.array([n for n in flat.queues[device, stream] if ops[n].work is not None], int)
        begin, end = self.begin[numbers], self.end[numbers]
        rows = zip(numbers.tolist(), self.us(begin), self.us(end - begin), self.owner[numbers].tolist(), strict=True)
        where = f'"pid":{device},"tid":{self.tid(device, stream)},"ts":'
        lines = []
        for number, ts, dur, action in rows:
            head, tail = self._op_json(ops[number], flat.latency[number])
            lines.append(f'{head}{where}{ts},"dur":{dur},"args":{{"action":"{actions[action]}"{tail}')
        return lines

    def _op_json(self, op: Op, latency: float) -> tuple[str, str]:
        """JSON of an op before its times and after its action, which all executions of the op share."""
        if op not in self._texts:
            assert op.work is not None
            # A send has no phase of its own: its action says whether it is forward or backward.
            args: dict[str, Any] = {} if isinstance(op.work, Transfer) else {"phase": op.phase}
            args |= _describe_work(op.work)
            if latency:
                args["latency_us"] = float(f"{latency * 1e6:.6g}")
            head = f'{{"ph":"X","name":{_json(op.name)},"cat":"{kind_of(op)}",'
            self._texts[op] = head, f",{_json(args)[1:]}}}"
        return self._texts[op]

    def action_slices(self, device: int) -> list[str]:
        """Slices of the actions of a device, each from its first kernel to its last."""
        table = self.program.timetable
        queue = np.array([n for n in self.flat.queues[device, COMPUTE] if self.flat.ops[n].work is not None], int)
        owner = self.owner[queue]
        # The queue is in the order of the actions, so kernels of one action are neighbours.
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        last = np.append(first[1:], len(queue)) - 1 if len(queue) else first
        begin, end = self.begin[queue[first]], self.end[queue[last]]
        lines = []
        for action, ts, dur in zip(owner[first].tolist(), self.us(begin), self.us(end - begin), strict=True):
            args: dict[str, Any] = {"kind": UPDATE}
            if action < len(table.slot):
                stage, kind, microbatch, part = table.actions[action]
                args = {"stage": stage, "kind": kind, "microbatch": microbatch}
                args |= {"slice": part} if table.shape.slices > 1 else {}
                args |= {"class": table.slots[table.slot[action]].variant} if table.shape.classes else {}
                args |= {"beside": str(table.actions[action + 1])} if table.slots[table.slot[action]].partner else {}
            lines.append(_slice_event(self.actions[action], "action", device, self.tid(device, ACTIONS), ts, dur, args))
        return lines

    def host_slices(self, device: int) -> list[str]:
        """Slices of the host of a device: launching the ops of one action after another, then the framework's constant
        time after the step."""
        lines = []
        issue = np.asarray(self.flat.issue)
        own = np.flatnonzero((np.asarray(self.flat.device) == device) & (issue > 0))
        if len(own):
            first = np.flatnonzero(np.diff(self.owner[own], prepend=-1))
            clock = self.ticks(np.concatenate([[0.0], np.cumsum(issue[own])]))[[*first, len(own)]]
            rows = zip(self.us(clock[:-1]), self.us(np.diff(clock)), np.diff([*first, len(own)]).tolist(), strict=True)
            for (ts, dur, count), action in zip(rows, self.owner[own[first]].tolist(), strict=True):
                name = self.actions[action]
                args = {"action": name, "ops": count}
                lines.append(_slice_event(f"issue {name}", HOST, device, self.tid(device, HOST), ts, dur, args))
        if self.report.job.framework.step_overhead_s:
            done = max(int(self.end.max(initial=0)), int(self.ticks(self.play.step.span)))
            overhead = self.report.job.framework.step_overhead_s
            ends = np.array([done, int(self.ticks(self.play.step.span + overhead))])
            (ts, _), (dur,) = self.us(ends), self.us(np.diff(ends))
            lines.append(_slice_event("host: data, logging", HOST, device, self.tid(device, HOST), ts, dur, {}))
        return lines

    def arrows(self) -> list[str]:
        """Arrows from every send to the first op of the receiving action that waits for it."""
        flat = self.flat
        receivers = {send: receiver for send, _, receiver in flat.sent}
        reader: dict[int, int] = {}
        for number, after in enumerate(flat.after):
            for other in after:
                # A stage without layers passes its input on: the op that waits is its own send, or there is none.
                if receivers.get(other) == flat.device[number]:
                    reader.setdefault(other, number)
        lines: list[str] = []
        for send, number in sorted(reader.items(), key=lambda ends: ends[1]):
            name = flat.ops[send].name.removeprefix("send ")
            for ph, end, more in (("s", send, ""), ("f", number, ',"bp":"e"')):
                (ts,) = self.us(self.begin[[end]])
                device, stream = flat.device[end], flat.ops[end].stream
                lines.append(
                    f'{{"ph":"{ph}","id":{send},"name":"{name}","cat":"send","pid":{device},'
                    f'"tid":{self.tid(device, stream)},"ts":{ts}{more}}}'
                )
        return lines

    def counters(self, device: int) -> list[str]:
        """Counter samples of the memory of a device [GiB] by category, at most `SAMPLES`, none of the peaks lost."""
        moments, held = self.play.memory(device)
        chosen = thin_samples(moments, held.sum(axis=1), SAMPLES)
        shown = [i for i in range(len(CATEGORIES)) if held[:, i].any()]
        names = [CATEGORIES[i] for i in shown]
        rows = zip(self.us(self.ticks(moments[chosen])), (held[chosen][:, shown] / GIB).tolist(), strict=True)
        lines = []
        for ts, values in rows:
            # Rounding errors must not show as negative memory.
            args = ",".join(f'"{name}":{max(value, 0.0):.9g}' for name, value in zip(names, values, strict=True))
            lines.append(f'{{"ph":"C","name":"memory [GiB]","pid":{device},"tid":0,"ts":{ts},"args":{{{args}}}}}')
        return lines


def thin_samples(moments: np.ndarray, total: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most `most` samples: the first, and in every bin of equal length the largest and the last.

    moments: times of the samples, ascending [s]. total: their values.
    """
    if len(moments) <= most:
        return np.arange(len(moments))
    bins = most // 2 - 1
    width = (moments[-1] - moments[0]) / bins or 1.0
    bin_of = np.minimum(((moments - moments[0]) / width).astype(int), bins - 1)
    first = np.flatnonzero(np.diff(bin_of, prepend=-1))
    last = np.append(first[1:], len(moments)) - 1
    largest = [a + int(np.argmax(total[a : b + 1])) for a, b in zip(first, last, strict=True)]
    return np.unique([0, *largest, *last])


def describe_ranks(ranks: Sequence[int]) -> str:
    """The ranks of a pipeline device in words, which stands for all of them.

    >>> describe_ranks([4, 5, 6, 7]), describe_ranks([0, 1, 4, 5, 8, 9])
    ('ranks 4 to 7: 4 ranks', 'ranks 0, 1, 4, 5, ...: 6 ranks')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}: {len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}: {len(ranks)} ranks"


def _describe_work(work: Work) -> dict[str, Any]:
    """Kind and fields of an op's work, with its bytes and FLOPs."""
    args: dict[str, Any] = {"work": type(work).__name__.lower()}
    args |= {field.name: value for field in fields(work) if (value := getattr(work, field.name)) is not None}
    if hasattr(work, "bytes"):
        args["bytes"] = int(work.bytes)
    if work.flops:
        args["FLOPs"] = int(work.flops)
    return args


def _position(thread: str) -> int:
    """Position of a thread in `THREADS`; a further stream of a family has that of its first one."""
    return THREADS.index(thread if thread in THREADS else thread.partition("-")[0])


def _slice_event(name: str, category: str, device: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> str:
    return (
        f'{{"ph":"X","name":{_json(name)},"cat":"{category}","pid":{device},"tid":{tid},'
        f'"ts":{ts},"dur":{dur},"args":{_json(args)}}}'
    )


def _metadata_event(what: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{pid},"tid":{tid},"args":{_json(args)}}}'


def _json(value: Any) -> str:
    """Compact JSON; an object that JSON does not know, as a model in a job, is written as text."""
    return json.dumps(value, separators=(",", ":"), default=str)
