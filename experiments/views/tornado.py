"""Tornado: the step between better and worse figures of the hardware, and between alternatives of assumed fields."""

from __future__ import annotations

from typing import NamedTuple

from meshcast.experiments.explain.assumed_fields import AssumedFieldEffect
from meshcast.experiments.explain.sensitivity import Sensitivities
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.formatting import describe_value, format_seconds

MIN_FIGURE, MIN_FIELD = 1e-4, 1e-3
"""Share of the step below which a figure of the hardware, or a field that the job does not state, gets no bar."""
MAX_FIELDS = 16
"""Maximum number of bars of such fields."""


class StepRange(NamedTuple):
    """A bar from the shortest to the longest step [s].

    about: what a percent of a figure saves; the assumed value of a field.
    """

    name: str
    low_s: float
    high_s: float
    about: str

    @property
    def label(self) -> str:
        """The name without the place of a field."""
        return self.name.removeprefix("framework.set.").removeprefix("plan.schemes.")


@dataclass(frozen=True)
class Tornado:
    """Bars around a step [s], the widest first.

    hardware, fields: of figures of the hardware, and of fields that the job does not state.
    without_influence: figures that have no bar.
    """

    step: float
    hardware: tuple[StepRange, ...]
    fields: tuple[StepRange, ...]
    without_influence: tuple[str, ...]


def make_tornado(sensitivities: Sensitivities) -> Tornado:
    """Makes the bars of a forecast's sensitivities."""
    step = sensitivities.report.step_time
    hardware, others = [], []
    for effect in sensitivities.figures:
        label = effect.figure.label
        if effect.swing_s >= MIN_FIGURE * step:
            hardware.append(StepRange(label, effect.better_s, effect.worse_s, format_seconds(effect.saved_s)))
        else:
            others.append(label)
    fields = [_field_range(effect) for effect in sensitivities.assumed if effect.step_effect_s >= MIN_FIELD * step]
    return Tornado(step, tuple(hardware), tuple(fields[:MAX_FIELDS]), tuple(others))


def _field_range(effect: AssumedFieldEffect) -> StepRange:
    """Makes the bar of a field; it ends at the step itself where no alternative is shorter, or none longer."""
    times = [effect.step_time_s, *(alternative.step_time_s for alternative in effect.alternatives)]
    value = effect.field.value
    assumed = "follows from others" if value is None else describe_value(value) or "none"
    return StepRange(effect.field.name, min(times), max(times), assumed)
