"""Plays a program on SimPy: a process for every stream of every device, and another for its host.

A process walks its queue in order: it waits until an op is launched and its dependencies have ended, lets the op's
seconds pass, and wakes whoever waits for it. The result of a transfer is seen a latency after it has left its stream.
Each process notes the time of the clock when it begins and ends an op: these notes are the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import simpy

from meshcast.hardware.errors import ScheduleError
from meshcast.simulator.engine.longest_path import OpTimes
from meshcast.simulator.program.flatten import FlatProgram

Run = Callable[[int], simpy.Event]
"""Begins an op, by its number: the event happens at its end."""


def play(
    flat: FlatProgram, running: Callable[[simpy.Environment], Run] | None = None, moments: Iterable[float] = ()
) -> OpTimes:
    """Plays all ops and returns their times.

    running: starts an op that shares something; by default each takes its seconds.
    moments: ascending times of the simulated clock, each asked for when the clock is at the moment before it [s]:
        whoever
    iterates over them sees how far the play is.

    Raises ScheduleError for a deadlock.
    """
    simulation = _Simulation(flat, running)
    env = simulation.env
    walks = [env.process(simulation.walk(queue)) for queue in flat.queues.values()]
    for device in sorted(set(flat.device)):
        if launches := [n for n in range(len(flat.ops)) if flat.device[n] == device and flat.issue[n]]:
            env.process(simulation.issue(launches))
    for moment in moments:
        env.run(moment)
    env.run()
    if any(process.is_alive for process in walks):
        stuck = next(n for n in range(len(flat.ops)) if not simulation.seen[n])
        raise ScheduleError(
            f"op {flat.ops[stuck].name!r}",
            "it waits for something that never happens",
            "A scheme issues an op ahead of what it depends on; see the order with `meshcast validate pipeline`",
        )
    return simulation.times


class _Simulation:
    """A program while it is played.

    seen: by op, whether its result is seen.
    issued: by op, whether the host has launched it.
    waiting: by op, the event that its result is seen, if somebody waits for it.
    called: by op, the event that it is launched, if its stream waits for it.
    """

    def __init__(self, flat: FlatProgram, running: Callable[[simpy.Environment], Run] | None) -> None:
        self.flat, self.env, count = flat, simpy.Environment(), len(flat.ops)
        self.times = OpTimes([0.0] * count, [0.0] * count, [0.0] * count, {}, {})
        self.seen, self.issued = bytearray(count), bytearray(not issue for issue in flat.issue)
        self.waiting: dict[int, simpy.Event] = {}
        self.called: dict[int, simpy.Event] = {}
        self.run: Run = running(self.env) if running else lambda number: self.env.timeout(flat.seconds[number])

    def walk(self, queue: list[int]) -> Generator[simpy.Event, object, None]:
        """Runs the ops of a stream."""
        env, flat, times, seen, waiting = self.env, self.flat, self.times, self.seen, self.waiting
        for number in queue:
            for other in flat.after[number]:
                if not seen[other]:
                    if other not in waiting:
                        waiting[other] = env.event()
                    yield waiting[other]
            if not self.issued[number]:
                ready = env.now
                self.called[number] = env.event()
                yield self.called[number]
                if env.now > ready:
                    times.unissued[number] = ready
            times.begin[number] = env.now
            if flat.seconds[number]:
                yield self.run(number)
            times.end[number] = env.now
            if flat.latency[number]:
                arrival = env.timeout(flat.latency[number], number)
                arrival.callbacks.append(lambda event: self.show(event.value))
            else:
                self.show(number)

    def show(self, number: int) -> None:
        """Lets others see the result of an op."""
        self.seen[number], self.times.arrival[number] = 1, self.env.now
        if (event := self.waiting.pop(number, None)) is not None:
            event.succeed()

    def issue(self, numbers: list[int]) -> Generator[simpy.Event, object, None]:
        """Launches the ops of a device."""
        for number in numbers:
            yield self.env.timeout(self.flat.issue[number])
            self.issued[number], self.times.launched[number] = 1, self.env.now
            if (event := self.called.pop(number, None)) is not None:
                event.succeed()
