"""docs/planners.md: a row for every planner, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

from meshcast.experiments.planning.benchmark.rows import planners_of_jobs
from meshcast.experiments.planning.planner import find_planner, planner_names

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "planners.md").read_text("utf-8")


def test_every_planner_has_a_row_with_its_paper_and_modes() -> None:
    section = PAGE.partition("## The planners")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", section, re.MULTILINE))
    assert sorted(rows) == planner_names()
    for name, row in rows.items():
        planner = find_planner(name)
        cells = [cell.strip() for cell in row.split("|")]
        assert planner.paper.ref in cells[0], name
        assert cells[3] == ", ".join(planner.modes), name


def test_the_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    space: dict[str, object] = {"print": lambda *values: None}
    exec(example, space)
    assert space["found"].proof.optimal  # type: ignore[attr-defined]


def test_the_benchmark_tables_have_every_planner_of_jobs_and_none_beats_the_optimum() -> None:
    tables = PAGE.partition("## Benchmark tables")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert len(tables) == 4
    for table in tables:
        rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", table, re.MULTILINE))
        assert sorted(rows) == planners_of_jobs(), table[:60]
        assert all(float(cells.split("|")[3].strip(" %") or 0) >= 0 for cells in rows.values())
