"""Experts that follow their loads from step to step: moved (SmartMoE), with replicas (FlexMoE), shadowed (Prophet)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Collective, Op, SideOps
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.routing import Placement, Routing
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.program import one_of
from meshcast.simulator.schemes.expert.shared.load_balancing import BalancedScheme
from tests.simulator.schemes.small_jobs import job_on

place_copies = sys.modules[find_scheme("expert/eplb").__module__].place_copies
P, E, H, F = 8, 16, 1024, 2048
WEIGHTS = 2 * H * F
BALANCED = ("smartmoe", "flexmoe", "prophet", "eplb")
IN_INTERVALS = ("smartmoe", "eplb")
SHARED = SharedWork()

SKEWED = {"zipf": 0.8, "drift": 0.06, "steps": 6}
"""Few popular experts; in each step two of sixteen change places, or none."""


def job(use: str, routing: Any, **options: Any) -> dict[str, Any]:
    moe = {"experts": E, "top_k": 2, "expert_ffn": F}
    expert = {"use": f"expert/{use}", "over": "ep", "routing": routing, **options}
    model = {"layers": 2, "hidden": H, "heads": 16, "vocab": 1024, "seq": 4096, "moe": moe}
    more = {"cluster": "dgx-a100:1", "batch": {"global": 4 * P, "micro": 2}, "views": {"experts": {"edp": 1, "ep": P}}}
    return job_on({"dp": P}, {"use": "data/zero-1", "over": "dp"}, expert, samples=4 * P, model=model, **more)


def steps(use: str, routing: Any, **options: Any) -> list[float]:
    """Seconds of every step."""
    found: list[float] = simulate(job(use, routing, **options), shared_work=SHARED).times_of_step_kinds
    return found


def scheme_at(use: str, routing: Any, step: int, **options: Any) -> BalancedScheme:
    plan = resolve_plan(load_job(job(use, routing, **options)).model_copy(update={"step": step}), SHARED)
    found: Scheme = plan.schemes[1]
    assert isinstance(found, BalancedScheme)
    return found


def side_ops(use: str, routing: Any, step: int, **options: Any) -> tuple[list[SideOps], list[SideOps]]:
    """The side ops of experts before the first and after the last use of weights in a step."""
    plan = resolve_plan(load_job(job(use, routing, **options)).model_copy(update={"step": step}), SHARED)
    (stage,) = lower_stages(plan)[0]
    both = one_of(stage).ahead, one_of(stage).behind
    mine = ([side for side in one if side.ops[0].stream == "expert-weights"] for one in both)
    ahead, behind = mine
    return ahead, behind


def collectives(sides: list[SideOps]) -> list[tuple[Op, Collective]]:
    return [(op, op.work) for side in sides for op in side.ops if isinstance(op.work, Collective)]


# ------------------------------------------------------------------------------------------- the policies


@pytest.mark.parametrize(
    ("use", "options"), [("smartmoe", {"interval": 2}), ("flexmoe", {}), ("prophet", {}), ("eplb", {"interval": 1})]
)
def test_drifting_skewed_loads_take_less_than_under_the_static_plan(use: str, options: dict[str, Any]) -> None:
    static, balanced = steps("all-to-all", SKEWED), steps(use, SKEWED, **options)
    assert balanced[0] == pytest.approx(static[0], rel=1e-2), "nothing is known before the first step"
    assert np.mean(balanced[2:]) < 0.95 * np.mean(static[2:])


@pytest.mark.parametrize("use", BALANCED)
def test_even_loads_cost_the_exchange_of_counts(use: str) -> None:
    """And the memory that FlexMoE reserves for replicas: of one expert in each layer on each rank."""
    even = {"zipf": 0.0, "steps": 3}
    static, balanced = (simulate(job(one, even), shared_work=SHARED) for one in ("all-to-all", use))
    for one, other in zip(static.times_of_step_kinds, balanced.times_of_step_kinds, strict=True):
        assert one < other < 1.01 * one
    reserved = 2 * (WEIGHTS + F + H) * 18 if use in ("flexmoe", "eplb") else 0
    assert balanced.peak_allocated - static.peak_allocated == pytest.approx(reserved, abs=1e3)


def test_smartmoe_does_not_follow_a_drift_that_is_faster_than_its_interval() -> None:
    """Loads that are drawn anew in each step say nothing about the next: a move gains nothing."""
    fast = {"zipf": 0.8, "drift": 1.0, "steps": 6}
    static, moved = steps("all-to-all", fast), steps("smartmoe", fast, interval=1)
    slow = {"zipf": 0.8, "drift": 0.0, "steps": 6}
    gain = np.mean(steps("all-to-all", slow)) / np.mean(steps("smartmoe", slow, interval=1))
    assert np.mean(static) / np.mean(moved) < gain


@pytest.mark.parametrize("use", BALANCED)
def test_policies_know_the_steps_before_the_first_that_is_forecast(use: str) -> None:
    whole, late = SKEWED, SKEWED | {"warmup": 2, "steps": 4}
    options = {"interval": 2} if use in IN_INTERVALS else {}
    assert steps(use, late, **options) == steps(use, whole, **options)[2:]


@pytest.mark.parametrize("use", BALANCED)
def test_a_policy_sees_no_later_step(use: str, tmp_path: Path) -> None:
    """Placements up to a step are the same whatever its own loads and later ones are."""
    random = np.random.default_rng(3)
    common, ends = random.integers(1, 99, (2, E)), random.integers(1, 99, (2, 2, E))
    found = []
    for i, end in enumerate(ends):
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps([*common.tolist(), *end.tolist()]))
        options = {"interval": 1} if use in IN_INTERVALS else {}
        found.append([scheme_at(use, {"trace": str(path)}, step, **options).placements_of(E) for step in range(4)])
    assert found[0][:3] == found[1][:3]
    assert found[0][2][1] != Placement.in_order(P, E)
    assert [before for before, _ in found[0][1:]] == [now for _, now in found[0][:-1]]


def test_smartmoe_moves_only_what_pays() -> None:
    """Of loads that stay it moves experts for many steps with many tokens, not for the next one with few."""
    for interval, sequence, moves in ((1, 4096, True), (1, 64, False), (12, 64, True)):
        routing = {"zipf": 0.5, "steps": interval + 1}
        config = job("smartmoe", routing, interval=interval)
        config["batch"] |= {"sequence": sequence}
        plan = resolve_plan(load_job(config).model_copy(update={"step": interval}), SHARED)
        scheme = plan.schemes[1]
        assert isinstance(scheme, BalancedScheme)
        assert (scheme.placements_of(E)[1] != Placement.in_order(P, E)) == moves


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 1), (8, 2), (16, 1)])
def test_eplb_fills_all_slots_and_evens_out_the_loads(ranks: int, replicas: int) -> None:
    """No other numbers of copies have a smaller load of the busiest copy, and ranks differ by less than such a copy."""
    loads = np.random.default_rng(5).zipf(1.5, 2 * ranks).clip(1, 50).astype(float)
    hosts = place_copies(loads, ranks, replicas).hosts
    copies = np.array([len(each) for each in hosts])
    assert all(len({*each}) == len(each) for each in hosts) and copies.min() == 1
    assert copies.sum() == len(loads) + ranks * replicas
    slots = np.bincount([rank for each in hosts for rank in each], minlength=ranks)
    assert slots.tolist() == [2 + replicas] * ranks
    each = loads / copies
    for giver in np.flatnonzero(copies > 1):
        assert max(loads[giver] / (copies[giver] - 1), each.max()) >= each.max()
        taker = int(np.argmax(each))
        assert loads[giver] / (copies[giver] - 1) >= each[taker] - 1e-9 or copies[taker] == ranks
    of_rank = [sum(each[expert] for expert, mine in enumerate(hosts) if rank in mine) for rank in range(ranks)]
    assert max(of_rank) - min(of_rank) <= each.max() + 1e-9
    assert np.bincount([mine[0] for mine in hosts], minlength=ranks).max() <= 2 + replicas


def test_flexmoe_keeps_to_its_slots() -> None:
    for slots in (0, 1, 3):
        for step in range(6):
            hosts = scheme_at("flexmoe", SKEWED, step, replicas=slots).placements_of(E)[1].hosts
            foreign = [rank for ranks in hosts for rank in ranks[1:]]
            assert max(foreign.count(rank) for rank in range(P)) <= slots
            assert all(
                ranks[0] == expert * P // E and len({*ranks}) == len(ranks) for expert, ranks in enumerate(hosts)
            )


def test_flexmoe_shrinks_experts_that_are_popular_no_more(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    first, last = [40, *[1] * (E - 1)], [*[1] * (E - 1), 40]
    path.write_text("\n".join(",".join(map(str, row)) for row in (first, first, last, last)))
    replicas = [scheme_at("flexmoe", {"trace": str(path)}, step).placements_of(E)[1].hosts for step in range(4)]
    assert len(replicas[1][0]) > 1 == len(replicas[1][-1])
    assert len(replicas[3][-1]) > len(replicas[3][0])


def test_prophet_skips_ranks_with_few_tokens_of_an_expert(tmp_path: Path) -> None:
    """All tokens of ranks 2 and 3, and a few of rank 1, want the first expert."""
    rows = [[1] * E for _ in range(P)]
    rows[1][0], rows[2][0], rows[3][0] = 30, 400, 400
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([rows, rows]))
    assert scheme_at("prophet", {"trace": str(path)}, 1, skip=5).placements_of(E)[1].hosts[0] == (0, 2, 3)


# ------------------------------------------------------------------------------------------------ the ops


def test_moved_experts_send_weights_and_optimizer_states() -> None:
    """2 + 12 bytes of every weight, biases included, of all that move; the first use of a layer's experts waits."""
    before, now = scheme_at("smartmoe", SKEWED, 2, interval=2).placements_of(E)
    moved = sum(one != other for one, other in zip(before.hosts, now.hosts, strict=True))
    ahead, behind = side_ops("smartmoe", SKEWED, 2, interval=2)
    found = collectives(ahead)
    assert moved and not behind and len(found) == 2, "one for each layer"
    for _, work in found:
        assert work.operation == "all_to_all"
        assert work.nbytes * (P - 1) == pytest.approx(moved * 14 * (WEIGHTS + F + H), rel=1e-3)
    assert not collectives(side_ops("smartmoe", SKEWED, 3, interval=2)[0]), "they have moved"


