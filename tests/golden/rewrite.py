"""Golden predictions: what the forecasts of some jobs were when they were last looked at.

`make golden` (``python -m tests.golden.rewrite``) forecasts the jobs in `jobs.yaml` again, prints every figure that
changed and rewrites the files. `test_golden.py` compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hardware.errors import MeshcastError
from hardware.load import read_yaml
from simulator import simulate
from simulator.forecast.shared_work import SharedWork
from simulator.report.report import Report

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

COMMAND = "make golden"

RTOL = 1e-9
"""Figures that are farther apart than this have changed."""

NOISE = 1e-12
"""Of the step: parts of it that differ by less are the rounding of sums over all ops."""

FIGURES = 13
"""Significant figures that are kept."""


class Change(NamedTuple):
    """A field that is not what it was; None where it was not, or is not any more."""

    job: str
    field: str
    old: Any
    new: Any


# ---------------------------------------------------------------------------------------- forecasts


def jobs() -> dict[str, Any]:
    """The jobs by name."""
    found = read_yaml(HERE / "jobs.yaml").data
    return {name: str(ROOT / job) if isinstance(job, str) else job for name, job in found.items()}


def file_of(name: str) -> Path:
    return HERE / f"{name}.json"


def forecasts(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The summaries of some jobs as they come out now."""
    shop, known = SharedWork(), jobs()
    for name in names:
        try:
            yield name, summary(simulate(known[name], shared_work=shop))
        except MeshcastError as error:
            raise error.at(f"{HERE.name}/jobs.yaml: {name}") from None


def summary(report: Report) -> dict[str, Any]:
    """What is kept of a forecast, in the units of its JSON answer."""
    answer = report.to_dict()
    memory = answer["memory"]
    stages = memory["stages"]
    worst = max(stages, key=lambda stage: stage["peak_allocated_gib"])
    chosen = {"first": stages[0], "last": stages[-1], "worst": worst}
    low, high = answer["interval_90_s"]
    kept = {
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
    return _rounded(kept, NOISE * answer["step_time_s"])


def _rounded(value: Any, noise: float) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item, noise) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{FIGURES}g}") if abs(value) > noise else 0.0
    return value


# ------------------------------------------------------------------------------------------- changes


def stored(name: str) -> dict[str, Any] | None:
    """What was kept of a job; None where there is nothing, or nothing that can be read."""
    try:
        found = json.loads(file_of(name).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


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
    """A tree by dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= fields(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def alike(old: Any, new: Any, noise: float) -> bool:
    """Whether a field is what it was; `noise`: a difference that is none."""
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


def main() -> int:
    """Rewrites the files of what changed; all are forecast first, so a mistake leaves every file as it was."""
    try:
        found = dict(forecasts(jobs()))
    except MeshcastError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    known = {name: stored(name) for name in found}
    fresh = [name for name, old in known.items() if old is None]
    told = [
        change for name, new in found.items() if known[name] is not None for change in changes(name, known[name], new)
    ]
    stale = [path for path in sorted(HERE.glob("*.json")) if path.stem not in found]
    changed = list(dict.fromkeys(change.job for change in told))
    for name in (*fresh, *changed):
        file_of(name).write_text(json.dumps(found[name], indent=2, ensure_ascii=False) + "\n", "utf-8")
    for path in stale:
        path.unlink()
    if told:
        print(table(told), end="\n\n")
    for names, what in ((fresh, "new"), ([path.stem for path in stale], "gone")):
        if names:
            print(f"{what}: {', '.join(names)}")
    print(f"{len(found)} golden predictions: {len(changed)} changed, {len(fresh)} new, {len(stale)} gone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
