"""Fixtures of the tests of measurements."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def hide_objects_of_other_tests() -> None:
    """Keeps what other tests have left from the garbage collections and the count of tensors of a measured peak."""
    gc.freeze()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces every GPU by `tests.validation.fake_cuda.FakeCuda`, whose calls are forgotten first."""
    pytest.importorskip("torch")
    from tests.validation.fake_cuda import FakeCuda

    FakeCuda.begin()
    for module in (
        *("measurements.cuda", "measurements.device", "measurements.recording"),
        *("distributed.launch", "calibration.device.calibrate"),
    ):
        monkeypatch.setattr(importlib.import_module(f"meshcast.validation.{module}"), "Cuda", FakeCuda)
    return FakeCuda
