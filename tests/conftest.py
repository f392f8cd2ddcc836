"""What every test shares: reproducible property tests, marked tests that skip, and the folder of measurements."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("meshcast", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("all", settings.get_profile("meshcast"))
settings.load_profile("meshcast")


def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of the garbage collector's rounds, which are many in a long run."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `torch` or `gpu` where there is none."""
    if not (item.get_closest_marker("torch") or item.get_closest_marker("gpu")):
        return
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (pip install -e '.[torch]')")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the checkout: large measurement tables that the repository does not carry."""
    path = Path("../shared")
    folder = (ROOT / path).resolve()
    if not folder.is_dir():
        pytest.skip(f"no folder {path} beside the checkout: it holds the measurement tables that this test reads")
    return folder
