"""Links and multiprocessors that messages and collectives of heterogeneous stages and replicas share."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.hardware import load_cluster
from meshcast.simulator import simulate
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Transfer
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.simulator.plan.test_asymmetric import draw_heterogeneous

MB = 2**20
FAN_OUT = Transfer(MB, "pp", 0, 1, tuple((0, rank, MB) for rank in range(1, 8)))
"""One rank sends to seven, a message after the other."""

SEEDS = drawn(range(20), keep=(1, 2))


MESH = Mesh({"pp": 2, "tp": 8})


def test_of_one_rank_that_sends_to_seven_each_is_busy_a_seventh_of_the_time() -> None:
    costs = Costs(load_cluster("dgx-h100:2"), MESH)
    fan, pair = costs.use(FAN_OUT), costs.use(Transfer(MB, "pp", 0, 1, ((0, 1, MB),)))
    assert fan.moving == pytest.approx(7 * pair.moving)
    assert fan.links == pair.links and fan.received == pytest.approx([share / 7 for share in pair.links])
    back = costs.use(Transfer(7 * MB, "pp", 1, 0, tuple((rank, 0, MB) for rank in range(1, 8))))
    assert (back.links, back.received) == (fan.received, fan.links)
    assert fan.moving <= costs.estimate(FAN_OUT).seconds


def test_messages_over_heterogeneous_links_use_each_for_its_part() -> None:
    """Rank 0 sends to a GPU of its node and to one of the other node."""
    pairs, costs = ((0, 1, MB), (0, 8, MB)), Costs(load_cluster("dgx-h100:2"), MESH)
    near, far, both = (costs.use(Transfer(MB, "pp", 0, 1, each)) for each in (pairs[:1], pairs[1:], pairs))
    assert both.moving == pytest.approx(near.moving + far.moving)
    scale_up, _, network = both.links
    assert scale_up == pytest.approx(near.moving * near.links[0] / both.moving)
    assert network == pytest.approx(far.moving / both.moving)


def test_what_replicas_on_heterogeneous_nodes_do_together_shares_the_links_of_each() -> None:
    """A reduction takes as long as on the slower node; on the faster one it uses the links as it would there alone."""
    nodes = [{"node": node, "nodes": 1} for node in ("dgx-a100-40", "dgx-h100")]
    replicas = [{"dp": 8, "microbatches": count} for count in (2, 4)]
    plan = {"mesh": {"dp": 16}, "schemes": [{"use": "data/ddp", "over": "dp"}], "replicas": replicas}
    job = {"model": "gpt2-774m", "cluster": {"groups": nodes}, "batch": {"global": 48, "micro": 1}, "plan": plan}
    alone, shared = (simulate(job, engine=engine).play.step.span for engine in ("matrices", "shared"))
    assert alone <= shared * (1 + 1e-9) and shared < 1.2 * alone


@pytest.mark.parametrize("seed", SEEDS)
def test_contention_makes_heterogeneous_plans_no_faster(seed: int) -> None:
    alone, shared = (simulate(draw_heterogeneous(seed), engine=engine) for engine in ("simpy", "shared"))
    assert shared.step_time >= alone.step_time * (1 - 1e-12)
    assert sum(shared.parts.values()) == pytest.approx(shared.step_time)


def every_communication(job: dict[str, Any]) -> list[tuple[Costs, Any]]:
    """The messages of a job, and the collectives in which its devices meet, each with the prices of a device."""
    plan, shared = resolve_plan(load_job(job)), SharedWork()
    every = shared.device_costs(plan)
    _, program = build_program(plan, [each.estimate for each in every], shared)
    communication = [(every[send.source], send.work) for _, send in program.sent]
    for meeting in program.meetings:
        for device, place in meeting:
            ops = [op for part in program.updates[device].parts for op in part.block.ops]
            communication.append((every[device], ops[place].work))
    return communication


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_move_no_longer_than_the_communication_lasts(seed: int) -> None:
    for prices, work in every_communication(draw_heterogeneous(seed)):
        use, seconds = prices.use(work), prices.estimate(work).seconds
        assert 0 < use.moving <= seconds * (1 + 1e-9)
        assert all(0 <= share <= 1 + 1e-12 for share in (*use.links, *(use.received or ())))
        if isinstance(work, Transfer):
            assert max(use.links) > 0 and max(use.received or use.links) > 0
        if isinstance(work, Collective) and work.ranks is not None and len({r // 8 for r in work.ranks}) > 1:
            assert use.links[2] > 0, "ranks of two nodes"
