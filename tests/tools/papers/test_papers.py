"""Figures of papers: their files, the forecasts of cheap ones, the images and the page."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from matplotlib import image

from meshcast.hardware.errors import PlanError
from meshcast.validation.claims.judge import ReportCache
from tests.draws import drawn
from tools.papers.__main__ import main
from tools.papers.draw import choose_log_ticks, draw
from tools.papers.figure_file import FigureFile, read_figure, read_figures
from tools.papers.forecasts import ForecastFigure, ForecastPoint, forecast_points
from tools.papers.page import IMAGES, anchor_of, sort_figures, write_page
from tools.papers.words import format_error, format_number, format_share, word_errors

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "papers.md"

FIGURE = """
title: a test
paper: Somebody 2024
link: https://example.org
place: table 1
source: made for the tests
provenance: checked
form: lines
x: {label: GPUs, log: true}
y: {label: s}
jobs:
  base: {model: gpt2, cluster: dgx-h100:1, batch: {global: 8}}
cases:
  plain: {schedule: 1f1b, p: 4, m: 8, t_f: 1, t_b: 1, t_w: 1}
series:
  - name: steps
    from: base
    points:
      - {x: 1, value: 1.0}
      - {x: 8, value: 2.0, set: {batch.global: 16}}
  - name: pipelines
    from: plain
    points:
      - {x: 4, value: 33}
