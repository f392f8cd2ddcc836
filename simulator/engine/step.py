"""A played step, by whichever engine: how long it took, and what ran when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, get_args

from simulator.engine.blocks import Price
from simulator.engine.flat import Flat, flatten, flatten_task
from simulator.engine.matrices import Coordinates
from simulator.engine.occupied import Spans, occupied_by, occupied_in
from simulator.engine.player import Play
from simulator.engine.player import play as play_by_matrices
from simulator.engine.program import Program, Task, task_of
from simulator.engine.sweep import Times, sweep
from simulator.ops import Chain, Transfer
from simulator.schedule import Durations

Engine = Literal["matrices", "sweep", "simpy"]
"""Task by task as (max,+) matrices; op by op in one pass; op by op as SimPy processes. All give the same answer."""

ENGINES: tuple[str, ...] = get_args(Engine)


def alone(task: Task, host: float = 0.0) -> float:
    """How long a task takes that begins on a device where nothing runs [s]."""
    flat = Flat()
    for op, seconds, latency, issue, after in flatten_task(task, host).ops:
        flat.add(op, seconds, latency, issue, after, 0)
    return sweep(flat).span


def durations(stages: Sequence[Chain], price: Price, axis: str, host: float = 0.0) -> Durations:
    """How long the passes through every stage last, each alone on its device, and a hop between two devices."""
    known: dict[tuple[int, str], float] = {}

    def lasts(kind: str) -> tuple[float, ...]:
        for chain in stages:
            if (id(chain), kind) not in known:
                known[id(chain), kind] = alone(task_of(chain, kind, price), host)
        return tuple(known[id(chain), kind] for chain in stages)

    hop = 0.0
    if len(stages) > 1:
        hop = sum(price(Transfer(stages[0].links[-1].nbytes, axis, 0, 1))[::2])
    return Durations(lasts("F"), lasts("B"), lasts("W"), lasts("R"), hop)


class Step(ABC):
    """A step that was played. flat: all its ops, one by one."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def flat(self) -> Flat:
        return flatten(self.program)

    @property
    @abstractmethod
    def times(self) -> Times:
        """The times of all ops."""

    @property
    @abstractmethod
    def span(self) -> float:
        """From the begin of the first op to the end of the last [s]."""

    @abstractmethod
    def occupied(self, device: int) -> dict[str, Spans]:
        """When something ran on a device, for its breakdown."""


class ByOps(Step):
    """Played op by op."""

    def __init__(self, program: Program, simpy: bool = False) -> None:
        super().__init__(program)
        if simpy:
            from simulator.engine.simpy_engine import play

            self._times = play(self.flat)
        else:
            self._times = sweep(self.flat)

    @property
    def times(self) -> Times:
        return self._times

    @property
    def span(self) -> float:
        return self._times.span

    def occupied(self, device: int) -> dict[str, Spans]:
        return occupied_in(self.flat, self._times, device)


class ByMatrices(Step):
    """Played task by task; its ops are worked out when somebody asks for them."""

    def __init__(self, program: Program, skip: bool = True) -> None:
        super().__init__(program)
        self.coordinates = Coordinates(program)
        self.play: Play = play_by_matrices(program, self.coordinates, skip)

    @cached_property
    def times(self) -> Times:
        return sweep(self.flat)

    @property
    def span(self) -> float:
        return self.play.span

    def occupied(self, device: int) -> dict[str, Spans]:
        return occupied_by(self.program, self.coordinates, self.play, device)


def played(program: Program, engine: Engine = "matrices", skip: bool = True) -> Step:
    """Plays a program. skip: whether the matrices may jump over what is proven to repeat."""
    return ByMatrices(program, skip) if engine == "matrices" else ByOps(program, engine == "simpy")
