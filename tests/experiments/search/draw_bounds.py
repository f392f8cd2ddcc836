"""Draws points of searches, holds their bounds against their forecasts, and makes the table of docs/search.md. By hand:

    python -m tests.experiments.search.draw_bounds draw ROWS.jsonl --seconds 300 --seed 1 dense unfused cp experts gpt3
    python -m tests.experiments.search.draw_bounds table ROWS.jsonl [MORE.jsonl ...]

A name is one of `JOBS`, `LARGE_JOBS` and `NAMED_JOBS`; `name:dualpipe,dualpipe-v` draws pipelines of these schedules
alone. Every row is a point that keeps the rules; a bound above its forecast is written as a violation, and ends `draw`
with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.frontier.group_bounds import GroupBounds
from tests.experiments.search.test_bounds import draw_points, hold_bounds, space_of

Row = dict[str, Any]
"""A drawn point: job, data scheme, schedule (none without a pipeline), shard, order, and bound over forecast of time
and memory; or `violation` in place of the two."""

SCHEDULES = ("1f1b gpipe", "interleaved-1f1b", "breadth-first", "hanayo", "zb-h1 zb-h2 zb-v", "dualpipe dualpipe-v")
FAMILIES: dict[str, Callable[[Row], bool]] = {
    **{name: lambda row, name=name: row["data"] == name and row["shard"] is None  # type: ignore[misc]
       for name in ("ddp", "zero-1", "zero-2", "fsdp", "zero-3")},
    "hybrid shards (zero-1, fsdp)": lambda row: row["shard"] is not None,
    "order dp-pp-cp-tp": lambda row: row["order"].startswith("dp"),
    "without pipeline": lambda row: row["schedule"] == "none",
    **{names.replace(" ", ", "): lambda row, names=names: row["schedule"] in names.split()  # type: ignore[misc]
       for names in SCHEDULES},
}  # fmt: skip
"""The rows of the table: which points each of them counts."""


def draw_rows(job: str, seed: int, seconds: float) -> Iterator[Row]:
    """Yields rows of a job that are drawn in so many seconds. job: its name, and schedules if not all."""
    name, _, schedules = job.partition(":")
    space, end = space_of(name), time.monotonic() + seconds
    groups = GroupBounds(space, PointBounds(space))
    kept = set(schedules.split(",")) if schedules else None
    for point in draw_points(space, seed, lambda each: kept is None or (each.pp > 1 and each.schedule in kept)):
        _, pipeline, step = point
        row: Row = {"job": name, "data": step.data, "schedule": pipeline.schedule if pipeline.pp > 1 else "none"}
        row |= {"shard": step.shard, "order": pipeline.mesh_order}
        try:
            if (ratios := hold_bounds(groups, point)) is not None:
                yield row | dict(zip(("time", "memory"), ratios, strict=True))
        except AssertionError:
            yield row | {"violation": repr(point)}
        if time.monotonic() > end:
            return


def make_table(rows: list[Row]) -> str:
    """Returns the table of docs/search.md, below a line with what all rows have."""
    held = [row for row in rows if "time" in row]
    median: Any = np.median([(row["time"], row["memory"]) for row in held], axis=0)
    lines = [
        f"{len(held):,} points, {len(rows) - len(held)} violations, median {median[0]:.3f} of the time, "
        f"{median[1]:.3f} of the memory",
        "",
        "| plans | drawn | time: 1 % | 10 % | median | memory: 10 % | median |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, counts in FAMILIES.items():
        ratios = np.array([(row["time"], row["memory"]) for row in held if counts(row)])
        if len(ratios):
            first, tenth, middle = np.quantile(ratios[:, 0], (0.01, 0.1, 0.5))
            low, memory = np.quantile(ratios[:, 1], (0.1, 0.5))
            figures = f"{first:.2f} | {tenth:.2f} | {middle:.3f} | {low:.2f} | {memory:.2f}"
            lines.append(f"| {name} | {len(ratios):,} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw, table = commands.add_parser("draw"), commands.add_parser("table")
    draw.add_argument("rows", type=Path)
    draw.add_argument("jobs", nargs="+")
    draw.add_argument("--seconds", type=float, default=300.0, help="of each job")
    draw.add_argument("--seed", type=int, default=0)
    table.add_argument("rows", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "table":
        print(make_table([json.loads(line) for path in options.rows for line in path.read_text().splitlines()]))
        return 0
    broken = 0
    with options.rows.open("a") as file:
        for job in options.jobs:
            for row in draw_rows(job, options.seed, options.seconds):
                broken += "violation" in row
                print(json.dumps(row), file=file, flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
