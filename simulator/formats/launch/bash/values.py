"""Texts of a script that know the lines they come from, and what in them nothing sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import field, replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.bash.records import Segment, Word

Value = tuple[Segment, ...]
"""A text."""

COST_OF_A_SEGMENT = 16
"""Letters that take as much memory as what a segment holds beside its text."""


def measure(value: Value) -> int:
    """Returns the size of a text in letters, its lines and marks included."""
    return sum(len(segment.text) + COST_OF_A_SEGMENT for segment in value)


def read_text(value: Value) -> str:
    """Returns a text as it is written, with what nothing sets."""
    return "".join(segment.text for segment in value)


def read_as_bash(value: Value) -> str:
    """Returns a text as bash would have it: variables that nothing sets are empty."""
    return "".join(segment.text for segment in value if not segment.unset)


def is_resolved(value: Value) -> bool:
    """Returns whether a text holds no command substitution that is not computed; unset variables are empty."""
    return all(segment.unset or not segment.unknown for segment in value)


def name_unknown(value: Value) -> tuple[str, ...]:
    """Returns what in a text nothing sets, each name once."""
    return tuple(dict.fromkeys(name for segment in value for name in segment.unknown))


def merge_segments(value: Value) -> Value:
    """Returns the same text with neighbouring parts of the same line joined."""
    merged: list[Segment] = []
    texts: list[str] = []
    for segment in value:
        last = merged[-1] if merged else None
        if last is not None and not segment.unknown and not last.unknown and _is_beside(last, segment):
            texts.append(segment.text)
            continue
        if last is not None:
            merged[-1] = replace(last, text="".join(texts))
        merged.append(segment)
        texts = [segment.text]
    if merged:
        merged[-1] = replace(merged[-1], text="".join(texts))
    return tuple(merged)


def _is_beside(left: Segment, right: Segment) -> bool:
    return (left.line, left.file) == (right.line, right.file)


def strip_line_ends(value: Value) -> Value:
    """Returns a text without the line ends behind it, as of a command substitution."""
    segments = list(value)
    while segments:
        text = segments[-1].text.rstrip("\n")
        if text or segments[-1].unset:
            segments[-1] = replace(segments[-1], text=text)
            break
        segments.pop()
    return tuple(segments)


def as_word(value: Value, line: int) -> Word:
    """Returns a word. line: where no part of the word says its line."""
    place = next((segment for segment in value if segment.text), value[0] if value else None)
    if place is None:
        return Word("", line)
    return Word(read_text(value), place.line, name_unknown(value), place.file, value)


def from_word(word: Word) -> Value:
    """Returns the text of a word."""
    return word.parts or (Segment(word.text, word.line, word.unknown, file=word.file),)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a word.

    values: texts; several for ``${A[@]}``.
    quoted: whether it stands in quotes.
    literal: whether it is written so; what is neither is divided at its spaces.
    """

    values: tuple[Value, ...]
    quoted: bool = False
    literal: bool = False


@dataclass
class FieldBuilder:
    """Words while they are built of parts: only what a variable without quotes brings is divided at spaces.

    fields: the finished words.
    current: parts of the word that is under way; None between words.
    """

    fields: list[Value] = field(default_factory=list)
    current: list[Segment] | None = None

    def add_whole(self, value: Value) -> None:
        """Adds a text that is not divided; an empty text makes a word, too."""
        if self.current is None:
            self.current = []
        self.current += value

    def add_divided(self, value: Value) -> None:
        """Adds a text that is divided at its spaces."""
        for segment in value:
            if segment.unknown:
                self.add_whole((segment,))
                continue
            for space, part in _split(segment.text):
                if space:
                    self.end_field()
                elif self.current is None:
                    self.current = [replace(segment, text=part)]
                else:
                    self.current.append(replace(segment, text=part))

    def end_field(self) -> None:
        """Ends the word that is under way, if any."""
        if self.current is not None:
            self.fields.append(tuple(self.current))
        self.current = None

    def add_fields(self, values: Iterable[Value]) -> None:
        """Adds words as ``"${A[@]}"`` does: the first joins what stands in front, the last what follows."""
        for index, value in enumerate(values):
            if index:
                self.end_field()
            self.add_whole(value)


def _split(text: str) -> Iterator[tuple[bool, str]]:
    """Yields (whether it is a space, text) of the parts of a text."""
    for part in re.finditer(r"[ \t\n]+|[^ \t\n]+", text):
        yield part[0][0] in " \t\n", part[0]
