"""Sections of docs/accuracy.md on memory: every run is counted once, left out of its spread, and faults are listed."""

from __future__ import annotations

import re
from typing import Any

from tests.validation.published.test_peak_spreads import draw
from tools.pages.memory_verdicts import LeftOutSpreads, forecast_reported, list_sections

WIDE, NARROW = draw("torchtitan", "a", 0.2, 200), draw("torchtitan", "b", 0.02, 200, 2)
PEAKS = WIDE + NARROW + draw("megatron-core", "c", 0.02, 200, 3)


def run(name: str, source: str, room: float, spread: str = "torchtitan") -> dict[str, Any]:
    predicted = {"room": room, "spread": spread, "peak_device_gib": 80 / room, "capacity_gib": 80.0}
    return {"id": name, "source": source, "replaced": {}, "misfit": "why", "predicted": predicted}


def test_a_run_is_judged_by_the_peaks_of_other_sources() -> None:
    """Source a is wide and b narrow: a run of a has the spread of b, one of b that of a, a stranger that of both."""
    left_out = LeftOutSpreads(PEAKS)
    scales = [left_out.error(run("x", source, 1.0)["predicted"] | {"source": source}).above for source in "abz"]
    assert scales[0] < 0.03 < scales[2] < 0.12 < scales[1]


def test_every_run_is_counted_once_and_faults_are_listed() -> None:
    rows = [run("sure", "a", 2.0), run("tight", "b", 1.1), run("fault", "z", 0.8), {"id": "refused", "predicted": None}]
    rows[1]["replaced"] = {"recompute.kind": "full"}
    failed = [*forecast_reported()]
    spreads, calibration, reported, faults = list_sections(rows, PEAKS, failed)
    counts = re.findall(r"^\| \d+ to \d+ \| (\d+) \| (\d+) \|$", calibration, re.MULTILINE)
    assert [sum(int(pair[i]) for pair in counts) for i in (0, 1)] == [3, len(failed)]
    assert all(entry["reported"] in reported for entry in failed) and len(failed) > 5
    assert "Of 3 runs that ran 33.3 % are called to fit" in calibration and "33.3 % tight, 33.3 % not" in calibration
    assert "| `fault` | 100 | 80 |" in faults and "why" in faults and "`sure`" not in faults
    assert "| `tight` | recompute.kind | full |" in faults
    assert re.search(r"^\| torchtitan \| 400 \| 2 \| torchtitan ", spreads, re.MULTILINE)
