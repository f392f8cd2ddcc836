"""Does the forecast choose the right plan? Published runs of one training task that differ in their plans alone.

Runs belong together if source, training program with its release, model, GPUs, network, batch, sequence, number formats
and adapters are equal. The plan is everything else: degrees, micro-batch, schedule, sharding, recompute, offloading,
overlap, compilation and CUDA graphs. A plan that was published several times counts once, with its median time.

The regret of a choice is the measured time of the chosen plan over that of the best one, minus 1.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from validation.published.releases import month_of
from validation.published.rows import PublishedRun, UnreadableLine
from validation.published.stacks import framework
from validation.published.summary import measured_step

LEAST_PLANS = 3
"""Plans of a group: between two of them a coin is right every other time."""

TASK = (
    "kind", "stack", "stack_version", "gpu", "gpus", "gpus_per_node", "scale_up_domain", "inter", "precision",
    "grad_dtype", "main_weights", "optimizer", "model", "lora",
)  # fmt: skip
"""Fields of `Spec` that say what is trained, by which program and on what; with the global batch and the sequence."""

NO_PLAN = ("batch", "memory_kind", "filled", *TASK)
"""Fields of `Spec` that are not of the plan, but for `batch.micro`."""


def choose_plans(runs: Sequence[PublishedRun | UnreadableLine], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of at least `LEAST_PLANS` plans with their regrets, in the order of their first run.

    rows: the answers to `runs`.
    """
    groups: dict[str, list[tuple[PublishedRun, dict[str, Any]]]] = defaultdict(list)
    for run, row in zip(runs, rows, strict=False):
        if isinstance(run, PublishedRun) and row["error"] is not None:
            groups[_task_of(run)].append((run, row))
    return [found for group in groups.values() if (found := _judge(group))["plans"] >= LEAST_PLANS]


def summarize_choices(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over all groups, and over those of each source."""
    sources = sorted({group["source"] for group in groups})
    return {
        **_means(groups),
        "by_source": {source: _means([group for group in groups if group["source"] == source]) for source in sources},
    }


def _means(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def mean(key: str) -> float | None:
        known = [float(group[key]) for group in groups if group[key] is not None]
        return fmean(known) if known else None

    keys = ("regret", "random_regret", "rho", "right")
    return {"groups": len(groups), "plans": sum(group["plans"] for group in groups), **{key: mean(key) for key in keys}}


def _task_of(run: PublishedRun) -> str:
    spec = run.spec.model_dump(mode="json", include=set(TASK))
    month = month_of(run, framework(run.spec.stack))  # rounds of MLPerf name the containers of older ones
    return json.dumps([run.source, month, spec, run.spec.batch.total, run.spec.batch.seq], sort_keys=True)


def _plan_of(run: PublishedRun) -> str:
    plan = run.spec.model_dump(mode="json", exclude=set(NO_PLAN))
    return json.dumps([plan, run.spec.batch.micro], sort_keys=True)


def _judge(group: Iterable[tuple[PublishedRun, dict[str, Any]]]) -> dict[str, Any]:
    plans: dict[str, list[tuple[PublishedRun, dict[str, Any]]]] = defaultdict(list)
    for run, row in group:
        plans[_plan_of(run)].append((run, row))
    measured = [median(measured_step(row) for _, row in same) for same in plans.values()]
    forecast = [median(float(row["predicted"]["step_time_s"]) for _, row in same) for same in plans.values()]
    names = [same[0][0].id for same in plans.values()]
    best, chosen = min(measured), min(range(len(forecast)), key=forecast.__getitem__)
    (first, _), *_ = next(iter(plans.values()))
    return {
        "source": first.source,
        "model": {"layers": first.spec.model.layers, "hidden": first.spec.model.hidden},
        "gpu": first.spec.gpu,
        "gpus": first.spec.gpus,
        "plans": len(plans),
        "chosen": names[chosen],
        "best": names[measured.index(best)],
        "right": measured[chosen] == best,
        "regret": measured[chosen] / best - 1,
        "random_regret": fmean(measured) / best - 1,
        "rho": rank_correlation(measured, forecast),
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rho; None if all values of a side are equal. Equal values share their mean rank."""
    ranks = np.array([_ranks(one), _ranks(other)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.sqrt((ranks**2).sum(axis=1))
    return float(ranks[0] @ ranks[1] / norms.prod()) if norms.all() else None


def _ranks(values: Sequence[float]) -> np.ndarray:
    found = np.array(values)
    return np.array([(np.sum(found < value) + np.sum(found <= value) - 1) / 2 for value in found])
