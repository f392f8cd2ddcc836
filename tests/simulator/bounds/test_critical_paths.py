"""Longest chains of passes against closed forms and replays of whole batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from meshcast.simulator.bounds import critical_paths as module
from meshcast.simulator.bounds.critical_paths import critical_paths
from meshcast.simulator.bounds.schedule_bound import PASSES, StageTimes
from meshcast.simulator.scheduling.schedule import Action, PipelineShape, Schedule, actions_of
from tests.simulator.scheduling.schedules import make_schedule, played

F, BW, B, W = 1.0, 2.0, 1.2, 0.8


def make(name: str, p: int, m: int, chunks: int = 1) -> tuple[Schedule, PipelineShape]:
    schedule = make_schedule(name, **({"chunks": chunks} if chunks > 1 else {}))
    return schedule, PipelineShape(p, m, schedule.chunks_per_device())


def alike(shape: PipelineShape, hop: float = 0.0, parts: int = 0) -> StageTimes:
    """Stages whose passes last as long whichever way a chain runs through them."""
    seconds = np.tile([F, BW, B, W], (parts or shape.stages, 1))
    own = seconds[:, :, None]
    return StageTimes(own, own, seconds, own, own, hop)


@pytest.mark.parametrize("m", [4, 8, 16, 64])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 3)])
def test_a_chain_is_as_long_as_the_step(name: str, chunks: int, m: int) -> None:
    """GPipe, section 3.1; arXiv 2104.04473, section 2.2."""
    schedule, shape = make(name, 4, m, chunks)
    paths = critical_paths(schedule, shape, alike(shape))
    assert paths is not None
    assert paths.seconds(alike(shape))[0] == pytest.approx((chunks * m + 4 - 1) * (F + BW))


SPLIT_OR_CHUNKED = [
    *[("interleaved-1f1b", 2), ("breadth-first", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("hanayo", 2)]
]


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), *SPLIT_OR_CHUNKED])
def test_a_long_batch_repeats_what_a_short_one_does(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, shape = make(name, 4, 32, chunks)
    times, uneven = alike(shape, 0.1), np.random.default_rng(0).uniform(0.8, 1.2, (shape.stages, len(PASSES)))
    stream = times.stream * uneven[:, :, None]
    times = replace(times, stream=stream, path=times.path * uneven, from_input=stream, to_result=stream)
    short = critical_paths(schedule, shape, times, {0, 3})
    monkeypatch.setattr(module, "FEW", 8)
    whole = critical_paths(schedule, shape, times, {0, 3})
    assert short is not None and whole is not None
    longest = whole.seconds(times)
    assert (short.seconds(times) <= longest * (1 + 1e-12)).all()
    assert short.seconds(times)[0] >= 0.98 * longest[0]
    assert (short.beside == whole.beside).all()


def draw_times(shape: PipelineShape) -> StageTimes:
    """Parts that differ, whose results are there before a pass ends, and which begin before their input has come."""
    draw = np.random.default_rng(0).uniform
    stream = 1e-3 * draw(0.5, 1.5, (shape.stages, len(PASSES), 1)) * np.array([F, BW, B, W])[:, None]
    entered, result = (stream * draw(0.6, 1.0, stream.shape) for _ in range(2))
    path = np.minimum(entered, result)[:, :, 0] * draw(0.6, 1.0, stream.shape[:2])
    return StageTimes(stream, stream, path, entered, result, hop=3e-4)


Ends = dict[Action, tuple[float, float]]
"""When a pass begins and when it has ended [s]."""


def replay(schedule: Schedule, shape: PipelineShape, times: StageTimes, late: Mapping[Action, float]) -> Ends:
    """Plays passes one by one; each begins when its device is free. late: when some passes end, with their result."""
    stages, free, played_passes = range(shape.stages), [0.0] * shape.p, Ends()
    results = dict[tuple[int, int, bool], float]()
    before = {stage: schedule.predecessors(shape, stage) for stage in stages}
    left = [list(actions_of(order)) for order in schedule.orders(shape)]
    while any(left):
        for device, order in enumerate(left):
            while order:
                action, part = order[0], schedule.model_part(shape, order[0].stage)
                kind, forward = PASSES.index(action.kind), action.kind == "F"
                after = [other for other in stages if action.stage in before[other]]
                senders = before[action.stage] if forward else after if action.kind != "W" else []
                inputs = [(sender, action.microbatch, forward) for sender in senders]
                if not all(key in results for key in inputs):
                    break
                hops = [0.0 if schedule.device(shape, sender) == device else times.hop for sender in senders]
                came = max((results[key] + hop for key, hop in zip(inputs, hops, strict=True)), default=-np.inf)
                begin = max(free[device], came)
                end = max(free[device] + times.stream[part, kind, 0], came + times.from_input[part, kind, 0])
                result = max(free[device] + times.to_result[part, kind, 0], came + times.path[part, kind])
                if action in late:
                    end = result = late[action]
                if action.kind != "W":
                    results[action.stage, action.microbatch, forward] = result
                free[device], played_passes[order.pop(0)] = end, (begin, end)
    return played_passes


@pytest.mark.parametrize("device", [0, 3])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), *SPLIT_OR_CHUNKED])
def test_chains_are_the_longest_of_their_passes(name: str, chunks: int, device: int) -> None:
    """To the end of the step, to the last backward pass of a stage, and on from the first forward pass of a stage."""
    schedule, shape = make(name, 4, 8, chunks)
    times, nothing = draw_times(shape), np.zeros(shape.stages)
    paths, ends = critical_paths(schedule, shape, times, {device}), replay(schedule, shape, times, {})
    step = max(end for _, end in ends.values())
    assert paths is not None and paths.seconds(times)[0] == pytest.approx(step)
    for stage in {action.stage for action in ends if schedule.device(shape, action.stage) == device}:
        # Collectives that take longer than the step, of this stage alone.
        seconds = np.where(np.arange(shape.stages) == stage, 1.0, 0.0)
        last = [action for action in ends if action.stage == stage and action.kind in ("BW", "W")][-1]
        assert paths.last_reduction(paths.seconds(times), seconds, nothing, nothing, 0.0) == pytest.approx(
            ends[last][0] + 1
        )
        first = next(action for action in ends if action.stage == stage and action.kind == "F")
        late = replay(schedule, shape, times, {first: 1.0})
        left = max(end for _, end in late.values()) - 1
        assert paths.last_reduction(paths.seconds(times), nothing, seconds, nothing, 0.0) == pytest.approx(1 + left)


def test_chains_with_collectives_beside_them() -> None:
    schedule, shape = make("1f1b", 4, 8)
    paths, times, none = critical_paths(schedule, shape, alike(shape), {0}), alike(shape), np.zeros(4)
    assert paths is not None
    step = (8 + 3) * (F + BW)
    reductions, each = np.array([5.0, 0, 0, 0]), np.array([4.0, 0, 0, 0])
    # Device 0 reduces from the begin of its last backward pass on, which ends with the step.
    assert paths.last_reduction(paths.seconds(times), reductions, none, none, 0.0) == pytest.approx(step - BW + 5)
    assert paths.last_reduction(paths.seconds(times), none, 4 * reductions, none, 0.0) == pytest.approx(20 + step - F)
    assert paths.last_reduction(paths.seconds(times), none, none, none, 2.5) == pytest.approx(step + 2.5)
    # From its first backward pass on, after 4 forward and 3 backward passes elsewhere, it reduces 8 times 4 s.
    assert paths.last_reduction(paths.seconds(times), none, none, each, 0.0) == pytest.approx(4 * F + 3 * BW + 32)
    assert step - BW + 4 < 4 * F + 3 * BW + 32


def test_schedules_without_fixed_orders_have_no_chains() -> None:
    schedule, shape = make("v-zb", 4, 16, 2)
    assert critical_paths(schedule, shape, alike(shape)) is None


@pytest.mark.parametrize(("name", "m"), [("dualpipe", 8), ("dualpipe", 20), ("dualpipe", 64), ("dualpipe-v", 16)])
def test_kernels_of_pairs_follow_each_other(name: str, m: int) -> None:
    schedule, shape = make(name, 4, m, 1 if name == "dualpipe" else 2)
    times = alike(shape, parts=shape.stages // schedule.directions)
    paths = critical_paths(schedule, shape, times, {0})
    assert paths is not None and paths.ends == paths.starts == 0
    chunks = len(times.path) // 4  # which share the time of a pass
    found = played(name, 4, m, (F, B, W), t_pair=F + B + W)["makespan"] * chunks
    # A pass of a pair gives its result before the pair ends.
    assert 0.9 * found < paths.seconds(times)[0] <= found * (1 + 1e-9)


def test_pairs_whose_kernels_are_short_bound_less() -> None:
    schedule, shape = make("dualpipe", 4, 32)
    times = alike(shape, parts=4)
    hidden = replace(times, busy=times.busy / 2)
    paths = critical_paths(schedule, shape, times)
    assert paths is not None
    assert shape.m * (F + BW) / 2 < paths.seconds(hidden)[0] < paths.seconds(times)[0]
