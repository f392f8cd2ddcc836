"""Tests of bash: ``[[ ]]``, ``[ ]`` and ``test``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.bash.arithmetic import read_decimal_number, read_whole_number
from meshcast.simulator.formats.launch.bash.expansion import Expander
from meshcast.simulator.formats.launch.bash.files import file_exists
from meshcast.simulator.formats.launch.bash.grammar import Source
from meshcast.simulator.formats.launch.bash.patterns import MAX_COMPARISONS, matches
from meshcast.simulator.formats.launch.bash.state import Shell
from meshcast.simulator.formats.launch.bash.values import Segment, Value, is_resolved, read_as_bash, read_text

if TYPE_CHECKING:
    from tree_sitter import Node

COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}

TEXTS = ("=", "==", "!=", "<", ">")

EXPRESSIONS = ("binary_expression", "unary_expression", "parenthesized_expression")

LONGEST_SUBJECT = 1_000
"""Letters of the longest text that a regular expression is looked for in."""


@dataclass(frozen=True)
class Status:
    """How a statement ends.

    holds: whether it succeeds, as far as is known.
    resolved: whether that is known.
    sure: whether it would be the same if variables were set that nothing sets.
    """

    holds: bool = True
    resolved: bool = True
    sure: bool = True

    def negate(self) -> Status:
        """Returns the status behind ``!``; what is not known does not hold either way."""
        return Status(not self.holds if self.resolved else False, self.resolved, self.sure)

    def join(self, other: Status, holds: bool) -> Status:
        """Returns the status of two statements that both count."""
        return Status(holds, self.resolved and other.resolved, self.sure and other.sure)


_DROPPED: Value = (Segment("", 0, unset=True),)
"""A word of ``[ ]`` that bash drops: a variable without quotes that nothing sets."""

UNKNOWN = Status(holds=False, resolved=False, sure=False)


class Conditions:
    """Evaluates the tests of a script."""

    def __init__(self, shell: Shell, expander: Expander) -> None:
        self.shell = shell
        self.expander = expander

    def evaluate(self, source: Source, node: Node) -> Status:
        """Returns whether a test holds."""
        inside = [child for child in node.children[1:-1] if child.type not in ("\n", "comment")]
        if node.children[0].type == "[":
            words = [value for child in inside for value in self._flatten(source, child)]
            status = self.test_words([word for word in words if word is not _DROPPED])
            return status if _DROPPED not in words else replace(status, sure=False)
        if node.has_error:
            return UNKNOWN
        return self._expression(source, [*_list_parts(inside[0])])

    def _flatten(self, source: Source, node: Node) -> Iterator[Value]:
        """Yields the words between ``[`` and ``]``, as a command would get them."""
        if node.type in EXPRESSIONS:
            for child in node.children:
                yield from self._flatten(source, child)
        elif node.is_named and node.type != "test_operator":
            bare = node.type in ("simple_expansion", "expansion")
            for value in self.expander.fields(source, node):
                yield _DROPPED if bare and value and all(segment.unset for segment in value) else value
        else:
            yield (Segment(source.text(node), source.line_of(node)),)

    # --------------------------------------------------------------------------------------------------- [[ ... ]]

    def _expression(self, source: Source, parts: list[Node]) -> Status:
        """Evaluates parts of a test as bash binds them: ``||`` least, then ``&&``, then ``!``; the grammar binds others
        more, as ``!`` more than ``==``, and ``&&`` more than ``=``."""
        self.shell.limits.step(source.line_of(parts[0]))
        self.shell.limits.enter()
        status = self._judge_joined(source, parts) or self._judge_single(source, parts)
        self.shell.limits.leave()
        return status

    def _judge_joined(self, source: Source, parts: list[Node]) -> Status | None:
        for sign in ("||", "&&"):
            if (place := _find_outside(parts, sign)) is not None:
                status = self._expression(source, parts[:place])
                if status.holds == (sign == "||"):
                    return status
                other = self._expression(source, parts[place + 1 :])
                return status.join(other, other.holds)
        return None

    def _judge_single(self, source: Source, parts: list[Node]) -> Status:
        first, *others = parts
        if first.type == "!" and others:
            return self._expression(source, others).negate()
        if first.type == "(" and len(others) > 1:
            return self._expression(source, others[:-1])
        if not others:
            value = self.expander.text(source, first)
            return judge(bool(read_as_bash(value)), value)
        if len(others) == 1:
            return self.test_value(source.text(first), self.expander.text(source, others[0]))
        return self._compare(source, self.expander.text(source, first), source.text(others[0]), others[1:])

    def _compare(self, source: Source, value: Value, sign: str, nodes: list[Node]) -> Status:
        if sign in COMPARED:
            return self.compare_numbers(value, sign, self.expander.text(source, nodes[-1]), arithmetic=True)
        if sign == "=~":
            return self._search(source, value, nodes[-1])
        pattern = self.expander.pattern(source, *nodes)  # the grammar divides *"text"*
        if sign in ("=", "==", "!="):
            text, form = read_as_bash(value), read_as_bash(pattern)
            if form.count("*") * len(text) > MAX_COMPARISONS:
                return UNKNOWN
            return judge(matches(text, form) == (sign != "!="), value, pattern)
        return self.compare_texts(value, sign, pattern)

    def _search(self, source: Source, value: Value, node: Node) -> Status:
        """Returns whether a text has a part of the form of a regular expression, if that is of simple form."""
        pattern, subject = self.expander.text(source, node), read_as_bash(value)
        written = source.text(node) if node.type == "regex" and "$" not in source.text(node)[:-1] else ""
        expression = written or (re.escape(read_as_bash(pattern)) if node.type == "string" else read_as_bash(pattern))
        repeats = len(re.findall(r"[*+{]", expression))
        if len(subject) > LONGEST_SUBJECT or repeats > 2 or re.search(r"\)[*+{?]|\[\[|\\", expression):
            return UNKNOWN
        try:
            return judge(re.search(expression, subject) is not None, value, pattern)
        except (re.error, OverflowError, RecursionError):
            return UNKNOWN

    # ------------------------------------------------------------------------------------------------------ [ ... ]

    def test_words(self, words: list[Value]) -> Status:
        """Returns whether ``[`` or ``test`` succeeds with these words."""
        texts = [read_text(word) for word in words]
        for sign in ("-o", "-a"):  # which binds less
            if sign in texts[1:-1] and len(words) > 3:
                place = texts.index(sign, 1)
                left, right = self.test_words(words[:place]), self.test_words(words[place + 1 :])
                holds = (left.holds or right.holds) if sign == "-o" else (left.holds and right.holds)
                return left.join(right, holds)
        if len(words) > 1 and texts[0] == "!":
            return self.test_words(words[1:]).negate()
        if not words:
            return Status(holds=False)
        if len(words) == 1:
            return judge(bool(read_as_bash(words[0])), words[0])
        if len(words) == 2:
            return self.test_value(read_as_bash(words[0]), words[1])
        sign = read_as_bash(words[1])
        if len(words) == 3 and sign in COMPARED:
            return self.compare_numbers(words[0], sign, words[2], arithmetic=False)
        if len(words) == 3 and sign in TEXTS:
            return self.compare_texts(words[0], sign, words[2])
        return Status(holds=False)  # a mistake, which fails

    def test_value(self, sign: str, value: Value) -> Status:
        """Returns whether a test of a word holds, such as ``-z`` or ``-f``."""
        text = read_as_bash(value)
        if sign == "-n":
            return judge(bool(text), value)
        if sign == "-z":
            return judge(not text, value)
        if sign == "-v":
            known = text.partition("[")[0] in self.shell.variables
            return Status(known, sure=known)
        if sign in ("-f", "-e", "-s", "-r") and is_resolved(value) and text and file_exists(self.shell, text):
            return Status()
        return UNKNOWN if re.fullmatch("-[a-zA-Z]", sign) else Status(holds=False)  # what is no test is a mistake

    def compare_texts(self, left: Value, sign: str, right: Value) -> Status:
        """Returns how two texts compare."""
        first, second = read_as_bash(left), read_as_bash(right)
        if sign in ("=", "=="):
            holds = first == second
        elif sign == "!=":
            holds = first != second
        else:
            holds = first < second if sign == "<" else first > second
        return judge(holds, left, right)

    def compare_numbers(self, left: Value, sign: str, right: Value, arithmetic: bool) -> Status:
        """Returns how two numbers compare. arithmetic: whether they may be formulas; an empty formula is 0 then."""
        if not is_resolved(left) or not is_resolved(right):
            return UNKNOWN
        numbers = []
        for value in (left, right):
            text = read_as_bash(value).strip()
            try:
                number = (read_whole_number(text) if text else 0) if arithmetic else read_decimal_number(text)
            except ArithmeticError:
                computed = self.expander.calculate(text)[0] if arithmetic else None
                if computed is None:
                    return Status(holds=False, sure=judge(True, left, right).sure)
                number = computed
            numbers.append(number)
        return judge(COMPARED[sign](*numbers), left, right)


def _list_parts(node: Node) -> Iterator[Node]:
    """Yields the operands, signs and brackets of a test."""
    if node.type in EXPRESSIONS:
        for child in node.children:
            yield from _list_parts(child)
    else:
        yield node


def _find_outside(parts: list[Node], sign: str) -> int | None:
    """Returns the place of the first sign of a kind that is not in brackets; None without."""
    depth = 0
    for place, part in enumerate(parts):
        depth += {"(": 1, ")": -1}.get(part.type, 0)
        if part.type == sign and not depth:
            return place
    return None


def judge(holds: bool, *values: Value) -> Status:
    """Returns the status of a test of texts: it does not hold where a part of a text is not known."""
    if not all(is_resolved(value) for value in values):
        return UNKNOWN
    return Status(holds, sure=not any(segment.unset for value in values for segment in value))
