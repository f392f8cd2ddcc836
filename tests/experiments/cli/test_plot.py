"""`meshcast plot` of schedules and jobs, and `--width` of every command that draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from meshcast.experiments.cli.app import app
from meshcast.experiments.cli.commands import COMMANDS, find_options
from meshcast.experiments.cli.plot import OF_JOBS
from meshcast.experiments.render.matplotlib import style
from tests.draws import drawn

JOB = "model: llama3-8b\ncluster: dgx-h100:2\nbatch: {global: 16}\nplan: {tp: 8, pp: 2}\n"


def run(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")
    return tmp_path / "job.yaml"


def is_png(path: Path, width: Any = "page") -> bool:
    from PIL import Image

    with Image.open(path) as image:
        return bool(image.format == "PNG" and abs(image.width / style.DPI - style.WIDTHS[width].width) < 0.01)


def test_schedules_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("plot", "schedules", "1f1b", "interleaved-1f1b:2", "dualpipe", "--p", 2, "--m", 4)
    assert done.exit_code == 0 and done.stdout.startswith("wrote schedules.png\n")
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert rows[0] == ["schedule", "chunks", "slots", "bubble", "%", "activations", "held"]
    assert rows[2][:4] == ["1f1b", "1", "15", "20.0"] and rows[3][:2] == ["interleaved-1f1b", "2"]
    assert is_png(tmp_path / "schedules.png")
    again = run("plot", "schedules", "zb-h1", "--p", 2, "--m", 4, "--width", "slide", "--out", "a.png")
    assert again.exit_code == 0 and is_png(tmp_path / "a.png", "slide")


@pytest.mark.parametrize("kind", drawn(OF_JOBS, keep=("timeline", "communication")))
def test_figures_of_a_job(job: Path, kind: str) -> None:
    done = run("plot", kind, job, "--set", "batch.global=8", "--width", "column")
    assert done.exit_code == 0, done.output
    assert is_png(job.parent / f"{kind}.png", "column")


def test_jobs_side_by_side(job: Path) -> None:
    other = job.parent / "other.yaml"
    other.write_text(JOB.replace("tp: 8, pp: 2", "tp: 4, pp: 4"), "utf-8")
    for kind in ("schedules", "breakdown"):
        done = run("plot", kind, job, other, "--out", f"{kind}.svg")
        assert done.exit_code == 0, done.output
        text = (job.parent / f"{kind}.svg").read_text("utf-8")
        assert text.startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("foo",), "there is no plot of this kind"),
        (("schedules",), "the plot has no subject"),
        (("schedules", "1f1b"), "--p"),
        (("schedules", "1f1b", "--p", "4"), "--m"),
        (("schedules", "nosuch", "--p", "4", "--m", "8"), "nosuch"),
        (("schedules", "1f1b:x", "--p", "4", "--m", "8"), "a number of chunks"),
        (("schedules", "1f1b", "job.yaml"), "no common axis"),
        (("schedules", "job.yaml", "--p", "4"), "jobs have their own"),
        (("schedules", "1f1b", "--p", "4", "--m", "8", "--set", "plan.tp=4"), "it is for jobs"),
        (("schedules", "1f1b", "--p", "4", "--m", "8", "--why", "1,2"), "takes no such option"),
        (("schedules", "1f1b", "--p", "4", "--m", "8", "--out", "a.jpg"), ".png, .svg or .pdf"),
        (("roofline", "job.yaml", "--by", "node"), "takes no such option"),
        (("communication", "job.yaml", "--by", "rack"), "there is no grouping"),
        (("timeline", "job.yaml", "job.yaml"), "is of one job"),
        (("memory", "none.yaml"), "none.yaml"),
        (("memory", "job.yaml", "--width", "poster"), "there is no width of this name"),
        (("results.parquet", "--p", "4"), "a sweep takes no such option"),
    ],
)
def test_mistakes(job: Path, words: tuple[str, ...], message: str) -> None:
    done = run("plot", *words)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in job.parent.iterdir()] == ["job.yaml"]


def test_every_command_that_draws_has_a_width() -> None:
    fields = {name: find_options(name).model_fields for name in COMMANDS}
    drawing = {name for name in COMMANDS if "plot" in fields[name] or name == "plot"}
    assert all("width" in fields[name] for name in drawing)
    assert drawing == {"predict", "plot", "run", "scale", "compare", "why", "plan", "search", "validate"}


@pytest.mark.slow
def test_widths_of_other_commands(job: Path) -> None:
    assert run("predict", job, "--plot", "a.png", "--width", "slide").exit_code == 0
    assert is_png(job.parent / "a.png", "slide")
    done = run("compare", job, "--set", "plan.tp=4", "--plot", "b.png", "--width", "column")
    assert done.exit_code == 0 and is_png(job.parent / "b.png", "column")
    alone = run("predict", job, "--width", "slide")
    assert alone.exit_code == 2 and "--width" in alone.stderr and "it is for a plot" in alone.stderr
    refused = run("validate", "claims", "--width", "slide")
    assert refused.exit_code == 2 and "validate claims takes no such option" in refused.stderr
