"""Orders of actions: invalid ones are refused before they are played, with a message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError, ScheduleError
from meshcast.simulator.program.pipeline_stages import Slot
from meshcast.simulator.program.timetable import Timetable, timetable
from meshcast.simulator.scheduling.batch_loss import insert_batch_loss
from meshcast.simulator.scheduling.order_check import format_orders
from meshcast.simulator.scheduling.schedule import Action, ActionKind, PipelineShape, Schedule, nearest_multiple
from tests.simulator.scheduling.schedules import make_schedule
from tests.strategies import shapes

SHAPE = PipelineShape(2, 2)
GOOD = ["0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"]


class Given(Schedule):
    """A schedule with orders given by the test."""

    name = "given"
    rows: list[list[Action]] = []

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        return self.rows[device]


def parsed(row: str) -> list[Action]:
    found = []
    for word in row.split():
        stage, rest = word[: word.index(word.lstrip("0123456789"))], word.lstrip("0123456789")
        kind = rest.rstrip("0123456789")
        found.append(Action(int(stage), kind, int(rest[len(kind) :])))
    return found


def given_schedule(*rows: str) -> Schedule:
    schedule = Given(("pp",))
    schedule.rows = [parsed(row) for row in rows]
    return schedule


def fits(use: str, shape: PipelineShape) -> bool:
    return shape.v >= 2 and shape.m % shape.p == 0 if use.startswith("inter") else shape.v == 1


def test_a_good_order_passes_and_prints_like_the_papers() -> None:
    orders = timetable(given_schedule(*GOOD), SHAPE).orders
    assert [[str(action) for action in order] for order in orders] == [row.split() for row in GOOD]
    assert format_orders(orders, {1: 2}) == "  device 0: 0F0 0F1 0BW0 0BW1\n  device 1: 1F0 1BW0 >1F1< 1BW1"


def test_long_orders_are_shown_around_their_failure() -> None:
    order = [Action(0, "F", i) for i in range(1000)]
    text = format_orders([order] * 64, {40: 500})
    lines = text.splitlines()
    assert len(lines) == 9 and lines[-1] == "  and 56 more devices" and len(text) < 1500
    assert lines[-2].startswith("  device 40: ... 0F492 ") and lines[-2].endswith(
        " >0F500< 0F501 0F502 0F503 0F504 0F505 0F506 0F507 0F508 ..."
    )


SPLIT = ["0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1F1 1B1 1W0 1W1"]
ONCE, DEADLOCK = "exactly once", "deadlocks"
REFUSED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "one missing": ([GOOD[0], "1F0 1BW0 1F1"], ("device 1", ONCE, "is listed 0 times")),
    "one twice": (["0F0 0F1 0F1 0BW0 0BW1", GOOD[1]], ("device 0", ONCE, "is listed 2 times")),
    "another device's": ([GOOD[0] + " 1F0", GOOD[1]], ("device 0", ONCE)),
    "no such micro-batch": (["0F0 0F1 0BW0 0BW2", GOOD[1]], ("device 0", ONCE, "0BW1", "is listed 0 times")),
    "another kind": (["0F0 0F1 0B0 0BW1", GOOD[1]], ("device 0", ONCE, "0W0", "is listed 0 times")),
    "nothing": (["", GOOD[1]], ("device 0", ONCE, "0F0", "is listed 0 times")),
    "half a backward pass": (["0F0 0F1 0B0 0B1 0W1", SPLIT[1]], ("device 0", ONCE, "0W0")),
    "backward first": (["0BW0 0F0 0F1 0BW1", GOOD[1]], (DEADLOCK, ">0BW0<", ">1F0<")),
    "each waits for the other": (["0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"], (DEADLOCK, ">0BW0<", ">1F1<")),
    "the last stage turned round": ([GOOD[0], "1BW0 1F0 1F1 1BW1"], (DEADLOCK, ">0BW0<", ">1BW0<")),
    "weights before inputs": (["0F0 0F1 0W0 0B0 0B1 0W1", SPLIT[1]], (DEADLOCK,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_orders_that_cannot_be_played_are_refused_and_shown(name: str) -> None:
    rows, words = REFUSED[name]
    with pytest.raises(ScheduleError) as refused:
        timetable(given_schedule(*rows), SHAPE)
    for word in ("pipeline/given", "device 0: ", "device 1: ", *words):
        assert word in str(refused.value)
    assert timetable(given_schedule(*SPLIT), SHAPE).orders


def needs(found: Timetable) -> dict[str, str | None]:
    """The inputs of every action from other stages."""
    actions = found.actions
    return {str(a): str(actions[n]) if n >= 0 else None for a, n in zip(actions, found.need, strict=True)}


def test_predecessors_of_an_action() -> None:
    found = needs(timetable(make_schedule("interleaved-1f1b"), PipelineShape(2, 4, 2)))
    assert {name: found[name] for name in ("0F1", "2F1", "3BW1", "1BW1")} == {
        "0F1": None,
        "2F1": "1F1",
        "3BW1": None,  # its own forward pass is on its own stage
        "1BW1": "2BW1",
    }
    split = given_schedule("0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1F1 1B1 1W0 1W1")
    found = needs(timetable(split, SHAPE))
    assert (found["0B1"], found["1B1"], found["0W1"], found["1W1"]) == ("1B1", None, None, None)


SHIPPED = st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"])


@given(shape=shapes(st.integers(1, 4)), use=SHIPPED)
def test_a_shipped_schedule_is_complete_or_gives_a_reason(shape: PipelineShape, use: str) -> None:
    schedule = make_schedule(use)
    if not fits(use, shape):
        with pytest.raises(PlanError) as refused:
            timetable(schedule, shape)
        assert refused.value.remedy and f"pipeline/{use}" in refused.value.rule
        return
    table = timetable(schedule, shape)
    wanted = [Action(s, kind, m) for s in range(shape.stages) for kind in ("F", "BW") for m in shape.microbatches]
    assert sorted(table.actions) == sorted(wanted)
    assert {schedule.device(shape, action.stage) for action in table.orders[-1]} == {shape.p - 1}


@given(shape=shapes(st.integers(1, 4)), use=SHIPPED)
def test_a_timetable_is_its_orders_in_numbers(shape: PipelineShape, use: str) -> None:
    if not fits(use, shape):
        return
    schedule = make_schedule(use)
    found = timetable(schedule, shape)
    number = {action: i for i, action in enumerate(found.actions)}
    place = {n: i for i, n in enumerate(found.sequence)}
    assert sorted(place) == list(range(len(number)))
    seen = set()
    for device, order in enumerate(found.orders):
        assert found.actions[found.starts[device] : found.starts[device + 1]] == order
        for action in order:
            i = number[action]
            turns = [other.microbatch for other in order if other[:2] == action[:2]]
            first, last = (action.microbatch == turns[at] for at in (0, -1))
            assert found.slots[found.slot[i]] == Slot(action.stage, action.kind, first, last)
            assert found.device_of[i] == device == found.stages.devices[action.stage]
            # Its inputs come before it: from the previous (or next) stage, and from its own.
            step = -1 if action.kind == "F" else 1
            source = Action(action.stage + step, action.kind, action.microbatch)
            assert found.need[i] == number.get(source, -1)
            own = [number[Action(action.stage, "F", action.microbatch)]] if action.kind != "F" else []
            for other in (*own, found.need[i], *([i - 1] if action is not order[0] else [])):
                assert other < 0 or place[other] < place[i]
            seen.add(found.slot[i])
    assert seen == set(range(len(found.slots)))
    assert [found.slot.count(i) for i in range(len(found.slots))] == list(found.turns)


@given(shape=shapes(most_p=4, most_m=6), data=st.data())
def test_two_actions_of_one_micro_batch_never_swap(shape: PipelineShape, data: st.DataObject) -> None:
    """A backward pass before its forward pass deadlocks on every device."""
    orders = timetable(make_schedule("gpipe"), shape).orders
    device, k = data.draw(st.integers(0, shape.p - 1)), data.draw(st.integers(0, shape.m - 1))
    order = orders[device]
    i, j = order.index(Action(device, "F", k)), order.index(Action(device, "BW", k))
    order[i], order[j] = order[j], order[i]
    turned = given_schedule()
    turned.rows = orders
    with pytest.raises(ScheduleError, match="deadlocks"):
        timetable(turned, shape)


@pytest.mark.parametrize("use", ["1f1b", "interleaved-1f1b", "dualpipe", "chimera"])
def test_every_direction_holds_each_part_of_the_model_once(use: str) -> None:
    schedule = make_schedule(use)
    shape = PipelineShape(4, 8, schedule.chunks_per_device())
    parts = range(shape.stages // schedule.directions)
    held = [parts[schedule.model_part(shape, stage)] for stage in range(shape.stages)]
    assert held == [*parts] * schedule.directions


@pytest.mark.parametrize(("couples", "forward_only"), [(False, False), (True, False), (True, True)])
def test_a_loss_that_couples_a_batch_follows_the_last_forward_pass(couples: bool, forward_only: bool) -> None:
    shape = PipelineShape(2, 3, batch_loss=couples, forward_only=forward_only)
    orders = insert_batch_loss(make_schedule("gpipe"), shape, [parsed("0F0 0F1 0F2"), parsed("1F0 1F1 1F2")])
    last = parsed("1F0 1F1 1F2") + [Action(1, ActionKind.LOSS, 2)] * (couples and not forward_only)
    assert [list(order) for order in orders] == [parsed("0F0 0F1 0F2"), last]


def test_the_nearest_multiple() -> None:
    assert [nearest_multiple(value, 4) for value in (1, 2, 5, 6, 7, 8, 9)] == [4, 4, 4, 8, 8, 8, 8]


@given(shape=shapes(st.integers(1, 4), most_p=6, most_m=48), use=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
def test_rounds_repeat_and_need_nothing_that_comes_later(shape: PipelineShape, use: str) -> None:
    """In every round the same tasks on every device, with inputs from the same round or the one before."""
    if not fits(use, shape):
        return
    table = timetable(make_schedule(use), shape)
    rounds = table.rounds
    if rounds is None:
        # GPipe has no rounds; the others have some for enough micro-batches.
        assert use == "gpipe" or shape.m < 6 * shape.p * shape.v
        return
    length, slot, need = rounds.length, table.slot, table.need
    ends = [begin + rounds.count * length for begin in rounds.first]
    assert rounds.count >= 2
    for device, begin in enumerate(rounds.first):
        assert table.starts[device] <= begin and ends[device] <= table.starts[device + 1]
        for i in range(begin, ends[device] - length):
            assert slot[i + length] == slot[i]
            assert need[i + length] == (need[i] + length if need[i] >= 0 else -1)
        for i in range(table.starts[device], ends[device]):
            if need[i] >= 0:
                # No action depends on a later round; none before the rounds depends on any.
                other = need[i] - rounds.first[table.device_of[need[i]]]
                assert other // length <= max((i - begin) // length, -1)
    before = {n for n, d in enumerate(table.device_of) if n < rounds.first[d]}
    wanted = {need[n] for n in range(len(need)) if n not in before} & before
    assert set(rounds.waiting) == wanted
