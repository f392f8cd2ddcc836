"""Orders that are the same whatever passes last: closed forms at many shapes and times, and orders as they are printed.

Printed orders name chunks of a device: upper case the first one, lower case the second; B of a schedule without W is
both gradients at once.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.building_block import repeat_block
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, Schedule, actions_of
from meshcast.validation.pipelines.cases import answer
from tests.simulator.engine.engines import check_reports
from tests.simulator.scheduling.static_orders import ALIKE, TIMES, bubbles, near, played, shipped
from tests.strategies import SECONDS, some

V = ("zb-v", "v-half", "v-min")
"""Schedules with two chunks a device, in a V."""

EVERY = ("breadth-first", "zb-h1", "zb-h2", "hanayo", *V)


def printed(order: Any, p: int) -> str:
    """An order as papers print it."""
    letters = {"F": "F", "BW": "B", "B": "B", "W": "W"}
    words = [(letters[action.kind], action.stage // p, action.microbatch) for action in actions_of(order)]
    return " ".join(f"{kind.lower() if chunk % 2 else kind}{k}" for kind, chunk, k in words)


def row(use: str, p: int, m: int, v: int, device: int) -> str:
    schedule, shape = shipped(use), PipelineShape(p, m, v)
    found = timetable(schedule, shape)
    assert list(schedule.order(shape, device)) == list(found.orders[device])
    return printed(found.orders[device], p)


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
    assert [row(use, p, m, v, device) for device in range(p)] == PRINTED[at]


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
    schedule: Any = shipped(use)
    shape = PipelineShape(4, 8, 2)
    assert printed(repeat_block(schedule, shape, schedule.block(shape))[device], 4) == BLOCKS[at]


@pytest.mark.torch
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 2), (2, 5), (3, 1), (4, 3), (4, 8), (5, 16), (8, 20)])
def test_zb_v_is_the_order_of_torch(p: int, m: int) -> None:
    """torch's method needs only the sizes of a pipeline."""
    of_torch = pytest.importorskip("torch.distributed.pipelining.schedules").ScheduleZBVZeroBubble
    known = SimpleNamespace(pp_group_size=p, _n_microbatches=m, num_stages=2 * p)
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    for rank in range(p):
        theirs = of_torch._calculate_single_rank_operations(known, rank)
        actions = [Action(a.stage_index, kinds[a.computation_type.name], a.microbatch_index) for a in theirs if a]
        assert actions == list(shipped("zb-v").order(PipelineShape(p, m, 2), rank))


def order_of_torch(rank: int, p: int, m: int, v: int) -> list[Action]:
    """The order of one rank of torch's interleaved 1F1B, whose method needs only the sizes of a pipeline."""
    of_torch = pytest.importorskip("torch.distributed.pipelining.schedules").ScheduleInterleaved1F1B
    known = SimpleNamespace(
        pp_group_size=p, _n_microbatches=m, n_local_stages=v, microbatches_per_round=m // max(1, m // p)
    )
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "BW"}
    theirs = of_torch._calculate_single_rank_operations(known, rank)
    return [Action(a.stage_index, kinds[a.computation_type.name], a.microbatch_index) for a in theirs if a]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("p", "m", "v"), [(4, 10, 2), (4, 3, 2), (2, 6, 3), (3, 3, 2), (4, 15, 4), (5, 14, 2), (8, 27, 2), (4, 8, 2)]
)
def test_interleaved_in_groups_is_the_order_of_torch(p: int, m: int, v: int) -> None:
    """torch makes groups of m // max(1, m // p) micro-batches."""
    kind = find_scheme("pipeline/interleaved-1f1b")
    ours = kind(("pp",), kind.Options(chunks=v, group=m // max(1, m // p)))
    assert isinstance(ours, Schedule)
    for rank in range(p):
        assert order_of_torch(rank, p, m, v) == ours.order(PipelineShape(p, m, v), rank)


def test_interleaved_in_groups_is_the_order_that_megatron_documents() -> None:
    """PP=2, VP=2, groups of 3, 5 micro-batches: forward passes of rank 0, from model_parallel_config.py."""
    found = played("interleaved-1f1b", 2, 5, v=2, group=3, order=True)
    forward = [action for action in found["order"][0] if "F" in action]
    assert forward == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "0F3", "0F4", "2F3", "2F4"]


# ------------------------------------------------------------------------------------------ closed forms


@given(p=st.integers(1, 6), m=st.integers(1, 24), v=st.integers(2, 4), times=st.tuples(SECONDS, SECONDS, SECONDS))
def test_interleaved_in_groups_of_any_size_idles_as_long(p: int, m: int, v: int, times: Any) -> None:
    """The bubble does not depend on the group as long as every group, also the last one, has p micro-batches."""
    case = {
        "schedule": "interleaved-1f1b",
        "p": p,
        "m": m,
        "v": v,
        **dict(zip(("t_f", "t_b", "t_w"), times, strict=True)),
    }
    for group in range(1, m + 2):
        found = answer({**case, "group": group})
        if group == m or (p <= group <= m and (m % group == 0 or m % group >= p)):
            assert found["status"] == "played", found
            if group >= p:
                assert bubbles(found, m, times)[0] == near((p - 1) * sum(times) / v)
                held = [min(m * v, 2 * (p - 1 - i) + (v - 1) * group + 1) for i in range(p)]
                assert all(most <= bound for most, bound in zip(found["in_flight_b"], held, strict=True))
        else:
            assert found["status"] == "refused" and "group" in found["reason"]
            assert "would work" in found["reason"]


@pytest.mark.parametrize(
    ("p", "m", "v", "group", "hidden"),
    [
        (4, 8, 2, None, ()),
        (4, 16, 2, 8, ("F", "B")),
        (3, 9, 3, 9, ("F", "B")),
        (4, 9, 2, 5, ("F",)),
        (3, 10, 3, 7, ("F",)),
    ],
)
def test_larger_groups_hide_messages_of_interleaved_1f1b(
    p: int, m: int, v: int, group: int | None, hidden: tuple[str, ...]
) -> None:
    """The first group's forward passes and the last group's backward passes wait for p v - 1 messages in groups of p,
    and for p - 1 in larger ones, whose first output is back before the turn of the next chunk."""
    hop = 1 / 16 / v
    found, late = (played("interleaved-1f1b", p, m, (1, 2, 1), v=v, group=group, hop=c)["makespan"] for c in (0, hop))
    expected = sum(p - 1 if way in hidden else p * v - 1 for way in ("F", "B"))
    assert (late - found) / hop == near(expected)
    kind = find_scheme("pipeline/interleaved-1f1b")
    schedule = kind(("pp",), kind.Options(chunks=v, group=group))
    laws = {law.quantity: law.value for law in schedule.closed_forms(PipelineSetting(PipelineShape(p, m, v), 1, 2, 1))}
    assert laws.get("bubble_per_hop", expected) == expected


@pytest.mark.parametrize(
    ("m", "group", "words"), [(16, 5, "leave 1 for the last"), (16, 3, "from pp = 4 to 16"), (2, 1, "one group")]
)
def test_groups_that_would_wait_are_refused_with_their_numbers(m: int, group: int, words: str) -> None:
    case = {"schedule": "interleaved-1f1b", "p": 4, "m": m, "v": 2, "t_f": 1, "t_b": 1, "t_w": 1, "group": group}
    assert words in answer(case)["reason"]


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
    kind = find_scheme("pipeline/seq1f1b")
    ours = kind(("pp",), kind.Options(chunks=v, slices=s))
    assert isinstance(ours, Schedule)
    for device in range(p):
        assert order_in_groups_of_slices(p, m, v, s, device) == ours.order(PipelineShape(p, m, v, s), device)


@given(
    p=st.integers(1, 6),
    m=st.integers(1, 12),
    v=st.integers(1, 4),
    s=st.integers(1, 6),
    times=st.tuples(SECONDS, SECONDS, SECONDS),
)
def test_seq1f1b_divides_the_bubble_by_chunks_and_slices(p: int, m: int, v: int, s: int, times: Any) -> None:
    found = played("seq1f1b", p, m, times, v=v, slices=s)
    if v == 1 or m * s >= p:
        assert bubbles(found, m, times)[0] == near((p - 1) * sum(times) / (v * s))


@given(p=st.integers(2, 6), m=st.integers(1, 24))
def test_micro_batches_that_p_does_not_divide_name_a_group_that_works(p: int, m: int) -> None:
    case = {"schedule": "interleaved-1f1b", "p": p, "m": m, "v": 2, "t_f": 1, "t_b": 1, "t_w": 1}
    found = answer(case)
    if m % p:
        assert found["status"] == "refused"
        group = int(found["reason"].rpartition("group: ")[2].partition("}")[0])
        found = answer({**case, "group": group})
    assert found["status"] == "played"


@given(p=st.integers(1, 8), m=st.integers(1, 20), times=st.tuples(SECONDS, SECONDS, SECONDS), v=st.integers(1, 4))
def test_breadth_first_is_as_short_as_interleaved_and_holds_everything(p: int, m: int, times: Any, v: int) -> None:
    found = played("breadth-first", p, m, times, v=v)
    assert found["in_flight_b"] == [m * v] * p
    if m >= p:
        assert bubbles(found, m, times)[0] == near((p - 1) * sum(times) / v)


@pytest.mark.parametrize(("p", "waves"), some([*product(range(1, 7), range(1, 5))], 3))
def test_waves_divide_the_bubble(p: int, waves: int) -> None:
    for n in (1, 2, 3):
        m = n * p
        found = played("hanayo", p, m, (2, 1, 1), waves=waves)
        assert bubbles(found, m, (2, 1, 1))[0] == near((p - 1) * 2 / waves)
        first = [2 * waves * p - (p - 1) + i for i in range(p)]
        assert found["in_flight_b"] == (first if n == 1 else [2 * waves * p] * p)
    for times in TIMES:
        if times[1] + times[2] >= times[0]:
            bubble = (p - 1) * (times[1] + times[2]) / waves
            found = played("hanayo", p, p, times, waves=waves)
            assert bubbles(found, p, times)[0] == near(bubble)


# ------------------------------------------------------------------------------------------ whole jobs


def job(use: str, batch: int, **options: Any) -> dict[str, Any]:
    return {
        "model": {"layers": 16, "hidden": 64, "heads": 8, "vocab": 128, "seq": 32},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0}},
        "batch": {"global": batch},
        "plan": {"mesh": {"pp": 4}, "schemes": [{"use": f"pipeline/{use}", "over": "pp", **options}]},
    }


