"""A span: consecutive steps with the pauses after them, whose times are known before they pass.

Nothing else happens within it, unless an event cuts it short: so many steps cost a single event. Steps that vary have
    each
another duration (`DrawnSpan`); of equal ones only those are listed that have a pause after them (`EqualSpan`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from meshcast.hardware.records import dataclass


@dataclass(frozen=True)
class CheckpointTier:
    """Checkpoints of a kind and place.

    every: steps between two of them; 0: they are taken when a failure has happened.
    stall: time for which training waits [s].
    write: time from then on until the checkpoint can be used [s]; the next waits for it.
    load: time to load it after a failure [s].
    survives: most nodes that may be lost at once without losing it.
    """

    every: int
    stall: float = 0.0
    write: float = 0.0
    load: float = 0.0
    survives: float = float("inf")


class Span(Protocol):
    """Successive steps, from a moment on.

    base: duration of a step without stragglers [s].
    taken: of every tier the steps, by their index, after which it takes a checkpoint.
    """

    @property
    def base(self) -> float: ...

    @property
    def taken(self) -> tuple[np.ndarray, ...]: ...

    @property
    def count(self) -> int:
        """Number of steps."""

    @property
    def total(self) -> float:
        """Duration [s]."""

    def end_at(self, elapsed: float) -> Span:
        """Returns the span up to the end of the step, or of the pauses, in which it is after so many seconds."""

    def count_steps(self, elapsed: float) -> tuple[int, int]:
        """Steps that are done after so many seconds, and those whose pauses have ended, too."""

    def sum_pauses(self, count: int) -> tuple[float, float]:
        """Pauses after the first `count` steps: for checkpoints, and for evaluations [s]."""

    def end_of_step(self, step: int) -> float:
        """Returns the time from the beginning of the span to the end of a step, by its index [s]."""

    def end_of_pauses(self, step: int) -> float:
        """Returns the time from the beginning of the span to the end of the pauses after a step [s]."""

    def checkpoint_after(self, step: int) -> float:
        """Returns the pause for checkpoints after a step [s]."""

    def beyond_base(self, count: int) -> float:
        """Returns what the first `count` steps take beyond steps without stragglers [s]."""

    def checkpoint_ends(self, tier: int) -> np.ndarray:
        """Returns the times from the beginning of the span to the ends of the pauses of every checkpoint of a tier
        [s]."""


@dataclass(frozen=True)
class DrawnSpan:
    """Steps with a duration each.

    base, taken: see `Span`.
    steps: duration of every step [s].
    checkpoint, evaluation: pauses after it [s], in this order.
    step_ends: from the beginning of the span to the end of every step [s].
    ends: to the end of its pauses [s].
    """

    base: float
    steps: np.ndarray
    checkpoint: np.ndarray
    evaluation: np.ndarray
    step_ends: np.ndarray
    ends: np.ndarray
    taken: tuple[np.ndarray, ...]

    @property
    def count(self) -> int:
        return len(self.steps)

    @property
    def total(self) -> float:
        return float(self.ends[-1])

    def end_at(self, elapsed: float) -> DrawnSpan:
        keep = min(int(np.searchsorted(self.ends, elapsed, side="left")) + 1, self.count)
        return DrawnSpan(
            self.base,
            self.steps[:keep],
            self.checkpoint[:keep],
            self.evaluation[:keep],
            self.step_ends[:keep],
            self.ends[:keep],
            tuple(at[at < keep] for at in self.taken),
        )

    def count_steps(self, elapsed: float) -> tuple[int, int]:
        done, complete = (np.searchsorted(ends, elapsed, side="right") for ends in (self.step_ends, self.ends))
        return int(done), int(complete)

    def sum_pauses(self, count: int) -> tuple[float, float]:
        return float(self.checkpoint[:count].sum()), float(self.evaluation[:count].sum())

    def end_of_step(self, step: int) -> float:
        return float(self.step_ends[step])

    def end_of_pauses(self, step: int) -> float:
        return float(self.ends[step])

    def checkpoint_after(self, step: int) -> float:
        return float(self.checkpoint[step])

    @cached_property
    def _beyond(self) -> np.ndarray:
        return np.cumsum(self.steps - self.base)

    def beyond_base(self, count: int) -> float:
        return float(self._beyond[count - 1]) if count else 0.0

    def checkpoint_ends(self, tier: int) -> np.ndarray:
        at = self.taken[tier]
        return self.step_ends[at] + self.checkpoint[at]


@dataclass(frozen=True)
class EqualSpan:
    """Steps of equal duration, with pauses after some of them.

    base, taken, count: see `Span`.
    step: duration of a step [s].
    at: steps with a pause, by their index.
    checkpoint, evaluation: these pauses [s].
    before: pauses before each of them, and all [s].
    """

    base: float
    step: float
    count: int
    at: np.ndarray
    checkpoint: np.ndarray
    evaluation: np.ndarray
    before: np.ndarray
    taken: tuple[np.ndarray, ...]

    @property
    def total(self) -> float:
        return self.count * self.step + float(self.before[-1])

    @cached_property
    def _ends(self) -> np.ndarray:
        """From the beginning of the span to the end of every pause [s]."""
        return (self.at + 1) * self.step + self.before[1:]

    def end_at(self, elapsed: float) -> EqualSpan:
        complete = self.count_steps(elapsed)[1]
        ended = complete > 0 and self.end_of_pauses(complete - 1) == elapsed
        keep = min(complete + (not ended), self.count)
        place = self._place(keep)
        return EqualSpan(
            self.base,
            self.step,
            keep,
            self.at[:place],
            self.checkpoint[:place],
            self.evaluation[:place],
            self.before[: place + 1],
            tuple(at[at < keep] for at in self.taken),
        )

    def _place(self, step: int) -> int:
        """Counts the pauses after the steps before `step`."""
        return int(np.searchsorted(self.at, step, side="left"))

    def count_steps(self, elapsed: float) -> tuple[int, int]:
        place = int(np.searchsorted(self._ends, elapsed, side="right"))
        first = int(self.at[place - 1]) + 1 if place else 0
        # Up to the next pause, or to the end, steps follow each other; that before a pause is not complete.
        paused = place < len(self.at)
        most = int(self.at[place]) + 1 if paused else self.count
        done = most
        if self.end_of_step(most - 1) > elapsed:
            began = first * self.step + float(self.before[place])
            done = min(first + max(int((elapsed - began) / self.step), 0), most - 1)
            while done < most and self.end_of_step(done) <= elapsed:
                done += 1
            while done > first and self.end_of_step(done - 1) > elapsed:
                done -= 1
        return done, min(done, most - 1) if paused else done

    def sum_pauses(self, count: int) -> tuple[float, float]:
        place = self._place(count)
        return float(self.checkpoint[:place].sum()), float(self.evaluation[:place].sum())

    def end_of_step(self, step: int) -> float:
        return (step + 1) * self.step + float(self.before[self._place(step)])

    def end_of_pauses(self, step: int) -> float:
        return (step + 1) * self.step + float(self.before[self._place(step + 1)])

    def checkpoint_after(self, step: int) -> float:
        place = self._place(step)
        return float(self.checkpoint[place]) if place < len(self.at) and self.at[place] == step else 0.0

    def beyond_base(self, count: int) -> float:
        return count * (self.step - self.base)

    def checkpoint_ends(self, tier: int) -> np.ndarray:
        place = np.searchsorted(self.at, self.taken[tier])
        return (self.taken[tier] + 1) * self.step + self.before[place] + self.checkpoint[place]


def make_drawn_span(
    base: float,
    steps: np.ndarray,
    done: int,
    last: int | None,
    tiers: tuple[CheckpointTier, ...],
    since: tuple[float, ...],
    evaluation: tuple[int, float] | None,
) -> DrawnSpan:
    """Returns a span after `done` steps.

    base: duration of a step without stragglers [s].
    steps: that of every step of the span [s].
    last: the last step of the run, after which there are no pauses; None if it has no number.
    since: time since the latest checkpoint of every tier [s]; infinity: all are written.
    evaluation: steps between two evaluations, and the duration of an evaluation [s].
    """
    checkpoint, evaluations = np.zeros(len(steps)), np.zeros(len(steps))
    if evaluation is not None:
        evaluations[_find_multiples(evaluation[0], done, len(steps), last)] = evaluation[1]
    taken = []
    for tier, before in zip(tiers, since, strict=True):
        at = _find_multiples(tier.every, done, len(steps), last)
        taken.append(at)
        if len(at):
            reached = np.cumsum(steps + evaluations)[at] - evaluations[at]
            checkpoint[at] += _pauses_of(tier, reached, before)
    ends = np.cumsum(steps + checkpoint + evaluations)
    return DrawnSpan(base, steps, checkpoint, evaluations, ends - checkpoint - evaluations, ends, tuple(taken))


def make_equal_span(
    base: float,
    step: float,
    count: int,
    done: int,
    last: int | None,
    tiers: tuple[CheckpointTier, ...],
    since: tuple[float, ...],
    evaluation: tuple[int, float] | None,
) -> EqualSpan:
    """Returns a span of `count` steps of equal duration [s]; otherwise as `make_drawn_span`."""
    taken = tuple(_find_multiples(tier.every, done, count, last) for tier in tiers)
    evaluated = _find_multiples(evaluation[0] if evaluation is not None else 0, done, count, last)
    paused = [steps for steps in (*taken, evaluated) if len(steps)]
    at = paused[0] if len(paused) == 1 else np.unique(np.concatenate([*paused, np.zeros(0, int)]))
    checkpoint, evaluations = np.zeros(len(at)), np.zeros(len(at))
    duration = evaluation[1] if evaluation is not None else 0.0
    evaluations[np.searchsorted(at, evaluated)] = duration
    for tier, steps, before in zip(tiers, taken, since, strict=True):
        reached = (steps + 1) * step + duration * np.searchsorted(evaluated, steps, side="left")
        checkpoint[np.searchsorted(at, steps)] += _pauses_of(tier, reached, before)
    pauses = np.concatenate([np.zeros(1), np.cumsum(checkpoint + evaluations)])
    return EqualSpan(base, step, count, at, checkpoint, evaluations, pauses, taken)


def _find_multiples(every: int, done: int, count: int, last: int | None) -> np.ndarray:
    """Returns the steps of a span, by their index, whose number is a multiple, but for the last of the run. every: 0:
    none."""
    if not every:
        return np.zeros(0, int)
    end = count if last is None else min(count, last - done - 1)
    return np.arange(-(done + 1) % every, end, every)


def _pauses_of(tier: CheckpointTier, reached: np.ndarray, before: float) -> np.ndarray:
    """Returns the pauses for the checkpoints of a tier: its stall, and until the checkpoint before is written [s].
    reached: time of each, without such pauses.
    before: from the latest to the begin of the span.
    """
    return tier.stall + np.maximum(tier.write - np.diff(reached, prepend=-before), 0.0)
