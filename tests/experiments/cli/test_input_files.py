"""Every command that reads a file refuses pipes, devices and bombs with one message, at once."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from tests.experiments.cli.samples import JOB
from tests.experiments.cli.test_mistakes import refusal

READERS = {
    "job": ("predict", "FILE.yaml"),
    "sweep": ("sweep", "FILE.yaml", "--out", "out.parquet"),
    "cluster": ("predict", "job.yaml", "--set", "cluster=FILE.yaml"),
    "model": ("predict", "job.yaml", "--set", "model=FILE.yaml"),
    "config.json": ("predict", "job.yaml", "--set", "model=FILE.json"),
    "published": ("validate", "published", "FILE.jsonl"),
    "pipeline": ("validate", "pipeline", "FILE.jsonl"),
    "kernels": ("validate", "kernels", "FILE.csv"),
    "stages": ("validate", "stages", "FILE.json"),
    "trace": ("validate", "trace", "FILE.json", "--job", "job.yaml"),
    "nccl": ("import", "nccl-tests", "FILE.txt", "--job", "job.yaml", "--out", "out.json"),
    "schedule": ("list", "schedule", "FILE.csv"),
    "calibration": ("predict", "job.yaml", "--calibration", "folder"),
    "campaign": ("measure", "campaign", "FILE.yaml", "--out", "out"),
    "plot": ("plot", "FILE.parquet", "--out", "out.png"),
}


def placed(tmp_path: Path, words: tuple[str, ...]) -> tuple[list[str], Path]:
    """The command with paths in `tmp_path`, and the file that it reads."""
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")
    (tmp_path / "folder").mkdir()
    name = next((word.rpartition("=")[2] for word in words if "FILE" in word), "folder/h100-sxm.yaml")
    found = [word if "=" not in word else word.replace("=", f"={tmp_path}/") for word in words]
    own = ("folder", "job.yaml", "out", "out.json", "out.png", "out.parquet", name)
    return [f"{tmp_path}/{word}" if word in own else word for word in found], tmp_path / name


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_and_a_device_are_refused(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # messages shorten long paths
    words, path = placed(tmp_path, READERS[reader])
    words = [word.replace(f"{tmp_path}/", "") for word in words]
    os.mkfifo(path)
    assert path.name in refusal(*words)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert path.name in refusal(*words)


@pytest.mark.parametrize("reader", ["published", "pipeline", "kernels", "nccl", "schedule"])
def test_a_small_archive_of_many_lines_is_refused(tmp_path: Path, reader: str) -> None:
    words, path = placed(tmp_path, READERS[reader])
    path.write_bytes(gzip.compress(b"\n" * 10_000_000))
    assert "10,000,000 lines, at most 2,000,000 are read. Split the file" in refusal(*words)


def test_streams_of_jobs_without_an_end(tmp_path: Path) -> None:
    """A named pipe without a writer, and a line without an end; the pipe of a shell is read."""
    os.mkfifo(tmp_path / "pipe")
    assert "it is a named pipe, which waits" in refusal("predict", "--jobs", str(tmp_path / "pipe"))
    reader, writer = os.pipe()
    os.write(writer, b"{}\n")
    os.close(writer)
    answer = CliRunner().invoke(app, ["predict", "--jobs", f"/dev/fd/{reader}"]).stdout
    os.close(reader)
    assert json.loads(answer)["error"]["where"].startswith(f"/dev/fd/{reader}:1")
    assert "/dev/zero:1: a line of 10,000,000 characters or more is no job" in refusal("predict", "--jobs", "/dev/zero")
