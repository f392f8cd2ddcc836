"""Orders that are the same whatever passes last: closed forms at many shapes and times, and orders as they are printed.

Printed orders name chunks of a device: upper case the first one, lower case the second; B of a schedule without W is
both gradients at once.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.building_block import repeat_block
from meshcast.simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    actions_of,
    alternate_passes,
    one_forward_one_backward,
    passes_in_groups,
)
from meshcast.validation.pipelines.cases import answer
from tests.simulator.scheduling.schedules import bubbles, make_schedule, near, played
from tests.strategies import SECONDS

EVERY = ("breadth-first", "zb-h1", "zb-h2", "hanayo", "zb-v", "v-half", "v-min")
TRIPLES = st.tuples(SECONDS, SECONDS, SECONDS)


def printed(order: Any, p: int) -> str:
    """An order as papers print it."""
    words = [(action.kind.replace("BW", "B"), action.stage // p, action.microbatch) for action in actions_of(order)]
    return " ".join(f"{kind.lower() if chunk % 2 else kind}{k}" for kind, chunk, k in words)


# ------------------------------------------------------------------------------------------ orders as printed

PRINTED = {
    ("breadth-first", 4, 8, 2): ["F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 b0 b1 b2 b3 b4 b5 b6 b7 "
                                 "B0 B1 B2 B3 B4 B5 B6 B7"] * 4,
    ("zb-h1", 4, 8, 1): [
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7",
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7",
        "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7",
    ],
    ("zb-h2", 4, 8, 1): [
        "F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7",
    ],
    ("zb-v", 4, 8, 2): [
        "F0 F1 F2 F3 F4 F5 F6 f0 b0 w0 f1 b1 w1 f2 b2 w2 f3 b3 w3 F7 B0 W0 f4 b4 w4 B1 W1 f5 b5 w5 B2 W2 f6 b6 w6 "
        "B3 W3 f7 b7 w7 B4 W4 B5 W5 B6 W6 B7 W7",
        "F0 F1 F2 F3 F4 f0 F5 f1 b0 w0 f2 b1 w1 f3 b2 w2 F6 B0 W0 f4 b3 w3 F7 B1 W1 f5 b4 w4 B2 W2 f6 b5 w5 "
        "B3 W3 f7 b6 w6 B4 b7 B5 W4 B6 W5 B7 W6 w7 W7",
        "F0 F1 F2 f0 F3 f1 F4 f2 b0 w0 f3 b1 w1 F5 B0 W0 f4 b2 w2 F6 B1 W1 f5 b3 w3 F7 B2 W2 f6 b4 w4 B3 W3 f7 b5 w5 "
        "B4 b6 B5 b7 B6 W4 B7 W5 w6 w7 W6 W7",
        "F0 f0 F1 f1 F2 f2 F3 f3 b0 w0 F4 B0 W0 f4 b1 w1 F5 B1 W1 f5 b2 w2 F6 B2 W2 f6 b3 w3 F7 B3 W3 f7 b4 w4 "
        "B4 b5 B5 b6 B6 b7 B7 W4 w5 w6 w7 W5 W6 W7",
    ],
    ("hanayo", 4, 4, 2): [
        "F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 B0 B1 B2 B3",
        "F0 F1 F2 F3 f0 f1 b0 f2 b1 f3 b2 B0 b3 B1 B2 B3",
        "F0 F1 F2 f0 F3 f1 f2 b0 f3 b1 B0 b2 B1 b3 B2 B3",
        "F0 f0 F1 f1 F2 f2 F3 f3 b0 B0 b1 B1 b2 B2 b3 B3",
    ],
    ("hanayo", 4, 8, 2): [
        "F0 F1 F2 F3 F4 F5 F6 f0 b0 f1 b1 f2 b2 f3 b3 B0 F7 B1 B2 B3 f4 b4 f5 b5 f6 b6 f7 b7 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 f0 F5 f1 b0 f2 b1 f3 b2 B0 b3 B1 F6 B2 F7 B3 f4 f5 b4 f6 b5 f7 b6 B4 b7 B5 B6 B7",
        "F0 F1 F2 f0 F3 f1 F4 f2 b0 f3 b1 B0 b2 B1 b3 B2 F5 B3 F6 f4 F7 f5 f6 b4 f7 b5 B4 b6 B5 b7 B6 B7",
        "F0 f0 F1 f1 F2 f2 F3 f3 b0 B0 b1 B1 b2 B2 b3 B3 F4 f4 F5 f5 F6 f6 F7 f7 b4 B4 b5 B5 b6 B6 b7 B7",
    ],
    ("dapple", 4, 8, 1): [
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ],
}  # fmt: skip


@pytest.mark.parametrize("at", PRINTED)
def test_orders_are_the_printed_ones(at: tuple[str, int, int, int]) -> None:
    use, p, m, v = at
    schedule, shape = make_schedule(use), PipelineShape(p, m, v)
    orders = timetable(schedule, shape).orders
    assert [list(schedule.order(shape, device)) for device in range(p)] == [*map(list, orders)]
    assert [printed(order, p) for order in orders] == PRINTED[at]


BLOCKS = {
    ("v-min", 0): "F0 F1 f0 b0 w0 F2 f1 b1 B0 w1 W0 F3 f2 b2 B1 w2 W1 F4 f3 b3 B2 w3 W2 F5 f4 b4 B3 w4 W3 F6 f5 b5 "
                  "B4 w5 W4 F7 f6 b6 B5 w6 W5 f7 b7 B6 w7 W6 B7 W7",
    ("v-min", 3): "F0 f0 F1 f1 b0 B0 w0 W0 F2 f2 b1 B1 w1 W1 F3 f3 b2 B2 w2 W2 F4 f4 b3 B3 w3 W3 F5 f5 b4 B4 w4 W4 "
                  "F6 f6 b5 B5 w5 W5 F7 f7 b6 B6 w6 W6 b7 B7 w7 W7",
    ("v-half", 0): "F0 F1 f0 F2 b0 w0 f1 F3 b1 w1 f2 F4 B0 b2 W0 f3 w2 F5 B1 b3 W1 f4 w3 F6 B2 b4 W2 f5 w4 F7 B3 b5 W3 "
                   "f6 w5 B4 b6 W4 f7 w6 B5 b7 W5 w7 B6 W6 B7 W7",
}  # fmt: skip
"""Repeated blocks with W's in free slots, before warm-up and cool-down are reordered: p = 4, m = 8."""


