"""Memory of every stage as a snapshot of torch's caching allocator, as ``torch.cuda.memory._dump_snapshot`` pickles it.

<https://pytorch.org/memory_viz> and ``torch/cuda/_memory_viz.py`` draw such files. The forecast knows the bytes of each
category at each moment. An allocation of the snapshot is one such growth, its free the next shrinkage of the same
category by as many bytes, the oldest first; where no allocation has that size, the oldest ones are freed in part, and
were then allocated in parts. Addresses are those of a first fit into one segment, so its size is not the forecast of
reserved memory.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.hardware.documents.output_file import replacing
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.join import shift_item
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.tracing.names import UPDATE
from meshcast.simulator.report.words import name_device

COLORS = {
    "parameters": "parameter",
    "gradients": "gradient",
    "optimizer": "optimizer_state",
    "activations": "activation",
}
"""Categories of torch's memory profiler by ours; all others are ``temporary``."""

FIRST_ADDRESS = 0x7F0000000000
"""Address of the segment of device 0; each device has a range of `RANGE` bytes."""

RANGE = 1 << 40


@dataclass(eq=False, slots=True)
class LiveBlock:
    """An allocation.

    Attributes:
        nbytes: its size.
        category: of `CATEGORIES`.
        born: number of the memory event that allocates it.
        died: number of the event that frees it; None: none of this step.
        address: in its segment.
    """

    nbytes: int
    category: str
    born: int
    died: int | None = None
    address: int = 0


def write_snapshot(report: Report, path: str | Path) -> None:
    """Writes the snapshot of all stages into a pickle. Raises OSError if the file cannot be written."""
    with replacing(path) as file:
        pickle.dump(make_snapshot(report), file, protocol=4)  # what the viewer in the browser reads


def make_snapshot(report: Report) -> dict[str, Any]:
    """The snapshot: the keys and values of ``torch.cuda.memory._snapshot()``; a device is a pipeline stage."""
    segments, traces = [], []
    for device in range(report.play.program.devices):
        segment, events = _trace_device(report, device)
        segments.append(segment)
        traces.append(events)
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def find_blocks(held: np.ndarray) -> list[LiveBlock]:
    """The allocations behind the bytes of every category [moments, categories], by their births."""
    found: list[LiveBlock] = []
    levels = np.rint(held).astype(np.int64)
    changes = np.diff(levels, axis=0, prepend=np.zeros((1, levels.shape[1]), np.int64))
    live: dict[str, deque[LiveBlock]] = defaultdict(deque)
    for event, place in zip(*np.nonzero(changes), strict=True):
        category, change = CATEGORIES[place], int(changes[event, place])
        own = live[category]
        if change > 0:
            found.append(LiveBlock(change, category, int(event)))
            own.append(found[-1])
            continue
        left = -change
        if same := next((block for block in own if block.nbytes == left), None):
            same.died = int(event)
            own.remove(same)
            continue
        while left and own:
            block = own.popleft()
            if block.nbytes > left:  # the rest lives on, as an allocation of its own
                rest = LiveBlock(block.nbytes - left, category, block.born)
                found.append(rest)
                own.appendleft(rest)
                block.nbytes = left
            block.died = int(event)
            left -= block.nbytes
    return sorted(found, key=lambda block: block.born)


def place_blocks(blocks: list[LiveBlock], first: int) -> int:
    """Gives every block an address from `first` on, by first fit; returns the bytes of the segment.

    A block is freed before those of the same event are allocated.
    """
    deaths: dict[int, list[LiveBlock]] = defaultdict(list)
    for block in blocks:
        if block.died is not None:
            deaths[block.died].append(block)
    ends = sorted(deaths)
    gaps: list[tuple[int, int]] = []  # address, bytes
    top, done = first, 0
    for block in blocks:
        while done < len(ends) and ends[done] <= block.born:
            for dead in deaths[ends[done]]:
                _free(gaps, dead.address, dead.nbytes)
            done += 1
        at = next((i for i, (_, nbytes) in enumerate(gaps) if nbytes >= block.nbytes), None)
        if at is None:
            block.address, top = top, top + block.nbytes
            continue
        block.address, free = gaps[at]
        gaps[at : at + 1] = [(block.address + block.nbytes, free - block.nbytes)] if free > block.nbytes else []
    return max(top - first, 1)


