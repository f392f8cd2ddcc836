"""Schedules that hold every stage on several devices: sums of the copies' gradients; Chimera's halves of samples."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.ops import COMPUTE, Collective
from meshcast.validation.contract.played import PAID, Ideal, Played, play_job
from meshcast.validation.pipelines.cases import ScheduleCase, answer, replay
from tests.draws import drawn_grid
from tests.simulator.engine.drawn_kinds import CONCATENATIONS
from tests.simulator.scheduling.schedules import job_of, pipeline
from tests.simulator.scheduling.test_static_orders import TRIPLES
from tests.strategies import BIDIRECTIONAL, SECONDS

# ------------------------------------------------------------------------------------------ two copies of the weights


def run(
    use: str, data: str = "data/ddp", dp: int = 1, pp: int = 4, sync: str = "", price: Any = PAID, **more: Any
) -> Played:
    schemes = [{"use": use, "over": "pp", **({"gradient_sync": sync} if sync else {})}, {"use": data, "over": "dp"}]
    return play_job(job_of({"mesh": {"pp": pp, "dp": dp}, "schemes": schemes}, batch=16 * dp, **more), price)


LINKS = Ideal(links=1e8)
"""A sum of gradients takes less time than the passes behind it."""

SYNCS = [*product(BIDIRECTIONAL, ("end", "eager")), ("pipeline/chimera", "eager-opt")]
"""Bidirectional schedules with their options of gradient synchronisation."""


def summed(played: Played, device: int) -> list[Collective]:
    """All-reduces of a device over the pipeline's axis, without that of the gradient norm."""
    works = [op.work for _, op in played.instances(device) if op.phase == "U" and isinstance(op.work, Collective)]
    return [work for work in works if work.axes == ("pp",) and work.nbytes > 4]


@pytest.mark.parametrize(
    ("of_pipeline", "of_data", "tied"),
    drawn_grid(SYNCS, [("data/ddp", 1), ("data/zero-1", 2), ("data/fsdp", 2)], [False, True]),
)
def test_two_directions_hold_and_reduce_everything_twice(
    of_pipeline: tuple[str, str], of_data: tuple[str, int], tied: bool
) -> None:
    """of_pipeline: schedule and when it sums gradients. of_data: data scheme and what it shards gradients by."""
    (use, sync), (data, cut) = of_pipeline, of_data
    two, one = run(use, data, dp=2, sync=sync, tied=tied), run("pipeline/1f1b", data, dp=2, tied=tied)
    model = two.plan.job.model
    held = [sum(param.size for param in two.list_held(device)) for device in range(4)]
    held_alone = sum(param.size for device in range(4) for param in one.list_held(device))
    # With tied embeddings the last stage shares the table of the other direction's first stage on its device.
    assert sum(held) == 2 * model.parameters
    for name in ("parameters", "gradients", "optimizer"):
        alone, copied = (sum(played.resting(device)[name] for device in range(4)) for played in (one, two))
        assert copied == pytest.approx(2 * alone * model.parameters / held_alone)
    for device in range(4):
        works = summed(two, device)
        assert {work.members for work in works} == {tuple(sorted((device, 3 - device)))}
        assert sum(work.nbytes for work in works) == pytest.approx(4 * held[device] / cut)
    assert not any(summed(one, device) for device in (1, 2))


def test_pairs_of_chimera_hold_and_reduce_everything_as_often() -> None:
    four = play_job(job_of(pipeline("chimera", pairs=2)))
    held = [sum(param.size for param in four.list_held(device)) for device in range(4)]
    assert sum(held) == 4 * four.plan.job.model.parameters
    for device in range(4):
        assert {work.members for work in summed(four, device)} == {(0, 1, 2, 3)}
        assert sum(work.nbytes for work in summed(four, device)) == pytest.approx(4 * held[device])
    assert not summed(run("pipeline/dualpipe-v"), 0)


def sums(played: Played, device: int) -> list[tuple[float, float]]:
    """Begins and ends of the sums of gradients of a device [s]."""
    works = summed(played, device)
    numbers = [n for n, op in played.instances(device) if op.work in works]
    return [(played.times.begin[n], played.times.end[n]) for n in numbers]


@pytest.mark.parametrize(("use", "sync"), SYNCS)
def test_two_devices_all_reduce_their_gradients(use: str, sync: str) -> None:
    played = run(use, sync=sync)
    for device in (0, 1):
        assert np.ravel(sums(played, device)) == pytest.approx(np.ravel(sums(played, 3 - device)))
        # Of the stages that end early, the outer ones of Chimera are followed by a bubble.
        early = {"end": 0, "eager": 2, "eager-opt": 1 - device}[sync]
        assert len(sums(played, device)) == early + (early < 2)


@pytest.mark.parametrize(
    ("use", "of_data"),
    drawn_grid(BIDIRECTIONAL, [("data/ddp", 1), ("data/ddp", 2), ("data/zero-1", 2), ("data/fsdp", 2)]),
)
def test_an_eager_sum_begins_with_the_last_gradient_of_all_copies(use: str, of_data: tuple[str, int]) -> None:
    """After the last backward pass of the stage on all devices, reduced among data-parallel ranks."""
    played = run(use, *of_data, sync="eager")
    flat, table, end = played.step.flat, played.program.timetable, played.times.end
    complete = dict.fromkeys(range(4), 0.0)
    free = dict(complete)
    for action, done in enumerate(table.actions):
        if done.kind in ("BW", "W"):
            ops = range(flat.first[action], flat.behind[action])
            gradients = [end[n] for n in ops if flat.ops[n].stream == COMPUTE or flat.ops[n].stream.startswith("data")]
            complete[done.stage % 4] = max([complete[done.stage % 4], *gradients])
    for action, done in enumerate(table.actions):
        if done.kind == "S":
            device = table.device_of[action]
            begin = played.times.begin[flat.first[action]]
            assert begin == pytest.approx(max(complete[done.stage % 4], free[device]))
            free[device] = end[flat.first[action]]


