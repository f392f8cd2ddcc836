"""Groups and orders of actions equal those of the plan; plans that torch runs otherwise are refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from tests.validation.distributed.jobs import EXPERTS, GPT, context_job, job

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


def test_a_shared_table_on_one_rank_has_no_group(ranks: Any) -> None:
    plan = resolve_plan(load_job(job(4, pp=4, schedule="zb-v", model={**GPT, "layers": 8})))
    for rank in range(4):
        place = ranks(plan, rank)
        assert place.embedding_group is None and place.last == 0


def test_groups_are_those_of_the_mesh(ranks: Any) -> None:
    import torch.distributed as dist

    plan = resolve_plan(load_job(job(8, pp=2, dp=2, tp=2)))
    for rank in range(8):
        place = ranks(plan, rank)
        for axis, name in ((place.pipeline, "pp"), (place.data, "dp"), (place.tensor, "tp")):
            stride = plan.mesh.stride(name)
            assert axis.size == 2 and axis.rank == rank // stride % 2
            first = rank - axis.rank * stride
            assert dist.get_process_group_ranks(axis.group) == [first + one for one in plan.mesh.ranks((name,))]


def test_gradients_are_reduced_over_ranks_with_the_same_weights(ranks: Any) -> None:
    import torch.distributed as dist

    plan = resolve_plan(load_job(job(8, pp=2, dp=2, cp=2, ep=2, model=EXPERTS)))
    for rank in range(8):
        place, first = ranks(plan, rank), rank // 4 * 4
        assert dist.get_process_group_ranks(place.data.group) == [first + one for one in range(4)]
        assert (place.replica.rank, place.context.rank) == (rank // 2 % 2, rank % 2)
        assert dist.get_process_group_ranks(place.expert.group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert dist.get_process_group_ranks(place.expert_data.group) == [first + rank % 2, first + rank % 2 + 2]


REFUSED = {
    "does not shard experts": job(2, dp=2, ep=2, fsdp=True, model=EXPERTS),
    "know one DDP": job(8, pp=2, dp=4, ep=2, zero=0, model=EXPERTS),
    "hold the same weights": job()
    | {"plan": {"mesh": {"cp": 2}, "schemes": [{"use": "sequence/ulysses", "over": "cp"}]}},
    "DDP waits for weight gradients": job(4, pp=2, cp=2, zero=0, schedule="zb-h1"),
    "over expert-parallel ranks or": job(4, dp=2, tp=2, ep=2, model=EXPERTS),
    "not both": job(dp=2, etp=2, model=EXPERTS),
    "routing is balanced": job(2)
    | {
        "model": EXPERTS,
        "plan": {
            "mesh": {"dp": 2},
            "views": {"experts": {"edp": 1, "ep": 2}},
            "schemes": [
                {"use": "data/ddp", "over": "dp"},
                {"use": "expert/all-to-all", "over": "ep", "routing": {"zipf": 1}},
            ],
        },
    },
    "copies none": context_job("sequence/ulysses", model={**GPT, "kv_heads": 1}),
    "4 equal parts": job(cp=2) | {"batch": {"global": 8, "micro": 2, "sequence": 18}},
    "does not support this scheme": context_job("sequence/ring"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_unsupported_expert_and_context_parallelism_is_refused(rule: str) -> None:
    from meshcast.validation.distributed.trainer import check

    with pytest.raises(PlanError) as refusal:
        check(resolve_plan(load_job(REFUSED[rule])))
    assert rule in refusal.value.rule and refusal.value.remedy


def test_a_shared_table_is_summed_between_the_ends_of_each_pipeline(ranks: Any) -> None:
    import torch.distributed as dist

    plan = resolve_plan(load_job(job(8, pp=4, tp=2)))
    for rank, pair in {0: [0, 6], 1: [1, 7], 6: [0, 6], 7: [1, 7]}.items():
        assert dist.get_process_group_ranks(ranks(plan, rank).embedding_group) == pair
    assert ranks(plan, 2).embedding_group is None
    untied = resolve_plan(load_job(job(8, pp=4, tp=2, model={**GPT, "tied": False})))
    assert ranks(untied, 0).embedding_group is None


def done(plan: Plan, place: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """The actions of one rank in the order in which torch calls for them; nothing is computed or sent."""
    from meshcast.validation.distributed import pipeline

    found: list[tuple[int, str, int]] = []

    def forward(stage: Any, k: int, *given: Any, **options: Any) -> Any:
        found.append((stage.stage_index, "F", k))
        return torch.zeros(())

    def backward(stage: Any, k: int, *given: Any, full_backward: bool = True, **options: Any) -> None:
        found.append((stage.stage_index, "BW" if full_backward else "B", k))

    def weights(stage: Any, k: int, *given: Any, **options: Any) -> None:
        found.append((stage.stage_index, "W", k))

    monkeypatch.setattr(pipeline.LeanPipelineStage, "forward_one_chunk", forward)
    monkeypatch.setattr(pipeline.LeanPipelineStage, "backward_one_chunk", backward)
    monkeypatch.setattr(pipeline.LeanPipelineStage, "backward_weight_one_chunk", weights)
    for name in ("set_local_fwd_input", "get_local_bwd_output", "set_local_bwd_input"):
        monkeypatch.setattr(pipeline.LeanPipelineStage, name, lambda *given: None)
    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
        monkeypatch.setattr(pipeline.LeanPipelineStage, name, lambda stage, k: [])
    mine = [i for i in range(plan.shape.stages) if plan.model_parts.device(i) == place.pipeline.rank]
    passes = pipeline.PipelinePasses(plan, dict.fromkeys(mine, torch.nn.Identity()), place)
    for name in ("_initialize_stage", "_initialize_stages"):
        if hasattr(passes.schedule, name):
            monkeypatch.setattr(passes.schedule, name, lambda *given, **options: None)
    tokens = torch.zeros(plan.shape.m, 1)
    rank = place.pipeline.rank
    passes(tokens if rank == 0 else None, tokens if rank == place.last else None)
    return found


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 4},
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "schedule": "gpipe"}, marks=pytest.mark.slow),
        {"pp": 4, "schedule": "gpipe"},
        pytest.param({"pp": 2, "chunks": 2}, marks=pytest.mark.slow),
        {"pp": 4, "chunks": 2},
        {"pp": 4, "chunks": 2, "schedule": "breadth-first"},
        {"pp": 4, "schedule": "zb-h1"},
        {"pp": 4, "schedule": "zb-h2"},
        {"pp": 4, "schedule": "zb-v"},
        {"pp": 4, "schedule": "v-half"},
        {"pp": 4, "schedule": "v-min"},
        {"pp": 4, "schedule": "hanayo"},
    ],
)
def test_torch_runs_the_plans_order(ranks: Any, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, Any]) -> None:
    from meshcast.validation.reference.orders import action_orders

    given = job(degrees["pp"], model={**GPT, "layers": 8}, **degrees)
    plan = resolve_plan(load_job({**given, "batch": {"global": 16, "micro": 2}}))
    for device, order in enumerate(action_orders(plan)):
        assert done(plan, ranks(plan, device), monkeypatch) == [tuple(action[:3]) for action in order]


def test_refusals() -> None:
    from meshcast.validation.distributed.trainer import check

    formats = {"compute": "bf16", "gradients": "fp32"}
    for given, words in (
        ({**job(dp=2, zero=0), "precision": formats}, "DDP reduces gradients in the format of the weights, bf16"),
        ({**job(dp=2, fsdp=True), "precision": {**formats, "gradients": "bf16"}}, "format of the sharded weights"),
        (job(4, pp=2, dp=2, fsdp=True), "once a step"),
        (job(4, pp=2, dp=2, zero=0, schedule="zb-h1"), "DDP waits for weight gradients"),
        (job(4, pp=2, dp=2, zero=0, schedule="hanayo"), "two stages of one device share it"),
        (job(1, schedule="gpipe"), "one after another through the whole model"),
        (job(2, pp=2, schedule="dualpipe"), "do not form one chain"),
        (job(2, pp=2, schedule="dualpipe-v"), "cannot overlap a forward and a backward pass"),
        (job(2, pp=2, schedule="seq1f1b"), "slices"),
        (job(4, pp=4, schedule="bpipe"), "cannot run actions of this kind"),
    ):
        with pytest.raises(PlanError, match=words):
            check(resolve_plan(load_job(given)))


def test_several_axes_of_one_family_are_refused() -> None:
    from meshcast.validation.distributed.trainer import check

    schemes = [{"use": "data/ddp", "over": ["outer", "inner"]}]
    given = {**job(4), "plan": {"mesh": {"outer": 2, "inner": 2}, "schemes": schemes}}
    with pytest.raises(PlanError, match="one axis for data schemes"):
        check(resolve_plan(load_job(given)))


def test_a_mesh_of_another_size_is_refused(ranks: Any) -> None:
    place = ranks(resolve_plan(load_job(job(tp=2))), 0)
    assert place.tensor.size == 2 and place.pipeline.group is None
    from meshcast.validation.distributed.process_groups import make_process_groups

    with pytest.raises(PlanError, match="Start 4 processes"):
        make_process_groups(resolve_plan(load_job(job(4, tp=2, pp=2))), place.device)
