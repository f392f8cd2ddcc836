"""Failures: how many there are, when, and which nodes they take."""

import math
from itertools import takewhile

import numpy as np
import pytest

from meshcast.simulator.runs.failures import FailingUnits, Failure, FailureLog
from tests.draws import drawn

DAY = 86_400.0


def within(units: FailingUnits, seconds: float, seed: int = 0) -> list[Failure]:
    return list(takewhile(lambda one: one.time < seconds, units.failures(np.random.default_rng(seed))))


def test_exponential_failures_come_at_the_rate_of_all_units() -> None:
    units = FailingUnits("gpu", 1000, 50 * DAY, 1.0, 1, 125)
    found = within(units, 400 * DAY)
    assert len(found) == pytest.approx(1000 * 400 / 50, rel=0.05)
    gaps = np.diff([one.time for one in found])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert {one.nodes[0] for one in found} == set(range(125))


@pytest.mark.parametrize("shape", drawn([0.7, 1.5, 3.0], keep=3))
def test_weibull_failures_renew_every_unit(shape: float) -> None:
    """Units that are all new fail as the renewal function says: at first by F(t), in the long run by t / mean."""
    units = FailingUnits("gpu", 2000, 100.0, shape, 1, 500)
    scale = 100.0 / math.gamma(1 + 1 / shape)
    early = sum(one.time < 5.0 for one in within(units, 5.0)) / 2000
    assert early == pytest.approx(1 - np.exp(-((5.0 / scale) ** shape)), rel=0.25, abs=0.002)
    late = within(units, 2000.0)
    after = sum(failure.time > 1000.0 for failure in late) / 2000
    assert after == pytest.approx(10.0, rel=0.02)
    assert [one.time for one in late] == sorted(one.time for one in late)


def test_a_failure_takes_the_nodes_behind_it() -> None:
    assert FailingUnits("gpu", 64, 1.0, 1.0, 1, 8).nodes_of(63) == (7,)
    assert FailingUnits("gpu", 64, 1.0, 1.0, 0, 8).nodes_of(63) == ()
    switch = FailingUnits("switch", 3, 1.0, 1.0, 32, 80)
    assert switch.nodes_of(0) == tuple(range(32))
    assert all(len(switch.nodes_of(unit)) == 32 and max(switch.nodes_of(unit)) < 80 for unit in range(3))
    assert FailingUnits("switch", 1, 1.0, 1.0, 32, 4).nodes_of(0) == (0, 1, 2, 3)


def test_a_log_is_replayed() -> None:
    log = (Failure(1.0, "gpu", (3,)), Failure(2.0, "software"))
    assert tuple(FailureLog(log).failures(np.random.default_rng(0))) == log
