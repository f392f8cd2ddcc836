"""Runs that go on while nodes are missing."""

import math

import pytest

from meshcast.simulator.runs.elastic import Elasticity, PipelineTime
from meshcast.simulator.runs.failures import FailingUnits, Failure, FailureLog
from meshcast.simulator.runs.span import CheckpointTier
from meshcast.simulator.runs.training import RunSetting, SimulatedRun, simulate_run


def policy(name, **more) -> Elasticity:
    return Elasticity((1.0, 1.5, 2.0), name, 4, 4.0, 1.8, 5.0, **more)


def test_nodes_are_regrouped_or_their_peers_take_over() -> None:
    regroup, reroute = policy("templates"), policy("reroute")
    assert [regroup.missing_replicas(range(n)) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    # Nodes 0, 5 and 10 hold different layers, 1, 5 and 9 the same ones.
    assert reroute.missing_replicas({0, 5, 10}) == 1 and reroute.missing_replicas({1, 5, 9}) == 3
    assert regroup.step_seconds({0, 1, 2, 3, 4}) == 2.0 and not regroup.goes_on(range(9))


def test_a_neighbour_takes_over_while_few_nodes_are_exposed() -> None:
    found = Elasticity((1.0, 1.5, 2.0), "redundant", 5, 12.0, 1.8, overhead=0.1)
    assert found.step_seconds(()) == pytest.approx(1.1) and found.step_seconds({2}) == pytest.approx(1.8)
    # With two of 58 exposed twice it goes on with four pipelines, and with three from the 13th missing node on.
    assert found.step_seconds({0, 2}) == found.step_seconds(range(12)) == pytest.approx(1.1 * 1.5)
    assert found.step_seconds(range(13)) == pytest.approx(1.1 * 2.0) and not found.goes_on(range(25))


def test_neighbours_that_fail_lose_work_unless_others_replaced_the_first() -> None:
    found = Elasticity((1.0, 1.5, 2.0), "redundant", 5, 12.0, 1.8)
    assert found.keeps_work({2, 5}, {5}) and not found.keeps_work({2, 3}, {3}) and not found.keeps_work({0, 11}, {11})
    assert found.keeps_work({11, 12}, {12}), "of two pipelines"
    assert found.keeps_work({2, 5, 6}, {6}), "node 5 was replaced when node 2 and node 5 were missing"
    assert not found.keeps_work({2, 5, 7, 8}, {7, 8})
    two, one = (Elasticity((1.0, 1.5), "redundant", 4, nodes) for nodes in (2.0, 1.0))
    assert two.keeps_work({2}, {2}) and not one.keeps_work({2}, {2}), "alone a node has no neighbour"


TEMPLATES = (PipelineTime(2, 1.0, 2.0), PipelineTime(3, 1.0, 1.5), PipelineTime(4, 1.0, 1.0))


def test_pipelines_that_lose_nodes_borrow_or_are_dissolved() -> None:
    found = policy("templates", pipelines=TEMPLATES, batches=32, outside=0.5, most_missing=12)
    assert found.regroup({1}) == [3, 4, 4, 4] and found.regroup({0, 1, 2}) == [2, 3, 4, 4]
    assert found.regroup({0, 1, 2, 4, 5, 8, 9, 12, 13}) == [3, 2, 2], "the one node left joins another pipeline"
    assert found.goes_on(range(12)) and not found.goes_on(range(13))
    assert found.keeps_work({1}, {1}) and not found.keeps_work(range(13), {12})


def test_micro_batches_are_spread_so_that_heterogeneous_pipelines_end_together() -> None:
    found = policy("templates", pipelines=TEMPLATES, batches=32, outside=0.5, most_missing=12)
    best = min(
        max(1 + 1.5 * short, 1 + (32 - short + 2) // 3)  # three pipelines share the others
        for short in range(33)
    )
    assert found.step_seconds({1}) == pytest.approx(best + 0.5)


def test_restarted_runs_choose_the_depth_of_their_pipelines() -> None:
    found = policy("fewer-replicas", pipelines=TEMPLATES, batches=32, outside=0.5, most_missing=12)
    # Of 14 nodes: 7 pipelines of 2 take 1 + 5 x 2, 4 of 3 take 1 + 8 x 1.5, 3 of 4 take 1 + 11 x 1.
    assert found.step_seconds({0, 1}) == pytest.approx(11.5)
    assert found.step_seconds(range(11)) == pytest.approx(1 + 16 * 2 + 0.5), "of 5 nodes two pipelines of 2"


def run(name, *failures: Failure, spares: int = 0, steps: int = 400, rejoin: float = 0.0) -> SimulatedRun:
    tiers = (CheckpointTier(50, 0.0, 0.0, 3.0),)
    source = (FailureLog(failures),)
    elasticity = policy(name, rejoin=rejoin)
    setting = RunSetting(
        elasticity, steps, sources=source, tiers=tiers, detection=2.0, restart=7.0, spares=spares, repair=1e9
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


@pytest.mark.parametrize(("spares", "back"), [(0, 220.5), (1, 122.5)])
def test_a_replica_heals_while_the_others_go_on(spares: int, back: float) -> None:
    """From the moment on at which a node is there: repaired, or a spare once the failure is known."""
    found = run("quorum", FAILURE, spares=spares, rejoin=21.0)
    assert found.time_s["lost_work"] == pytest.approx(0.5)
    assert found.time_s["restart"] == pytest.approx(2 * 5.0)
    steps = math.ceil((back + 21.0 - 127.5) / 1.5)
    assert found.time_s["elasticity"] == pytest.approx(steps * 0.5)


def test_all_nodes_of_a_replica_are_missed_together() -> None:
    found = policy("quorum")
    assert [found.missing_replicas(nodes) for nodes in ({0, 1, 3}, {3, 4}, {0, 5, 10})] == [1, 2, 3]
    assert found.goes_on({0, 7}) and not found.goes_on({0, 5, 10})


def test_software_failures_restart_all_policies() -> None:
    found = run("templates", Failure(120.5, "software"))
    assert found.time_s["lost_work"] == pytest.approx(20.5) and found.time_s["restart"] == 10.0


def test_spare_nodes_are_taken_first() -> None:
    found = run("templates", FAILURE, spares=1)
    assert found.time_s["elasticity"] == 0.0 and found.time_s["restart"] == 5.0


def test_neighbours_that_fail_send_a_redundant_run_back_to_its_checkpoint() -> None:
    together = run("redundant", Failure(120.5, "node", (6, 7), 100.0))
    assert together.time_s["waiting_for_spares"] == 0.0 and together.time_s["lost_work"] == pytest.approx(20.5)
    apart = run("redundant", Failure(120.5, "node", (6, 9), 100.0))
    assert apart.time_s["lost_work"] == pytest.approx(0.5) and apart.time_s["restart"] == pytest.approx(2 * 5.0)


def test_failures_of_the_job_hit_nodes_that_it_has() -> None:
    source = FailingUnits("node", 1, 50.0, 20.0, 1, 16)
    kept = policy("templates", pipelines=TEMPLATES, batches=32, most_missing=12)
    setting = RunSetting(kept, None, horizon=530.0, sources=(source,), spares=0, repair=1e9)
    assert simulate_run(setting, 0, 0).failures["node"] in (10, 11)


def test_a_node_that_makes_no_further_pipeline_waits_beside_them() -> None:
    found = run("redundant", Failure(120.5, "node", (6,), 1e9), Failure(150.0, "node", (9,), 50.0))
    assert found.time_s["restart"] == pytest.approx(2 * 5.0), "none when node 9 is back"
