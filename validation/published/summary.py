"""Error statistics of forecasts of published runs: of all, and by source, GPU, class, training program and regime."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

GROUPS = ("source", "gpu", "class", "stack", "regime")


def summarize_answers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of all answers and of each group, reasons of refusals, and the runs whose forecast cannot be right:
    those that do not fit in memory though they ran, and those faster than their FLOPs at peak."""
    names = {group: sorted({str(row[group]) for row in rows if row[group] is not None}) for group in GROUPS}
    return {
        **compute_figures(rows),
        **{
            f"by_{group}": {name: compute_figures([row for row in rows if row[group] == name]) for name in names[group]}
            for group in GROUPS
        },
        "refusals": dict(Counter(_reason(row) for row in rows if row["status"] == "refused").most_common()),
        "does_not_fit": [row["id"] for row in rows if row["predicted"] and not row["predicted"]["fits"]],
        "faster_than_peak": [row["id"] for row in rows if beats_its_flops(row)],
    }


def compute_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns counts and error statistics; `compared` rows have a forecast and a measured time."""
    done = [row for row in rows if row["status"] == "predicted"]
    timed = [row for row in done if row["error"] is not None]
    naive = [row["baseline"] for row in timed if row["baseline"]]
    blind = [each["error_from_other_sources"] for each in naive]
    memory = [row["memory_error"] for row in done if row["memory_error"] is not None]
    return {
        "rows": len(rows),
        "predicted": len(done),
        "refused": len(rows) - len(done),
        "compared": len(timed),
        **error_statistics([row["error"] for row in timed]),
        "inside_interval": fmean(map(_inside, timed)) if timed else None,
        "baseline": error_statistics([each["error"] for each in naive]),
        "baseline_from_other_sources": error_statistics([error for error in blind if error is not None]),
        "memory": {"compared": len(memory), **error_statistics(memory)},
    }


def error_statistics(errors: Sequence[float]) -> dict[str, float | None]:
    """Returns the median, mean and 90th percentile of |error|, and the median error (bias)."""
    if not errors:
        return dict.fromkeys(("median", "mean", "p90", "bias"))
    sizes = sorted(map(abs, errors))
    return {"median": median(sizes), "mean": fmean(sizes), "p90": quantile(sizes, 0.9), "bias": median(errors)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the quantile of sorted values, linearly interpolated."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def beats_its_flops(row: dict[str, Any]) -> bool:
    """Returns whether a forecast is faster than its FLOPs at peak, which would be a defect."""
    return bool(row["at_peak_s"]) and row["predicted"]["step_time_s"] < row["at_peak_s"]


def measured_step(row: dict[str, Any]) -> float:
    """Returns the measured step time [s] of an answer that has an error."""
    return float(row["predicted"]["step_time_s"] / (1 + row["error"]))


def _inside(row: dict[str, Any]) -> bool:
    low, high = row["predicted"]["interval_90_s"]
    return bool(low <= measured_step(row) <= high)


def _reason(row: dict[str, Any]) -> str:
    """Returns the reason of a refusal without line numbers and list indices, so that equal reasons count together.

    Reasons of unreadable lines stay whole.
    """
    reason = str(row["reason"])
    return reason if row["source"] is None else re.sub(r"^\S+:\d+:? |\[\d+\]", "", reason)
