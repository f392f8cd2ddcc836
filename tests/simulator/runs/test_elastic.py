"""Runs that go on while nodes are missing."""

import pytest

from simulator.runs.elastic import Elasticity
from simulator.runs.failures import Failure, FailureLog
from simulator.runs.span import CheckpointTier
from simulator.runs.training import RunSetting, SimulatedRun, simulate_run


def policy(name, **more) -> Elasticity:
    return Elasticity((1.0, 1.5, 2.0), name, 4, 4.0, 1.8, 5.0, **more)


def test_nodes_are_regrouped_or_their_peers_take_over() -> None:
    regroup, reroute = policy("templates"), policy("reroute")
    assert [regroup.missing_replicas(range(n)) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    # Nodes 0, 5 and 10 hold unlike layers, 1, 5 and 9 the same ones.
    assert reroute.missing_replicas({0, 5, 10}) == 1 and reroute.missing_replicas({1, 5, 9}) == 3
    assert regroup.step_seconds({0, 1, 2, 3, 4}) == 2.0 and not regroup.goes_on(range(9))


def test_a_neighbour_takes_over_unless_it_is_missing_too() -> None:
    found = policy("redundant", overhead=0.1)
    assert found.step_seconds(()) == pytest.approx(1.1) and found.step_seconds({2}) == pytest.approx(1.1 * 1.8)
    assert found.goes_on({0, 2}) and not found.goes_on({2, 3}) and not found.goes_on({0, 3})
    assert found.goes_on({3, 4}), "of two replicas"


def run(name, *failures: Failure, spares: int = 0, steps: int = 400) -> SimulatedRun:
    tiers = (CheckpointTier(50, 0.0, 0.0, 3.0),)
    source = (FailureLog(failures),)
    setting = RunSetting(
        policy(name), steps, sources=source, tiers=tiers, detection=2.0, restart=7.0, spares=spares, repair=1e9
    )
    return simulate_run(setting, 0, 0)


FAILURE = Failure(120.5, "node", (6,), 100.0)


def test_waiting_loses_the_time_of_the_repair() -> None:
    found = run("none", FAILURE)
    assert found.time_s["lost_work"] == pytest.approx(20.5)
    assert found.time_s["waiting_for_spares"] == pytest.approx(98.0)


def test_fewer_replicas_restart_from_the_checkpoint_and_join_again() -> None:
    found = run("fewer-replicas", FAILURE)
    assert found.time_s["waiting_for_spares"] == 0.0 and found.time_s["lost_work"] == pytest.approx(20.5)
    # From 132.5 until the node is back at 220.5 there are 59 steps of 1.5 s; two restarts.
    assert found.time_s["elasticity"] == pytest.approx(59 * 0.5)
    assert found.time_s["restart"] == pytest.approx(2 * 10.0)


@pytest.mark.parametrize("name", ["templates", "reroute"])
def test_other_replicas_hold_the_states(name: str) -> None:
    found = run(name, FAILURE)
    assert found.time_s["lost_work"] == pytest.approx(0.5)
    assert found.time_s["restart"] == pytest.approx(2 * 5.0)
    assert found.time_s["elasticity"] == pytest.approx(62 * 0.5)  # from 127.5 to 220.5


def test_software_failures_restart_all_policies() -> None:
    found = run("templates", Failure(120.5, "software"))
    assert found.time_s["lost_work"] == pytest.approx(20.5) and found.time_s["restart"] == 10.0


def test_spare_nodes_are_taken_first() -> None:
    found = run("templates", FAILURE, spares=1)
    assert found.time_s["elasticity"] == 0.0 and found.time_s["restart"] == 5.0


def test_neighbours_that_fail_stop_a_redundant_run() -> None:
    found = run("redundant", FAILURE, Failure(150.0, "node", (7,), 30.0))
    assert found.time_s["waiting_for_spares"] == pytest.approx(28.0)
    assert found.time_s["lost_work"] > 10
