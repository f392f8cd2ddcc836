"""Plays a program on SimPy: one process for every stream of every device.

A process walks its queue in order. It waits until all that an op depends on has happened, lets the op's seconds pass,
and wakes whoever waits for it. What a transfer brings is seen one latency after it has left its stream.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import simpy

from hardware.errors import ScheduleError
from simulator.engine.program import Program


@dataclass(frozen=True)
class Times:
    """Begin and end of every instance of a program [s]."""

    begin: list[float]
    end: list[float]

    @property
    def span(self) -> float:
        """From zero to the last end [s]."""
        return max(self.end, default=0.0)


def play(program: Program) -> Times:
    """The times of all ops.

    Raises ScheduleError when some wait for each other for ever.
    """
    env = simpy.Environment()
    count = len(program.ops)
    begin, end, seen = [0.0] * count, [0.0] * count, bytearray(count)
    waiting: dict[int, simpy.Event] = {}
    after, seconds, latency = program.after, program.seconds, program.latency

    def show(number: int) -> None:
        seen[number] = 1
        if (event := waiting.pop(number, None)) is not None:
            event.succeed()

    def walk(queue: list[int]) -> Generator[simpy.Event, object, None]:
        for number in queue:
            for other in after[number]:
                if not seen[other]:
                    if other not in waiting:
                        waiting[other] = env.event()
                    yield waiting[other]
            begin[number] = env.now
            if seconds[number]:
                yield env.timeout(seconds[number])
            end[number] = env.now
            if latency[number]:
                arrival = env.timeout(latency[number], number)
                arrival.callbacks.append(lambda event: show(event.value))
            else:
                show(number)

    walks = [env.process(walk(queue)) for queue in program.queues.values()]
    env.run()
    if any(process.is_alive for process in walks):
        stuck = next(n for n in range(count) if not seen[n])
        raise ScheduleError(
            f"op {program.ops[stuck].name!r}",
            "it waits for something that never happens",
            "A scheme issues an op ahead of what it depends on; see the order with `meshcast validate pipeline`",
        )
    return Times(begin, end)
