"""No message between stages waits for one of another edge, and no computation for a send."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from tests.draws import drawn
from tests.validation.distributed.in_order_streams import (
    Order,
    one_a_direction,
    one_a_message,
    one_an_edge,
    one_for_all,
    play,
    receive_late,
)
from tests.validation.distributed.jobs import GPT, job

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from meshcast.validation.distributed import torch_pipelining  # noqa: E402
from meshcast.validation.distributed.pipeline import PipelinePasses  # noqa: E402
from meshcast.validation.distributed.pipeline_messages import (  # noqa: E402
    BACKWARD,
    FORWARD,
    list_edges,
    make_edge_groups,
)
from tests.validation.distributed.recorded_messages import record_steps  # noqa: E402
from tests.validation.ranks import on_ranks  # noqa: E402

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {},
    "interleaved-1f1b": {"chunks": 2},
    "breadth-first": {"chunks": 2, "schedule": "breadth-first"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "hanayo": {"schedule": "hanayo"},
}
BOTH_WAYS = ("interleaved-1f1b", "breadth-first", "zb-v", "hanayo")
"""Schedules in which a device both sends and receives in the same direction, from 2 devices on."""


def plan_of(schedule: str, p: int, m: int, **degrees: Any) -> Plan:
    fields = job(p, model={**GPT, "layers": 16}, pp=p, **SCHEDULES[schedule], **degrees)
    return resolve_plan(load_job({**fields, "batch": {"global": 2 * m, "micro": 2, "sequence": 16}}))


def devices_of(plan: Plan) -> list[int]:
    return [plan.model_parts.device(stage) for stage in range(plan.shape.stages)]


def orders_of(plan: Plan, ranks: Any) -> list[Order]:
    """The orders that torch's runtime runs, with the messages that it adds."""
    mine = [stage for stage, device in enumerate(devices_of(plan)) if device == 0]
    passes = PipelinePasses(plan, dict.fromkeys(mine, torch.nn.Identity()), ranks(plan, 0))
    return torch_pipelining.orders_with_messages(passes.schedule)


@pytest.mark.parametrize(
    ("schedule", "p", "factor", "late"), drawn([*product(SCHEDULES, (2, 4), (1, 2, 4), (False, True))], keep=5)
)
def test_groups_of_edges_are_as_good_as_a_stream_for_each_message(
    ranks: Any, schedule: str, p: int, factor: int, late: bool
) -> None:
    """They never deadlock, wherever receives are posted, and never delay a pass."""
    plan = plan_of(schedule, p, factor * p)
    orders, devices = orders_of(plan, ranks), devices_of(plan)
    orders = [receive_late(order) if late else order for order in orders]
    for seconds in (0.0, 0.25, 1.0):
        least = play(orders, devices, one_a_message(), seconds)
        assert least is not None and play(orders, devices, one_an_edge, seconds) == least


@pytest.mark.parametrize(("schedule", "p"), drawn([*product(SCHEDULES, (2, 4))], keep=lambda case: case[1] == 2))
def test_one_communicator_deadlocks_unless_receives_are_posted_ahead(ranks: Any, schedule: str, p: int) -> None:
    """torch's order is safe on any number of communicators: it posts each receive together with its send."""
    plan = plan_of(schedule, p, 2 * p)
    orders, devices = orders_of(plan, ranks), devices_of(plan)
    late = [receive_late(order) for order in orders]
    assert play(orders, devices, one_for_all) is not None
    assert (play(late, devices, one_for_all) is None) is (schedule != "gpipe")
    assert (play(late, devices, one_a_direction) is None) is (schedule in BOTH_WAYS)


@pytest.mark.parametrize(
    ("schedule", "p", "seconds", "factor"),
    [
        ("interleaved-1f1b", 4, 33, 1.3),
        ("interleaved-1f1b", 8, 69, 1.7),
        ("breadth-first", 4, 33, 1.2),
        ("zb-v", 4, 30, 1.03),
        ("hanayo", 4, 36, 1.02),
    ],
)
def test_one_communicator_takes_longer(ranks: Any, schedule: str, p: int, seconds: float, factor: float) -> None:
    """Even if a message takes no time: with torch's order of receives, passes wait for messages of other edges."""
    plan = plan_of(schedule, p, p)
    orders, devices = orders_of(plan, ranks), devices_of(plan)
    assert play(orders, devices, one_an_edge) == seconds
    for each in (one_a_direction, one_for_all):
        took = play(orders, devices, each)
        assert took is not None and took >= factor * seconds


