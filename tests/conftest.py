"""Fixtures and settings of all tests: reproducible property tests, marked tests that skip, and the measured tables."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from typer.main import get_command

if TYPE_CHECKING:
    import pandas as pd

# Before numpy is imported: its threads would wait for the cores that the test processes keep busy.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("meshcast", derandomize=True, deadline=None, max_examples=6)
settings.register_profile("all", settings.get_profile("meshcast"), max_examples=60)
settings.load_profile("meshcast")


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """In `make test-all` every job of the contract suite is lowered alone, and its pipelines are larger."""
    if settings.get_current_profile_name() == "all":
        from meshcast.validation.contract import of_pipeline, played

        played.LIKE = None
        of_pipeline.MOST_P, of_pipeline.MOST_M = 8, 24


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Imports and collects without garbage collection: almost all of these objects stay. Of all tests each process
    imports its share first: the bytecode of asserts, which takes longest to make, is then made once.
    """
    gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker is None or [Path(arg).name for arg in session.config.args] != ["tests"]:
        return
    share = slice(int(worker["workerid"].removeprefix("gw")), None, worker["workercount"])
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[share]:
        with suppress(Exception, pytest.skip.Exception):  # collection will say so
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


FORKING = ("tests/validation/distributed/", "tests/validation/reference/")
"""Tests that fork ranks from their process, in which no thread of autograd may have begun."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests that fork first: after a trace or a planner that learns, their ranks could not go backward."""
    items.sort(key=lambda item: not item.nodeid.startswith(FORKING))


def pytest_collection_finish() -> None:
    """Freezes imported and collected objects, so that the rounds of garbage collection in a long run skip them."""
    gc.freeze()
    gc.set_threshold(40_000, 20, 20)
    gc.enable()


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


@dataclass(frozen=True)
class Tables:
    """Measured tables and published runs of others.

    folder: where they are. whole: whether all rows are there; otherwise the sample in tests/data, of at most 200 rows a
    table, on which errors are not as small as on all rows.
    """

    folder: Path
    whole: bool

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(f"{pattern}.csv*"))

    def read(self, name: str) -> pd.DataFrame:
        import pandas

        (file,) = self.files(name)
        return pandas.read_csv(file)

    @property
    def published_runs(self) -> Path:
        return self.folder / "published_runs.jsonl"


@pytest.fixture(scope="session", autouse=True)
def one_tree_of_commands() -> Iterator[None]:
    """Builds the commands of meshcast once: typer's runner builds them for every line, which takes most lines' time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command), raising=False)
        yield


@pytest.fixture(scope="session")
def tables() -> Tables:
    """The sample in the repository; in `make test-all` all measured tables if `shared` lies next to the checkout."""
    folder = (ROOT / "../shared/data").resolve()
    whole = settings.get_current_profile_name() == "all" and folder.is_dir()
    return Tables(folder, True) if whole else Tables(ROOT / "tests" / "data", False)
