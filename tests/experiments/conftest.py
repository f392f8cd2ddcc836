"""Fixtures of the tests of commands and sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.run import load_sweep, run
from tests.experiments.sweeps.sweeps import GRID, Lazy


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "CHUNK", 4)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of GRID, made in one go by one worker, in chunks of four."""
    out = tmp_path_factory.mktemp("reference") / "rows.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "CHUNK", 4)
        run(load_sweep(GRID), out, Lazy())
    return out
