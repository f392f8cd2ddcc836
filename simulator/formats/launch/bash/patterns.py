"""Patterns of bash (``*.sh``, ``[a-c]?``), matched in time that grows with pattern times text, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator

MAX_COMPARISONS = 1_000_000
"""Comparisons of letters to cut a part off a text, for which every length of the part is tried."""


def is_costly(text: str, pattern: str) -> bool:
    """Returns whether it takes too many comparisons to cut off a text, or replace in it, what a pattern matches."""
    wild = sum(sign in "*?[" for sign in pattern)
    return wild > 0 and (len(text) + 1) ** 2 * wild > MAX_COMPARISONS


CLASSES = {
    "[:digit:]": str.isdigit,
    "[:alpha:]": str.isalpha,
    "[:alnum:]": str.isalnum,
    "[:space:]": str.isspace,
    "[:upper:]": str.isupper,
    "[:lower:]": str.islower,
}


def split_pattern(pattern: str) -> list[str]:
    """Returns the pieces of a pattern: ``*``, ``?``, ``[...]`` or a letter, behind a backslash where it is plain."""
    pieces, position = [], 0
    while position < len(pattern):
        end = position + 1
        if pattern[position] == "\\":
            end = position + 2
        elif pattern[position] == "[":
            end = _end_of_set(pattern, position)
        pieces.append(pattern[position:end])
        position = end
    return pieces


def _end_of_set(pattern: str, start: int) -> int:
    """Returns where ``[...]`` ends; behind its first letter if it does not."""
    position = start + 1
    if pattern[position : position + 1] in ("!", "^"):
        position += 1
    if pattern[position : position + 1] == "]":
        position += 1
    while position < len(pattern) and pattern[position] != "]":
        close = pattern.find(":]", position) if pattern.startswith("[:", position) else -1
        position = close + 2 if close > 0 else position + 1
    return position + 1 if position < len(pattern) else start + 1


def matches(text: str, pattern: str) -> bool:
    """Returns whether a whole text has the form of a pattern."""
    pieces = split_pattern(pattern)
    position = index = 0
    star, mark = -1, 0
    while position < len(text):
        if index < len(pieces) and pieces[index] == "*":
            star, mark = index, position
            index += 1
        elif index < len(pieces) and _is_letter(text[position], pieces[index]):
            position, index = position + 1, index + 1
        elif star >= 0:
            mark += 1
            position, index = mark, star + 1
        else:
            return False
    return all(piece == "*" for piece in pieces[index:])


def _is_letter(letter: str, piece: str) -> bool:
    """Returns whether a letter is what a piece of a pattern stands for."""
    if piece == "?":
        return True
    if len(piece) == 1:
        return letter == piece
    if piece[0] == "\\":
        return letter == piece[1:]
    inside = piece[1:-1]
    negated = inside[:1] in ("!", "^")
    return _is_in_set(letter, inside[1:] if negated else inside) != negated


def _is_in_set(letter: str, inside: str) -> bool:
    position = 0
    while position < len(inside):
        name = next((name for name in CLASSES if inside.startswith(name, position)), None)
        if name is not None:
            if CLASSES[name](letter):
                return True
            position += len(name)
        elif inside[position + 1 : position + 2] == "-" and position + 2 < len(inside):
            if inside[position] <= letter <= inside[position + 2]:
                return True
            position += 3
        else:
            if letter == inside[position]:
                return True
            position += 1
    return False


def cut_front(text: str, pattern: str, longest: bool) -> int:
    """Returns how many letters at the front of a text have the form of a pattern: as few or as many as may be."""
    lengths = range(len(text), -1, -1) if longest else range(len(text) + 1)
    return next((length for length in lengths if matches(text[:length], pattern)), 0)


def cut_back(text: str, pattern: str, longest: bool) -> int:
    """Returns how many letters at the end of a text have the form of a pattern."""
    lengths = range(len(text), -1, -1) if longest else range(len(text) + 1)
    return next((length for length in lengths if matches(text[len(text) - length :], pattern)), 0)


def find_parts(text: str, pattern: str) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of the parts of a text that a pattern matches, each as long as may be."""
    plain = not any(sign in pattern for sign in "*?[\\")
    position = 0
    while pattern and position < len(text):
        if plain:
            start = text.find(pattern, position)
            if start < 0:
                return
            length = len(pattern)
        else:
            start, length = position, cut_front(text[position:], pattern, longest=True)
        if length:
            yield start, start + length
        position = start + max(1, length)


def escape(text: str) -> str:
    """Returns a pattern that matches a text alone."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
