"""Errors for users.

Every mistake that a user can correct is a ``MeshcastError`` that says where it is, which value is wrong, which rule it
breaks (with the rule's numbers) and what would work::

    MeshcastError
    +-- CatalogError    a hardware description (GPU, link, node, cluster)
    +-- ModelError      a model description (preset, config.json, inline)
    +-- PlanError       a job or its parallel plan
    +-- ScheduleError   an order of pipeline actions that cannot be played
    +-- OutOfMemory     only under ``--strict``; otherwise not fitting is a result, not an error
    +-- Defect          meshcast itself failed on a row of many; the others are answered
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from meshcast.hardware.documents.other_words import MEANINGS, find_meaning


class MeshcastError(Exception):
    """One mistake, in four parts.

    Args:
        where: file and line, or the field's path (``job.yaml:4 plan.tp``).
        value: the offending value as it was stated; None if something is missing.
        rule: the rule that it breaks, with the rule's numbers.
        remedy: what would work.
    """

    def __init__(self, where: str, rule: str, remedy: str, value: Any = None) -> None:
        self.where, self.value = cut_middle(where), value
        self.rule, self.remedy = (
            _LONG_WORD.sub(lambda word: cut_middle(word[0], 200), _LONG_SPACE.sub(" ", text)) for text in (rule, remedy)
        )
        super().__init__(str(self))

    def __str__(self) -> str:
        got = "" if self.value is None else f" is {shorten(self.value)}"
        return self._escape(f"{to_line(self.where)}{got}: {self.rule}. {self.remedy}")

    @staticmethod
    def _escape(text: str) -> str:
        """Returns the message in a single line, whatever the names in it hold."""
        return to_line(text)

    def to_dict(self) -> dict[str, Any]:
        """Returns the error object in answers of ``--json``."""
        plain = self.value is None or (isinstance(self.value, str | int | float) and _is_short(self.value))
        return {
            "kind": type(self).__name__,
            "where": self.where,
            "value": self.value if plain else shorten(self.value),
            "rule": self.rule,
            "remedy": self.remedy,
        }

    def at(self, where: str) -> MeshcastError:
        """Returns the same error with `where` put in front of its place (a file in front of a field)."""
        return type(self)(f"{where} {self.where}".strip(), self.rule, self.remedy, self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.rule, self.remedy, self.value)


_LONG_WORD, _LONG_SPACE = re.compile(r"\S{1000,}"), re.compile(r"\s{100,}")
"""A name in a file, and the space in or around it, that may have any length, but would hide the sentence that quotes
it."""

MAX_LETTERS = 1_000
"""Longest text that the error object of ``--json`` repeats in full."""


def _is_short(value: str | float) -> bool:
    """Returns whether an error object repeats a value: no long text, and a number that JSON can hold, which is not
    infinity or NaN, nor an integer of more digits than Python writes."""
    if isinstance(value, str):
        return len(value) <= MAX_LETTERS
    return value.bit_length() < 10_000 if isinstance(value, int) else isfinite(value)


class CatalogError(MeshcastError):
    """A hardware description is wrong."""


class ModelError(MeshcastError):
    """A model description is wrong."""


class PlanError(MeshcastError):
    """A job or its plan is wrong."""


class ScheduleError(MeshcastError):
    """An order of pipeline actions cannot be played; the orders stand on separate lines."""

    @staticmethod
    def _escape(text: str) -> str:
        return escape_controls(text)


class OutOfMemory(MeshcastError):
    """The plan does not fit into memory, and ``--strict`` makes that an error."""


class Defect(MeshcastError):
    """meshcast itself failed: the answer to a job, line or row of many."""

    @classmethod
    def of(cls, error: Exception, where: str = "") -> Defect:
        """Returns the answer that stands for an unexpected error."""
        rule = f"meshcast failed: {type(error).__name__}: {str(error)[:500]}"
        return cls(where, rule, "Report this defect of meshcast, with the job that shows it")


CONTROLS = (
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)
"""Characters that terminals act upon or that nobody sees: C0 and C1 controls, with which escape sequences begin, marks
of direction, tags, separators of lines and paragraphs, and halves of surrogates, which no encoding has; all but the end
of a line."""


def escape_controls(text: str) -> str:
    """Returns `text` with escapes, such as ``\\x1b``, in place of control characters: names in files may hold any."""
    if text.isprintable():  # none is; the pattern takes long to compile
        return text
    return re.sub(CONTROLS, lambda match: match[0].encode("unicode_escape").decode(), text)


def to_line(text: str) -> str:
    """Returns `text` in a single line, as in a comment of a script: with escapes for ends of lines, too."""
    return escape_controls(text).replace("\n", "\\n")


def shorten(value: Any, limit: int = 80) -> str:
    """Returns `value` as text of at most `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no longer numbers
        return "a number of more than 4,300 digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def cut_middle(text: str, most: int = 400) -> str:
    """Returns `text`, without its middle if it is longer than `most` characters: a key may have any length."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


MAX_LISTED, MAX_LISTED_KEYS = 150, 400
"""Letters of valid names, and of valid keys, that a message lists, before it says that there are more."""


def nearest(name: str, valid: Iterable[str], meanings: Mapping[str, str] = MEANINGS, most: int = MAX_LISTED) -> str:
    """Returns a sentence that points from a misspelt `name` to the valid ones.

    meanings: valid names by words of other programs.
    most: letters of valid names that are listed.
    """
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    shown = names[: most // 7]
    while len(shown) > 1 and sum(map(len, shown)) > most:
        shown.pop()
    listed = ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
    meaning = find_meaning(str(name), names, meanings)
    if meaning is not None and close[:1] != [meaning]:  # a word that is close anyway was misspelt
        return f"It is {meaning!r} here. Valid: {listed}"
    return f"Did you mean {close[0]!r}? Valid: {listed}" if close else f"Valid: {listed}"
