"""Ops that share links and multiprocessors in whole jobs: work is kept, nothing gets faster, and reports add up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import simpy
from hypothesis import given

from meshcast.simulator import simulate
from meshcast.simulator.costs.estimate import ALONE, FULL, Use
from meshcast.simulator.engine import contention, simpy_engine
from meshcast.simulator.engine.contention import Running, Traffic
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Transfer, Work
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.flatten import FlatProgram, flatten
from meshcast.validation.contract.played import Ideal
from tests.draws import drawn
from tests.simulator.engine.links import NETWORK, UP
from tests.strategies import EVERY_EXAMPLE, examples, jobs

PASSES = 40 if EVERY_EXAMPLE else 24
"""Of micro-batches through layers, up to which a drawn job may have more of them."""


class Watched(Traffic):
    """Keeps at which rate every op went on from when."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.paces: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.links: dict[int, Mapping[Any, float]] = {}

    def _set_rate(self, one: Running, rate: float) -> None:
        super()._set_rate(one, rate)
        self.paces[one.number].append((self.env.now, rate))
        self.links[one.number] = one.links


PRICE = Ideal(links=1e6, latency=1e-5)


def crowded(work: Work) -> Use:
    """All communication over one port, after a third of its time, with a quarter of the multiprocessors."""
    if isinstance(work, Collective | Transfer):
        return Use(2 / 3 * PRICE(work)[0], NETWORK, 0.25)
    return ALONE if isinstance(work, Memory) else FULL


def flat_of(job: dict[str, Any], price: Any = PRICE, shared: SharedWork | None = None) -> tuple[FlatProgram, int]:
    plan = resolve_plan(load_job(job), shared, price)
    return flatten(build_program(plan, price, shared)[1]), plan.shape.p


@examples(40)
@given(job=jobs(launch=(0.0, 2e-6, 1e-4), passes=PASSES))
def test_sharing_makes_no_op_earlier_and_no_op_shorter(job: dict[str, Any]) -> None:
    """Without sharing the times are those of SimPy bit by bit; nearly so if streams have links so wide that all fit."""
    flat, devices = flat_of(job)
    plain, narrow = simpy_engine.play(flat), Use(1.0, (0.1, 0.1, 0.1))
    alone, fits, full = (contention.play(flat, [use] * devices) for use in (lambda _: ALONE, lambda _: narrow, crowded))
    assert alone == plain
    assert (*fits.begin, *fits.end) == pytest.approx((*plain.begin, *plain.end), rel=1e-12)
    slack = 1e-12 * full.span
    assert all(late >= early - slack for late, early in zip(full.begin, plain.begin, strict=True))
    rows = zip(full.begin, full.end, flat.seconds, strict=True)
    assert all(end - begin >= seconds - slack for begin, end, seconds in rows)


@examples(30)
@given(job=jobs(launch=(0.0, 1e-4), passes=PASSES))
def test_every_op_does_its_work_and_no_link_more_than_it_can(job: dict[str, Any]) -> None:
    flat, devices = flat_of(job)
    seen: list[Watched] = []

    def running(env: simpy.Environment) -> Any:
        seen.append(Watched(env, flat, [crowded] * devices))
        return seen[0].run

    times = simpy_engine.play(flat, running)
    changes: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for number, paces in seen[0].paces.items():
        paces = [*paces, (times.end[number], 0.0)]
        done = math.fsum((end - begin) * rate for (begin, rate), (end, _) in pairwise(paces))
        work = flat.ops[number].work
        wanted = crowded(work).moving if isinstance(work, Collective | Transfer) else flat.seconds[number]
        assert done == pytest.approx(wanted, rel=1e-9, abs=1e-12 * times.span)
        for link, share in seen[0].links[number].items():
            before = [0.0, *(rate for _, rate in paces)]
            changes[link] += [(at, share * (rate - was)) for (at, rate), was in zip(paces, before, strict=False)]
    for moves in changes.values():
        used = 0.0
        moves.sort()
        for at, (moment, change) in enumerate(moves):
            used += change
            if at + 1 == len(moves) or moves[at + 1][0] > moment + 1e-12 * times.span:
                assert used <= 1 + 1e-9


