"""Reports, sweeps and searches in Python: their tables, figures and HTML."""

from __future__ import annotations

import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
from matplotlib.figure import Figure

import meshcast
from meshcast import MeshcastError, search, simulate, simulator, sweep
from meshcast.experiments.render.terminal.forecast import page, render
from tests.draws import drawn

JOB: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": 1},
    "plan": {"tp": 2, "pp": 2},
}
SWEEP: dict[str, Any] = {"job": JOB, "vary": {"plan.tp": [1, 2, 3], "batch.micro": [1, 2]}}


@pytest.fixture(scope="module")
def report() -> meshcast.Report:
    return simulate(JOB)


class Text(HTMLParser):
    """Collects the text of a page, and its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags = "", list[str]()
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


def test_it_is_the_forecast_of_the_simulator(report: meshcast.Report) -> None:
    plain = simulator.simulate(JOB)
    assert isinstance(report, meshcast.Report) and isinstance(report, simulator.Report)
    assert report.to_dict() == plain.to_dict()
    assert report.breakdown.parts == plain.breakdown.parts and report.breakdown.hidden == plain.breakdown.hidden
    assert repr(report) == repr(plain)


def test_html_is_the_page_of_predict(report: meshcast.Report) -> None:
    found = Text(report._repr_html_())
    lines = [line.rstrip() for line in found.text.splitlines()]
    assert lines == render(page(report)).splitlines()
    assert set(found.tags) == {"pre", "code", "span"}


def test_html_escapes_names() -> None:
    odd = {**JOB, "model": {**JOB["model"], "name": "<script>alert(1)</script>\x1b[31m"}}
    html = simulate(odd)._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html and "\x1b" not in html


def test_a_frame_has_the_columns_and_values_of_a_sweep(report: meshcast.Report) -> None:
    rows = sweep({"job": JOB, "vary": {"plan.tp": [2]}}, workers=1).to_frame()
    own = report.to_frame()
    assert len(own) == 1
    shared = [name for name in rows.columns if name not in ("index", "plan.tp", "reason")]
    assert set(shared) <= set(own.columns)
    pandas.testing.assert_frame_equal(own[shared], rows[shared], check_dtype=False)
    assert len(pandas.concat([own, own])) == 2


@pytest.mark.parametrize("name", drawn(["breakdown", "memory", "timeline", "roofline", "communication"], keep=3))
def test_figures(report: meshcast.Report, name: str, tmp_path: Path) -> None:
    figure = getattr(report, name)()
    assert isinstance(figure, Figure) and figure.axes
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]  # what IPython asks for
    figure.savefig(tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text("utf-8")


@pytest.mark.parametrize(("width", "inches"), [("column", 3.33), ("page", 7.0), ("slide", 13.33)])
@pytest.mark.slow
def test_figures_are_as_wide_as_they_are_made_for(
    report: meshcast.Report, width: Any, inches: float, tmp_path: Path
) -> None:
    figure = report.memory(width=width)
    for suffix in ("pdf", "svg", "png"):
        figure.savefig(tmp_path / f"figure.{suffix}")
    (box,) = re.findall(rb"/MediaBox \[ 0 0 ([0-9.]+) ", (tmp_path / "figure.pdf").read_bytes())
    assert float(box) == pytest.approx(72 * inches, abs=0.5)
    (points,) = re.findall(r'<svg [^>]*?width="([0-9.]+)pt"', (tmp_path / "figure.svg").read_text("utf-8"))
    assert float(points) == pytest.approx(72 * inches, abs=0.5)
    with pytest.raises(MeshcastError, match="no width of this name"):
        report.roofline(width="poster")  # type: ignore[arg-type]


def test_communication_by_stage(report: meshcast.Report) -> None:
    words = [text.get_text() for text in report.communication(by="stage").texts]
    assert any("between 2 stages" in word for word in words)
    with pytest.raises(MeshcastError, match="no grouping of this name"):
        report.communication(by="nodes")  # type: ignore[arg-type]


def test_a_sweep_in_memory_and_in_a_file(tmp_path: Path) -> None:
    kept = sweep(SWEEP, workers=1)
    written = sweep(SWEEP, tmp_path / "rows.parquet", workers=1)
    pandas.testing.assert_frame_equal(kept.to_frame(), written.to_frame())
    pandas.testing.assert_frame_equal(kept.to_frame(), pandas.read_parquet(tmp_path / "rows.parquet"))
    assert kept.fields == ("plan.tp", "batch.micro") and kept.summary["out"] == "in memory"
    assert (
        kept.summary["status"] == written.summary["status"] == {"fits": 4, "tight": 0, "does-not-fit": 0, "invalid": 2}
    )
    assert re.search(r"6 points: 4 fit", Text(kept._repr_html_()).text) and "6 points, 4 fit" in repr(kept)
    del kept.to_frame()["status"]
    assert "status" in kept.to_frame()


def test_a_search_gives_reports_that_draw(tmp_path: Path) -> None:
    found = search({**JOB, "plan": {"tp": [1, 2], "pp": [1, 2]}}, top=2, workers=1)
    frame = found.to_frame()
    assert list(frame["plan.tp"]) == [plan.changes["plan.tp"] for plan in found.best]
    assert list(frame.step_time_s) == [plan.report.step_time for plan in found.best]
    assert isinstance(found.best[0].report, meshcast.Report)
    assert isinstance(found.best[0].report.timeline(), Figure)
    html = Text(found._repr_html_())
    assert "plans in" in html.text and set(html.tags) == {"pre", "code", "span"} and len(frame) == len(found.best)
    assert repr(found).startswith("<SearchResult: 4 plans, 2 listed, gap 0.00%; best ") and len(repr(found)) < 150


def test_a_wrong_sweep_is_refused() -> None:
    with pytest.raises(MeshcastError, match="vary"):
        sweep({"job": JOB, "vary": {}}, workers=1)


def test_results_can_be_pickled_and_sent_to_processes(report: meshcast.Report) -> None:
    found: meshcast.Report = pickle.loads(pickle.dumps(report))
    assert found.to_dict() == report.to_dict() and found.assumed == report.assumed
    assert found.memory().axes and found._repr_html_() == report._repr_html_()
    job = meshcast.load_job(JOB)
    assert pickle.loads(pickle.dumps(job)).to_dict() == job.to_dict()
    # Varuna decides at run time: noise builds its program again, for other orders.
    plan = {"pp": 4, "schedule": "varuna", "recompute": "full"}
    noisy = simulate(JOB | {"plan": plan, "noise": {"steps": 2, "jitter": 0.1}})
    assert pickle.loads(pickle.dumps(noisy)).to_dict() == noisy.to_dict()
    searched = search({**JOB, "plan": {"tp": "auto"}}, workers=1)
    assert pickle.loads(pickle.dumps(searched)).to_dict() == searched.to_dict()


def test_numbers_of_tables_are_values_of_jobs(report: meshcast.Report) -> None:
    rows = sweep(
        {"job": JOB, "vary": {"plan.tp": numpy.array([1, 2]), "batch.micro": range(1, 3)}}, workers=1
    ).to_frame()
    best = rows[rows["status"] == "fits"].iloc[-1]
    plan = {**JOB["plan"], "tp": best["plan.tp"]}
    again = simulate({**JOB, "plan": plan, "batch": {"global": numpy.int64(16), "micro": best["batch.micro"]}})
    assert again.step_time == best["step_time_s"]


def test_changes_may_be_a_mapping_or_one_text() -> None:
    wanted = meshcast.load_job(JOB, ["plan.tp=4", "plan.schedule=gpipe"]).to_dict()
    assert meshcast.load_job(JOB, {"plan.tp": numpy.int64(4), "plan.schedule": "gpipe"}).to_dict() == wanted
    assert meshcast.load_job(JOB, "plan.tp=4").to_dict() == meshcast.load_job(JOB, ["plan.tp=4"]).to_dict()


def test_missing_figures_are_not_objects(report: meshcast.Report) -> None:
    assert report.to_frame()["days"].dtype == float and report.to_frame()["days"].isna().all()


def test_wrong_words_in_python_are_named() -> None:
    engine: Any = "fast"
    with pytest.raises(MeshcastError, match=r"engine is 'fast': there is no such engine\. Valid: matrices"):
        simulate(JOB, engine=engine)
    with pytest.raises(MeshcastError, match=r"workers is 0: at least one process"):
        sweep(SWEEP, workers=0)
    with pytest.raises(MeshcastError, match=r"plan\.tp is 'auto': must be a number: only a search opens fields"):
        simulate({**JOB, "plan": {"tp": "auto"}})
