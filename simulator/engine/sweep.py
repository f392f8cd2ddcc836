"""The longest-path sweep: the times of all ops in one pass, where nothing is shared.

An op begins when its stream is free, the host has issued it, and all that it waits for has happened. In an order in
which each op comes after those, that is one maximum an op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.engine.flat import Flat


@dataclass(frozen=True)
class Times:
    """Begin and end of every instance of a flat program [s]."""

    begin: list[float]
    end: list[float]

    @property
    def span(self) -> float:
        """From zero to the last end [s]."""
        return max(self.end, default=0.0)


def sweep(flat: Flat, free: Sequence[float] = (), host: Sequence[float] = ()) -> Times:
    """The times of all ops. free, host: when each device's streams and its host begin; zero if not given."""
    count = len(flat.ops)
    begin, end, seen = [0.0] * count, [0.0] * count, [0.0] * count
    streams = {key: i for i, key in enumerate(flat.queues)}
    queue = [0] * count
    for key, numbers in flat.queues.items():
        for number in numbers:
            queue[number] = streams[key]
    ready = [free[device] if free else 0.0 for device, _ in flat.queues]
    clock = list(host) if host else [0.0] * (max(flat.device, default=0) + 1)
    rows = zip(flat.seconds, flat.latency, flat.issue, flat.after, flat.device, queue, strict=True)
    for number, (seconds, latency, issue, after, device, stream) in enumerate(rows):
        at = ready[stream]
        if issue:
            clock[device] = issued = clock[device] + issue
            if issued > at:
                at = issued
        for other in after:
            if seen[other] > at:
                at = seen[other]
        begin[number] = at
        end[number] = ready[stream] = at = at + seconds
        seen[number] = at + latency
    return Times(begin, end)
