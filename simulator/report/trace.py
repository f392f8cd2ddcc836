"""Chrome trace of a played step in the fields of torch's profiler (Kineto), for Perfetto, HolisticTraceAnalysis and
whatever else reads traces of PyTorch.

A process is a pipeline device, which stands for its equal ranks; a thread is a stream of it, or its host. Events:

    user_annotation      on the host: the step (``ProfilerStep#0``), and issuing the ops of each action
    cpu_op               on the host: issuing an op
    cuda_runtime         on the host: the launch of its kernel, which has the same ``correlation``
    gpu_user_annotation  on the stream of kernels: an action of the schedule, from its first kernel to its last
    kernel, gpu_memcpy   on a stream (``args.stream``): a kernel, collective or message; a copy to or from the host

Arrows lead from a send to the op on the other device that waits for it; counters show memory by category. Times are in
microseconds [us], rounded to whole nanoseconds, so that consecutive ops stay consecutive in the file and in Perfetto:
it rounds begins and lengths each by itself, and drops slices that then overlap. Equal forecasts give equal bytes.
Format: "Trace Event Format", JSON object form; fields as of libkineto's ``output_json.cpp``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.hardware.documents.output_file import replacing
from meshcast.hardware.remembered import remembered_by
from meshcast.hardware.units import GIB
from meshcast.simulator.ir.ops import COMPUTE, HostCopy
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.flatten import check_ops
from meshcast.simulator.program.join import shift_item
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.formatting import describe_device, is_heterogeneous, name_device, name_replicas
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.tracing.lanes import (
    HOST,
    THREADS,
    describe_ranks,
    find_lanes,
    find_launches,
    thin_samples,
    to_ns,
)
from meshcast.simulator.report.tracing.names import (
    COPY,
    LAUNCH,
    UPDATE,
    category_of,
    describe_collective,
    describe_op,
    is_launched,
    name_kernel,
)
from meshcast.simulator.report.version import product_version
from meshcast.simulator.scheduling.schedule import OverlappedPasses

SPOKEN = {"memory": "copy"}
"""Name of a thread where it differs from its stream: "memory" would be taken for the counter of the memory."""

STRIDE = 100
"""Thread ids of a process start at its id times this, so they are unique and differ from ids of processes."""

FIRST_STREAM = 7
"""``args.stream`` of the kernels: torch's default stream in traces of Kineto. Other streams follow by their places."""

SAMPLES = 2000
"""Maximum number of memory samples of a device."""

LEVEL = 6
"""Level of compression: Python's default takes longer and saves next to nothing."""

STEP = "ProfilerStep#0"
"""The profiler's name of the step."""

MAX_OPS = 1_000_000
"""Most ops of a trace that is written unasked: 19 us and 0.9 kB each (measured on 845,000 ops)."""


def write_trace(report: Report, path: str | Path) -> None:
    """Writes the trace of all pipeline devices into a file, compressed if `path` ends in .gz.

    Raises OSError if the file cannot be written.
    """
    trace = _Trace(report)
    trace.write(Path(path), range(trace.program.devices))


def write_rank_traces(report: Report, folder: str | Path) -> list[Path]:
    """Writes a trace for each pipeline device, as of its first rank: ``rank-0.pt.trace.json.gz``. Returns the files.

    The names are those of ``torch.profiler.tensorboard_trace_handler``; HolisticTraceAnalysis reads such a folder.
    Raises OSError if a file cannot be written.
    """
    trace, written = _Trace(report), []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for device in range(trace.program.devices):
        rank = int(trace.play.plan.ranks.of_device(device).min())
        written.append(Path(folder) / f"rank-{rank}.pt.trace.json.gz")
        trace.write(written[-1], [device])
    return written


