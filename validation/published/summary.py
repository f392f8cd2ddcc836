"""Errors of many forecasts, added up: of all runs, and of the runs of each source, GPU, class and program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

GROUPS = ("source", "gpu", "class", "stack")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all answers, and again of each group; reasons of refusals; forecasts that beat their FLOPs."""
    names = {group: sorted({str(row[group]) for row in rows if row[group] is not None}) for group in GROUPS}
    return {
        **figures(rows),
        **{
            f"by_{group}": {name: figures([row for row in rows if row[group] == name]) for name in names[group]}
            for group in GROUPS
        },
        "refusals": dict(Counter(_reason(row) for row in rows if row["status"] == "refused").most_common()),
        "faster_than_peak": [row["id"] for row in rows if beats_its_flops(row)],
    }


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts and errors of some answers; of `compared` rows both forecast and measured time are known."""
    done = [row for row in rows if row["status"] == "predicted"]
    timed = [row for row in done if row["error"] is not None]
    naive = [row["baseline"] for row in timed if row["baseline"]]
    blind = [each["error_from_other_sources"] for each in naive]
    return {
        "rows": len(rows),
        "predicted": len(done),
        "refused": len(rows) - len(done),
        "compared": len(timed),
        **errors([row["error"] for row in timed]),
        "inside_interval": fmean(map(_inside, timed)) if timed else None,
        "baseline": errors([each["error"] for each in naive]),
        "baseline_from_other_sources": errors([error for error in blind if error is not None]),
        "memory": _memory([row["memory_error"] for row in done if row["memory_error"] is not None]),
    }


def errors(found: Sequence[float]) -> dict[str, float | None]:
    """Median, mean and 90th percentile of the absolute errors, and the median of the errors."""
    if not found:
        return dict.fromkeys(("median", "mean", "p90", "bias"))
    sizes = sorted(map(abs, found))
    return {"median": median(sizes), "mean": fmean(sizes), "p90": quantile(sizes, 0.9), "bias": median(found)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie; between two values in proportion."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def beats_its_flops(row: dict[str, Any]) -> bool:
    """Whether a forecast is faster than its matrix products at peak, which would be a defect."""
    return bool(row["at_peak_s"]) and row["predicted"]["step_time_s"] < row["at_peak_s"]


def _memory(found: Sequence[float]) -> dict[str, Any]:
    return {"compared": len(found), **errors(found)}


def measured_step(row: dict[str, Any]) -> float:
    """The measured time [s] of an answer that has an error."""
    return float(row["predicted"]["step_time_s"] / (1 + row["error"]))


def _inside(row: dict[str, Any]) -> bool:
    low, high = row["predicted"]["interval_90_s"]
    return bool(low <= measured_step(row) <= high)


def _reason(row: dict[str, Any]) -> str:
    """A reason without what differs from row to row, the place in a list of schemes; of a line that could not be read
    the line is all there is to go by."""
    reason = str(row["reason"])
    return reason if row["source"] is None else re.sub(r"^\S+:\d+:? |\[\d+\]", "", reason)
