"""Does the forecast choose the right plan? Published runs of a training task that differ in their plans alone.

Runs belong together if source, training program with its release, model, GPUs, network, batch, sequence, number formats
and adapters are equal. The plan is everything else: degrees, micro-batch, schedule, sharding, recompute, offloading,
overlap, compilation and CUDA graphs. A plan that was published several times counts once, with its median time.

The regret of a choice is the measured time of the chosen plan over that of the best, minus 1. A robust choice is of the
smallest upper end of the interval, which is wider for plans unlike what was run. A published plan is itself among
what was run, so it is held against the combinations of the other runs alone, without the group.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.published.answer import Answer, map_chunks
from meshcast.validation.published.measured_range.combinations import condense
from meshcast.validation.published.measured_range.distance import Distance, known_combinations, measure_distance
from meshcast.validation.published.measured_range.survey import SurveyedRun, survey
from meshcast.validation.published.releases import month_of
from meshcast.validation.published.rows import PublishedRun, UnreadableLine
from meshcast.validation.published.stacks import framework
from meshcast.validation.published.summary import measured_step

MIN_PLANS = 3
"""Plans of a group: between two of them a coin is right every other time."""

TASK = (
    "kind", "stack", "stack_version", "gpu", "gpus", "gpus_per_node", "scale_up_domain", "inter", "precision",
    "grad_dtype", "main_weights", "optimizer", "model", "lora",
)  # fmt: skip
"""Fields of `Spec` that say what is trained, by which program and on what; with the global batch and the sequence."""

NO_PLAN = ("batch", "memory_kind", "filled", *TASK)
"""Fields of `Spec` that are not of the plan, but for `batch.micro`."""


@dataclass(frozen=True)
class PlanGroup:
    """Published runs of a task.

    plans: the runs of each plan with their rows, answers of `validate published`, or such with an error, a predicted
        step and the run as `surveyed`.
    """

    plans: tuple[tuple[tuple[PublishedRun, dict[str, Any]], ...], ...]

    @property
    def runs(self) -> list[PublishedRun]:
        """The runs of all plans."""
        return [run for same in self.plans for run, _ in same]

    @property
    def measured(self) -> list[float]:
        """Measured step of each plan, the median of its runs [s]."""
        return [median(measured_step(row) for _, row in same) for same in self.plans]

    @property
    def forecast(self) -> list[float]:
        """Forecast step of each plan, the median of its runs [s]."""
        return [median(float(row["predicted"]["step_time_s"]) for _, row in same) for same in self.plans]

    @property
    def names(self) -> list[str]:
        """The first run of each plan."""
        return [same[0][0].id for same in self.plans]

    @property
    def surveyed(self) -> list[SurveyedRun]:
        """The first run of each plan as surveyed; empty if the rows are answers of `validate published`."""
        return [same[0][1]["surveyed"] for same in self.plans if "surveyed" in same[0][1]]


def forecast_choices(runs: Sequence[PublishedRun | UnreadableLine], workers: int | None = None) -> Iterator[Answer]:
    """Yields a row for each run, in order: error, predicted step, and the run as `surveyed`; without these where it is
    refused, cannot be read or has no measured time."""
    yield from map_chunks(_forecast_chunk, runs, workers)


def _forecast_chunk(runs: Sequence[PublishedRun | UnreadableLine]) -> list[Answer]:
    shared, answers = SharedWork(), list[Answer]()
    for run in runs:
        surveyed = None
        try:
            surveyed = survey(run, shared) if isinstance(run, PublishedRun) else None
        except Exception:  # a defect of meshcast costs a row, which `validate published` explains
            shared = SharedWork()
        answers.append({"error": None})
        if surveyed is not None and isinstance(run, PublishedRun) and run.step_time:
            error, predicted = surveyed.step_time / run.step_time - 1, {"step_time_s": surveyed.step_time}
            answers[-1] = {"error": error, "predicted": predicted, "surveyed": surveyed}
    return answers


def group_plans(runs: Sequence[PublishedRun | UnreadableLine], rows: Sequence[dict[str, Any]]) -> list[PlanGroup]:
    """Lists the groups of at least `MIN_PLANS` plans, in the order of their first run. rows: answers to `runs`."""
    groups: dict[str, dict[str, list[tuple[PublishedRun, dict[str, Any]]]]] = defaultdict(lambda: defaultdict(list))
    for run, row in zip(runs, rows, strict=False):
        if isinstance(run, PublishedRun) and row["error"] is not None:
            groups[_task_of(run)][_plan_of(run)].append((run, row))
    return [PlanGroup(tuple(map(tuple, plans.values()))) for plans in groups.values() if len(plans) >= MIN_PLANS]


def choose_plans(runs: Sequence[PublishedRun | UnreadableLine], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judges groups of plans by their regrets; by those of robust choices, too, where rows have surveyed runs."""
    every = [row["surveyed"] for row in rows if "surveyed" in row]
    return [judge_group(group, every) for group in group_plans(runs, rows)]


