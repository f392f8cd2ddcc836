"""Longest path: the times of all ops in a single pass, where nothing is shared.

An op begins when its stream is free, the host has launched it and all its dependencies have ended. Ops are in an order
in which each comes behind its dependencies, so this is a maximum per op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshcast.hardware.records import dataclass
from meshcast.simulator.program.flatten import FlatProgram


@dataclass(frozen=True)
class OpTimes:
    """When everything happened in a flat program, as its player noted it [s].

    begin: by op, when it began on its stream.
    end: by op, when it left its stream.
    arrival: by op, when others saw its result.
    launched: by op that takes time of the host, when the host had launched it.
    unissued: by op that waited for the host, when it could have begun without it.
    """

    begin: list[float]
    end: list[float]
    arrival: list[float]
    launched: dict[int, float]
    unissued: dict[int, float]

    @property
    def span(self) -> float:
        """From zero to the last end [s]."""
        return max(self.end, default=0.0)


def longest_path(
    flat: FlatProgram, free: Mapping[tuple[int, str], float] | None = None, host: Sequence[float] = ()
) -> OpTimes:
    """Returns the times of all ops. free, host: when each stream and each host become free [s]; 0 by default."""
    begin, end, arrival = ([0.0] * len(flat.ops) for _ in range(3))
    ready = [free[key] if free else 0.0 for key in flat.queues]
    launched: dict[int, float] = {}
    unissued: dict[int, float] = {}
    clock = list(host) if host else [0.0] * (max(flat.device, default=0) + 1)
    rows = zip(flat.seconds, flat.latency, flat.issue, flat.after, flat.device, _stream_numbers(flat), strict=True)
    for number, (seconds, latency, issue, after, device, stream) in enumerate(rows):
        at = ready[stream]
        for other in after:
            if arrival[other] > at:
                at = arrival[other]
        if issue:
            clock[device] = launched[number] = clock[device] + issue
            if clock[device] > at:
                unissued[number] = at
                at = clock[device]
        begin[number] = at
        end[number] = ready[stream] = at = at + seconds
        arrival[number] = at + latency
    return OpTimes(begin, end, arrival, launched, unissued)


def _stream_numbers(flat: FlatProgram) -> list[int]:
    """Returns by op the number of its stream, in the order of the queues."""
    streams = [0] * len(flat.ops)
    for stream, numbers in enumerate(flat.queues.values()):
        for number in numbers:
            streams[number] = stream
    return streams