def test_directions_are_the_streams_of_the_program() -> None:
    plan = plan_of("1f1b", 2, 2)
    costs = Costs(plan.job.cluster, plan.mesh, plan.job.framework.kernel_traits)
    _, program = build_program(plan, costs.estimate)
    assert {send.stream for send in program.sends if send} == {FORWARD, BACKWARD}


def test_edges() -> None:
    chain = [(0, 1, FORWARD), (1, 0, BACKWARD), (1, 2, FORWARD), (2, 1, BACKWARD)]
    assert list_edges([0, 1, 2]) == chain
    assert set(list_edges([0, 1, 0, 1])) == {(a, b, way) for a, b in ((0, 1), (1, 0)) for way in (FORWARD, BACKWARD)}
    assert len(list_edges([0, 1, 2, 0, 1, 2])) == 6, "the last device also sends to the first"
    turned = list_edges([0, 1, 2, 2, 1, 0])
    assert turned[:4] == chain and len(turned) == 8 and (2, 1, FORWARD) in turned


def test_every_pipeline_has_groups_of_its_own(ranks: Any) -> None:
    plan = resolve_plan(load_job(job(8, pp=4, tp=2)))
    for rank in range(8):
        ranks(plan, rank)
        groups = make_edge_groups(plan)
        assert all(dist.get_process_group_ranks(group) == sorted(edge[:2]) for edge, group in groups.items())
        assert len(set(map(id, groups.values()))) == len(groups)
        ahead = {(rank, rank + 2, FORWARD), (rank + 2, rank, BACKWARD)} if rank < 6 else set()
        behind = {(rank - 2, rank, FORWARD), (rank, rank - 2, BACKWARD)} if rank > 1 else set()
        assert set(groups) == ahead | behind


# ------------------------------------------------------------------------------------- in real processes

STEPS = {"1f1b": job(pp=2), "interleaved-1f1b": job(pp=2, chunks=2), "zb-v": job(pp=2, schedule="zb-v")}


RECORDED = {**{(name, True): job for name, job in STEPS.items()}, ("zb-v", False): STEPS["zb-v"]}
"""Steps with recorded CUDA calls, and one of a CPU."""


@pytest.fixture(scope="module")
def recorded() -> list[dict[tuple[str, bool], Any]]:
    """What each of two ranks did in a step of each job."""
    return on_ranks(partial(record_steps, RECORDED))


@pytest.mark.parametrize("case", RECORDED)
def test_every_message_is_batched_on_the_group_of_its_edge(ranks: Any, recorded: Any, case: tuple[str, bool]) -> None:
    plan = resolve_plan(load_job(RECORDED[case]))
    orders, devices = orders_of(plan, ranks), devices_of(plan)
    for rank, order in enumerate(orders):
        expected = []
        for stage, kind, _ in order:
            if kind[:4] in ("SEND", "RECV"):
                forward, sends = kind[-1] == "F", kind.startswith("SEND")
                other = devices[stage + (1 if forward == sends else -1)]
                pair = (rank, other) if sends else (other, rank)
                expected.append(("isend" if sends else "irecv", (*pair, FORWARD if forward else BACKWARD)))
        step = recorded[rank][case]
        assert step["batched"] == expected and step["unbatched"] == 0
        assert step["equal"], "sharded training equals serial training"


@pytest.mark.parametrize("name", STEPS)
def test_on_a_gpu_no_computation_waits_for_a_send(recorded: Any, name: str) -> None:
    for step in (of_rank[name, True] for of_rank in recorded):
        sends = [edge[2] for op, edge in step["batched"] if op == "isend"]
        waits = step["waits"]
        assert [stream for op, stream in waits if op == "isend"] == sends, "the side stream of its direction waits"
        assert {stream for op, stream in waits if op == "irecv"} == {"compute"}
        assert sum(op == "irecv" for op, _ in waits) == len(step["batched"]) - len(sends)
        assert step["kept"] == sends, "the allocator keeps the tensor until that stream is past the wait"


def test_on_a_cpu_a_send_waits_for_the_one_before(recorded: Any) -> None:
    for step in (of_rank["zb-v", False] for of_rank in recorded):
        assert sum(op == "isend" for op, _ in step["waits"]) == sum(op == "isend" for op, _ in step["batched"])
        assert step["most_sends"] <= 2, "one in each direction"
