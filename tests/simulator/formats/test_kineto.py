"""Traces of torch's profiler: events, their nesting, and the operators that launch kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats import kineto
from tests.simulator.formats.samples import START, event, kernel, launch

EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 20446, "tid": 0, "ts": START, "args": {"name": "python"}},
    event("PyTorch Profiler (0)", "Trace", -50.0, 900.0, pid="Spans", tid="PyTorch Profiler"),
    event("ProfilerStep#3", "user_annotation", 0.0, 400.0),
    event("aten::linear", "cpu_op", 10.0, 60.0),
    event("aten::addmm", "cpu_op", 20.0, 40.0, args={"External id": 5}),
    launch(30.0, 101),
    event("_RMSNorm", "cpu_op", 100.0, 50.0, args={"External id": 9}),
    event("aten::mul", "cpu_op", 110.0, 10.0),
    launch(112.0, 102),
    event("aten::add", "cpu_op", 140.0, 10.0, tid=99),
    kernel("nvjet_tst_192x192", 200.0, 80.0, 101),
    kernel("void at::native::vectorized_elementwise_kernel<4>", 285.0, 5.0, 102),
    kernel("unlaunched", 300.0, 5.0, 999, **{"External id": 9}),
    {"ph": "s", "id": 4, "cat": "fwdbwd", "name": "fwdbwd", "pid": 20446, "tid": 20453, "ts": START},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": START + 900},
]
TRACE = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "distributedInfo": {
        "backend": "nccl",
        "rank": 1,
        "world_size": 4,
        "pg_config": [
            {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
            {"pg_name": "2", "pg_desc": "undefined", "ranks": [0, 1]},
        ],
    },
    "traceEvents": EVENTS,
}


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(data: Any, name: str = "trace.json") -> Path:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        return path

    return write


@pytest.fixture
def trace(put: Any) -> kineto.Trace:
    return kineto.read(put(TRACE))


def test_events_are_read_with_their_times(trace: kineto.Trace) -> None:
    assert (trace.rank, trace.world, trace.backend, trace.devices) == (1, 4, "nccl", ("NVIDIA H200",))
    assert trace.groups == {"default_pg": (0, 1, 2, 3), "2": (0, 1)}
    first = trace.of("kernel")[0]
    assert first.begin == pytest.approx(200e-6, rel=1e-5) and first.seconds == pytest.approx(80e-6)
    assert trace.on_gpu and [step.name for step in trace.steps()] == ["ProfilerStep#3"]
    begins = [one.begin for one in trace.events]
    assert begins == sorted(begins)


def test_a_kernel_knows_its_launching_operator(trace: kineto.Trace) -> None:
    product, scaled, unlaunched = trace.of("kernel")
    assert trace.callers(product) == ("aten::addmm", "aten::linear", "ProfilerStep#3")
    assert trace.callers(scaled) == ("aten::mul", "_RMSNorm", "ProfilerStep#3")
    assert trace.callers(unlaunched)[0] == "_RMSNorm"  # by the operator's number, for want of its launch


def test_every_moment_belongs_to_the_innermost_operator(trace: kineto.Trace) -> None:
    took: dict[str, float] = {}
    for one in trace.self_times():
        took[one.event.name] = took.get(one.event.name, 0.0) + one.end - one.begin
    times_us = {"ProfilerStep#3": 290, "aten::linear": 20, "aten::addmm": 40, "_RMSNorm": 40, "aten::mul": 10}
    assert took == pytest.approx({name: us * 1e-6 for name, us in (times_us | {"aten::add": 10}).items()}, rel=1e-4)
    places = {event.name: (around, parent) for event, around, parent in trace.nest_events()}
    assert places["aten::mul"][0] == ("_RMSNorm", "ProfilerStep#3") and places["aten::add"] == ((), -1)
    names = [event.name for event, _, _ in trace.nest_events()]
    assert names[places["aten::addmm"][1]] == "aten::linear"


def test_a_trace_of_any_number_of_names_is_refused(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "MAX_NAMES", 9)
    kineto.read(put(TRACE))  # five operators, three kernels and a step
    monkeypatch.setattr(kineto, "MAX_NAMES", 8)
    with pytest.raises(PlanError, match="9 names of operators and kernels, at most 8"):
        kineto.read(put(TRACE))


def test_compressed_traces(put: Any, trace: kineto.Trace) -> None:
    packed = kineto.read(put(gzip.compress(json.dumps(TRACE).encode()), "trace.json.gz"))
    assert packed.events == trace.events


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ":1.*JSON"),
        (json.dumps(TRACE).encode()[:-30], "JSON"),
        (gzip.compress(json.dumps(TRACE).encode())[:-30], "incomplete"),
        (b"[]", "a list where an object"),
        ({}, "traceEvents.*missing"),
        ({"traceEvents": {}}, "traceEvents.*an object"),
        ({"traceEvents": []}, "no operator and no kernel"),
        ({"traceEvents": [EVENTS[0]]}, "no operator and no kernel"),
        ({"traceEvents": [7]}, "traceEvents.0"),
        ({"traceEvents": [event("a", "cpu_op", 0, 1) | {"ts": None}]}, "traceEvents.0 ts"),
        ({"traceEvents": [event("a", "cpu_op", 0, 1) | {"ts": "5"}]}, "traceEvents.0 ts"),
        ({"traceEvents": [event("a", "cpu_op", 0, float("nan"))]}, "traceEvents.0 dur"),
        ({"traceEvents": [event("a", "cpu_op", 0, -1.0)]}, "not negative"),
    ],
)
def test_mistakes_end_in_one_error(put: Any, data: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        kineto.read(put(data))


@given(st.data())
def test_broken_traces_end_in_one_error_or_are_read(tmp_path_factory: Any, data: Any) -> None:
    text = json.dumps(TRACE, indent=1)
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 40))
    put_in = data.draw(st.text(st.sampled_from(list('0189.e-{}[]",: \nanull\x00\u00b2')), max_size=6))
    path = tmp_path_factory.mktemp("fuzz") / "trace.json"
    path.write_text(text[:at] + put_in + text[at + length :], "utf-8")
    try:
        found = kineto.read(path)
    except PlanError as error:
        assert str(path) in str(error)
    else:
        assert all(trace.seconds >= 0 for trace in found.events)
        assert len(found.nest_events()) >= len({one.event.name for one in found.self_times()})
        for one in found.of("kernel"):
            found.callers(one)


# Values of the wrong kind anywhere in an event.
WORDS = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=3) | st.lists(st.none())


@given(st.dictionaries(st.sampled_from(["ts", "dur", "name", "cat", "args", "pid", "tid", "ph"]), WORDS))
def test_values_of_a_wrong_kind(tmp_path_factory: Any, changes: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*EVENTS[:5], EVENTS[10] | changes]}), "utf-8")
    try:
        found = kineto.read(path)
    except PlanError as error:
        assert "traceEvents.5" in str(error)
    else:
        found.self_times()
        for one in found.of("kernel"):
            found.callers(one)
