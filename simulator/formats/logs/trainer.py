"""Progress bars of Hugging Face's Trainer, which are tqdm's (``format_meter`` of ``tqdm/std.py``): a line whose updates
are separated by carriage returns::

      3%|▎         | 30/1000 [01:02<33:20,  2.06s/it]

The Trainer logs no times of steps. A bar tells how many whole seconds have passed, so an iteration here is what `SPAN`
seconds at least have brought: its mean is known to a tenth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from meshcast.simulator.formats.logs.training_log import Iteration, LogFormat

BAR = re.compile(r"%\|[^|]*+\|\s*(\d{1,9})/(\d{1,9}) \[(?:(\d{1,5}):)?(\d{1,3}):(\d\d)<")

SPAN = 10
"""Least time between two bars that are told apart [s]: ten times their resolution."""


class TrainerLog(LogFormat):
    """Logs of Hugging Face's Trainer."""

    name = "trainer"
    program = "Hugging Face Trainer"
    form = "3%|▎  | 30/1000 [01:02<33:20,  2.06s/it]"
    hint = "%|"

    def read_iteration(self, line: str, where: str) -> Iteration | None:
        stated = BAR.search(line)
        if not stated:
            return None
        hours, minutes, seconds = (int(part or 0) for part in stated.groups()[2:])
        moment = 3600.0 * hours + 60 * minutes + seconds
        return Iteration(int(stated[1]), where, total=int(stated[2]), moment=moment)


def thin_bars(bars: Iterable[Iteration]) -> list[tuple[int, Iteration]]:
    """Returns bars that are `SPAN` seconds apart or more, each with its index and the seconds of an iteration since the
    last. The longest bar counts: those of evaluations have another end, and begin anew."""
    runs: dict[int | None, list[tuple[int, Iteration]]] = {}
    longest: list[tuple[int, Iteration]] = []
    for index, bar in enumerate(bars):
        run = runs.setdefault(bar.total, [])
        if run and not _follows(run[-1][1], bar):
            run = runs[bar.total] = []
        run.append((index, bar))
        longest = max(longest, run, key=len)
    kept = longest[:1]
    for index, bar in longest:
        before = kept[-1][1]
        if bar.number > before.number and (passed := _measure_time(before, bar)) >= SPAN:
            kept.append((index, replace(bar, seconds=passed / (bar.number - before.number))))
    return kept


def _follows(before: Iteration, bar: Iteration) -> bool:
    return bar.number >= before.number and _measure_time(before, bar) >= 0


def _measure_time(before: Iteration, bar: Iteration) -> float:
    assert before.moment is not None and bar.moment is not None
    return bar.moment - before.moment
