"""Expansions of bash: what a word stands for once variables, arithmetic, braces and substitutions are replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from meshcast.simulator.formats.launch.bash.arithmetic import Formula, read_whole_number
from meshcast.simulator.formats.launch.bash.grammar import Source, parse
from meshcast.simulator.formats.launch.bash.parameters import ParameterExpander
from meshcast.simulator.formats.launch.bash.patterns import escape
from meshcast.simulator.formats.launch.bash.state import MAX_ROUNDS, MAX_WORDS, Shell
from meshcast.simulator.formats.launch.bash.values import (
    FieldBuilder,
    Part,
    Segment,
    Value,
    is_resolved,
    measure,
    name_unknown,
    read_as_bash,
    strip_line_ends,
)

if TYPE_CHECKING:
    from tree_sitter import Node

QUOTES = ("string", "raw_string", "ansi_c_string", "translated_string")
DOLLARS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
DIVIDED = ("word", "concatenation", "string", "command_name")
"""What the grammar may divide a word into."""

INSIDE = (*QUOTES, *DOLLARS, "process_substitution", "brace_expression", "concatenation", "array")
"""Nodes inside of a word that stand for something else than their text."""

VARIABLE = re.compile(rb"\\.|\$([A-Za-z_]\w*|[0-9@*#?])", re.DOTALL)

_ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}


class Expander(ParameterExpander):
    """Expands the words of a script.

    capture: returns what the statements of a command substitution print; None if that is not known.
    """

    def __init__(self, shell: Shell, capture: Callable[[Source, Node], Value | None]) -> None:
        super().__init__(shell)
        self.capture = capture

    # ------------------------------------------------------------------------------------------------ whole words

    def fields(self, source: Source, *nodes: Node) -> list[Value]:
        """Returns the words that a word of a command stands for, which may be of several nodes without a space."""
        start, end = nodes[0].start_byte, nodes[-1].end_byte
        text = source.text_of(start, end)
        if "{" in text and not re.search(r"[$'\"`\\]", text):
            words = expand_braces(text, MAX_ROUNDS)
            if len(words) > MAX_ROUNDS:
                raise self.shell.limits.refuse(f"{text[:40]!r} stands for more than {MAX_ROUNDS:,} words")
            self.shell.limits.spend(sum(map(len, words)) + 16 * len(words))
            return [(source.segment(word, start),) for word in words]
        if "{" in text and len(words := expand_guarded_braces(text, MAX_ROUNDS)) > 1:
            return [field for word in words for field in self._fields_of_text(source, word, start)]
        builder = FieldBuilder()
        for part in self._word_parts(source, nodes):
            if part.quoted or part.literal:
                builder.add_fields(part.values)
            else:
                for index, value in enumerate(part.values):
                    if index:
                        builder.end_field()
                    builder.add_divided(value)
            if len(builder.fields) > MAX_WORDS:
                raise self.shell.limits.refuse(f"a word stands for more than {MAX_WORDS:,} words")
        builder.end_field()
        self.shell.limits.spend(sum(map(measure, builder.fields)))
        return builder.fields

    def _fields_of_text(self, source: Source, word: str, place: int) -> list[Value]:
        """Returns the words that a word stands for which braces expanded at a place."""
        self.shell.limits.spend(16 + len(word))
        written = parse(f": {word}", self.shell.where, ((0, source.line_at(place), source.file_at(place)),))
        command = written.root.children[0] if written.root.children else written.root
        groups = group_nodes(written, command.children[1:])
        return [field for group in groups for field in self.fields(written, *group)]

    def _word_parts(self, source: Source, nodes: Sequence[Node], raw: bool = False) -> Iterator[Part]:
        if len(nodes) == 1:
            return self.parts(source, nodes[0], quoted=False, raw=raw)
        inner = [part for node in nodes for part in (node.children if node.type == "concatenation" else (node,))]
        return self.expand(source, inner, source.start_of(nodes[0]), nodes[-1].end_byte, raw=raw)

    def text(self, source: Source, node: Node) -> Value:
        """Returns the text that a word stands for where it is not divided, as behind ``X=``."""
        nodes = [node]
        parent, after = node.parent, node.next_sibling
        if after is None and parent is not None and parent.type == "variable_assignment":
            after = parent.next_sibling
        # the grammar divides words such as a_$X.txt at the $
        while after is not None and after.type in DIVIDED and source.start_of(after) == nodes[-1].end_byte:
            nodes.append(after.children[0] if after.type == "command_name" else after)
            after = after.next_sibling
        return self.join(self._word_parts(source, nodes))

    def join(self, parts: Iterable[Part]) -> Value:
        """Returns the text of the parts of a word; words of arrays have spaces between them."""
        segments: list[Segment] = []
        for part in parts:
            for index, value in enumerate(part.values):
                segments += [Segment(" ", value[0].line if value else self.shell.limits.line)] if index else []
                segments += value
        self.shell.limits.spend(measure(tuple(segments)))
        return tuple(segments)

    def pattern(self, source: Source, *nodes: Node) -> Value:
        """Expands a word to a pattern, as after ``case`` or ``==``: ``*``, ``?`` and ``[`` in quotes match
        themselves."""
        return self.join(self._escape_quoted(self._word_parts(source, nodes, raw=True)))

    def pattern_between(self, source: Source, node: Node, start: int, end: int) -> Value:
        """Returns the pattern that stands between two places of a node."""
        return self.join(self._escape_quoted(self.expand_span(source, node, start, end, quoted=False, raw=True)))

    def _escape_quoted(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if part.quoted:
                values = (
                    tuple(replace(segment, text=escape(segment.text)) for segment in value) for value in part.values
                )
                part = Part(tuple(values), quoted=True)
            yield part

    # ------------------------------------------------------------------------------------------------ their parts

    def parts(self, source: Source, node: Node, quoted: bool, raw: bool = False) -> Iterator[Part]:
        """Yields the parts of a word. raw: whether backslashes stay, as in a pattern."""
        limits = self.shell.limits
        limits.step(source.line_of(node))
        limits.enter()
        if node.type == "string":
            yield from self._string(source, node)
        elif node.type == "raw_string" and not quoted:
            yield Part((self.literal(source, node.start_byte + 1, node.end_byte - 1, "raw"),), quoted=True)
        elif node.type == "ansi_c_string":
            text = unescape_ansi(source.text(node)[2:-1])
            yield Part(((source.segment(text, node.start_byte),),), quoted=True)
        elif node.type in ("simple_expansion", "expansion"):
            yield from self.parameter_parts(source, node, quoted)
        elif node.type == "arithmetic_expansion":
            yield Part((self._arithmetic(source, node),), quoted)
        elif node.type in ("command_substitution", "process_substitution"):
            yield Part((self._substitution(source, node),), quoted)
        elif node.child_count and node.type != "extglob_pattern":
            yield from self.expand_span(source, node, source.start_of(node), node.end_byte, quoted, raw)
        else:
            yield from self._plain_parts(source, node.start_byte, node.end_byte, quoted, raw)
        limits.leave()

    def expand_span(
        self, source: Source, node: Node, start: int, end: int, quoted: bool, raw: bool = False
    ) -> Iterator[Part]:
        """Yields the parts between two places of a node; what none of its children stands for is literal."""
        return self.expand(source, node.children, start, end, quoted, raw)

    def expand(
        self, source: Source, nodes: Sequence[Node], start: int, end: int, quoted: bool = False, raw: bool = False
    ) -> Iterator[Part]:
        """Yields the parts between two places, in which these nodes lie."""
        for child in nodes:
            first = source.start_of(child)
            if child.type not in INSIDE or first < start or child.end_byte > end:
                continue
            yield from self._plain_parts(source, start, first, quoted, raw)
            yield from self.parts(source, child, quoted, raw)
            start = child.end_byte
        yield from self._plain_parts(source, start, end, quoted, raw)

    def _plain_parts(self, source: Source, start: int, end: int, quoted: bool, raw: bool) -> Iterator[Part]:
        """Yields the parts of a text without nodes: literal ones, and variables that the grammar took for letters."""
        style = "raw" if raw else "quoted" if quoted else "plain"
        for variable in VARIABLE.finditer(source.content, start, end):
            if variable[1] is None:
                continue
            if variable.start() > start:
                yield Part((self.literal(source, start, variable.start(), style),), quoted, literal=True)
            yield from self.named_parts(source, variable[1].decode(), variable.start(), quoted)
            start = variable.end()
        if end > start:
            yield Part((self.literal(source, start, end, style),), quoted, literal=True)

    def _string(self, source: Source, node: Node) -> Iterator[Part]:
        closed = node.child_count > 1 and node.children[-1].type == '"' and not node.children[-1].is_missing
        start, end = source.content.find(b'"', node.start_byte) + 1, node.end_byte - closed
        if end <= start:
            yield Part(((source.segment("", node.start_byte),),), quoted=True)
        yield from self.expand_span(source, node, start, end, quoted=True)

    def literal(self, source: Source, start: int, end: int, style: str) -> Value:
        """Returns the text between two places, a part for each line.

        style: "raw": backslashes are letters, "quoted": as in double quotes, "plain": outside of quotes.
        """
        first = source.segment("", start)
        segments: list[Segment] = []
        for row, text in enumerate(source.text_of(start, end).split("\n")):
            if row:
                last = segments[-1]
                joined = style != "raw" and (len(last.text) - len(last.text.rstrip("\\"))) % 2
                segments[-1] = replace(last, text=last.text[:-1] if joined else f"{last.text}\n")
            segments.append(replace(first, text=text, line=first.line + row))
        if style == "quoted":
            segments = [replace(part, text=re.sub(r'\\([$`"\\])', r"\1", part.text)) for part in segments]
        elif style == "plain":
            segments = [replace(part, text=re.sub(r"\\(.)", r"\1", part.text)) for part in segments]
        return tuple(part for part in segments if part.text)

    # ------------------------------------------------------------------------------------- what is computed

    def opaque(self, source: Source, node: Node, names: Iterable[str] = ()) -> Value:
        """Returns a part of a word as it is written, for nothing knows its value."""
        text = source.text_of(source.start_of(node), node.end_byte)
        unknown = tuple(names) or (text,)
        return (source.segment(text, source.start_of(node), unknown),)

    def _substitution(self, source: Source, node: Node) -> Value:
        if re.fullmatch(r"\$\(\(.*\)\)", source.text(node), re.DOTALL):  # in a default value, for the grammar a shell
            return self._formula(source, node, node.start_byte + 3, node.end_byte - 2)
        output = self.capture(source, node) if node.type == "command_substitution" else None
        return strip_line_ends(output) if output is not None else self.opaque(source, node)

    def _arithmetic(self, source: Source, node: Node) -> Value:
        return self._formula(source, node, node.children[0].end_byte, node.children[-1].start_byte)

    def _formula(self, source: Source, node: Node, start: int, end: int) -> Value:
        number, names = self.compute(source, node, start, end)
        if number is None:
            return self.opaque(source, node, names)
        return (source.segment(str(number), node.start_byte),)

    def compute(self, source: Source, node: Node, start: int, end: int) -> tuple[int | None, tuple[str, ...]]:
        """Returns the number that a formula between two places makes, or None and what in it is not known."""
        text: list[Segment] = []
        for child in find_dollars(node):
            if child.start_byte < start or child.end_byte > end:
                continue
            text += self.literal(source, start, child.start_byte, "plain")
            text += self.join(self.parts(source, child, quoted=True))
            start = child.end_byte
        text += self.literal(source, start, end, "plain")
        if unknown := name_unknown(tuple(text)):
            return None, unknown
        return self.calculate(read_as_bash(tuple(text)).replace('"', ""))

    def calculate(self, formula: str) -> tuple[int | None, tuple[str, ...]]:
        """Returns the number that a formula makes; None, and what is not known in it, if it makes none."""
        unknown: list[str] = []

        def read(name: str) -> int:
            variable = self.shell.variables.get(name)
            value = variable.elements.get(0, ()) if variable is not None else ()
            if variable is None or not is_resolved(value) or any(segment.unset for segment in value):
                unknown.extend(name_unknown(value) or (name,))
                raise ArithmeticError(name)
            text = read_as_bash(value).strip()
            if not text:
                return 0
            try:
                return read_whole_number(text)
            except ArithmeticError:
                self.shell.limits.enter()
                number, names = self.calculate(text)
                self.shell.limits.leave()
                if number is None:
                    unknown.extend(names)
                    raise
                return number

        self.shell.limits.spend(len(formula))
        try:
            return Formula(formula, read, self.shell.assign_number).compute(), ()
        except (ArithmeticError, KeyError):
            return None, tuple(dict.fromkeys(unknown))


def group_nodes(source: Source, nodes: Iterable[Node]) -> list[list[Node]]:
    """Returns nodes by words: what follows without a space belongs to the same word, though the grammar divides it."""
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and groups[-1][-1].end_byte == source.start_of(node):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def find_dollars(node: Node) -> Iterator[Node]:
    """Yields the expansions inside of a formula, in their order."""
    waiting = list(reversed(node.children))
    while waiting:
        child = waiting.pop()
        if child.type in DOLLARS:
            yield child
        else:
            waiting += reversed(child.children)


def unescape_ansi(text: str) -> str:
    """Returns the text of ``$'...'``, in which numbers are those of bytes, but for ``\\u`` and ``\\U``."""

    def replace_escape(escape_sequence: re.Match[str]) -> str:
        sign = escape_sequence[1]
        if sign[0] in "xuU":
            code = int(sign[1:], 16)
            if sign[0] == "x":
                return _to_letter(code)
            return chr(code) if code < 0xD800 or 0xDFFF < code < 0x110000 else ""
        if sign[0].isdigit():
            return _to_letter(int(sign, 8) % 256)
        return _ANSI.get(sign, f"\\{sign}")

    escapes = r"(?s)\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[0-7]{1,3}|.)"
    return re.sub(escapes, replace_escape, text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _to_letter(byte: int) -> str:
    """Returns a byte as a letter, or as the half of a surrogate that stands for a part of a letter."""
    return chr(byte) if byte < 0x80 else chr(0xDC00 + byte)


GUARDED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^{}]*\}|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`""", re.DOTALL)
"""Parts of a word in which braces, commas and dots are letters."""

