"""The text of a YAML launch file from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcast.simulator.formats.launch.quoting import quote_yaml


def write_yaml(settings: Mapping[str, Any], header: list[str]) -> str:
    """Returns the text of nested settings, a line each. header: lines of comments above them."""
    return "\n".join([*(f"# {line}".rstrip() for line in header), *_write_lines(settings, "")]) + "\n"


def _write_lines(settings: Mapping[str, Any], margin: str) -> list[str]:
    lines: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{margin}{quote_yaml(key)}:", *_write_lines(value, f"{margin}  ")]
        else:
            lines.append(f"{margin}{quote_yaml(key)}: {quote_yaml(value)}")
    return lines
