"""The same job gives the same bytes, whatever the order in which Python hashes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.cli.samples import run

ROOT = Path(__file__).resolve().parents[3]


WORDS = ("predict", "examples/llama3-70b-dgx-h100.yaml", "--json", "--set", "batch.global=64")


def test_two_runs_give_identical_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process, which hashes by another seed, and of one of its own."""
    monkeypatch.chdir(ROOT)
    command = [sys.executable, "-m", "meshcast.experiments.cli", *WORDS]
    env = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    first = subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout
    assert len(first) > 1000
    assert run(*WORDS).stdout == first
