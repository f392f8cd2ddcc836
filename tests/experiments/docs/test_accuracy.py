"""docs/accuracy.md: every compared run is counted once in each table, and the largest errors are listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.docs.accuracy import page
from experiments.pages.published import validate_published
from validation.published.summary import compute_figures

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    answer, missing = validate_published([ROOT / "tests" / "data" / "published_runs.jsonl"])
    assert not missing
    return answer["rows"]


def test_the_tables_have_the_figures_of_the_runs(rows: list[dict]) -> None:
    text = page(rows)
    found = compute_figures(rows)
    (counted,) = re.findall(r"^(\d+) runs, (\d+) forecast, (\d+) compared\.$", text, re.MULTILINE)
    assert [int(one) for one in counted] == [found[key] for key in ("rows", "predicted", "compared")]
    (classes,) = re.findall(r"## Step time\n\n(.*?)\n\n", text, re.DOTALL)
    last = [cell.strip() for cell in classes.splitlines()[-1].split("|")[1:-1]]
    assert last[:4] == ["all", str(found["compared"]), f"{100 * found['median']:.1f}", f"{100 * found['p90']:.1f}"]
    dense = [row for row in rows if row["class"] == "dense" and row["error"] is not None]
    for head in ("program", "GPU, number format", "source"):
        table, *_ = re.findall(rf"^\| {head} \| runs .*?\n\n", text, re.MULTILINE | re.DOTALL)
        counts = [int(line.split("|")[2]) for line in table.strip().splitlines()[2:]]
        assert sum(counts[:-1]) <= counts[-1] == len(dense)


def test_the_largest_errors_come_first(rows: list[dict]) -> None:
    (table,) = re.findall(r"## The \d+ largest errors\n.*", page(rows), re.DOTALL)
    errors = [abs(float(line.split("|")[2])) for line in table.strip().splitlines()[4:]]
    assert errors == sorted(errors, reverse=True) and len(errors) == 30
    worst = max((row for row in rows if row["error"] is not None), key=lambda row: abs(row["error"]))
    assert f"`{worst['id']}`" in table.splitlines()[4]


def test_the_page_in_docs_has_the_sections_of_today(rows: list[dict]) -> None:
    shown = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    heads = [[line for line in text.splitlines() if line.startswith("#")] for text in (shown, page(rows))]
    assert heads[0] == heads[1]
