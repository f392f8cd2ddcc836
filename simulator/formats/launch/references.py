"""Values of settings that refer to other settings, as OmegaConf and Hydra write them: ``${policy.model_name}``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshcast.simulator.formats.launch.table import Stated

DEEPEST = 20
"""References that lead to each other at most."""

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
"""A reference without another inside."""

NUMBERS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mul": math.prod,
    "add": sum,
    "max": max,
    "min": min,
    "div": lambda numbers: numbers[0] / numbers[1],
}
"""Functions of references, such as ``${mul:4, ${policy.batch}}``, as programs register them."""


def fill_references(settings: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings with the values that their references mean; those that lead nowhere are unknown."""
    return {name: _fill(name, stated, settings) for name, stated in settings.items()}


def _fill(name: str, stated: Stated, settings: Mapping[str, Stated]) -> Stated:
    value, path = stated.value, name.split(".")
    for _ in range(DEEPEST):
        if not isinstance(value, str) or (match := INNERMOST.search(value)) is None:
            return stated if value is stated.value else replace(stated, value=value)
        plain = match[1].lstrip(".")
        above = len(match[1]) - len(plain)  # a dot for every section up from the setting itself
        meant = _resolve(".".join([*path[:-above], plain]) if above else plain, settings)
        if meant is None:
            return replace(stated, unknown=(*stated.unknown, match[0]))
        value = meant.value if match[0] == value else value.replace(match[0], str(meant.value))
    return replace(stated, unknown=(*stated.unknown, str(value)[:80]))


def _resolve(reference: str, settings: Mapping[str, Stated]) -> Stated | None:
    """Returns the value of a reference: that of another setting, of its default, or of a function; None if nothing
    tells it."""
    name, colon, rest = reference.partition(":")
    words = [word.strip() for word in rest.split(",")]
    if not colon:
        return settings.get(name.strip())
    if name in ("oc.select", "oc.env"):
        selected = settings.get(words[0]) if name == "oc.select" else None
        return selected if selected is not None or len(words) < 2 else _state(_read_plain(words[1]))
    values = [_read_plain(word) for word in words]
    if name not in NUMBERS or not all(isinstance(value, int | float) for value in values):
        return None
    try:
        number = NUMBERS[name](values)
    except (ArithmeticError, IndexError, ValueError):
        return None
    return _state(int(number) if number == int(number) else number)


def _state(value: Any) -> Stated:
    return Stated(value, "")


def _read_plain(word: str) -> Any:
    """Reads a word as a number or a null, if it is one."""
    if re.fullmatch(r"-?\d{1,18}", word):
        return int(word)
    if re.fullmatch(r"-?\d{1,18}\.\d{1,18}", word):
        return float(word)
    return None if word in ("null", "None", "") else word
