"""Reads the words of a command without typer, which takes longer to be imported, and to make its tree of commands, than
a forecast takes to be computed.

It reads what is written without a fault and spelt in full. Help, errors and whatever it does not know are for typer,
which reads the same parameters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import get_args

from meshcast.experiments.cli.commands import find_options
from meshcast.experiments.cli.parameters import CommandParameter, list_parameters
from meshcast.experiments.options import Flag
from meshcast.hardware.units import read_digits


def read_values(name: str, words: Sequence[str]) -> dict[str, object] | None:
    """Returns the values of the parameters of a command as typer would; None for words that are left to typer."""
    if os.name == "nt":  # where typer expands patterns of files
        return None
    parameters = list_parameters(find_options(name))
    options = {flag: parameter for parameter in parameters for flag in parameter.flag.names}
    arguments = [parameter for parameter in parameters if not parameter.flag.names]
    stated: dict[str, list[object]] = {}
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        if word.startswith("-"):
            flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
            parameter = options.get(flag)
            if parameter is None:
                return None
            kind = _find_kind(parameter)
            if kind is bool:
                text = None if equals else "true"
            else:
                text = value if equals else rest.pop() if rest else None
        elif arguments:
            parameter = arguments[0] if arguments[0].is_list else arguments.pop(0)
            kind, text = _find_kind(parameter), word
        else:
            return None
        if kind is None or not text or text.startswith("-") or (parameter.name in stated and not parameter.is_list):
            return None
        parsed = _read_count(text, parameter.flag) if kind is int else kind(text)
        if parsed is None:
            return None
        stated.setdefault(parameter.name, []).append(parsed)
    if any(parameter.required and parameter.name not in stated for parameter in parameters):
        return None
    values = {parameter.name: parameter.default for parameter in parameters}
    lists = {parameter.name for parameter in parameters if parameter.is_list}
    return values | {field: read if field in lists else read[0] for field, read in stated.items()}


def _read_count(text: str, flag: Flag) -> int | None:
    """Returns the whole number that a word is; None for another word, and beyond the limits of the option."""
    number = read_digits(text)
    low, high = flag.min, flag.max
    within = number is not None and (low is None or number >= low) and (high is None or number <= high)
    return number if within else None


def _find_kind(parameter: CommandParameter) -> type | None:
    """Returns what a word is read as: text, a path, a whole number or, of an option without one, true; None for
    anything else."""
    parts = get_args(parameter.kind)
    kind = (
        next(part for part in parts if part is not NoneType)
        if NoneType in parts and len(parts) == 2
        else parameter.kind
    )
    pair = any("/" in flag for flag in parameter.flag.names)
    return kind if kind in (str, Path, bool, int) and not pair else None
