"""Searches and forecasts of these tests share what they lower, and advice on one job is given once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.advice import adviser
from meshcast.experiments.advice.advice import Advice
from meshcast.simulator.job.job import Job
from tests.experiments.advice.files import write_launches
from tests.experiments.shared_work import one_work

__all__ = ["one_work"]


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of launch files."""
    made = tmp_path_factory.mktemp("launches")
    write_launches(made)
    return made


@pytest.fixture(autouse=True)
def folder(launches: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of launch files as the working directory; what a test writes goes with it."""
    monkeypatch.chdir(launches)
    before = {*launches.iterdir()}
    yield launches
    for path in {*launches.iterdir()} - before:
        path.unlink()


@pytest.fixture(scope="session", autouse=True)
def kept_advice() -> Iterator[None]:
    """Gives the advice of before where job, file, changes and what is kept are the same."""
    given, advise_on = dict[str, Advice](), adviser.advise_on

    def advise_once(job: Job, file: Path | None = None, changes: Sequence[str] = (), **options: Any) -> Advice:
        text = file.read_text("utf-8") if file else ""
        key = str((job.to_dict(), file, text, tuple(changes), options.get("keep"), options.get("calibration")))
        if key not in given:
            given[key] = advise_on(job, file, changes, **options)
        return given[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adviser, "advise_on", advise_once)
        yield
