"""The program of a step: what every device executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import cached_property

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import StageOps, Work
from meshcast.simulator.program.categories import KINDS
from meshcast.simulator.program.task import Send, Task
from meshcast.simulator.program.timetable import Timetable

EveryStageOps = Sequence[StageOps | Sequence[StageOps]]
"""The ops that every virtual stage is lowered to; where sequences are sliced, those of each slice; where backward
passes are of a part of the samples, those of a forward and of a backward pass; where micro-batches are of different
length, those of each class."""


def one_of(stage: StageOps | Sequence[StageOps]) -> StageOps:
    """Returns the ops of a stage, or of its first variant: all variants run the same units with the same weights."""
    return variants_of(stage)[0]


def variants_of(stage: StageOps | Sequence[StageOps]) -> Sequence[StageOps]:
    """Returns the ops of a stage in all its variants."""
    return (stage,) if isinstance(stage, StageOps) else stage


@dataclass(eq=False)
class Program:
    """A step: tasks and messages by slot, the update of every device, and where devices meet in its collectives.

    sends: by slot, the message that carries the result.
    others: the further messages where several stages need the result (see `Timetable.extra_results`).
    received: bytes that a slot receives from other devices.
    meetings: (device, place) of the ops of a collective of the updates, which begin together; the op before each is a
        mark: it does no work and says that the device is ready.
    overlap_sends: a device goes on while it sends; otherwise its next action waits.
    host: time of the host to launch an op [s].
    """

    timetable: Timetable
    tasks: list[Task]
    sends: list[Send | None]
    received: list[int]
    updates: list[Task]
    meetings: list[list[tuple[int, int]]]
    overlap_sends: bool = True
    host: float = 0.0
    others: dict[int, list[Send | None]] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return self.timetable.shape.p

    def device_of(self, slot: int) -> int:
        return self.timetable.stages.owner(self.timetable.slots[slot])

    @cached_property
    def sent(self) -> list[tuple[int, Send]]:
        """Every send, with its slot."""
        sends = [(slot, send) for slot, send in enumerate(self.sends) if send is not None]
        return sends + [(slot, send) for slot, sends in self.others.items() for send in sends if send is not None]

    @cached_property
    def first_sent_slots(self) -> np.ndarray:
        """The slots whose first result is sent."""
        return np.flatnonzero([send is not None for send in self.sends])

    @cached_property
    def sent_slots(self) -> np.ndarray:
        """The slots of `sent`."""
        return np.array([slot for slot, _ in self.sent], int)

    @cached_property
    def sent_ends(self) -> np.ndarray:
        """The device that sends, and that which receives, of `sent` [2, messages]."""
        return np.array([(send.source, send.target) for _, send in self.sent], int).reshape(-1, 2).T

    @cached_property
    def distinct(self) -> list[Task]:
        """The tasks of all slots and the updates, each once: slots share their tasks."""
        return list(dict.fromkeys((*self.tasks, *self.updates)))

    @cached_property
    def task_numbers(self) -> np.ndarray:
        """By slot, the place of its task in `distinct`."""
        place = {task: number for number, task in enumerate(self.distinct)}
        return np.array([place[task] for task in self.tasks], int)

    @cached_property
    def owners(self) -> np.ndarray:
        """The device of every slot."""
        return np.array([self.device_of(slot) for slot in range(len(self.tasks))], int)

    def count_runs(self, turns: np.ndarray) -> np.ndarray:
        """Counts how often every device runs each of the `distinct` tasks [devices, tasks]. turns: of every slot."""
        place = {task: number for number, task in enumerate(self.distinct)}
        runs = np.zeros((self.devices, len(self.distinct)))
        np.add.at(runs, (self.owners, self.task_numbers), turns)
        for device, task in enumerate(self.updates):
            runs[device, place[task]] += 1
        return runs

    def list_works(self) -> Iterator[Work]:
        """Yields the work of all ops and messages."""
        ops = (op for task in self.distinct for op, _ in task.count_ops())
        yield from (op.work for op in ops if op.work is not None)
        yield from (send.work for _, send in self.sent)

    def turns(self) -> Iterator[tuple[Task, int]]:
        """Yields every task of all devices with the number of times that it runs."""
        yield from zip(self.tasks, self.timetable.turns, strict=True)
        yield from ((task, 1) for task in self.updates)

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over all ops of every device [devices, kinds, sums]; a message counts where it is sent and arrives."""
        return self.sums_of(np.array(self.timetable.turns))

    def sums_of(self, turns: np.ndarray) -> np.ndarray:
        """Returns `SUMS` over the ops of every device, like `sums`, where each slot runs as often as `turns` says."""
        sums = np.tensordot(self.count_runs(turns), np.array([task.sums for task in self.distinct]), 1)
        if self.sent:
            message = np.array([(s.seconds, s.seconds * s.sigma, s.seconds + s.latency, 0.0) for _, s in self.sent])
            message *= turns[self.sent_slots, None]
            for end in self.sent_ends:
                np.add.at(sums[:, KINDS.index("pp")], end, message)
        return sums
