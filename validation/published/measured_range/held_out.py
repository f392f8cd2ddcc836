"""The upper ends of the intervals of published plans, as if these plans had not been published.

A search that ranks robustly widens the interval of a plan by its distance from what somebody has run. A published plan
is itself among what was run. So it is held against the combinations of the other runs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshcast.simulator.report.metrics import Z90
from meshcast.validation.published.measured_range.combinations import condense
from meshcast.validation.published.measured_range.distance import Distance, known_combinations, measure_distance
from meshcast.validation.published.measured_range.survey import SurveyedRun


def held_out_distances(group: Sequence[SurveyedRun], runs: Sequence[SurveyedRun]) -> list[Distance]:
    """The distance of each run of a group from the combinations of all runs that are not of the group."""
    own = {run.id for run in group}
    table = condense(run.plan for run in runs if run.id not in own)
    return [
        measure_distance(one.task, one.fields, known_combinations(one.task, table))
        for one in (run.plan for run in group)
    ]


def upper_end(run: SurveyedRun, distance: Distance) -> float:
    """The upper end of the 90 % interval of a forecast [s], wider by its distance from what was run."""
    return run.step_time * math.exp(Z90 * math.hypot(run.sides[1], run.others, distance.sigma))
