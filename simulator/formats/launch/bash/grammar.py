"""Syntax trees of bash, by tree-sitter."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.bash.records import LostPlace, Segment

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_SPACES = re.compile(rb"(?:\s|\\\n)*")

_WORDS = re.compile(rb"(?<=\s)<[A-Za-z]+(?: [\w./-]+)+>(?=\s|$)")
"""Words that a user is to replace, as ``<more arguments>``: bash would read from a file and write another."""

_FORMULA = re.compile(rb"(?<=:[-=])\$\(\(((?:\$(?!\()|[^\n;\"'`$]){1,300}?)\)\)(?=\})")
"""A formula as a default value, of which the grammar takes a space or a bracket for its end, unless it is in quotes."""

_PLACEHOLDER = re.compile(rb"(?<==)<[A-Za-z][^<>\n|;&\"'`$]{0,200}>")

SCRIPT = ((0, 1, ""),)
"""Lines of a text that is the script itself."""

LARGEST = 1_000_000
"""Bytes of the largest script."""


@cache
def _parser() -> Parser:
    import tree_sitter  # here, for jobs that are no launch files need neither
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


@dataclass(frozen=True)
class Source:
    """A text of bash with its tree.

    content: the text in UTF-8, to which the places of nodes count.
    root: of its tree.
    lines: (place, line, file) of parts that come from different lines of a script, as those of a text that `eval`
        gets, or from files that it sources; the file of the script itself is "".
    ends: places of its line ends.
    """

    content: bytes
    root: Node
    lines: tuple[tuple[int, int, str], ...] = SCRIPT
    ends: tuple[int, ...] = ()

    def line_of(self, node: Node) -> int:
        """Returns the line of the script on which a node begins."""
        if len(self.lines) == 1:
            return self.lines[0][1] + int(node.start_point.row)
        return self.line_at(node.start_byte)

    def start_of(self, node: Node) -> int:
        """Returns where a node begins, without spaces in front, which the grammar counts to some."""
        spaces = _SPACES.match(self.content, node.start_byte, node.end_byte)
        return spaces.end() if spaces is not None else int(node.start_byte)

    def line_at(self, place: int) -> int:
        """Returns the line of the script that a place lies on."""
        start, line, _ = self._part_at(place)
        return line + bisect_right(self.ends, place - 1) - bisect_right(self.ends, start - 1)

    def file_at(self, place: int) -> str:
        """Returns the file that a place comes from."""
        return self._part_at(place)[2]

    def _part_at(self, place: int) -> tuple[int, int, str]:
        return self.lines[max(0, bisect_right(self.lines, (place, 1 << 62, "")) - 1)]

    def segment(self, text: str, place: int, unknown: tuple[str, ...] = (), unset: bool = False) -> Segment:
        """Returns a text that stands for a part of the script at a place."""
        return Segment(text, self.line_at(place), unknown, unset, self.file_at(place))

    def text_of(self, start: int, end: int) -> str:
        """Returns the text between two places."""
        return self.content[start:end].decode("utf-8", "replace")

    def text(self, node: Node) -> str:
        """Returns the text of a node."""
        return self.text_of(node.start_byte, node.end_byte)


def parse(text: str, where: str, lines: tuple[tuple[int, int, str], ...] = SCRIPT) -> Source:
    """Returns the tree of a text. Raises PlanError for a text that is too large."""
    content = text.encode("utf-8", "replace")
    if len(content) > LARGEST:
        rule = f"the script has more than {LARGEST:,} bytes"
        raise PlanError(where, rule, "Write the command that starts the training program into a script of its own")
    content = _WORDS.sub(lambda place: re.sub(rb"\W", b"_", place[0]), content)
    root = _parser().parse(content).root_node
    if root.has_error:  # places that a user is to fill in, as X=<path to data>, which bash takes for files
        filled = _PLACEHOLDER.sub(lambda place: re.sub(rb"[^\w./-]", b"_", place[0]), content)
        filled = _FORMULA.sub(_quote_formula, filled)
        if filled != content:
            content, root = filled, _parser().parse(filled).root_node
    ends = tuple(place for place, letter in enumerate(content) if letter == 10)
    return Source(content, root, lines or SCRIPT, ends)


def field_of(node: Node, name: str) -> Node:
    """Returns a field without which the grammar makes no such node, errors or not."""
    return node.children_by_field_name(name)[0]


def _quote_formula(place: re.Match[bytes]) -> bytes:
    """Returns a formula in quotes, which stand where the spaces around it were."""
    return b'"$((' + place[1].strip().ljust(len(place[1]) - 2) + b'))"'


MAX_TOLD = 10
"""Places that are not of bash's grammar, of which each is told; the rest are counted."""


def find_errors(source: Source) -> Iterator[LostPlace]:
    """Yields the places where a text is not of bash's grammar, one a line; of those with the same reason the first."""
    places = dict[str, int]()
    for place in _list_errors(source):
        places.setdefault(place.why, place.line)
    for why, line in [*places.items()][:MAX_TOLD]:
        yield LostPlace(line, why)
    for line in [*places.values()][MAX_TOLD : MAX_TOLD + 1]:
        yield LostPlace(line, f"bash's grammar has no place for this and {len(places) - MAX_TOLD - 1:,} places below")


def _list_errors(source: Source) -> Iterator[LostPlace]:
    lines = set()
    waiting = [source.root]
    while waiting:
        node = waiting.pop()
        if not node.has_error:
            continue
        line = source.line_of(node)
        if node.is_missing or node.is_error:
            harmless = node.is_error and not source.text(node).strip("\\ \t\n")
            if line not in lines and not harmless:
                lines.add(line)
                yield LostPlace(line, _describe(source, node))
        else:
            waiting += reversed(node.children)


def _describe(source: Source, node: Node) -> str:
    if node.is_missing:
        return "a quote is open" if node.type in ('"', "'") else f"{node.type!r} is missing here"
    shown = source.text(node).strip().splitlines()
    part = shown[0][:40] if shown else ""
    return f"bash's grammar has no place for {part!r}; a quote or a bracket may be open"
