"""How long a run is expected to take, and through how many failures, before it is simulated.

Between two failures a run recovers (R), and then trains from a checkpoint to the next (t, pauses included); each can
be used once it is written (w). Of a time G between two failures it keeps floor((G - R - w) / t) such segments, so n of
them take n / E[floor((G - R - w) / t)] failures (renewal reward). With exponential times of mean M that is

    failures = n exp((R + w) / M) (exp(t / M) - 1)        duration = M x failures

which is Daly's formula for w = 0 (`expected_slowdown`). Of Weibull times and of logs the failures are drawn, and the
same expectation is taken over them. Where some checkpoints do not survive failures of many nodes, these failures alone
have to leave room for those that do; the longest of these durations counts.

Without enough spare nodes, a share of the failures waits for a repair: that which finds all m nodes in repair that may
be missing (Erlang's loss formula), for the mean time in which their number falls from m + 1 to m (a birth-death
process). Slow episodes make a run longer, and are left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from typing import NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.runs.failures import FailingUnits, FailureLog, FailureSource
from meshcast.simulator.runs.span import CheckpointTier
from meshcast.simulator.runs.training import SPAN, RunSetting, spawn_streams

DRAWN = 4_000
"""Failures that are drawn where their times are not exponentially distributed."""

EVENTS_EACH = 3
"""Events of a failure or a slow episode at least: that it comes, interrupts training, and ends."""


@dataclass(frozen=True)
class FailureGaps:
    """Times between failures.

    mean: mean time [s].
    drawn: in their order [s]; None: they are exponentially distributed.
    units: parts that fail, each of which begins anew with its failure; () beside a log.
    """

    mean: float
    drawn: np.ndarray | None = None
    units: tuple[FailingUnits, ...] = ()

    def pass_failures(self, count: float) -> float:
        """Returns the time until so many have happened [s]."""
        if self.drawn is not None and count < len(self.drawn):
            return float(self.drawn[: int(count)].sum())
        return count * self.mean if count else 0.0

    def count_within(self, seconds: float) -> float:
        """Counts the failures in a time from the beginning on."""
        if self.drawn is not None and (count := int(np.searchsorted(np.cumsum(self.drawn), seconds))) < len(self.drawn):
            return float(count)
        return seconds / self.mean

    def survive(self, seconds: float) -> float:
        """Returns the share of the failures, at least, after which so much time passes without another where none of
        the drawn failures left as much: as if they were exponentially distributed, or as the part that failed allows by
        itself."""
        alone = max((unit.survive(seconds) for unit in self.units), default=1.0)
        drawn = 1.0 if self.drawn is None else 1 / len(self.drawn)
        return min(math.exp(-seconds / self.mean), alone, drawn)


class Attempt(NamedTuple):
    """What has to pass without a failure before a run gets on.

    recovery: from a failure until steps run again [s].
    segment: from a checkpoint to the next [s].
    write: until it can be used [s].
    segments: their number.
    """

    recovery: float
    segment: float
    write: float = 0.0
    segments: float = 1.0

    @property
    def need(self) -> float:
        """Time without a failure from any of them to the next checkpoint [s]."""
        return self.recovery + self.segment + self.write

    def expect_failures(self, gaps: FailureGaps) -> float:
        """Returns the expected number of failures until all segments are done."""
        if gaps.drawn is None:
            again, passed = self.recovery + self.write, math.exp(-self.segment / gaps.mean)
            if passed == 1:
                return 0.0
            kept = math.exp(-again / gaps.mean) * passed / -math.expm1(-self.segment / gaps.mean)
            return self.segments / kept if kept else math.inf
        room = np.maximum(gaps.drawn - self.write - self.recovery, 0.0)
        room[0] = max(gaps.drawn[0] - self.write, 0.0)  # nothing has failed before
        done = np.cumsum(np.floor(room / self.segment))
        if done[-1] >= self.segments:
            return float(np.searchsorted(done, self.segments))
        share = float(done[-1]) / len(done) if done[-1] else gaps.survive(self.need)
        return self.segments / share if share else math.inf


class FailureTimes:
    """When a run's failures happen, as far as it is known before: their rates, or times that are drawn."""

    def __init__(self, sources: Sequence[FailureSource]) -> None:
        self._units = tuple(source for source in sources if isinstance(source, FailingUnits))
        logs = [source for source in sources if isinstance(source, FailureLog)]
        self._drawn = bool(logs) or any(unit.shape != 1.0 for unit in self._units)
        self._times, self._lost, self._ended, self._logged = np.zeros(0), np.zeros(0, int), False, bool(logs)
        if self._drawn:
            streams = spawn_streams(np.random.SeedSequence(0), len(self._units))[2:]
            every = [_draw(unit, np.random.default_rng(rng)) for unit, rng in zip(self._units, streams, strict=True)]
            every += [((failure.time, len(failure.nodes)) for failure in log.entries) for log in logs]
            most = DRAWN + sum(len(log.entries) for log in logs)
            failures = [*islice(heapq.merge(*every), most)]
            self._times = np.array([time for time, _ in failures], float)
            self._lost = np.array([lost for _, lost in failures], int)
            self._ended = len(failures) < most

    def stretch(self, factor: float) -> FailureTimes:
        """Returns the same failures, so many times as rare."""
        rarer = copy(self)
        rarer._units = tuple(unit._replace(mtbf=unit.mtbf * factor) for unit in self._units)
        rarer._times = self._times * factor
        return rarer

    def list_losses(self) -> list[int]:
        """Lists the numbers of nodes that single failures take."""
        return sorted({*(unit.lost for unit in self._units), *self._lost.tolist()})

    def gaps(self, least: int = 0, most: float = math.inf) -> FailureGaps:
        """Returns the times between failures that take so many nodes."""
        units = tuple(unit for unit in self._units if least <= unit.lost <= most)
        if not self._drawn:
            rate = sum(unit.rate for unit in units)
            return FailureGaps(1 / rate if rate else math.inf)
        gaps = np.diff(self._times[(self._lost >= least) & (self._lost <= most)], prepend=0.0)
        if not len(gaps):
            return FailureGaps(math.inf)
        mean, drawn = float(gaps.mean()), np.append(gaps, math.inf) if self._ended else gaps
        return FailureGaps(mean, drawn, () if self._logged else units)


