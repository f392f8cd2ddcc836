"""Golden predictions: jobs, and what their forecasts were when they were last looked at.

A file `<name>.yaml` holds a job as in a job file (or the path of one, from the root of the repository) and, behind it,
its forecast: the step time, the peak memory of every stage and the breakdown; with `keep: all` every figure and
sentence of the answer. `make golden` (``python -m tests.golden.rewrite``) forecasts all jobs again, prints every figure
that changed and rewrites what stands behind `forecast:`. `test_golden.py` compares. A new job is a file without a
forecast. Jobs are small where their subject allows it: all are played in a few seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.load import read_yaml
from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from meshcast.validation.contract.composed import is_installed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

COMMAND = "make golden"

RTOL = 1e-9
"""Relative difference from which on a figure has changed."""

NOISE = 1e-12
"""Of the step: parts of it that differ by less are the rounding of sums over all ops."""

FIGURES = 13
"""Significant figures that are kept."""


class Change(NamedTuple):
    """A field whose value has changed; None where it is missing."""

    job: str
    field: str
    old: Any
    new: Any


# ---------------------------------------------------------------------------------------- forecasts


class Golden(NamedTuple):
    """A file of this folder.

    job: as in a job file, or the path of one.
    whole: whether every figure is kept.
    forecast: what is kept; None for a new job.
    """

    job: Any
    whole: bool
    forecast: dict[str, Any] | None


def names() -> list[str]:
    """The names of all jobs."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def file_of(name: str) -> Path:
    return HERE / f"{name}.yaml"


def stored(name: str) -> Golden:
    """The content of a job's file."""
    fields = read_yaml(file_of(name)).data
    job = fields["job"]
    job = str(ROOT / job) if isinstance(job, str) else job
    return Golden(job, fields.get("keep") == "all", fields.get("forecast"))


@cache
def uses(name: str) -> tuple[str, ...]:
    """The schemes of a job."""
    return tuple(entry.use for entry in load_job(stored(name).job).plan.schemes)


def playable(name: str) -> bool:
    """Whether the packages are installed that the schemes of a job need."""
    return all(map(is_installed, uses(name)))


def reports(names: Iterable[str]) -> Iterator[tuple[str, Report]]:
    """The forecasts of some jobs, as of now."""
    shared = SharedWork()
    for name in names:
        try:
            yield name, simulate(stored(name).job, shared_work=shared)
        except MeshcastError as error:
            raise error.at(f"{HERE.name}/{file_of(name).name}") from None


def summary(report: Report, whole: bool) -> dict[str, Any]:
    """The stored part of a forecast, in the units of its JSON answer."""
    answer = report.to_dict()
    if whole:
        kept = whole_answer(answer)
    else:
        peaks = [stage["peak_allocated_gib"] for stage in answer["memory"]["stages"]]
        kept = {"step_time_s": answer["step_time_s"], "peak_allocated_gib": peaks, "breakdown_s": answer["breakdown_s"]}
    return _rounded(kept, NOISE * answer["step_time_s"])


