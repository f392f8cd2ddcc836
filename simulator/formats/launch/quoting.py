"""Values as the languages of launch files write them: whatever a name in a job holds, it is data, in a single line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

from meshcast.hardware.errors import to_line

PLAIN = re.compile(r"(?:--)?[A-Za-z_][\w./:+ -]*")
"""Strings of YAML that need no quotes, but for some words and colons."""

WORDS = ("null", "true", "false", "yes", "no", "on", "off")
"""Words that are no strings in YAML without quotes."""


def quote_shell(value: object) -> str:
    """Writes a value as a single word of bash, in quotes where bash would divide or change it."""
    text = str(value)
    if to_line(text) == text:
        return shlex.quote(text)
    letters = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(letter if letter.isprintable() else _escape_bytes(letter) for letter in letters) + "'"


def _escape_bytes(letter: str) -> str:
    """Returns a character as escapes of its bytes, for what a number of a character means depends on the locale of
    bash."""
    return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogatepass"))


def quote_python(value: object) -> str:
    """Returns a value as a literal of Python."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(quote_python, value))}]"
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text


def quote_toml(value: object) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quote_text(value)
    return f"[{', '.join(map(quote_toml, value))}]" if isinstance(value, list | tuple) else str(value)


def quote_yaml(value: object) -> str:
    """Writes a value on a line of YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in WORDS and not re.search(r": |:$| $", value)
        return value if plain else quote_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quote_key(key)}: {quote_yaml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(quote_yaml, value)) + "]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
        return str(int(value))
    return json.dumps(value)


def _quote_key(key: object) -> str:
    """Writes a key of a mapping in braces; YAML wants a mark before a key of more than 1,024 letters."""
    word = quote_yaml(key)
    return word if len(word) < 1000 else f"? {word} "


def quote_text(text: str) -> str:
    """Returns a text in double quotes, as YAML and TOML have them."""
    letters = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in letters) + '"'
