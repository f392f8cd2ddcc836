"""Points of a sweep whose whole training is simulated: those that state keys which ``meshcast run`` alone reads.

vary: {run.checkpoints.every_s: [300, 900, 1800], run.recovery.spares: [0, 1, 2]}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.workers import stop_if_asked
from meshcast.simulator.report.report import Report
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import make_run
from meshcast.simulator.runs.training import simulate_run

KEYS = frozenset(
    ["steps", "days", "seeds", "seed", "most_days", "most_events", "failures", "checkpoints", "recovery", "stragglers"]
    + ["evaluation", "data_stalls"]
)
"""Keys of `run` that a forecast of a step does not read."""


@dataclass(frozen=True)
class RunColumn:
    """A column of simulated points.

    compute: mean of the runs of a point.
    head: of tables.
    form: of values in tables.
    """

    name: str
    compute: Callable[[RunAnswer], float | None]
    head: str
    form: str

    def cell(self, value: float | None) -> str:
        """Formats the value for a table, whose heading has the unit."""
        return "" if value is None else self.form.format(value).removesuffix("%")


RANKED_BY_RUN = "run_tokens_per_s"
"""Column by which simulated points are ranked, largest value first."""

COLUMNS = (
    RunColumn(
        RANKED_BY_RUN, lambda answer: answer.steps * answer.plan.report.tokens / answer.seconds, "tokens/s", "{:,.0f}"
    ),
    RunColumn("goodput", lambda answer: answer.goodput, "goodput %", "{:.2%}"),
    RunColumn("run_days", lambda answer: answer.days, "days", "{:,.4g}"),
    RunColumn("run_cost", lambda answer: answer.mean(answer.cost_of), "cost", "{:,.4g}"),
    RunColumn("run_energy_mwh", lambda answer: answer.mean(answer.energy_of), "MWh", "{:,.4g}"),
)


def simulates_runs(job: Mapping[str, Any], fields: Collection[str]) -> bool:
    """Returns whether a sweep simulates runs. fields: those that vary."""
    run = job.get("run")
    stated = {str(key) for key in run} if isinstance(run, Mapping) else set[str]()
    stated |= {name.split(".")[1] for name in fields if name.startswith("run.")}
    return not KEYS.isdisjoint(stated)


def forecast_run(report: Report) -> dict[str, float | None]:
    """Returns the columns of a point. Raises PlanError for a run that cannot be simulated, or does not end."""
    plan = make_run(report)
    runs = [simulate_run(plan.setting, plan.seed, number, _follow_parent) for number in range(plan.seeds)]
    answer = RunAnswer(plan, runs)
    return {column.name: column.compute(answer) for column in COLUMNS}


def _follow_parent(share: float) -> None:
    """Ends a run whose sweep has ended. share: of it that is done."""
    stop_if_asked()