def _free(gaps: list[tuple[int, int]], address: int, nbytes: int) -> None:
    """Adds a gap and joins it with its neighbours."""
    at = bisect_right(gaps, (address, 0))
    if at < len(gaps) and gaps[at][0] == address + nbytes:
        nbytes += gaps.pop(at)[1]
    if at and sum(gaps[at - 1]) == address:
        start, before = gaps.pop(at - 1)
        address, nbytes = start, before + nbytes
    insort(gaps, (address, nbytes))


def _trace_device(report: Report, device: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The segment of a device at the end of the step, and its events."""
    moments, held = report.play.memory(device)
    blocks = find_blocks(held)
    start = FIRST_ADDRESS + device * RANGE
    total = place_blocks(blocks, start)
    times = np.rint(moments * 1e6).astype(np.int64).tolist()
    frames = _frames(report, device, moments)
    deaths: dict[int, list[LiveBlock]] = defaultdict(list)
    births: dict[int, list[LiveBlock]] = defaultdict(list)
    for block in blocks:
        births[block.born].append(block)
        if block.died is not None:
            deaths[block.died].append(block)
    events = [_event("segment_alloc", start, total, times[0], [])]
    for event, time in enumerate(times):
        for block in deaths[event]:
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, block.address, block.nbytes, time, frames(event, block.category)))
        for block in births[event]:
            allocation = _event("alloc", block.address, block.nbytes, time, frames(event, block.category))
            events.append({**allocation, "category": COLORS.get(block.category, "temporary")})
    left = [block for block in blocks if block.died is None]
    allocated = sum(block.nbytes for block in left)
    segment = {
        "device": device,
        "address": start,
        "total_size": total,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "frames": [],
        "blocks": list(_blocks(left, start, total, frames)),
    }
    return segment, events


def _event(action: str, address: int, nbytes: int, time: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time, "frames": frames}


def _blocks(left: list[LiveBlock], start: int, total: int, frames: Any) -> Iterator[dict[str, Any]]:
    """The blocks of a segment in the order of their addresses, and the gaps between them."""
    at = start
    for block in sorted(left, key=lambda block: block.address):
        if block.address > at:
            yield _inactive(at, block.address - at)
        yield {
            "address": block.address,
            "size": block.nbytes,
            "requested_size": block.nbytes,
            "state": "active_allocated",
            "frames": frames(block.born, block.category),
        }
        at = block.address + block.nbytes
    if at < start + total:
        yield _inactive(at, start + total - at)


def _inactive(address: int, nbytes: int) -> dict[str, Any]:
    return {"address": address, "size": nbytes, "requested_size": 0, "state": "inactive", "frames": []}


def _frames(report: Report, device: int, moments: np.ndarray) -> Any:
    """A function of an event's number and a category: the "stack" that viewers show, innermost first.

    It is the category, the action that runs, and the stage.
    """
    names, starts = _running_actions(report, device)
    order = np.argsort(starts, kind="stable")
    place = np.searchsorted(np.asarray(starts)[order], moments, side="right") - 1
    stage = name_device(report.play.plan, device)
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def frames(event: int, category: str) -> list[dict[str, Any]]:
        # The first memory event is what lives through the whole step.
        name = names[order[max(int(place[event]), 0)]] if event and names else "before the step"
        if (category, name) not in known:
            words = (category, name, stage)
            known[category, name] = [{"name": word, "filename": "meshcast", "line": 0} for word in words]
        return known[category, name]

    return frames


def _running_actions(report: Report, device: int) -> tuple[list[str], list[float]]:
    """Returns the names of the actions of a device that have kernels, and when the first of each begins [s]."""
    flat, begin, plan = report.play.step.flat, report.play.step.times.begin, report.play.plan
    table = report.play.program.timetable
    first = sum(pipeline.shape.stages for pipeline in plan.every_pipeline[: plan.ranks.pipeline_of(device)[0]])
    names, starts = [UPDATE] * bool(flat.updates[device]), [begin[n] for n in flat.updates[device][:1]]
    for action in range(table.starts[device], table.starts[device + 1]):
        # Side ops of an action may run long before its kernels.
        ops = range(flat.first[action], flat.behind[action])
        number = next((n for n in ops if flat.ops[n].stream == COMPUTE and flat.ops[n].work is not None), None)
        if number is not None:
            names.append(str(shift_item(table.actions[action], -first)))
            starts.append(begin[number])
    return names, starts
