"""Parameters of bash: ``$X``, ``${A[i]}``, defaults, cuts, replacements, slices."""

from __future__ import annotations

import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from meshcast.hardware.records import dataclass
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.bash.grammar import Source, field_of
from meshcast.simulator.formats.launch.bash.patterns import cut_back, cut_front, find_parts, is_costly
from meshcast.simulator.formats.launch.bash.records import LostPlace
from meshcast.simulator.formats.launch.bash.state import Shell, Variable
from meshcast.simulator.formats.launch.bash.values import (
    Part,
    Segment,
    Value,
    name_unknown,
    read_as_bash,
)

if TYPE_CHECKING:
    from tree_sitter import Node

DEFAULTS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
CUTS: dict[str, Callable[[str, str], str]] = {
    "#": lambda text, pattern: text[cut_front(text, pattern, longest=False) :],
    "##": lambda text, pattern: text[cut_front(text, pattern, longest=True) :],
    "%": lambda text, pattern: text[: len(text) - cut_back(text, pattern, longest=False)],
    "%%": lambda text, pattern: text[: len(text) - cut_back(text, pattern, longest=True)],
}
CASES: dict[str, Callable[[str], str]] = {
    ",,": str.lower,
    "^^": str.upper,
    ",": lambda text: text[:1].lower() + text[1:],
    "^": lambda text: text[:1].upper() + text[1:],
}

