"""Timelines of a step played by matrices: equal to those of the times of all ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshcast.experiments.views.matrix_timeline import matrix_timeline
from meshcast.experiments.views.timeline import UPDATE, DeviceTimeline, busy_shares, merge_bins, step_timelines
from meshcast.simulator import load_job, simulate
from meshcast.simulator.program.categories import EXPOSED
from tests.draws import drawn

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
PLANS = [
    "all-five-axes",
    "data-fsdp",
    "framework-slow-host",
    "pipeline-interleaved",
    "pipeline-overlapped-passes",
    "pipeline-pipedream-2bw",
    "pipeline-zb-v",
    "recompute-some-layers",
]


def list_passes(timeline: DeviceTimeline) -> list[tuple[Any, ...]]:
    """All but the update: begin, end, kind, stage, chunk, micro-batch and place in the bar."""
    columns = (timeline.begin, timeline.end, timeline.kind, timeline.stage, timeline.chunk, timeline.microbatch)
    rows = zip(*columns, timeline.part.tolist(), strict=True)
    return sorted(row for row in rows if row[2] != UPDATE)


@pytest.mark.parametrize("name", drawn(PLANS, keep=2))
def test_actions_begin_and_end_with_their_kernels(name: str) -> None:
    report = simulate(load_job(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text("utf-8"))["job"], base=GOLDEN))
    edges = np.linspace(0.0, report.play.step.span, 501)
    exposed = {axis for axis in EXPOSED if report.breakdown.parts.get(axis)}
    timelines = step_timelines(report, range(report.play.program.devices))
    assert exposed <= {axis for exact in timelines for axis in exact.lanes}, "what is exposed has a lane"
    for exact in timelines:
        timeline = matrix_timeline(report, exact.device)
        passes = [list_passes(each) for each in (timeline, exact)]
        assert [row[2:] for row in passes[0]] == [row[2:] for row in passes[1]]
        ends = [np.array([row[:2] for row in rows]) for rows in passes]
        assert ends[0] == pytest.approx(ends[1], abs=1e-9)
        assert (UPDATE in exact.kind) == (UPDATE in timeline.kind)
        assert timeline.recomputed.sum() == pytest.approx(exact.recomputed.sum(), rel=1e-9)
        busy = timeline.bin_lanes(edges)
        for axis, there in exact.bin_lanes(edges).items():
            if axis not in EXPOSED:
                continue
            # Latency counts here, and not there.
            assert busy[axis].sum() >= there.sum() * (1 - 1e-6)
            assert abs(busy[axis] - there).mean() < 0.05


def test_busy_shares_by_hand() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    intervals = [(np.array([0.5]), np.array([2.25])), (np.array([2.75]), np.array([3.0]))]
    assert busy_shares(intervals, edges) == pytest.approx([0.5, 1.0, 0.5])
    assert list(merge_bins(np.array([1.0, 1.0, 0.0, 0.5]), np.arange(5.0))) == [(0.0, 2.0, 1.0), (3.0, 4.0, 0.5)]