def whole_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure and sentence; of memory the first, the last and the fullest stage."""
    memory = answer["memory"]
    stages = memory["stages"]
    worst = max(stages, key=lambda stage: stage["peak_allocated_gib"])
    chosen = {"first": stages[0], "last": stages[-1], "worst": worst}
    low, high = answer["interval_90_s"]
    return {
        "status": answer["status"],
        "step_time_s": answer["step_time_s"],
        "interval_90_s": {"low": low, "high": high},
        "tokens_per_s_per_gpu": answer["tokens_per_s_per_gpu"],
        "breakdown_s": answer["breakdown_s"],
        "hidden_s": answer["hidden_s"],
        "mfu": answer["mfu"],
        "hfu": answer["hfu"],
        "memory": {
            **{key: value for key, value in memory.items() if key != "stages"},
            "stages": {
                which: {
                    "stage": stage["stage"],
                    "peak_allocated_gib": stage["peak_allocated_gib"],
                    "by": {category: nbytes for category, nbytes in stage["by"].items() if nbytes},
                }
                for which, stage in chosen.items()
            },
        },
        "limits": answer["limits"],
        "warnings": answer["warnings"],
    }


def _rounded(value: Any, noise: float) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item, noise) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, noise) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{FIGURES}g}") if abs(value) > noise else 0.0
    return value


# ------------------------------------------------------------------------------------------- changes


def changes(name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[Change]:
    """The fields of a job that differ, in the order of the summary."""
    before, after = fields(old or {}), fields(new)
    step = after["step_time_s"]
    found = []
    for field in dict.fromkeys((*after, *before)):
        was, now = before.get(field), after.get(field)
        if not alike(was, now, NOISE * step if field.startswith(("breakdown_s", "hidden_s")) else 0.0):
            found.append(Change(name, field, was, now))
    return found


def fields(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A tree by dotted names; items of lists by their numbers."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        below = dict(enumerate(value)) if isinstance(value, list) else value
        found |= fields(below, f"{above}{key}.") if isinstance(below, dict) else {f"{above}{key}": value}
    return found


def alike(old: Any, new: Any, noise: float) -> bool:
    """Whether a field is unchanged; `noise`: the largest difference that is rounding."""
    if isinstance(old, int | float | None) and isinstance(new, int | float | None):
        if (old is None or new is None) and not noise:
            return old is new
        # What lasts no time is not listed.
        old, new = old or 0.0, new or 0.0
        return abs(old - new) <= max(RTOL * max(abs(old), abs(new)), noise)
    return bool(old == new)


def table(found: Iterable[Change]) -> str:
    """Changes as text: job, field, old, new, and by how much in percent."""
    rows = [("job", "field", "old", "new", "change")]
    for job, field, old, new in found:
        rows.append((job, field, _word(old), _word(new), _percent(old, new)))
    # Sentences are as long as they are: they stand in rows of their own.
    widths = [max(len(row[i]) for row in rows if len(row[i]) <= 24 or i < 2) for i in range(5)]
    lines = []
    for job, field, old, new, change in rows:
        if max(len(old), len(new)) > 24:
            lines.append(f"{job:<{widths[0]}}  {field}")
            lines += [f"{'':<{widths[0]}}    {word}: {text}" for word, text in (("old", old), ("new", new))]
        else:
            cells = f"{old:>{widths[2]}}  {new:>{widths[3]}}  {change:>{widths[4]}}"
            lines.append(f"{job:<{widths[0]}}  {field:<{widths[1]}}  {cells}".rstrip())
    return "\n".join(lines)


def _word(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _percent(old: Any, new: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new))
    if not numbers or not old:
        return ""
    change = (new / old - 1) * 100
    return f"{change:+.2f} %" if 0.005 <= abs(change) < 1e4 else f"{change:+.1e} %"


# -------------------------------------------------------------------------------------------- command


def write(name: str, forecast: Mapping[str, Any]) -> None:
    """Puts a forecast behind the job in its file."""
    job, _, _ = file_of(name).read_text("utf-8").partition("\nforecast:")
    style = {"sort_keys": False, "default_flow_style": None, "allow_unicode": True, "width": 120}
    text = yaml.safe_dump({"forecast": dict(forecast)}, **style)  # type: ignore[call-overload]
    file_of(name).write_text(f"{job.rstrip()}\n{text}", "utf-8")


def main() -> int:
    """Rewrites the forecasts that changed; all are made first, so a mistake leaves every file as it was."""
    try:
        found = {name: summary(report, stored(name).whole) for name, report in reports(filter(playable, names()))}
    except MeshcastError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    fresh = [name for name in found if stored(name).forecast is None]
    moved = {name: changes(name, stored(name).forecast, new) for name, new in found.items() if name not in fresh}
    changed = [name for name, some in moved.items() if some]
    for name in (*fresh, *changed):
        write(name, found[name])
    if changed:
        print(table(change for name in changed for change in moved[name]), end="\n\n")
    if fresh:
        print(f"new: {', '.join(fresh)}")
    print(f"{len(found)} golden predictions: {len(changed)} changed, {len(fresh)} new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
