"""Activation transfers: BPipe's orders and bound, and the effect of transfers on time and memory."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import ScheduleError
from meshcast.simulator import simulate
from meshcast.simulator.engine.peak_memory import over_time
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import Transfer
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.activation_transfer import ActivationTransfer, insert_transfers
from meshcast.simulator.scheduling.schedule import (
    ACTIVATION_TRANSFERS,
    Action,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)
from meshcast.validation.contract.played import Ideal, Played, play_job, sent_between_stages
from tests.simulator.scheduling.schedules import job, make_schedule, played
from tests.strategies import examples, shapes

UNIT = (1, 1, 1)


def bound(p: int) -> int:
    return math.ceil((p + 2) / 2)


def orders(p: int, m: int, name: str = "bpipe", **options: Any) -> list[list[Action]]:
    return [actions_of(order) for order in timetable(make_schedule(name, **options), PipelineShape(p, m)).orders]


# ------------------------------------------------------------------------------------------------- orders


def test_the_order_of_four_devices() -> None:
    answered = played("bpipe", 4, 8, UNIT, order=True)
    assert [" ".join(row) for row in answered["order"]] == [
        "0F0 0F1 0E1 0F2 0E2 0F3 0L1 0BW0 0E3 0F4 0L2 0BW1 0E4 0F5 0L3 0BW2 0E5 0F6 0L4 0BW3 0E6 0F7 0L5 0BW4 0L6 0BW5 "
        "0BW6 0BW7",
        "1F0 1F1 1F2 1BW0 1F3 1BW1 1F4 1BW2 1F5 1BW3 1F6 1BW4 1F7 1BW5 1BW6 1BW7",
        "2F0 2F1 2BW0 2F2 2BW1 2F3 2BW2 2F4 2BW3 2F5 2BW4 2F6 2BW5 2F7 2BW6 2BW7",
        "0K1 0K2 3F0 3BW0 3F1 3BW1 3F2 0G1 3BW2 0K3 3F3 0G2 3BW3 0K4 3F4 0G3 3BW4 0K5 3F5 0G4 3BW5 0K6 3F6 0G5 3BW6 "
        "3F7 0G6 3BW7",
    ]
    assert answered["in_flight_b"] == [3, 3, 2, 3]


@given(shape=shapes(most_p=12, most_m=40))
def test_a_micro_batch_is_evicted_once_and_loaded_back(shape: PipelineShape) -> None:
    """The passes are those of 1F1B."""
    rows, plain = orders(shape.p, shape.m), make_schedule("1f1b")
    for x, order in enumerate(rows):
        assert [action for action in order if action.kind not in ACTIVATION_TRANSFERS] == plain.order(shape, x)
        y, kinds = shape.p - 1 - x, Counter(action.kind for action in order if action.stage == x)
        moves = max(0, shape.m - bound(shape.p) + 1) if min(shape.m, shape.p - x) > bound(shape.p) else 0
        assert kinds["E"] == kinds["L"] == moves
        assert Counter(action.kind for action in rows[y] if action.stage == x and x < y)["K"] == moves
        # In steady state at most one micro-batch is evicted and one loaded between two backward passes.
        backs = [at for at, action in enumerate(order) if action.kind == "BW" and action.stage == x]
        for begin, end in pairwise(backs):
            between = Counter(action.kind for action in order[begin:end] if action.stage == x)
            assert between["E"] <= 1 and between["L"] <= 1


@pytest.mark.parametrize(("p", "most"), [(2, 2), (3, 3), (4, 3), (5, 4), (6, 4), (7, 5), (8, 5), (16, 9)])
def test_the_bound(p: int, most: int) -> None:
    assert max(played("bpipe", p, 3 * p)["in_flight_b"]) == most


def test_transfers_shorter_than_a_pass_are_hidden() -> None:
    """Activations are loaded one backward pass ahead: a shorter hop costs no more than in 1F1B."""
    for hop, longer in ((0.25, False), (1.0, False), (40.0, True)):
        ours, plain = (played(name, 8, 32, UNIT, hop=hop)["makespan"] for name in ("bpipe", "1f1b"))
        assert ours > plain if longer else ours == plain


# ----------------------------------------------------------------------------------- transfers of any schedule


class Lent(Schedule):
    """GPipe on two devices; the first evicts micro-batches to the second. rows: orders in place of these."""

    name = "lent"
    needs_durations = True
    rows: list[list[ScheduleItem]] | None = None

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        plain: list[list[ScheduleItem]] = [
            [Action(d, kind, k) for kind in ("F", "BW") for k in shape.microbatches] for d in range(shape.p)
        ]
        moves = [
            ActivationTransfer(Action(0, "F", k), 1, Action(0, "F", k + 1), Action(0, "BW", max(k - 1, 0)))
            for k in (0, 1)
        ]
        return self.rows or insert_transfers(self, shape, plain, moves, durations)


def test_transfers_are_put_before_the_pass_that_the_other_device_runs_then() -> None:
    """Its passes begin later by a hop, and passes backward on the first device by another."""
    shape, back, nothing = PipelineShape(2, 3), (1.0, 1.0), (0.0, 0.0)
    both = [
        [" ".join(map(str, order)) for order in Lent(("pp",)).orders(shape, durations)]
        for durations in (
            PassDurations((1.0, f), back, nothing, nothing, hop) for f, hop in ((0.5, 0), (4, 0), (0.5, 2))
        )
    ]
    assert [first for first, _ in both] == ["0F0 0E0 0F1 0E1 0F2 0L0 0L1 0BW0 0BW1 0BW2"] * 3
    assert [second for _, second in both] == [
        "0K0 1F0 0K1 1F1 1F2 1BW0 0G0 0G1 1BW1 1BW2",
        "0K0 0K1 1F0 1F1 1F2 1BW0 0G0 0G1 1BW1 1BW2",
        "0K0 0K1 1F0 1F1 1F2 1BW0 1BW1 1BW2 0G0 0G1",
    ]


@pytest.mark.parametrize(
    ("taken", "put", "words"),
    [
        ("0G0", None, "an activation transfer needs all of"),
        ("0E0", None, "an activation transfer needs all of"),
        (None, (0, 2, Action(0, "K", 0)), "is listed 2 times"),
        (None, (1, 0, Action(7, "K", 0)), "7K0"),
        (None, (0, 0, Action(0, "E", 0)), "is listed 2 times"),
        ("0L1", (0, 99, Action(0, "L", 1)), "(?s)deadlocks.*>0BW1<"),
    ],
    ids=["never given back", "never evicted", "kept twice", "no such stage", "evicted twice", "loaded too late"],
)
def test_half_a_transfer_is_refused(taken: str | None, put: tuple[int, int, Action] | None, words: str) -> None:
    schedule, shape = Lent(("pp",)), PipelineShape(2, 3)
    rows = [[turn for turn in row if str(turn) != taken] for row in schedule.orders(shape)]
    if put:
        rows[put[0]].insert(put[1], put[2])
    schedule.rows = rows
    with pytest.raises(ScheduleError, match=words):
        timetable(schedule, shape)


# ----------------------------------------------------------------------------------------------- whole jobs


@examples(15)
@given(m=st.integers(1, 16), pp=st.sampled_from([2, 4, 8]))
def test_only_transfers_are_added_to_1f1b(m: int, pp: int) -> None:
    ours, plain = (play_job(job(name, pp, m), engine="matrices") for name in ("bpipe", "1f1b"))
    assert ours.flops("F", "B", "W", "R") == plain.flops("F", "B", "W", "R")
    assert sent_between_stages(ours) == sent_between_stages(plain)
    assert [ours.resting(d) for d in range(pp)] == [plain.resting(d) for d in range(pp)]
    assert all(peak.left == 0 for peak in ours.peaks)


def moves_of(run: Played) -> list[tuple[int, int, int]]:
    """Bytes, sender and receiver of every transfer."""
    works = [op.work for _, op in run.instances() if op.stream == "pipeline-moves"]
    return [(work.nbytes, work.source, work.target) for work in works if isinstance(work, Transfer)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_transfer_has_the_bytes_that_a_forward_pass_saves(recompute: str) -> None:
    run = play_job(job("bpipe", m=9, recompute=recompute))
    slots = run.program.timetable.slots
    forward = next(i for i, slot in enumerate(slots) if slot.stage == 0 and slot.kind == "F")
    saved = float(run.program.tasks[forward].memory.net.sum())
    assert Counter(moves_of(run)) == {(saved, 0, 3): 7, (saved, 3, 0): 7}


def test_memory_is_balanced() -> None:
    """The last device keeps activations of the first: of eight devices 1F1B's fullest holds 8 micro-batches, BPipe's 5,
    transfers in flight included. Where a pass is freed early, a keeper may have one more.
    """
    ours, plain = (play_job(job(name, 8, 24, framework={"dummy_gradients": False})) for name in ("bpipe", "1f1b"))
    each = moves_of(ours)[0][0]
    message = max(nbytes for messages in sent_between_stages(plain).values() for nbytes in messages)
    gained = plain.peaks[0].total - ours.peaks[0].total
    assert abs(gained - 3 * each) <= 2 * message, "but for messages that are in flight at the peak"
    taken = [mine.total - theirs.total for mine, theirs in zip(ours.peaks, plain.peaks, strict=True)]
    assert taken[4] == taken[3] == 0 and min(taken[5:]) > 0
    assert 4 * each <= max(taken) <= 5 * each
    for device in range(8):
        moments, levels = over_time(ours.program, ours.flat, ours.times, device, ours.resting(device))
        assert levels.sum(axis=1).max() == pytest.approx(ours.peaks[device].total)
        assert (moments[1:] >= moments[:-1]).all()


def test_a_backward_pass_waits_for_its_load() -> None:
    """Over slow links, where no transfer is hidden, every load ends before its backward pass begins."""
    run, plain = (play_job(job(name, m=6), Ideal(links=1e5)) for name in ("bpipe", "1f1b"))
    actions, flat, times = run.program.timetable.actions, run.flat, run.times
    ops = {str(action): range(flat.first[n], flat.behind[n]) for n, action in enumerate(actions)}
    for k in range(1, 5):
        come, gone, ends = (times.end[ops[f"0{kind}{k}"][-1]] for kind in ("G", "E", "BW"))
        assert gone <= come < ends and any(times.begin[n] >= come for n in ops[f"0BW{k}"])
    assert run.step.span > plain.step.span


# ------------------------------------------------------------------------------------------------- places


def across_nodes(pp: int, tp: int, use: str = "bpipe", **options: Any) -> dict[str, Any]:
    """Stages of which 8 / tp lie in a node."""
    schemes = [{"use": f"pipeline/{use}", "over": "pp", **options}, {"use": "tensor/megatron-sp", "over": "tp"}]
    return {
        "model": {"layers": 4 * pp, "hidden": 4096, "heads": 32, "vocab": 51200, "seq": 2048},
        "cluster": f"dgx-a100:{pp * tp // 8}",
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0}},
        "batch": {"global": 4 * pp, "micro": 2},
        "plan": {"mesh": {"pp": pp, "tp": tp}, "schemes": schemes},
    }


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8, 11])
def test_partners_have_neighbouring_places(pp: int) -> None:
    places = [make_schedule("bpipe").place(PipelineShape(pp, 2 * pp), device) for device in range(pp)]
    assert sorted(places) == list(range(pp))
    assert [places[pp - 1 - x] - places[x] for x in range(pp // 2)] == [1] * (pp // 2)


def test_activations_move_inside_a_node_and_not_between_nodes() -> None:
    def seconds(config: dict[str, Any], source: int, target: int) -> float:
        plan = resolve_plan(load_job(config), shared)
        return shared.costs(plan).estimate(Transfer(1 << 30, "pp", source, target)).seconds

    shared = SharedWork()
    adjacent, apart = (across_nodes(8, 4, pair_adjacent=pair) for pair in (True, False))
    within = seconds(across_nodes(8, 2), 0, 7)
    for x in range(4):
        assert seconds(adjacent, x, 7 - x) == pytest.approx(within)
        # In the order of stages only the two in the middle share a node or are in neighbouring ones; no pair does here.
        assert seconds(apart, x, 7 - x) > 5 * within
    # Neighbouring stages, of which every second pair shared a node, no longer do.
    between = [seconds(adjacent, x, x + 1) for x in range(7)]
    assert min(between[:3] + between[4:]) > 5 * within > between[3]


def test_a_step_across_nodes_is_as_short_as_without_transfers() -> None:
    plain, ours, apart = (
        simulate(across_nodes(8, 2, **options)).step_time for options in ({"use": "1f1b"}, {}, {"pair_adjacent": False})
    )
    assert ours <= 1.02 * plain and apart > 1.1 * ours


# ------------------------------------------------------------------------------------------------- MPress


@pytest.mark.parametrize("p", [4, 6, 8])
def test_mpress_spreads_what_a_device_holds_above_the_limit(p: int) -> None:
    """Over all devices with room, of which none holds more; BPipe's partners are one for each."""
    keepers: dict[int, set[int]] = {}
    for device, order in enumerate(orders(p, 3 * p, "mpress")):
        for action in order:
            if action.kind == "K":
                keepers.setdefault(action.stage, set()).add(device)
    assert set(keepers) == {i for i in range(p) if p - i > bound(p)}
    assert all(min(devices) > p // 2 - 1 for devices in keepers.values())
    assert max(map(len, keepers.values())) > 1
    assert max(played("mpress", p, 3 * p)["in_flight_b"]) == bound(p)


def test_mpress_with_a_larger_limit_swaps_less() -> None:
    rows = [orders(8, 24, "mpress", memory_limit=limit) for limit in (5, 6, 8)]
    swaps = [sum(action.kind == "E" for order in row for action in order) for row in rows]
    assert swaps == sorted(swaps, reverse=True) and swaps[-1] == 0


def test_mpress_with_recomputed_and_offloaded_layers() -> None:
    """Each frees memory of the fullest device; what is swapped over NVLink takes less time than what is recomputed."""

    def forecast(*schemes: dict[str, Any]) -> Any:
        return simulate(
            {
                "model": {"preset": "gpt3-5b", "layers": 24},
                "cluster": {"gpu": "v100-sxm2-32", "gpus": 8, "gpus_per_node": 8},
                "precision": {"compute": "fp16"},
                "batch": {"global": 32, "micro": 1, "sequence": 1024},
                "plan": {"mesh": {"pp": 8}, "schemes": list(schemes)},
            }
        )

    plain, swap = {"use": "pipeline/1f1b", "over": "pp"}, {"use": "pipeline/mpress", "over": "pp", "memory_limit": 5}
    recompute, offload = {"use": "memory/recompute-full", "layers": 1}, {"use": "memory/offload", "layers": 1}
    bare, again = forecast(plain), forecast(plain, {"use": "memory/recompute-full"})
    swapped, both, host = forecast(swap), forecast(swap, recompute), forecast(swap, offload)
    assert bare.peak_allocated > swapped.peak_allocated > max(both.peak_allocated, host.peak_allocated)
    assert bare.step_time * (1 - 1e-12) <= swapped.step_time < 1.05 * bare.step_time < again.step_time
