"""All-to-alls of experts that go expert by expert, in two levels, or once for tensor ranks with the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshcast.simulator.formats.expert_counts import read_routing
from meshcast.simulator.ir.ops import Collective, Gemm, HostLaunch, Op
from meshcast.simulator.ir.routing import Routing
from meshcast.validation.contract.played import Played, play_job
from meshcast.validation.contract.step_dataflow import step_problems
from tests.simulator.schemes.small_jobs import job_on

MODEL = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 128, "seq": 32}
MOE = {"experts": 8, "top_k": 1, "expert_ffn": 24, "capacity": 1.0}


def played(
    use: str, moe: dict[str, Any] = MOE, tensor: str = "tensor/megatron", etp: int = 2, **options: Any
) -> Played:
    """Four expert ranks on dp 4 x tp 2, whose tensor ranks share every expert."""
    views = {"experts": {"edp": 2 // etp, "ep": 4, "etp": etp}}
    schemes = [
        {"use": "data/ddp", "over": "dp"},
        {"use": tensor, "over": "tp"},
        {"use": use, "over": ["ep", "etp"], **options},
    ]
    return play_job(job_on({"dp": 4, "tp": 2}, *schemes, samples=4, model={**MODEL, "moe": moe}, views=views))


def exchanges(one: Played, operation: str) -> list[Collective]:
    """Collectives of the experts of the first layer, forward and backward."""
    unit_run = next(unit_run for unit_run in one.stage_ops(0).unit_runs if unit_run.name == "layer")
    ops: list[Op] = [*unit_run.fragment.forward, *unit_run.fragment.backward]
    works = [op.work for op in ops if op.stream == "expert" and isinstance(op.work, Collective)]
    return [work for work in works if work.operation == operation]


def test_tensor_ranks_with_the_same_tokens_exchange_a_part_of_them_each() -> None:
    """DeepSpeed-TED, section 5.1: 1/L of the all-to-all, and an all-gather."""
    whole, parts = (played("expert/deepspeed-moe", coordinated=on) for on in (False, True))
    assert step_problems(parts) == step_problems(whole) == []
    sent = [work.nbytes for work in exchanges(whole, "all_to_all")]
    assert sent == [32 * 64 * 2] * 4
    assert [work.nbytes for work in exchanges(parts, "all_to_all")] == [nbytes // 2 for nbytes in sent]
    gathers = exchanges(parts, "all_gather")
    assert [work.nbytes for work in gathers] == sent and {work.axes for work in gathers} == {("tp",)}
    assert exchanges(whole, "all_gather") == []


def test_tensor_ranks_that_divide_the_tokens_are_coordinated_already() -> None:
    one, other = (played("expert/deepspeed-moe", tensor="tensor/megatron-sp", coordinated=on) for on in (False, True))
    assert exchanges(one, "all_to_all") == exchanges(other, "all_to_all")
    assert exchanges(one, "all_gather") == exchanges(other, "all_gather") != []


def test_two_levels_send_twice_and_within_nodes_first() -> None:
    flat, levels = (played("expert/deepspeed-moe", two_level=near) for near in (None, 2))
    assert step_problems(levels) == []
    works = exchanges(levels, "all_to_all")
    assert [work.members for work in works] == [(0, 1), (0, 2)] * 4
    assert [work.nbytes for work in works[::2]] == [work.nbytes for work in exchanges(flat, "all_to_all")]


def test_without_dropping_all_experts_have_the_slots_of_the_most_popular_one() -> None:
    one = played("expert/deepspeed-moe", drop_tokens=False, routing={"zipf": 1.0})
    most = float(Routing(zipf=1.0).shares(8).max())
    # The capacity is a fraction of at most 1000.
    assert exchanges(one, "all_to_all")[0].nbytes == pytest.approx(32 * 64 * 2 / 2 * most, rel=1e-2)
    assert next(work.nbytes for work in exchanges(one, "all_reduce")) == 8


@pytest.mark.parametrize("routing", ["balanced", {"zipf": 1.2}])
def test_experts_are_exchanged_one_by_one(routing: Any) -> None:
    """All exchanges together send what one would, and each waits for the busiest rank of its experts."""
    moe = {**MOE, "capacity": None, "top_k": 2}
    whole, each = (played(use, moe, etp=1, routing=routing) for use in ("expert/all-to-all", "expert/fastmoe"))
    assert step_problems(each) == []
    (out, *_), works = exchanges(whole, "all_to_all"), exchanges(each, "all_to_all")
    assert len(works) == 4 * 2 + 1
    counts, *first = works[:3]
    assert counts.nbytes == 8 * 8
    assert sum(work.nbytes for work in first) == pytest.approx(out.nbytes, abs=2)
    paced = [work.pace * work.nbytes for work in first]
    assert sum(paced) >= out.pace * out.nbytes * (1 - 1e-3)
    shares = read_routing(routing).shares(8)[0]
    for place, nbytes in enumerate(paced):
        # The busiest receives from three others what they have for its expert.
        most = max(3 * shares[place::2].max(), (shares[place::2].sum() - shares[place::2]).max())
        assert nbytes == pytest.approx(32 * 2 * 64 * 2 / 2 * most / 8 * 4 / 3, rel=1e-2), np.round(shares, 2)


def test_gemms_of_experts_are_launched_one_by_one() -> None:
    """Two experts on each rank: the host launches two GEMMs in place of one."""
    moe, numbers = {**MOE, "capacity": None}, []
    for use in ("expert/all-to-all", "expert/fastmoe"):
        unit_run = next(one for one in played(use, moe, etp=1).stage_ops(0).unit_runs if one.name == "layer")
        products = [op for op in unit_run.fragment.forward if isinstance(op.work, Gemm) and op.work.groups]
        launches = [other.work for op in products for other in op.after if isinstance(other.work, HostLaunch)]
        numbers.append([work.number for work in launches])
    assert len(numbers[0]) == 2
    assert numbers[1] == [2 * number for number in numbers[0]]


PYRAMID = {**MOE, "experts_from": [[1, 16]], "shared_experts": 1, "residual": True}


def test_later_layers_have_more_experts_and_a_fixed_one_beside_them() -> None:
    one = played("expert/deepspeed-moe", PYRAMID, etp=1)
    assert step_problems(one) == []
    sizes = [
        {param.name: param.total for param in unit_run.fragment.params}
        for unit_run in one.stage_ops(0).unit_runs
        if unit_run.name == "layer"
    ]
    assert [size["wrouter"] for size in sizes] == [64 * 8, 64 * 16]
    assert [size["wexpert.up"] for size in sizes] == [8 * 64 * 24, 16 * 64 * 24]
    assert [size["wcoefficient"] + size["bcoefficient"] for size in sizes] == [2 * 65] * 2
    held = sum(param.total for param in one.list_held(0))
    assert held == one.plan.model_parts.model.parameters
    assert one.flops("F", dispatch=False)["gemm"] == pytest.approx(one.wanted["gemm"])
