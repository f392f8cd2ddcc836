"""The ops of a single device of a step, with their times.

A step that was played by matrices knows the state before every action. The times of the ops of an action follow from
it, those of all actions of a task at once, so nothing of other devices is flattened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from meshcast.simulator.engine.longest_path import OpTimes
from meshcast.simulator.engine.play import ByMatrices, PlayedStep
from meshcast.simulator.engine.task_player import states
from meshcast.simulator.ir.ops import Op
from meshcast.simulator.program.flatten import MAX_OPS, FlatProgram, FlatTask, check_ops, flatten_task
from meshcast.simulator.program.task import Send, Task


def device_ops(step: PlayedStep, device: int) -> tuple[FlatProgram, OpTimes]:
    """Returns the ops of a device of a step, and their times; those of all devices where these are known.

    Raises PlanError for a step of more than `MAX_OPS` ops.
    """
    if not isinstance(step, ByMatrices) or "times" in vars(step):
        return step.flat, step.times
    check_ops(step.program, MAX_OPS, "played op by op")
    ops = _DeviceOps(step, device)
    ops.add_actions()
    ops.add_sends()
    ops.add_update()
    return ops.flat, OpTimes(np.concatenate(ops.begin).tolist(), np.concatenate(ops.end).tolist(), [], {}, {})


class _DeviceOps:
    """The ops of a device while they are collected; begins and ends of ops in several arrays [s]."""

    def __init__(self, step: ByMatrices, device: int) -> None:
        self.step, self.device, self.program = step, device, step.program
        self.flat, self.begin, self.end = FlatProgram(), list[np.ndarray](), list[np.ndarray]()
        table = self.program.timetable
        self.first, behind = table.starts[device], table.starts[device + 1]
        self.slots = table.slot_array[self.first : behind]
        self.flat.first, self.flat.behind = [0] * len(table.slot_array), [0] * len(table.slot_array)

    def add_actions(self) -> None:
        """Adds the ops of all actions, in their order."""
        flat, tasks = self.flat, [self.program.tasks[slot] for slot in self.slots.tolist()]
        flattened = {task: flatten_task(task, self.program.host) for task in dict.fromkeys(tasks)}
        columns = {task: [*zip(*each.ops, strict=True)][:2] or [(), ()] for task, each in flattened.items()}
        places = defaultdict[Task, list[int]](list)
        for place, task in enumerate(tasks):
            ops, seconds = columns[task]
            flat.first[self.first + place] = len(flat.ops)
            flat.ops += ops
            flat.seconds += seconds
            flat.behind[self.first + place] = len(flat.ops)
            places[task].append(self.first + place)
        begin, end = np.empty(len(flat.ops)), np.empty(len(flat.ops))
        queues = defaultdict[str, list[np.ndarray]](list)
        for task, actions in places.items():
            starts, rows = np.array([flat.first[action] for action in actions]), flattened[task].ops
            numbers = np.arange(len(rows))[:, None] + starts
            begin[numbers], end[numbers] = self._play(task, flattened[task], np.array(actions) - self.first)
            for stream in dict.fromkeys(op.stream for op, *_ in rows):
                on_stream = [i for i, (op, *_) in enumerate(rows) if op.stream == stream]
                queues[stream].append(numbers[on_stream].ravel())
        self.begin.append(begin)
        self.end.append(end)
        for stream, numbers_of_tasks in queues.items():
            flat.queues[self.device, stream] += np.sort(np.concatenate(numbers_of_tasks)).tolist()

    def _play(self, task: Task, flat: FlatTask, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns when the ops of all actions of a task begin and end [ops, actions] [s].

        places: of the actions in the order of the device.
        """
        ready, clock, arrivals = self._states(task, places)
        begin, end, seen = (np.empty((len(flat.ops), len(places))) for _ in range(3))
        for i, (op, seconds, latency, issue, after) in enumerate(flat.ops):
            at = ready[op.stream].copy()
            for other in after:
                np.maximum(at, seen[other], out=at)
            for arrival, outside in zip(arrivals, flat.outside, strict=False):
                if i in outside:
                    np.maximum(at, arrival, out=at)
            if issue and clock is not None:
                clock = clock + issue
                np.maximum(at, clock, out=at)
            begin[i], end[i] = at, at + seconds
            ready[op.stream], seen[i] = end[i], end[i] + latency
        return begin, end

    def _states(
        self, task: Task, places: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None, Sequence[np.ndarray]]:
        """Returns when each stream is free before the actions of a task, when the host begins to launch them (None: it
        takes no time), and when the input of each port arrives, also where it delays nothing [s]."""
        axes, play = self.step.coordinates, self.step.play
        state, times = states(axes, task, play, self.device, places), play.of_device(self.device)
        state[axes.port] = times.arrival[places]
        for i, place in enumerate(places.tolist()) if play.full else ():
            if (whole := play.full.get(self.first + place)) is not None:
                state[axes.ports, i] = whole[axes.ports]
        if axes.host is not None:
            state[axes.host] = times.host[places]
        streams = {stream: state[at] for stream, at in axes.at.items()}
        return streams, state[axes.host] if axes.host is not None else None, [*state[axes.ports]]

    def add_sends(self) -> None:
        """Adds the messages that the device sends."""
        table, sent = self.program.timetable, self.step.play.of_device(self.device).sent
        sends = self.program.sends
        for place, slot in enumerate(self.slots.tolist()):
            if (send := sends[slot]) is not None:
                self._add_send(send, float(sent[place]))
            others = zip(
                table.extra_results.get(self.first + place, ()), self.program.others.get(slot, ()), strict=False
            )
            for number, other in others:
                if other is not None:
                    self._add_send(other, self.step.play.sent_extra[number])

    def _add_send(self, send: Send, begin: float) -> None:
        self._add_op(Op("send", send.stream, send.work, [], "B" if send.backward else "F"), send.seconds, begin)

    def add_update(self) -> None:
        """Adds the optimizer update behind all passes."""
        tail, times = self.step.play.tail_ops, self.step.play.tail
        self.flat.updates = [[] for _ in tail.updates]
        for number in tail.updates[self.device] if tail.updates else ():
            self.flat.updates[self.device].append(len(self.flat.ops))
            self._add_op(tail.ops[number], tail.seconds[number], times.begin[number])

    def _add_op(self, op: Op, seconds: float, begin: float) -> None:
        self.flat.queues[self.device, op.stream].append(len(self.flat.ops))
        self.flat.ops.append(op)
        self.flat.seconds.append(seconds)
        self.begin.append(np.array([begin]))
        self.end.append(np.array([begin + seconds]))
