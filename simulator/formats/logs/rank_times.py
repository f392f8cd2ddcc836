"""Timers of several ranks in the logs of Megatron-LM and of NeMo: those of ``--timing-log-level`` in all three forms of
``--timing-log-option`` (``megatron/core/timers.py`` of d98e8a64dd), and the straggler detector's report of
``--log-straggler`` (``megatron/core/utils.py``)::

    (min, max) time across ranks (ms):
        forward-compute ................................: (2031.04, 2032.71)
    max time across ranks (ms):
        forward-compute ................................: 2032.71
    times across ranks (ms):
      forward-compute:
         rank  0: 2031.04
    ... | MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | ... | MnDRtt/Rnk: 14.27ms/23 | MxDRtt/Rnk: 34.65ms/3 | ...
"""

from __future__ import annotations

import re
from dataclasses import replace

from meshcast.simulator.formats.logs.training_log import NUMBER, RankTimes, parse_number

BOTH = re.compile(rf"^\s+([\w-]{{1,80}}) \.*+: \({NUMBER}, {NUMBER}\)\s*$")
MOST = re.compile(rf"^\s+([\w-]{{1,80}}) \.++: {NUMBER}\s*$")
NAME = re.compile(r"^\s+([\w-]{1,80}):\s*$")
RANK = re.compile(rf"^\s+rank +(\d{{1,7}}): {NUMBER}\s*$")
REPORT = re.compile(rf"\bM(n|x)(D?Rtt)/Rnk: {NUMBER}ms/(\d{{1,7}})\b")

ROUND_TRIP, BATCH = "Rtt", "DRtt"
"""Names in the straggler detector's report: all traced ops of an iteration, and getting its batch."""


class RankTimesReader:
    """Reads timers, line by line."""

    def __init__(self) -> None:
        self.times: list[RankTimes] = []
        self._name = ""

    def read(self, line: str, where: str, index: int) -> None:
        """Adds the timer of a line, if there is one. index: of the line of an iteration that is before."""
        if "MxRtt/Rnk" in line:
            self._add_report(line, where, index)
        elif not line.startswith((" ", "\t")):
            return
        elif stated := BOTH.match(line):
            self._add(stated[1], where, index, (parse_number(stated[2]), parse_number(stated[3])))
        elif stated := RANK.match(line):
            self._add_rank(int(stated[1]), parse_number(stated[2]), where, index)
        elif stated := MOST.match(line):
            self._add(stated[1], where, index, (parse_number(stated[2]), parse_number(stated[2])))
        elif stated := NAME.match(line):
            self._name = stated[1]

    def _add(self, name: str, where: str, index: int, milliseconds: tuple[float | None, float | None]) -> None:
        least, most = milliseconds
        if index >= 0 and least is not None and most is not None and 0 <= least <= most:
            self.times.append(RankTimes(name, index, where, least * 1e-3, most * 1e-3))

    def _add_rank(self, rank: int, milliseconds: float | None, where: str, index: int) -> None:
        if index < 0 or milliseconds is None or milliseconds < 0 or not self._name:
            return
        seconds, last = milliseconds * 1e-3, self.times[-1] if self.times else None
        if last is None or (last.name, last.line) != (self._name, index) or rank in last.ranks:
            self.times.append(RankTimes(self._name, index, where, seconds, seconds, {rank: seconds}))
            return
        ranks = {**last.ranks, rank: seconds}
        self.times[-1] = replace(last, least=min(last.least, seconds), most=max(last.most, seconds), ranks=ranks)

    def _add_report(self, line: str, where: str, index: int) -> None:
        ends: dict[str, dict[str, tuple[float, int]]] = {}
        for end, name, number, rank in REPORT.findall(line):
            ends.setdefault(name, {})[end] = ((parse_number(number) or 0.0) * 1e-3, int(rank))
        for name, found in ends.items():
            if index >= 0 and found.keys() == {"n", "x"} and 0 <= found["n"][0] <= found["x"][0]:
                ranks = {rank: seconds for seconds, rank in (found["n"], found["x"])}
                self.times.append(RankTimes(name, index, where, found["n"][0], found["x"][0], ranks))
