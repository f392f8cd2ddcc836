"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.cli.samples import JOB


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The file of the small job."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB, "utf-8")
    return path
