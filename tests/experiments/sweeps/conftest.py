"""Known forecasts for the tests of sweeps that are about files and processes, not about what a row holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiments.sweeps.sweeps import know_forecasts


@pytest.fixture
def known_forecasts(reference: Path) -> Iterator[None]:
    with know_forecasts(reference):
        yield
