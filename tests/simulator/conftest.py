"""What jobs of one run have in common is lowered and priced once, by whichever test forecasts it first."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.validation.contract import played


def share_work(calibration: Calibration | None = None) -> SharedWork:
    """Returns the work that all jobs share, or for coefficients of their own an empty one."""
    if played.LIKE is None or calibration is not None:
        return SharedWork(calibration)
    played.LIKE.forget_excess()
    return played.LIKE


@pytest.fixture(autouse=True)
def work_of_like_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets `simulate` share the work of jobs that bring none; not in `make test-all`, and not in a test that may patch
    the product: it finds nothing that was made before, and leaves nothing."""
    if played.LIKE is None or "monkeypatch" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("meshcast.simulator.forecast.simulate"), "SharedWork", share_work)
        yield
