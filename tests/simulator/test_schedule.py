"""Orders of actions: what is refused before it is played, and how it is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.errors import PlanError, ScheduleError
from simulator.schedule import Action, Schedule, Shape, check_orders, nearest_multiple, requires, table
from simulator.scheme import find_scheme
from tests.strategies import shapes

SHAPE = Shape(2, 2)
GOOD = ["0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"]


class Given(Schedule):
    """A schedule that was written by hand."""

    name = "given"
    rows: list[str] = []

    def order(self, shape: Shape, device: int) -> list[Action]:
        return parsed(self.rows[device])


def parsed(row: str) -> list[Action]:
    found = []
    for word in row.split():
        stage, rest = word[: word.index(word.lstrip("0123456789"))], word.lstrip("0123456789")
        kind = rest.rstrip("0123456789")
        found.append(Action(int(stage), kind, int(rest[len(kind) :])))
    return found


def given_schedule(*rows: str, backward: str = "BW") -> Schedule:
    schedule = Given(("pp",))
    schedule.rows, schedule.backward = list(rows), backward
    return schedule


def test_a_good_order_passes_and_prints_like_the_papers() -> None:
    orders = given_schedule(*GOOD).orders(SHAPE)
    assert [[str(action) for action in order] for order in orders] == [row.split() for row in GOOD]
    assert table(orders, {1: 2}) == "  device 0: 0F0 0F1 0BW0 0BW1\n  device 1: 1F0 1BW0 >1F1< 1BW1"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD[0], "1F0 1BW0 1F1"], ["device 1", "Action", "occurs 0 times"]),
        (["0F0 0F1 0F1 0BW0 0BW1", GOOD[1]], ["device 0", "occurs 2 times"]),
        ([GOOD[0] + " 1F0", GOOD[1]], ["device 0", "exactly once there"]),
        (["0F0 0F1 0BW0 0BW2", GOOD[1]], ["device 0", "0BW1", "occurs 0 times"]),
        (["0F0 0F1 0B0 0BW1", GOOD[1]], ["device 0", "0BW0", "occurs 0 times"]),
        (["", GOOD[1]], ["device 0", "0F0", "occurs 0 times"]),
    ],
    ids=["one missing", "one twice", "another device's", "no such micro-batch", "another kind", "nothing"],
)
def test_an_order_that_is_not_complete_is_refused(rows: list[str], words: list[str]) -> None:
    with pytest.raises(ScheduleError) as refused:
        given_schedule(*rows).orders(SHAPE)
    text = str(refused.value)
    assert "pipeline/given" in text and "exactly once" in text
    assert "device 0: " in text and "device 1: " in text, "the table stands in the message"
    for word in words:
        assert word in text or word == "Action"


@pytest.mark.parametrize(
    ("rows", "marked"),
    [
        (["0BW0 0F0 0F1 0BW1", GOOD[1]], [">0BW0<", ">1F0<"]),
        (["0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"], [">0BW0<", ">1F1<"]),
        ([GOOD[0], "1BW0 1F0 1F1 1BW1"], [">0BW0<", ">1BW0<"]),
    ],
    ids=["backward first", "each waits for the other", "the last stage turned round"],
)
def test_a_standstill_is_found_and_shown(rows: list[str], marked: list[str]) -> None:
    with pytest.raises(ScheduleError, match="stands still") as refused:
        given_schedule(*rows).orders(SHAPE)
    for cell in marked:
        assert cell in str(refused.value)


def test_backward_passes_in_two_parts() -> None:
    rows = ["0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1F1 1B1 1W0 1W1"]
    assert given_schedule(*rows, backward="B W").orders(SHAPE)
    with pytest.raises(ScheduleError, match="0W0"):
        given_schedule("0F0 0F1 0B0 0B1 0W1", rows[1], backward="B W").orders(SHAPE)
    with pytest.raises(ScheduleError, match="stands still"):
        given_schedule("0F0 0F1 0W0 0B0 0B1 0W1", rows[1], backward="B W").orders(SHAPE)


def test_what_an_action_needs() -> None:
    shape = Shape(2, 4, 2)
    assert requires(Action(0, "F", 1), shape, False) == []
    assert requires(Action(2, "F", 1), shape, False) == [Action(1, "F", 1)]
    assert requires(Action(3, "BW", 1), shape, False) == [Action(3, "F", 1)]
    assert requires(Action(1, "BW", 1), shape, False) == [Action(1, "F", 1), Action(2, "BW", 1)]
    assert requires(Action(1, "B", 1), shape, True) == [Action(1, "F", 1), Action(2, "B", 1)]
    assert requires(Action(1, "W", 1), shape, True) == [Action(1, "B", 1)]


@given(shape=shapes(st.integers(1, 4)), use=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
def test_a_shipped_schedule_is_complete_or_says_why_not(shape: Shape, use: str) -> None:
    schedule = find_scheme(f"pipeline/{use}")(("pp",))
    assert isinstance(schedule, Schedule)
    fits = shape.v >= 2 and shape.m % shape.p == 0 if use.startswith("inter") else shape.v == 1
    if not fits:
        with pytest.raises(PlanError) as refused:
            schedule.orders(shape)
        assert refused.value.remedy and f"pipeline/{use}" in refused.value.rule
        return
    orders = schedule.orders(shape)
    assert sum(map(len, orders)) == 2 * shape.stages * shape.m
    check_orders(orders, shape, schedule)
    assert {schedule.device(shape, action.stage) for action in orders[-1]} == {shape.p - 1}


@given(shape=shapes(most_p=4, most_m=6), data=st.data())
def test_two_actions_of_one_micro_batch_never_swap(shape: Shape, data: st.DataObject) -> None:
    """Turning the forward and the backward of one micro-batch round stands still, wherever it is done."""
    schedule = find_scheme("pipeline/gpipe")(("pp",))
    assert isinstance(schedule, Schedule)
    orders = schedule.orders(shape)
    device, k = data.draw(st.integers(0, shape.p - 1)), data.draw(st.integers(0, shape.m - 1))
    order = orders[device]
    i, j = order.index(Action(device, "F", k)), order.index(Action(device, "BW", k))
    order[i], order[j] = order[j], order[i]
    with pytest.raises(ScheduleError, match="stands still"):
        check_orders(orders, shape, schedule)


def test_the_nearest_multiple() -> None:
    assert [nearest_multiple(value, 4) for value in (1, 2, 5, 6, 7, 8, 9)] == [4, 4, 4, 8, 8, 8, 8]
