"""Plays a program on SimPy: one process for every stream of every device, and one for its host.

A process walks its queue in order: it waits until an op is launched and its dependencies have ended, lets the op's
seconds pass, and wakes whoever waits for it. The result of a transfer is seen one latency after it has left its stream.
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
    moments: ascending times of the simulated clock, each asked for when the clock is at the one before it [s]: whoever
    makes them sees how far the play is.

    Raises ScheduleError for a deadlock.
    """
    env = simpy.Environment()
    count = len(flat.ops)
    begin, end, arrival = [0.0] * count, [0.0] * count, [0.0] * count
    launched: dict[int, float] = {}
    unissued: dict[int, float] = {}
    seen, issued = bytearray(count), bytearray(1 if not issue else 0 for issue in flat.issue)
    waiting: dict[int, simpy.Event] = {}
    called: dict[int, simpy.Event] = {}
    after, seconds, latency = flat.after, flat.seconds, flat.latency
    run = running(env) if running else lambda number: env.timeout(seconds[number])

    def show(number: int) -> None:
        seen[number], arrival[number] = 1, env.now
        if (event := waiting.pop(number, None)) is not None:
            event.succeed()

    def walk(queue: list[int]) -> Generator[simpy.Event, object, None]:
        for number in queue:
            for other in after[number]:
                if not seen[other]:
                    if other not in waiting:
                        waiting[other] = env.event()
                    yield waiting[other]
            if not issued[number]:
                ready = env.now
                called[number] = env.event()
                yield called[number]
                if env.now > ready:
                    unissued[number] = ready
            begin[number] = env.now
            if seconds[number]:
                yield run(number)
            end[number] = env.now
            if latency[number]:
                arrival = env.timeout(latency[number], number)
                arrival.callbacks.append(lambda event: show(event.value))
            else:
                show(number)

    def issue(numbers: list[int]) -> Generator[simpy.Event, object, None]:
        for number in numbers:
            yield env.timeout(flat.issue[number])
            issued[number], launched[number] = 1, env.now
            if (event := called.pop(number, None)) is not None:
                event.succeed()

    walks = [env.process(walk(queue)) for queue in flat.queues.values()]
    for device in sorted(set(flat.device)):
        if own := [n for n in range(count) if flat.device[n] == device and flat.issue[n]]:
            env.process(issue(own))
    for moment in moments:
        env.run(moment)
    env.run()
    if any(process.is_alive for process in walks):
        stuck = next(n for n in range(count) if not seen[n])
        raise ScheduleError(
            f"op {flat.ops[stuck].name!r}",
            "it waits for something that never happens",
            "A scheme issues an op ahead of what it depends on; see the order with `meshcast validate pipeline`",
        )
    return OpTimes(begin, end, arrival, launched, unissued)