TRANSFORMED: dict[str, Callable[[str], str]] = {
    "U": str.upper,
    "L": str.lower,
    "Q": lambda text: "'" + text.replace("'", r"'\''") + "'",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the form ``${...}``.

    prefix: "#" for a length, "!" for the variable that another names.
    sign: what is done with the value.
    start, end: where the words of that stand.
    many: whether all elements are meant: "@" or "*".
    key: of an element.
    """

    name: str
    prefix: str = ""
    sign: str = ""
    start: int = 0
    end: int = 0
    many: str = ""
    key: int | str = 0


@dataclass(frozen=True)
class Content:
    """What a parameter stands for. is_set: whether anything sets it; keys: of the elements."""

    values: tuple[Value, ...]
    is_set: bool
    keys: tuple[int | str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether bash would put nothing here."""
        return not self.is_set or not any(read_as_bash(value) for value in self.values)


class ParameterExpander(ABC):
    """Expands parameters.

    lost: places where the reader was lost on which what was expanded depends; whoever expands a command empties it.
    """

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.lost: list[LostPlace] = []

    @abstractmethod
    def join(self, parts: Iterable[Part]) -> Value:
        """Returns the text of the parts of a word."""

    @abstractmethod
    def expand_span(
        self, source: Source, node: Node, start: int, end: int, quoted: bool, raw: bool = False
    ) -> Iterator[Part]:
        """Yields the parts between two places of a node."""

    @abstractmethod
    def pattern_between(self, source: Source, node: Node, start: int, end: int) -> Value:
        """Returns the pattern that stands between two places of a node."""

    @abstractmethod
    def opaque(self, source: Source, node: Node, names: Iterable[str] = ()) -> Value:
        """Returns a part of a word as it is written."""

    @abstractmethod
    def compute(self, source: Source, node: Node, start: int, end: int) -> tuple[int | None, tuple[str, ...]]:
        """Returns the number that a formula between two places makes."""

    # --------------------------------------------------------------------------------------------------- look-ups

    def fetch(self, parameter: Parameter, required: bool = True) -> Content:
        """Returns what a parameter stands for. required: whether the script needs an argument that nobody gives."""
        name = parameter.name
        if name in ("@", "*"):
            return self._fetch_arguments()
        if (number := read_digits(name)) is not None and name != "0":
            arguments = self.shell.frame.arguments
            if number <= len(arguments):
                return Content((arguments[number - 1],), True)
            if required and len(self.shell.frames) == 1:
                self.shell.positional[f"${name}"] = None
            return Content((), False)
        variable = self.shell.variables.get(name)
        if variable is None:
            text = self._read_special(name)
            return Content(() if text is None else ((Segment(text, self.shell.limits.line),),), text is not None)
        self.lost += variable.lost
        return self._fetch_elements(variable, parameter)

    def _fetch_elements(self, variable: Variable, parameter: Parameter) -> Content:
        elements = variable.elements
        if parameter.many:
            keys = sorted(elements, key=lambda key: (isinstance(key, str), key if isinstance(key, int) else 0))
            return Content(tuple(elements[key] for key in keys), bool(elements) or variable.is_array, tuple(keys))
        key = parameter.key
        if isinstance(key, int) and key < 0 and elements:
            key += 1 + max(index for index in (*elements, 0) if isinstance(index, int))
        return Content((elements[key],), True) if key in elements else Content((), False)

    def _fetch_arguments(self) -> Content:
        frame = self.shell.frame
        if not frame.is_given:
            why = "what the arguments of the script add here is not known: --args gives them"
            self.lost.append(LostPlace(self.shell.limits.line, why))
        return Content(tuple(frame.arguments), True)

    def _read_special(self, name: str) -> str | None:
        """Returns the text of a variable that bash itself sets."""
        if name == "#":
            return str(len(self.shell.frame.arguments))
        known = {"?": "0", "-": "", "PWD": ".", "OPTIND": "1", "LINENO": str(self.shell.limits.line)}
        script = posixpath.basename(self.shell.where.replace("\\", "/"))
        return script if name in ("0", "BASH_SOURCE") else known.get(name)

    # ---------------------------------------------------------------------------------------------------- their parts

    def parameter_parts(self, source: Source, node: Node, quoted: bool) -> Iterator[Part]:
        """Yields the parts that a parameter stands for."""
        parameter = self._read_parameter(source, node)
        if parameter is None:
            yield Part((self.opaque(source, node),), quoted)
            return
        if parameter.prefix == "!" and not parameter.many:
            target = read_as_bash(self.join([Part(self.fetch(parameter).values)]))
            parameter = replace(parameter, prefix="", name=target if re.fullmatch(r"\w+|[@*#]", target) else "")
        content = self.fetch(parameter, required=parameter.sign not in (":-", "-", ":+", "+"))
        if parameter.sign in DEFAULTS:
            yield from self._choose_default(source, node, parameter, content, quoted)
            return
        values = self._change(source, node, parameter, content)
        if parameter.many == "*" and quoted:
            values = (self.join([Part(values)]),)
        yield Part(values, quoted)

    def named_parts(self, source: Source, name: str, place: int, quoted: bool) -> Iterator[Part]:
        """Yields the parts that ``$NAME`` at a place stands for."""
        content = self.fetch(Parameter(name, many=name if name in ("@", "*") else ""))
        if content.is_set:
            yield Part(content.values, quoted)
        else:
            shown = f"${name}" if name.isdigit() else name
            yield Part(((source.segment(f"${name}", place, (shown,), unset=True),),), quoted)

    def _read_parameter(self, source: Source, node: Node) -> Parameter | None:
        """Returns a parameter; None for a form that is not understood."""
        if node.type == "simple_expansion":
            name = source.text_of(source.start_of(node) + 1, node.end_byte)
            return Parameter(name, many=name if name in ("@", "*") else "")
        children = node.children[1:-1]
        if len(children) > 1 and children[0].type in ("!", "#"):
            prefix, children = children[0].type, children[1:]
        else:
            prefix = ""
        if not children:
            return None
        target, rest = children[0], children[1:]
        name, many = source.text(target), ""
        key: int | str = 0
        if target.type == "subscript":
            name, many, index = self._read_index(source, target)
            if index is None:
                return None
            key = index
        many = name if name in ("@", "*") else many
        sign = rest[0].type if rest else ""
        start = rest[0].end_byte if rest else node.end_byte - 1
        return Parameter(name, prefix, sign, start, node.end_byte - 1, many, key)

    def _read_index(self, source: Source, target: Node) -> tuple[str, str, int | str | None]:
        """Returns the name of an array, "@" or "*" for all elements, and the index; None where it is not known."""
        name = source.text(field_of(target, "name"))
        start = source.content.find(b"[", target.start_byte) + 1
        written = source.text_of(start, target.end_byte - 1)
        if written in ("@", "*"):
            return name, written, 0
        return name, "", self.read_key(source, target, name, start, target.end_byte - 1)

    def read_key(self, source: Source, node: Node, name: str, start: int, end: int) -> int | str | None:
        """Returns the index between two places: a text for arrays of texts, else a number; None if it is not known."""
        variable = self.shell.variables.get(name)
        if variable is not None and variable.is_map:
            return read_as_bash(self.join(self.expand_span(source, node, start, end, quoted=False)))
        return self.compute(source, node, start, end)[0]

    def _choose_default(
        self, source: Source, node: Node, parameter: Parameter, content: Content, quoted: bool
    ) -> Iterator[Part]:
        """Yields the value or what stands for it: ``${X:-d}``, ``${X:=d}``, ``${X:+v}``, and without the colon."""
        missing = content.is_empty if parameter.sign.startswith(":") else not content.is_set
        kind = parameter.sign[-1]
        if kind == "+":
            if not missing:
                yield from self._operand(source, node, parameter, quoted)
            elif quoted:
                yield Part(((),), quoted)
        elif not missing:
            yield Part(content.values, quoted)
        elif kind == "?":
            yield Part((self._unset(source, node, parameter.name),), quoted)
        elif kind == "=":
            value = self.join(self._operand(source, node, parameter, quoted=False))
            self.shell.assign_text(parameter.name, value)
            yield Part((value,), quoted)
        else:
            yield from self._operand(source, node, parameter, quoted)

    def _operand(self, source: Source, node: Node, parameter: Parameter, quoted: bool) -> Iterator[Part]:
        """Yields the parts of a default; in quotes an empty default is a word, too."""
        empty = True
        for part in self.expand_span(source, node, parameter.start, parameter.end, quoted):
            empty = False
            yield replace(part, literal=False) if part.literal and not part.quoted else part
        if empty and quoted:
            yield Part(((),), quoted)

    def _unset(self, source: Source, node: Node, name: str) -> Value:
        shown = f"${name}" if name.isdigit() else name
        return tuple(replace(part, unset=True) for part in self.opaque(source, node, (shown,)))

    # -------------------------------------------------------------------------------------------- changed values

    def _change(self, source: Source, node: Node, parameter: Parameter, content: Content) -> tuple[Value, ...]:
        """Returns the texts of a parameter once they are cut, counted, replaced, or left as they are."""
        line = source.line_of(node)
        if parameter.prefix == "!":
            return tuple((Segment(str(key), line),) for key in content.keys)
        if not content.is_set:
            if parameter.prefix == "#" and parameter.many:
                return ((Segment("0", line),),)
            return (self._unset(source, node, parameter.name),)
        if parameter.prefix == "#" and parameter.many:
            return ((Segment(str(len(content.values)), line),),)
        if not parameter.prefix and not parameter.sign:
            return content.values
        if parameter.many and parameter.sign == ":":
            return self._slice_elements(source, node, parameter, content)
        change = self._find_change(source, node, parameter)
        changed = []
        for value in content.values:
            text = read_as_bash(value)
            result = None if change is None or name_unknown(value) else change(text)
            if result is None:
                changed.append(self.opaque(source, node, name_unknown(value)))
            else:
                self.shell.limits.spend(len(text) + len(result))
                where = value[0] if value else Segment("", line)
                changed.append((Segment(result, where.line, file=where.file),))
        return tuple(changed)

    def _find_change(self, source: Source, node: Node, parameter: Parameter) -> Callable[[str], str | None] | None:
        """Returns what is done with a text, or None for what is not computed."""
        sign, start, end = parameter.sign, parameter.start, parameter.end
        if parameter.prefix == "#":
            return lambda text: str(len(text))
        if sign in CUTS:
            pattern = read_as_bash(self.pattern_between(source, node, start, end))
            return lambda text: None if is_costly(text, pattern) else CUTS[sign](text, pattern)
        if sign in CASES:
            return CASES[sign]
        if sign in ("/", "//", "/#", "/%"):
            return self._find_replacement(source, node, parameter)
        if sign == ":":
            span = self._read_span(source, node, parameter)
            return None if span is None else lambda text: text[_slice(span, len(text))]
        operation = source.text_of(start, end)
        return TRANSFORMED.get(operation) if sign == "@" else None

    def _find_replacement(self, source: Source, node: Node, parameter: Parameter) -> Callable[[str], str | None]:
        """Returns the replacement of ``${X/old/new}``."""
        slash = find_sign(node, "/", parameter.start)
        middle = slash.start_byte if slash is not None else parameter.end
        pattern = read_as_bash(self.pattern_between(source, node, parameter.start, middle))
        new = ""
        if slash is not None:
            new = read_as_bash(self.join(self.expand_span(source, node, slash.end_byte, parameter.end, quoted=False)))

        def change(text: str) -> str | None:
            if is_costly(text, pattern):
                return None
            if parameter.sign == "/#":
                length = cut_front(text, pattern, longest=True)
                return new + text[length:] if length else text
            if parameter.sign == "/%":
                length = cut_back(text, pattern, longest=True)
                return text[: len(text) - length] + new if length else text
            pieces, position = [], 0
            for start, end in find_parts(text, pattern):
                self.shell.limits.spend(len(new))
                pieces += [text[position:start], new]
                position = end
                if parameter.sign == "/":
                    break
            return "".join([*pieces, text[position:]])

        return change

    def _read_span(self, source: Source, node: Node, parameter: Parameter) -> tuple[int, int | None] | None:
        """Returns start and length of ``${X:start:length}``; None if they are not known."""
        colon = find_sign(node, ":", parameter.start)
        middle = colon.start_byte if colon is not None else parameter.end
        start, _ = self.compute(source, node, parameter.start, middle)
        length = None
        if colon is not None:
            length, _ = self.compute(source, node, colon.end_byte, parameter.end)
        return None if start is None or (colon is not None and length is None) else (start, length)

    def _slice_elements(self, source: Source, node: Node, parameter: Parameter, content: Content) -> tuple[Value, ...]:
        span = self._read_span(source, node, parameter)
        if span is None:
            return (self.opaque(source, node),)
        values = content.values
        if parameter.name in ("@", "*"):  # $0 stands in front of the arguments
            values = ((Segment(self._read_special("0") or "", source.line_of(node)),), *values)
        return values[_slice(span, len(values))]


def find_sign(node: Node, sign: str, start: int) -> Node | None:
    """Returns the first sign of a kind behind a place of a node; None without."""
    return next((child for child in node.children if child.type == sign and child.start_byte >= start), None)


def _slice(span: tuple[int, int | None], size: int) -> slice:
    start, length = span
    start = start if start >= 0 else start + size
    if start < 0:
        return slice(0, 0)
    if length is None:
        return slice(start, None)
    return slice(start, start + length) if length >= 0 else slice(start, max(start, size + length))