PRIVATE = 0xE000
"""The first letter that stands for such a part: no text has a meaning for it."""


def expand_guarded_braces(text: str, most: int) -> list[str]:
    """Returns the words of a word with variables and quotes, which bash expands after braces; more than `most`, if
    there are more. A word whose parts are not told apart is left as it is."""
    guarded = GUARDED.findall(text)
    if len(guarded) > 100 or any(PRIVATE <= ord(letter) < PRIVATE + 100 for letter in text):
        return [text]
    letters = iter(range(PRIVATE, PRIVATE + len(guarded)))
    plain = GUARDED.sub(lambda _: chr(next(letters)), text)
    if re.search(r"['\"`]|\$[({]", plain):
        return [text]
    parts = {PRIVATE + number: part for number, part in enumerate(guarded)}
    return [word.translate(parts) for word in expand_braces(plain, most)]


def expand_braces(text: str, most: int) -> list[str]:
    """Returns the words of ``a{b,c}d`` and ``{1..8}``; more than `most`, if there are more."""
    words, ready = [text], False
    while not ready:
        ready, longer = True, []
        for word in words:
            choices = _first_braces(word, most)
            ready = ready and choices is None
            longer += choices if choices is not None else [word]
            if len(longer) > most:
                return longer
        words = longer
    return words