"""


@pytest.fixture(scope="module")
def figures() -> list[FigureFile]:
    return read_figures()


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        path = tmp_path / "test.yaml"
        path.write_text(text, "utf-8")
        return path

    return write_file


# ----------------------------------------------------------------------------------------- the files


def test_every_file_has_a_source_and_points_whose_jobs_exist(figures) -> None:
    assert len(figures) >= 25
    for file in figures:
        assert file.figure.source and file.figure.link.startswith("https://") and file.parts
        for part in file.parts:
            for assumed in part.file.alternatives(part.claim):
                assert all(jobs for jobs in part.file.expand(part.claim, assumed).values())


def test_points_of_claims_are_those_of_the_papers(figures) -> None:
    """A figure is of the source that its claims name: arXiv number or repository."""
    for file in figures:
        numbers = set(re.findall(r"\d{4}\.\d{5}", file.figure.source + file.figure.link))
        for part in file.parts:
            named = set(re.findall(r"\d{4}\.\d{5}", part.claim.source))
            assert not named or not numbers or named & numbers, (file.name, part.claim.id)


def test_provenance_is_that_of_the_claims(figures) -> None:
    for file in figures:
        recalled = any(part.claim.provenance == "recalled" for part in file.parts)
        assert (file.figure.provenance == "recalled") == recalled, file.name


def test_titles_and_anchors_are_unique(figures) -> None:
    assert len({file.title for file in figures}) == len(figures)
    assert len({anchor_of(forecast_above(file)) for file in figures}) == len(figures)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("value: 1.0", "claim: TP1-a", "claim_file has no such claim"),
        ("{x: 1, value: 1.0}", "{x: 1}", "no published number"),
        ("{x: 1, value: 1.0}", "{x: 1, value: 1.0, claim: TP1-a}", "Remove claim, or value"),
        ("    from: base\n", "", "it says no job"),
        ("    from: base\n", "    from: bass\n", "there is no such job"),
        ("{x: 1, value: 1.0}", "{x: one, value: 1.0}", "on an axis of numbers"),
        ("x: {label: GPUs, log: true}\n", "", "lines need an x axis"),
        ("form: lines", "form: rows", "rows have no x axis"),
        ("jobs:\n", "claim_file: megatron-ml\njobs:\n", "validation/claims has no such file"),
        ("jobs:\n", "measure: step_tim_s\njobs:\n", "there is no such number of a forecast"),
        ("form: lines", "form: pie", "form"),
    ],
)
def test_errors_of_a_file_name_the_place_and_the_rule(write, old, new, says) -> None:
    assert old in FIGURE
    with pytest.raises(PlanError) as caught:
        read_figure(write(FIGURE.replace(old, new)))
    assert says in str(caught.value) and "test.yaml" in str(caught.value)


def test_a_claim_with_bounds_is_no_point(write) -> None:
    text = FIGURE.replace("jobs:\n", "claim_file: zero-plus-plus\njobs:\n").replace("value: 1.0", "claim: zero-07")
    with pytest.raises(PlanError, match="bounds and no value"):
        read_figure(write(text))


# ------------------------------------------------------------------------------------- the forecasts


def test_points_are_forecast_once_a_job(write) -> None:
    text = FIGURE.replace("{x: 1, value: 1.0}", "{x: 1, value: 1.0}\n      - {x: 2, value: 1.0}")
    cache = ReportCache()
    steps = forecast_points(read_figure(write(text)).parts, cache)
    assert cache.simulated == 2
    assert steps[0].ours == steps[1].ours != steps[2].ours
    assert steps[3] == ForecastPoint("pipelines", 4, 33, 33, 33)


def test_a_cache_keeps_the_last_reports() -> None:
    cache, job = ReportCache(size=1), {"model": "gpt2", "cluster": "dgx-h100:1"}
    report = cache.forecast(job)
    assert cache.forecast(dict(job)) is report
    cache.forecast(job | {"batch": {"global": 16}})
    assert cache.forecast(job) is not report and cache.simulated == 3


def test_what_is_open_makes_a_range(write) -> None:
    text = FIGURE.replace("    from: base\n", "    from: base\n    assumed: {batch.sequence: [512, 1024]}\n")
    first = forecast_points(read_figure(write(text)).parts)[0]
    assert first.low < first.high and first.ours == (first.low + first.high) / 2


def test_a_job_that_cannot_be_forecast_is_a_point_without_ours(write) -> None:
    found = forecast_points(read_figure(write(FIGURE.replace("batch.global: 16", "batch.global: 13"))).parts)
    assert found[1].ours is None and found[1].deviation is None and "global" in found[1].reason
    figure = ForecastFigure(read_figure(write(FIGURE)), found)
    assert len(figure.deviations) == 2


LARGEST = {"dualpipe-table-2": 1e-9, "chimera-table-2": 1e-3, "chimera-table-2-memory": 1e-9}
LARGEST |= {"megatron-lm-figure-5": 0.15}


@pytest.mark.parametrize(("name", "largest"), LARGEST.items())
def test_cheap_figures_are_as_near_as_the_page_says(name, largest) -> None:
    (file,) = read_figures([name])
    figure = ForecastFigure(file, forecast_points(file.parts))
    assert figure.largest <= largest
    row = re.search(rf"^\| \[.*\(#{anchor_of(figure)}\) \|(.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    cells = [cell.strip() for cell in row[1].split("|")]
    assert cells[:3] == [str(len(figure.points)), format_error(figure.median), format_error(figure.largest)]


# -------------------------------------------------------------------------------- images and the page


def forecast_above(file: FigureFile) -> ForecastFigure:
    """A figure with forecasts that are 5 % above, so that no job runs."""
    values = [(part.series, part.x, part.claim.value) for part in file.parts]
    return ForecastFigure(file, [ForecastPoint(*point, *[1.05 * point[-1]] * 2) for point in values])


FORMS = ["ptd-p-figure-10", "torchtitan-tables", "zero-table-1-1t", "zero-bubble-tables-5-6"]


@pytest.mark.parametrize(("name", "width"), drawn(product(FORMS, ["page", "column"]), keep=3))
def test_figures_are_drawn(tmp_path, name, width) -> None:
    (file,) = read_figures([name])
    draw(forecast_above(file), tmp_path / "plot.png", width)
    assert image.imread(tmp_path / "plot.png").shape[1] in (1400, 666)


def test_a_figure_without_forecasts_is_drawn(tmp_path, write) -> None:
    file = read_figure(write(FIGURE))
    figure = ForecastFigure(file, [ForecastPoint(part.series, part.x, 1.0, None, None, "no") for part in file.parts])
    draw(figure, tmp_path / "plot.svg")
    assert "No forecast" in (tmp_path / "plot.svg").read_text("utf-8") or (tmp_path / "plot.svg").stat().st_size > 5000
    assert word_errors(figure) == "3 points, none of which has a forecast"


def test_the_page_has_every_figure_and_every_point(figures) -> None:
    page = PAGE.read_text("utf-8")
    for file in figures:
        figure = file.figure
        assert f"### {figure.place[0].upper()}{figure.place[1:]}: {figure.title}" in page, file.name
        assert figure.source in page and (not figure.note or figure.note.strip() in page)
        assert f"(#{anchor_of(forecast_above(file))})" in page
        for part in file.parts:
            assert format_number(part.claim.value) in page
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    assert sorted(links) == sorted(f"{IMAGES}/{file.name}.png" for file in figures if file.figure.image)
    for link in links:
        assert (PAGE.parent / link).stat().st_size < 60_000


def test_the_page_of_forecasts_is_written_as_the_file_is(figures) -> None:
    """All lines but those with forecasts are the ones of docs/papers.md."""

    def keep(page: str) -> list[str]:
        return [line for line in page.splitlines() if not line.startswith("|") and " points, " not in line]

    assert keep(write_page(sort_figures([forecast_above(file) for file in figures]))) == keep(PAGE.read_text("utf-8"))


def test_an_unknown_name_is_an_error(capsys) -> None:
    assert main(["ptd-p-table-7"]) == 2
    assert "tools/papers/figures has no such file" in capsys.readouterr().err


def test_a_named_figure_is_drawn_and_its_errors_printed(tmp_path, capsys) -> None:
    assert main(["dualpipe-table-2", "--out", str(tmp_path), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "6 points: deviation 0 % in the median, 0 % at most" in printed
    assert (tmp_path / "dualpipe-table-2.png").is_file() and f"wrote {tmp_path / 'dualpipe-table-2.png'}" in printed


# ---------------------------------------------------------------------------------------------- words


def test_numbers_have_three_digits() -> None:
    texts = {0: "0", 0.00105: "0.00105", 0.5: "0.5", 7.47: "7.47", 100: "100", 163.24: "163.2", 5762: "5,762"}
    assert {value: format_number(value) for value in texts} == texts


def test_errors_in_words() -> None:
    errors = {None: "", 0.0001: "0 %", 0.0123: "1.2 %", 0.0999: "10 %", 2.48: "248 %"}
    assert {value: format_error(value) for value in errors} == errors
    assert format_share(ForecastPoint("", 1, 2.0, 2.1, 2.1)) == "+5.0 %"
    assert format_share(ForecastPoint("", 1, 0.0, 0.0, 0.0)) == "0"
    assert format_share(ForecastPoint("", 1, 2.0, None, None)) == ""


def test_ticks_of_logarithmic_axes() -> None:
    assert choose_log_ticks(40, 9000) == [50, 100, 200, 500, 1000, 2000, 5000]
    assert choose_log_ticks(0.1, 20000) == [0.1, 1, 10, 100, 1000, 10000]


def test_the_example_of_the_page_is_a_figure(write) -> None:
    page = (ROOT / "docs" / "validation.md").read_text("utf-8").partition("## Figures of papers")[2]
    file = read_figure(write(re.search(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]))
    assert [part.claim.value for part in file.parts] == [153, 149, 163]
