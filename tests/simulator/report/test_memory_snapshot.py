"""Memory snapshots hold the forecast's memory, and torch's own viewer reads them."""

from __future__ import annotations

import pickle
import pickletools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator import Report, simulate
from meshcast.simulator.engine.allocator import CachingAllocator
from meshcast.simulator.engine.reserved_memory import TensorReplay, play_first_step, play_passes, play_update
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.tracing.memory_snapshot import make_snapshot, write_snapshot

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 64}
JOBS: dict[str, dict[str, Any]] = {
    "1f1b": {"plan": {"tp": 2, "pp": 2, "recompute": "selective"}},
    "interleaved": {"plan": {"pp": 2, "chunks": 2, "recompute": "full"}},
    "dualpipe": {"batch": {"global": 16, "micro": 1}, "plan": {"pp": 4, "schedule": "dualpipe"}},
    "one stage": {"plan": {"tp": 2}},
}
BROWSER = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINUNICODE", "EMPTY_DICT"),
    *("EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE"),
    *("PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""Opcodes of pickles that torch/utils/viz/MemoryViz.js, the viewer in the browser, reads."""


@pytest.fixture(scope="module", params=JOBS)
def report(request: pytest.FixtureRequest) -> Report:
    base = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}}
    return simulate({**base, **JOBS[request.param]})


def test_the_peaks_are_those_of_the_forecast(report: Report) -> None:
    for events, peak in zip(make_snapshot(report)["device_traces"], report.play.peaks, strict=True):
        held, highest = 0, 0
        for event in events:
            held += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
            highest = max(highest, held)
        assert highest == pytest.approx(peak.total, abs=len(CATEGORIES))


def test_allocations_lie_apart_in_segments_and_are_freed_once(report: Report) -> None:
    for device, events in enumerate(make_snapshot(report)["device_traces"]):
        segments: list[tuple[int, int]] = []
        live: dict[int, int] = {}
        for event in events:
            at, size = event["addr"], event["size"]
            if event["action"] == "segment_alloc":
                segments.append((at, at + size))
            elif event["action"] == "alloc":
                assert any(start <= at and at + size <= end for start, end in segments)
                assert all(at + size <= other or other + live[other] <= at for other in live), device
                live[at] = size
            elif event["action"] == "free_completed":
                assert live.pop(at) == size
        times = [event["time_us"] for event in events]
        assert times == sorted(times)


def test_segments_end_as_their_events_do(report: Report) -> None:
    snapshot = make_snapshot(report)
    for device, events in enumerate(snapshot["device_traces"]):
        live: dict[int, int] = {}
        for event in events:
            if event["action"] == "alloc":
                live[event["addr"]] = event["size"]
            elif event["action"] == "free_completed":
                del live[event["addr"]]
        segments = [one for one in snapshot["segments"] if one["device"] == device]
        made = {event["addr"]: event["size"] for event in events if event["action"] == "segment_alloc"}
        assert {segment["address"]: segment["total_size"] for segment in segments} == made
        blocks = [block for segment in segments for block in segment["blocks"]]
        active = [block for block in blocks if block["state"] == "active_allocated"]
        assert {block["address"]: block["requested_size"] for block in active} == live
        assert sum(block["size"] for block in active) == sum(segment["allocated_size"] for segment in segments)
        for segment in segments:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
            at = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == at and 0 <= block["requested_size"] <= block["size"]
                at += block["size"]


def test_recording_takes_the_segments_that_an_allocator_takes_without_it(report: Report) -> None:
    segments = make_snapshot(report)["segments"]
    for device in range(report.play.program.devices):
        replay = TensorReplay(CachingAllocator())
        play_first_step(replay, report.play.program, device, report.play.list_tensors(device))
        for play in (play_passes, play_update):
            for _ in play(replay, report.play.program, device):
                pass
        sizes = [segment["total_size"] for segment in segments if segment["device"] == device]
        assert sorted(sizes) == sorted(segment.nbytes for segment in replay.allocator.segments)


def test_expandable_segments_grow() -> None:
    job = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}, **JOBS["one stage"]}
    framework = {"name": "megatron-core", "set": {"memory": {"expandable": True}}}
    snapshot = make_snapshot(simulate({**job, "framework": framework}))
    assert len(snapshot["segments"]) <= 2 and all(one["is_expandable"] for one in snapshot["segments"])
    made = sum(one["size"] for one in snapshot["device_traces"][0] if one["action"].startswith("segment"))
    assert made == sum(one["total_size"] for one in snapshot["segments"])


def test_the_stack_names_category_action_and_stage(report: Report) -> None:
    names = defaultdict(set)
    for device, events in enumerate(make_snapshot(report)["device_traces"]):
        for event in (event for event in events if event["frames"]):
            category, action, stage = (frame["name"] for frame in event["frames"])
            assert category in CATEGORIES and stage == f"stage {device}"
            names[device].add(action)
            if action == "O":  # the update
                begin = min(report.play.step.times.begin[op] for op in report.play.step.flat.updates[device])
                assert event["time_us"] >= round(begin * 1e6)
    for device, order in enumerate(report.play.program.timetable.orders):
        assert {"before the step", str(order[0])} <= names[device]


@pytest.mark.torch
def test_the_viewer_of_torch_reads_it(report: Report, tmp_path: Path) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    write_snapshot(report, tmp_path / "memory.pickle")
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    for draw in (viewer.segments, viewer.memory):
        lines = draw(snapshot, format_flamegraph=str).splitlines()
        counted = sum(int(line.rpartition(" ")[2]) for line in lines if ";active_allocated;" in line)
        assert counted == sum(segment["allocated_size"] for segment in snapshot["segments"])
    assert viewer.trace(snapshot).count("= cudaMalloc(") == len(snapshot["segments"])
    assert f"segments: {len(snapshot['segments'])}" in viewer.segsum(snapshot)
    assert "add_local_files" in viewer.trace_plot(snapshot)
    assert "add_local_files" in viewer.segment_plot(snapshot)


def test_the_pickle_is_one_that_the_browser_reads(report: Report, tmp_path: Path) -> None:
    write_snapshot(report, tmp_path / "memory.pickle")
    data = (tmp_path / "memory.pickle").read_bytes()
    assert {opcode.name for opcode, *_ in pickletools.genops(data)} <= BROWSER
    write_snapshot(report, tmp_path / "again.pickle")
    assert (tmp_path / "again.pickle").read_bytes() == data
