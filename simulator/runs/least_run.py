"""Lower bounds of the length of a job's simulated runs, from a lower bound of the step of its plan.

Run k of a job has the same random numbers whatever its plan, so it has the same failures at the same times. From a
failure on, no step runs for at least the time of a recovery. A run therefore ends no earlier than at the first time T
with

    T - (recoveries begun before T) >= steps x shortest step + pauses for checkpoints

Work that a failure destroys, slow episodes, evaluations and waits for repairs only make it longer. The bound grows with
the step, so a lower bound of the step gives a lower bound of the run.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.job.job import Job
from meshcast.simulator.runs.checkpoints import StateSize, interval_seconds, make_tiers, saved_bytes
from meshcast.simulator.runs.failures import Failure, FailureSource
from meshcast.simulator.runs.inputs import SEEDS, RunConditions, make_jitter, read_conditions
from meshcast.simulator.runs.training import spawn_streams

Figure = TypeVar("Figure", float, np.ndarray)

MAX_FAILURES = 20_000
"""Failures of a run that a bound counts; later ones are left out, which makes it looser."""

SLACK = 1e-9
"""Share by which a bound is lower than its formula: rounding of the sums of a simulated run."""


class LeastRun:
    """Lower bound of the mean length of all runs of a job.

    job: with any plan.
    equal_steps: whether replicas wait for each other after every step, whatever the plan; else the period of the data
        scheme is unknown, and steps count as if ranks did not vary against each other.
    Raises PlanError for a job whose runs have no number of steps, or whose checkpoints its cluster does not admit.
    """

    def __init__(self, job: Job, equal_steps: bool = True) -> None:
        run, conditions, self._job = job.run, read_conditions(job), job
        self.steps = count_steps(job)
        self.seeds = run.seeds or SEEDS
        jitter = make_jitter(job, 1)
        least = jitter.least_duration()
        # Means of several steps lie between a step and their mean, which is 1 or more.
        self._factor = least if equal_steps else min(least, 1.0)
        self._factor *= 1 + (
            conditions.recovery.redundancy_overhead if conditions.recovery.elastic == "redundant" else 0.0
        )
        self._mean = jitter.mean_duration() if equal_steps else min(jitter.mean_duration(), 1.0)
        self._set_pauses(conditions)
        # Nodes that are missing do not fail: of those that a run may go without, the first failure counts alone.
        self._may_miss = conditions.recovery.spares is not None or conditions.recovery.elastic != "none"
        entropy = [np.random.SeedSequence(run.seed or 0, spawn_key=(k,)) for k in range(self.seeds)]
        self._recoveries = [self._list_recoveries(conditions.sources, sequence) for sequence in entropy]
        self._next = [next(recoveries, None) for recoveries in self._recoveries]
        self._covered, self._known = -1.0, list[tuple[float, float]]()
        self._starts, self._down = [math.inf], [0.0]
        self.gpus = job.cluster.gpus + (conditions.recovery.spares or 0) * job.cluster.gpus_per_node

    def _set_pauses(self, conditions: RunConditions) -> None:
        """Reads pauses for checkpoints, and the shortest recovery."""
        keys, job = conditions.checkpoints, self._job
        trained = job.model.parameters if job.adapters is None else job.adapters.parameters(job.model)
        size = StateSize(float(trained) * saved_bytes(job, keys), 2)
        tiers = make_tiers(keys, size, conditions.store, job.cluster, conditions.mtbf, 1.0)
        keeps = conditions.recovery.elastic in ("templates", "reroute", "redundant", "quorum")
        restart = conditions.restart + min((tier.load for tier in tiers), default=0.0)
        self.recovery = conditions.detection + (min(restart, conditions.recovery.reconfigure_s) if keeps else restart)
        """Least time from a failure until a step runs again [s]."""
        self._stall, self._every, self.interval = 0.0, 1, math.inf
        if keys.kind in ("full", "sharded", "asynchronous"):
            # Where a failure loses no state, it may cut a pause short.
            self._stall = 0.0 if keeps else tiers[0].stall
            self._every = keys.every_steps or 0
            self.interval = interval_seconds(keys, tiers[0].stall, tiers[0].write, conditions.mtbf)
        if job.adapters is not None:  # how many of their states a checkpoint holds depends on the plan
            self._stall, self.recovery = (
                0.0,
                conditions.detection + min(conditions.restart, conditions.recovery.reconfigure_s),
            )

    def _list_recoveries(
        self, sources: Sequence[FailureSource], entropy: np.random.SeedSequence
    ) -> Iterator[tuple[float, float]]:
        """Yields of each failure of a run the least time that is spent otherwise before it, and that of recovery that
        it adds [s]."""
        streams = spawn_streams(entropy, len(sources))[2:]
        every = (source.failures(np.random.default_rng(rng)) for source, rng in zip(sources, streams, strict=True))
        failed, down, until, spent = set[int](), 0.0, -math.inf, 0.0
        failures: Iterator[Failure] = heapq.merge(*every, key=lambda failure: failure.time)
        for failure, _ in zip(failures, range(MAX_FAILURES), strict=False):
            known = bool(failure.nodes) and failed.issuperset(failure.nodes)
            failed.update(failure.nodes)
            if known and self._may_miss:
                yield (failure.time - down if failure.time >= until else spent), 0.0
                continue
            if failure.time >= until:
                spent, until = failure.time - down, failure.time
            added = failure.time + self.recovery - until
            down, until = down + added, until + added
            yield spent, added

    def _cover(self, need: float) -> None:
        """Lists all recoveries of runs that spend so much time otherwise [s]."""
        if need <= self._covered:
            return
        self._covered = 1.25 * need
        for k, recoveries in enumerate(self._recoveries):
            recovery = self._next[k]
            while recovery is not None and recovery[0] < self._covered:
                if recovery[1]:
                    self._known.append(recovery)
                recovery = next(recoveries, None)
            self._next[k] = recovery
        self._known.sort()
        self._starts = [spent for spent, _ in self._known]
        self._down = [0.0, *np.cumsum([added for _, added in self._known]).tolist()]

    def seconds(self, step: Figure) -> Figure:
        """Returns the least mean length of the runs of a plan [s]. step: lower bound of its step [s]; also an array."""
        if isinstance(step, np.ndarray):
            need = self.steps * step * self._factor + self._stall * self._count_checkpoints(step)
            finite = need[np.isfinite(need)]
            self._cover(float(finite.max(initial=0.0)))
            at = np.searchsorted(np.array(self._starts), need, side="left")
            return (need + np.array(self._down)[at] / self.seeds) * (1 - SLACK)
        alone = self.steps * step * self._factor + self._stall * float(self._count_checkpoints(np.array([step]))[0])
        if math.isfinite(alone):
            self._cover(alone)
        down = self._down[bisect.bisect_left(self._starts, alone)]
        return (alone + down / self.seeds) * (1 - SLACK)

    def _count_checkpoints(self, step: np.ndarray) -> np.ndarray:
        """Returns the least number of checkpoints for which training waits."""
        if not self._stall:
            return np.zeros(len(step))
        if self._every:
            return np.full(len(step), (self.steps - 1) // self._every)
        with np.errstate(divide="ignore"):
            return np.floor((self.steps - 1) / np.maximum(np.rint(self.interval / (step * self._mean)), 1))

    def cost(self, seconds: Figure) -> Figure:
        """Returns the price of runs of this length. Raises PlanError if the job states none."""
        price = self._job.run.price_per_gpu_hour
        if price is None:
            raise PlanError("run.price_per_gpu_hour", "the cost of a run needs a price", "State it, for example 2.5")
        return seconds / 3600 * self.gpus * price


def count_steps(job: Job) -> int:
    """Steps of a run. Raises PlanError where the job does not state them, or a time that ends it before."""
    run, batch = job.run, job.batch
    if run.days is not None:
        rule = "it ends a run whatever it has reached, so runs of different plans do not compare by their length"
        raise PlanError("run.days", rule, "Leave it out, and state run.tokens or run.steps", run.days)
    if run.steps is not None:
        return run.steps
    if run.tokens is None or not batch.total or not batch.sequence:
        rule = "the run has no length"
        raise PlanError("run", rule, "State run.tokens or run.steps, for example with --set run.tokens=1e12")
    return math.ceil(run.tokens / (batch.total * batch.sequence))
