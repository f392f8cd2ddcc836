"""Memory of every stage as a snapshot of torch's caching allocator, as ``torch.cuda.memory._dump_snapshot`` pickles it.

<https://pytorch.org/memory_viz> and ``torch/cuda/_memory_viz.py`` draw such files. The allocator is played over the
second step of a run, see `simulator.engine.reserved_memory`: its segments are those that torch would reserve.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.hardware.documents.output_file import replacing
from meshcast.simulator.engine.allocator import CachedBlock, CachedSegment, CachingAllocator
from meshcast.simulator.engine.peak_memory import moments_inside
from meshcast.simulator.engine.reserved_memory import (
    FIRST,
    Place,
    TensorReplay,
    play_first_step,
    play_passes,
    play_update,
)
from meshcast.simulator.program.block import TensorKind
from meshcast.simulator.program.join import shift_item
from meshcast.simulator.report.forecast import Forecast
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.tracing.names import UPDATE

COLORS = {
    "parameters": "parameter",
    "gradients": "gradient",
    "optimizer": "optimizer_state",
    "activations": "activation",
}
"""Categories of torch's memory profiler by ours; all others are ``temporary``."""

FIRST_ADDRESS = 0x7F0000000000
"""Address of the first segment of device 0; each device has a range of `RANGE` bytes."""

RANGE = 1 << 44

BEFORE = "before the step"
"""Name of the action that allocated what is there when the step begins."""

Description = dict[str, Any]
"""A snapshot, or a part of it."""

Frames = list[Description]


class RecordedReplay(TensorReplay):
    """The tensors of a device, with the memory events of a step.

    Attributes:
        held: kind and frames of every tensor, by its block.
        events: since `record`.
        action: name of what runs.
        microseconds: since the begin of the step; memory follows the order of issue, so it never goes back.
    """

    def __init__(self, allocator: CachingAllocator, stage: str) -> None:
        super().__init__(allocator)
        self.held: dict[CachedBlock, tuple[TensorKind, Frames]] = {}
        self.events: list[Description] = []
        self.action, self.microseconds = BEFORE, 0
        self._stage, self._recording = stage, False
        self._known: dict[tuple[str, str], Frames] = {}

    def record(self) -> None:
        """Notes the segments and tensors that are there as the first events."""
        self._recording = True
        for segment in self.allocator.segments:
            self._note("segment_alloc", segment.address, segment.nbytes, segment.stream, [])
        for block, ((category, nbytes), frames) in self.held.items():
            self._note("alloc", block.address, nbytes, block.pool.stream, frames, category)

    def allocate(self, kind: TensorKind, stream: str = "") -> CachedBlock:
        count, reserved = len(self.allocator.segments), self.allocator.reserved
        block = super().allocate(kind, stream)
        frames = self._stack(kind[0])
        self.held[block] = kind, frames
        if grown := self.allocator.reserved - reserved:
            action = "segment_alloc" if len(self.allocator.segments) > count else "segment_map"
            ends = (segment.address + segment.nbytes for segment in self.allocator.segments)
            end = next(end for end in ends if end > block.address)  # addresses of segments ascend
            self._note(action, end - grown, grown, stream, frames)
        self._note("alloc", block.address, kind[1], stream, frames, kind[0])
        return block

    def free(self, block: CachedBlock) -> None:
        (category, nbytes), _ = self.held.pop(block)
        for action in ("free_requested", "free_completed"):
            self._note(action, block.address, nbytes, block.pool.stream, self._stack(category))
        super().free(block)

    def _note(self, action: str, address: int, nbytes: int, stream: str, frames: Frames, category: str = "") -> None:
        if self._recording:
            event = {"action": action, "addr": address, "size": nbytes, "stream": _number(stream), "frames": frames}
            event["time_us"] = self.microseconds
            self.events.append(event | ({"category": COLORS.get(category, "temporary")} if category else {}))

    def _stack(self, category: str) -> Frames:
        """Returns the "stack" that viewers show, innermost first: the category, the action that runs, and the stage."""
        words = (category, self.action)
        if words not in self._known:
            self._known[words] = [{"name": word, "filename": "meshcast", "line": 0} for word in (*words, self._stage)]
        return self._known[words]


def write_snapshot(report: Report, path: str | Path) -> None:
    """Writes the snapshot of all stages into a pickle. Raises OSError if the file cannot be written."""
    with replacing(path) as file:
        pickle.dump(make_snapshot(report), file, protocol=4)  # what the viewer in the browser reads


