"""Rules on fields of a point: which choices of a pipeline keep them, evaluated once for equal values of the fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence

from meshcast.experiments.search.space.space import LayerGroup, Pipeline, StepChoice
from meshcast.hardware.remembered import remembered_by

PARTS = (LayerGroup, Pipeline, StepChoice)


class PointRule(ABC):
    """A rule on some fields of a point.

    fields: their names in a point.
    """

    def __init__(self, fields: Collection[str]) -> None:
        self.fields = frozenset(fields)
        self._keys = [[i for i, name in enumerate(part._fields) if name in fields] for part in PARTS]

    @abstractmethod
    def evaluate(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        """Returns whether a point keeps the rule."""

    def select(self, group: LayerGroup, pipeline: Pipeline, steps: tuple[StepChoice, ...]) -> tuple[StepChoice, ...]:
        """Returns the choices at which the rule holds."""
        if not steps:
            return ()
        if not self._keys[2]:
            return steps if self.holds(group, pipeline, steps[0]) else ()
        return self._select(group, pipeline, steps)

    @remembered_by(lambda rule, group, pipeline, steps: (rule.key_of(0, group), rule.key_of(1, pipeline), steps))
    def _select(self, group: LayerGroup, pipeline: Pipeline, steps: tuple[StepChoice, ...]) -> tuple[StepChoice, ...]:
        return tuple(step for step in steps if self.holds(group, pipeline, step))

    def key_of(self, part: int, values: Sequence[Hashable]) -> tuple[Hashable, ...]:
        """Returns the values of a part of a point that determine the rule."""
        return tuple([values[i] for i in self._keys[part]])

    @remembered_by(lambda rule, *point: tuple([rule.key_of(i, part) for i, part in enumerate(point)]))
    def holds(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        return self.evaluate(group, pipeline, step)
