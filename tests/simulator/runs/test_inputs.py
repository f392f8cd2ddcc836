"""From a job to a run: sizes and times of checkpoints, rates of failures, replicas, and refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import load
from meshcast.simulator import load_job, simulate
from meshcast.simulator.costs.stragglers import slowest_pace
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import RunPlan, make_run
from meshcast.simulator.runs.least_run import count_steps
from meshcast.simulator.runs.span import CheckpointTier
from meshcast.simulator.runs.training import simulate_run

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8}, "cluster": "dgx-h100:4", "batch": {"global": 64},
    "plan": {"tp": 2, "pp": 4, "dp": 4},
}  # fmt: skip


def plan(run: dict[str, Any], **changes: Any) -> RunPlan:
    return make_run(simulate(load_job({**JOB, **changes, "run": {"steps": 1000, **run}})))


def tiers(**keys: Any) -> tuple[CheckpointTier, ...]:
    found = plan({"checkpoints": keys})
    return found.setting.tiers


def test_tokens_become_whole_steps() -> None:
    report = simulate(load_job({**JOB, "run": {"tokens": 1e9}}))
    assert make_run(report).setting.steps == count_steps(report.job) == math.ceil(1e9 / report.tokens)


@pytest.mark.parametrize("idle", [0, 10, 99])
def test_runs_that_reach_no_step_widen_the_interval_of_tokens_down_to_none(idle: int) -> None:
    made = make_run(simulate(load_job({**JOB, "run": {"days": 0.01}})))
    run = simulate_run(made.setting, 0, 0)
    answer = RunAnswer(made, [*[run] * 3, *[replace(run, steps=0)] * idle])
    low, high = answer.tokens_interval_90
    assert low < answer.steps * made.report.tokens < high and (low == 0) == (idle > 0)
    assert answer.to_dict()["days_interval_90_simulated"] == pytest.approx([run.seconds / 86_400] * 2)


def test_a_checkpoint_holds_main_weights_and_moments() -> None:
    found = plan({})
    assert found.size.nbytes == found.job.model.parameters * 12
    assert plan({"checkpoints": {"bytes_per_parameter": 16}}).size.nbytes == found.job.model.parameters * 16


@pytest.mark.parametrize(("changes", "copies"), [
    ({"tp": 2, "pp": 4, "zero": 1}, 1),
    ({"tp": 2, "pp": 4, "zero": 0}, 4),
    ({"tp": 2, "pp": 2, "zero": 1, "shard": 4}, 2),
    ({"tp": 2, "fsdp": True}, 1),
    ({"tp": 2, "fsdp": True, "shard": 4}, 4),
])  # fmt: skip
def test_copies_of_states_are_those_of_the_plan(changes: dict[str, Any], copies: int) -> None:
    assert plan({}, plan=changes).size.copies == copies


def test_times_follow_from_size_and_rates() -> None:
    size = plan({}).size.nbytes
    cluster = plan({}).job.cluster
    (full,) = tiers(kind="full", write_gb_per_s=10, every_steps=5)
    (sharded,) = tiers(kind="sharded", write_gb_per_s=10, read_gb_per_s=20, every_steps=5)
    (background,) = tiers(kind="asynchronous", write_gb_per_s=10, every_steps=5)
    assert sharded.stall == pytest.approx(size / 10e9) and sharded.load == pytest.approx(size / 20e9)
    assert full.stall == pytest.approx(size / 10e9)
    (wide,) = tiers(kind="full", write_gb_per_s=1e6, every_steps=5)
    assert wide.stall == pytest.approx(size / (cluster.scale_out.bandwidth * 8)), "one node writes"
    assert background.write == pytest.approx(size / 10e9)
    assert background.stall == pytest.approx(size / cluster.gpus / cluster.host.bandwidth)
    assert tiers(kind="none") == ()


def test_stated_times_replace_them() -> None:
    (found,) = tiers(kind="asynchronous", every_steps=5, stall_s=2, write_s=30, load_s=7)
    assert found == CheckpointTier(5, 2.0, 28.0, 7.0)


def test_copies_in_memory_survive_fewer_nodes_than_copies() -> None:
    memory, store = tiers(kind="in-memory", copies=3)
    assert (memory.every, memory.stall, memory.survives) == (1, 0.0, 2)
    assert store.survives == math.inf and store.every > memory.every and memory.load < store.load


def test_a_checkpoint_after_a_failure_needs_copies_of_states() -> None:
    found = plan({"checkpoints": "just-in-time"}, plan={"tp": 2, "pp": 4, "zero": 0}).setting.tiers
    assert (found[0].every, found[0].survives) == (0, 3)


def test_rates_of_the_catalog_scale_with_the_cluster() -> None:
    rates = load("reliability", "llama3-405b")
    whole = plan({}, cluster={"node": "dgx-h100", "nodes": 4})
    per_gpu = sum(
        (component.failures or 0) for component in rates.components.values() if component.per in ("gpu", "nic")
    )
    per_node = sum((component.failures or 0) for component in rates.components.values() if component.per == "node")
    expected = (per_gpu * 32 / 16_384 + per_node * 4 / 2048) / (54 * 86_400)
    assert 1 / whole.mtbf == pytest.approx(expected)
    assert plan({"failures": {"mtbf_factor": 3}}).mtbf == pytest.approx(3 * whole.mtbf)
    assert plan({"failures": "none"}).mtbf == math.inf


def test_own_components_replace_those_of_the_catalog() -> None:
    own = {"gpu": {"per": "gpu", "mtbf_hours": 100}, "switch": {"per": "switch", "mtbf_hours": 900}}
    found = plan({"failures": {"rates": "none", "components": own, "nodes_per_switch": 2}})
    gpu, switch = found.setting.sources
    assert (gpu.units, gpu.mtbf, gpu.lost) == (32, 360_000, 1)
    assert (switch.units, switch.lost) == (2, 2)
    both = plan({"failures": {"components": {"gpu": {"per": "gpu", "mtbf_hours": 100}}}})
    assert [source.component for source in both.setting.sources].count("gpu") == 1


@pytest.mark.parametrize("policy", ["fewer-replicas", "templates", "reroute"])
def test_steps_of_fewer_replicas_are_forecast(policy: str) -> None:
    found = plan({"recovery": {"elastic": policy, "most_lost_replicas": 2}})
    usual, one, two = found.setting.elasticity.step_s
    direct = {**JOB, "cluster": "dgx-h100:3", "batch": {"global": 3 * 22}, "plan": {"tp": 2, "pp": 4}}
    longer = simulate(direct).step_time
    filled = 3 * (longer - usual) / 6 if policy == "reroute" else 0.0  # the bubble, by 3 of 6 further micro-batches
    assert one == pytest.approx(longer - filled, rel=1e-9)
    assert usual < one < two < 2.2 * usual


def test_replicas_of_a_quorum_keep_their_micro_batches_and_fetch_states_from_each_other() -> None:
    """Three of four train three quarters of the tokens of a step; each GPU fetches what it holds."""
    whole = {"tp": 2, "pp": 4, "zero": 0}
    found = plan({"recovery": {"elastic": "quorum", "warm_up_s": 10, "scheduling_s": 20}}, plan=whole)
    elasticity, job = found.setting.elasticity, found.report.job
    direct = {**JOB, "cluster": "dgx-h100:3", "batch": {"global": 3 * 16}, "plan": whole}
    assert elasticity.step_s[1] == pytest.approx(max(simulate(direct).step_time * 4 / 3, elasticity.step_s[0]))
    held = 12 * job.model.parameters / (2 * 4)
    assert elasticity.rejoin == pytest.approx(30 + held / job.cluster.scale_out.bandwidth, rel=1e-6)
    with pytest.raises(PlanError, match="the replicas shard theirs"):
        plan({"recovery": {"elastic": "quorum"}}, plan={**whole, "zero": 1})


def test_replicas_that_train_on_their_own_meet_after_a_period() -> None:
    found = plan({"stragglers": {"jitter": 0.1}}, plan={"tp": 2, "dp_scheme": {"use": "local-sgd", "period": 16}})
    assert found.setting.jitter.barrier == 16 and plan({}).setting.jitter.barrier == 1


def test_pipelines_of_other_depths_are_timed_where_a_replica_has_several_nodes() -> None:
    nodes = {"gpu": "a100-sxm-40", "gpus": 12, "gpus_per_node": 1, "inter": {"kind": "infiniband"}}
    job = {"cluster": nodes, "batch": {"global": 24, "micro": 1}, "plan": {"pp": 4, "zero": 0, "recompute": "full"}}
    found = plan({"recovery": {"elastic": "templates"}}, **job).setting.elasticity
    assert [pipeline.nodes for pipeline in found.pipelines] == [2, 3, 4], "the states do not fit on one GPU"
    _, shorter, whole = found.pipelines
    # The slowest of four GPUs is slower than that of three.
    assert whole.each / slowest_pace(4) < shorter.each / slowest_pace(3) < 2 * whole.each
    whole_step = whole.fixed + 8 * whole.each + found.outside
    assert whole_step == pytest.approx(found.step_s[0], rel=1e-9)
    assert found.step_seconds({0}) >= whole_step * (1 - 1e-12)