@pytest.mark.parametrize("at", BLOCKS)
def test_blocks_are_repeated_as_printed(at: tuple[str, int]) -> None:
    use, device = at
    schedule: Any = make_schedule(use)
    shape = PipelineShape(4, 8, 2)
    assert printed(repeat_block(schedule, shape, schedule.block(shape))[device], 4) == BLOCKS[at]


INTERLEAVED = [(4, 10, 2), (4, 3, 2), (2, 6, 3), (3, 3, 2), (4, 15, 4), (5, 14, 2), (8, 27, 2), (4, 8, 2)]
OF_TORCH: list[tuple[str, int, int, int]] = [
    *(
        ("ScheduleZBVZeroBubble", p, m, 2)
        for p, m in [(1, 1), (1, 4), (2, 5), (3, 1), (4, 3), (4, 8), (5, 16), (8, 20)]
    ),
    *((kind, *sizes) for kind in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble") for sizes in INTERLEAVED),
    *(("ScheduleLoopedBFS", p, m, v) for p, m, v in [(1, 3, 2), (2, 4, 3), (4, 6, 2)]),
]


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "p", "m", "v"), OF_TORCH)
def test_orders_are_those_of_torch(kind: str, p: int, m: int, v: int) -> None:
    """torch's methods need only the sizes of a pipeline; it makes groups of m // max(1, m // p) micro-batches."""
    of_torch = getattr(pytest.importorskip("torch.distributed.pipelining.schedules"), kind)
    known, group = SimpleNamespace(pp_group_size=p, _n_microbatches=m, num_stages=v * p), m // max(1, m // p)
    known.n_local_stages, known.microbatches_per_round, known._stages = v, group, range(v)
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    ours = {
        "ScheduleZBVZeroBubble": lambda: make_schedule("zb-v"),
        "ScheduleInterleaved1F1B": lambda: make_schedule("interleaved-1f1b", chunks=v, group=group),
        "ScheduleInterleavedZeroBubble": lambda: make_schedule("interleaved-zb", chunks=v, group=group),
        "ScheduleLoopedBFS": lambda: make_schedule("breadth-first", chunks=v, backward_from="last"),
    }[kind]()
    for rank in range(p):
        theirs = of_torch._calculate_single_rank_operations(known, rank)
        actions = [Action(a.stage_index, kinds[a.computation_type.name], a.microbatch_index) for a in theirs if a]
        assert actions == list(ours.order(PipelineShape(p, m, v), rank))


GROUPED = {
    (2, 3, 2, 1): ["F0 f0 F1 b0 w0 f1 B0 W0 F2 b1 w1 f2 B1 W1 b2 w2 B2 W2",
                   "F0 f0 b0 w0 F1 B0 W0 f1 b1 w1 F2 B1 W1 f2 b2 w2 B2 W2"],
    (4, 6, 2, 2): ["F0 F1 f0 f1 F2 F3 b0 w0 f2 b1 w1 f3 B0 W0 F4 B1 W1 F5 b2 w2 f4 b3 w3 f5 B2 W2 B3 W3 b4 w4 b5 w5 "
                   "B4 W4 B5 W5",
                   "F0 F1 f0 f1 F2 b0 w0 F3 b1 w1 f2 B0 W0 f3 B1 W1 F4 b2 w2 F5 b3 w3 f4 B2 W2 f5 B3 W3 b4 w4 b5 w5 "
                   "B4 W4 B5 W5",
                   "F0 F1 f0 f1 b0 w0 F2 b1 w1 F3 B0 W0 f2 B1 W1 f3 b2 w2 F4 b3 w3 F5 B2 W2 f4 B3 W3 f5 b4 w4 b5 w5 "
                   "B4 W4 B5 W5",
                   "F0 F1 f0 b0 w0 f1 b1 w1 F2 B0 W0 F3 B1 W1 f2 b2 w2 f3 b3 w3 F4 B2 W2 F5 B3 W3 f4 b4 w4 f5 b5 w5 "
                   "B4 W4 B5 W5"],
    (4, 4, 2, 1): ["F0 F1 f0 F2 f1 F3 b0 w0 f2 b1 w1 f3 B0 W0 b2 w2 B1 W1 b3 w3 B2 W2 B3 W3",
                   "F0 F1 f0 F2 f1 b0 w0 F3 f2 b1 w1 B0 W0 f3 b2 w2 B1 W1 b3 w3 B2 W2 B3 W3",
                   "F0 F1 f0 F2 b0 w0 f1 F3 b1 w1 f2 B0 W0 b2 w2 f3 B1 W1 b3 w3 B2 W2 B3 W3",
                   "F0 F1 f0 b0 w0 F2 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3"],
    (4, 5, 2, 3): ["F0 F1 F2 f0 f1 f2 F3 b0 w0 F4 b1 w1 b2 w2 f3 B0 W0 f4 B1 W1 B2 W2 b3 w3 b4 w4 B3 W3 B4 W4",
                   "F0 F1 F2 f0 f1 f2 b0 w0 F3 b1 w1 F4 b2 w2 B0 W0 f3 B1 W1 f4 B2 W2 b3 w3 b4 w4 B3 W3 B4 W4",
                   "F0 F1 F2 f0 f1 b0 w0 f2 b1 w1 F3 b2 w2 F4 B0 W0 B1 W1 f3 B2 W2 f4 b3 w3 b4 w4 B3 W3 B4 W4",
                   "F0 F1 F2 f0 b0 w0 f1 b1 w1 f2 b2 w2 F3 B0 W0 F4 B1 W1 B2 W2 f3 b3 w3 f4 b4 w4 B3 W3 B4 W4"],
}  # fmt: skip
"""What sail-sg/zero-bubble @3fd87fd makes (GroupBuildingBlockScheduler with its least group for equal passes), by
devices, micro-batches, chunks and group."""


