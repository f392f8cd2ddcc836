"""DynaPipe's cyclic schedule: its stock of forward passes, its limit of memory, and its order of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshcast.simulator import simulate
from meshcast.simulator.scheduling.list_scheduler import reorder_at_run_time
from meshcast.simulator.scheduling.schedule import PassDurations, PipelineShape, Schedule, actions_of
from meshcast.simulator.schemes.pipeline.dynapipe import cluster_by_time
from tests.simulator.scheduling.schedules import make_schedule

P, M = 4, 24


def drawn(seed: int) -> PassDurations:
    """Durations of M micro-batches, of which a few take many times as long; activations in proportion."""
    times = np.random.default_rng(seed).lognormal(0, 1, M)
    each = tuple(PassDurations((t,) * P, (t,) * P, (t,) * P, (0.0,) * P, stored=(t,) * P) for t in times.tolist())
    mean = (float(np.mean(times)),) * P
    return PassDurations(mean, mean, mean, (0.0,) * P, stored=mean, each=each, barrier=True)


def makespan(schedule: Schedule, durations: PassDurations) -> float:
    shape = PipelineShape(P, M)
    orders = schedule.orders(shape, durations)
    run = reorder_at_run_time(schedule, shape, orders, lambda item: sum(map(durations.of, actions_of([item]))))
    return max(run.free_at)


@pytest.mark.parametrize("seed", range(3))
def test_heterogeneous_micro_batches_delay_it_less_than_1f1b(seed: int) -> None:
    durations = drawn(seed)
    plain, cyclic, best = (
        makespan(schedule, durations)
        for schedule in (make_schedule("1f1b"), make_schedule("dynapipe", reorder=False), make_schedule("dynapipe"))
    )
    assert best <= cyclic <= plain
    assert best < 0.97 * plain


@pytest.mark.parametrize("limit", [1.0, 2.5, 4.0])
def test_a_device_holds_no_more_than_the_limit(limit: float) -> None:
    """But for one micro-batch that is larger by itself."""
    durations = drawn(7)
    sizes, mean = [one.stored[0] for one in durations.each], durations.stored[0]
    for order in make_schedule("dynapipe", memory_limit=limit).orders(PipelineShape(P, M), durations):
        held: set[int] = set()
        for action in actions_of(order):
            held ^= {action.microbatch}
            assert sum(sizes[k] for k in held) <= limit * mean * (1 + 1e-9) or len(held) == 1


def test_equal_micro_batches_take_as_long_as_in_1f1b_but_for_less_memory_than_the_stock() -> None:
    """A limit makes bursts: the first device fills the pipeline, and waits until a backward pass is back."""
    one, shape = (1.0,) * P, PipelineShape(P, M)
    durations = replace(PassDurations(one, one, one, (0.0,) * P), barrier=True)
    plain = makespan(make_schedule("1f1b"), durations)
    free, stock, less = (makespan(make_schedule("dynapipe", memory_limit=n), durations) for n in (None, 2 * P - 1, P))
    assert free == stock == plain < less
    (first, *_) = make_schedule("dynapipe", memory_limit=P).orders(shape, durations)
    assert [action.kind for action in actions_of(first)][: P + 2] == ["F"] * P + ["BW", "F"]


def test_clusters_hold_micro_batches_of_like_times() -> None:
    times = [1.0, 9.0, 1.1, 5.0, 0.9, 9.2, 5.1, 1.0] * 3
    each = [PassDurations((t, t), (t, t), (t, t), (0.0, 0.0)) for t in times]
    found = cluster_by_time(each)
    assert sorted(sorted({round(times[k]) for k in own}) for own in found) == [[1], [5], [9]]
    assert sorted(k for own in found for k in own) == list(range(24))
    assert len(cluster_by_time(each[:1])) == 1


def test_orders_of_a_job_follow_the_lengths_of_its_micro_batches() -> None:
    def step(schedule: Any, classes: list[int]) -> float:
        lengths = [{"samples": 8, "sequence": 512}, {"sequence": 8192}]
        plan = {"tp": 2, "pp": 4, "schedule": schedule}
        batch = {"lengths": lengths, "order": classes}
        return float(simulate({"model": "llama2-7b", "cluster": "dgx-h100:1", "batch": batch, "plan": plan}).step_time)

    classes = [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    given = step({"use": "dynapipe", "reorder": False}, classes)
    assert step("dynapipe", classes) <= given <= step("1f1b", classes)
    assert step("dynapipe", classes) < step("1f1b", classes)