def test_replicas_sum_their_gradients_and_shadows_return_them() -> None:
    for use, before, after in (("flexmoe", "all_to_all", "all_reduce"), ("prophet", "broadcast", "reduce")):
        hosts = scheme_at(use, SKEWED, 1).placements_of(E)[1].hosts
        groups = sorted(tuple(sorted(ranks)) for ranks in hosts if len(ranks) > 1)
        ahead, behind = side_ops(use, SKEWED, 1)
        assert groups and {work.operation for _, work in collectives(ahead)} == {before}
        sums = [work for _, work in collectives(behind)]
        assert {work.operation for work in sums} == {after}
        assert sorted(work.members or () for work in sums) == sorted(2 * groups), "in both layers"
        assert {work.nbytes for work in sums} == {4 * (WEIGHTS + F + H)}
        if use == "prophet":
            assert {work.nbytes for _, work in collectives(ahead)} == {2 * (WEIGHTS + F + H)}


def test_side_ops_are_of_the_parameters_of_their_layers_experts() -> None:
    plan = resolve_plan(load_job(job("prophet", SKEWED)).model_copy(update={"step": 1}), SHARED)
    (stage,) = map(one_of, lower_stages(plan)[0])
    names = [
        param.name for unit_run in stage.unit_runs for _ in range(unit_run.count) for param in unit_run.fragment.params
    ]
    (ahead,) = (side for side in stage.ahead if side.ops[0].stream == "expert-weights")
    groups = np.split(ahead.params, ahead.starts[1:])
    assert [names[number].startswith(("wexpert", "bexpert")) for group in groups for number in group] == [True] * len(
        ahead.params
    )
    layers = [min(group) for group in groups]
    assert layers == sorted(layers) and len({*layers}) == 2


