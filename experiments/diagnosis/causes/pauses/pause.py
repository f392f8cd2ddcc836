"""What all pauses have: an event in the log, or a period that is a setting of the launch file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from meshcast.experiments.diagnosis.detector import Cause, Detector
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.steps import StepInterval, StepTimes
from meshcast.simulator.formats.logs.training_log import COLLECTION, EVALUATION, SAVE
from meshcast.simulator.report.formatting import format_seconds

AGREES = 0.8
"""Share of the steps at a period that are longer, so that the period is that of the pauses."""

LEAST_TIMES = 2
"""Pauses at a period at least: one step may be long by chance at any number."""

SHOWN = 4
"""Steps that evidence lists."""


class Pause(Detector):
    """A pause of a kind of event.

    Attributes:
        event: kind of its event in logs.
        settings: names of the settings of launch files that state its period in steps.
        timers: names of timers in logs that measure it.
    """

    event: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    timers: ClassVar[tuple[str, ...]] = ()
    pauses = True

    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields the pause where it takes enough of the mean step."""
        steps = run.steps
        if steps is None:
            return
        logged = steps.with_event(self.event)
        period, where = self.find_period(run)
        seconds, words = 0.0, ""
        if logged:
            seconds = sum(self._measure(steps, interval) for interval in logged)
            words = f"the log tells of {len(logged)}, {format_seconds(seconds / len(logged))} each"
        elif period and (at := find_periodic(steps, period)):
            seconds = sum(interval.excess for interval in at)
            words = f"{len(at)} steps are {format_seconds(seconds / len(at))} longer, each {period}th ({where})"
            logged = at
        if seconds / steps.steps >= run.least:
            yield self.make(run, seconds / steps.steps, f"{words}: {list_steps(logged)}", *self._compare(run, period))

    def find_period(self, run: RunEvidence) -> tuple[int, str]:
        """Returns the period in steps that the launch file states, and where; 0: it states none."""
        return run.find_period(*self.settings)

    def _compare(self, run: RunEvidence, period: int) -> Iterable[str]:
        """Yields further evidence."""
        return ()

    def _measure(self, steps: StepTimes, interval: StepInterval) -> float:
        """Returns the seconds of the events of an interval: as stated, or the time beyond usual steps that no other
        event states."""
        events = [event for event in interval.events if event.kind == self.event]
        stated = [event.seconds for event in events if event.seconds is not None]
        timed = [times.most for times in interval.times_since if times.name in self.timers]
        if stated or timed:
            return sum(stated) or max(timed)
        if not steps.is_pause(interval):
            return 0.0
        others = [event.seconds or 0.0 for event in interval.events if event.kind != self.event]
        unstated = {event.kind for event in interval.events if event.seconds is None}
        return max(interval.excess - sum(others), 0.0) / len(unstated)


def find_periodic(steps: StepTimes, period: int) -> list[StepInterval]:
    """Returns the pauses at the multiples of a period of which the log says nothing else; none where these steps are no
    longer than others, or all are."""
    silent = [i for i in steps.intervals if not {event.kind for event in i.events} & {SAVE, EVALUATION, COLLECTION}]
    at = [interval for interval in silent if interval.covers(period) and interval.first > 1]
    longer = [interval for interval in at if steps.is_pause(interval)]
    if len(at) > len(steps.intervals) / 2 or len(longer) < max(
        LEAST_TIMES, AGREES * len({i.line.number // period for i in at})
    ):
        return []
    return longer


def list_steps(intervals: Sequence[StepInterval]) -> str:
    """Returns the numbers of steps in words, of many the first ones."""
    numbers = [interval.line.number for interval in intervals]
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"step{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:SHOWN]))}{more}"
