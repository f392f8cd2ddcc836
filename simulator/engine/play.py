"""A played step, by whichever engine: how long it took, and what ran when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from simulator.costs.estimate import Use
from simulator.engine.longest_path import OpTimes, longest_path
from simulator.engine.maxplus import Coordinates
from simulator.engine.occupancy import Spans, occupied_by, occupied_in
from simulator.engine.steady_state import Window
from simulator.engine.task_player import Play
from simulator.engine.task_player import play as play_by_matrices
from simulator.ir.ops import StageOps, Transfer, Work
from simulator.program.block import SUMS, Price
from simulator.program.build import Program, Task, task_of
from simulator.program.categories import KINDS, kind_of
from simulator.program.flatten import FlatProgram, flatten, flatten_task
from simulator.scheduling.schedule import Durations

Engine = Literal["matrices", "sweep", "simpy", "shared"]
"""Task by task as (max,+) matrices; op by op in one pass; op by op as SimPy processes: all give the same answer. Or as
SimPy processes of which those that share links or multiprocessors slow each other."""

ENGINES: tuple[str, ...] = get_args(Engine)

Uses = Callable[[Work], Use]
"""What else than its stream a piece of work occupies."""


def alone(task: Task, host: float = 0.0) -> float:
    """How long a task takes that begins on a device where nothing runs [s]."""
    flat = FlatProgram()
    for op, seconds, latency, issue, after in flatten_task(task, host).ops:
        flat.add(op, seconds, latency, issue, after, 0)
    return longest_path(flat).span


def durations(stages: Sequence[StageOps], prices: Sequence[Price], axis: str, host: float = 0.0) -> Durations:
    """How long the passes through every stage last at its prices, each alone on its device, and a hop between two."""
    known: dict[tuple[int, int, str], float] = {}
    parts: dict[int, float] = {}

    def lasts(kind: str) -> tuple[float, ...]:
        keys = [(id(stage_ops), prices.index(price), kind) for stage_ops, price in zip(stages, prices, strict=True)]
        for key, stage_ops, price in zip(keys, stages, prices, strict=True):
            if key not in known:
                known[key] = alone(task_of(stage_ops, kind, price), host)
        return tuple(known[key] for key in keys)

    hop = 0.0
    if len(stages) > 1:
        hop = sum(prices[0](Transfer(stages[0].unit_runs[-1].nbytes, axis, 0, 1))[::2])
    for stage_ops, price in zip(stages, prices, strict=True):
        if id(stage_ops) not in parts:
            grown = [task_of(stage_ops, kind, price).memory.grown for kind in "FW"]
            parts[id(stage_ops)] = -grown[1] / grown[0] if grown[0] > 0 else 0.0
    kept = tuple(parts[id(stage_ops)] for stage_ops in stages) if any(parts.values()) else None
    return Durations(lasts("F"), lasts("B"), lasts("W"), lasts("R"), hop, kept)


class PlayedStep(ABC):
    """A step that was played. flat: all its ops, one by one."""

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

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over all ops of every device, as they were played."""
        return self.sums_in(None)

    def sums_in(self, window: Window | None) -> np.ndarray:
        """The same over those of a window, if there is one."""
        return window.sums(self.program) if window else self.program.sums

    @abstractmethod
    def done(self, update: int) -> float:
        """When an update that is an action has ended [s]; other actions come behind it."""

    @abstractmethod
    def occupied(self, device: int) -> dict[str, Spans]:
        """When something ran on a device, for its breakdown."""


class ByOps(PlayedStep):
    """Played op by op."""

    def __init__(self, program: Program, simpy: bool = False) -> None:
        super().__init__(program)
        if simpy:
            from simulator.engine.simpy_engine import play

            self._times = play(self.flat)
        else:
            self._times = longest_path(self.flat)

    @property
    def times(self) -> OpTimes:
        return self._times

    @property
    def span(self) -> float:
        return self._times.span

    def done(self, update: int) -> float:
        return self._times.end[self.flat.behind[update] - 1]

    def occupied(self, device: int) -> dict[str, Spans]:
        return occupied_in(self.flat, self._times, device)


class Shared(ByOps):
    """Played op by op, ops that share something slowing each other. uses: on every device."""

    def __init__(self, program: Program, uses: Sequence[Uses]) -> None:
        from simulator.engine.contention import play

        PlayedStep.__init__(self, program)
        self._times = play(self.flat, uses)

    def sums_in(self, window: Window | None) -> np.ndarray:
        found, flat = super().sums_in(window).copy(), self.flat
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
                np.add.at(found[..., column], (devices, kinds[numbers]), longer[numbers])
        # What is uncertain of a kind grows with its time.
        seconds, alone = found[..., SUMS.index("seconds")], super().sums_in(window)[..., SUMS.index("seconds")]
        found[..., SUMS.index("weighted")] *= np.divide(seconds, alone, out=np.ones_like(alone), where=alone > 0)
        return found


class ByMatrices(PlayedStep):
    """Played task by task; its ops are worked out when somebody asks for them."""

    def __init__(self, program: Program, skip: bool = True) -> None:
        super().__init__(program)
        self.coordinates = Coordinates(program)
        self.play: Play = play_by_matrices(program, self.coordinates, skip)

    @cached_property
    def times(self) -> OpTimes:
        return longest_path(self.flat)

    @property
    def span(self) -> float:
        return self.play.span

    def done(self, update: int) -> float:
        return self.play.entry[update + 1]

    def occupied(self, device: int) -> dict[str, Spans]:
        return occupied_by(self.program, self.coordinates, self.play, device)


def played(program: Program, engine: Engine = "matrices", skip: bool = True, uses: Sequence[Uses] = ()) -> PlayedStep:
    """Plays a program.

    skip: whether the matrices may jump over what is proven to repeat. uses: on every device, what work occupies that
    ops may share; only the engine `shared` asks.
    """
    if engine == "shared":
        return Shared(program, uses)
    return ByMatrices(program, skip) if engine == "matrices" else ByOps(program, engine == "simpy")
