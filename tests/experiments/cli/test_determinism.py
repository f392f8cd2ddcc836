"""The same job gives the same bytes, whatever the order in which Python hashes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def answer(seed: str) -> bytes:
    command = [sys.executable, "-m", "experiments.cli", "predict", "examples/llama3-70b-dgx-h100.yaml", "--json"]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [*command, "--set", "batch.global=64"], cwd=ROOT, env=env, capture_output=True, check=True
    ).stdout


def test_two_runs_give_identical_json() -> None:
    first = answer("1")
    assert len(first) > 1000
    assert answer("2") == first
