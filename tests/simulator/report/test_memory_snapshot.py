"""Memory snapshots hold the forecast's memory, and torch's own viewer reads them."""

from __future__ import annotations

import pickle
import pickletools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import Report, simulate
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.tracing.memory_snapshot import find_blocks, make_snapshot, place_blocks, write_snapshot

MODEL = {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128}
JOBS: dict[str, dict[str, Any]] = {
    "1f1b": {"plan": {"tp": 2, "pp": 2, "recompute": "selective"}},
    "interleaved": {"plan": {"pp": 4, "chunks": 2, "recompute": "full"}},
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


def test_allocations_do_not_overlap_and_are_freed_once(report: Report) -> None:
    for device, events in enumerate(make_snapshot(report)["device_traces"]):
        assert [event["action"] for event in events].count("segment_alloc") == 1
        start, end = events[0]["addr"], events[0]["addr"] + events[0]["size"]
        live: dict[int, int] = {}
        for event in events[1:]:
            at, size = event["addr"], event["size"]
            if event["action"] == "alloc":
                assert start <= at and at + size <= end
                assert all(at + size <= other or other + live[other] <= at for other in live), device
                live[at] = size
            elif event["action"] == "free_completed":
                assert live.pop(at) == size
        times = [event["time_us"] for event in events]
        assert times == sorted(times)


def test_the_segment_ends_as_its_events_do(report: Report) -> None:
    snapshot = make_snapshot(report)
    for segment, events in zip(snapshot["segments"], snapshot["device_traces"], strict=True):
        live: dict[int, int] = {}
        for event in events:
            if event["action"] == "alloc":
                live[event["addr"]] = event["size"]
            elif event["action"] == "free_completed":
                del live[event["addr"]]
        active = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
        assert active == live and sum(active.values()) == segment["allocated_size"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]


def test_the_stack_names_category_action_and_stage(report: Report) -> None:
    names = defaultdict(set)
    for device, events in enumerate(make_snapshot(report)["device_traces"]):
        for event in events[1:]:
            category, action, stage = (frame["name"] for frame in event["frames"])
            assert category in CATEGORIES and stage == f"stage {device}"
            names[device].add(action)
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


@given(st.lists(st.lists(st.integers(0, 5), min_size=8, max_size=8), min_size=1, max_size=30))
def test_blocks_add_up_to_what_is_held(rows: list[list[int]]) -> None:
    held = np.array(rows, float)
    blocks = find_blocks(held)
    for moment in range(len(rows)):
        found = dict.fromkeys(CATEGORIES, 0)
        for block in blocks:
            if block.born <= moment and (block.died is None or block.died > moment):
                found[block.category] += block.nbytes
        assert list(found.values()) == rows[moment]
    assert place_blocks(blocks, 100) >= held.sum(axis=1).max()
    for i, one in enumerate(blocks):
        for other in blocks[:i]:
            together = (one.died is None or other.born < one.died) and (other.died is None or one.born < other.died)
            apart = one.address + one.nbytes <= other.address or other.address + other.nbytes <= one.address
            assert apart or not together
