"""One store of lowered units and prices for all searches and forecasts of a test module: sharing changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork

WORK = cache(lambda related: SharedWork(related=related))

MAKERS = (
    *("experiments.search.search_job", "experiments.search.heterogeneous.block_search"),
    *("experiments.search.frontier.bounds", "experiments.search.frontier.branch_and_bound"),
    *("experiments.search.space.limits", "experiments.planning.pricing.job"),
    *("experiments.advice.adviser", "experiments.explain.fitting_changes", "experiments.explain.sensitivity"),
    *("simulator.forecast.simulate", "simulator.forecast.step", "simulator.forecast.planning"),
)
"""Modules that make a store where none is given."""


@pytest.fixture(scope="module", autouse=True)
def one_work() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in MAKERS:
            patch.setattr(f"meshcast.{module}.SharedWork", share_work)
        yield


def share_work(calibration: Any = None, related: bool = False) -> SharedWork:
    return WORK(related) if calibration is None else SharedWork(calibration)