def _first_braces(word: str, most: int) -> list[str] | None:
    """Returns the words for the first braces of a word that hold a list or a range; None without."""
    opened: list[list[int]] = []  # of each the places of its brace and of its commas
    chosen: list[tuple[int, list[str]]] = []  # where those inside of braces without a choice begin, and their words
    for mark in re.finditer(r"[{},]", word):
        if mark[0] == "{":
            opened.append([mark.start()])
        elif opened and mark[0] == ",":
            opened[-1].append(mark.start())
        elif opened:
            cuts = [*opened.pop(), mark.start()]
            inside = [word[start + 1 : end] for start, end in pairwise(cuts)]
            choices = inside if len(inside) > 1 else _list_range(inside[0], most)
            if choices:
                before, after = word[: cuts[0]], word[mark.end() :]
                chosen.append((cuts[0], [before + choice + after for choice in choices]))
            if not opened and chosen:
                break
    return min(chosen)[1] if chosen else None


def _list_range(inside: str, most: int) -> list[str]:
    """Returns the words of a range such as ``1..8``; none of what is no range."""
    if span := re.fullmatch(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?", inside):
        first, last = int(span[1]), int(span[2])
        step = abs(int(span[3] or 1)) or 1
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        padded = any(re.match("-?0.", bound) for bound in span.groups()[:2])
        width = max(map(len, span.groups()[:2])) if padded else 0
        return [f"{number:0{width}}" for number in numbers[: most + 1]]
    if re.fullmatch(r"[A-Za-z]\.\.[A-Za-z]", inside):
        first, last = ord(inside[0]), ord(inside[-1])
        return [*map(chr, range(first, last + 1) if first <= last else range(first, last - 1, -1))]
    return []
