"""One job's way through the rooms, as CONTRIBUTING.md lists it."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from meshcast.simulator import simulate

ROOT = Path(__file__).resolve().parents[3]
JOB = {"model": "gpt2", "cluster": "dgx-h100:1", "plan": {"tp": 2, "pp": 2}, "batch": {"global": 16}}


def listed() -> list[tuple[str, str]]:
    """(file, function) of every step that CONTRIBUTING.md lists, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return re.findall(r"^\d\. `(simulator/[\w/]+\.py)` `([\w.]+)`", text, re.MULTILINE)


def finished(run: Any) -> dict[tuple[str, str], int]:
    """When each function of the simulator has returned for the last time, as a number that grows."""
    last, counter = dict[tuple[str, str], int](), itertools.count()
    folder = f"{ROOT / 'meshcast'}/simulator/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code.co_filename.startswith(folder):
            file = Path(frame.f_code.co_filename).relative_to(ROOT / "meshcast").as_posix()
            last[file, frame.f_code.co_qualname] = next(counter)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return last


def test_a_job_passes_the_rooms_in_the_listed_order() -> None:
    steps = listed()
    assert len(steps) == 8 and len({file.split("/")[1] for file, _ in steps}) == 8, "every step has a room of its own"
    last = finished(lambda: simulate(JOB))
    *passed, report, conductor = steps
    assert [last[step] for step in passed] == sorted(last[step] for step in passed)
    assert max(last[step] for step in passed) < last[conductor]
    assert report not in last, "the report works out its figures when somebody asks"
