"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshcast.experiments.render.matplotlib import style
from tests.experiments.cli.samples import JOB


@pytest.fixture(autouse=True)
def coarse_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws few pixels: what a plot looks like is tested where it is made."""
    monkeypatch.setattr(style, "DPI", 40)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The file of the small job."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB, "utf-8")
    return path


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what commands remember away from the user's caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield
