"""Messages stay readable whatever a file has in them."""

import pytest

from meshcast.hardware.errors import PlanError, cut_middle, shorten


def test_a_name_of_any_length_does_not_hide_the_sentence_that_quotes_it() -> None:
    name = "9" * 5000
    message = str(PlanError("cluster", f"no node {name!r} is known", f"Write {name}.json", name))
    assert len(message) < 1000 and "is known" in message and message.endswith("999.json")
    assert str(PlanError("a", "short words stay", "x" * 900)).endswith("x" * 900)
    assert "a b" in str(PlanError("a", "\t".join(["a", *[""] * 5000, "b"]), "c"))


@pytest.mark.parametrize("most", [20, 21, 400])
def test_a_text_without_its_middle_is_as_long_as_it_may_be(most: int) -> None:
    text = "".join(chr(97 + number % 26) for number in range(500))
    cut = cut_middle(text, most)
    assert most - 1 <= len(cut) <= most and text.startswith(cut.partition(" ... ")[0]) and text.endswith(cut[-7:])
    assert cut_middle(text[:most], most) == text[:most]


def test_a_value_of_a_message_has_at_most_the_letters_of_its_limit() -> None:
    assert shorten("x" * 8, 10) == repr("x" * 8) and shorten("x" * 9, 10) == "'xxxxxx..."
