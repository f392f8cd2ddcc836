"""Fixtures of the tests of measurements."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """Makes plain data once for all processes of pytest-xdist, which share out the tests of a file: the first one that
    asks makes it, the others wait and read it."""
    root = tmp_path_factory.getbasetemp()
    folder = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def make_or_read(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.json"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                path.write_text(json.dumps(make()), "utf-8")
        return json.loads(path.read_text("utf-8"))

    return make_or_read


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces every GPU by `tests.validation.fake_cuda.FakeCuda`, whose calls are forgotten first."""
    pytest.importorskip("torch")
    from tests.validation.fake_cuda import FakeCuda

    FakeCuda.begin()
    for name in (
        "measurements.cuda",
        "measurements.device",
        "measurements.recording",
        "distributed.launch",
        "calibration.device.calibrate",
    ):
        monkeypatch.setattr(importlib.import_module(f"meshcast.validation.{name}"), "Cuda", FakeCuda)
    return FakeCuda