@pytest.mark.parametrize(
    "config",
    [
        job("interleaved-1f1b", 10, chunks=2, group=5),
        job("interleaved-1f1b", 11, chunks=4, group=7),
        job("seq1f1b", 6, chunks=2, slices=4),
        pytest.param(job("seq1f1b", 5, chunks=2, slices=2, balanced=True), marks=pytest.mark.slow),
        job("chimera", 8, pairs=2),
    ],
    ids=["groups", "groups of two sizes", "slices and chunks", "balanced slices and chunks", "pairs"],
)
def test_all_engines_agree_on_options_of_static_orders(config: dict[str, Any]) -> None:
    check_reports(config)


# ------------------------------------------------------------------------------------------ shapes


@given(
    use=st.sampled_from(EVERY), p=st.integers(1, 6), m=st.integers(1, 14), times=st.tuples(SECONDS, SECONDS, SECONDS)
)
def test_every_number_of_micro_batches_has_an_order(use: str, p: int, m: int, times: Any) -> None:
    assert played(use, p, m, times)["makespan"] >= m * sum(times) - 1e-9


def test_waves_and_chunks_give_the_same_schedule() -> None:
    alike = [played("hanayo", 3, 6, **options) for options in ({"waves": 2}, {"v": 4}, {"waves": 2, "v": 4})]
    assert alike[0] == alike[1] == alike[2] != played("hanayo", 3, 6)


@pytest.mark.parametrize(
    ("use", "options"),
    [("hanayo", {"v": 3}), ("hanayo", {"v": 4, "waves": 1}), *((use, {"v": 4}) for use in V), ("zb-h1", {"v": 2})],
)
def test_other_chunks_are_refused(use: str, options: dict[str, int]) -> None:
    found = answer({"schedule": use, "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1, **options})
    assert found["status"] == "refused"
    assert f"pipeline/{use}" in found["reason"] and "chunk" in found["reason"]
    with pytest.raises(PlanError):
        shipped("v-min").check(PipelineShape(2, 4, 1))


# ------------------------------------------------------------------------------------------------- dapple


@pytest.mark.parametrize("p", [2, 4, 7])
def test_policy_b_hides_messages_that_policy_a_waits_for(p: int) -> None:
    m, hop = 4 * p, 0.5
    deep, plain, one = (
        played("dapple", p, m, hop=hop, policy=policy) if policy else played("1f1b", p, m, hop=hop)
        for policy in ("B", "A", None)
    )
    assert plain == one
    assert bubbles(deep, m)[0] == near((p - 1) * sum(ALIKE) + 2 * (p - 1) * hop)
    assert bubbles(plain, m)[0] == near((p - 1) * sum(ALIKE) + (2 * (p - 1) * m / p + 2 * p - 4) * hop)


@pytest.mark.parametrize(("policy", "in_flight"), [("A", 2), ("B", 2), ("B", 3)])
def test_dapple_holds_no_more_micro_batches_than_memory_allows(policy: str, in_flight: int) -> None:
    found = played("dapple", 4, 12, policy=policy, in_flight=in_flight)
    assert max(found["in_flight_b"]) == in_flight
    assert found["makespan"] > played("dapple", 4, 12)["makespan"]


# --------------------------------------------------------------------------------------------------- gems


@pytest.mark.parametrize("p", [2, 4, 8])
def test_gems_idles_as_chimeras_authors_state(p: int) -> None:
    """(D-1)/(D+1/2) of a long step with t_B = 2 t_f: arXiv 2107.06925, table 2."""
    found = played("gems", p, 400, (1, 1, 1))
    assert found["bubble_rate"] == pytest.approx((p - 1) / (p + 0.5), rel=2e-3)
    assert found["in_flight_b"] == [1] * p
