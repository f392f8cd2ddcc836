"""The steps of a run as its log has them: their usual time, how much it varies, and which steps are longer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.logs.trainer import TrainerLog
from meshcast.simulator.formats.logs.training_log import Iteration, LogEvent, RankTimes, TrainingLog

LONGER = 5.0
"""Standard deviations by which a step is longer than its neighbours to count as a pause: one in a million is by
chance."""

LEAST_LONGER = 0.03
"""Share of the usual step by which it is longer at least: clocks of logs are not better than that."""

NEIGHBOURS = 10
"""Lines before and behind, whose median is the level of the steps at a line."""

LEAST_DRIFT = 0.02
"""Least change between the first and the last fifth of a log that counts as drift."""

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class StepInterval:
    """The steps since the line of a log before.

    Attributes:
        line: the line at their end.
        steps: their number.
        seconds: of a step on the clock of the log [s].
        outside: time between both lines in which that clock stood still [s].
        level: median of the steps around [s].
        resolution: of the seconds of a step, where they follow from the clock on the wall [s].
        events: that the log tells between both lines.
        times: of several ranks, as printed after the line, before the next one.
        times_since: those that were printed since the line before.
    """

    line: Iteration
    steps: int
    seconds: float
    outside: float = 0.0
    level: float = 0.0
    resolution: float = 0.0
    events: tuple[LogEvent, ...] = ()
    times: tuple[RankTimes, ...] = ()
    times_since: tuple[RankTimes, ...] = ()

    @property
    def first(self) -> int:
        """Number of the first step."""
        return self.line.number - self.steps + 1

    @property
    def excess(self) -> float:
        """Seconds beyond steps at the level around, of all steps together; below 0: they were shorter."""
        return (self.seconds - self.level) * self.steps + self.outside

    def covers(self, period: int) -> bool:
        """Returns whether one of the steps, or the one before them, is a multiple of a period: what runs after a step
        is seen on the next line."""
        return self.line.number // period > (self.first - 2) // period


@dataclass(frozen=True)
class StepTimes:
    """The steps of a log.

    Attributes:
        log: the log.
        warm: intervals at the begin that were longer until they settled, or that were to be left out.
        intervals: the others.
    """

    log: TrainingLog
    warm: tuple[StepInterval, ...]
    intervals: tuple[StepInterval, ...]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of a step, by interval."""
        return np.array([interval.seconds for interval in self.intervals])

    @cached_property
    def typical(self) -> float:
        """Median [s]."""
        return float(np.median(self.seconds))

    def percentile(self, percent: float) -> float:
        """Returns a percentile of the steps [s]."""
        return float(np.percentile(self.seconds, percent))

    @cached_property
    def sigma(self) -> float:
        """Standard deviation between neighbours that are no pauses [s]."""
        return estimate_noise(self.seconds)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(interval.steps for interval in self.intervals)

    @cached_property
    def mean(self) -> float:
        """Mean of a step, with the time between steps in which the clock stood still [s]."""
        total = sum(interval.seconds * interval.steps + interval.outside for interval in self.intervals)
        return total / self.steps

    @property
    def threshold(self) -> float:
        """Seconds by which a step is longer than its neighbours to count as a pause."""
        return max(LONGER * self.sigma, LEAST_LONGER * self.typical)

    def is_pause(self, interval: StepInterval) -> bool:
        """Returns whether an interval is longer than chance would have it."""
        limit = max(self.threshold, interval.resolution)
        return interval.seconds - interval.level > limit or interval.outside > LEAST_LONGER * self.typical

    @cached_property
    def pauses(self) -> tuple[StepInterval, ...]:
        """Intervals that are longer than chance would have it."""
        return tuple(interval for interval in self.intervals if self.is_pause(interval))

    @cached_property
    def paused(self) -> float:
        """Seconds of pauses for each step."""
        return sum(interval.excess for interval in self.pauses) / self.steps

    @property
    def steady(self) -> float:
        """Mean of a step without pauses [s]."""
        return self.mean - self.paused

    @cached_property
    def drift(self) -> tuple[float, float, int] | None:
        """Level at the begin and at the end [s], and the step at which it changes most; None: no change that is more
        than chance."""
        count = len(self.intervals)
        if count < 10:
            return None
        levels = np.array([interval.level for interval in self.intervals])
        fifth = max(count // 5, 2)
        first, last = float(np.median(levels[:fifth])), float(np.median(levels[-fifth:]))
        if abs(last - first) <= max(LEAST_DRIFT * first, 4 * self.sigma / fifth**0.5):
            return None
        sums = np.abs(np.cumsum(self.seconds - self.seconds.mean()))
        return first, last, self.intervals[min(int(sums.argmax()) + 1, count - 1)].first

    def with_event(self, kind: str) -> list[StepInterval]:
        """Returns the intervals with an event of a kind."""
        return [interval for interval in self.intervals if any(event.kind == kind for event in interval.events)]

    def timers(self, *names: str) -> list[RankTimes]:
        """Returns what timers of some names show in the intervals."""
        return [times for interval in self.intervals for times in interval.times if times.name in names]


def estimate_noise(seconds: Sequence[float] | np.ndarray) -> float:
    """Returns the standard deviation of steps by the differences of neighbours: neither pauses nor drift count in
    it."""
    if len(seconds) < 3:
        return 0.0
    differences = np.abs(np.diff(np.asarray(seconds)))
    return NORMAL * float(np.median(differences)) / 2**0.5


def measure_steps(log: TrainingLog, seconds_of: Callable[[Iteration], float], skip: int | None = None) -> StepTimes:
    """Returns the steps of a log.

    seconds_of: returns the seconds of an iteration. skip: lines to leave out; None: those until the steps settle.
    """
    intervals = _make_intervals(log, seconds_of)
    warm = _count_warm(intervals) if skip is None else min(skip, len(intervals) - 1)
    return StepTimes(log, tuple(intervals[:warm]), tuple(_with_levels(intervals[warm:])))


def _make_intervals(log: TrainingLog, seconds_of: Callable[[Iteration], float]) -> list[StepInterval]:
    numbers = [line.number for line in log.iterations]
    usual = round(statistics.median([b - a for a, b in pairwise(numbers) if b > a] or [1]))
    events: dict[int, list[LogEvent]] = {}
    times: dict[int, list[RankTimes]] = {}
    for event in log.events:
        events.setdefault(event.before, []).append(event)
    for timer in log.times:
        times.setdefault(timer.line, []).append(timer)
    intervals = []
    for index, line in enumerate(log.iterations):
        before = log.iterations[index - 1] if index else None
        continues = before is not None and line.number > before.number
        steps = line.number - before.number if before is not None and continues else min(line.number, usual)
        passed = _measure_time_between(before, line) if continues else None
        if line.samples_per_s is not None and line.moment is not None:
            # DeepSpeed's rate is of its last step alone: the clock on the wall knows all of them.
            if passed is None:
                continue
            seconds, outside, clocked = passed[0] / steps, 0.0, True
        elif line.seconds is None and line.tokens_per_s is None and line.samples_per_s is None:
            continue  # the first bar of a progress bar
        else:
            seconds, clocked = seconds_of(line), log.form == TrainerLog.name
            rest = passed[0] - steps * seconds if passed is not None else 0.0
            outside = rest if passed is not None and rest > 3 * passed[1] else 0.0
        intervals.append(
            StepInterval(
                line,
                max(steps, 1),
                seconds,
                outside,
                seconds,
                2 * line.resolution / max(steps, 1) if clocked else 0.0,
                tuple(events.get(index, ())),
                tuple(times.get(index, ())),
                tuple(times.get(index - 1, ())),
            )
        )
    return intervals


def _measure_time_between(before: Iteration | None, line: Iteration) -> tuple[float, float] | None:
    """Returns the seconds between two lines, and their resolution; None: the log does not say."""
    if before is None or before.moment is None or line.moment is None or line.moment <= before.moment:
        return None
    return line.moment - before.moment, max(before.resolution, line.resolution)


def _count_warm(intervals: Sequence[StepInterval]) -> int:
    """Returns the number of intervals at the begin that are longer than the later half of the log, at most half of
    all."""
    half = len(intervals) // 2
    later = [interval.seconds for interval in intervals[half:]]
    if half < 2:
        return 0
    settled = statistics.median(later)
    limit = settled + max(LONGER * estimate_noise(later), LEAST_LONGER * settled)
    return next((i for i in range(half) if intervals[i].seconds <= limit), half)


def _with_levels(intervals: Sequence[StepInterval]) -> list[StepInterval]:
    seconds = np.array([interval.seconds for interval in intervals])
    return [
        replace(interval, level=float(np.median(seconds[max(0, i - NEIGHBOURS) : i + NEIGHBOURS + 1])))
        for i, interval in enumerate(intervals)
    ]
