"""Threads of a trace: which events lie on them, when the host has launched these, and how threads are called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.flatten import FlatProgram

HOST, RECEIVES = "host", "pipeline-receive"

THREADS = (
    HOST,
    COMPUTE,
    "tensor",
    "tensor-row",
    "sequence",
    "sequence-inner",
    "sequence-return",
    "expert",
    "expert-fetch",
    "expert-fetch-far",
    "data",
    "pipeline-forward",
    "pipeline-backward",
    "pipeline-moves",
    "pipeline-sums",
    "pipeline",
    RECEIVES,
    "memory",
)
"""Threads of every process from top to bottom. All but the first are streams; a family may have more of them."""


def find_lanes(
    flat: FlatProgram, begin: np.ndarray, arrive: np.ndarray
) -> dict[tuple[int, str], list[tuple[int, bool]]]:
    """Returns by device and thread its events: (op instance, whether it is the receiving end of a message).

    A message reaches its receiver some time after it has left the stream of its sender, so of two in a row the
    second may begin before the first has ended: it then has a further thread (``pipeline-forward-2``).
    """
    events_of: dict[tuple[int, str], list[tuple[int, bool]]] = defaultdict(list)
    for (device, stream), queue in flat.queues.items():
        events_of[device, stream] = [(n, False) for n in queue if flat.ops[n].work is not None]
    for number, _, receiver in flat.sent:
        events_of[receiver, RECEIVES].append((number, True))
    lanes: dict[tuple[int, str], list[tuple[int, bool]]] = {}
    for (device, stream), events in events_of.items():
        ends: list[int] = []
        for number, receives in sorted(events, key=lambda event: begin[event[0]]):
            place = next((i for i, end in enumerate(ends) if end <= begin[number]), len(ends))
            ends[place:] = [int(arrive[number]), *ends[place + 1 :]]
            lane = stream if not place else f"{stream}-{place + 1}"
            lanes.setdefault((device, lane), []).append((number, receives))
    return lanes


def to_ns(seconds: Any) -> np.ndarray:
    """Converts moments [s] to whole nanoseconds."""
    return np.rint(np.asarray(seconds, float) * 1e9).astype(np.int64)


def find_launches(flat: FlatProgram, begin: np.ndarray, launched: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Finds when the host begins and ends to launch every op [ns].

    begin: of the ops [ns].
    launched: when the host had launched those that take its time [s].

    The host launches the ops of a device in turn, each in its `issue`. A host without launch times is as
    far ahead as the order allows: a launch then ends no later than any later op begins. An op without launch time
    takes a nanosecond, before its op begins: readers nest slices of no length that share their time in each other.
    What a hook launches before its turn is an instant inside whatever the host does then; so is a launch of a kernel
    that begins with the step.
    """
    starts, ends = begin.copy(), begin.copy()
    issue, owner = np.asarray(flat.issue), np.asarray(flat.device)
    for device in range(max(flat.device, default=-1) + 1):
        ops = np.flatnonzero(owner == device)
        if not len(ops):
            continue
        if issue[ops].any():
            due = to_ns(np.maximum.accumulate([launched.get(number, 0.0) for number in ops.tolist()]))
            in_turn = (issue[ops] > 0) | (begin[ops] >= due)
        else:
            due = np.minimum.accumulate(begin[ops][::-1])[::-1] // 1000 * 1000  # some readers round to microseconds
            in_turn = np.ones(len(ops), bool)
        chain, place = ops[in_turn], np.arange(np.count_nonzero(in_turn))
        end = np.minimum(due[in_turn], begin[chain])
        end = np.minimum.accumulate((end - place)[::-1])[::-1] + place
        end = np.maximum(end, place + 1)
        ends[chain] = np.minimum(end, begin[chain])
        busy = np.concatenate([[0], end[:-1]])
        starts[chain] = np.minimum(np.where(issue[chain] > 0, busy, end - 1), ends[chain])
    return starts, ends


def thin_samples(moments: np.ndarray, total: np.ndarray, most: int) -> np.ndarray:
    """Returns the indices of at most `most` samples: the first, and in every bin of equal length the largest and the
    last.

    moments: times of the samples, ascending [s].
    total: their values.
    """
    if len(moments) <= most:
        return np.arange(len(moments))
    bins = most // 2 - 1
    width = (moments[-1] - moments[0]) / bins or 1.0
    bin_of = np.minimum(((moments - moments[0]) / width).astype(int), bins - 1)
    first = np.flatnonzero(np.diff(bin_of, prepend=-1))
    last = np.append(first[1:], len(moments)) - 1
    largest = [a + int(np.argmax(total[a : b + 1])) for a, b in zip(first, last, strict=True)]
    return np.unique([0, *largest, *last])


def describe_ranks(ranks: Iterable[int]) -> str:
    """Describes the ranks of a pipeline device; the device stands for all of them.

    >>> describe_ranks(range(4, 8)), describe_ranks([0, 1, 4, 5, 8, 9])
    ('ranks 4 to 7: 4 ranks', 'ranks 0, 1, 4, 5, ...: 6 ranks')
    """
    first, *others = sorted(ranks)
    count, last = len(others) + 1, others[-1] if others else first
    if count == 1:
        return f"rank {first}"
    if last - first == count - 1:
        return f"ranks {first} to {last}: {count} ranks"
    return f"ranks {', '.join(map(str, (first, *others[:3])))}{', ...' if count > 4 else ''}: {count} ranks"