def _draw(unit: FailingUnits, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
    """Draws the times of failures [s], each with the number of its nodes."""
    return ((time, unit.lost) for time, _ in unit.times(rng))


@dataclass(frozen=True)
class ExpectedRun:
    """What is expected of a run, at least.

    seconds: its duration [s].
    events: of its simulation.
    attempt: what is hardest to pass, between failures with the mean time `mtbf` [s].
    attempts: for each of its segments.
    waiting: part of the duration in which the run waits for repairs [s].
    """

    seconds: float
    events: float
    attempt: Attempt
    mtbf: float
    attempts: float
    waiting: float

    def ends(self, setting: RunSetting) -> bool:
        """Returns whether a run of this setting ends before it is given up."""
        return self.seconds <= setting.limit_s and self.events <= setting.most_events


def expect_run(setting: RunSetting, times: FailureTimes | None = None) -> ExpectedRun:
    """Returns what is expected of a run. times: of its failures, where they are known."""
    times = times or FailureTimes(setting.sources)
    attempt, mtbf, seconds, attempts = Attempt(0.0, setting.quiet_s), math.inf, setting.quiet_s, 1.0
    for gaps, hardest in _list_attempts(setting, times) if setting.steps is not None else ():
        count = hardest.expect_failures(gaps)
        duration = math.inf if math.isinf(count) else gaps.pass_failures(count)
        if duration > seconds:
            attempt, mtbf, seconds, attempts = hardest, gaps.mean, duration, count / hardest.segments + 1
    losing, waiting = times.gaps(1), 0.0
    quiet = min(seconds, setting.horizon)
    if losing.mean < math.inf and quiet < math.inf:
        count = losing.count_within(quiet)
        if late := max(count - count_replaceable(setting), 0.0):
            waiting = late * expect_wait(setting, min(count / quiet, 1 / losing.mean))
    working = 1 - measure_pauses(setting)
    seconds = (seconds + waiting) / working if working > 0 else math.inf
    passed = min(seconds, setting.horizon)
    events = EVENTS_EACH * times.gaps().count_within(passed)
    events += EVENTS_EACH * sum(passed / episodes.every for episodes in setting.episodes)
    if setting.steps is not None and setting.jitter.sigma:
        events += setting.steps / SPAN
    return ExpectedRun(passed, events, attempt, mtbf, attempts, waiting)


def measure_pauses(setting: RunSetting) -> float:
    """Returns the share of the time for which slow episodes and data stop a run; 1 or more: it never goes on."""
    return sum(episodes.pause / episodes.every for episodes in setting.episodes)


def _list_attempts(setting: RunSetting, times: FailureTimes) -> Iterator[tuple[FailureGaps, Attempt]]:
    """Yields what has to pass between all failures, and between those of so many nodes that some checkpoints do not
    survive."""
    if setting.elasticity.policy in ("none", "fewer-replicas"):
        for least in times.list_losses():
            left = [tier for tier in setting.tiers if tier.survives >= least]
            yield _find_easiest(setting, left, times.gaps(least))
        return
    # Only those that take no node lead back to a checkpoint whatever is missing.
    yield _find_easiest(setting, setting.tiers, times.gaps(0, 0))
    gaps, pause = times.gaps(), min(setting.elasticity.reconfigure, setting.restart)
    yield gaps, Attempt(setting.detection + pause, _certain_step(setting, gaps), 0.0, setting.steps or 0)


def _find_easiest(
    setting: RunSetting, tiers: Sequence[CheckpointTier], gaps: FailureGaps
) -> tuple[FailureGaps, Attempt]:
    """Returns the attempt with the fewest failures among checkpoints that survive them."""
    steps = setting.steps or 0
    step, recovery = _certain_step(setting, gaps), setting.detection + setting.restart
    every, seconds = setting.evaluation or (1, 0.0)
    each = step + seconds / every
    attempts = []
    for tier in tiers:
        if not tier.every:
            attempts.append(Attempt(recovery + tier.stall + tier.load, step, 0.0, steps))
        elif tier.every < steps:
            segment = max(tier.every * each, tier.write) + tier.stall
            attempts.append(Attempt(recovery + tier.load, segment, tier.write, steps / tier.every))
    attempts = attempts or [Attempt(recovery, steps * each)]
    return gaps, min(attempts, key=lambda attempt: attempt.expect_failures(gaps))


def _certain_step(setting: RunSetting, gaps: FailureGaps) -> float:
    """Returns the duration of equal steps that pass without a failure as often as those that vary [s]."""
    if math.isinf(gaps.mean) or setting.jitter.sigma == 0.0:
        return setting.step_s * setting.jitter.mean_duration()
    return setting.step_s * setting.jitter.certain_duration(setting.step_s / gaps.mean)


def count_replaceable(setting: RunSetting) -> float:
    """Counts the nodes that may be in repair while the run goes on."""
    return math.inf if setting.spares is None else setting.spares + int(setting.elasticity.most_nodes)


def expect_wait(setting: RunSetting, losing: float) -> float:
    """Returns the mean time for which a run waits for repairs when it loses nodes [s]. losing: how often it does [1 /
    s]."""
    units = [source for source in setting.sources if isinstance(source, FailingUnits) and source.lost]
    if setting.spares is None or not units:
        return 0.0
    nodes = max(unit.nodes for unit in units)
    rate = losing * sum(unit.rate * unit.lost for unit in units) / sum(unit.rate for unit in units)
    load, most = rate * setting.repair, int(count_replaceable(setting))
    blocked = 1.0  # share of failures that find so many nodes in repair
    for count in range(1, most + 1):
        blocked = load * blocked / (count + load * blocked)
    fall = 0.0  # mean time until a node fewer is in repair [s]
    for count in range(min(nodes + setting.spares, most + 1_000 + int(min(4 * load, 1e6))), most, -1):
        active = max(nodes - max(count - setting.spares, 0), 0) / nodes
        fall = setting.repair / count * (1 + rate * active * fall)
    return blocked * fall
