"""Messages stay readable whatever a file has in them."""

from meshcast.hardware.errors import PlanError


def test_a_name_of_any_length_does_not_hide_the_sentence_that_quotes_it() -> None:
    name = "9" * 5000
    message = str(PlanError("cluster", f"no node {name!r} is known", f"Write {name}.json", name))
    assert len(message) < 1000 and "is known" in message and message.endswith("999.json")
    assert str(PlanError("a", "short words stay", "x" * 900)).endswith("x" * 900)
    assert "a b" in str(PlanError("a", "\t".join(["a", *[""] * 5000, "b"]), "c"))
