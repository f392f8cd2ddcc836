"""Edits of flags in a shell script or a list of arguments, and of the variables of the environment that it exports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from meshcast.simulator.formats.launch.edits.setting_change import SettingChange, line_of_place
from meshcast.simulator.formats.launch.quoting import quote_shell
from meshcast.simulator.formats.launch.table import Stated

VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|(?!--)(?:\$\{[^}\n]*\}|\$\(\([^\n]*?\)\)|[^\s"'\\;|&()])+)"""
"""A value behind a flag."""


def edit_script(text: str, change: SettingChange) -> str:
    """Returns the script with a setting changed. Raises PlanError for a setting that does not stand as it is stated."""
    if change.variable:
        return _edit_variable(text, change)
    if change.before is None:
        return _add_flag(text, change)
    spans = list(_find_flag(text, change.name, change.line, change.before))
    if not spans:
        raise change.refuse()
    begin, name_end, end = spans[0]
    if change.flag is not None:
        return f"{text[:begin]}{change.flag[0]}{_spell_values(change.flag[1])}{text[end:]}"
    if change.after is None:
        return _cut_flag(text, begin, end)
    return f"{text[:name_end]}{_spell_values(change.after, text[name_end : name_end + 1])}{text[end:]}"


def edit_assignment(text: str, change: SettingChange) -> str | None:
    """Returns the script with the value changed where a variable gets it; None if it is not written there."""
    lines = text.splitlines(keepends=True)
    at, value = line_of_place(change.value_place) - 1, re.escape(str(change.before))
    if not 0 <= at < len(lines) or not isinstance(change.after, str | int | float) or change.after is True:
        return None
    assignment = re.compile(rf"(?<![\w$])(\w+=)([\"']?){value}\2(?=[\s;]|$)")
    if len(assignment.findall(lines[at])) != 1:
        return None
    lines[at] = assignment.sub(lambda place: f"{place[1]}{_spell_values(change.after).strip()}", lines[at])
    return "".join(lines)


def _find_flag(text: str, name: str, line: int, value: object) -> Iterator[tuple[int, int, int]]:
    """Yields where a flag stands outside of comments, the first from a line on first: where it begins, where its
    name ends, and where its values end. value: that it has."""
    spans = []
    for flag in re.finditer(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
        before = text[text.rfind("\n", 0, flag.start()) + 1 : flag.start()]
        if re.match(r"\s*#|.*\s#", before):
            continue
        spans.append((flag.start(), flag.end(), _end_of_values(text, flag.end(), _count_words(value))))
    numbered = [(text.count("\n", 0, span[0]) + 1, span) for span in spans]
    for _, span in sorted(numbered, key=lambda pair: (pair[0] < line, abs(pair[0] - line))):
        yield span


def _count_words(value: object) -> int:
    """Returns the words that a flag has as its value."""
    return 0 if value is True else len(value) if isinstance(value, list | tuple) else max(1, len(str(value).split()))


def _end_of_values(text: str, at: int, words: int) -> int:
    """Returns where the values of a flag end, whose name ends at a place."""
    for number in range(words):
        value = re.compile(rf"{'[= ]' if number == 0 else ' '}[ \t]*{VALUE}").match(text, at)
        if value is None:
            break
        at = value.end()
    return at


def _spell_values(value: object, gap: str = " ") -> str:
    """Returns the value of a flag as the shell takes it, with what is between. gap: the letter behind the name as it
    is."""
    if value is True:
        return ""
    words = list(value) if isinstance(value, list | tuple) else [value]
    return ("=" if gap == "=" else " ") + " ".join(map(quote_shell, words))


def _cut_flag(text: str, begin: int, end: int) -> str:
    """Returns the text without a flag, and without its line if nothing else is on it."""
    start, stop = text.rfind("\n", 0, begin) + 1, text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    left, right = text[start:begin], text[end:stop].lstrip()
    if not left.strip() and not right.strip("\\ \t"):
        return text[:start] + text[stop + 1 :]
    return text[:start] + (f"{left.rstrip()} {right}".rstrip() if left.strip() else left + right) + text[stop:]


def _add_flag(text: str, change: SettingChange) -> str:
    """Returns the script with a flag behind the nearest neighbour that stands in it."""
    flag = change.on_command_line
    for neighbour in change.neighbours:
        for _, _, end in _find_flag(text, neighbour.shown, line_of_place(neighbour.place), neighbour.value):
            return f"{text[:end]} {flag.name}{_spell_values(flag.after)}{text[end:]}"
    raise change.refuse()


def _edit_variable(text: str, change: SettingChange) -> str:
    """Returns the script with another value of a variable of the environment, or without it."""
    lines = text.split("\n")
    if change.before is None:
        at = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
        return "\n".join([*lines[:at], f"export {change.variable}={quote_shell(change.after)}", *lines[at:]])
    at, assignment = change.line - 1, rf"\b{change.variable}=(\"[^\"]*\"|'[^']*'|[^\s;]*)"
    if not 0 <= at < len(lines) or not re.search(assignment, lines[at]):
        raise change.refuse()
    after = "" if change.after is None else f"{change.variable}={quote_shell(change.after)}"
    lines[at] = re.sub(assignment, lambda _: after, lines[at])
    if re.fullmatch(r"\s*(export)?\s*", lines[at]):
        del lines[at]
    return "\n".join(lines)


def order_neighbours(
    name: str, written: Sequence[str], stated: Mapping[str, Stated], apart: Collection[str] = ()
) -> tuple[Stated, ...]:
    """Returns the settings of a file in the order in which a setting to add belongs beside them: those before it in a
    file that is written anew, the nearest first, then those behind it, then all others.

        written: names of the settings of that file.
        stated: the settings of the file that exists.
        apart: names of those beside which it belongs least, as a degree beside the shape of the model.
    """
    at = written.index(name) if name in written else 0
    rank = {other: (other in apart, number > at, abs(number - at)) for number, other in enumerate(written)}
    order = sorted(stated, key=lambda other: rank.get(other, (True, True, len(written))))
    return tuple(stated[other] for other in order)
