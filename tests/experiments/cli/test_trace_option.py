"""`meshcast predict --trace`: the file is written and named on the page; an unwritable path is refused at once."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from tests.experiments.cli.samples import run


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("model: gpt2-124m\ncluster: dgx-h100:1\nplan: {tp: 2, pp: 2}\n", "utf-8")
    return path


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.JSON"])
def test_a_trace_is_written(job: Path, name: str) -> None:
    path = job.parent / name
    result = run("predict", job, "--trace", path)
    assert result.exit_code == 0, result.output
    assert name in result.stdout and "ui.perfetto.dev" in result.stdout
    text = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    assert json.loads(text)["traceEvents"]


def test_json_stays_json(job: Path) -> None:
    result = run("predict", job, "--json", "--trace", job.parent / "a.json")
    assert json.loads(result.stdout)["status"] == "fits" and (job.parent / "a.json").exists()


@pytest.mark.parametrize("option", ["--trace", "--plot"])
def test_a_file_that_may_not_be_written(job: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda _, mode, **__: mode != os.W_OK)
    result = run("predict", job, option, job.parent / ("a.json" if option == "--trace" else "a.png"))
    assert result.exit_code == 2 and "permission denied" in result.stderr and option in result.stderr
