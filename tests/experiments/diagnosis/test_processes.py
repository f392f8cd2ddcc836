"""`meshcast.explain` on two real processes with a planted cause: minutes each, so `make test-all` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcast.experiments.diagnosis.explain import explain
from tests.experiments.diagnosis.processes import JOB, run_processes

pytest.importorskip("torch")
PLANTS = (
    *("slow rank", "slow communication", "missing overlap", "host pauses", "data loading"),
    *("garbage collection", "checkpoint saves"),
)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("plant", PLANTS)
def test_the_planted_cause_of_real_processes_is_first(tmp_path: Path, plant: str) -> None:
    explanation = explain(run_processes(tmp_path, plant), JOB)
    assert [cause.name for cause in explanation.causes[:1]] == [plant]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_named_in_clean_processes(tmp_path: Path, seed: int) -> None:
    assert explain(run_processes(tmp_path, "", seed), JOB).causes == ()