def make_snapshot(report: Report) -> Description:
    """Returns the snapshot: the keys and values of ``torch.cuda.memory._snapshot()``; a device is a pipeline stage."""
    segments: list[Description] = []
    traces = []
    for device in range(report.play.program.devices):
        replay = record_step(report.play, device)
        segments += _describe_segments(replay, device)
        traces.append(replay.events)
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def record_step(play: Forecast, device: int) -> RecordedReplay:
    """Returns the tensors of a device behind the second step of a run, with the memory events of this step."""
    plan, program = play.plan.on(device), play.program
    allocator = CachingAllocator(plan.job.framework.memory.expandable, FIRST_ADDRESS + device * RANGE)
    replay = RecordedReplay(allocator, name_device(play.plan, device))
    play_first_step(replay, program, device, play.list_tensors(device))
    replay.record()
    names, moments = _name_actions(play, device), _Moments(play, device)
    for action, place in play_passes(replay, program, device):
        replay.action = names[action - program.timetable.starts[device]]
        replay.microseconds = max(replay.microseconds, round(moments.of_pass(action, place) * 1e6))
    replay.action = UPDATE
    for place in play_update(replay, program, device):
        replay.microseconds = max(replay.microseconds, round(moments.of_update(place) * 1e6))
    return replay


class _Moments:
    """When the tensors of a step are allocated and freed on a device."""

    def __init__(self, play: Forecast, device: int) -> None:
        self.program, self.flat, self.device = play.program, play.step.flat, device
        self.begin, self.end = np.array(play.step.times.begin), np.array(play.step.times.end)
        self._action, self._ops = -1, range(0)
        self._parts: list[list[float]] = []

    def of_pass(self, action: int, place: Place) -> float:
        """Returns the moment of a tensor of a pass [s]."""
        if action != self._action:
            self._action, flat = action, self.flat
            task = self.program.tasks[self.program.timetable.slot[action]]
            if task.parts:  # What follows in a pair is played with the action before.
                self._ops = range(flat.first[action], flat.behind[action])
            start = flat.first[action] + sum(len(side.ops) for side in task.ahead)
            parts = moments_inside(task, range(start, flat.behind[action]), self.begin, self.end)
            self._parts = [moments.tolist() for moments in parts]
        number, row = place
        if number >= 0:
            return self._parts[number][row]
        ops = slice(self._ops.start, self._ops.stop)
        return float(self.begin[ops][0] if place == FIRST else self.end[ops].max())

    def of_update(self, place: Place) -> float:
        """Returns the moment of a tensor of the update [s]."""
        if self._action != -1:
            self._action, instances = -1, self.flat.updates[self.device]
            parts = moments_inside(self.program.updates[self.device], instances, self.begin, self.end)
            self._parts = [moments.tolist() for moments in parts]
        number, row = place
        return self._parts[number][row]


def _name_actions(play: Forecast, device: int) -> list[str]:
    """Returns the names of the actions of a device."""
    table, plan = play.program.timetable, play.plan
    first = sum(pipeline.shape.stages for pipeline in plan.every_pipeline[: plan.ranks.pipeline_of(device)[0]])
    return [str(shift_item(table.actions[n], -first)) for n in range(*table.starts[device : device + 2])]


def _describe_segments(replay: RecordedReplay, device: int) -> Iterator[Description]:
    """Yields the segments of a device as they are behind the step."""
    every = sorted(replay.held, key=lambda block: block.address)
    addresses = [block.address for block in every]
    for segment in replay.allocator.segments:
        ends = segment.address, segment.address + segment.nbytes
        blocks = every[slice(*(bisect_left(addresses, end) for end in ends))]
        allocated = sum(block.nbytes for block in blocks)
        yield {
            "device": device,
            "address": segment.address,
            "total_size": segment.nbytes,
            "stream": _number(segment.stream),
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": replay.allocator.expandable,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(replay.held[block][0][1] for block in blocks),
            "frames": [],
            "blocks": list(_describe_blocks(replay, segment, blocks)),
        }


def _describe_blocks(
    replay: RecordedReplay, segment: CachedSegment, blocks: list[CachedBlock]
) -> Iterator[Description]:
    """Yields the blocks of a segment in the order of their addresses, and the gaps between them."""
    at = segment.address
    for block in blocks:
        if block.address > at:
            yield _describe_gap(at, block.address - at)
        (_, nbytes), frames = replay.held[block]
        size, at = block.nbytes, block.address + block.nbytes
        yield {
            "address": block.address,
            "size": size,
            "requested_size": nbytes,
            "state": "active_allocated",
            "frames": frames,
        }
    if at < segment.address + segment.nbytes:
        yield _describe_gap(at, segment.address + segment.nbytes - at)


def _describe_gap(address: int, nbytes: int) -> Description:
    return {"address": address, "size": nbytes, "requested_size": 0, "state": "inactive", "frames": []}


def _number(stream: str) -> int:
    """Returns the number of a stream: 0 for that of the kernels."""
    return int(bool(stream))