class _Trace:
    """Events of a forecast, each a line of JSON."""

    def __init__(self, report: Report) -> None:
        self.report, self.play = report, report.play
        self.program = report.play.program
        check_ops(self.program, MAX_OPS, "written as a trace")
        self.flat = report.play.step.flat
        times = report.play.step.times
        self.begin, self.end = to_ns(times.begin), to_ns(times.end)
        self.arrive = to_ns(times.arrival)
        # Stages are numbered within their pipeline.
        self.first_stage = self._first_stages()
        turns = [
            shift_item(turn, -first)
            for order, first in zip(self.program.timetable.orders, self.first_stage, strict=True)
            for turn in order
        ]
        # Both actions of an overlapped pair have the name of the pair.
        played = [str(turn) for turn in turns for _ in range(2 if isinstance(turn, OverlappedPasses) else 1)]
        self.actions = [*played, *[UPDATE] * self.program.devices]
        self.sender: dict[int, str] = {}
        self.owner = self._owners()
        self.lanes = find_lanes(self.flat, self.begin, self.arrive)
        streams = {stream for device, stream in self.lanes}
        self.threads = sorted({*THREADS, *streams}, key=lambda name: (_position(name), name))
        self.launch_begin, self.launch_end = find_launches(self.flat, self.begin, times.launched)
        self.lane_of = {
            n: stream for (_, stream), events in self.lanes.items() for n, receives in events if not receives
        }

    def _first_stages(self) -> list[int]:
        """Returns for every device the first stage of its pipeline."""
        stages, first = list[int](), 0
        for part in self.play.plan.every_pipeline:
            stages += [first] * part.shape.p
            first += part.shape.stages
        return stages

    def us(self, ns: np.ndarray) -> list[float]:
        """Nanoseconds in microseconds; with at most 15 digits the shortest decimal is exact."""
        return (ns / 1000).tolist()

    def _owners(self) -> np.ndarray:
        """Returns the index in `actions` of every op's action; of a pair that of its first action."""
        owner = np.empty(len(self.flat.ops), int)
        table = self.program.timetable
        for action in range(len(table.slot)):
            behind = self.flat.behind[action]
            sends = range(behind, behind + self._sends(action))
            owner[self.flat.first[action] : sends.stop] = action - self._follows(action)
            first = self.first_stage[table.device_of[action]]
            self.sender |= dict.fromkeys(sends, f"send {shift_item(table.actions[action], -first)}")
        for device, numbers in enumerate(self.flat.updates):
            owner[numbers] = len(self.program.timetable.slot) + device
        return owner

    def _sends(self, action: int) -> int:
        """Returns the number of sends after the ops of an action."""
        slot = self.program.timetable.slot[action]
        return sum(send is not None for send in (self.program.sends[slot], *self.program.others.get(slot, ())))

    def _follows(self, action: int) -> bool:
        """Returns whether an action is overlapped with that before it."""
        table = self.program.timetable
        return table.slots[table.slot[action]].follows

    # ------------------------------------------------------------------------------------------ parts

    def write(self, path: Path, devices: Sequence[int]) -> None:
        """Writes the trace of some devices."""
        with ExitStack() as opened:
            file: Any = opened.enter_context(replacing(path))
            if str(path).lower().endswith(".gz"):
                # No time and no file name in the header: the bytes depend on the forecast alone.
                file = opened.enter_context(gzip.GzipFile("", "wb", LEVEL, file, mtime=0))
            # A line each: HolisticTraceAnalysis looks for the rank line by line.
            head = [f"{_json(key)}: {json.dumps(value, default=str)}" for key, value in self.head(devices).items()]
            file.write(("{" + ",\n".join(head) + ',\n"traceEvents": [\n').encode())
            separator = ""
            for lines in self.events(devices):
                if lines:
                    file.write((separator + ",\n".join(lines)).encode())
                    separator = ",\n"
            file.write(b"\n]}\n")

    def head(self, devices: Sequence[int]) -> dict[str, Any]:
        """Returns the metadata of the trace: ranks and GPUs, as Kineto writes them, and job, result and version."""
        report, clusters = self.report, self.play.plan.ranks.clusters
        ranks = {device: self.play.plan.ranks.of_device(device) for device in devices}
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "distributedInfo": {
                "backend": "nccl",
                # Of several devices no rank has all events.
                **({"rank": int(ranks[devices[0]].min())} if len(devices) == 1 else {}),
                "world_size": self.play.plan.mesh.world,
            },
            "deviceProperties": [
                {"id": device, "name": clusters[device].gpu.name, "totalGlobalMem": int(clusters[device].gpu.memory)}
                for device in devices
            ],
            "otherData": {
                "id": report.job.id,
                "meshcast": product_version(),
                "step_time_s": report.step_time,
                "interval_90_s": list(report.interval_90),
                "job": report.state_job(),
            },
        }

    def events(self, devices: Sequence[int]) -> Iterator[list[str]]:
        """Yields all events in batches; a slice comes before those inside it, and before arrows that start or end at
        it."""
        for device in devices:
            yield self.names(device)
            yield self.host_slices(device)
            yield self.action_slices(device)
            for stream in self.streams(device):
                yield self.slices(device, stream)
        if len(devices) == self.program.devices:
            yield self.arrows()
        for device in devices:
            yield self.counters(device)

    def streams(self, device: int) -> list[str]:
        """Returns the streams of a device that have events, in the order of the threads."""
        return sorted((stream for owner, stream in self.lanes if owner == device), key=self.threads.index)

    def names(self, device: int) -> list[str]:
        """Returns names and order of a process and its threads."""
        plan = self.play.plan
        words = describe_ranks(plan.ranks.of_device(device).tolist())
        words += f", {describe_device(plan, device)}" if is_heterogeneous(plan) else ""
        lines = [
            _metadata_event("process_name", device, 0, {"name": f"{name_device(plan, device)} ({words})"}),
            _metadata_event("process_sort_index", device, 0, {"sort_index": device}),
        ]
        for place, name in enumerate(self.threads):
            if name == HOST or (device, name) in self.lanes:
                tid = self.tid(device, name)
                lines.append(_metadata_event("thread_name", device, tid, {"name": SPOKEN.get(name, name)}))
                lines.append(_metadata_event("thread_sort_index", device, tid, {"sort_index": place}))
        return lines

    def tid(self, device: int, thread: str) -> int:
        """Returns the unique id of a thread over all processes."""
        return device * STRIDE + 1 + self.threads.index(thread)

    def slices(self, device: int, stream: str) -> list[str]:
        """Returns the slices of a stream: every op that has work, and every message that arrives."""
        numbers = np.array([number for number, _ in self.lanes[device, stream]], int)
        begin, end = self.begin[numbers], self.arrive[numbers]
        rows = zip(self.lanes[device, stream], self.us(begin), self.us(end - begin), strict=True)
        where = f'"pid":{device},"tid":{self.tid(device, stream)},"ts":'
        on_gpu = f'"device":{device},"context":1,"stream":{self.stream(stream)},"correlation":'
        lines = []
        for (number, receives), ts, dur in rows:
            op = self.flat.ops[number]
            if receives:
                head, tail = self._receive_json(device, number)
            else:
                head, tail = self._op_json(device, number)
            launch = f",{on_gpu}{self.correlation(number, receives)}" if is_launched(op) else ""
            action = (
                f'"action":"{self.actions[self.owner[number]]}"'
                if not receives
                else f'"action":"{self.sender.get(number, "send ")[5:]}"'
            )
            lines.append(f'{head}{where}{ts},"dur":{dur},"args":{{{action}{launch}{tail}')
        return lines

    def stream(self, thread: str) -> int:
        """Returns the number of a stream in the arguments of its kernels."""
        return FIRST_STREAM + self.threads.index(thread) - self.threads.index(COMPUTE)

    def correlation(self, number: int, receives: bool) -> int:
        """Returns the id that a kernel shares with its launch."""
        return 1 + number + (len(self.flat.ops) if receives else 0)

    @remembered_by(lambda trace, device, number: (trace.flat.ops[number], device))
    def _op_json(self, device: int, number: int) -> tuple[str, str]:
        """Returns the JSON of an op before its times and after its action, which all executions of the op share."""
        op = self.flat.ops[number]
        args = describe_op(op, self.flat.latency[number]) | describe_collective(op, self.plan_of(device), device)
        name = name_kernel(op, self.sender.get(number, ""))
        return f'{{"ph":"X","name":{_json(name)},"cat":"{category_of(op)}",', f",{_json(args)[1:]}}}"

    def _receive_json(self, device: int, number: int) -> tuple[str, str]:
        """Returns the same of the receiving end of a message."""
        op = self.flat.ops[number]
        name = name_kernel(op, self.sender.get(number, op.name).replace("send", "recv", 1))
        args = describe_op(op, self.flat.latency[number])
        args |= describe_collective(op, self.plan_of(device), device, receives=True)
        return f'{{"ph":"X","name":{_json(name)},"cat":"kernel",', f",{_json(args)[1:]}}}"

    def plan_of(self, device: int) -> Plan:
        """Returns the plan of the ranks of a device."""
        return self.play.plan.on(device)

    def action_slices(self, device: int) -> list[str]:
        """Returns the slices of the actions of a device, each from its first kernel to its last."""
        table = self.program.timetable
        queue = np.array([n for n in self.flat.queues[device, COMPUTE] if self.flat.ops[n].work is not None], int)
        owner = self.owner[queue]
        # The queue is in the order of the actions, so kernels of an action are neighbours.
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        last = np.append(first[1:], len(queue)) - 1 if len(queue) else first
        begin, end = self.begin[queue[first]], self.end[queue[last]]
        lines = []
        for action, ts, dur in zip(owner[first].tolist(), self.us(begin), self.us(end - begin), strict=True):
            args: dict[str, Any] = {"kind": UPDATE}
            if action < len(table.slot):
                stage, kind, microbatch, part = table.actions[action]
                plan = self.play.plan
                args = {"replica": name_replicas(plan, plan.ranks.pipeline_of(device)[0])} if plan.pipelines else {}
                args |= {"stage": stage - self.first_stage[device], "kind": kind, "microbatch": microbatch}
                args |= {"slice": part} if table.shape.slices > 1 else {}
                args |= {"class": table.slots[table.slot[action]].variant} if table.shape.classes else {}
                if table.slots[table.slot[action]].partner:
                    args |= {"beside": str(shift_item(table.actions[action + 1], -self.first_stage[device]))}
            tid = self.tid(device, COMPUTE)
            lines.append(_slice_event(self.actions[action], "gpu_user_annotation", device, tid, ts, dur, args))
        return lines

    def host_slices(self, device: int) -> list[str]:
        """Returns the slices of the host of a device: the step, issuing the ops of each action, each of these ops and
        its launch, then the framework's constant time after the step."""
        tid = self.tid(device, HOST)
        overhead = self.report.job.framework.step_overhead_s
        done = max(int(self.arrive.max(initial=0)), int(to_ns(self.play.step.span)))
        ends = np.array([done, max(done, int(to_ns(self.play.step.span + overhead)))])
        (ts, step), (dur,) = self.us(ends), self.us(np.diff(ends))
        lines = [_slice_event(STEP, "user_annotation", device, tid, 0.0, step, {})]
        lines += self.issue_slices(device)
        lines += self.launches(device)
        if overhead:
            lines.append(_slice_event("host: data, logging", "user_annotation", device, tid, ts, dur, {}))
        return lines

    def issue_slices(self, device: int) -> list[str]:
        """Returns the slices of the host for issuing the ops of each action."""
        ops = np.flatnonzero((np.asarray(self.flat.device) == device) & (np.asarray(self.flat.issue) > 0))
        if not len(ops):
            return []
        first = np.flatnonzero(np.diff(self.owner[ops], prepend=-1))
        last = np.append(first[1:], len(ops)) - 1
        begin, end = self.launch_begin[ops[first]], self.launch_end[ops[last]]
        rows = zip(self.us(begin), self.us(end - begin), (last - first + 1).tolist(), strict=True)
        lines = []
        for (start, lasts, count), action in zip(rows, self.owner[ops[first]].tolist(), strict=True):
            name, tid = self.actions[action], self.tid(device, HOST)
            args = {"action": name, "ops": count}
            lines.append(_slice_event(f"issue {name}", "user_annotation", device, tid, start, lasts, args))
        return lines

    def launches(self, device: int) -> list[str]:
        """Returns the slices of the host for every op that it launches on a device: the operator, and inside it the
        launch."""
        ops = np.flatnonzero(np.asarray(self.flat.device) == device).tolist()
        sides = [(number, False) for number in ops if is_launched(self.flat.ops[number])]
        sides += [(number, True) for number, _, receiver in self.flat.sent if receiver == device]
        numbers = np.array([number for number, _ in sides], int)
        end = self.launch_end[numbers]
        begin = np.where([receives for _, receives in sides], end, self.launch_begin[numbers])
        where = f'"pid":{device},"tid":{self.tid(device, HOST)},"ts":'
        lines = []
        for (number, receives), ts, dur in zip(sides, self.us(begin), self.us(end - begin), strict=True):
            op, both = self.flat.ops[number], self.correlation(number, receives)
            name = self.sender.get(number, op.name)
            name = _json(name.replace("send", "recv", 1) if receives else name)
            call = COPY if isinstance(op.work, HostCopy) else LAUNCH
            args = f'"args":{{"External id":{both}'
            lines.append(f'{{"ph":"X","name":{name},"cat":"cpu_op",{where}{ts},"dur":{dur},{args}}}}}')
            head = f'{{"ph":"X","name":"{call}","cat":"cuda_runtime",'
            lines.append(f'{head}{where}{ts},"dur":{dur},{args},"correlation":{both}}}}}')
        return lines

    def arrows(self) -> list[str]:
        """Returns arrows from every send to the first op of the receiving action that waits for it."""
        flat = self.flat
        receivers = {send: receiver for send, _, receiver in flat.sent}
        reader: dict[int, int] = {}
        for number, after in enumerate(flat.after):
            for other in after:
                # A stage without layers passes its input on: the op that waits is its send, or there is none.
                if receivers.get(other) == flat.device[number]:
                    reader.setdefault(other, number)
        lines: list[str] = []
        for send, number in sorted(reader.items(), key=lambda ends: ends[1]):
            name = self.sender[send].removeprefix("send ")
            for ph, end, more in (("s", send, ""), ("f", number, ',"bp":"e"')):
                (ts,) = self.us(self.begin[[end]])
                device, stream = flat.device[end], self.lane_of[end]
                lines.append(
                    f'{{"ph":"{ph}","id":{send},"name":"{name}","cat":"send","pid":{device},'
                    f'"tid":{self.tid(device, stream)},"ts":{ts}{more}}}'
                )
        return lines

    def counters(self, device: int) -> list[str]:
        """Returns counter samples of the memory of a device [GiB] by category, at most `SAMPLES`, none of the peaks
        lost."""
        moments, held = self.play.memory(device)
        chosen = thin_samples(moments, held.sum(axis=1), SAMPLES)
        shown = [i for i in range(len(CATEGORIES)) if held[:, i].any()]
        names = [CATEGORIES[i] for i in shown]
        rows = zip(self.us(to_ns(moments[chosen])), (held[chosen][:, shown] / GIB).tolist(), strict=True)
        lines = []
        for ts, values in rows:
            # Rounding errors must not show as negative memory.
            args = ",".join(f'"{name}":{max(value, 0.0):.9g}' for name, value in zip(names, values, strict=True))
            lines.append(f'{{"ph":"C","name":"memory [GiB]","pid":{device},"tid":0,"ts":{ts},"args":{{{args}}}}}')
        return lines


def _position(thread: str) -> int:
    """Returns the position of a thread in `THREADS`; a further stream of a family has that of its first."""
    return THREADS.index(thread if thread in THREADS else thread.partition("-")[0])


def _slice_event(name: str, category: str, device: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> str:
    return (
        f'{{"ph":"X","name":{_json(name)},"cat":"{category}","pid":{device},"tid":{tid},'
        f'"ts":{ts},"dur":{dur},"args":{_json(args)}}}'
    )


def _metadata_event(what: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{pid},"tid":{tid},"args":{_json(args)}}}'


def _json(value: Any) -> str:
    """Returns compact JSON; an object that JSON does not know, as a model in a job, is written as text."""
    return json.dumps(value, separators=(",", ":"), default=str)
