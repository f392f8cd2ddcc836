"""A span: consecutive steps with the pauses after them, whose times are known before they pass.

Nothing else happens within it, unless an event cuts it short: so many steps cost one event, and each of them still has
a duration of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CheckpointTier:
    """Checkpoints of one kind and place.

    every: steps between two of them; 0: they are made when a failure has happened.
    stall: time for which training waits [s].
    write: time from then on until the checkpoint can be used [s]; the next one waits for it.
    load: time to load it after a failure [s].
    survives: most nodes that may be lost at once without losing it.
    """

    every: int
    stall: float = 0.0
    write: float = 0.0
    load: float = 0.0
    survives: float = float("inf")


@dataclass(frozen=True)
class Span:
    """Steps one after another, from a moment on.

    base: duration of a step without stragglers [s].
    steps: duration of every step [s]. checkpoint, evaluation: pauses after it [s], in this order.
    step_ends: from the beginning of the span to the end of every step [s]. ends: to the end of its pauses [s].
    taken: of every tier the steps, by their index, after which it takes a checkpoint.
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
        """Number of steps."""
        return len(self.steps)

    @property
    def total(self) -> float:
        """Duration [s]."""
        return float(self.ends[-1])

    def end_at(self, elapsed: float) -> Span:
        """The span up to the end of the step, or of the pauses, in which it is after so many seconds."""
        keep = min(int(np.searchsorted(self.ends, elapsed, side="left")) + 1, self.count)
        return Span(
            self.base,
            self.steps[:keep],
            self.checkpoint[:keep],
            self.evaluation[:keep],
            self.step_ends[:keep],
            self.ends[:keep],
            tuple(at[at < keep] for at in self.taken),
        )


def make_span(
    base: float,
    steps: np.ndarray,
    done: int,
    last: int | None,
    tiers: tuple[CheckpointTier, ...],
    since: tuple[float, ...],
    evaluation: tuple[int, float] | None,
) -> Span:
    """A span after `done` steps.

    base: duration of a step without stragglers [s]. steps: that of every step of the span [s].
    last: the last step of the run, after which there are no pauses; None if it has no number.
    since: time since the latest checkpoint of every tier [s]; infinity: all are written.
    evaluation: steps between two evaluations, and the duration of one [s].
    """
    numbers = done + 1 + np.arange(len(steps))
    checkpoint, evaluations = np.zeros(len(steps)), np.zeros(len(steps))
    if evaluation is not None:
        evaluations[(numbers % evaluation[0] == 0) & (numbers != last)] = evaluation[1]
    taken = []
    for tier, before in zip(tiers, since, strict=True):
        at = np.flatnonzero((numbers % tier.every == 0) & (numbers != last)) if tier.every else np.zeros(0, int)
        taken.append(at)
        if len(at):
            reached = np.cumsum(steps + evaluations)[at] - evaluations[at]
            passed = np.diff(reached, prepend=-before)
            checkpoint[at] += tier.stall + np.maximum(tier.write - passed, 0.0)
    ends = np.cumsum(steps + checkpoint + evaluations)
    return Span(base, steps, checkpoint, evaluations, ends - checkpoint - evaluations, ends, tuple(taken))
