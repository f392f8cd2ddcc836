"""Schedules without a pipeline flush: which part of a run repeats, and how long a step of it takes.

The pipeline is filled once. Then every device repeats the same actions, but the pattern in which devices wait for each
other may take some updates to repeat: a message and its answer belong to micro-batches up to p apart. So a window of
some updates is looked for that all devices pass in the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.occupancy import Spans
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.timetable import Timetable
from meshcast.simulator.scheduling.no_flush import cooldown_updates, max_cycle_updates

ALIKE = 1e-10
"""Part of a run by which times may differ that are the same time."""


@dataclass(frozen=True)
class Window:
    """Part of a run between warm-up and cool-down: updates that all devices pass in the same time.

    moments: ends of the updates of every device from the first of the run on [devices, updates, s].
    count: the last updates of these that make the window.
    rows: the actions in it, by device.
    steps: steps in it.
    """

    moments: np.ndarray
    count: int
    rows: list[range]
    steps: float

    def turns(self, program: Program) -> np.ndarray:
        """Returns by slot how often its actions run in the window."""
        slots = np.concatenate([program.timetable.slot_array[row.start : row.stop] for row in self.rows])
        return np.bincount(slots, minlength=len(program.tasks))

    def sums(self, program: Program) -> np.ndarray:
        """Returns `Program.sums` over what runs in the window."""
        return program.sums_of(self.turns(program))

    def occupancy(self, device: int, spans: Spans) -> Spans:
        """Returns the intervals of a device inside the window, since its begin, shortened as if the window were a
        single step."""
        begin, end = self.begin[device], self.end[device]
        clipped = [(first.clip(begin, end) - begin, last.clip(begin, end) - begin) for first, last in spans]
        return [(first / self.steps, last / self.steps) for first, last in clipped]

    @property
    def begin(self) -> np.ndarray:
        return np.asarray(self.moments[:, -1 - self.count])

    @property
    def end(self) -> np.ndarray:
        return np.asarray(self.moments[:, -1])

    @property
    def seconds(self) -> float:
        """Duration of a step in the steady state [s]."""
        return float((self.end - self.begin).max() / self.steps)

    def first_steps(self, count: int) -> list[float]:
        """Durations of the first steps of the run [s]: the first fills the pipeline."""
        updates = round(self.count / self.steps)
        known = self.moments.max(axis=0)
        last = len(known) - 1
        ends = [0.0]
        for update in range(updates - 1, count * updates, updates):
            beyond = max(0, math.ceil((update - last) / self.count))
            ends.append(float(known[update - beyond * self.count]) + beyond * self.seconds * self.steps)
        return np.diff(ends).tolist()


def cycle(moments: np.ndarray, most: int) -> int | None:
    """Returns after how many updates, up to `most`, all devices have moved on by the same time; None: after none.

    moments: [devices, updates], 2 x most at least.
    """
    for count in range(1, most + 1):
        moved = (moments[:, count:] - moments[:, :-count])[:, -most:]
        if np.ptp(moved) <= ALIKE * moments.max():
            return count
    return None


def window(table: Timetable, done: Callable[[int], float], batch: int) -> Window:
    """Returns the window of a run.

    done: end of an update [s].
    batch: micro-batches of a step.
    """
    shape, interval = table.shape, table.update_interval
    steady = len(table.updates[0]) - cooldown_updates(shape, interval)
    moments = np.array([[done(action) for action in updates[:steady]] for updates in table.updates])
    most = max_cycle_updates(shape, interval)
    count = cycle(moments, most) or most
    rows = [range(updates[steady - 1 - count] + 1, updates[steady - 1] + 1) for updates in table.updates]
    return Window(moments, count, rows, count * interval / batch)
