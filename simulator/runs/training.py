"""One training run by discrete events: a SimPy process that trains, and processes that interrupt it.

Between two events whole spans of steps pass at once (`simulator.runs.span`). A failure ends a span at once: training
goes back to the latest checkpoint that the failure left, and the steps since then are lost. Slow episodes, pauses and
nodes that come back act from the end of the running step on. Failures happen at any time, also during recovery, which
then begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import simpy

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.runs.elastic import Elasticity
from meshcast.simulator.runs.failures import Failure, FailureSource
from meshcast.simulator.runs.span import CheckpointTier, Span, make_drawn_span, make_equal_span
from meshcast.simulator.runs.stragglers import Episodes, Jitter

SPAN = 4096
"""Most steps of a span whose durations are drawn together; of equal steps, most of those with a pause."""

MAX_STEPS = 2**40
"""Most steps of a span without pauses."""

MAX_EVENTS = 1_000_000
"""Most events of a run whose job states no number: half a minute on a core."""

MAX_SECONDS, MIN_GOODPUT = 3650 * 86_400.0, 0.01
"""Longest run of a job that states no limit [s], or the goodput that a longer run has at least."""

EVENTS_TOLD = 100
"""Events after which a run tells how far it is: some milliseconds, a tenth of a second of steps that vary."""

TIMES = (
    *("productive", "lost_work", "checkpoint", "restart", "detection", "straggling", "waiting_for_spares"),
    *("evaluation", "data_stalls", "elasticity"),
)
"""Where the time of a run goes; they add up to its duration."""


@dataclass(frozen=True)
class RunSetting:
    """All figures that a simulated run depends on.

    steps: its length; None if `horizon` alone ends it.
    horizon: time after which it ends [s].
    elasticity: durations of steps, and what happens while nodes are missing.
    tiers: checkpoints, those that load fastest first.
    detection: from a failure until it is known [s].
    restart: until training goes on, without loading a checkpoint [s].
    spares: nodes that wait; None: as many as are needed.
    repair: mean time until a lost node is back [s].
    evaluation: steps between two evaluations, and the duration of an evaluation [s].
    most_events: events after which a run that has not ended is given up.
    most_seconds: time after which it is [s]; None: see `limit_s`.
    """

    elasticity: Elasticity
    steps: int | None
    horizon: float = math.inf
    jitter: Jitter = field(default_factory=Jitter)
    episodes: tuple[Episodes, ...] = ()
    sources: tuple[FailureSource, ...] = ()
    tiers: tuple[CheckpointTier, ...] = ()
    detection: float = 0.0
    restart: float = 0.0
    spares: int | None = None
    repair: float = 86_400.0
    evaluation: tuple[int, float] | None = None
    most_events: int = MAX_EVENTS
    most_seconds: float | None = None

    @property
    def step_s(self) -> float:
        """Duration of a step as forecast [s]."""
        return self.elasticity.step_s[0]

    @property
    def quiet_s(self) -> float:
        """Mean duration of a run without failures and slow episodes [s]; infinity if `horizon` alone ends it."""
        if self.steps is None:
            return math.inf
        pauses = sum((self.steps - 1) // tier.every * tier.stall for tier in self.tiers if tier.every)
        if self.evaluation is not None:
            pauses += (self.steps - 1) // self.evaluation[0] * self.evaluation[1]
        return self.steps * self.step_s * self.jitter.mean_duration() + pauses

    @property
    def limit_s(self) -> float:
        """Time after which a run that has not ended is given up [s]; infinity for a run that `horizon` ends."""
        if self.horizon < math.inf:
            return math.inf
        return max(MAX_SECONDS, self.quiet_s / MIN_GOODPUT) if self.most_seconds is None else self.most_seconds


class Snapshot(NamedTuple):
    """A state of training: steps done, and what they took beyond the forecast, for stragglers and for missing nodes."""

    done: int = 0
    straggling: float = 0.0
    elasticity: float = 0.0


@dataclass(frozen=True)
class SimulatedRun:
    """How a run went.

    time_s: by `TIMES`.
    failures: by component.
    steps: that it has done.
    """

    time_s: dict[str, float]
    failures: dict[str, int]
    steps: int

    @property
    def seconds(self) -> float:
        """Its duration [s]."""
        return math.fsum(self.time_s.values())


class _Saved:
    """Checkpoints of a tier: the latest that can be used, and those that are still being written.

    since: when the latest was taken, that may still be being written.
    """

    def __init__(self, tier: CheckpointTier) -> None:
        self.tier, self.latest, self.since = tier, Snapshot(), -math.inf
        self._writing: list[tuple[float, Snapshot]] = []

    def add(self, taken: list[tuple[float, Snapshot]], now: float) -> None:
        """Adds checkpoints, each with the time at which it was taken; those that are written by now can be used."""
        if taken:
            self.since = taken[-1][0]
        self._writing += [(time + self.tier.write, state) for time, state in taken]
        usable = [state for time, state in self._writing if time <= now + 1e-9]
        self._writing = self._writing[len(usable) :]
        self.latest = usable[-1] if usable else self.latest

    def reset(self, state: Snapshot | None) -> None:
        """Drops what is being written; a state becomes the latest checkpoint."""
        self._writing.clear()
        self.latest, self.since = state or self.latest, -math.inf


Waiting = Generator[Any, Any, Failure | None]
"""A part of the process that returns the failure which cut it short."""


class _Pace(NamedTuple):
    """An event that acts from the end of the running step on.

    pause: to stop for [s].
    data: to wait for data.
    """

    pause: float = 0.0
    data: bool = False


class TrainingProcess:
    """The process of a run, and what it has done so far."""

    def __init__(self, setting: RunSetting, entropy: np.random.SeedSequence) -> None:
        self.setting, self.env = setting, simpy.Environment()
        jitter, repair, *others = spawn_streams(entropy, len(setting.sources) + len(setting.episodes))
        self._jitter, self._repairs = np.random.default_rng(jitter), np.random.default_rng(repair)
        self.times = dict.fromkeys(TIMES, 0.0)
        self.failures: dict[str, int] = {}
        self.state = Snapshot()
        self._saved = [_Saved(tier) for tier in setting.tiers]
        self._missing: set[int] = set()
        self._starting: set[int] = set()
        self._healed: set[int] = set()
        self._spares = setting.spares or 0
        self._slowdowns: list[float] = []
        self._pauses: list[_Pace] = []
        self._ended = self._arrived = False
        self._process = self.env.process(self._train())
        streams = iter(np.random.default_rng(sequence) for sequence in others)
        for source in setting.sources:
            self.env.process(self._fail(source, next(streams)))
        for episodes in setting.episodes:
            self.env.process(self._slow_down(episodes, next(streams)))
        if setting.horizon < math.inf:
            self.env.process(self._end())

    def run(self, tell: Callable[[float], None] = lambda share: None) -> SimulatedRun:
        """Runs to the end. tell: called now and then with the share of the run that is done.

        Raises PlanError for a run that has not ended after the events, or the time, of its setting.
        """
        env, setting, limit = self.env, self.setting, self.setting.limit_s
        for number in range(setting.most_events):
            if env.peek() > limit:
                raise self._give_up("most_days", f"{limit / 86_400:,.6g} days")
            env.step()
            if self._process.processed:
                break
            if number % EVENTS_TOLD == 0:
                tell(self._share)
        else:
            raise self._give_up("most_events", f"{setting.most_events:,} events")
        state, step = self.state, self.setting.step_s
        self.times["productive"] = state.done * step
        self.times["straggling"] += state.straggling
        self.times["elasticity"] += state.elasticity
        return SimulatedRun(self.times, self.failures, state.done)

    @property
    def _share(self) -> float:
        """Share of the run that is done."""
        steps, horizon = self.setting.steps, self.setting.horizon
        return max(self.env.now / horizon, self.state.done / steps if steps is not None else 0.0)

    def _give_up(self, key: str, limit: str) -> PlanError:
        """Returns the error for a run that has not ended. key: of `run` that states the limit."""
        steps = "" if self.setting.steps is None else f" of {self.setting.steps:,}"
        reached = f"{self.state.done:,}{steps} steps are done after {self.env.now / 86_400:,.4g} days"
        rule = f"a simulated run has not ended after {limit}: {reached} with {sum(self.failures.values()):,} failures"
        remedy = "Save more often, state fewer failures and slow episodes, end it by run.days, or raise this limit"
        return PlanError(f"run.{key}", rule, remedy)

    # ------------------------------------------------------------------------------------ training

    @property
    def _finished(self) -> bool:
        return self._ended or self.state.done == self.setting.steps

    def _train(self) -> Generator[Any, Any, None]:
        while not self._finished:
            # What has happened during a recovery acts before the next step.
            failure = None if self._pauses or self._arrived else (yield from self._advance())
            while self._pauses and failure is None and not self._finished:
                pace = self._pauses.pop()
                failure = yield from self._spend("data_stalls" if pace.data else "straggling", pace.pause)
            if self._arrived and failure is None and not self._finished:
                failure = yield from self._rejoin()
            if failure is not None:
                yield from self._recover(failure)

    def _advance(self) -> Waiting:
        span, began = self._plan_span(), self.env.now
        while True:
            try:
                yield self.env.timeout(max(began + span.total - self.env.now, 0.0))
                self._book(span, began, math.inf)
                return None
            except simpy.Interrupt as stop:
                if isinstance(stop.cause, Failure):
                    self._book(span, began, self.env.now - began)
                    return stop.cause
                self._note(stop.cause)
                span = span.end_at(self.env.now - began)

    def _plan_span(self) -> Span:
        setting, done = self.setting, self.state.done
        left = math.inf if setting.steps is None else setting.steps - done
        base = setting.elasticity.step_seconds(self._missing)
        step = base * max(self._slowdowns, default=1.0)
        since = tuple(self.env.now - saved.since for saved in self._saved)
        if setting.jitter.sigma == 0.0 and step > 0.0:
            # Equal steps are as good in a span as in several, so it need not reach beyond the next event.
            quiet = (self.env.peek() - self.env.now) / step + 1
            count = math.ceil(min(left, quiet, SPAN * self._least_interval))
            return make_equal_span(base, step, count, done, setting.steps, setting.tiers, since, setting.evaluation)
        steps = setting.jitter.draw(self._jitter, int(min(SPAN, left))) * step
        return make_drawn_span(base, steps, done, setting.steps, setting.tiers, since, setting.evaluation)

    @cached_property
    def _least_interval(self) -> int:
        """Least number of steps between two pauses; infinite without any, but not more than a span may count."""
        every = [tier.every for tier in self.setting.tiers if tier.every]
        return min([*every, *([self.setting.evaluation[0]] if self.setting.evaluation else []), MAX_STEPS // SPAN])

    def _book(self, span: Span, began: float, elapsed: float) -> None:
        """Books the steps and pauses of a span that passed in `elapsed` seconds; infinity: all of them."""
        done, complete = span.count_steps(elapsed)
        checkpoint, evaluation = span.sum_pauses(complete)
        self.times["checkpoint"] += checkpoint
        self.times["evaluation"] += evaluation
        if done > complete:
            inside = elapsed - span.end_of_step(complete)
            saving = min(inside, span.checkpoint_after(complete))
            self.times["checkpoint"] += saving
            self.times["evaluation"] += inside - saving
        elif complete < span.count:
            self.times["lost_work"] += elapsed - (span.end_of_pauses(complete - 1) if complete else 0.0)
        before, beyond = self.state, span.base - self.setting.step_s

        def reach(steps: int) -> Snapshot:
            straggling = before.straggling + span.beyond_base(steps)
            return Snapshot(before.done + steps, straggling, before.elasticity + steps * beyond)

        for tier, (saved, at) in enumerate(zip(self._saved, span.taken, strict=True)):
            moments = began + span.checkpoint_ends(tier)
            taken = _latest(at, moments, self.env.now, saved.tier.write)
            saved.add([(time, reach(i + 1)) for i, time in taken], self.env.now)
        if done:
            self.state = reach(done)

    def _spend(self, name: str, seconds: float) -> Waiting:
        """Lets time pass that is booked under a name."""
        began = self.env.now
        while True:
            try:
                yield self.env.timeout(max(began + seconds - self.env.now, 0.0))
                self.times[name] += seconds
                return None
            except simpy.Interrupt as stop:
                if isinstance(stop.cause, Failure):
                    self.times[name] += self.env.now - began
                    return stop.cause
                self._note(stop.cause)

    def _note(self, cause: Any) -> None:
        """Notes an event that acts later."""
        if isinstance(cause, _Pace) and cause.pause:
            self._pauses.append(cause)

    # ------------------------------------------------------------------------------------ recovery

    def _recover(self, first: Failure) -> Generator[Any, Any, None]:
        """Goes on after a failure, and after those that happen meanwhile."""
        failure: Failure | None = first
        setting, load, restarts = self.setting, 0.0, False
        while failure is not None:
            self.failures[failure.component] = self.failures.get(failure.component, 0) + 1
            self._lose(failure)
            save = 0.0
            if not setting.elasticity.keeps_work(self._missing, failure.nodes):  # more than the running step is lost
                saved = self._restore(failure)
                restarts = True
                load = max(load, saved.tier.load if saved else 0.0)
                save = saved.tier.stall if saved and not saved.tier.every else 0.0
            failure = yield from self._spend("detection", setting.detection)
            if failure is None and save:
                failure = yield from self._spend("checkpoint", save)
            if failure is None:
                failure = yield from self._await_nodes()
            if failure is None and not self._ended:
                pause = setting.restart + load if restarts else setting.elasticity.reconfigure
                failure = yield from self._spend("restart", pause)
            if self._ended:  # a recovery that begins anew for ever ends with the run
                return

    def _lose(self, failure: Failure) -> None:
        if self.setting.spares is None and self.setting.elasticity.policy == "none":
            return
        for node in failure.nodes:
            self._missing.add(node)
            self.env.process(self._repair(failure))

    def _restore(self, failure: Failure) -> _Saved | None:
        """Goes back to the latest checkpoint that a failure has left, or to the beginning."""
        left = [saved for saved in self._saved if saved.tier.survives >= len(failure.nodes)]
        for saved in left:
            if not saved.tier.every:  # healthy replicas save the state of the last complete step
                saved.latest = self.state
        restored = max(left, key=lambda saved: saved.latest.done, default=None)
        state, now, step = restored.latest if restored else Snapshot(), self.state, self.setting.step_s
        lost = now.straggling - state.straggling + now.elasticity - state.elasticity
        self.times["lost_work"] += (now.done - state.done) * step + lost
        self.state = state
        in_time = restored is not None and not restored.tier.every
        for saved in self._saved:
            ahead = (
                saved.latest.done > state.done
                or in_time
                or (restored is not None and saved.tier.load < restored.tier.load)
            )
            saved.reset(state if ahead else None)
        return restored

    def _await_nodes(self) -> Waiting:
        """Takes spare nodes; waits for repairs if the run cannot go on without them."""
        self._take_spares()
        while self._missing and not self.setting.elasticity.goes_on(self._missing) and not self._ended:
            began = self.env.now
            try:
                yield self.env.timeout(math.inf)
            except simpy.Interrupt as stop:
                self.times["waiting_for_spares"] += self.env.now - began
                if isinstance(stop.cause, Failure):
                    return stop.cause
                self._note(stop.cause)
            self._take_spares()
        return None

    def _take_spares(self) -> None:
        self._arrived = False
        if self.setting.elasticity.rejoin:
            self._start_spares()
            return
        if self.setting.spares is None:
            self._missing.clear()
        for node in sorted(self._missing)[: self._spares]:
            self._missing.remove(node)
            self._spares -= 1

    def _start_spares(self) -> None:
        """Takes nodes into the run whose replicas have the states, and starts processes on other nodes."""
        self._missing -= self._healed
        self._starting -= self._healed
        self._healed.clear()
        waiting = sorted(self._missing - self._starting)
        for node in waiting if self.setting.spares is None else waiting[: self._spares]:
            self._spares -= self.setting.spares is not None
            self._starting.add(node)
            self.env.process(self._heal(node))

    def _heal(self, node: int) -> Generator[simpy.Event, object, None]:
        yield self.env.timeout(self.setting.elasticity.rejoin)
        self._healed.add(node)
        self._arrived = True
        self._interrupt(_Pace())

    def _rejoin(self) -> Waiting:
        """Takes nodes that have come back into the run."""
        setting, policy = self.setting, self.setting.elasticity
        before = set(self._missing)
        self._take_spares()
        if policy.policy == "redundant" and policy.step_seconds(before) == policy.step_seconds(self._missing):
            return None  # they wait beside the pipelines
        if policy.rejoin and before == self._missing:
            return None  # their processes start beside the others
        if policy.policy not in ("none", "fewer-replicas"):
            return (yield from self._spend("restart", policy.reconfigure))
        regular = [saved for saved in self._saved if saved.tier.every]
        for saved in regular[:1]:
            failure = yield from self._spend("checkpoint", saved.tier.stall + saved.tier.write)
            if failure is not None:
                return failure
            saved.reset(self.state)
        load = regular[0].tier.load if regular else 0.0
        return (yield from self._spend("restart", setting.restart + load))

    # -------------------------------------------------------------------- processes that interrupt

    def _interrupt(self, cause: Any) -> None:
        if self._process.is_alive:
            self._process.interrupt(cause)

    def _fail(self, source: FailureSource, rng: np.random.Generator) -> Generator[Any, Any, None]:
        for failure in source.failures(rng):
            yield self.env.timeout(max(failure.time - self.env.now, 0.0))
            nodes = failure.nodes
            if failure.any_of and not self._missing.isdisjoint(nodes):
                places = ((nodes[0] + i) % failure.any_of for i in range(failure.any_of))
                nodes = tuple(islice((place for place in places if place not in self._missing), len(nodes)))
            active = tuple(node for node in nodes if node not in self._missing)
            if active or not failure.nodes:
                self._interrupt(failure._replace(nodes=active))

    def _slow_down(self, episodes: Episodes, rng: np.random.Generator) -> Generator[Any, Any, None]:
        while True:
            yield self.env.timeout(float(rng.exponential(episodes.every)))
            self.env.process(self._pass_episode(episodes, episodes.draw_pause(rng), float(rng.exponential())))

    def _pass_episode(self, episodes: Episodes, pause: float, share: float) -> Generator[Any, Any, None]:
        if episodes.slowdown > 1:
            self._slowdowns.append(episodes.slowdown)
        self._interrupt(_Pace(pause, episodes.data))
        if episodes.slowdown > 1:
            yield self.env.timeout(share * episodes.seconds)
            self._slowdowns.remove(episodes.slowdown)
            self._interrupt(_Pace())

    def _repair(self, failure: Failure) -> Generator[Any, Any, None]:
        drawn = float(self._repairs.exponential(self.setting.repair))
        yield self.env.timeout(drawn if failure.repair is None else failure.repair)
        self._spares += 1
        if self._missing:
            self._arrived = True
            self._interrupt(_Pace())

    def _end(self) -> Generator[Any, Any, None]:
        yield self.env.timeout(self.setting.horizon)
        self._ended = True
        self._interrupt(_Pace())


def _latest(at: np.ndarray, moments: np.ndarray, now: float, write: float) -> list[tuple[int, float]]:
    """Checkpoints that were taken, as (step of the span, time): the latest that is written, and those after it."""
    taken = int(np.searchsorted(moments, now + 1e-9, side="right"))
    written = int(np.searchsorted(moments + write, now + 1e-9, side="right"))
    return [(int(at[i]), float(moments[i])) for i in range(max(written - 1, 0), taken)]


def spawn_streams(entropy: np.random.SeedSequence, count: int) -> list[np.random.SeedSequence]:
    """Returns the random numbers of a run: of its jitter, its repairs, and each of its sources of failures, then of
    episodes."""
    return entropy.spawn(2 + count)


def simulate_run(
    setting: RunSetting, seed: int, number: int, tell: Callable[[float], None] = lambda share: None
) -> SimulatedRun:
    """Simulates run `number`, counted from 0, of those with this seed: the same whoever simulates it, in any order.

    tell: called now and then with the share of the run that is done. Raises PlanError if it does not end.
    """
    return TrainingProcess(setting, np.random.SeedSequence(seed, spawn_key=(number,))).run(tell)