def summarize_choices(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over all groups, and over those of each source."""
    sources = sorted({group["source"] for group in groups})
    return {
        **_means(groups),
        "by_source": {source: _means([group for group in groups if group["source"] == source]) for source in sources},
    }


def _means(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def mean(key: str) -> float | None:
        known = [float(group[key]) for group in groups if group.get(key) is not None]
        return fmean(known) if known else None

    robust = ("robust_regret", "robust_right") if groups and "robust_regret" in groups[0] else ()
    keys = ("regret", "random_regret", "rho", "right", *robust)
    return {"groups": len(groups), "plans": sum(group["plans"] for group in groups), **{key: mean(key) for key in keys}}


def _task_of(run: PublishedRun) -> str:
    spec = run.spec.model_dump(mode="json", include=set(TASK))
    month = month_of(run, framework(run.spec.stack))  # rounds of MLPerf name the containers of older ones
    return json.dumps([run.source, month, spec, run.spec.batch.total, run.spec.batch.seq], sort_keys=True)


def _plan_of(run: PublishedRun) -> str:
    plan = run.spec.model_dump(mode="json", exclude=set(NO_PLAN))
    return json.dumps([plan, run.spec.batch.micro], sort_keys=True)


def judge_group(group: PlanGroup, runs: Sequence[SurveyedRun] = ()) -> dict[str, Any]:
    """Returns the choice in a group and its regret. runs: all of them as surveyed, for the robust choice."""
    measured, forecast, names = group.measured, group.forecast, group.names
    best, chosen = min(measured), min(range(len(forecast)), key=forecast.__getitem__)
    first, _ = group.plans[0][0]
    return {
        "source": first.source,
        "model": {"layers": first.spec.model.layers, "hidden": first.spec.model.hidden},
        "gpu": first.spec.gpu,
        "gpus": first.spec.gpus,
        "plans": len(group.plans),
        "chosen": names[chosen],
        "best": names[measured.index(best)],
        "right": measured[chosen] == best,
        "regret": measured[chosen] / best - 1,
        "random_regret": fmean(measured) / best - 1,
        "rho": rank_correlation(measured, forecast),
        **(_judge_robust(group, runs) if group.surveyed else {}),
    }


def _judge_robust(group: PlanGroup, runs: Sequence[SurveyedRun]) -> dict[str, Any]:
    """Returns the choice of the smallest upper end, each the median of the runs of a plan."""
    surveyed = [row["surveyed"] for same in group.plans for _, row in same]
    distances = dict(zip((run.id for run in surveyed), held_out_distances(surveyed, runs), strict=True))
    ends = [
        median(upper_end(row["surveyed"], distances[row["surveyed"].id]) for _, row in same) for same in group.plans
    ]
    measured = group.measured
    chosen = min(range(len(ends)), key=ends.__getitem__)
    return {
        "robust_chosen": group.names[chosen],
        "robust_right": measured[chosen] == min(measured),
        "robust_regret": measured[chosen] / min(measured) - 1,
        "schedules_not_run": sum("schedule" in distances[same[0][0].id].outside for same in group.plans),
    }


def held_out_distances(group: Sequence[SurveyedRun], runs: Sequence[SurveyedRun]) -> list[Distance]:
    """Returns the distance of each run of a group from the combinations of all runs that are not of the group."""
    held_out = {run.id for run in group}
    table = condense(run.plan for run in runs if run.id not in held_out)
    return [
        measure_distance(plan.task, plan.fields, known_combinations(plan.task, table))
        for plan in (run.plan for run in group)
    ]


def upper_end(run: SurveyedRun, distance: Distance) -> float:
    """Returns the upper end of the 90 % interval of a forecast [s], wider by its distance from what was run."""
    return run.step_time * math.exp(run.bias + Z90 * math.hypot(run.sigma, distance.sigma))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns Spearman's rho; None if all values of a side are equal. Equal values share their mean rank."""
    ranks = np.array([_ranks(first), _ranks(second)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.sqrt((ranks**2).sum(axis=1))
    return float(ranks[0] @ ranks[1] / norms.prod()) if norms.all() else None


def _ranks(values: Sequence[float]) -> np.ndarray:
    ordered = np.array(values)
    return np.array([(np.sum(ordered < value) + np.sum(ordered <= value) - 1) / 2 for value in ordered])
