"""Groups and orders of actions equal those of the plan; plans that torch runs otherwise are refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from tests.validation.distributed.jobs import EXPERTS, GPT, job

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from meshcast.validation.distributed import pipeline  # noqa: E402
from meshcast.validation.distributed.process_groups import make_process_groups  # noqa: E402
from meshcast.validation.reference.orders import action_orders  # noqa: E402
from tests.draws import drawn  # noqa: E402


def test_a_shared_table_on_one_rank_has_no_group(ranks: Any) -> None:
    plan = resolve_plan(load_job(job(4, pp=4, schedule="zb-v", model={**GPT, "layers": 8})))
    for rank in range(4):
        place = ranks(plan, rank)
        assert place.embedding_group is None and place.last == 0


def test_groups_are_those_of_the_mesh(ranks: Any) -> None:
    plan = resolve_plan(load_job(job(8, pp=2, dp=2, tp=2)))
    for rank in range(8):
        place = ranks(plan, rank)
        for axis, name in ((place.pipeline, "pp"), (place.data, "dp"), (place.tensor, "tp")):
            stride = plan.mesh.stride(name)
            assert axis.size == 2 and axis.rank == rank // stride % 2
            first = rank - axis.rank * stride
            assert dist.get_process_group_ranks(axis.group) == [first + member for member in plan.mesh.ranks((name,))]


def test_gradients_are_reduced_over_ranks_with_the_same_weights(ranks: Any) -> None:
    plan = resolve_plan(load_job(job(8, pp=2, dp=2, cp=2, ep=2, model=EXPERTS)))
    for rank in range(8):
        place, first = ranks(plan, rank), rank // 4 * 4
        assert dist.get_process_group_ranks(place.data.group) == [first + member for member in range(4)]
        assert (place.replica.rank, place.context.rank) == (rank // 2 % 2, rank % 2)
        assert dist.get_process_group_ranks(place.expert.group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert dist.get_process_group_ranks(place.expert_data.group) == [first + rank % 2, first + rank % 2 + 2]


def test_a_shared_table_is_summed_between_the_ends_of_each_pipeline(ranks: Any) -> None:
    plan = resolve_plan(load_job(job(8, pp=4, tp=2)))
    for rank, pair in {0: [0, 6], 1: [1, 7], 6: [0, 6], 7: [1, 7]}.items():
        assert dist.get_process_group_ranks(ranks(plan, rank).embedding_group) == pair
    assert ranks(plan, 2).embedding_group is None
    untied = resolve_plan(load_job(job(8, pp=4, tp=2, model={**GPT, "tied": False})))
    assert ranks(untied, 0).embedding_group is None


def list_calls(plan: Plan, place: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """The actions of one rank in the order in which torch calls for them; nothing is computed or sent."""
    calls: list[tuple[int, str, int]] = []

    def forward(stage: Any, k: int, *arguments: Any, **options: Any) -> Any:
        calls.append((stage.stage_index, "F", k))
        return torch.zeros(())

    def backward(stage: Any, k: int, *arguments: Any, full_backward: bool = True, **options: Any) -> None:
        calls.append((stage.stage_index, "BW" if full_backward else "B", k))

    def weights(stage: Any, k: int, *arguments: Any, **options: Any) -> None:
        calls.append((stage.stage_index, "W", k))

    monkeypatch.setattr(pipeline.LeanPipelineStage, "forward_one_chunk", forward)
    monkeypatch.setattr(pipeline.LeanPipelineStage, "backward_one_chunk", backward)
    monkeypatch.setattr(pipeline.LeanPipelineStage, "backward_weight_one_chunk", weights)
    for name in ("set_local_fwd_input", "get_local_bwd_output", "set_local_bwd_input"):
        monkeypatch.setattr(pipeline.LeanPipelineStage, name, lambda *arguments: None)
    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
        monkeypatch.setattr(pipeline.LeanPipelineStage, name, lambda stage, k: [])
    mine = [i for i in range(plan.shape.stages) if plan.model_parts.device(i) == place.pipeline.rank]
    passes = pipeline.PipelinePasses(plan, dict.fromkeys(mine, torch.nn.Identity()), place)
    for name in ("_initialize_stage", "_initialize_stages"):
        if hasattr(passes.schedule, name):
            monkeypatch.setattr(passes.schedule, name, lambda *arguments, **options: None)
    tokens = torch.zeros(plan.shape.m, 1)
    rank = place.pipeline.rank
    passes(tokens if rank == 0 else None, tokens if rank == place.last else None)
    return calls


ORDERS: list[dict[str, Any]] = [
    *({"pp": 4, "schedule": name} for name in ("gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "hanayo")),
    *({"pp": 4}, {"pp": 4, "chunks": 2}, {"pp": 4, "chunks": 2, "schedule": "breadth-first"}),
    *({"pp": 2}, {"pp": 2, "schedule": "gpipe"}, {"pp": 2, "chunks": 2}),
]


@pytest.mark.parametrize("degrees", drawn(ORDERS, keep=lambda degrees: degrees["pp"] == 4))
def test_torch_runs_the_plans_order(ranks: Any, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, Any]) -> None:
    fields = job(degrees["pp"], model={**GPT, "layers": 8}, **degrees)
    plan = resolve_plan(load_job({**fields, "batch": {"global": 16, "micro": 2}}))
    for device, order in enumerate(action_orders(plan)):
        assert list_calls(plan, ranks(plan, device), monkeypatch) == [tuple(action[:3]) for action in order]


def test_a_mesh_of_another_size_is_refused(ranks: Any) -> None:
    place = ranks(resolve_plan(load_job(job(tp=2))), 0)
    assert place.tensor.size == 2 and place.pipeline.group is None
    with pytest.raises(PlanError, match="Start 4 processes"):
        make_process_groups(resolve_plan(load_job(job(4, tp=2, pp=2))), place.device)
