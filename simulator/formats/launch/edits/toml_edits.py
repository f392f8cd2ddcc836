"""Edits of settings in a TOML file, line by line."""

from __future__ import annotations

import re

from meshcast.hardware.documents.input_file import Unreadable, parse_toml, split_lines
from meshcast.simulator.formats.launch.edits.setting_change import SettingChange
from meshcast.simulator.formats.launch.quoting import quote_toml

LONGEST = 500
"""Most lines of a value."""


def edit_toml(text: str, change: SettingChange) -> str:
    """Returns the file with a setting changed. Raises PlanError for a setting that is written without
    ``key = value``."""
    section, _, key = change.name.rpartition(".")
    lines = split_lines(text)
    if change.before is None:
        added = f"{key} = {quote_toml(change.after)}"
        at = _end_of_section(lines, section)
        lines[at:at] = [added] if at < len(lines) or _has_section(lines, section) else ["", f"[{section}]", added]
    else:
        begin, end = _find_lines(lines, change, key)
        margin = lines[begin][: len(lines[begin]) - len(lines[begin].lstrip())]
        after = f"{margin}{key} = {quote_toml(change.after)}{_find_comment(lines[end - 1])}"
        lines[begin:end] = [] if change.after is None else [after]
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def _find_comment(line: str) -> str:
    """Returns the comment that ends a line, with the blanks before it; an empty string if it may be part of a text."""
    unquoted = line[max(line.rfind('"'), line.rfind("'")) + 1 :]
    at = unquoted.find("#")
    return unquoted[len(unquoted[:at].rstrip()) :] if at >= 0 else ""


def _find_lines(lines: list[str], change: SettingChange, key: str) -> tuple[int, int]:
    """Returns the lines of a key and its value, which may be a list over several."""
    begin = change.line - 1
    if begin >= 0 and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", lines[begin]):
        for end in range(begin + 1, min(len(lines), begin + LONGEST) + 1):
            try:
                parse_toml("\n".join(lines[begin:end]))
            except Unreadable:
                continue
            return begin, end
    raise change.refuse()


def _has_section(lines: list[str], section: str) -> bool:
    return any(_name_section(line) == section for line in lines)


def _name_section(line: str) -> str | None:
    """Returns the section that a line begins; None if it begins none."""
    header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
    return header[1] if header else None


def _end_of_section(lines: list[str], section: str) -> int:
    """Returns the line behind the last key of a section; the end of the file if there is none of this name."""
    inside, last = False, len(lines)
    for number, line in enumerate(lines):
        if (named := _name_section(line)) is not None:
            inside = named == section
        if inside and line.strip() and not line.lstrip().startswith("#"):
            last = number + 1
    return last
