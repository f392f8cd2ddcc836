"""Methods whose results are kept."""

import pickle
from dataclasses import dataclass, replace

import pytest

from meshcast.hardware.remembered import RecentResults, remember, remembered, remembered_by


@dataclass(frozen=True)
class Squares:
    """Counts the calls that its methods run through."""

    calls: list[object]
    power: int = 2

    @remembered
    def square(self, number: int, sign: int = 1) -> int:
        """Returns sign x number ** power."""
        self.calls.append((number, sign))
        if number < 0:
            raise ValueError
        return int(sign * number**self.power)

    @remembered_by(lambda squares, key, method: key.lower())
    def count(self, key: str, method: str = "") -> int:
        """Returns the number of letters."""
        self.calls.append(key)
        return len(key + method)


class MoreSquares(Squares):
    """Has a method of the same name, with results of its own."""

    @remembered
    def square(self, number: int, sign: int = 1) -> int:
        """Returns one more."""
        return 1 + super().square(number, sign)


def test_a_call_runs_once_for_equal_arguments_by_place_by_name_and_by_default() -> None:
    squares = Squares([])
    assert [squares.square(3), squares.square(3, 1), squares.square(sign=1, number=3)] == [9, 9, 9]
    assert squares.square(3, -1) == -9 and squares.calls == [(3, 1), (3, -1)]
    assert [squares.count("ab"), squares.count("AB")] == [2, 2] and squares.calls[2:] == ["ab"]


def test_results_belong_to_one_object_and_are_pickled_with_it() -> None:
    squares = Squares([])
    squares.square(3)
    cube, copy = replace(squares, power=3), pickle.loads(pickle.dumps(squares))
    assert cube.square(3) == 27
    assert copy.square(3) == 9 and copy.calls == [(3, 1)]
    assert copy == squares.__class__(copy.calls)
    more = MoreSquares([])
    assert [more.square(3), Squares.square(more, 3), more.square(3)] == [10, 9, 10]


def test_a_call_that_raises_is_tried_again() -> None:
    squares = Squares([])
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            squares.square(-1)
        assert error.value.__context__ is None
    assert len(squares.calls) == 2


def test_a_store_keeps_what_was_used_since_it_aged_last_and_counts_it() -> None:
    store: RecentResults[str, str] = RecentResults(len)
    calls: list[str] = []

    def look_up(text: str) -> str:
        return remember(store, text, lambda: calls.append(text) or text)  # type: ignore[func-returns-value]

    for ages, (used, made) in enumerate([("a bb ccc", "a bb ccc"), ("bb", ""), ("ccc bb a", "ccc a")]):
        assert [look_up(text) for text in used.split()] == used.split()
        assert calls == made.split() and store.nbytes == sum(map(len, used.split())), ages
        calls.clear()
        store.age()
    store.clear()
    assert look_up("a") == "a" and calls == ["a"]
