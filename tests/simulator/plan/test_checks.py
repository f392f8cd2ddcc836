"""Plans next to those that rules of one model or scheme refuse, and what a plan knows of its parts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan

SMALL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 32}
ENCODER = {"name": "encoder", "layers": 2, "tokens": 16, "bidirectional": True, "final_norm": True}
ATTENDING = SMALL | {"positions": "none", "relative_buckets": 8, "cross_attention": True, "branches": [ENCODER]}
HYBRID, LINEAR, BRANCHES = "nemotron-h-8b", "qwen3-next-80b-a3b", "two-towers-2.3b"

TP = {"use": "tensor/megatron", "over": "tp"}
OFFLOADING = {"use": "data/zero-infinity", "over": "dp"}


def over(axis: str, use: str, **options: Any) -> dict[str, Any]:
    return {"use": use, "over": axis, **options}


def resolved(model: Any, mesh: dict[str, int], *schemes: dict[str, Any], partition: Any = "even", **more: Any) -> Plan:
    gpus = math.prod(mesh.values())
    cluster = {"gpu": "h100-sxm", "gpus": gpus, "gpus_per_node": min(8, gpus)}
    plan = {"mesh": mesh, "schemes": list(schemes), "partition": partition}
    return resolve_plan(load_job({"model": model, "cluster": cluster, "batch": {"global": 8}, "plan": plan, **more}))


def table(layers: str) -> dict[str, Any]:
    return over("tp", "tensor/annotated", tables=[{"layers": layers, "divide": {"all": ["a"]}}])


@pytest.mark.parametrize(("model", "tp"), [(HYBRID, 16), (LINEAR, 32)])
def test_heads_that_a_scan_groups_are_not_offered_for_padding(model: str, tp: int) -> None:
    with pytest.raises(PlanError) as refused:
        resolved(model, {"tp": tp}, TP)
    assert "would work" in str(refused.value) and "pad_heads" not in str(refused.value)


KEPT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "heads of a scan": ((HYBRID, {"tp": 2}, TP), {}),
    "heads of linear attention": ((LINEAR, {"cp": 2}, over("cp", "sequence/ulysses")), {}),
    "heads of an encoder": ((ATTENDING, {"tp": 2}, TP), {}),
    "heads of a branch": ((BRANCHES, {"tp": 2}, TP), {}),
    "states that leave once": ((SMALL, {"dp": 2}, OFFLOADING, {"use": "memory/offload", "what": ["activations"]}), {}),
    "a reference": ((SMALL, {"pp": 2}, over("pp", "pipeline/1f1b")), {"train": {"reference": True}}),
    "layers of a table": ((SMALL, {"tp": 2}, table("2-3")), {}),
    "a batch that is coupled": (("clip-vit-l-14", {"tp": 2}, TP), {"batch": {"global": 8, "micro": 8}}),
}


@pytest.mark.parametrize("rule", KEPT)
def test_the_next_plan_is_resolved(rule: str) -> None:
    words, more = KEPT[rule]
    assert resolved(*words, **more).shape.m


@pytest.mark.parametrize(("model", "partition", "embedding", "readers"), [
    (ATTENDING | {"tied": True}, [1, 1, 2, 2], 0, (2, 3)),
    (ATTENDING | {"tied": False}, [1, 1, 2, 2], 0, (2,)),
    ("llava-1.5-7b", [23, 2, 11, 20], 1, None),
], ids=["tied", "untied", "a trunk behind a branch of 24 layers"])  # fmt: skip
def test_the_table_is_where_tokens_enter_and_where_a_tied_output_leaves(
    model: Any, partition: list[int], embedding: int, readers: tuple[int, ...] | None
) -> None:
    parts = resolved(model, {"pp": 4}, over("pp", "pipeline/1f1b"), partition=partition).model_parts
    assert parts.with_embedding == embedding
    assert readers is None or parts.with_table == readers


@pytest.mark.parametrize(
    ("pp", "schedule", "divided"), [(1, "1f1b", False), (2, "1f1b", True), (2, "pipedream", False)]
)
def test_data_schemes_know_a_pipeline_that_divides_the_model_and_flushes(pp: int, schedule: str, divided: bool) -> None:
    plan = resolved(SMALL, {"pp": pp, "dp": 2}, over("pp", f"pipeline/{schedule}"), over("dp", "data/ddp"))
    assert plan.stage_schemes[0].pipelined is divided
