"""The front of the engines: plays a program and answers how long the step took and what ran when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from meshcast.simulator.costs.estimate import Uses
from meshcast.simulator.engine.longest_path import OpTimes, longest_path
from meshcast.simulator.engine.maxplus import Coordinates
from meshcast.simulator.engine.occupancy import Spans, op_occupancy, task_occupancy
from meshcast.simulator.engine.steady_state import Window
from meshcast.simulator.engine.task_player import Play
from meshcast.simulator.engine.task_player import play as play_by_matrices
from meshcast.simulator.program.block import SUMS
from meshcast.simulator.program.categories import KINDS, kind_of
from meshcast.simulator.program.flatten import FlatProgram, flatten
from meshcast.simulator.program.program import Program

Engine = Literal["matrices", "sweep", "simpy", "shared"]
"""Op by op as SimPy processes (`simpy`) is the reference; op by op in a single pass (`sweep`) and task by task as
(max,+) matrices (`matrices`) are faster ways to its answer. `shared`: as SimPy processes of which those that share
links or multiprocessors slow each other, which no other engine can play."""

ENGINES: tuple[str, ...] = get_args(Engine)


class PlayedStep(ABC):
    """A played step.

    program: what was played.
    flat: all its ops, singly.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def flat(self) -> FlatProgram:
        return flatten(self.program)

    @property
    @abstractmethod
    def times(self) -> OpTimes:
        """The times of all ops."""

    @property
    @abstractmethod
    def span(self) -> float:
        """From the begin of the first op to the end of the last [s]."""

    def sums_in(self, window: Window | None) -> np.ndarray:
        """Returns `SUMS` over all ops of every device as they were played, in a window of the run if there is any."""
        return window.sums(self.program) if window else self.program.sums

    @abstractmethod
    def done(self, update: int) -> float:
        """Returns the end of an update that is an action [s]."""

    @abstractmethod
    def occupancy(self, device: int) -> dict[str, Spans]:
        """Returns when something ran on a device, by axis."""


class ByOps(PlayedStep):
    """Played op by op, by the longest path or on SimPy. times: as the engine noted them."""

    def __init__(self, program: Program, flat: FlatProgram, times: OpTimes) -> None:
        super().__init__(program)
        self.flat, self._times = flat, times

    @property
    def times(self) -> OpTimes:
        return self._times

    @property
    def span(self) -> float:
        return self._times.span

    def done(self, update: int) -> float:
        return self._times.end[self.flat.behind[update] - 1]

    def occupancy(self, device: int) -> dict[str, Spans]:
        return op_occupancy(self.flat, self._times, device)


class Shared(ByOps):
    """Played op by op on SimPy, with contention."""

    def sums_in(self, window: Window | None) -> np.ndarray:
        sums, flat = super().sums_in(window).copy(), self.flat
        begin, owner = np.array(self.times.begin), np.array(flat.device)
        longer = np.array(self.times.end) - begin - np.array(flat.seconds)
        kinds = np.array([KINDS.index(kind_of(op)) for op in flat.ops])
        sent, _, receivers = np.array(flat.sent, int).reshape(-1, 3).T
        for numbers, devices in ((np.arange(len(begin)), owner), (sent, receivers)):
            if window:
                first, last = np.array(window.begin)[devices], np.array(window.end)[devices]
                inside = (first <= begin[numbers]) & (begin[numbers] < last)
                numbers, devices = numbers[inside], devices[inside]
            for column in (SUMS.index("seconds"), SUMS.index("lasting")):
                np.add.at(sums[..., column], (devices, kinds[numbers]), longer[numbers])
        # What is uncertain of a kind grows with its time.
        seconds, alone = sums[..., SUMS.index("seconds")], super().sums_in(window)[..., SUMS.index("seconds")]
        sums[..., SUMS.index("weighted")] *= np.divide(seconds, alone, out=np.ones_like(alone), where=alone > 0)
        return sums


class ByMatrices(PlayedStep):
    """Played task by task as (max,+) matrices; times of ops are computed when somebody asks for them."""

    def __init__(self, program: Program, skip: bool = True) -> None:
        super().__init__(program)
        self.coordinates = Coordinates(program.tasks, program.host)
        self.play: Play = play_by_matrices(program, self.coordinates, skip)

    @cached_property
    def times(self) -> OpTimes:
        return longest_path(self.flat)

    @property
    def span(self) -> float:
        return self.play.span

    def done(self, update: int) -> float:
        times = self.play.of_device(int(self.program.timetable.device_array[update]))
        return float(times.entry[update + 1 - times.first])

    def occupancy(self, device: int) -> dict[str, Spans]:
        return task_occupancy(self.program, self.coordinates, self.play, device)


def play(program: Program, engine: Engine = "matrices", skip: bool = True, uses: Sequence[Uses] = ()) -> PlayedStep:
    """Plays a program.

    engine: see `Engine`.
    skip: whether the matrices may jump over a steady state that is proven to repeat.
    uses: what an op occupies beside its stream, for every device; asked by the engine `shared` only.
    """
    if engine == "matrices":
        return ByMatrices(program, skip)
    flat = flatten(program)
    if engine == "sweep":
        return ByOps(program, flat, longest_path(flat))
    if engine == "simpy":
        return play_on_simpy(program, flat)
    from meshcast.simulator.engine import contention

    return Shared(program, flat, contention.play(flat, uses))


def play_on_simpy(program: Program, flat: FlatProgram, moments: Iterable[float] = ()) -> ByOps:
    """Plays a program as SimPy processes.

    flat: its ops.
    moments: see `simpy_engine.play`.
    """
    from meshcast.simulator.engine import simpy_engine

    return ByOps(program, flat, simpy_engine.play(flat, moments=moments))