# --------------------------------------------------------------------------------------------- placements


def test_replicas_by_hand() -> None:
    """Four experts on two ranks: the first, with half of the tokens, also on the other rank."""
    routing = Routing(counts=((6.0, 2.0, 2.0, 2.0),))
    spread = routing.load(2, 4, placement=Placement(((0, 1), (0,), (1,), (1,))))
    assert spread.rank_loads == pytest.approx((5 / 6, 7 / 6))
    assert spread.expert_loads == pytest.approx((1.0, 2 / 3, 2 / 3))
    shadow = routing.load(2, 4, placement=Placement(((0, 1), (0,), (1,), (1,)), stays=True))
    assert shadow.rank_loads == spread.rank_loads
    assert shadow.remote < spread.remote, "half of the expert's tokens travel to its replica, none to a shadow"


def test_transfers_are_from_the_owner_to_new_hosts() -> None:
    before, after = Placement(((0,), (0,), (1,), (1,))), Placement(((1,), (0, 1), (0,), (1,)))
    assert after.transfers(before, 2).tolist() == [[0, 2], [1, 0]]


# --------------------------------------------------------------------------------------------- the report


def test_steps_are_those_of_jobs_of_one_step_each(tmp_path: Path) -> None:
    counts = [list(range(1, E + 1)), [1] * E, [5, *[1] * (E - 1)]]
    (tmp_path / "trace.json").write_text(json.dumps(counts))
    report = simulate(job("all-to-all", {"trace": str(tmp_path / "trace.json")}), shared_work=SHARED)
    alone = []
    for i, one in enumerate(counts):
        (tmp_path / f"{i}.json").write_text(json.dumps(one))
        alone.append(simulate(job("all-to-all", {"counts": str(tmp_path / f"{i}.json")}), shared_work=SHARED))
    answer = report.to_dict()
    assert answer["steps"]["step_times_s"] == pytest.approx([one.step_time for one in alone], rel=1e-12)
    assert (
        answer["step_time_s"] == answer["steps"]["mean_s"] == pytest.approx(np.mean([one.step_time for one in alone]))
    )
    assert answer["steps"]["slowest"] == 2
    assert report.peak_allocated == max(one.peak_allocated for one in alone)
    assert sum(report.parts.values()) == pytest.approx(report.step_time)
    assert "steps" not in alone[0].to_dict()
    assert json.dumps(answer)


def test_sharded_weights_may_be_lowered_first() -> None:
    """FSDP divides the layers of a stage into runs: whichever scheme comes first, as many experts have replicas."""
    found = []
    for order in (1, -1):
        config = job("flexmoe", SKEWED)
        config["plan"]["schemes"] = [{"use": "data/fsdp", "over": "dp"}, *config["plan"]["schemes"][1:]][::order]
        plan = resolve_plan(load_job(config).model_copy(update={"step": 1}), SHARED)
        (stage,) = map(one_of, lower_stages(plan)[0])
        found.append(sum(len(side.params) for side in stage.ahead))
    assert found[0] == found[1] > 0
