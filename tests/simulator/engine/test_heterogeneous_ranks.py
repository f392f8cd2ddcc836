"""Steps rank by rank of plans whose stages or replicas differ: a rank waits for the ranks that send to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from meshcast.simulator import simulate
from meshcast.simulator.engine.per_rank import Pace, unfold
from meshcast.simulator.ir.ops import COMPUTE, Collective, Transfer
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.program.program import Program
from meshcast.simulator.scheduling.schedule import ACTION_KINDS
from tests.draws import drawn
from tests.simulator.plan.test_asymmetric import MIXED, REPLICAS, draw_heterogeneous, job

PROMPT = {"set": {"launch_s": 0.0}}
"""The host never keeps a GPU waiting."""

STAGES = [{"layers": 3, "tp": 4, "dp": 2}, {"layers": 3, "tp": 1, "dp": 4}, {"layers": 2, "tp": 4, "dp": 1}]
SIDES = [
    {"microbatches": 3, "stages": [{"tp": 2, "dp": 2, "layers": 3}, {"tp": 4, "layers": 5}]},
    {"microbatches": 5, "stages": [{"tp": 2, "dp": 4}]},
]
JOBS = {
    "stages": job({"stages": STAGES}, {"global": 32, "microbatches": 4}),
    "shares": job(
        {**REPLICAS, "replicas": [{"dp": 1, "microbatches": 3}, {"dp": 3, "microbatches": 7}]}, {"global": 24}
    ),
    "replicas": job({"replicas": SIDES}, {"global": 64, "micro": 8}),
}


@pytest.mark.parametrize("seed", drawn(range(20), keep=(1, 2)))
def test_equal_ranks_take_the_folded_step(seed: int) -> None:
    report = simulate(draw_heterogeneous(seed))
    plan, play = report.play.plan, report.play
    assert unfold(play.program, plan.ranks.grids, Pace()).span == pytest.approx(play.step.span, rel=1e-12)
    slower = unfold(play.program, plan.ranks.grids, Pace(stragglers=1.0, slow=2.0)).span
    assert play.step.span * (1 - 1e-12) <= slower <= 2 * play.step.span * (1 + 1e-12)


def groups_of(plan: Plan, device: int, axes: tuple[str, ...]) -> dict[int, frozenset[int]]:
    """For every rank of a device, the ranks of it that differ from it along `axes` alone."""
    mesh, ranks = plan.on(device).mesh, plan.ranks.of_device(device).tolist()
    apart = {
        rank: tuple((rank - mesh.first) // mesh.stride(a) % n for a, n in mesh.axes.items() if a not in axes)
        for rank in ranks
    }
    return {rank: frozenset(one for one in ranks if apart[one] == apart[rank]) for rank in ranks}


def by_hand(plan: Plan, program: Program, flat: FlatProgram, pace: Pace) -> tuple[float, dict[int, float]]:
    """The end of the step, and the busy time of every rank: every op of every global rank by itself."""
    ranks = [plan.ranks.of_device(device).tolist() for device in range(plan.ranks.devices)]
    grids = plan.ranks.grids
    sizes = [plan.ranks.grid(device).ranks.shape for device in range(plan.ranks.devices)]
    owner: dict[int, tuple[int, ...]] = {}
    for (stage, kind, k, part), first, behind in zip(program.timetable.actions, flat.first, flat.behind, strict=True):
        owner.update(dict.fromkeys(range(first, behind), (stage, ACTION_KINDS.index(kind), k, part)))
    owner |= {number: owner[number - 1] for number, _, _ in flat.sent}
    for device, numbers in enumerate(flat.updates):
        owner.update(dict.fromkeys(numbers, (device,)))
    always, transfers = pace.always(sizes), {key: pace.transfers(0, key) for key in {*owner.values()}}
    free: dict[tuple[str, int], float] = {}
    busy: dict[int, float] = dict.fromkeys((rank for own in ranks for rank in own), 0.0)
    end: dict[int, dict[int, float]] = {}
    rows = zip(flat.ops, flat.seconds, flat.latency, flat.issue, flat.after, flat.device, strict=True)
    clock = [0.0] * plan.ranks.devices
    for number, (op, seconds, latency, issue, after, device) in enumerate(rows):
        begin = {rank: free.get((op.stream, rank), 0.0) for rank in ranks[device]}
        everyone = False
        for other in after:
            work, there = flat.ops[other].work, flat.device[other]
            if isinstance(work, Transfer) and work.pairs and there != device:
                arrives: dict[int, list[float]] = {rank: [0.0] for rank in ranks[device]}
                for source, target, _ in work.pairs:
                    arrives[target].append(end[other][source])
                came = {rank: max(times) for rank, times in arrives.items()}
            elif grids[there].axes == grids[device].axes and sizes[there] == sizes[device]:
                came = {rank: end[other][one] for rank, one in zip(ranks[device], ranks[there], strict=True)}
            else:
                everyone, came = True, dict.fromkeys(ranks[device], max(end[other].values()))
            begin = {rank: max(time, came[rank]) for rank, time in begin.items()}
        if issue:
            clock[device] += issue
            begin = {rank: max(time, clock[device]) for rank, time in begin.items()}
        if isinstance(op.work, Collective):
            group = groups_of(plan, device, op.work.axes)
            group = dict.fromkeys(group, frozenset(ranks[device])) if everyone else group
            begin = {rank: max(begin[one] for one in group[rank]) for rank in begin}
        kernel = op.stream == COMPUTE and not isinstance(op.work, Collective | Transfer) and seconds > 0
        drawn = np.ones(sizes[device])
        if kernel:
            drawn = always[device] * pace.once(sizes[device], 0, owner[number])
        elif pace.communication and seconds and isinstance(op.work, Collective | Transfer):
            met = op.work.axes if isinstance(op.work, Collective) else ()
            axes = zip(plan.ranks.grid(device).axes, sizes[device], strict=True)
            drawn = drawn * transfers[owner[number]](tuple(1 if axis in met else size for axis, size in axes))
        factors = dict(zip(ranks[device], drawn.ravel().tolist(), strict=True))
        end[number] = {}
        for rank, time in begin.items():
            lasts = seconds * factors[rank]
            busy[rank] += lasts if kernel else 0.0
            free[op.stream, rank] = time + lasts
            end[number][rank] = time + lasts + latency
    return max(free.values()), busy


@pytest.mark.parametrize("name", drawn(JOBS, keep=("stages", "shares")))
def test_ranks_wait_for_those_that_they_meet(name: str) -> None:
    report = simulate(JOBS[name])
    plan = report.play.plan
    for pace in (Pace(jitter=0.3, seed=7), Pace(stragglers=0.2, slow=3.0, seed=2)):
        found = unfold(report.play.program, plan.ranks.grids, pace)
        span, busy = by_hand(plan, report.play.program, report.play.step.flat, pace)
        assert found.span == pytest.approx(span, rel=1e-12)
        for grid, own in zip(plan.ranks.grids, found.busy, strict=True):
            assert dict(zip(grid.ranks.ravel().tolist(), own.ravel().tolist(), strict=True)) == pytest.approx(
                {rank: busy[rank] for rank in grid.ranks.ravel().tolist()}
            )


@dataclass(frozen=True)
class OneSlowRank(Pace):
    """One rank of the first device takes twice as long."""

    rank: int = 0

    def always(self, shapes: Sequence[tuple[int, ...]], step: int = 0) -> list[np.ndarray]:
        factors = [np.ones(shape) for shape in shapes]
        factors[0].ravel()[self.rank] = 2.0
        return factors


def test_a_straggler_delays_the_ranks_that_receive_from_it() -> None:
    """Forward passes of four replicas into two: rank 4 receives from ranks 0 and 1, rank 5 from ranks 2 and 3."""
    stages = [{"layers": 4, "dp": 4}, {"layers": 4, "dp": 2}]
    cluster = {"gpu": "h100-sxm", "gpus": 6}
    batch, forward = {"global": 4, "microbatches": 1}, {"train": {"mode": "forward-only"}, "framework": PROMPT}
    play = simulate(job({"stages": stages}, batch, cluster=cluster) | forward).play
    work = next(send.work for _, send in play.program.sent)
    assert isinstance(work, Transfer)
    assert [(source, target) for source, target, _ in work.pairs] == [(0, 4), (1, 4), (2, 5), (3, 5)]
    equal = unfold(play.program, play.plan.ranks.grids, Pace())
    for slow in range(4):
        found = unfold(play.program, play.plan.ranks.grids, OneSlowRank(rank=slow))
        later = found.busy[0].max() - found.busy[0].min()
        assert later == pytest.approx(equal.busy[0].max())
        assert found.span == pytest.approx(equal.span + later, rel=1e-12)


@pytest.mark.parametrize("name", drawn(JOBS, keep=("replicas",)))
def test_the_slowest_rank_is_a_global_one(name: str) -> None:
    noise = {"stragglers": 0.1, "slow": 5.0, "seed": 4}
    report = simulate(JOBS[name] | {"noise": noise})
    answer, plan = report.to_dict()["noise"], report.play.plan
    ranks = np.concatenate([plan.ranks.of_device(device) for device in range(plan.ranks.devices)])
    assert sorted(ranks.tolist()) == list(range(16)), "every rank of the cluster has a pace of its own"
    busy = np.concatenate([own.ravel() for own in report.steps[0].busy])
    assert answer["slowest_rank"] == ranks[int(np.argmax(busy))]
    assert answer["its_kernels_s"] == busy.max() > answer["mean_kernels_s"] == pytest.approx(busy.mean())
    assert answer["over_equal_ranks"] > 1


@pytest.mark.slow
def test_devices_of_heterogeneous_replicas_decide_at_run_time() -> None:
    """Varuna in two replicas: each goes on with its own passes."""
    plan = {
        "mesh": {"dp": 2, "pp": 8},
        "schemes": [
            {"use": "pipeline/varuna", "over": "pp"},
            {"use": "data/zero-1", "over": "dp"},
            {"use": "memory/recompute-full"},
        ],
        "replicas": [{"dp": 1, "microbatches": 9}, {"dp": 1, "microbatches": 15}],
    }
    noisy = {"jitter": 0.4, "steps": 5}
    report = simulate(job(plan, {"global": 24}, cluster=MIXED, noise=noisy, framework=PROMPT))
    grids = report.play.plan.ranks.grids
    fixed = [unfold(report.play.program, grids, Pace(0.4, communication=0.4), step).span for step in range(5)]
    free = [step.span for step in report.steps]
    assert np.mean(free) < np.mean(fixed)
