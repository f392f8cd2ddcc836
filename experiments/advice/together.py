"""The best two and three changes together.

Times and needs of memory of single changes are multiplied; in triples also by how much every pair of them that was
tried differs from this product. Combinations with the shortest expected step are forecast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from math import prod
from typing import NamedTuple

from meshcast.experiments.advice.neighbours import PlanChange
from meshcast.experiments.advice.trials import Trials, TriedPlan, merge_fields
from meshcast.experiments.explain.sensitivity import Watch

Numbers = tuple[int, ...]
"""A combination of single changes by their numbers."""

COMBINED = 40
"""Most single changes that are combined: 9,880 triples, which are ranked in a tenth of a second."""

SLACK = 1.1
"""How many times the memory of a GPU a combination may be expected to need: what two changes save is not a product."""

LEAST_EFFECT = 1e-3
"""Share of the step or of the memory that a change must save to be a part of a combination."""


class Ratios(NamedTuple):
    """Time and memory of a plan over those of another."""

    seconds: float
    held: float


class Together:
    """Looks for the best combinations of changes.

    trials: of the job.
    singles: trials of single changes to combine, those first that are to be combined where there are many.
    refused: changes that a rule excludes alone, and that others may make possible: of them nothing is expected.
    """

    def __init__(self, trials: Trials, singles: Sequence[TriedPlan], refused: Sequence[PlanChange] = ()) -> None:
        self._trials = trials
        helping = [trial for trial in singles if self._helps(trial)][: COMBINED - len(refused)]
        self._singles = [trial.changes[0] for trial in helping] + [*refused]
        self._alone = [self._measure(trial) for trial in helping] + [Ratios(1.0, 1.0)] * len(refused)
        self._interplay: dict[tuple[int, int], Ratios] = {}

    def _helps(self, trial: TriedPlan) -> bool:
        return not trial.numerics and min(self._measure(trial)) < 1 - LEAST_EFFECT

    def _measure(self, trial: TriedPlan) -> Ratios:
        now = self._trials.now
        return Ratios(trial.seconds / now.seconds, trial.forecast.held / now.forecast.held)

    def find(self, watch: Watch, most: int) -> tuple[list[TriedPlan], list[TriedPlan]]:
        """Returns pairs and triples that fit, the fastest first.

        watch: passes those that are tried on. most: of each.
        """
        pairs = self._forecast(self._rank(2, most), watch)
        for numbers, trial in pairs.items():
            expected, measured = self._expect(numbers), self._measure(trial)
            self._interplay[numbers[0], numbers[1]] = Ratios(*(m / e for m, e in zip(measured, expected, strict=True)))
        triples = self._forecast(self._rank(3, most), watch)
        return self._sort(pairs.values()), self._sort(triples.values())

    def _sort(self, trials: Iterable[TriedPlan]) -> list[TriedPlan]:
        return sorted(filter(self._trials.fits, trials), key=lambda trial: trial.seconds)

    def _forecast(self, combined: Sequence[Numbers], watch: Watch) -> dict[Numbers, TriedPlan]:
        """Returns the forecasts of combinations of singles by their numbers, but for those that break a rule."""
        tried = {}
        for numbers in watch(combined):
            changes = [self._singles[number] for number in numbers]
            if (trial := self._trials.forecast(*changes)) is not None:
                tried[numbers] = trial
        return tried

    def _rank(self, size: int, most: int) -> list[Numbers]:
        """Returns combinations of so many singles that may fit, those of the shortest expected step first."""
        room = SLACK * self._trials.now.forecast.room
        expected = ((self._expect(numbers), numbers) for numbers in combinations(range(len(self._singles)), size))
        kept = [(ratios.seconds, numbers) for ratios, numbers in expected if ratios.held <= room]
        return [*islice((numbers for _, numbers in sorted(kept) if self._go_together(numbers)), most)]

    def _expect(self, numbers: Numbers) -> Ratios:
        """Returns what is expected of some singles together."""
        parts = [self._alone[number] for number in numbers]
        parts += [known for pair in combinations(numbers, 2) if (known := self._interplay.get(pair)) is not None]
        return Ratios(prod([part.seconds for part in parts]), prod([part.held for part in parts]))

    def _go_together(self, numbers: Numbers) -> bool:
        """Returns whether singles are about different fields, of which all act, and none contradicts another."""
        changes = [self._singles[number] for number in numbers]
        keys = {change.key for change in changes}
        if len(keys) < len(changes) or any(change.idle & keys for change in changes):
            return False
        return merge_fields(changes) is not None
