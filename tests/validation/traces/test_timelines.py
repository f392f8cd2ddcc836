"""Timelines of traces: what of a step belongs to whom, counted by cells of time."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.formats.kineto import Event, Trace
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.loading.load import load_job
from meshcast.validation.traces.comparison import UNATTRIBUTED, attribute_communication
from meshcast.validation.traces.gpu_timeline import gpu_timeline
from meshcast.validation.traces.host_timeline import host_timeline
from meshcast.validation.traces.timeline import Slice, Timeline

WORKER, GLOO = ("1", "1"), ("1", "2")
LONG = 40
INTERVALS = st.lists(st.tuples(st.integers(0, LONG), st.integers(1, 12)), min_size=1, max_size=6)


@example([(5, 3), (7, 3)], 2, 12)
@given(INTERVALS, st.integers(0, LONG), st.integers(1, LONG))
def test_a_function_computes_where_no_collective_runs(runs: list[tuple[int, int]], begin: int, seconds: int) -> None:
    """Every unit of time of an autograd function in Python counts once: for a collective that runs, or for it."""
    runs = [(0, 1), *runs]  # the timeline begins at 0
    node = Event("MyFunctionBackward", "cpu_op", begin, seconds, WORKER)
    collectives = [Event("gloo:all_reduce", "user_annotation", *run, GLOO) for run in runs]
    timeline = host_timeline(Trace("", tuple(sorted([node, *collectives], key=lambda event: event.begin))), None)
    waits = {cell for first, number in runs for cell in range(first, first + number)}
    computing = [slice_ for slice_ in timeline.slices if slice_.stream == COMPUTE]
    cells = [round(slice_.begin) + number for slice_ in computing for number in range(round(slice_.seconds))]
    assert sorted(cells) == sorted({*range(begin, begin + seconds)} - waits)


def test_a_step_has_what_begins_in_it() -> None:
    """From its begin on and before its end: consecutive steps have every operator and collective once."""
    events = [
        *(Event("aten::mm", "cpu_op", begin, 5.0, WORKER) for begin in (0.0, 10.0, 20.0)),
        *(Event("gloo:all_reduce", "user_annotation", begin, 2.0, GLOO) for begin in (0.0, 10.0, 20.0)),
        *(Event("c10d::allgather_", "cpu_op", begin, 1.0, ("1", "3")) for begin in (0.0, 10.0, 20.0)),
    ]
    trace = Trace("", tuple(sorted(events, key=lambda event: event.begin)))
    timeline = host_timeline(trace, Event("step", "user_annotation", 10.0, 10.0, WORKER))
    kinds = {slice_.kind: (slice_.begin, slice_.calls) for slice_ in timeline.slices}
    assert kinds.items() >= {"gemm": (0.0, 1), "all_gather": (0.0, 1)}.items() and len(timeline.slices) == 2
    assert timeline.span == 10.0


def test_kernels_begin_with_the_first_of_a_step() -> None:
    """Wherever a step lies in its trace; one without kernels is named."""
    plan = resolve_plan(
        load_job({"model": "gpt3-5b", "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}})
    )
    kernels = [Event("gemm", "kernel", 100.0 + begin, 1.0, ("0", "7")) for begin in (0.0, 4.0)]
    timeline = gpu_timeline(Trace("", tuple(kernels)), plan, 0, None)
    assert [slice_.begin for slice_ in timeline.slices] == [0.0, 4.0] and timeline.span == 5.0
    mark = Event("ProfilerStep#3", "user_annotation", 0.0, 1.0, WORKER)
    with pytest.raises(PlanError, match=r"ProfilerStep#3.*no kernel was launched in it"):
        gpu_timeline(Trace("", tuple(kernels)), plan, 0, mark)


def test_collectives_without_a_group_go_to_the_only_stream_that_has_them() -> None:
    """Of an operation that two streams use neither is known; of one that none uses nothing is ambiguous."""
    forecast = {"tensor": ("all_reduce", "all_gather"), "data": ("all_gather",)}
    played = Timeline(tuple(Slice(stream, kind, 0, 1, "") for stream, kinds in forecast.items() for kind in kinds), 1)
    real = Timeline(tuple(Slice("", kind, 0, 1, "") for kind in ("all_reduce", "all_gather", "send_recv")), 1)
    measured, simulated, ambiguous = attribute_communication(real, played)
    assert [slice_.stream for slice_ in measured.slices] == ["tensor", UNATTRIBUTED, UNATTRIBUTED]
    assert [slice_.stream for slice_ in simulated.slices] == ["tensor", UNATTRIBUTED, UNATTRIBUTED]
    assert ambiguous == ["all_gather"]
