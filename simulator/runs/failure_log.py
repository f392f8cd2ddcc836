"""Logs of failures as CSV, to replay them and to fit rates to them.

A log has a row of headings and a row for each failure: ``time_h`` since the beginning [hours], in rising order;
``component``; and, as far as they are known, ``nodes`` (numbers of the nodes that the job lost, from 0, separated by
spaces; empty: it lost none) and ``repair_h`` (hours until they were back). Further columns are left alone. A last row
with the component ``end`` says how long was observed; without it that is the time of the last failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import csv_rows
from meshcast.simulator.runs.failures import Failure

COLUMNS = ("time_h", "component", "nodes", "repair_h")
END = "end"
"""Component of the row that ends a log."""

MAX_COMPONENTS = 1_000
"""Most components of a log; a column with more names holds something else, such as messages."""

HOUR = 3600.0

MIN_HOURS = 1e-9
"""Shortest time but 0; rates of shorter ones would be beyond all numbers."""


@dataclass(frozen=True)
class ObservedLog:
    """A log.

    failures: in the order of time.
    observed: time that it covers [s].
    """

    failures: tuple[Failure, ...]
    observed: float


def read_failure_log(path: Path, nodes: int | None = None) -> ObservedLog:
    """Returns the failures of a log. nodes: of the job; None: not known. Raises PlanError for a mistake, with its
    line."""
    rows = [row for row in csv_rows(path, "Name a CSV file with the columns time_h and component") if row.cells]
    heads = rows[0].cells if rows else []
    for name in COLUMNS:
        if heads.count(name) > 1:
            raise PlanError(f"{path}:1", f"the log has {heads.count(name)} columns {name}", "Keep one of them", name)
    for name in COLUMNS[:2]:
        if name not in heads:
            rule = f"the log has no column {name}, but {', '.join(heads[:8]) or 'no headings'}"
            raise PlanError(
                f"{path}:1", rule, nearest(name, heads) if heads else "Write time_h,component,nodes,repair_h"
            )
    failures: list[Failure] = []
    for row in rows[1:]:
        cells = dict(zip_longest(heads, row.cells[: len(heads)], fillvalue=""))
        failures.append(_read_row(cells, f"{path}:{row.line}", nodes, failures))
    observed = failures[-1].time if failures else 0.0
    if failures and failures[-1].component == END:
        failures.pop()
    if any(failure.component == END for failure in failures):
        raise PlanError(str(path), "failures follow the row that ends the log", "Move that row to the end")
    if not failures:
        raise PlanError(str(path), "the log has no failures", "Write a row for each, or failures: none")
    if len(names := {failure.component for failure in failures}) > MAX_COMPONENTS:
        rule = f"the log has {len(names):,} components, at most {MAX_COMPONENTS:,} are read"
        raise PlanError(str(path), rule, "Name the kinds of parts that fail, such as gpu, in the column component")
    return ObservedLog(tuple(failures), observed)


def _read_row(cells: dict[str, str], where: str, nodes: int | None, before: Sequence[Failure]) -> Failure:
    time = _read_number(cells["time_h"], where, "time_h")
    if before and time * HOUR < before[-1].time:
        raise PlanError(f"{where} time_h", "times rise from row to row", "Sort the rows by time_h", cells["time_h"])
    if not cells["component"]:
        raise PlanError(
            f"{where} component", "a failure has a component", "Write gpu, nic, node, software or another word"
        )
    lost = []
    for word in cells.get("nodes", "").split():
        if not word.isdecimal() or len(word) > 9 or (nodes is not None and int(word) >= nodes):
            rule = f"nodes are numbers from 0{f' to {nodes - 1:,}' if nodes else ''}, separated by spaces"
            raise PlanError(f"{where} nodes", rule, "Correct it, or leave it empty if the job lost no node", word)
        lost.append(int(word))
    repair = cells.get("repair_h", "")
    seconds = _read_number(repair, where, "repair_h") * HOUR if repair else None
    return Failure(time * HOUR, cells["component"], tuple(dict.fromkeys(lost)), seconds)


def _read_number(text: str, where: str, column: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not (hours == 0 or MIN_HOURS <= hours <= 1e6):
        rule = f"hours are 0, or numbers from {MIN_HOURS:g} to 1,000,000"
        raise PlanError(f"{where} {column}", rule, "Correct it", text)
    return hours


@dataclass(frozen=True)
class FittedRate:
    """Distribution of the time between two failures of a component, of all its parts together.

    failures: number of them.
    mtbf: mean time [s], the estimate of greatest likelihood under exponential times: observed time over failures.
    low, high: 90 % interval of it.
    shape, scale: of the Weibull distribution of greatest likelihood of the gaps [s].
    gain: by how much its log-likelihood exceeds that of the exponential distribution; above 1.92 a shape of 1 is
        outside of the 95 % interval.
    """

    component: str
    failures: int
    mtbf: float
    low: float
    high: float
    shape: float
    scale: float
    gain: float


MIN_FAILURES = 3
"""Gaps that a Weibull distribution is fitted to at least."""


def fit_rates(log: ObservedLog) -> list[FittedRate]:
    """Returns the rates of every component of a log. Raises PlanError for a log that covers no time."""
    if not log.observed:
        rule = "the log covers no time, so that it has no rates"
        raise PlanError(
            "time_h", rule, f"End it with a row whose component is {END}, at the time until which it was kept"
        )
    times: dict[str, list[float]] = {}
    for failure in log.failures:
        times.setdefault(failure.component, []).append(failure.time)
    return [_fit(name, seconds, log.observed) for name, seconds in times.items()]


def _fit(name: str, times: Sequence[float], observed: float) -> FittedRate:
    count = len(times)
    # Gaps between failures, the first from the beginning on; the time after the last is a gap that has not ended.
    gaps = np.diff(np.array([0.0, *times]))
    gaps = gaps[gaps > 0]
    rest = max(observed - times[-1], 0.0)
    low, high = _poisson_interval(count)
    shape, scale, gain = 1.0, observed / count, 0.0
    if len(gaps) >= MIN_FAILURES:
        shape, scale = fit_weibull(gaps, rest)
        gain = _likelihood(gaps, rest, shape, scale) - _likelihood(
            gaps, rest, 1.0, float(gaps.sum() + rest) / len(gaps)
        )
    return FittedRate(name, count, observed / count, observed / high, observed / low, shape, scale, max(gain, 0.0))


def fit_weibull(gaps: np.ndarray, rest: float = 0.0) -> tuple[float, float]:
    """Returns shape and scale [s] of greatest likelihood.

    gaps: times that have ended.
    rest: a time that has not, 0: none.

    The shape k solves sum(t^k ln t) / sum(t^k) - 1 / k = mean(ln t of the ended gaps), whose left side rises with k.
    """
    longest = float(max(gaps.max(), rest))
    every = np.append(gaps, rest) / longest if rest > 0 else gaps / longest
    logs, target = np.log(every), float(np.log(gaps / longest).mean())

    def excess(k: float) -> float:
        weights = every**k
        return float((weights * logs).sum() / weights.sum()) - 1 / k - target

    low, high = 1e-3, 1.0
    while excess(high) < 0 and high < 1e4:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    shape = (low + high) / 2
    return shape, longest * float((every**shape).sum() / len(gaps)) ** (1 / shape)


def _likelihood(gaps: np.ndarray, rest: float, shape: float, scale: float) -> float:
    ended = np.log(shape / scale) + (shape - 1) * np.log(gaps / scale) - (gaps / scale) ** shape
    return float(ended.sum()) - (rest / scale) ** shape


def _poisson_interval(count: int) -> tuple[float, float]:
    """Returns the 90 % interval of the mean of a Poisson number (Wilson and Hilferty's cubes of a chi-squared
    quantile)."""
    z = 1.6449
    low = count * (1 - 1 / (9 * count) - z / (3 * math.sqrt(count))) ** 3
    high = (count + 1) * (1 - 1 / (9 * (count + 1)) + z / (3 * math.sqrt(count + 1))) ** 3
    return max(low, 1e-9), high
