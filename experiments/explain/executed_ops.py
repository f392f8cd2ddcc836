"""What every pipeline device executes in a step: each op with its price and the number of times that it runs.

The counts are those of the breakdown: of a schedule without a flush the mean over the steps of its window, and of steps
that differ the mean over all of them. A message counts where it is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import Op
from meshcast.simulator.program.categories import kind_of
from meshcast.simulator.program.task import Send, Task
from meshcast.simulator.report.forecast import Forecast
from meshcast.simulator.report.metrics import Metrics


@dataclass(frozen=True)
class ExecutedOp:
    """An op of a device, or a message that it sends.

    op: the op; `op.work` says what is executed.
    device: the pipeline device; it stands for all of its ranks.
    target: of a message between pipeline devices the receiver; -1 of all other ops.
    seconds: for which an execution occupies its stream [s].
    latency: from the end of that until other ops see the result [s].
    count: executions in a step on every rank of the device; a mean may be a fraction.
    """

    op: Op
    device: int
    target: int
    seconds: float
    latency: float
    count: float

    @property
    def kind(self) -> str:
        """The part of the breakdown that its time counts for."""
        return kind_of(self.op)


def list_executed_ops(metrics: Metrics, device: int | None = None) -> list[ExecutedOp]:
    """Returns the ops with work that a step executes, those of every device or of `device`."""
    steps = metrics.step_kinds or [(1.0, metrics.play)]
    return [executed for share, play in steps for executed in _ops_of_step(play, share, device)]


def _ops_of_step(play: Forecast, share: float, device: int | None) -> Iterator[ExecutedOp]:
    program, window = play.program, play.window
    turns, steps = np.array(program.timetable.turns, float), 1.0
    if window:
        table = program.timetable
        slots = np.concatenate([table.slot_array[row.start : row.stop] for row in window.rows])
        turns, steps = np.bincount(slots, minlength=len(program.tasks)).astype(float), window.steps
    times: dict[int, dict[Task, float]] = defaultdict(lambda: defaultdict(float))
    for slot, task in enumerate(program.tasks):
        times[program.device_of(slot)][task] += turns[slot]
    for owner, task in enumerate(program.updates):
        times[owner][task] += 1.0
    messages: dict[int, dict[Send, float]] = defaultdict(lambda: defaultdict(float))
    for slot, send in program.sent:
        messages[send.source][send] += turns[slot]
    for owner in range(program.devices) if device is None else (device,):
        for task, count in times[owner].items():
            if count:
                yield from _ops_of_task(task, owner, count * share / steps)
        for send, count in messages[owner].items():
            op = Op("send", send.stream, send.work)
            if count:
                yield ExecutedOp(op, owner, send.target, send.seconds, send.latency, count * share / steps)


def _ops_of_task(task: Task, device: int, count: float) -> Iterator[ExecutedOp]:
    """Yields the ops with work of a task that a device runs `count` times."""
    for part in task.parts:
        for op, seconds, latency in zip(part.block.ops, part.seconds, part.latency, strict=True):
            if op.work is not None:
                yield ExecutedOp(op, device, -1, seconds, latency, count * part.count)
    for side in (*task.ahead, *task.behind):
        for op, seconds, latency in zip(side.ops, side.seconds.tolist(), side.latency.tolist(), strict=True):
            if op.work is not None:
                yield ExecutedOp(op, device, -1, seconds, latency, count)
