"""Assignments of bash: ``X=1``, ``A+=(a b)``, ``declare -A``, ``local``, ``export``, ``unset``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from meshcast.simulator.formats.launch.bash.conditions import Status
from meshcast.simulator.formats.launch.bash.expansion import Expander, group_nodes
from meshcast.simulator.formats.launch.bash.grammar import Source, field_of
from meshcast.simulator.formats.launch.bash.state import Shell, Variable
from meshcast.simulator.formats.launch.bash.values import Segment, Value, is_resolved, merge_segments, read_as_bash

if TYPE_CHECKING:
    from tree_sitter import Node

_KEYED = re.compile(r"\[([^\]]*)\]=")


class Declarations:
    """Sets the variables of a script."""

    def __init__(self, shell: Shell, expander: Expander) -> None:
        self.shell = shell
        self.expander = expander

    def read(self, source: Source, node: Node) -> tuple[str, Value]:
        """Returns name and text of an assignment in front of a command."""
        value = node.child_by_field_name("value")
        return source.text(field_of(node, "name")), self.expander.text(source, value) if value is not None else ()

    def assign(self, source: Source, node: Node) -> Status:
        """Sets a variable, an array, or an element of an array."""
        before = self.expander.lost
        self.expander.lost = []
        label, value = field_of(node, "name"), node.child_by_field_name("value")
        adds = any(child.type == "+=" for child in node.children)
        if label.type == "subscript":
            self._assign_element(source, label, value, adds)
        elif value is not None and value.type == "array":
            self._assign_array(source, source.text(label), value, adds)
        else:
            self._assign_text(source, source.text(label), value, adds)
        self.expander.lost = before
        return Status()

    def _old(self, name: str) -> Variable:
        return self.shell.variables.get(name, Variable())

    def _set(self, name: str, variable: Variable, adds: bool) -> None:
        lost = tuple(dict.fromkeys((*(self._old(name).lost if adds else ()), *self.expander.lost)))
        self.shell.assign(name, replace(variable, lost=lost))

    def _assign_text(self, source: Source, name: str, node: Node | None, adds: bool) -> None:
        value = self.expander.text(source, node) if node is not None else ()
        old = self._old(name)
        if adds:
            value = (*old.elements.get(0, ()), *value)
        kept = old.elements if old.is_array else {}
        elements = {**kept, 0: merge_segments(value)}
        self._set(name, replace(old, elements=elements), adds)

    def _assign_element(self, source: Source, label: Node, node: Node | None, adds: bool) -> None:
        name = source.text(field_of(label, "name"))
        start = source.content.find(b"[", label.start_byte) + 1
        key = self.expander.read_key(source, label, name, start, label.end_byte - 1)
        value = self.expander.text(source, node) if node is not None else ()
        old = self._old(name)
        if key is None:
            return
        if adds:
            value = (*old.elements.get(key, ()), *value)
        elements = {**old.elements, key: merge_segments(value)}
        self._set(name, replace(old, elements=elements, is_array=True), adds=True)

    def _assign_array(self, source: Source, name: str, node: Node, adds: bool) -> None:
        """Sets the elements of ``(a b)``, or those of their keys in ``([k]=a [l]=b)``."""
        old = self._old(name)
        elements = dict(old.elements) if adds else {}
        self.shell.limits.spend(len(elements))
        number = 1 + max((key for key in elements if isinstance(key, int)), default=-1)
        words = [child for child in node.children[1:-1] if child.type != "comment"]
        for child, *others in group_nodes(source, words):
            keyed = _KEYED.match(source.text(child)) if child.type in ("concatenation", "word") else None
            if keyed is not None:
                start = child.start_byte + len(keyed[0].encode())
                key = self.expander.read_key(source, child, name, child.start_byte + 1, start - 2)
                if key is not None:
                    value = self.expander.join(self.expander.expand_span(source, child, start, child.end_byte, False))
                    elements[key] = merge_segments(value)
                    number = key + 1 if isinstance(key, int) else number
                continue
            for value in self.expander.fields(source, child, *others):
                elements[number] = merge_segments(value)
                number += 1
        self._set(name, replace(old, elements=elements, is_array=True), adds)

    def declare(self, source: Source, node: Node) -> Status:
        """Follows ``declare``, ``local``, ``export``, ``readonly`` and ``typeset``."""
        kind, options = node.children[0].type, ""
        for child in node.children[1:]:
            text = source.text(child)
            if child.type == "word" and text[:1] in "-+":
                options += text[1:] if text[0] == "-" else ""
                continue
            if child.type == "variable_assignment":
                name = source.text(field_of(child, "name"))
                self._prepare(name, kind, options)
                self.assign(source, child)
            elif child.type in ("variable_name", "word", "string", "concatenation", "simple_expansion"):
                name = self._declare_word(source, child, kind, options)
            else:
                continue
            if (kind == "export" or "x" in options) and name in self.shell.variables:
                variable = self.shell.variables[name]
                self.shell.variables[name] = replace(variable, exported="n" not in options)
        return Status()

    def _declare_word(self, source: Source, node: Node, kind: str, options: str) -> str:
        """Declares a name, or what a word such as ``"$NAME=1"`` assigns. Returns the name."""
        value = self.expander.text(source, node) if node.type != "variable_name" else ()
        text = source.text(node) if node.type == "variable_name" else read_as_bash(value)
        name, sign, rest = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not is_resolved(value):
            return ""
        self._prepare(name, kind, options)
        if sign:
            self.shell.assign_text(name, (Segment(rest, source.line_of(node)),))
        return name

    def _prepare(self, name: str, kind: str, options: str) -> None:
        """Makes a variable local, an array, or a map of texts."""
        frame = self.shell.frame
        local = kind == "local" or (kind in ("declare", "typeset") and "g" not in options)
        if local and len(self.shell.frames) > 1 and name not in frame.hidden:
            frame.hidden[name] = self.shell.variables.pop(name, None)
        if "a" in options or "A" in options:
            variable = self._old(name)
            self.shell.variables[name] = replace(variable, is_array=True, is_map="A" in options)

    def unset(self, source: Source, node: Node) -> Status:
        """Forgets variables and functions."""
        for child in node.children[1:]:
            plain = child.type == "variable_name"
            name = source.text(child) if plain else read_as_bash(self.expander.text(source, child))
            self.shell.variables.pop(name, None)
            self.shell.functions.pop(name, None)
        return Status()
