"""Edits of settings in a YAML or JSON file, whose other letters stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from meshcast.simulator.formats.launch.edits.setting_change import SettingChange
from meshcast.simulator.formats.launch.quoting import quote_yaml
from meshcast.simulator.formats.launch.table import Stated

ENVIRONMENT_SECTION = "ENV_VARS"
"""The section of the variables of the environment in files of Megatron's functional tests."""


class SettingEntry(NamedTuple):
    """A key of a mapping in a file: its dotted path, and the nodes of key, value and mapping."""

    path: str
    key: yaml.ScalarNode
    value: yaml.Node
    mapping: yaml.MappingNode


def edit_yaml(text: str, change: SettingChange) -> str:
    """Returns the file with a setting changed. Raises PlanError for a setting that does not stand where it is stated,
    and for text that libyaml alone reads, such as tabs between a key and its value."""
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise change.refuse() from error
    if not isinstance(root, yaml.MappingNode):
        raise change.refuse()
    name = f"{ENVIRONMENT_SECTION}.{change.variable}" if change.variable else change.name
    entries = list(_walk(root, ""))
    if change.before is None:
        return _add(text, root, entries, name, change)
    entry = _find(entries, name, change.line)
    if entry is None:
        raise change.refuse()
    if change.after is None:
        return _remove(text, entry)
    value = _spell(change.after, entry.mapping)
    if entry.value.start_mark.line != entry.key.start_mark.line:  # a list on separate lines
        end = entry.value.end_mark.index
        return f"{text[: entry.key.end_mark.index]}: {value}\n{text[end:]}"
    return f"{text[: entry.value.start_mark.index]}{value}{text[entry.value.end_mark.index :]}"


def _walk(node: yaml.MappingNode, path: str) -> Iterator[SettingEntry]:
    """Yields the entries of a mapping, and of those in it."""
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            name = f"{path}.{key.value}" if path else str(key.value)
            yield SettingEntry(name, key, value, node)
            if isinstance(value, yaml.MappingNode):
                yield from _walk(value, name)


def _find(entries: list[SettingEntry], name: str, line: int = 0) -> SettingEntry | None:
    """Returns the entry of a setting, whose sections a format may leave out; of several that on a line."""
    fitting = [entry for entry in entries if entry.path == name or entry.path.endswith(f".{name}")]
    on_line = [entry for entry in fitting if entry.key.start_mark.line + 1 == line]
    return next(iter(on_line or fitting), None)


def _remove(text: str, entry: SettingEntry) -> str:
    """Returns the text without an entry: without its lines, or without it and a comma."""
    if not entry.mapping.flow_style:
        begin = text.rfind("\n", 0, entry.key.start_mark.index) + 1
        end = text.find("\n", entry.value.end_mark.index - 1)
        return text[:begin] + (text[end + 1 :] if end >= 0 else "")
    begin, end = entry.key.start_mark.index, entry.value.end_mark.index
    behind, before = text[end:].lstrip(), text[:begin].rstrip()
    if behind.startswith(","):
        return text[:begin] + behind[1:].lstrip()
    return before.removesuffix(",") + text[end:]


def _add(text: str, root: yaml.MappingNode, entries: list[SettingEntry], name: str, change: SettingChange) -> str:
    """Returns the text with an entry behind the last of its section, which is added if there is none."""
    section, _, key = name.rpartition(".") if not name.startswith("--") else ("", "", name)
    mapping, value = _find_mapping(root, entries, section, change.neighbours), change.after
    while mapping is None:
        section, _, inner = section.rpartition(".")
        key, value = inner, {key: value}
        mapping = _find_mapping(root, entries, section, ())
    if not mapping.value:
        raise change.refuse()
    last_key, last = mapping.value[-1]
    spelled = _spell(value, mapping)
    if mapping.flow_style:
        own_line = text[: last_key.start_mark.index].rpartition("\n")[2].isspace()
        gap = "\n" + " " * last_key.start_mark.column if own_line else " "
        word = json.dumps(key) if _is_json(mapping) else quote_yaml(key)
        return f"{text[: last.end_mark.index]},{gap}{word}: {spelled}{text[last.end_mark.index :]}"
    end = text.find("\n", max(last.end_mark.index - 1, 0))
    before = text if end < 0 else text[:end]
    return f"{before}\n{' ' * last_key.start_mark.column}{quote_yaml(key)}: {spelled}{text[len(before) :] or chr(10)}"


def _find_mapping(
    root: yaml.MappingNode, entries: list[SettingEntry], section: str, neighbours: tuple[Stated, ...]
) -> yaml.MappingNode | None:
    """Returns the mapping of a section; without a name that of the nearest neighbour without a section, or the whole
    file."""
    if section:
        entry = _find(entries, section)
        return entry.value if entry is not None and isinstance(entry.value, yaml.MappingNode) else None
    beside = (_find(entries, neighbour.shown) for neighbour in neighbours if "." not in neighbour.shown)
    return next((entry.mapping for entry in beside if entry is not None), root)


def _is_json(mapping: yaml.MappingNode) -> bool:
    """Returns whether the keys of a mapping have quotes, as in JSON."""
    return all(isinstance(key, yaml.ScalarNode) and key.style == '"' for key, _ in mapping.value)


def _spell(value: object, mapping: yaml.MappingNode) -> str:
    """Returns a value as the file writes it."""
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, str) and re.fullmatch(r"-?\d+(\.\d+)?", plain):  # of a format whose values are all words
        return plain
    return json.dumps(plain) if mapping.flow_style and _is_json(mapping) else quote_yaml(plain)
