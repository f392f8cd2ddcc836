"""Rounds of a timetable that repeat but for their micro-batches, and times of those that an engine skips."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.scheduling.schedule import PipelineShape


@dataclass(frozen=True)
class Rounds:
    """The steady state: `count` rounds of `length` actions per device, equal except for the micro-batches.

    first: by device, the number of the first action of the first round. A round needs no result of a later round.
    waiting: results computed before the first round and needed in it or later; after each round the same, `length`
        higher.
    """

    first: list[int]
    length: int
    count: int
    waiting: list[int]

    def split(self, sequence: np.ndarray, device_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Splits the sequence of all actions: those before the steady state, of its first round, and behind it."""
        place = (sequence - np.asarray(self.first)[device_of][sequence]) // self.length
        return sequence[place < 0], sequence[place == 0], sequence[place >= self.count]


@dataclass(frozen=True)
class Repetition:
    """Rounds that are not played: their times are those of the rounds before them, shifted.

    starts: by device, the first of their actions.
    span: actions of a device after which times repeat.
    shift: by which they are later [s].
    times: how often they repeat.
    """

    starts: Sequence[int]
    span: int
    shift: float
    times: int

    @property
    def skipped(self) -> int:
        """Number of actions that are not played."""
        return self.times * self.span * len(self.starts)

    def fill(self, times: np.ndarray, device: int, first: int) -> None:
        """Fills in the times of the actions of a device that are not played. first: number of its first action."""
        start = self.starts[device] - first
        block = times[start - self.span : start] + self.shift * np.arange(1, self.times + 1)[:, None]
        times[start : start + self.times * self.span] = block.ravel()

    def fill_some(self, log: list[float], actions: np.ndarray) -> None:
        """Fills in the times of those of some actions that are not played."""
        starts = np.array(self.starts)
        behind = actions - starts[np.searchsorted(starts, actions, "right") - 1]
        inside = (behind >= 0) & (behind < self.times * self.span) & (actions >= starts[0])
        for action, copy in zip(actions[inside].tolist(), (behind[inside] // self.span + 1).tolist(), strict=True):
            log[action] = log[action - copy * self.span] + self.shift * copy

    def fill_states(self, log: dict[int, Sequence[float]]) -> None:
        """Fills in whole states. log: those of some actions."""
        for start in self.starts:
            for action in range(start - self.span, start):
                if (state := log.get(action)) is not None:
                    for i in range(1, self.times + 1):
                        log[action + i * self.span] = (np.asarray(state) + i * self.shift).tolist()


def find_rounds(
    shape: PipelineShape, bounds: Sequence[int], need: np.ndarray, slot: np.ndarray, update_interval: int = 0
) -> Rounds | None:
    """Looks for the steady state: rounds of an update, or of 1, p or p v micro-batches, whose slots and needs repeat.

    A round begins on every device after all that an action of device 0 depends on, directly or not; so no action of an
    earlier round depends on it.
    """
    search = _RoundSearch(bounds, need, slot)
    actions = bounds[1] - bounds[0]
    lengths = [actions // shape.m * step for step in (1, shape.p, shape.p * shape.v)]
    if update_interval:
        lengths.insert(0, actions * update_interval // shape.m)
    for length in dict.fromkeys(lengths):
        if length * 3 <= actions and (rounds := search.try_length(length)):
            return rounds
    return None


class _RoundSearch:
    """Looks for rounds among the actions of all devices. Arguments as of `find_rounds`."""

    def __init__(self, bounds: Sequence[int], need: np.ndarray, slot: np.ndarray) -> None:
        self.bounds, self.needs, self.slot, self.need = bounds, need.tolist(), slot, need
        self.device_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)).tolist()

    def try_length(self, length: int) -> Rounds | None:
        """Returns the rounds of so many actions a device, if there are two or more."""
        spans = self._recurring(length)
        if any(stop - start < 2 * length for start, stop in spans):
            return None
        # No dependency leads backwards over the border behind all that an action depends on.
        reached = list(self.bounds[:-1])
        for at in range(spans[0][0], spans[0][0] + length):
            _extend_to(self.needs, self.device_of, at, reached)
            if all(begin >= start for begin, (start, _) in zip(reached, spans, strict=True)):
                count = min((stop - begin) // length for begin, (_, stop) in zip(reached, spans, strict=True))
                return Rounds(list(reached), length, count, self._waiting(reached)) if count > 1 else None
        return None

    def _recurring(self, length: int) -> list[tuple[int, int]]:
        """Returns by device the longest run of actions that recur `length` actions later, with those."""
        same = self.slot[length:] == self.slot[:-length]
        same &= np.where(self.need[:-length] >= 0, self.need[:-length] + length, -1) == self.need[length:]
        spans = []
        for begin, end in itertools.pairwise(self.bounds):
            breaks = np.flatnonzero(~same[begin : end - length])
            edges = np.concatenate([[-1], breaks, [end - length - begin]])
            widest = int(np.argmax(np.diff(edges)))
            spans.append((begin + int(edges[widest]) + 1, begin + int(edges[widest + 1]) + length))
        return spans

    def _waiting(self, reached: Sequence[int]) -> list[int]:
        """Returns the actions before `reached` on each device that later ones need."""
        later = np.ones(len(self.need), bool)
        for begin, end in zip(self.bounds[:-1], reached, strict=True):
            later[begin:end] = False
        wanted = np.flatnonzero(np.bincount(self.need[later & (self.need >= 0)]))
        return wanted[~later[wanted]].tolist()


def _extend_to(needs: Sequence[int], device_of: Sequence[int], action: int, reached: list[int]) -> None:
    """Extends `reached` (by device, the end of a prefix of its actions) to `action` and all that it depends on."""
    left = [action]
    while left:
        at = left.pop()
        device = device_of[at]
        if at >= reached[device]:
            left += [need for need in needs[reached[device] : at + 1] if need >= 0]
            reached[device] = at + 1
