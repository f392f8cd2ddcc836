"""Times of actions: equal to those of the ops one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshcast.experiments.explain.action_times import UPDATE, action_times, busy_shares, merge_bins
from meshcast.experiments.render.matplotlib.gantt import busy_share, device_row
from meshcast.simulator import load_job, simulate
from meshcast.simulator.program.categories import EXPOSED
from tests.thinning import thinned

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


@pytest.mark.parametrize("name", thinned(PLANS, keep=2))
def test_actions_begin_and_end_with_their_kernels(name: str) -> None:
    report = simulate(load_job(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text("utf-8"))["job"], base=GOLDEN))
    step: Any = report.play.step
    begin, end = np.asarray(step.times.begin), np.asarray(step.times.end)
    for device in range(report.play.program.devices):
        found, row = action_times(step, device), device_row(report, device, begin, end)
        own = [i for i, kind in enumerate(found.kinds) if kind != UPDATE]
        passes = [i for i, kind in enumerate(row.kind) if kind != UPDATE]
        mine = sorted(zip(found.begin[own], found.end[own], [found.kinds[i] for i in own], strict=True))
        theirs = sorted(zip(row.begin[passes], row.end[passes], [row.kind[i] for i in passes], strict=True))
        assert [kind for *_, kind in mine] == [kind for *_, kind in theirs]
        assert np.array([one[:2] for one in mine]) == pytest.approx(np.array([one[:2] for one in theirs]), abs=1e-9)
        last = [one for one in row.kind if one == UPDATE]
        assert bool(last) == (UPDATE in found.kinds)
        for axis, lanes in row.lanes.items():
            if axis not in EXPOSED:
                continue
            # Latency counts here, and not there.
            there = busy_share(lanes, found.edges)
            assert found.busy[axis].sum() >= there.sum() * (1 - 1e-6)
            assert abs(found.busy[axis] - there).mean() < 0.05


def test_busy_shares_by_hand() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    intervals = [(np.array([0.5]), np.array([2.25])), (np.array([2.75]), np.array([3.0]))]
    assert busy_shares(intervals, edges) == pytest.approx([0.5, 1.0, 0.5])
    assert list(merge_bins(np.array([1.0, 1.0, 0.0, 0.5]), np.arange(5.0))) == [(0.0, 2.0, 1.0), (3.0, 4.0, 0.5)]
