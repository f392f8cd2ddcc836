"""`meshcast plot` of schedules and jobs, and `--width` of every command that draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.cli.commands import COMMANDS, find_options
from meshcast.experiments.cli.plot import OF_JOBS
from meshcast.experiments.render.matplotlib import style
from tests.draws import drawn
from tests.experiments.cli.samples import run

JOB = """{model: {layers: 4, hidden: 512, heads: 8, vocab: 1000, seq: 256}, cluster: "dgx-h100:1", batch: {global: 8},
plan: {tp: 4, pp: 2}}"""


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
    again = run("plot", "schedules", "zb-h1", "--p", 2, "--m", 4, "--width", "column", "--out", "a.png")
    assert again.exit_code == 0 and is_png(tmp_path / "a.png", "column")


@pytest.mark.parametrize("kind", drawn(OF_JOBS, keep=("timeline", "communication")))
def test_figures_of_a_job(job: Path, kind: str) -> None:
    done = run("plot", kind, job, "--set", "batch.global=4", "--width", "column")
    assert done.exit_code == 0, done.output
    assert is_png(job.parent / f"{kind}.png", "column")


def test_jobs_side_by_side(job: Path) -> None:
    other = job.parent / "other.yaml"
    other.write_text(JOB.replace("tp: 4, pp: 2", "tp: 2, pp: 4"), "utf-8")
    for kind in ("schedules", "breakdown"):
        done = run("plot", kind, job, other, "--out", f"{kind}.svg")
        assert done.exit_code == 0, done.output
        text = (job.parent / f"{kind}.svg").read_text("utf-8")
        assert text.startswith("<?xml")


def test_every_command_that_draws_has_a_width() -> None:
    fields = {name: find_options(name).model_fields for name in COMMANDS}
    drawing = {name for name in COMMANDS if "plot" in fields[name] or name == "plot"}
    assert all("width" in fields[name] for name in drawing)
    assert drawing == {"predict", "plot", "run", "scale", "compare", "why", "plan", "search", "size", "validate"}


@pytest.mark.slow
def test_widths_of_other_commands(job: Path) -> None:
    assert run("predict", job, "--plot", "a.png", "--width", "slide").exit_code == 0
    assert is_png(job.parent / "a.png", "slide")
    done = run("compare", job, "--set", "plan.tp=4", "--plot", "b.png", "--width", "column")
    assert done.exit_code == 0 and is_png(job.parent / "b.png", "column")
