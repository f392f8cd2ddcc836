"""Short plans whose mesh has copies of shards, or replicas as its outermost axis."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshcast.simulator import load_job, simulate
from tests.draws import drawn_grid
from tests.simulator.job.test_job import MODEL, SHORT, report, report_as


@pytest.mark.parametrize(("fsdp", "cp"), drawn_grid([False, True], [1, 2]))
def test_shards_have_copies_along_an_axis_of_their_own(fsdp: bool, cp: int) -> None:
    """Megatron-Core's optimizer instances, and torchtitan's dp_replicate x dp_shard x cp: copies are the outer axis."""
    job = {**SHORT, "cluster": {"gpu": "h100-sxm", "gpus": 16 * cp}}
    short = {**job, "plan": {"tp": 2, "pp": 2, "cp": cp, "shard": 2, "fsdp": fsdp}}
    schemes = [
        {"use": "pipeline/1f1b", "over": "pp", "chunks": 1},
        {"use": "data/fsdp" if fsdp else "data/zero-1", "over": "shard", "replicate": "replicate"},
        *([{"use": "sequence/all-gather", "over": "cp"}] if cp > 1 else []),
        {"use": "tensor/megatron-sp", "over": "tp"},
    ]
    mesh = {"pp": 2, "replicate": 2, "shard": 2, **({"cp": cp} if cp > 1 else {}), "tp": 2}
    long = {**job, "plan": {"mesh": mesh, "partition": "even", "schemes": schemes}}
    assert report_as(answer := report(short), long) == answer
    everywhere = {**job, "plan": {**short["plan"], "shard": 4}}
    assert json.dumps(report(everywhere)) == json.dumps(report(everywhere, "plan.shard=null"))


@pytest.mark.parametrize(("plan", "mesh", "views"), [
    ({}, {"dp": 8, "pp": 2, "tp": 2}, {}),
    ({"cp": 2, "shard": 2}, {"replicate": 2, "shard": 2, "pp": 2, "cp": 2, "tp": 2}, {}),
    ({"ep": 4}, {"dp": 8, "pp": 2, "tp": 2}, {"experts": {"edp": 4, "ep": 4, "etp": 1}}),
])  # fmt: skip
def test_replicas_may_be_the_outermost_axis(
    plan: dict[str, Any], mesh: dict[str, int], views: dict[str, dict[str, int]]
) -> None:
    """`--use-tp-pp-dp-mapping` of Megatron-LM."""
    model = {**MODEL, **({"moe": {"experts": 8, "top_k": 2, "expert_ffn": 64}} if views else {})}
    job = {**SHORT, "model": model, "cluster": {"gpu": "h100-sxm", "gpus": 32}}
    short = {**job, "plan": {"tp": 2, "pp": 2, "order": "dp-pp-cp-tp", **plan}}
    data = {"over": "shard", "replicate": "replicate"} if "shard" in plan else {"over": "dp"}
    schemes = [
        {"use": "pipeline/1f1b", "over": "pp", "chunks": 1},
        {"use": "data/zero-1", **data},
        *([{"use": "sequence/all-gather", "over": "cp"}] if "cp" in plan else []),
        {"use": "tensor/megatron-sp", "over": "tp"},
        *([{"use": "expert/all-to-all", "over": "ep"}] if views else []),
    ]
    plan_in_full = {"mesh": mesh, "partition": "even", "schemes": schemes} | ({"views": views} if views else {})
    long = {**job, "plan": plan_in_full}
    assert report_as(answer := report(short), long) == answer
    usual = report(short, "plan.order=pp-dp-cp-tp")
    assert usual == report({**job, "plan": {"tp": 2, "pp": 2, **plan}})
    assert [*usual["job"]["plan"]["mesh"]] == ["pp", *(axis for axis in mesh if axis != "pp")]


def test_stages_that_are_neighbours_send_within_a_node() -> None:
    job = {"model": {"preset": "llama3-8b", "layers": 8}, "cluster": "dgx-h100:4", "batch": {"global": 16}}
    job["framework"] = {"set": {"overlap": {"pp": False}}}
    plan = {"tp": 4, "pp": 4}
    exposed = [
        simulate({**job, "plan": {**plan, "order": order}}).to_dict()["breakdown_s"]["exposed"]
        for order in ("pp-dp-cp-tp", "dp-pp-cp-tp")
    ]
    # Two replicas within a node, or on both.
    assert exposed[0]["pp"] > exposed[1]["pp"] and exposed[0]["dp"] < exposed[1]["dp"]


def test_copies_of_shards_leave_more_memory_and_less_to_gather() -> None:
    cluster = {"gpu": "h100-sxm", "gpus": 32}
    job = {**SHORT, "cluster": cluster, "batch": {"global": 32, "micro": 1, "sequence": 48}}
    peaks = []
    for shard in (None, 4, 2, 1):
        plan = {"tp": 2, "cp": 2, "fsdp": True, **({"shard": shard} if shard else {})}
        found = simulate({**job, "plan": plan})
        (data,) = found.play.plan.family("data")
        replicas, sharded = found.play.plan.mesh.size("replicate"), found.play.plan.mesh.size(("shard", "cp"))
        assert shard is None or (replicas, sharded) == (8 // shard, shard * 2)
        assert found.play.plan.ranks.replicas == 8 and data.axes
        peaks.append(found.peak_device)
    assert sorted(peaks) == peaks and len({*peaks}) == 4


def test_equal_short_plans_are_expanded_once_and_orders_of_axes_told_apart() -> None:
    job = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 8}}
    first, again = (load_job({**job, "plan": {"tp": 2, "pp": 2}}).plan for _ in range(2))
    assert first is again and first != load_job({**job, "plan": {"tp": 2, "pp": 4}}).plan
    schemes = [{"use": "tensor/megatron", "over": "tp"}, {"use": "data/ddp", "over": "dp"}]
    orders = [("dp", "tp"), ("tp", "dp")]
    for order in orders:
        plan = {"mesh": {axis: {"dp": 4, "tp": 2}[axis] for axis in order}, "schemes": schemes}
        assert tuple(load_job({**job, "plan": plan}).plan.mesh) == order