@pytest.mark.parametrize("at", GROUPED)
def test_grouped_interleaved_is_the_order_of_its_authors_code(at: tuple[int, int, int, int]) -> None:
    p, m, v, group = at
    orders = make_schedule("grouped-interleaved", chunks=v, group=group).orders(PipelineShape(p, m, v))
    assert [printed(order, p) for order in orders] == GROUPED[at]


def place_block(p: int, v: int, group: int, least: int) -> list[list[tuple[int, str, int, int]]]:
    """The slots of a block of a group as the code of its authors places them, by device: slot, kind, chunk and
    micro-batch, each slot of the repeated block taken once."""
    times, rounds = -(-least // group), 3 * group
    devices = []
    for device in range(p):
        slots: dict[int, tuple[str, int, int]] = {}
        for chunk in range(v):
            start = times * rounds * chunk + rounds * (chunk // (v // math.gcd(v, times)))
            last = times * rounds * (v - 1) + rounds * ((v - 1) // (v // math.gcd(v, times))) + device
            back = last + 3 * (p - 1 - device) + 1 + start
            for k in range(group):
                slots[start + 3 * k + device] = ("F", chunk, k)
                slots[back + 3 * k], slots[back + 3 * k + 1] = ("B", v - 1 - chunk, k), ("W", v - 1 - chunk, k)
        assert len({slot % (rounds * v) for slot in slots}) == len(slots) == 3 * v * group
        devices.append([(slot, *slots[slot]) for slot in sorted(slots)])
    return devices


@given(p=st.integers(1, 6), m=st.integers(1, 16), v=st.integers(2, 4), data=st.data())
def test_grouped_interleaved_repeats_a_block_without_collisions(p: int, m: int, v: int, data: st.DataObject) -> None:
    """The slots of all groups, in turn; every group has a block of its own. It waits for nothing forever."""
    group, unit = data.draw(st.integers(1, p)), 3 * v
    shape, schedule = PipelineShape(p, m, v), make_schedule("grouped-interleaved", chunks=v, group=group)
    orders = schedule.orders(shape)
    for device, block in enumerate(place_block(p, v, group, -(-p // 2))):
        every: list[tuple[int, Action]] = []
        for first in range(0, m, group):
            for slot, kind, chunk, k in block:
                if first + k < m:
                    every.append((slot + first * unit, Action(chunk * p + device, kind, first + k)))
        assert [action for _, action in sorted(every)] == list(orders[device])
    assert played("grouped-interleaved", p, m, v=v, group=group)["makespan"] >= 6 * m - 1e-9


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (1, 4, 1)])
def test_a_smaller_group_holds_less_than_interleaved_1f1b(times: Any) -> None:
    p, m, v = 4, 16, 2
    usual = played("interleaved-1f1b", p, m, times, v=v)
    for group in (2, 4):
        least = max(2, -(-p * max(times[:2]) // sum(times)))
        found = played("grouped-interleaved", p, m, times, v=v, group=group)
        if group >= least:
            assert found["in_flight_w"] == [(v - 1) * group + p - i for i in range(p)]
        assert max(found["in_flight_w"]) < max(usual["in_flight_b"])


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 9), (6, 4)])
def test_interleaved_zero_bubble_of_one_chunk_is_zb_h1(p: int, m: int) -> None:
    shape = PipelineShape(p, m)
    for device in range(p):
        assert make_schedule("interleaved-zb", group=m).order(shape, device) == make_schedule("zb-h1").order(
            shape, device
        )


def test_interleaved_in_groups_is_the_order_that_megatron_documents() -> None:
    """PP=2, VP=2, groups of 3, 5 micro-batches: forward passes of rank 0, from model_parallel_config.py."""
    found = played("interleaved-1f1b", 2, 5, v=2, group=3, order=True)
    forward = [action for action in found["order"][0] if "F" in action]
    assert forward == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "0F3", "0F4", "2F3", "2F4"]


# ------------------------------------------------------------------------------------------ closed forms


@given(p=st.integers(1, 6), m=st.integers(1, 24), v=st.integers(2, 4), times=TRIPLES)
def test_interleaved_in_groups_of_any_size_idles_as_long(p: int, m: int, v: int, times: Any) -> None:
    """The bubble does not depend on the group as long as every group, also the last one, has p micro-batches. What is
    refused names a group that works."""
    case = {"schedule": "interleaved-1f1b", "p": p, "m": m, "v": v} | dict(
        zip(("t_f", "t_b", "t_w"), times, strict=True)
    )
    for group in range(1, m + 2):
        answered = answer({**case, "group": group})
        if group == m or (p <= group <= m and (m % group == 0 or m % group >= p)):
            assert answered["status"] == "played", answered
            if group >= p:
                assert bubbles(answered, m, times)[0] == near((p - 1) * sum(times) / v)
                held = [min(m * v, 2 * (p - 1 - i) + (v - 1) * group + 1) for i in range(p)]
                assert all(most <= bound for most, bound in zip(answered["in_flight_b"], held, strict=True))
        else:
            assert "group" in answered["reason"] and "would work" in answered["reason"]
    answered = answer(case)
    if m % p:
        works = int(answered["reason"].rpartition("group: ")[2].partition("}")[0])
        answered = answer({**case, "group": works})
    assert answered["status"] == "played"


@pytest.mark.parametrize(
    ("p", "m", "v", "group", "hidden"),
    [(4, 8, 2, None, ""), (4, 16, 2, 8, "FB"), (3, 9, 3, 9, "FB"), (4, 9, 2, 5, "F"), (3, 10, 3, 7, "F")],
)
def test_larger_groups_hide_messages_of_interleaved_1f1b(
    p: int, m: int, v: int, group: int | None, hidden: str
) -> None:
    """The first group's forward passes and the last group's backward passes wait for p v - 1 messages in groups of p,
    and for p - 1 in larger ones, whose first output is back before the turn of the next chunk."""
    hop = 1 / 16 / v
    none, late = (played("interleaved-1f1b", p, m, (1, 2, 1), v=v, group=group, hop=c)["makespan"] for c in (0, hop))
    expected = sum(p - 1 if way in hidden else p * v - 1 for way in "FB")
    assert (late - none) / hop == near(expected)
    schedule = make_schedule("interleaved-1f1b", chunks=v, group=group)
    laws = {law.quantity: law.value for law in schedule.closed_forms(PipelineSetting(PipelineShape(p, m, v), 1, 2, 1))}
    assert laws.get("bubble_per_hop", expected) == expected


@given(st.integers(1, 9), st.integers(0, 12), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3))
def test_orders_as_arrays_are_those_of_their_actions(m: int, warmup: int, group: int, chunks: int, slices: int) -> None:
    """1F1B of arrays is that of lists; passes go group by group, a group stage by stage."""
    arrays = [passes_in_groups(kind, range(chunks), m, group, range(slices)) for kind in ("F", "BW")]
    groups = [range(begin, min(begin + group, m)) for begin in range(0, m, group)]
    lists = [
        [Action(c, kind, k, s) for some in groups for c in range(chunks) for k in some for s in range(slices)]
        for kind in ("F", "BW")
    ]
    order = alternate_passes(*arrays, warmup)
    assert [*order] == one_forward_one_backward(*lists, warmup) == order
    assert (order[-1], order[1:3], len(order)) == ([*order][-1], [*order][1:3], 2 * m * chunks * slices)


def order_in_groups_of_slices(p: int, m: int, v: int, s: int, device: int) -> list[Action]:
    """Seq1F1B-I as its code states it (thunlp/Seq1F1B @6893466, schedules.py): slice k of all chunks' forward passes is
    one of a group of p slices; backward the queue of a micro-batch's slices is taken from its end."""

    def at(k: int, backward: bool) -> Action:
        group, inside = divmod(k, p * v)
        chunk, number = inside // p, group * p + inside % p
        stage = (v - 1 - chunk if backward else chunk) * p + device
        part = s - 1 - number % s if backward else number % s
        return Action(stage, "BW" if backward else "F", number // s, part)

    total = m * s * v
    warmup = min(total, (v - 1) * p + 2 * (p - device - 1) + s - 1)
    order = [at(k, False) for k in range(warmup)]
    for k in range(total - warmup):
        order += [at(warmup + k, False), at(k, True)]
    return order + [at(k, True) for k in range(total - warmup, total)]


@pytest.mark.parametrize(("p", "m", "v", "s"), [(4, 8, 2, 2), (4, 8, 3, 4), (2, 6, 2, 2), (8, 8, 2, 4), (6, 6, 4, 3)])
def test_seq1f1b_with_chunks_is_the_order_of_its_code(p: int, m: int, v: int, s: int) -> None:
    schedule, shape = make_schedule("seq1f1b", chunks=v, slices=s), PipelineShape(p, m, v, s)
    for device in range(p):
        assert order_in_groups_of_slices(p, m, v, s, device) == schedule.order(shape, device)


@given(p=st.integers(1, 6), m=st.integers(1, 12), v=st.integers(1, 4), s=st.integers(1, 6), times=TRIPLES)
def test_seq1f1b_divides_the_bubble_by_chunks_and_slices(p: int, m: int, v: int, s: int, times: Any) -> None:
    answered = played("seq1f1b", p, m, times, v=v, slices=s)
    if v == 1 or m * s >= p:
        assert bubbles(answered, m, times)[0] == near((p - 1) * sum(times) / (v * s))
    if v == 1:
        assert answered["in_flight_b"] == answered["in_flight_w"] == [min(m * s, p - i + s - 1) for i in range(p)]


@given(use=st.sampled_from(EVERY), p=st.integers(1, 6), m=st.integers(1, 14), times=TRIPLES)
def test_every_number_of_micro_batches_has_an_order(use: str, p: int, m: int, times: Any) -> None:
    assert played(use, p, m, times)["makespan"] >= m * sum(times) - 1e-9


def test_waves_and_chunks_give_the_same_schedule() -> None:
    alike = [played("hanayo", 3, 6, **options) for options in ({"waves": 2}, {"v": 4}, {"waves": 2, "v": 4})]
    assert alike[0] == alike[1] == alike[2] != played("hanayo", 3, 6)


# ------------------------------------------------------------------------------------------------- dapple


@pytest.mark.parametrize(("policy", "in_flight"), [("A", 2), ("B", 2), ("B", 3)])
def test_dapple_holds_no_more_micro_batches_than_memory_allows(policy: str, in_flight: int) -> None:
    """With all of it policy A is 1F1B."""
    answered = played("dapple", 4, 12, policy=policy, in_flight=in_flight)
    assert max(answered["in_flight_b"]) == in_flight
    assert answered["makespan"] > played("dapple", 4, 12)["makespan"]
    assert played("dapple", 4, 12, policy="A", hop=0.5) == played("1f1b", 4, 12, hop=0.5)


# --------------------------------------------------------------------------------------------------- gems


@pytest.mark.parametrize("p", [2, 4])
def test_gems_idles_as_chimeras_authors_state(p: int) -> None:
    """(D-1)/(D+1/2) of a long step with t_B = 2 t_f: arXiv 2107.06925, table 2."""
    assert played("gems", p, 400, (1, 1, 1))["bubble_rate"] == pytest.approx((p - 1) / (p + 0.5), rel=2e-3)
