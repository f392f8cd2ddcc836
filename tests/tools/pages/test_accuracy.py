"""docs/accuracy.md: every compared run is counted once in each table, and the largest errors are listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshcast.experiments.render.terminal.published import fit_published, validate_published
from meshcast.validation.published.answer import answer
from meshcast.validation.published.clusters import forget_cluster
from meshcast.validation.published.rows import PublishedHardware, PublishedRun, read
from meshcast.validation.published.summary import compute_figures
from tests.validation.published.test_peak_spreads import draw
from tools.pages.accuracy import forecast_forgotten, page
from tools.pages.memory_verdicts import forecast_reported, list_sections

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "published_runs.jsonl"


pytestmark = pytest.mark.slow  # the shipped runs are forecast and fitted for a minute


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    answer, missing = validate_published([DATA])
    assert not missing
    return answer["rows"]


@pytest.fixture(scope="module")
def fit() -> dict:
    return fit_published([DATA])[0]


@pytest.fixture(scope="module")
def text(rows: list[dict], fit: dict) -> str:
    """The page, as if the runs of Megatron-DeepSpeed named their cluster."""
    runs = [run for run in read(DATA) if isinstance(run, PublishedRun) and run.source == "bloom"]
    named = [run.model_copy(update={"hardware": PublishedHardware(inter="Jean Zay")}) for run in runs]
    peaks = draw("torchtitan", "a", 0.05, 20) + draw("megatron-core", "b", 0.05, 20)
    return page(rows, fit, forecast_forgotten(named), list_sections(rows, peaks, [*forecast_reported()]))


def test_the_tables_have_the_figures_of_the_runs(rows: list[dict], text: str) -> None:
    found = compute_figures(rows)
    (counted,) = re.findall(r"^(\d+) runs, (\d+) forecast, (\d+) compared\.$", text, re.MULTILINE)
    assert [int(number) for number in counted] == [found[key] for key in ("rows", "predicted", "compared")]
    (classes,) = re.findall(r"## Step time\n\n(.*?)\n\n", text, re.DOTALL)
    last = [cell.strip() for cell in classes.splitlines()[-1].split("|")[1:-1]]
    assert last[:4] == ["all", str(found["compared"]), f"{100 * found['median']:.1f}", f"{100 * found['p90']:.1f}"]
    dense = [row for row in rows if row["class"] == "dense" and row["error"] is not None]
    for head in ("program", "GPU, number format", "source"):
        table, *_ = re.findall(rf"^\| {head} \| runs .*?\n\n", text, re.MULTILINE | re.DOTALL)
        counts = [int(line.split("|")[2]) for line in table.strip().splitlines()[2:]]
        assert sum(counts[:-1]) <= counts[-1] == len(dense)


def test_the_largest_errors_come_first(rows: list[dict], text: str) -> None:
    (table,) = re.findall(r"## The \d+ largest errors\n.*", text, re.DOTALL)
    errors = [abs(float(line.split("|")[2])) for line in table.strip().splitlines()[4:]]
    assert errors == sorted(errors, reverse=True) and len(errors) == 30
    worst = max((row for row in rows if row["error"] is not None), key=lambda row: abs(row["error"]))
    assert f"`{worst['id']}`" in table.splitlines()[4]


def test_the_page_in_docs_has_the_sections_of_today(text: str) -> None:
    shown = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    heads = [[line for line in page.splitlines() if line.startswith("#")] for page in (shown, text)]
    assert heads[0] == heads[1]


def test_every_model_is_forecast_with_a_fit_to_the_others(fit: dict, text: str) -> None:
    (table,) = re.findall(r"^\| runs \| \| shipped .*?\n\n", text, re.MULTILINE | re.DOTALL)
    counts = {line.split("|")[1].strip(): int(line.split("|")[2]) for line in table.strip().splitlines()[2:]}
    assert counts["experts"] == sum(count for name, count in counts.items() if name.startswith("of them"))
    groups = fit["classes"]["experts"]["left_out"]["model"]
    assert {f"of them {one['group']}" for one in groups} < set(counts) and len(groups) > 2
    # Its own model moves the fit, so without it the forecast of at least one is another.
    assert any(len({of["median"] for of in one["errors"].values()}) > 1 for one in groups)


def test_runs_of_a_known_cluster_are_forecast_without_it_too(rows: list[dict], text: str) -> None:
    (table,) = re.findall(r"^\| node \| runs .*?\n\n", text, re.MULTILINE | re.DOTALL)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    bloom = [row for row in rows if row["source"] == "bloom"]
    assert [one[:3] for one in cells] == [["`jean-zay-a100`", str(len(bloom)), word] for word in ("with", "without")]


def test_a_forgotten_cluster_is_forecast_as_any_other() -> None:
    run = next(run for run in read(DATA) if isinstance(run, PublishedRun) and run.source == "bloom")
    named = run.model_copy(update={"hardware": PublishedHardware(inter="4x100Gb Omni-Path (Jean Zay)")})
    ((node, (without,)),) = forecast_forgotten([run, named]).items()
    assert node == "jean-zay-a100"
    assert without["predicted"]["step_time_s"] < answer(named)["predicted"]["step_time_s"]
    assert without["predicted"] == answer(forget_cluster(named))["predicted"]