PLANS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 16, "fsdp": True},
    {"pp": 2, "tp": 4, "dp": 4},
    {"pp": 4, "tp": 8, "dp": 1, "chunks": 2},
    {"pp": 2, "tp": 2, "dp": 4, "cp": 2},
]


def real(plan: dict[str, Any]) -> dict[str, Any]:
    gpus = math.prod(plan.get(axis, 1) for axis in ("pp", "tp", "dp", "cp"))
    return {
        "model": {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000, "seq": 2048},
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0}},
        "cluster": f"dgx-h100:{gpus // 8}",
        "batch": {"global": 32},
        "plan": plan,
    }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow
def test_whole_jobs_are_never_slower_on_faster_links(plan: dict[str, Any]) -> None:
    """Not true of every order of ops: an earlier op may delay another one."""
    spans, lowered = [], SharedWork()
    for rate in [1e8 * 4**i for i in range(6)]:
        price = Ideal(flops=1e14, memory=1e12, links=rate)

        def use(work: Work, price: Ideal = price) -> Use:
            if not isinstance(work, Collective | Transfer):
                return FULL if isinstance(work, Gemm | Attention) else ALONE
            inside = isinstance(work, Collective) and work.axes == ("tp",)
            return Use(price(work)[0], UP if inside else NETWORK, 0.2)

        flat, devices = flat_of(real(plan), price, lowered)
        spans.append(contention.play(flat, [use] * devices).span)
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(spans))


@pytest.mark.parametrize("plan", drawn(PLANS, keep=2))
def test_the_report_of_contention_adds_up(plan: dict[str, Any]) -> None:
    """FSDP with TP: an all-gather occupies 24 of 132 multiprocessors, and at most three collectives run at once."""
    plain, shared, again = (simulate(real(plan), engine) for engine in ("simpy", "shared", "shared"))
    alone, parts = plain.breakdown.parts, shared.breakdown.parts
    assert shared.step_time >= plain.step_time * (1 - 1e-12)
    assert math.fsum(parts.values()) == pytest.approx(shared.play.step.span, rel=1e-9)
    assert all(parts[kind] >= alone[kind] * (1 - 1e-12) for kind in ("gemm", "attention"))
    assert all(parts[kind] == pytest.approx(alone[kind], rel=1e-9) for kind in ("memory_bound", "optimizer"))
    assert shared.play.peaks == plain.play.peaks and set(shared.assumed) > set(plain.assumed)
    assert shared.to_dict() == again.to_dict()
    if plan.get("fsdp"):
        assert alone["gemm"] * 1.005 < parts["gemm"] <= alone["gemm"] / (1 - 3 * 24 / 132)


def test_all_to_alls_that_go_first_take_their_own_time() -> None:
    """Lina: beside gradient reductions on the same ports all-to-alls take longer, unless they go first."""

    def exposed(engine: Engine, **options: Any) -> tuple[float, float]:
        moe = {"experts": 16, "top_k": 2, "expert_ffn": 4096, "capacity": 1.0}
        schemes = [{"use": "data/ddp", "over": "dp"}, {"use": "expert/lina", "over": "ep", **options}]
        job = {
            "model": {"layers": 12, "hidden": 1024, "heads": 8, "vocab": 1024, "seq": 512, "moe": moe},
            "cluster": {"gpu": "a100-sxm-40", "gpus": 16, "gpus_per_node": 4, "inter": {"gbps_per_gpu": 50}},
            "batch": {"global": 64, "micro": 4},
            "plan": {"mesh": {"dp": 16}, "views": {"experts": {"edp": 1, "ep": 16}}, "schemes": schemes},
        }
        answer = simulate(job, engine).to_dict()
        return answer["breakdown_s"]["exposed"]["ep"], answer["step_time_s"]

    alone, fair, first = exposed("matrices"), exposed("shared", priority=False), exposed("shared")
    assert alone[0] == pytest.approx(first[0], rel=1e-6)
    assert fair[0] > 1.01 * first[0] and first[1] < fair[1]