@pytest.mark.parametrize("use", BIDIRECTIONAL)
def test_passes_that_are_left_hide_eager_sums(use: str) -> None:
    """On the outermost devices one of two stages ends early: half of their sums is hidden."""
    end, eager = run(use, sync="end", price=LINKS), run(use, sync="eager", price=LINKS)
    ((first, last),) = sums(end, 0)
    assert end.times.span - eager.times.span == pytest.approx((last - first) / 2, rel=0.05)
    assert end.peaks == eager.peaks


# --------------------------------------------------------------------------- more micro-batches than stages (Chimera)


def test_forward_doubling_and_backward_halving_as_they_are_printed() -> None:
    """A forward pass, then a backward pass for each half of its samples; groups of p forward passes fit together."""
    answers = [
        answer({"schedule": "chimera", "p": 4, "m": m, "t_f": 1, "t_b": 1, "concatenation": option, "order": True})
        for m, option in ((8, "forward-doubling"), (4, "backward-halving"))
    ]
    assert answers[0]["order"] == answers[1]["order"]
    assert [" ".join(order) for order in answers[0]["order"][:2]] == [
        "0F0 0F1 7F2 7BW2 7F3 7BW2.1 0BW0 7BW3 0BW0.1 7BW3.1 0BW1 0BW1.1",
        "1F0 6F2 1F1 6F3 6BW2 1BW0 6BW2.1 1BW0.1 6BW3 1BW1 6BW3.1 1BW1.1",
    ]


@given(half=st.integers(1, 8), groups=st.integers(1, 4), times=TRIPLES, option=st.sampled_from(CONCATENATIONS))
def test_bubble_and_memory_of_forward_doubling_and_backward_halving(
    half: int, groups: int, times: tuple[float, float, float], option: str
) -> None:
    """No bubbles between groups if a forward pass is as long as a backward pass: two forward passes, or half a backward
    pass, of a micro-batch (arXiv 2107.06925, section 3.5). Twice the activations for forward doubling."""
    p, joint, (tf, tb, tw) = 2 * half, 2 if option == "forward-doubling" else 1, times
    m = joint * p * groups
    run = replay(ScheduleCase(schedule="chimera", p=p, m=m, t_f=tf, t_b=tb, t_w=tw, concatenation=option))
    forward, backward = joint * tf, joint * (tb + tw) / 2
    bubble = (p - 2) * (max(forward, backward) + (groups - 1) * abs(forward - backward))
    assert run.makespan == pytest.approx(m * (tf + tb + tw) + bubble)
    # In the samples of a backward pass, which are a micro-batch or half of one.
    down = [p + half + 1 + device for device in range(half)]
    assert run.in_flight("B") == [*down, *reversed(down)]


@given(groups=st.integers(1, 3), tf=SECONDS)
def test_equal_passes_remove_the_bubbles_between_groups(groups: int, tf: float) -> None:
    """With backward passes twice as long as forward passes the bubble ratio is that of equal passes and N = 2 D n:
    (D-2)/(3N/2 + D-2), where direct concatenation adds (D-2) t_f for every further D micro-batches."""
    p, m = 8, 16 * groups
    times = {"t_f": tf, "t_b": tf, "t_w": tf}
    spans = {
        option: replay(ScheduleCase(schedule="chimera", p=p, m=m, **times, concatenation=option)).makespan  # type: ignore[arg-type]
        for option in ("direct", "forward-doubling")
    }
    doubled = spans["forward-doubling"]
    assert 1 - 3 * m * tf / doubled == pytest.approx((p - 2) / (3 * m / 2 + p - 2))
    assert spans["direct"] - doubled == pytest.approx((m // p - 1) * (p - 2) * tf)


def of_chimera(option: str, batch: int = 16, micro: int = 2, **more: Any) -> dict[str, Any]:
    schemes = [{"use": "pipeline/chimera", "over": "pp", "concatenation": option}, {"use": "data/zero-1", "over": "dp"}]
    config = job_of({"mesh": {"pp": 4, "dp": 2}, "schemes": schemes}, **more)
    return {**config, "batch": {"global": batch * micro * 2, "micro": micro}}


@pytest.mark.parametrize("option", CONCATENATIONS)
def test_halves_of_samples_are_conserved(option: str) -> None:
    """The same work, twice or as many activations; every rank frees all memory."""
    direct, halves = play_job(of_chimera("direct")), play_job(of_chimera(option))
    assert halves.flops("F") == pytest.approx(halves.wanted)
    assert halves.wanted == direct.wanted
    assert halves.flops("F", "B", "W") == pytest.approx(direct.flops("F", "B", "W"))
    assert all(peak.left == 0 for peak in (*direct.peaks, *halves.peaks))
    held = [[peak.by["activations"] for peak in played.peaks] for played in (direct, halves)]
    # p - 1 of p micro-batches in flight become 2 p - 1 of twice as many parts, and p become 2 p.
    joint = 2 if option == "forward-doubling" else 1
    for device, most in enumerate((7 / 6, 1, 1, 7 / 6)):
        assert held[1][device] == pytest.approx(joint * most * held[0][device], rel=0.1)
