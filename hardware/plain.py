"""Reads the plain YAML that descriptions are written in, many times faster than a parser of the whole language.

Plain is printable ASCII in blocks of ``key: value`` lines, each value in one line: a word, a number, a day, text in
double quotes without escapes, or lists and mappings of these in brackets. One such value alone is plain, and so is JSON
without escapes. Whatever else a document holds, mistakes included, is for the parser of the whole language.
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

DEPTH = 16
"""Deepest nesting of blocks, or of brackets in one line, that is plain."""

BRACKETS = 100
"""Most brackets of a JSON document that is plain."""

PRINTABLE = re.compile(r"[\n -~]*")
COMMENT = re.compile(r" *(?:#.*)?")
END = re.compile(r"(?: +#.*)? *")
LINE = re.compile(r"( *)([A-Za-z_][\w.-]{0,99}):(?: +(.*?))? *")
OPENING = re.compile(r"([\[{]) *")
BETWEEN = re.compile(r" *(?:, *(?![\]}])|(?=[\]}]))")
KEY = re.compile(r"([A-Za-z_][\w.-]{0,99}): +")
QUOTED = re.compile(r'"([^"\\\n]*)"')
WORD = re.compile(r"(?:[A-Za-z0-9_/.]|[+-](?=[\w.]))(?:[\w ./+()=%;<>~'-]|:(?=[\w/.]))*")
LINE_WORD = re.compile(WORD.pattern.replace("[\\w ", "[\\w ,"))
"""Outside brackets a comma is a part of a word."""

CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?")
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
NUMERIC = re.compile(r"[-+]?(?:[0-9_.]+(?:e[-+]?[0-9]*)?|0[box].*|\.(?:inf|nan).*)|[0-9]{4}-.*", re.IGNORECASE)
"""Whatever might be a number or a time in some notation of YAML."""


class Other(Exception):
    """The document is not plain."""


def read_plain(text: str) -> Any:
    """What a plain document holds; None for any other document."""
    if PRINTABLE.fullmatch(text):
        for form in (_json, _line, _blocks):
            try:
                return form(text)
            except (Other, ValueError, RecursionError):
                continue
    return None


def _json(text: str) -> Any:
    def refused(_: str) -> None:
        raise Other

    # Escapes differ a little; and a depth that ends the other parser, or whatever walks the data, must not pass here.
    if "\\" in text or text.count("{") + text.count("[") > BRACKETS:
        raise Other
    return json.loads(text, object_pairs_hook=_once, parse_constant=refused)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Other
    return found


def _line(text: str) -> Any:
    value, end = _value(text, 0, LINE_WORD, DEPTH)
    if text.startswith("...") or not END.fullmatch(text, end):  # three dots end a document
        raise Other
    return value


def _blocks(text: str) -> Any:
    top: dict[str, Any] = {}
    stack = [(0, top)]  # the mappings that are open, with their indentation
    opened: str | None = None  # the key whose mapping the next line may begin
    for line in text.split("\n"):
        if COMMENT.fullmatch(line):
            continue
        found = LINE.fullmatch(line)
        if found is None:
            raise Other
        indent, key = len(found[1]), found[2]
        if indent > stack[-1][0]:
            if opened is None or len(stack) == DEPTH:
                raise Other
            inner: dict[str, Any] = {}
            stack[-1][1][opened] = inner
            stack.append((indent, inner))
        while indent < stack[-1][0]:
            stack.pop()
        mapping = stack[-1][1]
        if indent != stack[-1][0] or key in mapping or key in CONSTANTS:
            raise Other
        opened = key if COMMENT.fullmatch(found[3] or "") else None
        mapping[key], end = (None, len(line)) if opened else _value(line, found.start(3), LINE_WORD, DEPTH)
        if not END.fullmatch(line, end):
            raise Other
    return top or None


def _value(line: str, at: int, word: re.Pattern[str], depth: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    if found := OPENING.match(line, at):
        return _brackets(line, found, depth)
    if found := QUOTED.match(line, at):
        return found[1], found.end()
    if found := word.match(line, at):
        text = found[0].rstrip(" ")
        return _resolved(text), at + len(text)
    raise Other


def _brackets(line: str, opening: re.Match[str], depth: int) -> tuple[Any, int]:
    closing, at = "]" if opening[1] == "[" else "}", opening.end()
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    if not depth:
        raise Other
    while line[at : at + 1] != closing:
        key = KEY.match(line, at) if closing == "}" else None
        if closing == "}" and (key is None or key[1] in pairs or key[1] in CONSTANTS):
            raise Other
        value, at = _value(line, key.end() if key else at, WORD, depth - 1)
        if key:
            pairs[key[1]] = value
        else:
            items.append(value)
        between = BETWEEN.match(line, at)
        if between is None:
            raise Other
        at = between.end()
    return (items if closing == "]" else pairs), at + 1


def _resolved(text: str) -> Any:
    """What a word without quotes stands for."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if not NUMERIC.fullmatch(text):
        return text
    if found := NUMBER.fullmatch(text):
        return float(text) if found[1] or found[2] else int(text)
    if DAY.fullmatch(text):
        return datetime.date.fromisoformat(text)
    raise Other
